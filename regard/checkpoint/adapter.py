"""Adapters: what fine-tuning learnt, kept apart from the model it stands on, which is named and hashed.

A folder of adapter.json, adapter.safetensors (LoRA's matrices and the head) and the tokenizer's files. `load` gives the
base with all of it merged in.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from regard.checkpoint import hf
from regard.checkpoint.store import check_converted, header, replacing, write_carried, write_json
from regard.config import from_dict, to_dict
from regard.errors import UsageError, nearest
from regard.files import read_files, read_json
from regard.layers import LM, MLM, Answer, Classify, Tag
from regard.models import Model, adapt
from regard.models.adapt import LoRA

RECORD, TENSORS = "adapter.json", "adapter.safetensors"
FORMAT = 1


class Base:
    """The folder that a model was read from; `model.origin.base`."""

    def __init__(self, folder: Path):
        # Of a link, the folder behind it: the link may move on.
        self.folder = folder.resolve()

    @cached_property
    def files(self) -> dict[str, str]:
        """SHA-256 of the configuration and of every file of weights, computed once."""
        digests = {}
        for path in sorted(self.folder.iterdir()):
            decides = path.name in ("config.json", RECORD) or path.suffix == ".safetensors"
            if decides and path.is_file():
                with path.open("rb") as file:
                    digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
        return digests


@dataclass(frozen=True)
class Stand:
    """Where the base is, as a whole path and as one from the adapter's folder, and what it was."""

    folder: str
    near: str
    files: dict[str, str]


@dataclass(frozen=True)
class Record:
    """adapter.json. `dtype` is of the body that was trained, `config` what config.json says beside."""

    base: Stand
    dtype: str
    lora: LoRA | None = None
    head: LM | MLM | Classify | Tag | Answer | None = None
    classes: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT


def load(
    path: str | Path,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    *,
    image_size: int | None = None,
) -> Model:
    """A model from a Hugging Face folder, one that `model.save` wrote, or an adapter's, merged into its base; in
    evaluation mode. The weights keep the type they are stored in unless `dtype` says otherwise. `image_size`: of the
    pictures it is to read, where that is not the folder's (see `with_image_size`)."""
    folder = Path(path)
    if not any((folder / name).exists() for name in (RECORD, "config.json")):
        check_converted(folder)
    if (folder / RECORD).is_file():
        model = hf.cast(adapt.merge(_joined(folder)), dtype).to(device=device)
    else:
        model = hf.load(folder, device, dtype)
    model.origin.base = Base(folder)
    return model if image_size is None else adapt.with_image_size(model, image_size)


def _joined(folder: Path) -> Model:
    """The base with the adapter in its place, not merged."""
    record, tensors = _record(folder), _tensors(folder)
    model, dtype = load(_base(record, folder)), getattr(torch, record.dtype)
    if next(model.parameters()).dtype != dtype:
        model = hf.cast(model, dtype)
    wanted = {n for n in tensors if n.startswith("head.")}
    if record.head is not None and record.head != model.config.head:
        model = adapt.with_head(model, record.head)
        wanted |= {n for n, _ in model.named_parameters() if n.startswith("head.")}
    inner = {n.rpartition(".")[0] for n in tensors if not n.startswith("head.")}
    adapt.inject(model, sorted(inner), record.lora or LoRA())
    _copy(tensors, model, [*_lora_names(model), *wanted])
    config = {**record.config, **adapt.labels(record.classes)}
    files = read_files(folder, hf.CARRIED_FILES)
    model.origin = replace(model.origin, config=config, files=files)
    return model.eval()


def save_adapter(model: Model, path: str | Path) -> Path:
    """Write what `regard.train.config.adapted` lets learn, LoRA's matrices and the head, to a small folder that
    `regard.load` reads; whole or not at all. The model must come from a folder, and that folder must stay: it is named
    in adapter.json with its hashes, which are computed at the first call for a model."""
    path = Path(path)
    base = getattr(model.origin, "base", None)
    if base is None:
        raise UsageError("adapters stand on a folder, this model comes from none: use model.save")
    tensors = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    inner, low = {n for n in tensors if not n.startswith("head.")}, adapt.low_ranks(model)
    if inner != set(_lora_names(model)):
        raise UsageError("weights of the body itself are trained: use model.save")
    record = Record(
        Stand(str(base.folder), os.path.relpath(base.folder, path.resolve()), base.files),
        hf.dtype_name(next(model.parameters()).dtype),
        next(iter(low.values())).config if low else None,
        model.config.head,
        tuple(adapt.classes_of(model)),
        {key: value for key, value in model.origin.config.items() if key not in adapt.NAMES},
    )
    with replacing(path) as folder:
        save_file({n: x.cpu().contiguous() for n, x in tensors.items()}, folder / TENSORS)
        write_json(folder / RECORD, to_dict(record))
        write_carried(folder, model.origin.files)
    return path


def load_adapter(path: str | Path, into: Model) -> Model:
    """Copy the tensors that `save_adapter` wrote back into a model that was adapted in the same way from the same base,
    to go on training: afterwards its state dict is, bit for bit, that of the model that was saved. Returns `into`."""
    folder = Path(path)
    record, tensors = _record(folder), _tensors(folder)
    low, base = adapt.low_ranks(into), getattr(into.origin, "base", None)
    lora = next(iter(low.values())).config if low else None
    if base is None or base.files != record.base.files:
        raise UsageError(
            f"{folder} stands on {record.base.folder} as it was then; go on with that model"
        )
    if (lora, into.config.head) != (record.lora, record.head):
        raise UsageError(
            f"{folder} was trained with {record.lora} and the head {record.head}, not with {lora} and "
            f"{into.config.head}; go on with the same settings"
        )
    return _copy(tensors, into, [n for n, p in into.named_parameters() if p.requires_grad])


# --- reading ------------------------------------------------------------------------------------------------------


def _record(folder: Path) -> Record:
    data = read_json(folder / RECORD)
    if data.get("format") != FORMAT:
        raise UsageError(
            f"{folder / RECORD} has format {data.get('format')!r}, this version of Regard reads {FORMAT}"
        )
    record = from_dict(Record, data, RECORD)
    if not isinstance(getattr(torch, record.dtype, None), torch.dtype):
        raise UsageError(f"{folder / RECORD}: dtype is {record.dtype!r}; float32 is one")
    return record


def _base(record: Record, folder: Path) -> Path:
    """The base's folder, with the bytes it had."""
    stand, put = record.base, f"name its folder as base.folder in {folder / RECORD}"
    folders = [p for p in (Path(stand.folder), folder.resolve() / stand.near) if p.is_dir()]
    for path in folders:
        if Base(path).files == stand.files:
            return path
    if not folders:
        raise UsageError(
            f"{folder} stands on {stand.folder}, which is not there; put it back, or {put}"
        )
    now = Base(folders[0]).files
    changed = sorted(n for n in now.keys() | stand.files if now.get(n) != stand.files.get(n))
    raise UsageError(
        f"{folder} stands on {folders[0]}, where {changed[0]} is no longer what it was; put the old one back, or {put}"
    )


def _tensors(folder: Path) -> dict[str, Tensor]:
    header(folder / TENSORS)
    return load_file(folder / TENSORS)


def _lora_names(model: Model) -> list[str]:
    return [f"{name}.{part}" for name in adapt.low_ranks(model) for part in "ab"]


@torch.no_grad()
def _copy(tensors: dict[str, Tensor], model: Model, wanted: Iterable[str]) -> Model:
    """Exactly the wanted parameters, each with its shape."""
    parameters, wanted = dict(model.named_parameters()), set(wanted)
    for name in sorted(wanted ^ tensors.keys()):
        what = "is missing from" if name in wanted else "has no place in the model, but is in"
        hint = nearest(name, wanted | tensors.keys())
        raise UsageError(f"tensor {name} {what} {TENSORS}; {hint}")
    for name, x in tensors.items():
        shape = tuple(parameters[name].shape) if name in parameters else None
        if shape != tuple(x.shape) or x.dtype not in hf.FLOATS:
            raise UsageError(
                f"tensor {name} of {TENSORS} is {x.dtype} of shape {tuple(x.shape)}; the model has floats of {shape}"
            )
        parameters[name].copy_(x)
    return model
