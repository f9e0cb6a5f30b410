"""What pre-training is worth: a BERT that has read, and one that has not, tuned on a few labelled verses."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch

from regard.labs.measure import Case, Figures
from regard.layers import Classify
from regard.models.adapt import labels as named
from regard.models.adapt import with_head
from regard.recipes.corpora import PARTS, make_parts, write
from regard.training.run import train


def verses(folder: Path, labels: Sequence[int], chapters: int, tests: int) -> None:
    """train.txt, so many chapters to read; labelled-N.tsv, the first N of the labelled verses; labelled.tsv, at most
    `tests` of other chapters. Where not all are taken, they are from all over the book."""
    make_parts(folder, labelled=max(labels))
    text, learned, held = (
        (folder / name).read_text(encoding="utf-8").splitlines(keepends=True)
        for name in ("text.txt", "train.tsv", "valid.tsv")
    )
    for path in list(folder.iterdir()):
        path.unlink()
    tables = {f"labelled-{n}.tsv": learned[: n + 1] for n in labels}
    rng, (head, *asked) = random.Random(0), held
    read = rng.sample(text, min(chapters, len(text)))
    asked = rng.sample(asked, min(tests, len(asked)))
    write(folder, {"train.txt": read, "labelled.tsv": [head, *asked], **tables})


def pretraining(case: Case) -> Figures:
    """The accuracy on verses of other chapters, after tuning on so many labels. A new head reads the mean of all
    tokens: no masked word was ever read from the first one."""
    torch.manual_seed(case.seed)
    model = with_head(case.load(), Classify(len(PARTS), token="mean", dense=None))
    model.origin.config = {**model.origin.config, **named(sorted(PARTS))}
    model.save(start := case.runs[-1].with_name("start"))
    scores = {}
    for n in case.settings["make"]["labels"]:
        files = {"train": f"labelled-{n}.tsv", "valid": "labelled.tsv"}
        paths = {side: str((case.home / "text" / name).resolve()) for side, name in files.items()}
        tune = case.settings["tune"]
        tables = {
            **tune,
            "model": {"folder": str(start.resolve())},
            "data": {**tune["data"], **paths},
            "train": {**tune["train"], "seed": case.seed},
        }
        run = case.runs[-1].with_name(f"tuned-{n}")
        tuned = train(tables, run, keep=1, overwrite=True, device=case.device)
        scores[n] = tuned.metrics["accuracy"]
    return {"Accuracy": {case.variant: scores}}
