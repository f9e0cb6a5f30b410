"""Every Hugging Face family that Regard reads and writes, and the config keys that decide nothing in any of them."""

from __future__ import annotations

from regard.checkpoint.families.decoders import GPT2, LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3
from regard.checkpoint.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, DEEPSEEK_V32
from regard.checkpoint.families.encoders import BERT, DEIT, DISTILBERT, ROBERTA, VIT, XLM_ROBERTA
from regard.checkpoint.families.seq2seq import BART, MARIAN, T5
from regard.checkpoint.rules import Family

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        GPT2, LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, DEEPSEEK_V2, DEEPSEEK_V3, DEEPSEEK_V32,
        BERT, ROBERTA, XLM_ROBERTA, DISTILBERT, VIT, DEIT, T5, BART, MARIAN,
    )
}  # fmt: skip

# Keys that decide nothing in a forward pass, unless a family has a rule for them: kept as they are and written back.
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
