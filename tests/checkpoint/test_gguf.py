"""GGUF files -> model folders: the logits are those of the model that was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard.checkpoint.gguf import KINDS, PLAIN, describe, from_gguf, gguf_dtype, unpacked
from tests.checkpoint import ggufs
from tests.checkpoint.families import case

gguf = pytest.importorskip("gguf")
IDS = torch.tensor([[1, 7, 42, 3, 3, 9, 11, 0, 49, 25, 17, 4]])


def converted(path: Path, target: Path, dtype: torch.dtype | None = None) -> Path:
    described = describe(path)
    from_gguf(described, target, dtype or gguf_dtype(described.file)[0], {})
    return target


@pytest.mark.parametrize("name", ggufs.CASES)
def test_converted_folder_gives_the_logits_of_the_model(name: str, tmp_path: Path) -> None:
    import transformers

    model = ggufs.made(name)
    tensors = ggufs.saved(model, tmp_path / "theirs")
    ggufs.write(tmp_path / "model.gguf", model, tensors)
    folder = converted(tmp_path / "model.gguf", tmp_path / "ours")
    ours = regard.load(folder)
    with torch.no_grad():
        wanted = model(IDS).logits
        torch.testing.assert_close(ours(IDS), wanted, rtol=1e-4, atol=1e-4)
        again = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert type(again) is type(model)
        torch.testing.assert_close(again(IDS).logits, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gpt2"])
def test_tensors_are_those_that_transformers_reads_from_the_file(name: str, tmp_path: Path) -> None:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model = ggufs.made(name)
    ggufs.write(tmp_path / "m.gguf", model, ggufs.saved(model, tmp_path / "t"), "Q8_0")
    theirs = load_gguf_checkpoint(tmp_path / "m.gguf", return_tensors=True, model_to_load=model)
    folder = converted(tmp_path / "m.gguf", tmp_path / "ours", torch.float32)
    same(weights(folder), theirs["tensors"])


def test_experts_of_old_files_are_those_of_new_ones(tmp_path: Path) -> None:
    model = ggufs.made("mixtral")
    tensors = ggufs.saved(model, tmp_path / "theirs")
    for name, old in (("old", True), ("new", False)):
        ggufs.write(tmp_path / f"{name}.gguf", model, tensors, old_experts=old)
        converted(tmp_path / f"{name}.gguf", tmp_path / name)
    assert weights(tmp_path / "old").keys() == tensors.keys()
    same(weights(tmp_path / "old"), tensors)
    same(weights(tmp_path / "new"), tensors)


def test_output_that_repeats_the_embedding_is_tied(tmp_path: Path) -> None:
    model = ggufs.made("gpt2")
    tensors = ggufs.saved(model, tmp_path / "theirs")
    twice = {**tensors, "lm_head.weight": tensors["transformer.wte.weight"]}
    ggufs.write(tmp_path / "m.gguf", model, twice)
    folder = converted(tmp_path / "m.gguf", tmp_path / "ours")
    assert "lm_head.weight" not in weights(folder)
    assert regard.load(folder).config.head.tied


# --- types --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model whose matrices have rows of 256, as the blocks of the K types need."""
    sizes: dict[str, Any] = dict(hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    sizes |= dict(num_attention_heads=4, num_key_value_heads=2, vocab_size=50)
    model = case("wide", "LlamaForCausalLM", sizes, max_position_embeddings=40).make()
    return model, ggufs.saved(model, tmp_path_factory.mktemp("wide"))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("kind", KINDS.values())
def test_every_type_is_read(
    kind: str, wide: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tensors = wide
    # Odd, so that a tensor is read in parts of which the last is shorter.
    monkeypatch.setattr("regard.checkpoint.gguf.CHUNK", 256 * 37)
    held = ggufs.write(tmp_path / "m.gguf", model, tensors, kind)
    folder = converted(tmp_path / "m.gguf", tmp_path / "whole", torch.float32)
    same(weights(folder), held)
    found = gguf_dtype(describe(tmp_path / "m.gguf").file)
    assert found == (PLAIN.get(kind, torch.float16), kind)
    halves = weights(converted(tmp_path / "m.gguf", tmp_path / "auto"))
    same(halves, {name: x.to(found[0]) for name, x in held.items()})


def nibbles(raw: np.ndarray) -> list[int]:
    return [int(b) & 15 for b in raw] + [int(b) >> 4 for b in raw]


def half(raw: np.ndarray) -> float:
    return float(raw.view(np.float16)[0])


def scale_and_least(raw: np.ndarray, j: int) -> tuple[int, int]:
    """get_scale_min_k4 of ggml-quants.c."""
    q = [int(b) for b in raw]
    if j < 4:
        return q[j] & 63, q[j + 4] & 63
    return (q[j + 4] & 15) | (q[j - 4] >> 6 << 4), (q[j + 4] >> 4) | (q[j] >> 6 << 4)


def by_hand(kind: str, raw: np.ndarray) -> list[float]:
    """One block, in loops, after dequantize_row_* of ggml-quants.c."""
    if kind == "Q8_0":
        return [half(raw[:2]) * int(q) for q in raw[2:].view(np.int8)]
    if kind == "Q4_0":
        return [half(raw[:2]) * (q - 8) for q in nibbles(raw[2:])]
    if kind == "Q4_1":
        return [half(raw[:2]) * q + half(raw[2:4]) for q in nibbles(raw[4:])]
    if kind in ("Q4_K", "Q5_K"):
        d, least, values = half(raw[:2]), half(raw[2:4]), []
        high, low = (None, raw[16:]) if kind == "Q4_K" else (raw[16:48], raw[48:])
        for j in range(8):
            scale, m = scale_and_least(raw[4:16], j)
            for k in range(32):
                q = int(low[j // 2 * 32 + k]) >> (4 * (j % 2)) & 15
                q += 0 if high is None else (int(high[k]) >> j & 1) * 16
                values.append(d * scale * q - least * m)
        return values
    assert kind == "Q6_K"
    low, high, scales = raw[:128], raw[128:192], raw[192:208].view(np.int8)
    values = []
    for i in range(256):
        side, k, at = i // 128, i % 128 // 32, i % 32
        q = int(low[side * 64 + k % 2 * 32 + at]) >> (4 * (k // 2)) & 15
        q |= (int(high[side * 32 + at]) >> (2 * k) & 3) << 4
        values.append(half(raw[208:210]) * int(scales[side * 8 + k * 2 + at // 16]) * (q - 32))
    return values


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K"])
def test_blocks_are_unpacked_as_the_format_says(kind: str) -> None:
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = np.random.default_rng(1).integers(0, 256, (3, size), dtype=np.uint8)
    for at in {"Q6_K": (208,), "Q4_0": (0,), "Q8_0": (0,)}.get(kind, (0, 2)):
        raw[:, at : at + 2] = np.array([0.5, -0.25, 2], np.float16).view(np.uint8).reshape(3, 2)
    found = unpacked(raw.tobytes(), kind, 3)
    wanted = torch.tensor([by_hand(kind, row) for row in raw])
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_value_beyond_float16_is_an_error_and_not_infinite(wide: Any, tmp_path: Path) -> None:
    from regard.errors import UsageError

    model, tensors = wide
    large = {**tensors, "model.norm.weight": torch.full((256,), 1e6)}
    ggufs.write(tmp_path / "m.gguf", model, large)
    with pytest.raises(UsageError, match="model.norm|output_norm.weight has values beyond"):
        converted(tmp_path / "m.gguf", tmp_path / "new", torch.float16)
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]
