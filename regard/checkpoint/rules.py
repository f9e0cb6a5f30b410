"""What the tables of families/ are made of. Every rule runs both ways: Hugging Face's words to ours, and back.

Config rules work on plain nested data (`to_dict` of a config); tensors.py has those for tensors. A rule whose place
does not exist in this model (a head that it lacks) does nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from regard.checkpoint.nested import Nested
from regard.checkpoint.tensors import choices
from regard.errors import UsageError

Data = dict[str, Any]
REQUIRED: Any = object()
ABSENT: Any = object()


def wrong(text: str) -> UsageError:
    return UsageError(f"config.json: {text}")


def get(data: Any, path: str) -> Any:
    """The value at a dotted path, or ABSENT. A number picks from a list; a name asks the first item that has it."""
    name, _, rest = path.partition(".")
    if isinstance(data, list) and name.isdigit():
        value = data[int(name)]
    elif isinstance(data, list):
        values = (get(item, path) for item in data)
        return next((value for value in values if value is not ABSENT), ABSENT)
    elif isinstance(data, dict) and name in data:
        value = data[name]
    else:
        return ABSENT
    return get(value, rest) if rest else value


def put(data: Any, path: str, value: Any) -> None:
    """Set the value at a dotted path, if there is such a place; in every item of a list that no number picks from."""
    name, _, rest = path.partition(".")
    if isinstance(data, list):
        for item in [data[int(name)]] if name.isdigit() else data:
            put(item, rest if name.isdigit() else path, value)
    elif isinstance(data, dict) and name in data:
        if rest:
            put(data[name], rest, value)
        else:
            data[name] = value


def need(data: Any, path: str) -> Any:
    """The value at a dotted path of a config of ours that a rule cannot be written without."""
    value = get(data, path)
    if value is ABSENT:
        raise UsageError(f"the model has no {path}")
    return value


# --- config -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Key:
    """A key of theirs that fills one place of ours, or several (`places`, apart by spaces, or as {a,b}). `default`
    stands in for a missing key, and for a null one unless `null` says otherwise; a function makes it from the other
    keys. `words` translates values, several of theirs may mean one of ours; or it is a function and its inverse. A
    `quiet` key is written where it is not the default."""

    places: str
    default: Any = REQUIRED
    words: Mapping[Any, Any] | tuple[Callable[[Any], Any], Callable[[Any], Any]] | None = None
    null: Any = ABSENT
    quiet: bool = False

    def each(self) -> list[str]:
        return [place for places in self.places.split() for place in choices(places)]

    def value(self, name: str, theirs: Data) -> Any:
        value = theirs.get(name)
        if value is None:
            value = self.default if name not in theirs or self.null is ABSENT else self.null
            value = value(theirs) if callable(value) else value
            if value is REQUIRED:
                raise wrong(f"{name} is missing; a {theirs.get('model_type')} model needs it")
        if self.words is None or value is None:
            return value
        if isinstance(self.words, tuple):
            return self.words[0](value)
        if value not in self.words:
            known = ", ".join(map(str, self.words))
            raise wrong(f"{name} is {value!r}; known: {known}")
        return self.words[value]

    def read(self, name: str, theirs: Data, ours: Data) -> None:
        for place in self.each():
            put(ours, place, self.value(name, theirs))

    def write(self, name: str, ours: Data, theirs: Data) -> None:
        values = (get(ours, place) for place in self.each())
        value = next((v for v in values if v is not ABSENT), ABSENT)
        said = self.quiet or name in theirs
        if value is ABSENT or (said and self.value(name, theirs) == value):
            return
        if isinstance(self.words, tuple):
            value = None if value is None else self.words[1](value)
        elif self.words is not None:
            value = next((k for k, v in self.words.items() if v == value), value)
        theirs[name] = value


@dataclass(frozen=True)
class Fixed:
    """A key that may only have this value, which is also what a missing key means, and a null one
    unless `null` says otherwise."""

    only: Any
    null: Any = ABSENT

    def read(self, name: str, theirs: Data, ours: Data) -> None:
        value = theirs.get(name, self.only)
        if value is None:
            value = self.only if self.null is ABSENT else self.null
        if value != self.only:
            value = theirs[name]
            raise wrong(f"{name} is {value!r}, Regard can only do {self.only!r}")

    def write(self, name: str, ours: Data, theirs: Data) -> None: ...


@dataclass(frozen=True)
class Group:
    """Keys that only make sense together: a pair of functions, each the inverse of the other. A `last` one is read
    after all other rules, and written before them: what it does to layers they need not know."""

    names: tuple[str, ...]
    reader: Callable[[Data, Data], None]
    writer: Callable[[Data, Data], None]
    last: bool = False

    def read(self, name: str, theirs: Data, ours: Data) -> None:
        self.reader(theirs, ours)

    def write(self, name: str, ours: Data, theirs: Data) -> None:
        self.writer(ours, theirs)


def fixed(**only: Any) -> dict[str, ConfigRule]:
    """A `Fixed` for each key."""
    return {name: Fixed(value) for name, value in only.items()}


ConfigRule = Key | Fixed | Group | Nested
Keys = dict[str, ConfigRule]

# What a value must be of the keys that groups read, and of those that say how a family starts. What a `Key` says is
# checked where it goes.
_KINDS = {
    "true or false": """is_causal is_gated_act scale_decoder_outputs share_encoder_decoder_embeddings
    tie_word_embeddings use_sliding_window _remove_final_layer_norm alibi do_layer_norm_before multi_query
    new_decoder_architecture parallel_attn qk_layernorm use_swiglu_ffn use_qk_norm attn_temperature_tuning""",
    "a whole number": """decoder_sparse_step first_k_dense_replace full_attention_interval inner_group_num
    global_attn_every_n_layers head_dim local_attention max_position_embeddings max_window_layers n_group
    num_hidden_groups num_hidden_layers num_labels original_max_position_embeddings sliding_window
    topk_group num_ln_in_parallel_attn word_embed_proj_dim no_rope_layer_interval attention_chunk_size
    floor_scale interleave_moe_layer_step rotary_dim""",
    "a whole number or a word": "sliding_window_pattern",
    "a number": """classifier_dropout classifier_dropout_prob dropout global_rope_theta init_std
    initializer_factor initializer_range local_rope_theta mlp_ratio partial_rotary_factor qa_dropout
    rope_local_base_freq rope_theta rotary_emb_base rotary_pct seq_classif_dropout attn_scale rms_norm_eps""",
    "an object": "id2label label2id rope_parameters rope_scaling",
    "a list": "layer_types mlp_layer_types mlp_only_layers moe_layers no_rope_layers",
    "a word": "dense_act_fn feed_forward_proj topk_method",
}
_TYPES: Data = {"true or false": bool, "a whole number": int, "a number": int | float}
_TYPES |= {"a whole number or a word": int | str}
_TYPES |= {"an object": dict, "a list": list, "a word": str}


def check_kinds(theirs: Data, keys: Collection[str]) -> None:
    """Refuse what could not be meant: a null is always possible."""
    for kind, names in _KINDS.items():
        for name in names.split():
            value = theirs.get(name)
            if name not in keys or value is None:
                continue
            boolean = isinstance(value, bool) and kind != "true or false"
            endless = isinstance(value, float) and not math.isfinite(value)
            if boolean or endless or not isinstance(value, _TYPES[kind]):
                raise wrong(f"{name} is {value!r}; it must be {kind}")


# Several of theirs may mean one of ours; the first of them is written.
ACTIVATIONS = {name: name for name in ("relu", "gelu", "silu", "tanh", "quick_gelu", "relu2")}
ACTIVATIONS |= dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_tanh")
ACTIVATIONS |= {"gelu_python": "gelu", "swish": "silu"}
# A scale of scores, said as the number whose root divides them.
ROOT = (lambda n: n**-0.5, lambda scale: round(scale**-2))

# --- keys that only make sense together: RoPE -----------------------------------------------------------------------

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
    "proportional": dict(factor="factor", partial_rotary_factor="share"),
}
# What may be missing, and what it means then.
_OPTIONAL: Data = dict(beta_fast=32.0, beta_slow=1.0, truncate=True)
_OPTIONAL |= dict.fromkeys(("attention_factor", "mscale", "mscale_all_dim"))


def rope_of(theirs: Data, renamed: Mapping[str, str]) -> Data:
    """What they say of a RoPE, in our words: base and share where they say one, and the scaling."""
    given = dict(theirs.get("rope_parameters") or theirs.get("rope_scaling") or {})
    base = given.pop("rope_theta", None)
    base = theirs.get("rope_theta") if base is None else base
    kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
    given.pop("type", None)
    kind = renamed.get(kind, kind)
    if kind == "dynamic":
        # Its waves are the default's in texts up to max_position_embeddings: the longest that we read.
        kind = "default"
        for key in ("factor", _ORIGINAL):
            given.pop(key, None)
    share = theirs.get("partial_rotary_factor")
    if kind != "proportional":
        share = given.pop("partial_rotary_factor", share)
    scaling: Data | None = None
    if kind != "default":
        if kind not in _SCALING:
            raise wrong(f"rope_type is {kind!r}; known: default, dynamic, {', '.join(_SCALING)}")
        scaling = {"kind": kind}
        whole = theirs.get("max_position_embeddings")
        original = given.get(_ORIGINAL) or theirs.get(_ORIGINAL) or whole
        missing = {**_OPTIONAL, _ORIGINAL: original}
        if kind == "proportional":
            missing |= dict(factor=1.0, partial_rotary_factor=1.0 if share is None else share)
            share = None
        if kind == "longrope":
            missing["factor"] = whole and whole / original
        for key, name in _SCALING[kind].items():
            value = given.pop(key, None)
            if value is None and key not in missing:
                raise wrong(f"rope_parameters.{key} is missing; {kind} scaling needs it")
            scaling[name] = missing[key] if value is None else value
    if given:
        raise wrong(f"rope_parameters.{next(iter(given))} is not known for {kind} RoPE")
    said = {"base": None if base is None else float(base), "partial": share}
    return {name: value for name, value in said.items() if value is not None} | {"scaling": scaling}


def _stretched(theirs: Data) -> Data:
    """A dynamic RoPE with alpha turns by a larger base, in texts of any length: its other keys decide nothing."""
    given = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    kind = given.get("rope_type") or given.get("type")
    if kind != "dynamic" or not given.get("alpha"):
        return theirs
    width = theirs.get("head_dim") or theirs["hidden_size"] // theirs["num_attention_heads"]
    base = given.get("rope_theta") or theirs.get("rope_theta") or 10000.0
    base *= given["alpha"] ** (width / (width - 2))
    return {**theirs, "rope_parameters": {"rope_type": "default", "rope_theta": base}}


def rope_words(rope: Data) -> Data:
    """Our RoPE as their rope_parameters."""
    scaling = rope["scaling"] or {"kind": "default"}
    out: Data = {"rope_type": scaling["kind"], "rope_theta": rope["base"]}
    if rope["partial"] != 1:
        out["partial_rotary_factor"] = rope["partial"]
    for key, name in _SCALING.get(scaling["kind"], {}).items():
        if scaling[name] is not None:
            out[key] = scaling[name]
    return out


def _ropes(
    places: Mapping[str, str],
    words: Callable[[Data, str], Data],
    older: Sequence[str],
    more: Sequence[str] = (),
) -> Group:
    """RoPEs at these places of ours, by their word for each, or one that has none (""). `words`: what their keys say of
    it, in ours; `older`: keys that rope_parameters stands for now; `more`: others that are looked at."""

    def read(theirs: Data, ours: Data) -> None:
        for word, place in places.items():
            if isinstance(rope := get(ours, place), dict):
                put(ours, place, {**rope, **words(theirs, word)})

    def write(ours: Data, theirs: Data) -> None:
        ropes = {word: get(ours, place) for word, place in places.items()}
        ropes = {word: rope for word, rope in ropes.items() if isinstance(rope, dict)}
        if all({**r, "base": 0, "partial": 1, **words(theirs, w)} == r for w, r in ropes.items()):
            return
        for key in (*older, "rope_scaling"):
            theirs.pop(key, None)
        said = {word: rope_words(rope) for word, rope in ropes.items()}
        theirs["rope_parameters"] = said.get("", said)

    return Group(("rope_parameters", "rope_scaling", *older, *more), read, write)


def rope_at(
    place: str,
    base: str = "rope_theta",
    share: str = "",
    renamed: Mapping[str, str] | None = None,
    idle: str = "",
    alpha: bool = False,
    **missing: Any,
) -> Group:
    """The RoPE of the attention at this place of ours. `base` and `share` are their older keys for them (no share:
    heads turn whole), `renamed` their other words for a rope_type, `missing` what missing keys mean, `idle` words of
    rope_parameters that decide nothing here, `alpha`: whether a dynamic one may have it."""

    def words(theirs: Data, _: str) -> Data:
        said = {**missing, **{k: v for k, v in theirs.items() if v is not None}}
        for key in ("rope_parameters", "rope_scaling"):
            if idle and isinstance(said.get(key), dict):
                said[key] = {k: v for k, v in said[key].items() if k not in idle.split()}
        said |= {"rope_theta": said.get(base)}
        said |= {"partial_rotary_factor": said.get(share)} if share else {}
        said = _stretched(said) if alpha else said
        out = rope_of(said, renamed or {})
        if not share and out.get("partial", 1) != 1:
            raise wrong(f"partial_rotary_factor is {out['partial']}, this family turns whole heads")
        return out

    more = ["original_max_position_embeddings", *([] if share else ["partial_rotary_factor"])]
    group = _ropes({"": place}, words, [base, share] if share else [base], more)

    def write(ours: Data, theirs: Data) -> None:
        given = theirs.get("rope_parameters") or {}
        group.writer(ours, theirs)
        kept = {key: given[key] for key in idle.split() if key in given}
        if kept:
            theirs["rope_parameters"] = {**theirs["rope_parameters"], **kept}

    return replace(group, writer=write)


def ropes_by_layer(
    full: tuple[str, float],
    sliding: tuple[str, float],
    scaled: str = "full_attention",
    missing: Data | None = None,
) -> Group:
    """A RoPE for the layers that see all and one for those that slide, as `sliding_layers` lists them. `full` and
    `sliding` are older keys for their bases and what missing ones mean, `scaled` says whose scaling an older
    rope_scaling is, `missing` what missing rope_parameters mean."""
    bases = {"full_attention": full, "sliding_attention": sliding}

    def words(theirs: Data, word: str) -> Data:
        nested = (theirs.get("rope_parameters") or missing or {}).get(word)
        older = theirs.get("rope_scaling") if word in scaled and nested is None else None
        key, default = bases[word]
        base = default if theirs.get(key) is None else theirs[key]
        said = {"rope_parameters": nested, "rope_scaling": older, "rope_theta": base}
        return rope_of(theirs | said, {})

    places = {word: f"tower.attention.{i}.rope" for i, word in enumerate(bases)}
    return _ropes(places, words, [key for key, _ in bases.values() if key])


ROPE = rope_at("tower.attention.rope")

# --- what differs from layer to layer -----------------------------------------------------------------------------


# Older words for kinds of layers.
_OLDER = {"attention": "full_attention", "mamba": "linear_attention"}


def by_layer(
    part: str,
    key: str,
    words: tuple[Any, Any],
    second: Callable[[Data, int], bool],
    which: Callable[[Data], bool],
    more: Sequence[str] = (),
    write: Callable[[list[str], Data | None, Data, bool], None] | None = None,
) -> Group:
    """A `part` of the tower ("attention" or "ffn") of which the blank lists two configs, one for each of `words`: rules
    fill in `tower.attention.0` and `tower.attention.1`, or both as `tower.attention`. Out goes one per layer.

    `key` of theirs lists a word for each layer; where it is missing, `second` tells from their keys (`more` of them)
    whether layer i is of the second kind. `which`: whether a config of ours is. `write`: those words, our second config
    (None where no layer is of it) and whether their keys say so already, into their keys; without it into `key`."""

    def kinds_of(theirs: Data, layers: int) -> list[str]:
        kinds = theirs.get(key) or [words[second(theirs, i)] for i in range(layers)]
        kinds = [_OLDER.get(kind, kind) if kind not in words else kind for kind in kinds]
        if not kinds or len(kinds) != layers or set(kinds) - set(words):
            known = " or ".join(map(str, words))
            listed = f"{key} must list as many words, {known}, got {kinds}"
            raise wrong(f"num_hidden_layers is {layers}; {listed}")
        return kinds

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
        fits = len(theirs.get(key) or kinds) == len(kinds)
        said = fits and kinds_of(theirs, len(kinds)) == kinds
        if write is not None:
            write(kinds, first.get(words[1]), theirs, said)
        elif not said:
            theirs[key] = kinds

    return Group(tuple(name for name in (key, *more) if name), read, write_back, last=True)


def sliding_layers(
    slides: Callable[[Data, int], bool],
    window: int,
    more: str = "",
    switch: str = "",
    key: str = "sliding_window",
    sides: int = 0,
) -> Group:
    """Layers that see all and layers that see a window: `attention` of the blank lists both. `slides`: whether layer i
    does where `layer_types` is missing (`more`: the key that it looks at); `window`: what a missing sliding_window
    means; `switch`: the key that turns it on, if there is one; `key`: where it is not sliding_window; `sides`: of an
    encoder, it counts the tokens on each side (1), or on both together (2), without the query's own."""
    keys = [name for name in (key, switch) if name]

    def window_of(theirs: Data) -> int | None:
        size = theirs.get(key, window) if theirs.get(switch, not switch) else None
        return size // sides + 1 if sides and size is not None else size

    def write(kinds: list[str], sliding: Data | None, theirs: Data, said: bool) -> None:
        size = sliding and sliding["window"]
        if said and size in (None, window_of(theirs)):
            return
        theirs["layer_types"] = kinds
        if switch:
            theirs[switch] = size is not None
        if switch or size is not None:
            theirs[key] = sides * (size - 1) if sides and size else size

    group = by_layer(
        "attention",
        "layer_types",
        ("full_attention", "sliding_attention"),
        lambda theirs, i: window_of(theirs) is not None and slides(theirs, i),
        lambda one: need(one, "window") is not None,
        [*keys, *more.split()],
        write,
    )

    def read(theirs: Data, ours: Data) -> None:
        size = window_of(theirs)
        if size is None and "sliding_attention" in (theirs.get("layer_types") or ()):
            raise wrong(f"layer_types slides, but {' or '.join(keys)} is off")
        put(ours, "tower.attention.1.window", size)
        group.reader(theirs, ours)

    return replace(group, reader=read)


def is_moe(ffn: Data | None) -> bool:
    return ffn is not None and ffn["kind"] == "moe"


def experts_by_layer(first_dense: int) -> Group:
    """`ffn` of the blank lists the dense one and the experts. `first_dense`: how many layers are
    dense where no key says it."""

    def sparse(theirs: Data, layer: int) -> bool:
        return layer >= (theirs.get("first_k_dense_replace", first_dense) or 0)

    def write(kinds: list[str], _: Data | None, theirs: Data, said: bool) -> None:
        if said and "mlp_layer_types" in theirs and "first_k_dense_replace" in theirs:
            return
        theirs["first_k_dense_replace"] = [*kinds, "sparse"].index("sparse")
        listed = theirs["model_type"] in ("deepseek_v32", "glm_moe_dsa")
        if "mlp_layer_types" in theirs or listed:
            theirs["mlp_layer_types"] = kinds

    more = ("first_k_dense_replace",)
    return by_layer("ffn", "mlp_layer_types", ("dense", "sparse"), sparse, is_moe, more, write)


def expert_groups(limited: str | None, default: tuple[int, int]) -> Group:
    """Expert groups, `default` where they are missing. V2 looks at them only if topk_method is
    `limited`; V3 (None) always does."""

    def read(theirs: Data, ours: Data) -> None:
        experts = ours["tower"]["ffn"][1]
        method = theirs.get("topk_method")
        if limited is not None and method not in (None, "greedy", limited):
            raise wrong(f"topk_method is {method!r}; known: greedy, {limited}")
        on = limited is None or method == limited
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
    # A null is false.
    ours["tower"]["causal"] = bool(theirs.get("is_causal", True))
    if not ours["tower"]["causal"] and theirs.get("sliding_window"):
        given = theirs["is_causal"]
        raise wrong(f"is_causal is {given}; with sliding_window Regard can only do True")


def _write_causal(ours: Data, theirs: Data) -> None:
    if ours["tower"]["causal"] != bool(theirs.get("is_causal", True)):
        theirs["is_causal"] = ours["tower"]["causal"]


CAUSAL = Group(("is_causal",), _read_causal, _write_causal)


# --- labels and oddities ------------------------------------------------------------------------------------------


def _read_labels(theirs: Data, ours: Data) -> None:
    names = theirs.get("id2label")
    count = theirs.get("num_labels")
    count = 2 if count is None else count
    put(ours, "head.labels", len(names) if names else count)


def _write_labels(ours: Data, theirs: Data) -> None:
    labels, names = get(ours, "head.labels"), theirs.get("id2label")
    if labels is ABSENT or (len(names) if names else 2) == labels:
        return
    theirs["id2label"] = {str(i): f"LABEL_{i}" for i in range(labels)}
    theirs["label2id"] = {f"LABEL_{i}": i for i in range(labels)}


def head_dropout(**keys: tuple[str, str | float | Callable[[Data], float]]) -> Group:
    """The dropout of a head, by its kind: its key, and what a missing or null one means: a number, what a function
    makes of the other keys, or the value of another key, which is 0.1 where it is missing too. Kinds that are not
    named have none."""

    def of(theirs: Data, kind: Any) -> float:
        name, default = keys[kind]
        if theirs.get(name) is not None:
            return theirs[name]
        if callable(default):
            return default(theirs)
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


def ids_below(last: int, *names: str, of: str = "embedding") -> Group:
    """What transformers takes for missing ids, up to `last`, would lie outside a smaller vocabulary: they are null."""

    def write(ours: Data, theirs: Data) -> None:
        if need(ours, f"{of}.vocab") <= last:
            for name in names:
                theirs.setdefault(name, None)

    return Group(names, lambda *_: None, write)


def mtp_count(name: str) -> Group:
    """Their number of MTP layers, which is written where there are some: whether there are, only the tensors tell."""

    def write(ours: Data, theirs: Data) -> None:
        if ours.get("mtp"):
            theirs[name] = ours["mtp"]["depth"]

    return Group((name,), lambda *_: None, write)
