"""Learn the pieces of a unigram model (Kudo 2018, arXiv:1804.10959): those that make the words most probable.

    P(word) = sum over all ways to cut it of prod p(piece)

Start from every substring that occurs twice; then in turn, find p by expectation maximisation and drop the pieces that
are missed least. The library's trainer sums in the order of a hash table, which is another one each time; here the same
words give the same pieces.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

# Characters of a piece.
LONGEST = 16
SEEDS = 1_000_000
# Characters of different words that are learned from, the most frequent words first.
MUCH = 1_000_000
# How many of the pieces stay after each round, and rounds of expectation maximisation between.
SHRINK, ROUNDS = 0.75, 2


def learn(counts: Mapping[str, int], size: int) -> list[tuple[str, float]]:
    """`size` pieces with log p, best first; all single characters are among them."""
    counts = _frequent(counts)
    words = sorted(counts)
    weight = np.array([counts[word] for word in words], np.float64)
    pieces, start = _seeds(words, counts)
    score = np.log(start) - np.log(start.sum())
    lattice, inside = lattice_of(words, pieces), lattice_of(pieces, pieces, whole=False)
    single = np.array([len(piece) == 1 for piece in pieces])
    enough = False
    while not enough:
        for _ in range(ROUNDS):
            expected = lattice.expected(score, weight)
            score = _digamma(np.maximum(expected, 0.5)) - _digamma(expected.sum())
        enough = len(pieces) <= size
        if not enough:
            best = inside.best(score)
            missed = np.where(single, np.inf, expected * (score - best))
            left = max(int(len(pieces) * SHRINK), size, int(single.sum()))
            stay = np.sort(np.argsort(-missed, kind="stable")[:left])
            pieces, score, single = [pieces[i] for i in stay], score[stay], single[stay]
            lattice, inside = lattice.only(stay), inside.only(stay, words=stay)
    order = sorted(range(len(pieces)), key=lambda i: (-score[i], pieces[i]))
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
        count, n = counts[word], len(word)
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
        n, before = len(word), len(piece)
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
        self.nodes = int(self.lasts[-1]) + 1
        self.firsts = np.concatenate([[0], self.lasts[:-1] + 1])
        self.forward = _groups(self.reaches - self.firsts[self.word], self.reaches)
        self.backward = _groups(self.lasts[self.word] - self.leaves, self.leaves)

    def only(self, pieces: np.ndarray, words: np.ndarray | None = None) -> Lattice:
        """Without the arcs of the other pieces (and of the other words); numbers move up."""
        new = np.full(int(max(self.piece.max(initial=0), pieces.max())) + 1, -1)
        new[pieces] = np.arange(len(pieces))
        piece = new[self.piece]
        stay = piece >= 0
        word, lasts, shift = self.word, self.lasts, np.zeros(len(self.lasts), np.int64)
        if words is not None:
            stay &= np.isin(word, words)
            sizes = (self.lasts - self.firsts + 1)[words]
            lasts = np.cumsum(sizes) - 1
            shift[words] = lasts - self.lasts[words]
            renamed = np.full(len(self.lasts), -1)
            renamed[words] = np.arange(len(words))
            word = renamed[word]
        moved = shift[self.word[stay]]
        leaves, reaches = self.leaves[stay] + moved, self.reaches[stay] + moved
        return Lattice(lasts, leaves, reaches, piece[stay], word[stay])

    def expected(self, score: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """How often each piece occurs, over all ways to cut the words, which occur `weight` times."""
        arc = score[self.piece]
        before = self._sweep(arc, self.firsts, self.forward, self.leaves, self.reaches)
        after = self._sweep(arc, self.lasts, self.backward, self.reaches, self.leaves)
        whole = before[self.lasts][self.word]
        share = np.exp(before[self.leaves] + arc + after[self.reaches] - whole)
        return np.bincount(self.piece, share * weight[self.word], minlength=len(score))

    def best(self, score: np.ndarray) -> np.ndarray:
        """log p of the best way to cut each word; -inf where there is none."""
        arc = score[self.piece]
        ends = self._sweep(arc, self.firsts, self.forward, self.leaves, self.reaches, best=True)
        return ends[self.lasts]

    def _sweep(
        self,
        arc: np.ndarray,
        begin: np.ndarray,
        groups: list[tuple[np.ndarray, np.ndarray]],
        leaves: np.ndarray,
        reaches: np.ndarray,
        best: bool = False,
    ) -> np.ndarray:
        """log of the sum (or the largest) of the products over all paths from `begin` to each node."""
        total = np.full(self.nodes, -np.inf)
        total[begin] = 0.0
        for arcs, starts in groups:
            x = total[leaves[arcs]] + arc[arcs]
            top = np.maximum.reduceat(x, starts)
            node = reaches[arcs[starts]]
            if best:
                total[node] = top
                continue
            size = np.diff(np.append(starts, len(x)))
            total[node] = top + np.log(np.add.reduceat(np.exp(x - np.repeat(top, size)), starts))
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


def _digamma(x: np.ndarray) -> np.ndarray:
    """d log Gamma(x) / dx for x > 0: psi(x) = psi(x + 1) - 1 / x until x is large, then its series."""
    x = np.array(x, np.float64)
    total = np.zeros_like(x)
    for _ in range(7):
        total -= 1 / x
        x = x + 1
    y = 1 / (x * x)
    return total + np.log(x) - 0.5 / x - y * (1 / 12 - y * (1 / 120 - y / 252))
