"""The table [data] of a training config, and what it becomes: files -> records -> ids in shards -> a feed.

The tokenizer is handed in as a `Coder` (see tokens.py). Ids are written once, into a folder, and used
again as long as files, tokenizer and settings are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from regard.config import Count, Fraction, Share, Whole, ranged
from regard.data.examples import ImageFeed, LabelFeed, PairFeed
from regard.data.feed import Base, Batching, TextFeed
from regard.data.files import DataError
from regard.data.fill import SETTINGS, Coder, shards_of
from regard.data.pack import OVERLONG
from regard.data.read import ARRAYS, ROLES, Source, format_of
from regard.data.shards import Column
from regard.errors import UsageError, nearest

TASKS = ("lm", "mlm", "seq2seq", "classify", "tag", "answer", "image")
Names = str | tuple[str, ...]
ROWED = ("lm", "mlm")  # tasks whose documents may share a row
LABELS = ("classify", "tag", "answer")
TEXTS = (*ROWED, "seq2seq", *LABELS)
TABLES = ("tsv", "csv", "jsonl", "parquet", "hub", "npz")  # formats with columns that have names
# setting -> tasks and formats that use it (none: all); settings that are not here are used by all
USED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    **dict.fromkeys(("target", "valid_target"), ((*ROWED, "seq2seq", "image"), ())),
    **dict.fromkeys(("unit", "marker"), (ROWED, ("text",))),
    "header": (TEXTS, ("tsv", "csv")),
    "size": (("image",), ("images",)),
    **dict.fromkeys(("length", "tokens", "overlong", "multiple"), (TEXTS, ())),
    "pack": (ROWED, ()),
    **dict.fromkeys(("shift", "flip", "erase", "paste"), (("image",), ())),
}
USED_ROLES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(ROWED, ("text", "source", "target")),
    "seq2seq": ("source", "target"),
    "classify": ("text", "second", "label"),
    "tag": ("words", "tags"),
    "answer": ("text", "second", "start", "end"),
    "image": ("image", "label"),
}


@dataclass(frozen=True)
@ranged
class Data:
    """Which files, how they are read (see Source), and how they become batches (see Batching and TextFeed).

    `target` has the other side of parallel files, or the classes of npy and idx files. Without `valid`, the share
    `held` of the training data is held out."""

    train: Names
    target: Names = ()
    valid: Names = ()
    valid_target: Names = ()
    held: Fraction = 0.0
    format: str = "auto"
    unit: str = "file"
    marker: str = ""
    columns: dict[str, Any] = field(default_factory=dict)
    header: bool | None = None
    size: Count | None = None
    length: Count | None = None
    rows: Count | None = None
    tokens: Count | None = None
    overlong: str = "error"
    multiple: Count = 1
    pack: str = "documents"
    shift: Whole = 0  # pictures: see ImageFeed
    flip: bool = False
    erase: Whole = 0
    paste: Share = 0.0

    def __post_init__(self) -> None:
        if self.overlong not in OVERLONG:
            raise UsageError(
                f"overlong = {self.overlong!r} is unknown; {nearest(self.overlong, OVERLONG)}"
            )

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


# --- what a task uses ---------------------------------------------------------------------------------------------


def text_roles(task: str, data: Data) -> tuple[str, ...]:
    """The columns that hold text, of which a tokenizer is learned."""
    two = bool(_tuple(data.target)) or "target" in data.columns
    if task == "seq2seq" or (task in ROWED and two):
        return ("source", "target")
    more = ("second",) if task == "answer" or "second" in data.columns else ()
    return ("words",) if task == "tag" else ("text", *more)


def check_used(data: Data, task: str, name: str = "") -> None:
    """Refuse settings that would be passed over: for the task (whose users call it `name`), or for the files' format.
    Nothing is read of the files but their names."""
    name = name or task
    said = {f.name for f in fields(Data) if f.default != getattr(data, f.name)} - {"columns"}
    for key, (tasks, _) in USED.items():
        if key in said and task not in tasks:
            raise UsageError(f"{key} is not used by the task {name}; leave it out")
    for role in data.columns:
        if role in ROLES and role not in USED_ROLES[task]:
            can = ", ".join(USED_ROLES[task])
            raise UsageError(f"columns: {role} is not used by the task {name}; it uses {can}")
    kinds = _formats(data, task, name)
    for key, (_, formats) in USED.items():
        if key in said and formats and not kinds & set(formats):
            raise UsageError(
                f"{key} is for {' and '.join(formats)} files, and the task {name} has {', '.join(sorted(kinds))} here; "
                "leave it out"
            )
    if task == "image" and "target" in said and not kinds & {"npy", "idx"}:
        raise UsageError(f"target is for npy and idx files in the task {name}; leave it out")
    if data.columns and not kinds & set(TABLES):
        raise UsageError(
            f"columns are not used by the task {name} for {', '.join(sorted(kinds))} files; leave them out"
        )
    for one, other, why in _clashes(data, task):
        if one in said and other in said:
            raise UsageError(
                f"{one} is not used beside {other} by the task {name}, {why}; leave {one} out"
            )
    if "valid_target" in said and "valid" not in said:
        raise UsageError("valid_target is the other side of valid; name valid too")


def _formats(data: Data, task: str, name: str) -> set[str]:
    """Of the training files; with a file beside each they are read line by line."""
    if not _tuple(data.train):
        raise UsageError("train names no file; give the path of a data file")
    if data.format == "hub":
        return {"hub"}
    paths = data.source().files()
    kinds = {format_of(path, data.format): path for path in paths}
    if task == "image":
        return set(kinds)
    for kind in kinds.keys() & set(ARRAYS):
        what = "a folder" if kind == "images" else f"of format {kind}"
        raise UsageError(f"{kinds[kind]} is {what}, and the task {name} reads text; name a file")
    return {"parallel"} if _tuple(data.target) else set(kinds)


def _clashes(data: Data, task: str) -> Iterator[tuple[str, str, str]]:
    """Settings of which one says all: (passed over, because of, why)."""
    yield "held", "valid", "one of the two says what is held out"
    yield "unit", "marker", "the marker stands between documents"
    if task not in ROWED or data.pack == "none":
        return
    yield "tokens", "rows", "all rows are of one length"
    yield "multiple", "length", f"with pack = {data.pack!r} all rows are of one length"
    if data.pack in ("stream", "windows"):
        yield "overlong", "pack", f"{data.pack!r} cuts rows out of all the text"


def longest(feed: Base | None) -> int | None:
    """Tokens of the longest row, padding included, of a side; None where rows have none."""
    if isinstance(feed, PairFeed):
        sizes = np.maximum(feed.read, feed.said)
    elif isinstance(feed, LabelFeed):
        sizes = feed.cut.size
    elif isinstance(feed, TextFeed):
        sizes = np.array([feed.batching.length]) if feed.pack != "none" else feed.size
    else:
        return None
    return int(feed.batching.padded(sizes).max())


# --- files -> a feed ----------------------------------------------------------------------------------------------


def load(task: str, data: Data, coder: Coder | None, folder: Path, seed: int = 0) -> Loaded:
    """The feed of a task. Shards go into `folder`."""
    if task not in TASKS:
        raise UsageError(f"task = {task!r} is unknown; {nearest(task, TASKS)}")
    if coder is None and task != "image":
        raise UsageError(f"task = {task!r} reads text and needs a tokenizer")
    check_used(data, task)
    batching = data.batching(seed)
    shards = shards_of(task, data.source(), coder, folder / "train", None)
    classes = shards.notes.get("classes", [])
    columns, name, held = shards.columns, shards.fingerprint, None
    if _tuple(data.valid):
        valid = shards_of(task, data.source(valid=True), coder, folder / "valid", classes or None)
        held = feed_of(task, data, coder, batching, valid.columns, valid.fingerprint, None)
    elif data.held:
        columns, rest = _split(columns, data.held, task == "lm" and data.pack != "none")
        name = f"{name} without {data.held}"
        held = feed_of(task, data, coder, batching, rest, f"{data.held} of {name}", None)
    feed = feed_of(task, data, coder, batching, columns, name, held)
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


def feed_of(
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
