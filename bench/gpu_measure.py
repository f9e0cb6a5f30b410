"""What the GPU benches share: regard from this checkout, timing on the device, and parts that are chosen by letter."""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # nothing needs to be installed
os.environ.setdefault("HF_HUB_OFFLINE", "1")

BF16, VOCAB = torch.bfloat16, 128256  # of the models that are measured
Part = Callable[[argparse.Namespace], None]


def seconds(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def replayed(calls: Sequence[Callable[[], Any]], repeats: int = 5) -> float:
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


@cache
def bandwidth() -> float:
    """Bytes a second of a large copy, read and written."""
    x = torch.empty(2**31, dtype=torch.uint8, device="cuda").random_(0, 255)
    y = torch.empty_like(x)
    for _ in range(3):
        y.copy_(x)
    return 2 * len(x) / statistics.median(seconds(lambda: y.copy_(x)) for _ in range(9))


def prompts(n: int, low: int, high: int, seed: int = 0, vocab: int = VOCAB) -> list[list[int]]:
    r = random.Random(seed)
    return [[r.randrange(vocab) for _ in range(r.randint(low, high))] for _ in range(n)]


def run_parts(
    parser: argparse.ArgumentParser, parts: Mapping[str, Part], usual: str, anywhere: str = ""
) -> None:
    """Run the parts that the command line names; one that fails prints why, and the next one runs. `anywhere`: those
    that need no GPU."""
    parser.add_argument("--part", default=usual, help=f"of {','.join(parts)}; default: {usual}")
    args = parser.parse_args()
    chosen = args.part.split(",")
    unknown = [name for name in chosen if name not in parts]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}; choose from {', '.join(parts)}")
    found = torch.cuda.is_available()
    if not found and not set(chosen) <= set(anywhere.split(",")):
        print("error: this bench needs a CUDA device, and torch finds none here", file=sys.stderr)
        sys.exit(3)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if found else 'no GPU'}")
    failed = 0
    for name in chosen:
        start = time.perf_counter()
        print(f"{name}: {(parts[name].__doc__ or '').strip()}", flush=True)
        try:
            parts[name](args)
        except Exception:
            failed += 1
            traceback.print_exc(file=sys.stdout)
        print(f"  ({time.perf_counter() - start:.0f} s)", flush=True)
    sys.exit(1 if failed else 0)
