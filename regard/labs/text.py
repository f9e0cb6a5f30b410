"""The text of experiments: a recipe's, a user's own, words of letters, or Python files that every machine has."""

from __future__ import annotations

import hashlib
import json
import random
import string
import sysconfig
from pathlib import Path
from typing import Any

from regard.data.config import Data
from regard.data.read import records
from regard.errors import DATA, blaming
from regard.recipes import MAKERS as RECIPES
from regard.recipes.corpora import write

HELD = 0.1  # of a user's text, its end, to measure on


def own_text(paths: tuple[str, ...], folder: Path) -> None:
    with blaming(DATA):
        found = records(Data(paths).source(), ("text",))
        whole = "\n".join(str(record["text"]) for record in found)
    cut = int(len(whole) * (1 - HELD))
    write(folder, {"train.txt": [whole[:cut]], "valid.txt": [whole[cut:]]})


def letters(folder: Path, most: int, count: int, tests: int) -> None:
    """`count` words of 1 to `most` random letters, and the same backwards; test-N.tsv has words of N letters."""
    rng = random.Random(0)

    def lines(size: int, length: int = 0) -> list[str]:
        sizes = [length or rng.randint(1, most) for _ in range(size)]
        words = ["".join(rng.choices(string.ascii_lowercase, k=n)) for n in sizes]
        return ["source\ttarget\n", *(f"{word}\t{word[::-1]}\n" for word in words)]

    apart = {f"test-{n}.tsv": lines(tests, n) for n in range(4, most + 1, 4)}
    write(folder, {"train.tsv": lines(count), "valid.tsv": lines(tests), **apart})


def sources(folder: Path, most: int) -> None:
    """The Python files of the standard library and of installed packages, up to so many characters; about one in a
    hundred is held out."""
    homes = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    texts: dict[bytes, str] = {}
    for path in sorted({path for home in homes for path in Path(home).rglob("*.py")}):
        if most > 0:
            text = path.read_text(encoding="utf-8", errors="replace")
            if text.strip() and (mark := hashlib.sha256(text.encode()).digest()) not in texts:
                texts[mark], most = json.dumps({"text": text}) + "\n", most - len(text)
    learned = [text for i, text in enumerate(texts.values()) if i % 100]
    write(folder, {"valid.jsonl": [*texts.values()][::100], "train.jsonl": learned})


MAKERS: dict[str, Any] = {**RECIPES, "letters": letters, "sources": sources}
