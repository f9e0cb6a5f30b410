"""regard plan: a table of what a run needs, nothing written, exit 3 where it cannot fit."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.cli.main import main
from regard.data.config import Data
from regard.data.survey import Survey
from regard.presets import build
from regard.training.config import Config
from regard.training.plan import cache_bytes, step_seconds
from regard.training.tasks import TASKS
from regard.training.trainer import Train

TEXT = "the quick brown fox jumps over the lazy dog. " * 60
LM = """
task = "lm"
[model]
preset = "llama"
layers = 2
dim = 32
heads = 4
kv-heads = 2
ffn-dim = 64
max-len = 64
[data]
train = "story.txt"
held = 0.2
length = 16
rows = 4
pack = "windows"
[tokenizer]
kind = "chars"
[train]
steps = 8
"""
PAIRS = """
task = "seq2seq"
model = { preset = "vaswani-base", layers = 1, dim = 32, heads = 4, ffn-dim = 64 }
data = { train = "pairs.tsv", columns = { source = 0, target = 1 }, tokens = 400 }
tokenizer = { vocab = 300 }
train = { steps = 10 }
"""
TUNE = """
task = "lm"
[model]
folder = "base"
[data]
train = "story.txt"
length = 16
rows = 1
pack = "windows"
[tokenizer]
kind = "chars"
[train]
steps = 2
"""
CLASSES = """
task = "classify"
model = { preset = "bert-base", layers = 1, dim = 32, heads = 4, ffn-dim = 64 }
data = { train = "labels.tsv", columns = { text = 1, label = 0 }, rows = 8 }
tokenizer = { kind = "wordpiece", vocab = 300 }
train = { steps = 10 }
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("regard.training.plan.PROBED", 0.01)
    monkeypatch.setattr("regard.training.plan.MEASURED", 0.0)
    (tmp_path / "story.txt").write_text(TEXT, encoding="utf-8")
    pairs = (f"number {i}\tnummer {i} und mehr davon\n" for i in range(200))
    (tmp_path / "pairs.tsv").write_text("".join(pairs), encoding="utf-8")
    labels = (f"{'abc'[i % 3]}\tthis is film number {i}\n" for i in range(90))
    (tmp_path / "labels.tsv").write_text("".join(labels), encoding="utf-8")
    for name, text in {"lm": LM, "pairs": PAIRS, "classes": CLASSES}.items():
        (tmp_path / f"{name}.toml").write_text(text, encoding="utf-8")
    return tmp_path


def planned(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> Any:
    assert main(["plan", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_plan_is_a_table_and_writes_nothing(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(home.rglob("*"))
    assert main(["plan", "lm.toml"]) == 0
    said = capsys.readouterr()
    rows = [line.split()[0] for line in said.out.splitlines()]
    assert rows == ["model", "data", "run", "memory", "disk", "time", "kv", "notice"]
    assert "2 layers x 32, 4 query / 2 kv heads (gqa), rope, gated silu" in said.out
    assert "8 steps x 64 tokens" in said.out and "mha would be 256 B, 2.0 x" in said.out
    assert said.err == "" and sorted(home.rglob("*")) == before


def test_plan_counts_what_training_then_has(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = planned(["lm.toml"], capsys)
    assert not before["data"]["exact"] and before["data"]["tokens"] == len(TEXT)
    assert main(["train", "lm.toml", "--quiet"]) == 0
    capsys.readouterr()
    model = regard.load(home / "runs/lm/last")
    assert before["parameters"] == sum(p.numel() for p in model.parameters())
    after = planned(["lm.toml"], capsys)
    assert after["data"]["exact"] and after["data"]["tokens"] == len(TEXT) + 1  # its end
    (home / "story.txt").write_text(TEXT * 2, encoding="utf-8")
    assert planned(["lm.toml"], capsys)["data"]["exact"] is False


@pytest.mark.usefixtures("home")
def test_plan_of_pairs_and_classes(capsys: pytest.CaptureFixture[str]) -> None:
    pairs = planned(["pairs.toml"], capsys)
    assert pairs["data"]["examples"] == 200 and len(pairs["data"]["longest"]) == 2
    assert 200 < pairs["tokens"] <= 800 and pairs["kv"]["token"] == 2 * 2 * 32
    classes = planned(["classes.toml"], capsys)
    assert classes["data"]["classes"] == 3 and classes["kv"] is None
    assert classes["memory"]["logits"] == 0


def test_every_example_is_counted(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not guessed from the first ones, which may be longer than the rest."""
    rows = [f"{'abc'[i % 3]}\t{'long ' * 400 if i < 600 else 'short'}\n" for i in range(9000)]
    (home / "labels.tsv").write_text("".join(rows))
    told = planned(["classes.toml"], capsys)["data"]
    assert told["examples"] == 9000 and told["counted"] and not told["exact"]
    assert main(["plan", "classes.toml"]) == 0
    assert " tokens in 9,000 texts" in capsys.readouterr().out


PRESETS: dict[str, dict[str, Any]] = {
    **{name: {"ffn_dim": 32} for name in ("gpt2", "bert-base", "vaswani-base")},
    **{
        name: {"ffn_dim": 32, "size": 8, "patch": 4, "channels": 1}
        for name in ("vit-small", "painter")
    },
}


@pytest.mark.parametrize("task", TASKS)
def test_step_of_every_task_is_measured(task: str) -> None:
    preset, reads = TASKS[task].presets.split()[0], TASKS[task].reads
    if preset not in PRESETS:
        pytest.skip(f"{preset} has no small form here")
    model = {"preset": preset, "layers": 1, "dim": 16, "heads": 2, **PRESETS[preset]}
    more: dict[str, Any] = {} if reads in ("image", "draw") else {"length": 16}
    more |= {"pack": "none"} if task in ("spans", "infill") else {}
    config = Config(task, Data("x", rows=4, **more), model, train=Train(steps=3))
    sides = 2 if reads in ("seq2seq", "prefer") else 1
    found = Survey(50, 500, (12,) * sides, (9.0,) * sides, classes=3, vocab=150)
    seconds = step_seconds(config, found, torch.device("cpu"))
    assert seconds is not None and seconds > 0


def test_time_is_that_of_measured_steps(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = planned(["lm.toml", "--train.steps", "100", "--train.evaluate", "20"], capsys)
    assert told["measured"] > 0 and told["seconds"] > 100 * told["measured"]
    assert main(["plan", "lm.toml", "--train.evaluate", "2"]) == 0
    said = capsys.readouterr().out
    assert "8 steps of " in said and "as just measured, and 4 evaluations" in said


@pytest.mark.usefixtures("home")
def test_settings_change_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    plain = planned(["lm.toml"], capsys)
    bf16 = planned(["lm.toml", "--train.precision", "bf16"], capsys)
    assert bf16["memory"]["activations"] < plain["memory"]["activations"]
    assert bf16["memory"]["copies"] > 0 == plain["memory"]["copies"]
    deep = planned(
        ["lm.toml", "--model.layers", "4", "--train.activation_checkpointing", "true"], capsys
    )
    assert deep["parameters"] > plain["parameters"] and deep["flops"] > 2 * plain["flops"]
    assert planned(["lm.toml", "--keep", "5"], capsys)["disk"]["total"] > plain["disk"]["total"]


@pytest.mark.usefixtures("home")
def test_run_that_cannot_fit_is_exit_3_with_the_cheapest_changes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.training.plan.free_memory", lambda device: 1 << 30)
    large = ["--model.layers", "12", "--model.dim", "128", "--data.rows", "16384"]
    assert main(["plan", "lm.toml", *large]) == 3
    said = capsys.readouterr()
    less = [line.split()[1] for line in said.out.splitlines() if line.startswith("less")]
    assert less[0] == "--train.micro_batches" and less[-1] == "--data.rows"
    assert said.err.startswith("error: this run does not fit: it needs about ")
    assert len(said.err.splitlines()) == 1
    told = planned(["lm.toml", *large], capsys, code=3)
    assert not told["fits"] and told["changes"]
    # Each as it is printed makes it fit.
    for change in told["changes"]:
        assert change["total"] <= 1 << 30
        flags = [
            word for name, value in change["settings"].items() for word in (f"--{name}", value)
        ]
        assert planned(["lm.toml", *large, *flags], capsys)["fits"]


def test_model_that_is_too_large_to_tune_whole_is_tuned_in_part(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """LoRA and LoRA on 4 bits, by plan and by train, where they are enough; typed as it is printed."""
    build("gpt2", vocab=60, layers=8, dim=256, heads=4, max_len=64).save("base")
    (home / "tune.toml").write_text(TUNE, encoding="utf-8")
    whole = planned(["tune.toml"], capsys)["memory"]["total"]
    lora, qlora = (
        planned(["tune.toml", "--adapt.method", name], capsys)["memory"]["total"]
        for name in ("lora", "qlora")
    )
    assert qlora < lora < whole
    for free, methods in ((lora, ["lora", "qlora"]), ((lora + qlora) // 2, ["qlora"])):
        monkeypatch.setattr("regard.training.plan.free_memory", lambda device, free=free: free)
        told = planned(["tune.toml"], capsys, code=3)
        found = [change["settings"].get("adapt.method") for change in told["changes"]]
        assert found == methods
        for name in methods:
            assert planned(["tune.toml", "--adapt.method", name], capsys)["fits"]
    # A run that begins counts what it holds already.
    held = sum(p.nbytes for p in regard.load("base").parameters())
    free = (lora + qlora) // 2 - held
    monkeypatch.setattr("regard.training.plan.free_memory", lambda device: free)
    assert main(["train", "tune.toml"]) == 3
    assert "--adapt.method qlora (a small part learns" in capsys.readouterr().err


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("fast", [True, False])
def test_bf16_on_a_cpu_without_it_is_told_beside_fp32(
    fast: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.training.plan.is_fast", lambda dtype: fast)
    told = planned(["lm.toml", "--train.precision", "bf16"], capsys)
    assert (told["in_fp32"] is None) == fast
    assert planned(["lm.toml"], capsys)["in_fp32"] is None
    monkeypatch.setattr("regard.training.plan.Forecast._fp32_step", lambda self, job: 1e-9)
    assert main(["plan", "lm.toml", "--train.precision", "bf16"]) == 0
    hint = "hint    this CPU does not multiply bf16"
    assert (hint in capsys.readouterr().out) == (not fast)


@pytest.mark.usefixtures("home")
def test_full_disk_is_exit_3(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.training.plan.free_disk", lambda folder: 1 << 20)
    assert main(["plan", "lm.toml"]) == 3
    assert "its checkpoints do not fit" in capsys.readouterr().err


@pytest.mark.usefixtures("home")
def test_overlong_data_is_told_before_training(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "lm.toml", "--data.pack", "documents"]) == 0
    assert "longer than 16 tokens, so training would stop" in capsys.readouterr().out


def test_plan_of_a_model_folder(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = build("gpt2", layers=1, dim=32, heads=4, vocab=50, max_len=64)
    model.save(home / "model")
    told = planned(["model"], capsys)
    assert told["parameters"] == sum(p.numel() for p in model.parameters()) and told["fits"]
    assert main(["plan", "model"]) == 0
    assert "8.0 KiB at 64 tokens" in capsys.readouterr().out
    assert main(["plan", "model", "--model.layers", "3"]) == 2
    tune = LM[: LM.index("[model]")] + '[model]\nfolder = "model"\n[adapt]\nmethod = "lora"\n'
    (home / "tune.toml").write_text(tune + LM[LM.index("[data]") :], encoding="utf-8")
    told = planned(["tune.toml"], capsys)
    assert told["trained"] < told["parameters"] / 10
    assert told["disk"]["checkpoint"] < (1 << 20) + told["memory"]["weights"]


def test_cache_of_known_models() -> None:
    """Llama 3.1 8B: 128 KiB a token. DeepSeek-V3: 70,272 bytes, 56.9 times less than keys and values of all heads."""
    assert cache_bytes(build("llama-3.1-8b", device="meta")) == {
        "token": 128 << 10,
        "mha": 512 << 10,
    }
    found = cache_bytes(build("deepseek-v3", device="meta"))
    assert found is not None and found["token"] == 70_272
    assert found["mha"] / found["token"] == pytest.approx(56.9, abs=0.05)


MISTAKES = {
    "no file": (["no.toml"], 2, "no.toml cannot be read: No such file"),
    "no model": (["."], 4, "config.json does not exist"),
    "unknown key": (["lm.toml", "--train.stpes", "3"], 2, "did you mean 'steps'?"),
    "preset": (["lm.toml", "--model.preset", "gtp2"], 2, "preset 'gtp2' is unknown"),
    "tokenizer": (["lm.toml", "--tokenizer.knid", "bpe"], 2, "tokenizer.knid is no setting"),
    "no tokenizer": (["lm.toml", "--tokenizer.folder", "gone"], 4, "has no tokenizer.json"),
    "data": (["lm.toml", "--data.train", "gone.txt"], 4, "gone.txt does not exist"),
    "too long": (["lm.toml", "--data.length", "65"], 2, "the model's context is 64 tokens"),
    "device": (["lm.toml", "--device", "gpu"], 2, "choose auto, cpu, cuda"),
    "keep": (["lm.toml", "--keep", "0"], 2, "--keep is 0; give a number from 1"),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.usefixtures("home")
def test_mistake_is_one_sentence(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, code, text = MISTAKES[name]
    assert main(["plan", *arguments]) == code
    said = capsys.readouterr()
    assert said.out == "" and text in said.err
    assert said.err.startswith("error: ") and len(said.err.splitlines()) == 1


@pytest.mark.parametrize(("preset", "readable"), [("llama", True), ("vaswani-base", False)])
def test_plan_says_whether_transformers_reads_it_and_training_does_not(
    preset: str, readable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """It is told before the run, and where a folder for others is asked for; not in the middle of a first run."""
    monkeypatch.chdir(tmp_path)
    Path("story.txt").write_text(TEXT, encoding="utf-8")
    Path("pairs.tsv").write_text("a b\tb a\nc d\td c\n" * 8, encoding="utf-8")
    Path("run.toml").write_text(LM if preset == "llama" else PAIRS, encoding="utf-8")
    told = "Regard's own format, which transformers does not read: no family of Hugging Face"
    assert main(["plan", "run.toml"]) == 0
    assert (told in capsys.readouterr().out) != readable
    assert main(["train", "run.toml", "--train.steps", "1"]) == 0
    said = "".join(capsys.readouterr())
    assert "own format" not in said
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        regard.load("runs/run").save("out")
    assert any(told in str(w.message) for w in caught) != readable
