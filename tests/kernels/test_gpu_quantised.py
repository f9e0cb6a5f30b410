"""Models in fp8 and int4 for CUDA graphs, off the GPU: `runner="graph"` with the plain forms gives what the model with
the same weights brought back gives; tests/gpu/test_graphs.py holds graphs and kernels to the same."""

import copy
import itertools
from typing import Any

import pytest
import torch

import regard
from regard.decode.engine import Engine
from regard.fast.cuda.quantised import PackedHead, quantised
from regard.kernels.packed import PackedLinear
from tests.kernels.plain import answer, served
from tests.kernels.test_gpu_graphs import FORMS, MECHANISMS, PAIRS, asked_of, build, requests, same
from tests.wide import wide


def brought_back(model: regard.Model, packed: Any) -> Any:
    """The model with the weights that the packed one computes with."""
    plain = copy.deepcopy(model)
    with torch.no_grad():
        for name, m in packed.named_modules():
            if isinstance(m, PackedHead):
                plain.get_submodule(name).weight.copy_(m.held.weight)
            elif isinstance(m, PackedLinear) and not name.endswith(".held"):
                plain.get_submodule(name).weight.copy_(m.weight)
    return plain


KINDS = ("fp8", "int4")
KEEP = [("gqa", "fp8"), ("qk_norm", "int4"), ("mla_query", "fp8"), ("dsa", "int4")]


@pytest.mark.parametrize(
    "name, kind",
    wide(
        itertools.product([*MECHANISMS, *FORMS, "gpt2", "alibi", *PAIRS], KINDS),
        keep=[*KEEP, ("qwen3_next", "int4"), ("t5-small", "fp8")],
    ),
)
def test_graphs_in_few_bits_give_the_tokens_of_weights_brought_back(name: str, kind: str) -> None:
    model = build(name)
    # Sums of another order choose other keys, but for float64.
    model = model.double() if "dsa" in name else model
    packed = quantised(model, kind)
    assert sum(isinstance(m, PackedLinear) for m in packed.modules()) >= 4 or "delta" in name
    asked = [asked_of(name, r) for r in requests()]
    want = served(Engine(brought_back(model, packed), runner="torch", rows=4), asked)
    same(answer(packed, asked, 3), want)
    same(answer(packed, asked, 7, chunk=24, page=8), want)
    same(served(Engine(packed, runner="torch", rows=4), asked), want)
