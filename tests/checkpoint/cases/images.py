"""Encoders of images, and of images beside texts."""

from __future__ import annotations

from tests.checkpoint.cases import IMAGE, Settings, case

_SHAPE = {key: IMAGE[key] for key in IMAGE if key != "intermediate_size"}
_DINO = dict(_SHAPE, mlp_ratio=1)
_BOTH = dict(hidden_size=24, intermediate_size=20, num_hidden_layers=2, num_attention_heads=3)
_WORDS = dict(_BOTH, vocab_size=50, max_position_embeddings=11, eos_token_id=39)
_SIGHT = dict(_BOTH, hidden_size=20, num_attention_heads=5, image_size=12, patch_size=4)
_PAIR = dict(text_config=_WORDS, vision_config=dict(_SIGHT, num_hidden_layers=3))
_OLDER = dict(_WORDS, eos_token_id=2, hidden_act="gelu")
_WIDE = dict(_WORDS, projection_size=20, num_hidden_layers=1)

CASES = [
    case("dinov2", "Dinov2Model", _DINO, layerscale_value=0.7),
    case("dinov2-labels", "Dinov2ForImageClassification", _DINO, num_labels=5, qkv_bias=False),
    case("dinov2-gated", "Dinov2Model", _DINO, use_swiglu_ffn=True, use_mask_token=False),
    case("clip-text", "CLIPTextModel", _WORDS),
    case("clip-text-older", "CLIPTextModelWithProjection", _OLDER, projection_dim=7),
    case("clip-vision", "CLIPVisionModel", _SIGHT),
    case("clip-vision-projected", "CLIPVisionModelWithProjection", _SIGHT, projection_dim=7),
    case("clip", "CLIPModel", _PAIR, projection_dim=7, logit_scale_init_value=1.5),
    case("siglip-text", "SiglipTextModel", _WORDS, projection_size=7),
    case("siglip-vision", "SiglipVisionModel", _SIGHT, num_channels=1),
    case("siglip", "SiglipModel", dict(_PAIR, text_config=_WIDE)),
]
ODD: Settings = {}
KEPT = ["dinov2", "clip"]
