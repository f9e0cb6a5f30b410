"""Row operations of a decoding step in C against their torch forms, on this CPU, in one interleaved run.

    python bench/rows.py [--repeats 30] [--only attend update_cache norm choose draw]

Prints microseconds, the median of the repeats, and how many times faster C is. Torch's side of `attend` is its fused
kernel over keys that already lie in the order of the rows; with a place table a model would have to copy them there
first. Each side goes through several inputs in turn, some 64 MB of them, because a model's caches do not wait in the
first caches. It changes nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from measure import floats, header, medians
from torch import Tensor

from regard.decode.filters import FILTERS
from regard.decode.sampling import draw as draw_plain
from regard.decode.sampling import uniform
from regard.kernels.c import native
from regard.kernels.c.rows import attend_one, draw, lse_and_topk, norm, plain_norm, update_cache
from regard.position import Rope, rotate


class Case(NamedTuple):
    """`make` gives the arguments of both sides, of which the first is C's."""

    name: str
    make: Callable[[], tuple[Any, ...]]
    ours: Callable[..., Any]
    torchs: Callable[..., Any]


def attend(r: int, h: int, g: int, d: int, slots: int, dtype: torch.dtype) -> Case:
    pos, mask = torch.full((r,), slots - 1), torch.ones(r, 1, 1, slots, dtype=torch.bool)
    table = None
    if r == 128:  # four beams to a sentence
        table = (torch.arange(r)[:, None] // 4 * 4 + torch.randint(4, (r, slots))).int()

    def make() -> tuple[Tensor, ...]:
        k, v = (torch.randn(r, slots, g, d).to(dtype) for _ in "kv")
        return torch.randn(r, h, d), k, v

    def ours(q: Tensor, k: Tensor, v: Tensor) -> None:
        attend_one(q, k, v, pos, place=table, scale=d**-0.5)

    def torchs(q: Tensor, k: Tensor, v: Tensor) -> None:
        q, k, v = q.to(dtype)[:, :, None], k.transpose(1, 2), v.transpose(1, 2)
        F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=h != g)

    return Case(f"attend {r} x {h}/{g} heads, {slots} {named(dtype)}", make, ours, torchs)


def updates(r: int, h: int, g: int, d: int, dtype: torch.dtype) -> Case:
    row, pos = torch.arange(r), torch.randint(64, (r,))
    cos, sin = Rope().angles(pos[:, None], d, torch.float32)

    def make() -> tuple[Tensor, ...]:
        k, v = (torch.zeros(r, 64, g, d, dtype=dtype) for _ in "kv")
        return torch.randn(r, (h + 2 * g) * d), k, v

    def ours(x: Tensor, k: Tensor, v: Tensor) -> None:
        update_cache(x, h, g, d, d, cos, sin, "half", k, v, pos)

    def torchs(x: Tensor, k: Tensor, v: Tensor) -> None:
        heads = x.view(r, 1, h + 2 * g, d)
        turned = rotate(heads[:, :, : h + g], cos, sin, "half")
        k[row, pos] = turned[:, 0, h:].to(dtype)
        v[row, pos] = heads[:, 0, h + g :].to(dtype)

    return Case(f"update_cache {r} x {h}/{g} heads {named(dtype)}", make, ours, torchs)


def norms(r: int, m: int, kind: str) -> Case:
    w = torch.randn(m)
    rest = (w, w if kind == "layer" else None, 1e-5, kind)
    return Case(f"{kind} norm {r} x {m}", lambda: (torch.randn(r, m), *rest), norm, plain_norm)


def chooses(r: int, vocab: int, k: int) -> Case:
    def torchs(x: Tensor, k: int) -> None:
        x.logsumexp(-1), x.topk(k)

    return Case(
        f"choose {k}, {r} x {vocab}", lambda: (torch.randn(r, vocab) * 3, k), lse_and_topk, torchs
    )


def draws(r: int, vocab: int, **by: float) -> Case:
    """The next token with a temperature and filters, whose torch form sorts the vocabulary."""
    columns = {
        name: torch.full((r, 1), value) for name, value in {"temperature": 0.9, **by}.items()
    }
    columns |= {"seed": torch.ones(r, 1, dtype=torch.long), "key": torch.arange(r)[:, None]}
    count, filters = torch.zeros(r, dtype=torch.long), {k: FILTERS[k].keep for k in by}

    def torchs(x: Tensor) -> None:
        kept = x / columns["temperature"]
        for name, keep in filters.items():
            kept = keep(kept, columns[name])
        draw_plain(kept, uniform(columns["seed"][:, 0], columns["key"][:, 0], count))

    def ours(x: Tensor) -> None:
        draw(x, columns, count)

    what = ", ".join(f"{k} {v}" for k, v in by.items()) or "temperature"
    return Case(f"draw {what}, {r} x {vocab}", lambda: (torch.randn(r, vocab) * 3,), ours, torchs)


def named(dtype: torch.dtype) -> str:
    return "bf16" if dtype == torch.bfloat16 else "fp32"


TYPES = (torch.float32, torch.bfloat16)[: len(floats())]
BEAMS = [(128, 8, 8, 64, slots) for slots in (16, 32, 64)]
FEW = [(r, 12, g, 64, slots) for r in (1, 8) for g in (4, 12) for slots in (512, 2048)]
ENTRIES = [(1, 12, 4, 64), (8, 12, 12, 64), (128, 8, 8, 64)]
LOGITS = [(1, 50257), (8, 50257), (128, 32000), (32, 128000)]
DRAWN: list[dict[str, float]] = [
    {},
    {"top_k": 50},
    {"top_p": 0.9},
    {"min_p": 0.05},
]
CASES = {
    "attend": [attend(*x, t) for x in [*BEAMS, *FEW, (1, 12, 4, 64, 32768)] for t in TYPES],
    "update_cache": [updates(*x, t) for x in ENTRIES for t in TYPES],
    "norm": [
        norms(*x, kind) for x in [(1, 768), (8, 768), (128, 512)] for kind in ("layer", "rms")
    ],
    "choose": [chooses(*x, k) for x in LOGITS for k in (1, 8, 64)],
    "draw": [draws(r, 49152, **by) for r in (1, 16) for by in DRAWN],
}


def row(case: Case, repeats: int) -> str:
    given = [case.make()]
    size = sum(x.nbytes for x in given[0] if isinstance(x, Tensor))
    given += [case.make() for _ in range(min(15, int(64e6 / size)))]

    def side(call: Callable[..., Any]) -> Callable[[], None]:
        def run() -> None:
            for x in given:
                call(*x)

        return run

    theirs, ours = medians([side(case.torchs), side(case.ours)], repeats)
    times = "".join(f"{t / len(given) * 1e6:>8.0f}" for t in (theirs, ours))
    return f"{case.name:>38}{times} ({theirs / ours:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=list(CASES))
    args = parser.parse_args()
    if not native.build():
        raise SystemExit(f"no native code to time: {native.why()}")
    print(header())
    print(f"{'':>38}{'torch':>8}{'C':>8}")
    with torch.inference_mode():
        for part in args.only:
            for case in CASES[part]:
                print(row(case, args.repeats), flush=True)


if __name__ == "__main__":
    main()
