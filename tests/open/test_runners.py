"""What a stranger adds runs on every runner: without a fast form by the generic part, in the same engine, right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.attention.multihead import GroupedQueryAttention
from regard.attention.protocol import Context
from regard.block import Block
from regard.decode.batch import Batch, Reading
from regard.decode.engine import Engine
from regard.decode.runners.rows import Forward, PlainBatch
from regard.decode.settings import Request, Settings
from regard.layers import FeedForward
from regard.parity.graph import why_unseen

PROMPTS = [[5, 9, 2, 7], [3, 3, 8, 1, 4, 6, 2, 9, 9], [11]]


def build(**changes: Any) -> Any:
    return stirred("llama", vocab=60, layers=2, dim=64, heads=4, kv_heads=2, max_len=128, **changes)


def stirred(preset: str, **changes: Any) -> Any:
    """Weights large enough that a mistake shows."""
    torch.manual_seed(0)
    model = regard.build(preset, **changes)
    for p in model.parameters():
        p.data.mul_(2.0 if p.dim() > 1 else 1.0)
    return model.eval()


class Squared(GroupedQueryAttention):
    """Softmax of the squares of scores: a subclass of ours that computes something else."""

    def core_attention(
        self, q: Tensor, kept: dict[str, Tensor], mask: Any, ctx: Context, bias: Any
    ) -> Tensor:
        return super().core_attention(q * q.sign().mean(-1, keepdim=True), kept, mask, ctx, bias)


class Sines(FeedForward):
    def project_up(self, x: Tensor) -> Tensor:
        return 8 * torch.sin(20 * super().project_up(x))


class Scaled(Block):
    """DeepNorm's residual: 1.5 x + f(norm x)."""

    def around(self, norm: nn.Module | None, part: nn.Module, x: Tensor, *ctx: Any) -> Tensor:
        assert norm is not None
        return part(norm(x), *ctx, 1.5 * x)


def become(model: Any, kind: type, other: type) -> Any:
    """The model with parts of one class as another one, which keeps their weights."""
    for module in model.modules():
        if type(module) is kind:
            module.__class__ = other
    return model


STRANGERS = {
    "mechanism": lambda: become(build(), GroupedQueryAttention, Squared),
    "feed-forward": lambda: become(build(), FeedForward, Sines),
    "block": lambda: become(build(), Block, Scaled),
    "no residual": lambda: build(residual=False),
}


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """By whole forward passes, without an engine or a cache."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.fixture(params=STRANGERS)
def stranger(request: pytest.FixtureRequest) -> Any:
    return STRANGERS[request.param]()


def served(model: Any, runner: str, count: int) -> list[list[int]]:
    model = regard.prepare(model) if runner == "native" else model
    engine = regard.Engine(model, runner="graph" if runner == "graph" else "torch")
    settings = regard.Settings(max_new_tokens=count, eos=())
    numbers = [engine.submit(regard.Request(prompt, settings)) for prompt in PROMPTS]
    done = {event.request: event.done for event in engine.run() if event.done is not None}
    return [done[number][0].ids for number in numbers]


@pytest.mark.parametrize("runner", ["torch", "native", "graph"])
def test_stranger_decodes_in_every_runner(stranger: Any, runner: str) -> None:
    """Steps that are recorded, prompts in chunks of one batch, texts of several lengths."""
    assert served(stranger, runner, 14) == [greedy(stranger, prompt, 14) for prompt in PROMPTS]


def test_stranger_differs_from_what_it_is_made_of(stranger: Any) -> None:
    assert served(stranger, "torch", 14) != served(build(), "torch", 14)


def test_what_runs_as_it_is_is_said(stranger: Any) -> None:
    said = regard.Engine(stranger, runner="graph").explain()
    assert "Generic" in said and ("as it is" in said or "over tensors" in said)
    assert "runs as it is there" in why_unseen(stranger) and why_unseen(build()) == ""


class Counting(PlainBatch):
    steps = 0

    def step(self) -> None:
        type(self).steps += bool(self.live)
        super().step()


class Greedy:
    """A runner of its own for greedy requests; what it does not take goes to those of the engine."""

    name = "greedy"

    def __init__(self, forward: Forward):
        self.forward = forward

    def explain(self) -> list[str]:
        return ["runner greedy: all that is not drawn"]

    def takes(self, request: Request, long: bool) -> bool:
        return not request.settings.temperature and not long

    def kind(self, request: Request, long: bool) -> None:
        return None

    def batch(self, kind: None, reading: Reading) -> Batch:
        return Counting(self.forward, reading)


@pytest.mark.parametrize("runner", ["torch", "graph"])
def test_an_added_runner_serves_what_it_takes(runner: str) -> None:
    model = build()
    drawn = Settings(max_new_tokens=6, temperature=1.0, seed=3)
    asked = [(ids, s) for ids in PROMPTS for s in (Settings(max_new_tokens=6), drawn)]

    def answers(engine: Engine) -> list[list[int]]:
        for key, (ids, settings) in enumerate(asked):
            engine.submit(Request(list(ids), settings, key=key))
        found = {e.request: e.done[0].ids for e in engine.run() if e.done is not None}
        return [found[i] for i in range(len(asked))]

    want, engine = answers(Engine(model, runner=runner)), Engine(model, runner=runner)
    forward = engine.runners[-1].forward  # type: ignore[attr-defined]
    engine.runners.insert(0, Greedy(forward))
    Counting.steps = 0
    assert answers(engine) == want
    assert Counting.steps >= 5 and engine.explain().startswith("runner greedy")


@pytest.mark.parametrize("runner", ["torch", "native", "graph"])
def test_bias_by_more_than_distance_is_that_of_the_plain_model(runner: str) -> None:
    """Kernels are given a bias by distance; where it is rounded by the key's position they are not asked."""
    parts = {"attention": regard.GQA(16, 4), "relative": regard.Alibi(16, 6.0, coarse=True)}
    model = stirred("llama", vocab=60, layers=2, dim=64, max_len=128, **parts)
    prompt = torch.randint(3, 60, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    prepared = regard.prepare(model) if runner == "native" else model
    engine = Engine(prepared, runner="graph" if runner == "graph" else "torch")
    engine.submit(Request(prompt, Settings(max_new_tokens=8, eos=())))
    (done,) = [event.done for event in engine.run() if event.done is not None]
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(8):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert done[0].ids == ids[100:]


@torch.inference_mode()
def test_layer_behind_the_tower_is_that_of_every_runner() -> None:
    """A narrow table of words, a wide tower, and a narrow answer of it, step by step; a graph says that it has none."""
    sizes = {"layers": 2, "dim": 64, "heads": 4, "ffn_dim": 48, "max_len": 64}
    model = stirred("opt-350m", vocab=60, width=24, out_dim=24, **sizes)
    assert model.config.embedding.widened_first and model.tower.out.bias is None
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    for fast in (model, regard.prepare(model)):
        cache = fast.cache(2)
        steps = torch.cat([fast(part, cache=cache) for part in ids.split([3] + [1] * 6, 1)], 1)
        torch.testing.assert_close(steps, model(ids), atol=1e-4, rtol=1e-4)
    with pytest.raises(regard.UsageError, match="a layer behind its last norm"):
        Engine(model, runner="graph")
