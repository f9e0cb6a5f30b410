"""A part of ours, however small, that somebody replaces by a class of their own computes what that class says, in every
runner: a fast form that reads its weights does not stand for it. Walked over all parts of models."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.fast.cuda.residual import rms
from regard.fast.cuda.table import decoder, why_not
from regard.layers import RMSNorm
from tests.wide import wide

TINY: Any = {"vocab": 60, "layers": 1, "dim": 64, "heads": 4}
PRESETS: dict[str, dict[str, Any]] = {
    "llama": {"kv_heads": 2},
    "gpt2": {},
    "qwen3-0.6b": {"kv_heads": 2},
    "mixtral-8x7b": {"kv_heads": 2},
    "deepseek-v3": {},
    "vaswani-base": {"ffn_dim": 96},
    "t5-small": {"ffn_dim": 96},
}
SOURCE, NEW = torch.tensor([5, 7, 3, 2]), 4
# These hold parts; or, of MLA, a weight that the absorbed form multiplies by, whatever calls it; or move nothing here.
HOLDERS = (nn.ModuleList, nn.Dropout)
LEFT_OUT = ("attention.w_ukv", "ffn.router", "decoder.relative")


@functools.cache
def built(name: str) -> Any:
    torch.manual_seed(0)
    model = regard.build(name, **TINY, **PRESETS[name])
    for p in model.parameters():
        p.data.mul_(3.0 if p.dim() > 1 else 1.0)
    return model.eval()


def parts(name: str) -> list[tuple[str, str]]:
    return [
        (name, path)
        for path, module in built(name).named_modules()
        if path and not isinstance(module, HOLDERS) and not path.endswith(LEFT_OUT)
    ]


def other(kind: type[nn.Module]) -> type[nn.Module]:
    """A class that halves what is positive."""

    def forward(self: nn.Module, *given: Any, **more: Any) -> Any:
        y = kind.forward(self, *given, **more)
        return torch.where(y > 0, 0.5 * y, y) if isinstance(y, Tensor) else y

    return type(f"Other{kind.__name__}", (kind,), {"forward": forward})


def best(model: Any) -> list[float]:
    """Log probabilities of the best tokens, by whole forward passes."""
    given = {"source": SOURCE[None]} if model.reads_source else {}
    ids, found = [0] if model.reads_source else [5, 9, 2], list[float]()
    with torch.inference_mode():
        for _ in range(NEW):
            logp = model(torch.tensor([ids]), **given)[0, -1].log_softmax(-1)
            ids.append(int(logp.argmax()))
            found.append(float(logp.max()))
    return found


def served(model: Any, runner: str) -> list[float]:
    given = {"source": SOURCE} if model.reads_source else {}
    ids = [0] if model.reads_source else [5, 9, 2]
    model = regard.prepare(model) if runner == "native" else model
    engine = regard.Engine(model, runner="graph" if runner == "graph" else "torch")
    settings = regard.Settings(max_new_tokens=NEW, min_new_tokens=NEW, eos=())
    engine.submit(regard.Request(ids, settings, **given))
    (result,) = next(event.done for event in engine.run() if event.done is not None)
    assert result.error is None
    return result.logprobs


CASES = [case for name in PRESETS for case in parts(name)]
KEEP = [
    case for name in ("gpt2", "vaswani-base") for case in parts(name) if "encoder" not in case[1]
]


@pytest.mark.parametrize("name, path", wide(CASES, keep=KEEP))
def test_replaced_part_is_computed_in_every_runner(name: str, path: str) -> None:
    model = copy.deepcopy(built(name))
    part = model.get_submodule(path)
    part.__class__ = other(type(part))
    wanted = best(model)
    assert wanted != pytest.approx(best(built(name)), abs=1e-3)
    for runner in ("torch", "native"):
        assert served(model, runner) == pytest.approx(wanted, abs=1e-3), runner
    # What has no step of its own in a graph is said by name; `regard.generate` takes another runner.
    if why := why_not(model):
        assert type(part).__name__ in why
        with pytest.raises(regard.UsageError, match="no CUDA graph"):
            served(model, "graph")
    else:
        assert served(model, "graph") == pytest.approx(wanted, abs=1e-3)


def test_models_as_they_are_have_a_graph() -> None:
    for name in PRESETS:
        assert served(built(name), "graph") == pytest.approx(best(built(name)), abs=1e-3)


def test_kernels_take_our_rms_norms_and_no_stranger_s() -> None:
    """Those of a graph's parts are of a class made of ours; a kernel that gets none for them does not norm."""
    for name in ("llama", "deepseek-v3"):
        norms = [m for m in decoder(built(name), False).modules() if isinstance(m, RMSNorm)]
        assert norms and all(rms(norm) is not None for norm in norms)
        norms[0].__class__ = other(RMSNorm)
        assert rms(norms[0]) is None
