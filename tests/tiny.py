"""Every preset at a tiny size, and what such a model answers to a fixed ragged batch."""

from typing import Any

import torch
from torch import Tensor

import regard
from regard.config import to_dict
from regard.presets import PRESETS

TINY = dict(
    layers=2, dim=24, vocab=50, source_vocab=50, max_len=40, heads=6, kv_heads=2, head_dim=8
)
TINY |= dict(ffn_dim=20, size=12, patch=4, experts=16, active=2, latent=16, query_latent=12, topk=5)
TINY |= dict(window=5, labels=5, key_heads=2, value_heads=4, shared_dim=20)
# What `make test` runs of a law over the presets (tests/wide.py): those that differ in kind.
FEW = ["gpt2", "llama", "gemma-3-1b", "gpt-oss-20b", "deepseek-v3.2", "qwen3-next-80b"]
FEW += ["bert-base", "albert-base", "vit-small", "t5-small", "marian"]
OWN = ["captioner", "painter", "gru-lm", "luong"]


def set_somewhere(data: Any) -> set[str]:
    """The names that a config sets to anything but None."""
    if isinstance(data, list):
        return set().union(*map(set_somewhere, data))
    if not isinstance(data, dict):
        return set()
    inner = set().union(*map(set_somewhere, data.values()))
    return inner | {name for name, value in data.items() if value is not None}


def tiny(name: str, **more: Any) -> regard.Model:
    has = set_somewhere(to_dict(PRESETS[name][1]()))
    changes = {key: value for key, value in TINY.items() if key in has}
    # Dense ones first, attention last.
    if any(word in name for word in ("deepseek", "next", "hybrid", "glm-4.5")):
        changes["layers"] = 4
    if "mamba" in name:
        changes["groups"] = 2
    if "kimi" in name:
        changes |= {"layers": 5, "value_heads": 2, "key_dim": 8, "value_dim": 8, "rank": 8}
    # Its rows stand in four parts, each of whole heads.
    if "codegen" in name:
        changes |= {"dim": 32, "heads": 4, "partial": 0.5}
    # Of heads of 4.
    if any(word in name for word in ("pythia", "phi-2", "stablelm", "gpt-j")):
        changes["partial"] = 0.5
    # What a family knows by the width alone.
    if any(word in name for word in ("bloom", "mpt-", "dinov2")):
        changes["ffn_dim"] = 4 * TINY["dim"]
    if "helium" in name:
        changes["head_dim"] = 4
    if name == "starcoder":
        changes["kv_heads"] = 1
    # Texts are filled up to max_len, in transformers by who makes the batch (`batch` of tests/checkpoint/families.py).
    if "siglip" in name:
        changes |= {"text.pooler.dense": TINY["dim"], "max_len": 11}
    torch.manual_seed(0)
    return regard.build(name, **changes, **more)


def answer(model: regard.Model) -> Tensor:
    """What the model says to a ragged batch of its kind."""
    g = torch.Generator().manual_seed(1)
    ids, lengths = torch.randint(43, (2, 7), generator=g), torch.tensor([7, 4])
    c = to_dict(model.config)
    if c["kind"] == "recurrent_seq2seq" or "source" in c:
        kind = c.get("source", {}).get("kind")
        sizes = {"patches": (3, 12, 12), "sound": (80, 24)}
        other = kind in sizes
        source = torch.randn(2, *sizes[kind], generator=g) if other else ids.flip(1)
        more = {} if other else {"source_lengths": torch.tensor([3, 7])}
        return model(ids, lengths, source=source, **more)
    if c["kind"] == "pair":
        return model(ids, lengths, images=torch.randn(2, 3, 12, 12, generator=g))
    if c.get("embedding", {}).get("kind") == "patches":
        return model(torch.randn(2, 3, 12, 12, generator=g))
    return model(ids, lengths)
