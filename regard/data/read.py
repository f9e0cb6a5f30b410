"""Data files as records: dictionaries {role: value}, one per example, in the order of the files; and pictures.

Text is UTF-8 unless `encoding` says otherwise, cut at \\n (a \\r before it goes with it) and at nothing else. All is
read as a stream, so that memory does not grow with the data. Text, TSV, CSV, JSONL and SQuAD's JSON are read here,
other tables by the package `datasets`. Pictures become one array of bytes (n h w c); no pickle is ever read.
"""

from __future__ import annotations

import bz2
import codecs
import contextlib
import csv
import glob
import gzip
import importlib
import io
import json
import lzma
import math
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from itertools import chain, groupby, islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from regard.config import Count, settings
from regard.errors import DATA, ENVIRONMENT, Fault, UsageError, check_choice, nearest, notice
from regard.files import nearby

if TYPE_CHECKING:
    from torch import Tensor

    from regard.models import Patches

UNITS = ("file", "line", "paragraph")
ROLES = (
    *("text", "second", "source", "target", "label", "words", "tags", "start", "end", "image"),
    *("messages", "tools", "prompt", "chosen", "rejected", "system", "input", "response"),
)
# Roles that a record may lack; and a column that is taken where there is none of a role's name.
OPTIONAL, INSTEAD = ("tools", "prompt", "system", "input"), {"messages": "conversations"}
SPAN = {"question", "context", "answers"}  # of a row of SQuAD
SUFFIXES = (".png", ".jpg", ".jpeg")
# Bytes of a file that are read at once; and what a long text is given out in.
CHUNK = 1 << 20
# What to do about text that is not UTF-8: where nothing else is read, and where `encoding` can say what it is.
CONVERT = "convert the file, for example with iconv -t utf-8"
OTHERWISE = "say what it is written in, for example encoding = {!r}, or convert it: iconv -t utf-8"
# Rows of a table that are looked at for a delimiter and a header; delimiters, and words that columns are called by.
LOOK, DELIMITERS = 50, ",;\t|"
TITLES = (
    "text sentence sentence1 sentence2 review comment title document summary label labels class category sentiment "
    "polarity rating score source target src tgt question answer context premise hypothesis"
)
# Number types of idx files.
IDX = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


class DataError(UsageError):
    """Data that is missing or broken; a command ends with this code, not with 2."""

    code = DATA


class Record(dict[str, Any]):
    """An example by its roles; `where` it stands: which line of which file."""

    def __init__(self, values: Mapping[str, Any], where: str = ""):
        super().__init__(values)
        self.where = where


class LongText:
    """A text that is too long to hold, in parts that are read when they are asked for."""

    def __init__(self, path: Path, encoding: str):
        self.path, self.encoding = path, encoding

    def __iter__(self) -> Iterator[str]:
        return chunks(self.path, self.encoding)

    def beginning(self, size: int | None) -> str:
        """So many characters of it; none: all."""
        read: list[str] = []
        parts = iter(self)
        while (size is None or sum(map(len, read)) < size) and (part := next(parts, "")):
            read.append(part)
        return "".join(read)[:size]


Text = str | Iterable[str]


def matching_files(names: Sequence[str]) -> list[Path]:
    """The files that names and patterns mean, each pattern's in order of their names."""
    paths: list[Path] = []
    for name in names:
        matches = sorted(glob.glob(name)) if not Path(name).exists() else [name]
        if not matches:
            how = nearby(name) or "; give the path of a data file"
            raise DataError(f"{name} does not exist{how}")
        paths += map(Path, matches)
    return paths


# --- bytes and characters -----------------------------------------------------------------------------------------


def packing(path: Path) -> str:
    """How a file is packed, by its name: .gz and the like, or nothing."""
    ending = path.suffix.lower()
    return ending if ending in PACKINGS else ""


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The file's bytes, unpacked if its name says that it is packed."""
    kind = packing(path)
    try:
        with PACKINGS.get(kind, open)(path, "rb") as stream:
            yield stream
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error, zipfile.BadZipFile) as error:
        raise DataError(f"{path} is a broken {kind[1:]} file: {error}") from None
    except OSError as error:
        # What bz2 raises has no number.
        if kind and error.errno is None:
            raise DataError(f"{path} is a broken {kind[1:]} file: {error}") from None
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def inner_name(path: Path) -> str:
    """The name of the one file that a zip file holds."""
    try:
        names = [
            n for n in zipfile.ZipFile(path).namelist() if n[-1] != "/" and "__MACOSX" not in n
        ]
    except zipfile.BadZipFile as error:
        raise DataError(f"{path} is a broken zip file: {error}") from None
    if len(names) != 1:
        raise DataError(f"{path} holds {len(names)} files, not one; unpack it, and name them")
    return names[0]


def _unzip(path: Path, mode: str) -> Any:
    return zipfile.ZipFile(path).open(inner_name(path))


def _unzst(path: Path, mode: str) -> Any:
    """By Python 3.14, or by the package zstandard."""
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.import_module("compression.zstd").open(path, mode)
    return io.BufferedReader(_Zst(path), CHUNK)


class _Zst(io.RawIOBase):
    """What a .zst file holds. One that is cut off is an error, which zstandard's own reader does not see."""

    def __init__(self, path: Path):
        library = needed("zstandard", "reading .zst files", "zstandard")
        self.begin, self.wrong = library.ZstdDecompressor().decompressobj, library.ZstdError
        self.file, self.frame, self.left = open(path, "rb"), None, memoryview(b"")  # noqa: SIM115  closed below

    def readable(self) -> bool:
        return True

    def readinto(self, room: Any) -> int:
        while not self.left:
            new = self.frame is None or self.frame.eof
            data = self.frame.unused_data if self.frame is not None and new else b""
            data = data or self.file.read(CHUNK // 8)
            if not data and new:
                return 0
            if not data:
                raise EOFError("it is cut off")
            self.frame = self.begin() if new else self.frame
            try:
                self.left = memoryview(self.frame.decompress(data))  # type: ignore[union-attr]
            except self.wrong as error:
                raise EOFError(str(error)) from None
        size = min(len(room), len(self.left))
        room[:size], self.left = self.left[:size], self.left[size:]
        return size

    def close(self) -> None:
        self.file.close()
        super().close()


PACKINGS: dict[str, Callable[..., Any]] = {
    ".gz": gzip.open,
    ".xz": lzma.open,
    ".bz2": bz2.open,
    ".zip": _unzip,
    ".zst": _unzst,
}


def chunks(path: Path, encoding: str = "utf-8") -> Iterator[str]:
    """The text of a file, about CHUNK characters at a time. \\r\\n is \\n, as where lines are read."""
    decoder = codecs.getincrementaldecoder(encoding)()
    # The line, its bytes so far; characters that belong to the next part.
    line, column, held, first = 1, 0, "", True
    with opened(path) as stream:
        while True:
            raw = stream.read(CHUNK)
            before = column - len(decoder.getstate()[0])
            try:
                text = held + decoder.decode(raw, not raw)
            except UnicodeError as error:
                raise undecodable(error, path, encoding, line, before) from None
            text, first = text.removeprefix("\ufeff") if first else text, first and not text
            held = "\r" if raw and text.endswith("\r") else ""
            if text := text.removesuffix(held).replace("\r\n", "\n"):
                yield text
            if not raw:
                return
            line += raw.count(b"\n")
            column = len(raw) - raw.rfind(b"\n") - 1 if b"\n" in raw else column + len(raw)


def lines(path: Path, encoding: str = "utf-8") -> Iterator[str]:
    if codecs.lookup(encoding).name == "utf-8":
        with opened(path) as stream:
            yield from lines_of(stream, path, OTHERWISE)
        return
    held = ""
    for text in chunks(path, encoding):
        *whole, held = (held + text).split("\n")
        yield from whole
    if held:
        yield held


def lines_of(stream: BinaryIO, path: Path, cure: str = CONVERT) -> Iterator[str]:
    """Lines of UTF-8 without their ends, \\n or \\r\\n and nothing else: one line in stays one line."""
    for number, raw in enumerate(stream, 1):
        raw = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
        yield decoded(raw.removesuffix(b"\n").removesuffix(b"\r"), path, number, cure)


def decoded(raw: bytes, path: Path, first: int = 1, cure: str = CONVERT) -> str:
    """The text of some bytes of a file; `first` is the number of their first line."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise undecodable(error, path, "utf-8", first, cure=cure) from None


def undecodable(
    error: UnicodeError,
    path: Path,
    encoding: str,
    line: int,
    before: int = 0,
    cure: str = OTHERWISE,
) -> DataError:
    """`line` and `before` are where the bytes of the error begin: in which line, and after how many bytes of it."""
    what, place, raw = f"{encoding.upper()} text", f"{path}", b""
    if isinstance(error, UnicodeDecodeError):
        raw, at = error.object, error.start
        begin = raw.rfind(b"\n", 0, at) + 1
        line += raw.count(b"\n", 0, at)
        place = f"line {line} of {path}"
        what += f": byte {at - begin if begin else at + before} is 0x{raw[at]:02x}"
    guess = "utf-16" if raw[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "cp1252"
    return DataError(f"{place} is no {what}; {cure.format(guess)}")


def needed(package: str, what: str, pip: str) -> Any:
    """A package that an installation may lack."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError:
        text = f"{what} needs the package {pip}; pip install {pip}"
        raise Fault(text, ENVIRONMENT) from None


# --- records --------------------------------------------------------------------------------------------------------


@settings
class Source:
    """Files of one format, read one after another; names may hold * and ?.

    `beside` are the files with the other side, line by line (or label by picture). `columns` says which column, by its
    number from 0 or its name, has a role: {"text": "1", "label": "0"}. A name means that the first line is a header."""

    paths: tuple[str, ...]
    beside: tuple[str, ...] = ()
    format: str = "auto"
    unit: str = "file"  # what is one document of plain text; lines where there is a `beside`
    marker: str = ""  # a text that stands between documents, for example <|endoftext|>
    columns: dict[str, Any] = field(default_factory=dict)
    header: bool | None = None  # none: as the names of columns, or the first lines, have it
    size: Count | None = None  # pictures are scaled to size x size
    delimiter: str = ""  # between the columns of a csv file; none: the one of , ; tab | that fits
    encoding: str = "utf-8"  # of text
    sample: Count | None = (
        None  # about so many characters are read, or pictures of a class; none: all
    )

    def __post_init__(self) -> None:
        check_choice("unit", self.unit, UNITS)
        if len(self.delimiter) > 1:
            raise UsageError(f"delimiter = {self.delimiter!r} must be one character, such as ';'")
        try:
            codecs.lookup(self.encoding)
        except LookupError:
            raise UsageError(
                f"encoding = {self.encoding!r} is unknown; give utf-8, utf-16, cp1252, latin-1, gb18030, ..."
            ) from None
        for role in self.columns:
            if role not in ROLES:
                raise UsageError(f"columns: {role!r} is no role; {nearest(role, ROLES)}")

    def files(self) -> list[Path]:
        hub = self.format == "hub"
        return [Path(p) for p in self.paths] if hub else matching_files(self.paths)

    def beside_files(self) -> list[Path]:
        return matching_files(self.beside)

    def column(self, role: str) -> str:
        return str(self.columns.get(role, role))


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
        empty, kind = True, format_of(path, source.format)
        if kind not in READERS:
            raise UsageError(f"{path} holds no text; text comes as {', '.join(READERS)}")
        for record in READERS[kind](path, source, roles):
            empty = False
            yield record
        if empty:
            raise DataError(f"{path} is empty: it holds no examples")


def format_of(path: Path, format: str) -> str:
    """The format that is given, else that of the name; one that tells nothing means text."""
    known = {*READERS, *ARRAYS}
    check_choice("format", format, known | {"auto"})
    if format != "auto" or path.is_dir():
        return "images" if format == "auto" else format
    name = path.name.lower().removesuffix(packing(path))
    if packing(path) == ".zip" and "." not in name and path.exists():
        name = inner_name(path).lower()
    ending = name.rpartition(".")[2] if not name.endswith("-ubyte") else "idx"
    ending = {"ndjson": "jsonl", "json": "squad"}.get(ending, ending)
    return ending if ending in known - {"hub"} else "text"


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
    marker, found = source.marker.replace("\r\n", "\n"), False
    # Of the document so far: parts without a marker, and the end, in which one may begin.
    held: list[str] = []
    end = ""
    for text in chunks(path, source.encoding):
        first, *rest = (end + text).split(marker)
        for part in rest:
            found = True
            yield "".join([*held, first]).strip("\n")
            held, first = [], part
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
    here, there = source.files(), source.beside_files()
    if len(roles) != 2 or len(here) != len(there):
        raise UsageError(
            f"{len(here)} files and {len(there)} beside them cannot be read as {', '.join(roles)}; give two files of "
            "one number of lines"
        )
    for left, right in zip(here, there):
        both_lines = (lines(path, source.encoding) for path in (left, right))
        sides, count = zip_longest(*both_lines), 0
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


Lines = Iterator[tuple[int, list[str]]]


def _tsv(path: Path, source: Source, roles: Sequence[str]) -> Iterator[Record]:
    return _table(_tsv_lines(path, source), path, source, roles)


def _csv(path: Path, source: Source, roles: Sequence[str]) -> Iterator[Record]:
    return _table(_csv_lines(path, source), path, source, roles)


def _tsv_lines(path: Path, source: Source) -> Lines:
    return ((n, line.split("\t")) for n, line in enumerate(lines(path, source.encoding), 1))


def _csv_lines(path: Path, source: Source) -> Lines:
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
        raise DataError(f"line {reader.line_num} of {path} is no CSV: {error}") from None


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


def _table(rows: Lines, path: Path, source: Source, roles: Sequence[str]) -> Iterator[Record]:
    head = [*islice(rows, LOOK)]
    if not head:
        return
    first, names, header = head[0][1], [source.column(role) for role in roles], source.header
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
            raise DataError(f"line {number} of {path} is no JSON: {error}") from None
        if not isinstance(row, dict):
            raise DataError(f"line {number} of {path} is no JSON object but {type(row).__name__}")
        check_pairs(line, row, f"line {number} of {path}")
        yield number, row


def check_pairs(text: str, data: Any, where: str) -> None:
    """Refuse what is no text in the data of this JSON text: one half of a surrogate pair, as in "\\ud83d"."""
    if not re.search(r"\\u[dD][89a-fA-F]", text):
        return
    try:
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise DataError(
            f"{where} has {half} alone, which is half a character and no text; write both halves, or leave it out"
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
        data, number = _json(path, source), 0
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
            f"{path} is no JSON of the SQuAD form ({type(error).__name__}: {error}); other data: one object a line, "
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
    name, split, files = kind, "train", {"data_files": str(path)}
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
    "tsv": _tsv,
    "csv": _csv,
    "jsonl": _jsonl,
    "squad": _squad,
    **dict.fromkeys(("parquet", "arrow", "hub"), _dataset),
}
ARRAYS = ("npz", "npy", "idx", "images")


def first_rows(source: Source, most: int) -> list[dict[str, Any]] | None:
    """The first rows of the first file, with all their columns, at most so many; None of plain text and of pictures,
    which have none. Of SQuAD's form one row stands for all."""
    path = source.files()[0]
    kind = format_of(path, source.format)
    if kind not in READERS or kind == "text" or source.beside:
        return None
    rows: list[Any]
    if kind in ("csv", "tsv"):
        table = (_csv_lines if kind == "csv" else _tsv_lines)(path, source)
        cells = [row for _, row in islice(table, most + 1)]
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
            raise DataError(f"{path} is no JSON: {error}") from None
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
        raise DataError(f"{path} is no list of JSON objects: it begins with {rows[0]!r:.60}")
    return rows


# --- pictures -----------------------------------------------------------------------------------------------------


def pictures(source: Source) -> tuple[np.ndarray, list[str]]:
    """Bytes (n h w c) and the class of each, by name or by number: of npz files, pairs of npy or idx files, or folders
    of PNG or JPEG files with a folder per class."""
    beside = source.beside_files()
    parts = [_arrays(path, source, beside[i : i + 1]) for i, path in enumerate(source.files())]
    shapes = {x.shape[1:] for x, _ in parts}
    if len(shapes) > 1:
        listed = " and ".join(map(str, sorted(shapes)))
        raise DataError(f"pictures of different sizes: {listed} (height, width, channels)")
    return np.concatenate([x for x, _ in parts]), [label for _, y in parts for label in y]


def _arrays(path: Path, source: Source, beside: list[Path]) -> tuple[np.ndarray, list[str]]:
    kind = format_of(path, source.format)
    if kind not in ARRAYS:
        raise UsageError(
            f"{path} holds no pictures; give a folder with one folder for each class, an npz file, or two npy or idx "
            "files"
        )
    if kind == "images":
        return _folder(path, source)
    if kind == "npz":
        stored = load_arrays(path)
        x, y = (_named(stored, source, *role, path) for role in (("image", "x"), ("label", "y")))
    elif not beside:
        raise UsageError(f"{path} holds pictures only; name the file with their classes too")
    else:
        x, y = map(_idx if kind == "idx" else load_arrays, (path, *beside))
    x = x[..., None] if x.ndim == 3 else x
    if x.ndim != 4 or x.dtype != np.uint8 or x.shape[-1] > 4:
        raise DataError(
            f"{path} must hold bytes of shape (n, height, width) or (n, height, width, channels), it holds {x.dtype} "
            f"{x.shape}"
        )
    if y.ndim != 1 or y.dtype.kind not in "iuU":
        raise DataError(f"classes of {path} must be n numbers or names, got {y.dtype} {y.shape}")
    if len(x) != len(y):
        raise DataError(f"{path} has {len(x):,} pictures and {len(y):,} classes")
    if len(x) == 0:
        raise DataError(f"{path} is empty: it holds no examples")
    return x, [str(label) for label in y.tolist()]


def load_arrays(path: Path) -> Any:
    """The array of an npy file, the arrays of an npz file by name."""
    with opened(path) as stream:
        data = stream.read()
    try:
        stored = np.load(io.BytesIO(data), allow_pickle=False)
        return stored if isinstance(stored, np.ndarray) else dict(stored)
    # A damaged header raises almost anything.
    except Exception as error:
        kind = "npz" if ".npz" in path.suffixes else "npy"
        why = str(error).partition("\n")[0]
        raise DataError(f"{path} is not an {kind} file of numbers: {why:.200}") from None


def _named(stored: Any, source: Source, role: str, default: str, path: Path) -> np.ndarray:
    name = str(source.columns.get(role, default))
    if name not in stored:
        known = ", ".join(stored)
        raise UsageError(f"{path} has no array {name!r} for the role {role}; it has: {known}")
    return stored[name]


def _idx(path: Path) -> np.ndarray:
    """The format of MNIST: two zero bytes, type, number of axes, their sizes, the numbers."""
    with opened(path) as stream:
        data = stream.read()
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in IDX or len(data) < 4 + 4 * data[3]:
        raise DataError(f"{path} is not an idx file")
    kind, axes = np.dtype(IDX[data[2]]), data[3]
    shape = np.frombuffer(data, ">u4", axes, 4).tolist()
    size = 4 + 4 * axes + math.prod(shape) * kind.itemsize
    if len(data) != size:
        raise DataError(f"{path} is cut off: it has {len(data):,} bytes, its head says {size:,}")
    return np.frombuffer(data, kind, offset=4 + 4 * axes).reshape(shape)


def _folder(path: Path, source: Source) -> tuple[np.ndarray, list[str]]:
    needed("PIL.Image", "reading PNG and JPEG pictures", "pillow")
    classes = sorted(p for p in path.iterdir() if p.is_dir())
    found = ([f for f in sorted(p.iterdir()) if f.suffix.lower() in SUFFIXES] for p in classes)
    files = [f for each in found for f in each[: source.sample]]
    if not files:
        raise DataError(f"{path} has no pictures: make a folder for each class, with PNG or JPEG")
    images: list[np.ndarray] = []
    for file in files:
        # All are grey or coloured as the first one is.
        image = read_picture(file, source.size, images[0].shape[2] if images else None)
        if images and image.shape != images[0].shape:
            (height, width, _), first = image.shape, images[0].shape
            raise DataError(
                f"{file} is {width} x {height}, {files[0].name} {first[1]} x {first[0]}; "
                f"say size = {min(first[:2])} to scale them"
            )
        images.append(image)
    return np.stack(images), [file.parent.name for file in files]


# Of pictures that somebody sent: what kinds, and how many pixels.
SENT, MOST_PIXELS = ("PNG", "JPEG"), 1 << 24


def read_picture(
    file: Path | bytes, size: int | None, channels: int | None, resample: int | None = None
) -> np.ndarray:
    """Bytes (h w c) of a PNG or JPEG; c is 1 or 3, by the file unless `channels` says it. `resample` is the number of
    Pillow's filter for scaling. A file's content is a stranger's: its kind and its size are looked at first."""
    library = needed("PIL.Image", "reading PNG and JPEG pictures", "pillow")
    sent = isinstance(file, bytes)
    opened: Any = io.BytesIO(file) if isinstance(file, bytes) else file
    try:
        with library.open(opened, formats=SENT if sent else None) as picture:
            if sent and picture.width * picture.height > MOST_PIXELS:
                raise ValueError(f"{picture.width} x {picture.height} pixels are too many")
            grey = picture.mode in ("1", "L") if channels is None else channels == 1
            picture = picture.convert("L" if grey else "RGB")
            picture = picture if size is None else picture.resize((size, size), resample)
            return np.atleast_3d(np.asarray(picture, dtype=np.uint8))
    # A broken picture raises almost anything.
    except Exception as error:
        why = getattr(error, "strerror", None) or error
        name = "this" if sent else str(file)
        raise DataError(
            f"{name} is no picture that can be read: {why}; give a PNG or JPEG"
        ) from None


class Pictures:
    """Pictures as a trained model reads them: scaled to its size, x / 255 minus mean over std. Those are 0.5, as in
    training, unless preprocessor_config.json of the model's folder (`origin`) says otherwise."""

    def __init__(self, wanted: Patches, origin: Any):
        self.wanted = wanted
        self.mean, self.std, self.filter = normal_of(origin)

    def file(self, file: Path | bytes) -> Tensor:
        """(c h w) of a PNG or JPEG, or of its content."""
        return self.tensor(read_picture(file, self.wanted.size, self.wanted.channels, self.filter))

    def array(self, file: Path) -> list[Tensor]:
        """Of bytes (n h w c) in an npy file; of an npz its array x, or the only one."""
        x = load_arrays(file)
        if isinstance(x, dict):
            name = next(iter(x)) if len(x) == 1 else "x"
            if name not in x:
                raise DataError(f"{file} has no array x of pictures; it has: {', '.join(x)}")
            x = x[name]
        x = x[..., None] if x.ndim == 3 else x
        want = (self.wanted.size, self.wanted.size, self.wanted.channels)
        if x.dtype != np.uint8 or x.shape[1:] != want:
            raise DataError(
                f"{file} holds {x.dtype} {x.shape}; the model reads bytes (n, {', '.join(map(str, want))})"
            )
        return [self.tensor(each) for each in x]

    def tensor(self, x: np.ndarray) -> Tensor:
        import torch

        scaled = (x.astype(np.float32) / 255 - self.mean) / self.std
        return torch.from_numpy(np.ascontiguousarray(scaled.transpose(2, 0, 1)))


def normal_of(origin: Any) -> tuple[np.ndarray, np.ndarray, int]:
    """Mean and standard deviation of the channels, and the number of Pillow's filter for scaling."""
    try:
        settings = json.loads(origin.files.get("preprocessor_config.json", b"{}"))
        mean, std = settings.get("image_mean") or 0.5, settings.get("image_std") or 0.5
        if not settings.get("do_normalize", True):
            mean, std = 0.0, 1.0
        sides = [np.atleast_1d(np.array(side, np.float32)) for side in (mean, std)]
        return sides[0], sides[1], int(settings.get("resample", 3))
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"preprocessor_config.json is not as it should be: {error}") from None
