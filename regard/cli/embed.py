"""regard embed: one vector per line."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from regard.cli import shared as cli
from regard.errors import RUN, Fault, UsageError
from regard.files import write_whole


@dataclass(frozen=True)
class Options:
    """One vector per line: the model's pooled vector, or the mean of its last hidden states.

    regard embed MODEL lines.txt > vectors.jsonl
    regard embed MODEL lines.txt --output vectors.npy --normalize
    """

    model: cli.Folder
    file: cli.File = "-"  # text file, one example per line; - is stdin
    # write a NumPy array (lines, width) instead of JSON lines on stdout
    output: Annotated[str | None, arg(metavar="FILE.npy")] = None
    normalize: cli.Switch = False  # vectors of length 1
    # mean: of the last states; cls: the first one; auto: as the model was trained
    pooling: cli.Pooling = "auto"
    rows: int = 32  # lines in a batch
    overlong: cli.Overlong = "error"  # what happens to a line longer than the model's context
    machine: cli.Machine = cli.Machine()


def run(options: Options) -> int:
    import numpy as np

    from regard.evaluate.model import Embedder, stacked

    cli.check_counts(options, "rows")
    if options.output is not None and not options.output.endswith(".npy"):
        raise UsageError(f"--output {options.output}: give a name that ends in .npy")
    cli.check_file(options.file)
    opened = cli.open_model(options.model, options.machine)
    embedder = Embedder(opened, options.normalize, options.overlong, options.pooling)
    whole = []
    for block in cli.line_blocks(options.file, 1 if cli.is_typed(options.file) else options.rows):
        vectors = embedder(*block)
        if options.output is not None:
            whole += vectors
            continue
        for vector in vectors:
            # float32 in the fewest digits that tell it; null for an empty line
            numbers = None if vector is None else [float(str(x)) for x in vector]
            sys.stdout.write(json.dumps({"embedding": numbers}) + "\n")
        sys.stdout.flush()
    if options.output is not None:
        path, file = Path(options.output), io.BytesIO()
        np.save(file, stacked(whole), allow_pickle=False)
        try:
            write_whole(path, file.getvalue())
        except OSError as error:
            raise Fault(f"cannot write {path}: {error.strerror}", RUN) from None
    return 0
