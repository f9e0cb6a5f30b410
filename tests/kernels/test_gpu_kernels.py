"""The GPU kernels against their plain forms, by Triton's interpreter: TRITON_INTERPRET=1 pytest tests/kernels."""

import copy
import os

import pytest
import torch
from torch import Tensor

from regard.attention import attend
from regard.kernels import gpu_attention, gpu_latent, gpu_linear, gpu_sample

pytestmark = pytest.mark.skipif(
    gpu_linear.triton is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs triton and TRITON_INTERPRET=1; on a GPU tests/gpu/test_graphs.py runs the kernels",
)


@pytest.mark.parametrize("blocks", [None, (4, 32, 4)])
@pytest.mark.parametrize(
    "m, k, n, act, gated, normed, biased, added",
    [
        (1, 64, 40, "", False, True, False, False),
        (3, 96, 50, "", False, True, True, True),
        (2, 128, 33, "silu", True, True, False, False),
        (4, 80, 20, "gelu", True, False, True, False),
        (5, 48, 20, "gelu_tanh", False, False, True, True),
    ],
)
def test_gpu_linear_matches_reference(
    m: int,
    k: int,
    n: int,
    act: str,
    gated: bool,
    normed: bool,
    biased: bool,
    added: bool,
    blocks: tuple[int, int, int] | None,
) -> None:
    x, w = torch.randn(m, k), torch.randn(2 * n if gated else n, k) / 8
    bias = torch.randn(len(w)) if biased else None
    norm = (torch.rand(k) + 0.5, 1e-5) if normed else None
    more = {"norm": norm, "act": act, "gated": gated}
    residual = torch.randn(m, n) if added else None
    got = gpu_linear.fused(x, w, bias, residual=residual, blocks=blocks, **more)  # type: ignore[arg-type]
    want = gpu_linear.reference(x, w, bias, residual=residual, **more)  # type: ignore[arg-type]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)  # another order of the sums


def paged(x: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """The rows of x (b s ...) cut into pages that lie in any order, and the table that says where."""
    b, s = x.shape[:2]
    n = -(-s // page)
    table = torch.randperm(b * n, generator=torch.Generator().manual_seed(s)).view(b, n)
    whole = torch.cat([x, x.new_zeros(b, n * page - s, *x.shape[2:])], 1)
    pool = x.new_zeros(b * n, page, *x.shape[2:])
    pool[table.flatten()] = whole.view(b * n, page, *x.shape[2:])
    return pool, table.int()


@pytest.mark.parametrize(
    "b, h, g, d, s, window, turned, splits",
    [
        (2, 4, 2, 32, 150, None, True, 1),
        (3, 4, 4, 64, 200, None, True, 2),
        (2, 8, 1, 32, 130, 20, False, 4),
        (1, 4, 2, 32, 300, None, True, 4),
    ],
)
def test_gpu_attention_matches_attend(
    b: int, h: int, g: int, d: int, s: int, window: int | None, turned: bool, splits: int
) -> None:
    qkv, k, v = torch.randn(b, (h + 2 * g) * d), torch.randn(b, s, g, d), torch.randn(b, s, g, d)
    pos = torch.randint(0, s, (b,))
    pos[0] = 0 if b > 1 else s - 1
    angles = (torch.rand(s, d // 2), torch.rand(s, d // 2)) if turned else None
    q, new_k, new_v = qkv.view(b, -1, d).split([h, g, g], 1)
    if angles is not None:
        q = gpu_attention.turn(q, angles[0][pos], angles[1][pos])
        new_k = gpu_attention.turn(new_k, angles[0][pos], angles[1][pos])
    full_k, full_v, row = k.clone(), v.clone(), torch.arange(b)
    full_k[row, pos], full_v[row, pos] = new_k, new_v
    at = torch.arange(s)
    seen = at <= pos[:, None]
    if window is not None:
        seen &= at > pos[:, None] - window
    want = attend(q[:, None], full_k, full_v, seen[:, None, None], scale=d**-0.5)[:, 0]
    plain = gpu_attention.reference(q, full_k, full_v, pos + 1, d**-0.5, window)
    torch.testing.assert_close(plain, want, rtol=1e-4, atol=1e-5)
    same = {"heads": h, "scale": d**-0.5, "window": window, "splits": splits}
    (pool_k, table), (pool_v, _) = paged(k, 16), paged(v, 16)
    got = gpu_attention.decode(qkv, k, v, pos, angles=angles, **same)  # type: ignore[arg-type]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert torch.equal(k, full_k) and torch.equal(v, full_v)
    got = gpu_attention.decode(qkv, pool_k, pool_v, pos, angles=angles, table=table, **same)  # type: ignore[arg-type]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    alone = q.flatten(1).contiguous()
    got = gpu_attention.decode(alone, k, v, pos + 1, new=False, **same)  # type: ignore[arg-type]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "b, h, c, r, s, splits",
    [(2, 4, 32, 16, 150, 1), (3, 20, 64, 16, 200, 2), (1, 40, 32, 16, 130, 4)],
)
def test_gpu_latent_matches_attend(b: int, h: int, c: int, r: int, s: int, splits: int) -> None:
    q, entry, cache = torch.randn(b, h, c + r), torch.randn(b, c + r), torch.randn(b, s, c + r)
    pos = torch.randint(0, s, (b,))
    full = cache.clone()
    full[torch.arange(b), pos] = entry
    seen = (torch.arange(s) <= pos[:, None])[:, None, None]
    keys = full[:, :, None]
    want = attend(q[:, None], keys, keys[..., :c], seen, scale=0.1)[:, 0]
    torch.testing.assert_close(gpu_latent.reference(q, full, pos + 1, c, 0.1), want)
    got = gpu_latent.decode(q, entry, cache, pos, latent=c, scale=0.1, splits=splits)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert torch.equal(cache, full)


def test_gpu_greedy_matches_argmax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_sample, "CHUNK", 64)
    state = [torch.tensor(x) for x in ([1, 2, 3], [4, 9, 6], [0, 1, 2], [1, 1, 1])]
    a = gpu_sample.State(*state, torch.zeros(5, 3, dtype=torch.long), 9)
    b = copy.deepcopy(a)
    for _ in range(6):
        logits = (torch.randn(3, 300) * 3).round()  # with ties
        gpu_sample.advance(a, logits.argmax(-1))
        gpu_sample.kernels(b, logits)
        for x, y in zip([*a.tensors(), a.log], [*b.tensors(), b.log], strict=True):
            assert torch.equal(x, y)
