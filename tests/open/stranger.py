"""What a stranger's addition must stand: it is trained, saved, read again, decoded and held against itself. And how
many files of ours he opens for it."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import regard
from regard.parity import CHECKS, parity, sample

ROOT = Path(__file__).resolve().parents[2]
RUNNERS = ("torch", "native", "graph")
PROMPTS = [[5, 9, 2, 7], [3, 3, 8, 1, 4, 6, 2, 9, 9], [11]]
SIZES = dict(preset="llama", layers=2, dim=32, heads=4, kv_heads=2, ffn_dim=48, max_len=64)


@contextmanager
def added(table: dict[str, Any], name: str, row: Any) -> Iterator[None]:
    """A row in a table of ours, for as long as a test lasts."""
    assert name not in table
    table[name] = row
    try:
        yield
    finally:
        del table[name]


def home(table: dict[str, Any]) -> str:
    """The file of the package that assigns a table."""
    found = [
        path
        for path in sorted((ROOT / "regard").rglob("*.py"))
        for name in _assigned(path)
        if getattr(sys.modules.get(_module(path)), name, None) is table
    ]
    assert len(found) == 1, f"the table is assigned in {found}"
    return str(found[0].relative_to(ROOT))


def _assigned(path: Path) -> Iterator[str]:
    """Names of tables that a file assigns at its top: in capitals, as all of ours."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        yield from (t.id for t in targets if isinstance(t, ast.Name) and t.id.isupper())


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def promised(change: str) -> int:
    """How many files docs/architecture.md says that one must open for a change."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    row = re.search(rf"^\| {re.escape(change)} \| (\d+) \|", text, re.MULTILINE)
    assert row, f"docs/architecture.md does not say what it costs to {change}"
    return int(row[1])


def tiny(**changes: Any) -> Any:
    """A model with weights large enough that a mistake shows."""
    torch.manual_seed(0)
    model = regard.build(**{**SIZES, **changes, "vocab": 60})
    for p in model.parameters():
        p.data.mul_(2.0 if p.dim() > 1 else 1.0)
    return model.eval()


def config(folder: Path, model: dict[str, Any]) -> dict[str, Any]:
    """The tables of a short run."""
    text = folder / "story.txt"
    text.write_text("The cat sat on the mat, and that was all. " * 60)
    data = dict(train=str(text), held=0.1, length=32, rows=4, pack="windows")
    train = dict(steps=12, evaluate=6, save=6, optim={"lr": 1e-2})
    tokenizer = {"kind": "chars"}
    return dict(task="lm", data=data, tokenizer=tokenizer, train=train, model={**SIZES, **model})


def stands(folder: Path, **model: Any) -> Any:
    """Train a model of the stranger's, whose loss falls; read it, write it and read it again; let it write; hold its
    runs against each other. The model, as it was read."""
    losses: list[float] = []

    def record(event: dict[str, Any]) -> None:
        losses.extend([event["loss"]] if "loss" in event else [])

    made = regard.train(config(folder, model), folder=folder / "run", callbacks=[record])
    assert losses[-1] < losses[0]
    first: Any = regard.load(made.last)
    again = regard.load(first.save(folder / "again"))
    ids = torch.tensor(PROMPTS[0])[None]
    assert again.config == first.config and torch.equal(again(ids), first(ids))
    decodes(first)
    # Who computes distances does not do so in bf16.
    checks = [name for name in CHECKS if name != "bf16 against fp32"]
    found = parity(first, sample(first, rows=2, tokens=7), only=checks)
    assert {check.verdict for check in found} <= {"equal", "rounding"}
    return first


def decodes(model: Any, count: int = 12) -> None:
    """The engine writes, to rows of several lengths at once, what whole forward passes do."""
    want = [greedy(model, prompt, count) for prompt in PROMPTS]
    settings = regard.Settings(max_new_tokens=count, eos=())
    for runner in RUNNERS:
        prepared = regard.prepare(model) if runner == "native" else model
        engine = regard.Engine(prepared, runner="graph" if runner == "graph" else "torch")
        numbers = [engine.submit(regard.Request(prompt, settings)) for prompt in PROMPTS]
        done = {event.request: event.done for event in engine.run() if event.done is not None}
        assert [done[number][0].ids for number in numbers] == want, runner


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]
