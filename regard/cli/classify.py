"""regard classify: lines or pictures in, labels out."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.cli import shared as cli
from regard.errors import DATA, Fault

if TYPE_CHECKING:
    from regard.evaluate.model import Classifier, Ranking


@dataclass(frozen=True)
class Options:
    """Label lines with a trained classifier: the label, a tab, its probability.

    regard classify MODEL reviews.txt
    echo "a fine film" | regard classify MODEL --json
    """

    model: cli.Folder
    # text file, one example per line; a picture, a folder of pictures, npz or npy; - is stdin: lines,
    # or names of pictures
    file: cli.File = "-"
    top: int = 1  # this many labels per line, the most probable first
    rows: int = 32  # examples in a batch
    overlong: cli.Overlong = "error"  # what happens to a line longer than the model's context
    json: cli.Switch = False  # one JSON object per line: label, probability, all probabilities
    machine: cli.Machine = cli.Machine()


def run(options: Options) -> int:
    from regard.evaluate.model import Classifier

    cli.check_counts(options, "top", "rows")
    cli.check_file(options.file)
    opened = cli.open_model(options.model, options.machine)
    classifier = Classifier(opened, options.overlong, options.model)
    rows = 1 if cli.is_typed(options.file) else options.rows
    if classifier.pictures is not None and options.file != "-":
        blocks: Iterable[Any] = picture_blocks(classifier, options.file, rows)
    else:
        lines = cli.line_blocks(options.file, rows)
        blocks = (([""] * len(block[0]), classifier.read(*block)) for block in lines)
    for names, examples in blocks:
        for name, ranking in zip(names, classifier(examples), strict=True):
            sys.stdout.write(shown(ranking, name, options) + "\n")
        sys.stdout.flush()
    return 0


def picture_blocks(classifier: Classifier, path: str, rows: int) -> Iterator[tuple[Any, Any]]:
    """Names to print, where there are several files, and pictures: of a folder, an array or one
    file."""
    from regard.data.read import SUFFIXES

    reader = classifier.pictures
    assert reader is not None
    if Path(path).is_dir():
        files = sorted(f for f in Path(path).rglob("*") if f.suffix.lower() in SUFFIXES)
        if not files:
            raise Fault(f"{path} has no pictures: PNG or JPEG files", DATA)
        pictures = ((str(file), reader.file(file)) for file in files)
    elif path.endswith((".npy", ".npz")):
        pictures = (("", x) for x in reader.array(Path(path)))
    else:
        pictures = (("", reader.file(file)) for file in [Path(path)])
    while block := list(islice(pictures, rows)):
        yield [name for name, _ in block], [x for _, x in block]


def shown(ranking: Ranking, name: str, options: Options) -> str:
    if not options.json:
        cells = [cell for label, p in ranking[: options.top] for cell in (label, f"{p:.4f}")]
        return "\t".join([*cells, name] if name else cells)
    label, highest = ranking[0] if ranking else (None, None)
    answer = {"label": label, "probability": highest, "probabilities": dict(ranking)}
    return json.dumps({**answer, **({"file": name} if name else {})}, ensure_ascii=False)
