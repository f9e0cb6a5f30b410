"""Encoders of images."""

from __future__ import annotations

from dataclasses import replace

from regard.block import Tower
from regard.checkpoint import rules, tensors
from regard.checkpoint.families.common import BIASED_ATTENTION, SHAPE_KEYS
from regard.checkpoint.rules import ACTIVATIONS, Data, Family, Key, fixed
from regard.checkpoint.tensors import To, Weights
from regard.layers import MLP, Classify, Norm
from regard.models import Patches, TransformerConfig
from regard.models.init import Start

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
