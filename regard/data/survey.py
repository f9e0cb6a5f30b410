"""What the data of a config holds, before it is read: how many examples, how many tokens, how long."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from regard.data.config import KINDS, LONG, Data, text_roles
from regard.data.pictures import SUFFIXES, pictures, segmented
from regard.data.read import records, wording
from regard.data.shards import MANIFEST, Shards, SourceHashes, open_shards, read_manifest
from regard.data.source import Source, chunks, format_of, packing
from regard.data.tokens import Coder, classes_of
from regard.data.train_tokenizer import Recipe
from regard.files import read_files
from regard.text import Tokenizer, needed

# Characters that are looked at; bytes of files that are read to their end where that tells more.
SAMPLE = 1 << 20
WHOLE = 64 << 20
# How much larger a packed file is.
PACKED = 3.5
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
# Tokens of a text.
Counting = Callable[[str], float]


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
    # Examples longer than a row.
    over: int = 0
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
    """What the data of a config holds, before it is read: from the shards of its run if they are there; else its
    examples are counted, and their tokens estimated. Of large files both are guessed from their sizes and first
    examples.

    `reads`: a row of KINDS; `recipe`: how the tokenizer is learned, if it is, else the folder `tokenizer` has it;
    `folder` is the run's; `start` the model that [model] folder names, or None."""
    source = data.source()
    if not KINDS[reads].texts:
        return _pictured(source, segmented if reads == "segment" else pictures)
    # The first examples, each a text for every role.
    examples = _read(source, text_roles(reads, data))
    texts = _first(examples)
    home = Path(tokenizer or folder / "tokenizer")
    vocab, count = _words(recipe, home, None if tokenizer else start, texts)
    limit = data.length or math.inf
    shards = _made(folder / "data" / "train", source)
    if shards is not None:
        lengths = [shards.columns[n].lengths for n in LONG if n in shards.columns]
        number = len(shards.notes.get("classes", []))
        known = {"vocab": vocab, "classes": number, "exact": True, "counted": True}
        return _measured(lengths, limit, **known)
    total = bytes_of(source)
    small = total <= WHOLE
    classes = 0
    if reads in ("classify", "tag"):
        named = "tags" if reads == "tag" else "label"
        classes = len(classes_of(source, named)) if small else 2
    sizes, whole = _counted(reads, chain(texts, examples if small else ()), count)
    known = {"vocab": vocab, "classes": classes, "counted": small and whole}
    guessed = _measured(sizes, limit, **known)
    if small:
        return guessed
    scale = max(total / max(sum(len(text.encode()) for parts in texts for text in parts), 1), 1.0)
    more = {n: round(scale * getattr(guessed, n)) for n in ("examples", "tokens", "over")}
    return replace(guessed, **more)


def _pictured(source: Source, read: Callable[[Source], Any]) -> Survey:
    homes = [path for path in source.files() if format_of(path, source.format) == "images"]
    if homes:
        folders = [p for home in homes for p in home.iterdir() if p.is_dir()]
        files = [f for p in folders for f in p.iterdir() if f.suffix.lower() in SUFFIXES]
        number = len(files)
        names = {p.name for p in folders}
    else:
        images, labels = read(source)
        number = len(images)
        names = {*np.ravel(labels).tolist()}
    return Survey(number, classes=len(names), exact=True, counted=True)


def _first(examples: Iterator[list[str]]) -> list[list[str]]:
    """The first of them, of about SAMPLE characters; the rest is left."""
    texts: list[list[str]] = []
    size = 0
    while size <= SAMPLE and (parts := next(examples, None)) is not None:
        texts.append(parts)
        size += sum(map(len, parts)) + 1
    return texts


def _made(folder: Path, source: Source) -> Shards | None:
    """The shards that a run made of these files, if it did."""
    if not (folder / MANIFEST).is_file():
        return None
    made_of = read_manifest(folder)["made_of"]
    same = made_of["sources"] == SourceHashes(source.files()).hashes
    return open_shards(folder) if same else None


def _counted(
    reads: str, examples: Iterator[list[str]], count: Counting
) -> tuple[list[np.ndarray], bool]:
    """About how many tokens each example has, a row for each side; whether these are all."""
    sizes = []
    size = 0
    for parts in examples:
        sides = parts if reads == "seq2seq" else ["\n".join(parts)]
        if reads == "prefer":
            sides = [parts[0] + answer for answer in parts[1:]]
        sizes.append([count(text) for text in sides])
        size += sum(map(len, sides))
        # A data set of the hub, whose size nobody told.
        if size > 4 * WHOLE:
            break
    return list(np.array(sizes).T), size <= 4 * WHOLE


def _measured(sides: list[np.ndarray], limit: float, **known: Any) -> Survey:
    """Of examples whose sides have so many tokens."""
    return Survey(
        examples=len(sides[0]),
        tokens=round(sum(float(side.sum()) for side in sides)),
        longest=tuple(max(1, math.ceil(side.max())) for side in sides),
        mean=tuple(float(side.mean()) for side in sides),
        over=int((np.maximum.reduce(sides) > limit).sum()),
        **known,
    )


def _read(source: Source, roles: tuple[str, ...]) -> Iterator[list[str]]:
    plain = source.unit == "file" and not source.marker and not source.beside
    first = source.files()[0]
    if plain and format_of(first, source.format) == "text" and first.stat().st_size > WHOLE:
        yield [next(chunks(first, source.encoding), "")]
        return
    for record in records(source, roles):
        values = [record[role] for role in roles]
        yield [wording(v) for v in values]


def bytes_of(source: Source) -> int:
    if source.format == "hub":
        return 0
    paths = [*source.files(), *source.beside_files()]
    sizes = (p.stat().st_size * (PACKED if packing(p) else 1) for p in paths)
    return round(sum(sizes))


def _words(
    recipe: Recipe | None, home: Path, start: Any, texts: list[list[str]]
) -> tuple[int, Counting]:
    """The vocabulary, and how many tokens a text has: by the tokenizer of the model `start`, else by that of the folder
    `home`; else about."""
    brought = {} if start is None else start.origin.files
    files = {n: brought[n] for n in TOKENIZER if n in brought} or read_files(home, TOKENIZER)
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
