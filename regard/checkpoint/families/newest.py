"""DeepSeek-V4: compressed attention, several streams, experts that are chosen by token in the first layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from regard.attention.compressed import Compressed
from regard.block import Streams
from regard.checkpoint import rules, tensors
from regard.checkpoint.families.common import FRAME_KEYS, llama_like
from regard.checkpoint.rules import ACTIVATIONS, Data, Group, Key, get, need, put, wrong
from regard.checkpoint.tensors import To, Weights
from regard.layers import LM
from regard.moe import MoE
from regard.position import Rope

# --- what differs from layer to layer -----------------------------------------------------------------------------

# Kinds of attention as the blank lists them, and how many tokens an entry stands for; and of feed-forwards.
_KINDS = dict(sliding_attention=0, compressed_sparse_attention=4, heavily_compressed_attention=128)
_WORDS, _FFNS = list(_KINDS), ["hash_moe", "moe"]


def _attentions(theirs: Data) -> list[str]:
    n, older = theirs.get("num_hidden_layers") or 0, theirs.get("compress_ratios")
    said = theirs.get("layer_types")
    if said is None and older is not None:
        names: Data = {str(number): name for name, number in _KINDS.items()}
        said = [names.get(str(number), number) for number in older]
    if said is None:
        said = [_WORDS[1] if i > 1 and i % 2 else _WORDS[2] for i in range(n)]
    return list(said)[:n]


def _ffns(theirs: Data) -> list[str]:
    n, first = theirs.get("num_hidden_layers") or 0, theirs.get("num_hash_layers")
    said = theirs.get("mlp_layer_types")
    return (
        list(said)[:n] if said else [_FFNS[i >= (3 if first is None else first)] for i in range(n)]
    )


def _read_layers(theirs: Data, ours: Data) -> None:
    tower = ours["tower"]
    for part, key, words, said in (
        ("attention", "layer_types", _WORDS, _attentions(theirs)),
        ("ffn", "mlp_layer_types", _FFNS, _ffns(theirs)),
    ):
        if len(said) != tower["layers"] or any(word not in words for word in said):
            given = f"num_hidden_layers is {tower['layers']}"
            raise wrong(f"{given}; {key} must list as many of {', '.join(words)}, got {said}")
        each = [tower[part][words.index(word)] for word in said]
        tower[part] = each[0] if all(one == each[0] for one in each) else each


def _attention_of(one: Data) -> int:
    return 0 if need(one, "rate") is None else 1 if need(one, "overlap") else 2


def _ffn_of(one: Data) -> int:
    return int(not need(one, "hashed"))


def _write_layers(ours: Data, theirs: Data) -> None:
    tower = ours["tower"]
    said = theirs | dict(num_hidden_layers=tower["layers"])
    for part, key, words, before, kind in (
        ("attention", "layer_types", _WORDS, _attentions(said), _attention_of),
        ("ffn", "mlp_layer_types", _FFNS, _ffns(said), _ffn_of),
    ):
        each = tower[part] if isinstance(tower[part], list) else [tower[part]] * tower["layers"]
        kinds = [kind(one) for one in each]
        now = [words[k] for k in kinds]
        if now != before:
            theirs[key] = now
        first = dict(zip(reversed(kinds), reversed(each), strict=True))
        tower[part] = [first.get(k) for k in range(len(words))]


_LAYERS = Group(
    ("layer_types", "mlp_layer_types", "compress_ratios", "num_hash_layers"),
    _read_layers, _write_layers, last=True,
)  # fmt: skip
_RATES = {_WORDS[1]: "compress_rate_csa", _WORDS[2]: "compress_rate_hca"}


def _rates(theirs: Data) -> list[Any]:
    said = theirs.get("compress_rates")
    each = [
        (said or _KINDS).get(word) if theirs.get(old) is None else theirs[old]
        for word, old in _RATES.items()
    ]
    if None in each:
        raise wrong(f"compress_rates is {said}; it must have {' and '.join(_RATES)}")
    return each


def _read_rates(theirs: Data, ours: Data) -> None:
    for i, rate in enumerate(_rates(theirs), 1):
        put(ours, f"tower.attention.{i}.rate", rate)


def _write_rates(ours: Data, theirs: Data) -> None:
    before = _rates(theirs)
    now = [get(ours, f"tower.attention.{i}.rate") for i in (1, 2)]
    now = [old if new is rules.ABSENT else new for old, new in zip(before, now, strict=True)]
    if now != before:
        for old in _RATES.values():
            theirs.pop(old, None)
        theirs["compress_rates"] = dict(zip(_RATES, now, strict=True))


# --- RoPE: one for layers that slide, one for those with entries --------------------------------------------------

_PLACES = dict(main=(0,), compress=(1, 2))


def _turned(theirs: Data) -> Any:
    """The share of a head that turns."""
    share, older = theirs.get("partial_rotary_factor"), theirs.get("qk_rope_head_dim")
    nested: Any = ((theirs.get("rope_parameters") or {}).get("main") or {}).get(
        "partial_rotary_factor"
    )
    if nested is not None or share is not None:
        return share if nested is None else nested
    return 64 / 512 if older is None else older / theirs.get("head_dim", 512)


def _rope(theirs: Data, word: str) -> Data:
    """What they say of it, in our words."""
    given = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    if isinstance(given.get("main"), dict) and isinstance(given.get("compress"), dict):
        said = dict(given[word])
    elif word == "main":
        said = dict(rope_theta=theirs.get("rope_theta", 1e4))
    else:
        base = theirs.get("compress_rope_theta", 1.6e5)
        said = {**{k: v for k, v in given.items() if k not in _PLACES}, "rope_theta": base}
        if "yarn" in (said.get("rope_type"), said.get("type")):
            said.setdefault("attention_factor", 1.0)
    said.pop("partial_rotary_factor", None)
    longest = theirs.get("max_position_embeddings")
    return rules.rope_of(dict(rope_parameters=said, max_position_embeddings=longest), {})


def _read_ropes(theirs: Data, ours: Data) -> None:
    for word, places in _PLACES.items():
        for place in places:
            attention = ours["tower"]["attention"][place]
            attention["rope"].update(_rope(theirs, word))
            attention["rope_dim"] = int(attention["head_dim"] * _turned(theirs))


def _write_ropes(ours: Data, theirs: Data) -> None:
    now, said, parts = {}, {}, ours["tower"]["attention"]
    blank = {"base": 1e4, "scaling": None}
    for word, places in _PLACES.items():
        said[word] = blank | _rope(theirs, word)
        one = next((parts[place] for place in places if parts[place] is not None), None)
        now[word] = said[word] if one is None else {key: one["rope"][key] for key in blank}
    one = next(part for part in parts if part is not None)
    same = int(one["head_dim"] * _turned(theirs)) == one["rope_dim"]
    if now == said and same:
        return
    for key in ("rope_theta", "compress_rope_theta", "rope_scaling", "qk_rope_head_dim"):
        theirs.pop(key, None)
    share = one["rope_dim"] / one["head_dim"]
    theirs["partial_rotary_factor"] = share
    theirs["rope_parameters"] = {
        word: rules.rope_words({**rope, "partial": share}) for word, rope in now.items()
    }


_ROPES = Group(
    ("rope_parameters", "rope_scaling", "rope_theta", "compress_rope_theta", "partial_rotary_factor",
     "qk_rope_head_dim"), _read_ropes, _write_ropes,
)  # fmt: skip

# --- the family ---------------------------------------------------------------------------------------------------

_LAYER: Weights = {
    "{attn,ffn}_norm.weight": "norm{1,3}.weight",
    "hc_attn_{fn,base,scale}": "mix1.{weight,bias,scale}", "hc_ffn_{fn,base,scale}": "mix3.{weight,bias,scale}",
    "attn.{wq_a,q_norm,wq_b,wkv,norm,wo_a,wo_b}.weight":
        "attention.{w_dq,q_norm,w_uq,wk,k_norm,w_group,wo}.weight",
    "attn.attn_sink": "attention.sinks",
    "attn.compressor.{wkv,wgate,norm}.weight": "attention.compressor.{wc,wz,norm}.weight",
    "attn.compressor.ape": "attention.compressor.bias",
    "attn.indexer.compressor.{wkv,wgate,norm}.weight": "attention.indexer.compressor.{wc,wz,norm}.weight",
    "attn.indexer.compressor.ape": "attention.indexer.compressor.bias",
    "attn.indexer.{wq_b,weights_proj}.weight": "attention.indexer.{wq,ww}.weight",
    "ffn.gate.weight": "ffn.router.weight", "ffn.gate.bias": "ffn.correction",
    "ffn.gate.tid2eid": To("ffn.table", tensors.WHOLE),
    "ffn.experts.{e}.{w1,w2,w3}.weight": To("ffn.{gate,down,up}", tensors.STACKED),
    "ffn.shared_experts.{w1,w2,w3}.*": "ffn.shared.{gate,down,up}.*",
}  # fmt: skip
# In this order.
_MODULES = {
    ".attn.indexer.compressor.": ".self_attn.compressor.indexer.",
    ".attn.indexer.weights_proj": ".self_attn.compressor.indexer.scorer.weights_proj",
    ".attn.indexer.": ".self_attn.compressor.indexer.", ".attn.": ".self_attn.", ".ffn.": ".mlp.",
    ".wq_a": ".q_a_proj", ".wq_b": ".q_b_proj", ".wkv": ".kv_proj", ".wgate": ".gate_proj",
    ".wo_a": ".o_a_proj", ".wo_b": ".o_b_proj", ".w1": ".gate_proj", ".w2": ".down_proj", ".w3": ".up_proj",
}  # fmt: skip
_SLIDES = Compressed(1, 2, 1, 1, Rope(layout="interleaved"), 2)
_SPARSE = replace(_SLIDES, rate=4, overlap=True, topk=1, index_dim=2)
_EXPERTS = MoE(1, 1, 1, shared=1, score="sqrtsoftplus", limit=10.0, raised=False)
_CHOSEN = replace(_EXPERTS, corrected=True)
_BLANK = llama_like(
    "deepseek_v4", {"DeepseekV4ForCausalLM": LM()}, (_SLIDES, _SPARSE, replace(_SLIDES, rate=128)),
    (replace(_EXPERTS, hashed=1), _CHOSEN, _CHOSEN), tower=dict(streams=Streams()), frame=FRAME_KEYS,
    keys=dict(
        vocab_size=Key("embedding.vocab tower.ffn.0.hashed"),
        rms_norm_eps=Key("tower.norm.eps tower.attention.eps tower.streams.norm_eps", 1e-6),
        num_attention_heads=Key("tower.attention.heads", 64), head_dim=Key("tower.attention.head_dim", 512),
        q_lora_rank=Key("tower.attention.query_latent", 1024), sliding_window=Key("tower.attention.local", 128),
        o_groups=Key("tower.attention.groups", 8), o_lora_rank=Key("tower.attention.rank", 1024),
        index_n_heads=Key("tower.attention.1.index_heads", 64),
        index_head_dim=Key("tower.attention.1.index_dim", 128), index_topk=Key("tower.attention.1.topk", 512),
        attention_dropout=Key("tower.attention.dropout", 0.0), rope_parameters=_ROPES,
        compress_rates=Group(("compress_rates", *_RATES.values()), _read_rates, _write_rates),
        hc_mult=Key("tower.streams.count", 4), hc_sinkhorn_iters=Key("tower.streams.rounds", 20),
        hc_eps=Key("tower.streams.eps", 1e-6), hidden_act=Key("tower.ffn.activation", "silu", ACTIVATIONS),
        moe_intermediate_size=Key("tower.ffn.ffn_dim", 2048), n_routed_experts=Key("tower.ffn.experts", 256),
        num_experts_per_tok=Key("tower.ffn.active", 6), mlp_bias=Key("tower.ffn.shared_bias", False),
        routed_scaling_factor=Key("tower.ffn.gain", 1.5), swiglu_limit=Key("tower.ffn.limit", 10.0),
        scoring_func=Key("tower.ffn.score", "sqrtsoftplus", {w: w for w in ("sqrtsoftplus", "sigmoid", "softmax")}),
        layer_types=_LAYERS,
    ),
    # transformers always normalises, has one shared expert of an expert's width, one key head, and no other biases.
    inert="""norm_topk_prob n_shared_experts num_key_value_heads attention_bias num_nextn_predict_layers
    output_router_logits router_aux_loss_coef router_jitter_noise""",
    aliases=dict(num_local_experts="n_routed_experts", intermediate_size="moe_intermediate_size"),
    layer=_LAYER, carried=(r"(model\.)?mtp\..*",), modules=_MODULES,
)  # fmt: skip
_END = {"hc_head.hc_{fn,base,scale}": "tower.mix.{weight,bias,scale}"}
DEEPSEEK_V4 = replace(
    _BLANK, tensors={**_BLANK.tensors, **_END}, head_tensors={"lm": {"head.weight": "head.weight"}}
)
