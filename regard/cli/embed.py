"""regard embed: one vector a line.

An encoder gives its pooled vector where it has a pooler (BERT's, on the first token), else the mean of the last hidden
states of the line's tokens; so do decoders (whose last state has read everything but was trained for the next token)
and, with the encoder's states, encoder-decoders.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.cli.classify import Lines, check_file, padded, rows_at_once
from regard.cli.generate import check_reads_text
from regard.cli.model import Opened
from regard.cli.options_work import Embed
from regard.errors import RUN, Fault, UsageError
from regard.evaluate.measure import context_of
from regard.models import Transformer
from regard.text import needed


def run(options: Embed) -> int:
    if options.rows < 1:
        raise UsageError(f"--rows is {options.rows}; give a number from 1")
    if options.output is not None and not options.output.endswith(".npy"):
        raise UsageError(f"--output {options.output}: give a name that ends in .npy")
    check_file(options.file)
    ready = Opened(options.model, options.machine, options.rows)
    model = ready.model
    check_reads_text(model)
    lines = Lines(needed(ready.tokenizer), context_of(model), options.overlong)
    kept: list[np.ndarray | None] = []
    done = 0
    for block in lines.read(options.file, rows_at_once(options)):
        given = [ids for _, ids in block if ids is not None]
        vectors = iter(embedded(model, given, options.normalize) if given else ())
        for number, (_, ids) in enumerate(block, done + 1):
            vector = None if ids is None else checked(next(vectors), number)
            if options.output is not None:
                kept.append(vector)
            else:
                sys.stdout.write(as_json(vector) + "\n")
        sys.stdout.flush()
        done += len(block)
    if options.output is not None:
        write(Path(options.output), kept)
    return 0


@torch.inference_mode()
def embedded(model: Any, given: Sequence[Tensor], normalize: bool = False) -> np.ndarray:
    """Vectors (b m) of rows of ids."""
    ids, lengths = padded(given, next(model.parameters()).device)
    if isinstance(model, Transformer):
        vectors = model.pool(ids, lengths)
    else:
        states = model.encode(ids, lengths)[0] if hasattr(model, "encode") else None
        states = model.hidden(ids, lengths) if states is None else states
        vectors = mean_of(states, lengths)
    vectors = vectors.float()
    return (torch.nn.functional.normalize(vectors, dim=-1) if normalize else vectors).cpu().numpy()


def mean_of(states: Tensor, lengths: Tensor | None) -> Tensor:
    """(b t m) -> (b m): over the real tokens."""
    if lengths is None:
        return states.mean(1)
    real = torch.arange(states.shape[1], device=states.device) < lengths[:, None]
    return (states * real[..., None]).sum(1) / lengths[:, None]


def checked(vector: np.ndarray, number: int) -> np.ndarray:
    if not np.isfinite(vector).all():
        raise Fault(f"the vector of line {number} is not finite; try --dtype fp32", RUN)
    return vector


def as_json(vector: np.ndarray | None) -> str:
    """float32 in the fewest digits that tell it; null for an empty line."""
    numbers = None if vector is None else [float(str(x)) for x in vector]
    return json.dumps({"embedding": numbers})


def write(path: Path, vectors: Sequence[np.ndarray | None]) -> None:
    """An array (lines, width), whole or not at all; rows of empty lines are NaN."""
    width = next((len(v) for v in vectors if v is not None), 0)
    whole = np.full((len(vectors), width), np.nan, np.float32)
    for row, vector in zip(whole, vectors, strict=True):
        if vector is not None:
            row[:] = vector
    new = path.with_name(f".{path.name}.new")
    try:
        with new.open("wb") as file:
            np.save(file, whole, allow_pickle=False)
        os.replace(new, path)
    except OSError as error:
        raise Fault(f"cannot write {path}: {error.strerror}", RUN) from None
