"""What linear layers read is found for every tower, and the model stays as it was."""

import pytest
import torch
from torch import nn

from regard.fast.cpu import prepare
from regard.fast.inputs import ROWS, TOKENS, read_by
from regard.kernels.linear import turned
from regard.models.adapt import LoRA, LowRank, inject
from regard.models.inputs import random_inputs
from tests.laws.mechanisms import TOWERS, decoder
from tests.tiny import tiny


@pytest.mark.parametrize("name", TOWERS)
def test_inputs_of_every_layer_are_found(name: str) -> None:
    model = decoder(name).float().eval()
    met: dict[int, torch.Tensor] = {}

    def note(layer: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        h = turned(given[0]).flatten(0, -3)
        met[id(layer)] = met.get(id(layer), 0) + torch.einsum("nti,ntj->tij", h, h)

    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    with torch.no_grad():
        model(random_inputs(model, ROWS, TOKENS)[0])
    for hook in hooks:
        hook.remove()
    found = read_by(model)
    assert found.keys() >= met.keys() and id(model.head) in found
    for key, moments in met.items():
        torch.testing.assert_close(found[key], moments, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["vaswani-base", "t5-small", "bart-base", "vit-small", "bert-base"]
)
def test_encoders_decoders_and_images_are_read_too(name: str) -> None:
    model = tiny(name).eval()
    state = torch.get_rng_state()
    found = read_by(model.train())
    layers = [m for n, m in model.named_modules() if isinstance(m, nn.Linear) and "blocks" in n]
    assert layers and {id(m) for m in layers} <= found.keys()
    assert all(m.training for m in model.modules())
    assert torch.equal(torch.get_rng_state(), state)


def test_what_lora_adds_reads_what_its_layer_reads() -> None:
    model = decoder("gqa_rope").float().eval()
    plain = read_by(model)
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    bases = [model.get_submodule(n) for n in names]
    inject(model, names, LoRA(4, 8.0))
    found = read_by(model)
    for name, base in zip(names, bases, strict=True):
        layer = model.get_submodule(name)
        assert isinstance(layer, LowRank)
        torch.testing.assert_close(found[id(layer)], plain[id(base)])


@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf])
def test_model_whose_numbers_are_not_finite_is_still_packed(spoilt: float) -> None:
    model = decoder("gqa_rope").float().eval()
    with torch.no_grad():
        model.tower.blocks[0].attention.wv.weight[0, 0] = spoilt
    assert not all(m.isfinite().all() for m in read_by(model).values())
    logits = prepare(model, "int8")(torch.tensor([[1, 2, 3]]))
    assert logits.shape[:2] == (1, 3) and not logits.isfinite().all()
