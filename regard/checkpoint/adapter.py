"""Adapters: what fine-tuning learnt, kept apart from the model it stands on.

A folder of adapter_config.json and adapter_model.safetensors, as PEFT writes and reads them: LoRA's matrices, and a
head that was learned. Beside them, in those that Regard writes, adapter.json (the base with its hashes, the head, the
names of labels) and the tokenizer's files. `load` gives the base with all of it merged in.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from regard.checkpoint import hf
from regard.checkpoint.family import Family
from regard.checkpoint.store import check_converted, header, replacing, write_carried, write_json
from regard.checkpoint.tensors import Step, choices
from regard.config import from_dict, to_dict
from regard.errors import UsageError, nearest, notice
from regard.files import read_files, read_json, resolve_model
from regard.layers import LM, MLM, Answer, Classify, Project, Tag
from regard.models import Model, adapt
from regard.models.adapt import LoRA

RECORD, PEFT, TENSORS = "adapter.json", "adapter_config.json", "adapter_model.safetensors"
FORMAT = 2


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
    """adapter.json. `dtype` is of the body that was trained, `config` what config.json says beside. `targets`: last
    names of the layers with LoRA; `int4`: the body's layers were in 4 bits, and are rounded so before they are merged.
    """

    base: Stand
    dtype: str
    lora: LoRA | None = None
    targets: tuple[str, ...] = ()
    int4: bool = False
    head: LM | MLM | Classify | Tag | Answer | Project | None = None
    classes: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT


def load(
    path: str | Path,
    device: str | torch.device | None = None,
    dtype: torch.dtype | Literal["stored"] | None = None,
    *,
    adapter: str | Path | None = None,
    image_size: int | None = None,
    mapped: bool = False,
) -> Model:
    """A model from a Hugging Face folder, one that `model.save` wrote, a run's, or an adapter's (Regard's or PEFT's),
    merged into its base; `demo` is the tiny one that is included. In evaluation mode. Without a `dtype` the weights
    have the type they are stored in, or, with a notice, float32 on a CPU that does not multiply that type; "stored"
    keeps it there too, as no `device` does beside a GPU. `adapter`: one to be merged into this folder's model.
    `image_size`: of the pictures it is to read, where that is not the folder's (see `with_image_size`).
    `mapped`, for a model that will be prepared with `consume`: on a CPU large weights stay in their file until they are
    packed, and the file must stay as it is until then."""
    wanted = None if dtype == "stored" else dtype
    folder = resolve_model(path)
    base = None
    if adapter is not None:
        folder, base = resolve_model(adapter), folder
        if not is_adapter(folder):
            raise UsageError(f"{folder} has no {PEFT}: it is not an adapter; name a folder with it")
    if is_adapter(folder):
        model = hf.cast(adapt.merge(_joined(folder, base)), wanted).to(device=device)
    else:
        if not (folder / "config.json").exists():
            check_converted(folder)
        model = hf.load(folder, device, wanted, mapped)
    model.origin.base = Base(folder)
    stays = device is not None or not torch.cuda.is_available()
    if dtype is None and stays and (why := hf.widen(model)):
        notice(f'{why}; dtype="stored" keeps them as they are')
    return model if image_size is None else adapt.with_image_size(model, image_size)


def is_adapter(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (RECORD, PEFT))


def _joined(folder: Path, base: Path | None) -> Model:
    """The base with the adapter in its place, not merged."""
    record = _record(folder)
    peft = _peft(folder)
    tensors = _tensors(folder)
    if record is None:
        model = load(base or _named(peft, folder), dtype="stored")
        head = _head_of(peft, tensors)
    else:
        model = load(_base(record, folder, base), dtype="stored")
        head = record.head
        model = hf.cast(model, getattr(torch, record.dtype))
        if record.int4:
            adapt.quantize(model)
    learned = set[str]()
    if head is not None and not _same_head(head, model.config.head):
        # A pooler that the base has need not be in an adapter of PEFT's.
        own = set[int]() if record else {id(p) for p in model.parameters()}
        model = adapt.with_head(model, head)
        named = model.named_parameters()
        learned = {n for n, p in named if n.startswith("head.") and id(p) not in own}
    ours, loras = _from_peft(folder, model, record, peft, tensors)
    for lora in dict.fromkeys(loras.values()):
        adapt.inject(model, [name for name, own in loras.items() if own == lora], lora)
    learned |= {n for n in ours if n.startswith("head.")}
    _copy(ours, model, [*_lora_names(model), *learned])
    if record is not None:
        config = {**record.config, **adapt.labels(record.classes)}
        files = read_files(folder, hf.CARRIED_FILES)
        model.origin = replace(model.origin, config=config, files=files)
    return model.eval()


def save_adapter(model: Model, path: str | Path) -> Path:
    """Write what `regard.training.config.adapted` lets learn, LoRA's matrices and the head, to a small folder that
    `regard.load` and PEFT read; whole or not at all. The model must come from a folder, and that folder must stay: it
    is named in adapter.json with its hashes, which are computed at the first call for a model."""
    path = Path(path)
    base = getattr(model.origin, "base", None)
    if base is None:
        raise UsageError("adapters stand on a folder, this model comes from none: use model.save")
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    inner = {n for n in trained if not n.startswith("head.")}
    low = adapt.low_ranks(model)
    if inner != set(_lora_names(model)):
        raise UsageError("weights of the body itself are trained: use model.save")
    # A head that was learned is float32, and so is the model around it; else LoRA is merged into what was stored.
    first, p = next(model.named_parameters())
    dtype = p.dtype if trained - inner else model.origin.stored.get(first, p.dtype)
    record = Record(
        Stand(str(base.folder), os.path.relpath(base.folder, path.resolve()), base.files),
        hf.dtype_name(dtype),
        next(iter(low.values())).config if low else None,
        tuple(sorted({name.rpartition(".")[2] for name in low})),
        any(isinstance(m, adapt.Int4Linear) for m in model.modules()),
        model.config.head,
        tuple(adapt.classes_of(model)),
        {key: value for key, value in model.origin.config.items() if key not in adapt.NAMES},
    )
    config, tensors = _to_peft(model, record, trained - inner)
    with replacing(path) as folder:
        save_file({n: x.cpu().contiguous() for n, x in tensors.items()}, folder / TENSORS)
        write_json(folder / PEFT, config)
        write_json(folder / RECORD, to_dict(record))
        write_carried(folder, model.origin.files)
    return path


def load_adapter(path: str | Path, into: Model) -> Model:
    """Copy the tensors that `save_adapter` wrote back into a model that was adapted in the same way from the same base,
    to go on training: afterwards its state dict is, bit for bit, that of the model that was saved. Returns `into`."""
    folder = Path(path)
    record = _record(folder)
    tensors = _tensors(folder)
    low = adapt.low_ranks(into)
    base = getattr(into.origin, "base", None)
    lora = next(iter(low.values())).config if low else None
    if record is None:
        raise UsageError(f"{folder} has no {RECORD}: it was not written by a run that can go on")
    if base is None or base.files != record.base.files:
        old = f"{record.base.folder} as it was then"
        raise UsageError(f"{folder} stands on {old}; go on with that model")
    if (lora, into.config.head) != (record.lora, record.head):
        raise UsageError(
            f"{folder} was trained with {record.lora} and the head {record.head}, not with {lora} and "
            f"{into.config.head}; go on with the same settings"
        )
    ours, _ = _from_peft(folder, into, record, _peft(folder), tensors)
    return _copy(ours, into, [n for n, p in into.named_parameters() if p.requires_grad])


# --- PEFT's words -------------------------------------------------------------------------------------------------

PREFIX = "base_model.model."
TASK_TYPES: dict[type, str] = {
    LM: "CAUSAL_LM", Classify: "SEQ_CLS", Tag: "TOKEN_CLS", Answer: "QUESTION_ANS"
}  # fmt: skip
# Keys of theirs that are read, or decide nothing once the matrices are there.
KNOWN = """r lora_alpha use_rslora alpha_pattern base_model_name_or_path task_type peft_type modules_to_save
rank_pattern auto_mapping peft_version revision inference_mode target_modules exclude_modules lora_dropout
fan_in_fan_out layers_to_transform layers_pattern megatron_config megatron_core loftq_config eva_config corda_config
lora_ga_config qalora_group_size runtime_config init_lora_weights bias ensure_weight_tying""".split()  # noqa: SIM905
# Beginnings of adapters that change the base too.
MOVED = ("pissa", "olora", "corda", "loftq", "lora_ga")


def _to_peft(model: Model, record: Record, head: set[str]) -> tuple[dict[str, Any], Any]:
    """adapter_config.json and the tensors, by their names. Where several of our layers are one of theirs (GPT-2's
    c_attn), so are their matrices: the A below each other, the B beside each other, of the rank of all together."""
    family, theirs, _ = hf.express(model, model.origin)
    steps = hf.plan(model, family)
    low = adapt.low_ranks(model)
    lora = record.lora or LoRA()
    tensors = dict[str, Tensor]()
    turned = False
    joined = dict[str, int]()  # their layers with LoRA, and how many of ours each is
    for name, step in _steps(model, family, theirs).items():
        parts = [low.get(n.removesuffix(".weight")) for n in step.ours]
        if not (made := [part for part in parts if part is not None]):
            continue
        b = [
            made[0].b.new_empty(shape[0], 0) if part is None else part.b.detach()
            for part, shape in zip(parts, step.shapes, strict=True)
        ]
        (both,) = step.save([*torch.block_diag(*b).split([len(x) for x in b])])
        tensors[f"{PREFIX}{name}.lora_A.weight"] = torch.cat([part.a.detach() for part in made])
        tensors[f"{PREFIX}{name}.lora_B.weight"] = both.t() if step.op.turned else both
        turned, joined[name] = turned or step.op.turned, len(made)
    saved = set[str]()
    for step in steps:
        if set(step.ours) <= head:
            values = step.save([model.get_parameter(n).detach() for n in step.ours])
            tensors |= {f"{PREFIX}{n}": x for n, x in zip(step.theirs, values, strict=True)}
            saved |= {n.rpartition(".")[0] for n in step.theirs}
    wide = {re.escape(name): count for name, count in joined.items() if count > 1}
    kind = TASK_TYPES.get(type(model.config.head))
    alphas = {n: lora.alpha * k ** (0.5 if lora.rslora else 1) for n, k in wide.items()}
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_2_SEQ_LM" if kind == "CAUSAL_LM" and model.reads_source else kind,
        "base_model_name_or_path": record.base.folder,
        "r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout, "use_rslora": lora.rslora,
        "rank_pattern": {n: lora.rank * k for n, k in wide.items()}, "alpha_pattern": alphas,
        "target_modules": _shortest([*joined], steps), "modules_to_save": sorted(saved) or None,
        "fan_in_fan_out": turned, "bias": "none", "inference_mode": True,
    }, tensors  # fmt: skip


def _shortest(targets: list[str], steps: list[Step]) -> list[str]:
    """The last names of their layers where these mean no others, else the whole ones."""
    last = {name.rpartition(".")[2] for name in targets}
    meant = [n for step in steps for n in step.theirs if set(n.split(".")[-2:]) & last]
    return sorted(last if len({n.rpartition(".")[0] for n in meant}) == len(targets) else targets)


def _steps(model: Model, family: Family | None, theirs: dict[str, Any]) -> dict[str, Step]:
    """How their modules are filled, by the names they have in a model of this class: the layers of ours that may have
    LoRA."""
    linears = {n.removesuffix(".base") for n in adapt.body_linears(model)}
    bare = family is not None and family.heads[theirs["architectures"][0]] is None
    prefix = family.base if family is not None and bare else ""
    found = {}
    for step in hf.plan(model, family):
        if step.ours[0].removesuffix(".weight") not in linears or len(step.theirs) != 1:
            continue
        name = step.theirs[0].removesuffix(".weight").removeprefix(prefix)
        names = choices(_modern(name, family))
        if len(names) == 1:
            found[names[0]] = step
            continue
        # Stored in one, and layers of their own in their modules.
        for name, ours, shape in zip(names, step.ours, step.shapes, strict=True):
            found[name] = Step([f"{name}.weight"], [ours], [shape])
    return found


def _modern(name: str, family: Family | None) -> str:
    for old, new in family.modules.items() if family is not None else ():
        name = name.replace(old, new)
    return name


def _from_peft(
    folder: Path, model: Model, record: Record | None, peft: dict[str, Any], tensors: Any
) -> tuple[dict[str, Tensor], dict[str, LoRA]]:
    """The tensors by our names, and the LoRA of each of our layers. Of one that is a part of one of theirs: of an
    adapter of ours its own part of the matrices (see `_to_peft`), of others all of A."""
    family, theirs, _ = hf.express(model, model.origin)
    steps = _steps(model, family, theirs)
    base = "" if family is None else family.base
    heads = [step for step in hf.plan(model, family) if step.ours[0].startswith("head.")]
    placed = {n for step in heads for n in step.theirs}
    tensors = {name.removeprefix(PREFIX): x for name, x in tensors.items()}
    ours = dict[str, Tensor]()
    loras = dict[str, LoRA]()
    for name, a in tensors.items():
        module, _, part = name.partition(".lora_")
        now = _modern(module, family)
        known = next((n for n in (now, base + now, now.removeprefix(base)) if n in steps), "")
        beside = part == "B.weight" and f"{module}.lora_A.weight" in tensors
        if name in placed or (known and beside):
            continue
        if not known or part != "A.weight":
            raise _other(folder, peft, f"{name} has no place in the model")
        step = steps[known]
        b = tensors.get(f"{module}.lora_B.weight")
        size = (sum(s[0] for s in step.shapes), len(a))
        if b is None or tuple(b.shape) != size or a.shape[1] != step.shapes[0][1]:
            told = f"({tuple(a.shape)}, {None if b is None else tuple(b.shape)})"
            raise _other(folder, peft, f"the matrices of {module} are {told}")
        alphas = peft.get("alpha_pattern") or {}
        alpha = [v for k, v in alphas.items() if re.fullmatch(rf"(.*\.)?({k})", known)]
        lora = LoRA(len(a), (*alpha, peft["lora_alpha"])[0], 0.0, bool(peft.get("use_rslora")))
        lora = record.lora if record is not None and record.lora is not None else lora
        at = 0
        for n, own_b in zip(step.ours, step.load([b.t() if step.op.turned else b]), strict=True):
            layer = n.removesuffix(".weight")
            if record is None or layer.rpartition(".")[2] in record.targets:
                own = slice(at, at + lora.rank)
                ours[f"{layer}.a"], ours[f"{layer}.b"] = a[own], own_b[:, own]
                loras[layer] = lora
                at += 0 if record is None else lora.rank
    for step in heads:
        if missing := sorted(set(step.theirs) - tensors.keys()):
            if len(missing) < len(step.theirs):
                raise _other(folder, peft, f"{missing[0]} is missing")
            continue
        ours |= zip(step.ours, step.load([tensors[n] for n in step.theirs]), strict=True)
    return ours, loras


def _head_of(peft: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    """The head that an adapter of PEFT's has learned, if it has: as many labels as its last matrix has rows."""
    rows = [len(x) for n, x in tensors.items() if ".lora_" not in n and x.dim() == 2]
    made = (Classify, Tag, Answer)
    kind = next((k for k in made if TASK_TYPES[k] == peft.get("task_type")), None)
    return None if kind is None or not rows else kind(min(rows))


def _same_head(one: Any, two: Any) -> bool:
    """Whether the head is that of the model already; one that says its labels alone may be of any form."""
    plain = isinstance(one, Classify | Tag | Answer) and one == type(one)(one.labels)
    return one == two or (plain and type(two) is type(one) and two.labels == one.labels)


def _other(folder: Path, peft: dict[str, Any], why: str) -> UsageError:
    of = peft.get("base_model_name_or_path")
    name = "name the one it was made for"
    return UsageError(f"{folder} is an adapter of another model ({of}): {why}; {name}")


# --- reading ------------------------------------------------------------------------------------------------------


def _record(folder: Path) -> Record | None:
    """What adapter.json says; None where there is none, in a folder of PEFT's."""
    if not (folder / RECORD).is_file():
        return None
    data = read_json(folder / RECORD)
    if data.get("format") != FORMAT:
        has = f"has format {data.get('format')!r}"
        raise UsageError(f"{folder / RECORD} {has}, this version of Regard reads {FORMAT}")
    record = from_dict(Record, data, RECORD)
    if not isinstance(getattr(torch, record.dtype, None), torch.dtype):
        raise UsageError(f"{folder / RECORD}: dtype is {record.dtype!r}; float32 is one")
    return record


def _peft(folder: Path) -> dict[str, Any]:
    """adapter_config.json, if it says nothing that cannot be done here."""
    data = read_json(folder / PEFT)
    alpha = data.get("lora_alpha")
    wrong = {
        "peft_type": data.get("peft_type") != "LORA",
        "bias": data.get("bias", "none") != "none",
        "init_lora_weights": str(data.get("init_lora_weights")).lower().startswith(MOVED),
        "lora_alpha": not isinstance(alpha, int | float) or alpha <= 0,
        **{name: bool(value) for name, value in data.items() if name not in KNOWN},
    }
    for name in (name for name, yes in wrong.items() if yes):
        plain = "Regard reads plain LoRA; merge it with PEFT"
        raise UsageError(f"{folder / PEFT} says {name} = {data.get(name)!r}, {plain}")
    return data


def _named(peft: dict[str, Any], folder: Path) -> Path:
    """The base that an adapter of PEFT's names, from here or from the adapter's folder."""
    name = peft.get("base_model_name_or_path")
    for path in (Path(str(name)), folder / str(name)):
        if name and path.is_dir():
            return path
    say = f"say which: regard.load(BASE, adapter={str(folder)!r})"
    raise UsageError(f"{folder} stands on {name}, which is not a folder here; {say}")


def _base(record: Record, folder: Path, given: Path | None = None) -> Path:
    """The base's folder, with the bytes it had."""
    stand = record.base
    put = f"name its folder as base.folder in {folder / RECORD}"
    places = (Path(stand.folder), folder.resolve() / stand.near) if given is None else (given,)
    folders = [p for p in places if p.is_dir()]
    for path in folders:
        if Base(path).files == stand.files:
            return path
    if not folders:
        gone = f"{stand.folder}, which is not there"
        raise UsageError(f"{folder} stands on {gone}; put it back, or {put}")
    now = Base(folders[0]).files
    changed = sorted(n for n in now.keys() | stand.files if now.get(n) != stand.files.get(n))
    other = f"where {changed[0]} is no longer what it was"
    raise UsageError(f"{folder} stands on {folders[0]}, {other}; put the old one back, or {put}")


def _tensors(folder: Path) -> dict[str, Tensor]:
    header(folder / TENSORS)
    return load_file(folder / TENSORS)


def _lora_names(model: Model) -> list[str]:
    return [f"{name}.{part}" for name in adapt.low_ranks(model) for part in "ab"]


@torch.no_grad()
def _copy(tensors: dict[str, Tensor], model: Model, wanted: Iterable[str]) -> Model:
    """Exactly the wanted parameters, each with its shape."""
    parameters = dict(model.named_parameters())
    wanted = set(wanted)
    for name in sorted(wanted ^ tensors.keys()):
        what = "is missing from" if name in wanted else "has no place in the model, but is in"
        hint = nearest(name, (wanted | tensors.keys()) - {name})
        raise UsageError(f"tensor {name} {what} {TENSORS}; {hint}")
    for name, x in tensors.items():
        shape = tuple(parameters[name].shape) if name in parameters else None
        if shape != tuple(x.shape) or x.dtype not in hf.FLOATS:
            what = f"{x.dtype} of shape {tuple(x.shape)}; the model has floats of {shape}"
            raise UsageError(f"tensor {name} of {TENSORS} is {what}")
        parameters[name].copy_(x)
    return model
