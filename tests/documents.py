"""The commands and the Python of the documents, found in their pages and done as they are printed.

What cannot be done here says so in the page's source: `<!-- not run: WHY -->` on the line above a block, or right
behind a command that stands in a sentence.

What is done differs from what is printed by these rules alone:

- MODEL is a link that leads to the smallest model that a command can use (`model_for`); files and runs that a page
  names but does not make are tiny ones of the same names (`make_stand_ins`), and Python finds `model`, `ids`, ...
- Blocks are done in their order; a command in a sentence or a table, and an example of a help, stands for itself: what
  it leaves behind is gone afterwards.
- A training makes two steps, or three where the command says how many; the measuring for a plan is short; an experiment
  is `--quick`; the data of recipes is little.
- A command that does the same on every page (`SAME`) is done once for all of them.
- A server gets a free port, is asked whether it is well, and ends; what curl sends is answered by one with the same
  model; a chat is one line from stdin.
- Where lm-eval is not installed, its command has to say so.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import json
import re
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import regard
from regard import recipes
from regard.cli.main import command_of, first_words, main
from regard.serve.app import App, listen
from tests.checkpoint import ggufs
from tests.checkpoint.families import case
from tests.serve.running import running, served
from tests.text.test_gguf_tokens import llama

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md"] + [
    str(path.relative_to(ROOT))
    for pattern in ("*.md", "guides/*.md", "mechanisms/*.md")
    for path in sorted((ROOT / "docs").glob(pattern))
]
PROGRAMS = (
    "regard",
    "curl",
    "make",
    "torchrun",
    "hf",
    "pip",
    "python",
    "git",
    "echo",
    "serve",
    "vllm",
)
NOT_RUN = r"<!-- not run: ([^>]+?) -->"
FENCE = re.compile(rf"(?:^{NOT_RUN}\n)?^```(\w*)\n(.*?)^```$", re.M | re.S)
INLINE = re.compile(rf"`((?:regard|torchrun) [^`]+)`(?:{NOT_RUN})?")
NAMED = re.compile(r"`([\w-]+\.toml)`:\s*$")
# Commands that do the same on every page, and are done once.
SAME = ("doctor", "explain", "lab", "parity", "presets")
ALONE = ("doctor", "explain", "lab", "presets", "recipes")
SERVER = "http://127.0.0.1:8000"
# What makes a training short, in a config.
SHORT = {"steps": 2, "evaluate": 2, "save": 1, "warmup": 0}


@dataclass(frozen=True)
class Piece:
    """What a page tells to do: a line of a shell (`alone`: for itself), a block of Python, or a file
    of settings with its name."""

    kind: str
    text: str
    why_not: str = ""
    name: str = ""
    alone: bool = False


def pieces_of(page: str) -> list[Piece]:
    """Those of a page in its order, each once."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found, end = list[Piece](), 0
    for fence in FENCE.finditer(text):
        prose, end = text[end : fence.start()], fence.end()
        found += [*_inline(prose), *_fenced(prose, fence[1] or "", fence[2], fence[3])]
    found += _inline(text[end:])
    # There it is code of ours, which other tests compare with its source.
    shown = ("python",) if page.startswith("docs/mechanisms/") else ()
    return list(dict.fromkeys(piece for piece in found if piece.kind not in shown))


def _inline(prose: str) -> Iterator[Piece]:
    for command, why_not in INLINE.findall(prose):
        words = command.split()
        # A verb alone is the name of a command, unless it needs no more.
        if words[0] == "torchrun" or (
            words[1] in first_words() and (words[2:] or words[1] in ALONE)
        ):
            yield Piece("shell", " ".join(words), why_not, alone=True)


def _fenced(prose: str, why_not: str, language: str, body: str) -> Iterator[Piece]:
    if language == "python":
        yield Piece("python", body, why_not)
    elif language == "toml":
        name = re.match(r"# ([\w-]+\.toml)\n", body) or NAMED.search(prose)
        assert name is not None or why_not, f"a file without a name: {body}"
        yield Piece("toml", body, why_not, "" if name is None else name[1])
    elif language in ("console", "sh", "bash", ""):
        lines = [line for line in body.splitlines() if line.strip()]
        # Between the lines that are typed stands what they print.
        typed = [line for line in lines if line.startswith("$ ")]
        if typed or language or lines[0].split()[0] in PROGRAMS:
            yield from (Piece("shell", x.removeprefix("$ "), why_not) for x in typed or lines)


def examples(name: str) -> list[Piece]:
    """Those in the help of a command, without what is said beside them."""
    text = inspect.cleandoc(command_of(name)[0].__doc__ or "")
    lines = [line for line in text.splitlines() if line.startswith(("regard ", "echo "))]
    return [Piece("shell", re.split(r" {2,}", line)[0], alone=True) for line in lines]


# --- what the pages speak of, made small ----------------------------------------------------------

LINES = ["Once upon a time there was a cat.", "Then the cat sat on the mat, and that was all."]
PAIRS = [("a cat", "a mat"), ("the cat", "the mat"), ("that", "all"), ("a time", "a mat")]
TALK = [{"role": "user", "content": "a cat?"}, {"role": "assistant", "content": "a mat"}]
TEXT = {"layers": 1, "dim": 16, "heads": 2, "ffn_dim": 16, "max_len": 512}
PICTURE = {"layers": 1, "dim": 16, "heads": 2, "size": 8, "patch": 4, "channels": 1}
# Kind of model -> its task, what it is built as, its data.
KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "translator": ("seq2seq", {"preset": "vaswani-base", **TEXT}, "test.tsv"),
    "classifier": ("classify", {"preset": "bert-base", **TEXT}, "labels.tsv"),
    "encoder": ("mlm", {"preset": "bert-base", **TEXT}, "story.txt"),
    "reader": ("answer", {"preset": "bert-base", **TEXT}, "squad.json"),
    "captioner": ("caption", {"preset": "captioner", **PICTURE, "max_len": 128}, "captions.npz"),
    "painter": ("draw", {"preset": "painter", **PICTURE, "max_len": 64}, "captions.npz"),
    "little": ("lm", {"preset": "gpt2", **TEXT}, "story.txt"),
    "vision": ("image", {"preset": "vit-base", **PICTURE}, "digits.npz"),
}
READ = {*KINDS, "decoder", "OTHER", "A", "B", "kept", "old-folder", ".theirs"}
# The verb of a command, alone or with a word that it has -> the kind of model that it is for.
FOR = {"translate": "translator", "classify": "classifier", "fill": "encoder", "embed": "encoder"}
FOR |= {
    "answer": "reader",
    "generate .png": "captioner",
    "generate seven": "painter",
    "look --image": "vision",
}
FOR |= {"look guten": "translator", "eval --shots": "decoder", "eval accuracy": "classifier"}
FOR |= {"parity": "little", "eval sts": "encoder", "eval test.": "translator"}


def model_for(words: list[str]) -> str:
    """The kind of model that a command takes as MODEL."""
    for hint, kind in FOR.items():
        verb, _, word = hint.partition(" ")
        if words[0] == verb and word in " ".join(words):
            return kind
    return "decoder"


def make_files(home: Path) -> None:
    """Every file that a page names and does not make."""
    table = "".join(f"{a}\t{b}\n" for a, b in PAIRS)
    tests = "".join(f"{a}\t{b}\tgood\t{a}\n" for a, b in PAIRS)
    labels = "".join(f"{'good' if i % 2 else 'bad'}\t{LINES[i % 2]}\n" for i in range(20))
    question = {"question": "Who sat?", "id": "1", "answers": [{"text": "cat", "answer_start": 4}]}
    squad = {"data": [{"paragraphs": [{"context": "The cat sat.", "qas": [question]}] * 4}]}
    chat = json.dumps({"messages": TALK}) + "\n"
    pair = json.dumps({"prompt": TALK[:1], "chosen": "the mat", "rejected": "no"}) + "\n"
    texts = {
        **dict.fromkeys(("story.txt", "stories.txt", "my.txt"), " ".join(LINES * 40)),
        **dict.fromkeys(("lines.txt", "reviews.txt", "file"), "\n".join(LINES)),
        **dict.fromkeys(("lines.de", "in.de", "test.en"), "".join(f"{a}\n" for a, _ in PAIRS)),
        **dict.fromkeys(("in.en", "test.de"), "".join(f"{b}\n" for _, b in PAIRS)),
        **dict.fromkeys(("test.tsv", "train.tsv"), f"source\ttarget\tlabel\ttext\n{tests}"),
        "pairs.tsv": table,
        "sts.tsv": "".join(f"{a}\t{b}\t{i}\n" for i, (a, b) in enumerate(PAIRS)),
        "labels.tsv": f"label\ttext\n{labels}",
        "reviews.tsv": labels,
        "reviews.csv": "label,text\n" + 'good,"a fine cat"\nbad,"no mat"\n' * 10,
        **dict.fromkeys(("chats.jsonl", "more.jsonl"), chat * 4),
        "pairs.jsonl": pair * 4,
        "squad.json": json.dumps(squad),
        "alpaca.json": json.dumps([{"instruction": a, "input": "", "output": b} for a, b in PAIRS]),
    }
    for name, text in texts.items():
        (home / name).write_text(text, encoding="utf-8")
    pixels = np.tile(np.arange(8, dtype=np.uint8) * 30, (4, 8, 1))
    np.savez(home / "captions.npz", x=pixels, y=np.array([a for a, _ in PAIRS]))
    np.savez(home / "digits.npz", x=pixels, y=np.array([0, 1, 0, 1]))
    for name in ("picture.png", "photo.png", "cat.png"):
        Image.fromarray(pixels[0]).save(home / name)


def make_stand_ins(home: Path) -> None:
    """The files, a model of each kind, and in `kept` the runs that pages name and do not make."""
    make_files(home)
    demo = ROOT / "regard" / "serve" / "demo"
    shutil.copytree(demo, home / "decoder")
    (home / "MODEL").symlink_to("decoder")
    for name in ("OTHER", "A", "B"):
        shutil.copytree(demo, home / name)
    for kind, (task, model, data) in KINDS.items():
        feed = {"train": str(home / data), "valid": str(home / data), "rows": 4}
        feed |= {"length": 128, "pack": "windows"} if task in ("lm", "mlm") else {}
        letters = {} if task == "image" else {"tokenizer": {"kind": "chars"}}
        config = {"task": task, "model": model, "data": feed, "train": {"steps": 1}, **letters}
        regard.train(config, folder=home / "made" / kind)
        shutil.move((home / "made" / kind / "best").resolve(), home / kind)
    story = next(p for p in pieces_of("docs/guides/train.md") if p.name == "story.toml")
    (home / "story.toml").write_text(shorter(story.text), encoding="utf-8")
    regard.train(home / "story.toml", folder=home / "kept" / "story")
    tuned = {"adapt": {"method": "lora"}, "model": {"folder": str(home / "decoder")}}
    text = {
        "train": str(home / "story.txt"),
        "length": 64,
        "rows": 2,
        "pack": "windows",
        "held": 0.2,
    }
    config = {"task": "lm", **tuned, "data": text, "train": {"steps": 1}}
    regard.train(config, folder=home / "kept" / "tuned")
    same = {"kept/a": "kept/story", "kept/b": "kept/story", "RUN": "kept/story"}
    same |= {"kept/adapter": "kept/tuned", "kept/translator": "translator"}
    for name, source in {**same, "kept/demo/dates/best": "translator"}.items():
        shutil.copytree(home / source, home / name, symlinks=True)
    shutil.rmtree(home / "made")
    _to_convert(home)


def _to_convert(home: Path) -> None:
    """A folder with pickled weights, and a GGUF file."""
    old = Path(shutil.copytree(home / "decoder", home / "old-folder"))
    torch.save(load_file(old / "model.safetensors"), old / "pytorch_model.bin")
    (old / "model.safetensors").unlink()
    said = llama()
    sizes = {**ggufs.WIDE, "vocab_size": len(said["tokenizer.ggml.tokens"])}
    model = case("told", "LlamaForCausalLM", sizes).make()
    tensors = ggufs.saved(model, home / ".theirs")
    ggufs.write(home / "model-Q4_K_M.gguf", model, tensors, "Q8_0", said)


def few_dates(folder: Path) -> str:
    """A stand-in for the recipe's data, in its form."""
    days = [f"May {d}, {y}\t{y}-05-{d}\ten\tlong" for y in (1980, 1994) for d in range(10, 30)]
    folder.mkdir(parents=True)
    for name in ("train", "valid", "unseen"):
        table = "\n".join(["source\ttarget\tlanguage\tform", *days])
        (folder / f"{name}.tsv").write_text(table, encoding="utf-8")
    return "a few dates"


# --- following a page -----------------------------------------------------------------------------


def shorter(config: str) -> str:
    """A config that trains for two steps."""
    for name, value in SHORT.items():
        config = re.sub(rf"\b{name} = [1-9]\d*\b(?!\.)", f"{name} = {value}", config)
    return config


def shortened(words: list[str]) -> list[str]:
    """A command with less work to do."""
    if words[0] == "lab" and len(words) > 1 and "--quick" not in words:
        return [*words, "--quick"]
    if words[0] not in ("train", "finetune") or "--help-all" in words:
        return words
    if "--train.steps" in words:
        at = words.index("--train.steps") + 1
        words = [*words[:at], "3", *words[at + 1 :]]
    if words[1].endswith(".toml"):
        config = Path(words[1])
        config.write_text(shorter(config.read_text(encoding="utf-8")), encoding="utf-8")
    return [*words, "--quiet"]


def copied(home: Path, to: Path) -> Path:
    """A folder to work in; of models, which are read alone, it has links."""
    for path in home.iterdir():
        if path.is_symlink() or path.name in READ:
            (to / path.name).symlink_to(path.resolve())
        elif path.is_dir():
            shutil.copytree(path, to / path.name, symlinks=True)
        else:
            shutil.copy(path, to / path.name)
    return to


class Session:
    """A folder with the stand-ins, in which a page is followed."""

    # What was printed by commands that print the same on every page.
    done: ClassVar[dict[str, str]] = {}

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch):
        self.home, self.monkeypatch, self.open = home, monkeypatch, contextlib.ExitStack()
        self.names: dict[str, Any] = {"regard": regard}
        self.serves = "demo"
        monkeypatch.chdir(home)
        monkeypatch.setenv("COLUMNS", "200")
        few = {"dates": few_dates, "sums": partial(recipes.corpora.make_sums, count=40)}
        monkeypatch.setattr(recipes, "MAKERS", {**recipes.MAKERS, **few})
        monkeypatch.setattr("regard.training.plan.PROBED", 0.01)
        monkeypatch.setattr("regard.serve.app.listen", lambda *_: listen("127.0.0.1", 0))
        monkeypatch.setattr("regard.serve.app.serve", asked_once)

    def follow(self, pieces: list[Piece]) -> dict[str, str]:
        """What each piece that is to be run printed."""
        for piece in pieces:
            if piece.kind == "toml" and not piece.why_not:
                (self.home / piece.name).write_text(shorter(piece.text), encoding="utf-8")
        with self.open:
            return {p.text: self.do(p) for p in pieces if p.kind != "toml" and not p.why_not}

    def do(self, piece: Piece) -> str:
        if piece.kind == "python":
            return self.python(piece.text)
        words = shlex.join(shlex.split(piece.text, comments=True))
        if words not in self.done:
            said = self.alone(piece.text) if piece.alone else self.typed(piece.text)
            if words.split()[1] not in SAME:
                return said
            self.done[words] = said
        return self.done[words]

    def alone(self, line: str) -> str:
        """What a line printed, done in a copy of the folder."""
        with tempfile.TemporaryDirectory() as other, contextlib.chdir(other):
            copied(self.home, Path(other))
            return self.typed(line)

    def python(self, text: str) -> str:
        link("decoder")
        if SERVER in text and "server" not in self.names:
            self.names["server"] = self.open.enter_context(running({"demo": "demo"}))
        for name in (name for name in GIVEN if name not in self.names and name in text):
            self.names[name] = GIVEN[name]()
        text = text.replace(SERVER, self.names["server"].url) if SERVER in text else text
        with contextlib.redirect_stdout(out := io.StringIO()):
            exec(compile(text, "page", "exec"), self.names)
        return out.getvalue()

    def typed(self, line: str) -> str:
        """A line of a shell: echo TEXT | regard ... < FILE > FILE. What it printed, errors too."""
        words, stdin = shlex.split(line, comments=True), "a cat?\n"
        if words[0] == "echo":
            stdin, words = words[1] + "\n", words[words.index("|") + 1 :]
        if words[0] == "curl":
            return self.curl(words)
        if "<" in words:
            stdin = Path(words[words.index("<") + 1]).read_text(encoding="utf-8")
        into = words[words.index(">") + 1] if ">" in words else ""
        words = words[: min(words.index(x) if x in words else len(words) for x in "<>")]
        assert words.pop(0) == "regard", f"{line}: mark it, if it cannot be run here"
        if words[0] == "serve":
            self.serves = words[1]
        link(model_for(words))
        for run in re.findall(r"runs/(\w+)", line):
            if Path("kept", run).exists() and not Path("runs", run).exists():
                shutil.copytree(Path("kept", run), Path("runs", run), symlinks=True)
        self.monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        with (
            contextlib.redirect_stdout(Stream()) as out,
            contextlib.redirect_stderr(Stream()) as err,
        ):
            code = main(shortened(words))
        if into:
            Path(into).write_text(out.getvalue(), encoding="utf-8")
        if words[0] == "lm-eval" and importlib.util.find_spec("lm_eval") is None:
            assert code == 3 and "pip install lm-eval" in err.getvalue(), (line, err.getvalue())
        else:
            # A check may fail: nothing was learned.
            checked = code == 5 and "--min" in words
            assert code == 0 or checked, (line, code, out.getvalue(), err.getvalue())
        return out.getvalue() + err.getvalue()

    def curl(self, words: list[str]) -> str:
        """What the server that was begun last answers to curl SERVER/PATH --json BODY."""
        at, flag, body = words[1:]
        assert at.startswith(SERVER) and flag == "--json", words
        name, _, folder = self.serves.rpartition("=")
        with running({name or Path(folder).name: folder}) as client:
            return json.dumps(client.post(at.removeprefix(SERVER), json.loads(body)))


# What a block of Python may use without making it.
GIVEN: dict[str, Callable[[], Any]] = {
    "ids": lambda: torch.tensor([[1, 2, 3, 4]]),
    "lines": lambda: list(LINES),
    "model": lambda: regard.load("decoder"),
    "translator": lambda: regard.load("translator"),
    "vision": lambda: regard.load("vision"),
    "images": lambda: torch.zeros(1, 1, 8, 8),
}


def link(kind: str) -> None:
    """MODEL is this one from here on."""
    Path("MODEL").unlink()
    Path("MODEL").symlink_to(Path(kind).resolve())


def asked_once(app: App, sock: Any) -> int:
    """A server that ends when it has said that it is well."""
    with served(app, sock) as client:
        status, _, text = client.request("GET", "/health")
        assert status == 200 and app.workers, text
    return 0


class Stream(io.StringIO):
    """Of a process: it can be told its encoding."""

    def reconfigure(self, **_: Any) -> None:
        pass
