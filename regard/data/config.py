"""The table [data] of a training config, and what it becomes: files -> records -> ids in shards -> a feed. `KINDS` has
a row for each way to read data.

Ids are written once, into a folder, and used again as long as files, tokenizer and settings are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from regard.config import Choice, Count, Fraction, Positive, Share, Whole, settings
from regard.data import feed as feeds
from regard.data import tokens
from regard.data.held import hold_out, tell_shared
from regard.data.image_feed import CaptionFeed, DrawingFeed, ImageFeed
from regard.data.samplers import OVERLONG
from regard.data.shards import Column, Shards, SourceHashes, Writer, prepare
from regard.data.source import ARRAYS, ROLES, UNITS, Source, format_of
from regard.data.tokens import Coder, Filling
from regard.errors import DATA, UsageError, blaming, check_choice, notice
from regard.text import CHATML

Names = str | tuple[str, ...]


class Kind(NamedTuple):
    """A way to read data: the roles that columns may have, how records become shards, the roles that hold text."""

    roles: tuple[str, ...]
    fill: Callable[[Filling], None]
    texts: tuple[str, ...] = ()


_DOCUMENTS = ("text", "source", "target")
KINDS: dict[str, Kind] = {
    "lm": Kind(_DOCUMENTS, tokens.fill_documents, ("text",)),
    "mlm": Kind(_DOCUMENTS, partial(tokens.fill_documents, masked=True), ("text",)),
    "chat": Kind(("messages", "tools", *tokens.TURNS), tokens.fill_chats, ("messages",)),
    "prefer": Kind(("prompt", *tokens.SIDES), tokens.fill_preferences, ("prompt", *tokens.SIDES)),
    "seq2seq": Kind(("source", "target"), tokens.fill_pairs, ("source", "target")),
    "classify": Kind(("text", "second", "label"), tokens.fill_classified, ("text",)),
    "tag": Kind(("words", "tags"), tokens.fill_tagged, ("words",)),
    "answer": Kind(("text", "second", "start", "end"), tokens.fill_answers, ("text", "second")),
    "image": Kind(("image", "label"), tokens.fill_pictures),
    "segment": Kind(("image", "label"), tokens.fill_segmented),
    "caption": Kind(("image", "label"), tokens.fill_captions, ("label",)),
    "draw": Kind(("image", "label"), tokens.fill_captions, ("label",)),
}
# Kinds whose documents are plain text, or the target of a source; that hold pictures; whose pictures may be scaled and
# moved, as no patch has a class; that may share a row; that hold chats.
PLAIN = ("lm", "mlm")
PICTURED = ("image", "segment", "caption", "draw")
MOVED = ("image", "caption", "draw")
ROWED = (*PLAIN, "chat")
CHATS = ("chat", "prefer")
TEXTS = tuple(name for name, kind in KINDS.items() if kind.texts and name not in PICTURED)
# Formats with columns that have names; JSON that is a list has them too.
TABLES = ("tsv", "csv", "jsonl", "squad", "parquet", "arrow", "hub", "npz")
# Kinds whose examples have two sides; columns whose rows are as long as an example.
PAIRS = {"seq2seq": ("source", "target"), "prefer": tokens.SIDES}
LONG = ("ids", *PAIRS["seq2seq"], *PAIRS["prefer"])
# Setting -> kinds and formats that use it (none: all); settings that are not here are used by all.
USED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    **dict.fromkeys(("target", "valid_target"), ((*PLAIN, "seq2seq", *PICTURED), ())),
    **dict.fromkeys(("unit", "marker"), (PLAIN, ("text",))),
    "header": (TEXTS, ("tsv", "csv")),
    "delimiter": (TEXTS, ("csv",)),
    "encoding": (TEXTS, ("text", "tsv", "csv", "jsonl", "squad", "parallel")),
    "size": (MOVED, ("images",)),
    **dict.fromkeys(("length", "tokens", "overlong", "multiple"), (TEXTS, ())),
    "pack": (ROWED, ()),
    "template": (CHATS, ()),
    **dict.fromkeys(("shift", "flip"), (MOVED, ())),
    "paste": (("image",), ()),
}
# Settings that there were -> what is no longer done; off, they change nothing.
GONE = {"erase": "black squares are no longer put into pictures"}
# Settings of a Source, beside its paths.
SETTINGS = ("format", "unit", "marker", "columns", "header", "size", "delimiter", "encoding")


@settings
class Data:
    """Which files, how they are read (see Source), and how they become batches (see Batching, TextFeed, ImageFeed)."""

    train: Names  # training files, from where the config lies; * and ? are understood
    # how often examples of each of train are seen beside those of the others; none: all as often
    weights: tuple[Positive, ...] = ()
    target: Names = ()  # files with the other side, line by line; classes of npy and idx files
    valid: Names = ()  # files of the evaluation
    valid_target: Names = ()  # their other side
    held: Fraction = 0.0  # share of the training data to evaluate on, where there is no valid
    # text, tsv, csv, jsonl, squad, parquet, hub, npz, npy, idx, images; auto: by the name
    format: str = "auto"
    # what is one document of plain text: file, line, paragraph
    unit: Annotated[str, Choice(UNITS)] = "file"
    marker: str = ""  # a text that stands between documents
    # which column has a role: { text = 1, label = 0 }, or by name
    columns: dict[str, Any] = field(default_factory=dict)
    # whether the first line names the columns; none: if columns are named, or it looks like it
    header: bool | None = None
    delimiter: str = ""  # between the columns of csv files; none: the one of , ; tab | that fits
    encoding: str = "utf-8"  # what text is written in, such as cp1252 or utf-16
    size: Count | None = None  # pictures are scaled to size x size
    length: Count | None = None  # tokens of a row at most
    rows: Count | None = None  # rows of a batch
    tokens: Count | None = None  # tokens of a batch (of each side), padding included
    # longer examples: error, truncate, drop or split
    overlong: Annotated[str, Choice(OVERLONG)] = "error"
    multiple: Count = 1  # rows are padded to a multiple of this
    # documents (whole, unseen by each other), stream, windows or none
    pack: Annotated[str, Choice(feeds.PACKS)] = "documents"
    # chats: how they are written, a .jinja file or "chatml"; none: as the model folder says
    template: str = ""
    shift: Whole = 0  # pictures are moved by up to so many pixels in training
    flip: bool = False  # mirrored every other time
    paste: Share = 0.0  # share into which a piece of another is pasted (CutMix)

    def __post_init__(self) -> None:
        files = len(_tuple(self.train))
        numbers = len(self.weights)
        if self.weights and (numbers != files or self.target):
            raise UsageError(
                f"weights has {numbers} numbers, train {files} files; give one for each, no target"
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
        if self.template not in ("", "chatml"):
            moved["template"] = str(folder / self.template)  # type: ignore[assignment]
        return replace(self, **moved)  # type: ignore[arg-type]

    def template_file(self) -> bytes:
        """The chat template that is named; nothing where none is."""
        if self.template in ("", "chatml"):
            return CHATML.encode() if self.template else b""
        with blaming(DATA), open(self.template, "rb") as stream:
            return stream.read()

    def batching(self, seed: int) -> feeds.Batching:
        return feeds.Batching(
            self.length, self.rows, self.tokens, self.overlong, self.multiple, seed
        )


@dataclass(frozen=True, eq=False)
class Loaded:
    """A feed, the classes its labels number, and what was counted while the files were read."""

    feed: feeds.Base
    classes: list[str]
    notes: dict[str, Any]
    # Tokens of each example, of its longer side.
    lengths: np.ndarray


def still_known(table: dict[str, Any]) -> dict[str, Any]:
    """The table [data] of a config that may be of before, without settings that are GONE."""
    for name in GONE.keys() & table.keys():
        if table[name]:
            raise UsageError(f"data.{name} = {table[name]!r}: {GONE[name]}; leave it out")
    return {name: value for name, value in table.items() if name not in GONE}


# --- what a task uses ---------------------------------------------------------------------------------------------


def text_roles(task: str, data: Data) -> tuple[str, ...]:
    """The columns that hold text, of which a tokenizer is learned."""
    if task in PLAIN and (_tuple(data.target) or "target" in data.columns):
        return ("source", "target")
    if task == "chat" and "response" in data.columns:
        return tuple(role for role in tokens.TURNS if role in data.columns)
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
    here = ", ".join(sorted(kinds))
    for key, (_, formats) in USED.items():
        if key in given and formats and not kinds & set(formats):
            raise UsageError(
                f"{key} is for {' and '.join(formats)} files, and the task {name} has {here} here; leave it out"
            )
    if task in PICTURED and "target" in given and not kinds & {"npy", "idx"}:
        raise UsageError(f"target is for npy and idx files in the task {name}; leave it out")
    if data.columns and not kinds & set(TABLES):
        raise UsageError(f"columns are not used by the task {name} for {here} files; omit them")
    # Settings of which one says all: what is passed over, because of what, and why.
    clashes = [
        ("held", "valid", "one of the two says what is held out"),
        ("unit", "marker", "the marker stands between documents"),
    ]
    if task in ROWED and data.pack != "none":
        same = "all rows are of one length"
        clashes.append(("tokens", "rows", same))
        clashes.append(("multiple", "length", f"with pack = {data.pack!r} {same}"))
    if task in ROWED and data.pack in ("stream", "windows"):
        clashes.append(("overlong", "pack", f"{data.pack!r} cuts rows out of all the text"))
    for one, other, why in clashes:
        if {one, other} <= given:
            raise UsageError(
                f"{one} is not used beside {other} by the task {name}, {why}; leave it out"
            )
    if "valid_target" in given and "valid" not in given:
        raise UsageError("valid_target is the other side of valid; name valid too")


def _formats(data: Data, task: str, name: str) -> set[str]:
    """Of the training files; with a file beside each they are read line by line."""
    if not _tuple(data.train):
        raise UsageError("train names no file; give the path of a data file")
    kinds = {format_of(path, data.format): path for path in data.source().files()}
    if task in PICTURED:
        return set(kinds)
    for kind in kinds.keys() & set(ARRAYS):
        what = "a folder" if kind == "images" else f"of format {kind}"
        raise UsageError(f"{kinds[kind]} is {what}, and the task {name} reads text; name a file")
    return {"parallel"} if _tuple(data.target) else set(kinds)


# --- files -> a feed ----------------------------------------------------------------------------------------------


def load(
    task: str,
    data: Data,
    coder: Coder | None,
    folder: Path,
    seed: int = 0,
    labels: Sequence[str] = (),
    sample: int | None = None,
) -> Loaded:
    """The feed of a task. Shards go into `folder`. `labels`: those that the model has already, in its order. `sample`:
    of each data set, only about so many characters are read."""
    check_choice("task", task, KINDS)
    if coder is None and KINDS[task].texts:
        raise UsageError(f"task = {task!r} reads text and needs a tokenizer")
    check_used(data, task)
    batching = data.batching(seed)
    for name in ("train", "valid"):
        _tell_twice(data, name)
    sources = [replace(data.source(), sample=sample)]
    if data.weights:
        sources = [replace(sources[0], paths=(path,)) for path in _tuple(data.train)]
    parts: list[Shards] = []
    classes: list[str] = []
    for i, source in enumerate(sources):
        home = folder / (f"train-{i}" if i else "train")
        parts.append(shards_of(task, source, coder, home, classes or None, labels))
        classes = classes or parts[0].notes.get("classes", [])
    columns = {n: Column.join([part.columns[n] for part in parts]) for n in parts[0].columns}
    sizes = [len(next(iter(part.columns.values()))) for part in parts]
    name = parts[0].fingerprint
    held = None
    if data.weights:
        name = f"{data.weights} of {' '.join(part.fingerprint for part in parts)}"
    # What is held out is chosen first, and only what is left is mixed: it is never trained on.
    rows = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    if _tuple(data.valid):
        home = folder / "valid"
        valid = shards_of(task, data.source(valid=True), coder, home, classes or None, labels)
        held = feed_of(task, data, coder, batching, valid.columns, valid.fingerprint, None)
        tell_shared(columns, valid.columns)
    elif data.held:
        split = hold_out(columns, sizes, data.held, task == "lm" and data.pack != "none")
        columns = split.columns
        rows = split.rows
        name = f"{name} without {split.name}"
        rest = {n: column.take(split.held) for n, column in columns.items()}
        held = feed_of(task, data, coder, batching, rest, f"{split.name} of {name}", None)
    if data.weights or data.held:
        chosen = mixed(rows, np.array(data.weights)) if data.weights else rows[0]
        columns = {n: column.take(chosen) for n, column in columns.items()}
    feed = feed_of(task, data, coder, batching, columns, name, held)
    longest = [columns[n].lengths for n in LONG if n in columns]
    lengths = np.maximum.reduce(longest) if longest else np.zeros(0, int)
    notes = _joined_notes([part.notes for part in parts])
    if spelled := notes.get("spelled"):
        _tell_spelled(spelled, data, coder)
    return Loaded(feed, classes, notes, lengths)


def _joined_notes(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """What was counted in several data sets: numbers are counts, lists the classes, or ends of answers."""
    notes = dict(parts[0])
    for name, x in ((n, x) for part in parts[1:] for n, x in part.items() if n != "classes"):
        notes[name] = notes.get(name, type(x)()) + x
    return notes


def _tell_spelled(count: int, data: Data, coder: Coder | None) -> None:
    """Say that texts hold the end token as characters, where a marker can make an end of it."""
    assert coder is not None
    plain = any(format_of(path, data.format) == "text" for path in data.source().files())
    how = f"; where it stands between documents, say marker = {coder.end_text!r}" if plain else ""
    notice(
        f"the texts spell {coder.end_text}, the tokenizer's own end of a document, {count:,} times, and it is learned "
        f"as plain text{how}"
    )


def _tell_twice(data: Data, name: str) -> None:
    """Say which files are named more than once."""
    source = data.source(valid=name == "valid")
    files = [path.resolve() for path in source.files()] if source.format != "hub" else []
    beside = [path.resolve() for path in source.beside_files()] or files
    for (path, _), count in Counter(zip(files, beside)).items():
        if count > 1:
            notice(f"{path} is named {count} times in {name}, and its examples count as often")


def mixed(parts: list[np.ndarray], weights: np.ndarray) -> np.ndarray:
    """The rows of several data sets, evenly among each other: each set as often as its weight says, and so many in all
    that every example is there."""
    sizes = np.array([len(part) for part in parts])
    counts = np.round((sizes / weights).max() * weights).astype(int)
    place = np.concatenate([(np.arange(n) + 0.5) / n for n in counts])
    rows = np.concatenate([part[np.arange(n) % len(part)] for part, n in zip(parts, counts)])
    return rows[np.argsort(place, kind="stable")]


def _tuple(names: Names) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def shards_of(
    task: str,
    source: Source,
    coder: Coder | None,
    folder: Path,
    classes: list[str] | None,
    labels: Sequence[str] = (),
) -> Shards:
    made_of: dict[str, Any] = {name: getattr(source, name) for name in SETTINGS}
    made_of |= {"task": task, "classes": classes, "labels": list(labels)}
    # Not where they are as they always were: shards of older versions are used again.
    for name, usual in (("delimiter", ""), ("encoding", "utf-8"), ("labels", [])):
        if made_of[name] == usual:
            del made_of[name]
    made_of["tokenizer"] = None if coder is None else coder.fingerprint
    if coder is not None:
        made_of["special"] = [coder.before, coder.between, coder.after, coder.start, coder.end]
    if task in CHATS and coder is not None:
        made_of["template"] = coder.tokenizer.templates.get("default")
    known = source.format != "hub" and source.sample is None
    here = SourceHashes(source.files() if known else [])
    there = SourceHashes(source.beside_files() if known else [])
    made_of |= {"sources": here.hashes if known else list(source.paths)}
    made_of |= {"beside": there.hashes} if known else {}

    def fill(writer: Writer) -> None:
        try:
            KINDS[task].fill(Filling(writer, source, coder, classes, labels))
        except UsageError:
            # What is wrong with a file may be that it was not the same all the time.
            here.check()
            there.check()
            raise
        here.check()
        there.check()

    return prepare(folder, made_of, fill)


def feed_of(
    task: str,
    data: Data,
    coder: Coder | None,
    batching: feeds.Batching,
    columns: dict[str, Column],
    name: str,
    held: Any,
) -> feeds.Base:
    """The feed over columns whose fingerprint is `name`."""
    more: dict[str, Any] = {"batching": batching, "held": held, "fingerprint": name}
    if not KINDS[task].texts:
        more |= {n: getattr(data, n) for n in ("shift", "flip", "paste")}
        return ImageFeed(columns["images"], columns["labels"], **more)
    assert coder is not None
    more["pad"] = coder.pad
    if task in ("caption", "seq2seq"):
        if coder.start is None or coder.end is None:
            raise UsageError(f"the task {task} needs a tokenizer with an end token (eos)")
        more |= {"start": coder.start, "end": coder.end}
    if task in ("caption", "draw"):
        more |= {n: getattr(data, n) for n in ("shift", "flip")}
        numbers, texts = Column(np.arange(len(columns["images"]))), columns["target"]
        if task == "caption":
            return CaptionFeed(columns["images"], numbers, texts=texts, **more)
        more["around"] = (coder.before, coder.after)
        return DrawingFeed(columns["images"], numbers, texts=texts, **more)
    if task in ROWED:
        prompts = None
        if asked := columns.get("prompts"):
            prompts = asked.at(np.arange(len(asked)))
        more |= {"pack": data.pack, "shift": task != "mlm", "prompts": prompts}
        more["learned"] = columns.get("ids_learned")
        return feeds.TextFeed(columns["ids"], **more)
    if task == "prefer":
        sides = [(columns[n], columns.get(f"{n}_learned")) for n in tokens.SIDES]
        return feeds.PreferFeed(sides[0], sides[1], **more)
    more["around"] = (coder.before, coder.after)
    if task != "seq2seq":
        return feeds.LabelFeed(columns["ids"], columns["labels"], divider=coder.divider, **more)
    return feeds.PairFeed(columns["source"], columns["target"], **more)
