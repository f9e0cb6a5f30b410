"""The data of the recipe of summaries: what programmers wrote about their code, and the first line in which they say it
in short. The sources of Python's library and of two packages that Regard needs are read, none of them is run."""

from __future__ import annotations

import ast
import importlib.util
import random
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from regard.recipes.corpora import write

# Folders whose docstrings describe tests, or programs rather than libraries.
LEFT_OUT = {"site-packages", "test", "tests", "testing", "idlelib", "lib2to3"}
SENTENCE = re.compile(r"(?s).+?[.!?:](?=\s|$)|.+")
Pair = tuple[str, str]  # text and summary


def make(folder: Path, seed: int = 0, homes: Sequence[Path] = ()) -> str:
    """train.tsv and valid.tsv, a docstring without its first line, a tab, that line; valid has one module in fifteen,
    and no text or summary that train has. `homes`: where sources lie; none: Python's library, NumPy and PyTorch."""
    # Only here, for it takes PyTorch along, which a list of recipes needs not.
    from regard.training.measure import suited, text_scores

    suited(["rouge"], "seq2seq")
    rng = random.Random(seed)
    files: dict[str, dict[Pair, None]] = {"train": {}, "valid": {}}
    for home in homes or libraries():
        for path in sorted(home.rglob("*.py")):
            if not LEFT_OUT & {*path.relative_to(home).parts}:
                name = "valid" if rng.random() < 1 / 15 else "train"
                files[name] |= dict.fromkeys(pairs(path))
    known = {text for pair in files["train"] for text in pair}
    valid = [pair for pair in files["valid"] if not known & {*pair}]
    tables = {"train.tsv": [*files["train"]], "valid.tsv": valid}
    rows = {name: [f"{text}\t{line}\n" for text, line in each] for name, each in tables.items()}
    write(folder, {name: ["source\ttarget\n", *lines] for name, lines in rows.items()})
    scores, _ = text_scores(
        ["rouge1", "rouge2", "rougeL"],
        [lead(text) for text, _ in valid],
        [line for _, line in valid],
    )
    said = ", ".join(f"{name} {value:.1f}" for name, value in scores.items())
    return (
        f"{len(files['train']):,} docstrings and their first lines, and {len(valid):,} of modules that were held out, "
        f"where the first sentence of each text as its summary has {said}"
    )


def libraries() -> list[Path]:
    """Folders with sources: Python's library, and packages of which nothing is imported."""
    specs = [importlib.util.find_spec(name) for name in ("numpy", "torch")]
    origins = [Path(spec.origin).parent for spec in specs if spec is not None and spec.origin]
    return [Path(sysconfig.get_path("stdlib")), *origins]


def pairs(path: Path) -> Iterator[Pair]:
    """The docstrings of a source that begin with a sentence and then say more: the rest and that sentence, in one line
    each."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        # Templates and files of other versions of Python.
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            line, _, text = (ast.get_docstring(node) or "").partition("\n\n")
            line, text = " ".join(line.split()), " ".join(text.split())
            sentence = line[:1].isupper() and line.endswith(".") and len(line.split()) > 3
            if sentence and len(line) < 120 and len(text.split()) > 8:
                yield text, line


def lead(text: str) -> str:
    """The first sentence of a text: what a summary has to be better than."""
    found = SENTENCE.match(text)
    return found[0] if found else text
