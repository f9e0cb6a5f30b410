"""GPT-2 and the decoders of its time."""

from __future__ import annotations

from dataclasses import replace

from regard.attention import GQA
from regard.block import Tower
from regard.checkpoint import rules, tensors
from regard.checkpoint.families.common import (
    BIASED,
    FRAME_KEYS,
    HEAD_TENSORS,
    NORM_EPS,
    decoder_heads,
    sizes,
)
from regard.checkpoint.family import Family
from regard.checkpoint.rules import ACTIVATIONS, Data, Key, fixed
from regard.checkpoint.tensors import To
from regard.layers import MLP
from regard.models import Tokens, TransformerConfig
from regard.models.init import Start
from regard.position import Learned, Rope


def _gpt2(dim: int, layers: int, heads: int) -> Data:
    dropouts = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    shape = dict(n_embd=dim, n_layer=layers, n_head=heads)
    return dict(vocab_size=50257, n_positions=1024, **shape, **dropouts)


GPT2 = Family(
    name="gpt2", base="transformer.",
    blank=TransformerConfig(
        Tokens(1, Learned(1)), Tower(1, 1, GQA(1, bias=True, out_bias=True), MLP(1, "gelu_tanh")), max_len=1,
    ),
    heads=decoder_heads("GPT2", "LMHeadModel"),
    config=dict(
        vocab_size=Key("embedding.vocab"), n_embd=Key("tower.dim"), n_layer=Key("tower.layers"),
        n_head=Key("tower.attention.heads"), n_positions=Key("max_len embedding.position.max_len"),
        n_inner=Key("tower.ffn.ffn_dim", lambda hf: 4 * hf["n_embd"]),
        activation_function=Key("tower.ffn.activation", "gelu_new", ACTIVATIONS), layer_norm_epsilon=NORM_EPS,
        tie_word_embeddings=Key("head.tied", True), id2label=rules.LABELS, is_causal=rules.CAUSAL,
        bos_token_id=rules.ids_below(50256, "bos_token_id", "eos_token_id"),
        classifier_dropout=FRAME_KEYS["classifier_dropout"], resid_pdrop=Key("tower.dropout", 0.1),
        embd_pdrop=Key("embedding.dropout", 0.1), attn_pdrop=Key("tower.attention.dropout", 0.1),
        **fixed(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False),
        **fixed(add_cross_attention=False),
    ),
    inert="""n_ctx n_special predict_special_tokens reorder_and_upcast_attn summary_activation
    summary_first_dropout summary_proj_to_labels summary_type summary_use_proj""",
    aliases=dict(hidden_size="n_embd", num_attention_heads="n_head", num_hidden_layers="n_layer")
    | dict(max_position_embeddings="n_positions"),
    tensors={
        "{wte,wpe}.weight": "embedding.{weight,position.weight}",
        "ln_f.*": "tower.norm.*",
        "h.{i}.": {
            "ln_{1,2}.*": "norm{1,3}.*",
            "attn.c_attn.*": To("attention.w{q,k,v}.*", tensors.transposed(tensors.JOINED)),
            "attn.c_proj.*": To("attention.wo.*", tensors.TRANSPOSED),
            "mlp.{c_fc,c_proj}.*": To("ffn.{up,down}.*", tensors.TRANSPOSED),
        },
    },
    head_tensors={**HEAD_TENSORS, "tag": {"classifier.*": "head.out.*"}},
    derived=(r".*\.attn\.(masked_)?bias",), start=Start("gpt2"),
    presets={
        "gpt2": _gpt2(768, 12, 12), "gpt2-medium": _gpt2(1024, 24, 16), "gpt2-large": _gpt2(1280, 36, 20),
        "gpt2-xl": _gpt2(1600, 48, 25),
    },
)  # fmt: skip
GPT_NEOX = Family(
    name="gpt_neox", base="gpt_neox.",
    blank=TransformerConfig(
        Tokens(1), Tower(1, 1, GQA(1, rope=Rope(partial=0.25)), MLP(1, "gelu")), max_len=1,
    ),
    heads=decoder_heads("GPTNeoX"),
    config={name: rule for name, rule in FRAME_KEYS.items() if name != "rms_norm_eps"} | dict(
        num_attention_heads=Key("tower.attention.heads"), intermediate_size=Key("tower.ffn.ffn_dim"),
        hidden_act=Key("tower.ffn.activation", "gelu", ACTIVATIONS), layer_norm_eps=NORM_EPS,
        attention_dropout=Key("tower.attention.dropout", 0.0),
        hidden_dropout=Key("tower.dropout embedding.dropout", 0.0),
        attention_bias=replace(BIASED, default=True),
        use_parallel_residual=Key("tower.order", True, {True: "parallel", False: "pre"}),
        rope_parameters=rules.rope_at(
            "tower.attention.rope", "rotary_emb_base", "rotary_pct", rotary_pct=0.25,
        ),
    ),
    tensors={
        "embed_in.weight": "embedding.weight", "final_layer_norm.*": "tower.norm.*",
        "layers.{i}.": {
            "{input,post_attention}_layernorm.*": "norm{1,3}.*",
            "attention.query_key_value.*": To("attention.w{q,k,v}.*", tensors.by_head("gqa", "heads")),
            "attention.dense.*": "attention.wo.*", "mlp.dense_{h_to_4h,4h_to_h}.*": "ffn.{up,down}.*",
        },
    },
    head_tensors={
        "lm": {"embed_out.weight": "head.weight"}, "classify": HEAD_TENSORS["classify"],
        "tag": {"classifier.*": "head.out.*"},
    },
    derived=(r".*\.attention\.(masked_)?bias", r".*rotary_emb\.inv_freq"),
    presets={"pythia-160m": sizes(50304, 768, 12, 12, 3072, 2048)},
)  # fmt: skip
