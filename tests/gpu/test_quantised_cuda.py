"""Weights in fp8 and int4 in CUDA graphs: the kernels with their inline assembly against what comes back, and models
against those with the same weights brought back. Skipped without a GPU."""

import pytest
import torch
from torch import Tensor

import regard
from regard.decode.engine import Engine
from regard.fast.cuda import quantised as cuda_quantised
from regard.kernels.packed import GROUPS, PackedLinear, unpacked
from regard.kernels.rounded import pack
from regard.kernels.triton import linear as gpu_linear
from regard.kernels.triton import measured as gpu_measured
from regard.kernels.triton import packed as gpu_packed
from regard.kernels.triton import wide as gpu_wide
from regard.models import Tokens, TransformerConfig
from tests.gpu.test_graphs import MECHANISMS, build, requests
from tests.kernels.plain import FEW, answer, ties
from tests.kernels.test_gpu_quantised import brought_back

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device: there is none here"
)
FORMS = [("fp8", None), *(("int4", group) for group in GROUPS)]
each_form = pytest.mark.parametrize("kind, group", FORMS, ids=str)


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of ours, even where torch's are faster, and models smaller than what is worth it."""
    monkeypatch.setattr(gpu_measured, "ON", False)
    monkeypatch.setattr(cuda_quantised, "SMALL", 0)


def near(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert not got.isnan().any()
    error = ((got.double() - want.double()).norm() / want.double().norm()).item()
    assert error < (1e-2 if dtype == torch.bfloat16 else 2e-3 if dtype == torch.float16 else 1e-5)


@each_form
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("m, k, n", [(1, 4096, 1000), (2, 384, 100), (4, 1152, 64), (1, 12288, 64)])
def test_few_rows_of_packed_weights(
    m: int, k: int, n: int, many: bool, dtype: torch.dtype, kind: str, group: int | None
) -> None:
    torch.manual_seed(0)
    x, g = torch.randn(m, k).cuda().to(dtype), (torch.rand(k) + 0.5).cuda().to(dtype)
    for gated in (False, True):
        w = pack((torch.randn(n * (1 + gated), k) / k**0.5).cuda().to(dtype), kind, group=group)
        act, bias = "silu" if gated else "", torch.randn(len(w)).cuda().to(dtype)
        residual = torch.randn(m, n).cuda().to(dtype)
        blocks = gpu_linear.packed_shape(w, m, gated, many)
        more = {"act": act, "gated": gated}
        got = gpu_linear.fused(
            x, w, bias, norm=(g, 1e-5, 0.0), residual=residual, blocks=blocks, **more
        )  # type: ignore[arg-type]
        wide, whole = [y.float() for y in (x, bias, residual)], unpacked(w, torch.float32)
        norm = (g.float(), 1e-5, 0.0)
        want = gpu_linear.reference(wide[0], whole, wide[1], norm=norm, residual=wide[2], **more)  # type: ignore[arg-type]
        near(got, want, dtype)


@each_form
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("m", [5, 16, 64, 100, 256])
def test_more_rows_of_packed_weights(
    m: int, dtype: torch.dtype, kind: str, group: int | None
) -> None:
    torch.manual_seed(0)
    k, n = 1024, 1000
    x, full = torch.randn(m, k).cuda().to(dtype), (torch.randn(2 * n, k) / k**0.5).cuda().to(dtype)
    w = pack(full, kind, group=group)
    assert torch.equal(gpu_packed.dense(w, dtype), unpacked(w, dtype))
    whole = unpacked(w, torch.float32)
    for split in (True, False):
        if dtype != torch.float32 or m <= 64:  # shared memory
            near(gpu_wide.parts(x, w, split).sum(0), x.float() @ whole.T, dtype)
    if dtype != torch.float32 or m <= 64:
        got = gpu_wide.parts(x, w, False, act="silu", gated=True)[0]
        near(got, gpu_wide.gated(x.float(), whole, None, "silu", fast=False), dtype)


@pytest.mark.parametrize("kind", ["fp8", "int4"])
@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("name", MECHANISMS)
def test_graph_gives_the_tokens_of_weights_brought_back(name: str, rows: int, kind: str) -> None:
    model, asked = build(name), requests()
    packed = regard.prepare(model, kind)
    assert sum(isinstance(m, PackedLinear) for m in packed.modules()) >= 8
    engine = Engine(packed, rows=rows)
    assert engine.graph is not None, engine.explain()
    assert ties(brought_back(model, packed), asked, answer(packed, asked, rows)) <= FEW


def test_packed_model_takes_less_memory_and_says_so() -> None:
    ffn, norm = regard.MLP(4096, "silu", gated=True, bias=False), regard.Norm(1e-5, rms=True)
    attention = regard.GQA(16, 4, 64, rope=regard.Rope())
    head = regard.LM(tied=False)
    config = TransformerConfig(
        Tokens(1024), regard.Tower(1024, 4, attention, ffn, norm=norm), head, 512
    )
    for kind, share in (("fp8", 0.55), ("int4", 0.32)):
        model = regard.build(config, device="cuda", dtype=torch.bfloat16)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        packed = regard.prepare(model, kind, consume=True)
        del model
        own = sum(p.nbytes for p in packed.parameters()) + sum(b.nbytes for b in packed.buffers())
        freed = before - torch.cuda.memory_allocated()
        assert own < share * (own + freed) and freed > 0
        (result,) = regard.generate(packed, [[1, 2, 3]], max_new_tokens=8)
        assert len(result.ids) == 8
        engine = Engine(packed, rows=1)
        assert f"{kind}: 0.0" in engine.explain() and "LMHead" in engine.explain()
        del packed, engine


def test_fp8_of_a_model_on_a_gpu_is_no_model_to_train_or_save(tmp_path) -> None:  # type: ignore[no-untyped-def]
    packed = regard.prepare(build("gqa"), "fp8")
    with pytest.raises(regard.UsageError, match="save the original"):
        packed.save(tmp_path / "m")
    with pytest.raises(regard.UsageError, match="cannot be trained"):
        packed.train()
