"""Families that vary the block of Llama, GPT-2 or BERT, as data: Gemma 3, OLMo 2 and 3, Phi-3, gpt-oss, GPT-NeoX,
ALBERT, ModernBERT."""

from __future__ import annotations

from dataclasses import replace

from regard.attention import GQA
from regard.block import Tower
from regard.checkpoint.families.decoders import (
    ATTENTION_TENSORS,
    BIASED,
    FRAME_KEYS,
    HEAD_TENSORS,
    KEYS,
    LLAMA,
    MLP_TENSORS,
    SWIGLU,
    decoder,
    decoder_heads,
)
from regard.checkpoint.families.encoders import (
    BERT,
    BERT_KEYS,
    EMBEDDING_TENSORS,
    LABEL_TENSORS,
    POST_NORM,
    encoder_heads,
)
from regard.checkpoint.families.keys import (
    ACTIVATIONS,
    LABELS,
    head_dropout,
    rope_at,
    ropes_by_layer,
    sliding_layers,
)
from regard.checkpoint.rules import (
    BY_TURNS,
    BY_TURNS_TRANSPOSED,
    EXPERTS_TRANSPOSED,
    JOINED,
    JOINED_BY_HEAD,
    Data,
    Family,
    Fixed,
    Group,
    Key,
    To,
    block,
    get,
    put,
    under,
)
from regard.layers import LM, MLM, MLP, Classify, Norm
from regard.models import Tokens, TransformerConfig
from regard.models.start import Start
from regard.moe import MoE
from regard.position import Learned, Rope

_EMBEDDING = {
    "model.embed_tokens.weight": "embedding.weight",
    "model.norm.weight": "tower.norm.weight",
}

# --- Gemma 3 ------------------------------------------------------------------------------------------------------


def _read_scale(theirs: Data, ours: Data) -> None:
    put(ours, "tower.attention.scale", theirs.get("query_pre_attn_scalar", 256) ** -0.5)


def _write_scale(ours: Data, theirs: Data) -> None:
    scale = get(ours, "tower.attention.scale")
    if isinstance(scale, float) and scale != theirs.get("query_pre_attn_scalar", 256) ** -0.5:
        theirs["query_pre_attn_scalar"] = round(scale**-2)


_GEMMA = GQA(1, 1, 1, rope=Rope(1e6), qk_norm=1e-6, qk_norm_plus_one=True, scale=1.0)
GEMMA3 = replace(
    LLAMA,
    name="gemma3_text",
    blank=replace(
        decoder(
            (_GEMMA, replace(_GEMMA, rope=Rope(), window=1)),
            MLP(1, "gelu_tanh", gated=True, bias=False),
            order="sandwich",
            norm=Norm(1e-6, rms=True, plus_one=True),
        ),
        embedding=Tokens(1, scaled=True),
    ),
    heads={
        "Gemma3ForCausalLM": LM(),
        "Gemma3TextModel": None,
        "Gemma3TextForSequenceClassification": Classify(2, None, "last", False),
    },
    config={name: rule for name, rule in KEYS.items() if name != "hidden_act"}
    | dict(
        rms_norm_eps=Key("tower.norm.eps tower.attention.qk_norm", 1e-6),
        tie_word_embeddings=Key("head.tied", True),
        num_key_value_heads=Key("tower.attention.kv_heads", 4),
        head_dim=Key("tower.attention.head_dim", 256),
        query_pre_attn_scalar=Group(("query_pre_attn_scalar",), _read_scale, _write_scale),
        attention_bias=BIASED,
        hidden_activation=Key("tower.ffn.activation", "gelu_pytorch_tanh", ACTIVATIONS),
        rope_parameters=ropes_by_layer("rope_theta", "rope_local_base_freq"),
        layer_types=sliding_layers(
            lambda hf, n: [bool((i + 1) % hf.get("sliding_window_pattern", 6)) for i in range(n)],
            window=4096,
            more="sliding_window_pattern",
        ),
        final_logit_softcapping=Fixed(None),
        use_bidirectional_attention=Fixed(False),
    ),
    # transformers' Gemma 3 reads no cap on scores.
    inert="attn_logit_softcapping _sliding_window_pattern",
    tensors={
        **_EMBEDDING,
        **ATTENTION_TENSORS,
        **MLP_TENSORS,
        **block(
            "model.layers.{i}.",
            {
                "input_layernorm.weight": "norm1.weight",
                "post_attention_layernorm.weight": "attention.add.norm.weight",
                "pre_feedforward_layernorm.weight": "norm3.weight",
                "post_feedforward_layernorm.weight": "ffn.add.norm.weight",
            },
        ),
    },
    presets={
        "gemma-3-1b": dict(
            vocab_size=262144,
            hidden_size=1152,
            num_hidden_layers=26,
            num_attention_heads=4,
            num_key_value_heads=1,
            intermediate_size=6912,
            max_position_embeddings=32768,
            sliding_window=512,
        )
    },
)

# --- OLMo ---------------------------------------------------------------------------------------------------------

_OLMO = GQA(1, 1, 1, rope=Rope(), qk_norm=1e-5, qk_norm_whole=True)
_OLMO_KEYS = KEYS | dict(
    rms_norm_eps=Key("tower.norm.eps tower.attention.qk_norm", 1e-5), attention_bias=BIASED
)
OLMO2 = replace(
    LLAMA,
    name="olmo2",
    blank=decoder(_OLMO, SWIGLU, order="inner"),
    heads=decoder_heads("Olmo2", tags=False),
    config=_OLMO_KEYS,
    tensors={
        **_EMBEDDING,
        **ATTENTION_TENSORS,
        **MLP_TENSORS,
        **block(
            "model.layers.{i}.",
            {
                "post_attention_layernorm.weight": "attention.add.norm.weight",
                "post_feedforward_layernorm.weight": "ffn.add.norm.weight",
            },
        ),
    },
    presets={
        "olmo-2-1b": dict(
            vocab_size=100352,
            hidden_size=2048,
            num_hidden_layers=16,
            num_attention_heads=16,
            intermediate_size=8192,
            max_position_embeddings=4096,
            rms_norm_eps=1e-6,
            rope_theta=500000.0,
        )
    },
)
_OLMO3 = replace(_OLMO, rope=Rope(500000.0))
OLMO3 = replace(
    OLMO2,
    name="olmo3",
    blank=decoder((_OLMO3, replace(_OLMO3, window=1)), SWIGLU, order="inner"),
    heads=decoder_heads("Olmo3", tags=False),
    config=_OLMO_KEYS
    | dict(
        # Their older rope_theta is of the layers that see all.
        rope_parameters=ropes_by_layer("rope_theta", ""),
        layer_types=sliding_layers(lambda hf, n: [(i + 1) % 4 != 0 for i in range(n)], window=4096),
    ),
    presets={
        "olmo-3-7b": dict(
            vocab_size=100278,
            hidden_size=4096,
            num_hidden_layers=32,
            num_attention_heads=32,
            intermediate_size=11008,
            max_position_embeddings=65536,
            rms_norm_eps=1e-6,
        )
    },
)

# --- Phi-3 --------------------------------------------------------------------------------------------------------

PHI3 = replace(
    LLAMA,
    name="phi3",
    heads=decoder_heads("Phi3"),
    config=KEYS
    | dict(
        rms_norm_eps=Key("tower.norm.eps", 1e-5),
        resid_pdrop=Key("tower.dropout", 0.0),
        sliding_window=Key("tower.attention.window", None),
        rope_parameters=rope_at(
            "tower.attention.rope",
            share="partial_rotary_factor",
            renamed={"su": "longrope", "yarn": "longrope"},
            original_max_position_embeddings=4096,
        ),
    ),
    # transformers' Phi-3 drops nothing of its embedding.
    inert="embd_pdrop",
    tensors={
        **{name: row for name, row in LLAMA.tensors.items() if "_proj" not in name},
        **block(
            "model.layers.{i}.",
            {
                "self_attn.qkv_proj.*": To("attention.wq.* attention.wk.* attention.wv.*", JOINED),
                "self_attn.o_proj.*": "attention.wo.*",
                "mlp.gate_up_proj.*": To("ffn.gate.* ffn.up.*", JOINED),
                "mlp.down_proj.*": "ffn.down.*",
            },
        ),
    },
    presets={
        "phi-3-mini": dict(
            vocab_size=32064,
            hidden_size=3072,
            num_hidden_layers=32,
            num_attention_heads=32,
            intermediate_size=8192,
            max_position_embeddings=4096,
            sliding_window=2047,
        )
    },
)

# --- gpt-oss ------------------------------------------------------------------------------------------------------

_YARN = dict(rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False)
_OSS = GQA(1, 1, 1, rope=Rope(150000.0), sinks=True)
GPT_OSS = replace(
    LLAMA,
    name="gpt_oss",
    blank=decoder(
        (_OSS, replace(_OSS, window=1)), MoE(1, 1, 1, "quick_gelu", bias=True, limit=7.0)
    ),
    heads=decoder_heads("GptOss"),
    config=KEYS
    | dict(
        rms_norm_eps=Key("tower.norm.eps", 1e-5),
        num_key_value_heads=Key(
            "tower.attention.kv_heads", 8, null=lambda hf: hf["num_attention_heads"]
        ),
        head_dim=Key("tower.attention.head_dim", 64),
        attention_bias=Key("tower.attention.bias tower.attention.out_bias", True),
        num_local_experts=Key("tower.ffn.experts", 128),
        num_experts_per_tok=Key("tower.ffn.active", 4),
        hidden_act=Fixed("silu"),
        swiglu_limit=Fixed(7.0),
        rope_parameters=rope_at(
            "tower.attention.rope",
            rope_scaling={**_YARN, "original_max_position_embeddings": 4096},
        ),
        layer_types=sliding_layers(lambda hf, n: [i % 2 == 0 for i in range(n)], window=128),
    ),
    inert="output_router_logits router_aux_loss_coef experts_per_token initial_context_length",
    aliases=dict(num_experts="num_local_experts"),
    tensors={
        **{name: row for name, row in LLAMA.tensors.items() if ".mlp." not in name},
        **block(
            "model.layers.{i}.",
            {
                "self_attn.sinks": "attention.sinks",
                "mlp.router.*": "ffn.router.*",
                "mlp.experts.gate_up_proj": To("ffn.gate ffn.up", BY_TURNS_TRANSPOSED),
                "mlp.experts.gate_up_proj_bias": To("ffn.gate_bias ffn.up_bias", BY_TURNS),
                "mlp.experts.down_proj": To("ffn.down", EXPERTS_TRANSPOSED),
                "mlp.experts.down_proj_bias": "ffn.down_bias",
            },
        ),
    },
    presets={
        "gpt-oss-20b": dict(
            vocab_size=201088,
            hidden_size=2880,
            num_hidden_layers=24,
            num_attention_heads=64,
            intermediate_size=2880,
            num_local_experts=32,
            max_position_embeddings=131072,
        )
    },
)

# --- GPT-NeoX -----------------------------------------------------------------------------------------------------

GPT_NEOX = Family(
    name="gpt_neox",
    base="gpt_neox.",
    blank=TransformerConfig(
        Tokens(1), Tower(1, 1, GQA(1, rope=Rope(partial=0.25)), MLP(1, "gelu")), max_len=1
    ),
    heads=decoder_heads("GPTNeoX"),
    config={name: rule for name, rule in FRAME_KEYS.items() if name != "rms_norm_eps"}
    | dict(
        num_attention_heads=Key("tower.attention.heads"),
        intermediate_size=Key("tower.ffn.ffn_dim"),
        hidden_act=Key("tower.ffn.activation", "gelu", ACTIVATIONS),
        layer_norm_eps=Key("tower.norm.eps", 1e-5),
        attention_dropout=Key("tower.attention.dropout", 0.0),
        hidden_dropout=Key("tower.dropout embedding.dropout", 0.0),
        classifier_dropout=head_dropout(tag=("classifier_dropout", 0.1)),
        attention_bias=Key("tower.attention.bias tower.attention.out_bias", True),
        use_parallel_residual=Key("tower.order", True, {True: "parallel", False: "pre"}),
        rope_parameters=rope_at(
            "tower.attention.rope", "rotary_emb_base", "rotary_pct", rotary_pct=0.25
        ),
    ),
    tensors={
        "gpt_neox.embed_in.weight": "embedding.weight",
        "gpt_neox.final_layer_norm.*": "tower.norm.*",
        **block(
            "gpt_neox.layers.{i}.",
            {
                "input_layernorm.*": "norm1.*",
                "post_attention_layernorm.*": "norm3.*",
                "attention.query_key_value.*": To(
                    "attention.wq.* attention.wk.* attention.wv.*", JOINED_BY_HEAD
                ),
                "attention.dense.*": "attention.wo.*",
                "mlp.dense_h_to_4h.*": "ffn.up.*",
                "mlp.dense_4h_to_h.*": "ffn.down.*",
            },
        ),
    },
    head_tensors={
        "lm": {"embed_out.weight": "head.weight"},
        "classify": HEAD_TENSORS["classify"],
        "tag": {"classifier.*": "head.out.*"},
    },
    twins=(("embed_out.weight", ("gpt_neox.embed_in.weight",), "head.tied"),),
    derived=(r".*\.attention\.(masked_)?bias", r".*rotary_emb\.inv_freq"),
    presets={
        "pythia-160m": dict(
            vocab_size=50304,
            hidden_size=768,
            num_hidden_layers=12,
            num_attention_heads=12,
            intermediate_size=3072,
            max_position_embeddings=2048,
        )
    },
)

# --- ALBERT -------------------------------------------------------------------------------------------------------


def _read_groups(theirs: Data, ours: Data) -> None:
    tower, groups = ours["tower"], theirs.get("num_hidden_groups", 1)
    n = tower["layers"]
    tower["blocks"] = None if groups == n else [int(i / (n / groups)) for i in range(n)]


def _write_groups(ours: Data, theirs: Data) -> None:
    blocks, n = ours["tower"]["blocks"], ours["tower"]["layers"]
    groups = n if blocks is None else len(set(blocks))
    if groups != theirs.get("num_hidden_groups", 1):
        theirs["num_hidden_groups"] = groups


ALBERT = replace(
    BERT,
    name="albert",
    base="albert.",
    blank=TransformerConfig(
        Tokens(1, Learned(1), types=2, norm=Norm(), width=1),
        replace(POST_NORM, blocks=(0,), ffn_dropped=False),
        max_len=1,
    ),
    heads={**encoder_heads("Albert", "tanh"), "AlbertForPreTraining": MLM()},
    config=BERT_KEYS
    | dict(
        embedding_size=Key("embedding.width", 128),
        num_hidden_groups=Group(("num_hidden_groups",), _read_groups, _write_groups, last=True),
        inner_group_num=Fixed(1),
        hidden_act=Key("tower.ffn.activation head.activation", "gelu_new", ACTIVATIONS),
        hidden_dropout_prob=Key("tower.dropout embedding.dropout", 0.0),
        attention_probs_dropout_prob=Key("tower.attention.dropout", 0.0),
        classifier_dropout=head_dropout(
            classify=("classifier_dropout_prob", 0.1),
            tag=("classifier_dropout_prob", "hidden_dropout_prob"),
        ),
    ),
    inert="net_structure_type gap_size num_memory_blocks down_scale_factor layers_to_keep",
    tensors={
        **under("albert.embeddings.", "embedding.", EMBEDDING_TENSORS),
        "albert.encoder.embedding_hidden_mapping_in.*": "embedding.project.*",
        "albert.pooler.*": "pooler.*",
        **block(
            "albert.encoder.albert_layer_groups.{i}.albert_layers.0.",
            {
                "attention.query.*": "attention.wq.*",
                "attention.key.*": "attention.wk.*",
                "attention.value.*": "attention.wv.*",
                "attention.dense.*": "attention.wo.*",
                "attention.LayerNorm.*": "norm1.*",
                "ffn.*": "ffn.up.*",
                "ffn_output.*": "ffn.down.*",
                "full_layer_layer_norm.*": "norm3.*",
            },
        ),
    },
    head_tensors={
        **LABEL_TENSORS,
        "mlm": {
            "predictions.dense.*": "head.dense.*",
            "predictions.LayerNorm.*": "head.norm.*",
            "predictions.decoder.weight": "head.weight",
            "predictions.bias": To("head.bias", unless="head.weight"),
            "predictions.decoder.bias": To("head.bias", needs="head.weight"),
        },
        "classify": {"albert.pooler.*": "head.dense.*", "classifier.*": "head.out.*"},
    },
    pooler="albert.pooler.weight",
    twins=(
        ("predictions.decoder.weight", ("albert.embeddings.word_embeddings.weight",), "head.tied"),
        ("predictions.decoder.bias", ("predictions.bias",), ""),
    ),
    carried=(r"albert\.pooler\..*", r"sop_classifier\..*", r"predictions\.bias"),
    presets={
        "albert-base": dict(
            vocab_size=30000,
            hidden_size=768,
            num_hidden_layers=12,
            num_attention_heads=12,
            intermediate_size=3072,
            max_position_embeddings=512,
        )
    },
)

# --- ModernBERT ---------------------------------------------------------------------------------------------------

_LOCAL = GQA(1, rope=Rope(10000.0), window=1)
_NORM = Norm(bias=False)
MODERNBERT = Family(
    name="modernbert",
    base="model.",
    blank=TransformerConfig(
        Tokens(1, norm=_NORM),
        Tower(
            1,
            2,
            (replace(_LOCAL, rope=Rope(160000.0), window=None), _LOCAL),
            MLP(1, "gelu", gated=True, bias=False, dropout=0.0),
            norm=_NORM,
            causal=False,
            first_norm=False,
            ffn_dropped=False,
        ),
        max_len=1,
    ),
    heads={
        "ModernBertForMaskedLM": MLM(),
        "ModernBertModel": None,
        "ModernBertForSequenceClassification": Classify(2, "gelu", norm=_NORM),
    },
    config=dict(
        vocab_size=Key("embedding.vocab"),
        hidden_size=Key("tower.dim"),
        num_hidden_layers=Key("tower.layers"),
        num_attention_heads=Key("tower.attention.heads"),
        intermediate_size=Key("tower.ffn.ffn_dim"),
        max_position_embeddings=Key("max_len"),
        hidden_activation=Key("tower.ffn.activation", "gelu", ACTIVATIONS),
        norm_eps=Key("tower.norm.eps embedding.norm.eps head.norm_eps head.norm.eps", 1e-5),
        norm_bias=Key("tower.norm.bias embedding.norm.bias head.norm_bias head.norm.bias", False),
        attention_bias=BIASED,
        mlp_bias=Key("tower.ffn.bias", False),
        attention_dropout=Key("tower.attention.dropout tower.dropout", 0.0),
        embedding_dropout=Key("embedding.dropout", 0.0),
        mlp_dropout=Key("tower.ffn.dropout", 0.0),
        rope_parameters=ropes_by_layer(
            "global_rope_theta", "local_rope_theta", "full_attention sliding_attention"
        ),
        layer_types=sliding_layers(
            lambda hf, n: [bool(i % hf.get("global_attn_every_n_layers", 3)) for i in range(n)],
            window=128,
            more="global_attn_every_n_layers",
            key="local_attention",
            both_ways=True,
        ),
        tie_word_embeddings=Key("head.tied", True),
        decoder_bias=Key("head.vocab_bias", True),
        classifier_bias=Key("head.dense_bias", False),
        classifier_activation=Key("head.activation head.dense", "gelu", ACTIVATIONS),
        classifier_pooling=Key("head.token", "cls", {"cls": "first", "mean": "mean"}),
        classifier_dropout=head_dropout(classify=("classifier_dropout", 0.0)),
        id2label=LABELS,
    ),
    inert="""initializer_cutoff_factor deterministic_flash_attn sparse_prediction sparse_pred_ignore_index
    reference_compile repad_logits_with_grad""",
    tensors={
        "model.embeddings.tok_embeddings.weight": "embedding.weight",
        "model.embeddings.norm.*": "embedding.norm.*",
        "model.final_norm.*": "tower.norm.*",
        **block(
            "model.layers.{i}.",
            {
                "attn_norm.*": "norm1.*",
                "attn.Wqkv.*": To("attention.wq.* attention.wk.* attention.wv.*", JOINED),
                "attn.Wo.*": "attention.wo.*",
                "mlp_norm.*": "norm3.*",
                "mlp.Wi.*": To("ffn.gate.* ffn.up.*", JOINED),
                "mlp.Wo.*": "ffn.down.*",
            },
        ),
    },
    head_tensors={
        "mlm": {
            "head.dense.*": "head.dense.*",
            "head.norm.*": "head.norm.*",
            "decoder.*": "head.*",
        },
        "classify": {
            "head.dense.*": "head.dense.*",
            "head.norm.*": "head.norm.*",
            "classifier.*": "head.out.*",
        },
    },
    twins=(("decoder.weight", ("model.embeddings.tok_embeddings.weight",), "head.tied"),),
    start=Start("modernbert"),
    presets={
        "modernbert-base": dict(
            vocab_size=50368,
            hidden_size=768,
            num_hidden_layers=22,
            num_attention_heads=12,
            intermediate_size=1152,
            max_position_embeddings=8192,
        )
    },
)
