"""Keys of Hugging Face that only make sense together: RoPE and its scaling, what differs by layer,
labels, and a few oddities. Each is a pair of functions, one the inverse of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from regard.checkpoint.rules import ABSENT, Data, Group, get, need, put, wrong

# Several of theirs may mean one of ours; the first of them is written.
ACTIVATIONS = {name: name for name in ("relu", "gelu", "silu", "tanh")}
ACTIVATIONS |= dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_tanh")
ACTIVATIONS |= {"gelu_python": "gelu", "swish": "silu"}

# --- RoPE ---------------------------------------------------------------------------------------------------------

_ORIGINAL = "original_max_position_embeddings"
# rope_type -> their key -> our field
_SCALING: dict[str, dict[str, str]] = {
    "linear": dict(factor="factor"),
    "llama3": dict(factor="factor", low_freq_factor="low", high_freq_factor="high")
    | {_ORIGINAL: "original_len"},
    "yarn": dict(factor="factor", beta_fast="fast", beta_slow="slow", truncate="truncated")
    | dict(attention_factor="attention_factor", mscale="mscale", mscale_all_dim="mscale_all")
    | {_ORIGINAL: "original_len"},
    "longrope": dict(factor="factor", short_factor="short", long_factor="long")
    | {"attention_factor": "attention_factor", _ORIGINAL: "original_len"},
}
# What may be missing, and what it means then.
_OPTIONAL: Data = dict(beta_fast=32.0, beta_slow=1.0, truncate=True)
_OPTIONAL |= dict.fromkeys(("attention_factor", "mscale", "mscale_all_dim"))


def _rope_of(theirs: Data, renamed: Mapping[str, str]) -> Data:
    """What they say of a RoPE, in our words: base and share where they say one, and the scaling."""
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(theirs.get(key), dict | None):
            raise wrong(f"{key} is {theirs[key]!r}; it must be an object")
    given = dict(theirs.get("rope_parameters") or theirs.get("rope_scaling") or {})
    base = given.pop("rope_theta", None) or theirs.get("rope_theta")
    kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
    given.pop("type", None)
    kind = renamed.get(kind, kind)
    share = given.pop("partial_rotary_factor", theirs.get("partial_rotary_factor"))
    scaling: Data | None = None
    if kind != "default":
        if kind not in _SCALING:
            raise wrong(f"rope_type is {kind!r}; known: default, {', '.join(_SCALING)}")
        scaling = {"kind": kind}
        whole = theirs.get("max_position_embeddings")
        original = given.get(_ORIGINAL) or theirs.get(_ORIGINAL) or whole
        missing = {**_OPTIONAL, _ORIGINAL: original}
        if kind == "longrope":
            missing["factor"] = whole and whole / original
        for key, name in _SCALING[kind].items():
            value = given.pop(key, None)
            if value is None and key not in missing:
                raise wrong(f"rope_parameters.{key} is missing; {kind} scaling needs it")
            scaling[name] = missing[key] if value is None else value
    if given:
        raise wrong(f"rope_parameters.{next(iter(given))} is not known for {kind} RoPE")
    said = {"base": base and float(base), "partial": share}
    return {name: value for name, value in said.items() if value} | {"scaling": scaling}


def _rope_words(rope: Data) -> Data:
    """Our RoPE as their rope_parameters."""
    scaling = rope["scaling"] or {"kind": "default"}
    out: Data = {"rope_type": scaling["kind"], "rope_theta": rope["base"]}
    if rope["partial"] != 1:
        out["partial_rotary_factor"] = rope["partial"]
    for key, name in _SCALING.get(scaling["kind"], {}).items():
        if scaling[name] is not None:
            out[key] = scaling[name]
    return out


def _same_rope(said: Data, rope: Data) -> bool:
    return {"partial": 1, **said} == {name: rope[name] for name in ("base", "partial", "scaling")}


def rope_at(
    place: str,
    base: str = "rope_theta",
    share: str = "",
    renamed: Mapping[str, str] | None = None,
    **missing: Any,
) -> Group:
    """The RoPE of the attention at this place of ours. `base` and `share` are their older keys for them (no share:
    heads turn whole), `renamed` their other words for a rope_type, `missing` what missing keys mean."""

    def words(theirs: Data) -> Data:
        said = {**missing, **{k: v for k, v in theirs.items() if v is not None}}
        said |= {"rope_theta": said.get(base)}
        said |= {"partial_rotary_factor": said.get(share)} if share else {}
        out = _rope_of(said, renamed or {})
        if not share and out.get("partial", 1) != 1:
            raise wrong(f"partial_rotary_factor is {out['partial']}, this family turns whole heads")
        return out

    def read(theirs: Data, ours: Data) -> None:
        rope, said = get(ours, place), words(theirs)
        if isinstance(rope, dict):
            put(ours, place, {**rope, **said})

    def write(ours: Data, theirs: Data) -> None:
        rope = get(ours, place)
        if not isinstance(rope, dict) or _same_rope(words(theirs), rope):
            return
        for old in (base, share, "rope_scaling"):
            theirs.pop(old, None)
        theirs["rope_parameters"] = _rope_words(rope)

    names = ["rope_parameters", "rope_scaling", base, share or "partial_rotary_factor"]
    return Group((*names, "original_max_position_embeddings"), read, write)


def ropes_by_layer(
    full: tuple[str, float], sliding: tuple[str, float], scaled: str = "full_attention"
) -> Group:
    """A RoPE for the layers that see all and one for those that slide, as `sliding_layers` lists them. `full` and
    `sliding` are older keys for their bases and what missing ones mean, `scaled` says whose scaling an older
    rope_scaling is."""
    bases = {"full_attention": full, "sliding_attention": sliding}
    places = {word: f"tower.attention.{i}.rope" for i, word in enumerate(bases)}

    def words(theirs: Data, word: str) -> Data:
        nested = (theirs.get("rope_parameters") or {}).get(word)
        older = theirs.get("rope_scaling") if word in scaled and nested is None else None
        key, default = bases[word]
        base = theirs.get(key) or default
        said = {"rope_parameters": nested, "rope_scaling": older, "rope_theta": base}
        return _rope_of(theirs | said, {})

    def read(theirs: Data, ours: Data) -> None:
        for word, place in places.items():
            put(ours, place, {**get(ours, place), **words(theirs, word)})

    def write(ours: Data, theirs: Data) -> None:
        ropes = {word: get(ours, place) for word, place in places.items()}
        ropes = {word: rope for word, rope in ropes.items() if isinstance(rope, dict)}
        if all(_same_rope(words(theirs, word), rope) for word, rope in ropes.items()):
            return
        for old in (*keys, "rope_scaling"):
            theirs.pop(old, None)
        theirs["rope_parameters"] = {word: _rope_words(rope) for word, rope in ropes.items()}

    keys = [key for key, _ in bases.values() if key]
    return Group(("rope_parameters", "rope_scaling", *keys), read, write)


ROPE = rope_at("tower.attention.rope")

# --- what differs from layer to layer -----------------------------------------------------------------------------


def by_layer(
    part: str,
    names: Sequence[str],
    words: Sequence[str],
    kinds_of: Callable[[Data, int], list[str]],
    which: Callable[[Data], int],
    write: Callable[[list[str], list[Data | None], Data], None] | None = None,
) -> Group:
    """A `part` of the tower ("attention" or "ffn") of which the blank lists one config for each of `words`: rules fill
    in `tower.attention.0` and `tower.attention.1`, or both as `tower.attention`. Out goes one per layer.

    `kinds_of`: the word for each layer, from their keys and the number of layers; `which` word a config of ours is;
    `write`: those words, and our config for each (None where no layer is of it), into their keys; without it the first
    of `names` lists the words."""

    def read(theirs: Data, ours: Data) -> None:
        tower = ours["tower"]
        each = [tower[part][words.index(kind)] for kind in kinds_of(theirs, tower["layers"])]
        tower[part] = each[0] if all(one == each[0] for one in each) else each

    def write_back(ours: Data, theirs: Data) -> None:
        tower = ours["tower"]
        each = tower[part] if isinstance(tower[part], list) else [tower[part]] * tower["layers"]
        kinds = [words[which(one)] for one in each]
        first = dict(zip(reversed(kinds), reversed(each), strict=True))
        tower[part] = [first.get(word) for word in words]
        if write is not None:
            write(kinds, tower[part], theirs)
        elif not _says(theirs, names[0], kinds, kinds_of):
            theirs[names[0]] = kinds

    return Group(tuple(names), read, write_back, last=True)


def _says(theirs: Data, key: str, kinds: list[str], kinds_of: Callable[..., list[str]]) -> bool:
    """Whether their keys mean these kinds already."""
    layers = len(kinds)
    return len(theirs.get(key) or kinds) == layers and kinds_of(theirs, layers) == kinds


def listed(theirs: Data, key: str, words: Sequence[str], layers: int, default: list[str]) -> Any:
    """The kinds of layers as their `key` lists them, or by default."""
    kinds = theirs.get(key) or default
    if len(kinds) != layers or set(kinds) - set(words):
        raise wrong(f"{key} must list {layers} times {' or '.join(words)}, got {kinds}")
    return kinds


def sliding_layers(
    default: Callable[[Data, int], list[bool]],
    window: int | None = None,
    switch: str = "",
    more: str = "",
    key: str = "sliding_window",
    both_ways: bool = False,
) -> Group:
    """Layers that see all and layers that see a window: `attention` of the blank lists both. `default`: whether each
    layer slides where `layer_types` is missing (`more`: the keys that it looks at); `window`: what a missing
    sliding_window means; `switch`: the key that turns it on, if there is one; `key`: where it is not sliding_window;
    `both_ways`: it counts the tokens on either side together, without the query's own."""
    words = ("full_attention", "sliding_attention")
    keys = [key, *([switch] if switch else [])]

    def window_of(theirs: Data) -> int | None:
        size = theirs.get(key, window) if theirs.get(switch, not switch) else None
        return size // 2 + 1 if both_ways and size is not None else size

    def kinds_of(theirs: Data, layers: int) -> list[str]:
        on = window_of(theirs) is not None
        kinds = [words[on and slides] for slides in default(theirs, layers)]
        kinds = listed(theirs, "layer_types", words, layers, kinds)
        if words[1] in kinds and not on:
            raise wrong(f"layer_types slides, but {' or '.join(keys)} is off")
        return kinds

    def write(kinds: list[str], variants: list[Data | None], theirs: Data) -> None:
        size = variants[1] and variants[1]["window"]
        if _says(theirs, "layer_types", kinds, kinds_of) and size in (None, window_of(theirs)):
            return
        theirs["layer_types"] = kinds
        if switch:
            theirs[switch] = size is not None
        if switch or size is not None:
            theirs[key] = 2 * (size - 1) if both_ways and size else size

    names = ["layer_types", *keys, *more.split()]
    group = by_layer(
        "attention", names, words, kinds_of, lambda one: need(one, "window") is not None, write
    )

    def read(theirs: Data, ours: Data) -> None:
        put(ours, "tower.attention.1.window", window_of(theirs))
        group.reader(theirs, ours)

    return replace(group, reader=read)


def experts_by_layer(first_dense: int) -> Group:
    """`ffn` of the blank lists the dense one and the experts. `first_dense`: how many layers are
    dense where no key says it."""
    words = ("dense", "sparse")

    def kinds_of(theirs: Data, layers: int) -> list[str]:
        first = min(theirs.get("first_k_dense_replace", first_dense) or 0, layers)
        default = ["dense"] * first + ["sparse"] * (layers - first)
        return listed(theirs, "mlp_layer_types", words, layers, default)

    def write(kinds: list[str], variants: list[Data | None], theirs: Data) -> None:
        theirs["first_k_dense_replace"] = [*kinds, "sparse"].index("sparse")
        if "mlp_layer_types" in theirs or theirs["model_type"] == "deepseek_v32":
            theirs["mlp_layer_types"] = kinds

    names = ("first_k_dense_replace", "mlp_layer_types")
    return by_layer("ffn", names, words, kinds_of, lambda ffn: ffn["kind"] == "moe", write)


def expert_groups(limited: str | None, default: tuple[int, int]) -> Group:
    """Expert groups, `default` where they are missing. V2 looks at them only if topk_method is
    `limited`; V3 (None) always does."""

    def read(theirs: Data, ours: Data) -> None:
        experts = ours["tower"]["ffn"][1]
        on = limited is None or theirs.get("topk_method") == limited
        experts["groups"] = _count(theirs, "n_group", default[0]) if on else 1
        experts["active_groups"] = _count(theirs, "topk_group", default[1]) if on else 1

    def write(ours: Data, theirs: Data) -> None:
        experts = ours["tower"]["ffn"][1]
        if experts is None or (limited is not None and experts["groups"] == 1):
            return
        theirs["n_group"], theirs["topk_group"] = experts["groups"], experts["active_groups"]
        if limited is not None:
            theirs["topk_method"] = limited

    return Group(("n_group", "topk_group", "topk_method"), read, write)


def _count(theirs: Data, key: str, default: int) -> int:
    """A number of groups; null is one."""
    value = theirs.get(key, default)
    if value is not None and (type(value) is not int or value < 1):
        raise wrong(f"{key} is {value!r}; it must be a whole number from 1 on")
    return value or 1


# --- what transformers reads of any config, whether its class defines it or not ---------------------------------


def _read_causal(theirs: Data, ours: Data) -> None:
    ours["tower"]["causal"] = theirs.get("is_causal") is not False
    if not ours["tower"]["causal"] and theirs.get("sliding_window"):
        raise wrong("is_causal is False; with sliding_window Regard can only do True")


def _write_causal(ours: Data, theirs: Data) -> None:
    if ours["tower"]["causal"] != (theirs.get("is_causal") is not False):
        theirs["is_causal"] = ours["tower"]["causal"]


CAUSAL = Group(("is_causal",), _read_causal, _write_causal)


# --- labels and oddities ------------------------------------------------------------------------------------------


def _read_labels(theirs: Data, ours: Data) -> None:
    names = theirs.get("id2label")
    put(ours, "head.labels", len(names) if names else theirs.get("num_labels") or 2)


def _write_labels(ours: Data, theirs: Data) -> None:
    labels = get(ours, "head.labels")
    if labels is ABSENT or len(theirs.get("id2label") or {0: 0, 1: 1}) == labels:
        return
    theirs["id2label"] = {str(i): f"LABEL_{i}" for i in range(labels)}
    theirs["label2id"] = {f"LABEL_{i}": i for i in range(labels)}


def head_dropout(**keys: tuple[str, str | float]) -> Group:
    """The dropout of a head, by its kind: its key, and what a missing or null one means: a number, or the value of
    another key, which is 0.1 where it is missing too. Kinds that are not named have none."""

    def of(theirs: Data, kind: Any) -> float:
        name, default = keys[kind]
        if theirs.get(name) is not None:
            return theirs[name]
        return theirs.get(default, 0.1) if isinstance(default, str) else default

    def read(theirs: Data, ours: Data) -> None:
        if get(ours, "head.kind") in keys:
            put(ours, "head.dropout", of(theirs, ours["head"]["kind"]))

    def write(ours: Data, theirs: Data) -> None:
        kind = get(ours, "head.kind")
        if kind in keys and ours["head"]["dropout"] != of(theirs, kind):
            theirs[keys[kind][0]] = ours["head"]["dropout"]

    return Group(tuple(dict.fromkeys(name for name, _ in keys.values())), read, write)


LABELS = Group(("id2label", "label2id", "num_labels"), _read_labels, _write_labels)


def ids_below(last: int, *names: str) -> Group:
    """What transformers takes for missing ids, up to `last`, would lie outside a smaller vocabulary: they are null."""

    def write(ours: Data, theirs: Data) -> None:
        if need(ours, "embedding.vocab") <= last:
            for name in names:
                theirs.setdefault(name, None)

    return Group(names, lambda *_: None, write)
