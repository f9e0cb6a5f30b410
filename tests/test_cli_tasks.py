"""What training takes from its data, what it says of itself, and what the commands afterwards remember of it."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard.attention import DSA, MLA
from regard.block import Tower
from regard.checkpoint.hf import Origin
from regard.cli.main import main
from regard.cli.settings import MODEL, keys
from regard.cli.shared import flags_of
from regard.cli.train import Options
from regard.layers import LM, MLP
from regard.models import Tokens, TransformerConfig
from regard.position import Rope
from regard.presets import PRESETS
from regard.training.config import FOREIGN_NAMES, Config
from regard.training.objectives import seq2seq
from regard.training.tasks import TASKS
from tests.test_cli_train import CONFIG, TEXT

PLAIN = CONFIG.replace("max-len = 32\n", "")
DATA = PLAIN.partition("[data]")[2].replace('[tokenizer]\nkind = "chars"\n', "")
FOLDER = 'task = "lm"\n[model]\nfolder = "start"\n[data]' + DATA


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("regard.training.plan.PROBED", 0.01)
    (tmp_path / "story.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "story.toml").write_text(PLAIN, encoding="utf-8")
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    capsys.readouterr()
    assert main(list(arguments)) == code
    return capsys.readouterr()


# --- from the data ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("home")
def test_context_is_the_rows_of_training_unless_it_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = said(capsys, "train", "story.toml", "--quiet")
    assert regard.load("runs/story/last").config.max_len == 16 and "note:" not in told.err
    assert "notice" not in said(capsys, "plan", "story.toml").out
    told = said(capsys, "train", "story.toml", "--quiet", "--model.max-len", "48", "--overwrite")
    assert regard.load("runs/story/last").config.max_len == 48
    assert "note: positions from 16 to 48 will not be trained" in told.err
    assert (
        "positions from 16 to 48" in said(capsys, "plan", "story.toml", "--model.max-len", "48").out
    )
    past = said(capsys, "generate", "runs/story", "the ", "--max-new-tokens", "20")
    assert "24 tokens are past the 16 that this model was trained on" in past.err
    within = said(capsys, "generate", "runs/story", "the ", "--max-new-tokens", "12")
    assert "past" not in within.err


def test_special_tokens_are_the_tokenizers(home: Path) -> None:
    """Never GPT-2's own, which a vocabulary of thirty characters does not have."""
    assert main(["train", "story.toml", "--quiet"]) == 0
    config = json.loads((home / "runs/story/last/config.json").read_text())
    tokens = json.loads((home / "runs/story/last/tokenizer.json").read_text())["added_tokens"]
    end = next(t["id"] for t in tokens if t["content"] == "<|endoftext|>")
    assert config["eos_token_id"] == config["bos_token_id"] == config["pad_token_id"] == end


def test_fine_tuning_keeps_what_the_folder_says_of_its_tokens(home: Path) -> None:
    assert main(["train", "story.toml", "--quiet"]) == 0
    start = regard.load("runs/story/last")
    start.origin.config["eos_token_id"] = [1, 5]
    start.save(home / "start")
    (home / "more.toml").write_text(FOLDER)
    assert main(["train", "more.toml", "--quiet"]) == 0
    config = json.loads((home / "runs/more/last/config.json").read_text())
    assert config["eos_token_id"] == [1, 5]


# --- what it says -------------------------------------------------------------------------------------------------


def test_bf16_folder_is_trained_in_float32_and_says_so(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "story.toml", "--quiet"]) == 0
    regard.load("runs/story/last").bfloat16().save(home / "start")
    (home / "more.toml").write_text(FOLDER)
    told = said(capsys, "train", "more.toml", "--quiet")
    assert (
        "note: the folder's weights are bfloat16; they are trained and saved in float32" in told.err
    )
    assert {p.dtype for p in regard.load("runs/more/last").parameters()} == {torch.float32}


@pytest.mark.usefixtures("home")
def test_what_the_tokenizer_cannot_read_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "story.toml", "--quiet"]) == 0
    told = said(capsys, "generate", "runs/story", "the üx€ ü", "--max-new-tokens", "2")
    assert "no token for 'ü', '€': the model reads <unk>" in told.err
    assert (
        "note:" not in said(capsys, "generate", "runs/story", "the ", "--max-new-tokens", "2").err
    )
    with pytest.warns(UserWarning, match="no token for 'ü'"):
        regard.generate(regard.load("runs/story/last"), "ü", max_new_tokens=1)


# --- the indexer of sparse attention ------------------------------------------------------------------------------


def sparse_folder(home: Path) -> dict[str, torch.Tensor]:
    """A tiny sparse model with the tokenizer of a run; its weights."""
    assert main(["train", "story.toml", "--quiet"]) == 0
    torch.manual_seed(0)
    attention = DSA(MLA(2, latent=8, rope_dim=4, rope=Rope()), 2, 4, 4, rope_dim=4)
    tower = Tower(16, 1, attention, MLP(32))
    model = TransformerConfig(Tokens(40), tower, LM(), max_len=64).make()
    model.origin = Origin("regard", files=regard.load("runs/story/last").origin.files)
    model.save(home / "start")
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def test_each_stage_trains_the_indexers_it_should(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, moved = sparse_folder(home), {}
    for task in ("lm", "dense_index", "sparse_index"):
        # Rows of no more than topk tokens are dense attention.
        text = FOLDER.replace("lm", task)
        (home / f"{task}.toml").write_text(
            text.replace("length = 16", "length = 4") if task == "lm" else text
        )
        told = said(capsys, "train", f"{task}.toml", "--quiet")
        assert ("indexers of sparse attention no gradient" in told.err) == (task == "lm")
        model = regard.load(f"runs/{task}/last")
        changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
        moved[task] = {"indexer" in n for n in changed}
    assert moved == {"lm": {False}, "dense_index": {True}, "sparse_index": {True, False}}
    assert "no gradient" in said(capsys, "plan", "lm.toml").out


def test_indexer_that_would_choose_untrained_is_an_error(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sparse_folder(home)
    (home / "more.toml").write_text(FOLDER)
    for command in ("train", "plan"):
        told = said(capsys, command, "more.toml", code=2)
        assert 'task = "lm" gives the indexers of sparse attention no gradient' in told.err
        assert "choose 4 keys in rows of 16 tokens: say data.length = 4" in told.err
        assert 'task = "dense_index", then task = "sparse_index"' in told.err
    assert main(["train", "more.toml", "--quiet", "--adapt.method", "lora"]) == 0


def test_indexers_are_trained_where_there_are_some(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "plain.toml").write_text(PLAIN.replace("lm", "sparse_index"))
    told = said(capsys, "train", "plain.toml", code=2)
    assert "this model has no indexer to train" in told.err
    (home / "more.toml").write_text(FOLDER.replace("lm", "dense_index"))
    told = said(capsys, "train", "more.toml", "--adapt.method", "lora", code=2)
    assert "trains indexers; leave [adapt] out" in told.err


# --- what eval and peek remember ----------------------------------------------------------------------------------

LABELS = """
task = "classify"
model = { preset = "bert-base", layers = 1, dim = 16, heads = 2, ffn-dim = 32 }
data = { train = "films.tsv", columns = { text = 1, label = 0 }, rows = 8, length = 12, overlong = "truncate" }
tokenizer = { kind = "chars" }
train = { steps = 2 }
"""


def test_eval_reads_as_the_run_did(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The columns by their numbers, so no header; the length, and that longer texts are cut."""
    rows = [f"{'ab'[i % 2]}\tfilm number {i}\n" for i in range(20)]
    (home / "films.tsv").write_text("".join(rows))
    (home / "films.toml").write_text(LABELS)
    assert main(["train", "films.toml", "--quiet"]) == 0
    for name in ("runs/films", "runs/films/last", "runs/films/checkpoints/step-00000002"):
        told = said(capsys, "eval", name, "--data", "films.tsv", "--json")
        assert json.loads(told.out)["data"].startswith("20 examples")
    (home / "other.jsonl").write_text('{"text": "film", "label": "a"}\n')
    told = said(
        capsys,
        "eval",
        "runs/films",
        "--data",
        "other.jsonl",
        "--columns",
        "text=text",
        "--columns",
        "label=label",
        "--json",
    )
    assert json.loads(told.out)["data"].startswith("1 example,")
    regard.load("runs/films/last").save(home / "moved")
    told = said(capsys, "eval", "moved", "--data", "films.tsv", code=2)
    assert "its first line, read as their names, has 'a', 'film number 0'" in told.err
    assert "--columns text=1" in told.err


@pytest.mark.usefixtures("home")
def test_eval_reads_rows_of_the_trained_length(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "story.toml", "--quiet", "--model.max-len", "48"]) == 0
    losses = []
    for more in ([], ["--length", "16"], ["--length", "48"]):
        told = said(capsys, "eval", "runs/story", "--data", "story.txt", "--json", *more)
        losses.append(json.loads(told.out)["metrics"]["loss"])
        assert ("past the 16" in told.err) == ("48" in more)
    assert losses[0] == losses[1] != losses[2]


def test_peek_shows_the_batch_of_a_config(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "prefix.toml").write_text(PLAIN.replace("lm", "prefix"))
    shown = json.loads(said(capsys, "data", "peek", "prefix.toml", "--json").out)
    assert shown["task"] == "prefix" and shown["shape"] == [4, 16]
    assert "DrawPrefix" in shown["about"]
    told = said(capsys, "data", "peek", "prefix.toml", "--length", "8", code=2)
    assert "give it alone" in told.err
    assert main(["train", "prefix.toml", "--quiet"]) == 0
    given = [
        "data",
        "peek",
        "story.txt",
        "--tokenizer",
        "runs/prefix",
        "--pack",
        "stream",
        "--json",
    ]
    assert json.loads(said(capsys, *given).out)["shape"] == [4, 128]


# What a config of each way to read data says of its files.
READ = {
    "lm": "train = 'story.txt', length = 16, rows = 4, pack = 'stream'",
    "mlm": "train = 'story.txt', length = 16, rows = 4, pack = 'stream'",
    "seq2seq": "train = 'films.tsv', columns = { source = 0, target = 1 }, rows = 4",
    "classify": "train = 'films.tsv', columns = { text = 1, label = 0 }, rows = 4",
    "tag": "train = 'tags.jsonl', rows = 2",
    "answer": "train = 'asked.jsonl', rows = 2",
    "image": "train = 'x.npz', rows = 2",
    "segment": "train = 'parts.npz', rows = 2",
    "caption": "train = 'said.npz', rows = 2",
    "draw": "train = 'said.npz', rows = 2",
    "chat": "train = 'chats.jsonl', length = 64, rows = 2",
    "prefer": "train = 'pairs.jsonl', rows = 2",
}


@pytest.mark.parametrize("task", TASKS)
def test_peek_shows_every_task(task: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a config, and from files where `--task` has it: the same batch."""
    reads = TASKS[task].reads
    (home / "films.tsv").write_text("".join(f"{'ab'[i % 2]}\tfilm {i}\n" for i in range(8)))
    rows = {"words": ["a", "film"], "tags": ["x", "y"]}, {"words": ["ab"], "tags": ["x"]}
    (home / "tags.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    asked = {"text": "who", "second": "it was Ann", "start": 7, "end": 10}
    (home / "asked.jsonl").write_text(f"{json.dumps(asked)}\n" * 2)
    np.savez(home / "x.npz", x=np.zeros((4, 8, 8), np.uint8), y=np.arange(4) % 2)
    np.savez(home / "parts.npz", x=np.zeros((4, 8, 8), np.uint8), y=np.arange(16).reshape(4, 2, 2))
    np.savez(home / "said.npz", x=np.zeros((4, 8, 8), np.uint8), y=np.array(["a", "b c"] * 2))
    talk = [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "Ann"}]
    (home / "chats.jsonl").write_text(f"{json.dumps({'messages': talk})}\n" * 4)
    pair = {"prompt": "who?", "chosen": "Ann", "rejected": "nobody"}
    (home / "pairs.jsonl").write_text(f"{json.dumps(pair)}\n" * 4)
    tokenizer = "" if reads in ("image", "segment") else "tokenizer = { kind = 'chars' }"
    model = f"model = {{ preset = '{TASKS[task].presets.split()[0]}' }}"
    text = f"task = '{task}'\n{model}\ndata = {{ {READ[reads]} }}\n{tokenizer}\n"
    (home / "task.toml").write_text(text)
    shown = json.loads(said(capsys, "data", "peek", "task.toml", "--json").out)
    assert shown["task"] == task and len(shown["rows"]) > 1
    assert f"task {task}, " in said(capsys, "data", "peek", "task.toml").out
    first = shown["rows"][0]
    assert ("source" in first) == (TASKS[task].objective is seq2seq and reads != "caption")
    corrupted = "corrupted by" in shown["about"]
    assert corrupted == (TASKS[task].corruption is not None)


def test_noise_is_a_setting(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = PLAIN.replace('"lm"', '"mlm"').replace("held = 0.2\n", "")
    counts = []
    for rate in ("", "[noise]\nrate = 0.6\n"):
        (home / "noise.toml").write_text(plain + rate)
        shown = json.loads(said(capsys, "data", "peek", "noise.toml", "--json").out)
        counts.append(sum(sum(row["counted"]) for row in shown["rows"]))
    assert counts[1] > 2 * counts[0] > 0
    (home / "noise.toml").write_text(plain + "[noise]\npermute = true\n")
    told = said(capsys, "train", "noise.toml", code=2)
    assert "noise.permute is not used by the task mlm; leave it out" in told.err
    (home / "noise.toml").write_text(plain + "[noise]\nrate = 1.5\n")
    assert "noise.rate = 1.5" in said(capsys, "train", "noise.toml", code=2).err


def test_questions_without_an_answer_are_trained_on(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SQuAD 2.0: `answers` is empty where the text has none."""
    known = {"question": "who?", "answers": [{"text": "Ann", "answer_start": 7}]}
    unknown = {"question": "why?", "answers": [], "is_impossible": True}
    part = {"context": "it was Ann.", "qas": [known, unknown] * 4}
    (home / "squad.json").write_text(json.dumps({"data": [{"paragraphs": [part]}]}))
    text = LABELS.replace('"classify"', '"answer"').replace("films.tsv", "squad.json")
    text = text.replace("columns = { text = 1, label = 0 }, ", 'valid = "squad.json", ')
    (home / "squad.toml").write_text(text.replace("length = 12", "length = 32"))
    metric = ["--train.metric", "exact", "--train.steps", "120", "--train.optim.lr", "3e-2"]
    assert main(["train", "squad.toml", "--quiet", *metric]) == 0
    told = said(capsys, "eval", "runs/squad", "--data", "squad.json", "--json")
    assert json.loads(told.out)["metrics"]["exact"] == 1.0
    assert "0 to 0: (unanswered)" in said(capsys, "data", "peek", "squad.toml").out


def test_none_is_a_word_in_toml(home: Path) -> None:
    """Seq2seq of 2014 without attention: the encoder's last state is all that the decoder knows."""
    (home / "films.tsv").write_text("".join(f"{'ab'[i % 2]}\tfilm {i}\n" for i in range(8)))
    model = "model = { preset = 'bahdanau', dim = 16, attention = 'none' }"
    data = f"data = {{ {READ['seq2seq']} }}\ntokenizer = {{ kind = 'chars' }}"
    (home / "plain.toml").write_text(
        f"task = 'seq2seq'\n{model}\n{data}\ntrain = {{ steps = 2 }}\n"
    )
    assert main(["train", "plain.toml", "--quiet"]) == 0
    assert regard.load("runs/plain/last").config.attention is None
    assert main(["train", "runs/plain/config.toml", "--quiet", "--output-dir", "again"]) == 0
    assert regard.load("again/last").config.attention is None


# --- names and epochs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, ours",
    [
        ("train.lr", "train.optim.lr"),
        ("train.learning_rate", "train.optim.lr"),
        ("train.batch_size", "data.rows"),
        ("data.batch_size", "data.rows"),
        ("data.epochs", "train.epochs"),
        ("train.num_train_epochs", "train.epochs"),
        ("train.optim.warmup", "train.schedule.warmup"),
        ("tokenizer.size", "tokenizer.vocab"),
        ("data.max_length", "data.length"),
    ],
)
@pytest.mark.usefixtures("home")
def test_names_of_elsewhere_lead_to_ours(
    change: str, ours: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = said(capsys, "train", "story.toml", f"--{change}", "3", code=2)
    assert f"{change} is no" in told.err and f"here it is {ours}" in told.err


@pytest.mark.parametrize(
    "flag, ours",
    [("lr", "train.optim.lr"), ("batch-size", "data.rows"), ("epochs", "train.epochs")],
)
@pytest.mark.usefixtures("home")
def test_flags_of_elsewhere_lead_to_ours(
    flag: str, ours: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = said(capsys, "train", "story.toml", f"--{flag}", "3", code=2)
    assert f"here it is --{ours}" in told.err


def test_what_elsewhere_leads_to_is_there() -> None:
    """Every hint names a setting or a flag that exists, and no name that is hinted at is one of ours at that place."""
    ours = {row[0] for row in [*keys(Config), *MODEL]} | {"tokenizer.folder"}
    flags = {f"--{name.replace('_', '-')}" for name in flags_of(Options)}
    wanted = """learning_rate num_train_epochs per_device_train_batch_size gradient_accumulation_steps warmup_ratio bf16
        output_dir max_steps weight_decay lr_scheduler_type max_grad_norm save_steps eval_steps logging_steps seed"""
    assert set(wanted.split()) <= FOREIGN_NAMES.keys()
    for name, here in FOREIGN_NAMES.items():
        first = here.split()[0]
        assert first in ours | flags | {"metrics.jsonl"}, (name, here)
        assert name not in vars(Config)["__dataclass_fields__"], name


@pytest.mark.parametrize(
    "flag, hint",
    [
        ("report-to", "here it is --log-to"),
        ("bf16", "here it is --train.precision (fp32 or bf16)"),
        ("logging-steps", "here it is metrics.jsonl in the run's folder (every step)"),
        ("train.output_dir", "train.output_dir is not a setting; here it is the flag --output-dir"),
    ],
)
@pytest.mark.usefixtures("home")
def test_hints_say_what_to_type(flag: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert hint in said(capsys, "train", "story.toml", f"--{flag}", "3", code=2).err


def test_help_all_has_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "train", "--help-all").out.splitlines()
    table = {line.split()[0]: line for line in lines[1:] if line}
    assert {row[0] for row in keys(Config)} < table.keys()
    assert {"tokenizer.vocab", "model.preset", "train.parallel.mode"} < table.keys()
    assert all(line.count(mark) % 2 == 0 for line in lines for mark in ('"', "`")), "an open quote"
    lr = re.split("  +", table["train.optim.lr"])
    assert lr == ["train.optim.lr", "number, more than 0", "0.001", "the peak learning rate"]


def test_presets_are_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "presets").out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(PRESETS)
    assert lines[1].split() == ["gpt2", "gpt2", "12", "768", "12", "50257"]
    one = said(capsys, "presets", "mixtral-8x7b").out
    assert one.startswith("# 46,702,792,704 parameters; [model] preset = ")
    assert "tower.ffn.experts = 8\n" in one
    whole = json.loads(said(capsys, "presets", "gpt2", "--json").out)
    assert whole["parameters"] == 124439808 and whole["config"]["tower"]["dim"] == 768
    assert "did you mean 'gpt2'?" in said(capsys, "presets", "gpt-2", code=2).err


@pytest.mark.usefixtures("home")
def test_transformer_leads_to_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    told = said(capsys, "train", "story.toml", "--model.preset", "transformer", code=2)
    assert 'preset = "vaswani-base"' in told.err


def test_epochs_are_passes_over_the_data(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """2,160 of 2,700 characters in rows of 16, 4 in a batch: 34 batches are a pass."""
    (home / "two.toml").write_text(PLAIN.replace("steps = 8", "epochs = 1.5"))
    planned = json.loads(said(capsys, "plan", "two.toml", "--json").out)
    told = said(capsys, "train", "two.toml", "--quiet", "--train.save", "0")
    assert told.out.endswith("step-00000051\n")
    run = json.loads((home / "runs/two/run.json").read_text())
    assert run["steps"] == run["config"]["train"]["steps"] == 51
    assert planned["steps"] == pytest.approx(51, abs=1) and planned["passes"] == pytest.approx(
        1.5, rel=0.02
    )
    told = said(capsys, "train", "two.toml", "--train.steps", "5", code=2)
    assert "train.steps and train.epochs both say how long" in told.err
    told = said(capsys, "train", "two.toml", "--train.epochs", "0", code=2)
    assert "train.epochs = 0.0: give more than 0" in told.err
