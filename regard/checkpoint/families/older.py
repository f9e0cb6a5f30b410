"""Decoders of 2019 to 2024 with habits of their own: fused rows of heads, one norm for both parts, older words."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from regard.attention import GQA
from regard.block import Tower
from regard.checkpoint import rules, tensors
from regard.checkpoint.families.common import (
    BIASED,
    GATED,
    HEAD_TENSORS,
    NORM_EPS,
    ROTARY,
    SHAPE_KEYS,
    decoder_heads,
    llama_like,
    sizes,
)
from regard.checkpoint.family import Family
from regard.checkpoint.rules import (
    ACTIVATIONS,
    Data,
    Fixed,
    Group,
    Key,
    Keys,
    fixed,
    get,
    need,
    put,
)
from regard.checkpoint.tensors import To
from regard.errors import UsageError
from regard.layers import LM, MLP, Answer, Norm
from regard.models import Tokens, TransformerConfig
from regard.models.init import Start
from regard.position import Alibi, Learned, Rope, Sinusoidal

_PRE_NORMS = {"{input,post_attention}_layernorm.*": "norm{1,3}.*"}
_QKVO = {"self_attn.{q,k,v,o}_proj.*": "attention.w{q,k,v,o}.*"}
_TAGS = {"tag": {"classifier.*": "head.out.*"}}
_ANSWERS = {"answer": {"qa_outputs.*": "head.out.*"}}


def _partial(share: float) -> Group:
    """RoPE of a share of each head; what a missing one is."""
    return rules.rope_at(
        "tower.attention.rope", share="partial_rotary_factor", partial_rotary_factor=share
    )


# --- in Llama's frame ---------------------------------------------------------------------------------------------


def _of_stream(theirs: Data) -> float:
    """The dropout of labels, where it follows that of the stream."""
    rate = theirs.get("hidden_dropout", 0.0)
    return 0.1 if rate is None else rate


_EPS: dict[str, Key | None] = dict(rms_norm_eps=None, layer_norm_eps=NORM_EPS)
_FLAT = {"mlp.{up,down}_proj.*": "ffn.{up,down}.*"}
STARCODER2 = llama_like(
    "starcoder2", decoder_heads("Starcoder2"), ffn=MLP(1, "gelu_tanh"), tower=dict(norm=Norm()),
    keys=dict(
        rms_norm_eps=None, norm_epsilon=NORM_EPS, num_key_value_heads=Key("tower.attention.kv_heads", 2),
        hidden_act=Key("tower.ffn.activation", "gelu_pytorch_tanh", ACTIVATIONS),
        tie_word_embeddings=Key("head.tied", True),
        use_bias=Key("tower.attention.{bias,out_bias} tower.ffn.bias", True),
        residual_dropout=Key("tower.dropout", 0.0), embedding_dropout=Key("embedding.dropout", 0.0),
        sliding_window=Key("tower.attention.window", None),
    ),
    last_norm="norm.*", layer={**_PRE_NORMS, **_QKVO, "mlp.{c_fc,c_proj}.*": "ffn.{up,down}.*"},
    start=Start(std=0.018042),
    presets={
        "starcoder2-3b": sizes(49152, 3072, 30, 24, 12288, 16384, sliding_window=4096, rope_theta=999999.4420358813),
    },
)  # fmt: skip
_PHI = llama_like(
    "phi", {**decoder_heads("Phi"), "PhiForCausalLM": LM(False, True)},
    replace(ROTARY, bias=True, out_bias=True), MLP(1, "gelu_tanh"), tower=dict(norm=Norm(), order="shared"),
    keys=dict(
        **_EPS, rope_parameters=_partial(0.5), resid_pdrop=Key("tower.dropout", 0.0),
        embd_pdrop=Key("embedding.dropout", 0.0), hidden_act=Key("tower.ffn.activation", "gelu_new", ACTIVATIONS),
        **fixed(qk_layernorm=False),
    ),
    layer={
        "input_layernorm.*": "norm1.*", "self_attn.{q,k,v}_proj.*": "attention.w{q,k,v}.*",
        "self_attn.dense.*": "attention.wo.*", "mlp.{fc1,fc2}.*": "ffn.{up,down}.*",
    },
    last_norm="final_layernorm.*",
    presets={"phi-2": sizes(51200, 2560, 32, 32, 10240, 2048, partial_rotary_factor=0.4, resid_pdrop=0.1)},
)  # fmt: skip
_BIASED_HEAD = {"lm": {"lm_head.*": "head.*"}}
PHI = replace(_PHI, head_tensors={**HEAD_TENSORS, **_BIASED_HEAD})


def _read_head_norms(theirs: Data, ours: Data) -> None:
    on = bool(theirs.get("qk_layernorm", False))
    put(ours, "tower.attention.qk_norm", get(ours, "tower.norm.eps") if on else None)
    put(ours, "tower.attention.qk_norm_by_head", on)


def _write_head_norms(ours: Data, theirs: Data) -> None:
    on = need(ours, "tower.attention.qk_norm_by_head")
    if bool(theirs.get("qk_layernorm", False)) != on:
        theirs["qk_layernorm"] = on


_HEAD_NORMS = Group(("qk_layernorm",), _read_head_norms, _write_head_norms, last=True)
STABLELM = llama_like(
    "stablelm", decoder_heads("StableLm"), replace(ROTARY, head_dim=None),
    tower=dict(norm=Norm(), attention_dropped=False),
    keys=dict(
        **_EPS, rope_parameters=_partial(0.25), num_key_value_heads=Key("tower.attention.kv_heads", 32),
        head_dim=None, use_qkv_bias=Key("tower.attention.bias", False), hidden_dropout=Key("tower.dropout", 0.0),
        use_parallel_residual=Key("tower.order", False, {True: "shared", False: "pre"}),
        classifier_dropout=rules.head_dropout(
            tag=("classifier_dropout", _of_stream),
        ),
        qk_layernorm=_HEAD_NORMS,
    ),
    last_norm="norm.*", layer={
        **_PRE_NORMS, **_QKVO, **GATED,
        "self_attn.{q,k}_layernorm.norms.{e}.weight": To("attention.{q,k}_norm.weight", tensors.STACKED),
    },
    presets={"stablelm-3b-4e1t": sizes(50304, 2560, 32, 32, 6912, 4096)},
)  # fmt: skip

NEMOTRON = llama_like(
    "nemotron", decoder_heads("Nemotron"), ffn=MLP(1, "relu2"), tower=dict(norm=Norm(plus_one=True)),
    keys=dict(
        rms_norm_eps=None, norm_eps=NORM_EPS, rope_parameters=_partial(0.5), attention_bias=BIASED,
        hidden_act=Key("tower.ffn.activation", "relu2", ACTIVATIONS), mlp_bias=Key("tower.ffn.bias", False),
    ),
    last_norm="norm.*", layer={**_PRE_NORMS, **_QKVO, **_FLAT}, start=Start(std=0.0134),
    presets={
        "nemotron-4-minitron-4b": sizes(256000, 3072, 32, 24, 9216, 4096, num_key_value_heads=8, head_dim=128),
    },
)  # fmt: skip

# --- GPT-J and CodeGen --------------------------------------------------------------------------------------------


def _read_turned(theirs: Data, ours: Data) -> None:
    size = theirs.get("rotary_dim", 64)
    heads, dim = get(ours, "tower.attention.heads"), get(ours, "tower.dim")
    if any(type(n) is not int or n < 1 for n in (heads, dim)) or dim % heads:
        # They are refused where they go.
        return
    width = dim // heads
    if type(size) is not int or not 0 < size <= width or size % 2:
        raise rules.wrong(
            f"rotary_dim is {size!r}; it must be an even number up to {width}, a head's width"
        )
    put(ours, "tower.attention.rope.partial", _share(size, width))


def _write_turned(ours: Data, theirs: Data) -> None:
    width = need(ours, "tower.dim") // need(ours, "tower.attention.heads")
    size = int(width * need(ours, "tower.attention.rope.partial"))
    if theirs.get("rotary_dim", 64) != size:
        theirs["rotary_dim"] = size


def _share(size: int, width: int) -> float:
    """The share that makes `size` of `width`, whole in spite of rounding."""
    share = size / width
    return share if int(width * share) == size else math.nextafter(share, 1.0)


_TURNED = Group(("rotary_dim",), _read_turned, _write_turned, last=True)
_GPT_KEYS: Keys = dict(
    vocab_size=Key("embedding.vocab"), n_embd=Key("tower.dim"), n_layer=Key("tower.layers"),
    n_head=Key("tower.attention.heads"), n_positions=Key("max_len"),
    n_inner=Key("tower.ffn.ffn_dim", lambda hf: 4 * hf["n_embd"]),
    activation_function=Key("tower.ffn.activation", "gelu_new", ACTIVATIONS), layer_norm_epsilon=NORM_EPS,
    bos_token_id=rules.ids_below(50256, "bos_token_id", "eos_token_id"),
    resid_pdrop=Key("tower.dropout", 0.0), embd_pdrop=Key("embedding.dropout", 0.0),
    attn_pdrop=Key("tower.attention.dropout", 0.0), tie_word_embeddings=Key("head.tied", False),
    id2label=rules.LABELS, is_causal=rules.CAUSAL,
)  # fmt: skip
_GPT_ALIASES = dict(hidden_size="n_embd", num_attention_heads="n_head", num_hidden_layers="n_layer")
_GPT_ALIASES |= dict(max_position_embeddings="n_positions")
_GPTJ = TransformerConfig(
    Tokens(1), Tower(1, 1, GQA(1, rope=Rope(layout="interleaved")), MLP(1, "gelu_tanh"), order="shared"),
    max_len=1,
)  # fmt: skip
_GPTJ_KEYS: Keys = _GPT_KEYS | dict(rotary_dim=_TURNED)
_GPTJ_LAYER = {
    "ln_1.*": "norm1.*", "attn.out_proj.*": "attention.wo.*", "mlp.{fc_in,fc_out}.*": "ffn.{up,down}.*",
}  # fmt: skip
_WORDS = {"wte.weight": "embedding.weight", "ln_f.*": "tower.norm.*"}
GPTJ = Family(
    name="gptj", base="transformer.", blank=_GPTJ,
    heads={
        **decoder_heads("GPTJ", tags=False), "GPTJForCausalLM": LM(False, True),
        "GPTJForQuestionAnswering": Answer(),
    },
    config=_GPTJ_KEYS, aliases=_GPT_ALIASES,
    tensors={**_WORDS, "h.{i}.": {**_GPTJ_LAYER, "attn.{q,k,v}_proj.*": "attention.w{q,k,v}.*"}},
    head_tensors={**HEAD_TENSORS, **_BIASED_HEAD, **_ANSWERS},
    derived=(r".*\.attn\.((masked_)?bias|embed_positions)",),
    presets={"gpt-j-6b": dict(vocab_size=50400, n_embd=4096, n_layer=28, n_head=16, n_positions=2048)},
)  # fmt: skip


def _in_fours(heads: int) -> int:
    if type(heads) is int and heads % 4:
        raise rules.wrong(f"n_head is {heads}; CodeGen's rows stand in four parts: a multiple of 4")
    return heads


CODEGEN = Family(
    name="codegen", base="transformer.", blank=_GPTJ,
    heads={"CodeGenForCausalLM": LM(False, True), "CodeGenModel": None},
    config=_GPTJ_KEYS | dict(n_head=Key("tower.attention.heads", words=(_in_fours, _in_fours))),
    # n_ctx is read where nothing is made of it.
    inert="n_ctx",
    aliases=_GPT_ALIASES,
    tensors={
        **_WORDS,
        "h.{i}.": {**_GPTJ_LAYER, "attn.qkv_proj.*": To("attention.w{q,v,k}.*", tensors.in_turns(lambda _: 4))},
    },
    head_tensors=_BIASED_HEAD, derived=(r".*\.attn\.(causal_mask|(masked_)?bias|embed_positions)",),
    presets={
        "codegen-350m": dict(vocab_size=51200, n_embd=1024, n_layer=20, n_head=16, n_positions=2048, rotary_dim=32),
    },
)  # fmt: skip

# --- in GPT-2's frame ---------------------------------------------------------------------------------------------

_PLACED = TransformerConfig(
    Tokens(1, Learned(1)),
    Tower(1, 1, GQA(1, bias=True, out_bias=True), MLP(1, "gelu_tanh")),
    max_len=1,
)
_PLACES = Key("max_len embedding.position.max_len")
_TWO_NORMS = {"ln_{1,2}.*": "norm{1,3}.*"}
# Some mask, or have a bias, as a text is read from its beginning; a null is false.
_ONE_WAY: Keys = dict(is_causal=Fixed(True, null=False))
_TAG_DROPOUT = rules.head_dropout(tag=("classifier_dropout", 0.1))


def _layers_of(theirs: Data) -> list[str]:
    """GPT-Neo's words for its layers: one each, or kinds in their order and how often these come again."""
    said = theirs.get("attention_layers")
    if said is not None:
        if not isinstance(said, list) or not all(isinstance(kind, str) for kind in said):
            raise rules.wrong(f"attention_layers is {said!r}; it must be a list of words")
        return said
    given = theirs.get("attention_types")
    listed: Any = [[["global", "local"], 12]] if given is None else given
    try:
        counts = [(list(kinds), range(times)) for kinds, times in listed]
    except (TypeError, ValueError):
        example = [[["global", "local"], 12]]
        raise rules.wrong(f"attention_types is {given!r}; write it as {example}") from None
    return [str(kind) for kinds, times in counts for _ in times for kind in kinds]


def _write_layers(kinds: list[str], _: Data | None, theirs: Data, __: bool) -> None:
    if _layers_of(theirs) != kinds:
        theirs["attention_types"], theirs["attention_layers"] = [[kinds, 1]], kinds


def _read_layers(theirs: Data, ours: Data) -> None:
    kinds, layers = _layers_of(theirs), get(ours, "tower.layers")
    if len(kinds) != layers:
        named = f"attention_types and attention_layers list {len(kinds)}"
        raise rules.wrong(f"num_layers is {layers!r}, {named}")
    _BY_KIND.reader({**theirs, "attention_layers": kinds}, ours)


_BY_KIND = rules.by_layer(
    "attention", "attention_layers", ("global", "local"), lambda theirs, i: False,
    lambda one: need(one, "window") is not None, ("attention_types",), _write_layers,
)  # fmt: skip
_UNSCALED = GQA(1, out_bias=True, scale=1.0)
GPT_NEO = Family(
    name="gpt_neo", base="transformer.",
    blank=replace(_PLACED, tower=replace(_PLACED.tower, layers=2, attention=(_UNSCALED, replace(_UNSCALED, window=1)))),
    heads={**decoder_heads("GPTNeo"), "GPTNeoForQuestionAnswering": Answer()},
    config=dict(
        vocab_size=Key("embedding.vocab"), hidden_size=Key("tower.dim"), num_layers=Key("tower.layers"),
        num_heads=Key("tower.attention.heads"), max_position_embeddings=_PLACES,
        intermediate_size=Key("tower.ffn.ffn_dim", lambda hf: 4 * hf["hidden_size"]),
        window_size=Key("tower.attention.1.window", 256), attention_types=replace(_BY_KIND, reader=_read_layers),
        activation_function=Key("tower.ffn.activation", "gelu_new", ACTIVATIONS), layer_norm_epsilon=NORM_EPS,
        bos_token_id=rules.ids_below(50256, "bos_token_id", "eos_token_id"),
        resid_dropout=Key("tower.dropout", 0.0), embed_dropout=Key("embedding.dropout", 0.0),
        attention_dropout=Key("tower.attention.dropout", 0.0), classifier_dropout=_TAG_DROPOUT,
        tie_word_embeddings=Key("head.tied", True), id2label=rules.LABELS, **_ONE_WAY,
    ),
    inert="""summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj""",
    aliases=dict(num_attention_heads="num_heads", num_hidden_layers="num_layers"),
    tensors={
        **_WORDS, "wpe.weight": "embedding.position.weight",
        "h.{i}.": {
            **_TWO_NORMS, "attn.attention.{q,k,v,out}_proj.*": "attention.w{q,k,v,o}.*",
            "mlp.{c_fc,c_proj}.*": "ffn.{up,down}.*",
        },
    },
    head_tensors={**HEAD_TENSORS, **_TAGS, **_ANSWERS}, derived=(r".*\.attn\.attention\.(masked_)?bias",),
    presets={
        "gpt-neo-1.3b": dict(
            vocab_size=50257, hidden_size=2048, num_layers=24, num_heads=16, max_position_embeddings=2048,
        ),
    },
)  # fmt: skip


def _read_one_key(theirs: Data, ours: Data) -> None:
    one = theirs.get("multi_query", True)
    put(ours, "tower.attention.kv_heads", 1 if one else get(ours, "tower.attention.heads"))


def _write_one_key(ours: Data, theirs: Data) -> None:
    heads, groups = need(ours, "tower.attention.heads"), need(ours, "tower.attention.kv_heads")
    if heads != 1 and theirs.get("multi_query", True) != (groups == 1):
        theirs["multi_query"] = groups == 1


_ONE_KEY = Group(("multi_query",), _read_one_key, _write_one_key, last=True)
# Of each group of heads the queries, then its key and its value.
_BY_GROUP = tensors.by_head("gqa", "groups")
GPT_BIGCODE = Family(
    name="gpt_bigcode", base="transformer.", blank=_PLACED, heads=decoder_heads("GPTBigCode"),
    config=_GPT_KEYS | dict(
        n_positions=_PLACES, multi_query=_ONE_KEY, scale_attn_weights=Key(
            "tower.attention.scale", True, {True: None, False: 1.0},
        ),
        activation_function=Key("tower.ffn.activation", "gelu_pytorch_tanh", ACTIVATIONS),
        resid_pdrop=Key("tower.dropout", 0.1), embd_pdrop=Key("embedding.dropout", 0.1),
        attn_pdrop=Key("tower.attention.dropout", 0.1), classifier_dropout=_TAG_DROPOUT,
        tie_word_embeddings=Key("head.tied", True), **fixed(add_cross_attention=False),
    ),
    # They say in which dtype softmax is computed: ours is float32.
    inert="""attention_softmax_in_fp32 scale_attention_softmax_in_fp32 num_key_value_heads inference_runner
    max_batch_size max_sequence_length pad_key_length pre_allocate_kv_cache validate_runner_input
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj""",
    aliases=_GPT_ALIASES,
    tensors={
        **_WORDS, "wpe.weight": "embedding.position.weight",
        "h.{i}.": {
            **_TWO_NORMS, "attn.c_attn.*": To("attention.w{q,k,v}.*", _BY_GROUP),
            "attn.c_proj.*": "attention.wo.*", "mlp.{c_fc,c_proj}.*": "ffn.{up,down}.*",
        },
    },
    head_tensors={**HEAD_TENSORS, **_TAGS}, derived=(r".*\.attn\.(masked_)?bias", r"(transformer\.)?bias"),
    start=Start("gpt2"),
    presets={
        "starcoder": dict(vocab_size=49152, n_embd=6144, n_layer=40, n_head=48, n_inner=24576, n_positions=8192),
    },
)  # fmt: skip

# --- OPT ----------------------------------------------------------------------------------------------------------


def _read_order(theirs: Data, ours: Data) -> None:
    before = theirs.get("do_layer_norm_before", True)
    put(ours, "tower.order", "pre" if before else "post")
    put(ours, "tower.final_norm", before and not theirs.get("_remove_final_layer_norm", False))


def _write_order(ours: Data, theirs: Data) -> None:
    before, last = need(ours, "tower.order") == "pre", need(ours, "tower.final_norm")
    if theirs.get("do_layer_norm_before", True) != before:
        theirs["do_layer_norm_before"] = before
    if before and theirs.get("_remove_final_layer_norm", False) == last:
        theirs["_remove_final_layer_norm"] = not last


_ORDER = Group(("do_layer_norm_before", "_remove_final_layer_norm"), _read_order, _write_order)


def _read_width(theirs: Data, ours: Data) -> None:
    width, dim = theirs.get("word_embed_proj_dim"), get(ours, "tower.dim")
    narrow = width is not None and width != dim
    put(ours, "embedding.widened_first", narrow)
    for place in ("embedding.width", "tower.out_dim"):
        put(ours, place, width if narrow else None)


def _write_width(ours: Data, theirs: Data) -> None:
    dim = need(ours, "tower.dim")
    width = need(ours, "tower.out_dim") or dim
    if theirs.get("word_embed_proj_dim", dim) != width:
        theirs["word_embed_proj_dim"] = width


# Of BART's kind: their layers, and those of XGLM and BioGPT.
_BART_LAYER = {
    "self_attn.{q,k,v,out}_proj.*": "attention.w{q,k,v,o}.*", "{self_attn,final}_layer_norm.*": "norm{1,3}.*",
    "{fc1,fc2}.*": "ffn.{up,down}.*",
}  # fmt: skip
OPT = Family(
    name="opt", base="model.",
    blank=replace(_PLACED, embedding=Tokens(1, Learned(1, offset=2)), tower=replace(_PLACED.tower, ffn=MLP(1, "relu"))),
    heads={**decoder_heads("OPT", tags=False), "OPTForQuestionAnswering": Answer()},
    config=dict(
        vocab_size=Key("embedding.vocab"), hidden_size=Key("tower.dim"), num_hidden_layers=Key("tower.layers"),
        num_attention_heads=Key("tower.attention.heads"), ffn_dim=Key("tower.ffn.ffn_dim"),
        max_position_embeddings=_PLACES, do_layer_norm_before=_ORDER,
        activation_function=Key("tower.ffn.activation", "relu", ACTIVATIONS),
        enable_bias=Key("tower.attention.{bias,out_bias} tower.ffn.bias", True),
        dropout=Key("tower.dropout", 0.1), attention_dropout=Key("tower.attention.dropout", 0.0),
        layerdrop=Key("tower.layer_drop", 0.0), tie_word_embeddings=Key("head.tied", True), id2label=rules.LABELS,
        is_causal=rules.CAUSAL, **fixed(layer_norm_elementwise_affine=True),
        word_embed_proj_dim=Group(("word_embed_proj_dim",), _read_width, _write_width, last=True),
    ),
    inert="activation_dropout",
    tensors={
        "decoder.embed_tokens.weight": "embedding.weight", "decoder.final_layer_norm.*": "tower.norm.*",
        "decoder.embed_positions.weight": "embedding.position.weight", "decoder.layers.{i}.": _BART_LAYER,
        "decoder.project_{in,out}.weight": "{embedding.project,tower.out}.weight",
    },
    head_tensors={**HEAD_TENSORS, **_ANSWERS},
    presets={
        "opt-125m": dict(
            vocab_size=50272, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, ffn_dim=3072,
            max_position_embeddings=2048,
        ),
        "opt-350m": dict(
            vocab_size=50272, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, ffn_dim=4096,
            max_position_embeddings=2048, word_embed_proj_dim=512, do_layer_norm_before=False,
        ),
    },
)  # fmt: skip

# --- with ALiBi ---------------------------------------------------------------------------------------------------


def _read_four(theirs: Data, ours: Data) -> None:
    dim = get(ours, "tower.dim")
    put(ours, "tower.ffn.ffn_dim", 4 * dim if type(dim) is int else dim)


# Inside a feed-forward is four times the width, whatever they say.
_FOUR_TIMES: Keys = dict(ffn_dim=Group((), _read_four, lambda *_: None, last=True))
_HIDDEN_TAG = rules.head_dropout(tag=("classifier_dropout", _of_stream))
_FUSED_LAYER = {
    "self_attention.query_key_value.*": To("attention.w{q,k,v}.*", _BY_GROUP),
    "self_attention.dense.*": "attention.wo.*", "mlp.dense_{h_to_4h,4h_to_h}.*": "ffn.{up,down}.*",
}  # fmt: skip
BLOOM = Family(
    name="bloom", base="transformer.",
    blank=TransformerConfig(
        Tokens(1, norm=Norm()),
        Tower(1, 1, GQA(1, bias=True, out_bias=True), MLP(1, "gelu_tanh"), relative=Alibi(1)),
    ),
    heads={**decoder_heads("Bloom"), "BloomForQuestionAnswering": Answer()},
    config=dict(
        vocab_size=Key("embedding.vocab"), hidden_size=Key("tower.dim"), **_FOUR_TIMES, **_ONE_WAY,
        n_layer=Key("tower.layers"), n_head=Key("tower.{attention,relative}.heads"),
        layer_norm_epsilon=Key("{tower,embedding}.norm.eps", 1e-5), tie_word_embeddings=Key("head.tied", True),
        hidden_dropout=Key("tower.dropout", 0.0), attention_dropout=Key("tower.attention.dropout", 0.0),
        classifier_dropout=_HIDDEN_TAG, id2label=rules.LABELS,
        **fixed(apply_residual_connection_post_layernorm=False, slow_but_exact=False),
    ),
    # Their length ends nothing, and the rest says how Megatron computed.
    inert="""seq_length n_inner offset_alibi attention_softmax_in_fp32 bias_dropout_fusion masked_softmax_fusion
    skip_bias_add skip_bias_add_qkv""",
    aliases=dict(n_embed="hidden_size", num_attention_heads="n_head", num_hidden_layers="n_layer"),
    tensors={
        "word_embeddings.weight": "embedding.weight", "word_embeddings_layernorm.*": "embedding.norm.*",
        "ln_f.*": "tower.norm.*", "h.{i}.": {**_PRE_NORMS, **_FUSED_LAYER},
    },
    head_tensors={**HEAD_TENSORS, **_TAGS, **_ANSWERS},
    presets={"bloom-560m": dict(vocab_size=250880, hidden_size=1024, n_layer=24, n_head=16)},
)  # fmt: skip


def _read_falcon(theirs: Data, ours: Data) -> None:
    heads, dim = get(ours, "tower.attention.heads"), get(ours, "tower.dim")
    new, parallel = theirs.get("new_decoder_architecture"), theirs.get("parallel_attn", True)
    norms = theirs.get("num_ln_in_parallel_attn")
    norms = (2 if new else 1) if norms is None else norms
    if new and not parallel:
        raise rules.wrong(f"parallel_attn is {parallel!r}, which new_decoder_architecture excludes")
    if norms not in (1, 2) or (norms == 2 and parallel and not new):
        known = "1, or 2 with new_decoder_architecture"
        raise rules.wrong(f"num_ln_in_parallel_attn is {norms!r}; known: {known}")
    groups = theirs.get("num_kv_heads") if new else 1 if theirs.get("multi_query", True) else heads
    put(ours, "tower.attention.kv_heads", heads if groups is None else groups)
    put(ours, "tower.order", "pre" if not parallel else "parallel" if norms == 2 else "shared")
    if not theirs.get("alibi", False):
        put(ours, "tower.relative", None)
        return
    put(ours, "tower.attention.rope", None)
    if type(heads) is int and type(dim) is int and 0 < heads <= dim:
        put(ours, "tower.relative.scale", (dim // heads) ** -0.5)


def _write_falcon(ours: Data, theirs: Data) -> None:
    heads, order = need(ours, "tower.attention.heads"), need(ours, "tower.order")
    groups = need(ours, "tower.attention.kv_heads") or heads
    new = order == "parallel" or groups not in (1, heads)
    new = new or bool(theirs.get("new_decoder_architecture") and order != "pre")
    said: Data = dict(new_decoder_architecture=new, parallel_attn=order != "pre")
    said["alibi"] = need(ours, "tower.relative") is not None
    said |= (
        dict(num_kv_heads=groups, num_ln_in_parallel_attn=1 + (order == "parallel")) if new else {}
    )
    if not new and (groups == 1) != (heads == 1 and not theirs.get("multi_query", True)):
        said["multi_query"] = groups == 1
    missing: Data = dict(
        new_decoder_architecture=False, parallel_attn=True, alibi=False, multi_query=True
    )
    missing |= dict(num_kv_heads=heads, num_ln_in_parallel_attn=2)
    for key, value in said.items():
        old = theirs.get(key)
        if (missing[key] if old is None else old) != value:
            theirs[key] = value


_FALCON = Group(
    ("new_decoder_architecture", "parallel_attn", "num_ln_in_parallel_attn", "num_kv_heads", "multi_query", "alibi"),
    _read_falcon, _write_falcon, last=True,
)  # fmt: skip


def _in_order(*orders: str) -> Callable[[Any], bool]:
    return lambda config: config.tower.order in orders


FALCON = Family(
    name="falcon", base="transformer.",
    blank=TransformerConfig(
        Tokens(1), Tower(1, 1, GQA(1, 1, rope=Rope()), MLP(1, "gelu"), relative=Alibi(1, coarse=True)), max_len=1,
    ),
    heads={**decoder_heads("Falcon"), "FalconForQuestionAnswering": Answer()},
    config=dict(
        vocab_size=Key("embedding.vocab"), hidden_size=Key("tower.dim"), num_hidden_layers=Key("tower.layers"),
        num_attention_heads=Key("tower.{attention,relative}.heads"), max_position_embeddings=Key("max_len", 2048),
        ffn_hidden_size=Key("tower.ffn.ffn_dim", lambda hf: 4 * hf["hidden_size"]),
        activation=Key("tower.ffn.activation", "gelu", ACTIVATIONS), layer_norm_epsilon=NORM_EPS,
        bias=Key("tower.attention.{bias,out_bias} tower.ffn.bias", False), rope_parameters=rules.ROPE,
        tie_word_embeddings=Key("head.tied", True), id2label=rules.LABELS, alibi=_FALCON,
        classifier_dropout=_HIDDEN_TAG, **fixed(apply_residual_connection_post_layernorm=False), **_ONE_WAY,
        # transformers drops what both parts add by one draw, and by attention_dropout where they follow one another.
        **fixed(hidden_dropout=0.0, attention_dropout=0.0),
    ),
    aliases=dict(n_embed="hidden_size"),
    tensors={
        "word_embeddings.weight": "embedding.weight", "ln_f.*": "tower.norm.*",
        "h.{i}.": {
            **_FUSED_LAYER, "input_layernorm.*": To("norm1.*", when=_in_order("pre", "shared")),
            "post_attention_layernorm.*": To("norm3.*", when=_in_order("pre")),
            "ln_{attn,mlp}.*": To("norm{1,3}.*", when=_in_order("parallel")),
        },
    },
    head_tensors={**HEAD_TENSORS, **_TAGS, **_ANSWERS}, derived=(r".*rotary(_emb)?\.inv_freq",),
    presets={
        "falcon-7b": dict(vocab_size=65024, hidden_size=4544, num_hidden_layers=32, num_attention_heads=71),
        "falcon-40b": dict(
            vocab_size=65024, hidden_size=8192, num_hidden_layers=60, num_attention_heads=128, num_kv_heads=8,
            new_decoder_architecture=True,
        ),
    },
)  # fmt: skip


def _read_nested(theirs: Data, ours: Data) -> None:
    given = theirs.get("attn_config")
    given = {} if given is None else given
    if not isinstance(given, dict):
        raise rules.wrong(f"attn_config is {given!r}; it must be an object")
    if unknown := [key for key in given if key not in _MPT_ATTENTION and key not in _NESTED_INERT]:
        raise rules.wrong(f"attn_config.{unknown[0]} is not known")
    for key, rule in _MPT_ATTENTION.items():
        try:
            rule.read(key, given, ours)
        except UsageError as error:
            raise UsageError(
                str(error).replace("config.json: ", "config.json: attn_config.")
            ) from None


def _write_nested(ours: Data, theirs: Data) -> None:
    before = theirs.get("attn_config") or {}
    said = dict(before)
    for key, rule in _MPT_ATTENTION.items():
        rule.write(key, ours, said)
    if said != before:
        theirs["attn_config"] = said


_MPT_ATTENTION: Keys = dict(
    softmax_scale=Key("tower.attention.scale", None),
    clip_qkv=Key("tower.attention.clip", None, (lambda most: most or None, lambda most: most)),
    # transformers looks at none of these, and computes as these say.
    **fixed(alibi=True, alibi_bias_max=8, attn_type="multihead_attention", prefix_lm=False, qk_ln=False),
    # Theirs is a whole number.
    **fixed(attn_uses_sequence_id=False, attn_pdrop=0),
)  # fmt: skip
# How it is computed, and what every config of transformers has.
_NESTED_INERT = frozenset(
    """attn_impl architectures output_hidden_states output_attentions return_dict dtype torch_dtype
    chunk_size_feed_forward is_encoder_decoder id2label label2id problem_type _name_or_path model_type
    transformers_version""".split()  # noqa: SIM905
)
MPT = Family(
    name="mpt", base="transformer.",
    blank=TransformerConfig(
        Tokens(1), Tower(1, 1, GQA(1), MLP(1, "gelu", bias=False), norm=Norm(biased=False), relative=Alibi(1)),
        max_len=1,
    ),
    heads={**decoder_heads("Mpt"), "MptForQuestionAnswering": Answer()},
    config=dict(
        vocab_size=Key("embedding.vocab"), d_model=Key("tower.dim"), n_layers=Key("tower.layers"), **_FOUR_TIMES,
        n_heads=Key("tower.{attention,relative}.heads"), max_seq_len=Key("max_len", 2048),
        layer_norm_epsilon=NORM_EPS, tie_word_embeddings=Key("head.tied", True), id2label=rules.LABELS,
        attn_config=Group(("attn_config",), _read_nested, _write_nested), classifier_dropout=_TAG_DROPOUT, **_ONE_WAY,
        **fixed(expansion_ratio=4, no_bias=True, logit_scale=None),
    ),
    # transformers drops nothing, and has no learned positions.
    inert="resid_pdrop emb_pdrop learned_pos_emb init_device embedding_fraction norm_type verbose init_config",
    aliases=dict(hidden_size="d_model", num_attention_heads="n_heads", num_hidden_layers="n_layers"),
    tensors={
        "wte.weight": "embedding.weight", "norm_f.*": "tower.norm.*",
        "blocks.{i}.": {
            "norm_{1,2}.*": "norm{1,3}.*", "attn.Wqkv.*": To("attention.w{q,k,v}.*", tensors.JOINED),
            "attn.out_proj.*": "attention.wo.*", "ffn.{up,down}_proj.*": "ffn.{up,down}.*",
        },
    },
    head_tensors={**HEAD_TENSORS, **_TAGS, **_ANSWERS},
    presets={"mpt-7b": dict(vocab_size=50432, d_model=4096, n_layers=32, n_heads=32, max_seq_len=2048)},
)  # fmt: skip

# --- XGLM and BioGPT ----------------------------------------------------------------------------------------------


def _read_padding(theirs: Data, ours: Data) -> None:
    if isinstance(pad := theirs.get("pad_token_id", 1), int) and pad > 1:
        why = "places count from 2, and transformers has no vector for the place of that number"
        raise rules.wrong(f"pad_token_id is {pad}: {why}; Regard can only do 0, 1 or none")


_AFTER_ACTIVATION = Key("tower.ffn.dropout", 0.0)
_SCALED = replace(_PLACED.tower, ffn=MLP(1, "gelu", dropout=0.0))
XGLM = Family(
    name="xglm", base="model.",
    blank=replace(
        _PLACED, embedding=Tokens(1, Sinusoidal(1, layout="fairseq", offset=2), scaled=True), tower=_SCALED,
    ),
    heads=decoder_heads("XGLM", labels=False),
    config=dict(
        vocab_size=Key("embedding.vocab"), d_model=Key("tower.dim"), num_layers=Key("tower.layers"),
        attention_heads=Key("tower.attention.heads"), ffn_dim=Key("tower.ffn.ffn_dim"),
        max_position_embeddings=_PLACES, activation_function=Key("tower.ffn.activation", "gelu", ACTIVATIONS),
        dropout=Key("tower.dropout embedding.dropout", 0.1), activation_dropout=_AFTER_ACTIVATION,
        attention_dropout=Key("tower.attention.dropout", 0.1), layerdrop=Key("tower.layer_drop", 0.0),
        scale_embedding=Key("embedding.scaled", True), tie_word_embeddings=Key("head.tied", True),
        is_causal=rules.CAUSAL, pad_token_id=Group(("pad_token_id",), _read_padding, lambda *_: None),
        **fixed(add_cross_attention=False),
    ),
    aliases=dict(hidden_size="d_model", num_attention_heads="attention_heads", num_hidden_layers="num_layers"),
    tensors={
        "embed_tokens.weight": "embedding.weight", "layer_norm.*": "tower.norm.*", "layers.{i}.": _BART_LAYER,
    },
    head_tensors=HEAD_TENSORS, derived=(r"(model\.)?embed_positions\.weights",),
    presets={
        "xglm-564m": dict(
            vocab_size=256008, d_model=1024, num_layers=24, attention_heads=16, ffn_dim=4096,
            max_position_embeddings=2048,
        ),
    },
)  # fmt: skip
BIOGPT = Family(
    name="biogpt", base="biogpt.",
    blank=replace(_PLACED, embedding=Tokens(1, Learned(1, offset=2), scaled=True), tower=_SCALED),
    heads=decoder_heads("BioGpt"),
    config=SHAPE_KEYS | dict(
        vocab_size=Key("embedding.vocab"), max_position_embeddings=_PLACES,
        hidden_act=Key("tower.ffn.activation", "gelu", ACTIVATIONS), layerdrop=Key("tower.layer_drop", 0.0),
        hidden_dropout_prob=Key("tower.dropout embedding.dropout", 0.1), activation_dropout=_AFTER_ACTIVATION,
        attention_probs_dropout_prob=Key("tower.attention.dropout", 0.1),
        scale_embedding=Key("embedding.scaled", True), tie_word_embeddings=Key("head.tied", True),
        classifier_dropout=rules.head_dropout(tag=("classifier_dropout", "hidden_dropout_prob")),
        id2label=rules.LABELS, is_causal=rules.CAUSAL,
    ),
    # Their norms have 1e-5 whatever it says.
    inert="layer_norm_eps",
    tensors={
        "embed_tokens.weight": "embedding.weight", "embed_positions.weight": "embedding.position.weight",
        "layer_norm.*": "tower.norm.*", "layers.{i}.": _BART_LAYER,
    },
    head_tensors={**HEAD_TENSORS, **_TAGS, "lm": {"output_projection.weight": "head.weight"}},
    presets={"biogpt": sizes(42384, 1024, 24, 16, 4096, 1024)},
)  # fmt: skip
