"""Hugging Face folders in and out, and models of transformers in memory: the tables of families/ run both ways.

A model that no family can express is saved to the same folder layout with `model_type: "regard"`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.checkpoint import quantised, store
from regard.checkpoint.blame import Looked, blaming, naming, said
from regard.checkpoint.families import FAMILIES, INERT, MULTIMODAL
from regard.checkpoint.family import Family
from regard.checkpoint.multimodal import language_model
from regard.checkpoint.nested import Nested
from regard.checkpoint.quantised import Packing
from regard.checkpoint.rules import Data, check_kinds, get, put, wrong
from regard.checkpoint.store import FLOATS, Source
from regard.checkpoint.tensors import SAME, Step, steps
from regard.config import from_dict, to_dict
from regard.errors import UsageError, nearest, notice
from regard.files import TOKENIZER_FILES, model_folder, read_files, read_json
from regard.kernels.linear import is_fast
from regard.kernels.triton import ahead
from regard.layers import LM
from regard.models import CONFIGS, Model
from regard.models.adapt import low_ranks, plain_shapes
from regard.models.init import Start

NATIVE = "regard"
OWN = "Regard's own format, which transformers does not read"
# How sentence-transformers makes a vector of an encoder's states.
POOLING, MODULES = "1_Pooling/config.json", "modules.json"
SENTENCES = (POOLING, MODULES, "sentence_bert_config.json", "config_sentence_transformers.json")
PICTURES = ("preprocessor_config.json", "processor_config.json")
CARRIED_FILES = (*TOKENIZER_FILES, *PICTURES, *SENTENCES)


@dataclass
class Origin:
    """What a folder said beyond what the model computes with."""

    family: str
    architecture: str = ""
    config: Data = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    # The folder itself, as adapter.py names it.
    base: Any = None
    # The types that its weights are stored in, by name, where `widen` gave the model another.
    stored: dict[str, torch.dtype] = field(default_factory=dict)
    # How its weights are packed, where they are.
    packing: Packing | None = None
    # Heads for its body, by kind, and how new weights on it are drawn.
    heads: dict[str, Any] = field(default_factory=dict)
    start: Start | None = None


def load(
    path: str | Path,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    mapped: bool = False,
) -> Model:
    """A model from a Hugging Face folder (or one that `model.save` wrote), in evaluation mode. The
    weights keep the type they are stored in unless `dtype` says otherwise, and lie on torch's
    default device unless `device` does. `mapped`: large ones that need no change stay in the file
    until they are looked at, for a model that will be packed."""
    folder = model_folder(path)
    place = torch.get_default_device() if device is None else torch.device(device)
    device = None if place.type == "cpu" else place
    if place.type == "cuda":
        ahead.begin()
    theirs = read_json(folder / "config.json")
    model = read(theirs, store.weights(folder, mapped and device is None), device, dtype)
    # A language model alone reads no pictures.
    text = theirs.get("model_type") in MULTIMODAL
    carried = [name for name in CARRIED_FILES if not (text and name in PICTURES)]
    model.origin.files = read_files(folder, carried)
    return model


def from_hf(module: nn.Module) -> Model:
    """The same from a transformers model in memory."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        why = "from_hf needs transformers >= 5; or save it and regard.load(folder)"
        raise UsageError(why) from None
    theirs = json.loads(module.config.to_json_string(use_diff=False))  # type: ignore[operator, union-attr]
    theirs["architectures"] = [type(module).__name__]
    tensors = revert_weight_conversion(module, module.state_dict())  # type: ignore[arg-type]
    model = read(theirs, store.memory(tensors), None, None)
    if getattr(module, "generation_config", None) is not None:
        text = module.generation_config.to_json_string()  # type: ignore[union-attr, operator]
        model.origin.files["generation_config.json"] = text.encode()
    return model


def read(theirs: Data, source: Source, device: Any, dtype: torch.dtype | None) -> Model:
    """Their config and tensors -> our model."""
    theirs, source = language_model(theirs, source, MULTIMODAL, FAMILIES)
    kind = theirs.get("model_type")
    count = len(source)
    family = None
    repeated = set[str]()
    if kind == NATIVE:
        _check_counts(theirs.get("config"), ("layers",), count)
        model = _empty(read_native(theirs), theirs)
        theirs = {key: value for key, value in theirs.items() if key != "config"}
        model.origin = Origin(NATIVE, config=theirs)
        _name_unknown(theirs, INERT, "Regard's own format")
    else:
        if not isinstance(kind, str) or kind not in FAMILIES:
            raise _unknown_family(theirs)
        family = FAMILIES[kind]
        # Their keys under their first names: GPT-2's n_layer may be called num_hidden_layers.
        first = {old: new for old, new in family.aliases.items() if new not in theirs}
        theirs = {first.get(key, key): value for key, value in theirs.items()}
        named = theirs.get("architectures") or [next(iter(family.heads))]
        architecture = named[0] if isinstance(named, list) else named
        if not isinstance(architecture, str) or architecture not in family.heads:
            known = f"of {kind}, known: {', '.join(family.heads)}"
            raise wrong(f"architectures has {architecture!r}; {known}")
        theirs, source, packing = quantised.unpack(theirs, source)
        source = _modern(source, family)
        _check_counts({k: v for k, v in theirs.items() if k in family.keys}, LAYERS, count)
        config, repeated = _settle(read_config(theirs, family, architecture), family, source)
        _name_unknown(theirs, family.keys | INERT | set(family.aliases), f"transformers' {kind}")
        for name, r in family.rules:
            if isinstance(r, Nested):
                _name_unknown(r.part(name, theirs), r.keys | INERT, f"transformers' {kind}.{name}")
        with naming(theirs, family, architecture):
            _check_counts(to_dict(config), ("experts",), count)
            model = _empty(config, theirs)
        heads = {
            head.kind: read_config(theirs, family, name).head
            for name, head in family.heads.items()
            if head is not None
        }
        # How the family starts, with the deviation that the folder says.
        key = next((key for key in STARTS if theirs.get(key) is not None), "")
        std = float(theirs[key]) if key else family.start.std
        if std < 0:
            raise wrong(f"{key} is {theirs[key]}; it must be 0 or more")
        start = replace(family.start, std=std)
        model.origin = Origin(kind, architecture, theirs, heads=heads, start=start, packing=packing)
    steps = plan(model, family)
    quantised.lay(source, steps)
    left = [name for name in _check(steps, source) if name not in repeated]
    model.origin.tensors = _carry(left, source, family, model, steps)
    _fill(model, steps, source, device, dtype or _common_type(model, steps, source, theirs))
    if model.origin.packing is not None:
        notice(model.origin.packing.told(next(model.parameters()).dtype))
    return model.eval()


# Keys that say how new weights are drawn.
STARTS = dict.fromkeys(("initializer_range", "init_std", "initializer_factor"))
HUGE = 2**24  # of a size: larger than any that a model has
LAYERS = """n_layer n_layers num_layers num_hidden_layers num_decoder_layers encoder_layers
decoder_layers""".split()  # noqa: SIM905


def _check_counts(data: Any, keys: Collection[str], tensors: int) -> None:
    """A layer has a tensor at least, and an expert too in the families' folders (ours stack them):
    without this check a wrong number could fill the memory."""
    for key, value in data.items() if isinstance(data, dict) else enumerate(data or ()):
        if isinstance(value, (dict, list)):
            _check_counts(value, keys, tensors)
        elif key in keys and isinstance(value, int) and value > tensors:
            raise wrong(f"{key} is {value:,}, but the weights hold {tensors:,} tensors in all")


def _name_unknown(theirs: Data, known: Collection[str], what: str) -> None:
    """One notice for all keys that decide nothing: they are kept as they are and written back."""
    unknown = [key for key in theirs if key not in known]
    if not unknown:
        return
    names = []
    for key in unknown[:20]:
        close = difflib.get_close_matches(key, known, n=1, cutoff=0.85)
        names.append(repr(key)[1:-1] + "".join(f" (did you mean {name}?)" for name in close))
    names += [f"{len(unknown) - 20} more"] if len(unknown) > 20 else []
    text = f"config.json: {', '.join(names)}: no such key in {what}, so nothing depends on it"
    text += "; kept, and written back by save"
    if "auto_map" in unknown:
        text += ". auto_map names code that comes with the model: Regard runs its own, never that"
    notice(text)


def _unknown_family(theirs: Data) -> UsageError:
    """Names the family that has a word for most of the keys, of several the one with the nearest name, and the keys
    that it has none for."""
    kind = theirs.get("model_type")
    used = [key for key in theirs if key not in INERT]

    def fit(family: Family) -> tuple[int, float]:
        known = family.keys | family.aliases.keys()
        names = difflib.SequenceMatcher(None, kind if isinstance(kind, str) else "", family.name)
        return sum(key in known for key in used), names.ratio()

    near = max(FAMILIES.values(), key=fit)
    others = [key for key in used if key not in near.keys | near.aliases.keys()]
    more = f" and {len(others) - 20} more" if len(others) > 20 else ""
    lacks = ", ".join(repr(key)[1:-1] for key in others[:20]) + more
    what = "no model_type" if kind is None else f"model_type {kind!r:.80}, which is not known"
    every = "has a word for each of its keys: write that model_type if it is one"
    has = f"has no word for: {lacks}" if others else every
    return UsageError(f"config.json has {what}; the nearest family is {near.name}, which {has}")


def read_native(theirs: Data) -> Any:
    data = theirs.get("config")
    kind = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in CONFIGS:
        raise wrong(f"config.kind is {kind!r}; known: {', '.join(CONFIGS)}")
    with blaming(lambda: "these settings do not fit together"):
        return from_dict(CONFIGS[kind], data)  # type: ignore[arg-type]


def read_config(theirs: Data, family: Family, architecture: str) -> Any:
    """Their keys -> our config, by the family's rules: what no rule names decides nothing."""
    check_kinds(theirs, family.keys | STARTS.keys())
    ours = to_dict(family.blank)
    ours["head"] = to_dict(family.heads[architecture])
    for name, r in family.rules:
        looked = Looked(theirs)
        with blaming(partial(looked.values_of, name, r)):
            if isinstance(r, Nested):
                check_kinds(r.part(name, theirs), r.keys)
            r.read(name, looked, ours)
    with (
        blaming(lambda: "these sizes do not fit together"),
        naming(theirs, family, architecture),
    ):
        return from_dict(type(family.blank), ours)


def _modern(source: Source, family: Family) -> Source:
    """Today's names for those of older folders: bodies saved alone leave out the first part
    (`h.0...` for `transformer.h.0...`), BERT's norms say gamma and beta, and a family may have spellings of its own."""
    names = {n: n.replace("LayerNorm.gamma", "LayerNorm.weight") for n in source}
    names = {n: new.replace("LayerNorm.beta", "LayerNorm.bias") for n, new in names.items()}
    for pattern, written in family.spellings.items():
        names = {n: re.sub(pattern, written, new) for n, new in names.items()}
    if family.base and not any(n.startswith(family.base) for n in names):
        heads = {n.split(".")[0] for table in family.head_rows.values() for n in table}
        bare = {n for n in names if n.split(".")[0] not in heads}
        names = {n: family.base + new if n in bare else new for n, new in names.items()}
    modern = Source({new: source[n] for n, new in names.items()})
    modern.folder = source.folder
    return modern


def _settle(config: Any, family: Family, source: Source) -> tuple[Any, set[str]]:
    """What only the tensors tell: whether a bare body has a pooler, how many MTP layers there are, whether what could
    be tied is. Returns the config and the tensors that merely repeat another."""
    ours = to_dict(config)
    skip = set()
    if family.pooler and ours["head"] is None and family.pooler in source:
        put(ours, "pooler", "tanh")
    if family.mtp is not None and isinstance(config.head, LM):
        depth = family.mtp_depth(source, config.tower.layers)
        put(ours, "mtp", to_dict(replace(family.mtp, depth=depth)) if depth else None)
    for name, twins, switch in family.twins:
        if name not in source or (switch and get(ours, switch) is False):
            continue
        shape = source[name].shape
        twin = next((t for t in twins if t in source and source[t].shape == shape), "")
        if twin and torch.equal(*source.borrow([name, twin])):
            skip.add(name)
        elif switch:
            put(ours, switch, False)
    return from_dict(type(config), ours), skip


def _empty(config: Any, theirs: Data) -> Model:
    """The model without memory for its weights. Their random start is skipped: on the meta device
    it would do nothing but import torch's compiler."""

    def large() -> str:
        sizes = [key for key, value in theirs.items() if isinstance(value, int) and value > HUGE]
        return said(theirs, sizes) or "no model has these sizes"

    with blaming(large), torch.device("meta"), _NoStart():
        return config.make()


class _NoStart(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("normal_", "uniform_", "zeros_", "ones_"):
            return args[0] if args else (kwargs or {}).get("tensor")
        return func(*args, **(kwargs or {}))


def plan(model: Model, family: Family | None, theirs: Data | None = None) -> list[Step]:
    """Which tensors of theirs are which of ours, for this model and their config (the folder's)."""
    shapes = plain_shapes(model)
    if family is None:
        return [Step([name], [name], [shape]) for name, shape in shapes.items()]
    head = model.config.head
    tables = [family.rows, family.head_rows[head.kind] if head is not None else {}]
    theirs = getattr(model.origin, "config", {}) if theirs is None else theirs
    inner = theirs.get("inner_group_num") or 1
    rows = [step for table in tables for step in steps(table, shapes, model.config, inner)]
    covered = [name for step in rows for name in step.ours]
    assert sorted(covered) == sorted(shapes), set(covered) ^ set(shapes)
    return rows


def _check(steps: list[Step], source: Source) -> list[str]:
    """Every tensor is there and has its shape; returns those that no rule names."""
    wanted = {n: shape for s in steps for n, shape in zip(s.theirs, s.their_shapes(), strict=True)}
    left = [name for name in source if name not in wanted]
    whole = {name for s in steps for name in s.theirs if s.op.whole}
    cut = {name for s in steps for name in s.theirs if s.op.cut}
    for name, shape in wanted.items():
        if name not in source:
            hint = _near(name, left) or f"{len(left)} are left over, none with a name like it"
            raise UsageError(f"tensor {name} is missing from the weights; {hint}")
        stored = source[name].shape
        if stored[name in cut :] != shape[name in cut :]:
            raise UsageError(f"tensor {name} has shape {stored}, the config asks for {shape}")
        counts = source[name].dtype is torch.int64 and name in whole
        if (kind := source[name].dtype) not in FLOATS and not counts:
            known = f"weights must be one of {', '.join(map(dtype_name, FLOATS))}"
            but = "(float8 only with quantization_config and its scales)"
            raise UsageError(f"tensor {name} is stored as {dtype_name(kind)}; {known} {but}")
    for s in (s for s in steps if s.op.cut):
        rows = sum(source[name].shape[0] for name in s.theirs)
        if rows != sum(shape[0] for shape in s.shapes):
            raise UsageError(
                f"tensors {', '.join(s.theirs)} have {rows} rows, not as many as the config asks for"
            )
    return left


def _near(name: str, known: Iterable[str]) -> str:
    """`did you mean ...?`, or nothing: lists of tensors are too long to read."""
    hint = nearest(name, islice(known, 10_000))
    return hint if hint.startswith("did") else ""


def _carry(
    left: list[str], source: Source, family: Family | None, model: Model, steps: list[Step]
) -> dict[str, Tensor]:
    """Tensors that the model does not use, for `save`; what has no place at all is refused."""
    layers = getattr(getattr(model.config, "tower", None), "layers", 0)
    derived, carried = (family.derived, family.carried) if family is not None else ((), ())
    tensors = {}
    for name in left:
        if any(re.fullmatch(p, name) for p in derived):
            continue
        if not any(re.fullmatch(p.replace("{layers}", str(layers)), name) for p in carried):
            what = "the model" if family is None else f"a {model.origin.architecture}"
            hint = _near(name, (n for step in steps for n in step.theirs))
            hint = hint or (family and "none of its tensors has a name like it") or ""
            raise UsageError(f"tensor {name} has no place in {what}; {hint}".rstrip("; "))
        tensors[name] = source[name].read(None)
    return tensors


def wide_names(model: Model) -> set[str]:
    """Parameters whose modules say that they stay float32 in a model of half precision."""
    return {
        f"{name}.{p}" for name, module in model.named_modules() for p in getattr(module, "wide", ())
    }


def type_of(name: str, wide: set[str], dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if name in wide and dtype.itemsize == 2 else dtype


def cast(model: Model, dtype: torch.dtype | None) -> Model:
    """The model in another type, as `load` would have given it."""
    if dtype is not None:
        wide = wide_names(model)
        for name, p in model.named_parameters():
            p.data = p.data.to(type_of(name, wide, dtype))
    return model


def widen(model: Model, device: torch.device | None = None) -> str:
    """Have a model that computes on a CPU (by `device`, or where it is) which does not multiply numbers of its type do
    so in float32, many times faster. Says so in a sentence; nothing where nothing had to change. `save` writes the
    stored types again while that loses nothing."""
    first = next(model.parameters())
    if (device or first.device).type != "cpu" or is_fast(first.dtype):
        return ""
    model.origin.stored = {name: p.dtype for name, p in model.named_parameters()}
    name = dtype_name(first.dtype)
    cast(model, torch.float32)
    return f"the weights are {name}, which this CPU does not multiply: they are computed with in float32"


def _saved_types(model: Model, origin: Origin) -> dict[str, torch.dtype]:
    """The types that the folder had before `widen`, if the weights are still numbers of these types."""
    kinds = origin.stored
    named = ((p.detach(), kinds.get(n, p.dtype)) for n, p in model.named_parameters() if kinds)
    return kinds if all(torch.equal(p.to(kind).to(p.dtype), p) for p, kind in named) else {}


def _common_type(
    model: Model, steps: list[Step], source: Source, theirs: Data
) -> torch.dtype | None:
    """None where all weights are stored in one type; else the one that the config says, or the widest. Weights in 8
    bits follow the others, and become bfloat16 where there are none."""
    wide = wide_names(model)
    used = [source[n] for step in steps if not wide & set(step.ours) for n in step.theirs]
    kinds = {x.dtype for x in used if x.held is None}
    packed = any(x.held is not None for x in used)
    if len(kinds) < 2:
        return next(iter(kinds), torch.bfloat16) if packed else None
    named = getattr(torch, str(theirs.get("dtype") or theirs.get("torch_dtype")), None)
    return named if named in FLOATS else max(kinds, key=lambda kind: kind.itemsize)


def dtype_name(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


def _fill(
    model: Model, steps: list[Step], source: Source, device: Any, dtype: torch.dtype | None
) -> None:
    """Read tensor by tensor into the empty model: at no time is more than one tensor held twice. What needs no change
    is read to its place; anything else is borrowed, and what comes of it copied."""
    # What is tied has several.
    owners: dict[Any, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, p in module._parameters.items():
            owners[p].append((module, name))
    wide = wide_names(model)
    for step in steps:
        mapped = all(source[name].mapped for name in step.theirs)
        plain = (step.op is SAME or mapped) and device is None and dtype is None
        theirs = (
            [source[n].read(None) for n in step.theirs] if plain else source.borrow(step.theirs)
        )
        places = {t.untyped_storage().data_ptr() for t in theirs}
        lent = set() if plain else places
        ours = zip(step.ours, step.load(theirs), quantised.kept(step, source), strict=True)
        for name, tensor, held in ours:
            old = model.get_parameter(name)
            kind = type_of(name, wide, dtype) if dtype else tensor.dtype
            value = torch.empty(0, dtype=kind, device=device or tensor.device)
            if tensor.untyped_storage().data_ptr() in lent:
                value = value.new_empty(tensor.shape).copy_(tensor)
            else:
                value = tensor.to(value)
            new = nn.Parameter(value, requires_grad=old.requires_grad)
            new.mapped = mapped and value.untyped_storage().data_ptr() in places  # type: ignore[attr-defined]
            new.held = held  # type: ignore[attr-defined]
            for module, attribute in owners[old]:
                setattr(module, attribute, new)


# --- saving -------------------------------------------------------------------------------------------------------


def save(
    model: Model, path: str | Path, shard_bytes: int = store.SHARD_BYTES, tell: bool = True
) -> Path:
    """Write config.json, the weights and whatever was carried along; a failed save leaves the old folder whole. Says if
    transformers cannot read it, unless it is for ourselves, as a run's checkpoints are (not `tell`)."""
    path = Path(path)
    if low_ranks(model):
        raise UsageError("this model has LoRA: save_adapter keeps it, or merge(model).save")
    origin = model.origin or Origin(model.family)
    family, theirs, why = express(model, origin)
    named = theirs["architectures"] == [origin.architecture]
    again = _packed_again(model, origin, family) if origin.packing is not None and named else None
    if again is not None:
        return _write(path, {**theirs, **again[0]}, again[1], origin, shard_bytes)
    if origin.packing is not None and tell:
        notice("saved with whole weights: they are no longer what the folder packed, or it is gone")
    if family is None and tell:
        notice(f"saved in {OWN}: {why}")
    kinds, (first, p) = _saved_types(model, origin), next(model.named_parameters())
    theirs = {**theirs, "dtype": dtype_name(kinds.get(first, p.dtype))}
    theirs.pop("torch_dtype", None)
    if family is None:
        theirs["config"] = to_dict(model.config)
    tensors: dict[str, Tensor] = {}
    for step in plan(model, family, theirs):
        ours = [model.get_parameter(name).detach().cpu() for name in step.ours]
        ours = [x.to(kinds.get(n, x.dtype)) for n, x in zip(step.ours, ours, strict=True)]
        for name, tensor in zip(step.theirs, step.save(ours), strict=True):
            tensors[name] = tensor.contiguous()
    if family is not None:
        for name, (first, *_), switch in family.twins if family.apart else ():
            untied = switch == "shared" and theirs.get("tie_word_embeddings") is False
            if untied and name not in tensors:
                tensors[name] = tensors[first].clone()
        if family.name == origin.family:
            tensors.update(origin.tensors)
        if family.heads[theirs["architectures"][0]] is None:
            tensors = {name.removeprefix(family.base): x for name, x in tensors.items()}
    return _write(path, theirs, tensors, origin, shard_bytes)


def _write(
    path: Path, theirs: Data, tensors: Source | dict[str, Tensor], origin: Origin, shard_bytes: int
) -> Path:
    read = None
    if isinstance(tensors, Source):
        source, read = tensors, lambda name: source[name].read(None)
        tensors = {n: torch.empty(x.shape, dtype=x.dtype, device="meta") for n, x in source.items()}
    with store.replacing(path) as folder:
        store.write_json(folder / "config.json", theirs)
        store.write_weights(folder, tensors, shard_bytes, read)
        store.write_carried(folder, origin.files)
    return path


def _packed_again(
    model: Model, origin: Origin, family: Family | None
) -> tuple[Data, Source] | None:
    """What the config says of packed weights, and the folder's own tensors, if the model's are still what these mean.
    They are read and unpacked again, one at a time: nothing is kept of them."""
    packing = origin.packing
    if family is None or packing is None or packing.folder is None or family.name != origin.family:
        return None
    try:
        raw = store.weights(packing.folder)
        said = {packing.key: packing.settings}
        source = _modern(quantised.unpack({**origin.config, **said}, raw)[1], family)
        steps = plan(model, family)
        quantised.lay(source, steps)
        for step in steps:
            if any(name not in source for name in step.theirs):
                return None
            theirs = step.load(source.borrow(step.theirs))
            for name, x in zip(step.ours, theirs, strict=True):
                p = model.get_parameter(name).detach().cpu()
                # As `load` gave it, and `widen` made it.
                if not torch.equal(x.to(origin.stored.get(name, p.dtype)).to(p.dtype), p):
                    return None
    except (UsageError, OSError):
        return None
    return said | ({"dtype": packing.dtype} if packing.dtype else {}), raw


def own_format(model: Model) -> str:
    """That and why a folder of this model is one for Regard alone; nothing where transformers reads it."""
    family, _, why = express(model, model.origin or Origin(model.family))
    return f"{OWN}: {why}" if family is None else ""


def express(model: Model, origin: Origin) -> tuple[Family | None, Data, str]:
    """The family whose words can say this config exactly (its own first), its config, and "". Or None, what stands
    beside our config, and why its own family cannot say it, or that it has none."""
    why = "no family of Hugging Face has such a model"
    for name in dict.fromkeys([origin.family, *FAMILIES]):
        family = FAMILIES.get(name)
        if family is None or type(family.blank) is not type(model.config):
            continue
        known = origin.config if name == origin.family else {}
        for architecture, head in family.heads.items():
            other = origin.architecture in family.heads and architecture != origin.architecture
            if other or getattr(head, "kind", None) != getattr(model.config.head, "kind", None):
                continue
            theirs = {**known, "model_type": name, "architectures": [architecture]}
            unsaid = _unsaid(family, architecture, model.config, theirs)
            if not unsaid:
                return family, theirs, ""
            if name == origin.family:
                why = f"{name} cannot express it ({unsaid})"
    source = FAMILIES.get(origin.family)
    used = source.keys - INERT | set(source.aliases) if source else frozenset()
    theirs = {key: value for key, value in origin.config.items() if key not in used}
    theirs |= {"model_type": NATIVE, "architectures": [type(model).__name__]}
    return None, theirs, why


def _unsaid(family: Family, architecture: str, config: Any, theirs: Data) -> str:
    """Write `config` into `theirs` by the family's rules; what of it is lost when that is read again, if anything."""
    ours = resolved(to_dict(config))
    try:
        for name, r in reversed(family.rules):
            r.write(name, ours, theirs)
        back = to_dict(read_config(theirs, family, architecture))
    except UsageError as error:
        return str(error)
    if "pooler" in back and family.pooler and config.head is None:
        back["pooler"] = config.pooler
    mtp = getattr(config, "mtp", None)
    if mtp is not None and family.mtp == replace(mtp, depth=1):
        back["mtp"] = to_dict(mtp)
    for _, _, switch in family.twins:
        # The stored tensors themselves show it.
        if switch and get(back, switch) is True:
            put(back, switch, get(to_dict(config), switch))
    return _difference(resolved(back), resolved(to_dict(config)))


def _difference(first: Any, second: Any, path: str = "") -> str:
    """The first place where two configs differ, and what the second has there."""
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        inner = (_difference(first[key], second[key], f"{path}.{key}") for key in first)
        return next(filter(None, inner), "")
    return "" if first == second else f"{path[1:]} is {second!r:.60}"


def resolved(data: Any, dim: int | None = None) -> Any:
    """Plain config data with the defaults that depend on other settings written out, and no dropout as a rate of 0."""
    if isinstance(data, list):
        return [resolved(item, dim) for item in data]
    if not isinstance(data, dict):
        return data
    dim = data.get("dim", dim)
    out = {name: resolved(value, dim) for name, value in data.items()}
    if out.get("dropout", 0.0) is None:
        out["dropout"] = 0.0
    if out.get("kind") in ("gqa", "mla") and dim:
        out["head_dim"] = out["head_dim"] or dim // out["heads"]
        out["value_dim"] = out["value_dim"] or out["head_dim"]
        if "kv_heads" in out:
            out["kv_heads"] = out["kv_heads"] or out["heads"]
    return out
