"""The activations that a plan measures on fake tensors are those that autograd saves on the GPU."""

from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from regard.presets import build
from regard.training.memory import Pass, activations
from tests.train.test_plan import MODELS

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device: there is none here"
)
NAMES = ("gpt2", "llama", "qwen3", "sinks", "softcap", "mla", "experts", "bert", "vaswani", "t5")


@pytest.mark.parametrize("name", NAMES)
def test_activations_are_what_autograd_saves(name: str) -> None:
    preset, settings = MODELS[name]
    model = build(preset, **settings).train().cuda()
    ids, run = torch.zeros(3, 48, dtype=torch.long, device="cuda"), Pass(3, 48, device="cuda")
    more = {}
    if name in ("vaswani", "t5"):
        more, run = {"source": ids[:, :32]}, replace(run, source=32)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: list[torch.Tensor] = []
    with saved_tensors_hooks(lambda x: (saved.append(x), x)[1], lambda x: x):
        model.hidden(ids, **more)
    sizes = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved}
    real = sum(n for place, n in sizes.items() if place not in parameters)
    assert activations(model.config, run).total() == pytest.approx(real, rel=0.05)
