"""A mixture of experts beside its dense twin, which does as much work per token: losses on held-out text.

    python bench/moe.py [--steps 500] [--seeds 1 2 3] [--only dense balance bias none]

The twin's feed-forward is as wide as the experts that a token uses together. "balance" keeps the experts busy by the
auxiliary loss (Switch, Mixtral), "bias" by a bias on the choice (DeepSeek-V3), "none" by nothing.
"""

from __future__ import annotations

import argparse
import lzma
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import header

import regard

TEXT = Path(__file__).resolve().parents[2] / "shared" / "data" / "lm" / "tinystories_2mb.txt.xz"
EXPERTS, ACTIVE, WIDTH = 16, 2, 96
FORMS: dict[str, dict[str, Any]] = {
    "dense": {"ffn": {"ffn_dim": ACTIVE * WIDTH}, "train": {}},
    "balance": {"ffn": {}, "train": {"balance": 0.01}},
    "bias": {"ffn": {"corrected": True, "score": "sigmoid"}, "train": {"balance": 0.0, "bias_speed": 0.01}},
    "none": {"ffn": {}, "train": {"balance": 0.0}},
}  # fmt: skip


def loss_of(form: str, seed: int, steps: int, text: Path, home: Path) -> float:
    kind = {"kind": "mlp", "activation": "silu", "gated": True, "bias": False}
    if form != "dense":
        kind = {"kind": "moe", "experts": EXPERTS, "active": ACTIVE, "ffn_dim": WIDTH}
    sizes = {"preset": "llama", "layers": 3, "dim": 96, "heads": 3, "kv_heads": 3, "tied": True}
    config = {
        "task": "lm",
        "model": {**sizes, "ffn": {**kind, **FORMS[form]["ffn"]}},
        "data": {"train": str(text), "held": 0.05, "length": 128, "rows": 16, "pack": "windows"},
        "tokenizer": {"kind": "bpe", "vocab": 1024},
        "train": {
            "steps": steps,
            "seed": seed,
            "optim": {"lr": 2e-3},
            "schedule": {"warmup": steps // 20},
            **FORMS[form]["train"],
        },
    }
    return regard.train(config, folder=home / f"{form}-{seed}").metrics["loss"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--only", nargs="*", default=list(FORMS), choices=list(FORMS))
    o = parser.parse_args()
    print(f"{header()}; {EXPERTS} experts of {WIDTH}, {ACTIVE} active; {vars(o)}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        text = Path(name) / "text.txt"
        text.write_bytes(lzma.decompress(o.text.read_bytes()))
        losses: dict[str, list[float]] = {form: [] for form in o.only}
        for seed in o.seeds:
            for form in o.only:
                start = time.perf_counter()
                losses[form].append(loss_of(form, seed, o.steps, text, Path(name)))
                took = time.perf_counter() - start
                print(f"seed {seed} {form:8} {losses[form][-1]:.4f}  {took:.0f} s", flush=True)
    for form, values in losses.items():
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        print(f"{form:8} mean {statistics.mean(values):.4f} +- {spread:.4f}")


if __name__ == "__main__":
    main()
