"""GGUF files, the format of llama.cpp, as model folders of Hugging Face.

A header of metadata and tensor descriptions comes first, then the tensors, often quantised. Layout:
github.com/ggml-org/ggml/blob/master/docs/gguf.md. A file is not trusted: every count and offset is held against the
file's size before anything is allocated, which the reader of the package `gguf` does not do; that package knows the
types and unpacks their blocks. Tensors are read a few rows at a time.

What a file says is put into Hugging Face's words by tables. llama.cpp changes some tensors when it makes a file; that
is undone: it reorders the rows of Llama's q and k so that RoPE turns neighbours, transposes GPT-2's matrices, and
stacks experts.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from regard.checkpoint import hf, store
from regard.checkpoint.families import FAMILIES
from regard.checkpoint.rules import Data
from regard.checkpoint.tensors import written_out
from regard.errors import UsageError
from regard.position import Llama3, Rope

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
QUANTISED = "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K"
KINDS = {GGMLQuantizationType[name].value: name for name in (*PLAIN, *QUANTISED.split())}
# Scalar types of metadata as struct codes.
SCALARS = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY, FLOAT32 = 8, 9, 6
MOST_ENTRIES = 2**24
# Values unpacked at once.
CHUNK = 2**22


class Entry(NamedTuple):
    """A tensor of the file; `shape` in the order of torch, the rows along the last axis."""

    name: str
    shape: tuple[int, ...]
    kind: str
    start: int

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType[self.kind]]
        return self.shape[-1] // block * size


class File:
    """The metadata and the tensors of a GGUF file; contents of tensors on request."""

    def __init__(self, path: Path):
        self.path = path
        try:
            with path.open("rb") as file:
                self.metadata, self.tensors = _header(_Cursor(file, path.stat().st_size))
        except UsageError:
            raise
        except (ValueError, struct.error) as error:
            why = f"is not a whole GGUF file ({error}); copy or download it again"
            raise UsageError(f"{path} {why}") from None

    def read(self, entry: Entry, first: int, rows: int, dtype: torch.dtype) -> Tensor:
        """Some rows of a tensor, dequantised: (rows, width)."""
        out = torch.empty(rows, entry.shape[-1], dtype=dtype)
        at = 0
        for raw in self._chunks(entry, first, rows):
            count = len(raw) // entry.row_bytes
            values = unpacked(raw, entry.kind, count)
            out[at : at + count] = store.narrowed(values, dtype, entry.name)
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
                    why = f"ended while {entry.name} was read; copy the file again"
                    raise UsageError(f"{self.path} {why}")
                yield raw


def unpacked(raw: bytes, kind: str, rows: int) -> Tensor:
    """The values of whole rows."""
    if kind in PLAIN:
        return torch.frombuffer(bytearray(raw), dtype=PLAIN[kind]).view(rows, -1)
    blocks = np.frombuffer(raw, np.uint8).reshape(rows, -1)
    # Scales that are not finite give values that are not: the file's own, not worth a warning.
    with np.errstate(all="ignore"):
        return torch.from_numpy(dequantize(blocks, GGMLQuantizationType[kind]))


# --- the header ---------------------------------------------------------------------------------------------------


class _Cursor:
    """A file read from the front; what would go beyond its end is an error before it is read."""

    def __init__(self, file: BinaryIO, size: int):
        self.file, self.size, self.left, self.entries = file, size, size, 0

    def need(self, count: int) -> None:
        if count > self.left:
            raise ValueError(f"{count:,} bytes are promised where {self.left:,} are left")

    def take(self, count: int) -> bytes:
        self.need(count)
        self.left -= count
        return self.file.read(count)

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

    def tensor(self) -> Entry:
        """A description; where it starts counts from the end of the header."""
        name = self.text()
        rank = self.number("I")
        if not 1 <= rank <= 4:
            raise ValueError(f"the tensor {name!r:.80} has {rank} axes")
        shape = tuple(reversed([self.number("Q") for _ in range(rank)]))
        number = self.number("I")
        offset = self.number("Q")
        if number not in KINDS:
            kinds = {kind.value: kind.name for kind in GGMLQuantizationType}
            why = f"the tensor {name!r:.80} has the type {kinds.get(number, number)}"
            raise UsageError(f"{self.file.name}: {why}; known: {', '.join(KINDS.values())}")
        block, _ = GGML_QUANT_SIZES[GGMLQuantizationType(number)]
        if min(shape) < 1 or shape[-1] % block:
            raise ValueError(f"the tensor {name!r:.80} of type {KINDS[number]} has shape {shape}")
        return Entry(name, shape, KINDS[number], offset)


def _header(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, Entry]]:
    if cursor.take(4) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version = cursor.number("I")
    if version not in (2, 3):
        why = f"version {version}" if version & 0xFFFF else "big-endian"
        raise ValueError(f"it is {why}; little-endian versions 2 and 3 are read")
    tensors = cursor.number("Q")
    pairs = cursor.number("Q")
    # Of a pair: the length of its name, type, one byte; of a tensor: length, rank, size, type, offset.
    cursor.need(13 * pairs + 32 * tensors)
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        name = cursor.text()
        kind = cursor.number("I")
        if name in metadata:
            raise ValueError(f"{name} occurs twice")
        metadata[name] = cursor.value(kind)
    described = [cursor.tensor() for _ in range(tensors)]
    align = metadata.get("general.alignment", 32)
    if not isinstance(align, int) or align < 1 or align & (align - 1):
        raise ValueError(f"general.alignment is {align!r}, not a power of two")
    begin = -(-(cursor.size - cursor.left) // align) * align
    entries: dict[str, Entry] = {}
    total = 0
    for entry in described:
        nbytes = entry.rows * entry.row_bytes
        total += nbytes
        if begin + entry.start + nbytes > cursor.size or total > cursor.size:
            raise ValueError(f"the tensor {entry.name} reaches beyond its end, or tensors overlap")
        if entry.name in entries:
            raise ValueError(f"the tensor {entry.name} occurs twice")
        entries[entry.name] = entry._replace(start=begin + entry.start)
    return metadata, entries


# --- the models ---------------------------------------------------------------------------------------------------

# Keys below the architecture's name -> Hugging Face's.
_SIZES = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}  # fmt: skip
_WINDOW = {"attention.sliding_window": "sliding_window"}
_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_GPT2_SIZES = {
    "context_length": "n_positions", "embedding_length": "n_embd", "block_count": "n_layer",
    "feed_forward_length": "n_inner", "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}  # fmt: skip
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gpt2")
# By the model type of Hugging Face: llama is three, one of them with a window, one with experts.
KEYS: dict[str, dict[str, str]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3"), _SIZES),
    "mistral": _SIZES | _WINDOW,
    "mixtral": _SIZES | _WINDOW | _EXPERTS,
    "gpt2": _GPT2_SIZES,
}
# Their tensors -> Hugging Face's. {i} is a layer, {e} an expert, * weight or bias. Files of before April 2024 have
# one tensor for each expert, later ones a stack, whose name has no {e}.
_MOE = "model.layers.{i}.block_sparse_moe."
_LLAMA_TENSORS = written_out(
    {
        "{token_embd,output_norm}.weight": "model.{embed_tokens,norm}.weight",
        "output.weight": "lm_head.weight",
        "blk.{i}.{attn,ffn}_norm.weight": "model.layers.{i}.{input,post_attention}_layernorm.weight",
        "blk.{i}.attn_{q,k,v,output}.*": "model.layers.{i}.self_attn.{q,k,v,o}_proj.*",
        "blk.{i}.attn_{q,k}_norm.weight": "model.layers.{i}.self_attn.{q,k}_norm.weight",
        "blk.{i}.ffn_{gate,up,down}.*": "model.layers.{i}.mlp.{gate,up,down}_proj.*",
        "blk.{i}.ffn_gate_inp.weight": _MOE + "gate.weight",
        "blk.{i}.ffn_{gate,down,up}_exps.weight": _MOE + "experts.{e}.{w1,w2,w3}.weight",
        "blk.{i}.ffn_{gate,down,up}.{e}.weight": _MOE + "experts.{e}.{w1,w2,w3}.weight",
    }
)
_GPT2_TENSORS = written_out(
    {
        "{token,position}_embd.weight": "transformer.{wte,wpe}.weight",
        "output.weight": "lm_head.weight",
        "output_norm.*": "transformer.ln_f.*",
        "blk.{i}.{attn,ffn}_norm.*": "transformer.h.{i}.ln_{1,2}.*",
        "blk.{i}.attn_{qkv,output}.*": "transformer.h.{i}.attn.{c_attn,c_proj}.*",
        "blk.{i}.ffn_{up,down}.*": "transformer.h.{i}.mlp.{c_fc,c_proj}.*",
    }
)
_FREQUENCIES = "rope_freqs.weight"
# Keys that repeat what tensors say, or that decide nothing.
_INERT = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "pooling_type")
# Keys that must have the value that Hugging Face's family takes for granted.
_NEUTRAL: Data = {"attention.causal": True, "expert_count": 0, "expert_used_count": 0}
_NEUTRAL |= {"rope.scaling.attn_factor": 1.0}
# Of a tensor of the folder: its shape, and what reads it in a type.
Part = tuple[tuple[int, ...], Callable[[torch.dtype], Tensor]]


class Described:
    """A GGUF file as a model of Hugging Face: `config`, and `parts`, of each tensor its shape and what reads it."""

    def __init__(self, file: File):
        self.file, metadata = file, file.metadata
        name = metadata.get("general.architecture")
        if not isinstance(name, str) or name not in ARCHITECTURES:
            self._fail(f" is of the architecture {name!r:.60}; known: {', '.join(ARCHITECTURES)}")
        if metadata.get("split.count", 0) not in (0, 1):
            join = "join them first: llama-gguf-split --merge FIRST-PART WHOLE.gguf"
            self._fail(f" is one of {metadata['split.count']} parts of a model; {join}")
        if metadata.get("general.type", "model") != "model":
            self._fail(f" holds a {metadata['general.type']!r:.60}, not a whole model")
        self.architecture = name
        self.prefix = f"{name}."
        self.model_type = name
        # Keys that were looked at for the config.
        self.used: set[str] = set()
        if name == "llama" and self.number("expert_count", 0):
            self.model_type = "mixtral"
        elif name == "llama" and self.number("attention.sliding_window", 0):
            self.model_type = "mistral"
        self.used.clear()
        self.entries = dict(file.tensors)
        frequencies = self.entries.pop(_FREQUENCIES, None)
        if "token_embd.weight" not in self.entries:
            self._fail(" has no tensor token_embd.weight; is it a model?")
        embedding = self.entries["token_embd.weight"]
        output = self.entries.get("output.weight")
        # The output matrix is the embedding where it is not stored, or stored in the same bytes.
        self.tied = output is None or file.equal(output, embedding)
        if self.tied:
            self.entries.pop("output.weight", None)
        self.config = self._config(embedding.shape[0], frequencies)
        self.parts = dict(part for entry in self.entries.values() for part in self._parts(entry))

    def _fail(self, text: str) -> NoReturn:
        raise UsageError(f"{self.file.path}{text}")

    def number(self, key: str, default: Any = None) -> Any:
        """A number below the architecture's name; of a list with one entry per layer, the one that all have."""
        self.used.add(key)
        value = self.file.metadata.get(self.prefix + key, default)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
        plain = isinstance(value, (int, float, type(None))) and not isinstance(value, bool)
        if not plain or (isinstance(value, float) and not math.isfinite(value)):
            must = "it must be one number for all layers"
            self._fail(f": {self.prefix}{key} is {value!r:.80}; {must}")
        return value

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """A tensor of the folder, as Hugging Face has it."""
        return self.parts[name][1](dtype)

    def shapes(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Types and shapes of the folder's tensors."""
        parts = self.parts.items()
        return {name: torch.empty(s, dtype=dtype, device="meta") for name, (s, _) in parts}

    def _config(self, vocab: int, frequencies: Entry | None) -> Data:
        metadata = self.file.metadata
        keys = KEYS[self.model_type]
        kind = self.model_type
        act = {"activation_function": "gelu_new"} if kind == "gpt2" else {"hidden_act": "silu"}
        config: Data = {
            "architectures": [next(iter(FAMILIES[kind].heads))],
            "model_type": kind,
            **act,
            **{k: self.number(key) for key, k in keys.items() if self.prefix + key in metadata},
            "vocab_size": vocab,
            "tie_word_embeddings": self.tied,
        }
        for key, name in {"bos": "bos", "eos": "eos", "padding": "pad"}.items():
            token = metadata.get(f"tokenizer.ggml.{key}_token_id")
            if token is not None:
                config[f"{name}_token_id"] = token
        if kind != "gpt2":
            self._llama_config(config, frequencies)
        known = {*keys, *_INERT, *self.used}
        for key, value in metadata.items():
            name = key.removeprefix(self.prefix)
            if name != key and name not in known and (name, value) not in _NEUTRAL.items():
                self._fail(f": {key} = {value!r:.60} is not a setting that a {kind} model has")
        for key, name in keys.items():
            if name not in config:
                self._fail(f" does not say {self.prefix}{key}")
        return config

    def _llama_config(self, config: Data, frequencies: Entry | None) -> None:
        """Defaults that follow from other keys, biases, RoPE."""
        count = config.get("num_attention_heads") or 1
        config.setdefault("num_key_value_heads", count)
        config.setdefault("head_dim", (config.get("hidden_size") or 0) // count)
        config.setdefault("rope_theta", 10000.0)
        if self.model_type in ("mistral", "mixtral"):
            config.setdefault("sliding_window", None)
        for key in ("rope.dimension_count", "attention.value_length"):
            if self.number(key, config["head_dim"]) != config["head_dim"]:
                heads = f"heads have {config['head_dim']} dimensions"
                only = "only whole heads that all have one width can be converted"
                self._fail(f": {self.prefix}{key} is {self.number(key)}, {heads}; {only}")
        if self.model_type == "llama":
            config["attention_bias"] = "blk.0.attn_q.bias" in self.entries
            config["mlp_bias"] = "blk.0.ffn_up.bias" in self.entries
        scaling = self._scaling()
        if frequencies is not None:
            if scaling is not None:
                self._fail(f" has {_FREQUENCIES} and rope.scaling both")
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
            known = "known: none, linear, yarn"
            self._fail(f": {self.prefix}rope.scaling.type is {kind!r:.60}; {known}")
        names = {"original_context_length": "original_max_position_embeddings"}
        names |= {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
        values = {ours: self.number(f"rope.scaling.{theirs}") for theirs, ours in names.items()}
        values = {key: value for key, value in values.items() if value is not None}
        return {"rope_type": "yarn", "factor": factor, **values}

    def _llama3(self, entry: Entry, config: Data) -> Data:
        """Llama 3's scaling of RoPE, of which the file has only what came of it, a divisor for each frequency."""
        divisors = self.file.read(entry, 0, entry.rows, torch.float32).flatten()
        head_dim = config["head_dim"]
        base = config["rope_theta"]
        factor = float(divisors.max())
        # What counts is the ratio of these lengths to the factors 1 and 4, which every Llama 3 has.
        for length in (8192, *(2**n for n in range(4, 21))):
            scaled = Rope(base, scaling=Llama3(factor, original_len=length)).frequencies(head_dim)
            wanted = Rope(base).frequencies(head_dim) / scaled
            if wanted.shape == divisors.shape and torch.allclose(wanted, divisors, rtol=1e-4):
                rope = dict(low_freq_factor=1.0, high_freq_factor=4.0, factor=factor)
                return dict(rope_type="llama3", original_max_position_embeddings=length, **rope)
        what = "is not a scaling of RoPE as Llama 3 has it, the only one that is known"
        self._fail(f": {_FREQUENCIES} {what}")

    def _parts(self, entry: Entry) -> Iterator[tuple[str, Part]]:
        """What an entry is in the folder: one tensor, or one for each expert of a stack."""
        gpt2 = self.model_type == "gpt2"
        shape = entry.shape
        for theirs, to in (_GPT2_TENSORS if gpt2 else _LLAMA_TENSORS).items():
            match = _pattern(theirs).fullmatch(entry.name)
            name = to.ours
            if match is not None:
                break
        else:
            self._fail(f": the tensor {entry.name} has no place in a {self.model_type} model")
        for group, value in match.groupdict().items():
            name = name.replace("*" if group == "end" else f"{{{group}}}", value)
        turned = {"q": "num_attention_heads", "k": "num_key_value_heads"}
        which = re.search(r"attn_([qk])\.", entry.name) if self.architecture == "llama" else None
        transposed = gpt2 and entry.name.startswith("blk.") and len(shape) == 2

        def read(dtype: torch.dtype, at: int = 0, size: tuple[int, ...] = shape) -> Tensor:
            rows = math.prod(size[:-1])
            x = self.file.read(entry, at * rows, rows, dtype).view(size)
            if which:
                pairs = x.unflatten(0, (self.config[turned[which[1]]], -1, 2))
                return pairs.transpose(1, 2).reshape(shape)
            return x.T if transposed else x

        if "{e}" not in name:
            yield name, (shape[::-1] if transposed else shape, read)
            return
        for e in range(shape[0]):
            one = functools.partial(read, at=e, size=shape[1:])
            yield name.replace("{e}", str(e)), (shape[1:], one)


@functools.cache
def _pattern(name: str) -> re.Pattern[str]:
    text = re.escape(name).replace(r"\{i\}", r"(?P<i>\d+)").replace(r"\{e\}", r"(?P<e>\d+)")
    return re.compile(text.replace(r"\*", "(?P<end>weight|bias)"))


# --- converting ---------------------------------------------------------------------------------------------------


def describe(path: Path) -> Described:
    """A GGUF file whose metadata and tensors make a model that Regard knows."""
    described = Described(File(path))
    try:
        hf.read(described.config, store.memory(described.shapes(torch.float32)), "meta", None)
    except UsageError as error:
        raise UsageError(f"{path} cannot become a model folder: {error}") from None
    return described


def gguf_dtype(file: File) -> tuple[torch.dtype, str]:
    """The type to write where none is asked for, and the one that most of the weights have: a plain
    type stays, and float16 holds a quantised one best, whose scales are float16."""
    counts: Counter[str] = Counter()
    for entry in file.tensors.values():
        counts[entry.kind] += math.prod(entry.shape)
    most = counts.most_common(1)[0][0]
    return PLAIN.get(most, torch.float16), most


def from_gguf(
    described: Described,
    target: Path,
    dtype: torch.dtype,
    files: Mapping[str, bytes],
    progress: store.Progress = lambda done, total: None,
) -> None:
    """Write the folder: the model, and `files` (the tokenizer's)."""
    blank = described.shapes(dtype)
    done = itertools.count(1)

    def read(name: str) -> torch.Tensor:
        progress(next(done), len(blank))
        return described.read(name, dtype)

    with store.replacing(target) as folder:
        store.check_room(folder, sum(x.nbytes for x in blank.values()))
        config = {**described.config, "dtype": hf.dtype_name(dtype)}
        store.write_json(folder / "config.json", config)
        store.write_carried(folder, files)
        store.write_weights(folder, blank, read=read)
