"""What a GGUF file says about its model, in Hugging Face's words: config.json and names of tensors, as tables.

llama.cpp changes some tensors when it makes a file; here that is undone: it reorders the rows of Llama's q and k so
that RoPE turns neighbours, it transposes GPT-2's matrices, and it stacks experts.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.checkpoint.gguf_file import Entry, File
from regard.checkpoint.rules import Data
from regard.errors import UsageError

SAME, TURNED_Q, TURNED_K, TRANSPOSED = "same", "turned q", "turned k", "transposed"


@dataclass(frozen=True)
class Architecture:
    """`keys`: theirs below the architecture's name -> ours, `tensors`: theirs -> (ours, what was done to it).
    {i} is a layer, {e} an expert (which a stacked tensor does not name), * is weight or bias."""

    model_type: str
    model_class: str
    keys: dict[str, str]
    fixed: Data
    tensors: dict[str, tuple[str, str]]


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
    "token_embd.weight": ("model.embed_tokens.weight", SAME),
    "output.weight": ("lm_head.weight", SAME),
    "output_norm.weight": ("model.norm.weight", SAME),
    "blk.{i}.attn_norm.weight": (_LAYER + "input_layernorm.weight", SAME),
    "blk.{i}.ffn_norm.weight": (_LAYER + "post_attention_layernorm.weight", SAME),
    "blk.{i}.attn_q.*": (_LAYER + "self_attn.q_proj.*", SAME),
    "blk.{i}.attn_k.*": (_LAYER + "self_attn.k_proj.*", SAME),
    "blk.{i}.attn_v.*": (_LAYER + "self_attn.v_proj.*", SAME),
    "blk.{i}.attn_output.*": (_LAYER + "self_attn.o_proj.*", SAME),
}
_GATED = {
    f"blk.{{i}}.ffn_{part}.*": (f"{_LAYER}mlp.{part}_proj.*", SAME)
    for part in ("gate", "up", "down")
}
_TURNED = {
    "blk.{i}.attn_q.*": (_LAYER + "self_attn.q_proj.*", TURNED_Q),
    "blk.{i}.attn_k.*": (_LAYER + "self_attn.k_proj.*", TURNED_K),
}
_NORMED = {
    f"blk.{{i}}.attn_{part}_norm.weight": (f"{_LAYER}self_attn.{part}_norm.weight", SAME)
    for part in "qk"
}
_MOE = _LAYER + "block_sparse_moe."
_EXPERTS = {
    "blk.{i}.ffn_gate_inp.weight": (_MOE + "gate.weight", SAME),
    **{
        # Files of before April 2024 have one tensor for each expert.
        f"blk.{{i}}.ffn_{part}{number}.weight": (f"{_MOE}experts.{{e}}.{name}.weight", SAME)
        for part, name in (("gate", "w1"), ("down", "w2"), ("up", "w3"))
        for number in ("_exps", ".{e}")
    },
}
_SILU: Data = {"hidden_act": "silu"}
LLAMA = Architecture("llama", "LlamaForCausalLM", _SIZES, _SILU, {**_FRAME, **_TURNED, **_GATED})
ARCHITECTURES = {
    "llama": LLAMA,
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _SIZES, _SILU, {**_FRAME, **_GATED}),
    "qwen3": Architecture(
        "qwen3", "Qwen3ForCausalLM", _SIZES, _SILU, {**_FRAME, **_NORMED, **_GATED}
    ),
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
        {"activation_function": "gelu_new"},
        {
            "token_embd.weight": ("transformer.wte.weight", SAME),
            "position_embd.weight": ("transformer.wpe.weight", SAME),
            "output.weight": ("lm_head.weight", SAME),
            "output_norm.*": ("transformer.ln_f.*", SAME),
            "blk.{i}.attn_norm.*": ("transformer.h.{i}.ln_1.*", SAME),
            "blk.{i}.ffn_norm.*": ("transformer.h.{i}.ln_2.*", SAME),
            "blk.{i}.attn_qkv.*": ("transformer.h.{i}.attn.c_attn.*", TRANSPOSED),
            "blk.{i}.attn_output.*": ("transformer.h.{i}.attn.c_proj.*", TRANSPOSED),
            "blk.{i}.ffn_up.*": ("transformer.h.{i}.mlp.c_fc.*", TRANSPOSED),
            "blk.{i}.ffn_down.*": ("transformer.h.{i}.mlp.c_proj.*", TRANSPOSED),
        },
    ),
}
# The llama architecture is several families of Hugging Face.
_MIXTRAL = Architecture(
    "mixtral",
    "MixtralForCausalLM",
    {
        **_SIZES,
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
        "attention.sliding_window": "sliding_window",
    },
    {**_SILU, "sliding_window": None},
    {**_FRAME, **_TURNED, **_EXPERTS},
)
_MISTRAL = Architecture(
    "mistral",
    "MistralForCausalLM",
    {**_SIZES, "attention.sliding_window": "sliding_window"},
    _SILU,
    LLAMA.tensors,
)
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
        self.file, said = file, file.metadata
        name = said.get("general.architecture")
        if not isinstance(name, str) or name not in ARCHITECTURES:
            raise UsageError(
                f"{file.path} is of the architecture {name!r:.60}; known: {', '.join(ARCHITECTURES)}"
            )
        if said.get("split.count", 0) not in (0, 1):
            raise UsageError(
                f"{file.path} is one of {said['split.count']} parts of a model; join them first: "
                "llama-gguf-split --merge FIRST-PART WHOLE.gguf"
            )
        if said.get("general.type", "model") != "model":
            raise UsageError(
                f"{file.path} holds a {said['general.type']!r:.60}, not a whole model, which is what can be converted"
            )
        self.prefix, self.kind = name + ".", ARCHITECTURES[name]
        if name == "llama" and self.number("expert_count", 0):
            self.kind = _MIXTRAL
        elif name == "llama" and self.number("attention.sliding_window", 0):
            self.kind = _MISTRAL
        self.entries = dict(file.tensors)
        frequencies = self.entries.pop(_FREQUENCIES, None)
        self.tied = self._tied()
        self.config = self._config(frequencies)
        self.parts = self._parts()

    def number(self, key: str, default: Any = None) -> Any:
        """A number below the architecture's name; of a list with one entry per layer, the one that all have."""
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
        said, keys = self.file.metadata, self.kind.keys
        config: Data = {
            "architectures": [self.kind.model_class],
            "model_type": self.kind.model_type,
            **self.kind.fixed,
        }
        for theirs, ours in keys.items():
            if self.prefix + theirs in said:
                config[ours] = self.number(theirs)
        config["vocab_size"] = self._embedding().shape[0]
        config["tie_word_embeddings"] = self.tied
        for key in ("bos", "eos", "padding"):
            token = said.get(f"tokenizer.ggml.{key}_token_id")
            if token is not None:
                config[f"{key.removesuffix('ding')}_token_id"] = token
        used = {*keys, *_INERT}
        if self.kind.model_type != "gpt2":
            used |= self._llama_config(config, frequencies)
        self._check_known(used)
        for theirs, ours in keys.items():
            if ours not in config:
                raise UsageError(f"{self.file.path} does not say {self.prefix}{theirs}")
        return config

    def _llama_config(self, config: Data, frequencies: Entry | None) -> set[str]:
        """Defaults that follow from other keys, biases, RoPE; the keys that were looked at."""
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
        scaling, used = self._scaling()
        if frequencies is not None:
            if scaling is not None:
                raise UsageError(f"{self.file.path} has {_FREQUENCIES} and rope.scaling both")
            scaling = self._llama3(frequencies, config)
        if scaling is not None:
            config["rope_scaling"] = scaling
        return used | {"rope.dimension_count", "attention.value_length"}

    def _scaling(self) -> tuple[Data | None, set[str]]:
        kind = self.file.metadata.get(self.prefix + "rope.scaling.type")
        factor = self.number("rope.scaling.factor", self.number("rope.scale_linear"))
        used = {"rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"}
        used.add("rope.scaling.original_context_length")
        if kind == "none" or factor is None or (kind in (None, "linear") and factor == 1):
            return None, used
        if kind in (None, "linear"):
            return {"rope_type": "linear", "factor": factor}, used
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
            used.add(f"rope.scaling.{theirs}")
            value = self.number(f"rope.scaling.{theirs}")
            if value is not None:
                scaling[ours] = value
        return scaling, used

    def _llama3(self, entry: Entry, config: Data) -> Data:
        """Llama 3's scaling of RoPE, of which the file has only what came of it, a divisor for each frequency."""
        found = self.file.read(entry, 0, entry.rows, torch.float32).flatten()
        # What counts is the ratio of these lengths to the factors 1 and 4, which every Llama 3 has.
        for length in (8192, *(2**n for n in range(4, 21))):
            scaling = {
                "rope_type": "llama3",
                "factor": float(found.max()),
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": length,
            }
            wanted = frequency_divisors(scaling, config["head_dim"], config["rope_theta"])
            if wanted.shape == found.shape and torch.allclose(wanted, found, rtol=1e-4):
                return scaling
        raise UsageError(
            f"{self.file.path}: {_FREQUENCIES} is not a scaling of RoPE as Llama 3 has it, the only one that is known"
        )

    def _check_known(self, used: set[str]) -> None:
        for key, value in self.file.metadata.items():
            name = key.removeprefix(self.prefix)
            if name == key or name in used or (name in _NEUTRAL and value == _NEUTRAL[name]):
                continue
            raise UsageError(
                f"{self.file.path}: {key} = {value!r:.60} is not a setting that a {self.kind.model_type} model has"
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
        found: dict[str, Part] = {}
        for name, entry in self.entries.items():
            for theirs, (ours, change) in self.kind.tensors.items():
                match = patterns[theirs].fullmatch(name)
                if match is None:
                    continue
                for group, value in match.groupdict().items():
                    ours = ours.replace("*" if group == "end" else f"{{{group}}}", value)
                found |= _cut(entry, ours, change)
                break
            else:
                raise UsageError(
                    f"{self.file.path}: the tensor {name} has no place in a {self.kind.model_type} model"
                )
        return found


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


def frequency_divisors(scaling: Data, head_dim: int, base: float) -> Tensor:
    """What Llama 3's scaling divides each frequency by, as llama.cpp stores it in rope_freqs.weight."""
    length = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    waves = 2 * math.pi * base ** (torch.arange(0, head_dim, 2).double() / head_dim)
    smooth = ((length / waves - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / scaling["factor"] + smooth)).float()
