"""MTP layers in folders: every family whose table has them, read, written as published, and equal to transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.checkpoint import hf
from regard.checkpoint.families import FAMILIES
from regard.decode.settings import OWN
from regard.layers import Classify
from regard.mask import Span
from regard.models.adapt import with_head
from tests.checkpoint.families import CASES, tensors

WITH = [name for name, family in FAMILIES.items() if family.mtp is not None]
# What stands around the block of the first MTP layer, as the hub has it.
AROUND = {
    "behind": ["layers.{n}.enorm", "layers.{n}.hnorm", "layers.{n}.eh_proj", "layers.{n}.shared_head.norm"],
    "apart": ["mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"],
}  # fmt: skip
IDS = torch.tensor([[5, 9, 2, 41, 7, 30, 11, 3, 20]])


@cache
def peer(name: str) -> Any:
    """transformers' model of the family's first case with a language model."""
    first = next(iter(FAMILIES[name].heads))
    return next(c for c in CASES.values() if c.architecture == first).make()


def with_mtp(name: str, depth: int = 1) -> Any:
    """Its weights in ours, and MTP layers beside them."""
    plain, torch_mtp = hf.from_hf(peer(name)), FAMILIES[name].mtp
    assert torch_mtp is not None
    model = replace(plain.config, mtp=replace(torch_mtp, depth=depth)).make()
    g = torch.Generator().manual_seed(1)
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=g) * 0.2
    model.load_state_dict(plain.state_dict(), strict=False)
    model.origin = plain.origin
    return model.eval()


def drafted(model: Any, layer: int = 0) -> Tensor:
    """Logits of the MTP layers up to this one, after every token but the last ones."""
    h, size = model.hidden(IDS), IDS.shape[1]
    for k in range(layer + 1):
        pos = Span.run(0, size - 1 - k, IDS.device)
        h = model.further(h[:, : size - 1 - k], IDS[:, 1 + k :], pos, k)
    return model.logits(h)


def test_table_has_those_that_the_hub_has() -> None:
    named = {"deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
    assert named <= set(WITH)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", WITH)
@torch.no_grad()
def test_written_as_published_and_read_again(name: str, depth: int, tmp_path: Path) -> None:
    model = with_mtp(name, depth)
    model.save(tmp_path / "a")
    said = json.loads((tmp_path / "a" / "config.json").read_text())
    counts = [said.get(key) for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers")]
    assert said["model_type"] == name and depth in counts
    stored = tensors(tmp_path / "a")
    n = model.config.tower.layers
    form = AROUND["apart" if model.config.mtp.shared else "behind"]
    for part in form:
        assert any(key.endswith(f"{part.format(n=n)}.weight") for key in stored), part
    again = regard.load(tmp_path / "a")
    assert again.config == model.config
    again.save(tmp_path / "b")
    for key, x in tensors(tmp_path / "b").items():
        assert torch.equal(x, stored[key]), key
    assert torch.equal(drafted(again, depth - 1), drafted(model, depth - 1))


@pytest.mark.parametrize("name", WITH)
@torch.no_grad()
def test_folder_without_them_has_none(name: str, tmp_path: Path) -> None:
    hf.from_hf(peer(name)).save(tmp_path)
    model = regard.load(tmp_path)
    assert model.mtp is None and model.config.mtp is None
    with pytest.raises(regard.UsageError, match="MTP layers, and it has none"):
        regard.generate(model, [[5, 6]], draft_model=OWN)


@pytest.mark.parametrize("name", WITH)
@torch.no_grad()
def test_transformers_reads_the_folder_and_answers_the_same(name: str, tmp_path: Path) -> None:
    model = with_mtp(name)
    model.save(tmp_path)
    theirs = type(peer(name)).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(model(IDS), theirs(IDS).logits, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
@torch.no_grad()
def test_guesses_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    model = with_mtp(name)
    model.save(tmp_path)
    theirs = type(peer(name)).from_pretrained(tmp_path).eval()
    # It knows the layer's number in the published sizes alone.
    theirs._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{model.config.tower.layers}\..*"]
    layers = MtpModel.from_pretrained(theirs).eval()
    states = theirs(IDS, output_hidden_states=True).hidden_states[-1][:, :-1]
    place = torch.arange(1, IDS.shape[1])[None]
    cache = MtpCache(config=theirs.config.get_mtp_config())
    _, logits, _ = layers(IDS[:, 1:], states, torch.ones_like(place), place, cache)
    ours = drafted(model)[:, -1]
    torch.testing.assert_close(ours, logits[:, 0], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
@torch.no_grad()
def test_guesses_equal_transformers_layers_put_together(name: str, tmp_path: Path) -> None:
    """transformers reads these folders without their MTP layers: what they compute is put together of its modules."""
    model = with_mtp(name)
    model.save(tmp_path)
    theirs = peer(name)
    core, config = theirs.model, theirs.config
    sees = config.layer_types.index("full_attention")
    last = config.num_hidden_layers - 1
    kind, norm = type(core.layers[sees]), type(core.norm)
    # The attention of a layer that sees tokens, the experts of the last one.
    config = type(config)(**{**config.to_dict(), "layer_types": ["full_attention"] * (last + 1)})
    block = kind(config, last).eval()
    stored = {k: x for k, x in tensors(tmp_path).items() if k.startswith("mtp.")}
    begin = "mtp.layers.0."
    own = {k.removeprefix(begin): x for k, x in stored.items() if k.startswith(begin)}
    names = set(block.state_dict())
    if "mlp.experts.gate_up_proj" in names:
        count = config.num_experts
        each = {part: [own.pop(f"mlp.experts.{e}.{part}_proj.weight") for e in range(count)]
                for part in ("gate", "up", "down")}  # fmt: skip
        gates = [torch.cat(pair) for pair in zip(each["gate"], each["up"], strict=True)]
        own["mlp.experts.gate_up_proj"] = torch.stack(gates)
        own["mlp.experts.down_proj"] = torch.stack(each["down"])
    block.load_state_dict(own)

    def normed(part: str, x: Tensor) -> Tensor:
        module: nn.Module = norm(config.hidden_size, eps=config.rms_norm_eps)
        module.load_state_dict({"weight": stored[f"mtp.{part}.weight"]})
        return module(x)

    h = core(IDS).last_hidden_state[:, :-1]
    words = normed("pre_fc_norm_embedding", core.embed_tokens(IDS[:, 1:]))
    x = torch.cat([words, normed("pre_fc_norm_hidden", h)], -1) @ stored["mtp.fc.weight"].T
    size = x.shape[1]
    mask = torch.full((size, size), -torch.inf).triu(1)[None, None]
    place = torch.arange(size)[None]
    # Qwen3.5 has three positions of a token in a picture, which in a text are one.
    turn = core.rotary_emb(x, place.expand(3, 1, -1) if "qwen3_5" in name else place)
    out = block(x, position_embeddings=turn, attention_mask=mask)
    out = out[0] if isinstance(out, tuple) else out
    logits = theirs.lm_head(normed("norm", out))
    torch.testing.assert_close(drafted(model), logits, rtol=1e-4, atol=2e-5)


@torch.no_grad()
def test_copies_of_table_and_head_are_written_back(tmp_path: Path) -> None:
    """The hub's DeepSeek-V3 stores both once more beside its MTP layer."""
    from safetensors.torch import load_file, save_file

    model = with_mtp("deepseek_v3")
    model.save(tmp_path / "a")
    file = tmp_path / "a" / "model.safetensors"
    stored, n = load_file(file), model.config.tower.layers
    stored[f"model.layers.{n}.embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
    stored[f"model.layers.{n}.shared_head.head.weight"] = stored["lm_head.weight"].clone()
    save_file(stored, file, {"format": "pt"})
    again = regard.load(tmp_path / "a")
    assert again.config.mtp == model.config.mtp
    again.save(tmp_path / "b")
    back = tensors(tmp_path / "b")
    assert back.keys() == stored.keys()
    assert all(torch.equal(back[key], x) for key, x in stored.items())


def test_another_head_leaves_them() -> None:
    model = with_head(with_mtp("deepseek_v3"), Classify(3))
    assert model.mtp is None and model.config.mtp is None


def test_missing_tensor_of_theirs_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    with_mtp("glm4_moe").save(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    name = next(key for key in stored if key.endswith("eh_proj.weight"))
    del stored[name]
    save_file(stored, file, {"format": "pt"})
    with pytest.raises(regard.UsageError, match=f"tensor {name} is missing"):
        regard.load(tmp_path)
