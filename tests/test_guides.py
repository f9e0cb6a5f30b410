"""What the tutorial and the guides tell to type is typed, in their order, on a model and data that are tiny."""

import contextlib
import io
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import regard
from regard import recipes
from regard.cli.main import command_of, main
from regard.cli.shared import parse
from tests.serve.running import running

ROOT = Path(__file__).resolve().parents[1]
# What makes a run small; a test of the recipes trains them as they are.
SMALL = ["--train.steps", "2", "--train.evaluate", "2", "--train.schedule.warmup", "0", "--quiet"]

# Slow, and done on many a model by tests of their own: here it is seen that they can be typed.
ELSEWHERE = ("parity", "convert", "lm-eval")
SERVER = "http://127.0.0.1:8000"


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def blocks(name: str) -> list[tuple[str, str]]:
    """The blocks of a page that are to be done: commands, Python, and configs that are written."""
    return re.findall(r"^```(console|python|toml)\n(.*?)^```", page(name), re.M | re.S)


def typed(line: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A line of a shell, in this process; what it printed."""
    said, _, line = line.removeprefix("$ ").rpartition("| ")
    words = shlex.split(line)
    assert words.pop(0) == "regard"
    if words[0] == "train":
        words += SMALL if "--smoke" not in words else ["--quiet"]
        words += ["--model.dim", "16", "--model.layers", "1"] if "my-dates.toml" in words else []
    words += ["--quiet"] if words[0] == "finetune" else []
    monkeypatch.setattr(
        "sys.stdin", io.TextIOWrapper(io.BytesIO(said.removeprefix("echo ").encode()))
    )
    out = io.StringIO()
    out.reconfigure = lambda **_: None  # type: ignore[attr-defined]
    if words[0] in ELSEWHERE:
        assert parse(command_of(words[0])[0], words[0], words[1:]) is not None
        return ""
    with contextlib.redirect_stdout(out):
        assert main(words) == 0, (line, out.getvalue())
    return out.getvalue()


def follow(
    name: str, home: Path, monkeypatch: pytest.MonkeyPatch, server: str = SERVER
) -> list[str]:
    said, names = [], dict[str, Any]()
    for kind, text in blocks(name):
        if kind == "toml":
            files = re.findall(r"`(\w+\.toml)`:\n", page(name))
            file = files[[block for kind, block in blocks(name) if kind == "toml"].index(text)]
            (home / file).write_text(text.replace("epochs = 3", "steps = 2"), encoding="utf-8")
        elif kind == "python":
            with contextlib.redirect_stdout(out := io.StringIO()):
                exec(compile(text.replace(SERVER, server), name, "exec"), names)
            said.append(out.getvalue())
        else:
            said += [typed(line, monkeypatch) for line in text.splitlines()]
    return said


def few_dates(folder: Path) -> str:
    days = [(f"May {d}, {y}\t{y}-05-{d}\ten\tlong") for y in (1980, 1994) for d in range(10, 30)]
    folder.mkdir(parents=True)
    for name in ("train", "valid", "unseen"):
        (folder / f"{name}.tsv").write_text(
            "\n".join(["source\ttarget\tlanguage\tform", *days]), "utf-8"
        )
    return "a few dates"


def test_tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(recipes.MAKERS, "dates", few_dates)
    monkeypatch.chdir(tmp_path)
    home, said = tmp_path, follow("tutorial", tmp_path, monkeypatch)
    assert len(said) == 11 and "task seq2seq" in said[1] and "parameters" in said[2]
    assert "exact" in said[4]
    assert "heads" in said[-1] and (home / "look.html").stat().st_size > 10_000
    assert (home / "runs" / "my-dates" / "report.html").is_file()


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model and the files that the guides speak of."""
    home = tmp_path_factory.mktemp("guides")
    lines = [
        "Once upon a time there was a cat. ",
        "Then the cat sat on the mat, and that was all. ",
    ]
    (home / "story.txt").write_text("".join(lines * 40), encoding="utf-8")
    (home / "lines.txt").write_text("\n".join(lines), encoding="utf-8")
    (home / "reviews.tsv").write_text(
        "good\ta fine cat\nbad\tno mat at all\n" * 10, encoding="utf-8"
    )
    (home / "pairs.tsv").write_text("a cat\ta mat\nthe cat\tthe mat\nthat\tall\n", encoding="utf-8")
    pairs = "a cat\ta mat\t3\nthe cat\tthe mat\t4.5\nthat\tall\t1\n"
    (home / "sts.tsv").write_text(pairs, encoding="utf-8")
    talk = [{"role": "user", "content": "a cat?"}, {"role": "assistant", "content": "a mat"}]
    (home / "chats.jsonl").write_text(json.dumps({"messages": talk}) + "\n", encoding="utf-8")
    (home / "more.jsonl").write_text(json.dumps({"messages": talk}) + "\n", encoding="utf-8")
    pair = {"prompt": talk[:1], "chosen": "the mat", "rejected": "no"}
    (home / "pairs.jsonl").write_text(f"{json.dumps(pair)}\n" * 4, encoding="utf-8")
    config = {
        "task": "lm",
        "model": {"preset": "gpt2", "layers": 2, "dim": 16, "heads": 2},
        "data": {
            "train": str(home / "story.txt"),
            "held": 0.2,
            "length": 128,
            "rows": 2,
            "pack": "windows",
        },
        "tokenizer": {"kind": "chars"},
        "train": {"steps": 1},
    }
    regard.train(config, folder=home / "made")
    (home / "made" / "best").resolve().rename(home / "MODEL")
    return home


GUIDES = ["data", "train", "fine-tune", "chat", "decode", "look", "convert", "evaluate", "serve"]


def test_every_guide_is_followed() -> None:
    assert sorted(GUIDES) == sorted(p.stem for p in (ROOT / "docs" / "guides").glob("*.md"))


@pytest.mark.parametrize("name", GUIDES)
def test_guide(name: str, stand_ins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(stand_ins)
    with running({"demo": "demo"}) if name == "serve" else contextlib.nullcontext() as client:
        server = client.url if client is not None else SERVER
        said = follow(f"guides/{name}", stand_ins, monkeypatch, server)
    assert len(said) >= 2 and all(isinstance(text, str) for text in said)
    wanted = {
        "data": ["task classify", "task lm", "2 classes: bad, good"],
        "train": ["task lm", "parameters"],
        "chat": ["task chat", "4 chats", "up to", "task prefer", "rejected"],
        "fine-tune": ["Transformer", "accuracy", "merged", "bad\t0."],
        "decode": ["length"],
        "look": ["torch.Size([1, 2, 1, 4])", "online-softmax"],
        "convert": [],
        "evaluate": ["perplexity", "exact"],
        "serve": ['{"colour": "', "0.self", "rg-"],
    }
    text = "\n".join(said)
    for word in wanted[name]:
        assert word in text, text
    for file in {"look": ("look.html", "heads.png", "masks.svg"), "convert": ("copy",)}.get(
        name, ()
    ):
        assert (stand_ins / file).exists()
