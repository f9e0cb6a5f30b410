"""Dense decoders that are Llama with changes."""

from __future__ import annotations

from dataclasses import replace

from regard.checkpoint import rules, tensors
from regard.checkpoint.families.common import (
    ADDED_NORMS,
    ATTENTION,
    BIASED,
    GATED,
    NORM_EPS,
    NORMS,
    PLUS_ONE,
    ROTARY,
    decoder_heads,
    llama_like,
    sizes,
    sliding,
)
from regard.checkpoint.rules import ACTIVATIONS, Data, Group, Key, Keys, fixed
from regard.checkpoint.tensors import To
from regard.checkpoint.windows import windows_by_layer
from regard.layers import LM, MLP, Answer, Norm, Tag
from regard.models import Tokens
from regard.models.init import Start
from regard.position import Rope

_MLP_BIAS = Key("tower.ffn.bias", False)
_HEAD_128 = Key(
    "tower.attention.head_dim", 128, null=lambda hf: hf["hidden_size"] // hf["num_attention_heads"]
)

# --- Gemma --------------------------------------------------------------------------------------------------------

_GEGLU = MLP(1, "gelu_tanh", gated=True, bias=False)
_GEMMA_KEYS: Keys = dict(
    tie_word_embeddings=Key("head.tied", True), head_dim=Key("tower.attention.head_dim", 256),
    attention_bias=BIASED, **fixed(use_bidirectional_attention=False),
)  # fmt: skip
GEMMA = llama_like(
    "gemma", decoder_heads("Gemma"), ROTARY, _GEGLU, scaled=True, tower=dict(norm=PLUS_ONE),
    keys=dict(
        **_GEMMA_KEYS, num_key_value_heads=Key("tower.attention.kv_heads", 16),
        hidden_act=Key("tower.ffn.activation", "gelu_pytorch_tanh", ACTIVATIONS),
    ),
    presets={
        "gemma-2b": sizes(256000, 2048, 18, 8, 16384, 8192, num_key_value_heads=1),
        "gemma-7b": sizes(256000, 3072, 28, 16, 24576, 8192),
    },
)  # fmt: skip
GEMMA2 = llama_like(
    "gemma2", decoder_heads("Gemma2"), sliding(replace(ROTARY, scale=1.0)), _GEGLU, scaled=True,
    tower=dict(order="sandwich", norm=PLUS_ONE),
    keys=dict(
        **_GEMMA_KEYS, num_key_value_heads=Key("tower.attention.kv_heads", 4), hidden_act=None,
        hidden_activation=Key("tower.ffn.activation", "gelu_pytorch_tanh", ACTIVATIONS),
        query_pre_attn_scalar=Key("tower.attention.scale", 256, rules.ROOT),
        attn_logit_softcapping=Key("tower.attention.softcap", 50.0, null=None),
        final_logit_softcapping=Key("head.logit_softcap", 30.0, null=None),
        layer_types=rules.sliding_layers(lambda hf, i: i % 2 == 0, 4096),
    ),
    layer={
        **ATTENTION, **GATED, **ADDED_NORMS, "{input,pre_feedforward}_layernorm.weight": "norm{1,3}.weight",
    },
    presets={
        "gemma-2-2b": sizes(256000, 2304, 26, 8, 9216, 8192),
        "gemma-2-9b": sizes(256000, 3584, 42, 16, 14336, 8192, num_key_value_heads=8),
    },
)  # fmt: skip

# --- GLM: half of a head turns, in pairs of neighbours ------------------------------------------------------------

_GLM = replace(ROTARY, bias=True, rope=Rope(layout="interleaved", partial=0.5))
_GLM_KEYS: Keys = dict(
    rms_norm_eps=Key("tower.norm.eps", 1.5625e-7), num_key_value_heads=Key("tower.attention.kv_heads", 2),
    head_dim=_HEAD_128, attention_bias=Key("tower.attention.bias", True),
    pad_token_id=rules.ids_below(151338, "pad_token_id", "eos_token_id"),
    rope_parameters=rules.rope_at(
        "tower.attention.rope", share="partial_rotary_factor", partial_rotary_factor=0.5
    ),
)  # fmt: skip
_GATE_UP = {
    "mlp.gate_up_proj.weight": To("ffn.{gate,up}.weight", tensors.JOINED),
    "mlp.down_proj.weight": "ffn.down.weight",
}
GLM = llama_like(
    "glm", decoder_heads("Glm"), _GLM, keys=_GLM_KEYS, layer={**NORMS, **ATTENTION, **_GATE_UP},
    presets={"glm-4-9b-chat": sizes(151552, 4096, 40, 32, 13696, 131072)},
)  # fmt: skip
GLM4 = llama_like(
    "glm4", decoder_heads("Glm4"), _GLM, keys=_GLM_KEYS, tower=dict(order="sandwich"),
    layer={
        **NORMS, **ATTENTION, **_GATE_UP,
        "post_{self_attn,mlp}_layernorm.weight": "{attention,ffn}.add.norm.weight",
    },
    presets={
        "glm-4-9b-0414": sizes(
            151552, 4096, 40, 32, 13696, 32768, rms_norm_eps=1e-5, attention_bias=False
        ),
    },
)  # fmt: skip

# --- other biases, activations and layouts ------------------------------------------------------------------------

SEED_OSS = llama_like(
    "seed_oss", decoder_heads("SeedOss"), replace(ROTARY, bias=True),
    keys=dict(
        num_key_value_heads=Key("tower.attention.kv_heads", 8, null=lambda hf: hf["num_attention_heads"]),
        head_dim=_HEAD_128, attention_bias=Key("tower.attention.bias", True),
        attention_out_bias=Key("tower.attention.out_bias", False), mlp_bias=_MLP_BIAS,
        attention_dropout=Key("tower.attention.dropout", 0.1), residual_dropout=Key("tower.dropout", 0.1),
    ),
    presets={"seed-oss-36b": sizes(155136, 5120, 64, 80, 27648, 524288, rope_theta=10000000.0)},
)  # fmt: skip
ARCEE = llama_like(
    "arcee", decoder_heads("Arcee"), ffn=MLP(1, "relu2", bias=False),
    keys=dict(
        hidden_act=Key("tower.ffn.activation", "relu2", ACTIVATIONS), rms_norm_eps=NORM_EPS,
        attention_bias=BIASED, mlp_bias=_MLP_BIAS,
    ),
    layer={**NORMS, **ATTENTION, "mlp.{up,down}_proj.*": "ffn.{up,down}.*"},
)  # fmt: skip
HELIUM = llama_like(
    "helium", decoder_heads("Helium"), replace(ROTARY, rope=Rope(1e5, "interleaved")),
    keys=dict(
        rms_norm_eps=Key("tower.norm.eps", 1e-8), head_dim=Key("tower.attention.head_dim", 128),
        num_key_value_heads=Key("tower.attention.kv_heads", 20), mlp_bias=_MLP_BIAS,
        attention_bias=Key("tower.attention.bias", False),
    ),
    presets={"helium-1-preview-2b": sizes(48000, 2560, 24, 20, 7040, 4096)},
)  # fmt: skip
ERNIE45 = llama_like(
    "ernie4_5", decoder_heads("Ernie4_5", labels=False),
    replace(ROTARY, rope=Rope(5e5, "interleaved", wide=True)),
    keys=dict(
        rms_norm_eps=NORM_EPS, head_dim=_HEAD_128, tie_word_embeddings=Key("head.tied", True),
        num_key_value_heads=Key("tower.attention.kv_heads", 2, null=lambda hf: hf["num_attention_heads"]),
        # transformers drops none of its attention.
        attention_dropout=None, classifier_dropout=None,
        use_bias=Key("tower.attention.{bias,out_bias} tower.ffn.bias", False),
    ),
    presets={"ernie-4.5-0.3b": sizes(103424, 1024, 18, 16, 3072, 131072)},
)  # fmt: skip
HUNYUAN = llama_like(
    "hunyuan_v1_dense", decoder_heads("HunYuanDenseV1", tags=False),
    replace(ROTARY, qk_norm=1e-5, qk_norm_last=True),
    keys=dict(
        rms_norm_eps=Key("tower.norm.eps tower.attention.qk_norm", 1e-5), attention_bias=BIASED,
        rope_parameters=rules.rope_at("tower.attention.rope", alpha=True),
    ),
    inert="eod_token_id",
    layer={
        **NORMS, **GATED, "self_attn.{q,k,v,o}_proj.*": "attention.w{q,k,v,o}.*",
        "self_attn.{query,key}_layernorm.weight": "attention.{q,k}_norm.weight",
    },
)  # fmt: skip
_LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
_LLAMA3 |= dict(original_max_position_embeddings=8192)
APERTUS = llama_like(
    "apertus", {"ApertusForCausalLM": LM(), "ApertusModel": None, "ApertusForTokenClassification": Tag(2)},
    replace(ROTARY, qk_norm=1e-5, rope=Rope(1.2e7)), MLP(1, "xielu", bias=False),
    keys=dict(
        hidden_act=Key("tower.ffn.activation", "xielu", {**ACTIVATIONS, "xielu": "xielu"}),
        rms_norm_eps=Key("tower.norm.eps tower.attention.qk_norm", 1e-5), attention_bias=BIASED,
        rope_parameters=rules.rope_at("tower.attention.rope", rope_scaling=_LLAMA3),
    ),
    layer={
        **ATTENTION, "{attention,feedforward}_layernorm.weight": "norm{1,3}.weight",
        "mlp.{up,down}_proj.weight": "ffn.{up,down}.weight",
        "mlp.act_fn.{alpha_p,alpha_n,beta,eps}": "ffn.act.{alpha_p,alpha_n,beta,eps}",
    },
    presets={"apertus-8b": sizes(131072, 4096, 32, 32, 21504, 65536, num_key_value_heads=8)},
)  # fmt: skip

# --- layers without positions -------------------------------------------------------------------------------------

SMOLLM3 = llama_like(
    "smollm3", decoder_heads("SmolLM3"), (replace(ROTARY, rope=Rope(2e6)), replace(ROTARY, rope=None)),
    keys=dict(
        num_key_value_heads=Key("tower.attention.kv_heads", 4, null=lambda hf: hf["num_attention_heads"]),
        rope_parameters=rules.rope_at("tower.attention.0.rope"), attention_bias=BIASED, mlp_bias=_MLP_BIAS,
        tie_word_embeddings=Key("head.tied", True),
        pad_token_id=rules.ids_below(128004, "pad_token_id"),
        # 1: it turns.
        no_rope_layers=rules.by_layer(
            "attention", "no_rope_layers", (1, 0), lambda hf, i: (i + 1) % hf.get("no_rope_layer_interval", 4) == 0,
            lambda one: one["rope"] is None, ["no_rope_layer_interval"],
        ),
        layer_types=windows_by_layer(lambda hf, one: one["rope"] is None, "use_sliding_window"),
    ),
    presets={"smollm3-3b": sizes(128256, 2048, 36, 16, 11008, 65536, rope_theta=5e6)},
)  # fmt: skip


def _exaone_layers() -> Group:
    """Layers that see all have no positions, unless none slides because sliding_window is null."""
    group = rules.sliding_layers(
        lambda hf, i: (i + 1) % hf.get("sliding_window_pattern", 4) > 0,
        4096,
        more="sliding_window_pattern",
    )

    def read(theirs: Data, ours: Data) -> None:
        attention = ours["tower"]["attention"]
        if theirs.get("sliding_window", 4096) is None:
            attention[0] = {**attention[1], "window": None}
        group.reader(theirs, ours)

    def write(ours: Data, theirs: Data) -> None:
        group.writer(ours, theirs)
        attention = ours["tower"]["attention"]
        if attention[1] is None and attention[0]["rope"] is not None:
            attention[1] = attention[0]
            theirs["sliding_window"] = None

    return replace(group, reader=read, writer=write)


EXAONE4 = llama_like(
    "exaone4", decoder_heads("Exaone4"),
    (replace(ROTARY, qk_norm=1e-5, rope=None), replace(ROTARY, qk_norm=1e-5, window=1)),
    tower=dict(order="inner"),
    keys=dict(
        num_key_value_heads=Key("tower.attention.kv_heads", 32), layer_types=_exaone_layers(),
        rms_norm_eps=Key("tower.norm.eps tower.attention.qk_norm", 1e-5),
        rope_parameters=rules.rope_at("tower.attention.1.rope"),
    ),
    layer={**ATTENTION, **GATED, **ADDED_NORMS},
)  # fmt: skip

# --- norms without weights ----------------------------------------------------------------------------------------

OLMO = llama_like(
    "olmo", decoder_heads("Olmo", tags=False), replace(ROTARY, rope=Rope(wide=True)),
    tower=dict(norm=Norm(biased=False, weighted=False)),
    keys=dict(rms_norm_eps=None, attention_bias=BIASED, clip_qkv=Key("tower.attention.clip", None)),
    layer=ATTENTION | GATED,
    presets={
        "olmo-1b": sizes(50304, 2048, 16, 16, 8192, 2048, tie_word_embeddings=True),
        "olmo-7b": sizes(50304, 4096, 32, 32, 11008, 2048),
    },
)  # fmt: skip
# It turns the other way round: pairs are (i + r/2, i).
_PAIRS = tensors.halves_changed("gqa")
_UNIT = Norm(1e-6, rms=True, weighted=False)
_NANOCHAT = llama_like(
    "nanochat", decoder_heads("NanoChat", labels=False),
    replace(ROTARY, qk_norm=1e-6, qk_norm_bare=True, qk_norm_last=True), MLP(1, "relu2", bias=False),
    tower=dict(norm=_UNIT), start=Start("nanochat"),
    keys=dict(
        hidden_act=Key("tower.ffn.activation", "relu2", ACTIVATIONS), attention_bias=BIASED,
        classifier_dropout=None, final_logit_softcapping=Key("head.logit_softcap", 15.0, null=None),
        rms_norm_eps=Key("tower.norm.eps tower.attention.qk_norm embedding.norm.eps", 1e-6),
    ),
    layer={
        "self_attn.{q,k}_proj.*": To("attention.w{q,k}.*", _PAIRS),
        "self_attn.{v,o}_proj.*": "attention.w{v,o}.*", "mlp.{fc1,fc2}.weight": "ffn.{up,down}.weight",
    },
)  # fmt: skip
NANOCHAT = replace(
    _NANOCHAT, blank=replace(_NANOCHAT.blank, embedding=Tokens(1, norm=_UNIT)),
    presets={"nanochat-d20": sizes(65536, 1280, 20, 10, 5120, 2048)},
)  # fmt: skip

# --- gains: Granite and Cohere ------------------------------------------------------------------------------------

_BY = (lambda n: 1 / n, lambda gain: 1 / gain)
GRANITE = llama_like(
    "granite", decoder_heads("Granite", labels=False), replace(ROTARY, scale=1.0),
    keys=dict(
        attention_bias=BIASED, mlp_bias=_MLP_BIAS, classifier_dropout=None,
        attention_multiplier=Key("tower.attention.scale", 1.0), logits_scaling=Key("head.logit_gain", 1.0, _BY),
        embedding_multiplier=Key("embedding.token_gain", 1.0),
        residual_multiplier=Key("tower.residual_gain", 1.0),
    ),
    presets={
        "granite-3.1-2b": sizes(
            49155, 2048, 40, 32, 8192, 131072, num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=5e6,
            tie_word_embeddings=True, attention_multiplier=0.015625, embedding_multiplier=12.0,
            logits_scaling=8.0, residual_multiplier=0.22,
        ),
    },
)  # fmt: skip


def _read_head_norms(theirs: Data, ours: Data) -> None:
    on = bool(theirs.get("use_qk_norm", False))
    eps = theirs.get("layer_norm_eps", 1e-5) if on else None
    rules.put(ours, "tower.attention.qk_norm", eps)
    rules.put(ours, "tower.attention.qk_norm_by_head", on)


def _write_head_norms(ours: Data, theirs: Data) -> None:
    on = rules.need(ours, "tower.attention.qk_norm") is not None
    if on != bool(theirs.get("use_qk_norm", False)):
        theirs["use_qk_norm"] = on


_COHERE = replace(ROTARY, rope=Rope(layout="interleaved", wide=True))
_COHERE_KEYS: dict[str, rules.ConfigRule | None] = dict(
    rms_norm_eps=None, layer_norm_eps=Key("tower.norm.eps", 1e-5), attention_bias=BIASED, classifier_dropout=None,
    tie_word_embeddings=Key("head.tied", True), logit_scale=Key("head.logit_gain", 0.0625),
)  # fmt: skip
_COHERE_TOWER: Data = dict(order="shared", norm=Norm(biased=False))
_COHERE_LAYER = {**ATTENTION, **GATED, "input_layernorm.weight": "norm1.weight"}
COHERE = llama_like(
    "cohere", decoder_heads("Cohere", labels=False), replace(_COHERE, rope=Rope(5e5, "interleaved", wide=True)),
    tower=_COHERE_TOWER, layer=_COHERE_LAYER,
    keys=_COHERE_KEYS | dict(use_qk_norm=Group(("use_qk_norm",), _read_head_norms, _write_head_norms)),
    presets={"command-r": sizes(256000, 8192, 40, 64, 22528, 8192, rope_theta=8e6)},
)  # fmt: skip
COHERE2 = llama_like(
    "cohere2", decoder_heads("Cohere2", labels=False),
    (replace(_COHERE, rope=None), replace(_COHERE, window=1)), tower=_COHERE_TOWER, layer=_COHERE_LAYER,
    keys=_COHERE_KEYS | dict(
        rope_parameters=rules.rope_at("tower.attention.1.rope"),
        layer_types=rules.sliding_layers(
            lambda hf, i: (i + 1) % hf.get("sliding_window_pattern", 4) > 0, 4096, more="sliding_window_pattern",
        ),
    ),
)  # fmt: skip

# --- queries that grow with their positions -----------------------------------------------------------------------

_YARN = dict(rope_type="yarn", rope_theta=1e6, factor=16.0, original_max_position_embeddings=16384)
_YARN |= dict(mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1)


def _temperature(theirs: Data) -> Data | None:
    """In our words."""
    given: Data = theirs.get("rope_parameters") or theirs.get("rope_scaling") or _YARN
    length, beta = (
        given.get(k) for k in ("original_max_position_embeddings", "llama_4_scaling_beta")
    )
    if beta is None:
        return None
    if length is None:
        name = "rope_parameters.original_max_position_embeddings"
        raise rules.wrong(f"{name} is missing; llama_4_scaling_beta needs it")
    return dict(length=length, scale=float(beta), offset=0, kind="temperature")


def _read_temperature(theirs: Data, ours: Data) -> None:
    rules.put(ours, "tower.attention.temperature", _temperature(theirs))


def _write_temperature(ours: Data, theirs: Data) -> None:
    """Into the rope_parameters that the RoPE has written."""
    now = rules.need(ours, "tower.attention.temperature")
    if now == _temperature(theirs):
        return
    words = dict(theirs.get("rope_parameters") or theirs.get("rope_scaling") or _YARN)
    words.pop("llama_4_scaling_beta", None)
    if now is not None:
        words["original_max_position_embeddings"] = now["length"]
        words["llama_4_scaling_beta"] = now["scale"]
    theirs.pop("rope_scaling", None)
    theirs["rope_parameters"] = words


MINISTRAL3 = llama_like(
    "ministral3", decoder_heads("Ministral3") | {"Ministral3ForQuestionAnswering": Answer()},
    replace(ROTARY, rope=Rope(1e6)),
    keys=dict(
        rms_norm_eps=NORM_EPS, head_dim=_HEAD_128,
        num_key_value_heads=Key("tower.attention.kv_heads", 8, null=lambda hf: hf["num_attention_heads"]),
        sliding_window=Key("tower.attention.window", None),
        llama_4_scaling_beta=Group(("llama_4_scaling_beta",), _read_temperature, _write_temperature),
        rope_parameters=rules.rope_at(
            "tower.attention.rope", idle="llama_4_scaling_beta max_position_embeddings", rope_scaling=_YARN,
        ),
    ),
    inert="layer_types",
    presets={"ministral-3-8b": sizes(131072, 4096, 34, 32, 14336, 262144)},
)  # fmt: skip
