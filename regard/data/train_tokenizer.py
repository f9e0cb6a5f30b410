"""Learn a tokenizer from texts, with the library `tokenizers`: the files that regard.text.Tokenizer
and transformers' PreTrainedTokenizerFast both read.

The same texts and settings give the same files. For two languages, give the texts of both for one
tokenizer, or train one for each side.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tokenizers
import torch
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from regard.config import Choice, Count, settings
from regard.data.source import Text, parts_of
from regard.errors import UsageError, nearest
from regard.files import write_whole
from regard.text.build import END, SPACE, STYLES, blaming

AROUND = ("none", "start", "end", "both")
# Task -> its usual special tokens.
TASKS = {
    "lm": "unk eos",
    "seq2seq": "pad unk bos eos",
    "infill": "pad unk bos eos mask",
    "mlm": "pad unk cls sep mask",
}
PARTS = tuple(STYLES["roberta"])
# Before a piece that does not begin a word.
INSIDE = "##"
# The first of 131,000 characters that no text should have.
PRIVATE = 0xF0000
# Characters of a text that are read at once; where it has no space; and of a word: longer ones are
# learned from in parts.
PART = 1 << 16
WORDLESS = 1 << 20
LONG = 128
# Characters of a piece.
LONGEST = 16
SEEDS = 1_000_000
# Characters of different words that are learned from, the most frequent words first.
MUCH = 1_000_000
# How many of the pieces stay after each round, and rounds of expectation maximisation between.
SHRINK, ROUNDS = 0.75, 2


@settings
class Recipe:
    """What is to be learned.

    kind: "bpe" (byte-level, loses nothing), "wordpiece" (BERT), "unigram" (SentencePiece), "chars" or "bytes". `vocab`
    counts the special tokens too; characters and bytes need none. `task` chooses the usual special tokens: "lm" an end,
    "seq2seq" begin and end, which is put behind a text, "mlm" (and classes) a mask, and class and separator around a
    text. `special` names them by their part instead, and `more` has others; ids begin with them, in order."""

    kind: Annotated[str, Choice(KINDS)] = "bpe"  # or wordpiece, unigram, chars, bytes
    vocab: Count = 8000  # tokens, special ones too; not of chars and bytes
    # lm, seq2seq, mlm or infill: the usual special tokens
    task: Annotated[str, Choice(TASKS)] = "lm"
    special: dict[str, str] | None = None  # special tokens by their part: { eos = "</s>" }
    more: tuple[str, ...] = ()  # further special tokens
    # What is put around a text: none, start, end, both; None: as the task has it.
    around: Annotated[str, Choice(AROUND)] | None = None
    lower: bool = False  # text in small letters
    # Pairs seen less often are not merged.
    min_count: Count = 2

    def __post_init__(self) -> None:
        for part in self.named:
            if part not in PARTS:
                raise UsageError(f"special token {part!r} is unknown; {nearest(part, PARTS)}")
        if "" in self.tokens or len(set(self.tokens)) < len(self.tokens):
            raise UsageError(f"special tokens must differ and not be empty, got {self.tokens}")
        if self.kind in ("bpe", "wordpiece", "unigram") and self.vocab <= len(self.tokens):
            raise UsageError(
                f"vocab = {self.vocab} leaves no room beside {len(self.tokens)} special tokens"
            )

    @property
    def named(self) -> dict[str, str]:
        """Special tokens by their part."""
        if self.special is not None:
            return self.special
        bert = (self.task, self.kind) == ("mlm", "wordpiece")
        tokens = STYLES["bert" if bert else "roberta"]
        tokens = {**tokens, "eos": END} if self.task == "lm" else tokens
        # Bytes leave nothing unknown.
        known = self.kind in ("bpe", "bytes") and self.task != "mlm"
        parts = TASKS[self.task].split()
        return {part: tokens[part] for part in parts if part != "unk" or not known}

    @property
    def tokens(self) -> list[str]:
        return [*self.named.values(), *self.more]

    @property
    def ends(self) -> tuple[str | None, str | None]:
        """The tokens in front of a text and behind it."""
        around = self.around or {"lm": "none", "mlm": "both"}.get(self.task, "end")
        ends: list[str | None] = []
        for place, parts in (("start", ("cls", "bos")), ("end", ("sep", "eos"))):
            token = next((self.named[part] for part in parts if part in self.named), None)
            wanted = around in (place, "both")
            if wanted and token is None:
                raise UsageError(f"around = {around!r} needs a special token {' or '.join(parts)}")
            ends.append(token if wanted else None)
        return ends[0], ends[1]


def train_tokenizer(texts: Iterable[Text], recipe: Recipe) -> dict[str, bytes]:
    """The files of the tokenizer, name -> bytes."""
    first, last = recipe.ends
    parts = (part for text in texts for part in _parts(text))
    one = next(parts, None)
    if one is None:
        raise UsageError("there are no texts to learn a tokenizer from")
    with blaming("no tokenizer can be learned from these texts"):
        core = KINDS[recipe.kind](chain([one], parts), recipe)
    for i, token in enumerate(recipe.tokens):
        if core.token_to_id(token) != i:
            raise UsageError(f"special token {token!r} is also a piece of text; choose another")
    if first or last:
        core.post_processor = processors.TemplateProcessing(
            single=" ".join(x for x in (first, "$A", last) if x),
            pair=" ".join(x for x in (first, "$A", last, "$B", last) if x),
            special_tokens=[(t, core.token_to_id(t)) for t in dict.fromkeys((first, last)) if t],
        )
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= {f"{part}_token": text for part, text in recipe.named.items()}
    settings["clean_up_tokenization_spaces"] = False
    if recipe.more:
        settings["additional_special_tokens"] = list(recipe.more)
    return {
        "tokenizer.json": core.to_str(pretty=True).encode(),
        "tokenizer_config.json": (json.dumps(settings, indent=2) + "\n").encode(),
    }


def _parts(text: Text) -> Iterator[str]:
    """A long text in parts, cut before a space where there is one: the library takes a hundred
    bytes and more for a character of what it reads at once, and asks for 256 parts before it
    reads."""

    def end(held: str, first: int) -> int:
        space = held.rfind(" ", first + PART // 2, first + PART)
        space = held.find(" ", first + PART, first + WORDLESS) if space < 0 else space
        return first + WORDLESS if space < 0 else space

    return parts_of(text, WORDLESS, end)


def write_files(folder: Path, files: dict[str, bytes]) -> Path:
    """Put files into a folder, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        write_whole(folder / name, data)
    return folder


# --- the kinds ----------------------------------------------------------------------------------------------------


def _bpe(texts: Iterator[str], recipe: Recipe, merges: bool = True) -> tokenizers.Tokenizer:
    """Bytes, and the pairs of them that are seen most (Sennrich et al. 2016; GPT-2's cut into words)."""
    smallest = 256 + len(recipe.tokens)
    if merges and recipe.vocab < smallest:
        raise UsageError(
            f"vocab = {recipe.vocab} is too small: 256 bytes and {len(recipe.tokens)} special tokens are {smallest}"
        )
    core = tokenizers.Tokenizer(models.BPE())
    core.normalizer = normalizers.Lowercase() if recipe.lower else None
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=merges)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab if merges else smallest,
        min_frequency=recipe.min_count,
        special_tokens=recipe.tokens,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts if merges else iter(()), trainer)
    return core


def _wordpiece(texts: Iterator[str], recipe: Recipe) -> tokenizers.Tokenizer:
    """Words, cut into the longest known pieces from the left (BERT). The pieces are those of byte pair encoding on
    characters, where a character inside a word is another one than at its beginning.

    The library's own trainer numbers those in the order of a hash table, so that no two runs are alike. Here each is
    written as a character of its own, from the planes for private use, and the trainer of BPE does the rest."""
    core = tokenizers.Tokenizer(models.WordPiece(unk_token=_unknown(recipe)))
    core.normalizer = normalizers.BertNormalizer(lowercase=recipe.lower)
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    # Character, or ## and character -> what stands for it.
    stands: dict[str, str] = {}

    def written(word: str) -> str:
        marks = [word[0], *(f"{INSIDE}{c}" for c in word[1:])]
        return "".join(stands.setdefault(m, chr(PRIVATE + len(stands))) for m in marks)

    counts = Counter(word for text in texts for word in _words(core, text))
    lines = (" ".join([written(word)] * count) for word, count in counts.items())
    pairs = tokenizers.Tokenizer(models.BPE())
    pairs.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    sizes = dict(vocab_size=recipe.vocab - len(recipe.tokens), min_frequency=recipe.min_count)
    pairs.train_from_iterator(lines, trainers.BpeTrainer(**sizes, show_progress=False))  # type: ignore[arg-type]
    read = {stand: mark for mark, stand in stands.items()}
    vocabulary = sorted(pairs.get_vocab().items(), key=lambda item: item[1])
    marks = [[read[c] for c in piece] for piece, _ in vocabulary]
    pieces = [first + "".join(c.removeprefix(INSIDE) for c in rest) for first, *rest in marks]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys([*recipe.tokens, *pieces]))}
    core.model = models.WordPiece(vocab, unk_token=_unknown(recipe))
    core.add_special_tokens(recipe.tokens)
    return core


def _unigram(texts: Iterator[str], recipe: Recipe) -> tokenizers.Tokenizer:
    """The pieces that make the texts most probable, with SentencePiece's mark for a space: see `learn`."""
    core = tokenizers.Tokenizer(models.Unigram())
    steps: list[Any] = [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    core.normalizer = normalizers.Sequence(steps + [normalizers.Lowercase()] * recipe.lower)
    core.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always")
    core.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="always")
    counts: Counter[str] = Counter()
    for text in texts:
        for word in _words(core, text):
            counts.update(word[i : i + LONG] for i in range(0, len(word), LONG))
    unk = _unknown(recipe)
    learned = learn(counts, recipe.vocab - len(recipe.tokens))
    pieces = [(token, 0.0) for token in recipe.tokens]
    pieces += [item for item in learned if item[0] not in recipe.tokens]
    core.model = models.Unigram(pieces, recipe.tokens.index(unk))
    core.add_special_tokens(recipe.tokens)
    return core


def _words(core: tokenizers.Tokenizer, text: str) -> list[str]:
    """The words of a text as the tokenizer will see them."""
    clean = core.normalizer.normalize_str(text)
    return [word for word, _ in core.pre_tokenizer.pre_tokenize_str(clean)]


def _chars(texts: Iterator[str], recipe: Recipe) -> tokenizers.Tokenizer:
    """Every character that occurs, in the order of Unicode."""
    seen: set[str] = set()
    for text in texts:
        seen |= set(text.lower() if recipe.lower else text)
    unk = _unknown(recipe)
    vocab = {token: i for i, token in enumerate([*recipe.tokens, *sorted(seen)])}
    core = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=unk))
    core.normalizer = normalizers.Lowercase() if recipe.lower else None
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(recipe.tokens)
    return core


def _unknown(recipe: Recipe) -> str:
    if "unk" not in recipe.named:
        raise UsageError(f"a tokenizer of kind {recipe.kind!r} needs the special token unk")
    return recipe.named["unk"]


KINDS: dict[str, Callable[[Iterator[str], Recipe], tokenizers.Tokenizer]] = {
    "bpe": _bpe,
    "wordpiece": _wordpiece,
    "unigram": _unigram,
    "chars": _chars,
    "bytes": partial(_bpe, merges=False),
}


# --- the unigram model --------------------------------------------------------------------------------------------


def learn(counts: Mapping[str, int], size: int) -> list[tuple[str, float]]:
    """`size` pieces with log p, best first, that make the words most probable (Kudo 2018, arXiv:1804.10959):

        P(word) = sum over all ways to cut it of prod p(piece)

    Start from every substring that occurs twice; then in turn, find p by expectation maximisation and drop the pieces
    that are missed least. All single characters stay.

    Why not the library's UnigramTrainer: it sums in the order of a hash table, which is another one in each process. Of
    one file (Multi30k's val.de, 1,000 pieces) six runs of tokenizers 0.23.3 gave six files, on one thread too: log p
    differs by up to 0.0017, and with it the order, so that pieces have other ids. Here the same words give the same
    pieces."""
    counts = _frequent(counts)
    words = sorted(counts)
    weight = np.array([counts[word] for word in words], np.float64)
    pieces, start = _seeds(words, counts)
    score = np.log(start) - np.log(start.sum())
    lattice = lattice_of(words, pieces)
    inside = lattice_of(pieces, pieces, whole=False)
    single = np.array([len(piece) == 1 for piece in pieces])
    if size < single.sum():
        raise UsageError(f"vocab leaves {size} pieces for {single.sum()} characters; give more")
    # The numbers of the pieces that are left.
    left = np.arange(len(pieces))
    while True:
        for _ in range(ROUNDS):
            expected = lattice.expected(score, weight)[left]
            seen = torch.from_numpy(np.append(np.maximum(expected, 0.5), expected.sum()))
            log_p = seen.digamma().numpy()
            score[left] = log_p[:-1] - log_p[-1]
        if len(left) <= size:
            break
        missed = np.where(single[left], np.inf, expected * (score - inside.best(score))[left])
        count = max(int(len(left) * SHRINK), size, int(single.sum()))
        left = left[np.sort(np.argsort(-missed, kind="stable")[:count])]
        stays = np.isin(np.arange(len(pieces)), left)
        lattice = lattice.only(stays[lattice.piece])
        inside = inside.only(stays[inside.piece] & stays[inside.word])
    order = sorted(left.tolist(), key=lambda i: (-score[i], pieces[i]))
    return [(pieces[i], float(score[i])) for i in order]


def _frequent(counts: Mapping[str, int]) -> Mapping[str, int]:
    """The most frequent words; of the others only the characters, so that all can be written."""
    order = sorted(counts, key=lambda word: (-counts[word], word))
    sizes = np.cumsum([len(word) for word in order])
    enough = int(np.searchsorted(sizes, MUCH, side="right"))
    frequent = Counter({word: counts[word] for word in order[:enough]})
    frequent.update({c for word in order[enough:] for c in word})
    return frequent


def _seeds(words: list[str], counts: Mapping[str, int]) -> tuple[list[str], np.ndarray]:
    seen: Counter[str] = Counter()
    for word in words:
        count = counts[word]
        n = len(word)
        for a in range(n):
            for b in range(a + 1, min(a + LONGEST, n) + 1):
                seen[word[a:b]] += count
    # Never seen but inside one longer substring, which is the better piece.
    inner = set()
    for text, count in seen.items():
        inner |= {part for part in (text[1:], text[:-1]) if seen[part] == count}
    singles = [text for text in seen if len(text) == 1]
    others = [t for t, count in seen.items() if len(t) > 1 < count and t not in inner]
    others.sort(key=lambda text: (-seen[text] * len(text), text))
    pieces = sorted([*singles, *others[:SEEDS]])
    return pieces, np.array([seen[piece] for piece in pieces], np.float64)


def lattice_of(words: Iterable[str], pieces: Iterable[str], whole: bool = True) -> Lattice:
    """All ways to cut words into pieces. Without `whole`, no word may be one piece."""
    number = {piece: i for i, piece in enumerate(pieces)}
    leaves, reaches, piece, lasts, arcs = (array("q") for _ in range(5))
    first = 0
    for word in words:
        n = len(word)
        before = len(piece)
        for a in range(n):
            for b in range(a + 1, min(a + LONGEST, n) + 1):
                index = number.get(word[a:b])
                if index is not None and (whole or b - a < n):
                    leaves.append(first + a)
                    reaches.append(first + b)
                    piece.append(index)
        arcs.append(len(piece) - before)
        lasts.append(first + n)
        first += n + 1
    word_of = np.repeat(np.arange(len(arcs)), np.array(arcs))
    ends, starts, stops, numbers = map(np.array, (lasts, leaves, reaches, piece))
    return Lattice(ends, starts, stops, numbers, word_of)


Way = tuple[np.ndarray, np.ndarray, np.ndarray, list[tuple[np.ndarray, np.ndarray]]]


@dataclass(eq=False)
class Lattice:
    """Arcs from node to node, a node being a place in a word: the last node of each word; where each arc leaves and
    what it reaches, its piece and its word."""

    lasts: np.ndarray
    leaves: np.ndarray
    reaches: np.ndarray
    piece: np.ndarray
    word: np.ndarray

    def __post_init__(self) -> None:
        self.firsts = np.concatenate([[0], self.lasts[:-1] + 1])
        # Where a sweep begins, the node before and behind each arc, and the arcs in the order that it takes them.
        order = _groups(self.reaches - self.firsts[self.word], self.reaches)
        self.forward = (self.firsts, self.leaves, self.reaches, order)
        order = _groups(self.lasts[self.word] - self.leaves, self.leaves)
        self.backward = (self.lasts, self.reaches, self.leaves, order)

    def only(self, arcs: np.ndarray) -> Lattice:
        """With some of the arcs."""
        parts = (x[arcs] for x in (self.leaves, self.reaches, self.piece, self.word))
        return Lattice(self.lasts, *parts)

    def expected(self, score: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """How often each piece occurs, over all ways to cut the words, which occur `weight` times."""
        arc = score[self.piece]
        before = self._sweep(arc, self.forward)
        after = self._sweep(arc, self.backward)
        whole = before[self.lasts][self.word]
        share = np.exp(before[self.leaves] + arc + after[self.reaches] - whole)
        return np.bincount(self.piece, share * weight[self.word], minlength=len(score))

    def best(self, score: np.ndarray) -> np.ndarray:
        """log p of the best way to cut each word; -inf where there is none."""
        return self._sweep(score[self.piece], self.forward, best=True)[self.lasts]

    def _sweep(self, arc: np.ndarray, way: Way, best: bool = False) -> np.ndarray:
        """log of the sum (or the largest) of the products over all paths from the beginning to each node."""
        begin, leaves, reaches, groups = way
        total = np.full(int(self.lasts[-1]) + 1, -np.inf)
        total[begin] = 0.0
        for arcs, starts in groups:
            x = total[leaves[arcs]] + arc[arcs]
            top = np.maximum.reduceat(x, starts)
            if not best:
                size = np.diff(np.append(starts, len(x)))
                top = top + np.log(np.add.reduceat(np.exp(x - np.repeat(top, size)), starts))
            total[reaches[arcs[starts]]] = top
        return total


def _groups(place: np.ndarray, node: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Arcs by place, and inside by node: (arcs, where each node's begin) for each place in turn."""
    order = np.lexsort((node, place))
    cuts = np.flatnonzero(np.diff(place[order])) + 1
    groups = []
    for arcs in np.split(order, cuts) if len(order) else []:
        starts = np.flatnonzero(np.diff(node[arcs])) + 1
        groups.append((arcs, np.concatenate([[0], starts])))
    return groups
