"""A training run as a TOML file: what to learn, which model, which data, how. Unknown keys name the nearest known one.

task = "lm"
[model]
preset = "gpt2"          # or folder = "a model folder"; every other key changes a setting of it
layers = 4
[data]
train = "story.txt"      # relative to this file
held = 0.1
length = 128
rows = 16
[tokenizer]
kind = "chars"           # or folder = "a folder with tokenizer.json"
[train]
steps = 300
optim = { lr = 1e-3 }
[adapt]
method = "lora"          # with a model folder: full (the default), frozen or lora
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from regard.config import UsageError, from_dict, nearest
from regard.train import objective
from regard.train.adapt import Adapt
from regard.train.batch import Feed, Objective
from regard.train.corrupt import Corrupted, DrawPrefix, Infill, Marks, MaskTokens, Spans
from regard.train.data import Data
from regard.train.head import NONE, Smoothing
from regard.train.trainer import Train

# task -> how its data is read, its objective, how batches are corrupted
TASKS: dict[str, tuple[str, Callable[..., Any], Callable[[Marks], Any] | None]] = {
    "lm": ("lm", objective.causal, None),
    "prefix": ("lm", objective.prefix, lambda marks: DrawPrefix()),
    "mlm": ("mlm", objective.masked, MaskTokens),
    "spans": ("mlm", objective.seq2seq, Spans),
    "infill": ("mlm", objective.seq2seq, Infill),
    "seq2seq": ("seq2seq", objective.seq2seq, None),
    "classify": ("classify", objective.classify, None),
    "tag": ("tag", objective.tag, None),
    "answer": ("answer", objective.answer, None),
    "image": ("image", objective.classify, None),
}


@dataclass(frozen=True)
class Config:
    """`model` has a preset or a folder, and changes; `tokenizer` a folder, or what regard.text's Recipe takes."""

    task: str
    data: Data
    model: dict[str, Any]
    tokenizer: dict[str, Any] = field(default_factory=dict)
    train: Train = field(default_factory=Train)
    smoothing: Smoothing = NONE
    adapt: Adapt = Adapt()

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise UsageError(f"task = {self.task!r} is unknown; {nearest(self.task, TASKS)}")
        if ("preset" in self.model) == ("folder" in self.model):
            raise UsageError('[model] needs one of preset = "gpt2" (or another) and folder = "..."')
        if self.smoothing != NONE and self.task == "answer":
            raise UsageError("label smoothing is not used for spans of an answer; leave it out")
        if self.adapt.method != "full" and "folder" not in self.model:
            raise UsageError(
                f'adapt.method = "{self.adapt.method}" is for a trained model: name one, [model] folder = "..."'
            )

    @property
    def objective(self) -> Objective:
        loss = TASKS[self.task][1]
        return loss if self.smoothing == NONE else partial(loss, smoothing=self.smoothing)

    def fed(self, feed: Feed, marks: Marks | None) -> Feed:
        """The feed as the task wants it."""
        corruption = TASKS[self.task][2]
        if corruption is None:
            return feed
        assert marks is not None
        return Corrupted(feed, corruption(marks), self.train.seed)


def read(path: Path, changes: Mapping[str, str] | None = None) -> Config:
    """A config file, with dotted settings changed: {"train.optim.lr": "3e-4"}."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is no TOML: {error}") from None
    data = _plain(data)
    for name, text in (changes or {}).items():
        _put(data, name.replace("-", "_").split("."), _value(text), name)
    config = from_dict(Config, data, path.name)
    folder = config.model.get("folder")
    model = config.model if folder is None else {**config.model, "folder": _under(path, folder)}
    words = config.tokenizer
    if "folder" in words:
        words = {**words, "folder": _under(path, words["folder"])}
    return replace(config, data=config.data.under(path.parent), model=model, tokenizer=words)


def _under(path: Path, folder: Any) -> str:
    if not isinstance(folder, str):
        raise UsageError(f"{path.name}: folder = {folder!r}; give the name of a folder")
    return str(path.parent / folder)


def _plain(data: Any) -> Any:
    """kebab-case keys are snake_case here."""
    if not isinstance(data, dict):
        return data
    return {key.replace("-", "_"): _plain(value) for key, value in data.items()}


def _value(text: str) -> Any:
    """A value as TOML has it; what is none is a text."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


def _put(data: dict[str, Any], names: list[str], value: Any, whole: str) -> None:
    for name in names[:-1]:
        data = data.setdefault(name, {})
        if not isinstance(data, dict):
            raise UsageError(f"--{whole}: {name} is a value, not a table")
    data[names[-1]] = value
