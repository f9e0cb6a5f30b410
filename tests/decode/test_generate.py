"""Texts in, texts out: `generate`, `stream` and `translate` of models with a tokenizer, and the engine they make."""

import copy
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard.checkpoint.hf import Origin
from regard.decode import generate as module
from regard.decode.engine import Engine
from regard.decode.generate import Job, Unanswered, engine_for, tokenizer_of, translating
from regard.decode.scheduler import Scheduler
from regard.decode.settings import Result
from regard.errors import UsageError
from regard.fast.cpu import prepare
from tests.decode.tiny import full, model
from tests.laws.mechanisms import VOCAB, stir
from tests.text import tiny

SMALL: dict[str, Any] = {"layers": 1, "dim": 16, "heads": 2, "ffn_dim": 24, "dropout": 0.0}
TWELVE: dict[str, Any] = {"max_new_tokens": 12, "eos": ()}
PROMPTS = ["The dog", "Once upon a time there was a little dog", "in the park"]


@functools.cache
def texts(name: str) -> Any:
    """A model that reads texts: a decoder, or an encoder-decoder."""
    torch.manual_seed(3)
    if name == "decoder":
        made, files = regard.build("gpt2", vocab=400, max_len=64, **SMALL), tiny.gpt2()
    else:
        made, files = regard.build("t5-small", vocab=400, **SMALL), tiny.bert()
    made = stir(made)
    made.origin = Origin("gpt2" if name == "decoder" else "t5", files=files)
    return made


def streamed(made: Any, prompt: str, **how: Any) -> Result:
    """A stream's pieces are its result's text."""
    results = list[Result]()

    def pieces() -> Iterator[str]:
        results.append((yield from regard.stream(made, prompt, **how)))

    found = list(pieces())
    assert all(found) and "".join(found) == results[0].text
    return results[0]


# --- texts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["decoder", "pair"])
def test_an_answer_is_the_text_of_its_ids(name: str) -> None:
    made, how = texts(name), TWELVE
    tokenizer = tokenizer_of(made)
    assert tokenizer is not None
    for prompt, result in zip(PROMPTS, regard.generate(made, PROMPTS, **how), strict=True):
        after = [] if name == "pair" else tokenizer.encode(prompt)
        assert result.text == tokenizer.decode(result.ids, after=after) and len(result.ids) == 12
        assert streamed(made, prompt, **how) == result


@pytest.mark.parametrize("name", ["decoder", "pair"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_text_ends_before_its_stop_string(name: str, prompt: str) -> None:
    """Wherever that begins; and with two answers each has its own end."""
    made, how = texts(name), TWELVE
    (whole,) = regard.generate(made, prompt, **how)
    assert whole.text is not None and whole.finish == "length"
    for at in range(0, len(whole.text), 3):
        stop = whole.text[at : at + 2]
        (short,) = regard.generate(made, prompt, stop=["\0", stop], **how)
        assert (short.text, short.finish) == (whole.text[: whole.text.index(stop)], "stop")
        assert streamed(made, prompt, stop=stop, **how) == short
    drawn: Any = {**how, "temperature": 1.0, "samples": 2}
    for one, other in zip(
        regard.generate(made, [prompt, prompt], **drawn),
        regard.generate(made, [prompt, prompt], stop="e", **drawn),
        strict=True,
    ):
        assert one.text is not None and other.text == one.text.partition("e")[0]


def test_what_a_tokenizer_cannot_read_is_named() -> None:
    lost = "the tokenizer has no token for '☃': the model reads <unk> instead"
    with pytest.warns(UserWarning, match=lost):
        regard.generate(texts("pair"), "The dog ☃", max_new_tokens=1)
    with pytest.raises(UsageError, match="tokenizer"):
        regard.generate(model("gqa_rope"), "The dog", max_new_tokens=1)
    with pytest.raises(UsageError, match="tokenizer"):
        regard.generate(model("gqa_rope"), [1, 2], stop="x", max_new_tokens=1)


FORMS: dict[str, tuple[Any, list[list[int]]]] = {
    "ids": ([1, 2], [[1, 2]]),
    "ids of numpy": ([np.int64(1), np.int64(2)], [[1, 2]]),
    "many": ([[1, 2], [3]], [[1, 2], [3]]),
    "a tuple": (((1, 2), (3,)), [[1, 2], [3]]),
    "a tensor": (torch.tensor([1, 2]), [[1, 2]]),
    "rows of a tensor": (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
    "tensors": ([torch.tensor([1, 2]), torch.tensor([3])], [[1, 2], [3]]),
    "an array": (np.array([1, 2]), [[1, 2]]),
    "rows of an array": (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
    "arrays": ([np.array([1, 2]), np.array([3])], [[1, 2], [3]]),
}


@pytest.mark.parametrize("form", FORMS)
def test_prompts_of_every_form_are_their_ids(form: str) -> None:
    given, want = FORMS[form]
    job = Job(model("gqa_rope"), (), {})
    found = job.requests(given)
    assert [r.ids for r in found] == want and [r.key for r in found] == list(range(len(want)))
    assert all(type(i) is int for r in found for i in r.ids)


@pytest.mark.parametrize(
    "bad", [5, None, 1.5, {1, 2}, [1.5], [[1.5]], [True], [[1, "a"]], [[None]], object()]
)
def test_prompts_that_are_none_are_refused(bad: Any) -> None:
    with pytest.raises(UsageError, match="a prompt is text or a list of whole numbers"):
        Job(model("gqa_rope"), (), {}).requests(bad)


def test_no_prompt_and_no_source_are_refused() -> None:
    for name, bad, why in (
        ("gqa_rope", [], "no prompt given"),
        ("pair", [[]], "the source is empty"),
    ):
        with pytest.raises(UsageError, match=why):
            Job(model(name), (), {}).requests(bad)


def test_an_answer_that_fails_is_no_mistake_of_the_caller() -> None:
    """A command ends with 1 for it, not with 2; of many a warning counts them."""
    three = np.arange(VOCAB) == 3
    nothing: Any = {"max_new_tokens": 4, "banned": (3,), "mask": lambda sample, ids: three}
    with pytest.raises(
        Unanswered, match="could not be answered: its mask allows no token"
    ) as raised:
        list(regard.stream(model("gqa_rope"), [1, 2], **nothing))
    assert raised.value.code == 1
    with pytest.warns(RuntimeWarning, match="2 of 2 answers could not be completed: its mask"):
        regard.generate(model("gqa_rope"), [[1, 2], [3]], **nothing)


def test_a_stream_is_one_answer() -> None:
    for kind in ({"beams": 2}, {"samples": 2, "temperature": 1.0}):
        with pytest.raises(UsageError, match="a stream is one answer"):
            list(regard.stream(texts("decoder"), "The dog", **kind))


# --- translations -----------------------------------------------------------------------------------------------------


def test_translations_stand_where_their_lines_do() -> None:
    made = texts("pair")
    lines = ["", PROMPTS[1], "  ", PROMPTS[0]]
    want = [r.text for r in regard.generate(made, [lines[1], lines[3]], beams=4, max_new_tokens=8)]
    assert regard.translate(made, lines, max_new_tokens=8) == ["", want[0], "", want[1]]
    assert regard.translate(made, ["", " "]) == ["", ""]
    best = regard.translate(made, lines, beams=3, n_best=2, max_new_tokens=8)
    assert [len(each) for each in best] == [1, 2, 1, 2] and best[0] == [""]
    drawn = regard.translate(made, lines[1:2], samples=3, temperature=1.0, max_new_tokens=8)
    assert [len(each) for each in drawn] == [3]
    with pytest.raises(UsageError, match="needs an encoder-decoder"):
        regard.translate(texts("decoder"), lines)


def test_what_nobody_says_of_a_translation() -> None:
    """Four beams, and twice the longest source and ten tokens within the context, if it has one."""
    made, sources = texts("pair"), [[5] * 3, [5] * 7]
    assert translating(made, sources, {}) == {"beams": 4, "max_new_tokens": 24}
    assert translating(made, [], {}) == {"beams": 4, "max_new_tokens": 1}
    given = {"beams": 2, "max_new_tokens": 3}
    assert translating(made, sources, given) == given
    assert "beams" not in translating(made, sources, {"temperature": 0.7})
    # What the folder says wins, unless it is left out.
    told, says = copy.copy(made), tiny.dump({"num_beams": 3, "max_length": 20})
    told.origin = Origin("t5", files={**made.origin.files, "generation_config.json": says})
    assert translating(told, sources, {}) == {}
    assert translating(told, sources, {}, "plain") == {"beams": 4, "max_new_tokens": 24}
    # An answer's first token is that which begins every answer.
    bound = model("pair")
    for size, most in ((26, 62), (27, 63), (60, 63)):
        assert translating(bound, [[5] * size], {})["max_new_tokens"] == most
    assert regard.generate(bound, [[5] * 60], max_new_tokens=63)


# --- the engine -------------------------------------------------------------------------------------------------------


def made_for(
    name: str, sizes: Sequence[int], rows: int | None, layout: str | None, **how: Any
) -> Engine:
    job = Job(model(name), (), how)
    return engine_for(model(name), job.requests([[1] * n for n in sizes]), rows, layout, None)


@pytest.mark.parametrize("layout", [None, "contiguous", "paged"])
@pytest.mark.parametrize("beams", [1, 2])
def test_texts_lie_in_rows_unless_pages_are_asked_for(layout: str | None, beams: int) -> None:
    """Beams of a prepared model too, but for that: its C code reads pages where they lie."""
    engine = made_for("gqa_rope", [3], None, layout, beams=beams)
    assert (engine.pool is not None) == (layout == "paged")
    lean = prepare(
        regard.build("llama", layers=1, dim=16, heads=2, kv_heads=1, ffn_dim=24, vocab=32), "fp32"
    )
    job = Job(lean, (), {"beams": beams})
    engine = engine_for(lean, job.requests([[1, 2]]), None, layout, None)
    assert (engine.pool is not None) == (layout == "paged" or (layout is None and beams == 2))


@pytest.mark.parametrize(
    "name, sizes, rows, kind, page, pages, batch, alone",
    [
        # 17 tokens at most are 2 pages; and two more for each row.
        ("gqa_rope", [3, 11, 12], None, {}, 16, 1 + 2 + 2 + 6, 3, 2),
        ("gqa_rope", [3, 11, 12], 2, {}, 16, 2 + 2 + 4, 2, 2),
        ("gqa_rope", [3, 11], None, {"samples": 2, "temperature": 1.0}, 16, 2 * (1 + 2) + 8, 4, 4),
        ("gqa_rope", [3, 11], 3, {"samples": 2, "temperature": 1.0}, 16, 2 * (1 + 2) + 6, 3, 4),
        # Beams have pages of one token.
        ("gqa_rope", [3, 11], None, {"beams": 2}, 1, 2 * (9 + 17) + 8, 4, 34),
        # An answer begins with one token; sources lie in pages too.
        ("twin", [3, 20], None, {}, 16, 1 + 1 + 1 + 2 + 4, 2, 3),
    ],
)
def test_pages_are_enough_for_all_that_run_together(
    name: str, sizes: list[int], rows: int | None, kind: Any, page: int, pages: int, batch: int,
    alone: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """So that nobody is put back; and where memory holds no more, for the largest alone, and all say the same."""
    how = {"max_new_tokens": 6, "eos": (), **kind}
    engine = made_for(name, sizes, rows, "paged", **how)
    assert engine.pool is not None
    assert (engine.pool.page, len(engine.pool.users), engine.scheduler.rows) == (page, pages, batch)
    prompts, more = [[i + 1] * n for i, n in enumerate(sizes)], {"rows": rows, **how}
    want = regard.generate(model(name), prompts, **more)
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "preempt_last", None)
        assert [r.ids for r in regard.generate(model(name), prompts, layout="paged", **more)] == [
            r.ids for r in want
        ]
    monkeypatch.setattr(module, "TOTAL", 1)
    least = made_for(name, sizes, rows, "paged", **how)
    assert least.pool is not None and len(least.pool.users) == alone
    found = regard.generate(model(name), prompts, layout="paged", **more)
    assert [r.ids for r in found] == [r.ids for r in want]
    full(least.pool)


@pytest.mark.parametrize(
    "sizes, rows, kind, pages, batch",
    [
        # 17 tokens at most are 2 pages; the next power of two, so that the next call finds the same memory.
        ([3, 11, 12], None, {}, 8, 3),
        ([3, 11, 12], 2, {}, 8, 2),
        ([11, 12], None, {"samples": 2, "temperature": 1.0}, 16, 4),
        ([3], None, {"beams": 4}, 8, 4),
        ([3] * 80, None, {"beams": 2}, 256, 128),
    ],
)
def test_memory_of_a_graph_is_enough_for_all_that_run_together(
    sizes: list[int], rows: int | None, kind: Any, pages: int, batch: int,
    monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """But for a part that is left free, and no less than is worth asking for."""
    asked, made = list[dict[str, Any]](), model("gqa_rope")
    monkeypatch.setattr(module, "why_plain", lambda *_, **__: "")
    monkeypatch.setattr(module, "Engine", lambda _, **how: asked.append(how))
    job = Job(made, (), {"max_new_tokens": 6, "eos": (), **kind})
    token = 8 * sum(spec.numbers() for spec in made.cache_specs())
    for least, free, memory in (
        (1, 10**12, pages * 16 * token),
        (1, 1000, 900),
        (10**9, 10**12, 10**9 // (16 * token) * 16 * token),
    ):
        monkeypatch.setattr(module, "LEAST", least)
        monkeypatch.setattr(module, "free_memory", lambda _, free=free: free)
        engine_for(made, job.requests([[1] * n for n in sizes]), rows, None, None)
        assert asked.pop() == {"rows": batch, "page": 16, "memory": memory}


def test_the_longest_are_served_first(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, real = list[int](), Engine.submit

    def submit(self: Engine, request: Any) -> int:
        sizes.append(len(request.ids if request.source is None else request.source))
        return real(self, request)

    monkeypatch.setattr(Engine, "submit", submit)
    for name in ("gqa_rope", "pair"):
        sizes.clear()
        regard.generate(model(name), [[1] * n for n in (3, 9, 1, 5)], max_new_tokens=1)
        assert sizes == [9, 5, 3, 1]


@pytest.mark.parametrize("rows, want", [(None, 128), (3, 3)])
def test_translations_are_twice_as_many_at_a_time(
    rows: int | None, want: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, found = texts("pair"), list[Any]()
    real = module.engine_for

    def noted(model: Any, requests: Any, rows: Any, *rest: Any) -> Engine:
        found.append(rows)
        return real(model, requests, rows, *rest)

    monkeypatch.setattr(module, "engine_for", noted)
    regard.translate(made, ["The dog"], rows=rows, max_new_tokens=1)
    assert found == [want]


def test_memory_is_counted_in_bytes() -> None:
    """Not in pages: half a GiB is what no machine that runs this has less than."""
    assert module.TOTAL > 2**29


def test_prompts_are_served_so_many_at_a_time() -> None:
    sizes = [2] * 70
    assert made_for("gqa_rope", sizes, None, None).scheduler.rows == 64
    assert made_for("gqa_rope", sizes, 5, None).scheduler.rows == 5
    assert made_for("gqa_rope", sizes[:3], 5, None, beams=2, eos=()).scheduler.rows == 5
    assert made_for("gqa_rope", sizes[:2], 5, None, beams=2, eos=()).scheduler.rows == 4
