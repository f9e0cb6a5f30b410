"""Models out to Hugging Face folders: the tables of hf_tables.py run backwards.

A model that no family can express is saved to the same folder layout with `model_type: "regard"`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from regard.checkpoint.families import FAMILIES, INERT
from regard.checkpoint.hf import NATIVE, Origin, plan, read_config
from regard.checkpoint.rules import Data, Family, get, put
from regard.checkpoint.store import SHARD_BYTES, replacing, write_json, write_weights
from regard.config import to_dict
from regard.errors import UsageError, notice
from regard.models import Model
from regard.models.adapt import low_ranks


def save(model: Model, path: str | Path, shard_bytes: int = SHARD_BYTES) -> Path:
    """Write config.json, the weights and whatever was carried along; a failed save leaves the old folder whole."""
    path = Path(path)
    if low_ranks(model):
        raise UsageError(
            "this model has LoRA: save_adapter keeps it small, merge(model).save whole"
        )
    origin = model.origin or Origin(model.family)
    family, theirs, why = _express(model, origin)
    if family is None:
        notice(f"saved in Regard's own format, which transformers does not read: {why}")
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    theirs = {**theirs, "dtype": dtype}
    theirs.pop("torch_dtype", None)
    if family is None:
        theirs["config"] = to_dict(model.config)
    tensors: dict[str, Tensor] = {}
    for step in plan(model, family):
        ours = [model.get_parameter(name).detach().cpu() for name in step.ours]
        for name, tensor in zip(step.theirs, step.save(ours), strict=True):
            tensors[name] = tensor.contiguous()
    if family is not None and family.apart and theirs.get("tie_word_embeddings") is False:
        for name, (first, *_), switch in family.twins:
            if switch == "shared" and name not in tensors:
                tensors[name] = tensors[first].clone()
    if family is not None and family.name == origin.family:
        tensors.update(origin.tensors)
    if family is not None and family.heads[theirs["architectures"][0]] is None:
        tensors = {name.removeprefix(family.base): tensor for name, tensor in tensors.items()}
    with replacing(path) as folder:
        write_json(folder / "config.json", theirs)
        write_weights(folder, tensors, shard_bytes)
        for name, content in origin.files.items():
            (folder / name).write_bytes(content)
    return path


def _express(model: Model, origin: Origin) -> tuple[Family | None, Data, str]:
    """The family whose words can say this config exactly (its own first), its config, and "". Or None, what stands
    beside our config, and why its own family cannot say it, or that it has none."""
    why = "no family of Hugging Face has such a model"
    for name in dict.fromkeys([origin.family, *FAMILIES]):
        family = FAMILIES.get(name)
        if family is None or type(family.blank) is not type(model.config):
            continue
        known = origin.config if name == origin.family else {}
        for architecture, head in family.heads.items():
            if _kind(head) != _kind(model.config.head):
                continue
            if origin.architecture in family.heads and architecture != origin.architecture:
                continue
            theirs = {**known, "model_type": name, "architectures": [architecture]}
            unsaid = _unsaid(family, architecture, model.config, theirs)
            if not unsaid:
                return family, theirs, ""
            if name == origin.family:
                why = f"{name} cannot express it ({unsaid})"
    own = FAMILIES.get(origin.family)
    used = own.keys - INERT | set(own.aliases) if own else set()
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
    for _, _, switch in family.twins:
        if switch and get(back, switch) is True:  # the stored tensors themselves tell
            put(back, switch, get(to_dict(config), switch))
    return _difference(resolved(back), resolved(to_dict(config)))


def _difference(one: Any, two: Any, path: str = "") -> str:
    """The first place where two configs differ, and what the second has there."""
    if isinstance(one, dict) and isinstance(two, dict) and one.keys() == two.keys():
        inner = (_difference(one[key], two[key], f"{path}.{key}") for key in one)
        return next(filter(None, inner), "")
    return "" if one == two else f"{path[1:]} is {two!r:.60}"


def _kind(head: Any) -> str | None:
    return None if head is None else head.kind


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
