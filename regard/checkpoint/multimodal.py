"""The language model of a folder that reads pictures or sounds too, read as a folder of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from regard.checkpoint.family import Family
from regard.checkpoint.rules import Data, wrong
from regard.checkpoint.store import Source
from regard.errors import notice
from regard.layers import LM, Classify


@dataclass(frozen=True)
class Multimodal:
    """A model_type of theirs that holds a language model of one of our families, computed by it as by a folder of that
    family. Rows stand in families/ beside those; `save` writes a plain folder of the family."""

    name: str
    # The family of a text config that names none.
    text: str
    # Where that config stands.
    key: str = "text_config"
    # What keys that it lacks mean, where a folder of the family itself must have them.
    missing: Data = field(default_factory=dict)
    # What names of its body begin with, where those of the family begin with its `base`; the first that fits.
    prefixes: tuple[str, ...] = (
        "language_model.model.",
        "model.language_model.",
        "language_model.",
    )


# Keys that the whole folder has for its language model too.
_SHARED = """dtype torch_dtype quantization_config tie_word_embeddings bos_token_id eos_token_id
pad_token_id id2label label2id num_labels""".split()  # noqa: SIM905
# What a class of theirs ends with, and our head of it.
_HEADS = {
    "ForConditionalGeneration": LM, "ForCausalLM": LM, "ForSequenceClassification": Classify,
    "Model": type(None),
}  # fmt: skip


def language_model(
    theirs: Data, source: Source, rows: Mapping[str, Multimodal], families: Mapping[str, Family]
) -> tuple[Data, Source]:
    """Config and tensors of the language model alone, and a notice of what is left; of any other folder as they are."""
    kind = theirs.get("model_type")
    row = rows.get(kind) if isinstance(kind, str) else None
    if row is None:
        return theirs, source
    text = theirs.get(row.key) or {}
    if not isinstance(text, dict):
        raise wrong(f"{row.key} is {text!r:.80}; it must be an object")
    name = text.get("model_type") or row.text
    family = families.get(name) if isinstance(name, str) else None
    if family is None:
        raise wrong(f"{row.key} has model_type {name!r}, which is not known; expected {row.text}")
    missing = row.missing if name == row.text else {}
    text = {**missing, **text, **{k: theirs[k] for k in _SHARED if theirs.get(k) is not None}}
    text |= {"model_type": name, "architectures": [_architecture(theirs, family)]}
    names = {n: new for n in source if (new := _renamed(n, row, family))}
    parts = Counter(_part(n) for n in source.keys() - names.keys())
    left = ", ".join(f"{part} ({count} tensors)" for part, count in sorted(parts.items()))
    notice(
        f"this {kind} model is read as its language model alone, a {name}; left out: {left or 'nothing'}. "
        f"save writes a plain {name} folder"
    )
    return text, Source({new: source[n] for n, new in names.items()})


def _architecture(theirs: Data, family: Family) -> str:
    """The class of the family that computes what the language model in the named one does."""
    named = theirs.get("architectures") or ["ForConditionalGeneration"]
    said = named[0] if isinstance(named, list) else named
    for end, head in _HEADS.items():
        if isinstance(said, str) and said.endswith(end):
            fitting = [a for a, each in family.heads.items() if type(each) is head]
            if fitting:
                return fitting[0]
    known = ", ".join(f"...{end}" for end in _HEADS)
    raise wrong(f"architectures has {said!r}; of {theirs['model_type']}, known: {known}")


def _renamed(name: str, row: Multimodal, family: Family) -> str:
    """The family's name for a tensor of its language model; nothing for any other."""
    heads = {n.split(".")[0] for table in family.head_rows.values() for n in table}
    rest = next((name.removeprefix(p) for p in row.prefixes if name.startswith(p)), "")
    if not rest:
        return name if name.split(".")[0] in heads else ""
    return rest if rest.split(".")[0] in heads else family.base + rest


def _part(name: str) -> str:
    """The part of their model that a tensor is of: model.vision_tower.encoder... is of vision_tower."""
    return name.removeprefix("model.").split(".")[0]
