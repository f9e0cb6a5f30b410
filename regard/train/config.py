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

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

from regard.config import from_dict, to_dict
from regard.data.config import ROWED, Data
from regard.data.corrupt import Corrupted, Marks
from regard.data.feed import Feed, Objective
from regard.errors import VERSION, UsageError, nearest, notice
from regard.models import Model
from regard.train.adapt import Adapt, adapted
from regard.train.index import indexers
from regard.train.loss import NONE, Smoothing
from regard.train.tasks import TASKS
from regard.train.trainer import RENAMED, Train


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
        task = TASKS[self.task]
        if self.smoothing != NONE and not task.smoothed:
            raise UsageError(f"label smoothing is not used by the task {self.task}; leave it out")
        if task.reads in ROWED and not task.packed and self.data.pack == "documents":
            raise UsageError(
                f"the task {self.task} repairs whole rows, which documents cannot share: say data.pack = none or stream"
            )
        if task.indexed and self.adapt.method != "full":
            raise UsageError(f"the task {self.task} trains indexers; leave [adapt] out")
        if self.adapt.method != "full" and "folder" not in self.model:
            raise UsageError(
                f'adapt.method = "{self.adapt.method}" is for a trained model: name one, [model] folder = "..."'
            )

    @property
    def objective(self) -> Objective:
        loss = TASKS[self.task].objective
        return loss if self.smoothing == NONE else partial(loss, smoothing=self.smoothing)

    def learning(self, model: Model) -> Model:
        """The model with what does not learn frozen, and LoRA added, in place."""
        return indexers(model) if self.task == "dense_index" else adapted(model, self.adapt)

    def fed(self, feed: Feed, marks: Marks | None) -> Feed:
        """The feed as the task wants it."""
        corruption = TASKS[self.task].corruption
        if corruption is None:
            return feed
        assert marks is not None
        return Corrupted(feed, corruption(marks), self.train.seed)


# what settings are called elsewhere -> here
ELSEWHERE = {
    **dict.fromkeys(("lr", "learning_rate", "max_lr"), "train.optim.lr"),
    "weight_decay": "train.optim.decay",
    **dict.fromkeys(("optimizer", "optim_name"), "train.optim.name"),
    **dict.fromkeys(("warmup", "warmup_steps", "warmup_iters"), "train.schedule.warmup"),
    **dict.fromkeys(("lr_scheduler", "lr_scheduler_type", "scheduler"), "train.schedule.shape"),
    **dict.fromkeys(("max_steps", "max_iters", "iterations", "steps"), "train.steps"),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs", "max_epochs"), "train.epochs"),
    **dict.fromkeys(("eval_steps", "eval_interval", "eval_every"), "train.evaluate"),
    **dict.fromkeys(("save_steps", "save_interval", "save_every"), "train.save"),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "gradient_clip_val"), "train.clip"),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "accumulate_grad_batches"), "train.micro_batches"
    ),
    "gradient_checkpointing": "train.activation_checkpointing",
    **dict.fromkeys(
        ("batch_size", "batch", "per_device_train_batch_size", "micro_batch_size"), "data.rows"
    ),
    **dict.fromkeys(
        ("block_size", "max_length", "max_seq_length", "seq_len", "sequence_length"), "data.length"
    ),
    "label_smoothing": "smoothing.eps",
    "label_smoothing_factor": "smoothing.eps",
}


def _known(cls: type, data: dict[str, Any], where: str = "") -> None:
    """Name our setting where one is called as elsewhere; what is left is told by from_dict."""
    hints = get_type_hints(cls)
    for key, value in data.items():
        if key not in hints and key in ELSEWHERE:
            raise UsageError(f"{where}{key} is not a setting; here it is {ELSEWHERE[key]}")
        if isinstance(value, dict) and is_dataclass(hints.get(key)):
            _known(hints[key], value, f"{where}{key}.")


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
    return configure(data, changes, path)


def configure(
    tables: Mapping[str, Any], changes: Mapping[str, Any] | None = None, path: Path = Path("config")
) -> Config:
    """The tables of a config file as a config; folders and files are named from where `path` lies."""
    data: dict[str, Any] = _plain(dict(tables))
    for name, text in (changes or {}).items():
        _put(data, name.replace("-", "_").split("."), _value(text), name)
    train = data.get("train")
    if isinstance(train, dict):
        for old, new in RENAMED.items():
            if old in train and new in train:
                raise UsageError(f"train.{old} is now train.{new}, which is set too; leave it out")
            if old in train:
                notice(f"train.{old} is now train.{new}; the old name is still read")
                train[new] = train.pop(old)
        if {"steps", "epochs"} <= train.keys():
            raise UsageError("train.steps and train.epochs both say how long; leave one out")
    _known(Config, data)
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


def _value(text: Any) -> Any:
    """A value as TOML has it; what is none is a text."""
    if not isinstance(text, str):
        return text
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


# --- written --------------------------------------------------------------------------------------


def as_toml(config: Config) -> str:
    """Every setting of a run as a file that can be trained from anywhere: paths begin at the root."""
    here = Path.cwd()

    def placed(table: dict[str, Any]) -> dict[str, Any]:
        return {n: str(here / x) if n == "folder" else x for n, x in table.items()}

    model, tokenizer = placed(config.model), placed(config.tokenizer)
    whole = replace(config, data=config.data.under(here), model=model, tokenizer=tokenizer)
    return f"# regard {VERSION}: the settings of this run\n{toml(to_dict(whole))}\n"


def toml(config: Mapping[str, Any]) -> str:
    """Tables of settings as TOML; what is None has no line."""
    tables = {name: table for name, table in config.items() if isinstance(table, dict)}
    lines = _settings({name: x for name, x in config.items() if name not in tables})
    for name, table in tables.items():
        lines += ["", f"[{name}]", *_settings(table)]
    return "\n".join(lines)


def _settings(table: Mapping[str, Any]) -> list[str]:
    bare = {n: n if re.fullmatch("[A-Za-z0-9_-]+", n) else _written(n) for n in table}
    return [f"{bare[n]} = {_written(x)}" for n, x in table.items() if x is not None]


def _written(x: Any) -> str:
    if isinstance(x, bool | str):
        return json.dumps(x, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(x, dict):
        return f"{{ {', '.join(_settings(x))} }}" if x else "{}"
    return f"[{', '.join(map(_written, x))}]" if isinstance(x, list | tuple) else repr(x)
