"""Options of our own parts that no fast form knows: whoever runs the model computes them, and says why it is slower."""

from typing import Any

import pytest
import torch

import regard
from regard.attention import GQA
from regard.block import PerLayer, Tower
from regard.fast.cuda.table import why_not
from regard.fast.invariant import invariant
from regard.fast.train import checkpointed, joined
from regard.layers import LM, MLP, Norm
from regard.models import Tokens, TransformerConfig
from regard.moe import MoE
from regard.position import Proportional, Rope
from tests.open.stranger import PROMPTS, greedy

_GROUPED = GQA(4, 2, head_dim=8, rope=Rope())
_FFN = MLP(24, "silu", gated=True, bias=False)
_TIED = GQA(4, 2, head_dim=8, rope=Rope(), qk_norm=1e-6, value_is_key=True)
_NORMED = MoE(4, 2, 12, shared=1, normed=1e-6, gains=True)
OPTIONS: dict[str, dict[str, Any]] = {
    "value is key": {"attention": _TIED},
    "values are normed": {"attention": GQA(4, 2, head_dim=8, rope=Rope(), v_norm=1e-6)},
    "some pairs turn": {"attention": GQA(4, rope=Rope(scaling=Proportional(0.5)))},
    "gained": {"gained": True},
    "experts with norms": {"ffn": _NORMED},
    "experts with gains": {"ffn": MoE(4, 2, 12, gains=True)},
    "all of these": {"attention": _TIED, "ffn": _NORMED, "gained": True, "order": "sandwich"},
}
# They have no graph.
APART: dict[str, dict[str, Any]] = {
    "keys of others": {"borrowing": 1},
    "per layer": {"per_layer": PerLayer(6, 60)},
}


def build(name: str) -> Any:
    torch.manual_seed(0)
    more = {"attention": _GROUPED, "ffn": _FFN, **(OPTIONS | APART)[name]}
    tower = Tower(32, 2, norm=Norm(1e-6, rms=True), **more)
    model = TransformerConfig(Tokens(60), tower, LM(tied=False), max_len=64).make().eval()
    for p in model.parameters():
        p.data = torch.randn_like(p) * 0.2 + (1 if p.dim() == 1 else 0)
    return model


def served(model: Any, runner: str, count: int = 12) -> list[list[int]]:
    model = regard.prepare(model) if runner == "native" else model
    engine = regard.Engine(model, runner="graph" if runner == "graph" else "torch")
    settings = regard.Settings(max_new_tokens=count, eos=())
    numbers = [engine.submit(regard.Request(prompt, settings)) for prompt in PROMPTS]
    done = {event.request: event.done for event in engine.run() if event.done is not None}
    return [done[number][0].ids for number in numbers]


@pytest.mark.parametrize("runner", ["torch", "native", "graph"])
@pytest.mark.parametrize("name", [*OPTIONS, *APART])
def test_option_decodes_in_every_runner(name: str, runner: str) -> None:
    model = build(name)
    if runner == "graph" and name in APART:
        assert "its layers read" in why_not(model)
        with pytest.raises(regard.UsageError, match="no CUDA graph: its layers read"):
            served(model, runner)
    else:
        assert served(model, runner) == [greedy(model, prompt, 12) for prompt in PROMPTS]


@pytest.mark.parametrize("name", [*OPTIONS, *APART])
@torch.inference_mode()
def test_option_is_computed_by_packed_weights(name: str) -> None:
    """Ragged rows too; what int8 rounds may choose other experts."""
    model, ids = build(name), torch.tensor([[5, 9, 2, 7, 1], [3, 8, 11, 4, 6]])
    want, real = model(ids, [5, 3]), torch.arange(5) < torch.tensor([[5], [3]])
    for precision, bound in (("fp32", 1e-5), ("int8", 0.1)):
        got = regard.prepare(model, precision)(ids, [5, 3])
        off = (got - want)[real].abs().max() / want[real].abs().max()
        assert off < bound


@pytest.mark.parametrize("name", [*OPTIONS, *APART])
@torch.inference_mode()
def test_option_has_its_bits_in_any_company(name: str) -> None:
    model, ids = invariant(build(name)), torch.tensor([[5, 9, 2, 7, 1], [3, 8, 11, 4, 6]])
    whole = model(ids, backend="ordered")
    assert all(
        torch.equal(model(row[None], backend="ordered"), x[None])
        for row, x in zip(ids, whole, strict=True)
    )


@pytest.mark.parametrize("name", [*OPTIONS, *APART])
def test_option_trains_in_joined_products(name: str) -> None:
    plain, fast, ids = (
        build(name),
        checkpointed(joined(build(name))),
        torch.tensor([[5, 9, 2, 7, 1]]),
    )
    for model in (plain, fast):
        model.train()(ids).square().mean().backward()
    pairs = zip(plain.named_parameters(), fast.parameters(), strict=True)
    for (n, a), b in pairs:
        assert (a.grad is None) == (not a.requires_grad), n
        if a.grad is not None:
            torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-6, msg=n)
