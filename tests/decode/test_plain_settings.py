"""Settings that no fast part knows are computed by the plain ones, whatever a model is prepared for, and explained."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import regard
from regard.attention import DSA, GQA, MLA
from regard.fast.cuda import decoder as decoder_of_slots
from regard.moe import MoE
from regard.position import Rope, Temperature
from tests.open.stranger import PROMPTS, decodes

_LATENT = MLA(3, 10, 6, 4, rope=Rope(layout="interleaved"))
_WARM = Temperature(3, 1.5, 1)


def _turned(**more: Any) -> GQA:
    return GQA(4, 2, 8, rope=Rope(), **more)


MIXER, WEIGHED = (
    MoE(5, 2, 40, mixer=0.3),
    MoE(5, 2, 40, shared=1, score="sigmoid", weigh_input=True),
)
# What is set; the same without it; and why a part is plain, "" where the fast ones know it.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "clip": (dict(attention=_turned(clip=0.3)), dict(attention=_turned()), "it has a clip"),
    "chunk": (dict(attention=_turned(chunk=4)), dict(attention=_turned()), "it has a chunk"),
    "temperature": (
        dict(attention=_turned(temperature=_WARM)), dict(attention=_turned()), "it has a temperature"
    ),
    "bare": (
        dict(attention=_turned(qk_norm=1e-6, qk_norm_bare=True)), dict(attention=_turned()), "it has a UnitNorm"
    ),
    "latent": (
        dict(attention=replace(_LATENT, temperature=_WARM)), dict(attention=_LATENT), "it has a temperature"
    ),
    "sparse": (
        dict(attention=DSA(_LATENT, 2, 8, 4, rope_dim=4, rope_layout="interleaved")),
        dict(attention=DSA(_LATENT, 2, 8, 4, rope_dim=4)), "",
    ),
    "residual": (dict(residual_gain=0.3), {}, "it has a ScaledAdd"),
    "mixer": (dict(ffn=MIXER), dict(ffn=replace(MIXER, mixer=None)), "one after the other"),
    "weighed": (dict(ffn=WEIGHED), dict(ffn=replace(WEIGHED, weigh_input=False)), "on what experts read"),
    "words": (dict(token_gain=3.0), {}, ""),
    "logits": (dict(logit_gain=0.2), {}, ""),
}  # fmt: skip
# The CPU's parts read these by their own steps, or leave them as they are.
KNOWN = ("latent", "mixer", "weighed")
PLAIN = dict(layers=2, dim=32, heads=4, kv_heads=2, ffn_dim=48, vocab=60, max_len=64)


def small(settings: dict[str, Any]) -> Any:
    model = regard.build(regard.build("llama", **PLAIN).config, **settings).eval()
    torch.manual_seed(0)
    for p in model.parameters():
        p.data = torch.randn_like(p) * p.shape[-1] ** -0.5 * 1.5 if p.dim() > 1 else p.data
    return model


@pytest.mark.parametrize("name", MODELS)
def test_every_runner_says_what_the_plain_model_does(name: str) -> None:
    decodes(small(MODELS[name][0]))


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_int8_is_near_the_plain_model_and_the_setting_matters(name: str) -> None:
    (said, without, _), ids = MODELS[name], torch.tensor([PROMPTS[1] * 2])
    model = small(said)
    want, other = model(ids), small(without)(ids)

    def off(logits: torch.Tensor) -> torch.Tensor:
        """Of the typical token, as one that goes to other experts is far off."""
        return ((logits - want).norm(dim=-1) / want.norm(dim=-1)).median()

    assert 3 * off(regard.prepare(model, "int8")(ids)) < off(other)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_plain_says_why(name: str) -> None:
    (said, _, why), prepared = MODELS[name], regard.prepare(small(MODELS[name][0])).explain()
    assert name in KNOWN or why in prepared
    assert why in decoder_of_slots(small(said)).explain()
