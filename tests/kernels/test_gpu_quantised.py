"""Models in fp8 and int4 for CUDA graphs, off the GPU: `runner="graph"` with the plain forms gives what the model with
the same weights brought back gives; tests/gpu/test_graphs.py holds graphs and kernels to the same."""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.decode.engine import Engine
from regard.errors import UsageError
from regard.fast.cuda import quantised as cuda_quantised
from regard.fast.cuda.quantised import PackedHead, quantised
from regard.kernels.packed import PackedLinear
from tests.kernels.plain import answer, served
from tests.kernels.test_gpu_graphs import FORMS, MECHANISMS, PAIRS, asked_of, build, requests, same
from tests.wide import wide


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models here are smaller than what is worth it."""
    monkeypatch.setattr(cuda_quantised, "SMALL", 0)


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


def test_prepared_model_says_what_is_packed_and_what_is_whole() -> None:
    said = quantised(build("mixtral", tied=False), "int4").explain()
    assert "its experts whole" in said and "LMHead" in said and "int4: 0.00 GiB" in said
    packed = quantised(build("gqa"), "fp8")
    engine = Engine(packed, runner="graph", rows=2)
    assert "it is the embedding's" in engine.explain() and "GraphAttention" in engine.explain()
    assert "fp8: 0.00 GiB, 0.00 as they were" in engine.explain()


def test_consumed_weights_are_given_up() -> None:
    model = build("qk_norm")
    before = sum(p.nbytes for p in model.parameters())
    packed = quantised(model, "int4", consume=True)
    kept = sum(x.nbytes for x in [*packed.parameters(), *packed.buffers()])
    assert kept < 0.4 * before
    gone = {name for name, p in model.named_parameters() if not p.numel()}
    assert "head.weight" in gone and len(gone) == 1 + 2 * 7


def test_words_that_prepare_does_not_know_are_errors_that_say_what_to_type(tmp_path: Path) -> None:
    model = build("gqa")
    with pytest.raises(
        UsageError, match=r'on a GPU, this one is on cpu.*regard.prepare\(model, "int8"\)'
    ):
        regard.prepare(model, "fp8")
    with pytest.raises(UsageError, match="choose one of fp32, bf16, int8, int4$"):
        regard.prepare(model, "fp4")
    packed = quantised(model, "fp8")
    with pytest.raises(UsageError, match="already prepared in fp8"):
        regard.prepare(packed, "int4")
    with pytest.raises(UsageError, match="save the original"):
        packed.save(tmp_path / "m")
    with pytest.raises(UsageError, match="recurrent"):
        quantised(regard.build("bahdanau", vocab=30, dim=16), "int4")


def test_products_that_are_small_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_quantised, "SMALL", 2**15)
    packed = quantised(build("qk_norm"), "int4")
    block = packed.tower.blocks[0]
    kinds = {n: type(m) for n, m in block.named_modules() if hasattr(m, "in_features")}
    # Of 128 inputs q, k and v have 256 outputs together.
    assert kinds["attention.wk"] is kinds["ffn.up"] is PackedLinear
    assert kinds["attention.wo"] is torch.nn.Linear
