"""The loss of a language model's head, forward and backward: in chunks against whole logits, in one interleaved run.

    python bench/loss.py [--repeats 5] [--shapes V,m,n ...] [--dtypes fp32 bf16] [--smoothing 0.1]

A shape is the vocabulary, the width and the number of tokens. Prints seconds (medians) of the plain loss, of torch's
own loss in chunks where torch has one, and of Regard's; then the memory that each needed at its peak beside hidden
states, the weight and the weight's gradient, each side in a process of its own. bf16 is autocast over fp32 weights. On
a GPU if there is one; there also against the plain loss compiled. It changes nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from measure import child, floats, growth, header
from torch import Tensor

from regard.training.losses import NONE, Smoothing, head_loss

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = {
    "cpu": ["65,384,8192", "8192,512,4096", "50257,384,1024"],
    "cuda": ["50257,768,16384", "128256,768,16384"],
}
SIDES = ["plain", "compiled", "torch", "regard"]


def plain(h: Tensor, w: Tensor, y: Tensor, s: Smoothing) -> Tensor:
    logits = F.linear(h, w).float()
    if not s.eps:
        return F.cross_entropy(logits, y, reduction="sum")
    return F.cross_entropy(logits, y, reduction="sum", label_smoothing=s.eps)


def theirs(h: Tensor, w: Tensor, y: Tensor, s: Smoothing) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(h, w, y, reduction="sum", label_smoothing=s.eps, options=options)


def regards(h: Tensor, w: Tensor, y: Tensor, s: Smoothing) -> Tensor:
    return head_loss(h, w, y, smoothing=s)[0]


def function(side: str) -> Callable[..., Tensor] | None:
    if side == "compiled":
        return torch.compile(plain) if DEVICE == "cuda" else None
    if side == "torch":
        return theirs if hasattr(F, "linear_cross_entropy") else None
    return plain if side == "plain" else regards


def make(side: str, shape: str, dtype: str, eps: float) -> Callable[[], Tensor] | None:
    """A call of forward and backward, or None where the side is not to be had."""
    vocab, dim, tokens = map(int, shape.split(","))
    torch.manual_seed(0)
    h = torch.randn(tokens, dim, device=DEVICE).requires_grad_()
    w = (torch.randn(vocab, dim, device=DEVICE) * dim**-0.5).requires_grad_()
    y = torch.randint(vocab, (tokens,), device=DEVICE)
    loss, smoothing = function(side), Smoothing(eps, "V") if eps else NONE
    if loss is None:
        return None

    def run() -> Tensor:
        h.grad = w.grad = None
        with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == "bf16"):
            total = loss(h, w, y, smoothing)
        total.backward()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return total.detach()

    return run


def peak(side: str, shape: str, dtype: str, eps: str) -> None:
    """Bytes beside what must be there: hidden states, the weight, and the gradient of both."""
    run = make(side, shape, dtype, float(eps))
    assert run is not None
    vocab, dim, tokens = map(int, shape.split(","))
    kept = 4 * dim * (vocab + tokens)
    if DEVICE == "cpu":
        small = make(side, f"16,{dim},16", dtype, float(eps))
        assert small is not None
        small()  # first-call buffers count for no side
        print(growth(run) - kept)
        return
    run()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() - kept  # the last run's gradients are still there
    run()
    print(torch.cuda.max_memory_allocated() - before - kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shapes", nargs="+", default=SHAPES[DEVICE])
    parser.add_argument("--dtypes", nargs="+", default=["fp32"] if DEVICE == "cpu" else ["bf16"])
    parser.add_argument("--smoothing", type=float, default=0.0)
    parser.add_argument("--peak", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak:
        peak(*args.peak)
        return
    print(f"{DEVICE}, {header()}")
    for shape in args.shapes:
        for dtype in args.dtypes:
            if dtype in floats():
                row(shape, dtype, args)
            else:
                print(f"{dtype}: left out, this CPU does not multiply it")


def row(shape: str, dtype: str, args: argparse.Namespace) -> None:
    made = {side: make(side, shape, dtype, args.smoothing) for side in SIDES}
    sides = {side: run for side, run in made.items() if run is not None}
    totals = [run() for run in sides.values()]
    spread = (max(totals) - min(totals)) / totals[0]
    times: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(args.repeats):
        for side, run in sides.items():
            start = time.perf_counter()
            run()
            times[side].append(time.perf_counter() - start)
    print(f"V,m,n = {shape} {dtype}: losses apart by {spread:.1e}")
    for side in sides:
        megabytes = child(__file__, side, shape, dtype, args.smoothing)
        milliseconds = statistics.median(times[side]) * 1e3
        print(f"  {side:<9} {milliseconds:>9.1f} ms {megabytes:>9.0f} MB")


if __name__ == "__main__":
    main()
