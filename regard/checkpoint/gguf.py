"""GGUF files, the format of llama.cpp, as model folders of Hugging Face.

A header of metadata and tensor descriptions comes first, then the tensors, often quantised. Layout:
github.com/ggml-org/ggml/blob/master/docs/gguf.md. A file is not trusted: every count and offset is held against the
file's size before anything is allocated. Tensors are read a few rows at a time; the package `gguf` unpacks the blocks
of the quantised types. (Its own reader checks nothing, and plain files are read without it.)

What a file says is put into Hugging Face's words by tables. llama.cpp changes some tensors when it makes a file; that
is undone: it reorders the rows of Llama's q and k so that RoPE turns neighbours, transposes GPT-2's matrices, and
stacks experts.
"""

from __future__ import annotations

import itertools
import math
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.checkpoint import hf
from regard.checkpoint.rules import Data
from regard.checkpoint.store import (
    Memory,
    check_room,
    narrowed,
    replacing,
    write_json,
    write_weights,
)
from regard.errors import UsageError
from regard.position import Llama3, Rope

Progress = Callable[[int, int], None]


class Kind(NamedTuple):
    """A tensor type: `size` bytes hold `block` values."""

    name: str
    block: int
    size: int


PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
KINDS = {0: Kind("F32", 1, 4), 1: Kind("F16", 1, 2), 30: Kind("BF16", 1, 2)}
for _number, _name, _size in (
    (2, "Q4_0", 18), (3, "Q4_1", 20), (6, "Q5_0", 22), (7, "Q5_1", 24), (8, "Q8_0", 34),
    (10, "Q2_K", 84), (11, "Q3_K", 110), (12, "Q4_K", 144), (13, "Q5_K", 176), (14, "Q6_K", 210),
):  # fmt: skip
    KINDS[_number] = Kind(_name, 256 if _name.endswith("K") else 32, _size)
# Types that are refused, to be named in the sentence.
_REFUSED = """Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M
TQ1_0 TQ2_0 MXFP4""".split()  # noqa: SIM905
REFUSED = dict(zip((*range(15, 30), 34, 35, 39), _REFUSED, strict=True))
# Scalar types of metadata as struct codes.
SCALARS = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY, FLOAT32 = 8, 9, 6
MOST_ENTRIES = 2**24
# Values unpacked at once.
CHUNK = 2**22


@dataclass(frozen=True)
class Entry:
    """A tensor of the file; `shape` in the order of torch, the rows along the last axis."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    start: int

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.kind.block * self.kind.size

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


class File:
    """The metadata and the tensors of a GGUF file; contents of tensors on request."""

    def __init__(self, path: Path):
        self.path, self.size = path, path.stat().st_size
        try:
            with path.open("rb") as file:
                self.metadata, self.tensors = _header(_Cursor(file, self.size))
        except (ValueError, struct.error) as error:
            raise UsageError(
                f"{path} is not a whole GGUF file ({error}); copy or download it again"
            ) from None

    def read(self, entry: Entry, first: int, rows: int, dtype: torch.dtype) -> Tensor:
        """Some rows of a tensor, dequantised: (rows, width)."""
        out = torch.empty(rows, entry.shape[-1], dtype=dtype)
        at = 0
        for raw in self._chunks(entry, first, rows):
            count = len(raw) // entry.row_bytes
            values = _unpacked(raw, entry.kind, count)
            out[at : at + count].copy_(narrowed(values, dtype, entry.name))
            at += count
        return out

    def equal(self, one: Entry, other: Entry) -> bool:
        """Whether two tensors are stored in the same bytes."""
        if (one.kind, one.shape) != (other.kind, other.shape):
            return False
        pairs = zip(*(self._chunks(x, 0, x.rows) for x in (one, other)), strict=True)
        return all(a == b for a, b in pairs)

    def _chunks(self, entry: Entry, first: int, rows: int) -> Iterator[bytes]:
        """The bytes of some rows, a few of them at a time."""
        step = max(1, CHUNK // entry.shape[-1])
        with self.path.open("rb") as file:
            file.seek(entry.start + first * entry.row_bytes)
            for at in range(0, rows, step):
                size = min(step, rows - at) * entry.row_bytes
                raw = file.read(size)
                if len(raw) != size:
                    raise UsageError(
                        f"{self.path} ended while {entry.name} was read; copy the file again"
                    )
                yield raw


def _unpacked(raw: bytes, kind: Kind, rows: int) -> Tensor:
    if kind.name in PLAIN:
        return torch.frombuffer(bytearray(raw), dtype=PLAIN[kind.name]).view(rows, -1)
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    blocks = np.frombuffer(raw, np.uint8).reshape(rows, -1)
    # Scales that are not finite give values that are not: the file's own, not worth a warning.
    with np.errstate(all="ignore"):
        return torch.from_numpy(dequantize(blocks, GGMLQuantizationType[kind.name]))


# --- the header ---------------------------------------------------------------------------------------------------


class _Cursor:
    """A file read from the front; what would go beyond its end is an error before it is read."""

    def __init__(self, file: BinaryIO, size: int):
        self.file, self.left, self.entries = file, size, 0

    def take(self, count: int) -> bytes:
        self.need(count)
        self.left -= count
        return self.file.read(count)

    def need(self, count: int) -> None:
        if count > self.left:
            raise ValueError(f"{count:,} bytes are promised where {self.left:,} are left")

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            return self.array(self.number("I"), self.number("Q"))
        if kind not in SCALARS:
            raise ValueError(f"metadata of the unknown type {kind}")
        number = self.number(SCALARS[kind])
        # The shortest decimal that is this float32: 1e-05, not 9.999999747378752e-06.
        return float(str(np.float32(number))) if kind == FLOAT32 else number

    def array(self, kind: int, count: int) -> list[Any]:
        self.entries += count
        if self.entries > MOST_ENTRIES:
            raise ValueError(f"its metadata has lists of more than {MOST_ENTRIES:,} entries")
        if kind == STRING:
            self.need(8 * count)
            return [self.text() for _ in range(count)]
        if kind not in SCALARS:
            raise ValueError(f"a list of the type {kind}")
        code = "<" + SCALARS[kind]
        return np.frombuffer(self.take(count * struct.calcsize(code)), code).tolist()


def _header(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, Entry]]:
    size = cursor.left
    if cursor.take(4) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version = cursor.number("I")
    if version not in (2, 3):
        swapped = version & 0xFFFF == 0
        why = "big-endian" if swapped else f"version {version}"
        raise ValueError(f"it is {why}; little-endian versions 2 and 3 are read")
    tensors, pairs = cursor.number("Q"), cursor.number("Q")
    # Of a pair: the length of its name, its type, one byte; of a tensor: length, rank, size, type,
    # offset.
    cursor.need(13 * pairs + 32 * tensors)
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        name, kind = cursor.text(), cursor.number("I")
        if name in metadata:
            raise ValueError(f"{name} occurs twice")
        metadata[name] = cursor.value(kind)
    described = [_described(cursor) for _ in range(tensors)]
    align = metadata.get("general.alignment", 32)
    if not isinstance(align, int) or align < 1 or align & (align - 1):
        raise ValueError(f"general.alignment is {align!r}, not a power of two")
    begin = -(-(size - cursor.left) // align) * align
    entries: dict[str, Entry] = {}
    for name, shape, kind, offset in described:
        entry = Entry(name, shape, kind, begin + offset)
        if entry.start + entry.nbytes > size:
            raise ValueError(f"the tensor {name} reaches beyond its end")
        if name in entries:
            raise ValueError(f"the tensor {name} occurs twice")
        entries[name] = entry
    if sum(entry.nbytes for entry in entries.values()) > size:
        raise ValueError("its tensors overlap")
    return metadata, entries


def _described(cursor: _Cursor) -> tuple[str, tuple[int, ...], Kind, int]:
    name, rank = cursor.text(), cursor.number("I")
    if not 1 <= rank <= 4:
        raise ValueError(f"the tensor {name!r:.80} has {rank} axes")
    shape = tuple(reversed([cursor.number("Q") for _ in range(rank)]))
    number, offset = cursor.number("I"), cursor.number("Q")
    if number not in KINDS:
        known = ", ".join(kind.name for kind in KINDS.values())
        raise UsageError(
            f"{cursor.file.name}: the tensor {name!r:.80} has the type {REFUSED.get(number, number)}; known: {known}"
        )
    kind = KINDS[number]
    if min(shape) < 1 or shape[-1] % kind.block:
        raise ValueError(f"the tensor {name!r:.80} of type {kind.name} has the shape {shape}")
    return name, shape, kind, offset


# --- the models ---------------------------------------------------------------------------------------------------

SAME, TURNED_Q, TURNED_K, TRANSPOSED = "same", "turned q", "turned k", "transposed"


@dataclass(frozen=True)
class Architecture:
    """`keys`: theirs below the architecture's name -> ours, `tensors`: theirs -> ours. {i} is a layer, {e} an expert
    (which a stacked tensor does not name), * is weight or bias. `changes`: what was done to a tensor, by their name."""

    model_type: str
    model_class: str
    keys: dict[str, str]
    tensors: dict[str, str]
    fixed: Data = field(default_factory=lambda: {"hidden_act": "silu"})
    changes: dict[str, str] = field(default_factory=dict)


_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_LAYER = "model.layers.{i}."
_FRAME = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "output_norm.weight": "model.norm.weight",
    "blk.{i}.attn_norm.weight": _LAYER + "input_layernorm.weight",
    "blk.{i}.ffn_norm.weight": _LAYER + "post_attention_layernorm.weight",
    **{f"blk.{{i}}.attn_{x}.*": f"{_LAYER}self_attn.{x}_proj.*" for x in "qkv"},
    "blk.{i}.attn_output.*": _LAYER + "self_attn.o_proj.*",
    **{f"blk.{{i}}.attn_{x}_norm.weight": f"{_LAYER}self_attn.{x}_norm.weight" for x in "qk"},
}
_GATED = {f"blk.{{i}}.ffn_{x}.*": f"{_LAYER}mlp.{x}_proj.*" for x in ("gate", "up", "down")}
_MOE = _LAYER + "block_sparse_moe."
_EXPERTS = {
    "blk.{i}.ffn_gate_inp.weight": _MOE + "gate.weight",
    # Files of before April 2024 have one tensor for each expert.
    **{
        f"blk.{{i}}.ffn_{part}{number}.weight": f"{_MOE}experts.{{e}}.{name}.weight"
        for part, name in (("gate", "w1"), ("down", "w2"), ("up", "w3"))
        for number in ("_exps", ".{e}")
    },
}
_DENSE = {
    name: ours for name, ours in {**_FRAME, **_GATED}.items() if not re.search("_._norm", name)
}
LLAMA = Architecture(
    "llama",
    "LlamaForCausalLM",
    _SIZES,
    _DENSE,
    changes={"blk.{i}.attn_q.*": TURNED_Q, "blk.{i}.attn_k.*": TURNED_K},
)
# The llama architecture is several families of Hugging Face.
_MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    model_class="MistralForCausalLM",
    keys={**_SIZES, "attention.sliding_window": "sliding_window"},
)
_MIXTRAL = replace(
    LLAMA,
    model_type="mixtral",
    model_class="MixtralForCausalLM",
    keys={
        **_MISTRAL.keys,
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
    },
    tensors={**{n: ours for n, ours in _DENSE.items() if n not in _GATED}, **_EXPERTS},
)
ARCHITECTURES = {
    "llama": LLAMA,
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _SIZES, _DENSE),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _SIZES, {**_FRAME, **_GATED}),
    "gpt2": Architecture(
        "gpt2",
        "GPT2LMHeadModel",
        {
            "context_length": "n_positions",
            "embedding_length": "n_embd",
            "block_count": "n_layer",
            "feed_forward_length": "n_inner",
            "attention.head_count": "n_head",
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
        },
        {
            "token_embd.weight": "transformer.wte.weight",
            "position_embd.weight": "transformer.wpe.weight",
            "output.weight": "lm_head.weight",
            "output_norm.*": "transformer.ln_f.*",
            "blk.{i}.attn_norm.*": "transformer.h.{i}.ln_1.*",
            "blk.{i}.ffn_norm.*": "transformer.h.{i}.ln_2.*",
            "blk.{i}.attn_qkv.*": "transformer.h.{i}.attn.c_attn.*",
            "blk.{i}.attn_output.*": "transformer.h.{i}.attn.c_proj.*",
            "blk.{i}.ffn_up.*": "transformer.h.{i}.mlp.c_fc.*",
            "blk.{i}.ffn_down.*": "transformer.h.{i}.mlp.c_proj.*",
        },
        {"activation_function": "gelu_new"},
        {f"blk.{{i}}.{x}.*": TRANSPOSED for x in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")},
    ),
}
_FREQUENCIES = "rope_freqs.weight"
# Keys that repeat what tensors say, or that decide nothing.
_INERT = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "pooling_type")
# Keys that must have the value that Hugging Face's family takes for granted.
_NEUTRAL = {
    "attention.causal": True,
    "expert_count": 0,
    "expert_used_count": 0,
    "rope.scaling.attn_factor": 1.0,
}


@dataclass(frozen=True)
class Part:
    """A tensor of the folder: `rows` of an entry from `first` on, as `shape`."""

    entry: Entry
    first: int
    rows: int
    shape: tuple[int, ...]
    change: str


class Described:
    """A GGUF file as a model of Hugging Face: `config`, and `parts` by the names of tensors."""

    def __init__(self, file: File):
        self.file, metadata = file, file.metadata
        name = metadata.get("general.architecture")
        if not isinstance(name, str) or name not in ARCHITECTURES:
            raise UsageError(
                f"{file.path} is of the architecture {name!r:.60}; known: {', '.join(ARCHITECTURES)}"
            )
        if metadata.get("split.count", 0) not in (0, 1):
            raise UsageError(
                f"{file.path} is one of {metadata['split.count']} parts of a model; join them first: "
                "llama-gguf-split --merge FIRST-PART WHOLE.gguf"
            )
        if metadata.get("general.type", "model") != "model":
            raise UsageError(
                f"{file.path} holds a {metadata['general.type']!r:.60}, not a whole model, "
                "which is what can be converted"
            )
        self.prefix, self.kind = name + ".", ARCHITECTURES[name]
        self.used: set[str] = set()
        if name == "llama" and self.number("expert_count", 0):
            self.kind = _MIXTRAL
        elif name == "llama" and self.number("attention.sliding_window", 0):
            self.kind = _MISTRAL
        # Keys that were looked at for the config.
        self.used = set()
        self.entries = dict(file.tensors)
        frequencies = self.entries.pop(_FREQUENCIES, None)
        self.tied = self._tied()
        self.config = self._config(frequencies)
        self.parts = self._parts()

    def number(self, key: str, default: Any = None) -> Any:
        """A number below the architecture's name; of a list with one entry per layer, the one that all have."""
        self.used.add(key)
        value = self.file.metadata.get(self.prefix + key, default)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
        plain = isinstance(value, (int, float, type(None))) and not isinstance(value, bool)
        if not plain or (isinstance(value, float) and not math.isfinite(value)):
            raise UsageError(
                f"{self.file.path}: {self.prefix}{key} is {value!r:.80}; one number for all layers is what can be used"
            )
        return value

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """A tensor of the folder, as Hugging Face has it."""
        part = self.parts[name]
        x = self.file.read(part.entry, part.first, part.rows, dtype)
        if part.change == TRANSPOSED and len(part.entry.shape) == 2:
            return x.T
        x = x.view(part.shape)
        if part.change in (TURNED_Q, TURNED_K):
            heads = "num_attention_heads" if part.change == TURNED_Q else "num_key_value_heads"
            pairs = x.unflatten(0, (self.config[heads], -1, 2))
            return pairs.transpose(1, 2).reshape(part.shape)
        return x

    # --- config.json ------------------------------------------------------------------------------------------------

    def _config(self, frequencies: Entry | None) -> Data:
        metadata, keys = self.file.metadata, self.kind.keys
        config: Data = {
            "architectures": [self.kind.model_class],
            "model_type": self.kind.model_type,
            **self.kind.fixed,
        }
        for theirs, ours in keys.items():
            if self.prefix + theirs in metadata:
                config[ours] = self.number(theirs)
        config["vocab_size"] = self._embedding().shape[0]
        config["tie_word_embeddings"] = self.tied
        for key in ("bos", "eos", "padding"):
            token = metadata.get(f"tokenizer.ggml.{key}_token_id")
            if token is not None:
                config[f"{key.removesuffix('ding')}_token_id"] = token
        if self.kind.model_type != "gpt2":
            self._llama_config(config, frequencies)
        for key, value in metadata.items():
            name = key.removeprefix(self.prefix)
            known = {*keys, *_INERT, *self.used}
            if name != key and name not in known and (name, value) not in _NEUTRAL.items():
                raise UsageError(
                    f"{self.file.path}: {key} = {value!r:.60} is not a setting that a {self.kind.model_type} model has"
                )
        for theirs, ours in keys.items():
            if ours not in config:
                raise UsageError(f"{self.file.path} does not say {self.prefix}{theirs}")
        return config

    def _llama_config(self, config: Data, frequencies: Entry | None) -> None:
        """Defaults that follow from other keys, biases, RoPE."""
        heads = config.get("num_attention_heads") or 1
        config.setdefault("num_key_value_heads", heads)
        config.setdefault("head_dim", (config.get("hidden_size") or 0) // heads)
        config.setdefault("rope_theta", 10000.0)
        if self.kind is _MIXTRAL or self.kind is _MISTRAL:
            config.setdefault("sliding_window", None)
        for key in ("rope.dimension_count", "attention.value_length"):
            if self.number(key, config["head_dim"]) != config["head_dim"]:
                raise UsageError(
                    f"{self.file.path}: {self.prefix}{key} is {self.number(key)}, heads have {config['head_dim']} "
                    "dimensions; only whole heads that all have one width can be converted"
                )
        if self.kind is LLAMA:
            config["attention_bias"] = "blk.0.attn_q.bias" in self.entries
            config["mlp_bias"] = "blk.0.ffn_up.bias" in self.entries
        scaling = self._scaling()
        if frequencies is not None:
            if scaling is not None:
                raise UsageError(f"{self.file.path} has {_FREQUENCIES} and rope.scaling both")
            scaling = self._llama3(frequencies, config)
        if scaling is not None:
            config["rope_scaling"] = scaling

    def _scaling(self) -> Data | None:
        kind = self.file.metadata.get(self.prefix + "rope.scaling.type")
        factor = self.number("rope.scaling.factor", self.number("rope.scale_linear"))
        self.used |= {"rope.scaling.type", "rope.scaling.original_context_length"}
        if kind == "none" or factor is None or (kind in (None, "linear") and factor == 1):
            return None
        if kind in (None, "linear"):
            return {"rope_type": "linear", "factor": factor}
        if kind != "yarn":
            raise UsageError(
                f"{self.file.path}: {self.prefix}rope.scaling.type is {kind!r:.60}; known: none, linear, yarn"
            )
        scaling: Data = {"rope_type": "yarn", "factor": factor}
        for theirs, ours in (
            ("original_context_length", "original_max_position_embeddings"),
            ("yarn_beta_fast", "beta_fast"),
            ("yarn_beta_slow", "beta_slow"),
        ):
            value = self.number(f"rope.scaling.{theirs}")
            if value is not None:
                scaling[ours] = value
        return scaling

    def _llama3(self, entry: Entry, config: Data) -> Data:
        """Llama 3's scaling of RoPE, of which the file has only what came of it, a divisor for each frequency."""
        divisors = self.file.read(entry, 0, entry.rows, torch.float32).flatten()
        head_dim, base, factor = config["head_dim"], config["rope_theta"], float(divisors.max())
        # What counts is the ratio of these lengths to the factors 1 and 4, which every Llama 3 has.
        for length in (8192, *(2**n for n in range(4, 21))):
            scaled = Rope(base, scaling=Llama3(factor, original_len=length)).frequencies(head_dim)
            wanted = Rope(base).frequencies(head_dim) / scaled
            if wanted.shape == divisors.shape and torch.allclose(wanted, divisors, rtol=1e-4):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": length,
                }
        raise UsageError(
            f"{self.file.path}: {_FREQUENCIES} is not a scaling of RoPE as Llama 3 has it, the only one that is known"
        )

    # --- tensors ----------------------------------------------------------------------------------------------------

    def _embedding(self) -> Entry:
        if "token_embd.weight" not in self.entries:
            raise UsageError(f"{self.file.path} has no tensor token_embd.weight; is it a model?")
        return self.entries["token_embd.weight"]

    def _tied(self) -> bool:
        """Whether the output matrix is the embedding: not stored, or stored in the same bytes (and then dropped)."""
        output = self.entries.get("output.weight")
        if output is not None and not self.file.equal(output, self._embedding()):
            return False
        self.entries.pop("output.weight", None)
        return True

    def _parts(self) -> dict[str, Part]:
        patterns = {name: _pattern(name) for name in self.kind.tensors}
        parts: dict[str, Part] = {}
        for name, entry in self.entries.items():
            for theirs, ours in self.kind.tensors.items():
                match = patterns[theirs].fullmatch(name)
                if match is None:
                    continue
                for group, value in match.groupdict().items():
                    ours = ours.replace("*" if group == "end" else f"{{{group}}}", value)
                parts |= _cut(entry, ours, self.kind.changes.get(theirs, SAME))
                break
            else:
                raise UsageError(
                    f"{self.file.path}: the tensor {name} has no place in a {self.kind.model_type} model"
                )
        return parts


def _pattern(name: str) -> re.Pattern[str]:
    text = re.escape(name).replace(r"\{i\}", r"(?P<i>\d+)").replace(r"\{e\}", r"(?P<e>\d+)")
    return re.compile(text.replace(r"\*", "(?P<end>weight|bias)"))


def _cut(entry: Entry, name: str, change: str) -> dict[str, Part]:
    """One tensor, or one for each expert of a stack."""
    if "{e}" not in name:
        shape = entry.shape[::-1] if change == TRANSPOSED else entry.shape
        return {name: Part(entry, 0, entry.rows, shape, change)}
    experts, rest = entry.shape[0], entry.shape[1:]
    rows = entry.rows // experts
    return {
        name.replace("{e}", str(e)): Part(entry, e * rows, rows, rest, change)
        for e in range(experts)
    }


# --- converting ---------------------------------------------------------------------------------------------------


def describe(path: Path) -> Described:
    """A GGUF file whose metadata and tensors make a model that Regard knows."""
    described = Described(File(path))
    if any(part.entry.kind.name not in PLAIN for part in described.parts.values()):
        # Missing, it is missed before anything is written.
        import gguf  # noqa: F401
    try:
        hf.read(described.config, Memory(_blank(described, torch.float32)), "meta", None)
    except UsageError as error:
        raise UsageError(f"{path} cannot become a model folder: {error}") from None
    return described


def gguf_dtype(file: File) -> tuple[torch.dtype, str]:
    """The type to write where none is asked for, and the one that most of the weights have: a plain
    type stays, and float16 holds a quantised one best, whose scales are float16."""
    counts: Counter[str] = Counter()
    for entry in file.tensors.values():
        counts[entry.kind.name] += entry.rows * entry.shape[-1]
    most = counts.most_common(1)[0][0]
    return PLAIN.get(most, torch.float16), most


def from_gguf(
    described: Described,
    target: Path,
    dtype: torch.dtype,
    files: Mapping[str, bytes],
    progress: Progress = lambda done, total: None,
) -> None:
    """Write the folder: the model, and `files` (the tokenizer's)."""
    blank, done = _blank(described, dtype), itertools.count(1)

    def read(name: str) -> torch.Tensor:
        progress(next(done), len(blank))
        return described.read(name, dtype)

    with replacing(target) as folder:
        check_room(folder, sum(x.nbytes for x in blank.values()))
        write_json(folder / "config.json", {**described.config, "dtype": hf.dtype_name(dtype)})
        for name, content in files.items():
            (folder / name).write_bytes(content)
        write_weights(folder, blank, read=read)


def _blank(described: Described, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Types and shapes of the folder's tensors."""
    return {
        name: torch.empty(part.shape, dtype=dtype, device="meta")
        for name, part in described.parts.items()
    }
