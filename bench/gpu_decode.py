"""Decoding on one GPU: a Llama-3.2-1B shape with random weights in bf16, against the memory's speed and transformers.

    python bench/gpu_decode.py                         all parts; under four minutes on an H200
    python bench/gpu_decode.py --quick                 tiny sizes: whether it runs at all
    python bench/gpu_decode.py --part c --profile      also the kernels of a step at batch 1 and 64
    python bench/gpu_decode.py --part c --compile      also transformers with a static cache, compiled

a copy bandwidth; b tokens against the model itself; c tokens/s at batch 1, 8, 64 (128 tokens of prompt, 256 new),
interleaved with transformers; d static against continuous batching of 512 requests; e MLA, GQA and MHA at 32k context.
The kernels alone: bench/gpu_kernels.py. Nothing but torch, triton and transformers must be installed.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from gpu_measure import BF16, VOCAB, bandwidth, profile, prompts, run_parts, seconds

import regard
from regard.decode.graphs import GraphDecoder
from regard.decode.settings import Request, Settings
from regard.kernels.triton import linear as gpu_linear
from regard.models import Tokens, TransformerConfig


class Sizes(NamedTuple):
    layers: int = 16
    batches: tuple[int, ...] = (1, 8, 64)
    new: int = 256
    requests: int = 512
    context: int = 32768


QUICK = Sizes(layers=2, batches=(1, 8), new=32, requests=24, context=2048)


def sizes_of(args: argparse.Namespace) -> Sizes:
    return QUICK if args.quick else Sizes()


@cache
def llama(layers: int) -> Any:
    torch.manual_seed(0)
    return regard.build("llama-3.2-1b", layers=layers, device="cuda", dtype=BF16)


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


# --- speed and truth ----------------------------------------------------------------------------------------------


def part_a(args: argparse.Namespace) -> None:
    """The speed of memory."""
    print(f"  copy {bandwidth() / 1e12:.2f} TB/s on {torch.cuda.get_device_name()}")


def part_b(args: argparse.Namespace) -> None:
    """Every token a decoder chose, scored by the model itself over the whole text: how far below the best it was."""
    model = llama(sizes_of(args).layers)
    texts = prompts(8, 96, 160)
    asked = [Request(ids, Settings(max_new_tokens=64)) for ids in texts]
    for name, rows, options, wide in (
        ("graph, kernels, batch 1", 1, {}, True),
        ("graph, kernels, batch 4", 4, {}, True),
        ("graph, kernels, batch 8", 8, {}, True),
        ("the same, torch's products", 8, {}, False),
        ("graph, torch only, batch 8", 8, {"kernels": False}, True),
    ):
        try:
            with switched(wide=wide):
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


# --- tokens a second against transformers -------------------------------------------------------------------------


def peer(layers: int) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=2048, intermediate_size=8192, num_hidden_layers=layers, num_attention_heads=32,
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


def texts_of(batch: int) -> list[list[int]]:
    """What both sides are given: 128 tokens, or 96 to 160 where there are several rows."""
    low, high = (128, 128) if batch == 1 else (96, 160)
    return prompts(batch, low, high, batch)


def hf_rate(model: Any, batch: int, new: int, **options: Any) -> float:
    """New tokens a second of generate on the prompts of `texts_of`, padded on the left; prefill included."""
    texts = texts_of(batch)
    width = max(map(len, texts))
    ids = torch.tensor([[0] * (width - len(t)) + t for t in texts], device="cuda")
    mask = torch.tensor([[0] * (width - len(t)) + [1] * len(t) for t in texts], device="cuda")
    asked = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    asked |= options
    with torch.no_grad():
        return batch * new / seconds(lambda: model.generate(ids, attention_mask=mask, **asked))


FORMS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, ...]]] = {
    "kernels": ({}, {}, (1, 8, 64)),
    "no pdl": ({}, {"pdl": False}, (1, 64)),
    "kernels, m=8": ({}, {"most": 8}, (8,)),
    "torch's products": ({}, {"wide": False}, (8, 64)),
    "torch only": ({"kernels": False}, {}, (1, 8, 64)),
}  # name -> the decoder's options, switches, batches


def part_c(args: argparse.Namespace) -> None:
    """Transformers warm, with as many new tokens unless that takes over 15 s (then 32), before and among our forms."""
    sizes, theirs = sizes_of(args), None
    try:
        theirs = peer(sizes.layers)
        hf_rate(theirs, 1, 4)
    except Exception as error:
        print(f"  transformers is left out: {type(error).__name__}: {error}")
    print("  batch  form              steps tok/s  % of limit   with prefill")
    for batch in sizes.batches:
        hf: list[float] = []
        new = sizes.new
        if theirs is not None:
            warm = [hf_rate(theirs, batch, 32) for _ in range(2)][1]
            new = sizes.new if batch * sizes.new / warm < 15 else 32
        rates = {}
        for name in FORMS:
            if batch not in FORMS[name][2]:
                continue
            if theirs is not None and len(hf) < 3:
                hf.append(hf_rate(theirs, batch, new))
            try:
                rates[name] = one_form(name, batch, args)
            except Exception as error:
                print(f"  {batch:5d}  {name:16s}  FAILED {type(error).__name__}: {error}")
        if hf:
            peer_rate = statistics.median(hf)
            ratios = ", ".join(f"{name} {rate / peer_rate:.1f}x" for name, rate in rates.items())
            print(
                f"  {batch:5d}  transformers     {peer_rate:,.0f} tokens/s with prefill ({new} new, warm, "
                f"median of {', '.join(f'{r:,.0f}' for r in hf)}): {ratios}"
            )
    if args.compile and theirs is not None:
        rate = [hf_rate(theirs, 1, 256, cache_implementation="static") for _ in range(2)][1]
        print(f"  transformers, static cache, batch 1: {rate:,.0f} tokens/s")


FIRST: dict[int, list[Any]] = {}  # batch -> the answers of its first form


def one_form(name: str, batch: int, args: argparse.Namespace) -> float:
    """Print a form's line; tokens a second with the prefill."""
    (options, switches, _), sizes = FORMS[name], sizes_of(args)
    model = llama(sizes.layers)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    cached = batch * (128 + sizes.new // 2) * sizes.layers * 2 * 8 * 64 * 2  # halfway
    limit = batch / ((weights + cached) / bandwidth())
    with switched(**switches):
        d = GraphDecoder(model, batch, 512, **options)
        rate, whole, out = ours(d, texts_of(batch), sizes.new)
        same = sum(a.ids == b.ids for a, b in zip(out, FIRST.setdefault(batch, out), strict=True))
        print(
            f"  {batch:5d}  {name:16s} {rate:11,.0f} {100 * rate / limit:10.1f} {whole:15,.0f}"
            f"   same tokens in {same} of {batch}",
            flush=True,
        )
        if args.profile and name != "torch only" and batch in (1, 64):
            profile(d)
    return whole


def ours(d: GraphDecoder, texts: list[list[int]], new: int) -> tuple[float, float, list[Any]]:
    """Tokens a second of the steps alone and with the prefill, and the answers."""
    long = [Request(ids, Settings(max_new_tokens=new)) for ids in texts]
    short = [Request(ids, Settings(max_new_tokens=1)) for ids in texts]
    out = d.serve(long)  # captures
    d.serve(short)
    runs = [(seconds(lambda: d.serve(long)), seconds(lambda: d.serve(short))) for _ in range(3)]
    total = statistics.median(a for a, _ in runs)
    steps = statistics.median(a - b for a, b in runs)
    return len(texts) * (new - 1) / steps, len(texts) * new / total, out


# --- many requests, long contexts ---------------------------------------------------------------------------------


def part_d(args: argparse.Namespace) -> None:
    """Many requests; answers of 16 to 256 tokens, log-uniform (many short, few long), prompts of 32 to 160."""
    sizes, r = sizes_of(args), random.Random(1)
    texts = prompts(sizes.requests, 32, 160, 2)
    lengths = [round(16 * 16 ** r.random()) for _ in texts]
    asked = [Request(i, Settings(max_new_tokens=n)) for i, n in zip(texts, lengths, strict=True)]
    d = GraphDecoder(llama(sizes.layers), min(64, sizes.requests // 2), 512)
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
    slow, total = statistics.median(times["static"]), sum(lengths)
    print(
        f"  {len(asked)} requests, {total:,} tokens, {d.rows} rows, the same prefill on both sides"
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
            f"  {name:20s} {took:.2f} s ({total / took:,.0f} tokens/s), {slow / took:.2f}x static; "
            f"of {whole:.2f} s: prefill {parts['prefill']:.2f} in {passes} passes, decode {parts['decode']:.2f}, "
            f"waiting {whole - sum(parts.values()):.2f}"
        )


def part_e(args: argparse.Namespace) -> None:
    """4 layers of width 4096, 32 heads of 128, 4 long rows; caches are filled with random numbers."""
    rope, length, base = regard.Rope(), sizes_of(args).context, math.nan
    mechanisms = {
        "MHA": regard.GQA(32, 32, 128, rope=rope),
        "GQA, 8 groups": regard.GQA(32, 8, 128, rope=rope),
        "MLA, 512 + 64": regard.MLA(32, 512, 128, 64, 128, rope=rope),
    }
    print(
        "  attention        bytes/token/layer   cache GB    step us   tokens/s   vs MHA   cache TB/s"
    )
    for name, attention in mechanisms.items():
        for kernels in (True, False):
            label = name if kernels else f"{name} (torch)"
            try:
                took, numbers = long_step(attention, length, kernels)
            except Exception as error:
                print(f"  {label}: {type(error).__name__}: {error}")
                continue
            base = ROWS / took if label == "MHA" else base
            held = ROWS * (length - 400) * numbers * 2 * LAYERS
            print(
                f"  {label:22s} {numbers * 2:10,d} {held / 1e9:13.2f} {took * 1e6:11,.0f} {ROWS / took:10,.0f} "
                f"{ROWS / took / base:8.2f}x {held / took / 1e12:9.2f}"
            )
            torch.cuda.empty_cache()


LAYERS, ROWS = 4, 4  # of part e


def long_step(attention: Any, length: int, kernels: bool) -> tuple[float, int]:
    """Seconds of a step near the end of `length` tokens, and the numbers that a layer keeps of one."""
    ffn, norm = regard.MLP(8192, "silu", True, False), regard.Norm(1e-5, rms=True)
    tower = regard.Tower(4096, LAYERS, attention, ffn, norm=norm)
    config = TransformerConfig(Tokens(32000), tower, regard.LM(), max_len=length)
    model = regard.build(config, device="cuda", dtype=BF16)
    d = GraphDecoder(model, ROWS, length, kernels=kernels)
    for memory in d.slots.memory:
        for x in memory:
            x.normal_()
    d.state.pos.fill_(length - 400)
    d.run(4, length)
    took = seconds(lambda: [d.run(16, length) for _ in range(4)]) / 64
    return took, model.cache_specs()[0].numbers()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes: whether it runs at all")
    parser.add_argument("--profile", action="store_true", help="the kernels of a step, in part c")
    parser.add_argument("--compile", action="store_true", help="transformers compiled, in part c")
    parts = {"a": part_a, "b": part_b, "c": part_c, "d": part_d, "e": part_e}
    run_parts(parser, parts, "a,b,c,d,e")
