"""GGUF files that are damaged, hostile or unknown: a sentence, quickly, and nothing is written."""

from __future__ import annotations

import random
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.checkpoint import store
from regard.checkpoint.gguf import describe, from_gguf
from regard.errors import UsageError
from tests.checkpoint import ggufs

pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, torch.Tensor]]:
    made = ggufs.made("llama")
    return made, ggufs.saved(made, tmp_path_factory.mktemp("model"))


@pytest.fixture
def path(model: Any, tmp_path: Path) -> Path:
    ggufs.write(tmp_path / "m.gguf", *model)
    return tmp_path / "m.gguf"


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(tensors: int, pairs: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, pairs) + rest


def tensor(name: str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


HOSTILE = {
    "nothing": b"",
    "another format": b"PK\x03\x04" + bytes(100),
    "version": b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "pairs": header(0, 2**62, bytes(100)),
    "tensors": header(2**62, 0, bytes(100)),
    "string": header(0, 1, struct.pack("<Q", 2**63 - 1) + bytes(100)),
    "list": header(0, 1, text("a") + struct.pack("<IIQ", 9, 4, 2**61) + bytes(100)),
    "list of strings": header(0, 1, text("a") + struct.pack("<IIQ", 9, 8, 2**40) + bytes(100)),
    "list of lists": header(0, 1, text("a") + struct.pack("<IIQ", 9, 9, 4) + bytes(100)),
    "type of value": header(0, 1, text("a") + struct.pack("<I", 99) + bytes(100)),
    "twice": header(0, 2, 2 * (text("a") + struct.pack("<IB", 0, 7))),
    "alignment": header(0, 1, text("general.alignment") + struct.pack("<II", 4, 0)),
    "axes": header(1, 0, tensor("a", [1] * 5) + bytes(100)),
    "no axes": header(1, 0, tensor("a", []) + bytes(100)),
    "size": header(1, 0, tensor("a", [2**40, 2**40]) + bytes(100)),
    "empty": header(1, 0, tensor("a", [0, 4]) + bytes(100)),
    "offset": header(1, 0, tensor("a", [4], offset=2**60) + bytes(100)),
    "block": header(1, 0, tensor("a", [33], kind=8) + bytes(100)),
    "overlap": header(9, 0, b"".join(tensor(f"{i}", [64]) for i in range(9)) + bytes(300)),
    "same name": header(2, 0, 2 * tensor("a", [4]) + bytes(100)),
    "bad text": header(0, 1, struct.pack("<Q", 2) + b"\xff\xff" + bytes(100)),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_header_is_refused(what: str, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(HOSTILE[what])
    with pytest.raises(UsageError, match="m.gguf is not a whole GGUF file"):
        describe(tmp_path / "m.gguf")


def test_damaged_file_gives_a_sentence_or_a_model(path: Path) -> None:
    whole, draw = path.read_bytes(), random.Random(0)
    end = whole.index(b"token_embd.weight") + 400
    for _ in range(300):
        data = bytearray(whole)
        if draw.random() < 0.3:
            del data[draw.randrange(len(data)) :]
        for _ in range(draw.choice((1, 3))):
            data[draw.randrange(min(end, len(data)))] = draw.choice((0, 1, 8, 127, 255))
        path.write_bytes(data)
        with suppress(UsageError):
            describe(path)


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"general.architecture": "mamba"}, "'mamba'; known: llama, qwen2, qwen3, gpt2"),
    "part": ({"split.count": 3}, "one of 3 parts of a model; join them first"),
    "adapter": ({"general.type": "adapter"}, "holds a 'adapter', not a whole model"),
    "unknown setting": ({"llama.logit_scale": 0.5}, "llama.logit_scale = 0.5 is not a setting"),
    "heads by layer": ({"llama.attention.head_count": [3, 1]}, r"head_count is \[3, 1\]"),
    "not finite": ({"llama.rope.freq_base": float("nan")}, "rope.freq_base is nan"),
    "not causal": ({"llama.attention.causal": False}, "llama.attention.causal = False"),
    "text for a number": ({"llama.block_count": "two"}, "block_count is 'two'"),
    "partial rotation": ({"llama.rope.dimension_count": 16}, "rope.dimension_count is 16"),
    "scaling": ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "longrope"),
    "missing": ({"llama.embedding_length": None}, "does not say llama.embedding_length"),
    "too many layers": ({"llama.block_count": 10**9}, "num_hidden_layers is 1,000,000,000"),
    "too few layers": ({"llama.block_count": 1}, "has no place"),
    "no heads": ({"llama.attention.head_count": 0}, "cannot become a model folder"),
    "wrong width": ({"llama.feed_forward_length": 65}, "cannot become a model folder: .* shape"),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_what_cannot_be_converted_is_named(what: str, model: Any, tmp_path: Path) -> None:
    metadata, message = CHANGES[what]
    path = tmp_path / "m.gguf"
    ggufs.write(path, *model, metadata=metadata)
    with pytest.raises(UsageError, match=message):
        describe(path)


def test_harmless_settings_are_taken(model: Any, tmp_path: Path) -> None:
    each = {"llama.attention.head_count": [3, 3], "llama.expert_count": 0}
    each |= {"llama.attention.causal": True, "llama.pooling_type": 3}
    ggufs.write(tmp_path / "m.gguf", *model, metadata={**each, "llama.rope.scaling.type": "none"})
    assert describe(tmp_path / "m.gguf").config["num_attention_heads"] == 3


def test_unknown_tensors_and_types_are_named(model: Any, path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data.replace(b"blk.0.attn_norm.weight", b"blk.0.attn_nork.weight"))
    with pytest.raises(UsageError, match="tensor blk.0.attn_nork.weight has no place in a llama"):
        describe(path)
    at = data.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8
    path.write_bytes(data[:at] + struct.pack("<I", 23) + data[at + 4 :])
    with pytest.raises(UsageError, match="'output_norm.weight' has the type IQ4_XS; known: F32"):
        describe(path)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_full_disk_in_the_middle_leaves_nothing(
    error: BaseException, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = store.Tensor.contiguous, iter(range(100))

    def fail(x: torch.Tensor) -> torch.Tensor:
        if next(calls) == 5:
            raise error
        return real(x)

    described = describe(path)
    monkeypatch.setattr(store.Tensor, "contiguous", fail)
    kind = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else UsageError
    with pytest.raises(kind):
        from_gguf(described, path.parent / "new", torch.float32, {"tokenizer.json": b"{}"})
    assert [p.name for p in path.parent.iterdir()] == ["m.gguf"]


def test_disk_without_room_is_told_before_anything_is_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("regard.checkpoint.convert.shutil.disk_usage", lambda where: full)
    with pytest.raises(UsageError, match="make room"):
        from_gguf(describe(path), path.parent / "new", torch.float32, {})
    assert [p.name for p in path.parent.iterdir()] == ["m.gguf"]
