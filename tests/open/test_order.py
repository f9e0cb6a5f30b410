"""A stranger changes where norms stand and what they do to the stream: a row of ORDERS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.block import ORDERS, Order, after
from regard.mask import Span
from tests.open.stranger import added, decodes, home, promised, stands, tiny

ALPHA = 1.7


def deepnorm(norm: Any, part: nn.Module, x: Tensor, stream: Tensor, *ctx: Any) -> Tensor:
    """norm(alpha x + f(x)) (Wang et al. 2022)."""
    return norm(part(x, *ctx, ALPHA * stream))


def damped(norm: Any, part: nn.Module, x: Tensor, stream: Tensor, *ctx: Any) -> Tensor:
    return part(norm(x), *ctx, 0.5 * stream)


ADDED = {
    "deepnorm": Order(deepnorm),
    "damped": Order(damped),
    "damped inner": Order(damped, outer=False, added=True),
    "damped parallel": Order(damped, parallel=True),
    # Ours in another company.
    "both norms after": Order(after, added=True),
    "added parallel": Order(added=True, parallel=True),
}


@pytest.fixture(params=ADDED)
def order(request: pytest.FixtureRequest) -> Iterator[str]:
    with added(ORDERS, request.param, ADDED[request.param]):
        yield request.param


def test_added_order_decodes(order: str) -> None:
    decodes(tiny(order=order))


MLA = regard.MLA(4, 16, rope_dim=4, rope=regard.Rope())
PARTS: dict[str, dict[str, Any]] = {
    "experts": {"ffn": regard.MoE(4, 2, 48)},
    "latents": {"attention": MLA},
    "chosen keys": {"attention": regard.DSA(MLA, 2, 8, 4, rope_dim=4)},
    "delta rule": {"attention": regard.DeltaRule(2, 4, 16, 16)},
}


@pytest.mark.parametrize("parts", PARTS)
def test_added_order_decodes_around_every_part(parts: str) -> None:
    with added(ORDERS, "damped", ADDED["damped"]):
        decodes(tiny(order="damped", **PARTS[parts]))


def test_added_order_trains_decodes_and_comes_back(tmp_path: Path) -> None:
    with added(ORDERS, "deepnorm", ADDED["deepnorm"]):
        model = stands(tmp_path, order="deepnorm", final_norm=False)
        assert model.config.tower.order == "deepnorm"


def test_added_order_computes_its_formula() -> None:
    with added(ORDERS, "deepnorm", ADDED["deepnorm"]):
        model = tiny(order="deepnorm", layers=1, final_norm=False)
        (block,) = model.tower.blocks
        x, ctx = torch.randn(1, 3, 32), regard.Context(Span.run(0, 3), regard.Causal())
        y = block(x, ctx)
    x = block.norm1(ALPHA * x + block.attention(x, ctx))
    torch.testing.assert_close(y, block.norm3(ALPHA * x + block.ffn(x)))


def test_unknown_order_is_refused_with_those_there_are(order: str) -> None:
    with pytest.raises(
        regard.UsageError,
        match=rf"order = 'postt' is unknown; did you mean 'post'. known: .*{order}",
    ):
        tiny(order="postt")


def test_order_costs_as_many_files_as_the_architecture_says() -> None:
    assert home(ORDERS) == "regard/block.py"
    assert len({home(ORDERS)}) == promised("change the residual order")
