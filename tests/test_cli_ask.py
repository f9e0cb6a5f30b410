"""regard fill and regard answer: what an encoder says behind masks, and where it finds answers."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.data.config import Data, load
from regard.data.tokens import Coder
from regard.decode.generate import tokenizer_of
from regard.text import needed
from regard.training.objectives import answer as answer_loss
from tests.test_cli import call, folder
from tests.test_cli_eval import encoder, figures

MASKED = "The [MASK] plays in the [MASK]."
WORDS = [
    "The",
    "dog",
    "plays",
    "in",
    "the",
    "park",
    "Ein",
    "kleiner",
    "Hund",
    "läuft",
    "a",
    "little",
    "ball",
]
STORY = " ".join(random.Random(0).choices(WORDS, k=40))


# --- masks --------------------------------------------------------------------------------------------------------


def test_masks_are_filled_as_transformers_does() -> None:
    from transformers import BertForMaskedLM, BertTokenizer

    home = encoder("mlm")
    peer, cut = BertForMaskedLM.from_pretrained(home).eval(), BertTokenizer.from_pretrained(home)
    given = cut(MASKED, return_tensors="pt")
    with torch.no_grad():
        logits = peer(**given).logits[given["input_ids"] == cut.mask_token_id]
    want = logits[:, : len(cut)].softmax(-1).topk(4)
    done = call("fill", home, MASKED, "--top", 4, "--json")
    assert done.code == 0 and done.err == "" and len(logits) == 2
    for i, line in enumerate(done.out.splitlines()):
        tokens = json.loads(line)["tokens"]
        assert [t["token"] for t in tokens] == cut.convert_ids_to_tokens(want.indices[i].tolist())
        found = torch.tensor([t["probability"] for t in tokens])
        torch.testing.assert_close(found, want.values[i], rtol=1e-4, atol=0)


def test_masks_may_be_typed_in_any_way_and_stand_apart() -> None:
    done = call("fill", encoder("mlm"), MASKED, "--top", 2)
    rows = done.out.split("\n")
    assert [bool(row) for row in rows] == [True, True, False, True, True, False]
    assert (
        call("fill", encoder("mlm"), "--top", 2, stdin=MASKED.replace("[MASK]", "<mask>")) == done
    )
    mine = regard.fill(encoder("mlm"), MASKED, top=2)
    assert [f"{t}\t{p:.4f}" for ranking in mine for t, p in ranking] == [r for r in rows if r]
    (one,) = regard.fill(regard.load(encoder("mlm")), "The [MASK]", top=300)
    assert sum(p for _, p in one) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "home, given, code, text",
    [
        ("mlm", ["no mask"], 2, "the text has no mask; put [MASK] where"),
        ("mlm", ["dog " * 40 + "[MASK]"], 4, "the text has 43 tokens, the model's context is 24"),
        ("mlm", ["[MASK]", "--top", 0], 2, "--top is 0"),
        ("mlm", ["[MASK]", "--top", 999], 2, "top is 999; give a number from 1 to"),
        ("classify", ["[MASK]"], 4, 'no head that fills masks; train one: a config with task = "mlm"'),
        ("t5", ["[MASK]"], 4, "an encoder-decoder writes instead: regard generate"),
    ],
)  # fmt: skip
def test_what_cannot_be_filled_is_told(home: str, given: list[Any], code: int, text: str) -> None:
    done = call("fill", folder("t5") if home == "t5" else encoder(home), *given)
    assert done.code == code and text in done.err and len(done.err.splitlines()) == 1


# --- answers ------------------------------------------------------------------------------------------------------


def by_hand(question: str, context: str, longest: int = 30) -> tuple[Any, float]:
    """By transformers' model, in one window, every pair tried: characters and probability."""
    from transformers import BertForQuestionAnswering, BertTokenizer

    peer = BertForQuestionAnswering.from_pretrained(encoder("answer")).eval()
    cut = BertTokenizer.from_pretrained(encoder("answer"))
    pair = cut(question, context, return_offsets_mapping=True)
    assert any(pair["token_type_ids"])
    with torch.no_grad():
        names = ("input_ids", "token_type_ids")
        out = peer(**{name: torch.tensor([pair[name]]) for name in names})
    inside = torch.tensor([s == 1 for s in pair.sequence_ids()])
    inside[0] = True
    start, end = (x[0].masked_fill(~inside, -torch.inf) for x in (out.start_logits, out.end_logits))
    pairs = [
        (float(start[a] + end[b]), a, b)
        for a in range(1, len(start))
        for b in range(a, min(a + longest, len(start)))
    ]
    _, a, b = max([(float(start[0] + end[0]), 0, 0), *pairs])
    offsets = pair["offset_mapping"]
    score = float(start.softmax(0)[a] * end.softmax(0)[b])
    return (None if a == 0 else (offsets[a][0], offsets[b][1])), score


@pytest.mark.parametrize("question", ["who", "a little ball", "der Hund"])
@pytest.mark.parametrize("longest", [1, 30])
def test_answer_is_the_best_span_of_transformers_model(question: str, longest: int) -> None:
    context = "The dog plays in the park."
    where, score = by_hand(question, context, longest)
    home = encoder("answer")
    given = ("--question", question, "--context", context, "--longest", longest)
    found = json.loads(call("answer", home, *given, "--json").out)
    assert found["score"] == pytest.approx(score, rel=1e-4)
    if where is None:
        assert found["answer"] is found["start"] is found["end"] is None
    else:
        assert (found["start"], found["end"]) == where
        assert found["answer"] == context[slice(*where)]
    done = call("answer", home, *given)
    assert done.out == f"{found['answer'] or ''}\t{score:.4f}\n"
    assert ("has no answer" in done.err) == (where is None)


def test_long_context_is_read_in_windows_that_overlap() -> None:
    """The best of all windows, each read alone; where it stands is counted in the whole text."""
    home, question = encoder("answer"), "who"
    model = regard.load(home)
    coder = Coder(needed(tokenizer_of(model)))
    ((ids, places),) = coder.located([STORY])
    head = [*coder.before, *coder.encode([question])[0], *coder.between]
    room = 24 - len(head) - 1
    best, nothing, windows = (-torch.inf, 0, 0), torch.inf, 0
    for i in range(0, len(ids), room - room // 2):
        part = ids[i : i + room]
        row = torch.tensor([[*head, *part, *coder.after]])
        types = torch.tensor([[0] * len(head) + [1] * (len(part) + 1)])
        with torch.no_grad():
            start, end = model(row, types=types)[0].T.tolist()
        pairs = [(a, b) for a in range(len(part)) for b in (a, a + 1) if b < len(part)]
        sums = [(start[len(head) + a] + end[len(head) + b], i + a, i + b) for a, b in pairs]
        best, nothing, windows = max(best, *sums), min(nothing, start[0] + end[0]), windows + 1
        if i + room >= len(ids):
            break
    found = regard.answer(model, question, STORY, longest=2)
    where = places[best[1]][0], places[best[2]][1]
    answer = (*where, STORY[slice(*where)]) if best[0] > nothing else (None, None, None)
    assert windows > 5 and (found.start, found.end, found.text) == answer
    done = call("answer", home, "--question", question, "--longest", 2, "--json", stdin=STORY)
    assert json.loads(done.out)["start"] == found.start


def test_training_and_eval_read_segments_too(tmp_path: Path) -> None:
    """What `answer` sees is what was learned: the second text is of type 1, where the model has types."""
    from transformers import BertTokenizer

    asked = {"text": "who", "second": "The dog plays", "start": 4, "end": 7}
    (tmp_path / "q.jsonl").write_text(json.dumps(asked) + "\n", encoding="utf-8")
    model = regard.load(encoder("answer"))
    coder = Coder(needed(tokenizer_of(model)))
    feed = load("answer", Data(str(tmp_path / "q.jsonl"), rows=1), coder, tmp_path / "shards").feed
    batch = feed.batch(0)
    pair = BertTokenizer.from_pretrained(encoder("answer"))("who", "The dog plays")
    ids, types = (torch.tensor([pair[name]]) for name in ("input_ids", "token_type_ids"))
    assert batch.types is not None and torch.equal(batch.types, types)
    total, count = answer_loss(model, batch)
    logits = model(ids, types=types)
    want = torch.nn.functional.cross_entropy(logits[0].T, batch.labels[0], reduction="sum")
    torch.testing.assert_close(total, want)
    found = figures(encoder("answer"), "--data", tmp_path / "q.jsonl", "--metric", "loss")
    assert found["metrics"]["loss"] == pytest.approx(float((total / count).detach()), rel=1e-5)


@pytest.mark.parametrize(
    "home, given, code, text",
    [
        ("answer", ["--context", "x"], 2, "say what is asked: --question"),
        ("answer", ["--question", "who", "--context", " "], 2, "the context is empty"),
        ("answer", ["--question", "", "--context", "x"], 2, "the question is empty"),
        ("answer", ["--question", "dog " * 30, "--context", "x"], 4, "no room for a text beside it"),
        ("answer", ["--question", "x", "--context", "x", "--longest", 0], 2, "--longest is 0"),
        ("mlm", ["--question", "x", "--context", "x"], 4, "no head that finds answers; train one"),
    ],
)  # fmt: skip
def test_what_cannot_be_answered_is_told(home: str, given: list[Any], code: int, text: str) -> None:
    done = call("answer", encoder(home), *given)
    assert done.code == code and text in done.err and len(done.err.splitlines()) == 1
