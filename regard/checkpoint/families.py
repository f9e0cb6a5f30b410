"""Every Hugging Face family that Regard reads and writes. A family is one table, and there is no
other list of them.

To add one, put a `Family` (rules.py) into this file. Most are Llama with changes:

    OLMO2 = llama_like(
        # Their model_type; their classes -> our heads; our configs with the choices that no key of theirs makes.
        "olmo2", decoder_heads("Olmo2"), GQA(1, 1, 1, rope=Rope()), SWIGLU,
        # Their keys, where they are not Llama's. The place of ours (or several: "a.b c.{d,e}"), what a missing key
        # means, and their words for our values. fixed: no other value is possible; inert: keys that decide nothing.
        keys=dict(hidden_act=Key("tower.ffn.activation", "silu", ACTIVATIONS), **fixed(clip_qkv=None)),
        inert="use_bias pretraining_note",
        # Their names in a layer -> ours; {i} is a layer, {e} an expert, * weight and bias, {a,b} both.
        layer={
            **NORMS, "self_attn.qkv_proj.*": To("attention.w{q,k,v}.*", JOINED),
            "mlp.experts.{e}.{gate,up}.weight": To("ffn.{gate,up}", STACKED),
        },
        # Known sizes, in their keys.
        presets={"olmo-2-7b": sizes(100352, 4096, 32, 32, 11008, 4096)},
    )

Without a default a key is required. Keys that only make sense together are a `Group` (rules.py has RoPE, labels, causal
or not, experts and windows by layer). Where layers differ, the blank lists one config per kind of layer, and `by_layer`
(`sliding_layers`, `experts_by_layer`) says which layer is of which kind: "tower.attention.1.window" is a place in the
second kind only, "tower.attention.heads" in all. An `Op` changes tensors on the way and may look at our config. `start`
is how new weights are drawn. `regard.build`, `save` and the tests walk this table, and make a tiny case of every class
in `heads` (tests/checkpoint/families.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from regard.attention import DSA, GQA, MLA, DeltaRule
from regard.block import Tower
from regard.checkpoint import rules, tensors
from regard.checkpoint.rules import ACTIVATIONS, Data, Family, Group, Key, Keys, fixed
from regard.checkpoint.tensors import To, Weights
from regard.layers import LM, MLM, MLP, Answer, Classify, Norm, Tag
from regard.models import EncoderDecoderConfig, Patches, Tokens, TransformerConfig
from regard.models.init import Start
from regard.moe import MoE
from regard.position import Learned, Rope, Sinusoidal, T5Bias

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
    "mlp.experts.{e}.{gate,up,down}_proj.weight": To("ffn.{gate,up,down}", tensors.STACKED),
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

# --- Llama and its kin --------------------------------------------------------------------------------------------

_GQA = GQA(1, 1, 1, rope=Rope())
SWIGLU = MLP(1, "silu", gated=True, bias=False)


def llama_like(
    name: str,
    heads: Data,
    attention: Any = _GQA,
    ffn: Any = SWIGLU,
    *,
    frame: Keys = KEYS,
    keys: Mapping[str, rules.ConfigRule | None] | None = None,
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
    config = {**frame, **(keys or {})}
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
        "block_sparse_moe.experts.{e}.{w1,w2,w3}.weight": To("ffn.{gate,down,up}", tensors.STACKED),
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
        **NORMS, "self_attn.qkv_proj.*": To("attention.w{q,k,v}.*", tensors.JOINED),
        "self_attn.o_proj.*": "attention.wo.*", "mlp.gate_up_proj.*": To("ffn.{gate,up}.*", tensors.JOINED),
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
        final_logit_softcapping=Key("head.logit_softcap", None), **fixed(use_bidirectional_attention=False),
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
        num_experts_per_tok=Key("tower.ffn.active", 4), **fixed(hidden_act="silu"),
        # transformers has no word for it, and computes with 7.
        swiglu_limit=Key("tower.ffn.limit", 7.0, quiet=True),
        rope_parameters=rules.rope_at("tower.attention.rope", rope_scaling=_YARN),
        layer_types=rules.sliding_layers(lambda hf, i: i % 2 == 0, 128),
    ),
    inert="output_router_logits router_aux_loss_coef experts_per_token initial_context_length",
    aliases=dict(num_experts="num_local_experts"),
    layer={
        **NORMS, **ATTENTION, "self_attn.sinks": "attention.sinks", "mlp.router.*": "ffn.router.*",
        "mlp.experts.gate_up_proj": To("ffn.{gate,up}", tensors.transposed(tensors.BY_TURNS)),
        "mlp.experts.gate_up_proj_bias": To("ffn.{gate,up}_bias", tensors.BY_TURNS),
        "mlp.experts.down_proj": To("ffn.down", tensors.TRANSPOSED),
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


def _read_turned_dim(theirs: Data, ours: Data) -> None:
    """transformers turns so many features of a head."""
    width = theirs.get("head_dim")
    turned = theirs.get("qk_rope_head_dim")
    if width is not None and width != turned:
        raise rules.wrong(f"head_dim is {width!r}; it must be qk_rope_head_dim, {turned!r}")


_SHARED_BIAS = Key("tower.ffn.0.bias tower.ffn.1.shared_bias", False)
_LATENT_INERT = (
    """num_key_value_heads qk_head_dim num_nextn_predict_layers ep_size aux_loss_alpha seq_aux"""
)
_V3: Keys = dict(
    norm_topk_prob=Key("tower.ffn.1.normalized", True, null=False), n_group=rules.expert_groups(None, (8, 4)),
    **fixed(scoring_func="sigmoid"), mlp_layer_types=rules.experts_by_layer(3),
    head_dim=Group(("head_dim",), _read_turned_dim, lambda *_: None),
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
    inert=f"{_LATENT_INERT} head_dim norm_topk_prob", aliases=_LATENT_ALIASES, layer=_latent_layer("attention"),
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
    keys=_V3 | dict(rope_interleave=Key("tower.attention.rope.layout", True, _INTERLEAVED, False)),
    inert=_LATENT_INERT, aliases=_LATENT_ALIASES, layer=_latent_layer("attention"), carried=_NEXT_TOKEN_LAYER,
    presets={"deepseek-v3": _SIZES_V3},
)  # fmt: skip
DEEPSEEK_V32 = llama_like(
    "deepseek_v32", decoder_heads("DeepseekV32", labels=False), DSA(_MLA, 1, 2, 1, rope_dim=2),
    (SWIGLU, _EXPERTS_V3), frame=_latent_keys("tower.attention.attention", 1, 2.5),
    keys=dict(
        **_V3, index_n_heads=Key("tower.attention.index_heads"),
        index_head_dim=Key("tower.attention.index_dim"), index_topk=Key("tower.attention.topk"),
    ),
    # transformers' V3.2 has a key for biases, and none.
    inert=f"{_LATENT_INERT} layer_types mlp_bias", aliases=_LATENT_ALIASES,
    layer={
        **_latent_layer("attention.attention"),
        "self_attn.indexer.{wq_b,wk,k_norm,weights_proj}.*": "attention.indexer.{wq,wk,k_norm,ww}.*",
    },
    carried=_NEXT_TOKEN_LAYER,
    presets={"deepseek-v3.2": _SIZES_V3 | dict(index_n_heads=64, index_head_dim=128, index_topk=2048)},
)  # fmt: skip

# --- Qwen3-Next: layers of a recurrent state between layers of attention ------------------------------------------


def _sparse(theirs: Data, layer: int) -> bool:
    dense = theirs.get("mlp_only_layers") or []
    step = theirs.get("decoder_sparse_step", 1)
    return theirs.get("num_experts", 512) > 0 and layer not in dense and (layer + 1) % step == 0


def _write_sparse(kinds: list[str], _: Any, theirs: Data, said: bool) -> None:
    if not said:
        theirs["decoder_sparse_step"] = 1
        theirs["mlp_only_layers"] = [i for i, kind in enumerate(kinds) if kind == "dense"]


# What the layers of attention have, and the others do not.
_GATE = "attention.wg.weight"
_BY_KEY_HEAD = tensors.by_head("delta", "key_heads")
QWEN3_NEXT = llama_like(
    "qwen3_next", decoder_heads("Qwen3Next"),
    (replace(_GEMMA, rope=Rope(partial=0.25), scale=None, gated=True), DeltaRule(1, 1, 1, 1)),
    (SWIGLU, MoE(1, 1, 1, shared=1, shared_dim=1, shared_gated=True)), tower=dict(norm=_PLUS_ONE),
    keys=dict(
        rms_norm_eps=Key("tower.norm.eps tower.attention.qk_norm tower.attention.eps", 1e-6),
        num_key_value_heads=Key("tower.attention.kv_heads", 2), head_dim=Key("tower.attention.head_dim", 256),
        # A recurrent state reads from left to right.
        attention_bias=BIASED, is_causal=rules.Fixed(True, null=False),
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
        "self_attn.q_proj.*": To("attention.w{q,g}.*", tensors.by_head("gqa", "heads"), needs=_GATE),
        "self_attn.{k,v,o}_proj.*": To("attention.w{k,v,o}.*", needs=_GATE),
        "self_attn.{q,k}_norm.weight": "attention.{q,k}_norm.weight",
        "linear_attn.in_proj_qkvz.weight": To("attention.w{q,k,v,z}.weight", _BY_KEY_HEAD, unless=_GATE),
        "linear_attn.in_proj_ba.weight": To("attention.w{b,a}.weight", _BY_KEY_HEAD),
        "linear_attn.conv1d.weight": To("attention.taps", tensors.TAPS),
        "linear_attn.{A_log,dt_bias,norm.weight}": "attention.{a_log,dt_bias,norm.weight}",
        "linear_attn.out_proj.weight": To("attention.wo.weight", unless=_GATE),
        "mlp.shared_expert.{gate,up,down}_proj.weight": "ffn.shared.{gate,up,down}.weight",
        "mlp.shared_expert_gate.weight": "ffn.shared_gate.weight",
    },
    # What predicts one token more.
    carried=(r"mtp\..*",),
    presets={"qwen3-next-80b": sizes(151936, 2048, 48, 16, 5632, 262144, rope_theta=10000000.0)},
)  # fmt: skip

# --- what most encoders share --------------------------------------------------------------------------------------

_BIASED = GQA(1, bias=True, out_bias=True)
POST_NORM = Tower(1, 1, _BIASED, MLP(1, "gelu"), order="post", final_norm=False, causal=False)
LABEL_TENSORS = {"tag": {"classifier.*": "head.out.*"}, "answer": {"qa_outputs.*": "head.out.*"}}


def encoder_heads(name: str, dense: str, twice: bool = False) -> Data:
    """Their classes; `dense`: the activation before a label of the whole, `twice`: dropout before and after it."""
    return {
        f"{name}ForMaskedLM": MLM(), f"{name}Model": None,
        f"{name}ForSequenceClassification": Classify(2, dense, dropped_twice=twice),
        f"{name}ForTokenClassification": Tag(2), f"{name}ForQuestionAnswering": Answer(),
    }  # fmt: skip


# --- BERT and its kin ---------------------------------------------------------------------------------------------

# Width, depth, heads and feed-forward, as nearly all call them.
_SHAPE_KEYS: Keys = dict(
    hidden_size=Key("tower.dim"), num_hidden_layers=Key("tower.layers"),
    num_attention_heads=Key("tower.attention.heads"), intermediate_size=Key("tower.ffn.ffn_dim"),
)  # fmt: skip
BERT_KEYS: Keys = _SHAPE_KEYS | dict(
    vocab_size=Key("embedding.vocab"), type_vocab_size=Key("embedding.types", 2),
    layer_norm_eps=Key("tower.norm.eps embedding.norm.eps head.norm_eps", 1e-12),
    hidden_dropout_prob=Key("tower.dropout embedding.dropout", 0.1),
    attention_probs_dropout_prob=Key("tower.attention.dropout", 0.1),
    classifier_dropout=rules.head_dropout(
        **dict.fromkeys(("classify", "tag"), ("classifier_dropout", "hidden_dropout_prob")),
    ),
    tie_word_embeddings=Key("head.tied", True),
    **fixed(position_embedding_type="absolute", is_decoder=False, add_cross_attention=False),
    id2label=rules.LABELS, max_position_embeddings=Key("max_len embedding.position.max_len"),
    hidden_act=Key("tower.ffn.activation head.activation", "gelu", ACTIVATIONS),
)  # fmt: skip


EMBEDDING_TENSORS = {
    "embeddings.{word,position}_embeddings.weight": "embedding.{weight,position.weight}",
    "embeddings.token_type_embeddings.weight": "embedding.types", "embeddings.LayerNorm.*": "embedding.norm.*",
}  # fmt: skip
_BERT_TENSORS = {
    **EMBEDDING_TENSORS, "pooler.dense.*": "pooler.*",
    "encoder.layer.{i}.": {
        "attention.self.{query,key,value}.*": "attention.w{q,k,v}.*",
        "attention.output.{dense,LayerNorm}.*": "{attention.wo,norm1}.*",
        "intermediate.dense.*": "ffn.up.*", "output.{dense,LayerNorm}.*": "{ffn.down,norm3}.*",
    },
}  # fmt: skip


def _mlm_tensors(base: str, before: str) -> Weights:
    """`before`: their dense layer and norm. The bias has two names, and one where the matrix is the embedding."""
    return {
        f"{base}{before}.*": "head.{dense,norm}.*", f"{base}decoder.weight": "head.weight",
        f"{base}bias": To("head.bias", unless="head.weight"),
        f"{base}decoder.bias": To("head.bias", needs="head.weight"),
    }  # fmt: skip


BERT = Family(
    name="bert", base="bert.",
    blank=TransformerConfig(Tokens(1, Learned(1), types=2, norm=Norm()), POST_NORM, max_len=1),
    heads={**encoder_heads("Bert", "tanh"), "BertForPreTraining": MLM()}, config=BERT_KEYS,
    tensors=_BERT_TENSORS,
    head_tensors={
        **LABEL_TENSORS, "mlm": _mlm_tensors("cls.predictions.", "transform.{dense,LayerNorm}"),
        "classify": {"bert.pooler.dense.*": "head.dense.*", "classifier.*": "head.out.*"},
    },
    derived=(r".*embeddings\.position_ids",),
    carried=(r"bert\.pooler\..*", r"cls\.seq_relationship\..*", r"cls\.predictions\.bias"),
    presets={
        "bert-base": sizes(30522, 768, 12, 12, 3072, 512),
        "bert-large": sizes(30522, 1024, 24, 16, 4096, 512),
    },
)  # fmt: skip


def _read_positions(theirs: Data, ours: Data) -> None:
    """Rows of the table count from the padding id + 1; the table's size includes those before."""
    pad = theirs.get("pad_token_id")
    pad = 1 if pad is None else pad
    size = theirs.get("max_position_embeddings", 512)
    ours["embedding"]["position"].update(max_len=size - pad - 1, offset=pad + 1, skip=pad)
    ours["max_len"] = size - pad - 1


def _write_positions(ours: Data, theirs: Data) -> None:
    skip, size, offset = (
        rules.need(ours, f"embedding.position.{name}") for name in ("skip", "max_len", "offset")
    )
    theirs["pad_token_id"], theirs["max_position_embeddings"] = skip, size + offset


ROBERTA = replace(
    BERT, name="roberta", base="roberta.",
    blank=TransformerConfig(Tokens(1, Learned(1, 2, 1), types=2, norm=Norm()), POST_NORM, max_len=1),
    heads=encoder_heads("Roberta", "tanh", twice=True),
    config=BERT_KEYS | dict(
        max_position_embeddings=Group(
            ("max_position_embeddings", "pad_token_id"), _read_positions, _write_positions,
        ),
        hidden_act=Key("tower.ffn.activation", "gelu", ACTIVATIONS),
    ),
    head_tensors={
        **LABEL_TENSORS, "mlm": _mlm_tensors("lm_head.", "{dense,layer_norm}"),
        "classify": {"classifier.{dense,out_proj}.*": "head.{dense,out}.*"},
    },
    carried=(r"roberta\.pooler\..*", r"lm_head\.bias"),
    presets={"roberta-base": sizes(50265, 768, 12, 12, 3072, 514, type_vocab_size=1, layer_norm_eps=1e-5)},
)  # fmt: skip
XLM_ROBERTA = replace(
    ROBERTA, name="xlm-roberta", heads=encoder_heads("XLMRoberta", "tanh", twice=True)
)
DISTILBERT = Family(
    name="distilbert", base="distilbert.",
    blank=TransformerConfig(
        Tokens(1, Learned(1), norm=Norm(1e-12)),
        replace(POST_NORM, norm=Norm(1e-12), attention_dropped=False), max_len=1,
    ),
    heads=encoder_heads("DistilBert", "relu"),
    config=dict(
        vocab_size=Key("embedding.vocab"), dim=Key("tower.dim"), n_layers=Key("tower.layers"),
        n_heads=Key("tower.attention.heads"), hidden_dim=Key("tower.ffn.ffn_dim"),
        max_position_embeddings=Key("max_len embedding.position.max_len"),
        activation=Key("tower.ffn.activation head.activation", "gelu", ACTIVATIONS),
        dropout=Key("tower.dropout embedding.dropout", 0.1),
        attention_dropout=Key("tower.attention.dropout", 0.1),
        seq_classif_dropout=rules.head_dropout(
            classify=("seq_classif_dropout", 0.2), tag=("dropout", 0.1), answer=("qa_dropout", 0.1),
        ),
        tie_word_embeddings=Key("head.tied", True), id2label=rules.LABELS,
    ),
    inert="tie_weights_",
    aliases=dict(hidden_size="dim", num_attention_heads="n_heads", num_hidden_layers="n_layers"),
    tensors={
        **EMBEDDING_TENSORS,
        "transformer.layer.{i}.": {
            "attention.{q,k,v,out}_lin.*": "attention.w{q,k,v,o}.*",
            "{sa,output}_layer_norm.*": "norm{1,3}.*", "ffn.lin{1,2}.*": "ffn.{up,down}.*",
        },
    },
    head_tensors={
        **LABEL_TENSORS, "mlm": {"vocab_{transform,layer_norm,projector}.*": "{head.dense,head.norm,head}.*"},
        "classify": {"pre_classifier.*": "head.dense.*", "classifier.*": "head.out.*"},
    },
    derived=BERT.derived,
    presets={
        "distilbert-base": dict(
            vocab_size=30522, dim=768, n_layers=6, n_heads=12, hidden_dim=3072, max_position_embeddings=512,
        ),
    },
)  # fmt: skip


def _groups_of(theirs: Data) -> tuple[int, int]:
    """Of layers that are called again, and how many of them each has."""
    groups, inner = (theirs.get(key) for key in ("num_hidden_groups", "inner_group_num"))
    return 1 if groups is None else groups, 1 if inner is None else inner


def _read_groups(theirs: Data, ours: Data) -> None:
    tower, (groups, inner) = ours["tower"], _groups_of(theirs)
    n = tower["layers"]
    apart = list(range(tower["layers"] * inner))
    calls = [int(i / (n / groups)) for i in range(n)]
    blocks = [group * inner + j for group in calls for j in range(inner)]
    tower["layers"], tower["blocks"] = len(apart), None if blocks == apart else blocks


def _write_groups(ours: Data, theirs: Data) -> None:
    """In the words that are there, where they can say it."""
    tower, (groups, inner) = ours["tower"], _groups_of(theirs)
    n = tower["layers"]
    blocks = tower["blocks"]
    kinds = n if blocks is None else len(set(blocks))
    if n % inner or kinds != groups * inner:
        groups, inner = kinds, 1
    if (groups, inner) != _groups_of(theirs):
        theirs["num_hidden_groups"], theirs["inner_group_num"] = groups, inner
    tower["layers"] = n // inner


ALBERT = replace(
    BERT, name="albert", base="albert.",
    blank=TransformerConfig(
        Tokens(1, Learned(1), types=2, norm=Norm(), width=1),
        replace(POST_NORM, blocks=(0,), ffn_dropped=False), max_len=1,
    ),
    heads=encoder_heads("Albert", "tanh"),
    config=BERT_KEYS | dict(
        embedding_size=Key("embedding.width", 128),
        num_hidden_groups=Group(
            ("num_hidden_groups", "inner_group_num"), _read_groups, _write_groups, last=True
        ),
        hidden_act=Key("tower.ffn.activation head.activation", "gelu_new", ACTIVATIONS),
        hidden_dropout_prob=Key("tower.dropout embedding.dropout", 0.0),
        attention_probs_dropout_prob=Key("tower.attention.dropout", 0.0),
        classifier_dropout=rules.head_dropout(
            classify=("classifier_dropout_prob", 0.1), tag=("classifier_dropout_prob", "hidden_dropout_prob"),
        ),
    ),
    inert="net_structure_type gap_size num_memory_blocks down_scale_factor layers_to_keep",
    tensors={
        **EMBEDDING_TENSORS, "encoder.embedding_hidden_mapping_in.*": "embedding.project.*",
        "pooler.*": "pooler.*",
        "encoder.albert_layer_groups.{i}.albert_layers.{j}.": {
            "attention.{query,key,value,dense}.*": "attention.w{q,k,v,o}.*",
            "{attention.LayerNorm,full_layer_layer_norm}.*": "norm{1,3}.*",
            "{ffn,ffn_output}.*": "ffn.{up,down}.*",
        },
    },
    head_tensors={
        **LABEL_TENSORS, "mlm": _mlm_tensors("predictions.", "{dense,LayerNorm}"),
        "classify": {"albert.pooler.*": "head.dense.*", "classifier.*": "head.out.*"},
    },
    carried=(r"albert\.pooler\..*", r"sop_classifier\..*", r"predictions\.bias"),
    presets={"albert-base": sizes(30000, 768, 12, 12, 3072, 512)},
)  # fmt: skip
_LOCAL = GQA(1, rope=Rope(wide=True), window=1)
_NORM = Norm(biased=False)
_DENSE_TENSORS = {"head.{dense,norm}.*": "head.{dense,norm}.*", "classifier.*": "head.out.*"}
MODERNBERT = Family(
    name="modernbert", base="model.",
    blank=TransformerConfig(
        Tokens(1, norm=_NORM),
        Tower(
            1, 2, (replace(_LOCAL, rope=Rope(160000.0, wide=True), window=None), _LOCAL),
            MLP(1, "gelu", gated=True, bias=False, dropout=0.0), norm=_NORM, causal=False, first_norm=False,
            ffn_dropped=False,
        ),
        max_len=1,
    ),
    heads={
        "ModernBertForMaskedLM": MLM(), "ModernBertModel": None,
        "ModernBertForSequenceClassification": Classify(2, "gelu", norm=_NORM),
        "ModernBertForTokenClassification": Tag(2, dense="gelu", norm=_NORM),
        "ModernBertForQuestionAnswering": Answer(dense="gelu", norm=_NORM),
    },
    config=_SHAPE_KEYS | dict(
        vocab_size=Key("embedding.vocab"), max_position_embeddings=Key("max_len"),
        hidden_activation=Key("tower.ffn.activation", "gelu", ACTIVATIONS),
        norm_eps=Key("{tower,embedding,head}.norm.eps head.norm_eps", 1e-5),
        norm_bias=Key("{tower,embedding,head}.norm.biased head.norm_bias", False), attention_bias=BIASED,
        mlp_bias=Key("tower.ffn.bias", False),
        attention_dropout=Key("tower.attention.dropout tower.dropout", 0.0),
        embedding_dropout=Key("embedding.dropout", 0.0), mlp_dropout=Key("tower.ffn.dropout", 0.0),
        rope_parameters=rules.ropes_by_layer(
            ("global_rope_theta", 160000.0), ("local_rope_theta", 1e4), "full_attention sliding_attention",
        ),
        layer_types=rules.sliding_layers(
            lambda hf, i: i % hf.get("global_attn_every_n_layers", 3) > 0, 128,
            more="global_attn_every_n_layers", key="local_attention", both_ways=True,
        ),
        tie_word_embeddings=Key("head.tied", True), decoder_bias=Key("head.vocab_bias", True),
        classifier_bias=Key("head.dense_bias", False),
        classifier_activation=Key("head.activation head.dense", "gelu", ACTIVATIONS),
        classifier_pooling=Key("head.token", "cls", {"cls": "first", "mean": "mean"}),
        classifier_dropout=rules.head_dropout(
            **dict.fromkeys(("classify", "tag", "answer"), ("classifier_dropout", 0.0))
        ),
        id2label=rules.LABELS,
        pad_token_id=rules.ids_below(50283, "pad_token_id", "eos_token_id", "bos_token_id"),
    ),
    inert="""initializer_cutoff_factor deterministic_flash_attn sparse_prediction sparse_pred_ignore_index
    reference_compile repad_logits_with_grad""",
    tensors={
        "embeddings.tok_embeddings.weight": "embedding.weight",
        "embeddings.norm.*": "embedding.norm.*", "final_norm.*": "tower.norm.*",
        "layers.{i}.": {
            "{attn,mlp}_norm.*": "norm{1,3}.*", "attn.Wqkv.*": To("attention.w{q,k,v}.*", tensors.JOINED),
            "attn.Wo.*": "attention.wo.*", "mlp.Wi.*": To("ffn.{gate,up}.*", tensors.JOINED),
            "mlp.Wo.*": "ffn.down.*",
        },
    },
    head_tensors={
        "mlm": {"head.{dense,norm}.*": "head.{dense,norm}.*", "decoder.*": "head.*"},
        "classify": _DENSE_TENSORS, "tag": _DENSE_TENSORS, "answer": _DENSE_TENSORS,
    },
    start=Start("modernbert"), presets={"modernbert-base": sizes(50368, 768, 22, 12, 1152, 8192)},
)  # fmt: skip

# --- images -------------------------------------------------------------------------------------------------------


_IMAGE_TENSORS: Weights = {
    "embeddings.cls_token": To("embedding.extra", tensors.TOKENS),
    "embeddings.patch_embeddings.projection.*": "embedding.project.*",
    "embeddings.position_embeddings": To("embedding.position", tensors.ROW),
    "layernorm.*": "tower.norm.*", "pooler.dense.*": "pooler.*",
    "encoder.layer.{i}.": {
        "attention.attention.{query,key,value}.*": "attention.w{q,k,v}.*",
        "attention.output.dense.*": "attention.wo.*", "layernorm_{before,after}.*": "norm{1,3}.*",
        "{intermediate,output}.dense.*": "ffn.{up,down}.*",
    },
}  # fmt: skip
_TWO_TOKENS = {
    "embeddings.cls_token embeddings.distillation_token": _IMAGE_TENSORS["embeddings.cls_token"]
}
_DEIT_TENSORS = _TWO_TOKENS | {
    n: to for n, to in _IMAGE_TENSORS.items() if n != "embeddings.cls_token"
}


def _image(dim: int, heads: int) -> Data:
    shape = dict(hidden_size=dim, num_hidden_layers=12, num_attention_heads=heads)
    return dict(**shape, intermediate_size=4 * dim, num_labels=1000)


_IMAGE_TOWER = Tower(1, 1, _BIASED, MLP(1, "gelu"), norm=Norm(1e-12), causal=False)
VIT = Family(
    name="vit", base="vit.", blank=TransformerConfig(Patches(16, 16, extra=1), _IMAGE_TOWER),
    heads={"ViTForImageClassification": Classify(2, None), "ViTModel": None},
    config=_SHAPE_KEYS | dict(
        hidden_act=Key("tower.ffn.activation", "gelu", ACTIVATIONS),
        layer_norm_eps=Key("tower.norm.eps", 1e-12), image_size=Key("embedding.size", 224),
        patch_size=Key("embedding.patch", 16), num_channels=Key("embedding.channels", 3),
        qkv_bias=Key("tower.attention.bias", True),
        hidden_dropout_prob=Key("tower.dropout embedding.dropout", 0.0),
        attention_probs_dropout_prob=Key("tower.attention.dropout", 0.0), **fixed(pooler_act="tanh"),
        id2label=rules.LABELS,
    ),
    inert="encoder_stride pooler_output_size", tensors=_IMAGE_TENSORS,
    head_tensors={
        "classify": {
            "classifier.*": To("head.out.*", unless="head.teacher.weight"),
            "cls_classifier.*": To("head.out.*", needs="head.teacher.weight"),
            "distillation_classifier.*": "head.teacher.*",
        },
    },
    carried=(r"vit\.pooler\..*",), presets={"vit-base": _image(768, 12), "vit-small": _image(384, 6)},
    modules={
        "encoder.layer.": "layers.",
        **{f"attention.attention.{n}": f"attention.{n[0]}_proj" for n in ("query", "key", "value")},
        "attention.output.dense": "attention.o_proj", "intermediate.dense": "mlp.fc1",
        "output.dense": "mlp.fc2",
    },
)  # fmt: skip
DEIT = replace(
    VIT, name="deit", base="deit.", blank=TransformerConfig(Patches(16, 16, extra=2), _IMAGE_TOWER),
    heads={
        "DeiTForImageClassification": Classify(2, None), "DeiTModel": None,
        "DeiTForImageClassificationWithTeacher": Classify(2, None, distilled=True),
    },
    tensors=_DEIT_TENSORS, carried=(r"deit\.pooler\..*",),
    presets={"deit-small": _image(384, 6)}, start=Start("deit"),
)  # fmt: skip

# --- an encoder and a decoder: T5 -------------------------------------------------------------------------------------


# One table for both sides, or one for each.
_FRAME = {
    "shared.weight": To("source.weight", unless="target.weight"),
    "encoder.embed_tokens.weight": To("source.weight", needs="target.weight"),
    "decoder.embed_tokens.weight": "target.weight",
}
_PLAIN = GQA(1, head_dim=1, scale=1.0)
_T5_ENCODER = Tower(
    1, 1, _PLAIN, MLP(1, bias=False, dropout=0.0), norm=Norm(1e-6, rms=True), causal=False,
    relative=T5Bias(1), end_dropped=True,
)  # fmt: skip
_T5_DECODER = replace(_T5_ENCODER, cross=_PLAIN, causal=True, relative=T5Bias(1, causal=True))


def _t5_tower(tower: str, last: int) -> Weights:
    """`last`: which of the parts of a layer is the feed-forward, after self-attention and perhaps cross-attention: its
    norm is then not that of the second."""
    ffn = f"{last}.DenseReluDense."
    gate = "ffn.gate.weight"
    rows: Weights = {
        "0.SelfAttention.{q,k,v,o}.weight": "attention.w{q,k,v,o}.weight",
        "1.EncDecAttention.{q,k,v,o}.weight": "cross.w{q,k,v,o}.weight",
        "{0,1}.layer_norm.weight": "norm{1,2}.weight", f"{last}.layer_norm.weight": "norm3.weight",
        f"{ffn}wi.weight": To("ffn.up.weight", unless=gate),
        f"{ffn}wi_1.weight": To("ffn.up.weight", needs=gate), f"{ffn}wi_0.weight": gate,
        f"{ffn}wo.weight": "ffn.down.weight",
    }  # fmt: skip
    bias = f"{tower}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return {
        **tensors.under(f"{tower}.block.{{i}}.layer.", f"{tower}.blocks.{{i}}.", rows),
        bias: f"{tower}.relative.weight", f"{tower}.final_layer_norm.weight": f"{tower}.norm.weight",
    }  # fmt: skip


# feed_forward_proj -> our activation, and whether it is gated; gated-gelu is the approximation.
_T5_GATED = {"gated-gelu": ("gelu_tanh", True)}
_T5_FFN = _T5_GATED | {name: (ours, False) for name, ours in ACTIVATIONS.items()}
_T5_FFN |= {f"gated-{name}": (ours, True) for name, ours in ACTIVATIONS.items()} | _T5_GATED


def _t5_ffn_of(theirs: Data) -> tuple[str, bool]:
    """Activation and gate: what dense_act_fn and is_gated_act say is stronger than feed_forward_proj."""
    word = theirs.get("feed_forward_proj")
    act = theirs.get("dense_act_fn")
    word = "relu" if word is None else word
    for key, value, known in (
        ("feed_forward_proj", word, _T5_FFN),
        ("dense_act_fn", act or "relu", ACTIVATIONS),
    ):
        if value not in known:
            raise rules.wrong(f"{key} is {value!r}; known: {', '.join(known)}")
    name, gated = _T5_FFN[word]
    said = theirs.get("is_gated_act")
    return ACTIVATIONS[act] if act else name, gated if said is None else said


def _read_t5_ffn(theirs: Data, ours: Data) -> None:
    for tower in ("encoder", "decoder"):
        ours[tower]["ffn"] |= dict(zip(("activation", "gated"), _t5_ffn_of(theirs)))


def _write_t5_ffn(ours: Data, theirs: Data) -> None:
    ffn = tuple(rules.need(ours, f"encoder.ffn.{name}") for name in ("activation", "gated"))
    if _t5_ffn_of(theirs) != ffn:
        theirs["feed_forward_proj"] = next(word for word, of in _T5_FFN.items() if of == ffn)
        for stale in ("dense_act_fn", "is_gated_act"):
            theirs.pop(stale, None)


def _t5_scale_of(theirs: Data) -> bool:
    """v1.0 multiplies the decoder's output by dim^-0.5; in older folders v1.1 shows by tie_word_embeddings false."""
    if "scale_decoder_outputs" in theirs:
        return bool(theirs["scale_decoder_outputs"])
    return theirs.get("tie_word_embeddings") is not False


def _write_t5_scale(ours: Data, theirs: Data) -> None:
    if ours["head"] is None:
        return
    scaled = ours["head"]["scaled"]
    if "scale_decoder_outputs" not in theirs or _t5_scale_of(theirs) != scaled:
        theirs["scale_decoder_outputs"] = theirs["tie_word_embeddings"] = scaled


def _t5(dim: int, layers: int, heads: int, ffn: int) -> Data:
    return dict(vocab_size=32128, d_model=dim, num_layers=layers, num_heads=heads, d_ff=ffn)


T5 = Family(
    name="t5", base="", blank=EncoderDecoderConfig(Tokens(1), _T5_ENCODER, Tokens(1), _T5_DECODER),
    heads={"T5ForConditionalGeneration": LM(), "T5Model": None},
    config=dict(
        vocab_size=Key("{source,target}.vocab"), d_model=Key("{encoder,decoder}.dim"),
        num_layers=Key("encoder.layers"),
        num_decoder_layers=Key("decoder.layers", lambda hf: hf["num_layers"]),
        num_heads=Key("{encoder,decoder}.{attention,relative}.heads decoder.cross.heads"),
        d_kv=Key("{encoder,decoder}.attention.head_dim decoder.cross.head_dim", 64),
        d_ff=Key("{encoder,decoder}.ffn.ffn_dim"),
        relative_attention_num_buckets=Key("{encoder,decoder}.relative.buckets", 32),
        relative_attention_max_distance=Key("{encoder,decoder}.relative.max_distance", 128),
        layer_norm_epsilon=Key("{encoder,decoder}.norm.eps", 1e-6),
        dropout_rate=Key(
            "{encoder,decoder,source,target,encoder.ffn,decoder.ffn}.dropout "
            "{encoder.attention,decoder.attention,decoder.cross}.dropout",
            0.1,
        ),
        feed_forward_proj=Group(
            ("feed_forward_proj", "dense_act_fn", "is_gated_act"), _read_t5_ffn, _write_t5_ffn,
        ),
        scale_decoder_outputs=Group(
            ("scale_decoder_outputs", "tie_word_embeddings"),
            lambda theirs, ours: rules.put(ours, "head.scaled", _t5_scale_of(theirs)), _write_t5_scale,
        ),
        is_causal=rules.Fixed(True, null=False), **fixed(is_decoder=False),
    ),
    inert="n_positions classifier_dropout",
    aliases=dict(hidden_size="d_model", num_attention_heads="num_heads", head_dim="d_kv") | dict(
        num_hidden_layers="num_layers",
    ),
    tensors={**_FRAME, **_t5_tower("encoder", 1), **_t5_tower("decoder", 2)},
    head_tensors={"lm": {"lm_head.weight": "head.weight"}},
    carried=(
        r"shared\.weight",
        r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
    ),
    start=Start("t5", 1.0),
    presets={
        "t5-small": _t5(512, 6, 8, 2048), "t5-base": _t5(768, 12, 12, 3072),
        "t5-v1.1-small": _t5(512, 8, 6, 1024) | {
            "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "head.tied": False,
        },
    },
)  # fmt: skip

# --- BART and Marian ----------------------------------------------------------------------------------------------

_BART_ENCODER = replace(POST_NORM, ffn=MLP(1, "gelu", dropout=0.0))
_BART_DECODER = replace(_BART_ENCODER, cross=_BIASED, causal=True)
_BART_HEAD = LM(bias=True, trained=False)


def _bart(words: Tokens) -> EncoderDecoderConfig:
    return EncoderDecoderConfig(words, _BART_ENCODER, words, _BART_DECODER, _BART_HEAD, max_len=1)


_BART_KEYS: Keys = dict(
    d_model=Key("{encoder,decoder}.dim"), encoder_layers=Key("encoder.layers"),
    decoder_layers=Key("decoder.layers"), encoder_attention_heads=Key("encoder.attention.heads"),
    decoder_attention_heads=Key("decoder.{attention,cross}.heads"),
    encoder_ffn_dim=Key("encoder.ffn.ffn_dim"), decoder_ffn_dim=Key("decoder.ffn.ffn_dim"),
    max_position_embeddings=Key("max_len {source,target}.position.max_len"),
    activation_function=Key("{encoder,decoder}.ffn.activation", "gelu", ACTIVATIONS),
    activation_dropout=Key("{encoder,decoder}.ffn.dropout", 0.0),
    dropout=Key("{encoder,decoder,source,target}.dropout", 0.1),
    attention_dropout=Key("{encoder.attention,decoder.attention,decoder.cross}.dropout", 0.0),
    encoder_layerdrop=Key("encoder.layer_drop", 0.0), decoder_layerdrop=Key("decoder.layer_drop", 0.0),
    scale_embedding=Key("{source,target}.scaled", False), tie_word_embeddings=Key("head.tied", True),
    is_causal=rules.Fixed(True, null=False),
    **fixed(is_decoder=False, normalize_before=False, add_final_layer_norm=False),
)  # fmt: skip


def _bart_tower(tower: str, side: str) -> Weights:
    rows = {
        "self_attn.{q,k,v,out}_proj.*": "attention.w{q,k,v,o}.*",
        "encoder_attn.{q,k,v,out}_proj.*": "cross.w{q,k,v,o}.*",
        "{self_attn,encoder_attn,final}_layer_norm.*": "norm{1,2,3}.*", "fc{1,2}.*": "ffn.{up,down}.*",
    }  # fmt: skip
    return {
        **tensors.under(f"{tower}.layers.{{i}}.", f"{tower}.blocks.{{i}}.", rows),
        f"{tower}.embed_positions.weight": f"{side}.position.weight",
        f"{tower}.layernorm_embedding.*": f"{side}.norm.*",
    }


def _bart_sizes(vocab: int, dim: int, layers: int, heads: int, ffn: int, context: int) -> Data:
    each = dict(layers=layers, attention_heads=heads, ffn_dim=ffn)
    towers = {f"{side}_{k}": v for side in ("encoder", "decoder") for k, v in each.items()}
    return dict(vocab_size=vocab, d_model=dim, max_position_embeddings=context, **towers)


BART = Family(
    name="bart", base="model.", blank=_bart(Tokens(1, Learned(1, offset=2), norm=Norm())),
    heads={"BartForConditionalGeneration": _BART_HEAD, "BartModel": None},
    config=_BART_KEYS | dict(
        vocab_size=Key("{source,target}.vocab"),
        **fixed(normalize_embedding=True, static_position_embeddings=False),
    ),
    inert="""classifier_dropout classif_dropout add_bias_logits extra_pos_embeddings
    force_bos_token_to_be_generated""",
    aliases=dict(
        hidden_size="d_model", num_attention_heads="encoder_attention_heads",
        num_hidden_layers="encoder_layers",
    ),
    tensors={**_FRAME, **_bart_tower("encoder", "source"), **_bart_tower("decoder", "target")},
    head_tensors={"lm": {"lm_head.weight": "head.weight", "final_logits_bias": To("head.bias", tensors.ROW)}},
    apart=True, derived=(r"model\.(encoder|decoder)\.version",), carried=(r"model\.shared\.weight",),
    presets={
        "bart-base": _bart_sizes(50265, 768, 6, 12, 3072, 1024),
        "bart-large": _bart_sizes(50265, 1024, 12, 16, 4096, 1024),
    },
)  # fmt: skip


def _read_shared(theirs: Data, ours: Data) -> None:
    ours["shared"] = theirs.get("share_encoder_decoder_embeddings") is not False


def _write_shared(ours: Data, theirs: Data) -> None:
    """A folder may say that the tables are shared and yet, with nothing tied, hold one each: the tensors tell."""
    if not theirs.get("share_encoder_decoder_embeddings") or theirs["tie_word_embeddings"]:
        theirs["share_encoder_decoder_embeddings"] = ours["shared"]


def _write_padding(ours: Data, theirs: Data) -> None:
    """Marian pads, and starts its output, with the last id; transformers must find it inside the vocabulary."""
    for key in ("pad_token_id", "decoder_start_token_id"):
        theirs.setdefault(key, ours["target"]["vocab"] - 1)


MARIAN = replace(
    BART, name="marian", blank=_bart(Tokens(1, Sinusoidal(1, layout="halves"))),
    heads={"MarianMTModel": _BART_HEAD, "MarianModel": None},
    config=dict(
        vocab_size=Key("source.vocab"), decoder_vocab_size=Key("target.vocab", lambda hf: hf["vocab_size"]),
        share_encoder_decoder_embeddings=Group(
            ("share_encoder_decoder_embeddings",), _read_shared, _write_shared,
        ),
        pad_token_id=Group(("pad_token_id", "decoder_start_token_id"), lambda *_: None, _write_padding),
        **_BART_KEYS, **fixed(normalize_embedding=False, static_position_embeddings=True),
    ),
    derived=(*BART.derived, r"model\.(encoder|decoder)\.embed_positions\.weight"),
    presets={
        "marian": _bart_sizes(58101, 512, 6, 8, 2048, 512) | dict(
            scale_embedding=True, activation_function="silu",
        ),
    },
)  # fmt: skip

# --- all of them --------------------------------------------------------------------------------------------------

# In the order above; `save` tries them in this order for a model that came from no folder.
FAMILIES: dict[str, Family] = {
    family.name: family for family in list(globals().values()) if isinstance(family, Family)
}

# Keys of how texts are generated: decode/defaults.py reads them where no generation_config.json does.
GENERATION = frozenset(
    """max_length max_new_tokens min_length min_new_tokens early_stopping max_time stop_strings do_sample
    num_beams use_mtp use_cache cache_implementation cache_config max_cache_len temperature top_k top_p
    min_p top_h typical_p epsilon_cutoff eta_cutoff repetition_penalty encoder_repetition_penalty
    length_penalty no_repeat_ngram_size bad_words_ids renormalize_logits forced_bos_token_id
    forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens sequence_bias token_healing guidance_scale watermarking_config
    num_return_sequences output_attentions output_hidden_states output_scores output_logits
    return_dict_in_generate pad_token_id bos_token_id eos_token_id encoder_no_repeat_ngram_size
    decoder_start_token_id is_assistant num_assistant_tokens num_assistant_tokens_schedule
    assistant_confidence_threshold prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit
    assistant_lookbehind target_lookbehind assistant_ensemble_weight speculation_type compile_config
    disable_compile continuous_batching_config low_memory penalty_alpha dola_layers diversity_penalty
    num_beam_groups constraints force_words_ids prefill_chunk_size _from_model_config transformers_version
    forced_decoder_ids""".split()  # noqa: SIM905
)
# Keys that decide nothing in a forward pass, unless a family has a rule for them: kept as they are
# and written back.
INERT = GENERATION | frozenset(
    """architectures model_type dtype torch_dtype _name_or_path name_or_path sep_token_id cls_token_id
    mask_token_id unk_token_id initializer_range initializer_factor init_std return_dict output_past
    trained_length tokenizer_class task_specific_params problem_type finetuning_task id2label label2id
    num_labels _num_labels gradient_checkpointing pretraining_tp chunk_size_feed_forward
    is_encoder_decoder torchscript use_bfloat16 prefix directionality pooler_fc_size
    pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type
    _attn_implementation_autoset tie_encoder_decoder use_return_dict cross_attention_hidden_size
    pruned_heads tf_legacy_loss is_composition sinusoidal_pos_embds is_decoder add_cross_attention
    tie_word_embeddings""".split()  # noqa: SIM905
)
