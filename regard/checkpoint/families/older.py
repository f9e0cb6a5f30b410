"""Decoders of 2019 to 2024 with habits of their own: fused rows of heads, one norm for both parts, older words."""

from __future__ import annotations

import math
from dataclasses import replace

from regard.attention import GQA
from regard.block import Tower
from regard.checkpoint import rules, tensors
from regard.checkpoint.families.common import (
    BIASED,
    GATED,
    HEAD_TENSORS,
    NORM_EPS,
    ROTARY,
    decoder_heads,
    llama_like,
    sizes,
)
from regard.checkpoint.rules import ACTIVATIONS, Data, Family, Group, Key, Keys, fixed, get, put
from regard.checkpoint.tensors import To
from regard.layers import LM, MLP, Answer, Norm
from regard.models import Tokens, TransformerConfig
from regard.models.init import Start
from regard.position import Alibi, Learned, Rope

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

_EPS: Keys = dict(rms_norm_eps=None, layer_norm_eps=NORM_EPS)
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
STABLELM = llama_like(
    "stablelm", decoder_heads("StableLm"), replace(ROTARY, head_dim=None),
    tower=dict(norm=Norm(), attention_dropped=False),
    keys=dict(
        **_EPS, rope_parameters=_partial(0.25), num_key_value_heads=Key("tower.attention.kv_heads", 32),
        head_dim=None, use_qkv_bias=Key("tower.attention.bias", False), hidden_dropout=Key("tower.dropout", 0.0),
        use_parallel_residual=Key("tower.order", False, {True: "shared", False: "pre"}),
        classifier_dropout=rules.head_dropout(
            tag=("classifier_dropout", lambda hf: hf.get("hidden_dropout", 0.0)),
        ),
        **fixed(qk_layernorm=False),
    ),
    last_norm="norm.*", layer={**_PRE_NORMS, **_QKVO, **GATED},
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
    width = get(ours, "tower.dim") // get(ours, "tower.attention.heads")
    size = int(width * get(ours, "tower.attention.rope.partial"))
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
        "codegen-350m": dict(
            vocab_size=51200, n_embd=1024, n_layer=20, n_head=16, n_positions=2048, rotary_dim=32,
        ),
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
_TAG_DROPOUT = rules.head_dropout(tag=("classifier_dropout", 0.1))


def _layers_of(theirs: Data) -> list[str]:
    """GPT-Neo's words for its layers: kinds in their order, and how often these come again."""
    given = theirs.get("attention_types")
    listed = [[["global", "local"], 12]] if given is None else given
    pairs = isinstance(listed, list | tuple) and all(
        isinstance(item, list | tuple)
        and len(item) == 2
        and isinstance(item[0], list | tuple)
        and type(item[1]) is int
        and item[1] <= 10_000
        for item in listed
    )
    if not pairs:
        raise rules.wrong(
            f"attention_types is {given!r}; it must be a list such as [[['global', 'local'], 12]]"
        )
    kinds = [kind for names, times in listed for _ in range(times) for kind in names]
    if (said := theirs.get("attention_layers")) is not None and said != kinds:
        raise rules.wrong(f"attention_layers is {said!r}, attention_types says {kinds}")
    return kinds


def _write_layers(kinds: list[str], _: Data | None, theirs: Data, said: bool) -> None:
    if _layers_of({k: v for k, v in theirs.items() if k == "attention_types"}) != kinds:
        theirs["attention_types"] = [[kinds, 1]]
        theirs["attention_layers"] = kinds


def _local_layers() -> Group:
    group = rules.by_layer(
        "attention", "attention_layers", ("global", "local"), lambda theirs, i: False,
        lambda one: rules.need(one, "window") is not None, ("attention_types",), _write_layers,
    )  # fmt: skip
    return replace(
        group,
        reader=lambda theirs, ours: group.reader(
            {**theirs, "attention_layers": _layers_of(theirs)}, ours
        ),
    )


_UNSCALED = GQA(1, out_bias=True, scale=1.0)
GPT_NEO = Family(
    name="gpt_neo", base="transformer.",
    blank=replace(_PLACED, tower=replace(_PLACED.tower, layers=2, attention=(_UNSCALED, replace(_UNSCALED, window=1)))),
    heads={**decoder_heads("GPTNeo"), "GPTNeoForQuestionAnswering": Answer()},
    config=dict(
        vocab_size=Key("embedding.vocab"), hidden_size=Key("tower.dim"), num_layers=Key("tower.layers"),
        num_heads=Key("tower.attention.heads"), max_position_embeddings=_PLACES,
        intermediate_size=Key("tower.ffn.ffn_dim", lambda hf: 4 * hf["hidden_size"]),
        window_size=Key("tower.attention.1.window", 256), attention_types=_local_layers(),
        activation_function=Key("tower.ffn.activation", "gelu_new", ACTIVATIONS), layer_norm_epsilon=NORM_EPS,
        bos_token_id=rules.ids_below(50256, "bos_token_id", "eos_token_id"),
        resid_dropout=Key("tower.dropout", 0.0), embed_dropout=Key("embedding.dropout", 0.0),
        attention_dropout=Key("tower.attention.dropout", 0.0), classifier_dropout=_TAG_DROPOUT,
        tie_word_embeddings=Key("head.tied", True), id2label=rules.LABELS, **fixed(is_causal=True),
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
    heads, groups = get(ours, "tower.attention.heads"), get(ours, "tower.attention.kv_heads")
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
        "starcoder": dict(
            vocab_size=49152, n_embd=6144, n_layer=40, n_head=48, n_inner=24576, n_positions=8192,
        ),
    },
)  # fmt: skip

# --- OPT ----------------------------------------------------------------------------------------------------------


def _read_order(theirs: Data, ours: Data) -> None:
    before = theirs.get("do_layer_norm_before", True)
    put(ours, "tower.order", "pre" if before else "post")
    put(ours, "tower.final_norm", before and not theirs.get("_remove_final_layer_norm", False))


def _write_order(ours: Data, theirs: Data) -> None:
    before, last = get(ours, "tower.order") == "pre", get(ours, "tower.final_norm")
    if theirs.get("do_layer_norm_before", True) != before:
        theirs["do_layer_norm_before"] = before
    if before and theirs.get("_remove_final_layer_norm", False) == last:
        theirs["_remove_final_layer_norm"] = not last


_ORDER = Group(("do_layer_norm_before", "_remove_final_layer_norm"), _read_order, _write_order)


def _read_width(theirs: Data, ours: Data) -> None:
    width, dim = theirs.get("word_embed_proj_dim"), get(ours, "tower.dim")
    if width is not None and width != dim:
        raise rules.wrong(
            f"word_embed_proj_dim is {width!r}, Regard can only do hidden_size, {dim!r}"
        )


def _write_width(ours: Data, theirs: Data) -> None:
    if theirs.get("word_embed_proj_dim") is not None:
        theirs["word_embed_proj_dim"] = get(ours, "tower.dim")


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
    },
    head_tensors={**HEAD_TENSORS, **_ANSWERS},
    presets={
        "opt-125m": dict(
            vocab_size=50272, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, ffn_dim=3072,
            max_position_embeddings=2048,
        ),
    },
)  # fmt: skip

# --- with ALiBi ---------------------------------------------------------------------------------------------------


def _read_size(theirs: Data, ours: Data) -> None:
    """The width, and four times as much inside."""
    dim = Key("tower.dim").value("hidden_size", theirs)
    put(ours, "tower.dim", dim)
    put(ours, "tower.ffn.ffn_dim", 4 * dim if type(dim) is int else dim)


def _write_size(ours: Data, theirs: Data) -> None:
    theirs["hidden_size"] = get(ours, "tower.dim")


# The dropout of labels follows that of the stream.
_HIDDEN_TAG = rules.head_dropout(
    tag=("classifier_dropout", lambda hf: hf.get("hidden_dropout", 0.0))
)
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
        vocab_size=Key("embedding.vocab"), hidden_size=Group(("hidden_size",), _read_size, _write_size),
        n_layer=Key("tower.layers"), n_head=Key("tower.{attention,relative}.heads"),
        layer_norm_epsilon=Key("{tower,embedding}.norm.eps", 1e-5), tie_word_embeddings=Key("head.tied", True),
        hidden_dropout=Key("tower.dropout", 0.0), attention_dropout=Key("tower.attention.dropout", 0.0),
        classifier_dropout=_HIDDEN_TAG, id2label=rules.LABELS,
        **fixed(apply_residual_connection_post_layernorm=False, slow_but_exact=False, is_causal=True),
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
