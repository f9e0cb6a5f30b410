"""`regard train` on chats, on preferences, with LoRA, with QLoRA and with averaged weights, killed a hundred times
each: every run ends with the weights, the optimiser and the log of one that never was."""

import json
import shutil
import signal
import time
from functools import partial
from pathlib import Path

from tests.faults import command
from tests.faults.command import again, alike, lines, reach, start, whole
from tests.faults.farm import Child, Family, check

BASE = """
task = "lm"
[model]
preset = "gpt2"
layers = 1
dim = 32
heads = 2
max-len = 128
dropout = 0.1
[data]
train = "story.txt"
length = 64
rows = 4
pack = "windows"
[tokenizer]
kind = "bytes"
[train]
steps = 3
"""
TUNED = """
task = "{task}"
[model]
folder = "base"
[data]
train = "{task}.jsonl"
held = 0.2
rows = 4
{data}
[tokenizer]
folder = "base"
[adapt]
method = "{method}"
[train]
steps = 40
evaluate = 20
save = 5
micro-batches = 2
optim = {{ lr = 1e-3 }}
schedule = {{ warmup = 10 }}
{more}
"""
# name -> task, method, more of [data], more of [train]
CHATS = 'template = "chatml"\nlength = 128'
ROWS = {
    "chat": ("chat", "full", CHATS, ""),
    "prefer": ("prefer", "full", CHATS, ""),
    "lora": ("chat", "lora", CHATS, ""),
    "qlora": ("chat", "qlora", CHATS, ""),
    "averaged": ("lm", "full", "length = 64", "ema = 0.9"),
}
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "and",
    "packs",
    "five",
    "dozen",
    "jugs",
]


def data(folder: Path) -> None:
    """A hundred examples of each kind."""
    chats, pairs, texts = [], [], []
    for i in range(100):
        words = [WORDS[(i * k) % len(WORDS)] for k in range(1, 4 + i % 3)]
        asked = {"role": "user", "content": " ".join(words)}
        said = {"role": "assistant", "content": " ".join(reversed(words))}
        chats.append({"messages": [asked, said]})
        pairs.append({"prompt": [asked], "chosen": [said], "rejected": [{**said, "content": "no"}]})
        texts.append({"text": " ".join(words)})
    for name, rows in {"chat": chats, "prefer": pairs, "lm": texts}.items():
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def home(base: Path, name: str, folder: Path) -> None:
    task, method, more_data, more = ROWS[name]
    folder.mkdir(parents=True, exist_ok=True)
    data(folder)
    shutil.copytree(base, folder / "base", dirs_exist_ok=True)
    text = TUNED.format(task=task, method=method, data=more_data, more=more)
    (folder / "story.toml").write_text(text, encoding="utf-8")


def made(folder: Path) -> Path:
    """A small model to begin with, trained in a process of its own."""
    folder.mkdir()
    (folder / "story.txt").write_text(command.TEXT, encoding="utf-8")
    (folder / "story.toml").write_text(BASE, encoding="utf-8")
    code = start(folder).end()
    check(code == 0, f"the base: {(folder / 'errors.txt').read_text()[-800:]}")
    return (folder / "run/last").resolve()


def killed(name: str, family: Family) -> str:
    base, draw, wanted = made(family.folder / "made"), family.draw, family.count(100, 2)
    settle = partial(home, base, name)
    want = whole(family.folder / "whole", settle)
    kills = runs = 0
    while kills < wanted:
        folder = family.folder / f"run-{runs}"
        settle(folder)
        for _ in range(draw.randint(4, 12)):
            child: Child = again(folder)
            reach(folder, child, len(lines(folder)) + draw.randint(0, 12))
            time.sleep(draw.random() * 0.02)
            child.send(signal.SIGKILL)
            code = child.end()
            if code == 0:
                break
            said = (folder / "errors.txt").read_text()[-800:]
            check(code == -signal.SIGKILL, f"{folder}: ended with {code}: {said}")
            kills += 1
        alike(folder, want, f"{name} {runs}, killed")
        shutil.rmtree(folder)
        runs += 1
    return f"{kills} kills of regard train; {runs} runs, weights, optimiser and log bit-equal"


chat, prefer, lora, qlora, averaged = (partial(killed, name) for name in ROWS)
