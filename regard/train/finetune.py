"""Fine-tuning without a config: what a model and a file say decides the task, the columns and the usual settings. The
run is `regard.train`'s, and writes them to config.toml in its folder, where they can be read and changed."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from regard.checkpoint import load
from regard.data.read import DataError, format_of, json_rows, lines, matching_files
from regard.errors import DATA, UsageError, blaming, check_choice
from regard.files import resolve_model
from regard.machine import pick_device
from regard.train.build import kind_of
from regard.train.config import METHODS
from regard.train.measure import context_of
from regard.train.run import RunResult, train
from regard.train.tasks import TASKS

# Tasks by the columns that they need, the first that fits: each role, and names that columns have for it.
COLUMNS: dict[str, dict[str, tuple[str, ...]]] = {
    "chat": {"messages": ("messages", "conversations")},
    "prefer": {"chosen": ("chosen",), "rejected": ("rejected",)},
    "tag": {"words": ("words", "tokens"), "tags": ("tags", "ner_tags", "pos_tags")},
    "classify": {"text": ("text", "sentence", "review"), "label": ("label", "labels", "class")},
    "seq2seq": {
        "source": ("source", "prompt", "question"),
        "target": ("target", "completion", "response", "answer"),
    },
    "lm": {"text": ("text", "content")},
}
# The peak learning rate, and that of preferences, which are learned in small steps.
RATES = {"full": (5e-5, 1e-6), "frozen": (1e-3, 1e-6), "lora": (2e-4, 1e-5), "qlora": (2e-4, 1e-5)}
# A setting of the user's (with some values, or any), and those of ours that it takes the place of.
CLASHES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "train.steps": ((), ("train.epochs",)),
    "data.valid": ((), ("data.held",)),
    "data.tokens": ((), ("data.rows",)),
    "data.pack": (("stream", "windows"), ("data.overlong",)),
    "adapt.method": (("full", "frozen"), ("adapt.rank", "adapt.alpha", "adapt.targets")),
}
LENGTH = 1024  # tokens of a row at most, where the model could read more
WHOLE = ("lm", "chat", "prefer", "mlm")  # learned in one epoch, others in three


def finetune(
    model: str | Path,
    data: str | Path,
    folder: str | Path | None = None,
    *,
    task: str | None = None,
    method: str = "full",
    valid: str | Path | None = None,
    changes: Mapping[str, Any] | None = None,
    device: str = "auto",
    **how: Any,
) -> RunResult:
    """Tune the model of a folder on a file, as `regard finetune` does: everything ("full"), the head ("frozen"), LoRA
    ("lora"), or LoRA on a model in 4 bits ("qlora"). The task is what the file's columns say, unless `task` does.
    `folder` is the run's, by default runs/ and the file's name; `changes` and `how` are as in `regard.train`."""
    check_choice("method", method, METHODS)
    folder = Path("runs") / Path(data).name.partition(".")[0] if folder is None else folder
    with blaming(DATA):
        tables = decide(model, data, task, method, valid)
    cuda = pick_device(device)[0].type == "cuda"
    tables["train"] |= {"precision": "bf16"} if cuda else {}
    if "train.steps" in (changes or {}):
        del tables["train"]["epochs"]
    return train(tables, folder, changes=changes, device=device, **how)


def decide(
    model: str | Path, data: str | Path, task: str | None, method: str, valid: Any = None
) -> dict[str, Any]:
    """The tables of a config."""
    home = resolve_model(model)
    start = load(home, device="meta")
    kind = kind_of(start)
    if task is None:
        task, columns = _task(Path(data), kind, model)
    else:
        check_choice("task", task, TASKS)
        columns = _roles(_names(Path(data)), COLUMNS.get(task, {})) or {}
    size: dict[str, Any] = {"rows": 8 if TASKS[task].packed else 16}
    if TASKS[task].reads not in ("image", "caption"):
        # Texts of a language model are cut to rows; of all else what is too long is cut off.
        cut = "split" if task in ("lm", "mlm") else "truncate"
        size |= {"length": min(LENGTH, context_of(start) or LENGTH), "overlong": cut}
    # A column that is called as its role needs no word.
    named = {role: name for role, name in columns.items() if role != name}
    usual, gently = RATES[method]
    held = {"held": 0.05} if valid is None else {"valid": str(valid)}
    tables: dict[str, Any] = {
        "task": task,
        "model": {"folder": str(home)},
        "data": {"train": str(data), **held, **size, **({"columns": named} if named else {})},
        "train": {
            "epochs": 1 if task in WHOLE else 3,
            "save": 200,
            "optim": {"lr": gently if task == "prefer" else usual, "decay": 0.0},
            "schedule": {"floor": 0.1},
        },
        "adapt": {"method": method},
    }
    if method in ("lora", "qlora"):
        tables["adapt"] |= {"rank": 16, "alpha": 32.0, "targets": "all"}
    return tables


def _task(path: Path, kind: str, model: str | Path) -> tuple[str, dict[str, str]]:
    """The task of a file for a kind of model, and the columns of its roles."""
    names = _names(path)
    if kind in ("model of pictures", "captioner"):
        return ("image" if kind == "model of pictures" else "caption"), {}
    if names is None:
        return {"decoder": "lm", "encoder": "mlm"}.get(kind, "spans"), {}
    for task, roles in COLUMNS.items():
        columns = _roles(names, roles)
        # A pair is read and answered by one tower as text after text.
        task = "lm" if task == "seq2seq" and kind == "decoder" else task
        if columns and kind in TASKS[task].models:
            return task, columns
    if len(names) == 2 and kind == "encoder-decoder":
        return "seq2seq", {"source": "0", "target": "1"}
    raise UsageError(
        f"{path} has the columns {', '.join(map(repr, names))}, which no task for {model} ({kind}) reads; call them "
        "messages, text and label, or source and target; or say --task and --data.columns '{ text = 1, label = 0 }'"
    )


def _roles(names: list[str] | None, roles: Mapping[str, tuple[str, ...]]) -> dict[str, str] | None:
    """Which column has each role; None where one has no column."""
    columns = {
        role: next((n for n in known if n in (names or ())), "") for role, known in roles.items()
    }
    return columns if all(columns.values()) else None


def _names(path: Path) -> list[str] | None:
    """The columns of a file's first line; None of plain text, pictures, and what names its own."""
    first = matching_files([str(path)])[0]
    filled = (line for line in lines(first) if line.strip())
    tables: dict[str, Iterator[list[str]]] = {
        "jsonl": (list(row) for _, row in json_rows(first)),
        "csv": csv.reader(filled),
        "tsv": (line.split("\t") for line in filled),
    }
    kind = format_of(first, "auto")
    if kind in tables and (names := next(tables[kind], None)) is None:
        raise DataError(f"{first} is empty: it holds no examples")
    return names if kind in tables else None
