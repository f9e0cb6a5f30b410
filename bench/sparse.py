"""Sparse against dense attention as the context grows: time by part, and memory, for a fixed k.

    python bench/sparse.py [--lengths 1024 2048 4096 8192 16384] [--topk 256] [--queries 128] [--plot bench/sparse.png]

For each length and mechanism, `queries` new tokens attend to the whole context: dense attention; sparse attention; and
its two parts, the index (scores of all keys and the choice, which grows with length by design, at a small width)
and the attention over the k chosen keys, which must not grow. It changes nothing but the picture.
"""

from __future__ import annotations

import argparse
import functools

import torch
from measure import child, growth, header, medians
from torch import Tensor

from regard.attention import DSA, GQA, MLA, Context
from regard.attention.sparse import WORK
from regard.mask import Causal, Span, Visible

DIM = 512
INNER = {
    "gqa": GQA(8, 2, 64),
    "mla": MLA(8, 128, 64),
}


class Setting:
    """One layer, a context of random entries, and the last `n` tokens as queries."""

    def __init__(self, name: str, length: int, n: int, topk: int):
        torch.manual_seed(0)
        self.layer = DSA(INNER[name], index_heads=4, index_dim=32, topk=topk).make(DIM).eval()
        self.x = torch.randn(1, n, DIM)
        spec = self.layer.cache_spec().token
        self.kept = {key: torch.randn(1, length, *shape) for key, shape in spec.items()}
        pos = Span.run(length - n, n)
        self.mask = Visible(Causal(), pos, Span.run(0, length))
        self.ctx = Context(pos, Causal(), store=object())  # type: ignore[arg-type]
        self.q = self.layer.attention.queries(self.x, self.ctx)
        self.index_q = self.layer.indexer.queries(self.x, self.ctx)
        self.seen = self.mask.rows(slice(None))[:, 0]
        self.k = min(topk, length)

    def dense(self) -> Tensor:
        return self.layer.attention.core_attention(self.q, self.kept, self.mask, self.ctx, None)

    def sparse(self) -> Tensor:
        return self.layer.sparse(self.x, self.q, self.index_q, self.kept, self.mask, self.ctx, None)

    def index(self) -> Tensor:
        step = max(
            1, WORK["cpu"] // (self.kept["index_k"].shape[1] * self.layer.config.index_heads)
        )
        parts = []
        for i in range(0, self.x.shape[1], step):  # in chunks, as `sparse` does
            at = slice(i, i + step)
            scores = self.layer.indexer.scores(
                self.index_q[:, at], self.kept["index_k"], self.x[:, at]
            )
            scores = scores.masked_fill(~self.seen[:, at], -torch.inf)
            parts.append(self.layer.choice(scores, self.k, None))
        return torch.cat(parts, 1)

    def gather(self) -> Tensor:
        kept = {key: value for key, value in self.kept.items() if key != "index_k"}
        return self.layer.gathered(self.q, kept, self.chosen, self.seen, None, self.ctx)

    @functools.cached_property
    def chosen(self) -> Tensor:
        return self.index()


def measure_peak(side: str, name: str, *numbers: str) -> None:
    setting = Setting(name, *map(int, numbers))
    print(growth(getattr(setting, side)))


def draw(
    path: str, rows: dict[str, list[list[float]]], lengths: list[int], topk: int, n: int
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(rows), figsize=(11, 4.2), sharey=True)
    for axis, (name, values) in zip(axes, rows.items(), strict=True):
        for label, column, style in [
            ("dense", 0, "o-"),
            ("sparse, all of it", 1, "s-"),
            ("  its index", 2, "^--"),
            ("  its attention over k", 3, "v--"),
        ]:
            axis.plot(lengths, [row[column] for row in values], style, label=label)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(lengths, [f"{x // 1024}k" for x in lengths])
        axis.set_title(f"over {name.upper()}, k = {topk}, {n} queries")
        axis.set_xlabel("keys in the context")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
        axis.grid(True, which="both", alpha=0.25)
    axes[0].set_ylabel("milliseconds")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f"wrote {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--topk", type=int, default=256)
    parser.add_argument("--queries", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--plot", default="")
    parser.add_argument("--peak", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak:
        with torch.inference_mode():
            return measure_peak(*args.peak)
    print(f"{header()}, fp32, {args.queries} queries, k = {args.topk}")
    columns = ("dense ms", "sparse ms", "index ms", "over k ms", "ratio", "dense MB", "sparse MB")
    print(f"{'over':<4} {'keys':>6}" + "".join(f"{name:>11}" for name in columns))
    rows: dict[str, list[list[float]]] = {}
    for name in INNER:
        for length in args.lengths:
            with torch.inference_mode():
                s = Setting(name, length, args.queries, args.topk)
                parts = [s.dense, s.sparse, s.index, s.gather]
                ms = [1e3 * t for t in medians(parts, args.repeats)]
            setting = (name, length, args.queries, args.topk)
            mb = [child(__file__, side, *setting) for side in ("dense", "sparse")]
            rows.setdefault(name, []).append(ms)
            numbers = (*ms, ms[0] / ms[1], *mb)
            print(f"{name:<4} {length:>6}" + "".join(f"{x:>11.2f}" for x in numbers))
    if args.plot:
        draw(args.plot, rows, args.lengths, args.topk, args.queries)


if __name__ == "__main__":
    main()
