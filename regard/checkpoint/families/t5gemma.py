"""T5Gemma: an encoder and a decoder, each a Gemma 2 with a config of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from regard.attention import GQA
from regard.block import Tower
from regard.checkpoint import rules, tensors
from regard.checkpoint.families.common import ATTENTION, GATED, PLUS_ONE, ROTARY, sizes, sliding
from regard.checkpoint.family import Family
from regard.checkpoint.nested import Nested
from regard.checkpoint.rules import ACTIVATIONS, Data, Group, Key, Keys, fixed
from regard.checkpoint.tensors import Weights
from regard.layers import LM, MLP
from regard.models import EncoderDecoderConfig, Tokens
from regard.models.init import Start

_ENCODER = Tower(
    1, 2, sliding(replace(ROTARY, scale=1.0)), MLP(1, "gelu_tanh", gated=True, bias=False, dropout=0.0),
    order="sandwich", norm=PLUS_ONE, causal=False, end_dropped=True,
)  # fmt: skip
_DECODER = replace(_ENCODER, cross=GQA(1, 1, 1, scale=1.0), causal=True)
_LENGTH = 8192  # that of a part which says none


def _part_keys(attention: str, sides: int) -> Keys:
    """Of a tower whose attentions these are; what a missing key means is Gemma 2's 2B."""
    return dict(
        vocab_size=Key("embedding.vocab", 256000), hidden_size=Key("tower.dim", 2304),
        num_hidden_layers=Key("tower.layers", 26), intermediate_size=Key("tower.ffn.ffn_dim", 9216),
        num_attention_heads=Key(f"{attention}.heads", 8), num_key_value_heads=Key(f"{attention}.kv_heads", 4),
        head_dim=Key(f"{attention}.head_dim", 256), attention_bias=Key(attention + ".{bias,out_bias}", False),
        hidden_activation=Key("tower.ffn.activation", "gelu_pytorch_tanh", ACTIVATIONS),
        rms_norm_eps=Key("tower.norm.eps", 1e-6), rope_parameters=rules.ROPE,
        query_pre_attn_scalar=Key(f"{attention}.scale", 256, rules.ROOT),
        attn_logit_softcapping=Key(f"{attention}.softcap", 50.0, null=None),
        layer_types=rules.sliding_layers(lambda hf, i: i % 2 == 0, 4096, sides=sides),
        **fixed(per_layer_config=None),
    )  # fmt: skip


def _read_ends(theirs: Data, ours: Data) -> None:
    """The longest input of either side, and the width of what the decoder reads of the encoder."""
    ours["max_len"] = max(_lengths(theirs))
    dim = ours["encoder"]["dim"]
    ours["decoder"]["memory_dim"] = None if dim == ours["decoder"]["dim"] else dim


def _write_ends(ours: Data, theirs: Data) -> None:
    if ours["max_len"] is not None and max(_lengths(theirs)) != ours["max_len"]:
        for name in ("encoder", "decoder"):
            theirs[name] = {**(theirs.get(name) or {}), "max_position_embeddings": ours["max_len"]}


def _lengths(theirs: Data) -> list[Any]:
    parts = (theirs.get(name) or {} for name in ("encoder", "decoder"))
    return [part.get("max_position_embeddings", _LENGTH) for part in parts]


# What the whole says of dropout stands in place of what a part does.
_IDLE = "max_position_embeddings attention_dropout dropout_rate classifier_dropout_rate"
_ADDED = "{attention,ffn}.add.norm.weight"
_ROWS: Weights = {
    **ATTENTION, **GATED, "{pre_self_attn,pre_feedforward}_layernorm.weight": "norm{1,3}.weight",
    "post_{self_attn,feedforward}_layernorm.weight": _ADDED,
    "cross_attn.{q,k,v,o}_proj.*": "cross.w{q,k,v,o}.*", "pre_cross_attn_layernorm.weight": "norm2.weight",
    "post_cross_attn_layernorm.weight": "cross.add.norm.weight",
}  # fmt: skip


def _tensors(tower: str, side: str) -> Weights:
    return {
        **tensors.under(f"{tower}.layers.{{i}}.", f"{tower}.blocks.{{i}}.", _ROWS),
        f"{tower}.embed_tokens.weight": f"{side}.weight", f"{tower}.norm.weight": f"{tower}.norm.weight",
    }  # fmt: skip


_LARGE = sizes(256000, 3584, 42, 16, 14336, 8192, num_key_value_heads=8)
T5GEMMA = Family(
    name="t5gemma", base="model.",
    blank=EncoderDecoderConfig(
        Tokens(1, scaled=True), _ENCODER, Tokens(1, scaled=True), _DECODER, shared=False, max_len=1,
    ),
    heads={"T5GemmaForConditionalGeneration": LM(), "T5GemmaModel": None},
    config=dict(
        encoder=Nested(
            {"tower": "encoder", "embedding": "source"}, _part_keys("tower.attention", 1),
            f"{_IDLE} final_logit_softcapping",
        ),
        decoder=Nested(
            {"tower": "decoder", "embedding": "target", "head": "head"},
            _part_keys("tower.{attention,cross}", 0) | dict(
                final_logit_softcapping=Key("head.logit_softcap", 30.0, null=None),
                is_causal=rules.Fixed(True, null=False),
            ),
            _IDLE,
        ),
        max_position_embeddings=Group((), _read_ends, _write_ends),
        dropout_rate=Key("{encoder,decoder,source,target,encoder.ffn,decoder.ffn}.dropout", 0.0),
        attention_dropout=Key("{encoder.attention,decoder.attention,decoder.cross}.dropout", 0.0),
        tie_word_embeddings=Key("head.tied", True),
    ),
    inert="vocab_size classifier_dropout_rate",
    tensors={**_tensors("encoder", "source"), **_tensors("decoder", "target")},
    head_tensors={"lm": {"lm_head.out_proj.weight": "head.weight"}},
    derived=(r".*rotary_emb\.inv_freq",), start=Start("t5gemma"),
    presets={"t5gemma-2b-2b": {}, "t5gemma-9b-9b": {"encoder": _LARGE, "decoder": _LARGE}},
)  # fmt: skip
