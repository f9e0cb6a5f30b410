"""Labels of texts or pictures, by a trained classifier; and the rows of ids that regard.embed
shares."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from regard.data.read import Pictures
from regard.data.tokens import Coder
from regard.errors import DATA, Fault, UsageError
from regard.evaluate.model import Opened
from regard.layers import Classify
from regard.models import Model, Patches
from regard.models.adapt import classes_of
from regard.text import Tokenizer, needed
from regard.train.measure import context_of

# The names of the classes and their probabilities, the most probable first.
Ranking = list[tuple[str, float]]


def classify(
    model: str | Path | Model,
    texts: Sequence[str | Path],
    *,
    rows: int = 32,
    overlong: str = "error",
    device: str = "auto",
) -> list[Ranking]:
    """For each text (or the file of a picture, where the model reads those) the labels and their
    probabilities, the most probable first; [] for an empty text. `model` is a folder, a run's
    folder, or a model; `rows` of texts are a batch; `overlong` texts are an "error", or "truncate"
    cuts them."""
    classifier = Classifier(Opened(model, rows, device=device), overlong)
    rankings: list[Ranking] = []
    for start in range(0, len(texts), rows):
        rankings += classifier(classifier.read(texts[start : start + rows], start))
    return rankings


class Classifier:
    """An opened model that has a classification head."""

    def __init__(self, opened: Opened, overlong: str = "error", name: str = "MODEL"):
        self.model = opened.model
        config = self.model.config
        if not isinstance(getattr(config, "head", None), Classify):
            raise Fault(
                "this model has no classification head; answers would be random; train one: a config with task = "
                f'"classify" and [model] folder = "{name}", then regard train CONFIG',
                DATA,
            )
        self.names = class_names(self.model)
        self.pictures: Pictures | None = None
        if isinstance(config.embedding, Patches):
            self.pictures = Pictures(config.embedding, self.model.origin)
        else:
            self.rows = Rows(needed(opened.tokenizer), context_of(self.model), overlong)

    def read(
        self, texts: Sequence[str | Path], start: int = 0, name: str = "texts"
    ) -> list[Tensor | None]:
        """Ids of texts, or pictures of files; None for what is empty. `start` counts those
        before."""
        if self.pictures is None:
            return self.rows([str(text) for text in texts], start, name)
        return [self.pictures.file(Path(x)) if str(x).strip() else None for x in texts]

    @torch.inference_mode()
    def __call__(self, examples: Sequence[Tensor | None]) -> list[Ranking]:
        given = [x for x in examples if x is not None]
        if not given:
            return [[] for _ in examples]
        device = next(self.model.parameters()).device
        if self.pictures is not None:
            logits = self.model(torch.stack(given).to(device))
        else:
            logits = self.model(*padded(given, device))
        answers = iter(logits.float().softmax(-1).tolist())
        return [[] if x is None else self.rank(next(answers)) for x in examples]

    def rank(self, probabilities: list[float]) -> Ranking:
        return sorted(zip(self.names, probabilities), key=lambda pair: -pair[1])


def class_names(model: Any) -> list[str]:
    """The names of a classifier's classes; numbers, where its folder names none."""
    numbers = range(model.config.head.labels)
    names = [str(name) for name in classes_of(model)]
    nameless = len(names) != len(numbers) or names == [f"LABEL_{i}" for i in numbers]
    return [str(i) for i in numbers] if nameless else names


class Rows:
    """Texts as rows of ids, with the tokens the model expects around them. What spells a special
    token is text."""

    def __init__(self, tokenizer: Tokenizer, longest: int | None, overlong: str):
        if overlong not in ("error", "truncate"):
            raise UsageError(f"overlong is {overlong!r}; choose error or truncate")
        self.coder, self.longest, self.overlong = Coder(tokenizer), longest, overlong

    def __call__(
        self, texts: Sequence[str], start: int = 0, name: str = "texts"
    ) -> list[Tensor | None]:
        """None for a text without tokens; `start` counts the lines before."""
        each = self.coder.encode([text if text.strip() else "" for text in texts])
        return [
            self._row(ids, f"line {number} of {name}") if text.strip() else None
            for number, (text, ids) in enumerate(zip(texts, each, strict=True), start + 1)
        ]

    def _row(self, ids: list[int], where: str) -> Tensor | None:
        before, after = self.coder.before, self.coder.after
        room = None if self.longest is None else self.longest - len(before) - len(after)
        if room is not None and len(ids) > room and self.overlong == "error":
            raise Fault(
                f"{where} has {len(ids) + len(before) + len(after)} tokens, the model's context is {self.longest}; "
                "split the line, or say --overlong truncate",
                DATA,
            )
        whole = [*before, *ids[:room], *after]
        return torch.tensor(whole) if whole else None


def padded(rows: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Rows of ids side by side, and how long each is if they differ."""
    sizes = torch.tensor([len(row) for row in rows])
    ids = pad_sequence(list(rows), batch_first=True)
    return ids.to(device), None if (sizes == sizes[0]).all() else sizes.to(device)
