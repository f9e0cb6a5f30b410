"""Decoding on one GPU: a Llama-3.2-1B shape with random weights in bf16, against the memory's speed and transformers.

    python bench/gpu_decode.py                         parts k,a,b,c,d,e; under four minutes on an H200
    python bench/gpu_decode.py --part t                 sweeps the linear kernels' shapes and prints the best as a table
    python bench/gpu_decode.py --part c --profile       also the kernels of a step at batch 1
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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import regard
from regard.decode.graphs import GraphDecoder
from regard.decode.settings import Request, Settings
from regard.kernels import gpu_attention, gpu_latent, gpu_linear
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
        ("graph, torch only, batch 8", 8, {"kernels": False}),
    ):
        try:
            out = GraphDecoder(model, rows, 512, **options).serve(asked)
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


def part_c(args: argparse.Namespace) -> None:
    model, copy = llama(), bandwidth()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    theirs = None
    try:
        theirs = peer()
        hf_rate(theirs, 1, 4)
    except Exception as error:
        print(f"  transformers: {type(error).__name__}: {error}")
    print(
        "  batch  form                    steps tok/s  % of limit   with prefill   transformers   ratio"
    )
    for batch in (1, 8, 64):
        low, high = (128, 128) if batch == 1 else (96, 160)
        texts = prompts(batch, low, high, 128256, batch)
        cached = batch * (128 + 128) * 16 * 2 * 8 * 64 * 2  # at the middle of the answer
        limit = batch / ((weights + cached) / copy)
        forms = {
            "kernels": ({}, False),
            "kernels, pdl": ({}, True),
            "torch only": ({"kernels": False}, False),
        }
        for name, (options, pdl) in forms.items():
            gpu_linear.SWITCH["pdl"] = pdl
            try:
                d = GraphDecoder(model, batch, 512, **options)
                rate, whole, out = ours(d, texts)
            except Exception as error:
                print(f"  {batch:5d}  {name:20s}  FAILED {type(error).__name__}: {error}")
                continue
            finally:
                gpu_linear.SWITCH["pdl"] = False
            first = SEEN.setdefault(("tokens", batch), out)
            same = sum(a.ids == b.ids for a, b in zip(out, first, strict=True))
            hf = hf_rate(theirs, batch, 32) if theirs is not None else math.nan
            print(
                f"  {batch:5d}  {name:20s} {rate:13,.0f} {100 * rate / limit:10.1f} {whole:15,.0f} "
                f"{hf:13,.0f} {whole / hf:8.1f}x   same tokens in {same} of {batch}"
            )
            if args.profile and name != "torch only" and batch in (1, 64):
                profile(d)
            del d
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
    d.serve(asked[:128]), d.serve(asked[:64], refill=False)
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(2):
        for refill in (False, True):
            times[refill].append(seconds(lambda refill=refill: d.serve(asked, refill=refill)))
    slow, fast = statistics.median(times[False]), statistics.median(times[True])
    print(
        f"  {sum(sizes):,} tokens: static {slow:.2f} s ({sum(sizes) / slow:,.0f} tokens/s), continuous {fast:.2f} s "
        f"({sum(sizes) / fast:,.0f} tokens/s), {slow / fast:.2f}x"
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
