"""From a config to a trainer: tokenizer, data, model, head and adapter, what is measured, where it is kept."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from regard.checkpoint import load as load_model
from regard.checkpoint.adapter import load_adapter, save_adapter
from regard.checkpoint.hf import Origin
from regard.cli import DATA, Fault
from regard.commands.model import blaming, resolved
from regard.config import UsageError, nearest
from regard.layers import Answer, Classify, Tag
from regard.measure import measure
from regard.presets import build
from regard.text import Tokenizer, needed
from regard.text.coder import Coder
from regard.text.train_tokenizer import Recipe, train_tokenizer
from regard.train.adapt import adapted, labels, with_head
from regard.train.batch import Feed
from regard.train.config import TASKS, Config
from regard.train.corrupt import Marks
from regard.train.data import Loaded
from regard.train.data import load as load_data
from regard.train.files import DataError
from regard.train.keep import Keeper
from regard.train.parallel import Alone
from regard.train.read import records
from regard.train.trainer import Measure, Trainer

CARRIED = ("tokenizer.json", "tokenizer_config.json")
HEADS = {"classify": Classify, "image": Classify, "tag": Tag}


@dataclass(eq=False)
class Built:
    """A trainer, and what it was made of."""

    trainer: Trainer
    files: dict[str, bytes]  # the tokenizer's
    classes: list[str]


def built(config: Config, folder: Path, device: torch.device, keep: int, team: Alone) -> Built:
    """All that `config` names, joined. The first process prepares tokenizer and data, the others read them."""
    with blaming(DATA):
        start = load_model(resolved(config.model["folder"])) if "folder" in config.model else None
        files, coder, loaded = team.first(lambda: read_data(config, start, folder))
    torch.manual_seed(config.train.seed)
    model = made(config, start, coder, loaded.classes)
    model.origin.files = {**model.origin.files, **files}
    model.origin.config = {**model.origin.config, **special(coder), **labels(loaded.classes)}
    model = adapted(model.to(device), config.adapt)
    small = config.adapt.method == "lora"
    save = save_adapter if small else lambda m, path: m.save(path)
    load = partial(load_adapter, into=model) if small else load_model
    keeper = Keeper(folder / "checkpoints", save, keep)
    feed = config.fed(loaded.feed, marks(coder))
    figures = measuring(config, feed, loaded.classes, files, device)
    trainer = Trainer(
        model, feed, config.objective, config.train, keeper, load, measure=figures, team=team
    )
    return Built(trainer, files, loaded.classes)


def read_data(
    config: Config, start: Any, folder: Path
) -> tuple[dict[str, bytes], Coder | None, Loaded]:
    reads = TASKS[config.task][0]
    files = {} if reads == "image" else tokenizer_files(config, start, folder)
    coder = Coder(needed(Tokenizer.from_files(files, {}))) if files else None
    if start is not None and coder is not None:
        vocab = start.config.embedding.vocab if hasattr(start.config, "embedding") else coder.vocab
        if coder.vocab > vocab:
            raise UsageError(
                f"the tokenizer has {coder.vocab:,} tokens, the model {vocab:,}: they do not belong together; "
                "leave [tokenizer] out to use the model's own"
            )
    try:
        return (
            files,
            coder,
            load_data(reads, config.data, coder, folder / "data", config.train.seed),
        )
    except DataError as error:
        raise Fault(str(error), DATA) from None


def made(config: Config, start: Any, coder: Coder | None, classes: list[str]) -> Any:
    """The preset with its changes, or the folder's model; with a head that suits the task."""
    changes = {k: v for k, v in config.model.items() if k not in ("preset", "folder")}
    if start is not None and changes:
        raise UsageError(f"[model] folder is taken as it is; leave {', '.join(changes)} out")
    model = start
    if model is None:
        if coder is not None:
            changes.setdefault("vocab", coder.vocab)
        model = build(config.model["preset"], **changes)
        model.origin = Origin(model.family)
    wanted: Any = None
    if config.task in HEADS:
        wanted = HEADS[config.task](len(classes))
    elif config.task == "answer":
        wanted = Answer()
    head = getattr(model.config, "head", None)
    if wanted is None:
        return model
    if isinstance(head, type(wanted)) and head.labels == wanted.labels:
        return model
    return with_head(model, wanted)


def measuring(
    config: Config, feed: Feed, classes: list[str], files: dict[str, bytes], device: torch.device
) -> Measure:
    """Figures beside the loss, and samples, of the held-out part."""
    names = [name for name in (config.train.metric,) if name != "loss"]
    tokenizer = needed(Tokenizer.from_files(files, {})) if files else None

    def figures(model: Any) -> tuple[dict[str, float], dict[str, Any]]:
        found = measure(
            model,
            config.task,
            feed,
            tokenizer,
            config.objective,
            names,
            classes=classes,
            precision=config.train.precision,
            device=device,
        )
        more: dict[str, Any] = {"samples": found.samples}
        if found.signatures:
            more["signatures"] = found.signatures
        return found.values, more

    return figures


def tokenizer_files(config: Config, start: Any, folder: Path) -> dict[str, bytes]:
    """The tokenizer that is named, the model's own, or one that is learned now and kept in the run's folder."""
    if "folder" in config.tokenizer:
        home = Path(config.tokenizer["folder"])
        if not (home / CARRIED[0]).is_file():
            raise UsageError(f"{home} has no {CARRIED[0]}; regard tokenizer train makes one")
        return {n: (home / n).read_bytes() for n in CARRIED if (home / n).is_file()}
    if start is not None and CARRIED[0] in start.origin.files:
        return {n: start.origin.files[n] for n in CARRIED if n in start.origin.files}
    home = folder / "tokenizer"
    if (home / CARRIED[0]).is_file():
        return {n: (home / n).read_bytes() for n in CARRIED}
    task = "lm" if config.task == "prefix" else TASKS[config.task][0]
    task = task if task in ("lm", "seq2seq") else "mlm"
    known = [f.name for f in fields(Recipe)]
    for name in config.tokenizer:
        if name not in known:
            raise UsageError(f"tokenizer.{name} is no setting; {nearest(name, ['folder', *known])}")
    recipe = Recipe(**{"task": task, **config.tokenizer})
    roles = ("source", "target") if TASKS[config.task][0] == "seq2seq" else ("text",)
    texts = (record[role] for record in records(config.data.source(), roles) for role in roles)
    files = train_tokenizer(texts, recipe)
    new = folder / ".tokenizer"  # whole or not at all
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    for name, content in files.items():
        (new / name).write_bytes(content)
    shutil.rmtree(home, ignore_errors=True)
    new.rename(home)
    return files


def marks(coder: Coder | None) -> Marks | None:
    if coder is None:
        return None
    return Marks(coder.vocab, coder.reserved, coder.mask, (), coder.start, coder.end, coder.pad)


def special(coder: Coder | None) -> dict[str, Any]:
    """Token ids as config.json names them."""
    if coder is None:
        return {}
    found = {"eos_token_id": coder.end, "pad_token_id": coder.pad, "bos_token_id": coder.start}
    found["decoder_start_token_id"] = coder.start
    return {name: value for name, value in found.items() if value is not None}
