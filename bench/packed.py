"""Packed documents: attention by document against the mask of t x s that it replaces, a whole training step each.

    python bench/packed.py [--rows 8] [--length 2048] [--steps 8]

A model of SmolLM2-135M's shape in bf16 on a GPU; documents of 50 to 1,200 tokens, as chats have. First both forms are
compared, output and gradients; then steps of each are timed in turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from measure import header

from regard.attention.core import attend
from regard.data.feed import Batching, TextFeed
from regard.data.shards import Column
from regard.mask import Causal, Documents, Span, Visible
from regard.presets import build
from regard.training.checkpoint import Checkpoints
from regard.training.objectives import causal
from regard.training.optim import Optim, Schedule
from regard.training.trainer import Train, Trainer

SMOL = dict(vocab=49152, dim=576, layers=30, heads=9, kv_heads=3, ffn_dim=1536, max_len=8192)
FORMS = ("by document", "dense mask")


def form(name: str):
    return patch.object(Visible, "packed", None) if name == "dense mask" else nullcontext()


def compared() -> None:
    torch.manual_seed(0)
    doc = torch.sort(torch.randint(0, 5, (2, 300), device="cuda"), 1)[0]
    doc[:, 280:] = -1
    qkv = [torch.randn(2, 300, n, 64, device="cuda", dtype=torch.bfloat16) for n in (9, 3, 3)]
    found = []
    for name in FORMS:
        leaves = [x.clone().requires_grad_() for x in qkv]
        with form(name):
            mask = Visible(Causal() & Documents(doc), *[Span.run(0, 300, "cuda")] * 2)
            out = attend(*leaves, mask)
        out.float().square().sum().backward()
        found.append([out.float(), *(x.grad.float() for x in leaves)])
    for name, a, b in zip(("output", "dq", "dk", "dv"), *found):
        print(f"{name}: {(a - b).norm() / b.norm():.1e} relative difference")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("rows", 8), ("length", 2048), ("steps", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    print(header())
    compared()
    draw = np.random.default_rng(0)
    texts = [draw.integers(1, 49152, n) for n in draw.integers(50, 1200, 400)]
    feed = TextFeed(Column.of(texts), Batching(asked.length, asked.rows))
    print(feed.describe())
    trainers = {}
    for name in FORMS:
        torch.manual_seed(0)
        model = build("llama", device="cuda", **SMOL)
        train = Train(
            steps=99, precision="bf16", optim=Optim(lr=1e-5), schedule=Schedule("constant")
        )
        times: list[tuple[float, float]] = []
        store = Checkpoints(Path(), lambda model, path: None)
        trainers[name] = Trainer(model, feed, causal, train, store, lambda path, m=model: m)
        trainers[name].model.train()
    losses = {name: [] for name in FORMS}
    times = {name: [] for name in FORMS}
    peak = {}
    for k in range(1, asked.steps + 4):
        for name, trainer in trainers.items():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before, start = torch.cuda.memory_allocated(), time.perf_counter()
            trainer.callbacks = [lambda e, n=name: losses[n].append(e["loss"])]
            with form(name):
                trainer._step(k)
            torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
            peak[name] = (torch.cuda.max_memory_allocated() - before) / 2**30
    for name in FORMS:
        each = statistics.median(times[name][3:])
        rate = asked.rows * asked.length / each
        print(
            f"{name}: {each * 1e3:.1f} ms a step, {rate:,.0f} tokens/s, {peak[name]:.2f} GiB above the weights"
        )
    print("losses", *(f"{n}: {x[0]:.5f} {x[-1]:.5f};" for n, x in losses.items()))


if __name__ == "__main__":
    main()
