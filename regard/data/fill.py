"""Records -> ids in shards, for each task. The tokenizer is handed in: this package may not import regard.text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from regard.data.batch import IGNORE, UNANSWERED
from regard.data.files import DataError, sha256
from regard.data.images import pictures
from regard.data.read import Record, Source, records
from regard.data.shards import Shards, Writer, prepare, token_dtype

CHUNK = 1 << 20  # characters that are encoded at once, of many texts
PIECE = 1 << 18  # and of one
AROUND, CUTS = (
    200,
    32,
)  # characters on each side of a cut that are compared; cuts of a kind that are tried
SETTINGS = ("format", "unit", "marker", "columns", "header", "size")  # of a Source
Located = tuple[list[int], list[tuple[int, int]]]  # ids, and the characters each comes from


class Coder(Protocol):
    """What training needs of a tokenizer; see regard.data.tokens.Coder."""

    vocab: int
    pad: int
    start: int | None
    end: int | None
    unknown: int | None
    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def fingerprint(self) -> str: ...

    def encode(self, texts: Sequence[str], *, target: bool = False) -> list[list[int]]: ...

    def located(self, texts: Sequence[str]) -> list[Located]: ...


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
    if task == "image" or coder is None:
        return prepare(folder, made_of, lambda w: _fill_pictures(w, source, classes))
    fill = {"lm": _fill_text, "mlm": _fill_text, "seq2seq": _fill_pairs}.get(task, _fill_labelled)
    return prepare(folder, made_of, lambda w: fill(Filling(w, source, coder, task, classes)))


@dataclass
class Filling:
    """Shards of texts while they are made."""

    writer: Writer
    source: Source
    coder: Coder
    task: str
    classes: list[str] | None

    def __post_init__(self) -> None:
        self.dtype = token_dtype(self.coder.vocab)
        self.count = {"records": 0, "empty": 0, "tokens": 0, "unknown": 0}

    def chunks(self, *roles: str) -> Iterator[list[Record]]:
        """Records, some at a time."""
        held: list[Record] = []
        size = 0
        for record in records(self.source, roles):
            self.count["records"] += 1
            more = sum(len(v) for v in record.values() if isinstance(v, str)) + 1
            if held and more > 2 * PIECE:  # it is encoded by itself
                yield held
                held, size = [], 0
            held.append(record)
            size += more
            if size > CHUNK or more > 2 * PIECE:
                yield held
                held, size = [], 0
        if held:
            yield held

    def texts(self, chunk: list[Record], role: str) -> list[str]:
        for record in chunk:
            if not isinstance(record[role], str):
                raise DataError(f"{role} must be text, one is {record[role]!r:.60}")
        return [record[role] for record in chunk]

    def counted(self, rows: list[list[int]]) -> list[list[int]]:
        self.count["tokens"] += sum(map(len, rows))
        if self.coder.unknown is not None:
            self.count["unknown"] += sum(row.count(self.coder.unknown) for row in rows)
        return rows

    def add(self, **columns: list[list[int]]) -> list[int]:
        """Write rows; those without a token on some side are left out. The numbers of the rows that are kept."""
        sides = list(columns.values())
        kept = [i for i in range(len(sides[0])) if all(side[i] for side in sides)]
        self.count["empty"] += len(sides[0]) - len(kept)
        for name, side in columns.items():
            self.writer.extend(name, [side[i] for i in kept], self.dtype)
        return kept

    def done(self, **notes: Any) -> None:
        if self.count["records"] == self.count["empty"]:
            raise DataError(f"{', '.join(self.source.paths)}: every example is empty")
        self.writer.notes = {**self.count, **notes}


def _fill_text(filling: Filling) -> None:
    """Documents: what the model expects in front, the text, the end token. Of a pair the source is only read, the
    target learned."""
    coder = filling.coder
    end = [] if coder.end is None else [coder.end]
    paired = bool(filling.source.beside) or "target" in filling.source.columns
    roles = ("source", "target") if paired else ("text",)
    prompts: list[int] = []
    after = [*coder.after] if filling.task == "mlm" else end
    for chunk in filling.chunks(*roles):
        if (
            len(chunk) == 1
            and not paired
            and len(text := filling.texts(chunk, "text")[0]) > 2 * PIECE
        ):
            encoded = (filling.counted(coder.encode([part]))[0] for part in pieces(text, coder))
            whole = chain([coder.before], encoded, [after])
            filling.writer.long("ids", whole, filling.dtype)
            continue
        parts = [filling.counted(coder.encode(filling.texts(chunk, role))) for role in roles]
        rows = [[*coder.before, *chain(*each), *after] if each[-1] else [] for each in zip(*parts)]
        kept = filling.add(ids=rows)
        if paired:
            prompts += [len(coder.before) + len(parts[0][i]) for i in kept]
    if paired:
        filling.writer.array("prompts", np.array(prompts, np.int64))
    filling.done()


def pieces(text: str, coder: Coder) -> Iterator[str]:
    """A text in pieces of about PIECE characters whose ids, end to end, are those of the whole: encoding it at once
    takes a hundred bytes and more for a character. A cut stands between two words if it can, and is taken where it
    leaves the ids of the text around it as they are."""
    first = 0
    while len(text) - first > 2 * PIECE:
        near = text[first + PIECE : first + 2 * PIECE]
        kinds = (r"(?<=\w) (?=\w)", r"(?<=\S)(?=\s)", "")
        for spot in chain(*(islice(re.finditer(kind, near), CUTS) for kind in kinds)):
            cut = first + PIECE + spot.start()
            left, right = text[cut - AROUND : cut], text[cut : cut + AROUND]
            one, two, both = coder.encode([left, right, left + right])
            if one + two == both:
                break
        else:
            break
        yield text[first:cut]
        first = cut
    yield text[first:]


def _fill_pairs(filling: Filling) -> None:
    for chunk in filling.chunks("source", "target"):
        read = filling.counted(filling.coder.encode(filling.texts(chunk, "source")))
        said = filling.counted(filling.coder.encode(filling.texts(chunk, "target"), target=True))
        filling.add(source=read, target=said)
    filling.done()


# --- labels -------------------------------------------------------------------------------------------------------


def _fill_labelled(filling: Filling) -> None:
    if filling.task == "answer":
        _fill_answers(filling)
        return
    read, said = ("words", "tags") if filling.task == "tag" else ("text", "label")
    more = ["second"] if "second" in filling.source.columns and filling.task != "tag" else []
    classes = filling.classes or classes_of(filling.source, said)
    number = {name: i for i, name in enumerate(classes)}
    labels: list[int] = []
    for chunk in filling.chunks(read, said, *more):
        if filling.task == "tag":
            _add_tagged(filling, chunk, number)
            continue
        found = [_number(name_of(record["label"]), number) for record in chunk]
        parts = [filling.coder.encode(filling.texts(chunk, role)) for role in ("text", *more)]
        between = [*filling.coder.between] if more else []
        rows = [[*one, *between, *chain(*rest)] if one else [] for one, *rest in zip(*parts)]
        labels += [found[i] for i in filling.add(ids=filling.counted(rows))]
    if filling.task != "tag":
        filling.writer.array("labels", np.array(labels, np.int64))
    filling.done(classes=classes)


def _add_tagged(filling: Filling, chunk: list[Record], number: dict[str, int]) -> None:
    """The first token of each word has the word's tag, the others are not counted."""
    ids, labels = [], []
    for record in chunk:
        words, tags = record["words"], record["tags"]
        if not isinstance(words, list) or not isinstance(tags, list) or len(words) != len(tags):
            raise DataError(f"words and tags must be lists of one length, got {record!r:.80}")
    texts = [" ".join(map(str, record["words"])) for record in chunk]
    for record, (row, spans) in zip(chunk, filling.coder.located(texts)):
        ends = np.cumsum([len(str(word)) + 1 for word in record["words"]]).tolist()
        tags = [_number(name_of(tag), number) for tag in record["tags"]]
        label, word = [IGNORE] * len(row), -1
        for i, (_, end) in enumerate(spans):
            here = int(np.searchsorted(ends, end - 1, side="right"))
            if here != word and here < len(tags):
                label[i], word = tags[here], here
        ids.append(row)
        labels.append(label)
    kept = filling.add(ids=filling.counted(ids))
    filling.writer.extend("labels", [labels[i] for i in kept], "int32")


def _fill_answers(filling: Filling) -> None:
    """A question and a text; the label is the first and the last token of the answer in the text, UNANSWERED where it
    has none (start and end are None), IGNORE where it cannot be found."""
    spans: list[tuple[int, int]] = []
    for chunk in filling.chunks("text", "second", "start", "end"):
        asked = filling.coder.encode(filling.texts(chunk, "text"))
        found = filling.coder.located(filling.texts(chunk, "second"))
        rows, labels = [], []
        for record, question, (ids, places) in zip(chunk, asked, found):
            head = [*question, *filling.coder.between]
            rows.append(head + ids)
            if record["start"] is None and record["end"] is None:
                labels.append((UNANSWERED, UNANSWERED))
                continue
            start, end = (_place(record, role) for role in ("start", "end"))
            inside = [i for i, (a, b) in enumerate(places) if a < end and b > start]
            span = (len(head) + inside[0], len(head) + inside[-1]) if inside else (IGNORE, IGNORE)
            labels.append(span)
        spans += [labels[i] for i in filling.add(ids=filling.counted(rows))]
    filling.writer.array("labels", np.array(spans, np.int64).reshape(-1, 2))
    filling.done()


def _place(record: Record, role: str) -> int:
    try:
        return int(record[role])
    except (TypeError, ValueError):
        said = f"the {role} of an answer is a character's number"
        raise DataError(f"{said}, counted from 0; got {record[role]!r}") from None


def _fill_pictures(writer: Writer, source: Source, classes: list[str] | None) -> None:
    x, names = pictures(source)
    classes = classes or ordered(set(names))
    number = {name: i for i, name in enumerate(classes)}
    writer.array("images", x)
    writer.array("labels", np.array([_number(name, number) for name in names], np.int64))
    writer.notes = {"records": len(x), "empty": 0, "classes": classes}


def classes_of(source: Source, role: str) -> list[str]:
    """All classes in the data, sorted."""
    found: set[str] = set()
    for record in records(source, (role,)):
        value = record[role]
        found |= {name_of(v) for v in (value if isinstance(value, list) else [value])}
    return ordered(found)


def ordered(names: set[str]) -> list[str]:
    if len(names) < 2:
        raise DataError(
            f"every label is {next(iter(names), '')!r}; give data with two classes or more"
        )
    numbers = all(name.isdecimal() for name in names)
    return sorted(names, key=lambda name: (int(name), name) if numbers else (0, name))


def name_of(label: Any) -> str:
    if not isinstance(label, str | int):
        raise DataError(f"a label must be a name or a whole number, one is {label!r:.60}")
    return str(label)


def _number(name: str, number: dict[str, int]) -> int:
    if name not in number:
        raise DataError(
            f"label {name!r} is not among the classes of the training data: {', '.join(number)[:200]}"
        )
    return number[name]
