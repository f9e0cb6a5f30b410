"""Folders of runs that never ran, for the tests of what reads them."""

import json
import math
from pathlib import Path
from typing import Any

INFO: dict[str, Any] = {
    "format": 1,
    "command": ["regard", "train", "story.toml", "--train.optim.lr", "3e-4"],
    "task": "lm",
    "seed": 42,
    "device": "cpu",
    "device_name": "x86_64",
    "precision": "fp32",
    "threads": 2,
    "world": 1,
    "regard": "0.1.0",
    "torch": "2.15.0",
    "python": "3.13.0",
    "commit": "0123abc",
    "parameters": 12_345_678,
    "trained": 12_345_678,
    "data": "story.txt, 1,115,394 tokens",
    "classes": [],
    "config": {
        "task": "lm",
        "model": {"preset": "gpt2", "layers": 4},
        "train": {"steps": 300, "patience": None, "optim": {"lr": 3e-4}},
    },
    "changes": {"train.optim.lr": "3e-4"},
    "metric": "loss",
    "began": "2025-01-01T12:00:00+00:00",
    "ended": "2025-01-01T12:05:44+00:00",
    "seconds": 344.0,
    "memory": 3 << 29,
    "status": "done",
    "step": 300,
    "steps": 300,
    "best": {"step": 250, "value": 3.041},
}


def events(steps: int = 300, lift: float = 0.0) -> list[dict[str, Any]]:
    """A loss that falls from 5 to 3 with some noise; evaluated every 50 steps, at 250 best."""
    found: list[dict[str, Any]] = []
    for k in range(1, steps + 1):
        loss = 3 + lift + 2 * math.exp(-k / 60) + 0.05 * math.sin(7 * k)
        told = {"norm": 0.5 + 2 / k, "lr": 3e-4 * min(k / 30, 1), "tokens": 1024}
        found.append({"kind": "step", "step": k, "loss": loss, **told, "seconds": 0.28})
        if k % 50 == 0:
            value = 3.041 + lift + abs(250 - k) / 500
            more = {"bleu": k / 10, "signatures": {"bleu": "nrefs:1|case:lc"}}
            best = k <= 250
            found.append({"kind": "evaluation", "step": k, "loss": value, "best": best, **more})
    return found


def samples() -> list[dict[str, Any]]:
    return [
        {"step": k, "source": "the king", "text": f" said {k}", "reference": " is dead"}
        for k in (100, 200, 300)
    ]


def make(
    folder: Path,
    told: list[dict[str, Any]] | None = None,
    texts: list[dict[str, Any]] | None = None,
    **changes: Any,
) -> Path:
    """Write a run's folder."""
    folder.mkdir(parents=True)
    info = {**INFO, "name": folder.name, **changes}
    (folder / "run.json").write_text(json.dumps(info), encoding="utf-8")
    for name, rows in (("metrics", told or events()), ("samples", texts or samples())):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    return folder
