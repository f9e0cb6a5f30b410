"""The table [data] of a training config, and what it becomes: files -> records -> ids in shards -> a feed. `KINDS` has
a row for each way to read data.

Ids are written once, into a folder, and used again as long as files, tokenizer and settings are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from regard.config import Count, Fraction, Share, Whole, ranged
from regard.data.feed import OVERLONG, Base, Batching, ImageFeed, LabelFeed, PairFeed, TextFeed
from regard.data.read import ARRAYS, ROLES, DataError, Source, format_of
from regard.data.shards import Column, Shards, prepare, sha256
from regard.data.tokens import (
    Coder,
    Filling,
    fill_answers,
    fill_classified,
    fill_documents,
    fill_pairs,
    fill_pictures,
    fill_tagged,
)
from regard.errors import UsageError, nearest

Names = str | tuple[str, ...]


class Kind(NamedTuple):
    """A way to read data: the roles that columns may have, how records become shards, and the feed over them. `texts`
    are the roles that hold text; `rowed`: documents may share a row."""

    roles: tuple[str, ...]
    fill: Callable[[Filling], None]
    feed: Callable[..., Base]
    texts: tuple[str, ...] = ()
    rowed: bool = False


def text_feed(
    data: Data, columns: dict[str, Column], coder: Coder, shift: bool, **rest: Any
) -> Base:
    prompts = columns["prompts"].values if "prompts" in columns else None
    pack: dict[str, Any] = {"pack": data.pack, "shift": shift, "prompts": prompts}
    return TextFeed(columns["ids"], **pack, pad=coder.pad, **rest)


def pair_feed(data: Data, columns: dict[str, Column], coder: Coder, **rest: Any) -> Base:
    if coder.start is None or coder.end is None:
        raise UsageError("translation needs a tokenizer with an end token (eos)")
    special: dict[str, Any] = {"start": coder.start, "end": coder.end, "pad": coder.pad}
    around = (coder.before, coder.after)
    return PairFeed(columns["source"], columns["target"], around=around, **special, **rest)


def label_feed(data: Data, columns: dict[str, Column], coder: Coder, **rest: Any) -> Base:
    around = (coder.before, coder.after)
    return LabelFeed(columns["ids"], columns["labels"], around=around, pad=coder.pad, **rest)


def image_feed(data: Data, columns: dict[str, Column], coder: None, **rest: Any) -> Base:
    changes = {n: getattr(data, n) for n in ("shift", "flip", "erase", "paste")}
    return ImageFeed(columns["images"], columns["labels"], **changes, **rest)


_DOCUMENTS = ("text", "source", "target")
KINDS: dict[str, Kind] = {
    "lm": Kind(
        _DOCUMENTS, fill_documents, partial(text_feed, shift=True), texts=("text",), rowed=True
    ),
    "mlm": Kind(
        _DOCUMENTS,
        partial(fill_documents, masked=True),
        partial(text_feed, shift=False),
        texts=("text",),
        rowed=True,
    ),
    "seq2seq": Kind(("source", "target"), fill_pairs, pair_feed, texts=("source", "target")),
    "classify": Kind(("text", "second", "label"), fill_classified, label_feed, texts=("text",)),
    "tag": Kind(("words", "tags"), fill_tagged, label_feed, texts=("words",)),
    "answer": Kind(
        ("text", "second", "start", "end"), fill_answers, label_feed, texts=("text", "second")
    ),
    "image": Kind(("image", "label"), fill_pictures, image_feed),
}
ROWED = tuple(name for name, kind in KINDS.items() if kind.rowed)
TEXTS = tuple(name for name, kind in KINDS.items() if kind.texts)
# Formats with columns that have names.
TABLES = ("tsv", "csv", "jsonl", "parquet", "arrow", "hub", "npz")
# Setting -> kinds and formats that use it (none: all); settings that are not here are used by all.
USED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    **dict.fromkeys(("target", "valid_target"), ((*ROWED, "seq2seq", "image"), ())),
    **dict.fromkeys(("unit", "marker"), (ROWED, ("text",))),
    "header": (TEXTS, ("tsv", "csv")),
    "size": (("image",), ("images",)),
    **dict.fromkeys(("length", "tokens", "overlong", "multiple"), (TEXTS, ())),
    "pack": (ROWED, ()),
    **dict.fromkeys(("shift", "flip", "erase", "paste"), (("image",), ())),
}
# Settings of a Source, beside its paths.
SETTINGS = ("format", "unit", "marker", "columns", "header", "size")


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
    if task in ROWED and (_tuple(data.target) or "target" in data.columns):
        return ("source", "target")
    more = ("second",) if "second" in data.columns and task == "classify" else ()
    return (*KINDS[task].texts, *more)


def check_used(data: Data, task: str, name: str = "") -> None:
    """Refuse settings that would be passed over: for the task (whose users call it `name`), or for the files' format.
    Nothing is read of the files but their names."""
    name = name or task
    given = {f.name for f in fields(Data) if f.default != getattr(data, f.name)} - {"columns"}
    for key, (tasks, _) in USED.items():
        if key in given and task not in tasks:
            raise UsageError(f"{key} is not used by the task {name}; leave it out")
    for role in data.columns:
        if role in ROLES and role not in KINDS[task].roles:
            can = ", ".join(KINDS[task].roles)
            raise UsageError(f"columns: {role} is not used by the task {name}; it uses {can}")
    kinds = _formats(data, task, name)
    for key, (_, formats) in USED.items():
        if key in given and formats and not kinds & set(formats):
            raise UsageError(
                f"{key} is for {' and '.join(formats)} files, and the task {name} has {', '.join(sorted(kinds))} here; "
                "leave it out"
            )
    if task == "image" and "target" in given and not kinds & {"npy", "idx"}:
        raise UsageError(f"target is for npy and idx files in the task {name}; leave it out")
    if data.columns and not kinds & set(TABLES):
        raise UsageError(
            f"columns are not used by the task {name} for {', '.join(sorted(kinds))} files; leave them out"
        )
    for one, other, why in _clashes(data, task):
        if one in given and other in given:
            raise UsageError(
                f"{one} is not used beside {other} by the task {name}, {why}; leave {one} out"
            )
    if "valid_target" in given and "valid" not in given:
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
        sizes = np.maximum(feed.source_sizes, feed.target_sizes)
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
    if task not in KINDS:
        raise UsageError(f"task = {task!r} is unknown; {nearest(task, KINDS)}")
    if coder is None and KINDS[task].texts:
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


def shards_of(
    task: str, source: Source, coder: Coder | None, folder: Path, classes: list[str] | None
) -> Shards:
    made_of: dict[str, Any] = {name: getattr(source, name) for name in SETTINGS}
    made_of |= {"task": task, "classes": classes}
    made_of["tokenizer"] = None if coder is None else coder.fingerprint
    if coder is not None:
        made_of["special"] = [coder.before, coder.between, coder.after, coder.start, coder.end]
    if source.format == "hub":
        made_of["sources"] = list(source.paths)
    else:
        made_of["sources"] = [sha256(p) for p in source.files()]
        made_of["beside"] = [sha256(p) for p in source.beside_files()]
    fill = KINDS[task].fill
    return prepare(folder, made_of, lambda writer: fill(Filling(writer, source, coder, classes)))


def feed_of(
    task: str,
    data: Data,
    coder: Coder | None,
    batching: Batching,
    columns: dict[str, Column],
    name: str,
    held: Any,
) -> Base:
    feed = KINDS[task].feed
    return feed(data, columns, coder, batching=batching, held=held, fingerprint=name)
