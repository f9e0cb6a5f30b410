"""Tiny models of several kinds and a feed of made-up sentences, for tests of the training loop."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import regard
from regard.attention import GQA
from regard.block import Tower
from regard.data.feed import IGNORE, Batch, Objective
from regard.layers import LM, MLP, Classify
from regard.models import Tokens, TransformerConfig
from regard.models.mtp import MTP
from regard.position import Learned
from regard.training import objectives
from regard.training.checkpoint import Checkpoints
from regard.training.optim import Optim, Schedule
from regard.training.trainer import Train, Trainer

VOCAB = 23
SMALL = dict(layers=1, dim=16, heads=2, ffn_dim=32, vocab=VOCAB, dropout=0.1)


class Toy:
    """Counts up from a random start; batch k is a function of k."""

    fingerprint, epoch = "toy", 10

    def __init__(self, change: Callable[[Tensor, torch.Generator], Batch] | None = None):
        self.change = change or following

    def batch(self, k: int, rank: int = 0, world: int = 1) -> Batch:
        generator = torch.Generator().manual_seed(k)
        start = torch.randint(VOCAB, (6, 1), generator=generator)
        return self.change((start + torch.arange(9)) % VOCAB, generator)

    def evaluation(self) -> Iterator[Batch]:
        return iter([self.batch(10**6)])

    def describe(self) -> str:
        return "toy"


def following(ids: Tensor, generator: torch.Generator) -> Batch:
    return Batch(ids[:, :-1], ids[:, 1:])


def hidden(ids: Tensor, generator: torch.Generator) -> Batch:
    """Every fourth token or so is to be guessed."""
    chosen = torch.rand(ids.shape, generator=generator) < 0.25
    return Batch(ids.masked_fill(chosen, 0), ids.masked_fill(~chosen, IGNORE))


def backwards(ids: Tensor, generator: torch.Generator) -> Batch:
    said = ids.flip(1)
    return Batch(said[:, :-1], said[:, 1:], source=ids)


def sorts(ids: Tensor, generator: torch.Generator) -> Batch:
    return Batch(ids, ids[:, 0] % 3)


# --- kinds of models ----------------------------------------------------------------------------------------------


def plain() -> Any:
    tower = Tower(16, 2, GQA(2, dropout=0.1), MLP(32, dropout=0.1), dropout=0.1)
    return TransformerConfig(Tokens(VOCAB, Learned(16)), tower, LM(), max_len=16).make()


def foretelling() -> Any:
    tower = Tower(16, 1, GQA(2, dropout=0.1), MLP(32, dropout=0.1), dropout=0.1)
    return TransformerConfig(Tokens(VOCAB), tower, LM(), max_len=16, mtp=MTP(2)).make()


def tuned() -> Any:
    """A new head on a body whose embeddings are frozen."""
    model = regard.build("bert-base", **SMALL, max_len=16, head=Classify(3))
    model.embedding.requires_grad_(False)
    return model


def recurrent() -> Any:
    sizes = dict(vocab=VOCAB, source_vocab=VOCAB, dim=16, dropout=0.1)
    return regard.build("bahdanau", **sizes)


# kind -> how it is made, how its batches are, what it learns
KINDS: dict[str, tuple[Callable[[], Any], Any, Objective]] = {
    "toy": (plain, following, objectives.causal),
    "mtp": (foretelling, following, objectives.causal),
    "gpt2": (
        lambda: regard.build("gpt2", **SMALL, max_len=16),
        following,
        objectives.causal,
    ),
    "wide": (  # heads of a width for which attention and GELU are in C
        lambda: regard.build(
            "gpt2", layers=1, dim=64, heads=2, ffn_dim=96, vocab=VOCAB, dropout=0.0, max_len=16
        ),
        following,
        objectives.causal,
    ),
    "bert": (
        lambda: regard.build("bert-base", **SMALL, max_len=16),
        hidden,
        objectives.masked,
    ),
    "tuned": (tuned, sorts, objectives.classify),
    "vaswani": (lambda: regard.build("vaswani-base", **SMALL), backwards, objectives.seq2seq),
    "gru": (
        lambda: regard.build("gru-lm", vocab=VOCAB, dim=16, layers=2, dropout=0.1),
        following,
        objectives.causal,
    ),
    "bahdanau": (recurrent, backwards, objectives.seq2seq),
}


def model(kind: str = "toy") -> Any:
    torch.manual_seed(0)
    return KINDS[kind][0]()


def config(**changes: Any) -> Train:
    base = dict(steps=12, micro_batches=2, save=2, evaluate=5, optim=Optim(lr=3e-3))
    steps = changes.get("steps", 12)
    return Train(**{**base, "schedule": Schedule(warmup=min(3, steps)), **changes})


def trainer(
    folder: Path,
    tell: Any = lambda event: None,
    *,
    kind: str = "toy",
    keep: int = 2,
    **changes: Any,
) -> Trainer:
    checkpoints = Checkpoints(folder, lambda m, path: m.save(path), keep)
    _, change, loss = KINDS[kind]
    feed = Toy(change)
    return Trainer(model(kind), feed, loss, config(**changes), checkpoints, regard.load, [tell])


# --- what must be equal -------------------------------------------------------------------------------------------


def weights(t: Trainer) -> dict[str, Tensor]:
    """Everything that must be equal to the bit."""
    return {**t.model.state_dict(), **t.optimizer.state()}


def digest(t: Trainer) -> str:
    """SHA-256 of all that must be equal."""
    total = hashlib.sha256()
    for name, x in sorted(weights(t).items()):
        total.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        total.update(x.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
