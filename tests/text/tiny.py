"""Tiny tokenizers of every kind, trained here in milliseconds, as the files that a model folder would carry."""

import json
import struct
from collections.abc import Callable
from functools import cache

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "Once upon a time there was a little dog who liked to play in the park with a ball.",
    "The dog said: don't stop! It's 12 o'clock, and I can't wait -- they've gone; we're here.",
    "Ein kleiner Hund läuft über die große Wiese, und zwei Männer sehen ihm dabei zu.",
    "Größe, Maß, Straße; für, über, schön. Der Hund spielt mit dem Ball im Park.",
    "Un chien joue déjà dans l'été; ça va bien, n'est-ce pas?",
    "שלום עולם  مرحبا بالعالم  你好，世界  안녕하세요  😀🎉  naïve café",
] * 4

TEXTS = [
    "Once upon a time",
    "",
    " ",
    "  two  spaces  ",
    "a\tb\nc\r\n d",
    "The dog's ball, isn't it? 1234",
    "Größe über straße",
    "👩‍👩‍👧 family 😀",
    "é vs e\u0301 and ﬁ ① ｆｕｌｌ",
    "שלום مرحبا 你好",
    "nul\0inside",
    "zero\u200bwidth \u00a0 nbsp \u3000 wide",
    "€ ☃ unknown",
    "<unk> </s> <s> [SEP] <|endoftext|> <mask> .",
]
FAIRSEQ = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]

Files = dict[str, bytes]


def dump(data: object) -> bytes:
    return json.dumps(data, ensure_ascii=False).encode()


@cache
def _byte_level(special: tuple[str, ...], size: int = 400) -> tuple[bytes, bytes]:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=list(special),
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    model = json.loads(core.to_str())["model"]
    merges = "#version: 0.2\n" + "".join(f"{' '.join(m)}\n" for m in model["merges"])
    return dump(model["vocab"]), merges.encode()


def byte_level(name: str, special: list[str], **settings: object) -> Files:
    vocab, merges = _byte_level(tuple(special))
    config = dump({"tokenizer_class": name, **settings})
    return {"vocab.json": vocab, "merges.txt": merges, "tokenizer_config.json": config}


def gpt2(**settings: object) -> Files:
    return byte_level("GPT2Tokenizer", ["<|endoftext|>"], **settings)


def roberta(**settings: object) -> Files:
    return byte_level("RobertaTokenizer", FAIRSEQ, **settings)


def qwen2(**settings: object) -> Files:
    return byte_level("Qwen2Tokenizer", ["<|endoftext|>"], **settings)


@cache
def _word_piece() -> bytes:
    core = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer(lowercase=False)
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    core.train_from_iterator(CORPUS, trainer)
    vocab = sorted(core.get_vocab().items(), key=lambda item: item[1])
    return "".join(token + "\n" for token, _ in vocab).encode()


def bert(**settings: object) -> Files:
    config = dump({"tokenizer_class": "BertTokenizer", **settings})
    return {"vocab.txt": _word_piece(), "tokenizer_config.json": config}


# --- SentencePiece files, written by hand -------------------------------------------------------------------------

Piece = tuple[
    str, float, int
]  # text, score, kind: 1 normal, 2 unknown, 3 control, 4 user-defined, 6 byte


def varint(n: int) -> bytes:
    out = b""
    n &= 2**64 - 1
    while n > 127:
        out, n = out + bytes([n & 127 | 128]), n >> 7
    return out + bytes([n])


def field(number: int, value: int | bytes | float) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def proto(pieces: list[Piece], model: int, *, prefix: bool = True, squeeze: bool = True) -> bytes:
    """A SentencePiece model; an id of -1 and a field that nobody reads are in it as in real ones.

    Who asks for one means to read it, which takes the package: without it the test is skipped."""
    for package in ("sentencepiece", "google.protobuf"):
        pytest.importorskip(package, reason="pip install 'regard[sentencepiece]'")
    out = b"".join(
        field(1, field(1, text.encode()) + field(2, score) + (field(3, kind) if kind != 1 else b""))
        for text, score, kind in pieces
    )
    out += field(2, field(3, model) + field(43, -1) + field(7, b"path"))
    return out + field(3, field(1, b"identity") + field(3, int(prefix)) + field(4, int(squeeze)))


@cache
def unigram_scores() -> tuple[tuple[str, float], ...]:
    core = Tokenizer(models.Unigram())
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(
            vocab_size=260, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
        ),
    )
    vocab = json.loads(core.to_str())["model"]["vocab"]
    return tuple((text, round(score, 4)) for text, score in vocab if text != "<unk>")


def t5_pieces() -> list[Piece]:
    ends: list[Piece] = [("<pad>", 0.0, 3), ("</s>", 0.0, 3), ("<unk>", 0.0, 2)]
    return ends + [(text, score, 1) for text, score in unigram_scores()]


def t5(**settings: object) -> Files:
    config = dump({"tokenizer_class": "T5Tokenizer", "extra_ids": 10, **settings})
    return {"spiece.model": proto(t5_pieces(), 1), "tokenizer_config.json": config}


def xlm_pieces() -> list[Piece]:
    ends: list[Piece] = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    return ends + [(text, score, 1) for text, score in unigram_scores()]


def xlm_roberta(**settings: object) -> Files:
    config = dump({"tokenizer_class": "XLMRobertaTokenizer", **settings})
    return {"sentencepiece.bpe.model": proto(xlm_pieces(), 1), "tokenizer_config.json": config}


@cache
def llama_pieces() -> tuple[Piece, ...]:
    """BPE in SentencePiece's way: the score is minus the rank, byte pieces stand in for unknown characters."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    vocab = sorted(core.get_vocab().items(), key=lambda item: (len(item[0]) == 1, item[1]))
    ends: list[Piece] = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    byte: list[Piece] = [(f"<0x{b:02X}>", 0.0, 6) for b in range(256)]
    return tuple(ends + byte + [(text, float(-i), 1) for i, (text, _) in enumerate(vocab)])


def llama(**settings: object) -> Files:
    config = dump({"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, **settings})
    return {
        "tokenizer.model": proto(list(llama_pieces()), 2, squeeze=False),
        "tokenizer_config.json": config,
    }


def marian(**settings: object) -> Files:
    """Two ways to cut: the target's lacks every fourth piece; vocab.json lacks every ninth, so the unknown occurs."""
    ends: list[Piece] = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    pieces: list[Piece] = [(text, score, 1) for text, score in unigram_scores()]
    target = [piece for i, piece in enumerate(pieces) if i % 4 or len(piece[0]) == 1]
    union = [
        "</s>",
        "<unk>",
        *(text for i, (text, _, _) in enumerate(pieces) if i % 9),
        ">>fr<<",
        "<pad>",
    ]
    return {
        "source.spm": proto(ends + pieces, 1),
        "target.spm": proto(ends + target, 1),
        "vocab.json": dump({text: i for i, text in enumerate(union)}),
        "tokenizer_config.json": dump({"tokenizer_class": "MarianTokenizer", **settings}),
    }


def suffix_bpe(**settings: object) -> Files:
    """BPE whose words end in </w>, as a tokenizer.json."""
    core = Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.decoder = decoders.BPEDecoder()
    core.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=300, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
        ),
    )
    return {"tokenizer.json": core.to_str().encode(), "tokenizer_config.json": dump(settings)}


def no_decoder(**settings: object) -> Files:
    files = suffix_bpe(**settings)
    return {
        **files,
        "tokenizer.json": dump({**json.loads(files["tokenizer.json"]), "decoder": None}),
    }


def odd_decoder(**settings: object) -> Files:
    """A decoder with a step that only the whole text decides."""
    files = suffix_bpe(**settings)
    steps = [
        {"type": "Fuse"},
        {"type": "Replace", "pattern": {"Regex": "</w>(?=.)"}, "content": " "},
        {"type": "Replace", "pattern": {"String": "</w>"}, "content": ""},
    ]
    decoder = {"type": "Sequence", "decoders": steps}
    return {
        **files,
        "tokenizer.json": dump({**json.loads(files["tokenizer.json"]), "decoder": decoder}),
    }


ALL: dict[str, Callable[..., Files]] = {
    "gpt2": gpt2,
    "roberta": roberta,
    "qwen2": qwen2,
    "bert": bert,
    "t5": t5,
    "xlm_roberta": xlm_roberta,
    "llama": llama,
    "marian": marian,
    "suffix_bpe": suffix_bpe,
    "no_decoder": no_decoder,
    "odd_decoder": odd_decoder,
}
