"""Config keys of Hugging Face that only make sense together: RoPE and its scaling, windows by layer, experts by layer,
labels, and a few oddities. Each is a pair of functions, one the inverse of the other.
"""

from __future__ import annotations

from typing import Any

from regard.checkpoint.rules import ABSENT, Custom, Data, get, put
from regard.config import UsageError

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
    layers = ours["tower"]["layers"]
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
    attention = ours["tower"]["attention"]
    each = [
        dict(attention, window=window if kind == "sliding_attention" else None) for kind in kinds
    ]
    ours["tower"]["attention"] = each[0] if all(a == each[0] for a in each) else each


def _write_windows(ours: Data, theirs: Data) -> None:
    each = ours["tower"]["attention"]
    each = each if isinstance(each, list) else [each] * ours["tower"]["layers"]
    windows = {a["window"] for a in each} - {None}
    theirs["layer_types"] = ["sliding_attention" if a["window"] else "full_attention" for a in each]
    theirs["use_sliding_window"] = bool(windows)
    theirs["sliding_window"] = max(windows, default=None)
    ours["tower"]["attention"] = dict(each[0])


WINDOWS = Custom(
    ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
    _read_windows,
    _write_windows,
)


def _read_experts(theirs: Data, ours: Data) -> None:
    """`ffn` comes in as [the dense one, the experts]; out goes one a layer."""
    layers, (dense, experts) = ours["tower"]["layers"], ours["tower"]["ffn"]
    kinds = theirs.get("mlp_layer_types")
    if kinds is None:
        first = min(theirs.get("first_k_dense_replace") or 0, layers)
        kinds = ["dense"] * first + ["sparse"] * (layers - first)
    if len(kinds) != layers or set(kinds) - {"dense", "sparse"}:
        raise UsageError(
            f"config.json: mlp_layer_types must list {layers} times dense or sparse, got {kinds}"
        )
    each = [dense if kind == "dense" else experts for kind in kinds]
    ours["tower"]["ffn"] = each[0] if all(f == each[0] for f in each) else each


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


MLP_OR_EXPERTS = Custom(("first_k_dense_replace", "mlp_layer_types"), _read_experts, _write_experts)


def groups(limited: str | None) -> Custom:
    """Expert groups. V2 looks at them only if topk_method is `limited`; V3 (None) always does."""

    def read(theirs: Data, ours: Data) -> None:
        experts = ours["tower"]["ffn"][1]
        on = limited is None or theirs.get("topk_method") == limited
        experts["groups"] = (theirs.get("n_group") or 1) if on else 1
        experts["active_groups"] = (theirs.get("topk_group") or 1) if on else 1

    def write(ours: Data, theirs: Data) -> None:
        experts = ours["tower"]["ffn"][1]
        if experts is None or (limited is not None and experts["groups"] == 1):
            return
        theirs["n_group"], theirs["topk_group"] = experts["groups"], experts["active_groups"]
        if limited is not None:
            theirs["topk_method"] = limited

    return Custom(("n_group", "topk_group", "topk_method"), read, write)


# --- labels and oddities ------------------------------------------------------------------------------------------


def _read_labels(theirs: Data, ours: Data) -> None:
    names = theirs.get("id2label")
    put(ours, "head.labels", len(names) if names else theirs.get("num_labels", 2))


def _write_labels(ours: Data, theirs: Data) -> None:
    labels = get(ours, "head.labels")
    if labels is ABSENT or len(theirs.get("id2label") or {0: 0, 1: 1}) == labels:
        return
    theirs["id2label"] = {str(i): f"LABEL_{i}" for i in range(labels)}
    theirs["label2id"] = {f"LABEL_{i}": i for i in range(labels)}


LABELS = Custom(("id2label", "label2id", "num_labels"), _read_labels, _write_labels)


def _read_roberta(theirs: Data, ours: Data) -> None:
    """Rows of the table count from the padding id + 1; the table's size includes those before."""
    pad = theirs.get("pad_token_id")
    pad = 1 if pad is None else pad
    size = theirs.get("max_position_embeddings", 512)
    ours["embedding"]["position"].update(max_len=size - pad - 1, offset=pad + 1, skip=pad)
    ours["max_len"] = size - pad - 1


def _write_roberta(ours: Data, theirs: Data) -> None:
    place = ours["embedding"]["position"]
    theirs["pad_token_id"] = place["skip"]
    theirs["max_position_embeddings"] = place["max_len"] + place["offset"]


ROBERTA_POSITIONS = Custom(
    ("max_position_embeddings", "pad_token_id"), _read_roberta, _write_roberta
)


def _read_t5_ffn(theirs: Data, ours: Data) -> None:
    activation, gated = _t5_ffn_of(theirs)
    for tower in ("encoder", "decoder"):
        ours[tower]["ffn"].update(activation=activation, gated=gated)


def _t5_ffn_of(theirs: Data) -> tuple[str, bool]:
    word = theirs.get("feed_forward_proj") or "relu"
    name = word.removeprefix("gated-")
    name = "gelu_new" if word == "gated-gelu" else name
    if name not in ACTIVATIONS:
        raise UsageError(
            f"config.json: feed_forward_proj is {word!r}; known: relu, gated-gelu, gated-silu, ..."
        )
    return ACTIVATIONS[name], word.startswith("gated-")


def _write_t5_ffn(ours: Data, theirs: Data) -> None:
    ffn = ours["encoder"]["ffn"]
    if "feed_forward_proj" in theirs and _t5_ffn_of(theirs) == (ffn["activation"], ffn["gated"]):
        return
    name = next(k for k, v in ACTIVATIONS.items() if v == ffn["activation"])
    if not ffn["gated"]:
        theirs["feed_forward_proj"] = name
    else:
        theirs["feed_forward_proj"] = "gated-gelu" if name == "gelu_new" else f"gated-{name}"
    for stale in ("dense_act_fn", "is_gated_act"):
        theirs.pop(stale, None)


T5_FFN = Custom(("feed_forward_proj", "dense_act_fn", "is_gated_act"), _read_t5_ffn, _write_t5_ffn)


def _read_t5_scale(theirs: Data, ours: Data) -> None:
    """v1.0 multiplies the decoder's output by dim^-0.5; v1.1 is told by tie_word_embeddings false in older folders."""
    put(ours, "head.scaled", _t5_scale_of(theirs))


def _t5_scale_of(theirs: Data) -> bool:
    scaled = theirs.get("scale_decoder_outputs")
    return theirs.get("tie_word_embeddings") is not False if scaled is None else scaled


def _write_t5_scale(ours: Data, theirs: Data) -> None:
    scaled = ours["head"]["scaled"]
    if "scale_decoder_outputs" not in theirs or _t5_scale_of(theirs) != scaled:
        theirs["scale_decoder_outputs"] = theirs["tie_word_embeddings"] = scaled


T5_SCALE = Custom(("scale_decoder_outputs", "tie_word_embeddings"), _read_t5_scale, _write_t5_scale)


def _read_shared(theirs: Data, ours: Data) -> None:
    ours["shared"] = theirs.get("share_encoder_decoder_embeddings") is not False


def _write_shared(ours: Data, theirs: Data) -> None:
    """A folder may say that the tables are shared and yet, with nothing tied, hold one each: the tensors tell."""
    told = theirs.get("share_encoder_decoder_embeddings") and not theirs["tie_word_embeddings"]
    if not told:
        theirs["share_encoder_decoder_embeddings"] = ours["shared"]


SHARED = Custom(("share_encoder_decoder_embeddings",), _read_shared, _write_shared)
