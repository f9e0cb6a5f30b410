"""Fine-tuning without a config: what a model and a file say decides the task, the columns and the usual settings. The
run is `regard.train`'s, and writes them to config.toml in its folder, where they can be read and changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from regard.checkpoint import load
from regard.config import from_dict
from regard.data.config import PICTURED, SETTINGS
from regard.data.read import ARRAYS, Source, first_rows, format_of
from regard.errors import DATA, UsageError, blaming, check_choice, notice
from regard.files import resolve_model
from regard.machine import pick_device
from regard.text import Tokenizer
from regard.training.build import kind_of
from regard.training.config import METHODS, value_of
from regard.training.measure import context_of
from regard.training.run import RunResult, train
from regard.training.tasks import TASKS

Names = Mapping[str, tuple[str, ...]]


class Form(NamedTuple):
    """A task by the columns that it needs, and may have: each role, and names that columns have for it."""

    task: str
    needs: Names
    may: Names = MappingProxyType({})


# What a question and its answer are called.
PAIR: Names = {
    "source": ("source", "prompt", "question"),
    "target": ("target", "completion", "response", "answer"),
}
# The first that fits is taken.
FORMS = (
    # OpenAI's, and ShareGPT's.
    Form("chat", {"messages": ("messages", "conversations")}, {"tools": ("tools",)}),
    Form(
        "prefer",
        {"chosen": ("chosen",), "rejected": ("rejected",)},
        {"prompt": ("prompt", "question", "instruction")},
    ),
    Form("tag", {"words": ("words", "tokens"), "tags": ("tags", "ner_tags", "pos_tags")}),
    Form(
        "classify",
        {
            "text": ("text", "sentence", "review", "sentence1", "premise"),
            "label": ("label", "labels", "class"),
        },
        {"second": ("second", "sentence2", "hypothesis")},
    ),
    # SQuAD's rows, which the reader knows by these names.
    Form("answer", {name: (name,) for name in ("question", "context", "answers")}),
    # Alpaca's.
    Form(
        "chat",
        {"prompt": ("instruction",), "response": ("output",)},
        {"input": ("input",), "system": ("system",)},
    ),
    Form(
        "chat",
        {"prompt": ("prompt", "question"), "response": ("completion", "response", "answer")},
        {"system": ("system",)},
    ),
    Form("seq2seq", PAIR),
    # By one tower a pair is read as text after text.
    Form("lm", PAIR),
    *(Form(task, {"text": ("text", "content")}) for task in ("lm", "mlm", "spans")),
)
FEW = 10  # examples of which none is held out
SHORT = 1000  # bytes of a plain text of which nothing is
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
        tables = decide(model, data, task, method, valid, changes)
    cuda = pick_device(device)[0].type == "cuda"
    tables["train"] |= {"precision": "bf16"} if cuda else {}
    return train(tables, folder, changes=changes, device=device, **how)


def decide(
    model: str | Path,
    data: str | Path,
    task: str | None,
    method: str,
    valid: Any = None,
    changes: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The tables of a config. `changes` are the user's: they say how files are read too, and what is set here gives
    way to them."""
    home = resolve_model(model)
    start = load(home, device="meta")
    given = {name.replace("-", "_"): value_of(x) for name, x in (changes or {}).items()}
    reading = {n: given[f"data.{n}"] for n in SETTINGS if f"data.{n}" in given}
    columns = {n.removeprefix("data.columns."): x for n, x in given.items() if "columns." in n}
    reading |= {"columns": {**reading.get("columns", {}), **columns}}
    source = from_dict(Source, {"paths": [str(data)], **reading}, "data")
    rows = first_rows(source, FEW)
    if task is not None:
        check_choice("task", task, TASKS)
    task, columns = chosen_task(source, rows, task, kind_of(start), model)
    size: dict[str, Any] = {"rows": 8 if TASKS[task].packed else 16}
    if TASKS[task].reads not in PICTURED:
        # Texts of a language model are cut to rows; of all else what is too long is cut off.
        cut = "split" if task in ("lm", "mlm") else "truncate"
        size |= {"length": min(LENGTH, context_of(start) or LENGTH), "overlong": cut}
    if task == "chat" and "data.template" not in given and not chat_templates(start):
        size["template"] = "chatml"
        notice("the model's folder has no chat template: ChatML is taken (data.template)")
    usual, gently = RATES[method]
    held: dict[str, Any] = {"held": 0.05} if valid is None else {"valid": str(valid)}
    if not {"data.held", "data.valid"} & given.keys() and valid is None and _few(source, rows):
        held = {}
        notice("so little data is learned whole: nothing is held out to evaluate on (--valid FILE)")
    tables: dict[str, Any] = {
        "task": task,
        "model": {"folder": str(home)},
        "data": {"train": str(data), **held, **size, **({"columns": columns} if columns else {})},
        "train": {
            "epochs": 1 if task in WHOLE else 3,
            "evaluate": 0.1,
            "save": 200,
            "optim": {"lr": gently if task == "prefer" else usual, "decay": 0.0},
            "schedule": {"warmup": 0.1, "floor": 0.1},
        },
        "adapt": {"method": method},
    }
    if method in ("lora", "qlora"):
        tables["adapt"] |= {"rank": 16, "alpha": 32.0, "targets": "all"}
    for name, (values, ours) in CLASHES.items():
        if name in given and (not values or given[name] in values):
            for mine in ours:
                table, _, key = mine.partition(".")
                tables[table].pop(key, None)
    return tables


def _few(source: Source, rows: list[dict[str, Any]] | None) -> bool:
    """Whether there is no share to hold out: few examples, copies of one, or some words."""
    files = source.files()
    if len(files) > 1 or format_of(files[0], source.format) in ARRAYS:
        return False
    if rows is None:
        return files[0].stat().st_size < SHORT
    return len(rows) < FEW or all(row == rows[0] for row in rows)


def chat_templates(model: Any) -> bool:
    """Whether the folder of a model brings a chat template."""
    tokenizer = Tokenizer.from_files(model.origin.files, model.origin.config)
    return tokenizer is not None and bool(tokenizer.templates)


def chosen_task(
    source: Source, rows: list[dict[str, Any]] | None, task: str | None, kind: str, model: Any
) -> tuple[str, dict[str, str]]:
    """The task of files for a kind of model, and the columns of its roles: by the names of the columns, the same in
    every format. What is read otherwise than its names say, or not read, is told."""
    if rows is None:
        plain = {"model of pictures": "image", "captioner": "caption"}
        plain |= {"decoder": "lm", "recurrent model": "lm", "encoder": "mlm"}
        return task or plain.get(kind, "spans"), {}
    names, path = [*rows[0]], source.paths[0]
    # Roles that the user gives are all that counts.
    known = [*source.columns] or names
    for form in FORMS:
        fits = form.task == task if task else kind in TASKS[form.task].models
        columns = _roles(known, form, bool(source.columns)) if fits else None
        if columns is not None:
            if source.columns:
                return form.task, {}
            _tell(str(path), names, columns)
            # A column that is called as its role needs no word, but for those that make a chat of two.
            paired = "response" in columns
            return form.task, {r: n for r, n in columns.items() if paired or r != n}
    if task is not None:
        return task, {}
    if len(names) == 2 and kind == "encoder-decoder" and source.header is None:
        return "seq2seq", {"source": "0", "target": "1"}
    raise UsageError(
        f"{path} has the columns {', '.join(map(repr, names))}, which no task for {model} ({kind}) reads; call them "
        "messages, prompt and completion, instruction and output, text and label, or text; or say which is which: "
        '--data.columns \'{ prompt = "question", response = "reply" }\', or { text = 1, label = 0 } by their numbers'
    )


def _roles(names: Sequence[str], form: Form, by_role: bool) -> dict[str, str] | None:
    """Which column has each role, `names` being of columns or already of roles; None where one has none."""
    if by_role:
        inside = form.needs.keys() <= {*names} <= form.needs.keys() | form.may.keys()
        return {name: name for name in names} if inside else None
    roles = {**form.needs, **form.may}
    columns = {role: next((n for n in roles[role] if n in names), "") for role in roles}
    return {r: n for r, n in columns.items() if n} if all(columns[r] for r in form.needs) else None


def _tell(path: str, names: Sequence[str], columns: Mapping[str, str]) -> None:
    """Say what is not plain from the names of columns."""
    if "response" in columns:
        asked = " and ".join(columns[role] for role in ("prompt", "input") if role in columns)
        notice(
            f"{path} is read as chats: {asked} of the user, {columns['response']} of the assistant"
        )
    if unread := [name for name in names if name not in columns.values()]:
        notice(f"columns of {path} that are not read: {', '.join(unread):.200}")
