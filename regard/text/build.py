"""Files of a model folder -> the `tokenizers` object(s) that do the work, built as transformers builds them.

tokenizer.json as it is; else from what older folders carry: vocab.json + merges.txt, vocab.txt, SentencePiece models.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from regard.errors import UsageError
from regard.text import spm
from regard.text.folder import STYLES, Files, Settings, blaming, content, read_json

SPACE = "▁"
WANTED = """tokenizer.json, or vocab.json and merges.txt, or vocab.txt, or a SentencePiece file (spiece.model,
tokenizer.model, sentencepiece.bpe.model), or source.spm, target.spm and vocab.json""".replace(
    "\n", " "
)
_BY_FILE = {
    "source.spm": "marian",
    "target.spm": "marian",
    "vocab.json": "gpt2",
    "merges.txt": "gpt2",
    "vocab.txt": "bert",
    "spiece.model": "t5",
    "tokenizer.model": "llama",
    "sentencepiece.bpe.model": "xlmroberta",
}
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def unreachable() -> str:
    """A name for a piece that no text spells."""
    return f"\ufdd0{secrets.token_hex(8)}"


def plain_copy(core: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A copy that finds no special token in a text. A unigram model would still find those of its own vocabulary."""
    data = json.loads(core.to_str())
    if data["model"]["type"] == "Unigram":
        vocab = data["model"]["vocab"]
        for token in data["added_tokens"]:
            if token["special"]:
                token["content"] = unreachable()
                if token["id"] < len(vocab):
                    vocab[token["id"]][0] = token["content"]
    copy = tokenizers.Tokenizer.from_str(json.dumps(data))
    copy.encode_special_tokens = True
    return copy


GROWTH = 256  # times that a tokenizer's replacements may lengthen a text


@dataclass
class Parts:
    """`core` knows every id. Marian cuts source and target text by two more, whose pieces `core` then numbers."""

    core: tokenizers.Tokenizer
    # A row of STYLES.
    kind: str | None = None
    source: tokenizers.Tokenizer | None = None
    target: tokenizers.Tokenizer | None = None

    @property
    def trim(self) -> bool:
        """Decoded text has no white space at its ends."""
        return self.source is not None


def build(files: Files, settings: Settings, kind: str | None, class_name: str) -> Parts | None:
    """The tokenizer that the files describe; None where there is none. `kind` is the row of STYLES
    that the folder names (as `class_name`), else the files decide."""
    if "tokenizer.json" in files:
        with blaming("tokenizer.json cannot be read"):
            core = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode("utf-8"))
            _check_growth(core)
        core.no_truncation()
        core.no_padding()
        return Parts(core, kind)
    guess = next((how for name, how in _BY_FILE.items() if name in files), None)
    if guess is None:
        return None
    if (
        kind is None
        and class_name
        and not class_name.startswith(("PreTrained", "TokenizersBackend"))
    ):
        raise UsageError(
            f"the folder's tokenizer is of class {class_name!r}, which Regard cannot build from these files; known: "
            f"{', '.join(STYLES)}. Save it with transformers (tokenizer.save_pretrained) to get a tokenizer.json"
        )
    if guess == "marian":
        return _marian(_all(files, "source.spm", "target.spm", "vocab.json"), settings)
    if guess == "gpt2":
        return _byte_level(_all(files, "vocab.json", "merges.txt"), settings, kind)
    if guess == "bert":
        return Parts(_word_piece(files, settings), "bert")
    file = next(name for name in _BY_FILE if name in files)
    return Parts(_sentence_piece(files[file], file, settings, kind or guess), kind or guess)


def _check_growth(core: tokenizers.Tokenizer) -> None:
    """Replacements that follow each other multiply: a few of them could ask for more memory than
    there is, and the library would end the process."""
    for part in (core.normalizer, core.decoder):
        state = {} if part is None else json.loads(part.__getstate__())
        growth = 1.0
        for step in state.get("normalizers") or state.get("decoders") or [state]:
            if step.get("type") == "Replace":
                shortest = len(step["pattern"].get("String", "")) or 1
                growth *= max(1.0, len(step["content"]) / shortest)
        if growth > GROWTH:
            raise UsageError(
                f"the replacements of tokenizer.json could make a text {growth:,.0f} times as long, at most {GROWTH} "
                "are allowed; take a tokenizer from a source that you trust"
            )


def _all(files: Files, *needed: str) -> Files:
    missing = [name for name in needed if name not in files]
    if missing:
        have = " and ".join(name for name in needed if name in files)
        raise UsageError(f"the folder has {have}, but no {missing[0]}; a tokenizer is {WANTED}")
    return files


def _text(files: Files, name: str) -> str:
    with blaming(f"{name} is not UTF-8"):
        return files[name].decode("utf-8")


def _vocab(files: Files) -> dict[str, int]:
    vocab = read_json(files, "vocab.json")
    if not vocab or not all(type(i) is int and 0 <= i < 2**31 for i in vocab.values()):
        raise UsageError("vocab.json must hold a table of token: id")
    return vocab


def _byte_level(files: Files, settings: Settings, kind: str | None) -> Parts:
    """Byte-level BPE of GPT-2, RoBERTa / BART and Qwen."""
    vocab = _vocab(files)
    kind = kind or ("roberta" if {"<s>", "</s>"} <= set(vocab) else "gpt2")
    lines = _text(files, "merges.txt").replace("\r\n", "\n").split("\n")
    merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    prefix = bool(settings.get("add_prefix_space", False))
    core = byte_level(
        vocab,
        merges,
        "vocab.json and merges.txt",
        QWEN_WORDS if kind == "qwen2" else "",
        composed=kind == "qwen2",
        prefix=prefix,
    )
    if kind == "roberta":
        last, first = (_known(core, settings, n, t) for n, t in (("sep", "</s>"), ("cls", "<s>")))
        core.post_processor = processors.RobertaProcessing(last, first, True, prefix)
    return Parts(core, kind)


def byte_level(
    vocab: dict[str, int],
    merges: list[tuple[str, ...]],
    what: str,
    pattern: str = "",
    *,
    composed: bool = False,
    prefix: bool = False,
    digits: bool = False,
    whole: bool = False,
) -> tokenizers.Tokenizer:
    """Byte-level BPE. `pattern` cuts text into words, without one GPT-2's; `composed`: the text is put into NFC;
    `digits` are words of their own; `whole`: a word that is a token is taken as it is."""
    with blaming(f"{what} do not make a tokenizer"):
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=whole)  # type: ignore[arg-type]
    core = tokenizers.Tokenizer(model)
    if composed:
        core.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    if pattern:
        steps.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=not pattern))
    core.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    core.decoder = decoders.ByteLevel()
    return core


def _word_piece(files: Files, settings: Settings) -> tokenizers.Tokenizer:
    """WordPiece of BERT and DistilBERT; one token per line."""
    lines = _text(files, "vocab.txt").removesuffix("\n").split("\n")
    vocab = {line.rstrip("\r"): i for i, line in enumerate(lines)}
    unk = content(settings.get("unk_token")) or "[UNK]"
    with blaming("vocab.txt does not make a tokenizer"):
        core = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=unk))
    core.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=bool(settings.get("tokenize_chinese_chars", True)),
        strip_accents=settings.get("strip_accents"),
        lowercase=bool(settings.get("do_lower_case", True)),
    )
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece(prefix="##")
    first, last = (_known(core, settings, n, t) for n, t in (("cls", "[CLS]"), ("sep", "[SEP]")))
    core.post_processor = around(first, last)
    return core


def around(first: tuple[str, int] | None, last: tuple[str, int] | None) -> Any:
    """The post-processor that puts a token before the text, behind it, or both."""
    used = [token for token in (first, last) if token]
    single = [*([first[0]] if first else []), "$A", *([last[0]] if last else [])]
    with blaming(f"cannot put {used} around a text"):
        return processors.TemplateProcessing(single=single, special_tokens=used)


def _known(core: tokenizers.Tokenizer, settings: Settings, name: str, text: str) -> tuple[str, int]:
    text = content(settings.get(f"{name}_token")) or text
    index = core.token_to_id(text)
    if index is None:
        raise UsageError(
            f"the vocabulary has no {name} token {text!r}; name the right one in tokenizer_config.json"
        )
    return text, index


# --- SentencePiece ------------------------------------------------------------------------------------------------


def _sentence_piece(data: bytes, file: str, settings: Settings, kind: str) -> tokenizers.Tokenizer:
    """Llama's BPE, T5's and XLM-R's unigram model; T5 and XLM-R number some tokens that the file does not have."""
    model = spm.read(data, file)
    scores, unk = [(piece.text, piece.score) for piece in model.pieces], model.unk
    if kind == "t5":
        extra = _count(settings)
        scores += [(f"<extra_id_{i}>", 0.0) for i in reversed(range(extra))]
    elif kind == "xlmroberta":
        ends = [(text, 0.0) for text in ("<s>", "<pad>", "</s>", "<unk>")]
        scores, unk = [*ends, *scores[3:], ("<mask>", 0.0)], 3
    core = cutter(model, scores, unk, file)
    prefix = model.prefix and settings.get("add_prefix_space") is not False
    if model.model == spm.BPE:
        _as_llama(core, prefix, bool(settings.get("legacy", False)))
    else:
        if model.charsmap:
            with blaming(f"{file} has a normaliser that cannot be read"):
                core.normalizer = normalizers.Precompiled(model.charsmap)
        scheme = "always" if prefix else "never"
        words = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme)
        core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), words])
        core.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme=scheme)
    core.add_tokens(_declared(model))
    if kind == "t5":
        core.add_special_tokens([text for text, _ in scores[len(model.pieces) :]])
        core.post_processor = around(None, _known(core, settings, "eos", "</s>"))
    elif kind == "xlmroberta":
        first, last = (_known(core, settings, n, t) for n, t in (("bos", "<s>"), ("eos", "</s>")))
        core.post_processor = around(first, last)
    elif kind == "llama" and not {"add_bos_token", "add_eos_token"} & set(settings):
        core.post_processor = around(_known(core, settings, "bos", "<s>"), None)
    return core


def _count(settings: Settings) -> int:
    extra = settings.get("extra_ids", 100)
    if type(extra) is not int or not 0 <= extra <= 100_000:
        raise UsageError(f"tokenizer_config.json: extra_ids must be a small number, got {extra!r}")
    return extra


def cutter(
    model: spm.SentencePiece, scores: list[tuple[str, float]], unk: int, file: str
) -> tokenizers.Tokenizer:
    """The model that cuts prepared text into pieces."""
    with blaming(f"{file} does not make a tokenizer"):
        if model.model == spm.UNIGRAM:
            return tokenizers.Tokenizer(models.Unigram(scores, unk, model.bytes))
        vocab = {text: i for i, (text, _) in enumerate(scores)}
        return tokenizers.Tokenizer(
            models.BPE(
                vocab=vocab,
                merges=_merges(model, vocab),
                unk_token=scores[unk][0],
                fuse_unk=True,
                byte_fallback=model.bytes,
            )
        )


def _merges(model: spm.SentencePiece, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Every cut of a piece into two pieces, best score first: SentencePiece merges whatever makes the best piece."""
    merges = []
    for i, piece in enumerate(model.pieces):
        if piece.kind in (spm.NORMAL, spm.USER_DEFINED):
            text = piece.text
            cuts = [(text[:k], text[k:]) for k in range(1, len(text))]
            merges += [
                (-piece.score, i, len(a), len(b), a, b)
                for a, b in cuts
                if a in vocab and b in vocab
            ]
    return [(a, b) for *_, a, b in sorted(merges)]


def _as_llama(core: tokenizers.Tokenizer, prefix: bool, legacy: bool) -> None:
    scheme = ("always" if legacy else "first") if prefix else "never"
    core.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=SPACE, prepend_scheme=scheme, split=False
    )
    core.decoder = piece_decoder(prefix)


def piece_decoder(prefix: bool) -> Any:
    """Pieces of SentencePiece -> text, without the space that was put before it."""
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence(steps + [decoders.Strip(content=" ", left=1)] * prefix)


def _declared(model: spm.SentencePiece) -> list[AddedToken]:
    """Control pieces never come from text by merging, user-defined ones always are one piece."""
    return [
        AddedToken(piece.text, normalized=False, special=piece.kind == spm.CONTROL)
        for piece in model.pieces
        if piece.kind in (spm.CONTROL, spm.USER_DEFINED)
    ]


def _marian(files: Files, settings: Settings) -> Parts:
    """Two SentencePiece models cut source and target text; vocab.json numbers the pieces of both."""
    if settings.get("separate_vocabs"):
        raise UsageError(
            "separate_vocabs in tokenizer_config.json: two lists of ids are not known; give ids"
        )
    vocab = _vocab(files)
    if "<unk>" not in vocab or "</s>" not in vocab:
        raise UsageError(
            "vocab.json has no '<unk>' or no '</s>', which every Marian vocabulary has"
        )
    with blaming("vocab.json does not make a tokenizer"):
        core = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    ends = [text for text in STYLES["marian"].values() if text in vocab]
    core.add_special_tokens(ends)
    core.decoder = piece_decoder(False)
    source, target = (_side(files[name], name, ends) for name in ("source.spm", "target.spm"))
    return Parts(core, "marian", source, target)


def _side(data: bytes, name: str, ends: list[str]) -> tokenizers.Tokenizer:
    """Text into pieces as SentencePiece itself does it."""
    model = spm.read(data, name)
    spelt = {piece.text for piece in model.pieces if piece.kind not in (spm.UNKNOWN, spm.CONTROL)}
    scores = [(p.text if p.text in spelt else unreachable(), p.score) for p in model.pieces]
    side = cutter(model, scores, model.unk, name)
    steps: list[Any] = []
    if model.charsmap:
        with blaming(f"{name} has a normaliser that cannot be read"):
            steps.append(normalizers.Precompiled(model.charsmap))
    if model.squeeze:
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    side.normalizer = normalizers.Sequence(steps)
    scheme = "always" if model.prefix else "never"
    side.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=SPACE, prepend_scheme=scheme, split=False
    )
    side.add_tokens([token for token in _declared(model) if not token.special])
    side.add_special_tokens(ends)
    return side
