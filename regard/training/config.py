"""A training run as a TOML file: what to learn, which model, which data, how. Unknown keys name the nearest known one.

The files in regard/recipes are such configs, each line with its meaning."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, field, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import torch
from torch import nn

from regard.checkpoint.hf import widen
from regard.config import Choice, Count, Fraction, Positive, from_dict, settings, to_dict
from regard.data.config import KINDS, ROWED, Data, check_used, still_known
from regard.data.corrupt import Corrupted, Marks, Noise
from regard.data.feed import Feed, Objective
from regard.data.train_tokenizer import Recipe
from regard.errors import DATA, VERSION, Fault, UsageError, nearest, notice
from regard.files import nearby
from regard.layers import LMHead
from regard.models import Model
from regard.models.adapt import LoRA, body_linears, chooses, inject, quantize
from regard.training.losses import NONE, Smoothing
from regard.training.measure import suited
from regard.training.objectives import DPO, Prefer
from regard.training.scheduled import TEACHER, Sampled, ScheduledSampling
from regard.training.tasks import TASKS
from regard.training.trainer import GONE, RENAMED, Train, flat

METHODS = ("full", "frozen", "lora", "qlora")
QUERIES_AND_VALUES = ("wq", "wv", "w_uq", "w_ukv")  # of GQA, and of MLA
# setting of a tokenizer -> kinds that do not use it
KINDLESS = {"vocab": ("chars", "bytes"), "min_count": ("chars", "bytes", "unigram")}


@settings
class Adapt:
    """Method "full": everything learns; "frozen": the head alone; "lora": LoRA on the linear layers that `targets`
    name, and the head, unless it is a vocabulary's that came with the model; "qlora": the same, and the body's linear
    layers are held in 4 bits.

    `targets` are last names (wq wk wv wo, w_dq w_uq w_dkv w_ukv, gate up down), or "all": every linear layer of the
    body but those that choose experts. Experts, which are no linear layers of their own, and the indexer of sparse
    attention, which no loss of the model reaches, are left as they are."""

    method: Annotated[str, Choice(METHODS)] = "full"  # full, frozen, lora or qlora
    rank: Count = 8  # r of LoRA
    alpha: Positive = 16.0  # LoRA's product counts alpha / r
    rslora: bool = False  # alpha / sqrt(r) instead
    dropout: Fraction = 0.0  # on what LoRA reads
    targets: tuple[str, ...] | str = QUERIES_AND_VALUES  # layers that get LoRA, or "all"

    def __post_init__(self) -> None:
        if not self.targets:
            raise UsageError('adapt.targets is empty; name layers such as wq, or say "all"')

    @property
    def low_rank(self) -> bool:
        return self.method in ("lora", "qlora")


@settings
class Config:
    """`model` has a preset or a folder, and changes; `tokenizer` a folder, or what regard.text's Recipe takes."""

    task: Annotated[str, Choice(TASKS)]  # what is learned: lm, seq2seq, classify, ...
    data: Data  # files and batches
    model: dict[str, Any]  # preset or folder, and every setting to change
    tokenizer: dict[str, Any] = field(default_factory=dict)  # folder = "...", or how one is learned
    train: Train = field(default_factory=Train)  # how long and how
    smoothing: Smoothing = NONE  # of labels
    prefer: Prefer = DPO  # how answers are preferred
    noise: Noise = Noise()  # how text is damaged that is to be repaired
    adapt: Adapt = Adapt()  # which weights learn
    scheduled_sampling: ScheduledSampling = TEACHER  # how often a decoder reads its own words

    def __post_init__(self) -> None:
        if ("preset" in self.model) == ("folder" in self.model):
            raise UsageError('[model] needs one of preset = "gpt2" (or another) and folder = "..."')
        task = TASKS[self.task]
        if self.smoothing != NONE and not task.smoothed:
            raise UsageError(f"label smoothing is not used by the task {self.task}; leave it out")
        if self.scheduled_sampling != TEACHER and not task.sampled:
            able = " and ".join(name for name, row in TASKS.items() if row.sampled)
            raise UsageError(
                f"[scheduled-sampling] is not used by the task {self.task}, but by {able}; leave it out"
            )
        if self.prefer != DPO and not task.compared:
            raise UsageError(f"[prefer] is not used by the task {self.task}; leave it out")
        if self.train.mtp and (self.adapt.method != "full" or not task.foretells):
            why = (
                "LoRA leaves MTP layers as they are"
                if task.foretells
                else "nothing foretells there"
            )
            able = " and ".join(name for name, row in TASKS.items() if row.foretells)
            raise UsageError(
                f"train.mtp is not used by the task {self.task} with adapt.method = {self.adapt.method} ({why}), "
                f"but by {able} with full; leave it out"
            )
        known = getattr(task.corruption, "__dataclass_fields__", {})
        if unused := [name for name in self.noise.given if name not in known]:
            raise UsageError(f"noise.{unused[0]} is not used by the task {self.task}; leave it out")
        if task.reads in ROWED and not task.packed and self.data.pack == "documents":
            raise UsageError(
                f"the task {self.task} repairs whole rows, which documents cannot share: say data.pack = none or stream"
            )
        if task.indexed and self.adapt.method != "full":
            raise UsageError(f"the task {self.task} trains indexers; leave [adapt] out")
        if self.adapt.low_rank and "size" in self.model:
            raise UsageError(
                'an adapter stands on the folder as it is: leave [model] size out, or say "frozen"'
            )
        if self.adapt.method != "full" and "folder" not in self.model:
            raise UsageError(
                f'adapt.method = "{self.adapt.method}" is for a trained model: name one, [model] folder = "..."'
            )

    @property
    def objective(self) -> Objective:
        task = TASKS[self.task]
        if task.compared:
            return partial(task.objective, how=self.prefer)
        given: dict[str, Any] = {} if self.smoothing == NONE else {"smoothing": self.smoothing}
        if task.foretells and self.train.mtp is not None:
            given["mtp"] = self.train.mtp
        return partial(task.objective, **given) if given else task.objective

    def learning(
        self,
        model: Model,
        device: torch.device | str | None = None,
        on: torch.device | None = None,
    ) -> Model:
        """The model on `device` with what does not learn frozen, and LoRA added, in place. Beside LoRA the body has the
        type it is stored in, if the device that it runs `on`, by default that one, multiplies that; else float32."""
        if self.adapt.low_rank:
            place = device if on is None else on
            widen(model, None if place is None else torch.device(place))
        if self.adapt.method == "qlora":
            quantize(model, device)
        model = model.to(device=device)
        task, layers = TASKS[self.task], getattr(model, "mtp", None)
        model = adapted(model, self.adapt) if task.leaves is None else task.leaves(model)
        if layers is None and self.train.mtp:
            why = "train.mtp is for MTP layers, and this model has none"
            raise UsageError(f'{why}; leave it out, or give it some: [model] mtp = "mtp"')
        if layers is not None and not (task.foretells and self.train.mtp != 0):
            layers.requires_grad_(False)
        return model

    def fed(self, feed: Feed, marks: Marks | None) -> Feed:
        """The feed as the task wants it."""
        if self.scheduled_sampling.share:
            return Sampled(feed, self.scheduled_sampling, self.train.seed)
        corruption = TASKS[self.task].corruption
        if corruption is None:
            return feed
        assert marks is not None
        if self.noise.permute and not marks.stops:
            raise UsageError("noise.permute needs a tokenizer with a full stop; leave it out")
        return Corrupted(feed, corruption(marks, **self.noise.given), self.train.seed)


# --- from a file ----------------------------------------------------------------------------------

# What Trainer, TRL, axolotl, litgpt and others call our settings, or flags of `regard train`; behind the name what to
# know of it.
FOREIGN_NAMES = {
    name: here
    for here, names in {
        "train.optim.lr": "lr learning_rate max_lr",
        "train.optim.decay": "weight_decay",
        "train.optim.name": "optim optimizer optim_name",
        "train.optim.betas": "adam_beta1 adam_beta2 beta1 beta2",
        "train.optim.eps": "adam_epsilon adam_eps",
        "train.schedule.warmup": "warmup warmup_steps warmup_iters warmup_ratio lr_warmup_steps",
        "train.schedule.shape": "lr_scheduler lr_scheduler_type scheduler",
        "train.schedule.floor": "min_lr min_lr_rate",
        "train.steps": "max_steps max_iters iterations steps train_iters",
        "train.epochs": "epochs num_epochs num_train_epochs max_epochs",
        "train.evaluate": "eval_steps eval_interval eval_every eval_strategy evals_per_epoch",
        "train.save": "save_steps save_interval save_every save_strategy saves_per_epoch",
        "train.metric": "metric_for_best_model load_best_model_at_end",
        "train.patience": "early_stopping_patience",
        "train.clip": "max_grad_norm max_norm grad_clip gradient_clip_val gradient_clipping",
        "train.seed": "seed data_seed",
        "train.compile": "torch_compile",
        "train.precision (fp32 or bf16)": "bf16 fp16 precision dtype torch_dtype mixed_precision",
        "train.micro_batches (parts of a batch)": "gradient_accumulation_steps"
        " accumulate_grad_batches",
        "train.activation_checkpointing": "gradient_checkpointing",
        "train.parallel.mode": "fsdp ddp deepspeed fsdp_config",
        "train.balance": "router_aux_loss_coef",
        "data.rows (of a whole batch)": "batch_size batch per_device_train_batch_size"
        " micro_batch_size global_batch_size train_batch_size",
        "data.length": "block_size max_length max_seq_length seq_len sequence_length"
        " sequence_len model_max_length max_seq_len",
        "data.pack": "packing sample_packing group_by_length",
        "data.train": "dataset datasets dataset_name train_file train_dataset data_path",
        "data.valid": "eval_dataset validation_file test_datasets",
        "data.held": "val_set_size val_split_fraction test_size",
        "data.columns": "dataset_text_field text_column",
        "model.folder": "model_name_or_path base_model checkpoint_dir pretrained",
        "tokenizer.folder": "tokenizer_name tokenizer_path",
        "smoothing.eps": "label_smoothing label_smoothing_factor",
        "adapt.method": "adapter use_peft load_in_4bit finetuning_type",
        "adapt.rank": "lora_r lora_rank",
        "adapt.alpha": "lora_alpha",
        "adapt.dropout": "lora_dropout",
        "adapt.targets": "lora_target_modules target_modules lora_target_linear",
        "--output-dir": "output_dir out_dir save_dir",
        "--resume": "resume_from_checkpoint",
        "--overwrite": "overwrite_output_dir",
        "--keep": "save_total_limit",
        "--log-to": "report_to logger_name wandb_project use_wandb",
        "metrics.jsonl in the run's folder (every step)": "logging_steps log_interval logging_dir",
    }.items()
    for name in names.split()
}


def _known(cls: type, data: dict[str, Any], where: str = "") -> None:
    """Name our setting where one is called as elsewhere; what is left is told by from_dict."""
    hints = get_type_hints(cls)
    for key, value in data.items():
        if key not in hints and key in FOREIGN_NAMES:
            flag = "the flag " if FOREIGN_NAMES[key].startswith("--") else ""
            raise UsageError(
                f"{where}{key} is not a setting; here it is {flag}{FOREIGN_NAMES[key]}"
            )
        if isinstance(value, dict) and is_dataclass(hints.get(key)):
            _known(hints[key], value, f"{where}{key}.")


def read(path: Path, changes: Mapping[str, str] | None = None) -> Config:
    """A config file, with dotted settings changed: {"train.optim.lr": "3e-4"}."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}{nearby(path)}") from None
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
        *path_to, last = name.replace("-", "_").split(".")
        table = data
        for part in path_to:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise UsageError(f"--{name}: {part} is a value, not a table")
        table[last] = value_of(text)
    train = data.get("train")
    if isinstance(train, dict):
        for old, new in RENAMED.items():
            if old in train and new in train:
                raise UsageError(f"train.{old} is now train.{new}, which is set too; leave it out")
            if old in train:
                notice(f"train.{old} is now train.{new}; the old name is still read")
                train[new] = train.pop(old)
        if train.get("average") or train.get("nan") == "back":
            name = "average" if train.get("average") else "nan"
            raise UsageError(f"train.{name} = {train[name]}: {GONE[name]}")
        train.pop("average", None)
        if {"steps", "epochs"} <= train.keys():
            raise UsageError("train.steps and train.epochs both say how long; leave one out")
    if isinstance(data.get("data"), dict):
        data["data"] = still_known(data["data"])
    _known(Config, data)
    config = from_dict(Config, data, path.name)
    for table in (config.model, config.tokenizer):
        if "folder" in table:
            if not isinstance(table["folder"], str):
                why = f"folder = {table['folder']!r}; give the name of a folder"
                raise UsageError(f"{path.name}: {why}")
            table["folder"] = str(path.parent / table["folder"])
    if config.prefer.reference:
        reference = str(path.parent / config.prefer.reference)
        config = replace(config, prefer=replace(config.prefer, reference=reference))
    return replace(config, data=config.data.under(path.parent))


def _plain(data: Any) -> Any:
    """kebab-case keys are snake_case here."""
    if not isinstance(data, dict):
        return data
    return {key.replace("-", "_"): _plain(value) for key, value in data.items()}


def value_of(text: Any) -> Any:
    """A value as TOML has it; what is none is a text."""
    if not isinstance(text, str):
        return text
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


# --- what can be wrong: found before a run's folder is touched, and before a step is made ----------


def check(config: Config) -> None:
    """What a config says that cannot be, or that would be passed over; no file of data is read."""
    for name, value in flat(asdict(config)).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{name} = {value}: give a finite number")
    preset = config.model.get("preset", "")
    if not isinstance(preset, str):
        raise UsageError(f'model.preset = {preset!r}: give a name, such as "gpt2"')
    suited([config.train.metric], config.task)
    check_used(config.data, TASKS[config.task].reads, config.task)
    recipe_of(config)
    for name in [f.name for f in fields(Adapt)][1:]:
        used = config.adapt.low_rank or getattr(config.adapt, name) == getattr(Adapt, name)
        if not used:
            raise UsageError(
                f'adapt.{name} is used by adapt.method = "lora" and "qlora" alone; leave it out'
            )


def recipe_of(config: Config) -> Recipe | None:
    """How the tokenizer is learned; nothing where none is."""
    settings, reads = dict(config.tokenizer), TASKS[config.task].reads
    if not KINDS[reads].texts:
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
    return from_dict(Recipe, {**TASKS[config.task].recipe, **settings, "kind": kind}, "tokenizer")


# --- written --------------------------------------------------------------------------------------


def rooted(config: Config) -> Config:
    """The same settings with every path from the root, so that they mean the same files anywhere."""
    here = Path.cwd()

    def placed(table: dict[str, Any]) -> dict[str, Any]:
        return {n: str(here / x) if n == "folder" else x for n, x in table.items()}

    model, tokenizer = placed(config.model), placed(config.tokenizer)
    return replace(config, data=config.data.under(here), model=model, tokenizer=tokenizer)


def as_toml(config: Config) -> str:
    """Every setting of a run as a file that can be trained from anywhere."""
    tables = to_dict(rooted(config))
    if config.train.epochs is not None:
        del tables["train"]["steps"]
    return f"# regard {VERSION}: the settings of this run\n{toml(tables)}\n"


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


# --- fine-tuning: which weights learn ---------------------------------------------------------------


def adapted(model: Model, adapt: Adapt) -> Model:
    """Freeze the model and add LoRA, as `adapt` says, in place. Its outputs do not change.

    Names of all other parameters stay; a layer `wq` with LoRA has `wq.base.weight`, `wq.a` and `wq.b`. The random
    numbers of A are torch's on the CPU: torch.manual_seed decides them."""
    if adapt.method == "full":
        return model
    model.requires_grad_(False)
    if adapt.low_rank:
        lora = LoRA(adapt.rank, adapt.alpha, adapt.dropout, adapt.rslora)
        inject(model, _chosen(model, adapt.targets), lora)
    head: nn.Module | None = getattr(model, "head", None)
    if head is not None:
        given = isinstance(head, LMHead) and not head.fresh
        head.requires_grad_(adapt.method == "frozen" or not given)
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError(
            'adapt.method = "frozen" trains the head alone, and this model has none with weights of its own; '
            'give it a head, or say "lora"'
        )
    return model


def _chosen(model: nn.Module, targets: tuple[str, ...] | str) -> list[str]:
    """Full names of the layers that get LoRA, in the model's order."""
    linears = {name: name.rpartition(".")[2] for name in body_linears(model)}
    wanted = {targets} if isinstance(targets, str) else set(targets)
    if wanted == {"all"}:
        return [name for name in linears if not chooses(name)]
    known = set(linears.values())
    unknown = sorted(wanted - known - set(QUERIES_AND_VALUES))
    if unknown or not wanted & known:
        name = unknown[0] if unknown else ", ".join(sorted(wanted))
        raise UsageError(
            f"adapt.targets: the body has no linear layer {name}; known: all, {', '.join(sorted(known))}"
        )
    return [name for name, last in linears.items() if last in wanted]
