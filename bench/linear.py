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
from measure import floats, header
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
    given = {"fp32": x, "bf16": x.bfloat16()}
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16}
    sides = [side(plain(weights, bias, kinds[p]), given[p]) for p in floats()]
    for precision in precisions():
        layers = [pack(w, bias, precision) for w in weights]
        sides.append(side(layers, given.get(precision, x)))  # type: ignore[arg-type]
    times = [t / count * 1e6 for t in bests(sides, args.repeats)]
    theirs, mine = times[: len(floats())], times[len(floats()) :]
    # fp32 against torch's fp32, others against its best.
    peers = [theirs[0]] + [min(theirs)] * (len(mine) - 1)
    ours = "".join(f"{t:>9.0f} ({p / t:4.2f})" for t, p in zip(mine, peers, strict=True))
    return f"{rows:>4} {f'{k} -> {n}':>13} {''.join(f'{t:>9.0f} ' for t in theirs)}{ours}"


def precisions() -> list[str]:
    return [p for p in PRECISIONS if p != "bf16" or p in floats()]


def rounding() -> str:
    """What each precision does to a product of activations with outliers, as trained models have them."""
    torch.manual_seed(0)
    x, w = torch.randn(64, 768), torch.randn(768, 768) * 768**-0.5
    x[:, ::97] *= 30
    want = x.double() @ w.double().t()
    off = {p: (pack(w, None, p)(x) - want).norm() / want.norm() for p in precisions()}
    return "error of a product with outliers: " + ", ".join(f"{p} {e:.1e}" for p, e in off.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 32, 128])
    parser.add_argument("--megabytes", type=float, default=48)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)  # torch on its own quantised tensors
    native.build()
    print(f"{header()}, C code {native.why() or native.form()}")
    print(rounding())
    names = "".join(f"{name:>9}       " for name in precisions())
    print(f"{'rows':>4} {'shape':>13} {''.join(f'F {p:<7} ' for p in floats())}{names}")
    with torch.inference_mode():
        for k, n in SHAPES:
            for rows in args.rows:
                print(row(rows, k, n, args), flush=True)


if __name__ == "__main__":
    main()
