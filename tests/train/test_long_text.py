"""A text of any length is prepared in bounded memory, and its ids are those of the whole text encoded at once."""

import subprocess
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from regard.data import source as files_of
from regard.data import tokens
from regard.data import train_tokenizer as learning
from regard.data.config import shards_of
from regard.data.read import Source, records
from regard.data.tokens import Coder
from regard.data.train_tokenizer import KINDS, Recipe, train_tokenizer
from regard.text import Tokenizer, needed

WORDS = "It was the best of times, it was the worst of times; 1,234 years.  And\n\nso on... no?\n"
TEXTS = {
    "words": WORDS * 12,
    "one word": "antidisestablishmentarianism" * 40,
    "spaces": "a   b \n c\t\td" * 60,
    "no spaces": "日本語のとても長い文章です。" * 60,
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_have_the_ids_of_the_whole(
    kind: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab = 60 if kind in ("wordpiece", "unigram") else 300
    files = train_tokenizer([*TEXTS.values()], Recipe(kind, vocab=vocab))
    coder = Coder(needed(Tokenizer.from_files(files)))
    (tmp_path / "a.txt").write_text(TEXTS[text], encoding="utf-8")
    source = Source((str(tmp_path / "a.txt"),))
    whole = shards_of("lm", source, coder, tmp_path / "whole", None)
    monkeypatch.setattr(tokens, "PIECE", 40)
    monkeypatch.setattr(tokens, "AROUND", 20)
    for chunk in (1 << 20, 100):
        # The second is read in parts, and never held whole.
        monkeypatch.setattr(files_of, "CHUNK", chunk)
        cut = shards_of("lm", source, coder, tmp_path / f"cut-{chunk}", None)
        assert cut.columns["ids"][0].tolist() == whole.columns["ids"][0].tolist()
        assert len(cut.columns["ids"]) == 1 and cut.notes == whole.notes
    if text == "words":
        assert len(list(tokens.pieces(TEXTS[text], coder))) > 8


def test_many_long_texts_stay_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coder = Coder(needed(Tokenizer.from_files(train_tokenizer([WORDS], Recipe("chars")))))
    lines = ["short", "long " * 50, "", "short again", "longer " * 60]
    (tmp_path / "a.txt").write_text("\n".join(lines), encoding="utf-8")
    source = Source((str(tmp_path / "a.txt"),), unit="line")
    whole = shards_of("lm", source, coder, tmp_path / "whole", None)
    monkeypatch.setattr(tokens, "PIECE", 40)
    cut = shards_of("lm", source, coder, tmp_path / "cut", None)
    rows = [[row.tolist() for row in made.columns["ids"]] for made in (cut, whole)]
    assert rows[0] == rows[1] and len(rows[0]) == 4 and cut.notes == whole.notes


@pytest.mark.parametrize("kind", KINDS)
def test_tokenizer_learned_from_parts_is_that_of_the_text(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe(kind, vocab=60 if kind in ("wordpiece", "unigram") else 300)
    text = "so it was the best of times and it was the worst of times " * 12
    whole = train_tokenizer([text], recipe)
    monkeypatch.setattr(learning, "PART", 40)
    monkeypatch.setattr(learning, "WORDLESS", 80)
    assert len(list(learning._parts(text))) > 8 and "".join(learning._parts(text)) == text
    assert train_tokenizer([text], recipe) == whole
    # In parts that come one by one too, wherever those are cut.
    for size in (1, 7, 100):
        parts = [text[i : i + size] for i in range(0, len(text), size)]
        assert "".join(learning._parts(parts)) == text
        assert train_tokenizer([parts], recipe) == whole


def test_file_that_is_one_document_is_never_held_whole(tmp_path: Path) -> None:
    """Neither where it is encoded nor where a tokenizer is learned from it: 40 MB in 8."""
    (tmp_path / "a.txt").write_text(WORDS * 480_000)

    def text() -> Any:
        (record,) = records(Source((str(tmp_path / "a.txt"),)), ("text",), long=True)
        return record["text"]

    coder: Any = SimpleNamespace(encode=lambda texts: [[ord(c) for c in text] for text in texts])
    for parts in (
        lambda: tokens.pieces(text(), coder),
        lambda: learning._parts(text()),
    ):
        tracemalloc.start()
        size = sum(len(part) for part in parts())
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert size == 480_000 * len(WORDS) and peak < 8_000_000


def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    """Two million characters in one line: at once they took 640 MB."""
    script = f"""
import resource
from pathlib import Path
from regard.text import Tokenizer
from regard.data.tokens import Coder
from regard.data.train_tokenizer import Recipe, train_tokenizer
from regard.data import tokens
from regard.data.config import shards_of
from regard.data.read import Source
path = Path({str(tmp_path / "a.txt")!r})
path.write_text("the quick brown fox jumps over " * (1 << 16))
coder = Coder(Tokenizer.from_files(train_tokenizer([path.read_text()[:99]], Recipe("chars")), {{}}))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
shards_of("lm", Source((str(path),)), coder, path.parent / "shards", None)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 300
