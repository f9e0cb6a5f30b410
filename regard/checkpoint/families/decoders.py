"""Decoder-only families as data: GPT-2, Llama and what varies its block, experts, latent and recurrent attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from regard.attention import DSA, GQA, MLA, DeltaRule
from regard.block import Tower
from regard.checkpoint import rules
from regard.checkpoint.rules import ACTIVATIONS, Data, Family, Key, Keys, To, Weights, fixed
from regard.layers import LM, MLP, Classify, Norm, Tag
from regard.models import Tokens, TransformerConfig
from regard.models.start import Start
from regard.moe import MoE
from regard.position import Learned, Rope

# --- what most decoders share --------------------------------------------------------------------------------------


def decoder_heads(
    name: str, lm: str = "ForCausalLM", *, labels: bool = True, tags: bool = True
) -> Data:
    """Their classes: the language model, the bare body, a label of the whole at the last token, one of each token."""
    heads: Data = {f"{name}{lm}": LM(), f"{name}Model": None}
    if labels:
        heads[f"{name}ForSequenceClassification"] = Classify(2, None, "last", False)
    if labels and tags:
        heads[f"{name}ForTokenClassification"] = Tag(2)
    return heads


def sizes(
    vocab: int, dim: int, layers: int, heads: int, ffn: int, context: int, **more: Any
) -> Data:
    """The keys of a preset."""
    body = dict(hidden_size=dim, num_hidden_layers=layers, num_attention_heads=heads)
    ends = dict(vocab_size=vocab, intermediate_size=ffn, max_position_embeddings=context)
    return body | ends | more


# Keys of the frame around attention and feed-forward.
FRAME_KEYS: Keys = dict(
    vocab_size=Key("embedding.vocab"), hidden_size=Key("tower.dim"), num_hidden_layers=Key("tower.layers"),
    max_position_embeddings=Key("max_len"), rms_norm_eps=Key("tower.norm.eps", 1e-6),
    tie_word_embeddings=Key("head.tied", False),
    classifier_dropout=rules.head_dropout(tag=("classifier_dropout", 0.1)), id2label=rules.LABELS,
    is_causal=rules.CAUSAL, **fixed(token_classification_bias=True, per_layer_config=None),
)  # fmt: skip
# Grouped-query attention with RoPE, a gated feed-forward.
KEYS: Keys = FRAME_KEYS | dict(
    num_attention_heads=Key("tower.attention.heads"),
    num_key_value_heads=Key("tower.attention.kv_heads", lambda hf: hf["num_attention_heads"]),
    head_dim=Key("tower.attention.head_dim", lambda hf: hf["hidden_size"] // hf["num_attention_heads"]),
    attention_dropout=Key("tower.attention.dropout", 0.0), rope_parameters=rules.ROPE,
    intermediate_size=Key("tower.ffn.ffn_dim"), hidden_act=Key("tower.ffn.activation", "silu", ACTIVATIONS),
)  # fmt: skip
EIGHT_KV = Key("tower.attention.kv_heads", 8, null=lambda hf: hf["num_attention_heads"])
BIASED = Key("tower.attention.{bias,out_bias}", False)
NORM_EPS = Key("tower.norm.eps", 1e-5)

# Rows of a layer.
NORMS = {"{input,post_attention}_layernorm.weight": "norm{1,3}.weight"}
ATTENTION = {
    "self_attn.{q,k,v,o}_proj.*": "attention.w{q,k,v,o}.*",
    "self_attn.{q,k}_norm.weight": "attention.{q,k}_norm.weight",
}
GATED = {"mlp.{gate,up,down}_proj.*": "ffn.{gate,up,down}.*"}
EXPERTS = {
    "mlp.gate.weight": "ffn.router.weight",
    "mlp.experts.{e}.{gate,up,down}_proj.weight": To("ffn.{gate,up,down}", rules.STACKED),
}
SCORE = {"score.*": "head.out.*"}
HEAD_TENSORS = {"lm": {"lm_head.weight": "head.weight"}, "classify": SCORE, "tag": SCORE}

# --- GPT-2 and GPT-NeoX -------------------------------------------------------------------------------------------


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
            "attn.c_attn.*": To("attention.w{q,k,v}.*", rules.transposed(rules.JOINED)),
            "attn.c_proj.*": To("attention.wo.*", rules.TRANSPOSED),
            "mlp.{c_fc,c_proj}.*": To("ffn.{up,down}.*", rules.TRANSPOSED),
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
            "attention.query_key_value.*": To("attention.w{q,k,v}.*", rules.by_head("gqa", "heads")),
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

# --- Llama and its kin --------------------------------------------------------------------------------------------

_GQA, SWIGLU = GQA(1, 1, 1, rope=Rope()), MLP(1, "silu", gated=True, bias=False)


def llama_like(
    name: str,
    heads: Data,
    attention: Any = _GQA,
    ffn: Any = SWIGLU,
    *,
    frame: Keys = KEYS,
    keys: Keys | None = None,
    layer: Weights = NORMS | ATTENTION | GATED,
    scaled: bool = False,
    tower: Data | None = None,
    **more: Any,
) -> Family:
    """A family with Llama's frame. Where layers differ, `attention` or `ffn` lists one config for each kind. `keys`:
    what is not as in `frame` (None: no such key); `layer`: its tensors; `scaled`: of the embedding; `tower`: what else
    is chosen."""
    kinds = next((len(part) for part in (attention, ffn) if isinstance(part, tuple)), 1)
    body = Tower(1, kinds, attention, ffn, **{"norm": Norm(1e-6, rms=True), **(tower or {})})
    config = frame | (keys or {})
    return Family(
        name=name, base="model.", blank=TransformerConfig(Tokens(1, scaled=scaled), body, max_len=1),
        heads=heads, config={key: rule for key, rule in config.items() if rule is not None},
        tensors={
            "embed_tokens.weight": "embedding.weight", "norm.weight": "tower.norm.weight",
            "layers.{i}.": layer,
        },
        head_tensors=HEAD_TENSORS, derived=(r".*rotary_emb\.inv_freq",), **more,
    )  # fmt: skip


def _sliding(attention: GQA, **changes: Any) -> tuple[GQA, GQA]:
    """Attention of the layers that see all, and of those that slide."""
    return attention, replace(attention, window=1, **changes)


def _llama3(factor: float) -> Data:
    rope = dict(rope_type="llama3", rope_theta=5e5, factor=factor)
    rope |= dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    return dict(num_key_value_heads=8, rms_norm_eps=1e-5, rope_parameters=rope)


LLAMA = llama_like(
    "llama", decoder_heads("Llama"), keys=dict(attention_bias=BIASED, mlp_bias=Key("tower.ffn.bias", False)),
    presets={
        "llama": sizes(32000, 768, 12, 12, 2048, 2048, num_key_value_heads=4, rms_norm_eps=1e-5),
        "llama-2-7b": sizes(32000, 4096, 32, 32, 11008, 4096, rms_norm_eps=1e-5),
        "llama-3.1-8b": sizes(128256, 4096, 32, 32, 14336, 131072, **_llama3(8.0)),
        "llama-3.2-1b": sizes(128256, 2048, 16, 32, 8192, 131072, tie_word_embeddings=True, **_llama3(32.0)),
    },
)  # fmt: skip
MISTRAL = llama_like(
    "mistral", decoder_heads("Mistral"),
    keys=dict(num_key_value_heads=EIGHT_KV, sliding_window=Key("tower.attention.window", 4096, null=None)),
    presets={"mistral-7b": sizes(32000, 4096, 32, 32, 14336, 32768, rms_norm_eps=1e-5)},
)  # fmt: skip
MIXTRAL = llama_like(
    "mixtral", decoder_heads("Mixtral"), replace(_GQA, rope=Rope(1e6)), MoE(1, 1, 1),
    keys=dict(
        rms_norm_eps=NORM_EPS, num_key_value_heads=EIGHT_KV, num_local_experts=Key("tower.ffn.experts", 8),
        num_experts_per_tok=Key("tower.ffn.active", 2), sliding_window=Key("tower.attention.window", None),
    ),
    inert="output_router_logits router_aux_loss_coef router_jitter_noise",
    aliases=dict(num_experts="num_local_experts"),
    layer={
        **NORMS, **ATTENTION, "block_sparse_moe.gate.weight": "ffn.router.weight",
        "block_sparse_moe.experts.{e}.{w1,w2,w3}.weight": To("ffn.{gate,down,up}", rules.STACKED),
    },
    presets={"mixtral-8x7b": sizes(32000, 4096, 32, 32, 14336, 32768)},
)  # fmt: skip
# The last layers slide, where use_sliding_window is on.
_LAST_SLIDE = rules.sliding_layers(
    lambda hf, i: i >= hf.get("max_window_layers", 28), 4096, more="max_window_layers",
    switch="use_sliding_window",
)  # fmt: skip
_SMALL_QWEN = dict(rope_theta=1e6, tie_word_embeddings=True)
QWEN2 = llama_like(
    "qwen2", decoder_heads("Qwen2"), _sliding(replace(_GQA, bias=True)), keys=dict(layer_types=_LAST_SLIDE),
    presets={"qwen2-0.5b": sizes(151936, 896, 24, 14, 4864, 32768, num_key_value_heads=2, **_SMALL_QWEN)},
)  # fmt: skip
QWEN3 = llama_like(
    "qwen3", decoder_heads("Qwen3"), _sliding(replace(_GQA, qk_norm=1e-6)),
    keys=dict(
        rms_norm_eps=Key("tower.norm.eps tower.attention.qk_norm", 1e-6),
        head_dim=Key("tower.attention.head_dim", 128), attention_bias=BIASED, layer_types=_LAST_SLIDE,
    ),
    presets={"qwen3-0.6b": sizes(151936, 1024, 28, 16, 3072, 40960, num_key_value_heads=8, **_SMALL_QWEN)},
)  # fmt: skip
PHI3 = llama_like(
    "phi3", decoder_heads("Phi3"),
    keys=dict(
        rms_norm_eps=NORM_EPS, resid_pdrop=Key("tower.dropout", 0.0),
        sliding_window=Key("tower.attention.window", None),
        pad_token_id=rules.ids_below(32000, "pad_token_id", "eos_token_id"),
        rope_parameters=rules.rope_at(
            "tower.attention.rope", share="partial_rotary_factor",
            renamed={"su": "longrope", "yarn": "longrope"}, original_max_position_embeddings=4096,
        ),
    ),
    # transformers' Phi-3 drops nothing of its embedding.
    inert="embd_pdrop",
    layer={
        **NORMS, "self_attn.qkv_proj.*": To("attention.w{q,k,v}.*", rules.JOINED),
        "self_attn.o_proj.*": "attention.wo.*", "mlp.gate_up_proj.*": To("ffn.{gate,up}.*", rules.JOINED),
        "mlp.down_proj.*": "ffn.down.*",
    },
    presets={"phi-3-mini": sizes(32064, 3072, 32, 32, 8192, 4096, sliding_window=2047)},
)  # fmt: skip

# --- other places for the norms: Gemma 3 and OLMo -----------------------------------------------------------------

# Norms of what attention and feed-forward add, before it is added.
_ADDED_NORMS = {"post_{attention,feedforward}_layernorm.weight": "{attention,ffn}.add.norm.weight"}
_GEMMA = GQA(1, 1, 1, rope=Rope(1e6), qk_norm=1e-6, qk_norm_plus_one=True, scale=1.0)
_PLUS_ONE = Norm(1e-6, rms=True, plus_one=True)
GEMMA3 = llama_like(
    "gemma3_text",
    {
        "Gemma3ForCausalLM": LM(), "Gemma3TextModel": None,
        "Gemma3TextForSequenceClassification": Classify(2, None, "last", False),
    },
    _sliding(_GEMMA, rope=Rope()), MLP(1, "gelu_tanh", gated=True, bias=False), scaled=True,
    tower=dict(order="sandwich", norm=_PLUS_ONE),
    keys=dict(
        hidden_act=None, rms_norm_eps=Key("tower.norm.eps tower.attention.qk_norm", 1e-6),
        tie_word_embeddings=Key("head.tied", True), num_key_value_heads=Key("tower.attention.kv_heads", 4),
        head_dim=Key("tower.attention.head_dim", 256),
        query_pre_attn_scalar=Key(
            "tower.attention.scale", 256, (lambda n: n**-0.5, lambda scale: round(scale**-2)),
        ),
        attention_bias=BIASED,
        hidden_activation=Key("tower.ffn.activation", "gelu_pytorch_tanh", ACTIVATIONS),
        rope_parameters=rules.ropes_by_layer(("rope_theta", 1e6), ("rope_local_base_freq", 1e4)),
        layer_types=rules.sliding_layers(
            lambda hf, i: (i + 1) % hf.get("sliding_window_pattern", 6) > 0, 4096,
            more="sliding_window_pattern",
        ),
        **fixed(final_logit_softcapping=None, use_bidirectional_attention=False),
    ),
    # transformers' Gemma 3 reads no cap on scores.
    inert="attn_logit_softcapping _sliding_window_pattern",
    layer={
        **ATTENTION, **GATED, **_ADDED_NORMS, "{input,pre_feedforward}_layernorm.weight": "norm{1,3}.weight",
    },
    presets={
        "gemma-3-1b": sizes(262144, 1152, 26, 4, 6912, 32768, num_key_value_heads=1, sliding_window=512),
    },
)  # fmt: skip
_OLMO = GQA(1, 1, 1, rope=Rope(wide=True), qk_norm=1e-5, qk_norm_whole=True)
_OLMO_LAYER = ATTENTION | GATED | _ADDED_NORMS
_OLMO_KEYS: Keys = dict(
    rms_norm_eps=Key("tower.norm.eps tower.attention.qk_norm", 1e-5), attention_bias=BIASED
)
OLMO2 = llama_like(
    "olmo2", decoder_heads("Olmo2", tags=False), _OLMO, tower=dict(order="inner"), keys=_OLMO_KEYS,
    layer=_OLMO_LAYER,
    presets={"olmo-2-1b": sizes(100352, 2048, 16, 16, 8192, 4096, rms_norm_eps=1e-6, rope_theta=500000.0)},
)  # fmt: skip
OLMO3 = llama_like(
    "olmo3", decoder_heads("Olmo3", tags=False), _sliding(replace(_OLMO, rope=Rope(5e5, wide=True))),
    tower=dict(order="inner"),
    keys=dict(
        **_OLMO_KEYS,
        # Their older rope_theta is of the layers that see all.
        rope_parameters=rules.ropes_by_layer(("rope_theta", 5e5), ("", 5e5)),
        layer_types=rules.sliding_layers(lambda hf, i: (i + 1) % 4 != 0, 4096),
    ),
    layer=_OLMO_LAYER, presets={"olmo-3-7b": sizes(100278, 4096, 32, 32, 11008, 65536, rms_norm_eps=1e-6)},
)  # fmt: skip

# --- gpt-oss ------------------------------------------------------------------------------------------------------

_YARN = dict(rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False)
_YARN |= dict(original_max_position_embeddings=4096)
GPT_OSS = llama_like(
    "gpt_oss", decoder_heads("GptOss"), _sliding(GQA(1, 1, 1, rope=Rope(150000.0), sinks=True)),
    MoE(1, 1, 1, "quick_gelu", bias=True, limit=7.0),
    keys=dict(
        rms_norm_eps=NORM_EPS, num_key_value_heads=EIGHT_KV, head_dim=Key("tower.attention.head_dim", 64),
        attention_bias=replace(BIASED, default=True), num_local_experts=Key("tower.ffn.experts", 128),
        num_experts_per_tok=Key("tower.ffn.active", 4), **fixed(hidden_act="silu", swiglu_limit=7.0),
        rope_parameters=rules.rope_at("tower.attention.rope", rope_scaling=_YARN),
        layer_types=rules.sliding_layers(lambda hf, i: i % 2 == 0, 128),
    ),
    inert="output_router_logits router_aux_loss_coef experts_per_token initial_context_length",
    aliases=dict(num_experts="num_local_experts"),
    layer={
        **NORMS, **ATTENTION, "self_attn.sinks": "attention.sinks", "mlp.router.*": "ffn.router.*",
        "mlp.experts.gate_up_proj": To("ffn.{gate,up}", rules.transposed(rules.BY_TURNS)),
        "mlp.experts.gate_up_proj_bias": To("ffn.{gate,up}_bias", rules.BY_TURNS),
        "mlp.experts.down_proj": To("ffn.down", rules.TRANSPOSED),
        "mlp.experts.down_proj_bias": "ffn.down_bias",
    },
    presets={"gpt-oss-20b": sizes(201088, 2880, 24, 64, 2880, 131072, num_local_experts=32)},
)  # fmt: skip

# --- DeepSeek: latent attention, experts, the indexer of sparse attention -----------------------------------------

_MLA = MLA(1, 1, 1, 2, 1, rope=Rope(layout="interleaved"))
_EXPERTS_V3 = MoE(1, 1, 1, shared=1, score="sigmoid", corrected=True)


def _latent_keys(at: str, shared: int, gain: float) -> Keys:
    """`at`: where the MLA stands (inside DSA for V3.2); `shared`, `gain`: what a missing key means."""
    return FRAME_KEYS | dict(
        num_attention_heads=Key(f"{at}.heads"), kv_lora_rank=Key(f"{at}.latent"),
        q_lora_rank=Key(f"{at}.query_latent", 1536, null=None), qk_nope_head_dim=Key(f"{at}.head_dim"),
        qk_rope_head_dim=Key(f"{at}.rope_dim tower.attention.rope_dim"), v_head_dim=Key(f"{at}.value_dim"),
        attention_bias=Key(at + ".{bias,out_bias}", False), attention_dropout=Key(f"{at}.dropout", 0.0),
        rope_parameters=rules.rope_at(f"{at}.rope"), intermediate_size=Key("tower.ffn.0.ffn_dim"),
        hidden_act=Key("tower.ffn.activation", "silu", ACTIVATIONS),
        moe_intermediate_size=Key("tower.ffn.1.ffn_dim"), n_routed_experts=Key("tower.ffn.1.experts"),
        num_experts_per_tok=Key("tower.ffn.1.active"), n_shared_experts=Key("tower.ffn.1.shared", shared),
        routed_scaling_factor=Key("tower.ffn.1.gain", gain), **fixed(moe_layer_freq=1),
    )  # fmt: skip


_SHARED_BIAS = Key("tower.ffn.0.bias tower.ffn.1.shared_bias", False)
_LATENT_INERT = """num_key_value_heads head_dim qk_head_dim num_nextn_predict_layers ep_size aux_loss_alpha
seq_aux"""
_V3: Keys = dict(
    norm_topk_prob=Key("tower.ffn.1.normalized", True), n_group=rules.expert_groups(None, (8, 4)),
    **fixed(scoring_func="sigmoid"), mlp_layer_types=rules.experts_by_layer(3),
)  # fmt: skip


def _latent_layer(at: str) -> Weights:
    low = f"{at}.w_dq.weight"
    return {
        **NORMS, **GATED, **EXPERTS, "self_attn.q_a_{proj,layernorm}.*": at + ".{w_dq,q_norm}.*",
        "self_attn.kv_a_{proj_with_mqa,layernorm}.*": at + ".{w_dkv,kv_norm}.*",
        "self_attn.{kv_b,o}_proj.*": at + ".{w_ukv,wo}.*",
        "self_attn.q_b_proj.weight": To(f"{at}.w_uq.weight", needs=low),
        "self_attn.q_proj.weight": To(f"{at}.w_uq.weight", unless=low),
        "mlp.gate.e_score_correction_bias": "ffn.correction",
        "mlp.shared_experts.{gate,up,down}_proj.*": "ffn.shared.{gate,up,down}.*",
    }  # fmt: skip


def _latent_sizes(mscale: float, experts: int, active: int, expert_dim: int) -> Data:
    rope = dict(rope_type="yarn", factor=40.0, original_max_position_embeddings=4096)
    return dict(
        rope_parameters={**rope, "mscale": mscale, "mscale_all_dim": mscale},
        **dict(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
        **dict(n_routed_experts=experts, num_experts_per_tok=active), moe_intermediate_size=expert_dim,
    )  # fmt: skip


_SIZES_V3 = sizes(129280, 7168, 61, 128, 18432, 163840) | _latent_sizes(1.0, 256, 8, 2048)
_LATENT_ALIASES = dict.fromkeys(("num_experts", "num_local_experts"), "n_routed_experts")
_LATENT_ALIASES |= dict(num_mtp_layers="num_nextn_predict_layers")
# The extra layer that predicts one token more.
_NEXT_TOKEN_LAYER = (r"model\.layers\.{layers}\..*",)
DEEPSEEK_V2 = llama_like(
    "deepseek_v2", decoder_heads("DeepseekV2", tags=False), _MLA,
    (SWIGLU, MoE(1, 1, 1, shared=1, normalized=False)), frame=_latent_keys("tower.attention", 2, 1.0),
    keys=dict(
        mlp_bias=_SHARED_BIAS, n_group=rules.expert_groups("group_limited_greedy", (1, 1)),
        **fixed(scoring_func="softmax"), mlp_layer_types=rules.experts_by_layer(0),
    ),
    # Whatever norm_topk_prob says, transformers never normalises for V2.
    inert=f"{_LATENT_INERT} norm_topk_prob", aliases=_LATENT_ALIASES, layer=_latent_layer("attention"),
    presets={
        "deepseek-v2-lite": sizes(102400, 2048, 27, 16, 10944, 163840)
        | _latent_sizes(0.707, 64, 6, 1408)
        | dict(q_lora_rank=None, first_k_dense_replace=1),
    },
)  # fmt: skip
_INTERLEAVED = {True: "interleaved", False: "half"}
DEEPSEEK_V3 = llama_like(
    "deepseek_v3", decoder_heads("DeepseekV3"), _MLA, (SWIGLU, _EXPERTS_V3),
    frame=_latent_keys("tower.attention", 1, 2.5),
    keys=_V3 | dict(rope_interleave=Key("tower.attention.rope.layout", True, _INTERLEAVED)),
    inert=_LATENT_INERT, aliases=_LATENT_ALIASES, layer=_latent_layer("attention"), carried=_NEXT_TOKEN_LAYER,
    presets={"deepseek-v3": _SIZES_V3},
)  # fmt: skip
DEEPSEEK_V32 = llama_like(
    "deepseek_v32", decoder_heads("DeepseekV32", labels=False), DSA(_MLA, 1, 2, 1, rope_dim=2),
    (SWIGLU, _EXPERTS_V3), frame=_latent_keys("tower.attention.attention", 1, 2.5),
    keys=dict(
        **_V3, mlp_bias=_SHARED_BIAS, index_n_heads=Key("tower.attention.index_heads"),
        index_head_dim=Key("tower.attention.index_dim"), index_topk=Key("tower.attention.topk"),
    ),
    inert=f"{_LATENT_INERT} layer_types", aliases=_LATENT_ALIASES,
    layer={
        **_latent_layer("attention.attention"),
        "self_attn.indexer.{wq_b,wk,k_norm,weights_proj}.*": "attention.indexer.{wq,wk,k_norm,ww}.*",
    },
    carried=_NEXT_TOKEN_LAYER,
    presets={"deepseek-v3.2": _SIZES_V3 | dict(index_n_heads=64, index_head_dim=128, index_topk=2048)},
)  # fmt: skip

# --- Qwen3-Next: layers of a recurrent state between layers of attention ------------------------------------------


def _sparse(theirs: Data, layer: int) -> bool:
    dense, step = theirs.get("mlp_only_layers") or [], theirs.get("decoder_sparse_step", 1)
    return theirs.get("num_experts", 512) > 0 and layer not in dense and (layer + 1) % step == 0


def _write_sparse(kinds: list[str], _: Any, theirs: Data, said: bool) -> None:
    if not said:
        theirs["decoder_sparse_step"] = 1
        theirs["mlp_only_layers"] = [i for i, kind in enumerate(kinds) if kind == "dense"]


# What the layers of attention have, and the others have not.
_GATE = "attention.wg.weight"
_BY_KEY_HEAD = rules.by_head("delta", "key_heads")
QWEN3_NEXT = llama_like(
    "qwen3_next", decoder_heads("Qwen3Next"),
    (replace(_GEMMA, rope=Rope(partial=0.25), scale=None, gated=True), DeltaRule(1, 1, 1, 1)),
    (SWIGLU, MoE(1, 1, 1, shared=1, shared_dim=1, shared_gated=True)), tower=dict(norm=_PLUS_ONE),
    keys=dict(
        rms_norm_eps=Key("tower.norm.eps tower.attention.qk_norm tower.attention.eps", 1e-6),
        num_key_value_heads=Key("tower.attention.kv_heads", 2), head_dim=Key("tower.attention.head_dim", 256),
        attention_bias=BIASED,
        rope_parameters=rules.rope_at(
            "tower.attention.rope", share="partial_rotary_factor", partial_rotary_factor=0.25,
        ),
        linear_num_key_heads=Key("tower.attention.key_heads", 16),
        linear_num_value_heads=Key("tower.attention.value_heads", 32),
        linear_key_head_dim=Key("tower.attention.key_dim", 128),
        linear_value_head_dim=Key("tower.attention.1.value_dim", 128),
        linear_conv_kernel_dim=Key("tower.attention.conv", 4),
        layer_types=rules.by_layer(
            "attention", "layer_types", ("full_attention", "linear_attention"),
            lambda hf, i: (i + 1) % hf.get("full_attention_interval", 4) > 0,
            lambda attention: attention["kind"] == "delta", ["full_attention_interval"],
        ),
        # The convolution's too.
        **fixed(hidden_act="silu"), intermediate_size=Key("tower.ffn.0.ffn_dim", 5632),
        moe_intermediate_size=Key("tower.ffn.1.ffn_dim", 512), num_experts=Key("tower.ffn.1.experts", 512),
        num_experts_per_tok=Key("tower.ffn.1.active", 10),
        shared_expert_intermediate_size=Key("tower.ffn.1.shared_dim", 512),
        norm_topk_prob=Key("tower.ffn.1.normalized", True),
        mlp_only_layers=rules.by_layer(
            "ffn", "", ("dense", "sparse"), _sparse, rules.is_moe, ["mlp_only_layers", "decoder_sparse_step"],
            _write_sparse,
        ),
    ),
    inert="output_router_logits router_aux_loss_coef",
    layer={
        **NORMS, **GATED, **EXPERTS,
        "self_attn.q_proj.*": To("attention.w{q,g}.*", rules.by_head("gqa", "heads"), needs=_GATE),
        "self_attn.{k,v,o}_proj.*": To("attention.w{k,v,o}.*", needs=_GATE),
        "self_attn.{q,k}_norm.weight": "attention.{q,k}_norm.weight",
        "linear_attn.in_proj_qkvz.weight": To("attention.w{q,k,v,z}.weight", _BY_KEY_HEAD, unless=_GATE),
        "linear_attn.in_proj_ba.weight": To("attention.w{b,a}.weight", _BY_KEY_HEAD),
        "linear_attn.conv1d.weight": To("attention.taps", rules.TAPS),
        "linear_attn.{A_log,dt_bias,norm.weight}": "attention.{a_log,dt_bias,norm.weight}",
        "linear_attn.out_proj.weight": To("attention.wo.weight", unless=_GATE),
        "mlp.shared_expert.{gate,up,down}_proj.weight": "ffn.shared.{gate,up,down}.weight",
        "mlp.shared_expert_gate.weight": "ffn.shared_gate.weight",
    },
    # What predicts one token more.
    carried=(r"mtp\..*",),
    presets={"qwen3-next-80b": sizes(151936, 2048, 48, 16, 5632, 262144, rope_theta=10000000.0)},
)  # fmt: skip
