"""Linear layers in every precision on this CPU, against F.linear in fp32 and bf16, in one interleaved run.

    OMP_NUM_THREADS=1 python bench/linear.py [--repeats 15] [--rows 1 4 8 32 128] [--megabytes 48]

Prints microseconds, the best of the repeats (a shared machine only ever adds), and in brackets how many times faster
that is than F.linear: fp32 than fp32, the others than the better of the two. Each side goes through several weights in
turn, `--megabytes` of fp32 in all, because a model's weights do not wait in the first caches; `--megabytes 0` takes
one. It changes nothing.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from measure import header
from torch import Tensor

from regard.kernels.c import native
from regard.kernels.linear import PRECISIONS, pack

SHAPES = [(512, 2048), (2048, 512), (512, 32000), (768, 3072), (768, 50257)]


def side(layers: list[Callable[[Tensor], Tensor]], x: Tensor) -> Callable[[], None]:
    def run() -> None:
        for layer in layers:
            layer(x)

    return run


def plain(weights: list[Tensor], bias: Tensor, dtype: torch.dtype) -> list[Callable]:
    cast = [w.to(dtype) for w in weights]
    bias = bias.to(dtype)
    return [lambda x, w=w: F.linear(x, w, bias) for w in cast]  # type: ignore[misc]


def bests(sides: list[Callable[[], None]], repeats: int) -> list[float]:
    """Seconds of each side at its best, the sides taken in turn."""
    times: list[list[float]] = [[] for _ in sides]
    for _ in range(repeats + 1):
        for mine, run in zip(times, sides, strict=True):
            start = time.perf_counter()
            run()
            mine.append(time.perf_counter() - start)
    return [min(t) for t in times]


def row(rows: int, k: int, n: int, args: argparse.Namespace) -> str:
    count = max(1, min(8, int(args.megabytes * 1e6 / (4 * k * n))))
    weights, bias = [torch.randn(n, k) * k**-0.5 for _ in range(count)], torch.randn(n)
    x = torch.randn(rows, k)
    half = x.bfloat16()
    sides = [
        side(plain(weights, bias, torch.float32), x),
        side(plain(weights, bias, torch.bfloat16), half),
    ]
    for precision in PRECISIONS:
        layers = [pack(w, bias, precision) for w in weights]
        sides.append(side(layers, x if precision in ("fp32", "int8") else half))  # type: ignore[arg-type]
    times = [t / count * 1e6 for t in bests(sides, args.repeats)]
    peers = [times[0]] + [min(times[:2])] * 3
    ours = "".join(f"{t:>9.0f} ({p / t:4.2f})" for t, p in zip(times[2:], peers, strict=True))
    return f"{rows:>4} {f'{k} -> {n}':>13} {times[0]:>9.0f} {times[1]:>9.0f} {ours}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 32, 128])
    parser.add_argument("--megabytes", type=float, default=48)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)  # torch on its own quantised tensors
    native.build()
    print(f"{header()}, C code {native.why() or native.form()}")
    names = "".join(f"{name:>9}       " for name in PRECISIONS)
    print(f"{'rows':>4} {'shape':>13} {'F fp32':>9} {'F bf16':>9} {names}")
    with torch.inference_mode():
        for k, n in SHAPES:
            for rows in args.rows:
                print(row(rows, k, n, args), flush=True)


if __name__ == "__main__":
    main()
