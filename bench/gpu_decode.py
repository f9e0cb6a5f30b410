"""Decoding on one GPU: a Llama-3.2-1B shape with random weights in bf16, against the memory's speed and transformers.

    python bench/gpu_decode.py                         parts k,a,b,c,d,e; under four minutes on an H200
    python bench/gpu_decode.py --part t                 sweeps the linear kernels' shapes and prints the best as a table
    python bench/gpu_decode.py --part w                 the same for products of 8 and 64 rows, and attention
    python bench/gpu_decode.py --part c --profile       also the kernels of a step at batch 1 and 64
    python bench/gpu_decode.py --part c --compile       also transformers with a static cache, compiled

k kernels against their plain forms; a copy bandwidth; b tokens against the model itself; c tokens/s at batch 1, 8, 64
(128 tokens of prompt, 256 new), interleaved with transformers; d static against continuous batching of 512 requests;
e MLA, GQA and MHA at 32k context. A part that fails prints why, and the next one runs.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import regard
from regard.decode.graphs import GraphDecoder
from regard.decode.settings import Request, Settings
from regard.kernels import gpu_attention, gpu_latent, gpu_linear, gpu_wide
from regard.models import Tokens, TransformerConfig

BF16 = torch.bfloat16
SEEN: dict[str, Any] = {}


def seconds(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def replayed(calls: list[Callable[[], Any]], repeats: int = 5) -> float:
    """Seconds a call, from a graph that holds all of them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    graph.replay()
    best = statistics.median(seconds(graph.replay) for _ in range(repeats)) / len(calls)
    del kept, graph
    return best


def llama() -> Any:
    if "model" not in SEEN:
        torch.manual_seed(0)
        SEEN["model"] = regard.build("llama-3.2-1b", device="cuda", dtype=BF16)
    return SEEN["model"]


def bandwidth() -> float:
    """Bytes a second of a large copy, read and written."""
    if "copy" not in SEEN:
        x = torch.empty(2**31, dtype=torch.uint8, device="cuda").random_(0, 255)
        y = torch.empty_like(x)
        for _ in range(3):
            y.copy_(x)
        SEEN["copy"] = 2 * len(x) / statistics.median(seconds(lambda: y.copy_(x)) for _ in range(9))
    return SEEN["copy"]


def prompts(n: int, low: int, high: int, vocab: int, seed: int = 0) -> list[list[int]]:
    r = random.Random(seed)
    return [[r.randrange(vocab) for _ in range(r.randint(low, high))] for _ in range(n)]


# --- parts --------------------------------------------------------------------------------------------------------


def part_k(args: argparse.Namespace) -> None:
    """Relative error ||kernel - plain in float32|| / ||plain|| of each kernel in bf16; about 3e-3 is rounding."""
    torch.manual_seed(0)

    def randn(*shape: int, by: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, device="cuda") * by).to(BF16)

    def show(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
        error = ((got.float() - want.float()).norm() / want.float().norm()).item()
        print(f"  {name:44s} {error:.1e} {'ok' if error < 1e-2 else 'WRONG'}")

    for m, k, n, gated in itertools.product(
        (1, 2, 4, 8), (2048, 8192, 768), (2048, 1000), (False, True)
    ):
        x, w, g = randn(m, k), randn(n * (1 + gated), k, by=k**-0.5), randn(k)
        more = {"act": "silu" if gated else "", "gated": gated}
        got = gpu_linear.fused(x, w, norm=(g, 1e-5), residual=randn(m, n).zero_(), **more)
        want = gpu_linear.reference(x.float(), w.float(), norm=(g.float(), 1e-5), **more)
        if (m, n) in ((1, 2048), (4, 1000), (8, 2048)):
            show(f"linear m={m} k={k} n={n} gated={gated}", got, want)
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
        page, pages = 16, -(-s // 16)
        table = torch.randperm(b * pages, device="cuda").view(b, pages).int()
        pools = []
        for x in (k, v):
            pool = torch.zeros(b * pages, page, g, d, dtype=BF16, device="cuda")
            x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, pages * page - s))
            pool[table.flatten().long()] = x.view(b * pages, page, g, d)
            pools.append(pool)
        got = gpu_attention.decode(qkv, *pools, pos, heads=h, scale=d**-0.5, table=table)
        show("  the same in pages", got, want)
    for m, k, n in ((8, 2048, 3072), (64, 8192, 2048), (33, 768, 1000)):
        x, w, g, more = randn(m, k), randn(n, k, by=k**-0.5), randn(k), randn(4, m, k).float()
        want = x.float() @ w.float().T
        show(f"parts m={m} k={k} n={n}", gpu_wide.parts(x, w).sum(0), want)
        show("  in one", gpu_wide.parts(x, w, split=False)[0], want)
        for i, name in enumerate(("  residual", "  norm")):
            got, want = (gpu_wide.add_norm(x, more, g, 1e-5, fast)[i] for fast in (True, False))
            show(name, got, want)
        show("  gate", gpu_wide.gate(x, "silu"), gpu_wide.gate(x.float(), "silu", fast=False))
    for b, h, s in ((1, 16, 700), (4, 32, 4096), (2, 128, 1000)):
        q, entry, cache = randn(b, h, 576), randn(b, 576), randn(b, s, 576)
        pos = torch.randint(s // 2, s, (b,), device="cuda")
        got = gpu_latent.decode(q, entry, cache, pos, latent=512, scale=0.05)
        want = gpu_latent.reference(q, cache, pos + 1, 512, 0.05)
        show(f"latent b={b} h={h}", got, want)


def part_a(args: argparse.Namespace) -> None:
    print(f"  copy {bandwidth() / 1e12:.2f} TB/s on {torch.cuda.get_device_name()}")


def part_b(args: argparse.Namespace) -> None:
    """Every token a decoder chose, scored by the model itself over the whole text: how far below the best it was."""
    model = llama()
    texts = prompts(8, 96, 160, 128256)
    asked = [Request(ids, Settings(max_new_tokens=64)) for ids in texts]
    for name, rows, options in (
        ("graph, kernels, batch 1", 1, {}),
        ("graph, kernels, batch 4", 4, {}),
        ("graph, kernels, batch 8", 8, {}),
        ("the same, split and tall", 8, {}),
        ("graph, torch only, batch 8", 8, {"kernels": False}),
    ):
        try:
            with switched(split="split" in name, tall="tall" in name):
                decoder = GraphDecoder(model, rows, 512, **options)
                out = [decoder.serve(asked) for _ in range(3)][-1]  # prefill as a graph
        except Exception:
            print(f"  {name}: FAILED")
            traceback.print_exc()
            continue
        gaps = []
        for ids, result in zip(texts, out, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([ids + result.ids], device="cuda"))[0].float()
            logits = logits[len(ids) - 1 : -1]
            chosen = torch.tensor(result.ids, device="cuda")[:, None]
            gaps += (logits.amax(-1) - logits.gather(-1, chosen)[:, 0]).tolist()
        other = sum(gap > 0 for gap in gaps)
        print(
            f"  {name:28s} {len(gaps)} tokens, {other} other than the model's own argmax, "
            f"largest logit gap {max(gaps):.4f} {'ok' if max(gaps) < 0.1 else 'LOOK'}"
        )


def peer() -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    before = torch.get_default_dtype()
    torch.set_default_dtype(BF16)
    try:
        with torch.device("cuda"):
            model = transformers.LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    return model


def hf_rate(model: Any, batch: int, new: int, **options: Any) -> float:
    """New tokens a second of generate, prefill included."""
    ids = torch.randint(0, 128256, (batch, 128), device="cuda")
    mask = torch.ones_like(ids)
    asked = {
        "max_new_tokens": new,
        "min_new_tokens": new,
        "do_sample": False,
        "pad_token_id": 0,
        **options,
    }
    with torch.no_grad():
        return batch * new / seconds(lambda: model.generate(ids, attention_mask=mask, **asked))


@contextmanager
def switched(most: int = gpu_linear.MOST, **on: bool) -> Iterator[None]:
    before, old = gpu_linear.MOST, dict(gpu_linear.SWITCH)
    gpu_linear.MOST = most
    gpu_linear.SWITCH.update(on)
    try:
        yield
    finally:
        gpu_linear.MOST = before
        gpu_linear.SWITCH.update(old)


FORMS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, ...]]] = {
    "kernels": ({}, {}, (1, 8, 64)),
    "no pdl": ({}, {"pdl": False}, (1, 64)),
    "kernels, m=8": ({}, {"most": 8}, (8,)),
    "split": ({}, {"split": True}, (8, 64)),
    "split, tall": ({}, {"split": True, "tall": True}, (8, 64)),
    "torch only": ({"kernels": False}, {}, (1, 8, 64)),
}  # name -> the decoder's options, switches, batches


def part_c(args: argparse.Namespace) -> None:
    """Transformers warm, with 256 new tokens too unless that takes over 15 s (then 32), before and among our forms."""
    model, copy = llama(), bandwidth()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    theirs = None
    try:
        theirs = peer()
        hf_rate(theirs, 1, 4)
    except Exception as error:
        print(f"  transformers: {type(error).__name__}: {error}")
    print("  batch  form              steps tok/s  % of limit   with prefill")
    for batch in (1, 8, 64):
        low, high = (128, 128) if batch == 1 else (96, 160)
        texts = prompts(batch, low, high, 128256, batch)
        cached = batch * (128 + 128) * 16 * 2 * 8 * 64 * 2  # at the middle of the answer
        limit = batch / ((weights + cached) / copy)
        hf, new, rates = [], 32, {}
        if theirs is not None:
            warm = [hf_rate(theirs, batch, 32) for _ in range(2)][1]
            new = 256 if batch * 256 / warm < 15 else 32
        for name, (options, switches, batches) in FORMS.items():
            if batch not in batches:
                continue
            if theirs is not None and len(hf) < 3:
                hf.append(hf_rate(theirs, batch, new))
            try:
                with switched(**switches):
                    d = GraphDecoder(model, batch, 512, **options)
                    rate, rates[name], out = ours(d, texts)
                    first = SEEN.setdefault(("tokens", batch), out)
                    same = sum(a.ids == b.ids for a, b in zip(out, first, strict=True))
                    print(
                        f"  {batch:5d}  {name:14s} {rate:13,.0f} {100 * rate / limit:10.1f} {rates[name]:15,.0f}"
                        f"   same tokens in {same} of {batch}",
                        flush=True,
                    )
                    if args.profile and name != "torch only" and batch in (1, 64):
                        profile(d)
                    del d
            except Exception as error:
                print(f"  {batch:5d}  {name:14s}  FAILED {type(error).__name__}: {error}")
        if hf:
            peer_rate = statistics.median(hf)
            ratios = ", ".join(f"{name} {rate / peer_rate:.1f}x" for name, rate in rates.items())
            print(
                f"  {batch:5d}  transformers   {peer_rate:,.0f} tokens/s with prefill ({new} new, warm, "
                f"median of {', '.join(f'{r:,.0f}' for r in hf)}): {ratios}"
            )
    if args.compile and theirs is not None:
        for _ in range(2):
            rate = hf_rate(theirs, 1, 256, cache_implementation="static")
        print(f"  transformers, static cache, batch 1: {rate:,.0f} tokens/s")


def ours(d: GraphDecoder, texts: list[list[int]], new: int = 256) -> tuple[float, float, list[Any]]:
    """Tokens a second of the steps alone and with the prefill, and the answers."""
    long = [Request(ids, Settings(max_new_tokens=new)) for ids in texts]
    short = [Request(ids, Settings(max_new_tokens=1)) for ids in texts]
    out = d.serve(long)  # captures
    d.serve(short)
    runs = [(seconds(lambda: d.serve(long)), seconds(lambda: d.serve(short))) for _ in range(3)]
    total = statistics.median(a for a, _ in runs)
    steps = statistics.median(a - b for a, b in runs)
    return len(texts) * (new - 1) / steps, len(texts) * new / total, out


def profile(d: GraphDecoder) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    bound = d.bucket(400)
    with watch(activities=[ProfilerActivity.CUDA]) as p:
        d.run(8, bound)
        torch.cuda.synchronize()
    rows = sorted(p.key_averages(), key=lambda e: -e.device_time_total)[:12]
    total = sum(e.device_time_total for e in p.key_averages()) / 8
    print(f"    kernels of a step, {total:.0f} us in all:")
    for e in rows:
        print(f"    {e.device_time_total / 8:8.1f} us {e.count / 8:6.1f}x  {e.key[:90]}")


def part_d(args: argparse.Namespace) -> None:
    """512 requests; answers of 16 to 256 tokens, log-uniform (many short, few long), prompts of 32 to 160."""
    model, r = llama(), random.Random(1)
    texts = prompts(512, 32, 160, 128256, 2)
    sizes = [round(16 * 16 ** r.random()) for _ in texts]
    asked = [Request(i, Settings(max_new_tokens=n)) for i, n in zip(texts, sizes, strict=True)]
    d = GraphDecoder(model, 64, 512)
    forms: dict[str, dict[str, Any]] = {
        "static": {"refill": False},
        "continuous, 8 free": {"few": 8},
        "continuous, 4 free": {"few": 4},
    }
    for options in forms.values():
        d.serve(asked, **options), d.serve(asked, **options)  # sizes that come again are recorded
    times: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(3):
        for name, options in forms.items():
            times[name].append(seconds(lambda o=options: d.serve(asked, **o)))
    slow = statistics.median(times["static"])
    print(
        f"  {sum(sizes):,} tokens, answers log-uniform in 16..256, the same prefill on both sides"
    )
    for name, options in forms.items():
        took = statistics.median(times[name])
        d.held.spans = []
        whole = seconds(lambda o=options: d.serve(asked, **o))
        spans, d.held.spans = d.held.spans, None
        parts = {
            n: sum(a.elapsed_time(b) for m, a, b in spans if m == n) / 1e3
            for n in ("prefill", "decode")
        }
        passes = sum(n == "prefill" for n, _, _ in spans)
        print(
            f"  {name:20s} {took:.2f} s ({sum(sizes) / took:,.0f} tokens/s), {slow / took:.2f}x static; "
            f"of {whole:.2f} s: prefill {parts['prefill']:.2f} in {passes} passes, decode {parts['decode']:.2f}, "
            f"waiting {whole - sum(parts.values()):.2f}"
        )


def part_e(args: argparse.Namespace) -> None:
    """4 layers of width 4096, 32 heads of 128, 4 rows of 32k tokens; caches are filled with random numbers."""
    layers, rows, length = 4, 4, 32768
    rope = regard.Rope()
    mechanisms = {
        "MHA": regard.GQA(32, 32, 128, rope=rope),
        "GQA, 8 groups": regard.GQA(32, 8, 128, rope=rope),
        "MLA, 512 + 64": regard.MLA(32, 512, 128, 64, 128, rope=rope),
    }
    print(
        "  attention        bytes/token/layer   cache GB    step us   tokens/s   vs MHA   cache TB/s"
    )
    base = math.nan
    for name, attention in mechanisms.items():
        for kernels in (True, False):
            try:
                tower = regard.Tower(4096, layers, attention, regard.MLP(8192, "silu", True, False),
                                     norm=regard.Norm(1e-5, rms=True))  # fmt: skip
                config = TransformerConfig(Tokens(32000), tower, regard.LM(), max_len=length)
                model = regard.build(config, device="cuda", dtype=BF16)
                numbers = model.cache_specs()[0].numbers()
                d = GraphDecoder(model, rows, length, kernels=kernels)
                for layer in d.layers:
                    for x in (getattr(layer, n, None) for n in ("k", "v", "cache")):
                        if x is not None:
                            x.normal_()
                d.state.pos.fill_(length - 400)
                d.run(4, length)
                took = seconds(lambda d=d: [d.run(16, length) for _ in range(4)]) / 64
            except Exception as error:
                print(f"  {name}, kernels={kernels}: {type(error).__name__}: {error}")
                continue
            held = rows * (length - 400) * numbers * 2 * layers
            base = rows / took if name == "MHA" and kernels else base
            label = name if kernels else f"{name} (torch)"
            print(
                f"  {label:22s} {numbers * 2:10,d} {held / 1e9:13.2f} {took * 1e6:11,.0f} {rows / took:10,.0f} "
                f"{rows / took / base:8.2f}x {held / took / 1e12:9.2f}"
            )
            del d, model
            torch.cuda.empty_cache()


def part_t(args: argparse.Namespace) -> None:
    """The best (rows of W, elements of K, warps) for each matrix of the model, over weights larger than the cache."""
    for rows in map(int, args.rows.split(",")):
        for name, k, n, gated, norm in (
            ("qkv", 2048, 3072, False, True),
            ("out", 2048, 2048, False, False),
            ("gate|up", 2048, 8192, True, True),
            ("down", 8192, 2048, False, False),
            ("head", 2048, 128256, False, True),
        ):
            size = n * (1 + gated) * k * 2
            copies = max(2, min(24, 400_000_000 // size))
            w = [torch.randn(n * (1 + gated), k, device="cuda", dtype=BF16) for _ in range(copies)]
            x, g = (
                torch.randn(rows, k, device="cuda", dtype=BF16),
                torch.ones(k, device="cuda", dtype=BF16),
            )
            more: dict[str, Any] = {"act": "silu" if gated else "", "gated": gated}
            more["norm"] = (g, 1e-5) if norm else None
            found = []
            for block_n, block_k, warps in itertools.product(
                (1, 2, 4, 8, 16), (1024, 2048, 4096, 8192), (2, 4, 8)
            ):
                load = block_n * block_k * (1 + gated) / (32 * warps)
                if not (16 <= load <= 128) or block_k > max(k, 1024) or k // block_k > 8:
                    continue
                try:
                    one = partial(gpu_linear.fused, x, blocks=(block_n, block_k, warps), **more)
                    calls = [partial(one, each) for each in w]
                    found.append((replayed(calls, 3), (block_n, block_k, warps)))
                except Exception as error:
                    print(f"    {name} {block_n, block_k, warps}: {type(error).__name__}")
            plain = replayed([partial(gpu_linear.reference, x, each, **more) for each in w])
            now = gpu_linear.shape(k, n, gated)
            mine = next((t for t, b in found if b == now), math.nan)
            for took, blocks in sorted(found)[:3]:
                print(
                    f"  m={rows} {name:8s} ({k}, {n}, {gated}): {blocks},  # {took * 1e6:.1f} us, "
                    f"{size / took / 1e12:.2f} TB/s; default {now} {mine * 1e6:.1f} us, torch {plain * 1e6:.1f} us"
                )
            del w


def part_w(args: argparse.Namespace) -> None:
    """For many rows: (rows of W, elements of K, parts, stages, warps) of our products, and attention's tiles."""
    for rows in (8, 64):
        for name, k, n, split in (
            ("qkv", 2048, 3072, False),
            ("out", 2048, 2048, True),
            ("gate|up", 2048, 16384, False),
            ("down", 8192, 2048, True),
            ("head", 2048, 128256, False),
        ):
            copies = max(2, min(24, 400_000_000 // (n * k * 2)))
            w = [torch.randn(n, k, device="cuda", dtype=BF16) for _ in range(copies)]
            x = torch.randn(rows, k, device="cuda", dtype=BF16)
            plain = replayed([partial(torch.nn.functional.linear, x, each) for each in w])
            shapes = [(32, 128), (64, 64), (64, 128), (64, 256), (128, 64), (128, 128)]
            tried = [(*s, p, 4, 4) for s in shapes for p in ((2, 4) if split else (1,))]
            found = []
            for blocks in dict.fromkeys([gpu_wide.blocks_for(k, n, split), *tried]):
                try:
                    calls = [partial(gpu_wide.parts, x, each, split, blocks) for each in w]
                    found.append((replayed(calls, 3), blocks))
                except Exception as error:
                    print(f"    {name} {blocks}: {type(error).__name__}")
            for took, blocks in [*sorted(found)[:2], *found[:1]]:
                print(
                    f"  m={rows} ({k}, {n}, {split}): {blocks},  # {name} {took * 1e6:.1f} us, "
                    f"{n * k * 2 / took / 1e12:.2f} TB/s; torch {plain * 1e6:.1f} us"
                )
            del w
    b, h, g, d, s = 64, 32, 8, 64, 512
    caches = torch.randn(8, 2, b, s, g, d, device="cuda", dtype=BF16)
    qkv = torch.randn(b, (h + 2 * g) * d, device="cuda", dtype=BF16)
    for keys in (140, 256, 390):
        pos, found = torch.full((b,), keys, device="cuda"), []
        for tiles in (
            (64, 4, 2),
            (32, 4, 2),
            (64, 4, 3),
            (64, 2, 2),
            (64, 8, 2),
            (128, 4, 2),
            (128, 8, 2),
        ):
            one = partial(gpu_attention.decode, qkv, pos=pos, heads=h, scale=0.1)
            with patch.dict(gpu_attention.TILES, {d: tiles}):
                found.append((replayed([partial(one, k=k, v=v) for k, v in caches]), tiles))
        line = ", ".join(f"{tiles} {took * 1e6:.1f}" for took, tiles in found)
        print(f"  attention, 64 rows of {keys} keys, (keys a step, warps, stages) us: {line}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", default="k,a,b,c,d,e")
    parser.add_argument("--rows", default="1", help="rows of x in part t")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this bench needs a CUDA device")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    for part in args.part.split(","):
        start = time.perf_counter()
        print(f"{part}: {(globals()['part_' + part].__doc__ or '').strip()}", flush=True)
        try:
            globals()["part_" + part](args)
        except Exception:
            traceback.print_exc(file=sys.stdout)
        print(f"  ({time.perf_counter() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
