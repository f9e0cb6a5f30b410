"""Every Hugging Face family that Regard reads and writes. A family is one table, and there is no other list of them.

To add one, put a `Family` (rules.py) into the file of its kin here. Most are Llama with changes:

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
is how new weights are drawn. A `Multimodal` (multimodal.py) beside a family is a model_type whose language model is of
that family: `GEMMA3_PICTURES = Multimodal("gemma3", "gemma3_text")`. `regard.build`, `save` and the tests walk this
table, and make a tiny case of every class in `heads` (tests/checkpoint/families.py).
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from regard.checkpoint.families import (
    dense,
    encoders,
    experts,
    gemma4,
    gpt,
    hybrid,
    images,
    latent,
    llama,
    newest,
    older,
    rotary_encoders,
    seq2seq,
    speech,
    t5gemma,
)
from regard.checkpoint.family import Family
from regard.checkpoint.multimodal import Multimodal

# `save` tries them in this order for a model that came from no folder.
_FILES: tuple[ModuleType, ...] = (
    gpt,
    llama,
    latent,
    hybrid,
    experts,
    encoders,
    rotary_encoders,
    images,
    seq2seq,
    dense,
    older,
    newest,
    speech,
    gemma4,
    t5gemma,
)
FAMILIES: dict[str, Family] = {
    family.name: family
    for file in _FILES
    for family in vars(file).values()
    if isinstance(family, Family)
}
# Folders whose language model is of one of them.
MULTIMODAL: dict[str, Multimodal] = {
    row.name: row for file in _FILES for row in vars(file).values() if isinstance(row, Multimodal)
}

# What works with each of them, as the tests measured it: python -m tests.checkpoint.matrix
MATRIX = Path(__file__).with_name("matrix.json")

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
