"""regard data peek and regard tokenizer train: what they print, what they write, how mistakes end."""

import json
import lzma
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regard.cli import data as peeking
from regard.cli.data import ROWS, breadth, columns, picture, visible
from regard.cli.data import Options as Peek
from regard.cli.data import TokenizerOptions as Train
from regard.cli.main import main
from regard.cli.shared import parse
from regard.errors import Notice, UsageError
from regard.text import Tokenizer, needed
from regard.training.tasks import TASKS

ROOT = Path(__file__).resolve().parents[1]
LINES = ["the dog runs", "a cat sleeps in the park", "", "größer 😀", "dogs and cats"]


def put(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def command(cls: Any, *arguments: Any) -> int:
    options = parse(cls, "data peek", [str(a) for a in arguments])
    assert options is not None
    return (peeking.run if cls is Peek else peeking.tokenizer)(options)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return put(tmp_path / "a.txt", "".join(f"{line}\n" for line in LINES))


@pytest.fixture
def tok(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert command(Train, text, "--out", tmp_path / "tok", "--vocab", 270, "--unit", "line") == 0
    capsys.readouterr()
    return tmp_path / "tok"


def test_help_and_options_do_not_import_torch() -> None:
    script = """
import sys
from regard.cli.data import Options as Peek
from regard.cli.main import main
from regard.cli.shared import parse
from regard.cli.data import TokenizerOptions as Train
assert parse(Peek, "data peek", ["--help"]) is None and parse(Train, "tokenizer train", ["--help"]) is None
assert parse(Peek, "data peek", ["a", "b", "--rows", "2"]).files == ("a", "b")
heavy = {"torch", "numpy", "tokenizers", "safetensors"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "regard data peek story.txt" in done.stdout and "--overlong" in done.stdout


# --- what is read -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["file", "line", "paragraph"])
def test_peek_reads_what_it_shows_and_no_more(
    unit: str, tok: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What stands far behind may be anything: it is not read."""
    path = tmp_path / "long.txt"
    path.write_bytes(b"the dog runs in the park\n\n" * 100_000 + b"\xff\xff")
    flags = ["--tokenizer", tok, "--length", 16, "--unit", unit]
    assert command(Peek, path, *flags, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sampled"] and found["counts"]["tokens"] < 400_000 and len(found["rows"]) == 4
    assert command(Peek, path, *flags) == 0
    assert "long.txt, the beginning: " in capsys.readouterr().out
    with pytest.raises(UsageError, match="is not UTF-8"):
        command(Peek, path, *flags, "--batch", 30_000)


def test_peek_at_a_table_sorted_by_its_classes(
    tok: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"the dog runs\t{'no' if i < 30_000 else 'yes'}\n" for i in range(60_000)]
    path = put(tmp_path / "a.tsv", "".join(rows))
    flags = ["--columns", "text=0", "--columns", "label=1", "--tokenizer", tok, "--json"]
    assert command(Peek, path, *flags) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sampled"] and found["counts"]["records"] < 30_000


def test_peek_leaves_nothing_behind_when_it_is_ended(tok: Path, tmp_path: Path) -> None:
    home = tmp_path / "temporary"
    home.mkdir()
    # Nobody writes to it: reading it lasts until the command is ended.
    os.mkfifo(tmp_path / "endless.txt")
    flags = ["data", "peek", str(tmp_path / "endless.txt"), "--tokenizer", str(tok)]
    env = {**os.environ, "TMPDIR": str(home)}
    process = subprocess.Popen([sys.executable, "-m", "regard", *flags], cwd=ROOT, env=env)
    while not any(home.iterdir()):
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    assert process.wait() == 143 and not any(home.iterdir())


def test_example_of_the_help_is_one_document_and_works(
    tok: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = put(tmp_path / "story.txt", "the dog runs in the park. " * 60)
    with pytest.warns(Notice, match="split here; training asks: data.overlong"):
        assert command(Peek, path, "--tokenizer", tok, "--length", 64) == 0
    assert "1 longer than 64 tokens: split" in capsys.readouterr().out
    with pytest.raises(UsageError, match="or --overlong truncate, drop or split"):
        command(Peek, path, "--tokenizer", tok, "--length", 64, "--overlong", "error")


CURES = {
    "encoding": ("a.txt", b"f\xfcr", [], "for example --encoding 'cp1252'"),
    "marker": ("a.txt", b"x<|endoftext|>y", [], "say --marker '<|endoftext|>'"),
    "header": ("a.tsv", b"text\tlabel\ngood\t1\nbad\t0\n", ["--columns", "text=0", "--columns", "label=1"],
               "--header False reads it as one"),
    "batch": ("a.txt", b"abc", ["--pack", "none", "--tokens", "1"], "say a larger tokens"),
}  # fmt: skip


@pytest.mark.parametrize("name", CURES)
def test_cure_is_given_as_the_flag_that_can_be_typed(
    name: str, tok: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, content, flags, cure = CURES[name]
    (tmp_path / file).write_bytes(content)
    main(["data", "peek", str(tmp_path / file), "--tokenizer", str(tok), *flags])
    said = capsys.readouterr().err
    assert cure in said and " = " not in said.replace("<|endoftext|>", "")


# --- tokenizer train ----------------------------------------------------------------------------------------------


def test_tokenizer_is_written_and_described(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tok"
    assert command(Train, text, "--out", out, "--kind", "chars", "--unit", "line") == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{out}: chars, ") and "1.00 characters per token" in said
    assert "learned from 5 texts" in said
    tokenizer = needed(Tokenizer.from_folder(out))
    assert tokenizer.decode(tokenizer.encode(LINES[3])) == LINES[3]


def test_sides_get_one_tokenizer_or_two(text: Path, tmp_path: Path) -> None:
    other = put(tmp_path / "b.txt", "".join(f"{line.upper()}\n" for line in LINES))
    given = [text, "--target", other, "--kind", "chars", "--task", "seq2seq"]
    command(Train, *given, "--out", tmp_path / "joint")
    command(Train, *given, "--out", tmp_path / "sides", "--sides")
    joint = needed(Tokenizer.from_folder(tmp_path / "joint"))
    source, target = (
        needed(Tokenizer.from_folder(tmp_path / "sides" / s)) for s in ("source", "target")
    )
    assert joint.special.unk not in joint.encode("the dog THE DOG")
    assert source.special.unk in source.encode("THE") and target.special.unk in target.encode("the")


def test_tokenizer_takes_special_tokens_and_columns(tmp_path: Path) -> None:
    table = put(tmp_path / "a.tsv", "1\tthe dog\n0\ta cat\n")
    out = tmp_path / "tok"
    command(
        Train, table, "--columns", "text=1", "--kind", "chars", "--special", "unk=<u>", "--special", "eos=<e>",
        "--more", "<user>", "--around", "end", "--out", out,
    )  # fmt: skip
    tokenizer = needed(Tokenizer.from_folder(out))
    assert [tokenizer.core.token_to_id(t) for t in ("<u>", "<e>", "<user>")] == [0, 1, 2]
    assert tokenizer.encode("1<user>")[:] == [0, 2, 1]  # the labels were not learned


def test_tokenizer_is_not_overwritten_unasked(text: Path, tok: Path) -> None:
    before = (tok / "tokenizer.json").read_bytes()
    with pytest.raises(UsageError, match="tokenizer.json exists; .* --overwrite"):
        command(Train, text, "--out", tok, "--kind", "bytes")
    assert (tok / "tokenizer.json").read_bytes() == before
    command(Train, text, "--out", tok, "--kind", "bytes", "--overwrite")
    assert (tok / "tokenizer.json").read_bytes() != before


# --- data peek ----------------------------------------------------------------------------------------------------


def test_peek_shows_tokens_ids_labels_and_borders(
    text: Path, tok: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--tokenizer", tok, "--unit", "line", "--length", 40, "--rows", 1]
    assert command(Peek, text, *flags) == 0
    out = capsys.readouterr().out
    head, about, batch, *_ = out.splitlines()
    assert head.startswith(f"{text}: 4 examples and 1 empty ones, which are left out; ")
    assert head.endswith("0.00% of the tokens are unknown") and about.startswith("4 documents, ")
    assert "tokens learned, packed into" in about and "task lm, seed 0, batch 0: 1 x 40" in batch
    lines = [line for line in out.splitlines() if line.startswith("  ")]
    table = [line for line in lines if not line.startswith("  up to ")]
    assert {line.split()[0] for line in table} == {"input", "ids", "label"}
    assert len(table) < len(lines), "no histogram of lengths"
    said = json.loads(capture(Peek, text, *flags, "--json", capsys=capsys))
    row = said["rows"][0]
    borders = sum(a != b for a, b in zip(row["doc"], row["doc"][1:]))
    assert borders > 0
    for name in ("input", "ids", "label"):
        lines = [line for line in table if line.split()[0] == name]
        assert sum(line.count(" | ") for line in lines) == borders


def capture(cls: Any, *arguments: Any, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert command(cls, *arguments) == 0
    return capsys.readouterr().out


def test_peek_as_json_is_the_batch(
    text: Path, tok: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--tokenizer", tok, "--unit", "line", "--pack", "none", "--rows", 4, "--json"]
    said = json.loads(capture(Peek, text, *flags, capsys=capsys))
    assert said["version"] == 1 and said["counts"]["empty"] == 1 and said["task"] == "lm"
    assert len(said["rows"]) == 4 and len(said["fingerprint"]) == 64
    tokenizer = needed(Tokenizer.from_folder(tok))
    for row in said["rows"]:
        assert row["labels"] == [*row["ids"][1:], tokenizer.special.eos[0]]
        assert all(row["counted"]) and tokenizer.decode(row["ids"]) in LINES
    other = [*flags, "--batch", 1]
    assert json.loads(capture(Peek, text, *other, capsys=capsys))["batch"] == 1


def test_peek_prints_some_rows_and_numbers_that_agree(
    tok: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A batch may have a hundred rows; each count of what was read is told once, or is the same."""
    file = tmp_path / "many.txt"
    file.write_text("a cat\n\n" * 101, encoding="utf-8")
    flags = ["--tokenizer", tok, "--unit", "line", "--pack", "none", "--tokens", 1000]
    out = capture(Peek, file, *flags, capsys=capsys)
    said = json.loads(capture(Peek, file, *flags, "--json", capsys=capsys))
    rows = len(said["rows"])
    assert rows > 2 * ROWS and out.count("\nrow ") == ROWS
    assert out.endswith(f"\nand {rows - ROWS} more rows; --json prints all\n")
    head, about, batch, *_ = out.splitlines()
    for line in (head, about):
        assert re.search(r"\b101 (examples|documents)\b", line)
        assert len(re.findall(r"\btokens\b", line)) == 1
    assert len(re.findall(r"[\d,]+ tokens", head + about)) == 1 and f": {rows} x " in batch


def test_peek_shows_both_sides_of_a_pair(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command(Train, text, "--out", tmp_path / "t", "--kind", "chars", "--task", "seq2seq")
    out = capture(
        Peek, text, "--target", text, "--tokenizer", tmp_path / "t", "--rows", 1, capsys=capsys
    )
    lines = [line.split() for line in out.splitlines()]
    assert {"source", "input", "ids", "label"} <= {line[0] for line in lines if line}
    assert next(line for line in lines if line[:1] == ["input"])[1] == "<s>"
    assert any(line[:1] == ["label"] and line[-1] == "</s>" for line in lines)


def test_peek_shows_what_is_masked(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command(
        Train, text, "--out", tmp_path / "t", "--kind", "wordpiece", "--task", "mlm", "--vocab", 60
    )
    flags = ["--tokenizer", tmp_path / "t", "--task", "mlm", "--unit", "line", "--length", 60]
    out = capture(Peek, text, *flags, capsys=capsys)
    assert "corrupted by MaskTokens" in out
    labels = [
        w for line in out.splitlines() if line.startswith("  label") for w in line.split()[1:]
    ]
    assert labels.count(".") > 0.5 * len(labels) and set(labels) != {"."}


def test_peek_names_classes_and_answers(
    tmp_path: Path, tok: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = put(tmp_path / "a.csv", "text,label\nthe dog,animal\nthe park,place\n")
    columns = ["--columns", "text=text", "--columns", "label=label"]
    out = capture(Peek, table, *columns, "--tokenizer", tok, capsys=capsys)
    assert "2 classes: animal, place" in out and "task classify" in out
    assert "  label  animal (0)" in out and "  label  place (1)" in out
    asked = {"text": "who?", "second": "the dog runs", "start": 4, "end": 7}
    row = put(tmp_path / "q.jsonl", json.dumps(asked) + "\n")
    out = capture(Peek, row, "--task", "answer", "--tokenizer", tok, capsys=capsys)
    assert out.splitlines()[-1].startswith("  label  ") and "dog" in out.splitlines()[-1].replace(
        " ", ""
    )


def test_peek_draws_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = np.zeros((2, 8, 8), np.uint8)
    x[:, :, 4:] = 255
    for name, array in (("x", x), ("y", np.array([0, 1]))):
        np.save(tmp_path / f"{name}.npy", array)
        (tmp_path / f"{name}.npy.xz").write_bytes(
            lzma.compress((tmp_path / f"{name}.npy").read_bytes())
        )
    out = capture(Peek, tmp_path / "x.npy.xz", "--target", tmp_path / "y.npy.xz", capsys=capsys)
    assert "task image" in out and out.count("      @@@@") == 8 and "label  1 (1)" in out


@pytest.mark.parametrize(
    "arguments, sentence, code",
    [
        ([], "name a data file", 2),
        (
            ["A", "--length", 4, "--unit", "line", "--overlong", "error"],
            "say a larger length, or --overlong truncate",
            4,
        ),
        (["nowhere.txt"], "nowhere.txt does not exist", 4),
        (["A", "--batch", -1], "--batch is -1", 2),
        (["A", "--columns", "text"], "--columns is 'text'; give NAME=VALUE", 2),
        (["A", "--task", "classify"], "plain text, which has no columns", 2),
        (["A", "--rows", 0, "--pack", "none"], "--rows 0: give 1 or more", 2),
    ],
)
def test_mistake_is_one_sentence(
    arguments: list[Any], sentence: str, code: int, text: Path, tok: Path
) -> None:
    given = [text if a == "A" else a for a in arguments]
    with pytest.raises(UsageError, match=sentence) as caught:
        command(Peek, *given, "--tokenizer", tok)
    assert getattr(caught.value, "code", 2) == code and "\n" not in str(caught.value)


@pytest.mark.parametrize("below", ["", "/deeper"])
def test_tokenizer_does_not_go_where_a_file_is(text: Path, tmp_path: Path, below: str) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(UsageError, match="notes is a file, a tokenizer is a folder; name another"):
        command(Train, text, "--out", f"{tmp_path}/notes{below}")
    assert (tmp_path / "notes").read_text() == "mine"


def test_text_without_a_tokenizer_says_how_to_get_one(text: Path) -> None:
    with pytest.raises(UsageError, match="--tokenizer FOLDER .a model, a run"):
        command(Peek, text)


# --- on a plain terminal ------------------------------------------------------------------------------------------


def test_columns_stand_below_each_other_and_fit_the_width() -> None:
    table = {"a": ["one", "2", "日本", "x" * 9], "bb": ["1", "two", "3", "4"]}
    lines = columns(table, [1], 24)
    assert lines == [
        "  a   one | 2   日本",
        "  bb  1   | two 3",
        "  a   xxxxxxxxx",
        "  bb  4",
    ]
    assert all(breadth(line) <= 24 for line in lines)


def test_spaces_and_control_characters_are_visible() -> None:
    shown = [visible(text) for text in (" a\n", "\x1b[31m", "", '"', "\\", "é")]
    assert shown == ["▁a\\n", "\\u001b[31m", "''", '"', "\\", "é"]


def test_picture_is_drawn_in_shades() -> None:
    import torch

    x = torch.linspace(0, 1, 10).expand(3, 4, 10)
    assert picture(x) == ["   .:-=+*#%@"] * 2


# A config of each task, as small as it can be; those of recipes have the rest.
PEEKED = {
    "lm": ("gpt2", "text.txt", ""),
    "chat": ("gpt2", "chats.jsonl", 'pack = "none"'),
    "prefer": ("gpt2", "prefer.jsonl", ""),
    "prefix": ("gpt2", "text.txt", ""),
    "mlm": ("bert-base", "text.txt", ""),
    "spans": ("t5-small", "text.txt", ""),
    "infill": ("bart-base", "text.txt", ""),
    "seq2seq": ("vaswani-base", "pairs.tsv", "columns = { source = 0, target = 1 }"),
    "classify": ("bert-base", "pairs.tsv", "columns = { text = 0, label = 1 }"),
    "tag": ("bert-base", "tags.jsonl", ""),
    "answer": ("bert-base", "squad.json", ""),
    "image": ("vit-small", "x.npz", ""),
    "segment": ("vit-small", "classes.npz", ""),
    "caption": ("captioner", "x.npz", ""),
    "draw": ("painter", "x.npz", ""),
    "dense_index": ("deepseek-v3.2", "text.txt", ""),
    "sparse_index": ("deepseek-v3.2", "text.txt", ""),
}


def test_every_task_is_peeked() -> None:
    assert PEEKED.keys() == TASKS.keys()


@pytest.mark.parametrize("task", PEEKED)
def test_peek_of_a_config_of_every_task(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    preset, data, more = PEEKED[task]
    (tmp_path / "text.txt").write_text("the cat sat on the mat. then it was all. " * 20)
    (tmp_path / "pairs.tsv").write_text("a cat\tgood\nno mat\tbad\n" * 4)
    (tmp_path / "tags.jsonl").write_text('{"words": ["a", "cat"], "tags": ["x", "y"]}\n' * 4)
    turns = [{"from": "human", "value": "a cat?"}, {"from": "gpt", "value": "a mat"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"conversations": turns}))
    pair = {"prompt": "a cat", "chosen": "sat", "rejected": "at all"}
    (tmp_path / "prefer.jsonl").write_text(json.dumps(pair))
    asked = {"question": "who sat?", "id": "1", "answers": [{"text": "cat", "answer_start": 2}]}
    squad = {"data": [{"paragraphs": [{"context": "a cat sat", "qas": [asked]}]}]}
    (tmp_path / "squad.json").write_text(json.dumps(squad))
    np.savez(tmp_path / "x.npz", x=np.zeros((4, 8, 8), np.uint8), y=np.array(["a", "b"] * 2))
    np.savez(
        tmp_path / "classes.npz",
        x=np.zeros((4, 8, 8), np.uint8),
        y=np.eye(2, dtype=int)[None].repeat(4, 0),
    )
    drawn = task in ("image", "segment", "caption", "draw")
    sizes = "size = 8\npatch = 4\nchannels = 1" if drawn else ""
    length = 'length = 16\npack = "stream"' if data == "text.txt" else ""
    words = "" if task in ("image", "segment") else '[tokenizer]\nkind = "chars"'
    (tmp_path / "c.toml").write_text(
        f'task = "{task}"\n[model]\npreset = "{preset}"\n{sizes}\n[data]\n'
        f'train = "{data}"\nrows = 2\n{length}\n{more}\n{words}\n'
    )
    code = main(["data", "peek", str(tmp_path / "c.toml")])
    out, err = capsys.readouterr()
    assert code == 0 and f"task {task}, seed 42, batch 0" in out and "row 0" in out, err
