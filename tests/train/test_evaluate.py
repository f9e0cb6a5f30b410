"""Metrics against values worked out by hand, and against sacreBLEU itself."""

import math
import re
import sys

import pytest
import sacrebleu

from regard.errors import Fault, UsageError
from regard.training import measure as evaluate
from regard.training.measure import METRICS, better, suited
from regard.training.tasks import TASKS

TEXTS = ["the cat sat on the mat", "A dog runs in the Park .", "nothing at all"]
REFERENCES = ["the cat sat on a mat", "a dog runs in the park .", "something else"]


def test_bleu_and_chrf_are_sacrebleu_with_its_signature() -> None:
    values, signatures = evaluate.text_scores(["bleu", "bleu_lc", "chrf"], TEXTS, REFERENCES)
    assert values["bleu"] == pytest.approx(sacrebleu.corpus_bleu(TEXTS, [REFERENCES]).score)
    lower = sacrebleu.corpus_bleu(TEXTS, [REFERENCES], lowercase=True).score
    assert values["bleu_lc"] == pytest.approx(lower) and lower > values["bleu"]
    assert values["chrf"] == pytest.approx(sacrebleu.corpus_chrf(TEXTS, [REFERENCES]).score)
    assert "case:mixed" in signatures["bleu"] and "tok:13a" in signatures["bleu"]
    assert "case:lc" in signatures["bleu_lc"] and "nc:6" in signatures["chrf"]


def test_bleu_of_equal_texts_is_100_and_of_unlike_ones_0() -> None:
    values, _ = evaluate.text_scores(["bleu", "exact"], REFERENCES, REFERENCES)
    assert values == {"bleu": pytest.approx(100.0), "exact": 1.0}
    values, _ = evaluate.text_scores(["bleu", "exact"], [""] * 3, REFERENCES)
    assert values == {"bleu": 0.0, "exact": 0.0}


def test_exact_counts_equal_texts() -> None:
    values, signatures = evaluate.text_scores(["exact"], ["a", "b", "C"], ["a", "x", "c"])
    assert values["exact"] == pytest.approx(1 / 3) and signatures == {}


ROUGES = {
    # texts, references -> rouge1, rouge2, rougeL, rougeLsum by hand, in percent
    "one word of six differs": (["the cat sat on the mat"], ["the cat sat on a mat"],
                                [500 / 6, 60, 500 / 6, 500 / 6]),
    "the order counts but for words": (["b a"], ["a b"], [100, 0, 50, 50]),
    "precision 2/2, recall 2/4": (["big dogs"], ["A big dog ran."], [200 / 3, 50, 200 / 3, 200 / 3]),
    "lines in another order": (["c d\na b"], ["a b\nc d"], [100, 200 / 3, 50, 100]),
    "a mean over texts": (["x", "y"], ["x", "z"], [50, 0, 50, 50]),
    "nothing said": ([""], ["a"], [0, 0, 0, 0]),
}  # fmt: skip


@pytest.mark.parametrize("case", ROUGES)
def test_rouge_is_that_of_its_library_and_of_hand(case: str) -> None:
    texts, references, wanted = ROUGES[case]
    library = pytest.importorskip("rouge_score.rouge_scorer")
    names = evaluate.listed(["rouge"])
    assert names == ("rouge1", "rouge2", "rougeL", "rougeLsum")
    values, signatures = evaluate.text_scores(names, texts, references)
    assert [values[name] for name in names] == pytest.approx(wanted)
    scores = [
        library.RougeScorer(names, use_stemmer=True).score(*pair) for pair in zip(references, texts)
    ]
    for name in names:
        mean = sum(each[name].fmeasure for each in scores) / len(texts)
        assert values[name] == pytest.approx(100 * mean)
        assert re.fullmatch(r"f1\|mean\|stems\|rouge-score:[\d.]+", signatures[name])


def test_rouge_without_its_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    monkeypatch.delitem(sys.modules, "rouge_score.rouge_scorer", raising=False)
    with pytest.raises(Fault, match="ROUGE needs the package rouge-score; pip install rouge-score"):
        suited(["rouge"], "seq2seq")
    with pytest.raises(UsageError, match="rouge1 does not suit the task lm"):
        suited(["rouge"], "lm")


def test_perplexity_is_exp_of_the_loss() -> None:
    assert evaluate.perplexity(math.log(7.0)) == pytest.approx(7.0)
    assert evaluate.perplexity(1e6) == math.inf


def test_macro_f1_is_the_mean_over_classes() -> None:
    found, wanted = ["a", "a", "a", "b", "c"], ["a", "a", "b", "b", "d"]
    # a: 2 right of 3 said and 2 true; b: 1 of 1 and 2; c was never wanted, d never found
    each = [2 * 2 / (3 + 2), 2 * 1 / (1 + 2), 0.0, 0.0]
    assert evaluate.macro_f1(found, wanted) == pytest.approx(sum(each) / 4)
    assert evaluate.macro_f1([1, 0], [1, 0]) == 1.0


@pytest.mark.parametrize(
    "tags, spans",
    [
        ("B-x I-x O B-y", {("x", 0, 1), ("y", 3, 3)}),
        ("B-x B-x", {("x", 0, 0), ("x", 1, 1)}),
        ("I-x I-x I-y", {("x", 0, 1), ("y", 2, 2)}),  # I after nothing begins one
        ("B-x I-y", {("x", 0, 0), ("y", 1, 1)}),
        ("O O", set()),
        ("", set()),
    ],
)
def test_tags_mean_spans(tags: str, spans: set[tuple[str, int, int]]) -> None:
    assert evaluate.spans_of(tags.split()) == spans


def test_span_f1_wants_ends_and_kind() -> None:
    found = [["B-x", "I-x", "O"], ["B-y", "O"]]
    wanted = [["B-x", "I-x", "O"], ["B-x", "I-x"]]
    assert evaluate.span_f1(found, wanted) == pytest.approx(2 * 1 / (2 + 2))
    assert evaluate.marks_spans(["O", "B-x", "I-x"])
    assert not evaluate.marks_spans(["NOUN", "O"]) and not evaluate.marks_spans(["O"])


def test_overlap_f1_counts_tokens() -> None:
    # 2..5 against 4..9: 2 common, 4 and 6 long; 0..0 against 3..4: nothing
    assert evaluate.overlap_f1([(2, 5), (0, 0)], [(4, 9), (3, 4)]) == pytest.approx(0.4 / 2)


def test_label_scores_of_each_task() -> None:
    values, kinds = evaluate.label_scores("classify", [0, 1, 1], [0, 1, 0], ["a", "b"])
    assert values == {"accuracy": pytest.approx(2 / 3), "f1": pytest.approx(2 / 3)}
    assert "macro" in kinds["f1"]
    rows = [(0, 1), (2,)], [(0, 1), (0,)]
    values, kinds = evaluate.label_scores("tag", *rows, ["B-x", "I-x", "O"])
    assert values["accuracy"] == pytest.approx(2 / 3) and values["f1"] == pytest.approx(2 / 3)
    assert "spans" in kinds["f1"]
    values, kinds = evaluate.label_scores("tag", *rows, ["a", "b", "c"])
    assert values["f1"] == pytest.approx((2 / 3 + 1 + 0) / 3) and "macro" in kinds["f1"]
    values, _ = evaluate.label_scores("answer", [(0, 1), (2, 2)], [(0, 1), (2, 3)], [])
    assert values == {"exact": 0.5, "f1": pytest.approx((1 + 2 / 3) / 2)}


def test_better_knows_the_direction_and_nan() -> None:
    assert better("loss", 1.0, 2.0) and not better("loss", 2.0, 2.0)
    assert better("bleu", 2.0, 1.0) and not better("bleu", 1.0, 2.0)
    assert not better("loss", math.nan, 5.0) and better("loss", 5.0, math.nan)
    assert not better("loss", math.nan, math.nan)


def test_every_task_has_metrics_that_suit_it() -> None:
    for task, row in TASKS.items():
        assert suited(row.metrics + row.other_metrics, task) == row.metrics + row.other_metrics
        assert "loss" in row.metrics
    named = {name for row in TASKS.values() for name in row.metrics + row.other_metrics}
    assert named == set(METRICS) - {"sts"}  # which is of vectors, whatever the task


def test_metric_that_is_unknown_or_unsuited_is_told() -> None:
    with pytest.raises(UsageError, match="there is no metric 'blue'; did you mean 'bleu'"):
        suited(["blue"], "seq2seq")
    with pytest.raises(UsageError, match="there is no metric 'acc'"):
        better("acc", 1.0, 2.0)
    with pytest.raises(UsageError, match="accuracy does not suit the task lm; choose loss, perp"):
        suited(["loss", "accuracy"], "lm")
