"""Options that no fast part knows: every runner computes them all the same, by the plain part, and says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import regard
from regard.fast.invariant import invariant
from regard.parity.graph import why_unseen
from tests.open.stranger import PROMPTS, decodes, tiny

LATE = {"tower.attention.qk_norm": 1e-6, "tower.attention.qk_norm_last": True}
XIELU = {"tower.ffn.activation": "xielu", "tower.ffn.gated": False}
# Settings, and the same without the option.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "norm after turning": (LATE, {**LATE, "tower.attention.qk_norm_last": False}),
    "xielu": (XIELU, {**XIELU, "tower.ffn.activation": "silu"}),
}


def made(settings: dict[str, Any]) -> Any:
    """Weights of norms and of activations differ, too."""
    model = tiny(**settings)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn(p.shape, generator=generator))
    return model


@pytest.fixture(params=OPTIONS)
def option(request: pytest.FixtureRequest) -> Any:
    return made(OPTIONS[request.param][0])


def test_option_is_computed_by_every_runner(option: Any) -> None:
    decodes(option)


@pytest.mark.parametrize("name", OPTIONS)
@torch.inference_mode()
def test_option_changes_what_the_model_says(name: str) -> None:
    """Or the test above would say nothing."""
    ids = torch.tensor([PROMPTS[1]])
    with_it, without = (made(settings)(ids) for settings in OPTIONS[name])
    assert (with_it - without).abs().max() > 0.1


@torch.inference_mode()
def test_option_is_computed_from_packed_weights(option: Any) -> None:
    ids = torch.tensor([PROMPTS[1]])
    wanted = option(ids)
    for precision, off in (("fp32", 1e-4), ("int8", 0.1)):
        got = regard.prepare(option, precision)(ids)
        assert (got - wanted).norm() < off * wanted.norm(), precision


@torch.inference_mode()
def test_option_is_computed_alike_in_any_company(option: Any) -> None:
    steady = invariant(option)
    ids = torch.tensor([[5, 9, 2, 7, 3, 1, 8], [3, 3, 8, 1, 4, 6, 2]])
    both = steady(ids)
    torch.testing.assert_close(both, option(ids), atol=1e-4, rtol=1e-4)
    assert torch.equal(steady(ids[1:]), both[1:])


def test_option_is_trained_in_one_product(option: Any) -> None:
    from regard.fast.train import joined

    ids = torch.tensor([PROMPTS[1]])
    wanted = option(ids)
    torch.testing.assert_close(joined(option)(ids), wanted, atol=1e-5, rtol=1e-5)


def test_option_that_runs_as_it_is_is_said(option: Any) -> None:
    assert "runs as it is there" in why_unseen(option)
    assert "Generic" in regard.Engine(option, runner="graph").explain()
