"""The GPU kernels against their plain forms in float32, by Triton's interpreter: make test-kernels.
It multiplies bf16 wrongly, so inputs are float32 and float16."""

import copy
import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import regard
from regard.attention import attend
from regard.attention.sparse import choose, dots_exact, index_scores
from regard.decode import sampling
from regard.decode.engine import Engine
from regard.decode.filters import FILTERS as PLAIN
from regard.decode.runners import guesses
from regard.decode.runners.guesses import Guesses, Plan
from regard.decode.settings import Request, Settings
from regard.fast.cuda import prompts as cuda_prompts
from regard.kernels.triton import attention as gpu_attention
from regard.kernels.triton import draw as gpu_draw
from regard.kernels.triton import experts as gpu_experts
from regard.kernels.triton import latent as gpu_latent
from regard.kernels.triton import linear as gpu_linear
from regard.kernels.triton import loss as gpu_loss
from regard.kernels.triton import prompt as gpu_prompt
from regard.kernels.triton import sample as gpu_sample
from regard.kernels.triton import sparse as gpu_sparse
from regard.kernels.triton import wide as gpu_wide
from regard.models import Tokens, TransformerConfig
from regard.position import rotate
from tests.kernels.plain import BOUND, largest_gap, served

pytestmark = pytest.mark.skipif(
    gpu_linear.triton is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs triton and TRITON_INTERPRET=1: make test-kernels; on a GPU tests/gpu/test_graphs.py runs the kernels",
)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
# Another order of the sums; float16 rounds by 2^-11 inside, and again what is written.
NEAR = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
}


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got.float(), want.float(), **NEAR[dtype])


@each_dtype
@pytest.mark.parametrize("blocks", [None, (4, 32, 4)])
@pytest.mark.parametrize(
    "m, k, n, act, gated, normed, biased, added",
    [
        (1, 64, 40, "", False, True, False, False),
        (3, 96, 50, "", False, True, True, True),
        (2, 128, 33, "silu", True, True, False, False),
        (4, 80, 20, "gelu", True, False, True, False),
        (5, 48, 20, "gelu_tanh", False, False, True, True),
        (2, 48, 20, "tanh", False, False, True, False),
        (2, 48, 20, "quick_gelu", True, False, True, False),
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
    dtype: torch.dtype,
) -> None:
    x, w = torch.randn(m, k).to(dtype), (torch.randn(2 * n if gated else n, k) / 8).to(dtype)
    bias = torch.randn(len(w)).to(dtype) if biased else None
    weight = (torch.rand(k) + 0.5).to(dtype)
    residual = torch.randn(m, n).to(dtype) if added else None
    more = {"act": act, "gated": gated}
    # A norm by 1 + w, as Gemma has it, where k is 128.
    shift = float(k == 128)
    norm = (weight, 1e-5, shift) if normed else None
    got = gpu_linear.fused(x, w, bias, norm=norm, residual=residual, blocks=blocks, **more)  # type: ignore[arg-type]
    x, w, weight = x.float(), w.float(), weight.float()
    bias, residual = (None if y is None else y.float() for y in (bias, residual))
    norm = (weight, 1e-5, shift) if normed else None
    want = gpu_linear.reference(x, w, bias, norm=norm, residual=residual, **more)  # type: ignore[arg-type]
    assert got.dtype is dtype
    close(got, want, dtype)


def paged(x: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """The rows of x (b s ...) cut into pages that lie in any order, and the table that says where."""
    b, s = x.shape[:2]
    n = -(-s // page)
    table = torch.randperm(b * n, generator=torch.Generator().manual_seed(s)).view(b, n)
    whole = torch.cat([x, x.new_zeros(b, n * page - s, *x.shape[2:])], 1)
    pool = x.new_zeros(b * n, page, *x.shape[2:])
    pool[table.flatten()] = whole.view(b * n, page, *x.shape[2:])
    return pool, table.int()


@each_dtype
@pytest.mark.parametrize("b, size, k", [(3, 5000, 8), (2, 4097, 5), (1, 700, 9)])
def test_gpu_largest_is_topk(b: int, size: int, k: int, dtype: torch.dtype) -> None:
    x = torch.randn(b, size).to(dtype)
    # The last ones too, and some in one block.
    x[0, -3:], x[-1, 256:260] = 9.0, 8.0
    top, at = gpu_sample.largest(x, k)
    assert torch.equal(top, x.topk(k).values) and torch.equal(x.gather(1, at), top)
    assert all(len(set(row)) == k for row in at.tolist())


@each_dtype
@pytest.mark.parametrize(
    "b, h, g, d, s, window, turned, splits",
    [
        (2, 4, 2, 32, 150, None, True, 1),
        (3, 4, 4, 64, 200, None, True, 2),
        (2, 8, 1, 32, 130, 20, False, 4),
        (2, 4, 4, 32, 130, None, False, 1),
        (1, 4, 2, 32, 300, None, True, 4),
    ],
)
def test_gpu_attention_matches_attend(
    b: int,
    h: int,
    g: int,
    d: int,
    s: int,
    window: int | None,
    turned: bool,
    splits: int,
    dtype: torch.dtype,
) -> None:
    sizes = ((b, (h + 2 * g) * d), (b, s, g, d), (b, s, g, d))
    qkv, k, v = (torch.randn(*size).to(dtype) for size in sizes)
    pos = torch.randint(0, s, (b,))
    pos[0] = 0 if b > 1 else s - 1
    cos, sin = torch.rand(2, s, d // 2).to(dtype)
    angles = (cos, sin) if turned else None
    q, new_k, new_v = qkv.view(b, -1, d).split([h, g, g], 1)
    if angles is not None:
        q = gpu_attention.rotate(q, angles[0][pos], angles[1][pos])
        new_k = gpu_attention.rotate(new_k, angles[0][pos], angles[1][pos])
    full_k, full_v, row = k.clone(), v.clone(), torch.arange(b)
    full_k[row, pos], full_v[row, pos] = new_k, new_v
    at = torch.arange(s)
    seen = at <= pos[:, None]
    if window is not None:
        seen &= at > pos[:, None] - window
    wide = [x.float() for x in (q[:, None], full_k, full_v)]
    # Where nothing turns, keys have a bias by their distance.
    bias = None if turned else torch.randn(h, s // 3)
    more = None if bias is None else bias[:, (pos[:, None] - at).clamp(0, s // 3 - 1)]
    more = None if more is None else more.transpose(0, 1)[:, :, None]
    want = attend(*wide, seen[:, None, None], bias=more, scale=d**-0.5)[:, 0]
    plain = gpu_attention.reference(q, full_k, full_v, pos + 1, d**-0.5, window, bias)
    close(plain, want, dtype)
    same = {"heads": h, "scale": d**-0.5, "window": window, "splits": splits, "bias": bias}
    (pool_k, table), (pool_v, _) = paged(k, 16), paged(v, 16)
    got = gpu_attention.decode(qkv, k, v, pos, angles=angles, **same)  # type: ignore[arg-type]
    close(got, want, dtype)
    assert torch.equal(k, full_k) and torch.equal(v, full_v)
    got = gpu_attention.decode(qkv, pool_k, pool_v, pos, angles=angles, table=table, **same)  # type: ignore[arg-type]
    close(got, want, dtype)
    alone = q.flatten(1).contiguous()
    got = gpu_attention.decode(alone, k, v, pos + 1, new=False, **same)  # type: ignore[arg-type]
    close(got, want, dtype)


FORMS = {
    "norms": {"qk_norm": 1e-6},
    "whole": {"qk_norm": 1e-6, "qk_norm_whole": True},
    "plus_one": {"qk_norm": 1e-6, "qk_norm_plus_one": True},
    "partial": {"rope": regard.Rope(partial=0.25)},
    "neighbours": {"rope": regard.Rope(layout="interleaved", partial=0.5), "qk_norm": 1e-6},
    "wide": {"rope": regard.Rope(wide=True)},
    "sinks": {"sinks": True, "window": 20},
    "softcap": {"softcap": 2.0, "sinks": True},
}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("form", FORMS)
def test_gpu_forms_of_attention_match_the_plain_ones(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts and a step, heads whose width is no power of two, as the plain mechanism has them."""
    config = regard.GQA(6, 2, 48, **{"rope": regard.Rope()} | FORMS[form])  # type: ignore[arg-type]
    tower = regard.Tower(64, 1, config, regard.MLP(64), norm=regard.Norm(rms=True))
    model = TransformerConfig(Tokens(97), tower, regard.LM(), max_len=96).make().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3) if p.dim() > 1 else p.add_(0.3 * torch.randn_like(p))
    monkeypatch.setattr(gpu_attention, "splits_for", lambda *_: 2)
    # In chunks: of what was read before, from its pages.
    engine = Engine(model, runner="graph", rows=2, page=8, chunk=16 if form == "sinks" else None)
    assert largest_gap(engine, [[5, 9, 2, 60], [7, 8, 9] * 9], 2) < BOUND


@each_dtype
@pytest.mark.parametrize(
    "n, m, f, e, a, biased",
    [(1, 64, 48, 8, 2, False), (5, 64, 48, 4, 3, True), (7, 32, 80, 16, 2, False)],
)
@pytest.mark.parametrize("few, most", [(16, 0), (0, 1024), (0, 0)], ids=["few", "sorted", "many"])
def test_gpu_experts_match_reference(
    n: int,
    m: int,
    f: int,
    e: int,
    a: int,
    biased: bool,
    few: int,
    most: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_experts, "FEW", few)
    monkeypatch.setattr(gpu_experts, "SORTED", most)
    shapes = ((e, f, m), (e, f, m), (e, m, f))
    biases = tuple(torch.randn(e, size).to(dtype) for size in (f, f, m)) if biased else None
    more = ("quick_gelu", 1.5) if biased else ("silu", None)
    w = gpu_experts.Experts(*((torch.randn(s) / 8).to(dtype) for s in shapes), biases, *more)  # type: ignore[arg-type]
    x, weight = torch.randn(n, m).to(dtype), torch.rand(n, a)
    # Not contiguous, as what the plain router gives.
    chosen = torch.stack([torch.randperm(e) for _ in range(n)])[:, :a]
    got = gpu_experts.experts(x, chosen, weight, w)
    wide = [y.float() for y in (w.gate, w.up, w.down)]
    wide_biases = None if biases is None else tuple(y.float() for y in biases)
    want = gpu_experts.reference(
        x.float(), chosen, weight, gpu_experts.Experts(*wide, wide_biases, *more)  # type: ignore[arg-type]
    )  # fmt: skip
    assert got.shape == (a, n, m)
    close(got.sum(0), want, dtype)


@pytest.mark.parametrize("n, a, e, block", [(7, 2, 5, 16), (40, 3, 8, 16), (33, 8, 64, 32)])
def test_gpu_sort_matches_the_plain_one(n: int, a: int, e: int, block: int) -> None:
    chosen = torch.stack([torch.randperm(e)[:a] for _ in range(n)])
    chosen[: n // 2, 0] = 3  # more than one tile, or it does not matter that it is there twice
    want, got = (f(chosen, e, block) for f in (gpu_experts.sort, gpu_experts.sort_few))
    assert torch.equal(got[0], want[0])
    real = want[1][:, 1] < want[1][:, 2]
    assert torch.equal(got[1][real], want[1][real])
    assert (got[1][~real, 1] >= got[1][~real, 2]).all()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    "settings",
    [{}, {"normalized": False, "gain": 2.0}, {"score": "sigmoid", "corrected": True, "bias": True}],
)
def test_gpu_router_matches_the_plain_one(settings: dict) -> None:
    layer = regard.MoE(12, 3, 16, **settings).make(80).eval()
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(torch.randn_like(p))
    x = torch.randn(5, 80)
    x[3], x[4, 7] = 0.0, torch.nan  # ties, and no numbers
    c = layer.config
    logits = gpu_experts.scores(x, layer.router.weight, layer.router.bias)
    torch.testing.assert_close(logits, layer.logits(x), equal_nan=True)
    more = {"normalized": c.normalized, "gain": c.gain, "correction": layer.correction}
    chosen, weight = gpu_experts.choose(logits, 3, sigmoid=c.score == "sigmoid", **more)
    want = layer.route(x)
    assert torch.equal(chosen[:4], want[0][:4])
    torch.testing.assert_close(weight[:4], want[1][:4])
    assert weight[4].isnan().all() and (chosen[4] >= 0).all() and (chosen[4] < 12).all()


@each_dtype
@pytest.mark.parametrize(
    "b, h, c, r, s, splits",
    [(2, 4, 32, 16, 150, 1), (3, 20, 64, 16, 200, 2), (1, 40, 32, 16, 130, 4)],
)
def test_gpu_latent_matches_attend(
    b: int, h: int, c: int, r: int, s: int, splits: int, dtype: torch.dtype
) -> None:
    page, places = 8, -(-s // 8)
    sizes = ((b, h, c + r), (b, c + r), (b * places, page, c), (b * places, page, r))
    q, entry, latents, ropes = (torch.randn(*size).to(dtype) for size in sizes)
    table = torch.randperm(b * places).view(b, places).int()
    pos = torch.randint(0, s, (b,))

    def whole() -> torch.Tensor:
        return torch.cat([latents, ropes], -1)[table.long()].flatten(1, 2)

    full = whole()
    full[torch.arange(b), pos] = entry
    seen = (torch.arange(places * page) <= pos[:, None])[:, None, None]
    keys = full[:, :, None].float()
    want = attend(q[:, None].float(), keys, keys[..., :c], seen, scale=0.1)[:, 0]
    close(gpu_latent.reference(q, full, pos + 1, c, 0.1), want, dtype)
    gpu_latent.put(entry[:, :c], latents, table, pos)
    gpu_latent.put(entry[:, c:], ropes, table, pos)
    assert torch.equal(whole(), full)
    got = gpu_latent.decode(q, latents, ropes, table, pos, scale=0.1, splits=splits)
    close(got, want, dtype)
    # Some of the tokens: the first, every third, and as many of a row as it has.
    at = torch.arange(0, s, 3)[None].minimum(pos[:, None])
    spots = table.gather(1, at // page) * page + at % page
    some = full[torch.arange(b)[:, None], at]
    count = (pos + 1).clamp(max=at.shape[1])
    got = gpu_latent.decode(
        q, latents, ropes, table, pos, scale=0.1, chosen=spots.int(), splits=splits
    )
    close(got, gpu_latent.reference(q, some, count, c, 0.1), dtype)


@each_dtype
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_gpu_rotate_matches_position(layout: str, dtype: torch.dtype) -> None:
    """Features inside wider ones, some of which do not turn; out of place and in place."""
    whole, pos = torch.randn(5, 3, 44).to(dtype), torch.tensor([7, 0, 3, 3, 9])
    cos, sin = (torch.randn(10, 6).to(dtype) for _ in range(2))
    x = whole[..., 20:36]
    want = rotate(x[:, None], cos[pos][:, None, None], sin[pos][:, None, None], layout)[:, 0]
    close(gpu_latent.rotate(x, (cos, sin), pos, layout != "half"), want, dtype)
    before = whole.clone()
    gpu_latent.rotate(x, (cos, sin), pos, layout != "half", out=x)
    close(x, want, dtype)
    before[..., 20:36] = x
    assert torch.equal(whole, before)


def tied_scores(b: int, s: int) -> Tensor:
    """Rows of scores, most of them with many that are equal; zeros of both signs."""
    x = torch.randn(b, s)
    x[1:] = (x[1:].relu() * 4).round() / 4
    x[2:] *= torch.where(torch.rand(b - 2, s) > 0.7, -1.0, 1.0)
    x[3] = 0.0
    return x


@pytest.mark.parametrize("s, k", [(150, 17), (64, 64)])
def test_gpu_topk_is_choose(s: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_sparse, "PIECE", 64)
    scores, page = tied_scores(5, s), 8
    pos = torch.tensor([s - 1, s - 1, s - 9 if s > k else s - 1, s - 1, k // 2])
    hidden = torch.arange(s) > pos[:, None]
    want = choose(scores.masked_fill(hidden, -torch.inf), k)
    assert torch.equal(gpu_sparse.reference(scores, pos + 1, k).long()[:4], want[:4])
    places = -(-s // page)
    table = torch.randperm(5 * places).view(5, places).int()
    spots = table.gather(1, want // page) * page + want % page
    got = gpu_sparse.topk(scores, pos, k, table, page)
    assert torch.equal(got[:4], spots[:4])
    # Of a row that is shorter than k, all of it.
    at = torch.arange(k // 2 + 1)
    assert torch.equal(got[4, at], table[4, at // page] * page + (at % page).int())


@each_dtype
@pytest.mark.parametrize("layout, low", [("half", True), ("interleaved", False)])
def test_gpu_update_cache_matches_the_parts(layout: str, low: bool, dtype: torch.dtype) -> None:
    """Query latents, latents and rotary keys inside a wider product; no norm where there is none."""
    b, a, c, r, page = 3, 40, 32, 16, 4
    both, pos = torch.randn(b, a + c + r + 8).to(dtype), torch.tensor([7, 0, 5])
    norms = tuple((torch.randn(n).to(dtype), 1e-3, shift) for n, shift in ((a, 0.0), (c, 1.0)))
    cos, sin = (torch.randn(8, r // 2).to(dtype) for _ in range(2))
    latents, ropes = torch.zeros(6, page, c).to(dtype), torch.zeros(6, page, r).to(dtype)
    table = torch.randperm(6).view(b, 2).int()
    more = {"angles": (cos, sin), "paired": layout != "half"}
    place = ((latents, ropes), table, pos)
    got = gpu_latent.update_cache(
        both, a, low, *place, norms=(norms[0] if low else None, norms[1]), **more
    )  # type: ignore[arg-type]
    assert got.shape == (b, a if low else 0)
    if low:
        close(got, gpu_linear.rms_norm(both[:, :a], norms[0]), dtype)
    page_of = table[torch.arange(b), pos // page].long()
    want = gpu_linear.rms_norm(both[:, a : a + c], norms[1])
    close(latents[page_of, pos % page], want, dtype)
    key = both[:, a + c : a + c + r]
    want = rotate(key[:, None, None], cos[pos][:, None, None], sin[pos][:, None, None], layout)
    close(ropes[page_of, pos % page], want[:, 0, 0], dtype)
    # Nothing else was written.
    for pool in (latents, ropes):
        pool[page_of, pos % page] = 0
        assert not pool.any()


@each_dtype
@pytest.mark.parametrize("r", [0, 12, 16])
def test_gpu_sparse_update_cache_matches_the_indexer(r: int, dtype: torch.dtype) -> None:
    b, h, d, m, page = 3, 5, 16, 40, 4
    attention = regard.GQA(2, 2, 16, rope=regard.Rope() if r else None)
    indexer = regard.DSA(attention, h, d, 4, rope_dim=r).make(m).indexer.to(dtype)
    with torch.no_grad():
        indexer.k_norm.weight.normal_()
        indexer.k_norm.bias.normal_()
    x, more, pos = torch.randn(b, m).to(dtype), torch.randn(b, 7).to(dtype), torch.tensor([7, 0, 5])
    cos, sin = (torch.randn(8, r // 2) for _ in range(2))

    def turned(y: Tensor) -> Tensor:
        at = (z[pos][:, None, None] for z in (cos, sin))
        return torch.cat([rotate(y[:, None, :, :r], *at, "half")[:, 0], y[..., r:]], -1)

    with torch.no_grad():
        key, q = indexer.wk(x), indexer.wq(x).unflatten(-1, (h, d))
        k = indexer.k_norm(key)[:, None]
        want = (turned(q), turned(k)[:, 0]) if r else (q.clone(), k[:, 0])
        keys, table = torch.zeros(6, page, d).to(dtype), torch.randperm(6).view(b, 2).int()
        # A key inside a wider product.
        inside = torch.cat([more, key], -1)[:, 7:]
        norm = (indexer.k_norm.weight, indexer.k_norm.bias, indexer.k_norm.eps)
        form = {"norm": norm, "angles": (cos, sin) if r else None, "fp8": False}
        asked, w = gpu_sparse.update_cache(
            x, indexer.ww.weight, q, inside, keys, table, pos, **form
        )  # type: ignore[arg-type]
        close(w, indexer.weights(x), dtype)
        close(asked, want[0], dtype)
        page_of = table[torch.arange(b), pos // page].long()
        close(keys[page_of, pos % page], want[1], dtype)
        before = keys.clone()
        # The key alone.
        gpu_sparse.update_cache(
            x, indexer.ww.weight, None, inside, keys.zero_(), table, pos, **form
        )  # type: ignore[arg-type]
        assert torch.equal(keys, before)


@each_dtype
@pytest.mark.parametrize("h, d, s", [(5, 16, 90), (16, 32, 40)])
def test_gpu_index_matches_scores(
    h: int, d: int, s: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gpu_sparse.TILES, False, (16, 4, 2, 1))
    monkeypatch.setattr(gpu_sparse, "MULTIPROCESSORS", 9)
    b, page = 3, 8
    places = -(-s // page)
    q, keys = torch.randn(b, h, d).to(dtype), torch.randn(b * places, page, d).to(dtype)
    w, table = torch.randn(b, h), torch.randperm(b * places).view(b, places).int()
    pos = torch.tensor([0, 31, s - 1])
    got = gpu_sparse.index(q, keys, w, table, pos, s)
    full = keys[table.long()].flatten(1, 2)
    want = index_scores(dots_exact(q[:, None], full), w[:, None])[:, 0]
    for i, end in enumerate((pos + 1).tolist()):
        close(got[i, :end], want[i, :end], dtype)


def state(rows: int, **given: list[int]) -> gpu_sample.State:
    def numbers(name: str, default: int) -> torch.Tensor:
        return torch.tensor(given.get(name, [default] * rows))

    four = [numbers(name, 1) for name in ("ids", "pos", "count", "tick")]
    log = torch.zeros(5, rows, dtype=torch.long)
    return gpu_sample.State(*four, numbers("live", 1), log, torch.zeros(5, rows), 9)


@pytest.mark.usefixtures("interpreted")
def test_gpu_greedy_matches_argmax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_sample, "CHUNK", 64)
    a = state(3, ids=[1, 2, 3], pos=[4, 9, 6], count=[0, 1, 2], live=[1, 1, 0])
    b, c = copy.deepcopy(a), copy.deepcopy(a)
    for _ in range(6):
        logits = (torch.randn(3, 300) * 3).round()  # with ties
        tokens, norm = logits.argmax(-1), logits.logsumexp(-1)
        with monkeypatch.context() as plain:
            plain.setitem(gpu_linear.SWITCH, "interpreted", False)
            gpu_sample.advance(a, logits, tokens, tokens, norm)
        gpu_sample.greedy_advance(b, logits)
        gpu_sample.advance(c, logits, tokens, tokens, norm)
        for other in (b, c):
            for x, y in zip([*a.tensors(), a.log], [*other.tensors(), other.log], strict=True):
                assert torch.equal(x, y)
            torch.testing.assert_close(a.logp, other.logp)
        for x, y in zip(gpu_sample.best(logits), (tokens, norm), strict=True):
            torch.testing.assert_close(x, y)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_gpu_greedy_chooses_nothing_without_numbers(
    value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole row of them, or (but for -infinity) one among numbers, in the first chunk or in the last."""
    monkeypatch.setattr(gpu_sample, "CHUNK", 64)
    logits = torch.randn(4, 300)
    logits[0], logits[1, 5], logits[2, 299] = value, value, value
    a = state(4)
    gpu_sample.greedy_advance(a, logits)
    want = torch.where(logits.amax(-1).isfinite(), logits.argmax(-1), -1)
    assert torch.equal(a.ids, want) and torch.equal(a.log[1], want)
    assert torch.equal(gpu_sample.best(logits)[0], want) and a.logp.isfinite().all()
    assert want[0] == -1 and want[3] >= 0 and (want[1] == -1) == (value != float("-inf"))


def filtered(logits: Tensor, columns: dict[str, Tensor]) -> Tensor:
    """The plain form, as a plain lane has it."""
    kept = logits.float() / columns["temperature"].clamp(min=1e-6)
    for name, each in PLAIN.items():
        if name in columns:
            kept = each.keep(kept, columns[name])
    return kept


# Settings of six rows: idle ones among them, and a greedy row.
HEAT = [1.0, 0.7, 0.0, 2.0, 0.25, 1.0]
FILTERS = {
    "top_k": [5, 0, 3, 400, 1, 5000],
    "top_p": [0.5, 0.9, 0.3, 1.0, 0.99, 0.0],
    "min_p": [0.1, 0.0, 0.5, 0.02, 1.0, 0.3],
}
ALONE_AND_TOGETHER = [
    (),
    ("top_k",),
    ("top_p",),
    ("min_p",),
    ("top_k", "top_p"),
    ("top_p", "min_p"),
    ("top_k", "top_p", "min_p"),
]


def settings(names: tuple[str, ...], rows: slice = slice(None)) -> dict[str, Tensor]:
    chosen = {"temperature": HEAT, **{name: FILTERS[name] for name in names}}
    return {name: torch.tensor(values[rows])[:, None] for name, values in chosen.items()}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("names", ALONE_AND_TOGETHER, ids="-".join)
@pytest.mark.parametrize(
    "vocab, chunk, levels, dtype",
    [(997, 512, 2, torch.float32), (1300, 512, 0, torch.float32), (200, 256, 8, torch.float16)],
)
def test_gpu_draw_matches_sampling(
    names: tuple[str, ...],
    vocab: int,
    chunk: int,
    levels: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same token for every u that is not so near to a boundary that rounding decides. `levels` per unit: ties."""
    monkeypatch.setattr(gpu_draw, "CHUNK", chunk)
    g = torch.Generator().manual_seed(vocab + len(names))
    logits = 2.5 * torch.randn(6, vocab, generator=g)
    logits = (logits * levels).round() / levels if levels else logits
    # Banned tokens, and zeros of both signs.
    logits[0, ::3], logits[3, : vocab // 2], logits[5, 1::4] = -torch.inf, -torch.inf, -0.0
    logits, columns = logits.to(dtype), settings(names)
    u = torch.rand(6, dtype=torch.float64, generator=g)
    kept = filtered(logits, columns)
    mass = kept.double().softmax(-1).cumsum(-1)
    drawn = columns["temperature"][:, 0] > 0
    clear = ((mass - u[:, None]).abs().amin(-1) > 1e-5) | ~drawn
    want = torch.where(drawn, sampling.draw(kept, u), logits.argmax(-1))
    got = gpu_draw.draw_filtered(logits, u, columns)
    assert got[clear].tolist() == want[clear].tolist()
    assert clear.sum() >= 5


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_gpu_draw_keeps_the_lowest_ids_of_equals(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all logits equal: the last token that can be drawn is the last that is kept."""
    monkeypatch.setattr(gpu_draw, "CHUNK", 256)
    monkeypatch.setattr(gpu_draw, "TILE", 128)
    u = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    logits, heat = torch.full((2, 1000), 2.0), torch.ones(2, 1)
    cases = {"top_k": (300, 299), "top_p": (0.2996, 299)}
    for name, (value, last) in {**cases, "min_p": (0.5, 999)}.items():
        columns = {"temperature": heat, name: torch.tensor([[value]] * 2)}
        assert gpu_draw.draw_filtered(logits, u, columns).tolist() == [0, last]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("names", [(), ("top_k",), tuple(FILTERS)], ids="-".join)
def test_gpu_draw_gives_some_token_without_numbers_and_none_where_none_is_left(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the row beside them its own."""
    monkeypatch.setattr(gpu_draw, "CHUNK", 256)
    g = torch.Generator().manual_seed(0)
    u = torch.full((6,), 0.6, dtype=torch.float64)
    columns = {
        name: column[:1].expand(6, 1).contiguous() for name, column in settings(names).items()
    }
    logits = torch.randn(6, 300, generator=g)
    for low, high in ((-torch.inf, torch.inf), (-3e38, 3e38)):
        logits[0], logits[1], logits[2] = torch.nan, high, low
        logits[3, 7], logits[3, 250], logits[4, 250] = torch.nan, high, low
        got = gpu_draw.draw_filtered(logits, u, columns)
        hot = logits.nan_to_num(-torch.inf, torch.inf, -torch.inf) / columns["temperature"]
        none = (hot <= -3e38).all(-1)
        assert ((got < 0) == none).all() and (got < 300).all()
        assert got[5] == sampling.draw(
            filtered(logits[5:], {n: c[5:] for n, c in columns.items()}), u[5:]
        )


@each_dtype
def test_gpu_allow_matches_sampling(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_draw, "CHUNK", 256)
    g = torch.Generator().manual_seed(0)
    for vocab in (31, 64, 1003):
        logits = torch.randn(3, vocab, generator=g).to(dtype)
        words = torch.randint(-(2**31), 2**31, (3, -(-vocab // 32)), generator=g).int()
        assert torch.equal(gpu_draw.allow(logits, words), sampling.allowed(logits, words))


def test_gpu_uniform_matches_sampling() -> None:
    g = torch.Generator().manual_seed(3)
    numbers = [torch.randint(-(2**40), 2**40, (50,), generator=g) for _ in range(3)]
    numbers[0][:2] = torch.tensor([-(2**63), 2**63 - 1])
    assert torch.equal(gpu_draw.uniform(*numbers), sampling.uniform(*numbers))


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_linear.SWITCH, "interpreted", True)


@pytest.mark.usefixtures("interpreted")
@each_dtype
@pytest.mark.parametrize("normed, after", [(True, False), (True, True), (False, True)])
@pytest.mark.parametrize("m, n, parts", [(3, 40, None), (6, 64, 0), (5, 50, 1), (7, 96, 4)])
def test_gpu_add_norm_matches_torch(
    m: int, n: int, parts: int | None, normed: bool, after: bool, dtype: torch.dtype
) -> None:
    x, weight = torch.randn(m, n).to(dtype), (torch.rand(n) + 0.5).to(dtype)
    # parts of a product are sums, in float32
    more = None if parts is None else torch.randn(*(parts,) * bool(parts), m, n)
    more = more if more is None or parts else more.to(dtype)
    before = x.clone()
    norm = (weight, 1e-5, 0.0) if normed else None
    post = (weight.flip(0).contiguous(), 1e-4, 1.0) if after else None
    got = gpu_wide.add_norm(x, more, norm, post)
    wide = None if more is None else more.float()
    norm, post = (None if y is None else (y[0].float(), *y[1:]) for y in (norm, post))
    want = gpu_wide.add_norm(x.float(), wide, norm, post, fast=False)
    assert all(y.dtype is dtype for y in got)
    close(got[0], want[0], dtype), close(got[1], want[1], dtype)
    assert torch.equal(x, before)


@pytest.mark.usefixtures("interpreted")
@each_dtype
@pytest.mark.parametrize("act", ["silu", "gelu", "relu"])
def test_gpu_gate_matches_torch(act: str, dtype: torch.dtype) -> None:
    x = torch.randn(5, 2 * 2500).to(dtype)
    close(gpu_wide.gate(x, act), gpu_wide.gate(x.float(), act, fast=False), dtype)


@each_dtype
@pytest.mark.parametrize(
    "m, k, n, split", [(8, 64, 40, False), (20, 256, 70, True), (64, 96, 33, True)]
)
def test_gpu_parts_sum_to_the_product(
    m: int, k: int, n: int, split: bool, dtype: torch.dtype
) -> None:
    x, w = torch.randn(m, k).to(dtype), (torch.randn(n, k) / 8).to(dtype)
    want = x.float() @ w.float().T
    got = gpu_wide.parts(x, w, split)
    assert len(got) == 1 or split
    close(got.sum(0), want, dtype)
    got = gpu_wide.parts(x, w, blocks=(16, 16, 2, 2, 4, 32))
    assert got.shape == (2, m, n)
    close(got.sum(0), want, dtype)


@pytest.mark.usefixtures("interpreted")
@each_dtype
@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("m, k, n", [(8, 64, 40), (33, 128, 70)])
def test_gpu_gated_product_matches_torch(
    m: int, k: int, n: int, act: str, dtype: torch.dtype
) -> None:
    x, w = torch.randn(m, k).to(dtype), (torch.randn(2 * n, k) / 8).to(dtype)
    got = gpu_wide.gated(x, w, None, act)
    close(got, gpu_wide.gated(x.float(), w.float(), None, act, fast=False), dtype)


@pytest.mark.usefixtures("interpreted")
@each_dtype
@pytest.mark.parametrize("share, padding", [(0.0, None), (0.1, None), (0.1, 3)])
def test_gpu_loss_matches_reference(
    share: float, padding: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_loss, "BLOCK", 64)
    n, vocab = 6, 150
    logits = (3 * torch.randn(n, vocab + 11)).to(dtype)[:, :vocab]
    labels, counted = torch.randint(4, vocab, (n,)), torch.arange(n) % 3 != 1
    labels[~counted] = -100
    others = vocab - 1 - (padding is not None)
    rest = labels, counted, 1 - share, share / others, padding
    exact = logits.double()
    want = gpu_loss.reference(exact, *rest)
    torch.testing.assert_close(gpu_loss.turn(logits, *rest, train=False).double(), want)
    torch.testing.assert_close(gpu_loss.turn(logits, *rest).double(), want)
    close(logits, exact, dtype)


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("turned", [True, False])
def test_gpu_lay_matches_indexing(turned: bool, rows: bool) -> None:
    h, g, d, length = 6, 2, 32, 90
    texts, page = [[1] * 7, [2] * 40, [3] * 33], 8
    pages = torch.randperm(36).view(3, 12).tolist()
    parts = [cuda_prompts.Part(text, 3 * i, pages[i]) for i, text in enumerate(texts)]
    sizes = cuda_prompts.sizes_of(parts, page)
    pack = cuda_prompts.Pack.of(cuda_prompts.flat(parts, sizes), sizes)
    qkv = torch.randn(sizes[0], (h + 2 * g) * d)
    qkv[80:] = qkv[79]  # spare tokens repeat the last
    angles = (torch.rand(length, d // 2), torch.rand(length, d // 2)) if turned else None
    keys, values = torch.zeros(2, 36, page, g, d)
    laid = gpu_prompt.lay_qkv(qkv, pack, keys, values, h, angles, rows=rows)
    q, k, v = qkv.unflatten(1, (-1, d)).split([h, g, g], 1)
    if angles is not None:
        cos, sin = angles[0][pack.pos], angles[1][pack.pos]
        q, k = gpu_attention.rotate(q, cos, sin), gpu_attention.rotate(k, cos, sin)
    if rows:
        for got, x in zip(laid, gpu_prompt.lay(pack, q, k, v), strict=True):
            for i, text in enumerate(texts):
                torch.testing.assert_close(got[i, : len(text)], x[i, : len(text)])
                assert not got[i, len(text) :].any()
    else:
        for got, x in zip(laid, (q, k, v), strict=True):
            torch.testing.assert_close(got[:80], x[:80])
            assert not got[80:].any()
    for cache, x in ((keys, k), (values, v)):
        want = torch.zeros_like(cache)
        want[pack.table[pack.row, pack.pos // page], pack.pos % page] = x
        torch.testing.assert_close(cache, want)


def test_only_a_recorded_pass_is_padded_to_few_sizes() -> None:
    def tokens(count: int, start: int = 0) -> int:
        parts = [cuda_prompts.Part([1] * count, start, range(-(-(start + count) // 16)))]
        return cuda_prompts.sizes_of(parts, 16).tokens

    most = cuda_prompts.RECORDED
    assert [tokens(n) for n in (1, most - 500, most)] == [64, most, most]
    assert len({tokens(n) for n in range(1, most + 1)}) < 32
    assert [tokens(n) for n in (most + 1, 8283)] == [most + 64, 8320]
    # A pass after what the cache has is not recorded.
    assert tokens(3000, start=16) == 3008


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("name", ["gqa", "mla"])
def test_gpu_decoder_gives_the_plain_tokens(
    name: str, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small(name)
    texts = [[5, 9, 2], [7] * 20, [1, 2], [3, 4, 5, 6, 7], [8]]
    asked = [Request(ids, Settings(max_new_tokens=4)) for ids in texts]
    want = served(Engine(model, runner="torch"), asked)
    monkeypatch.setitem(gpu_linear.SWITCH, "wide", wide)
    for rows in (2, 5):  # few rows, and more than MOST
        engine = Engine(model, runner="graph", rows=rows)
        assert [r.ids for r in served(engine, asked)] == [r.ids for r in want]
        assert largest_gap(engine, texts[:rows], 2) < BOUND


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    "name, few", [("gqa", 8), ("gqa", 0), ("window", 8), ("mla", 8), ("dsa", 8)]
)
def test_gpu_guesses_change_no_token(name: str, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass as rows of a step, and over pages; guesses of a draft model that is right, and looked up."""
    plan = Plan(2, name != "window", 2, 1.0)
    monkeypatch.setattr(Guesses, "plan", lambda *_: plan)
    monkeypatch.setattr(guesses, "FEW", few)
    model = small(name)
    asked = [Request(ids, Settings(max_new_tokens=7)) for ids in ([5, 9, 5, 9], [7] * 19)]
    want = served(Engine(model, runner="torch"), asked)
    kind = {"draft": 2} if plan.drafts else {"lookup": 2}
    guessed = [replace(r, settings=replace(r.settings, **kind)) for r in asked]
    rows, draft = (2, small(name)) if plan.drafts else (1, None)
    engine = Engine(model, runner="graph", rows=rows, draft=draft)
    assert [r.ids for r in served(engine, guessed)] == [r.ids for r in want]


@pytest.mark.usefixtures("interpreted")
def test_gpu_sparse_decoder_gives_the_plain_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that is read densely, and chooses among its tokens when it is longer."""
    monkeypatch.setattr(gpu_sparse, "PIECE", 64)
    model = small("dsa")
    text = torch.randint(0, 97, (31,)).tolist()
    engine = Engine(model, runner="graph", rows=1)
    assert "GraphSparse" in engine.explain()
    assert largest_gap(engine, [text], 4) < BOUND


def small(name: str) -> regard.Model:
    torch.manual_seed(0)
    rope = regard.Rope()
    latent = regard.MLA(4, 32, 32, 16, rope=rope)
    attention = {
        "gqa": regard.GQA(4, 2, 32, rope=rope),
        "window": regard.GQA(4, 2, 32, rope=rope, window=5, qk_norm=1e-6),
        "mla": latent,
        "dsa": regard.DSA(latent, 4, 16, 32, rope_dim=16),
    }[name]
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
