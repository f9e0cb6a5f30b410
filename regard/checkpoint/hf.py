"""Hugging Face folders in, from disk or from a model in memory: the tables of hf_tables.py run forwards."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.checkpoint.hf_tables import FAMILIES, INERT
from regard.checkpoint.rules import SAME, Data, Family, Step, get, put
from regard.checkpoint.store import Memory, Renamed, Source, Weights, read_json
from regard.config import UsageError, from_dict, nearest, to_dict
from regard.models import CONFIGS, Model
from regard.models.start import Start, start_of

NATIVE = "regard"
CARRIED_FILES = """tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json merges.txt
vocab.txt spiece.model sentencepiece.bpe.model tokenizer.model source.spm target.spm generation_config.json
preprocessor_config.json processor_config.json chat_template.jinja chat_template.json""".split()  # noqa: SIM905


@dataclass
class Origin:
    """What a folder said beyond what the model computes with."""

    family: str
    architecture: str = ""
    config: Data = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    base: Any = None  # the folder itself, as adapter.py names it
    heads: dict[str, Any] = field(default_factory=dict)  # heads for its body, by kind
    start: Start | None = None  # how new weights on it are drawn


def load(
    path: str | Path, device: str | torch.device | None = None, dtype: torch.dtype | None = None
) -> Model:
    """A model from a Hugging Face folder (or one that `model.save` wrote), in evaluation mode. The weights keep the
    type they are stored in unless `dtype` says otherwise."""
    folder = Path(path)
    if not folder.is_dir():
        raise UsageError(
            f"{folder} is no folder; give the path of a model folder (with config.json and weights)"
        )
    theirs = read_json(folder / "config.json")
    if "auto_map" in theirs:
        raise UsageError(
            f"{folder / 'config.json'} has auto_map: it asks to run code that comes with the model. Regard never does; "
            f"if the model is of a known type, delete that key. Known: {', '.join(FAMILIES)}"
        )
    weights = Weights(folder)
    model = read(theirs, weights, device, dtype)
    for name in CARRIED_FILES:
        if (folder / name).is_file():
            model.origin.files[name] = (folder / name).read_bytes()
    return model


def from_hf(module: nn.Module) -> Model:
    """The same from a transformers model in memory."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        raise UsageError(
            "from_hf needs transformers >= 5; or save the model and use regard.load(folder)"
        ) from None
    theirs = json.loads(module.config.to_json_string(use_diff=False))  # type: ignore[operator, union-attr]
    theirs["architectures"] = [type(module).__name__]
    tensors = revert_weight_conversion(module, module.state_dict())  # type: ignore[arg-type]
    model = read(theirs, Memory(tensors), None, None)
    if getattr(module, "generation_config", None) is not None:
        text = module.generation_config.to_json_string()  # type: ignore[union-attr, operator]
        model.origin.files["generation_config.json"] = text.encode()
    return model


def read(theirs: Data, source: Source, device: Any, dtype: torch.dtype | None) -> Model:
    """Their config and tensors -> our model."""
    kind = theirs.get("model_type")
    if theirs.get("quantization_config"):
        raise UsageError(
            "config.json has quantization_config: its weights are packed, and Regard reads plain ones. "
            "Unpack them first, for example with transformers: from_pretrained(...).dequantize()"
        )
    _check_counts(theirs, sum(1 for _ in source))
    if kind == NATIVE:
        config = read_native(theirs)
        model, family = _empty(config), None
        model.origin = Origin(NATIVE, config={k: v for k, v in theirs.items() if k in INERT})
    else:
        if not isinstance(kind, str) or kind not in FAMILIES:
            what = (
                "has no model_type"
                if kind is None
                else f"has model_type {kind!r}, which is not known"
            )
            raise UsageError(f"config.json {what}; known: {', '.join([*FAMILIES, NATIVE])}")
        family = FAMILIES[kind]
        architecture = _architecture(theirs, family)
        source = _modern(source, family)
        config, skip = _settle(read_config(theirs, family, architecture), family, source)
        model = _empty(config)
        model.origin = Origin(kind, architecture, theirs)
        model.origin.heads = _heads(theirs, family)
        model.origin.start = _start(theirs, kind)
    steps = plan(model, family)
    left = _check(steps, source, family, model)
    if family is not None:
        left = [name for name in left if name not in skip]
        model.origin.tensors = _carry(left, source, family, model)
    elif left:
        hint = _near(left[0], (n for step in steps for n in step.theirs))
        raise UsageError(f"tensor {left[0]} has no place in the model; {hint}".rstrip("; "))
    _fill(model, steps, source, device, dtype)
    return model.eval()


COUNTS = """layers n_layer n_layers num_layers num_hidden_layers num_decoder_layers encoder_layers decoder_layers
experts num_experts n_routed_experts num_local_experts""".split()  # noqa: SIM905


def _check_counts(theirs: Any, tensors: int) -> None:
    """A layer, an expert has a tensor at least: without this check a wrong number could fill the memory."""
    for key, value in theirs.items() if isinstance(theirs, dict) else enumerate(theirs):
        if isinstance(value, (dict, list)):
            _check_counts(value, tensors)
        elif key in COUNTS and isinstance(value, int) and value > tensors:
            raise UsageError(
                f"config.json: {key} is {value:,}, but the weights hold {tensors:,} tensors in all"
            )


def read_native(theirs: Data) -> Any:
    data = theirs.get("config")
    kind = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in CONFIGS:
        raise UsageError(f"config.json: config.kind is {kind!r}; known: {', '.join(CONFIGS)}")
    with _blaming("these settings do not fit together"):
        return from_dict(CONFIGS[kind], data)  # type: ignore[arg-type]


def read_config(theirs: Data, family: Family, architecture: str) -> Any:
    """Their keys -> our config. Every key is used, known to decide nothing, or an error."""
    used = {name for r in family.config for name in r.names}
    for key in theirs:
        if key not in used | INERT:
            hint = _near(key, used | INERT) or nearest(key, used)
            raise UsageError(
                f"config.json: {key!r} is not a key of {family.name} that Regard knows; {hint}"
            )
    ours = to_dict(family.blank)
    ours["head"] = to_dict(family.heads[architecture])
    for r in family.config:
        said = {name: theirs[name] for name in r.names if name in theirs}
        with _blaming(f"cannot use {said}"):
            r.read(theirs, ours)
    with _blaming("these sizes do not fit together"):
        return from_dict(type(family.blank), ours)


def _heads(theirs: Data, family: Family) -> dict[str, Any]:
    """What each head of the family would be on this body, by its kind."""
    found = {}
    for head in family.heads.values():
        ours = to_dict(family.blank) | {"head": to_dict(head)}
        for r in family.config if head is not None else ():
            r.read(theirs, ours)
        if head is not None:
            found[head.kind] = from_dict(type(head), ours["head"])
    return found


def _start(theirs: Data, family: str) -> Start:
    """How the family starts, with the deviation that the folder says."""
    start = start_of(None, family)
    for key in ("initializer_range", "init_std", "initializer_factor"):
        if theirs.get(key):
            return replace(start, std=float(theirs[key]))
    return start


@contextmanager
def _blaming(what: str) -> Iterator[None]:
    """Whatever a wrong value made go wrong is the config's fault."""
    try:
        yield
    except UsageError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        raise UsageError(f"config.json: {what} ({e!r})") from None


def _architecture(theirs: Data, family: Family) -> str:
    named = theirs.get("architectures") or [next(iter(family.heads))]
    name = named[0] if isinstance(named, list) else named
    if not isinstance(name, str) or name not in family.heads:
        raise UsageError(
            f"config.json: architecture {name!r}; of {family.name}, known: {', '.join(family.heads)}"
        )
    return name


def _modern(source: Source, family: Family) -> Source:
    """Today's names for those of older folders: bodies saved alone leave out the first part (`h.0...` for
    `transformer.h.0...`), and BERT's norms say gamma and beta."""
    names = {n: n.replace("LayerNorm.gamma", "LayerNorm.weight") for n in source}
    names = {n: new.replace("LayerNorm.beta", "LayerNorm.bias") for n, new in names.items()}
    if family.base and not any(n.startswith(family.base) for n in names):
        heads = {r.theirs[0].split(".")[0] for rules in family.head_tensors.values() for r in rules}
        bare = {n for n in names if n.split(".")[0] not in heads}
        names = {n: family.base + new if n in bare else new for n, new in names.items()}
    return Renamed(source, {new: n for n, new in names.items()})


def _settle(config: Any, family: Family, source: Source) -> tuple[Any, set[str]]:
    """What only the tensors tell: whether a bare body has a pooler, whether what could be tied is. Returns the config
    and the tensors that merely repeat another."""
    ours, skip = to_dict(config), set()
    if family.pooler and ours["head"] is None and family.pooler in source:
        put(ours, "pooler", "tanh")
    for name, twins, switch in family.twins:
        if name not in source:
            continue
        twin = next((t for t in twins if t in source), None)
        if switch and get(ours, switch) is False:
            continue
        same = twin is not None and source.shape(name) == source.shape(twin)
        if same and torch.equal(*source.borrow([name, str(twin)])):
            skip.add(name)
        elif switch:
            put(ours, switch, False)
    return from_dict(type(config), ours), skip


def _empty(config: Any) -> Model:
    """The model without memory for its weights. Their random start is skipped: on the meta device it would do nothing
    but import torch's compiler."""
    with _blaming("no model has these sizes"), torch.device("meta"), _NoStart():
        return config.make()


class _NoStart(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("normal_", "uniform_", "zeros_", "ones_"):
            return args[0] if args else (kwargs or {}).get("tensor")
        return func(*args, **(kwargs or {}))


def plan(model: Model, family: Family | None) -> list[Step]:
    """Which tensors of theirs are which of ours, for this model."""
    shapes = {name: p.shape for name, p in model.named_parameters()}
    if family is None:
        return [Step([name], [name], [shape], SAME) for name, shape in shapes.items()]
    head = () if model.config.head is None else family.head_tensors[model.config.head.kind]
    steps = [step for r in (*family.tensors, *head) for step in r.steps(shapes)]
    covered = [name for step in steps for name in step.ours]
    assert sorted(covered) == sorted(shapes), set(covered) ^ set(shapes)
    return steps


def _check(steps: list[Step], source: Source, family: Family | None, model: Model) -> list[str]:
    """Every tensor is there and has its shape; returns those that no rule names."""
    wanted = {
        name: shape
        for step in steps
        for name, shape in zip(step.theirs, step.their_shapes(), strict=True)
    }
    left = [name for name in source if name not in wanted]
    for name, shape in wanted.items():
        if name not in source:
            hint = _near(name, left) or f"{len(left)} are left over, none with a name like it"
            raise UsageError(f"tensor {name} is missing from the weights; {hint}")
        if source.shape(name) != shape:
            raise UsageError(
                f"tensor {name} has shape {source.shape(name)}, the config asks for {shape}"
            )
    return left


def _near(name: str, known: Iterable[str]) -> str:
    """`did you mean ...?`, or nothing: lists of tensors are too long to read."""
    hint = nearest(name, known)
    return hint if hint.startswith("did") else ""


def _carry(left: Iterable[str], source: Source, family: Family, model: Model) -> dict[str, Tensor]:
    layers = getattr(getattr(model.config, "tower", None), "layers", 0)
    carried = {}
    for name in left:
        if any(re.fullmatch(p, name) for p in family.derived):
            continue
        if not any(re.fullmatch(p.replace("{layers}", str(layers)), name) for p in family.carried):
            names = [n for step in plan(model, family) for n in step.theirs]
            hint = _near(name, names) or "none of its tensors has a name like it"
            raise UsageError(f"tensor {name} has no place in a {model.origin.architecture}; {hint}")
        carried[name] = source.read(name)
    return carried


def _fill(
    model: Model, steps: list[Step], source: Source, device: Any, dtype: torch.dtype | None
) -> None:
    """Read tensor by tensor into the empty model: at no time is more than one tensor held twice. What needs no change
    is read to its place; anything else is borrowed, and what comes of it copied."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                owners.setdefault(id(p), []).append((module, name))
    for step in steps:
        plain = step.op is SAME and device is None and dtype is None
        theirs = [source.read(step.theirs[0])] if plain else source.borrow(step.theirs)
        lent = set() if plain else {t.untyped_storage().data_ptr() for t in theirs}
        for name, tensor in zip(step.ours, step.op.load(theirs, step.shapes), strict=True):
            old = model.get_parameter(name)
            kind = dtype if dtype and tensor.is_floating_point() else tensor.dtype
            kept = torch.empty(0, dtype=kind, device=device or tensor.device)
            if tensor.untyped_storage().data_ptr() in lent:
                kept = kept.new_empty(tensor.shape).copy_(tensor)
            else:
                kept = tensor.to(kept)
            new = nn.Parameter(kept, requires_grad=old.requires_grad and kept.is_floating_point())
            for module, attribute in owners[id(old)]:
                setattr(module, attribute, new)
