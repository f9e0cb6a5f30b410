"""overflow="sinks": a text without end, conditioned on its first four tokens and its last ones, at the places that they
have in the window. Held against a form that keeps nothing: the whole text read once in float64, each query with keys
turned to their places as that query finds them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.attention import DSA, GQA, MLA, DeltaRule
from regard.attention.protocol import Context
from regard.block import Tower
from regard.cache import FIRST, Sinks
from regard.decode.engine import Engine
from regard.decode.runners.outgrown import streams
from regard.decode.settings import Request, Result, Settings
from regard.errors import UsageError
from regard.layers import LM, MLP
from regard.mask import Causal, Span
from regard.models import Tokens, Transformer, TransformerConfig
from regard.position import Alibi, Learned, Linear, LongRope, Rope, T5Bias, Yarn
from tests.decode.tiny import full, prompts, run
from tests.laws.mechanisms import VOCAB, stir
from tests.wide import wide

L = 11  # the context
YARN = Yarn(4.0, 8, mscale=0.7, mscale_all=0.9)
STREAMED: dict[str, Any] = {
    "rope": {"attention": GQA(6, 2, 8, rope=Rope())},
    "interleaved": {"attention": GQA(3, head_dim=8, rope=Rope(layout="interleaved", partial=0.5))},
    "linear": {"attention": GQA(3, head_dim=8, rope=Rope(scaling=Linear(2.0)), qk_norm=1e-6)},
    "yarn": {"attention": GQA(3, head_dim=8, rope=Rope(scaling=YARN), sinks=True, softcap=2.0)},
    "window": {
        "attention": (GQA(3, head_dim=8, rope=Rope(), window=6), GQA(3, head_dim=8, rope=Rope()))
    },
    "alibi": {"attention": GQA(6, 1), "relative": Alibi(6)},
    "t5": {"attention": GQA(4, 2), "relative": T5Bias(4, 8, 16, causal=True)},
    "no positions": {"attention": GQA(3)},
    "mla": {
        "attention": MLA(3, latent=10, head_dim=6, rope_dim=4, rope=Rope(layout="interleaved"))
    },
    "delta": {
        "attention": (
            DeltaRule(2, value_heads=6, key_dim=10, value_dim=7),
            GQA(3, head_dim=8, rope=Rope()),
        )
    },
}
READ_ANEW: dict[str, Any] = {
    "learned": ({"attention": GQA(3)}, Learned(L)),
    "dsa": ({"attention": DSA(GQA(6, 2, 8, rope=Rope()), 2, 8, 5, rope_dim=4)}, None),
    "longrope": (
        {"attention": GQA(3, head_dim=8, rope=Rope(scaling=LongRope((1.0,) * 4, (2.0,) * 4, 64)))},
        None,
    ),
}
WAYS: dict[str, dict[str, Any]] = {
    "contiguous": {"layout": "contiguous"},
    "paged": {"page": 4, "pages": 60, "chunk": 5},
    "graph": {"runner": "graph", "page": 4, "pages": 60},
}


def made(tower: dict, position: Any = None) -> Transformer:
    torch.manual_seed(0)
    config = TransformerConfig(
        Tokens(VOCAB, position), Tower(24, 2, ffn=MLP(20), **tower), LM(tied=False), max_len=L
    )
    return stir(config.make())


# --- the plain form -----------------------------------------------------------------------------------------------


def places(query: int, size: int) -> Tensor:
    """Where tokens 0 to size - 1 stand for the token `query`: -1 if it does not see them."""
    key, past = torch.arange(size), max(0, query + 1 - L)
    seen = (key <= query) & ((key < FIRST) | (key >= past + FIRST))
    return torch.where(seen, torch.where(key < FIRST, key, key - past), -1)


class Placed:
    """Attention of each query alone, over keys that are turned for it."""

    def forward(self: Any, x: Tensor, ctx: Context, residual: Tensor | None = None) -> Tensor:
        o = torch.cat([self.one(x, i, ctx) for i in range(x.shape[1])], 1)
        return self.project_out(self.weigh(o, x), residual)

    def one(self: Any, x: Tensor, i: int, ctx: Context) -> Tensor:
        at = places(i, x.shape[1])[None]
        own, keys = Span(at[:, i : i + 1]), Span(at)
        q = self.queries(self.query_input(x[:, i : i + 1]), Context(own))
        kept = self.entries(x, Context(Span(at.clamp(min=0))))
        seen = Context(own, Causal(), relative=ctx.relative, backend="reference")
        return self.core_attention(
            q, kept, seen.visible(keys, self.config.window), seen, seen.bias(keys)
        )


@contextmanager
def placed(model: Transformer) -> Iterator[None]:
    """The model with the plain form in place of its attention, and without a limit."""
    parts = [block.attention for block in model.tower.blocks]
    kinds, config = [type(part) for part in parts], model.config
    try:
        model.config = replace(config, max_len=None)
        for part, kind in zip(parts, kinds, strict=True):
            if not isinstance(part.config, DeltaRule):
                part.__class__ = type("Placed", (Placed, kind), {})
        yield
    finally:
        model.config = config
        for part, kind in zip(parts, kinds, strict=True):
            part.__class__ = kind


@torch.no_grad()
def plain(model: Transformer, prompt: list[int], ids: list[int]) -> Tensor:
    """Log probabilities at every place of an answer, by one pass over the whole text."""
    base = prompt if len(prompt) <= L else prompt[:FIRST] + prompt[FIRST - L :]
    with placed(model):
        return model(torch.tensor([base + ids[:-1]]))[0, len(base) - 1 :].log_softmax(-1)


def served(model: Any, asked: list[list[int]], new: int, **options: Any) -> list[Result]:
    engine = Engine(model, **options)
    s = Settings(max_new_tokens=new, overflow="sinks", top_logprobs=3)
    for i, prompt in enumerate(asked):
        engine.submit(Request(prompt, s, key=i))
    found = run(engine)
    full(engine.pool)
    return [found[i][0] for i in range(len(asked))]


def checked(model: Any, prompt: list[int], r: Result) -> None:
    top = plain(model, prompt, r.ids).topk(3)
    assert r.ids == top.indices[:, 0].tolist()
    for got, want, tokens in zip(r.top_logprobs, top.values.tolist(), top.indices.tolist()):
        assert [i for i, _ in got] == tokens
        assert [p for _, p in got] == pytest.approx(want, abs=1e-5)


TRIED = [(n, w) for n in STREAMED for w in WAYS if w != "graph" or n in ("rope", "mla")]
FEW = [row for row in TRIED if row[0] == "rope" or row[1] == next(iter(WAYS))]


@pytest.mark.parametrize("name, way", wide(TRIED, keep=FEW))
def test_sinks_are_the_text_read_with_a_mask(name: str, way: str) -> None:
    """Past two windows, so that what is kept moves; prompts below, at and above the context, together."""
    model = made(STREAMED[name])
    assert streams(model)
    asked = prompts((3, L - 1, L + 1, 30))
    for prompt, r in zip(asked, served(model, asked, 3 * L - 2, **WAYS[way]), strict=True):
        checked(model, prompt, r)


def test_sinks_differ_from_crop() -> None:
    """What the first tokens say matters: the law above is not about nothing."""
    model, (prompt,) = made(STREAMED["rope"]), prompts((L,))
    (kept,) = served(model, [prompt], 2 * L)
    cropped = regard.generate(model, [prompt], max_new_tokens=2 * L, overflow="crop")[0]
    assert kept.ids != cropped.ids


@pytest.mark.parametrize("name", READ_ANEW)
def test_where_tokens_cannot_move_the_window_is_read_anew(name: str) -> None:
    model = made(*READ_ANEW[name])
    assert not streams(model)
    for prompt in prompts((3, L + 4)):
        (r,) = served(model, [prompt], 9)
        assert len(r.ids) == 9
        text = list(prompt)
        for token in r.ids:
            window = text if len(text) <= L else text[:FIRST] + text[FIRST - L :]
            with torch.no_grad():
                assert int(model(torch.tensor([window]))[0, -1].argmax()) == token
            text.append(token)


def test_sinks_survive_being_put_back_and_cancelling() -> None:
    """A text that is read again is what it was: its prompt, then token by token."""
    model, asked, new = made(STREAMED["rope"]), prompts((3, 9, 14, 2)), 2 * L + 3
    engine, found = Engine(model, page=4, pages=40, chunk=5), {}
    s = Settings(max_new_tokens=new, overflow="sinks", temperature=0.7, samples=2)
    for i, prompt in enumerate(asked):
        engine.submit(Request(prompt, s, key=i))
    for step in range(400):
        found |= {e.request: e.done for e in engine.step() if e.done}
        if step % 11 == 5 and len(list(engine.scheduler.running())) > 1:
            with torch.inference_mode():
                engine.scheduler.preempt_last()
        if step == 15:
            found |= {e.request: e.done for e in engine.cancel(1)}
        if engine.idle:
            break
    for i, prompt in enumerate(asked):
        alone = Engine(model, layout="contiguous")
        alone.submit(Request(prompt, s, key=i))
        (want,) = run(alone).values()
        for got, r in zip(found[i], want, strict=True):
            assert got.ids == (r.ids if i != 1 else r.ids[: len(got.ids)])
    assert {r.finish for r in found[1]} == {"cancelled"}
    full(engine.pool)


def test_cache_of_sinks_refuses_what_it_cannot_do() -> None:
    model = made(STREAMED["rope"])
    cache = Sinks(model.cache_specs(), 1, window=L, dtype=torch.float64)
    with torch.no_grad():
        model(torch.zeros(1, L, dtype=torch.long), cache=cache)
        model(torch.zeros(1, 1, dtype=torch.long), cache=cache)
        with pytest.raises(UsageError, match="past 11 tokens this cache takes one at a time"):
            model(torch.zeros(1, 2, dtype=torch.long), cache=cache)
    with pytest.raises(UsageError, match="cannot be rewound"):
        cache.rewind(1)
    short = TransformerConfig(Tokens(VOCAB, Learned(4)), Tower(24, 1, GQA(3), MLP(20)), LM())
    with pytest.raises(UsageError, match="no room for 4 sinks; take overflow='crop'"):
        Engine(short.make()).submit(Request([1], Settings(max_new_tokens=9, overflow="sinks")))
