"""Data files as records: dictionaries {role: value}, one per example, in the order of the files.

All is read as a stream, so that memory does not grow with the data. Text, TSV, CSV, JSONL and SQuAD's JSON are read
here, other tables by the package `datasets`.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, groupby, islice, zip_longest
from pathlib import Path
from typing import Any

# Those `as` their own names are for callers that know them from here.
from regard.data.pictures import SUFFIXES as SUFFIXES
from regard.data.pictures import Pictures as Pictures
from regard.data.pictures import normal_of as normal_of
from regard.data.pictures import pictures
from regard.data.source import (
    ARRAYS,
    DataError,
    LongText,
    Record,
    Source,
    chunks,
    format_of,
    lines,
    needed,
)
from regard.data.source import Text as Text
from regard.data.source import decoded as decoded
from regard.data.source import lines_of as lines_of
from regard.data.source import matching_files as matching_files
from regard.errors import UsageError, notice

# Roles that a record may lack; and a column that is taken where there is none of a role's name.
OPTIONAL = ("tools", "prompt", "system", "input")
INSTEAD = {"messages": "conversations"}
SPAN = {"question", "context", "answers"}  # of a row of SQuAD
# Rows of a table that are looked at for a delimiter and a header; delimiters, and words that columns are called by.
LOOK, DELIMITERS = 50, ",;\t|"
TITLES = (
    "text sentence sentence1 sentence2 review comment title document summary label labels class category sentiment "
    "polarity rating score source target src tgt question answer context premise hypothesis"
)


def records(source: Source, roles: Sequence[str], long: bool = False) -> Iterator[Record]:
    """The examples with these roles. The labels of pictures can be read as texts: captions. With `long` a file that is
    one long document is a LongText."""
    left = source.sample
    for record in _records(source, roles):
        text = record.get("text")
        if isinstance(text, LongText) and (left or not long):
            record["text"] = text.beginning(left)
        yield record
        if left is not None:
            left -= length_of(record)
            if left <= 0:
                return


def length_of(record: Record) -> int:
    """Characters of an example."""
    return sum(len(v if isinstance(v, str) else repr(v)) for v in record.values()) + 1


def _records(source: Source, roles: Sequence[str]) -> Iterator[Record]:
    paths = source.files()
    if list(roles) == ["label"] and format_of(paths[0], source.format) in ARRAYS:
        yield from (Record({"label": name}) for name in pictures(source)[1])
        return
    if source.beside:
        yield from _parallel(source, roles)
        return
    for path in paths:
        empty = True
        kind = format_of(path, source.format)
        if kind not in READERS:
            raise UsageError(f"{path} holds no text; text comes as {', '.join(READERS)}")
        for record in READERS[kind](path, source, roles):
            empty = False
            yield record
        if empty:
            raise DataError(f"{path} is empty: it holds no examples")


# --- plain text ---------------------------------------------------------------------------------------------------


def _text(path: Path, source: Source, roles: Sequence[str]) -> Iterator[Record]:
    if list(roles) != ["text"]:
        raise UsageError(
            f"{path} is plain text, which has no columns, but {', '.join(roles)} are needed; give a TSV, CSV or JSONL "
            "file, or a second file beside it"
        )
    units = {"file": _whole, "line": lines, "paragraph": _paragraphs}
    texts = _marked(path, source) if source.marker else units[source.unit](path, source.encoding)
    return (Record({"text": text}) for text in texts)


def _whole(path: Path, encoding: str) -> Iterator[Any]:
    first = [*islice(chunks(path, encoding), 2)]
    if first:
        yield LongText(path, encoding) if len(first) > 1 else first[0]


def _paragraphs(path: Path, encoding: str) -> Iterator[str]:
    for filled, group in groupby(lines(path, encoding), lambda line: bool(line.strip())):
        if filled:
            yield "\n".join(group)


def _marked(path: Path, source: Source) -> Iterator[str]:
    """What stands between markers, which may hold line breaks."""
    marker = source.marker.replace("\r\n", "\n")
    found = False
    # Of the document so far: parts without a marker, and the end, in which one may begin.
    held: list[str] = []
    end = ""
    for text in chunks(path, source.encoding):
        first, *rest = (end + text).split(marker)
        for part in rest:
            found = True
            yield "".join([*held, first]).strip("\n")
            held = []
            first = part
        size = max(len(first) - len(marker) + 1, 0)
        held.append(first[:size])
        end = first[size:]
    last = "".join([*held, end])
    if last.strip():
        yield last.strip("\n")
    if last and not found:
        how = " (a line break is \"\\n\" in a config, $'\\n' in a shell)" if "\\n" in marker else ""
        notice(f"the marker {marker!r} does not occur in {path}, which is one document{how}")


def _parallel(source: Source, roles: Sequence[str]) -> Iterator[Record]:
    """Two files side by side: line i of one belongs to line i of the other."""
    here = source.files()
    there = source.beside_files()
    if len(roles) != 2 or len(here) != len(there):
        raise UsageError(
            f"{len(here)} files and {len(there)} beside them cannot be read as {', '.join(roles)}; give two files of "
            "one number of lines"
        )
    for left, right in zip(here, there):
        both_lines = (lines(path, source.encoding) for path in (left, right))
        sides = zip_longest(*both_lines)
        count = 0
        for both in sides:
            if None in both:
                more = count + 1 + sum(1 for _ in sides)
                longer, shorter = (left, right) if both[1] is None else (right, left)
                raise DataError(
                    f"{longer} has {more:,} lines, {shorter} {count:,}; line i of one must belong to line i of the "
                    "other"
                )
            count += 1
            yield Record(dict(zip(roles, both)))
        if not count:
            raise DataError(f"{left} is empty: it holds no examples")


# --- tables -------------------------------------------------------------------------------------------------------


def _rows(path: Path, source: Source) -> Iterator[tuple[int, list[str]]]:
    """The rows of a TSV or CSV file, with the numbers of their lines."""
    if format_of(path, source.format) == "tsv":
        yield from ((n, row.split("\t")) for n, row in enumerate(lines(path, source.encoding), 1))
        return
    # A document may be longer than the 128 KB that csv takes at first.
    csv.field_size_limit(1 << 30)
    found = (f"{line}\n" for line in lines(path, source.encoding))
    head = [*islice(found, LOOK)]
    delimiter = source.delimiter or _delimiter(head, path)
    reader = csv.reader(chain(head, found), strict=True, delimiter=delimiter)
    try:
        for row in reader:
            if row:
                yield reader.line_num, row
    except csv.Error as error:
        raise DataError(f"line {reader.line_num} of {path} is not CSV: {error}") from None


def _delimiter(head: list[str], path: Path) -> str:
    """The first of DELIMITERS that cuts these lines into as many columns each, and more than one; else the first."""
    for mark in DELIMITERS:
        # The last row may go on behind these lines.
        rows = [row for row in csv.reader(head, delimiter=mark) if row]
        rows = rows[:-1] if len(head) == LOOK else rows
        if len({len(row) for row in rows}) == 1 and len(rows[0]) > 1:
            if mark != DELIMITERS[0]:
                notice(f"columns of {path} are parted by {mark!r}; delimiter says another one")
            return mark
    return DELIMITERS[0]


def _table(path: Path, source: Source, roles: Sequence[str]) -> Iterator[Record]:
    rows = _rows(path, source)
    head = [*islice(rows, LOOK)]
    if not head:
        return
    first = head[0][1]
    names = [source.column(role) for role in roles]
    header = source.header
    if header is None:
        header = not all(str(name).isdecimal() for name in (*names, *source.columns.values()))
        if not header and _titled([row for _, row in head], [int(name) for name in names]):
            header = True
            listed = ", ".join(map(repr, first))
            notice(
                f"the first line of {path} is taken for the names of its columns ({listed:.80}), and is no example; "
                "header = false reads it as one"
            )
    places = [_place(name, first, header, path, roles, i) for i, name in enumerate(names)]
    width = len(first)
    for number, row in chain(head[1:] if header else head, rows):
        if row == [""] and width > 1:
            continue
        if len(row) != width:
            raise DataError(
                f"line {number} of {path} has {len(row)} columns, the first line {width}; they must be the same"
            )
        yield Record({role: row[i] for role, i in zip(roles, places)}, f"line {number} of {path}")


def _titled(rows: list[list[str]], places: list[int]) -> bool:
    """Whether the first row looks like the names of columns, in one of these: a word that columns are called by, words
    over numbers, or one that never comes back over a few others that do. Numbers are no names."""
    columns = [[row[i].strip() for row in rows if i < len(row)] for i in places]
    columns = [column for column in columns if column]
    if not columns or any(_is_number(column[0]) for column in columns):
        return False
    for first, *rest in columns:
        counts = Counter(rest)
        few = len(rest) > 5 and first not in counts and min(counts.values()) > 1
        if first.lower() in TITLES.split() or few or (len(rest) > 1 and all(map(_is_number, rest))):
            return True
    return False


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[-+]?\d+([.,]\d+)?", text) is not None


def _place(
    name: str, first: list[str], header: bool, path: Path, roles: Sequence[str], which: int
) -> int:
    """Where the column of a role stands in the first line."""
    if header and name in first:
        return first.index(name)
    if name.isdecimal() and int(name) < len(first):
        return int(name)
    listed = ", ".join(repr(c)[:40] if header else f"{i} ({c[:30]!r})" for i, c in enumerate(first))
    what = "its first line, read as their names, has" if header else "its columns:"
    # As if a label stood first, and all else in the order of their roles: more cannot be guessed.
    role, order = roles[which], sorted(roles, key=lambda role: role != "label")
    such = min(order.index(role), len(first) - 1)
    raise UsageError(
        f"{path} has no column {name!r} for the role {role}; {what} {listed}. Say which by name or by number from 0: "
        f"--columns {role}={such}, or in a config columns = {{ {role} = {such} }}"
    )


def _jsonl(path: Path, source: Source, roles: Sequence[str]) -> Iterator[Record]:
    for number, row in json_rows(path, source.encoding):
        yield _picked(row, source, roles, f"line {number} of {path}")


def json_rows(path: Path, encoding: str = "utf-8") -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSONL file, with the numbers of their lines."""
    for number, line in enumerate(lines(path, encoding), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"line {number} of {path} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise DataError(
                f"line {number} of {path} is not a JSON object but a {type(row).__name__}"
            )
        check_pairs(line, row, f"line {number} of {path}")
        yield number, row


def check_pairs(text: str, data: Any, where: str) -> None:
    """Refuse what is not text in the data of this JSON text: one half of a surrogate pair, as in "\\ud83d"."""
    if not re.search(r"\\u[dD][89a-fA-F]", text):
        return
    try:
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise DataError(
            f"{where} has {half} alone, which is half a character and not text; write both halves, or leave it out"
        ) from None


def _picked(row: dict[str, Any], source: Source, roles: Sequence[str], where: str) -> Record:
    if "second" in roles and row.keys() >= SPAN and not source.columns:
        try:
            row = _span(*map(row.get, ("question", "context", "answers")))
        except (KeyError, TypeError, ValueError):
            form = '{"text": [...], "answer_start": [...]}'
            raise UsageError(f"{where}: answers are {form}, got {row['answers']!r:.80}") from None
    names = {role: source.column(role) for role in roles}
    for role in INSTEAD.keys() & names.keys() - row.keys() - source.columns.keys():
        names[role] = INSTEAD[role] if INSTEAD[role] in row else role
    missing = [name for role, name in names.items() if name not in row and role not in OPTIONAL]
    if missing:
        have = ", ".join(map(repr, row))
        raise UsageError(f"{where} has no {missing[0]!r}; it has: {have} (`columns` says which)")
    return Record({role: row.get(name) for role, name in names.items()}, where)


def _span(question: Any, context: Any, answers: Any) -> dict[str, Any]:
    """A question on a text, as SQuAD has it: the first answer, None where the text has none (SQuAD 2.0)."""
    row: dict[str, Any] = {"text": question, "second": context, "start": None, "end": None}
    if isinstance(answers, dict):
        pairs = [*zip(answers["answer_start"], answers["text"])]
    else:
        pairs = [(each["answer_start"], each["text"]) for each in answers]
    for start, text in pairs[:1]:
        row |= {"start": int(start), "end": int(start) + len(text)}
    return row


def wording(value: Any) -> str:
    """The text of a column: of words, or of the messages of a chat, one after the other."""
    if not isinstance(value, list):
        return "" if value is None else str(value)
    each = (v.get("content", v.get("value")) if isinstance(v, dict) else v for v in value)
    return " ".join(map(str, each))


def _squad(path: Path, source: Source, roles: Sequence[str]) -> Iterator[Record]:
    """Questions on a text: `text` is the question, `second` the text, `start` and `end` the answer's characters. A file
    that is a list has its examples in it."""
    try:
        data = _json(path, source)
        number = 0
        if isinstance(data, list):
            for i, row in enumerate(data, 1):
                yield _picked(dict(row), source, roles, f"example {i} of {path}")
            return
        if source.columns:
            raise UsageError(f"{path} is of SQuAD's form, which names its own columns; omit them")
        for article in data["data"]:
            for paragraph in article["paragraphs"]:
                for asked in paragraph["qas"]:
                    row = _span(asked["question"], paragraph["context"], asked["answers"])
                    number += 1
                    where = f"question {number} of {path}"
                    yield Record({role: row[role] for role in roles}, where)
    except UsageError:
        raise
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise DataError(
            f"{path} is not JSON of the SQuAD form ({type(error).__name__}: {error}); other data: one object per line, "
            "as .jsonl"
        ) from None


def _json(path: Path, source: Source) -> Any:
    text = "".join(chunks(path, source.encoding))
    data = json.loads(text)
    check_pairs(text, data, str(path))
    return data


# --- what the package `datasets` reads -----------------------------------------------------------------------------


def _dataset(path: Path, source: Source, roles: Sequence[str]) -> Iterator[Record]:
    """Parquet and Arrow files; or a data set by its name on the hub, such as stanfordnlp/sst2:train, which is the only
    thing here that may use the network."""
    rows = enumerate(_dataset_rows(path, source), 1)
    return (_picked(row, source, roles, f"row {number} of {path}") for number, row in rows)


def _dataset_rows(path: Path, source: Source) -> Iterator[dict[str, Any]]:
    kind = format_of(path, source.format)
    load = needed("datasets", f"reading {kind}", "datasets").load_dataset
    name = kind
    split = "train"
    files = {"data_files": str(path)}
    if kind == "hub":
        (name, _, split), files = str(path).partition(":"), {}
    try:
        yield from load(name, split=split or "train", streaming=True, **files)
    except UsageError:
        raise
    # Whatever that package and those below it raise: a broken file, an unknown name, no network.
    except Exception as error:
        why = " ".join(str(error).split())
        raise DataError(
            f"{path}: datasets cannot read it ({type(error).__name__}: {why})"
        ) from None


READERS: dict[str, Callable[[Path, Source, Sequence[str]], Iterator[Record]]] = {
    "text": _text,
    "tsv": _table,
    "csv": _table,
    "jsonl": _jsonl,
    "squad": _squad,
    **dict.fromkeys(("parquet", "arrow", "hub"), _dataset),
}


def first_rows(source: Source, most: int) -> list[dict[str, Any]] | None:
    """The first rows of the first file, with all their columns, at most so many; None of plain text and of pictures,
    which have none. Of SQuAD's form one row stands for all."""
    path = source.files()[0]
    kind = format_of(path, source.format)
    if kind not in READERS or kind == "text" or source.beside:
        return None
    rows: list[Any]
    if kind in ("csv", "tsv"):
        cells = [row for _, row in islice(_rows(path, source), most + 1)]
        named = source.header is not False
        names = [name if named else str(i) for i, name in enumerate(cells[0] if cells else [])]
        rows = [dict(zip(names, row)) for row in cells[named:]]
        # A file of one line may be a header alone, or an example: what it means is told by its names.
        rows = rows or [dict.fromkeys(names)][: len(cells)]
    elif kind == "squad":
        try:
            data = _json(path, source)
        except UsageError:
            raise
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} is not JSON: {error}") from None
        rows = data[:most] if isinstance(data, list) else [dict.fromkeys(sorted(SPAN))]
    else:
        read = (
            (row for _, row in json_rows(path, source.encoding))
            if kind == "jsonl"
            else _dataset_rows(path, source)
        )
        rows = [*islice(read, most)]
    if not rows:
        raise DataError(f"{path} is empty: it holds no examples")
    if not isinstance(rows[0], dict):
        raise DataError(f"{path} is not a list of JSON objects: it begins with {rows[0]!r:.60}")
    return rows
