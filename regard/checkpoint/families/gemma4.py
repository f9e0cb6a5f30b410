"""Gemma 4's text model: layers that see all have heads of another size, the last ones read the keys and values of
earlier ones, experts stand beside the dense feed-forward, and each layer is given a vector of its own for each token.
"""

from __future__ import annotations

from dataclasses import replace

from regard.attention import GQA
from regard.block import PerLayer
from regard.checkpoint import rules, tensors
from regard.checkpoint.families.common import (
    ADDED_NORMS,
    ATTENTION,
    BIASED,
    GATED,
    SWIGLU,
    llama_like,
)
from regard.checkpoint.multimodal import Multimodal
from regard.checkpoint.rules import ACTIVATIONS, Data, Group, Key, need, wrong
from regard.checkpoint.tensors import To, Weights
from regard.layers import LM
from regard.moe import MoE
from regard.position import Proportional, Rope

# --- layers that see all ------------------------------------------------------------------------------------------

_WORDS = ("sliding_attention", "full_attention")
_ROPES: Data = dict(
    full_attention=dict(rope_type="proportional", partial_rotary_factor=0.25, rope_theta=1e6),
    sliding_attention=dict(rope_type="default", rope_theta=1e4),
)


def _kinds(theirs: Data) -> list[str]:
    """Of each layer; whatever it says, the last one sees all."""
    layers = theirs.get("num_hidden_layers") or 0
    kinds = theirs.get("layer_types") or [_WORDS[i % 6 == 5] for i in range(layers)]
    return [*kinds[:-1], "full_attention"] if kinds else []


_SLIDING = rules.sliding_layers(lambda *_: True, 512)


def _read_kinds(theirs: Data, ours: Data) -> None:
    _SLIDING.reader({**theirs, "layer_types": _kinds(theirs)}, ours)


def _global_sizes(theirs: Data) -> Data:
    """Heads of the layers that see all, by their keys of today or older ones."""
    kv_heads = theirs.get("num_key_value_heads", 4)
    each = theirs.get("per_layer_config")
    if each is None:
        own = theirs.get("num_global_key_value_heads") if theirs.get("attention_k_eq_v") else None
        width = theirs.get("global_head_dim", 512)
        return dict(head_dim=width, kv_heads=kv_heads if own is None else own)
    full = {int(i): one for i, one in each.items()}
    same = all(one == next(iter(full.values())) for one in full.values())
    kinds = _kinds(theirs)
    found = {i for i, kind in enumerate(kinds) if kind == "full_attention"}
    said = {"head_dim": theirs.get("head_dim", 256), "num_key_value_heads": kv_heads}
    changes: Data = next(iter(full.values()), {})
    if not same or set(full) not in (set(), found) or set(changes) - set(said):
        what = "head_dim and num_key_value_heads of all layers with full_attention, the same"
        given = f"per_layer_config is {each}, layer_types is {kinds}"
        raise wrong(f"{given}; Regard can only do {what}")
    said |= changes
    return dict(head_dim=said["head_dim"], kv_heads=said["num_key_value_heads"])


def _read_global(theirs: Data, ours: Data) -> None:
    tied = bool(theirs.get("attention_k_eq_v"))
    ours["tower"]["attention"][0].update(_global_sizes(theirs), value_is_key=tied)


def _write_global(ours: Data, theirs: Data) -> None:
    need(ours, "tower.attention.0.value_is_key")
    full, tower = ours["tower"]["attention"][0], ours["tower"]
    if full["value_is_key"] != bool(theirs.get("attention_k_eq_v")):
        theirs["attention_k_eq_v"] = full["value_is_key"]
    sizes = dict(head_dim=full["head_dim"], kv_heads=full["kv_heads"])
    if _global_sizes(theirs | dict(num_hidden_layers=tower["layers"])) != sizes:
        for key in ("global_head_dim", "num_global_key_value_heads"):
            theirs.pop(key, None)
        kinds = _kinds(theirs | dict(num_hidden_layers=tower["layers"]))
        changes = dict(head_dim=full["head_dim"], num_key_value_heads=full["kv_heads"])
        full_layers = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
        theirs["per_layer_config"] = {str(i): changes for i in full_layers}


_GLOBAL_KEYS = "per_layer_config global_head_dim num_global_key_value_heads"
_GLOBAL = Group(("attention_k_eq_v", *_GLOBAL_KEYS.split()), _read_global, _write_global)

# --- feed-forwards, and vectors for each layer --------------------------------------------------------------------


def _read_ffn(theirs: Data, ours: Data) -> None:
    tower = ours["tower"]
    experts = bool(theirs.get("enable_moe_block"))
    for key in ("num_experts", "top_k_experts", "moe_intermediate_size") if experts else ():
        if theirs.get(key) is None:
            raise wrong(f"{key} is missing; enable_moe_block needs it")
    one, width = tower["ffn"][experts], ("ffn_dim", "shared_dim")[experts]
    last, tower["ffn"] = tower["borrowing"], one
    if last and theirs.get("use_double_wide_mlp"):
        wide = {**one, width: 2 * one[width]}
        tower["ffn"] = [one] * (tower["layers"] - last) + [wide] * last


def _write_ffn(ours: Data, theirs: Data) -> None:
    tower = ours["tower"]
    each = tower["ffn"] if isinstance(tower["ffn"], list) else [tower["ffn"]]
    experts = rules.is_moe(each[0])
    width = ("ffn_dim", "shared_dim")[experts]
    first, last = (need(one, width) or 0 for one in (each[0], each[-1]))
    said = dict(enable_moe_block=experts, use_double_wide_mlp=last > first)
    theirs |= {key: on for key, on in said.items() if on != bool(theirs.get(key))}
    tower["ffn"] = [None, each[0]] if experts else [each[0], None]


_FFN = Group(("enable_moe_block", "use_double_wide_mlp"), _read_ffn, _write_ffn, last=True)
_WIDTH, _VOCAB = "hidden_size_per_layer_input", "vocab_size_per_layer_input"


def _tables(theirs: Data) -> tuple[int, int]:
    return theirs.get(_WIDTH, 256) or 0, theirs.get(_VOCAB, 262144)


def _read_tables(theirs: Data, ours: Data) -> None:
    width, vocab = _tables(theirs)
    if width:
        ours["tower"]["per_layer"].update(width=width, vocab=vocab)
    else:
        ours["tower"]["per_layer"] = None


def _write_tables(ours: Data, theirs: Data) -> None:
    tables = ours["tower"]["per_layer"]
    width, vocab = _tables(theirs)
    said = (tables["width"], tables["vocab"]) if tables else (0, vocab)
    if said != (width, vocab):
        theirs[_WIDTH], theirs[_VOCAB] = said


def _read_sight(theirs: Data, ours: Data) -> None:
    # "vision" is about pictures: of text alone it says nothing.
    sight = theirs.get("use_bidirectional_attention")
    if sight not in (None, "vision"):
        raise wrong(f"use_bidirectional_attention is {sight!r}; Regard can only do null")


# --- the family ---------------------------------------------------------------------------------------------------

_LAYER: Weights = {
    **ATTENTION, **GATED, **ADDED_NORMS, "input_layernorm.weight": "norm1.weight",
    # A layer with experts has norms of its own for them, and the dense one is what all tokens share.
    "pre_feedforward_layernorm.*": "norm3.*",
    "pre_feedforward_layernorm.weight": "ffn.norms.shared.weight",
    "mlp.{gate,up,down}_proj.weight": "ffn.shared.{gate,up,down}.weight",
    "pre_feedforward_layernorm_2.weight": "ffn.norms.experts.weight",
    "post_feedforward_layernorm_{1,2}.weight": "ffn.norms.{shared,experts}_out.weight",
    "router.proj.weight": "ffn.router.weight", "router.scale": "ffn.norms.router.weight",
    "router.per_expert_scale": "ffn.gains",
    "experts.gate_up_proj": To("ffn.{gate,up}", tensors.GATE_UP), "experts.down_proj": "ffn.down",
    "per_layer_input_gate.weight": "input.gate.weight",
    "per_layer_projection.weight": "input.project.weight",
    "post_per_layer_input_norm.weight": "input.norm.weight", "layer_scalar": "gain.weight",
}  # fmt: skip
_ATTENTION = GQA(
    1, 1, 1, rope=Rope(1e6, scaling=Proportional()), qk_norm=1e-6, v_norm=1e-6, scale=1.0
)
_EXPERTS = MoE(1, 1, 1, "gelu_tanh", shared=1, shared_dim=1, normed=1e-6, gains=True)
_EPS = "tower.norm.eps tower.attention.{qk_norm,v_norm} tower.ffn.1.normed tower.per_layer.eps"
_BLANK = llama_like(
    "gemma4_text", {"Gemma4ForCausalLM": LM(), "Gemma4TextModel": None},
    (_ATTENTION, replace(_ATTENTION, rope=Rope(), window=1)),
    (replace(SWIGLU, activation="gelu_tanh"), _EXPERTS),
    scaled=True, tower=dict(order="sandwich", per_layer=PerLayer(1, 1), gained=True),
    keys=dict(
        hidden_act=None, per_layer_config=None, rms_norm_eps=Key(_EPS, 1e-6),
        tie_word_embeddings=Key("head.tied", True), num_key_value_heads=Key("tower.attention.1.kv_heads", 4),
        head_dim=Key("tower.attention.1.head_dim", 256), attention_bias=BIASED,
        intermediate_size=Key("tower.ffn.0.ffn_dim tower.ffn.1.shared_dim", 9216),
        hidden_activation=Key(
            "tower.ffn.activation tower.per_layer.activation", "gelu_pytorch_tanh", ACTIVATIONS
        ),
        num_experts=Key("tower.ffn.1.experts", 1), top_k_experts=Key("tower.ffn.1.active", 1),
        moe_intermediate_size=Key("tower.ffn.1.ffn_dim", 1),
        num_kv_shared_layers=Key("tower.borrowing", 0), final_logit_softcapping=Key("head.logit_softcap", None),
        rope_parameters=rules.ropes_by_layer(("", 1e6), ("", 1e4), missing=_ROPES),
        attention_k_eq_v=_GLOBAL, hidden_size_per_layer_input=Group((_WIDTH, _VOCAB), _read_tables, _write_tables),
        use_bidirectional_attention=Group(("use_bidirectional_attention",), _read_sight, lambda *_: None),
        layer_types=replace(_SLIDING, reader=_read_kinds), enable_moe_block=_FFN,
    ),
    layer=_LAYER,
)  # fmt: skip
_TABLES = {
    "embed_tokens_per_layer.weight": "tower.tables.weight",
    "per_layer_model_projection.weight": "tower.tables.project.weight",
    "per_layer_projection_norm.weight": "tower.tables.norm.weight",
}
GEMMA4 = replace(_BLANK, tensors={**_BLANK.tensors, **_TABLES})
GEMMA4_PICTURES = Multimodal("gemma4", "gemma4_text")
