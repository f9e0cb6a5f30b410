"""What only a GPU can show: the same numbers there as on the CPU, torch's fused kernels, real float8. Skipped
without one."""

import pytest
import torch

import regard
from regard.attention.core import BACKENDS, attend
from regard.attention.sparse import dots_exact, fp8_dots, packed_fp8, to_fp8
from regard.mask import Causal, Documents, Span, Visible
from regard.models import Tokens, TransformerConfig

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device: there is none here"
)

ROPE = regard.Rope()
MECHANISMS = {
    "gqa": regard.GQA(8, 2, 32, rope=ROPE),
    "window": regard.GQA(8, 2, 32, rope=ROPE, window=9),
    "mla": regard.MLA(4, 64, 32, 16, rope=ROPE),
    "dsa_mla": regard.DSA(regard.MLA(4, 64, 32, 16, rope=ROPE), 4, 32, 12, rope_dim=16),
    "dsa_gqa": regard.DSA(regard.GQA(8, 2, 32, rope=ROPE), 4, 32, 12, rope_dim=16),
}
each = pytest.mark.parametrize("name", MECHANISMS)


def build(name: str) -> regard.Model:
    tower = regard.Tower(128, 2, MECHANISMS[name], regard.MLP(256, "silu", gated=True, bias=False))
    return TransformerConfig(Tokens(97), tower, regard.LM(), max_len=128).make().eval()


@each
def test_logits_on_cuda_equal_cpu(name: str) -> None:
    model, ids = build(name), torch.randint(0, 97, (2, 40))
    with torch.no_grad():
        want = model(ids)
        got = model.cuda()(ids.cuda()).cpu()
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)  # other summation orders, no TF32


@each
@pytest.mark.parametrize("backend", BACKENDS)
def test_backend_on_cuda_equals_reference(name: str, backend: str) -> None:
    model, ids = build(name).cuda(), torch.randint(0, 97, (2, 40)).cuda()
    with torch.no_grad():
        want = model(ids, [40, 23], backend="reference")
        got = model(ids, [40, 23], backend=backend)
    torch.testing.assert_close(got[1, :23], want[1, :23], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(got[0], want[0], rtol=1e-3, atol=1e-4)


def test_no_plan_is_made_for_lengths_that_change() -> None:
    q = torch.randn(1, 4, 33, 64, device="cuda", dtype=torch.bfloat16)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with torch.no_grad(), torch.profiler.profile() as seen:
        attend(q, q, q, Visible(Causal(), *[Span.run(0, 33, "cuda")] * 2), backend="sdpa")
    names = " ".join(event.key for event in seen.key_averages())
    assert "scaled_dot_product" in names and "cudnn" not in names
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


@each
def test_cached_decode_on_cuda_equals_full_forward(name: str) -> None:
    model, ids = build(name).cuda(), torch.randint(0, 97, (2, 40)).cuda()
    with torch.no_grad():
        cache = model.cache(2, "paged", page=8)
        parts = [model(ids[:, :30], cache=cache)] + [
            model(ids[:, i : i + 1], cache=cache) for i in range(30, 40)
        ]
        torch.testing.assert_close(torch.cat(parts, 1), model(ids), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_masks_with_empty_rows_give_no_nan_on_cuda(backend: str, dtype: torch.dtype) -> None:
    q, k, v = (
        torch.randn(4, 33, 4, 32, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)
    )
    mask = torch.rand(4, 1, 33, 33, device="cuda") < 0.1
    mask[:, :, ::5] = False
    out = attend(q, k, v, mask, backend=backend)
    assert (out[:, ::5] == 0).all()
    out.float().square().sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v))


def test_float8_products_on_the_tensor_cores_equal_the_emulation() -> None:
    q, k = torch.randn(2, 24, 4, 64, device="cuda"), torch.randn(2, 48, 64, device="cuda")
    (q8, qs), (k8, ks) = to_fp8(q), to_fp8(k)
    want = dots_exact(q8, k8) * qs * ks[:, None, None, :, 0]
    torch.testing.assert_close(
        fp8_dots(q, packed_fp8(k)), want, rtol=2e-3, atol=2e-3
    )  # the cores keep fewer bits of the sum


def test_float8_index_chooses_nearly_the_same_keys() -> None:
    q, k = torch.randn(1, 64, 8, 128, device="cuda"), torch.randn(1, 4096, 128, device="cuda")
    w = torch.randn(1, 64, 8, device="cuda")
    from regard.attention.sparse import choose, index_scores

    exact = choose(index_scores(dots_exact(q, k), w), 256)
    rough = choose(index_scores(fp8_dots(q, packed_fp8(k)), w), 256)
    shared = torch.stack(
        [torch.isin(a, b).float().mean() for a, b in zip(exact[0], rough[0], strict=True)]
    )
    assert shared.mean() > 0.9


@pytest.mark.parametrize("causal", [True, False])
def test_attention_by_document_equals_the_mask(
    causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    doc = torch.sort(torch.randint(0, 5, (2, 300), device="cuda"), 1)[0]
    doc[:, 280:] = -1
    rule = Causal() & Documents(doc) if causal else Documents(doc)
    span = Span.run(0, 300, "cuda")
    qkv = [torch.randn(2, 300, n, 64, device="cuda", dtype=torch.bfloat16) for n in (6, 2, 2)]
    found = []
    for backend in ("sdpa", "reference"):
        leaves = [x.clone().requires_grad_() for x in qkv]
        out = attend(*leaves, Visible(rule, span, span), backend=backend)
        out.float().square().sum().backward()
        found.append([out, *(x.grad for x in leaves)])
    # Both round to bf16; a key of another document would change outputs by as much as they are.
    for ours, plain in zip(*found):
        gap = (ours - plain).float().norm() / plain.float().norm()
        assert gap < 1e-2, f"{gap:.1e}"
    monkeypatch.setattr(Visible, "tensor", None)  # no mask of t x s is made
    attend(*qkv, Visible(rule, span, span))
