"""What Regard holds, shown: every family built tiny, every law checked, every mechanism's cache counted.

    make tour          (or: python examples/tour.py)

Takes about two minutes on two cores. It writes nothing.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import regard
from regard import DSA, GQA, MLA, Rope
from regard.models import EncoderDecoder, Seq2Seq

SMALL = {
    "dim": 64, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn_dim": 64, "vocab": 99, "max_len": 64,
    "experts": 4, "active": 2, "groups": 2, "active_groups": 1, "latent": 16, "query_latent": 24, "rope_dim": 4,
    "value_dim": 16, "index_heads": 4, "index_dim": 8, "topk": 6, "size": 16, "patch": 8, "window": 8,
    "source_vocab": 99,
}  # fmt: skip


def main() -> None:
    print("1. Every preset, at a tiny size, on one batch of random input\n")
    families()
    print("\n2. What one token leaves in the cache of one layer (128 heads of 128, bf16)\n")
    caches()
    print("\n3. The laws that tie the mechanisms to each other\n")
    sys.exit(laws())


def tiny(name: str) -> Any:
    """The preset with every size that it has made small."""
    present = sizes(regard.PRESETS[name][1]())
    kept = {k: v for k, v in SMALL.items() if k in present}
    if "kv_heads" in kept and present["kv_heads"] in (None, present["heads"]):
        kept["kv_heads"] = present["kv_heads"] and kept["heads"]
    if "topk" in kept:
        kept["tower.attention.attention.rope_dim"] = kept["rope_dim"]
    return regard.build(name, **{k: v for k, v in kept.items() if present.get(k, v) is not None})


def sizes(config: Any) -> dict[str, Any]:
    """Every setting of a config and of its parts, by its plain name; the first one found."""
    found: dict[str, Any] = {}
    for each in config if isinstance(config, tuple) else (config,):
        for name, value in vars(each).items() if dataclasses.is_dataclass(each) else ():
            found = {**sizes(value), name: value, **found}
    return found


def families() -> None:
    torch.manual_seed(0)
    print(f"{'preset':<18} {'parameters':>10}  {'output':<14} {'cache bytes/token':>17}")
    for name in regard.PRESETS:
        model = tiny(name)
        ids = torch.randint(0, 99, (2, 10))
        image = torch.randn(2, 3, 16, 16)
        with torch.inference_mode():
            if isinstance(model, (EncoderDecoder, Seq2Seq)):
                out = model(ids, source=image if name == "captioner" else ids)
            else:
                out = model(image if "vit" in name or "deit" in name else ids)
        assert out.isfinite().all()
        size = sum(p.numel() for p in model.parameters())
        print(f"{name:<18} {size:>10,}  {tuple(out.shape)!s:<14} {cache(model):>17}")


def cache(model: Any) -> str:
    from regard.models.base import cache_bytes

    try:
        return f"{cache_bytes(model):,}" if cache_bytes(model) else "a fixed state"
    except regard.UsageError:
        return "-"


def caches() -> None:
    mla = MLA(128, 512, 128, 64, query_latent=1536, rope=Rope())
    rows = {
        "MHA": GQA(128, 128, 128),
        "GQA, 8 groups": GQA(128, 8, 128),
        "MQA": GQA(128, 1, 128),
        "MLA": mla,
        "DSA over MLA": DSA(mla, 64, 128, 2048, rope_dim=64),
    }
    print(f"{'mechanism':<16} {'numbers':>8} {'bytes':>8}   against MHA")
    for name, config in rows.items():
        with torch.device("meta"):
            n = config.make(7168).cache_spec().numbers()
        print(f"{name:<16} {n:>8,} {2 * n:>8,}   1/{32768 / n:.1f}")


def laws() -> int:
    root = Path(__file__).resolve().parent.parent
    start = time.perf_counter()
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--no-header",
        "-n",
        "2",
        "-p",
        "no:cacheprovider",
        "tests/laws",
    ]
    code = subprocess.run(command, cwd=root, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode
    verdict = "every law holds" if code == 0 else "A LAW IS BROKEN"
    print(
        f"\n{verdict} ({time.perf_counter() - start:.0f} s); they are in tests/laws, one claim a test"
    )
    return code


if __name__ == "__main__":
    main()
