"""What can be wrong with a training config: found before a run's folder is touched, and before a step is made."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from regard.config import from_dict
from regard.data.config import Data, Loaded, check_used
from regard.data.feed import ImageFeed, TextFeed
from regard.data.tokens import Coder
from regard.data.train_tokenizer import Recipe
from regard.errors import DATA, Fault, UsageError, nearest
from regard.fast.train import PRECISIONS
from regard.layers import LM, MLM
from regard.models import Patches
from regard.train.adapt import Adapt
from regard.train.config import Config
from regard.train.index import sparse_layers
from regard.train.measure import context_of
from regard.train.metrics import suited
from regard.train.tasks import TASKS
from regard.train.trainer import Train

KINDLESS = {  # setting of a tokenizer -> kinds that do not use it
    "vocab": ("chars", "bytes"),
    "min_count": ("chars", "bytes", "unigram"),
}


def check(config: Config) -> None:
    """What a config says that cannot be, or that would be passed over; no file of data is read."""
    for name, value in _numbers(asdict(config), ""):
        if not math.isfinite(value):
            raise UsageError(f"{name} = {value}: give a finite number")
    preset = config.model.get("preset", "")
    if not isinstance(preset, str):
        raise UsageError(f'model.preset = {preset!r}: give a name, such as "gpt2"')
    _check_train(config.train)
    suited([config.train.metric], config.task)
    check_used(config.data, TASKS[config.task].reads, config.task)
    recipe_of(config)
    usual = {f.name: f.default for f in fields(Adapt)} | {"method": config.adapt.method}
    for name in [n for n, x in usual.items() if x != getattr(config.adapt, n)]:
        if config.adapt.method != "lora":
            raise UsageError(f'adapt.{name} is used by adapt.method = "lora" alone; leave it out')


def _check_train(train: Train) -> None:
    if train.precision not in PRECISIONS:
        hint = nearest(train.precision, PRECISIONS)
        raise UsageError(f"train.precision = {train.precision!r} is unknown; {hint}")


def _numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    """All real numbers of a config, by their dotted names."""
    if isinstance(value, float):
        yield name, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _numbers(inner, name)


def recipe_of(config: Config) -> Recipe | None:
    """How the tokenizer is learned; nothing where none is."""
    settings, reads = dict(config.tokenizer), TASKS[config.task].reads
    if reads == "image":
        if settings:
            raise UsageError(f"[tokenizer] is not used by the task {config.task}; leave it out")
        return None
    if "folder" in settings and not (Path(settings["folder"]) / "tokenizer.json").is_file():
        why = f"{settings['folder']} has no tokenizer.json"
        raise Fault(f"{why}; regard tokenizer train makes one", DATA)
    known, kind = [f.name for f in fields(Recipe)], settings.get("kind", Recipe.kind)
    for name in settings:
        if name not in ("folder", *known):
            hint = nearest(name, ["folder", *known])
            if name in ("size", "vocab_size"):
                hint = "here it is tokenizer.vocab"
            raise UsageError(f"tokenizer.{name} is no setting; {hint}")
        if name != "folder" and "folder" in settings:
            raise UsageError(f"tokenizer.{name} is not used beside tokenizer.folder; leave one out")
        if kind in KINDLESS.get(name, ()):
            raise UsageError(f'tokenizer.{name} is not used by kind = "{kind}"; leave it out')
    if "folder" in settings:
        return None
    settings.pop("kind", None)
    whole = {**TASKS[config.task].recipe, **settings}
    return replace(from_dict(Recipe, whole, "tokenizer"), kind=kind)


# --- the model ----------------------------------------------------------------------------------------------------


def kind_of(model: Any) -> str:
    """What a model is, in a word."""
    c, encodes = model.config, model.reads_source
    reads = getattr(c, "source" if encodes else "embedding", None)
    if isinstance(reads, Patches):
        return "model of pictures"
    if encodes:
        return "encoder-decoder"
    if not hasattr(c, "tower"):
        return "recurrent model"
    return "decoder" if c.tower.causal else "encoder"


def check_suits(task: str, model: Any) -> None:
    """Refuse a model that the task is not for."""
    row = TASKS[task]
    kind, head = kind_of(model), getattr(model.config, "head", None)
    if kind not in row.models:
        raise UsageError(
            f"the task {task} is for {' or '.join(_a(k) for k in row.models)}, and [model] is {_a(kind)}; say preset = "
            f"{row.presets}, or another task"
        )
    if row.indexed:
        sparse_layers(model)
    worded = isinstance(head, LM | MLM) or not hasattr(model.config, "head")
    if row.head is None and not worded:
        what = "no head" if head is None else f"a head of another kind ({head.kind})"
        raise UsageError(
            f"the task {task} says words, and [model] has {what}; name a language model"
        )


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def check_vocab(model: Any, coder: Coder | None, trained: bool) -> None:
    """Refuse a tokenizer that has more tokens than the model; `own`: the model came with its weights."""
    c = model.config
    parts = [getattr(c, name, None) for name in ("embedding", "source", "target")]
    sizes = [n for n in (getattr(part, "vocab", None) for part in [c, *parts]) if n is not None]
    sizes += [c.source_vocab] if hasattr(c, "source_vocab") else []
    if coder is not None and sizes and coder.vocab > min(sizes):
        what = "[tokenizer] out to use the model's own" if trained else "vocab out of [model]"
        raise UsageError(
            f"the tokenizer has {coder.vocab:,} tokens, the model {min(sizes):,}: they do not belong together; "
            f"leave {what}"
        )


def check_fits(model: Any, loaded: Loaded, data: Data) -> None:
    """Refuse examples that the model cannot read: longer than its context, pictures of another size, packed ones for
    a recurrent model."""
    c, feed = model.config, loaded.feed
    if isinstance(feed, ImageFeed):
        shape, want = feed.pictures.values.shape[1:], c.embedding
        if shape != (want.size, want.size, want.channels):
            raise UsageError(
                f"the pictures are {' x '.join(map(str, shape))}, the model reads {want.size} x {want.size} x "
                f"{want.channels}; say other size and channels in [model], or scale them by data.size"
            )
        return
    if (
        isinstance(feed, TextFeed)
        and feed.pack == "documents"
        and kind_of(model) == "recurrent model"
    ):
        raise UsageError(
            "a recurrent model carries its state on, so documents cannot share a row; say data.pack = stream or none"
        )
    most, limit = context_of(model), data.length
    size = max(part.longest or 0 for part in (feed, feed.held) if part is not None)
    if most is not None and size > most:
        if limit is not None and limit > most:
            what = f"data.length = {limit}, but the model's context is {most} tokens"
            raise UsageError(f"{what}; say data.length = {most}, or a larger max-len in [model]")
        raise UsageError(
            f"an example has {size:,} tokens, the model's context is {most:,}; say data.length = {most} and "
            "data.overlong = truncate or drop, or a larger max-len in [model]"
        )
