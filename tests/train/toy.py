"""A tiny model with dropout and a feed of made-up sentences, for tests of the loop; `main` trains in a process of its
own, which tests may kill."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import regard
from regard.attention import GQA
from regard.block import Tower
from regard.layers import LM, MLP
from regard.models import Tokens, TransformerConfig
from regard.position import Learned
from regard.train.batch import Batch
from regard.train.keep import Keeper, locked
from regard.train.objective import causal
from regard.train.optim import Optim
from regard.train.schedule import Schedule
from regard.train.trainer import Train, Trainer

VOCAB = 23


class Toy:
    """Counts up from a random start; batch k is a function of k."""

    fingerprint, epoch = "toy", 10

    def batch(self, k: int, rank: int = 0, world: int = 1) -> Batch:
        start = torch.randint(VOCAB, (6, 1), generator=torch.Generator().manual_seed(k))
        ids = (start + torch.arange(9)) % VOCAB
        return Batch(ids[:, :-1], ids[:, 1:])

    def evaluation(self) -> Iterator[Batch]:
        return iter([self.batch(10**6)])

    def describe(self) -> str:
        return "toy"


def model() -> Any:
    torch.manual_seed(0)
    tower = Tower(16, 2, GQA(2, dropout=0.1), MLP(32, dropout=0.1), dropout=0.1)
    return TransformerConfig(Tokens(VOCAB, Learned(16)), tower, LM(), max_len=16).make()


def config(**changes: Any) -> Train:
    base = dict(steps=12, parts=2, save=2, evaluate=5, optim=Optim(lr=3e-3))
    return Train(**{**base, "schedule": Schedule("cosine", 12, warmup=3), **changes})


def trainer(folder: Path, tell: Any = lambda event: None, **changes: Any) -> Trainer:
    keeper = Keeper(folder, lambda m, path: m.save(path), keep=2)
    return Trainer(model(), Toy(), causal, config(**changes), keeper, regard.load, tell)


def weights(t: Trainer) -> dict[str, Tensor]:
    """Everything that must be equal to the bit."""
    return {**t.model.state_dict(), **t.optimizer.state()}


def main() -> None:
    folder, changes = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    with locked(folder):
        t = trainer(folder, lambda event: print(json.dumps(event), flush=True), **changes)
        t.keeper.clean()
        t.resume()
        t.run()


if __name__ == "__main__":
    main()
