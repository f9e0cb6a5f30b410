"""The tokenizer in a GGUF file's metadata cuts text as the tokenizer it was made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library

from regard.errors import UsageError
from regard.text import Tokenizer, needed
from regard.text.gguf import KEY, PRE, tokenizer_files
from tests.text import tiny
from tests.text.tiny import CORPUS, TEXTS

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
HARD = [
    *TEXTS,
    *CORPUS[:6],
    "1234567 + 89 = ３ ½ x²",
    "HelloWorld HTTPServer isNaN don't DON'T we'Ll",
    "<|im_start|>user\nHi<|im_end|>\n<think>well</think>",
    "tabs\t\there\n\n\n  and    spaces \n\t x",
    "path/to//file.py // comment\r\n\r\nif (a==b){}",
    "日本語のテキスト、한국어 ไทย हिन्दी",
    "\U0001f1e9\U0001f1ea\u200d\ufe0f",
]
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"


def split(pattern: str) -> dict[str, Any]:
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [cut, level(False)]}


def level(regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": regex,
    }


def digits() -> dict[str, Any]:
    one = {"type": "Digits", "individual_digits": True}
    return {"type": "Sequence", "pretokenizers": [one, level(True)]}


# As the tokenizer.json of the models that these names stand for has it.
PUBLISHED = {
    "gpt-2": level(True),
    "smollm": digits(),
    "starcoder": digits(),
    "refact": digits(),
    "qwen2": split(
        CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ),
    "llama-bpe": split(
        CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ),
    "tekken": split(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
for name, twin in {
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
}.items():
    PUBLISHED[name] = PUBLISHED[twin]


def byte_level(pre: str | None, **more: Any) -> dict[str, Any]:
    """Metadata of a byte-level tokenizer with special, user-defined and filling tokens."""
    vocab, merges = tiny._byte_level(SPECIAL)
    tokens = [*sorted(json.loads(vocab), key=json.loads(vocab).get), "<think>", "[PAD401]"]  # type: ignore[arg-type]
    kinds = [3 if token in SPECIAL else 1 for token in tokens]
    kinds[-2:] = [4, 5]
    said = dict(model="gpt2", tokens=tokens, token_type=kinds, bos_token_id=0, eos_token_id=2)
    said |= {"merges": merges.decode().splitlines()[1:], "add_bos_token": False}
    said |= {} if pre is None else {"pre": pre}
    return {KEY + key: value for key, value in {**said, **more}.items()}


def reference(pre: str) -> Library:
    vocab, merges = tiny._byte_level(SPECIAL)
    pairs = [line.split(" ") for line in merges.decode().splitlines()[1:]]
    whole = pre in ("llama-bpe", "llama3", "llama-v3", "tekken")
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False)
    added = [{"id": i, "content": t, "special": True, **flags} for i, t in enumerate(SPECIAL)]
    added.append({"id": len(json.loads(vocab)), "content": "<think>", "special": False, **flags})
    data = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if "qwen" in pre else None,
        "pre_tokenizer": PUBLISHED[pre],
        "post_processor": None,
        "decoder": level(True),
        "model": {
            "type": "BPE",
            "vocab": json.loads(vocab),
            "merges": pairs,
            "ignore_merges": whole,
        },
    }
    return Library.from_str(json.dumps(data))


def load(said: dict[str, Any]) -> Tokenizer:
    return needed(Tokenizer.from_files(tokenizer_files(said)[0], {}))


@pytest.mark.parametrize("pre", PRE)
def test_byte_level_is_the_published_tokenizer(pre: str) -> None:
    ours, theirs = load(byte_level(pre)), reference(pre)
    for text in HARD:
        ids = theirs.encode(text).ids
        assert ours.encode(text) == ids, text
        for skip in (True, False):
            wanted = theirs.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special=skip) == wanted


def llama(**more: Any) -> dict[str, Any]:
    texts, scores, kinds = (list(each) for each in zip(*tiny.llama_pieces(), strict=True))
    said = dict(model="llama", tokens=texts, scores=scores, token_type=kinds)
    said |= dict(bos_token_id=1, eos_token_id=2, unknown_token_id=0)
    return {KEY + key: value for key, value in {**said, **more}.items()}


@pytest.mark.parametrize("prefix", [True, False])
def test_sentence_piece_is_the_library_itself(prefix: bool) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    data = tiny.proto(list(tiny.llama_pieces()), 2, squeeze=False, prefix=prefix)
    # The switch that makes the library fall back to bytes; two parts of a message are joined.
    data += tiny.field(2, tiny.field(35, 1))
    theirs = sentencepiece.SentencePieceProcessor(model_proto=data)
    ours = load(llama(add_space_prefix=prefix))
    for text in HARD:
        # The library takes control tokens for text, and does not know that a NUL is a character.
        if any(token in text for token in ("<s>", "\0")):
            continue
        ids = theirs.encode(text)
        assert ours.encode(text) == [1, *ids], text
        assert ours.decode([1, *ids]) == theirs.decode(ids) == text


def test_special_tokens_around_a_text_are_those_that_the_file_asks_for() -> None:
    assert load(llama()).encode("a", special=True)[0] == 1
    assert load(llama(add_bos_token=False)).encode("a") == load(llama()).encode("a")[1:]
    assert load(llama(add_eos_token=True)).encode("a")[-1] == 2
    # Llama 3 begins with a token unless the file says no, Qwen does not.
    said = byte_level("llama-bpe")
    del said[KEY + "add_bos_token"]
    assert load(said).encode("a")[0] == 0
    assert load({**said, KEY + "pre": "qwen2"}).encode("a")[0] != 0


def test_transformers_reads_the_files_and_gives_the_same_ids(tmp_path: Path) -> None:
    import transformers

    template = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    said = byte_level("qwen2", padding_token_id=0, eot_token_id=1)
    for more in (said, llama()):
        more["tokenizer.chat_template"] = template
        files, notices = tokenizer_files(more)
        assert notices == []
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        ours = needed(Tokenizer.from_folder(tmp_path))
        assert theirs.bos_token_id == ours.special.bos == more[KEY + "bos_token_id"]
        assert theirs.eos_token_id == more[KEY + "eos_token_id"]
        assert theirs.chat_template == template == ours.templates["default"]
        for text in HARD:
            assert theirs(text)["input_ids"] == ours.encode(text), text
            assert theirs.decode(ours.encode(text)) == ours.decode(
                ours.encode(text), skip_special=False
            )
    # A second template has a name.
    named = {**said, "tokenizer.chat_template.tool": "x", "tokenizer.chat_templates": ["tool"]}
    assert load(named).templates == {"default": template, "tool": "x"}
    # Both ends of an answer end it.
    assert load(said).special.eos == (2, 1)


def test_what_is_not_known_is_said() -> None:
    for said, what in (
        ({KEY + "model": "bert"}, "'bert', which cannot be built (known: gpt2, llama)"),
        (byte_level("falcon"), "'falcon', which cannot be built (known: gpt-2, llama-bpe"),
        ({}, "no tokenizer"),
    ):
        files, (notice,) = tokenizer_files(said)
        assert files == {} and what in notice
    files, (notice,) = tokenizer_files({**byte_level(None), "general.architecture": "qwen2"})
    assert "qwen2 is assumed" in notice
    assert files == tokenizer_files(byte_level("qwen2"))[0]


@pytest.mark.parametrize(
    "said, message",
    [
        (llama(tokens=[]), "tokens has 0 entries"),
        (llama(tokens=[1, 2]), "must be a list of str"),
        (llama(token_type=[1]), "token_type 1"),
        (llama(scores=[1.0]), "scores has 1 entries"),
        (llama(bos_token_id=10**6), "bos_token_id is 1000000"),
        (llama(bos_token_id="x"), "bos_token_id is 'x'"),
        (llama(tokens=["a", "b", "a"], token_type=[1, 1, 1]), "'a' twice"),
        (byte_level("gpt-2", merges=["no such"]), "do not make a tokenizer"),
        (byte_level("gpt-2", merges=["x"]), "do not make a tokenizer"),
        (byte_level("gpt-2", merges=3), "must be a list of str"),
    ],
)
def test_broken_metadata_gives_a_sentence(said: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        tokenizer_files(said)
