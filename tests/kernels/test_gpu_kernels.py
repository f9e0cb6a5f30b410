"""The GPU kernels against their plain forms, by Triton's interpreter: TRITON_INTERPRET=1 pytest tests/kernels."""

import copy
import os

import pytest
import torch
from torch import Tensor

import regard
from regard.attention import attend
from regard.decode.graphs import GraphDecoder
from regard.decode.settings import Request, Settings
from regard.kernels import gpu_attention, gpu_latent, gpu_linear, gpu_prompt, gpu_sample, gpu_wide
from regard.models import Tokens, TransformerConfig

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
        gpu_sample.advance(a, gpu_sample.greedy(logits))
        gpu_sample.kernels(b, logits)
        for x, y in zip([*a.tensors(), a.log], [*b.tensors(), b.log], strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_gpu_greedy_chooses_nothing_without_numbers(
    value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole row of them, or (but for -infinity) one among numbers, in the first chunk or in the last."""
    monkeypatch.setattr(gpu_sample, "CHUNK", 64)
    logits = torch.randn(4, 300)
    logits[0], logits[1, 5], logits[2, 299] = value, value, value
    state = [torch.ones(4, dtype=torch.long) for _ in range(4)]
    a = gpu_sample.State(*state, torch.zeros(3, 4, dtype=torch.long), 9)
    gpu_sample.kernels(a, logits)
    want = gpu_sample.greedy(logits)
    assert torch.equal(a.ids, want) and torch.equal(a.log[1], want)
    assert want[0] == -1 and want[3] >= 0 and (want[1] == -1) == (value != float("-inf"))


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_linear.SWITCH, "interpreted", True)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("m, n, parts", [(3, 40, None), (6, 64, 0), (5, 50, 1), (7, 96, 4)])
def test_gpu_add_norm_matches_torch(m: int, n: int, parts: int | None) -> None:
    x, weight = torch.randn(m, n), torch.rand(n) + 0.5
    more = None if parts is None else torch.randn(*(parts,) * bool(parts), m, n)
    before = x.clone()
    got = gpu_wide.add_norm(x, more, weight, 1e-5)
    want = gpu_wide.add_norm(x, more, weight, 1e-5, fast=False)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert torch.equal(x, before)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("act", ["silu", "gelu", "relu"])
def test_gpu_gate_matches_torch(act: str) -> None:
    x = torch.randn(5, 2 * 2500)
    torch.testing.assert_close(gpu_wide.gate(x, act), gpu_wide.gate(x, act, fast=False))


@pytest.mark.parametrize(
    "m, k, n, split", [(8, 64, 40, False), (20, 256, 70, True), (64, 96, 33, True)]
)
def test_gpu_parts_sum_to_the_product(m: int, k: int, n: int, split: bool) -> None:
    x, w = torch.randn(m, k), torch.randn(n, k) / 8
    got = gpu_wide.parts(x, w, split)
    assert len(got) == 1 or split
    torch.testing.assert_close(got.sum(0), x @ w.T, rtol=1e-4, atol=1e-5)
    got = gpu_wide.parts(x, w, blocks=(16, 16, 2, 2, 4))
    assert got.shape == (2, m, n)
    torch.testing.assert_close(got.sum(0), x @ w.T, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("m, k, n", [(8, 64, 40), (33, 128, 70)])
def test_gpu_gated_product_matches_torch(m: int, k: int, n: int, act: str) -> None:
    x, w = torch.randn(m, k), torch.randn(2 * n, k) / 8
    got, want = (gpu_wide.gated(x, w, None, act, fast) for fast in (True, False))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("turned", [True, False])
def test_gpu_lay_matches_indexing(turned: bool) -> None:
    h, g, d, length = 6, 2, 32, 90
    texts, rows = [[1] * 7, [2] * 40, [3] * 33], [4, 0, 2]
    sizes = gpu_prompt.sizes_of(texts)
    pack = gpu_prompt.Pack.of(torch.tensor(gpu_prompt.flat(texts, rows, sizes)), sizes)
    qkv = torch.randn(sizes[0], (h + 2 * g) * d)
    qkv[80:] = qkv[79]  # spare tokens repeat the last
    angles = (torch.rand(length, d // 2), torch.rand(length, d // 2)) if turned else None
    keys, values = torch.zeros(2, 5, length, g, d)
    laid = gpu_prompt.lay_qkv(qkv, pack, keys, values, h, angles)
    q, k, v = qkv.unflatten(1, (-1, d)).split([h, g, g], 1)
    if angles is not None:
        cos, sin = angles[0][pack.pos], angles[1][pack.pos]
        q, k = gpu_attention.turn(q, cos, sin), gpu_attention.turn(k, cos, sin)
    for got, x in zip(laid, gpu_prompt.lay(pack, q, k, v), strict=True):
        for i, text in enumerate(texts):
            torch.testing.assert_close(got[i, : len(text)], x[i, : len(text)])
            assert not got[i, len(text) :].any()
    for cache, x in ((keys, k), (values, v)):
        want = torch.zeros_like(cache)
        want[pack.row, pack.pos] = x
        torch.testing.assert_close(cache, want)
    o = gpu_prompt.attend(laid, pack, 0.2, None)
    assert o.shape == (sizes[0], h * d) and not o.isnan().any()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("name", ["gqa", "mla"])
def test_gpu_decoder_gives_the_plain_tokens(
    name: str, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small(name)
    texts = [[5, 9, 2], [7] * 20, [1, 2], [3, 4, 5, 6, 7], [8]]
    asked = [Request(ids, Settings(max_new_tokens=4)) for ids in texts]
    want = GraphDecoder(model, 5, 48, graph=False, kernels=False).serve(asked)
    monkeypatch.setitem(gpu_linear.SWITCH, "wide", wide)
    for rows in (2, 5):  # few rows, and more than MOST
        got = GraphDecoder(model, rows, 48, graph=False).serve(asked)
        assert [r.ids for r in got] == [r.ids for r in want]


def small(name: str) -> regard.Model:
    torch.manual_seed(0)
    rope = regard.Rope()
    attention = (
        regard.GQA(4, 2, 32, rope=rope) if name == "gqa" else regard.MLA(4, 32, 32, 16, rope=rope)
    )
    ffn, norm = regard.MLP(96, "silu", gated=True, bias=False), regard.Norm(1e-5, rms=True)
    config = TransformerConfig(
        Tokens(97), regard.Tower(64, 1, attention, ffn, norm=norm), regard.LM(), max_len=48
    )
    model = config.make()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(3)
    return model.eval()
