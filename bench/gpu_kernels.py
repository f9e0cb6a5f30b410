"""The GPU kernels alone: against their plain forms, and over the shapes they can have, in bf16.

python bench/gpu_kernels.py                 k: every kernel's error
python bench/gpu_kernels.py --part t        sweeps the shapes of linear layers of few rows, prints the best as a table
python bench/gpu_kernels.py --part w        the same for products of 8 and 64 rows, and attention
python bench/gpu_kernels.py --part q        products with weights in fp8 and int4 at 1 to 256 rows; checks them;
                                            --sweep tries other shapes and groups, --rows says how many rows
python bench/gpu_kernels.py --part e        experts of 1 to 4,096 rows
python bench/gpu_kernels.py --part l        latent attention at 32k tokens; index scores and top-2,048 at 128k
python bench/gpu_kernels.py --part d        DSA against dense MLA at 128k tokens through regard.Engine
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import textwrap
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from gpu_measure import BF16, replayed, run_parts, seconds

import regard
from regard.attention.sparse import (
    choose,
    dots_exact,
    fp8_dots,
    index_scores,
    packed_fp8,
    to_fp8,
)
from regard.decode.engine import Engine
from regard.decode.sequence import page_keys
from regard.decode.settings import Request, Settings
from regard.kernels import rounded
from regard.kernels.packed import Packed
from regard.kernels.triton import attention as gpu_attention
from regard.kernels.triton import experts as gpu_experts
from regard.kernels.triton import latent as gpu_latent
from regard.kernels.triton import linear as gpu_linear
from regard.kernels.triton import sparse as gpu_sparse
from regard.kernels.triton import wide as gpu_wide
from regard.models import Tokens, TransformerConfig

COLD = 400_000_000  # bytes of weights that a sweep reads in turn, more than the device's cache


def randn(*shape: int, by: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * by).to(BF16)


# --- errors -------------------------------------------------------------------------------------------------------


def part_k(args: argparse.Namespace) -> None:
    """Relative error ||kernel - plain in float32|| / ||plain|| of each kernel in bf16; about 3e-3 is rounding."""
    torch.manual_seed(0)
    check_linear()
    check_attention()
    check_wide()
    check_latent()
    check_sparse()


def show(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    error = ((got.float() - want.float()).norm() / want.float().norm()).item()
    print(f"  {name:44s} {error:.1e} {'ok' if error < 1e-2 else 'WRONG'}")


def check_linear() -> None:
    for (m, n), k, gated in itertools.product(
        ((1, 2048), (4, 1000), (8, 2048)), (2048, 8192, 768), (False, True)
    ):
        x, w, g = randn(m, k), randn(n * (1 + gated), k, by=k**-0.5), randn(k)
        more: dict[str, Any] = {"act": "silu" if gated else "", "gated": gated}
        got = gpu_linear.fused(x, w, norm=(g, 1e-5, 0.0), residual=randn(m, n).zero_(), **more)
        want = gpu_linear.reference(x.float(), w.float(), norm=(g.float(), 1e-5, 0.0), **more)
        show(f"linear m={m} k={k} n={n} gated={gated}", got, want)


def check_attention() -> None:
    for b, h, g, d, s in (
        (1, 32, 8, 64, 400),
        (64, 32, 8, 64, 400),
        (4, 32, 32, 128, 4096),
        (3, 16, 2, 128, 900),
    ):
        qkv, k, v = randn(b, (h + 2 * g) * d), randn(b, s, g, d), randn(b, s, g, d)
        pos = torch.randint(s // 2, s, (b,), device="cuda")
        row = torch.arange(b, device="cuda")
        got = gpu_attention.decode(qkv, k, v, pos, heads=h, scale=d**-0.5)
        q = qkv[:, : h * d].view(b, h, d)
        fine = torch.equal(k[row, pos].flatten(1), qkv[:, h * d : (h + g) * d])
        want = gpu_attention.reference(q, k, v, pos + 1, d**-0.5)
        show(f"attention b={b} h={h} g={g} d={d} stored={fine}", got, want)
        pools, table = paged(k, v)
        got = gpu_attention.decode(
            qkv, pools[0], pools[1], pos, heads=h, scale=d**-0.5, table=table
        )
        show("  the same in pages", got, want)


def paged(*stored: torch.Tensor, page: int = 16) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Caches (b s g d) as pools of pages in random order, and the table that finds them."""
    b, s, g, d = stored[0].shape
    pages = -(-s // page)
    table = torch.randperm(b * pages, device="cuda").view(b, pages).int()
    pools = []
    for x in stored:
        pool = torch.zeros(b * pages, page, g, d, dtype=BF16, device="cuda")
        x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, pages * page - s))
        pool[table.flatten().long()] = x.view(b * pages, page, g, d)
        pools.append(pool)
    return pools, table


def check_wide() -> None:
    for m, k, n in ((8, 2048, 3072), (64, 8192, 2048), (33, 768, 1000)):
        x, w, g, more = randn(m, k), randn(n, k, by=k**-0.5), randn(k), randn(4, m, k).float()
        want = x.float() @ w.float().T
        show(f"parts m={m} k={k} n={n}", gpu_wide.parts(x, w).sum(0), want)
        show("  in one", gpu_wide.parts(x, w, split=False)[0], want)
        got = gpu_wide.gated(x, w, None, "silu")
        show("  gated", got, gpu_wide.gate(want, "silu", fast=False))
        for i, name in enumerate(("  residual", "  norm")):
            got, want = (
                gpu_wide.add_norm(x, more, (g, 1e-5, 0.0), None, fast)[i] for fast in (True, False)
            )
            show(name, got, want)
        show("  gate", gpu_wide.gate(x, "silu"), gpu_wide.gate(x.float(), "silu", fast=False))


def check_latent() -> None:
    for b, h, s in ((1, 16, 700), (4, 32, 4096), (2, 128, 1000)):
        places = -(-s // 16)
        q = randn(b, h, 576)
        latents, ropes = randn(b * places, 16, 512), randn(b * places, 16, 64)
        table = torch.randperm(b * places, device="cuda").view(b, places).int()
        pos = torch.randint(s // 2, s, (b,), device="cuda")
        got = gpu_latent.decode(q, latents, ropes, table, pos, scale=0.05)
        cache = torch.cat([latents, ropes], -1)[table.long()].flatten(1, 2)
        want = gpu_latent.reference(q, cache, pos + 1, 512, 0.05)
        show(f"latent b={b} h={h}", got, want)


def check_sparse() -> None:
    b, s, k = 16, 131072, 2048
    scores = torch.randn(b, s, device="cuda")
    scores[1:9] = (scores[1:9].relu() * 8).round() / 8  # ties
    pos = torch.randint(k, s, (b,), device="cuda")
    hidden = torch.arange(s, device="cuda") > pos[:, None]
    want = choose(scores.masked_fill(hidden, -torch.inf), k)
    same = torch.equal(gpu_sparse.topk(scores, pos, k).long(), want)
    print(f"  top-{k:,} of {s:,}, batch {b}: {'the same as choose' if same else 'WRONG'}")
    q, keys, w, table, pos = indexed(3, 3008)
    for fp8 in (False, True):
        kept, asked, own = in_fp8(keys, q, w) if fp8 else (keys, q, w)
        got = gpu_sparse.index(asked, kept, own, table, pos, 3008)
        full = kept[table.long()].flatten(1, 2)
        dots = (fp8_dots if fp8 else dots_exact)(q[:, None], full)
        show(f"index scores fp8={fp8}", got, index_scores(dots, w[:, None])[:, 0])


def indexed(b: int, s: int, h: int = 64, d: int = 128, page: int = 16) -> tuple[torch.Tensor, ...]:
    """Index queries, keys in pages, weights, a block table and positions."""
    places = s // page
    q, keys = randn(b, h, d), randn(b * places, page, d)
    table = torch.randperm(b * places, device="cuda").view(b, places).int()
    pos = torch.full((b,), s - 1, device="cuda")
    return q, keys, torch.randn(b, h, device="cuda"), table, pos


def in_fp8(keys: torch.Tensor, q: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Keys, queries, and weights that hold the scales of the queries."""
    q8, size = to_fp8(q)
    return packed_fp8(keys), q8, w * size[..., 0]


# --- latent attention ---------------------------------------------------------------------------------------------


def part_l(args: argparse.Namespace) -> None:
    """Latent attention (512 + 64) of 32,768 tokens in pages; a step of DSA at 131,072 tokens by its kernels."""
    for b, h, page in (
        (16, 16, 16),
        (16, 32, 16),
        (16, 64, 16),
        (16, 64, 64),
        (16, 128, 16),
        (1, 64, 16),
    ):
        s = 32768
        q, latents, ropes, table, pos = paged_latents(b, h, s, page)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call = partial(gpu_latent.decode, q, latents, ropes, table, pos, scale=0.05)
        call()
        size = latents.nbytes + ropes.nbytes
        more = (torch.cuda.max_memory_allocated() - before) / size
        took = replayed([call] * 10)
        print(
            f"  batch {b:2d}, {h:3d} heads, pages of {page}: {took * 1e6:6.1f} us, {size / took / 1e12:.2f} TB/s, "
            f"{b * s * h * 2 * 1088 / took / 1e12:.0f} TFLOP/s, memory {1 + more:.3f} times the cache"
        )
        del q, latents, ropes, table, call
    s, k = 131072, 2048
    q, keys, w, table, pos = indexed(16, s)
    for fp8 in (False, True):
        kept, asked, own = in_fp8(keys, q, w) if fp8 else (keys, q, w)
        took = replayed([partial(gpu_sparse.index, asked, kept, own, table, pos, s)] * 10)
        speed = f"{took * 1e6:.1f} us, {kept.nbytes / took / 1e12:.2f} TB/s"
        print(f"  index scores, batch 16, {'float8' if fp8 else 'bf16'} keys: {speed}")
    scores = gpu_sparse.index(q, keys, w, table, pos, s)
    took = replayed([partial(gpu_sparse.topk, scores, pos, k, table, 16)] * 10)
    plain = replayed([partial(scores.topk, k)] * 10)
    print(f"  exact top-{k:,}, batch 16: {took * 1e6:.1f} us; torch.topk {plain * 1e6:.1f} us")
    del keys
    spots = gpu_sparse.topk(scores, pos, k, table, 16)
    for h in (64, 128):
        q, latents, ropes, table, pos = paged_latents(16, h, s, 16)
        call = partial(gpu_latent.decode, q, latents, ropes, table, pos, scale=0.05, chosen=spots)
        print(f"  attention over the choice, {h} heads: {replayed([call] * 10) * 1e6:.1f} us")
        del q, latents, ropes


def paged_latents(b: int, h: int, s: int, page: int) -> tuple[torch.Tensor, ...]:
    places = s // page
    table = torch.randperm(b * places, device="cuda").view(b, places).int()
    latents, ropes = randn(b * places, page, 512), randn(b * places, page, 64)
    return randn(b, h, 576), latents, ropes, table, torch.full((b,), s - 1, device="cuda")


def part_d(args: argparse.Namespace) -> None:
    """A step at 131,072 tokens, batch 16, through regard.Engine: DeepSeek-V3.2's attention in 8 layers 1,024 wide."""
    took = {}
    for name in ("mla", "exact", "fp8"):
        engine, texts = long_texts(name)
        pool = engine.pool
        assert pool is not None
        for _ in range(2):  # records the graphs of steps, then those of prompts
            say(engine, texts, 18)
        torch.cuda.reset_peak_memory_stats()
        few, many = (min(say(engine, texts, n) for _ in range(2)) for n in (18, 274))
        took[name] = (many - few) / 256
        used = torch.cuda.max_memory_allocated() - sum(p.nbytes for p in engine.model.parameters())
        print(
            f"  {name}: {took[name] * 1e3:.2f} ms a step, memory {used / pool.nbytes:.3f} times the cache of "
            f"{pool.nbytes / 2**30:.1f} GiB"
        )
        print(textwrap.indent(engine.explain(), "    "))
        del engine, pool
        torch.cuda.empty_cache()
    for name in ("exact", "fp8"):
        print(
            f"  dense MLA takes {took['mla'] / took[name]:.1f} times as long as DSA, index keys {name}"
        )


def long_texts(name: str, rows: int = 16, length: int = 131072) -> tuple[Engine, list[list[int]]]:
    """An engine, and texts whose pages are in its pool as another request would have left them, but for their end."""
    mla = regard.MLA(128, 512, 128, 64, 128, 1536, rope=regard.Rope())
    sparse = {"rope_dim": 64, "precision": name}
    attention = mla if name == "mla" else regard.DSA(mla, 64, 128, 2048, **sparse)
    ffn, norm = regard.MLP(2048, "silu", gated=True, bias=False), regard.Norm(1e-6, rms=True)
    tower = regard.Tower(1024, 8, attention, ffn, norm=norm)
    config = TransformerConfig(Tokens(1024), tower, regard.LM(), max_len=length)
    engine = Engine(
        regard.build(config, device="cuda", dtype=BF16), rows=rows, pages=rows * length // 16
    )
    pool, g = engine.pool, random.Random(0)
    assert pool is not None and not engine.plain, engine.plain
    for store in pool.stores:
        for key, x in store.items():
            float8 = key == "index_k" and name == "fp8"
            x.copy_(packed_fp8(randn(*x.shape[:2], 128))) if float8 else x.normal_()
    texts = [[g.randrange(1024) for _ in range(length - 300)] for _ in range(rows)]
    for text in texts:
        for key in page_keys(text, pool.page)[:-1]:
            page = pool.take()
            pool.publish(page, key)
            pool.drop(page)
    return engine, texts


def say(engine: Engine, texts: list[list[int]], count: int) -> float:
    """Seconds of `count` tokens for each text."""
    for text in texts:
        engine.submit(Request(text, Settings(max_new_tokens=count)))
    return seconds(lambda: list(engine.run()))


# --- shapes -------------------------------------------------------------------------------------------------------


def weights(n: int, k: int) -> list[torch.Tensor]:
    """As many matrices (n k) as no cache holds."""
    return [randn(n, k) for _ in range(max(2, min(24, COLD // (n * k * 2))))]


def part_t(args: argparse.Namespace) -> None:
    """The best (rows of W, elements of K, warps) for each matrix of the model, over weights larger than the cache."""
    for rows in map(int, (args.rows or "1").split(",")):
        for name, k, n, gated, norm in (
            ("qkv", 2048, 3072, False, True),
            ("out", 2048, 2048, False, False),
            ("gate|up", 2048, 8192, True, True),
            ("down", 8192, 2048, False, False),
            ("head", 2048, 128256, False, True),
        ):
            x, w, g = randn(rows, k), weights(n * (1 + gated), k), torch.ones(k).cuda().to(BF16)
            more: dict[str, Any] = {"act": "silu" if gated else "", "gated": gated}
            more["norm"] = (g, 1e-5, 0.0) if norm else None
            found = few_rows(name, x, w, more)
            plain = replayed([partial(gpu_linear.reference, x, each, **more) for each in w])
            now, size = gpu_linear.shape(k, n, gated), w[0].numel() * 2
            mine = next((t for t, b in found if b == now), math.nan)
            for took, blocks in sorted(found)[:3]:
                print(
                    f"  m={rows} {name:8s} ({k}, {n}, {gated}): {blocks},  # {took * 1e6:.1f} us, "
                    f"{size / took / 1e12:.2f} TB/s; default {now} {mine * 1e6:.1f} us, torch {plain * 1e6:.1f} us"
                )
            del w


def few_rows(
    name: str, x: torch.Tensor, w: list[torch.Tensor], more: dict[str, Any]
) -> list[tuple[float, tuple[int, int, int]]]:
    """Seconds of each shape that the kernel for few rows can have."""
    k, found = x.shape[1], []
    for block_n, block_k, warps in itertools.product(
        (1, 2, 4, 8, 16), (1024, 2048, 4096, 8192), (2, 4, 8)
    ):
        load = block_n * block_k * (1 + more["gated"]) / (32 * warps)
        if not (16 <= load <= 128) or block_k > max(k, 1024) or k // block_k > 8:
            continue
        blocks = (block_n, block_k, warps)
        try:
            one = partial(gpu_linear.fused, x, blocks=blocks, **more)
            found.append((replayed([partial(one, each) for each in w], 3), blocks))
        except Exception as error:
            print(f"    {name} {blocks}: {type(error).__name__}")
    return found


def part_w(args: argparse.Namespace) -> None:
    """For many rows: (rows of W, elements of K, parts, stages, warps, asked for ahead), and attention's tiles."""
    for rows in (8, 64):
        for name, k, n, split, gated in (
            ("qkv", 2048, 3072, True, False),
            ("out", 2048, 2048, True, False),
            ("gate|up", 2048, 8192, False, True),
            ("down", 8192, 2048, True, False),
            ("head", 2048, 128256, False, False),
        ):
            x, w = randn(rows, k), weights(n * (1 + gated), k)
            plain = replayed([partial(torch.nn.functional.linear, x, each) for each in w])
            shapes = [(32, 128), (64, 64), (64, 128), (64, 256), (128, 64), (128, 128)]
            tried = [(*s, p, 4, 4, 512) for s in shapes for p in ((2, 4) if split else (1,))]
            more: dict[str, Any] = {"act": "silu", "gated": True} if gated else {}
            found = []
            for blocks in dict.fromkeys([gpu_wide.blocks_for(k, n, split, gated), *tried]):
                try:
                    calls = [partial(gpu_wide.parts, x, each, split, blocks, **more) for each in w]
                    found.append((replayed(calls, 3), blocks))
                except Exception as error:
                    print(f"    {name} {blocks}: {type(error).__name__}")
            for took, blocks in [*sorted(found)[:2], *found[:1]]:
                print(
                    f"  m={rows} ({k}, {n}, {split}): {blocks},  # {name} {took * 1e6:.1f} us, "
                    f"{w[0].numel() * 2 / took / 1e12:.2f} TB/s; torch's product {plain * 1e6:.1f} us"
                )
            del w
    attention_tiles()


def attention_tiles() -> None:
    b, h, g, d, s = 64, 32, 8, 64, 512
    caches = randn(8, 2, b, s, g, d)
    qkv = randn(b, (h + 2 * g) * d)
    tried = ((64, 4, 2), (32, 4, 2), (64, 4, 3), (64, 2, 2), (64, 8, 2), (128, 4, 2), (128, 8, 2))
    for keys in (140, 256, 390):
        pos, found = torch.full((b,), keys, device="cuda"), []
        for tiles in tried:
            one = partial(gpu_attention.decode, qkv, pos=pos, heads=h, scale=0.1)
            with patch.dict(gpu_attention.FULL, {d: tiles}):
                found.append((replayed([partial(one, k=k, v=v) for k, v in caches]), tiles))
        line = ", ".join(f"{tiles} {took * 1e6:.1f}" for took, tiles in found)
        print(f"  attention, 64 rows of {keys} keys, (keys a step, warps, stages) us: {line}")


# --- packed weights -----------------------------------------------------------------------------------------------

# Of a Qwen3-8B: name, K, N, gated, whether few rows have a norm.
EIGHT = (
    ("qkv", 4096, 6144, False, True),
    ("out", 4096, 4096, False, False),
    ("gate|up", 4096, 12288, True, True),
    ("down", 12288, 4096, False, False),
)
HEAD = ("head", 4096, 151936, False, True)
FORMS = (("bf16", 0), ("fp8", 0), ("int4", 128), ("int4", 64), ("int4", 32))


def part_q(args: argparse.Namespace) -> None:
    """Products of a Qwen3-8B shape with weights in bf16, fp8 and int4 (inputs of a scale): us, TB/s of packed bytes."""
    torch.manual_seed(0)
    each = list(map(int, (args.rows or "1,2,4,8,16,64,256").split(",")))
    for (kind, group), rows in itertools.product(FORMS if args.sweep else FORMS[:3], each):
        sweep = args.sweep and (kind, group) in FORMS[1:3]
        total, size = 0.0, 0
        for name, k, n, gated, norm in (*EIGHT, HEAD):
            if name == "head" and kind == "int4":
                continue
            w = packed_weights(kind, group, n * (1 + gated), k)
            x, g = randn(rows, k), torch.ones(k).cuda().to(BF16)
            if rows <= gpu_linear.MOST:
                found = few_packed(x, w, g, gated, norm, sweep)
            else:
                found = many_packed(x, w, gated, sweep)
            best = sorted(found, key=lambda each: each[0])[:3]
            took, said = best[0], ", ".join(f"{t * 1e6:.1f} {b}" for t, b in best)
            now = "" if kind == "bf16" else f"; usual {found[0][1]} {found[0][0] * 1e6:.1f}"
            print(
                f"    {kind} {group} m={rows} {name}: {w[0].nbytes / took[0] / 1e12:.2f} TB/s, us: {said}{now}"
            )
            if name != "head":
                total, size = total + took[0], size + w[0].nbytes
            del w
        print(
            f"  {kind} {group or ''} m={rows}: a layer {total * 1e6:.1f} us, {size / total / 1e12:.2f} TB/s",
            flush=True,
        )


def packed_weights(kind: str, group: int, n: int, k: int) -> list[Any]:
    """As many as no cache holds."""
    full = randn(n, k, by=k**-0.5)
    if kind == "bf16":
        return [full.clone() for _ in range(max(2, COLD // full.nbytes))]
    one = rounded.pack(full, kind, group=group or None)
    return [one.clone() for _ in range(max(2, min(64, COLD // one.nbytes)))]


def check_packed(name: str, call: Any, plain: Any, w: Any) -> None:
    if isinstance(w, Packed):
        got, want = call(w).float(), plain(w.dense()).float()
        want = want if got.dim() == want.dim() else want[None]
        got = got.sum(0, keepdim=True) if got.dim() == 3 else got
        if (error := ((got - want).norm() / want.norm()).item()) > 1e-2 or math.isnan(error):
            print(f"    {name}: WRONG, {error:.1e}")


def few_packed(
    x: torch.Tensor, w: list[Any], g: torch.Tensor, gated: bool, norm: bool, sweep: bool
) -> list[tuple[float, Any]]:
    """Seconds of the usual shape of the kernel for few rows, then of others."""
    n, full = len(w[0]) // (1 + gated), isinstance(w[0], torch.Tensor)
    more: dict[str, Any] = {"act": "silu" if gated else "", "gated": gated}
    more["norm"] = (g, 1e-5, 0.0) if norm else None
    columns = w[0].shape[1] if full else w[0].q.shape[1]
    usual = gpu_linear.shape(columns, n, gated)
    usual = usual if full else gpu_linear.packed_shape(w[0], len(x), gated)
    tried = [usual] if full else [usual, gpu_linear.packed_shape(w[0], len(x), gated, many=True)]
    if sweep:
        most = 256 if len(x) == 1 else 128
        for b in itertools.product((1, 2, 4, 8, 16), (512, 1024, 2048, 4096), (2, 4, 8)):
            mine = b[0] * b[1] * (1 + gated) / (32 * b[2])  # bytes of a thread
            if 64 <= mine <= most and columns % b[1] == 0 and columns // b[1] <= 12:
                tried.append(b)
    found = []
    for blocks in dict.fromkeys(tried):
        one = partial(gpu_linear.fused, x, blocks=blocks, **more)
        check_packed(f"{blocks}", one, partial(gpu_linear.reference, x, **more), w[0])
        found.append((replayed([partial(one, each) for each in w], 3), blocks))
    return found


def many_packed(x: torch.Tensor, w: list[Any], gated: bool, sweep: bool) -> list[tuple[float, Any]]:
    """The same of the kernel for more rows; torch's product, of packed weights that are brought back, last."""
    more: dict[str, Any] = {"act": "silu", "gated": True} if gated else {}
    plain = partial(gpu_linear.reference, x, **more)
    if isinstance(w[0], torch.Tensor):
        ours = gpu_wide.gated if gated else gpu_wide.product
        last: tuple[Any, ...] = (None, "silu") if gated else (None, True, True)
        calls = [partial(ours, x, each, *last) for each in w]
        return [
            (replayed(calls, 3), "as today"),
            (replayed([partial(plain, each) for each in w], 3), "torch"),
        ]
    n, k, split, found = len(w[0]) // (1 + gated), x.shape[1], not gated and len(w[0]) < 2**16, []
    usual = gpu_wide.packed_blocks(w[0], len(x), split, gated)
    deep = gpu_wide.packed_blocks(w[0], len(x), split, gated, deep=len(x) <= 64)
    step, tried = usual[1], [usual, deep]
    for rows, count, stages in itertools.product((64, 128), (1, 2, 4), (4, 8) if sweep else ()):
        if (split or count == 1) and w[0].q.shape[1] % (count * step) == 0:
            tried.append((rows, step, count, stages, 4, 512))
    for blocks in dict.fromkeys(tried):
        one = partial(gpu_wide.parts, x, split=split, blocks=blocks, **more)
        try:
            check_packed(f"{blocks}", one, plain, w[0])
            found.append((replayed([partial(one, each) for each in w], 3), blocks))
        except Exception as error:
            print(f"    {n} {k} {blocks}: {type(error).__name__}")
    return [*found, (replayed([partial(plain, each) for each in w], 3), "torch")]


def part_e(args: argparse.Namespace) -> None:
    """The chosen experts, both products and their order; the rate is that of weights that are read once."""
    for name, m, f, count, a in (("Mixtral", 4096, 14336, 8, 2), ("Qwen3-MoE", 2048, 768, 128, 8)):
        shapes = ((count, f, m), (count, f, m), (count, m, f))
        weights = (torch.empty(s, dtype=BF16, device="cuda").normal_(0, 0.02) for s in shapes)
        w = gpu_experts.Experts(*weights)
        for rows in (1, 8, 64, 4096):
            chosen = torch.rand(rows, count, device="cuda").topk(a).indices
            x, weight = randn(rows, m), torch.rand(rows, a, device="cuda")
            took = replayed([partial(gpu_experts.experts, x, chosen, weight, w)] * 4)
            size, work = len(chosen.unique()) * 6 * m * f, rows * a * 6 * m * f
            print(
                f"  {name}, {rows} rows: {took * 1e6:.1f} us, {size / took / 1e12:.2f} TB/s, "
                f"{work / took / 1e12:.0f} TFLOP/s"
            )
        del w


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", help="rows of x in parts t and q")
    parser.add_argument("--sweep", action="store_true", help="other shapes in part q")
    run_parts(
        parser,
        {
            "k": part_k,
            "t": part_t,
            "w": part_w,
            "q": part_q,
            "l": part_l,
            "d": part_d,
            "e": part_e,
        },
        "k",
    )
