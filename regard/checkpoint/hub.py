"""A model brought from the Hugging Face Hub into its cache: the only code that downloads one, and where it is asked.

What is taken is what a model needs: safetensors, configs, tokenizer. A name is resolved to a commit first, every file
is of that commit, and its content is held against the checksum that the hub lists for it. Only when all are there does
the cache say that the name means this commit (`in_hub_cache` in files.py): a pull that was cut off is never taken for
whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.checkpoint.hf import CARRIED_FILES
from regard.errors import DATA, ENVIRONMENT, RUN, Fault, UsageError
from regard.files import hub_cache, hub_name

SMALL_FILES = ("config.json", "adapter_config.json", "adapter.json", *CARRIED_FILES)
INDEX = "model.safetensors.index.json"
WEIGHTS = ("model.safetensors", "adapter_model.safetensors")
SWITCHES = ("1", "on", "yes", "true")


@dataclass(frozen=True)
class HubFile:
    """A file of a commit, as the hub lists it."""

    name: str
    size: int
    # sha256 of a large file; of a small one git's hash, sha1 of its size and its bytes
    sha256: str | None
    blob: str | None


@dataclass(frozen=True)
class Listing:
    """What a name on the hub means now."""

    name: str
    revision: str
    commit: str
    files: tuple[HubFile, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def home(self) -> Path:
        return hub_cache() / f"models--{self.name.replace('/', '--')}"

    @property
    def folder(self) -> Path:
        return self.home / "snapshots" / self.commit


def look_up(name: str) -> Listing:
    """The commit that `name` (org/name, or org/name@revision) means now, and what a pull would bring of it."""
    parsed = hub_name(name)
    if parsed is None:
        raise UsageError(
            f"{name} is no name on the Hugging Face Hub; give org/name or org/name@revision"
        )
    repo, revision = parsed
    hub = _library()
    with _told(repo, revision):
        info = hub.HfApi(endpoint=_endpoint()).model_info(
            repo, revision=revision, files_metadata=True
        )
    every = {file.name: file for file in map(_file, info.siblings or ())}
    return Listing(repo, revision, str(info.sha), tuple(_needed(repo, every)))


def pull(listing: Listing, tell: Callable[[HubFile], None] = lambda file: None) -> Path:
    """Every file of it, checked; the folder in the hub's cache. `tell` is called before each."""
    hub = _library()
    _check_room(listing)
    named: set[str] | None = None
    for file in sorted(listing.files, key=lambda file: file.name != INDEX):
        # Of several forms of the weights the index names the one that is meant.
        if named is not None and file.name.endswith(".safetensors") and file.name not in named:
            continue
        tell(file)
        with _told(listing.name, listing.revision):
            path = Path(
                hub.hf_hub_download(
                    listing.name,
                    file.name,
                    revision=listing.commit,
                    cache_dir=hub_cache(),
                    endpoint=_endpoint(),
                )
            )
        _check(path, file)
        if file.name == INDEX:
            named = _shards(path)
    if listing.revision != listing.commit:
        ref = listing.home / "refs" / listing.revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        beside = ref.with_name(f"{ref.name}.{os.getpid()}")
        beside.write_text(listing.commit, encoding="utf-8")
        beside.replace(ref)
    return listing.folder


def _library() -> Any:
    """huggingface_hub, which is told to count nobody."""
    for switch in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(switch, "").lower() in SWITCHES:
            text = f"{switch} is set: nothing is downloaded; unset it for this command"
            raise Fault(text, ENVIRONMENT)
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError:
        why = "the package huggingface_hub is missing; pip install 'regard[hub]'"
        raise Fault(why, ENVIRONMENT) from None
    # Read from the environment when it was imported, by whomever.
    constants: Any = importlib.import_module("huggingface_hub.constants")
    constants.HF_HUB_DISABLE_TELEMETRY = True
    return hub


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def _file(sibling: Any) -> HubFile:
    large = sibling.lfs
    sha256 = large and (large.get("sha256") if isinstance(large, dict) else large.sha256)
    return HubFile(sibling.rfilename, sibling.size or 0, sha256 or None, sibling.blob_id)


def _needed(repo: str, every: dict[str, HubFile]) -> Iterator[HubFile]:
    """What a model needs of the files in the folder itself; all shards, where an index will name them."""
    yield from (every[name] for name in SMALL_FILES if name in every)
    weights = [name for name in WEIGHTS if name in every]
    if INDEX in every:
        yield every[INDEX]
        weights = [n for n in every if n.endswith(".safetensors") and "/" not in n]
    if not weights:
        others = [n for n in every if n.endswith((".bin", ".pt", ".pth", ".gguf", ".h5"))]
        has = f"; it has {', '.join(others[:3])}" if others else ""
        raise Fault(f"{repo} has no safetensors{has}: nothing was pulled", DATA)
    yield from (every[name] for name in weights)


def _shards(index: Path) -> set[str]:
    try:
        named = json.loads(index.read_bytes())["weight_map"].values()
        return {str(name) for name in named}
    except (ValueError, KeyError, AttributeError):
        raise Fault(f"{index.name} of this model is not an index of its weights", DATA) from None


def _check_room(listing: Listing) -> None:
    listing.home.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(listing.home).free
    if free < listing.size:
        has = f"{hub_cache()} has {free / 1e9:.1f} GB free"
        text = f"{listing.name} has {listing.size / 1e9:.1f} GB, and {has}; make room, or set HF_HOME to a larger disk"
        raise Fault(text, RUN)


def _check(path: Path, file: HubFile) -> None:
    """Hold a file against its checksum; a wrong one leaves the cache."""
    wanted = file.sha256 or file.blob
    if wanted is None:
        raise Fault(f"the hub lists no checksum for {file.name}: it is not taken", DATA)
    if file.sha256:
        found = _hash(path, hashlib.sha256())
    else:
        found = _hash(path, hashlib.sha1(b"blob %d\0" % path.stat().st_size))
    if found != wanted:
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        is_not = f"its checksum is {found[:12]}..., the hub says {wanted[:12]}..."
        raise Fault(
            f"{file.name} did not arrive as it is on the hub: {is_not}; it was removed, pull again",
            DATA,
        )


def _hash(path: Path, digest: Any) -> str:
    with path.open("rb") as content:
        while block := content.read(2**20):
            digest.update(block)
    return str(digest.hexdigest())


@contextlib.contextmanager
def _told(repo: str, revision: str) -> Iterator[None]:
    """What went wrong with the hub, in a sentence."""
    errors = importlib.import_module("huggingface_hub.errors")
    network = importlib.import_module("httpx").HTTPError
    place = _endpoint()
    try:
        yield
    except errors.GatedRepoError:
        text = (
            f"{repo} is only for those who were let in: ask on {place}/{repo}, then hf auth login"
        )
        raise Fault(text, DATA) from None
    except errors.RevisionNotFoundError:
        raise Fault(f"{repo} has no revision {revision!r} on {place}", DATA) from None
    except errors.RepositoryNotFoundError:
        text = f"{place} has no model {repo}, or it is private: check the name, or hf auth login"
        raise Fault(text, DATA) from None
    except errors.HfHubHTTPError as error:
        code = getattr(error.response, "status_code", "no status")
        raise Fault(f"{place} answered {code} for {repo}; try again later", RUN) from None
    except (errors.LocalEntryNotFoundError, network, ConnectionError, TimeoutError) as error:
        first = str(error).partition("\n")[0]
        raise Fault(f"{place} cannot be reached: {first}", RUN) from None
