"""LongRoPE past the context of its training: every token of a longer text is turned otherwise, so a text that grows
past the border is read again, and a long prompt is read as one text, in however many chunks."""

import copy
from typing import Any

import pytest
import torch

import regard
from regard.attention import GQA
from regard.decode.engine import Engine
from regard.decode.sequence import Sequence
from regard.decode.settings import Request, Settings
from regard.fast.cpu import prepare
from regard.position import LongRope, Rope
from tests.decode.tiny import full, run
from tests.wide import crossed

BORDER, NEW = 24, 12
SHORT, LONG = (1.0, 1.3, 1.6, 2.0), (2.0, 5.0, 9.0, 12.0)
ROPE = Rope(scaling=LongRope(SHORT, LONG, BORDER, factor=4.0))
WAYS: dict[str, dict[str, Any]] = {
    "rows": {"layout": "contiguous"},
    "paged": {"page": 4, "pages": 300},
    "shared": {"page": 4, "pages": 300, "prefix": True},
    "graph": {"page": 4, "pages": 300, "runner": "graph"},
    "native": {"page": 4, "pages": 300},
}


def made(rope: Rope = ROPE) -> Any:
    torch.manual_seed(0)
    attention = GQA(4, kv_heads=2, rope=rope)
    model = regard.build("llama", layers=2, dim=32, vocab=96, attention=attention)
    return model.eval()


def prompts() -> list[list[int]]:
    """Short ones, one that ends at the border and its neighbours, long ones; two begin alike."""
    draw = torch.Generator().manual_seed(1)
    sizes = (3, 18, BORDER - 1, BORDER, BORDER + 1, 40)
    texts = [torch.randint(12, 90, (n,), generator=draw).tolist() for n in sizes]
    return [*texts, texts[-1][:20], [*texts[-1][:30], 7]]


@torch.no_grad()
def plain(model: Any, ids: list[int], new: int = NEW) -> list[int]:
    """The whole text in one call for every token."""
    text = list(ids)
    for _ in range(new):
        text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    return text[len(ids) :]


@pytest.mark.parametrize("way, chunk", crossed(WAYS, [7, 512]))
def test_texts_grow_past_the_border(way: str, chunk: int) -> None:
    """In company, in chunks, and when they were put back: as if every token were chosen by the whole text."""
    model = made()
    want = [plain(model, ids) for ids in prompts()]
    used = prepare(copy.deepcopy(model), "fp32") if way == "native" else model
    engine = Engine(used, rows=5, chunk=chunk, **WAYS[way])
    for i, ids in enumerate(prompts()):
        engine.submit(Request(ids, Settings(max_new_tokens=NEW), key=i))
    found, steps = {}, 0
    while not engine.idle:
        found |= {e.request: e.done[0] for e in engine.step() if e.done}
        steps += 1
        if steps in (3, 9, 14) and len(list(engine.scheduler.running())) > 1:
            with torch.inference_mode():
                engine.scheduler.preempt_last()
    full(engine.pool)
    assert [found[i].ids for i in range(len(want))] == want


@pytest.mark.parametrize("more", [{"lookup": 3}, {"draft": 3}])
def test_guesses_do_not_cross_the_border_unread(more: dict[str, int]) -> None:
    model = made()
    draft = model if "draft" in more else None
    engine = Engine(model, rows=8, chunk=7, page=4, pages=300, draft=draft)
    for ids in prompts():
        engine.submit(Request(ids, Settings(max_new_tokens=NEW, **more)))
    found = run(engine)
    assert [found[i][0].ids for i in range(8)] == [plain(model, ids) for ids in prompts()]


def test_samples_cross_one_by_one() -> None:
    """Whether one's siblings have ended or crossed changes nothing of it."""
    model, ids = made(), prompts()[1]
    how: dict[str, Any] = {
        "max_new_tokens": NEW,
        "temperature": 1.0,
        "seed": 3,
        "eos": tuple(range(12)),
    }
    together = regard.generate(model, [ids], samples=6, **how)
    again = regard.generate(model, [ids, prompts()[4]], samples=6, rows=4, layout="paged", **how)[
        :6
    ]
    assert [r.ids for r in together] == [r.ids for r in again]
    assert len({len(r.ids) for r in together}) > 1


@pytest.mark.parametrize("native", [False, True])
def test_beams_are_read_for_the_length_they_may_come_to(native: bool) -> None:
    """A search is never read again: with room for a long text it is a long text's from its start."""
    model, always = made(), made(Rope(scaling=LongRope(LONG, LONG, BORDER, factor=4.0)))
    used = prepare(copy.deepcopy(model), "fp32") if native else model
    how: dict[str, Any] = {"beams": 3, "n_best": 2, "max_new_tokens": NEW}
    many = [prompts()[i] for i in (1, 2, 5)]
    assert ids_of(used, many, **how) == ids_of(always, many, **how)
    never = made(Rope(scaling=LongRope(SHORT, SHORT, BORDER, factor=4.0)))
    assert ids_of(used, prompts()[:1], **how) == ids_of(never, prompts()[:1], **how)


def ids_of(model: Any, many: list[list[int]], **how: Any) -> list[list[int]]:
    return [r.ids for r in regard.generate(model, many, **how)]


def test_phi_3_goes_on_as_transformers_does() -> None:
    """Prompts that grow past the border, and one that is longer; by theirs the whole text for every token, as its cache
    goes on with keys that were turned as a short text's."""
    from transformers import Phi3Config, Phi3ForCausalLM

    rope = {"rope_type": "longrope", "short_factor": list(SHORT), "long_factor": list(LONG)}
    torch.manual_seed(0)
    theirs = Phi3ForCausalLM(
        Phi3Config(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=4 * BORDER,
            original_max_position_embeddings=BORDER,
            rope_parameters=rope | {"rope_theta": 10000.0},
            eos_token_id=None,
            pad_token_id=0,
            bos_token_id=1,
        )
    ).eval()
    ours = regard.from_hf(theirs)
    for ids in (prompts()[i] for i in (0, 1, 3, 5)):
        want = theirs.generate(
            torch.tensor([ids]), max_new_tokens=30, do_sample=False, use_cache=False
        )
        assert ids_of(ours, [ids], max_new_tokens=30, eos=()) == [want[0, len(ids) :].tolist()]


@pytest.mark.parametrize("beams, far", [(1, False), (2, True), (3, True)])
def test_a_search_is_read_for_the_longest_that_it_may_come_to(beams: int, far: bool) -> None:
    request = Request([1, 2, 3], Settings(max_new_tokens=5, beams=beams))
    assert Sequence(request, 0, border=6).far == far
