"""Config keys of Hugging Face that only make sense together: RoPE and its scaling, windows by layer, experts by layer,
labels, and a few oddities. Each is a pair of functions, one the inverse of the other.
"""

from __future__ import annotations

from typing import Any

from regard.checkpoint.rules import ABSENT, Custom, Data, get, need, put
from regard.errors import UsageError

ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}

# --- RoPE ---------------------------------------------------------------------------------------------------------

_SCALING: dict[
    str, dict[str, tuple[str, Any]]
] = {  # rope_type -> their key -> (our field, default)
    "linear": {"factor": ("factor", None)},
    "llama3": {
        "factor": ("factor", None),
        "low_freq_factor": ("low", None),
        "high_freq_factor": ("high", None),
        "original_max_position_embeddings": ("original_len", "max_position_embeddings"),
    },
    "yarn": {
        "factor": ("factor", None),
        "original_max_position_embeddings": ("original_len", "max_position_embeddings"),
        "beta_fast": ("fast", 32.0),
        "beta_slow": ("slow", 1.0),
        "attention_factor": ("attention_factor", ABSENT),
        "mscale": ("mscale", ABSENT),
        "mscale_all_dim": ("mscale_all", ABSENT),
        "truncate": ("truncated", True),
    },
}


def _read_rope(theirs: Data, ours: Data) -> None:
    base, scaling = _rope_of(theirs)
    rope = get(ours, _rope_path(ours))
    if isinstance(rope, dict):
        rope.update(base=base or rope["base"], scaling=scaling)


def _rope_of(theirs: Data) -> tuple[float | None, Data | None]:
    """Their base, if they say one, and the scaling in our words."""
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(theirs.get(key), dict | None):
            raise UsageError(f"config.json: {key} is {theirs[key]!r}; it must be an object")
    given = dict(theirs.get("rope_parameters") or theirs.get("rope_scaling") or {})
    base = given.pop("rope_theta", None) or theirs.get("rope_theta")
    kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
    given.pop("type", None)
    share = given.pop("partial_rotary_factor", theirs.get("partial_rotary_factor"))
    if share not in (None, 1, 1.0):
        raise UsageError(
            f"config.json: partial_rotary_factor is {share}, this family turns whole heads"
        )
    scaling = None
    if kind != "default":
        if kind not in _SCALING:
            raise UsageError(
                f"config.json: rope_type is {kind!r}; known: default, {', '.join(_SCALING)}"
            )
        scaling = {"kind": kind}
        for key, (name, default) in _SCALING[kind].items():
            value = given.pop(key, None)
            if value is None and default is None:
                raise UsageError(
                    f"config.json: rope_parameters.{key} is missing; {kind} scaling needs it"
                )
            if value is None and default == "max_position_embeddings":
                value = (
                    theirs.get("original_max_position_embeddings")
                    or theirs["max_position_embeddings"]
                )
            elif value is None:
                value = None if default is ABSENT else default
            scaling[name] = value
    if given:
        raise UsageError(
            f"config.json: rope_parameters.{next(iter(given))} is not known for {kind} RoPE"
        )
    return base and float(base), scaling


def _write_rope(ours: Data, theirs: Data) -> None:
    rope = get(ours, _rope_path(ours))
    if not isinstance(rope, dict) or _rope_of(theirs) == (rope["base"], rope["scaling"]):
        return
    scaling = rope["scaling"] or {"kind": "default"}
    kind = scaling["kind"]
    out: Data = {"rope_type": kind, "rope_theta": rope["base"]}
    for key, (name, _) in _SCALING.get(kind, {}).items():
        if scaling[name] is not None:
            out[key] = scaling[name]
    for old in ("rope_theta", "rope_scaling"):
        theirs.pop(old, None)
    theirs["rope_parameters"] = out


def _rope_path(ours: Data) -> str:
    inner = "attention.attention" if get(ours, "tower.attention.kind") == "dsa" else "attention"
    return f"tower.{inner}.rope"


ROPE = Custom(
    (
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "partial_rotary_factor",
        "original_max_position_embeddings",
    ),
    _read_rope,
    _write_rope,
)

# --- what differs from layer to layer -----------------------------------------------------------------------------


def _read_windows(theirs: Data, ours: Data) -> None:
    attention = ours["tower"]["attention"]
    each = [dict(attention, window=w) for w in _windows_of(theirs, ours["tower"]["layers"])]
    ours["tower"]["attention"] = each[0] if all(a == each[0] for a in each) else each


def _windows_of(theirs: Data, layers: int) -> list[int | None]:
    window = theirs.get("sliding_window") if theirs.get("use_sliding_window") else None
    first = theirs.get("max_window_layers", 28)
    kinds = theirs.get("layer_types") or [
        "sliding_attention" if window is not None and i >= first else "full_attention"
        for i in range(layers)
    ]
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown or len(kinds) != layers:
        raise UsageError(
            f"config.json: layer_types must list {layers} times full_attention or sliding_attention, got {kinds}"
        )
    if "sliding_attention" in kinds and window is None:
        raise UsageError(
            "config.json: layer_types slides, but sliding_window or use_sliding_window is off"
        )
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _write_windows(ours: Data, theirs: Data) -> None:
    each, layers = ours["tower"]["attention"], ours["tower"]["layers"]
    each = each if isinstance(each, list) else [each] * layers
    windows = [need(a, "window") for a in each]
    ours["tower"]["attention"] = dict(each[0])
    if (
        len(theirs.get("layer_types") or windows) == layers
        and _windows_of(theirs, layers) == windows
    ):
        return
    theirs["layer_types"] = ["sliding_attention" if w else "full_attention" for w in windows]
    theirs["use_sliding_window"] = any(windows)
    theirs["sliding_window"] = max((w for w in windows if w), default=None)


WINDOWS = Custom(
    ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
    _read_windows,
    _write_windows,
)


def mlp_or_experts(dense_first: int) -> Custom:
    """`ffn` comes in as [the dense one, the experts]; out goes one a layer. `dense_first`: what a missing key means."""

    def read(theirs: Data, ours: Data) -> None:
        layers, (dense, experts) = ours["tower"]["layers"], ours["tower"]["ffn"]
        kinds = theirs.get("mlp_layer_types")
        if kinds is None:
            first = min(theirs.get("first_k_dense_replace", dense_first) or 0, layers)
            kinds = ["dense"] * first + ["sparse"] * (layers - first)
        if len(kinds) != layers or set(kinds) - {"dense", "sparse"}:
            raise UsageError(
                f"config.json: mlp_layer_types must list {layers} times dense or sparse, got {kinds}"
            )
        each = [dense if kind == "dense" else experts for kind in kinds]
        ours["tower"]["ffn"] = each[0] if all(f == each[0] for f in each) else each

    return Custom(("first_k_dense_replace", "mlp_layer_types"), read, _write_experts)


def _write_experts(ours: Data, theirs: Data) -> None:
    each = ours["tower"]["ffn"]
    each = each if isinstance(each, list) else [each] * ours["tower"]["layers"]
    kinds = ["sparse" if f["kind"] == "moe" else "dense" for f in each]
    theirs["first_k_dense_replace"] = kinds.index("sparse") if "sparse" in kinds else len(kinds)
    if "mlp_layer_types" in theirs or theirs["model_type"] == "deepseek_v32":
        theirs["mlp_layer_types"] = kinds
    dense = next((f for f in each if f["kind"] == "mlp"), None)
    experts = next((f for f in each if f["kind"] == "moe"), None)
    ours["tower"]["ffn"] = [dense, experts]


def groups(limited: str | None, default: tuple[int, int]) -> Custom:
    """Expert groups, `default` where they are missing. V2 looks at them only if topk_method is `limited`; V3 (None)
    always does."""

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

    return Custom(("n_group", "topk_group", "topk_method"), read, write)


def _count(theirs: Data, key: str, default: int) -> int:
    """A number of groups; null is one."""
    value = theirs.get(key, default)
    if value is not None and (type(value) is not int or value < 1):
        raise UsageError(f"config.json: {key} is {value!r}; it must be a whole number from 1 on")
    return value or 1


# --- what transformers reads of any config, whether its class defines it or not ---------------------------------


def _read_causal(theirs: Data, ours: Data) -> None:
    ours["tower"]["causal"] = theirs.get("is_causal") is not False
    if not ours["tower"]["causal"] and theirs.get("sliding_window"):
        raise UsageError(
            "config.json: is_causal is False; with sliding_window Regard can only do True"
        )


def _write_causal(ours: Data, theirs: Data) -> None:
    if ours["tower"]["causal"] != (theirs.get("is_causal") is not False):
        theirs["is_causal"] = ours["tower"]["causal"]


CAUSAL = Custom(("is_causal",), _read_causal, _write_causal)


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


def head_dropout(**keys: tuple[str, str | float]) -> Custom:
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

    return Custom(tuple(dict.fromkeys(name for name, _ in keys.values())), read, write)


LABELS = Custom(("id2label", "label2id", "num_labels"), _read_labels, _write_labels)
