"""Training and evaluation under autocast are one model: gradients decide neither types nor numbers."""

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.block import Block
from regard.moe import MixtureOfExperts
from regard.presets import PRESETS
from tests.tiny import answer, tiny


def run(model: regard.Model, gradients: bool) -> tuple[Tensor, list[torch.dtype]]:
    """What the model answers under bf16 autocast, and the types of the stream after each block."""
    types: list[torch.dtype] = []

    def note(module: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
        types.append(out.dtype)

    hooks = [m.register_forward_hook(note) for m in model.modules() if isinstance(m, Block)]
    with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(gradients):
        out = answer(model).detach().float()
    for hook in hooks:
        hook.remove()
    return out, types


@pytest.mark.parametrize("name", PRESETS)
def test_autocast_is_the_same_with_and_without_gradients(name: str) -> None:
    """The stream has one type; what is left are two roundings, each as far off as bf16 is: on the mean, or, where
    tokens are routed, at the median token, for one that rounding sends to another expert is far off."""
    model = tiny(name)
    (trained, types), (measured, others) = run(model, True), run(model, False)
    assert types == others
    with torch.no_grad():
        exact = answer(model)
    routed = any(isinstance(m, MixtureOfExperts) for m in model.modules())
    typical = torch.median if routed else torch.mean
    off, apart = (typical((trained - x).square().mean(-1)) for x in (exact, measured))
    assert apart <= 2 * off
