"""Texts in, texts out: `generate`, `stream` and `translate` of models with a tokenizer, and the engine they make."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import regard
from regard.checkpoint.hf import Origin
from regard.decode import generate as module
from regard.decode.engine import Engine
from regard.decode.generate import Job, engine_for, tokenizer_of, translating
from regard.decode.settings import Result
from regard.errors import UsageError
from regard.fast.cpu import prepare
from tests.decode.tiny import full, model
from tests.laws.mechanisms import stir
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
    "name, sizes, rows, kind, page, pages, batch",
    [
        # 17 tokens at most are 2 pages; and two more for each row.
        ("gqa_rope", [3, 11, 12], None, {}, 16, 1 + 2 + 2 + 6, 3),
        ("gqa_rope", [3, 11, 12], 2, {}, 16, 2 + 2 + 4, 2),
        ("gqa_rope", [3, 11], None, {"samples": 2, "temperature": 1.0}, 16, 2 * (1 + 2) + 8, 4),
        ("gqa_rope", [3, 11], 3, {"samples": 2, "temperature": 1.0}, 16, 2 * (1 + 2) + 6, 3),
        # Beams have pages of one token.
        ("gqa_rope", [3, 11], None, {"beams": 2}, 1, 2 * (9 + 17) + 8, 4),
        # An answer begins with one token; sources lie in pages too.
        ("twin", [3, 20], None, {}, 16, 1 + 1 + 1 + 2 + 4, 2),
    ],
)
def test_pages_are_enough_for_all_that_run_together(
    name: str, sizes: list[int], rows: int | None, kind: Any, page: int, pages: int, batch: int,
    monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """So that nobody is put back; and where memory holds no more, for the largest alone, and all say the same."""
    how = {"max_new_tokens": 6, "eos": (), **kind}
    engine = made_for(name, sizes, rows, "paged", **how)
    assert engine.pool is not None
    assert (engine.pool.page, len(engine.pool.users), engine.rows) == (page, pages, batch)
    prompts, more = [[i + 1] * n for i, n in enumerate(sizes)], {"rows": rows, **how}
    want = regard.generate(model(name), prompts, **more)
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_preempt", None)
        assert [r.ids for r in regard.generate(model(name), prompts, layout="paged", **more)] == [
            r.ids for r in want
        ]
    monkeypatch.setattr(module, "TOTAL", 1)
    least = made_for(name, sizes, rows, "paged", **how)
    assert least.pool is not None and len(least.pool.users) < pages
    found = regard.generate(model(name), prompts, layout="paged", **more)
    assert [r.ids for r in found] == [r.ids for r in want]
    full(least.pool)


def test_prompts_are_served_so_many_at_a_time() -> None:
    sizes = [2] * 70
    assert made_for("gqa_rope", sizes, None, None).rows == 64
    assert made_for("gqa_rope", sizes, 5, None).rows == 5
    assert made_for("gqa_rope", sizes[:3], 5, None, beams=2, eos=()).rows == 5
    assert made_for("gqa_rope", sizes[:2], 5, None, beams=2, eos=()).rows == 4
