"""The runner `graph` as CUDA graphs with Triton kernels: the plain model's logits, each within a bound,
and its tokens but for ties within that bound. Skipped without a GPU; on any machine
tests/kernels/test_gpu_graphs.py does the same without kernels."""

import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

import regard
from regard.attention.sparse import choose, dots_exact, fp8_dots, index_scores, packed_fp8
from regard.decode.engine import Engine
from regard.decode.runners import steps as kept_steps
from regard.decode.runners.graph import GraphRunner
from regard.decode.runners.steps import GraphSteps
from regard.decode.settings import Request, Settings
from regard.kernels.triton import attention as gpu_attention
from regard.kernels.triton import dense as gpu_dense
from regard.kernels.triton import experts as gpu_experts
from regard.kernels.triton import latent as gpu_latent
from regard.kernels.triton import linear as gpu_linear
from regard.kernels.triton import measured as gpu_measured
from regard.kernels.triton import sparse as gpu_sparse
from regard.kernels.triton import wide as gpu_wide
from regard.models import Tokens, TransformerConfig
from tests.kernels import test_gpu_graphs as small
from tests.kernels import test_graph_guesses as guessed
from tests.kernels.plain import BOUND, FEW, answer, largest_gap, served, ties

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device: there is none here"
)
ROPE = regard.Rope()
MECHANISMS = {
    "gqa": regard.GQA(8, 2, 64, rope=ROPE),
    "qk_norm": regard.GQA(4, 2, 64, rope=ROPE, qk_norm=1e-6),
    "window": regard.GQA(4, 4, 32, rope=ROPE, window=9, bias=True),
    "mla": regard.MLA(16, 64, 32, 16, rope=ROPE),
    "dsa": regard.DSA(regard.MLA(16, 64, 32, 16, rope=ROPE), 4, 32, 40, rope_dim=16),
    "dsa_gqa": regard.DSA(regard.GQA(8, 2, 64, rope=ROPE), 4, 32, 40, rope_dim=16),
}


def build(name: str, dtype: torch.dtype = torch.float32) -> regard.Model:
    torch.manual_seed(0)
    ffn, norm = regard.MLP(256, "silu", gated=True, bias=False), regard.Norm(1e-5, rms=True)
    tower = regard.Tower(128, 2, MECHANISMS[name], ffn, norm=norm)
    config = TransformerConfig(Tokens(97), tower, regard.LM(), max_len=512)
    model = regard.build(config, device="cuda", dtype=dtype)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(3)
    return model


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of ours, even where torch's are faster on shapes as small as these."""
    monkeypatch.setattr(gpu_measured, "ON", False)


def requests(count: int = 12, **settings: object) -> list[Request]:
    g = torch.Generator().manual_seed(1)
    sizes = torch.randint(1, 300, (count, 2), generator=g).tolist()
    return [
        Request(
            torch.randint(0, 97, (n,), generator=g).tolist(),
            Settings(max_new_tokens=1 + new // 4, **settings),  # type: ignore[arg-type]
        )
        for n, new in sizes
    ]


def made(model: regard.Model, rows: int, kernels: bool) -> Engine:
    """An engine with or without kernels."""
    engine = Engine(model, rows=rows)
    assert engine.graph is not None and engine.pool is not None
    if not kernels:
        steps = GraphSteps(model, engine.pool, rows, 512, kernels=False)
        engine.graph = engine.runners[0] = GraphRunner(steps, rows)
        engine.graph.batch(None, engine.reading)
    return engine


def texts(rows: int) -> list[list[int]]:
    return [r.ids for r in requests(rows)]


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("name", MECHANISMS)
def test_kernels_give_the_logits_of_the_plain_model(
    name: str, rows: int, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gpu_linear.SWITCH, "wide", wide)
    assert largest_gap(Engine(build(name), rows=rows), texts(rows), 20) < BOUND


@pytest.mark.parametrize("rows", [3, 16])
@pytest.mark.parametrize("name", MECHANISMS)
def test_kernels_in_bf16_are_as_near_to_the_plain_model_as_torchs(name: str, rows: int) -> None:
    model = build(name, torch.bfloat16)
    ours, theirs = (largest_gap(made(model, rows, k), texts(rows), 20) for k in (True, False))
    assert ours < 2 * theirs, f"{ours:.3f}, torch {theirs:.3f}"


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("name", MECHANISMS)
def test_graph_gives_the_plain_tokens(name: str, rows: int) -> None:
    model, asked = build(name), requests()
    for kernels in (False, True):
        assert ties(model, asked, served(made(model, rows, kernels), asked)) <= FEW


@pytest.mark.parametrize("name, rows", list(zip(small.FORMS, itertools.cycle((3, 16)))))
def test_every_form_gives_the_plain_logits_and_tokens(name: str, rows: int) -> None:
    model, asked = small.build(name).cuda(), small.requests(rows)
    assert largest_gap(Engine(model, rows=rows), [r.ids for r in asked], 6) < BOUND
    kept_steps._kept.clear()
    assert ties(model, asked, answer(model, asked, rows)) <= FEW


@pytest.mark.parametrize("n", [1, 40, 300])
def test_experts_on_cuda(n: int) -> None:
    shapes = ((16, 192, 256), (16, 192, 256), (16, 256, 192))
    w = gpu_experts.Experts(*((torch.randn(s) / 16).cuda().bfloat16() for s in shapes))
    x, weight = torch.randn(n, 256).cuda().bfloat16(), torch.rand(n, 4).cuda()
    chosen = torch.stack([torch.randperm(16)[:4] for _ in range(n)]).cuda()
    wide = gpu_experts.Experts(w.gate.float(), w.up.float(), w.down.float())
    want = gpu_experts.reference(x.float(), chosen, weight, wide)
    close(gpu_experts.experts(x, chosen, weight, w).float().sum(0), want)


def test_faster_form_is_measured_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_measured, "ON", True)
    monkeypatch.setattr(gpu_measured, "table", lambda card: known)
    monkeypatch.setattr(gpu_measured, "keep", lambda *_: None)
    known: dict[str, str] = {}
    model, asked = build("gqa", torch.bfloat16), requests(4)
    assert answer(model, asked, 4)
    kinds = {key.split()[0] for key in known}
    assert "rows" in kinds <= {"linear", "rows"}
    w = torch.ones(2**22, device="cuda")
    slow, fast = (lambda w: w.exp().exp().exp()), (lambda w: w.exp())
    assert gpu_measured.fastest("slow", w, {"ours": slow, "torch": fast}) == "torch"
    assert gpu_measured.fastest("fast", w, {"ours": fast, "torch": slow}) == "ours"


@pytest.mark.parametrize("settings", [{"top_k": 20, "top_p": 0.8}, {"min_p": 0.05}, {}])
def test_graph_draws_on_the_device(settings: dict) -> None:
    model, asked = build("gqa"), requests(temperature=1.0, seed=5, **settings)
    assert ties(model, asked, answer(model, asked, 4)) <= FEW


OTHERS = [
    {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.5},
    {"logit_bias": ((3, 5.0), (9, -4.0)), "banned": (1, 2), "temperature": 0.8},
    {"min_new_tokens": 1, "eos": (5, 7, 11, 20, 33, 34)},
    {"forced_first": 8, "forced_last": 13, "eos": (13,)},
    {"temperature": 1.2, "samples": 3, "top_p": 0.9},
]


@pytest.mark.parametrize("settings", OTHERS)
def test_every_setting_is_the_same_in_a_graph(settings: dict) -> None:
    """As the runner `torch` has it on the same device, but for ties."""
    model, asked = build("gqa"), [*requests(8, **settings), *requests(3)]
    got = answer(model, asked, 4)
    want = served(Engine(model, runner="torch", rows=4), asked)
    same = sum(a.ids == b.ids and a.finish == b.finish for a, b in zip(got, want, strict=True))
    assert same >= len(asked) - 1, f"{same} of {len(asked)}"
    for a, b in zip(got, want, strict=True):
        if a.ids == b.ids:
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-3)


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "top_p": 0.9, "seed": 5}])
@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("name", MECHANISMS)
def test_guesses_in_a_graph_give_the_plain_tokens(
    name: str, rows: int, settings: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked up, and of a draft model that is right now and then, in every round; by recorded graphs."""
    monkeypatch.setattr(guessed.Guesses, "plan", guessed.always)
    model, asked = build(name), guessed.repeating(requests(**settings))
    draft = guessed.noisy(model, 0.005)
    for guesses in (guessed.looked_up(asked), guessed.drafted(asked)):
        engine = Engine(model, rows=rows, draft=draft)
        assert ties(model, asked, served(engine, guesses)) <= FEW
        assert engine.graph is not None
        assert "guess" in {key[0] for key in engine.graph.steps.recorder.graphs}


def test_generate_guesses_in_a_graph_where_it_is_faster() -> None:
    """As it is measured on the device: a text that goes round and round has fewer steps."""
    model, ids = build("gqa"), [[3, 8] * 6]
    more: dict[str, Any] = {"max_new_tokens": 200, "logit_bias": {3: 40.0, 8: 40.0}}
    plain = regard.generate(model, ids, **more)
    for _ in range(3):
        found = regard.generate(model, ids, lookup=8, **more)
    assert [r.ids for r in found] == [r.ids for r in plain]
    kept = kept_steps._kept[model]
    assert kept.guesses.seconds and "guess" in {key[0] for key in kept.recorder.graphs}


def test_generate_uses_the_graph_and_keeps_it() -> None:
    model, ids = build("gqa"), [[1, 2, 3], [4, 5]]
    first = regard.generate(model, ids, max_new_tokens=20)
    kept = kept_steps._kept[model]
    recorded = set(kept.recorder.graphs)
    again = regard.generate(model, ids, max_new_tokens=20)
    assert [r.ids for r in again] == [r.ids for r in first] and kept_steps._kept[model] is kept
    assert recorded <= set(kept.recorder.graphs)
    with torch.no_grad():
        model.tower.blocks[0].attention.wq.weight.mul_(-1)
    changed = regard.generate(model, ids, max_new_tokens=20)
    plain = regard.generate(model, ids, max_new_tokens=20, layout="contiguous")
    assert [r.ids for r in changed] == [r.ids for r in plain] != [r.ids for r in first]
    assert kept_steps._kept[model] is kept
    pieces = regard.stream(model, [1, 2, 3], max_new_tokens=8)
    assert list(pieces) == []


def test_out_of_memory_is_an_error_and_the_engine_goes_on() -> None:
    model, asked = build("gqa"), requests(4)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        Engine(model, memory=10**15, rows=10**7)
    assert ties(model, asked, answer(model, asked, 4)) <= FEW


def test_dependent_launch_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = build("gqa", torch.bfloat16), requests()
    for rows in (2, 16):
        monkeypatch.setitem(gpu_linear.SWITCH, "pdl", False)
        want = answer(model, asked, rows)
        kept_steps._kept.clear()
        monkeypatch.setitem(gpu_linear.SWITCH, "pdl", True)
        got = answer(model, asked, rows)
        assert [r.ids for r in got] == [r.ids for r in want]


@pytest.mark.parametrize("wide", [True, False])
def test_our_products_give_the_plain_tokens(wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = build("gqa"), requests()
    monkeypatch.setitem(gpu_linear.SWITCH, "wide", wide)
    assert ties(model, asked, answer(model, asked, 16)) <= FEW


def test_recorded_prefill_gives_the_same_tokens() -> None:
    model, asked = build("gqa"), requests()
    engine = Engine(model, rows=4, prefix=False)
    first, second, third = (served(engine, asked) for _ in range(3))  # eager, recorded, replayed
    assert engine.graph is not None and len(engine.graph.steps.recorder.graphs) > 1
    assert [r.ids for r in third] == [r.ids for r in second]
    assert all(ties(model, asked, answers) <= FEW for answers in (first, second))


@pytest.mark.parametrize("m", [8, 64])
def test_wide_kernels_on_cuda(m: int) -> None:
    x, w = torch.randn(m, 2048).cuda().bfloat16(), torch.randn(2048, 2048).cuda().bfloat16() / 45
    g, more = torch.rand(2048).cuda().bfloat16(), gpu_wide.parts(x, w)
    close(more.sum(0), x.float() @ w.float().T)
    close(gpu_wide.parts(x, w, split=False)[0], x.float() @ w.float().T)
    got, want = (gpu_wide.add_norm(x, more, (g, 1e-5, 0.0), None, fast) for fast in (True, False))
    close(got[0], want[0]), close(got[1], want[1])
    close(gpu_wide.gated(x, w, None, "silu"), gpu_wide.gated(x, w, None, "silu", fast=False))
    close(gpu_wide.gate(x, "silu"), gpu_wide.gate(x.float(), "silu", fast=False))


SIZES = [(3, 2048, 512), (33, 768, 1000), (64, 2048, 3072), (16, 8192, 512)]
SIZES += [(65, 2048, 1000), (128, 8192, 512), (200, 768, 3072), (256, 2048, 10240)]


@pytest.mark.parametrize("m, k, n", SIZES)
def test_products_by_the_copy_engine(m: int, k: int, n: int) -> None:
    x, w = torch.randn(m, k).cuda().bfloat16(), (torch.randn(2 * n, k) / k**0.5).cuda().bfloat16()
    if not gpu_dense.hopper(x):
        pytest.skip("needs a Hopper GPU and the Gluon that was measured")
    want = x.float() @ w.float().T
    for count in (c for c in (1, 2, 4) if k % (c * 128) == 0):
        close(gpu_dense.parts(x, w, count).sum(0), want)
    got = gpu_dense.parts(x, w, gated=True)[0]
    close(got, gpu_wide.gate(want, "silu", fast=False))
    assert torch.equal(got, gpu_dense.parts(x, w, gated=True)[0])


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("width, normed", [(64, False), (64, True), (128, False), (128, True)])
@pytest.mark.parametrize("heads, groups, parts", [(32, 8, 4), (8, 8, 1), (48, 4, 2)])
def test_attention_by_the_copy_engine(
    heads: int, groups: int, parts: int, width: int, normed: bool, splits: int,
    monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Rows of no key, of a tile and one more; what lies behind their ends is no number."""
    lengths, page, places = [0, 1, 15, 63, 64, 65, 192, 300], 16, 20
    b, pos = len(lengths), torch.tensor(lengths).cuda()
    table = torch.randperm(b * places).view(b, places).int().cuda()
    k, v = torch.randn(2, b * places, page, groups, width).cuda().bfloat16()
    at = torch.arange(places * page).cuda()
    for i in range(b):
        late = at[pos[i] :]
        for x in (k, v):
            x[table[i, late // page].long(), late % page] = torch.nan
    qkv = torch.randn(parts, b, (heads + 2 * groups) * width).cuda()
    angles = torch.rand(2, places * page, width // 2).cuda().unbind()
    gains = (0.5 + torch.rand(2, width)).cuda().bfloat16()
    norms = tuple((gain, 1e-6, 0.0) for gain in gains) if normed else None
    if not gpu_dense.suits(heads, k, angles):
        pytest.skip("needs a Hopper GPU and the Gluon that was measured")
    form = {"heads": heads, "scale": width**-0.5, "angles": angles, "table": table, "norms": norms}
    old, calls = (k.clone(), v.clone()), []
    attend = gpu_dense.attend
    monkeypatch.setattr(gpu_dense, "attend", lambda *a: calls.append(0) or attend(*a))
    monkeypatch.setattr(gpu_dense, "splits_for", lambda *_: splits)
    got = gpu_attention.decode(qkv, k, v, pos, **form)
    assert calls
    close(got, gpu_attention.decode(qkv, *old, pos, **form, splits=splits))
    assert len(calls) == 1
    for x, y in zip((k, v), old, strict=True):
        if normed:
            # The mean square is a sum in another order: now and then a feature rounds to the next number.
            assert torch.equal(x.isnan(), y.isnan())
            close(x.nan_to_num(), y.nan_to_num())
        else:
            assert torch.equal(x.view(torch.int16), y.view(torch.int16))


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    error = (got.float() - want.float()).norm() / want.float().norm()
    assert error < 1e-2, f"relative error {error:.1e}"  # bf16 in and out


@pytest.mark.parametrize("m, k, n, gated", [(1, 2048, 3072, False), (4, 768, 1000, True)])
def test_linear_on_cuda(m: int, k: int, n: int, gated: bool) -> None:
    x, g = torch.randn(m, k).cuda().bfloat16(), torch.rand(k).cuda().bfloat16()
    w = (torch.randn(n * (1 + gated), k) / k**0.5).cuda().bfloat16()
    act = "silu" if gated else ""
    got = gpu_linear.fused(x, w, norm=(g, 1e-5, 0.0), act=act, gated=gated)
    wide = (g.float(), 1e-5, 0.0)
    close(got, gpu_linear.reference(x.float(), w.float(), norm=wide, act=act, gated=gated))


@pytest.mark.parametrize("b, h, g, d, s", [(1, 32, 8, 64, 400), (3, 8, 8, 128, 3000)])
def test_attention_on_cuda(b: int, h: int, g: int, d: int, s: int) -> None:
    qkv, k, v = (
        torch.randn(*n).cuda().bfloat16()
        for n in ((b, (h + 2 * g) * d), (b, s, g, d), (b, s, g, d))
    )
    pos = torch.randint(s // 2, s, (b,)).cuda()
    got = gpu_attention.decode(qkv, k, v, pos, heads=h, scale=d**-0.5)
    q = qkv[:, : h * d].view(b, h, d)
    close(got, gpu_attention.reference(q, k, v, pos + 1, d**-0.5))


@pytest.mark.parametrize("h, c", [(16, 512), (40, 256), (128, 512)])
def test_latent_on_cuda(h: int, c: int) -> None:
    """Rows of one token, of a tile and one more, and of many; parts that are empty; and some of the tokens."""
    q, entry, latents, ropes = (
        torch.randn(*n).cuda().bfloat16()
        for n in ((4, h, c + 64), (4, c + 64), (500, 16, c), (500, 16, 64))
    )
    pos = torch.tensor([1999, 777, 0, 64]).cuda()
    table = torch.randperm(500).view(4, 125).int().cuda()
    gpu_latent.put(entry[:, :c], latents, table, pos)
    gpu_latent.put(entry[:, c:], ropes, table, pos)
    cache = torch.cat([latents, ropes], -1)[table.long()].flatten(1, 2)
    assert torch.equal(cache[torch.arange(4), pos], entry)
    want = gpu_latent.reference(q, cache, pos + 1, c, 0.05)
    for splits in (None, 1, 8):
        given = (q, latents, ropes, table, pos)
        close(gpu_latent.decode(*given, scale=0.05, splits=splits), want)
    scores = torch.randn(4, 2000).cuda()
    spots = gpu_sparse.topk(scores, pos, 100, table, 16)
    at = gpu_sparse.reference(scores, pos + 1, 100).long()
    some = cache[torch.arange(4)[:, None], at]
    want = gpu_latent.reference(q, some, (pos + 1).clamp(max=100), c, 0.05)
    close(gpu_latent.decode(*given, scale=0.05, chosen=spots), want)


def test_topk_on_cuda_is_choose() -> None:
    scores = torch.randn(6, 131072).cuda()
    scores[1] = scores[1].relu()  # half of them are zero
    scores[2] = (scores[2] * 8).round() / 8
    scores[3] = 0.0
    scores[4] *= -0.0
    pos = torch.tensor([131071, 131071, 100_000, 70_001, 2047, 2048]).cuda()
    hidden = torch.arange(131072).cuda() > pos[:, None]
    want = choose(scores.masked_fill(hidden, -torch.inf), 2048)
    assert torch.equal(gpu_sparse.topk(scores, pos, 2048).long(), want)


@pytest.mark.parametrize("fp8", [False, True])
def test_index_on_cuda(fp8: bool) -> None:
    b, h, d, s = 3, 20, 64, 800
    q, keys = torch.randn(b, h, d).cuda().bfloat16(), torch.randn(150, 16, d).cuda().bfloat16()
    table = torch.randperm(150).view(b, 50).int().cuda()
    pos = torch.full((b,), s - 1).cuda()
    kept = packed_fp8(keys) if fp8 else keys
    # Of ones, half of them negative, a layer norm is its own weight, whatever the order of sums.
    sign = torch.stack([torch.randperm(d) % 2 * 2.0 - 1 for _ in range(b)]).cuda().bfloat16()
    norm = (torch.rand(d).cuda().bfloat16() + 0.5, torch.zeros(d).cuda(), 0.0)
    weight, x = torch.randn(h, 96).cuda(), torch.randn(b, 96).cuda().bfloat16()
    given = (x, weight, q, sign, kept, table, pos)
    asked, w = gpu_sparse.update_cache(*given, norm=norm, angles=None, fp8=fp8)
    own = x.float() @ weight.T * (h * d) ** -0.5
    full = kept[table.long()].flatten(1, 2)
    want = index_scores((fp8_dots if fp8 else dots_exact)(q[:, None], full), own[:, None])[:, 0]
    got = gpu_sparse.index(asked, kept, w, table, pos, s)
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)
    new = sign * norm[0]
    new = packed_fp8(new) if fp8 else new
    assert torch.equal(full[:, -1].view(torch.uint8), new.view(torch.uint8))


PAIRS = ("vaswani-base", "bart-base", "t5-small")


def pair(name: str) -> regard.Model:
    torch.manual_seed(0)
    model = regard.build(name, layers=2, dim=128, heads=4, head_dim=32, ffn_dim=256, vocab=97)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(2).add_(torch.randn_like(p), alpha=0.1)
    return model.cuda()


def sources(count: int, **settings: object) -> list[Request]:
    """Requests with the prompts of `requests` as sources."""
    return [
        Request([0], replace(r.settings, max_new_tokens=12, **settings), source=torch.tensor(r.ids))
        for r in requests(count)
    ]


@torch.no_grad()
def agree(model: regard.Model, asked: list[Request], rows: int) -> None:
    """Eager, recorded and replayed, answers are those of the plain engine in float64, but for one at most; and each
    log probability is what the plain model gives for the very text."""
    plain: Any = copy.deepcopy(model).double()
    want = served(Engine(plain, runner="torch", rows=64, memory=1 << 30), asked)
    for _ in range(3):
        answers = answer(model, asked, rows)
        assert sum(a.ids != b.ids for a, b in zip(answers, want, strict=True)) <= 1
        for r, a, b in zip(asked, answers, want, strict=True):
            assert a.score == pytest.approx(b.score, abs=1e-4)
            ids = torch.tensor([[*r.ids, *a.ids]], device="cuda")
            more = {} if r.source is None else {"source": r.source[None].cuda()}
            logits = plain(ids, **more)[0, len(r.ids) - 1 : -1]
            found = logits.log_softmax(-1).gather(1, ids[0, len(r.ids) :, None])[:, 0]
            assert a.logprobs == pytest.approx(found.tolist(), abs=2 * BOUND)


@pytest.mark.parametrize("name, rows", [("vaswani-base", 3), ("bart-base", 16), ("t5-small", 16)])
def test_encoder_decoders_write_what_the_plain_model_writes(name: str, rows: int) -> None:
    agree(pair(name), sources(8), rows)


BEAMS: list[tuple[str, dict[str, Any]]] = [
    ("gqa", {"length_penalty": 0.5}),
    ("vaswani-base", {"banned": (4,), "forced_first": 9}),
    ("t5-small", {"early_stopping": "never"}),
]


@pytest.mark.parametrize("name, settings", BEAMS)
def test_beams_in_a_graph_find_what_the_plain_engine_finds(name: str, settings: dict) -> None:
    beams = {"beams": 4, "eos": (5, 7), "length_penalty": 0.7, **settings}
    if name in PAIRS:
        return agree(pair(name), sources(8, **beams), 32)
    short = [replace(r.settings, max_new_tokens=12) for r in requests(8, **beams)]
    asked = [replace(r, settings=s) for r, s in zip(requests(8), short, strict=True)]
    agree(build(name), asked, 32)


def test_two_engines_of_a_model_do_not_meet() -> None:
    model, asked = build("gqa"), requests(6)
    want = [r.ids for r in answer(model, asked, 4)]
    first, second = (Engine(model, rows=4, memory=2**26) for _ in range(2))
    found: dict[int, dict[int, list[int]]] = {0: {}, 1: {}}
    for engine in (first, second):
        for i, r in enumerate(asked):
            engine.submit(Request(list(r.ids), r.settings, key=i))
    while not (first.idle and second.idle):
        for k, engine in enumerate((first, second)):
            found[k] |= {e.request: e.done[0].ids for e in engine.step() if e.done is not None}
    assert all([each[i] for i in range(6)] == want for each in found.values())


def odd(sample: int, ids: list[int]) -> torch.Tensor:
    """A mask: every third token, others after each text; none after nine."""
    return (torch.arange(97) + sum(ids)) % 3 == (0 if len(ids) < 9 else 3)


def test_best_tokens_prompts_and_masks_are_the_same_in_a_graph() -> None:
    """Rows with masks beside rows without, drawn and greedy, as the runner `torch` has them on the same device."""
    model = build("gqa")
    asked = [
        *requests(4, top_logprobs=5, prompt_logprobs=True),
        *requests(4, temperature=1.0, top_p=0.9, top_logprobs=20),
    ]
    for i, r in enumerate(asked):
        r.mask = odd if i % 2 else None
    got = answer(model, asked, 8)
    want = served(Engine(model, runner="torch", rows=8), asked)
    for r, a, b in zip(asked, got, want, strict=True):
        assert (a.ids, a.finish) == (b.ids, b.finish)
        assert r.mask is None or all((t + sum(a.ids[:i])) % 3 == 0 for i, t in enumerate(a.ids))
        assert a.prompt_logprobs[1:] == pytest.approx(b.prompt_logprobs[1:], abs=1e-3)
        for x, y in zip(
            a.top_logprobs + a.prompt_top_logprobs,
            b.top_logprobs + b.prompt_top_logprobs,
            strict=True,
        ):
            assert [p for _, p in x] == pytest.approx([p for _, p in y], abs=1e-3)


def test_row_that_nothing_is_left_for_ends_alone() -> None:
    """Its mask allows one token, which is banned: after three others, and at once."""
    model, few = build("gqa"), requests(3, temperature=1.0)
    want = [r.ids for r in answer(model, few, 8)]

    def one(sample: int, ids: list[int]) -> torch.Tensor:
        return torch.arange(97) == (5 if len(ids) < 3 else 4)

    for how in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3, "top_p": 0.5}):
        for ban, said in ((4, [5, 5, 5]), (5, [])):
            settings = Settings(max_new_tokens=9, banned=(ban,), **how)  # type: ignore[arg-type]
            lost = Request([1, 2, 3], settings, mask=one)
            *others, last = answer(model, [*few, lost], 8)
            assert [r.ids for r in others] == want
            assert (last.ids, last.finish) == (said, "error")
            assert "its mask allows no token that its other settings leave" in last.error


def test_request_too_large_for_the_device_ends_alone() -> None:
    """Real memory, of which hardly any is free: a prompt that needs more ends with an error, the others do not."""
    model, few = build("gqa"), requests(3)
    want = [r.ids for r in answer(model, few, 4)]
    engine = Engine(model, rows=4)
    large = Request([1] * 400, Settings(max_new_tokens=2, prompt_logprobs=True))
    engine.graph.steps.read, read = (
        lambda *a: _greedy_for_memory(read, *a),
        engine.graph.steps.read,
    )
    found = served(engine, [few[0], large, *few[1:]])
    assert [found[i].ids for i in (0, 2, 3)] == want
    assert found[1].finish == "error"
    assert "out of memory on cuda" in found[1].error


def _greedy_for_memory(read: object, pack: object, used: object, wanted: object = ()) -> object:
    """Reads; for log probabilities with more memory than there is."""
    if wanted:
        torch.empty(2**50, dtype=torch.uint8, device="cuda")
    return read(pack, used, wanted)  # type: ignore[operator]
