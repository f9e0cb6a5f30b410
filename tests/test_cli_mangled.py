"""Commands with words left out, put in and swapped for odd ones: an answer or one sentence, never a traceback, and
what was there stays. REGARD_MANGLED=N runs N rounds instead of a few."""

import os
import random
import re
from pathlib import Path

import pytest

from tests.test_cli import call, folder

ROUNDS = int(os.environ.get("REGARD_MANGLED", "2"))
CALLS = 40  # of a round
TOML = """
task = "lm"
model = {preset = "gpt2", layers = 1, dim = 16, heads = 2, max-len = 32}
data = {train = "lines.txt", valid = "lines.txt", length = 16, rows = 2, pack = "windows"}
tokenizer = {kind = "bytes"}
train = {steps = 3, evaluate = 3}
"""
ODD = [
    ".",
    "..",
    "nofile",
    "folder",
    "bytes.bin",
    "empty.txt",
    "lines.txt",
    "pairs.tsv",
    "run.toml",
    "a/b/c",
    "bytes.bin/x",
    "é☃",
    "日本",
    "-1",
    "0",
    "1",
    "1.5",
    "1e400",
    "1e-30",
    "nan",
    "inf",
    "-inf",
    "99999999999999999999",
    "1,2",
    "-1,-2",
    "2,99",
    "[]",
    "{}",
    "true",
    "None",
    "--",
    "-",
    "runs/run",
    "page.html",
]
SETTINGS = [
    "train.steps",
    "train.optim.lr",
    "train.optim.name",
    "train.seed",
    "train.precision",
    "train.schedule.shape",
    "train.clip",
    "train.schedule.warmup",
    "train.micro_batches",
    "train.ema",
    "train.patience",
    "train.save",
    "train.evaluate",
    "data.rows",
    "data.length",
    "data.pack",
    "data.train",
    "model.dim",
    "model.heads",
    "model.layers",
    "model.vocab",
    "model.max-len",
    "tokenizer.kind",
    "tokenizer.vocab",
    "task",
]
GIVEN = ["bytes.bin", "empty.txt", "lines.txt", "pairs.tsv", "run.toml"]
PROMISED = {0, 1, 2, 3, 4, 5}


SOUND = """
generate GPT dog --max-new-tokens 2
translate T5 lines.txt --max-new-tokens 2
translate MARIAN lines.txt --max-new-tokens 2 --align
chat GPT --max-new-tokens 2
train run.toml --output-dir new
train run.toml --resume
eval runs/run/best lines.txt
eval T5 pairs.tsv
classify GPT lines.txt
embed GPT lines.txt
merge GPT merged
convert GPT converted
plan run.toml
report runs/run
compare runs/run runs/run
look GPT dog --output page.html
parity GPT --only bf16
recipes show dates
data peek run.toml
tokenizer train lines.txt --out tok
explain softmax 1 2 3
doctor
"""


def commands() -> list[list[str]]:
    text = SOUND
    for word, name in (("GPT", "gpt2"), ("T5", "t5"), ("MARIAN", "marian")):
        text = text.replace(word, str(folder(name)))
    return [line.split() for line in text.split("\n") if line]


def mangled(draw: random.Random, words: list[str]) -> list[str]:
    name = 2 if words[0] in ("data", "tokenizer") else 1
    for _ in range(draw.choice((1, 1, 2))):
        what, at = draw.random(), draw.randrange(name, len(words) + 1)
        if what < 0.45:
            words[at : at + 1] = [draw.choice(ODD)]
        elif what < 0.55:
            del words[at : at + 1]
        elif what < 0.65:
            words.insert(at, draw.choice(["", " ", *ODD]))
        elif what < 0.85 and (known := flags(words[:name])):
            words += [draw.choice(known), draw.choice(ODD)][: draw.choice((1, 2, 2))]
        elif words[0] in ("train", "plan", "data"):
            words += [f"--{draw.choice(SETTINGS)}", draw.choice(ODD)]
    return words


def flags(name: list[str]) -> list[str]:
    found = set(re.findall(r"(?<!\S)--[a-z][a-z-]+", call(*name, "--help").out))
    return sorted(found - {"--help", "--overwrite", "--force"})


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("mangled")
    (home / "folder").mkdir()
    (home / "bytes.bin").write_bytes(bytes(range(256)) * 10)
    (home / "empty.txt").write_text("")
    (home / "lines.txt").write_text("the cat sat\n\na dog\n" * 30)
    (home / "pairs.tsv").write_text("a b\tc d\n" * 40)
    (home / "run.toml").write_text(TOML)
    return home


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_mangled_command_ends_in_an_answer_or_a_sentence(
    seed: int, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setattr("regard.cli.main.give_up", lambda code: code)  # closes the process' stdout
    monkeypatch.setattr("regard.training.plan.PROBED", 0.02)
    if not Path("runs/run").exists():
        assert call("train", "run.toml", "--quiet").code == 0
    given, draw = [home / name for name in GIVEN], random.Random(seed)
    before = {path: path.read_bytes() for path in given}
    for _ in range(CALLS):
        words = mangled(draw, draw.choice(commands()))
        done = call(*words, stdin=draw.choice(["", "Hi\n", "\0\n"]))
        assert done.code in PROMISED, (words, done)
        if done.code not in (0, 5):
            assert done.err.splitlines()[-1].startswith("error: "), (words, done)
        assert "Traceback" not in done.err, (words, done)
        assert Path("runs/run/best/model.safetensors").is_file(), words
    assert {path: path.read_bytes() for path in given} == before
