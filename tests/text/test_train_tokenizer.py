"""Tokenizers that are learned: the same files each time, read alike by us and by transformers."""

import hashlib
import lzma
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from regard.data import train_tokenizer as module
from regard.data.train_tokenizer import (
    KINDS,
    Recipe,
    lattice_of,
    learn,
    train_tokenizer,
    write_files,
)
from regard.errors import UsageError
from regard.text import Tokenizer, needed

ROOT = Path(__file__).resolve().parents[2]
WORDS = "der Hund läuft im Park , the dogs run and play in a park . kleiner größer".split()  # noqa: SIM905
TEXTS = [" ".join(WORDS[(i * j) % len(WORDS)] for j in range(1, 9)) for i in range(60)]
ODD = [
    "Größe 😀 שלום",
    "  two  spaces\nand\tmore ",
    "naïve café",
    "",
    "x",
    "日本語 dogs",
    "The PARK",
]
every = pytest.mark.parametrize("kind", KINDS)


def made(kind: str, vocab: int = 320, **more: Any) -> dict[str, bytes]:
    return train_tokenizer(TEXTS, Recipe(kind, vocab, **more))


def load(files: dict[str, bytes]) -> Tokenizer:
    return needed(Tokenizer.from_files(files))


@every
@pytest.mark.parametrize("task", ["lm", "seq2seq", "mlm"])
def test_files_are_read_alike_by_transformers(kind: str, task: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    files = made(kind, task=task, more=("<user>",))
    ours = load(files)
    assert set(os.listdir(write_files(tmp_path, files))) == set(files)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert theirs.vocab_size <= len(theirs) == ours.vocab
    for text in [*TEXTS[:5], *ODD, "a <user> b"]:
        for special in (True, False):
            ids = theirs(text, add_special_tokens=special)["input_ids"]
            assert ours.encode(text, special=special) == ids
            said = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            assert ours.decode(ids) == said
    for name, text in ours.tokens.items():
        assert getattr(theirs, name) == text


@every
def test_text_it_has_learned_comes_back(kind: str) -> None:
    ours = load(made(kind))
    for text in TEXTS:
        said = ours.decode(ours.encode(text))
        # the decoder of WordPiece takes the space before a comma away
        assert said == (text.replace(" ,", ",").replace(" .", ".") if kind == "wordpiece" else text)
    if kind in ("bpe", "bytes"):
        assert all(ours.decode(ours.encode(text)) == text for text in ODD)


def bits() -> str:
    return " ".join(hashlib.sha256(made(k)["tokenizer.json"]).hexdigest()[:16] for k in KINDS)


def test_same_texts_give_the_same_files_in_another_process() -> None:
    """Several times, as the hash tables of the library are seeded anew in each process."""
    script = "from tests.text.test_train_tokenizer import bits; print(bits())"
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": seed}
        command = [sys.executable, "-c", script]
        run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
        assert run.stdout.strip() == bits()


def test_real_text_gives_the_same_files_each_time(shared: Path) -> None:
    text = lzma.decompress((shared / "multi30k" / "val.de.xz").read_bytes()).decode()
    lines = text.split("\n")
    for kind in ("wordpiece", "unigram"):
        found = {train_tokenizer(lines, Recipe(kind, 1000))["tokenizer.json"] for _ in range(3)}
        assert len(found) == 1, kind


@pytest.mark.parametrize(
    "kind, task, want",
    [
        ("bpe", "lm", ["<|endoftext|>"]),
        ("unigram", "lm", ["<unk>", "<|endoftext|>"]),
        ("bpe", "seq2seq", ["<pad>", "<s>", "</s>"]),
        ("wordpiece", "mlm", ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]),
        ("bpe", "mlm", ["<pad>", "<unk>", "<s>", "</s>", "<mask>"]),
    ],
)
def test_special_tokens_come_first_and_are_never_cut(kind: str, task: str, want: list[str]) -> None:
    ours = load(made(kind, task=task))
    ids = [ours.core.token_to_id(token) for token in want]
    assert ids == list(range(len(want)))
    for i, token in enumerate(want):
        assert i in ours.encode(f"dogs {token} run", special=False)
        assert i not in ours.encode(f"dogs {token} run", special=False, literal=True) or (
            token == "<unk>" or token == "[UNK]"
        )


@pytest.mark.parametrize(
    "task, around, want",
    [
        ("lm", None, (None, None)),
        ("seq2seq", None, (None, "</s>")),
        ("mlm", None, ("[CLS]", "[SEP]")),
        ("seq2seq", "both", ("<s>", "</s>")),
        ("seq2seq", "none", (None, None)),
    ],
)
def test_ends_are_put_around_a_text(
    task: str, around: str | None, want: tuple[str | None, str | None]
) -> None:
    ours = load(made("wordpiece", task=task, around=around))
    inner, ids = ours.encode("the park", special=False), ours.encode("the park")
    first, last = ([ours.core.token_to_id(t)] if t else [] for t in want)
    assert ids == first + inner + last


def test_vocabulary_has_the_size_that_was_asked_for() -> None:
    for kind, vocab in (("bpe", 300), ("wordpiece", 60), ("unigram", 45)):
        assert load(made(kind, vocab)).vocab == vocab, kind
    assert load(made("bytes")).vocab == 257
    assert load(made("chars")).vocab == 2 + len(set("".join(TEXTS)))


def test_lower_joins_capitals() -> None:
    for kind in KINDS:
        ours = load(made(kind, lower=True))
        assert ours.encode("THE park") == ours.encode("the PARK"), kind


def test_one_tokenizer_serves_both_sides_or_each_has_its_own() -> None:
    left, right = TEXTS[:30], [text.upper() for text in TEXTS[30:]]
    joint = load(train_tokenizer([*left, *right], Recipe("wordpiece", 90)))
    sides = [load(train_tokenizer(side, Recipe("wordpiece", 90))) for side in (left, right)]
    assert all(joint.special.unk not in joint.encode(text) for text in (*left, *right))
    assert sides[0].special.unk in sides[0].encode(right[0])


@pytest.mark.parametrize(
    "settings, sentence",
    [
        (dict(kind="bpee"), "kind = 'bpee' is unknown; did you mean 'bpe'"),
        (dict(task="translate"), "task = 'translate' is unknown"),
        (dict(around="left"), "around = 'left' is unknown"),
        (dict(vocab=100), "vocab = 100 is too small: 256 bytes and 1 special tokens are 257"),
        (dict(kind="unigram", vocab=2), "vocab = 2 leaves no room beside 2 special tokens"),
        (dict(special={"begin": "<s>"}), "special token 'begin' is unknown"),
        (dict(special={"bos": "<s>", "eos": "<s>"}), "special tokens must differ"),
        (dict(kind="unigram", special={"eos": "</s>"}), "needs the special token unk"),
        (dict(around="both"), "around = 'both' needs a special token cls or bos"),
        (dict(min_count=0), "min_count = 0"),
        (dict(kind="chars", special={"unk": "a"}), "'a' is also a piece of text"),
    ],
)
def test_mistake_is_one_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        train_tokenizer(TEXTS, Recipe(**settings))


def test_no_texts_are_refused() -> None:
    with pytest.raises(UsageError, match="no texts to learn a tokenizer from"):
        train_tokenizer([], Recipe())


# --- the unigram trainer ------------------------------------------------------------------------------------------


def cuts(word: str, pieces: dict[str, float]) -> list[list[str]]:
    """Every way to cut a word, one by one."""
    if not word:
        return [[]]
    ways = range(1, len(word) + 1)
    return [
        [word[:n], *rest] for n in ways if word[:n] in pieces for rest in cuts(word[n:], pieces)
    ]


def test_expected_counts_are_those_of_all_ways_to_cut() -> None:
    pieces = {"a": -1.0, "b": -1.5, "ab": -2.0, "ba": -2.2, "aba": -3.0, "bab": -4.0}
    words, weight = ["ababa", "a", "bb"], np.array([3.0, 2.0, 1.0])
    score = np.array(list(pieces.values()))
    lattice = lattice_of(words, pieces)
    want: Counter[str] = Counter()
    for word, count in zip(words, weight):
        ways = cuts(word, pieces)
        share = np.array([np.exp(sum(pieces[p] for p in way)) for way in ways])
        for way, p in zip(ways, share / share.sum()):
            for piece in way:
                want[piece] += count * p
        best = max(sum(pieces[p] for p in way) for way in ways)
        assert lattice.best(score)[words.index(word)] == pytest.approx(best)
    np.testing.assert_allclose(
        lattice.expected(score, weight), [want[p] for p in pieces], rtol=1e-12
    )


def test_smaller_lattice_is_the_lattice_of_fewer_pieces() -> None:
    pieces, words = ["a", "ab", "b", "ba", "bab"], ["abba", "b", "babab"]
    kept, stays = [0, 2, 3], np.array([True, False, True, True, False])
    score, weight = np.log([0.5, 0.01, 0.3, 0.2, 0.01]), np.ones(3)
    whole, plain = lattice_of(words, pieces), lattice_of(words, [pieces[i] for i in kept])
    small = whole.only(stays[whole.piece]).expected(score, weight)
    np.testing.assert_array_equal(small[kept], plain.expected(score[kept], weight))
    assert not small[[1, 4]].any()
    inside = lattice_of(pieces, pieces, whole=False)
    inside = inside.only(stays[inside.piece] & stays[inside.word])
    assert inside.best(score)[kept].tolist() == [-np.inf, -np.inf, score[2] + score[0]]


def test_rare_words_beyond_the_limit_leave_their_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MUCH", 12)
    pieces = dict(learn({"often": 9, "seldom": 3, "rare": 1, "ß": 1}, 100))
    assert {"often", "seldom"} <= set(pieces) >= set("oftenseldomraß") and "rare" not in pieces


def test_learned_pieces_cut_text_as_short_as_the_library_does() -> None:
    metaspace = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    counts = Counter(word for text in TEXTS for word, _ in metaspace.pre_tokenize_str(text))
    pieces = learn(counts, 50)
    assert len(pieces) == 50 and {c for w in counts for c in w} <= {p for p, _ in pieces}
    assert np.exp([score for _, score in pieces]).sum() == pytest.approx(1.0, abs=0.05)
    ours = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), *pieces], 0))
    theirs = tokenizers.Tokenizer(models.Unigram())
    ours.pre_tokenizer = theirs.pre_tokenizer = metaspace
    trainer = trainers.UnigramTrainer(
        vocab_size=51, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    theirs.train_from_iterator(TEXTS, trainer)
    used = [sum(len(t.encode(text).ids) for text in TEXTS) for t in (ours, theirs)]
    assert used[0] <= 1.02 * used[1]
