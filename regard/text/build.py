"""What the files of a model folder (name -> bytes) say: the `tokenizers` object(s) that do the work, built as
transformers builds them, the special tokens and their ids, chat templates.

tokenizer.json as it is; else from what older folders carry: vocab.json + merges.txt, vocab.txt, SentencePiece models.
"""

from __future__ import annotations

import importlib
import json
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from regard.errors import ENVIRONMENT, Fault, UsageError
from regard.files import json_object

Files = Mapping[str, bytes]
Settings = dict[str, Any]

SPACE = "▁"
END = "<|endoftext|>"
_FAIRSEQ = dict(
    bos="<s>", eos="</s>", sep="</s>", cls="<s>", unk="<unk>", pad="<pad>", mask="<mask>"
)
# Style of tokenizer -> the strings that its class has by default.
STYLES: dict[str, dict[str, str]] = {
    "gpt2": dict(bos=END, eos=END, unk=END),
    "qwen2": dict(eos=END, unk=END, pad=END),
    "roberta": _FAIRSEQ,
    "bert": dict(unk="[UNK]", sep="[SEP]", pad="[PAD]", cls="[CLS]", mask="[MASK]"),
    "t5": dict(eos="</s>", unk="<unk>", pad="<pad>"),
    "llama": dict(bos="<s>", eos="</s>", unk="<unk>"),
    "xlmroberta": _FAIRSEQ,
    "marian": dict(eos="</s>", unk="<unk>", pad="<pad>"),
}
_SAME_AS = dict(bart="roberta", distilbert="bert", qwen3="qwen2", mistral="llama", mixtral="llama")
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
WANTED = (
    "tokenizer.json, or vocab.json and merges.txt, or vocab.txt, or a SentencePiece file (spiece.model, "
    "tokenizer.model, sentencepiece.bpe.model), or source.spm, target.spm and vocab.json"
)
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Times that a tokenizer's replacements may lengthen a text.
GROWTH = 256
# SentencePiece: kinds of models and of pieces.
UNIGRAM, BPE = 1, 2
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


@contextmanager
def blaming(what: str) -> Iterator[None]:
    """Whatever the library cannot take is the file's fault; it raises plain exceptions, and panics on some input."""
    try:
        yield
    except UsageError:
        raise
    except BaseException as e:
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
            raise
        raise UsageError(f"{what}: {e}") from None


def check_unicode(text: str, what: str) -> None:
    """Half a surrogate pair is a string in Python but not Unicode text."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise UsageError(
            f"{what} holds half a surrogate pair (U+{ord(text[e.start]):04X} at character {e.start}), which is not "
            f"Unicode text; replace it: text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')"
        ) from None


def read_json(files: Files, name: str) -> Settings:
    """The table in a JSON file of the folder; empty where there is no such file."""
    return json_object(files[name], name) if name in files else {}


def read_text(files: Files, name: str) -> str:
    with blaming(f"{name} is not UTF-8"):
        return files[name].decode("utf-8")


def content(token: Any) -> str | None:
    """The string of a token that is written as a string or as a table with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def style(settings: Settings, config: Settings) -> tuple[str | None, str]:
    """(row of STYLES or None, what the folder calls it), by tokenizer_class, then by model_type."""
    class_name = settings.get("tokenizer_class") or config.get("tokenizer_class") or ""
    name = str(class_name).removesuffix("Fast").removesuffix("Tokenizer").lower()
    if name in ("", "pretrained", "tokenizersbackend", "auto"):
        class_name = config.get("model_type") or ""
        name = str(class_name).replace("-", "").replace("_", "").lower()
    name = _SAME_AS.get(name, name)
    return (name if name in STYLES else None), str(class_name)


def names(
    files: Files, settings: Settings, kind: str | None, known: Callable[[str], Any]
) -> Settings:
    """{"bos_token": "<s>", ...}: what the folder says, then what the class has by default and the vocabulary knows."""
    tokens = {f"{name}_token": text for name, text in STYLES.get(kind or "", {}).items()}
    tokens = {name: text for name, text in tokens.items() if known(text) is not None}
    for table in (read_json(files, "special_tokens_map.json"), settings):
        for name, token in table.items():
            text = content(token)
            if name.endswith("_token") and not name.startswith("add_") and text is not None:
                tokens[name] = text
            elif name in tokens and token is None:
                # null: this model has none.
                del tokens[name]
    return tokens


@dataclass(frozen=True)
class Special:
    """Ids with a meaning; eos may be several, None is what the folder does not name. `start` begins
    what a decoder writes."""

    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None
    unk: int | None = None
    start: int | None = None


def special_ids(
    files: Files, config: Settings | None = None, tokens: Settings | None = None
) -> Special:
    """By generation_config.json, then config.json, then the tokenizer (`tokens`: name -> id)."""
    tables = {
        "generation_config.json": read_json(files, "generation_config.json"),
        "config.json": config or read_json(files, "config.json"),
        "the tokenizer": tokens or {},
    }

    def first(name: str) -> tuple[int, ...]:
        for where, table in tables.items():
            value = table.get(name)
            ids = value if isinstance(value, list) else [] if value is None else [value]
            if not all(type(i) is int for i in ids):
                raise UsageError(f"{where}: {name} must be an id or a list of ids, got {value!r}")
            # -1 is how some folders write "none".
            if ids := [i for i in ids if i >= 0]:
                return tuple(ids)
        return ()

    names = ("bos", "pad", "unk", "decoder_start")
    bos, pad, unk, start = (next(iter(first(f"{name}_token_id")), None) for name in names)
    return Special(bos, first("eos_token_id"), pad, unk, start)


def templates(files: Files, settings: Settings) -> dict[str, str]:
    """Chat templates by name ("default" is the usual one): chat_template.jinja before the JSON files."""
    given = settings.get("chat_template")
    if given is None:
        given = read_json(files, "chat_template.json").get("chat_template")
    if isinstance(given, list):
        given = {t.get("name"): t.get("template") for t in given if isinstance(t, dict)}
    sources = given if isinstance(given, dict) else {} if given is None else {"default": given}
    if "chat_template.jinja" in files:
        sources = {**sources, "default": read_text(files, "chat_template.jinja")}
    for name, source in sources.items():
        if not isinstance(name, str) or not isinstance(source, str):
            raise UsageError(
                f"tokenizer_config.json: chat_template must be text, or a list of {{name, template}}, got {given!r:.80}"
            )
    return sources


# --- files -> a tokenizer --------------------------------------------------------------------------------------------


@dataclass
class Parts:
    """`core` knows every id. Marian cuts source and target text by two more, whose pieces `core` then numbers."""

    core: tokenizers.Tokenizer
    # A row of STYLES.
    kind: str | None = None
    source: tokenizers.Tokenizer | None = None
    target: tokenizers.Tokenizer | None = None


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
    general = not class_name or class_name.startswith(("PreTrained", "TokenizersBackend"))
    if kind is None and not general:
        raise UsageError(
            f"the folder's tokenizer is of class {class_name!r}, which Regard cannot build from these files; known: "
            f"{', '.join(STYLES)}. Save it with transformers (tokenizer.save_pretrained) to get a tokenizer.json"
        )
    several = {"marian": "source.spm target.spm vocab.json", "gpt2": "vocab.json merges.txt"}
    needed = several.get(guess, "").split()
    have, missing = ([n for n in needed if (n in files) is there] for there in (True, False))
    if missing:
        raise UsageError(
            f"the folder has {' and '.join(have)}, but no {missing[0]}; a tokenizer is {WANTED}"
        )
    if guess == "marian":
        return _marian(files, settings)
    if guess == "gpt2":
        return _byte_level(files, settings, kind)
    if guess == "bert":
        return Parts(_word_piece(files, settings), "bert")
    file = next(name for name in _BY_FILE if name in files)
    return Parts(_sentence_piece(files[file], file, settings, kind or guess), kind or guess)


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


def _vocab(files: Files) -> dict[str, int]:
    vocab = read_json(files, "vocab.json")
    if not vocab or not all(type(i) is int and 0 <= i < 2**31 for i in vocab.values()):
        raise UsageError("vocab.json must hold a table of token: id")
    return vocab


def _byte_level(files: Files, settings: Settings, kind: str | None) -> Parts:
    """Byte-level BPE of GPT-2, RoBERTa / BART and Qwen."""
    vocab = _vocab(files)
    kind = kind or ("roberta" if {"<s>", "</s>"} <= set(vocab) else "gpt2")
    lines = read_text(files, "merges.txt").replace("\r\n", "\n").split("\n")
    merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    prefix = bool(settings.get("add_prefix_space", False))
    qwen: dict[str, Any] = dict(pattern=QWEN_WORDS, composed=True) if kind == "qwen2" else {}
    core = byte_level(vocab, merges, "vocab.json and merges.txt", prefix=prefix, **qwen)
    if kind == "roberta":
        last, first = _known(core, settings, sep="</s>", cls="<s>")
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
    lines = read_text(files, "vocab.txt").removesuffix("\n").split("\n")
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
    core.post_processor = around(*_known(core, settings, cls="[CLS]", sep="[SEP]"))
    return core


def around(first: tuple[str, int] | None, last: tuple[str, int] | None) -> Any:
    """The post-processor that puts a token before the text, behind it, or both."""
    used = [token for token in (first, last) if token]
    single = [*([first[0]] if first else []), "$A", *([last[0]] if last else [])]
    with blaming(f"cannot put {used} around a text"):
        return processors.TemplateProcessing(single=single, special_tokens=used)


def _known(core: tokenizers.Tokenizer, settings: Settings, **defaults: str) -> list[Any]:
    """Special tokens with their ids, by name; those that the settings name before the usual ones."""
    texts = {name: content(settings.get(f"{name}_token")) or defaults[name] for name in defaults}
    for name, text in texts.items():
        if core.token_to_id(text) is None:
            raise UsageError(
                f"the vocabulary has no {name} token {text!r}; name the right one in tokenizer_config.json"
            )
    return [(text, core.token_to_id(text)) for text in texts.values()]


# --- SentencePiece ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SentencePiece:
    """What a SentencePiece file says: of each piece, in the order of ids, its text, score and kind; and how text is
    prepared for them."""

    texts: Sequence[str]
    scores: Sequence[float]
    kinds: Sequence[int]
    model: int = UNIGRAM
    unk: int = 0
    charsmap: bytes = b""
    # A space is put before the text; runs of spaces become one, those at the ends go.
    prefix: bool = True
    squeeze: bool = True


def read_sentencepiece(data: bytes, name: str) -> SentencePiece:
    """The content of a .model or .spm file."""
    try:
        from google.protobuf.message import DecodeError

        schema: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    except ModuleNotFoundError:
        raise Fault(
            f"{name} is read by the package sentencepiece; pip install 'regard[sentencepiece]', or put the model's "
            "tokenizer.json into the folder",
            ENVIRONMENT,
        ) from None
    try:
        proto = schema.ModelProto.FromString(data)
    except DecodeError as e:
        raise _no_sentencepiece(name, e) from None
    kinds = [p.type for p in proto.pieces]
    model = proto.trainer_spec.model_type
    if not kinds:
        raise _no_sentencepiece(name, "it holds no pieces")
    if model not in (UNIGRAM, BPE):
        raise _no_sentencepiece(name, f"model type {model}, known are unigram (1) and BPE (2)")
    if UNKNOWN not in kinds:
        raise _no_sentencepiece(name, "it has no piece for the unknown")
    return SentencePiece(
        [p.piece for p in proto.pieces],
        [p.score for p in proto.pieces],
        kinds,
        model,
        unk=kinds.index(UNKNOWN),
        charsmap=proto.normalizer_spec.precompiled_charsmap,
        prefix=proto.normalizer_spec.add_dummy_prefix,
        squeeze=proto.normalizer_spec.remove_extra_whitespaces,
    )


def _no_sentencepiece(name: str, why: object) -> UsageError:
    return UsageError(
        f"{name} is not a SentencePiece model ({why}); put a tokenizer.json into the folder instead"
    )


def _sentence_piece(data: bytes, file: str, settings: Settings, kind: str) -> tokenizers.Tokenizer:
    """Llama's BPE, T5's and XLM-R's unigram model; T5 and XLM-R number some tokens that the file does not have."""
    model = read_sentencepiece(data, file)
    scores = list(zip(model.texts, model.scores))
    unk = model.unk
    if kind == "t5":
        extra = settings.get("extra_ids", 100)
        if type(extra) is not int or not 0 <= extra <= 100_000:
            raise UsageError(f"tokenizer_config.json: extra_ids is {extra!r}, not a small number")
        scores += [(f"<extra_id_{i}>", 0.0) for i in reversed(range(extra))]
    elif kind == "xlmroberta":
        ends = [(text, 0.0) for text in ("<s>", "<pad>", "</s>", "<unk>")]
        scores = [*ends, *scores[3:], ("<mask>", 0.0)]
        unk = 3
    core = cutter(model, scores, unk, file)
    prefix = model.prefix and settings.get("add_prefix_space") is not False
    if model.model == BPE:
        scheme = ("always" if settings.get("legacy", False) else "first") if prefix else "never"
        core.pre_tokenizer = _metaspace(scheme)
        core.decoder = piece_decoder(prefix)
    else:
        for step in _charsmap(model, file):
            core.normalizer = step
        scheme = "always" if prefix else "never"
        words = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme)
        core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), words])
        core.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme=scheme)
    core.add_tokens(declared(model.texts, model.kinds))
    if kind == "t5":
        core.add_special_tokens([text for text, _ in scores[len(model.texts) :]])
        core.post_processor = around(None, _known(core, settings, eos="</s>")[0])
    elif kind == "xlmroberta":
        core.post_processor = around(*_known(core, settings, bos="<s>", eos="</s>"))
    elif kind == "llama" and not {"add_bos_token", "add_eos_token"} & set(settings):
        core.post_processor = around(_known(core, settings, bos="<s>")[0], None)
    return core


def _charsmap(model: SentencePiece, file: str) -> list[Any]:
    """The normaliser that the file brings, if it does."""
    with blaming(f"{file} has a normaliser that cannot be read"):
        return [normalizers.Precompiled(model.charsmap)] if model.charsmap else []


def _metaspace(scheme: str) -> Any:
    return pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=False)


def cutter(
    model: SentencePiece, scores: list[tuple[str, float]], unk: int, file: str
) -> tokenizers.Tokenizer:
    """The model that cuts prepared text into pieces; with byte pieces <0x00> ... <0xFF>, characters without a piece
    are spelt in them."""
    spelt = BYTE in model.kinds
    with blaming(f"{file} does not make a tokenizer"):
        if model.model == UNIGRAM:
            return tokenizers.Tokenizer(models.Unigram(scores, unk, spelt))
        vocab = {text: i for i, (text, _) in enumerate(scores)}
        how: Any = dict(unk_token=scores[unk][0], fuse_unk=True, byte_fallback=spelt)
        return tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=_merges(model, vocab), **how))


def _merges(model: SentencePiece, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Every cut of a piece into two pieces, best score first: SentencePiece merges whatever makes the best piece."""
    merges = []
    for i, (text, score, kind) in enumerate(zip(model.texts, model.scores, model.kinds)):
        if kind in (NORMAL, USER_DEFINED):
            cuts = [(text[:k], text[k:]) for k in range(1, len(text))]
            known = [(a, b) for a, b in cuts if a in vocab and b in vocab]
            merges += [(-score, i, len(a), len(b), a, b) for a, b in known]
    return [(a, b) for *_, a, b in sorted(merges)]


def piece_decoder(prefix: bool) -> Any:
    """Pieces of SentencePiece -> text, without the space that was put before it."""
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence(steps + [decoders.Strip(content=" ", left=1)] * prefix)


def declared(
    texts: Iterable[str], kinds: Iterable[int], special: Collection[int] = ()
) -> list[AddedToken]:
    """Tokens that text never makes by merging (control, and the `special` ids), or always is where it spells them
    (user-defined)."""
    return [
        AddedToken(text, normalized=False, special=kind == CONTROL or i in special)
        for i, (text, kind) in enumerate(zip(texts, kinds, strict=True))
        if kind in (CONTROL, USER_DEFINED) or i in special
    ]


def _marian(files: Files, settings: Settings) -> Parts:
    """Two SentencePiece models cut source and target text; vocab.json numbers the pieces of both."""
    if settings.get("separate_vocabs"):
        raise UsageError("separate_vocabs in tokenizer_config.json is not supported; give ids")
    vocab = _vocab(files)
    if "<unk>" not in vocab or "</s>" not in vocab:
        raise UsageError("vocab.json lacks '<unk>' or '</s>', which every Marian vocabulary has")
    with blaming("vocab.json does not make a tokenizer"):
        core = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    ends = [text for text in STYLES["marian"].values() if text in vocab]
    core.add_special_tokens(ends)
    core.decoder = piece_decoder(False)
    source, target = (_side(files[name], name, ends) for name in ("source.spm", "target.spm"))
    return Parts(core, "marian", source, target)


def _side(data: bytes, name: str, ends: list[str]) -> tokenizers.Tokenizer:
    """Text into pieces as SentencePiece itself does it."""
    model = read_sentencepiece(data, name)
    spelt = {t for t, kind in zip(model.texts, model.kinds) if kind not in (UNKNOWN, CONTROL)}
    texts = [text if text in spelt else unreachable() for text in model.texts]
    scores = list(zip(texts, model.scores))
    side = cutter(model, scores, model.unk, name)
    ends_and_runs = ((r"\A +| +\z", ""), (" {2,}", " ")) if model.squeeze else ()
    squeezed = [normalizers.Replace(Regex(spaces), to) for spaces, to in ends_and_runs]
    side.normalizer = normalizers.Sequence(_charsmap(model, name) + squeezed)
    side.pre_tokenizer = _metaspace("always" if model.prefix else "never")
    side.add_tokens([t for t in declared(model.texts, model.kinds) if not t.special])
    side.add_special_tokens(ends)
    return side
