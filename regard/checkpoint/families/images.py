"""Encoders of images, and of images beside texts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from regard.attention import GQA
from regard.block import Tower
from regard.checkpoint import rules, tensors
from regard.checkpoint.families.common import BIASED_ATTENTION, SHAPE_KEYS
from regard.checkpoint.family import Family
from regard.checkpoint.nested import Nested
from regard.checkpoint.rules import ACTIVATIONS, Data, Group, Key, Keys, fixed
from regard.checkpoint.tensors import To, Weights
from regard.layers import MLP, Classify, Norm, Project
from regard.models import AttentionPool, PairConfig, Patches, Pool, Tokens, TransformerConfig
from regard.models.init import Start
from regard.position import Learned

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


_IMAGE_TOWER = Tower(1, 1, BIASED_ATTENTION, MLP(1, "gelu"), norm=Norm(1e-12), causal=False)
VIT = Family(
    name="vit", base="vit.", blank=TransformerConfig(Patches(16, 16, extra=1), _IMAGE_TOWER),
    heads={"ViTForImageClassification": Classify(2, None), "ViTModel": None},
    config=SHAPE_KEYS | dict(
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

# --- DINOv2 -------------------------------------------------------------------------------------------------------


def _dino_width(theirs: Data, dim: int) -> int:
    """Of a feed-forward; with a gate two thirds of it, rounded up to eights."""
    width = int(dim * theirs.get("mlp_ratio", 4))
    return (int(width * 2 / 3) + 7) // 8 * 8 if theirs.get("use_swiglu_ffn") else width


def _read_dino_ffn(theirs: Data, ours: Data) -> None:
    gated = bool(theirs.get("use_swiglu_ffn"))
    word = "silu" if gated else theirs.get("hidden_act", "gelu")
    if word not in ACTIVATIONS:
        raise rules.wrong(f"hidden_act is {word!r}; known: {', '.join(ACTIVATIONS)}")
    dim = ours["tower"]["dim"]
    if type(dim) is not int or dim < 1:
        raise rules.wrong(f"hidden_size is {dim!r}; it must be a whole number from 1 on")
    ours["tower"]["ffn"] |= dict(
        ffn_dim=_dino_width(theirs, dim), gated=gated, activation=ACTIVATIONS[word]
    )


def _write_dino_ffn(ours: Data, theirs: Data) -> None:
    names = ("ffn_dim", "gated", "activation")
    width, gated, act = (rules.need(ours, f"tower.ffn.{name}") for name in names)
    dim = rules.need(ours, "tower.dim")
    if bool(theirs.get("use_swiglu_ffn")) != gated:
        theirs["use_swiglu_ffn"] = gated
    if not gated and ACTIVATIONS.get(theirs.get("hidden_act", "gelu")) != act:
        theirs["hidden_act"] = next((word for word, of in ACTIVATIONS.items() if of == act), act)
    if _dino_width(theirs, dim) != width:
        ratios = range(1, 2 * width // dim + 2)
        fits = (n for n in ratios if _dino_width({**theirs, "mlp_ratio": n}, dim) == width)
        theirs["mlp_ratio"] = next(fits, 4)


_DINO_TENSORS = {
    n: to for n, to in _IMAGE_TENSORS.items() if not n.startswith(("encoder", "pooler"))
}
DINOV2 = Family(
    name="dinov2", base="dinov2.",
    blank=TransformerConfig(
        Patches(14, 14), replace(_IMAGE_TOWER, layer_scale=1.0, ffn_dropped=False), pooler=Pool()
    ),
    heads={"Dinov2Model": None, "Dinov2ForImageClassification": Classify(2, None, "both")},
    config={n: r for n, r in SHAPE_KEYS.items() if n != "intermediate_size"} | dict(
        mlp_ratio=Group(("mlp_ratio", "use_swiglu_ffn", "hidden_act"), _read_dino_ffn, _write_dino_ffn),
        layer_norm_eps=Key("tower.norm.eps", 1e-6), image_size=Key("embedding.size", 224),
        patch_size=Key("embedding.patch", 14), num_channels=Key("embedding.channels", 3),
        qkv_bias=Key("tower.attention.bias", True), layerscale_value=Key("tower.layer_scale", 1.0),
        hidden_dropout_prob=Key("tower.dropout embedding.dropout", 0.0),
        attention_probs_dropout_prob=Key("tower.attention.dropout", 0.0),
        drop_path_rate=Key("tower.path_drop", 0.0), id2label=rules.LABELS,
    ),
    inert="""out_features out_indices _out_features _out_indices stage_names apply_layernorm
    reshape_hidden_states use_mask_token""",
    tensors={
        **_DINO_TENSORS,
        "encoder.layer.{i}.": {
            "attention.attention.{query,key,value}.*": "attention.w{q,k,v}.*",
            "attention.output.dense.*": "attention.wo.*", "norm{1,2}.*": "norm{1,3}.*",
            "layer_scale{1,2}.lambda1": "{attention,ffn}.add.norm.weight",
            "mlp.fc{1,2}.*": To("ffn.{up,down}.*", unless="ffn.gate.weight"),
            "mlp.weights_in.*": To("ffn.{gate,up}.*", tensors.JOINED),
            "mlp.weights_out.*": To("ffn.down.*", needs="ffn.gate.weight"),
        },
    },
    head_tensors={"classify": {"classifier.*": "head.out.*"}},
    carried=(r"dinov2\.embeddings\.mask_token",),
    presets={
        f"dinov2-{size}": dict(
            hidden_size=dim, num_hidden_layers=12, num_attention_heads=heads, image_size=518
        )
        for size, dim, heads in (("small", 384, 6), ("base", 768, 12))
    },
)  # fmt: skip

# --- CLIP and SigLIP ----------------------------------------------------------------------------------------------


def _encoder_keys(dim: int, layers: int, heads: int, ffn: int, act: str, eps: float) -> Keys:
    """What a missing key means differs: published folders leave out whole parts."""
    return dict(
        hidden_size=Key("tower.dim", dim), num_hidden_layers=Key("tower.layers", layers),
        num_attention_heads=Key("tower.attention.heads pooler.attention.heads", heads),
        intermediate_size=Key("tower.ffn.ffn_dim pooler.ffn.ffn_dim", ffn),
        hidden_act=Key("tower.ffn.activation pooler.ffn.activation", act, ACTIVATIONS),
        layer_norm_eps=Key("{tower.norm,embedding.norm,pooler.norm}.eps", eps),
        attention_dropout=Key("tower.attention.dropout", 0.0),
    )  # fmt: skip


def _text_keys(vocab: int, context: int) -> Keys:
    return dict(
        vocab_size=Key("embedding.vocab", vocab),
        max_position_embeddings=Key("max_len embedding.position.max_len", context),
    )


def _image_keys(patch: int) -> Keys:
    return dict(
        image_size=Key("embedding.size", 224), patch_size=Key("embedding.patch", patch),
        num_channels=Key("embedding.channels", 3),
    )  # fmt: skip


# In folders with the wrong id 2 the end is the highest id.
_WRONG_END = 2


def _read_end(theirs: Data, ours: Data) -> None:
    end = theirs.get("eos_token_id", 49407)
    if type(end) is not int or end < 0:
        raise rules.wrong(f"eos_token_id is {end!r}; give the id that ends a text")
    highest = end == _WRONG_END
    ours["pooler"] |= dict(token="highest", end=None) if highest else dict(token="end", end=end)


def _write_end(ours: Data, theirs: Data) -> None:
    end = rules.need(ours, "pooler.end")
    end = _WRONG_END if end is None else end
    if theirs.get("eos_token_id", 49407) != end:
        theirs["eos_token_id"] = end


_ENCODER_LAYER = {
    "encoder.layers.{i}.": {
        "self_attn.{q,k,v,out}_proj.*": "attention.w{q,k,v,o}.*", "layer_norm{1,2}.*": "norm{1,3}.*",
        "mlp.fc{1,2}.*": "ffn.{up,down}.*",
    },
}  # fmt: skip
_TEXT_TENSORS = tensors.written_out(_ENCODER_LAYER | {
    "embeddings.token_embedding.weight": "embedding.weight",
    "embeddings.position_embedding.weight": "embedding.position.weight",
    "final_layer_norm.*": "tower.norm.*", "head.*": "pooler.dense.*",
})  # fmt: skip
_VISION_TENSORS = tensors.written_out(_ENCODER_LAYER | {
    "embeddings.class_embedding": To("embedding.extra", tensors.OWN_ROW),
    "embeddings.patch_embedding.*": "embedding.project.*",
    "embeddings.position_embedding.weight": "embedding.position", "pre_layrnorm.*": "embedding.norm.*",
    "post_layernorm.*": To("tower.norm.*", needs="tower.norm.weight"),
})  # fmt: skip
_CLIP_VISION = _VISION_TENSORS | {
    "post_layernorm.*": To("pooler.norm.*", unless="tower.norm.weight")
}
_SIGLIP_VISION = _VISION_TENSORS | tensors.written_out({
    "head.probe": To("pooler.query", tensors.ROW),
    "head.attention.in_proj_weight": To("pooler.attention.w{q,k,v}.weight", tensors.JOINED),
    "head.attention.in_proj_bias": To("pooler.attention.w{q,k,v}.bias", tensors.JOINED),
    "head.attention.out_proj.*": "pooler.attention.wo.*", "head.layernorm.*": "pooler.norm.*",
    "head.mlp.fc{1,2}.*": "pooler.ffn.{up,down}.*",
})  # fmt: skip
_POSITION_IDS = (r".*\.position_ids",)


def _tower(eps: float, **more: Any) -> Tower:
    return Tower(1, 1, BIASED_ATTENTION, MLP(1, "gelu"), norm=Norm(eps), **more)


_CLIP_WORDS = _encoder_keys(512, 12, 8, 2048, "quick_gelu", 1e-5) | _text_keys(49408, 77) | dict(
    eos_token_id=Group(("eos_token_id",), _read_end, _write_end),
)  # fmt: skip
_CLIP_IMAGES = _encoder_keys(768, 12, 12, 3072, "quick_gelu", 1e-5) | _image_keys(32)
CLIP_TEXT = Family(
    name="clip_text_model", base="text_model.",
    blank=TransformerConfig(Tokens(1, Learned(1)), _tower(1e-5), pooler=Pool("end", 1), max_len=1),
    heads={"CLIPTextModelWithProjection": Project(1), "CLIPTextModel": None},
    config=_CLIP_WORDS | dict(projection_dim=Key("head.width", 512)), tensors=_TEXT_TENSORS,
    head_tensors={"project": {"text_projection.weight": "head.out.weight"}}, start=Start("clip"),
    derived=_POSITION_IDS,
)  # fmt: skip
CLIP_VISION = Family(
    name="clip_vision_model", base="vision_model.",
    blank=TransformerConfig(
        Patches(32, 32, bias=False, norm=Norm()), _tower(1e-5, causal=False, final_norm=False),
        pooler=Pool(norm=Norm()),
    ),
    heads={"CLIPVisionModelWithProjection": Project(1), "CLIPVisionModel": None},
    config=_CLIP_IMAGES | dict(projection_dim=Key("head.width", 512)), tensors=_CLIP_VISION,
    head_tensors={"project": {"visual_projection.weight": "head.out.weight"}}, start=Start("clip"),
    derived=_POSITION_IDS,
)  # fmt: skip
CLIP = Family(
    name="clip", base="",
    blank=PairConfig(
        replace(CLIP_TEXT.blank, head=Project(1)), replace(CLIP_VISION.blank, head=Project(1))
    ),
    heads={"CLIPModel": None},
    config=dict(
        text_config=Nested("text", _CLIP_WORDS, "projection_dim"),
        vision_config=Nested("image", _CLIP_IMAGES, "projection_dim"),
        projection_dim=Key("{text,image}.head.width", 512), logit_scale_init_value=Key("scale", 2.6592),
    ),
    inert="text_config_dict vision_config_dict",
    tensors={
        **tensors.under("text_model.", "text.", _TEXT_TENSORS),
        **tensors.under("vision_model.", "image.", _CLIP_VISION), "logit_scale": "scale",
        "text_projection.weight": "text.head.out.weight",
        "visual_projection.weight": "image.head.out.weight",
    },
    head_tensors={}, start=Start("clip", 1.0), derived=_POSITION_IDS,
    presets={"clip-vit-base-patch32": {}},
)  # fmt: skip

_SIGLIP_EACH = _encoder_keys(768, 12, 12, 3072, "gelu_pytorch_tanh", 1e-6)
_SIGLIP_WORDS = _SIGLIP_EACH | _text_keys(32000, 64) | dict(
    pad_token_id=Key("pooler.fill", 1),
    projection_size=Key("pooler.dense", lambda hf: hf.get("hidden_size", 768)),
)  # fmt: skip
_SIGLIP_IMAGES = _SIGLIP_EACH | _image_keys(16)
SIGLIP_TEXT = Family(
    name="siglip_text_model", base="text_model.",
    blank=TransformerConfig(
        Tokens(1, Learned(1)), _tower(1e-6, causal=False), pooler=Pool("last", dense=1, fill=1),
        max_len=1,
    ),
    heads={"SiglipTextModel": None}, config=_SIGLIP_WORDS, tensors=_TEXT_TENSORS, head_tensors={},
    start=Start("siglip"), derived=_POSITION_IDS,
)  # fmt: skip
SIGLIP_VISION = Family(
    name="siglip_vision_model", base="vision_model.",
    blank=TransformerConfig(
        Patches(16, 16, extra=0), _tower(1e-6, causal=False),
        pooler=AttentionPool(GQA(1, bias=True, out_bias=True), MLP(1, "gelu")),
    ),
    heads={"SiglipVisionModel": None}, config=_SIGLIP_IMAGES, tensors=_SIGLIP_VISION, head_tensors={},
    start=Start("siglip"), derived=_POSITION_IDS,
)  # fmt: skip
SIGLIP = Family(
    name="siglip", base="",
    blank=PairConfig(SIGLIP_TEXT.blank, SIGLIP_VISION.blank, scale=0.0, biased=True),
    heads={"SiglipModel": None},
    config=dict(
        text_config=Nested("text", _SIGLIP_WORDS), vision_config=Nested("image", _SIGLIP_IMAGES),
    ),
    tensors={
        **tensors.under("text_model.", "text.", _TEXT_TENSORS),
        **tensors.under("vision_model.", "image.", _SIGLIP_VISION),
        "logit_{scale,bias}": To("{scale,bias}", tensors.ROW),
    },
    head_tensors={}, start=Start("siglip", 1.0), derived=_POSITION_IDS,
    presets={"siglip-base-patch16-224": {}},
)  # fmt: skip
