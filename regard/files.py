"""Files of a folder that may come from anyone: regular, of bounded size, inside the folder; JSON that says one thing.

Without these checks a pipe would hang, a device or a sparse file would fill the memory, and a link could bring any file
of this machine into what is saved and shared.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from regard.errors import DATA, Fault, UsageError

TOKENIZER_FILES = """tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json
vocab.json merges.txt vocab.txt spiece.model sentencepiece.bpe.model tokenizer.model source.spm target.spm
generation_config.json chat_template.jinja chat_template.json""".split()  # noqa: SIM905
# The index of DeepSeek-V3 has 9 MB, the largest tokenizers some 40.
JSON_BYTES, FILE_BYTES = 64 * 2**20, 256 * 2**20
# The key of config.json with the longest row that a model was trained on.
TRAINED = "trained_length"


def nearby(path: str | Path) -> str:
    """A hint such as `; did you mean story.toml?` where what does not exist has a neighbour of nearly its name."""
    home = Path(path)
    there = os.listdir(home.parent) if not home.exists() and home.parent.is_dir() else []
    # A link that leads nowhere is its own neighbour.
    there = [name for name in there if name != home.name]
    close = difflib.get_close_matches(home.name, there, n=1, cutoff=0.7)
    return f"; did you mean {home.with_name(close[0])}?" if close else ""


def model_folder(path: str | Path) -> Path:
    """`path` if it is a folder, or what was pulled of a name on the Hugging Face Hub; else a sentence that says what to
    type."""
    folder, name = Path(path), str(path)
    if folder.is_dir():
        return folder
    if not folder.exists() and (pulled := in_hub_cache(name)):
        return pulled
    text = f"{name} is not a folder; give the path of a model folder (with config.json and weights)"
    if folder.is_symlink() and not folder.exists():
        text += f"; it is a link to {os.readlink(folder)}, which is not there"
    elif hint := nearby(folder):
        text += hint
    elif folder.parts[:1] == ("runs",) and not folder.exists():
        run = folder.parts[1] if folder.parts[1:] else "NAME"
        text += (
            f". A run is made by regard train {run}.toml, of a recipe by regard recipes run {run}"
        )
    elif not folder.exists() and hub_name(name):
        text += f". If it is a model on the Hugging Face Hub: regard pull {name}"
    raise UsageError(text)


def hub_name(name: str) -> tuple[str, str] | None:
    """org/name, or org/name@revision, as (org/name, revision); None if it is no such name."""
    found = re.fullmatch(r"((?:\w[\w.-]*/)?\w[\w.-]*)(?:@(\w[\w./-]*))?", name)
    odd = found is None or found[1].startswith("runs/") or ".." in name
    return None if found is None or odd else (found[1], found[2] or "main")


def hub_cache() -> Path:
    """Where the Hugging Face Hub's programs keep what they downloaded."""
    own = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    home = os.environ.get("HF_HOME")
    if home is None:
        home = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(own or os.path.join(home, "hub")).expanduser()


def in_hub_cache(name: str) -> Path | None:
    """The folder in the hub's cache that a name on the hub means, if it was brought here."""
    if (parsed := hub_name(name)) is None:
        return None
    repo, revision = parsed
    home = hub_cache() / f"models--{repo.replace('/', '--')}"
    try:
        commit = (home / "refs" / revision).read_text(encoding="utf-8").strip()
    except OSError:
        commit = revision
    folder = home / "snapshots" / commit
    there = any((folder / f"{name}.json").is_file() for name in ("config", "adapter_config"))
    return folder if re.fullmatch(r"[\w-]+", commit) and there else None


DEMO = Path(__file__).parent / "serve" / "demo"


def resolve_model(path: str | Path) -> Path:
    """The model folder that is meant: of a run's folder its best model, or its last where none was evaluated; `demo`,
    where there is no such folder, is the tiny model that is included; a name on the hub what was pulled of it."""
    home, names = Path(path), ("config", "adapter", "adapter_config")
    if str(path) == "demo" and not home.exists():
        return DEMO
    if not home.exists() and (pulled := in_hub_cache(str(path))):
        return pulled
    for place in (home, home / "best", home / "last"):
        if any((place / f"{name}.json").is_file() for name in names):
            return place
    if (home / "run.json").is_file() or (home / "checkpoints").is_dir():
        raise Fault(f"the run {path} has saved no model yet; wait for a checkpoint", DATA)
    return home


def inside(path: Path) -> Path:
    """The regular file behind `path`, which must lie in its folder; only in a snapshot of a hub's cache may it be a
    link to the blobs of the same cache."""
    home = path.parent.resolve()
    allowed = [home, home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [home]
    try:
        real = path.resolve()
    except (OSError, RuntimeError):
        raise UsageError(f"{path} cannot be read: it is a link to itself") from None
    if not any(real.is_relative_to(place) for place in allowed):
        raise UsageError(
            f"{path} is a link out of its folder, to {real}, and such links are refused; "
            "if you trust it, put a copy of the file in place of the link"
        )
    if real.exists() and not real.is_file():
        raise UsageError(f"{path} cannot be read: it is not a regular file")
    if path.is_symlink() and not real.exists():
        missing = f"it is a link to {real}, which does not exist"
        raise UsageError(f"{path} cannot be read: {missing}; remove the link or restore the file")
    return real


def read_bytes(path: Path, limit: int = FILE_BYTES) -> bytes:
    """The content of a file of at most `limit` bytes."""
    try:
        with inside(path).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= limit:
                return file.read(limit)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    much = f"it has {size:,} bytes, at most {limit:,} are taken"
    raise UsageError(f"{path} cannot be read: {much}")


def read_files(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Those of the files that the folder has: name -> content."""
    return {name: read_bytes(folder / name) for name in names if os.path.lexists(folder / name)}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of finite numbers, or a sentence that says why not."""
    try:
        return json_object(read_bytes(path, JSON_BYTES), path)
    except FileNotFoundError:
        holds = "a model folder holds config.json and model.safetensors"
        raise UsageError(f"{path} does not exist; {holds}") from None


def json_object(content: bytes, name: str | Path) -> dict[str, Any]:
    """The same from what the file of this name holds."""
    try:
        data = loads(content)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise UsageError(f"{name} must hold a JSON object, it holds a {type(data).__name__}")
    return data


def loads(data: str | bytes) -> Any:
    """JSON of finite numbers in which no object has a key twice."""
    return json.loads(data, parse_constant=_finite, parse_float=_finite, object_pairs_hook=_once)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for name, value in pairs:
        if name in table:
            raise ValueError(f"the key {name!r:.80} stands twice in one object")
        table[name] = value
    return table


# --- writing --------------------------------------------------------------------------------------


def write_whole(path: Path, content: str | bytes) -> None:
    """Put a file in place whole or not at all, also when the power goes. Characters that UTF-8
    cannot have become question marks."""
    new = path.with_name(f".{path.name}.new")
    try:
        with naming(path), new.open("wb") as file:
            file.write(as_bytes(content))
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        # What there is of it takes room.
        new.unlink(missing_ok=True)
        raise
    os.replace(new, path)
    sync(path.parent)


def write_over(path: Path, content: str | bytes) -> None:
    """Put a file in place whole, as `write_whole` does; where the disk has no room for another one, over the old file,
    which may have room for it."""
    try:
        write_whole(path, content)
    except OSError as error:
        if error.errno != errno.ENOSPC or not path.is_file():
            raise
        with naming(path), path.open("r+b") as file:
            file.write(as_bytes(content))
            file.truncate()


def as_bytes(content: str | bytes) -> bytes:
    return content if isinstance(content, bytes) else content.encode("utf-8", "replace")


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have what goes wrong with writing say with which file: a full disk does not."""
    try:
        yield
    except OSError as error:
        # Without a number its text is all that it has.
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def whole_folder(target: Path, mark: str = "") -> Iterator[Path]:
    """A new folder beside `target` that takes its place, and is on the disk, when the block ends well; else `target`
    is as it was. `mark` keeps the names of several processes apart."""
    new, old = (target.with_name(f".{target.name}.{word}{mark}") for word in ("new", "old"))
    # Of a process that was killed.
    for left in (new, old):
        shutil.rmtree(left, ignore_errors=True)
    try:
        new.mkdir(parents=True)
        yield new
        for path in [*new.rglob("*"), new]:
            if not path.is_symlink():
                sync(path)
        if target.exists():
            target.rename(old)
        try:
            new.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise
        sync(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
