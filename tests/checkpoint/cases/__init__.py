"""What a case of tests/checkpoint/families.py is made of, and the cases of families that stand in a file of their kin
here, each in a list CASES."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch

Settings = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Case:
    """A class of transformers (the config's is named after it) and its settings; `options` go to the class itself."""

    name: str
    architecture: str
    settings: Settings
    options: Settings = field(default_factory=dict)

    def make(self) -> Any:
        """The model with weights large enough that a mistake shows."""
        import transformers

        transformers.logging.set_verbosity_error()
        cls = getattr(transformers, self.architecture)
        torch.manual_seed(0)
        # transformers fills in what it is given
        settings = copy.deepcopy(self.settings)
        model = cls(cls.config_class(**settings), **self.options).eval()
        sines = model.config.model_type in ("marian", "pegasus")
        fixed = "embed_positions" if sines else "no such name"
        with torch.no_grad():
            for name, p in model.named_parameters():
                if fixed not in name:
                    gain = 1 if p.dim() == 1 and p.mean() > 0.5 else 0  # of a norm
                    p.copy_(torch.randn_like(p) * 0.2 + gain)
            for name, b in model.named_buffers():
                if "e_score_correction" in name or "final_logits" in name:
                    b.copy_(torch.randn_like(b) * 0.3)
                if "tid2eid" in name:
                    b.copy_(torch.randint_like(b, model.config.n_routed_experts))
                if "layer_scalar" in name:
                    b.copy_(torch.randn_like(b) * 0.2 + 1)
        return model


def case(name: str, architecture: str, *settings: Settings, **more: Any) -> Case:
    merged: Settings = {}
    for each in (*settings, more):
        merged |= each
    return Case(name, architecture, merged, merged.pop("options", {}))


# --- settings that cases share ------------------------------------------------------------------------------------

BASE = dict(vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=3)
BASE |= dict(intermediate_size=20, max_position_embeddings=40)
KV = dict(BASE, num_key_value_heads=3)
GPT = dict(vocab_size=50, n_embd=24, n_layer=2, n_head=3, n_positions=40)
GPT |= dict(bos_token_id=1, eos_token_id=2)
LATENT = dict(kv_lora_rank=16, q_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
EXPERTS = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, n_group=2)
DEEPSEEK = {**KV, **LATENT, **EXPERTS, "first_k_dense_replace": 1, "topk_group": 1}
PHI = dict(pad_token_id=0, eos_token_id=2)
ALBERT = dict(BASE, num_hidden_layers=3, embedding_size=10)
MODERN = dict(BASE, num_hidden_layers=4, local_attention=4, pad_token_id=0)
INDEX = dict(index_head_dim=16, index_n_heads=7)
DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=5)
DELTA |= dict(linear_value_head_dim=7, linear_conv_kernel_dim=3, head_dim=8)
DELTA |= dict(moe_intermediate_size=12, shared_expert_intermediate_size=13, num_experts_per_tok=2)
DELTA |= dict(num_experts=4)
DISTIL = dict(vocab_size=50, dim=24, n_layers=2, n_heads=3, hidden_dim=20)
DISTIL |= dict(max_position_embeddings=40)
T5 = dict(vocab_size=50, d_model=24, d_kv=10, d_ff=20, num_layers=2, num_heads=3)
BART = dict(vocab_size=50, d_model=24, encoder_layers=2, decoder_layers=1)
BART |= dict(encoder_attention_heads=3, decoder_attention_heads=2)
BART |= dict(encoder_ffn_dim=20, decoder_ffn_dim=22, max_position_embeddings=40)
MARIAN = dict(BART, pad_token_id=49, decoder_start_token_id=49)
IMAGE = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20)
IMAGE |= dict(image_size=12, patch_size=4)


def rope(kind: str, **more: Any) -> Settings:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


_YARN = dict(factor=4.0, original_max_position_embeddings=10)
LLAMA3 = rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
YARN = rope("yarn", **_YARN)
LONG = rope("longrope", short_factor=[1.0, 1.3], long_factor=[2.0, 3.0], partial_rotary_factor=0.5)
YARN_FIXED = rope("yarn", **_YARN, attention_factor=0.8, truncate=False)
YARN_SCALED = rope("yarn", **_YARN, mscale=0.7, mscale_all_dim=0.9, beta_fast=16, beta_slow=2)
