"""Every Hugging Face family that Regard reads and writes. A family is one table, and there is no
other list of them.

To add one, put a module-level `Family` (rules.py) into a file of this folder. Most are Llama with changes:

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

import importlib
import pkgutil

from regard.checkpoint.rules import Family

# In the order of the files; `save` tries them in this order for a model that came from no folder.
FAMILIES: dict[str, Family] = {
    family.name: family
    for file in pkgutil.iter_modules(__path__)
    for family in vars(importlib.import_module(f"{__name__}.{file.name}")).values()
    if isinstance(family, Family)
}

# Keys that decide nothing in a forward pass, unless a family has a rule for them: kept as they are
# and written back.
INERT = frozenset(
    """architectures model_type transformers_version dtype torch_dtype _name_or_path name_or_path use_cache
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id mask_token_id unk_token_id
    decoder_start_token_id forced_bos_token_id forced_eos_token_id bad_words_ids suppress_tokens
    begin_suppress_tokens initializer_range initializer_factor init_std return_dict output_attentions
    output_hidden_states output_past trained_length tokenizer_class task_specific_params problem_type finetuning_task
    id2label label2id num_labels _num_labels gradient_checkpointing pretraining_tp chunk_size_feed_forward
    is_encoder_decoder torchscript use_bfloat16 prefix num_beams max_length min_length length_penalty
    early_stopping no_repeat_ngram_size do_sample temperature top_k top_p num_return_sequences
    directionality pooler_fc_size pooler_num_attention_heads
    pooler_num_fc_layers pooler_size_per_head pooler_type _attn_implementation_autoset tie_encoder_decoder
    use_return_dict remove_invalid_values exponential_decay_length_penalty diversity_penalty
    num_beam_groups repetition_penalty typical_p encoder_no_repeat_ngram_size cross_attention_hidden_size
    pruned_heads tf_legacy_loss is_composition sinusoidal_pos_embds is_decoder add_cross_attention tie_word_embeddings
    return_dict_in_generate output_scores""".split()  # noqa: SIM905
)
