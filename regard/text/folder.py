"""What a model folder says beside the tokenizer itself: its kind, the special tokens and their ids, chat templates.

Read from the files that the folder carries (name -> bytes); the ids also without any tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from regard.errors import UsageError
from regard.files import loads

Files = Mapping[str, bytes]
Settings = dict[str, Any]

END = "<|endoftext|>"
_FAIRSEQ = dict(
    bos="<s>", eos="</s>", sep="</s>", cls="<s>", unk="<unk>", pad="<pad>", mask="<mask>"
)
_BERT = dict(unk="[UNK]", sep="[SEP]", pad="[PAD]", cls="[CLS]", mask="[MASK]")
# style of tokenizer -> the strings that its class has by default
STYLES: dict[str, dict[str, str]] = {
    "gpt2": dict(bos=END, eos=END, unk=END),
    "qwen2": dict(eos=END, unk=END, pad=END),
    "roberta": _FAIRSEQ,
    "bert": _BERT,
    "t5": dict(eos="</s>", unk="<unk>", pad="<pad>"),
    "llama": dict(bos="<s>", eos="</s>", unk="<unk>"),
    "xlmroberta": _FAIRSEQ,
    "marian": dict(eos="</s>", unk="<unk>", pad="<pad>"),
}
_SAME_AS = dict(bart="roberta", distilbert="bert", qwen3="qwen2", mistral="llama", mixtral="llama")
_GENERAL = ("", "pretrained", "tokenizersbackend", "auto")


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


def read_json(files: Files, name: str) -> Settings:
    """The table in a JSON file of the folder; empty where there is no such file."""
    if name not in files:
        return {}
    try:
        data = loads(files[name])
    except (ValueError, RecursionError) as e:
        raise UsageError(f"{name} is not JSON: {e}") from None
    if not isinstance(data, dict):
        raise UsageError(f"{name} must hold a table {{...}}, got {type(data).__name__}")
    return data


def content(token: Any) -> str | None:
    """The string of a token that is written as a string or as a table with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def style(settings: Settings, config: Settings) -> tuple[str | None, str]:
    """(row of STYLES or None, what the folder calls it), by tokenizer_class, then by model_type."""
    class_name = settings.get("tokenizer_class") or config.get("tokenizer_class") or ""
    name = str(class_name).removesuffix("Fast").removesuffix("Tokenizer").lower()
    if name in _GENERAL:
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
    tables = [
        (read_json(files, "generation_config.json"), "generation_config.json"),
        (config or read_json(files, "config.json"), "config.json"),
        (tokens or {}, "the tokenizer"),
    ]

    def first(name: str) -> tuple[int, ...]:
        for table, where in tables:
            ids = _ids(table.get(name), f"{where}: {name}")
            if ids:
                return ids
        return ()

    def one(name: str) -> int | None:
        return next(iter(first(name)), None)

    return Special(
        bos=one("bos_token_id"),
        eos=first("eos_token_id"),
        pad=one("pad_token_id"),
        unk=one("unk_token_id"),
        start=one("decoder_start_token_id"),
    )


def _ids(value: Any, where: str) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(v, bool) or not isinstance(v, int) for v in values):
        raise UsageError(f"{where} must be an id or a list of ids, got {value!r}")
    # -1 is how some folders write "none".
    return tuple(v for v in values if v >= 0)


def templates(files: Files, settings: Settings) -> dict[str, str]:
    """Chat templates by name ("default" is the usual one): chat_template.jinja before the JSON files."""
    given = settings.get("chat_template")
    if given is None:
        given = read_json(files, "chat_template.json").get("chat_template")
    if isinstance(given, list):
        given = {t.get("name"): t.get("template") for t in given if isinstance(t, dict)}
    sources = given if isinstance(given, dict) else {} if given is None else {"default": given}
    if "chat_template.jinja" in files:
        try:
            sources = {**sources, "default": files["chat_template.jinja"].decode("utf-8")}
        except UnicodeDecodeError as e:
            raise UsageError(f"chat_template.jinja is not UTF-8: {e}") from None
    for name, source in sources.items():
        if not isinstance(name, str) or not isinstance(source, str):
            raise UsageError(
                f"tokenizer_config.json: chat_template must be text, or a list of {{name, template}}, got {given!r:.80}"
            )
    return sources
