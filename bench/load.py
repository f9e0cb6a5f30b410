"""Memory that loading a folder takes, against the folder's bytes, each in a fresh process.

    python bench/load.py [--megabytes 500] [--models gpt2 llama mixtral]

GPT-2's tensors are transposed and cut on the way, Mixtral's experts stacked; Llama's are taken as they are. The folders
are written to a temporary place and removed. Linux only.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import child, growth, header

import regard

WIDTH = dict(dim=512, heads=8, vocab=8000, max_len=256)
LAYER = {  # what a layer weighs in megabytes, and what else to set
    "gpt2": (12.6, {"ffn_dim": 2048}),
    "llama": (11.5, {"kv_heads": 2, "ffn_dim": 1536}),
    "mixtral": (27.8, {"kv_heads": 2, "ffn_dim": 512}),
}
PRESET = {"gpt2": "gpt2", "llama": "llama", "mixtral": "mixtral-8x7b"}


def write(name: str, megabytes: float, folder: Path) -> int:
    """A model of about that size; returns the bytes of its weights."""
    layer, more = LAYER[name]
    layers = max(1, round((megabytes - 16) / layer))
    settings: dict[str, Any] = WIDTH | more
    model = regard.build(PRESET[name], device="meta", layers=layers, **settings)
    model.to_empty(device="cpu").save(folder)  # whatever stands in memory: only its size matters
    return sum(p.stat().st_size for p in folder.glob("*.safetensors"))


def measure_peak(folder: str, tiny: str) -> None:
    regard.load(tiny)  # what the first load imports is not the folder's
    print(growth(lambda: regard.load(folder)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=500)
    parser.add_argument("--models", nargs="+", choices=LAYER, default=list(LAYER))
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak:
        return measure_peak(*args.peak)
    print(header())
    print(f"{'model':<8} {'folder MB':>10} {'peak MB':>8} {'ratio':>6} {'seconds':>8}")
    for name in args.models:
        with tempfile.TemporaryDirectory() as place:
            folder, tiny = Path(place, "model"), Path(place, "tiny")
            size = write(name, args.megabytes, folder) / 1e6
            regard.build("gpt2", layers=1, dim=8, heads=1, vocab=10, max_len=8).save(tiny)
            start = time.perf_counter()
            regard.load(folder)
            seconds = time.perf_counter() - start
            peak = child(__file__, folder, tiny)
        print(f"{name:<8} {size:>10.1f} {peak:>8.1f} {peak / size:>6.2f} {seconds:>8.2f}")


if __name__ == "__main__":
    main()
