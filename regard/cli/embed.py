"""regard embed: one vector a line."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from regard.cli.parse import File, Folder, Machine, Overlong, Switch, check_counts
from regard.cli.shared import check_file, line_blocks, open_model, rows_at_once
from regard.errors import RUN, Fault, UsageError


@dataclass(frozen=True)
class Options:
    """One vector a line: the model's pooled vector, or the mean of its last hidden states.

    regard embed MODEL lines.txt > vectors.jsonl
    regard embed MODEL lines.txt --output vectors.npy --normalize
    """

    model: Folder
    file: File = "-"
    """text file, one example a line; - is stdin"""
    output: Annotated[str | None, arg(metavar="FILE.npy")] = None
    """write a NumPy array (lines, width) instead of JSON lines on stdout"""
    normalize: Switch = False
    """vectors of length 1"""
    rows: int = 32
    """lines in a batch"""
    overlong: Overlong = "error"
    """what happens to a line that is longer than the model's context"""
    machine: Machine = field(default_factory=Machine)


def run(options: Options) -> int:
    from regard.evaluate.embed import Embedder, stacked

    check_counts(options, "rows")
    if options.output is not None and not options.output.endswith(".npy"):
        raise UsageError(f"--output {options.output}: give a name that ends in .npy")
    check_file(options.file)
    opened = open_model(options.model, options.machine, options.rows)
    embedder = Embedder(opened, options.normalize, options.overlong)
    whole = []
    for block in line_blocks(options.file, rows_at_once(options)):
        vectors = embedder(*block)
        if options.output is not None:
            whole += vectors
        else:
            sys.stdout.write("".join(as_json(vector) + "\n" for vector in vectors))
        sys.stdout.flush()
    if options.output is not None:
        write(Path(options.output), stacked(whole))
    return 0


def as_json(vector: Any) -> str:
    """float32 in the fewest digits that tell it; null for an empty line."""
    numbers = None if vector is None else [float(str(x)) for x in vector]
    return json.dumps({"embedding": numbers})


def write(path: Path, vectors: Any) -> None:
    """An array (lines, width), whole or not at all."""
    import numpy as np

    new = path.with_name(f".{path.name}.new")
    try:
        with new.open("wb") as file:
            np.save(file, vectors, allow_pickle=False)
        os.replace(new, path)
    except OSError as error:
        raise Fault(f"cannot write {path}: {error.strerror}", RUN) from None
