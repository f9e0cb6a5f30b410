"""The table [data] of a training config, and what it becomes: files -> records -> ids in shards -> a feed.

The tokenizer is handed in as a `Coder` (regard.text.coder has one). Ids are written once, into a folder, and used again
as long as files, tokenizer and settings are the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from regard.config import UsageError, nearest
from regard.train.examples import ImageFeed, LabelFeed, PairFeed
from regard.train.feed import Base, Batching, TextFeed
from regard.train.files import DataError
from regard.train.fill import SETTINGS, Coder, shards_of
from regard.train.read import Source
from regard.train.shards import Column

TASKS = ("lm", "mlm", "seq2seq", "classify", "tag", "answer", "image")
Names = str | tuple[str, ...]


@dataclass(frozen=True)
class Data:
    """Which files, how they are read (see Source), and how they become batches (see Batching and TextFeed).

    `target` has the other side of parallel files, or the classes of npy and idx files. Without `valid`, the share
    `held` of the training data is held out."""

    train: Names
    target: Names = ()
    valid: Names = ()
    valid_target: Names = ()
    held: float = 0.0
    format: str = "auto"
    unit: str = "file"
    marker: str = ""
    columns: dict[str, Any] = field(default_factory=dict)
    header: bool | None = None
    size: int | None = None
    length: int | None = None
    rows: int | None = None
    tokens: int | None = None
    overlong: str = "error"
    multiple: int = 1
    pack: str = "documents"
    shift: int = 0  # pictures: see ImageFeed
    flip: bool = False
    erase: int = 0
    paste: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.held < 1.0:
            raise UsageError(f"held = {self.held}: give a share from 0 to 1, for example 0.1")

    def source(self, valid: bool = False) -> Source:
        paths, beside = (self.valid, self.valid_target) if valid else (self.train, self.target)
        return Source(_tuple(paths), _tuple(beside), **{n: getattr(self, n) for n in SETTINGS})

    def under(self, folder: Path) -> Data:
        """The same with paths relative to a folder (that of the config file)."""
        if self.format == "hub":
            return self
        names = ("train", "target", "valid", "valid_target")
        moved = {n: tuple(str(folder / p) for p in _tuple(getattr(self, n))) for n in names}
        return replace(self, **moved)  # type: ignore[arg-type]

    def batching(self, seed: int) -> Batching:
        return Batching(self.length, self.rows, self.tokens, self.overlong, self.multiple, seed)


@dataclass(frozen=True, eq=False)
class Loaded:
    """A feed, the classes its labels number, and what was counted while the files were read."""

    feed: Base
    classes: list[str]
    notes: dict[str, Any]


def load(task: str, data: Data, coder: Coder | None, folder: Path, seed: int = 0) -> Loaded:
    """The feed of a task. Shards go into `folder`."""
    if task not in TASKS:
        raise UsageError(f"task = {task!r} is unknown; {nearest(task, TASKS)}")
    if coder is None and task != "image":
        raise UsageError(f"task = {task!r} reads text and needs a tokenizer")
    batching = data.batching(seed)
    shards = shards_of(task, data.source(), coder, folder / "train", None)
    classes = shards.notes.get("classes", [])
    columns, name, held = shards.columns, shards.fingerprint, None
    if _tuple(data.valid):
        valid = shards_of(task, data.source(valid=True), coder, folder / "valid", classes or None)
        held = _feed(task, data, coder, batching, valid.columns, valid.fingerprint, None)
    elif data.held:
        columns, rest = _split(columns, data.held, task == "lm" and data.pack != "none")
        name = f"{name} without {data.held}"
        held = _feed(task, data, coder, batching, rest, f"{data.held} of {name}", None)
    feed = _feed(task, data, coder, batching, columns, name, held)
    return Loaded(feed, classes, shards.notes)


def _tuple(names: Names) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _split(
    columns: dict[str, Column], share: float, tail: bool
) -> tuple[dict[str, Column], dict[str, Column]]:
    """Hold out a share: the end of a text (of its last document, if there is one only), or examples here and there."""
    n = len(next(iter(columns.values())))
    if tail and n == 1:
        (name, column), *_ = columns.items()
        at = int(len(column.stream) * (1 - share))
        parts = (column.stream[:at], column.stream[at:])
        return tuple({name: Column.of([part], part.dtype)} for part in parts)  # type: ignore[return-value]
    out = max(round(n * share), 1)
    if n < 2:
        raise DataError("a single example cannot be shared out; name valid files")
    if tail:
        halves = ((0, n - out), (n - out, n))
        return tuple({m: c.part(*h) for m, c in columns.items()} for h in halves)  # type: ignore[return-value]
    picked = np.zeros(n, bool)
    picked[(np.arange(out) * n + n // 2) // out] = True
    sides = (np.flatnonzero(~picked), np.flatnonzero(picked))
    return tuple({m: c.take(side) for m, c in columns.items()} for side in sides)  # type: ignore[return-value]


def _feed(
    task: str,
    data: Data,
    coder: Coder | None,
    batching: Batching,
    columns: dict[str, Column],
    name: str,
    held: Any,
) -> Base:
    common: dict[str, Any] = {"held": held, "fingerprint": name}
    if coder is None or task == "image":
        x, y = columns["images"], columns["labels"]
        changes = {n: getattr(data, n) for n in ("shift", "flip", "erase", "paste")}
        return ImageFeed(x, y, batching, **changes, **common)
    common["pad"] = coder.pad
    if task in ("lm", "mlm"):
        prompts = columns["prompts"].values if "prompts" in columns else None
        shift, pack = task == "lm", data.pack
        return TextFeed(columns["ids"], batching, pack=pack, shift=shift, prompts=prompts, **common)
    common["around"] = (coder.before, coder.after)
    if task != "seq2seq":
        return LabelFeed(columns["ids"], columns["labels"], batching, **common)
    start, end = coder.start, coder.end
    if start is None or end is None:
        raise UsageError("translation needs a tokenizer with an end token (eos)")
    source, target = columns["source"], columns["target"]
    return PairFeed(source, target, batching, start=start, end=end, **common)
