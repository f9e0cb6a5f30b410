"""One vector per text.

An encoder gives its pooled vector where it has a pooler (BERT's, on the first token), else the mean
of the last hidden states of the text's tokens; so do decoders (whose last state has read everything
but was trained for the next token) and, with the encoder's states, encoder-decoders.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import RUN, Fault
from regard.evaluate.classify import Rows, padded
from regard.evaluate.model import Opened, check_reads_text
from regard.models import Model, Transformer
from regard.text import needed
from regard.train.measure import context_of


def embed(
    model: str | Path | Model,
    texts: Sequence[str],
    *,
    normalize: bool = False,
    rows: int = 32,
    overlong: str = "error",
    device: str = "auto",
) -> np.ndarray:
    """Vectors (texts, width) in float32, of length 1 if `normalize`; NaN for an empty text. `model`
    is a folder, a run's folder, or a model; `rows` of texts are a batch; `overlong` texts are an
    "error", or "truncate" cuts them."""
    embedder = Embedder(Opened(model, rows, device=device), normalize, overlong)
    vectors: list[np.ndarray | None] = []
    for start in range(0, len(texts), rows):
        vectors += embedder(texts[start : start + rows], start)
    return stacked(vectors)


class Embedder:
    """An opened model that reads text."""

    def __init__(self, opened: Opened, normalize: bool = False, overlong: str = "error"):
        self.model, self.normalize = opened.model, normalize
        check_reads_text(self.model)
        self.rows = Rows(needed(opened.tokenizer), context_of(self.model), overlong)

    def __call__(
        self, texts: Sequence[str], start: int = 0, name: str = "texts"
    ) -> list[np.ndarray | None]:
        """A vector for each text, None for an empty one; `start` counts the lines before."""
        rows = self.rows(texts, start, name)
        given = [ids for ids in rows if ids is not None]
        vectors = iter(embedded(self.model, given, self.normalize) if given else ())
        each = [None if ids is None else next(vectors) for ids in rows]
        for number, vector in enumerate(each, start + 1):
            if vector is not None and not np.isfinite(vector).all():
                raise Fault(f"the vector of line {number} is not finite; try --dtype fp32", RUN)
        return each


@torch.inference_mode()
def embedded(model: Any, given: Sequence[Tensor], normalize: bool = False) -> np.ndarray:
    """Vectors (b m) of rows of ids."""
    ids, lengths = padded(given, next(model.parameters()).device)
    if isinstance(model, Transformer):
        vectors = model.pool(ids, lengths)
    else:
        read = model.reads_source
        states = model.encode(ids, lengths)[0] if read else model.hidden(ids, lengths)
        vectors = mean_of(states, lengths)
    vectors = vectors.float()
    return (F.normalize(vectors, dim=-1) if normalize else vectors).cpu().numpy()


def mean_of(states: Tensor, lengths: Tensor | None) -> Tensor:
    """(b t m) -> (b m): over the real tokens."""
    if lengths is None:
        return states.mean(1)
    real = torch.arange(states.shape[1], device=states.device) < lengths[:, None]
    return (states * real[..., None]).sum(1) / lengths[:, None]


def stacked(vectors: Sequence[np.ndarray | None]) -> np.ndarray:
    """(texts, width); rows of empty texts are NaN."""
    width = next((len(v) for v in vectors if v is not None), 0)
    whole = np.full((len(vectors), width), np.nan, np.float32)
    for row, vector in zip(whole, vectors, strict=True):
        if vector is not None:
            row[:] = vector
    return whole
