"""regard finetune: the file's columns and the kind of model decide the task; the run is as any other."""

import csv
import json
import sys
import tomllib
import warnings
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest

import regard
from regard.cli.main import main
from regard.errors import Notice, UsageError
from regard.files import resolve_model
from regard.training.config import Config, check, configure
from regard.training.finetune import decide

# Rows by a name, and what each kind of model makes of them.
ROWS: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "a"}]},
    "shared": {"id": 1, "conversations": [{"from": "human", "value": "a"}]},
    "prefer": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "asked": {"question": "a", "chosen": "b", "rejected": "c"},
    "openai": {"prompt": "a cat", "completion": "a mat"},
    "answered": {"prompt": "a cat", "answer": "a mat"},
    "alpaca": {"instruction": "say", "input": "a cat", "output": "a mat", "text": "say a cat"},
    "short": {"instruction": "say", "output": "a mat"},
    "pairs": {"source": "a cat", "target": "eine Katze"},
    "texts": {"content": "a cat"},
    "tags": {"tokens": ["a"], "ner_tags": ["O"]},
    "labels": {"label": "good", "sentence": "a fine cat"},
    "two": {"premise": "a", "hypothesis": "b", "label": 0},
    "squad": {"question": "a", "context": "b", "answers": {"text": ["b"], "answer_start": [0]}},
}
TURNS = {"prompt": "prompt", "response": "completion"}
ALPACA = {"prompt": "instruction", "response": "output", "input": "input"}
SAME: dict[str, str] = {}
MEANT: list[tuple[str, str, str, dict[str, str]]] = [
    ("gpt2", "chat", "chat", SAME),
    ("gpt2", "shared", "chat", {"messages": "conversations"}),
    ("gpt2", "prefer", "prefer", SAME),
    ("gpt2", "asked", "prefer", {"prompt": "question"}),
    ("gpt2", "openai", "chat", TURNS),
    ("gpt2", "answered", "chat", {**TURNS, "response": "answer"}),
    ("gpt2", "alpaca", "chat", ALPACA),
    ("gpt2", "short", "chat", {r: n for r, n in ALPACA.items() if r != "input"}),
    ("gpt2", "pairs", "lm", SAME),
    ("gpt2", "texts", "lm", {"text": "content"}),
    ("gpt2", "labels", "classify", {"text": "sentence"}),
    ("t5-small", "openai", "seq2seq", {"source": "prompt", "target": "completion"}),
    ("t5-small", "pairs", "seq2seq", SAME),
    ("t5-small", "texts", "spans", {"text": "content"}),
    ("bert-base", "tags", "tag", {"words": "tokens", "tags": "ner_tags"}),
    ("bert-base", "labels", "classify", {"text": "sentence"}),
    ("bert-base", "two", "classify", {"text": "premise", "second": "hypothesis"}),
    ("bert-base", "squad", "answer", SAME),
    ("bert-base", "texts", "mlm", {"text": "content"}),
]
SIZES: dict[str, Any] = dict(dim=16, layers=1, heads=2, ffn_dim=16)


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Rows in the format of the name; of Parquet what stands for them, see `parquet`."""
    with path.open("w", encoding="utf-8", newline="") as stream:
        match path.suffix:
            case ".json":
                json.dump(rows, stream)
            case ".csv" | ".tsv":
                kind = "excel" if path.suffix == ".csv" else "excel-tab"
                table = csv.DictWriter(stream, rows[0], dialect=kind, lineterminator="\n")
                table.writeheader()
                table.writerows(rows)
            case _:
                stream.writelines(json.dumps(row) + "\n" for row in rows)
    return path


@pytest.fixture
def parquet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of lines of JSON in the place of Parquet, where the package that reads it is missing."""

    def load_dataset(name: str, *, data_files: str, **_: Any) -> Any:
        return map(json.loads, Path(data_files).read_text("utf-8").splitlines())

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finetune")
    for name, text in {"story.txt": "Once upon a time", "pairs.tsv": "a cat\teine Katze"}.items():
        (folder / name).write_text(text + "\n")
    written(folder / "chat.jsonl", [ROWS["chat"]])
    written(folder / "prefer.jsonl", [ROWS["prefer"]])
    presets = {"gpt2": dict(max_len=64), "bert-base": dict(max_len=64), "t5-small": {}}
    for preset, more in presets.items():
        regard.build(preset, **SIZES, vocab=50, **more).save(folder / preset)
    images = dict(dim=24, layers=1, heads=3, ffn_dim=20, size=12, patch=4)
    regard.build("vit-small", **images).save(folder / "vit")
    return folder


@pytest.mark.filterwarnings("ignore::regard.errors.Notice")
@pytest.mark.usefixtures("parquet")
@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet", "csv", "tsv"])
@pytest.mark.parametrize("model, name, task, columns", MEANT)
def test_task_is_what_the_columns_say_in_every_format(
    model: str,
    name: str,
    task: str,
    columns: dict[str, str],
    ending: str,
    home: Path,
    tmp_path: Path,
) -> None:
    row = ROWS[name]
    if ending in ("csv", "tsv") and not all(isinstance(x, str | int) for x in row.values()):
        pytest.skip("lists do not stand in such tables")
    file = written(tmp_path / f"{name}.{ending}", [{**row, "more": i} for i in range(12)])
    tables = decide(home / model, file, None, "full")
    assert tables["task"] == task and tables["data"].get("columns", {}) == columns
    assert tables["data"]["held"] == 0.05 and tables["data"]["length"] <= 1024


@pytest.mark.filterwarnings("ignore::regard.errors.Notice")
@pytest.mark.parametrize(
    "model, file, task",
    [
        ("gpt2", "story.txt", "lm"),
        ("bert-base", "story.txt", "mlm"),
        ("t5-small", "story.txt", "spans"),
        ("t5-small", "pairs.tsv", "seq2seq"),
        ("vit", "story.txt", "image"),
    ],
)
def test_task_of_files_without_names_is_the_models(
    model: str, file: str, task: str, home: Path
) -> None:
    assert decide(home / model, home / file, None, "full")["task"] == task


def test_what_is_not_plain_is_told(home: Path, tmp_path: Path) -> None:
    file = written(tmp_path / "a.json", [ROWS["alpaca"]])
    with pytest.warns(Notice) as said:
        tables = decide(home / "gpt2", file, None, "full")
    texts = "\n".join(str(w.message) for w in said)
    assert "read as chats: instruction and input of the user, output of the assistant" in texts
    assert "a.json that are not read: text" in texts and "ChatML is taken" in texts
    assert "nothing is held out" in texts and not {"held", "valid"} & tables["data"].keys()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        given = {"data.held": 0.5, "data.template": "chatml", "data.columns": ALPACA}
        assert decide(home / "gpt2", file, None, "full", None, given)["task"] == "chat"
        assert decide(home / "gpt2", file, None, "full", "v.json", given)["task"] == "chat"


@pytest.mark.filterwarnings("ignore::regard.errors.Notice")
@pytest.mark.parametrize(
    "task, columns", [("classify", {"text": 1, "label": 0}), ("lm", {"text": "b"})]
)
def test_columns_that_are_said_decide(
    task: str, columns: dict[str, Any], home: Path, tmp_path: Path
) -> None:
    (tmp_path / "odd.csv").write_text("a,b,c\n1,2,3\n")
    given = {f"data.columns.{role}": name for role, name in columns.items()}
    for changes in ({"data.columns": columns}, given):
        tables = decide(home / "gpt2", tmp_path / "odd.csv", None, "full", None, changes)
        assert tables["task"] == task and "columns" not in tables["data"]


# --- what the command sets by itself gives way ----------------------------------------------------------------------

# A value for each setting that the user may give, where its default would show nothing.
VALUES: dict[str, Any] = {
    **{"task": "lm", "train.nan": "skip", "train.metric": "perplexity", "train.compile": True},
    **{"train.precision": "bf16", "train.activation_checkpointing": True, "adapt.method": "full"},
    **{"train.optim.name": "muon", "train.optim.betas": (0.8, 0.9), "adapt.targets": "all"},
    **{"train.schedule.shape": "linear", "data.pack": "stream", "data.overlong": "drop"},
    **{"train.parallel.mode": "fsdp", "data.format": "text", "data.unit": "line"},
    **{"data.marker": "--", "data.valid": "story.txt", "data.held": 0.5},
}
# Settings that belong to others, or to another kind of data.
OTHERS = "model tokenizer noise prefer data.train data.weights data.target data.valid_target data.columns data.header"
OTHERS += " data.size data.flip data.shift data.paste data.template"


def settings_of(cls: type, where: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting by its dotted name, with a value that is not its default."""
    hints = get_type_hints(cls)
    for f in fields(cls):
        name, hint = f"{where}{f.name}", hints[f.name]
        if is_dataclass(hint):
            yield from settings_of(hint, f"{name}.")  # type: ignore[arg-type]
        elif name in VALUES:
            yield name, VALUES[name]
        else:
            yield name, True if hint is bool else 0.5 if "float" in str(hint) else 3


SETTINGS = {n: x for n, x in settings_of(Config) if not n.startswith((*OTHERS.split(),))}


@pytest.mark.filterwarnings("ignore::regard.errors.Notice")
@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_default_of_the_command_never_clashes_with_what_is_given(
    method: str, home: Path, tmp_path: Path
) -> None:
    """What can be said in a config that says no more than it must can be said beside `finetune`'s defaults."""
    file, compared = tmp_path / "long.txt", []
    file.write_text("Once upon a time " * 500)
    for name, value in SETTINGS.items():
        data = {"train": str(file), "length": 32}
        data |= {} if name == "data.tokens" else {"rows": 4}
        model = {"folder": str(home / "gpt2")}
        least = {"task": "lm", "model": model, "data": data, "adapt": {"method": method}}
        try:
            check(configure(least, {name: value}))
        except UsageError:
            # It cannot be said by itself either.
            continue
        compared.append(name)
        tables = decide(home / "gpt2", file, None, method, None, {name: value})
        check(configure(tables, {name: value}))
    wanted = {"train.steps", "data.valid", "data.tokens", "data.pack", "adapt.method", "data.held"}
    assert wanted <= {*compared} and len(compared) > 0.7 * len(SETTINGS)


def test_steps_take_the_place_of_epochs_and_both_are_refused(home: Path, tmp_path: Path) -> None:
    both = {"train.steps": 3, "train.epochs": 2}
    with pytest.raises(UsageError, match="both say how long"):
        regard.finetune(home / "gpt2", home / "story.txt", tmp_path / "x", changes=both)


@pytest.mark.filterwarnings("ignore::regard.errors.Notice")
def test_settings_suit_the_method(home: Path) -> None:
    full, lora = (decide(home / "gpt2", home / "chat.jsonl", None, m) for m in ("full", "qlora"))
    gently = decide(home / "gpt2", home / "prefer.jsonl", None, "full")
    rates = [t["train"]["optim"]["lr"] for t in (gently, full, lora)]
    assert rates == sorted(rates) and full["data"]["length"] == 64
    assert lora["adapt"] == {"method": "qlora", "rank": 16, "alpha": 32.0, "targets": "all"}
    assert (
        decide(home / "gpt2", home / "story.txt", "lm", "full", "v.txt")["data"]["valid"] == "v.txt"
    )


def test_command_trains_and_its_run_goes_on(home: Path, tmp_path: Path, capsys: Any) -> None:
    (home / "cats.txt").write_text("Once upon a time there was a cat. " * 60)
    config = {
        "task": "lm",
        "model": {"preset": "gpt2", **SIZES, "dim": 32},
        "data": {"train": str(home / "cats.txt"), "length": 32, "rows": 2, "pack": "windows"},
        "tokenizer": {"kind": "chars"},
        "train": {"steps": 1},
    }
    base, run = regard.train(config, folder=tmp_path / "base").last, tmp_path / "run"
    words = ["finetune", str(base), "--data", str(home / "cats.txt"), "--method", "qlora"]
    more = ["--output-dir", str(run), "--quiet", "--train.epochs", "0.5", "--data.rows", "4"]
    assert main([*words, *more]) == 0
    written = tomllib.loads((run / "config.toml").read_text())
    assert written["task"] == "lm" and written["adapt"]["method"] == "qlora"
    assert written["data"]["rows"] == 4 and (run / "last" / "adapter_config.json").is_file()
    assert main(["train", "--resume", str(run), "--quiet"]) == 0
    assert main([*words, *more]) == 2
    assert "is not empty; go on (--resume), start anew (--overwrite)" in capsys.readouterr().err


def test_run_warms_up_is_evaluated_ten_times_and_keeps_the_best(tmp_path: Path) -> None:
    (tmp_path / "cats.txt").write_text("Once upon a time there was a cat. " * 200)
    model = {"preset": "gpt2", **SIZES, "dim": 32}
    data = {"train": str(tmp_path / "cats.txt"), "length": 32, "rows": 2, "overlong": "split"}
    first = {"task": "lm", "model": model, "data": data, "tokenizer": {"kind": "chars"}}
    base = regard.train({**first, "train": {"steps": 1}}, tmp_path / "base").last
    changes = {"train.steps": 24, "data.length": 32, "train.optim.lr": 0.5}
    result = regard.finetune(base, tmp_path / "cats.txt", tmp_path / "run", changes=changes)
    events = [json.loads(x) for x in (result.folder / "metrics.jsonl").read_text().splitlines()]
    steps, rated = ([e for e in events if e["kind"] == k] for k in ("step", "evaluation"))
    assert len(rated) == 10 and rated[-1]["step"] == 24 and steps[0]["lr"] < steps[1]["lr"]
    best = min(rated, key=lambda event: event["loss"])
    assert (result.best_step, result.best_value) == (best["step"], best["loss"])
    assert result.best is not None and result.best.resolve().name == f"step-{best['step']:08d}"
    # It is what is merged and served where the run's folder is named.
    assert resolve_model(result.folder) == result.best


def test_what_cannot_be_is_said_in_one_sentence(home: Path, tmp_path: Path) -> None:
    (home / "odd.csv").write_text("a,b,c\n1,2,3\n")
    (home / "none.jsonl").write_text("")
    (home / "list.jsonl").write_text("[1]\n")
    (home / "list.json").write_text("[1]\n")
    (home / "broken.json").write_text("[1")
    wrong: dict[str, tuple[Any, str]] = {
        "odd.csv": (None, "has the columns 'a', 'b', 'c', which no task for .* reads"),
        "none.jsonl": (None, "is empty"),
        "list.jsonl": (None, "is not a JSON object but a list"),
        "list.json": (None, "is not a list of JSON objects: it begins with 1"),
        "broken.json": (None, "is not JSON"),
        "gone.txt": (None, "does not exist"),
        "chat.jsonl": ("chats", "task .*chats.*chat"),
    }
    for file, (task, words) in wrong.items():
        with pytest.raises(UsageError, match=words):
            decide(home / "gpt2", home / file, task, "full")
    with pytest.raises(UsageError, match="method .*lore.*lora"):
        regard.finetune(home / "gpt2", home / "story.txt", tmp_path / "x", method="lore")
    with pytest.raises(UsageError, match="config.json"):
        regard.finetune(home / "nowhere", home / "story.txt", tmp_path / "x")
    assert not (tmp_path / "x").exists()
