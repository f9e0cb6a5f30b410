"""What pre-training is worth: a BERT that has read, and one that has not, tuned on a few labelled verses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from regard.labs.measure import Case, Figures
from regard.recipes.corpora import make_parts, write
from regard.training.run import train


def verses(folder: Path, labels: Sequence[int], chapters: int, tests: int) -> None:
    """train.txt, so many chapters to read; labelled-N.tsv, the first N of the labelled verses; labelled.tsv, at most
    `tests` of other chapters."""
    make_parts(folder, labelled=max(labels))
    text, learned, held = (
        (folder / name).read_text(encoding="utf-8").splitlines(keepends=True)
        for name in ("text.txt", "train.tsv", "valid.tsv")
    )
    for path in list(folder.iterdir()):
        path.unlink()
    tables = {f"labelled-{n}.tsv": learned[: n + 1] for n in labels}
    write(folder, {"train.txt": text[:chapters], "labelled.tsv": held[: tests + 1], **tables})


def pretraining(case: Case) -> Figures:
    """The accuracy on verses of other chapters, after tuning on so many labels."""
    scores = {}
    for n in case.settings["make"]["labels"]:
        files = {"train": f"labelled-{n}.tsv", "valid": "labelled.tsv"}
        paths = {side: str((case.home / "text" / name).resolve()) for side, name in files.items()}
        tune = case.settings["tune"]
        tables = {
            **tune,
            "model": {"folder": str(case.best.resolve())},
            "data": {**tune["data"], **paths},
            "train": {**tune["train"], "seed": case.seed},
        }
        run = case.runs[-1].with_name(f"tuned-{n}")
        tuned = train(tables, run, keep=1, overwrite=True, device=case.device)
        scores[n] = tuned.metrics["accuracy"]
    return {"Accuracy": {case.variant: scores}}
