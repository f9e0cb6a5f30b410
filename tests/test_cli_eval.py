"""regard eval: a table of metrics for every kind of model, and run folders in place of model folders."""

import json
import math
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sacrebleu
import torch
import torch.nn.functional as F

import regard
from regard.checkpoint.hf import Origin
from regard.errors import Fault, UsageError
from regard.evaluation.run import Shots, task_of
from regard.files import resolve_model
from regard.layers import Answer, Classify, Tag
from regard.text import Tokenizer, needed
from regard.training.measure import text_scores
from tests.test_cli import HOME, call, folder, put
from tests.text import tiny

SMALL: dict[str, Any] = dict(layers=1, dim=16, heads=2, ffn_dim=24)
LINES = ["The dog plays in the park.", "Ein kleiner Hund läuft", "a little ball"]
NAMES = ["bad", "good", "so-so"]


@cache
def encoder(kind: str) -> Path:
    """A tiny BERT with a head: classify, tag, answer or mlm."""
    torch.manual_seed(0)
    heads = {"classify": Classify(3), "tag": Tag(3), "answer": Answer()}
    changes = {"head": heads[kind]} if kind in heads else {}
    model = regard.build("bert-base", vocab=300, max_len=24, dropout=0.0, **SMALL, **changes)
    for p in model.parameters():
        p.data *= 3  # so that its answers differ
    names = {"id2label": {str(i): name for i, name in enumerate(NAMES)}}
    model.origin = Origin("bert", config=names if kind in ("classify", "tag") else {})
    return put(model.save(Path(HOME.name) / f"eval-{kind}"), tiny.bert())


def figures(*arguments: Any) -> dict[str, Any]:
    done = call("eval", *arguments, "--json")
    assert done.code == 0 and done.err == "", done.err
    return json.loads(done.out)


def tsv(path: Path, rows: list[tuple[str, ...]]) -> Path:
    path.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    return path


LABELLED = ["--columns", "text=0", "--columns", "label=1"]


# --- language models ----------------------------------------------------------------------------------------------


def test_loss_of_a_language_model_is_that_of_its_rows(tmp_path: Path) -> None:
    text = " ".join(LINES * 20)
    (tmp_path / "story.txt").write_text(text, encoding="utf-8")
    found = figures(folder("gpt2"), "--data", tmp_path / "story.txt", "--length", 32)
    model, tokenizer = regard.load(folder("gpt2")), needed(Tokenizer.from_files(tiny.gpt2()))
    ids = torch.tensor([*tokenizer.encode(text), 0])  # the end of the document is predicted too
    total = 0.0
    for start in range(0, len(ids) - 1, 32):
        row = ids[start : start + 33]
        with torch.no_grad():
            total += F.cross_entropy(model(row[None, :-1])[0], row[1:], reduction="sum").item()
    loss = total / (len(ids) - 1)
    assert found["task"] == "lm" and found["metrics"]["loss"] == pytest.approx(loss, rel=1e-5)
    assert found["metrics"]["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    assert found["data"] == f"1 example, {len(ids) - 1:,} tokens"


def test_quantized_weights_are_what_is_measured(tmp_path: Path) -> None:
    (tmp_path / "story.txt").write_text(" ".join(LINES * 5), encoding="utf-8")
    asked = (folder("gpt2"), "--data", tmp_path / "story.txt", "--metric", "loss")
    plain = figures(*asked)["metrics"]["loss"]
    packed = figures(*asked, "--quantize", "int8")["metrics"]["loss"]
    # The vocabulary is learned anew in each process: int8 moves the loss by 4e-3 to 1e-2.
    assert packed == pytest.approx(plain, rel=3e-2) and packed != plain


def test_masks_of_a_masked_model_are_the_same_each_time(tmp_path: Path) -> None:
    (tmp_path / "story.txt").write_text("\n".join(LINES * 10), encoding="utf-8")
    asked = (encoder("mlm"), "--data", tmp_path / "story.txt", "--unit", "line")
    first = figures(*asked)
    assert first == figures(*asked) and first["task"] == "mlm"
    assert 0 < first["metrics"]["loss"] < 100


# --- texts --------------------------------------------------------------------------------------------------------


def test_translations_are_compared_with_the_file_itself(tmp_path: Path) -> None:
    model = regard.load(folder("t5"))
    said = regard.translate(model, LINES, beams=2)
    said[1] = "ganz <anders>  €"  # what the tokenizer would not give back
    (tmp_path / "in.en").write_text("\n".join([*LINES, ""]), encoding="utf-8")
    (tmp_path / "in.de").write_text("\n".join([*said, ""]), encoding="utf-8")
    sides = ("--data", tmp_path / "in.en", "--target", tmp_path / "in.de", "--beams", 2)
    found = figures(folder("t5"), *sides, "--metric", "exact", "--metric", "bleu")
    assert found["task"] == "seq2seq" and found["metrics"]["exact"] == pytest.approx(2 / 3)
    mine = regard.translate(model, LINES, beams=2)
    want = sacrebleu.corpus_bleu(mine, [said]).score
    assert found["metrics"]["bleu"] == pytest.approx(want)
    assert found["signatures"]["bleu"].startswith("nrefs:1|case:mixed")


def test_rouge_is_four_figures_with_their_signature(tmp_path: Path) -> None:
    said = regard.translate(regard.load(folder("t5")), LINES, beams=1)
    path = tsv(tmp_path / "pairs.tsv", [("source", "target"), *zip(LINES, said)])
    found = figures(folder("t5"), "--data", path, "--beams", 1, "--metric", "rouge")
    names = ["rouge1", "rouge2", "rougeL", "rougeLsum"]
    assert list(found["metrics"]) == list(found["signatures"]) == names
    values, _ = text_scores(names, said, said)
    assert found["metrics"] == pytest.approx(values) and values["rouge1"] > 0


def test_table_has_metrics_values_and_signatures(tmp_path: Path) -> None:
    path = tsv(tmp_path / "pairs.tsv", [("The dog", "Der Hund"), ("a ball", "ein Ball")])
    roles = ("--columns", "source=0", "--columns", "target=1", "--beams", 1)
    done = call("eval", folder("t5"), "--data", path, *roles)
    head, *rows = done.out.splitlines()
    assert done.code == 0 and head.split() == ["metric", "value", "signature"]
    assert [row.split()[0] for row in rows] == ["bleu", "chrf", "loss", "perplexity"]
    assert "nrefs:1" in rows[0].split()[2] and len(rows[2].split()) == 2


def test_quantized_translation_has_a_loss(tmp_path: Path) -> None:
    path = tsv(tmp_path / "pairs.tsv", [("The dog", "Der Hund"), ("a little ball", "ein Ball")])
    asked = (folder("t5"), "--data", path, "--columns", "source=0", "--columns", "target=1")
    plain = figures(*asked, "--metric", "loss")["metrics"]["loss"]
    packed = figures(*asked, "--metric", "loss", "--quantize", "int8")["metrics"]["loss"]
    # The vocabulary is learned anew in each process: int8 moves the loss by 4e-3 to 1e-2.
    assert packed == pytest.approx(plain, rel=3e-2) and packed != plain


def test_task_is_that_of_the_head() -> None:
    small = {"layers": 1, "dim": 16, "heads": 2, "vocab": 50}
    assert task_of(regard.build("gru-lm", vocab=50, dim=8)) == "lm"
    assert task_of(regard.build("bert-base", **small)) == "mlm"
    with pytest.raises(Fault, match="no head, so it answers nothing"):
        task_of(regard.build("bert-base", head=None, **small))


# --- labels -------------------------------------------------------------------------------------------------------


def test_labels_are_matched_by_name(tmp_path: Path) -> None:
    model, tokenizer = regard.load(encoder("classify")), needed(Tokenizer.from_files(tiny.bert()))
    said = [NAMES[int(model(torch.tensor([tokenizer.encode(t)])).argmax())] for t in LINES]
    wrong = next(name for name in NAMES if name != said[0])
    path = tsv(tmp_path / "test.tsv", list(zip(LINES, [wrong, *said[1:]])))
    found = figures(encoder("classify"), "--data", path, *LABELLED)
    assert found["task"] == "classify" and found["metrics"]["accuracy"] == pytest.approx(2 / 3)
    one = tsv(tmp_path / "one.tsv", [(LINES[0], said[0])])  # a single class is no mistake here
    assert figures(encoder("classify"), "--data", one, *LABELLED)["metrics"]["accuracy"] == 1.0


def test_label_the_model_does_not_know_is_told(tmp_path: Path) -> None:
    path = tsv(tmp_path / "test.tsv", [("a", "good"), ("b", "great")])
    done = call("eval", encoder("classify"), "--data", path, *LABELLED)
    assert done.code == 4 and done.out == ""
    assert "label 'great'" in done.err and "bad, good, so-so" in done.err


def test_tags_and_answers(tmp_path: Path) -> None:
    rows = [{"words": ["The", "dog"], "tags": ["bad", "good"]}, {"words": ["x"], "tags": ["so-so"]}]
    path = tmp_path / "tags.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = figures(encoder("tag"), "--data", path)
    assert found["task"] == "tag" and set(found["metrics"]) == {"accuracy", "f1", "loss"}
    row = {"text": "who", "second": "The dog plays", "start": 4, "end": 7}
    path.write_text(json.dumps(row) + "\n")
    found = figures(encoder("answer"), "--data", path)
    assert found["task"] == "answer" and list(found["metrics"]) == ["exact", "f1", "loss"]


def test_pictures_are_read_as_in_training(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = regard.build("vit-small", size=8, patch=4, channels=1, **SMALL, labels=3)
    for p in model.parameters():
        p.data *= 3
    model.origin = Origin("vit", config={"id2label": {"0": "cat", "1": "dog", "2": "owl"}})
    home = model.save(tmp_path / "vit")
    x = np.random.default_rng(0).integers(0, 256, (6, 8, 8), dtype=np.uint8)
    given = torch.from_numpy(x)[:, None].float() / 255 * 2 - 1
    with torch.no_grad():
        said = np.array(["cat", "dog", "owl"])[model(given).argmax(-1).numpy()]
    np.savez(tmp_path / "x.npz", x=x, y=said)
    found = figures(home, "--data", tmp_path / "x.npz", "--metric", "accuracy")
    assert found["task"] == "image" and found["metrics"] == {"accuracy": 1.0}
    np.savez(tmp_path / "x.npz", x=x[:, :4], y=said)
    done = call("eval", home, "--data", tmp_path / "x.npz")
    assert done.code == 4 and "pictures are 4 x 8 x 1, the model reads 8 x 8 x 1" in done.err


# --- prompts with examples ----------------------------------------------------------------------------------------

PAIRS = [("dog", "Hund"), ("ball", "Ball"), ("park", "Park"), ("little", "kleiner"), ("a", "ein")]


def prompted(home: Path, *more: Any) -> tuple[Any, ...]:
    """A question, and two examples that may be shown before it."""
    asked = tsv(home / "asked.tsv", [("source", "target"), ("park", "Park"), ("dog", "Hund")])
    shown = tsv(home / "shown.tsv", [("source", "target"), *PAIRS[:2]])
    return (folder("gpt2"), "--data", asked, "--shots-from", shown, *more)


def test_loss_is_that_of_the_answers_after_their_shots(tmp_path: Path) -> None:
    template = "{source} -> {target};"
    found = figures(*prompted(tmp_path, "--shots", 1, "--template", template))
    assert found["data"] == "2 examples, 1 shot each" and found["task"] == "lm"
    model, tokenizer = regard.load(folder("gpt2")), needed(Tokenizer.from_files(tiny.gpt2()))
    total, count = 0.0, 0
    for i, pair in enumerate([("park", "Park"), ("dog", "Hund")]):
        prompt = Shots(1, template).prompt(PAIRS[:2], i, pair)
        assert re.fullmatch(rf"(dog -> Hund|ball -> Ball);{pair[0]} -> ", prompt)
        ids, n = tokenizer.encode(f"{prompt}{pair[1]};"), len(tokenizer.encode(prompt.rstrip()))
        with torch.no_grad():
            logits = model(torch.tensor([ids[:-1]]))[0, n - 1 :]
        total += F.cross_entropy(logits, torch.tensor(ids[n:]), reduction="sum").item()
        count += len(ids) - n
    assert found["metrics"]["loss"] == pytest.approx(total / count, rel=1e-5)
    assert found["metrics"]["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)


def test_greedy_answers_are_compared_up_to_the_templates_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def say(model: Any, prompts: Any, **settings: Any) -> Any:
        asked.append((prompts, settings["stop"]))
        return [SimpleNamespace(text=text) for text in (" Park ", "Hunde")]

    monkeypatch.setattr("regard.evaluation.run.generate", say)
    found = figures(*prompted(tmp_path, "--shots", 1, "--metric", "exact"))
    assert found["metrics"] == {"exact": 0.5}
    ((prompts, stop),) = asked
    tokenizer = needed(Tokenizer.from_files(tiny.gpt2()))
    assert stop == "\n\n" and tokenizer.decode(prompts[1]) == "ball\nBall\n\ndog\n"


def test_shots_depend_on_the_seed_alone(tmp_path: Path) -> None:
    shots = Shots(2, seed=3)
    prompts = [shots.prompt(PAIRS, i, PAIRS[0]) for i in range(20)]
    assert prompts == [shots.prompt(PAIRS, i, PAIRS[0]) for i in range(20)]
    assert len(set(prompts)) > 5 and prompts != [
        Shots(2, seed=4).prompt(PAIRS, i, PAIRS[0]) for i in range(20)
    ]
    # Never the answer itself, and the question stands at the end.
    assert all("Hund" not in p and p.endswith("dog\n") and p.count("\n\n") == 2 for p in prompts)
    assert Shots(0).prompt([], 0, PAIRS[0]) == "dog\n"
    braces = Shots(1).prompt([("{target}", "{source}")], 0, PAIRS[0])
    assert braces == "{target}\n{source}\n\ndog\n"
    losses = {figures(*prompted(tmp_path, "--shots", n))["metrics"]["loss"] for n in (0, 1, 1)}
    assert len(losses) == 2


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("x.tsv", ("source", "target")),
        ("x.tsv", None),
        ("x.csv", None),
        ("x.tsv", ("question", "answer")),
        ("x.csv", ("prompt", "completion")),
        ("x.jsonl", ("question", "answer")),
        ("x.jsonl", ("prompt", "response")),
        ("x.json", ("prompt", "response")),
    ],
)
def test_questions_and_shots_are_read_as_people_have_them(
    name: str, head: tuple[str, str] | None, tmp_path: Path
) -> None:
    """By the words that finetune knows, and a table of two columns without a header: the same figures."""
    path, parted = tmp_path / name, "," if name.endswith("csv") else "\t"
    rows = [dict(zip(head or ("", ""), pair)) for pair in PAIRS]
    if name.endswith("jsonl"):
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    elif name.endswith("json"):
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(f"{parted.join(x)}\n" for x in ([head] if head else []) + PAIRS))
    known = tsv(tmp_path / "known.tsv", [("source", "target"), *PAIRS])
    how = ["--shots", 2, "--metric", "loss"]
    found, wanted = (
        figures(folder("gpt2"), "--data", p, "--shots-from", p, *how) for p in (path, known)
    )
    assert found["metrics"] == wanted["metrics"] and found["data"] == "5 examples, 2 shots each"


def test_column_that_is_proposed_is_one_to_try(tmp_path: Path) -> None:
    """Roles in their order, each with a column of its own: as proposed, the second time all is there."""
    asked = tsv(
        tmp_path / "x.tsv", [("wen", "was", "egal"), ("dog", "Hund", "1"), ("a", "ein", "2")]
    )
    words: list[Any] = ["eval", folder("gpt2"), "--data", asked, "--shots", 0, "--metric", "loss"]
    for role, column in (("source", 0), ("target", 1)):
        done = call(*words)
        assert done.code in (2, 4) and f"--columns {role}={column}," in done.err, done.err
        words += ["--columns", f"{role}={column}"]
    assert call(*words).code == 0


def test_shots_come_from_the_runs_training_data(tmp_path: Path) -> None:
    home = tmp_path / "run"
    model = regard.load(folder("gpt2")).save(home / "last")
    train = tsv(tmp_path / "train.tsv", [("source", "target"), *PAIRS])
    (home / "run.json").write_text(json.dumps({"config": {"data": {"train": str(train)}}}))
    asked = tsv(tmp_path / "asked.tsv", [("source", "target"), ("park", "Park")])
    found = figures(model, "--data", asked, "--shots", 2, "--metric", "loss")
    named = figures(
        folder("gpt2"), "--data", asked, "--shots", 2, "--shots-from", train, "--metric", "loss"
    )
    assert found == named


@pytest.mark.parametrize(
    "more, code, text",
    [
        (["--shots", 3], 4, "3 shots need as many other examples, there are 2"),
        (["--shots", 1, "--template", "{source}" + "dog " * 60 + "{target};"], 4,
         "more than the model's context of 96; ask for fewer shots"),
        (["--shots", 1, "--template", "{source}: {target}"], 2, "then what ends an answer"),
        (["--shots", 1, "--template", "{target}: {source};"], 2, "it needs {source}, then {target}"),
        (["--shots", -1], 2, "count = -1"),
        (["--shots", 1, "--metric", "bleu"], 2, "bleu does not suit shots"),
        ([], 2, "--shots-from is for prompts with examples: --shots N"),
    ],
)  # fmt: skip
def test_shots_that_cannot_be_are_told(
    more: list[Any], code: int, text: str, tmp_path: Path
) -> None:
    done = call("eval", *prompted(tmp_path, *more))
    assert done.code == code and text in done.err and len(done.err.splitlines()) == 1, done.err


def test_shots_are_for_language_models(tmp_path: Path) -> None:
    path = tsv(tmp_path / "x.tsv", [("source", "target"), ("a", "b")])
    done = call("eval", folder("t5"), "--data", path, "--shots", 1)
    assert done.code == 2 and "shots are for a language model" in done.err
    done = call("eval", folder("gpt2"), "--data", path, "--shots", 1)
    assert done.code == 2 and "--shots-from FILE" in done.err


# --- checks and mistakes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "metric, value, code",
    [("loss", 100, 0), ("loss", 0.1, 5), ("accuracy", 0, 0), ("accuracy", 1.5, 5)],
)
def test_min_is_a_check(metric: str, value: float, code: int, tmp_path: Path) -> None:
    path = tsv(tmp_path / "test.tsv", [("a", "good"), ("b", "bad")])
    asked = ("--data", path, *LABELLED, "--metric", metric, "--min", value)
    done = call("eval", encoder("classify"), *asked)
    assert done.code == code and metric in done.out  # the table comes all the same
    kind = "at most" if metric == "loss" else "at least"
    assert (f"asked for {kind} {value:g}" in done.err) == (code == 5)


def test_example_that_is_too_long_is_named(tmp_path: Path) -> None:
    long = "dog " * 40
    path = tsv(tmp_path / "test.tsv", [("a", "good"), ("", "bad"), (long, "bad")])
    done = call("eval", encoder("classify"), "--data", path, *LABELLED)
    assert done.code == 4 and f"example 3 of {path} ('dog dog" in done.err
    assert "42 tokens, a row holds 24; shorten it, or say overlong='truncate'" in done.err
    cut = ("--overlong", "truncate", "--metric", "accuracy")
    assert figures(encoder("classify"), "--data", path, *LABELLED, *cut)["data"].startswith("2 exa")
    sides = tsv(tmp_path / "pairs.tsv", [("a", "b"), ("der Hund " * 300, "x")])
    roles = ("--columns", "source=0", "--columns", "target=1", "--beams", 1)
    done = call("eval", folder("marian"), "--data", sides, *roles, "--metric", "bleu")
    assert done.code == 4 and f"example 2 of {sides} ('der Hund" in done.err
    done = call("eval", folder("marian"), "--data", sides, *roles, "--metric", "loss")
    assert done.code == 4 and f"example 2 of {sides} ('der Hund" in done.err


MISTAKES = {
    "metric": (["--data", "x", "--metric", "blue"], 2, "no metric 'blue'; did you mean 'bleu'?"),
    "unsuited": (["--data", "x", "--metric", "bleu"], 2, "bleu does not suit the task classify"),
    "no data": ([], 2, "data"),
    "missing": (["--data", "gone.tsv", *LABELLED], 4, "gone.tsv does not exist"),
    "beams": (["--data", "x", "--beams", "0"], 2, "beams is 0"),
    "length": (["--data", "x", "--length", "99"], 2, "from 1 to 24, the model's context"),
    "min": (["--data", "x", "--min", "nan"], 2, "--min is nan; give a finite number"),
    "unit": (["--data", "x", "--unit", "line"], 2, "unit is not used by the task classify"),
    "header": (["--data", __file__, "--header", "True"], 2, "header is for tsv and csv files"),
    "target": (["--data", "x", "--target", "y"], 2, "target is not used by the task classify"),
    "role": (["--data", "x", "--columns", "lable=1"], 2, "did you mean 'label'?"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_one_sentence(name: str) -> None:
    arguments, code, text = MISTAKES[name]
    done = call("eval", encoder("classify"), *arguments)
    assert done.code == code and done.out == ""
    assert text in done.err and len(done.err.splitlines()) == 1


def test_model_without_a_head_or_a_tokenizer_is_told(tmp_path: Path) -> None:
    bare = regard.build("bert-base", vocab=300, max_len=24, **SMALL, head=None)
    done = call("eval", put(bare.save(tmp_path / "m"), tiny.bert()), "--data", "x")
    assert done.code == 4 and "no head" in done.err
    done = call("eval", folder("bare"), "--data", "x")
    assert done.code == 4 and "no tokenizer" in done.err
    assert call("eval", folder("captioner"), "--data", "x").code == 4


# --- run folders --------------------------------------------------------------------------------------------------


def test_run_folder_means_its_best_model_else_its_last(tmp_path: Path) -> None:
    run, steps = tmp_path / "run", tmp_path / "run" / "checkpoints"
    steps.mkdir(parents=True)
    with pytest.raises(Fault, match="has saved no model yet") as error:
        resolve_model(run)
    assert error.value.code == 4
    for name in ("step-1", "step-2"):
        (steps / name).mkdir()
        (steps / name / "config.json").write_text("{}")
    (run / "last").symlink_to(Path("checkpoints") / "step-2")
    assert resolve_model(run) == run / "last"
    (run / "best").symlink_to(Path("checkpoints") / "step-1")
    assert resolve_model(run) == run / "best"
    assert resolve_model(steps / "step-1") == steps / "step-1"
    (steps / "step-1" / "config.json").rename(steps / "step-1" / "adapter.json")  # LoRA
    assert resolve_model(run) == run / "best"
    assert resolve_model("nowhere") == Path("nowhere")


def test_load_takes_runs_and_the_model_that_is_included(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    included = regard.load("demo")
    included.save("run/best")
    Path("run/run.json").write_text("{}")
    weights = regard.load("run").state_dict()
    assert all(torch.equal(x, weights[name]) for name, x in included.state_dict().items())
    Path("demo").mkdir()
    with pytest.raises(UsageError, match="config.json"):
        regard.load("demo")


def test_commands_take_run_folders(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "last").symlink_to(folder("gpt2"))
    want = call("generate", folder("gpt2"), "The dog", "--max-new-tokens", 4)
    assert call("generate", tmp_path, "The dog", "--max-new-tokens", 4) == want
    (tmp_path / "story.txt").write_text("The dog plays")
    assert figures(tmp_path, "--data", tmp_path / "story.txt")["task"] == "lm"
