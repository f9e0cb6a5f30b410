"""regard translate: lines, and which words belong together."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import torch.nn.functional as F
from tokenizers import models, pre_tokenizers, processors

import regard
from regard.see.align import source_words, target_words, word_numbers
from regard.text import Tokenizer, needed
from tests.test_cli import HOME, Done, call, folder, process, put
from tests.text import tiny

LINES = ["The dog plays", "", "Ein kleiner Hund 😀 שלום", "   ", "two\u2028lines\x0bin one", "last"]


@pytest.mark.parametrize("name", ["t5", "marian"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_translation_keeps_the_lines(name: str, end: str, tmp_path: Path) -> None:
    model = regard.load(folder(name))
    want = regard.translate(model, LINES, beams=2, max_new_tokens=8)
    text = end.join(LINES)
    flags = ["--beams", 2, "--max-new-tokens", 8]
    done = call("translate", folder(name), *flags, stdin=text)
    assert done == Done(0, "".join(f"{line}\n" for line in want), "")
    assert want[1] == want[3] == "" and all(want[i] for i in (0, 2, 4, 5))
    file = tmp_path / "lines.txt"
    file.write_bytes(b"\xef\xbb\xbf" + text.encode() + end.encode())
    for more in ([], ["--block", 1], ["--block", 2, "--rows", 1]):
        assert call("translate", folder(name), file, *flags, *more) == done


def test_translation_of_nothing_is_nothing() -> None:
    assert call("translate", folder("t5"), stdin="") == Done(0, "", "")
    assert call("translate", folder("t5"), stdin="\n\n") == Done(0, "\n\n", "")


def test_process_translates_stdin() -> None:
    done = process("translate", folder("t5"), "-", "--max-new-tokens", 5, stdin="The dog\n\nHund")
    want = regard.translate(regard.load(folder("t5")), ["The dog", "", "Hund"], max_new_tokens=5)
    assert done == Done(0, "".join(f"{line}\n" for line in want), "")


def test_json_is_one_object_a_line() -> None:
    flags = ["--beams", 1, "--max-new-tokens", 5, "--json", "--align"]
    done = call("translate", folder("t5"), *flags, stdin="The dog\n\nHund")
    first, empty, _ = found = [json.loads(line) for line in done.out.splitlines()]
    assert [len(f["ids"]) for f in found] == [5, 0, 5] and empty["text"] == ""
    assert first["finish"] == "length" and len(first["logprobs"]) == 5
    assert all(isinstance(pair, list) and len(pair) == 2 for pair in first["align"])


def test_line_that_is_too_long_is_named() -> None:
    done = call("translate", folder("marian"), "--beams", 1, stdin="fine\n" + "der Hund " * 400)
    assert done.code == 4 and "line 2 of stdin has" in done.err and "context is 512" in done.err


def test_line_that_is_no_text_is_named() -> None:
    done = call("translate", folder("t5"), stdin=b"fine\nab\xff\n")
    assert done.code == 4 and "line 2 of stdin is not UTF-8 text: byte 2 is 0xff" in done.err


def test_quantize_says_what_it_costs_once() -> None:
    flags = ["--max-new-tokens", 4, "--beams", 2, "--quantize", "int8", "--block", 1]
    done = call("translate", folder("t5"), *flags, stdin="The dog\nThe dog")
    assert done.code == 0 and len(done.out.splitlines()) == 2
    assert done.err.startswith("int8: perplexity of the plain model's answer ")
    assert len(done.err.splitlines()) == 1


def test_every_line_is_cut_into_tokens_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read, encode = [], Tokenizer.encode

    def counted(self: Tokenizer, text: str, **more: Any) -> list[int]:
        read.append(text)
        return encode(self, text, **more)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    assert call("translate", folder("t5"), "--beams", 2, stdin="Ein\n\nHund").code == 0
    regard.translate(regard.load(folder("t5")), ["Ein", " ", "Hund"], beams=2)
    assert read == ["Ein", "Hund"] * 2


# --- alignment ----------------------------------------------------------------------------------------------------

WORDS = "ja nein der die das hund ball park er sie es geht steht liegt rot blau neu".split()  # noqa: SIM905


@cache
def dropping() -> Path:
    """A model that has learned to say a sentence again without its first word."""
    torch.manual_seed(0)
    vocab = len(WORDS) + 3
    model = regard.build(
        "vaswani-base", vocab=vocab, layers=1, dim=32, heads=2, ffn_dim=32, dropout=0.0
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    end = torch.ones(32, 1, dtype=torch.long)
    # How long it takes depends on how a CPU rounds: until the longest sentences are learned.
    for step in range(2000):
        said = torch.randint(3, vocab, (32, 3 + step % 5))
        source, target = torch.cat([said, end], 1), torch.cat([said[:, 1:], end], 1)
        logits = model(torch.cat([0 * end, said[:, 1:]], 1), source=source)
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 4 and loss < 0.02:
            break
    assert loss < 0.02, loss
    core = tokenizers.Tokenizer(models.WordLevel({w: i + 3 for i, w in enumerate(WORDS)} | ENDS))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    files = {
        "tokenizer.json": core.to_str().encode(),
        "tokenizer_config.json": tiny.dump({"eos_token": "</s>", "pad_token": "<pad>"}),
        "generation_config.json": tiny.dump({"decoder_start_token_id": 0, "eos_token_id": 1}),
    }
    return put(model.save(Path(HOME.name) / "dropping"), files)


ENDS = {"<pad>": 0, "</s>": 1, "<unk>": 2}


@pytest.mark.parametrize("beams", [1, 3])
def test_alignment_of_a_model_that_drops_the_first_word(beams: int) -> None:
    text = "der hund geht rot\n\n  sie   steht neu das park"
    done = call("translate", dropping(), "--align", "--beams", beams, stdin=text)
    want = "hund geht rot\t1-0 2-1 3-2\n\nsteht neu das park\t1-0 2-1 3-2 4-3\n"
    assert done == Done(0, want, "")


def test_alignment_needs_cross_attention(tmp_path: Path) -> None:
    model = regard.build("luong", vocab=145, source_vocab=145, dim=16, attention=None)
    path = put(model.save(tmp_path / "m"), tiny.t5())
    done = call("translate", path, "--align", stdin="The dog")
    assert done.code == 2 and "--align reads cross-attention, and this model has none" in done.err
    assert call("translate", path, "--max-new-tokens", 3, stdin="The dog").code == 0


def test_alignment_works_with_additive_attention(tmp_path: Path) -> None:
    model = regard.build("bahdanau", vocab=145, source_vocab=145, dim=16)
    path = put(model.save(tmp_path / "m"), tiny.t5())
    done = call("translate", path, "--align", "--max-new-tokens", 3, stdin="The dog")
    assert done.code == 0 and "\t" in done.out


@pytest.mark.parametrize("name", ["t5", "marian", "roberta", "bert", "llama"])
@pytest.mark.parametrize(
    "text", ["The dog plays in the park.", "  Größe  über 😀 שלום don't", "👩‍👩‍👧", " ", "x"]
)
def test_every_token_of_a_text_has_its_word(name: str, text: str) -> None:
    tokenizer = needed(Tokenizer.from_files(tiny.ALL[name]()))
    ids, words = source_words(tokenizer, text)
    assert ids == tokenizer.encode(text) and len(ids) == len(words)
    assert {w for w in words if w is not None} == set(range(len(text.split())))
    ordered = [w for w in words if w is not None]
    assert ordered == sorted(ordered)
    plain = tokenizer.encode(text, special=False)
    if plain:
        found = target_words(tokenizer, plain)
        said = {w for w in found if w is not None}
        assert len(found) == len(plain)
        assert said == set(range(len(tokenizer.decode(plain).split())))


def test_language_code_is_no_word_of_the_source() -> None:
    tokenizer = needed(Tokenizer.from_files(tiny.marian()))
    ids, words = source_words(tokenizer, ">>fr<< The dog")
    assert ids == tokenizer.encode(">>fr<< The dog") and words[0] is None
    assert {w for w in words if w is not None} == {1, 2}


def test_words_are_what_stands_between_spaces() -> None:
    found: list[Any] = word_numbers(" ab  c\u2003d")
    assert found == [None, 0, 0, None, None, 1, None, 2]
