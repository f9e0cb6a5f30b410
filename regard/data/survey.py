"""What the data of a config holds, before it is read: from the shards of its run if they are there; else its examples
are counted, and their tokens estimated. Of large files both are guessed from their sizes and first examples. What is
estimated says so."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from regard.data.config import Data, text_roles
from regard.data.read import SUFFIXES, Source, format_of, opened, pictures, records
from regard.data.shards import MANIFEST, open_shards, read_manifest, sha256
from regard.data.tokens import Coder, classes_of
from regard.data.train_tokenizer import Recipe
from regard.files import read_files
from regard.text import Tokenizer, needed

SAMPLE = 1 << 20  # characters that are looked at
WHOLE = 64 << 20  # bytes of files that are read to their end where that tells more
PACKED = 3.5  # how much larger a file is without gzip or xz
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
Count = Callable[[str], float]  # tokens of a text


@dataclass(frozen=True)
class Survey:
    """`tokens` of all data, the `longest` example and the `mean` one, each side for itself; `exact` if they were
    counted, and not guessed, and `counted` if the examples were. Pictures have no tokens."""

    examples: int
    tokens: int = 0
    longest: tuple[int, ...] = ()
    mean: tuple[float, ...] = ()
    classes: int = 0
    vocab: int = 0
    over: int = 0  # examples longer than a row
    exact: bool = False
    counted: bool = False

    def describe(self) -> str:
        about, roughly = ("" if exact else "about " for exact in (self.exact, self.counted))
        if not self.tokens:
            return f"{self.examples:,} pictures in {self.classes} classes"
        what = "pairs" if len(self.longest) > 1 else "texts"
        if self.examples == 1:
            what = "text"
        text = f"{about}{self.tokens:,} tokens in {roughly}{self.examples:,} {what}, vocabulary {self.vocab:,}"
        return text + (f", {self.classes} classes" if self.classes else "")


def survey(
    reads: str,
    data: Data,
    recipe: Recipe | None,
    tokenizer: str | None,
    folder: Path,
    start: Any = None,
) -> Survey:
    """`reads`: how data is read, see regard.data.config.TASKS; `recipe`: how the tokenizer is learned, if it is, else
    the folder `tokenizer` has it; `folder` is the run's; `start` the model that [model] folder names, or None."""
    source = data.source()
    if reads == "image":
        return _pictured(source)
    roles = text_roles(reads, data)
    texts, whole = _sample(source, roles)
    vocab, count = _words(
        recipe, Path(tokenizer or folder / "tokenizer"), start, texts, not tokenizer
    )
    limit = data.length or math.inf
    ready = _counted(folder / "data" / "train", source, limit)
    if ready is not None:
        return replace(ready, vocab=vocab)
    total = bytes_of(source)
    classes = 0
    if reads in ("classify", "tag"):
        named = "tags" if reads == "tag" else "label"
        classes = len(classes_of(source, named)) if total <= WHOLE else 2
    guessed = _guessed(_read(source, roles) if whole else iter(texts), count, limit, reads)
    scale = (
        1.0 if whole else max(total / max(sum(len(t.encode()) for p in texts for t in p), 1), 1.0)
    )
    return replace(
        guessed,
        examples=round(scale * guessed.examples),
        tokens=round(scale * guessed.tokens),
        over=round(scale * guessed.over),
        vocab=vocab,
        classes=classes,
        counted=whole and guessed.counted,
    )


# --- examples -----------------------------------------------------------------------------------------------------


def _counted(folder: Path, source: Source, limit: float) -> Survey | None:
    """From the shards, if they were made of these files."""
    if not (folder / MANIFEST).is_file():
        return None
    if read_manifest(folder)["made_of"]["sources"] != [sha256(path) for path in source.files()]:
        return None
    shards = open_shards(folder)
    sides = [shards.columns[n].lengths for n in ("ids", "source", "target") if n in shards.columns]
    return Survey(
        examples=len(sides[0]),
        tokens=int(sum(side.sum() for side in sides)),
        longest=tuple(int(side.max()) for side in sides),
        mean=tuple(float(side.mean()) for side in sides),
        classes=len(shards.notes.get("classes", [])),
        over=int((np.maximum.reduce(sides) > limit).sum()),
        exact=True,
        counted=True,
    )


def _guessed(examples: Iterator[list[str]], count: Count, limit: float, reads: str) -> Survey:
    """Of these examples, one after the other."""
    number = over = read = 0
    longest, total = np.zeros(1), np.zeros(1)
    for parts in examples:
        sides = parts if reads == "seq2seq" else ["\n".join(parts)]
        sizes = np.array([count(text) for text in sides])
        number, over = number + 1, over + bool(sizes.max() > limit)
        longest, total = np.maximum(longest, sizes), total + sizes
        read += sum(map(len, sides))
        if read > 4 * WHOLE:  # a data set of the hub, whose size nobody told
            break
    return Survey(
        examples=number,
        tokens=round(float(total.sum())),
        longest=tuple(max(1, math.ceil(n)) for n in longest),
        mean=tuple(float(n) / max(number, 1) for n in total),
        over=over,
        counted=read <= 4 * WHOLE,
    )


def _pictured(source: Source) -> Survey:
    homes = [path for path in source.files() if format_of(path, source.format) == "images"]
    if homes:
        classes = [p for home in homes for p in home.iterdir() if p.is_dir()]
        files = [f for p in classes for f in p.iterdir() if f.suffix.lower() in SUFFIXES]
        return Survey(len(files), classes=len({p.name for p in classes}), exact=True, counted=True)
    images, names = pictures(source)
    return Survey(len(images), classes=len(set(names)), exact=True, counted=True)


def _sample(source: Source, roles: tuple[str, ...]) -> tuple[list[list[str]], bool]:
    """The first examples, each a text for every role, and whether all can be read in a moment."""
    texts: list[list[str]] = []
    room, rest = SAMPLE, _read(source, roles)
    for parts in rest:
        texts.append(parts)
        room -= sum(map(len, parts)) + 1
        if room < 0:
            break
    return texts, bytes_of(source) <= WHOLE


def _read(source: Source, roles: tuple[str, ...]) -> Iterator[list[str]]:
    plain = source.unit == "file" and not source.marker and not source.beside
    first = Path(source.paths[0]) if source.format == "hub" else source.files()[0]
    if plain and format_of(first, source.format) == "text" and first.stat().st_size > WHOLE:
        with opened(first) as stream:
            yield [stream.read(SAMPLE).decode("utf-8", "ignore")]
        return
    for record in records(source, roles):
        values = [record[role] for role in roles]
        yield [" ".join(map(str, v)) if isinstance(v, list) else str(v) for v in values]


def bytes_of(source: Source) -> int:
    if source.format == "hub":
        return 0
    paths = [*source.files(), *source.beside_files()]
    return round(
        sum(p.stat().st_size * (PACKED if p.suffix in (".gz", ".xz") else 1) for p in paths)
    )


# --- tokens -------------------------------------------------------------------------------------------------------


def _words(
    recipe: Recipe | None, home: Path, start: Any, texts: list[list[str]], brought: bool
) -> tuple[int, Count]:
    """The vocabulary, and how many tokens a text has: by the tokenizer if there is one, else about. `own`: that of the
    model `start` comes before the one of the folder `home`."""
    files = read_files(home, TOKENIZER)
    if start is not None and brought:
        files = {n: start.origin.files[n] for n in TOKENIZER if n in start.origin.files} or files
    sample = "\n".join(text for parts in texts[:1000] for text in parts)[:100_000]
    if TOKENIZER[0] in files:
        coder = Coder(needed(Tokenizer.from_files(files, {})))
        rate = len(coder.encode([sample])[0]) / max(len(sample), 1)
        return coder.vocab, lambda text: len(text) * rate
    assert recipe is not None
    special = len(recipe.tokens)
    if recipe.kind == "bytes":
        return 256 + special, lambda text: len(text.encode())
    if recipe.kind == "chars":
        return len({c for parts in texts for text in parts for c in text}) + special, len
    # English, of 1,000 words and more.
    rate = 1 / max(0.33 * math.log2(recipe.vocab) - 0.8, 1.0)
    return recipe.vocab, lambda text: len(text) * rate
