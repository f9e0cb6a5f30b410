"""Files of data: which there are, how they are packed, in what format; their bytes and their
characters, as streams, so that memory does not grow with the data.

Text is UTF-8 unless `encoding` says otherwise, cut at \\n (a \\r before it goes with it) and at
nothing else.
"""

from __future__ import annotations

import bz2
import codecs
import contextlib
import glob
import gzip
import importlib
import io
import lzma
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from regard.config import Choice, Count, settings
from regard.errors import DATA, ENVIRONMENT, Fault, UsageError, check_choice, nearest
from regard.files import nearby

UNITS = ("file", "line", "paragraph")
# Formats of files with examples, and of pictures. "hub" is the name of a data set, not a file.
TEXTS = ("text", "tsv", "csv", "jsonl", "squad", "parquet", "arrow", "hub")
ARRAYS = ("npz", "npy", "idx", "images")
# Endings of names that are called otherwise than the format.
ENDINGS = {"ndjson": "jsonl", "json": "squad"}
ROLES = (
    *("text", "second", "source", "target", "label", "words", "tags", "start", "end", "image"),
    *("messages", "tools", "prompt", "chosen", "rejected", "system", "input", "response"),
)
# Bytes of a file that are read at once; and what a long text is given out in.
CHUNK = 1 << 20
# What to do about text that is not UTF-8: where nothing else is read, and where `encoding` can say what it is.
CONVERT = "convert the file, for example with iconv -t utf-8"
OTHERWISE = "say what it is written in, for example encoding = {!r}, or convert it: iconv -t utf-8"


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


def parts_of(text: Text, most: int, end: Callable[[str, int], int | None]) -> Iterator[str]:
    """A text in parts, none of which is cut while it has at most so many characters. `end(held, first)` says where the
    part of `held` that begins at `first` ends; None: nowhere, all that is left is one part."""
    held = ""
    pieces = iter([text] if isinstance(text, str) else text)
    for piece in pieces:
        held += piece
        first = 0
        while len(held) - first > most:
            cut = end(held, first)
            if cut is None:
                yield "".join([held[first:], *pieces])
                return
            yield held[first:cut]
            first = cut
        held = held[first:]
    yield held


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
        self.begin = library.ZstdDecompressor().decompressobj
        self.wrong = library.ZstdError
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
    what = f"{encoding.upper()} text"
    place = f"{path}"
    raw = b""
    if isinstance(error, UnicodeDecodeError):
        raw, at = error.object, error.start
        begin = raw.rfind(b"\n", 0, at) + 1
        line += raw.count(b"\n", 0, at)
        place = f"line {line} of {path}"
        what += f": byte {at - begin if begin else at + before} is 0x{raw[at]:02x}"
    guess = "utf-16" if raw[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "cp1252"
    return DataError(f"{place} is not {what}; {cure.format(guess)}")


def needed(package: str, what: str, pip: str) -> Any:
    """A package that an installation may lack."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError:
        text = f"{what} needs the package {pip}; pip install {pip}"
        raise Fault(text, ENVIRONMENT) from None


# --- which files, and of what format -------------------------------------------------------------------------------


@settings
class Source:
    """Files of one format, read one after another; names may hold * and ?.

    `beside` are the files with the other side, line by line (or label by picture). `columns` says which column, by its
    number from 0 or its name, has a role: {"text": "1", "label": "0"}. A name means that the first line is a header."""

    paths: tuple[str, ...]
    beside: tuple[str, ...] = ()
    format: str = "auto"
    # what is one document of plain text; lines where there is a `beside`
    unit: Annotated[str, Choice(UNITS)] = "file"
    marker: str = ""  # a text that stands between documents, for example <|endoftext|>
    columns: dict[str, Any] = field(default_factory=dict)
    header: bool | None = None  # none: as the names of columns, or the first lines, have it
    size: Count | None = None  # pictures are scaled to size x size
    delimiter: str = ""  # between the columns of a csv file; none: the one of , ; tab | that fits
    encoding: str = "utf-8"  # of text
    # about so many characters are read, or pictures of a class; none: all
    sample: Count | None = None

    def __post_init__(self) -> None:
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
                raise UsageError(f"columns: {role!r} is not a role; {nearest(role, ROLES)}")

    def files(self) -> list[Path]:
        hub = self.format == "hub"
        return [Path(p) for p in self.paths] if hub else matching_files(self.paths)

    def beside_files(self) -> list[Path]:
        return matching_files(self.beside)

    def column(self, role: str) -> str:
        return str(self.columns.get(role, role))


def format_of(path: Path, format: str) -> str:
    """The format that is given, else that of the name; one that tells nothing means text."""
    known = {*TEXTS, *ARRAYS}
    check_choice("format", format, known | {"auto"})
    if format != "auto" or path.is_dir():
        return "images" if format == "auto" else format
    name = path.name.lower().removesuffix(packing(path))
    if packing(path) == ".zip" and "." not in name and path.exists():
        name = inner_name(path).lower()
    ending = name.rpartition(".")[2] if not name.endswith("-ubyte") else "idx"
    ending = ENDINGS.get(ending, ending)
    return ending if ending in known - {"hub"} else "text"
