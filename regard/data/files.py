"""Bytes and lines of data files, packed or not, and the errors that are the data's fault.

Text is UTF-8, cut at \\n (a \\r before it goes with it) and at nothing else.
"""

from __future__ import annotations

import codecs
import contextlib
import glob
import gzip
import hashlib
import importlib
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from regard.errors import UsageError


class DataError(UsageError):
    """Data that is missing or broken; a command ends with this code, not with 2."""

    code = 4


class PackageError(UsageError):
    """A format that needs a package which is not installed."""

    code = 3


def found(names: Sequence[str]) -> list[Path]:
    """The files that names and patterns mean, each pattern's in order of their names."""
    paths: list[Path] = []
    for name in names:
        matches = sorted(glob.glob(name)) if not Path(name).exists() else [name]
        if not matches:
            raise DataError(f"{name} does not exist; give the path of a data file")
        paths += map(Path, matches)
    return paths


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The file's bytes, unpacked if its name ends in .gz or .xz."""
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
    try:
        with openers.get(path.suffix, open)(path, "rb") as stream:
            yield stream
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is a broken {path.suffix[1:]} file: {error}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def lines(path: Path) -> Iterator[str]:
    """Lines of text without their ends."""
    with opened(path) as stream:
        for number, raw in enumerate(stream, 1):
            raw = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
            yield decoded(raw.removesuffix(b"\n").removesuffix(b"\r"), path, number)


def decoded(raw: bytes, path: Path, first: int = 1) -> str:
    """The text of some bytes of a file; `first` is the number of their first line."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first + raw.count(b"\n", 0, error.start)
        at = error.start - (raw.rfind(b"\n", 0, error.start) + 1)
        raise DataError(
            f"line {line} of {path} is no UTF-8 text: byte {at} is 0x{raw[error.start]:02x}; convert the file, for "
            "example with iconv -t utf-8"
        ) from None


def needed(package: str, what: str, pip: str) -> Any:
    """A package that an installation may lack."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError:
        raise PackageError(f"{what} needs the package {package}; pip install {pip}") from None


def sha256(path: Path) -> str:
    """Of a file's bytes, or of the names and bytes of all files in a folder."""
    if path.is_dir():
        whole = hashlib.sha256()
        for file in sorted(p for p in path.rglob("*") if p.is_file()):
            whole.update(f"{file.relative_to(path).as_posix()}\0{sha256(file)}\n".encode())
        return whole.hexdigest()
    try:
        with open(path, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
