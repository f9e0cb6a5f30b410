"""Bad input to regard train and regard plan: one sentence, an exit code, no traceback, nothing overwritten."""

import sys
from pathlib import Path

import numpy as np
import pytest

from regard.cli.main import main
from regard.training.run import BEFORE

TEXT = "the quick brown fox jumps over the lazy dog. " * 30
SMALL = "layers = 1\ndim = 16\nheads = 2\nffn-dim = 32\n"
END = '[tokenizer]\nkind = "chars"\n[train]\nsteps = 2\nsave = 1\n'
LM = f"""task = "lm"
[model]
preset = "gpt2"
max-len = 32
{SMALL}[data]
train = "story.txt"
held = 0.2
length = 16
rows = 4
pack = "windows"
{END}"""
CLASSES = f"""task = "classify"
[model]
preset = "bert-base"
max-len = 32
{SMALL}[data]
train = "films.tsv"
rows = 4
{END}"""
PAIRS = f"""task = "seq2seq"
[model]
preset = "vaswani-base"
max-len = 32
{SMALL}[data]
train = "a.txt"
target = "b.txt"
rows = 4
{END}"""
PICTURES = f"""task = "image"
[model]
preset = "vit-small"
size = 8
patch = 4
channels = 1
{SMALL}[data]
train = "x.npz"
rows = 4
[train]
steps = 2
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)  # as where the extra is not installed
    texts = {"lm.toml": LM, "classes.toml": CLASSES, "pairs.toml": PAIRS, "pictures.toml": PICTURES}
    texts |= {
        "story.txt": TEXT,
        "a.txt": "ab cd\n" * 9,
        "b.txt": "cd ab\n" * 9,
        "few.txt": "ab\n" * 4,
    }
    texts |= {
        "films.tsv": "text\tlabel\n" + "good\t1\nbad\t0\n" * 5,
        "empty.txt": "",
        "blank.toml": "",
    }
    texts |= {"one.tsv": "text\tlabel\n" + "good\t1\n" * 9, "gap.tsv": "text\tlabel\na\t1\nb\n"}
    texts |= {
        "half.toml": "task = ",
        "bad.jsonl": '{"text": \n',
        "odd.jsonl": '{"text": 5, "label": 1}\n',
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "latin.txt").write_bytes("Stra\xdfe\n".encode("latin-1") * 50)
    (tmp_path / "latin.toml").write_bytes(b"# \xff")
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    (tmp_path / "folder").mkdir()
    x, y = np.zeros((8, 8, 8), np.uint8), np.arange(8) % 2
    np.savez(tmp_path / "x.npz", x=x, y=y)
    np.savez(tmp_path / "real.npz", x=x.astype(np.float32), y=y)
    np.savez(tmp_path / "large.npz", x=np.zeros((8, 12, 12, 3), np.uint8), y=y)
    np.savez(tmp_path / "names.npz", a=x, b=y)
    return tmp_path


DATA: dict[str, tuple[str, list[str], int, str]] = {  # config, changes, exit code, what is said
    "missing": ("lm", ["data.train", "gone.txt"], 4, "gone.txt does not exist; give the path"),
    "no match": ("lm", ["data.train", "gone*.txt"], 4, "gone*.txt does not exist"),
    "long name": ("lm", ["data.train", "x" * 5000], 4, "File name too long"),
    "empty": ("lm", ["data.train", "empty.txt"], 4, "empty.txt is empty: it holds no examples"),
    "a folder": ("lm", ["data.train", "folder"], 2, "folder is a folder, and the task lm reads text"),
    "no UTF-8": ("lm", ["data.train", "latin.txt"], 4, "line 1 of latin.txt is not UTF-8 text: byte 4 is 0xdf"),
    "column": ("classes", ["data.columns.text", "film"], 2, "no column 'film' for the role text; its first line"),
    "role": ("classes", ["data.columns.txt", "0"], 2, "'txt' is not a role; did you mean 'text'?"),
    "one class": ("classes", ["data.train", "one.tsv"], 4, "every label is '1'; give data with two classes"),
    "gap": ("classes", ["data.train", "gap.tsv"], 4, "line 3 of gap.tsv has 1 columns, the first line 2"),
    "no JSON": ("classes", ["data.train", "bad.jsonl"], 4, "line 1 of bad.jsonl is not JSON"),
    "no text": ("classes", ["data.train", "odd.jsonl"], 4, "text must be text, got 5"),
    "sides": ("pairs", ["data.target", "few.txt"], 4, "a.txt has 9 lines, few.txt 4"),
    "no other side": ("pairs", ["data.valid", "a.txt"], 2, "or a second file beside it"),
    "array": ("pictures", ["data.train", "real.npz"], 4, "must hold bytes of shape"),
    "array names": ("pictures", ["data.train", "names.npz"], 2, "has no array 'x' for the role image; it has: a, b"),
    "array size": ("pictures", ["data.train", "large.npz"], 2, "pictures are 12 x 12 x 3, the model reads 8 x 8 x 1"),
    "no picture": ("pictures", ["data.train", "story.txt"], 2, "story.txt holds no pictures"),
    "Parquet": ("lm", ["data.train", "a.parquet"], 3, "needs the package datasets; pip install datasets"),
    "hub": ("lm", ["data.train", "org/set", "data.format", "hub"], 3, "pip install datasets"),
    "format": ("lm", ["data.format", "xls"], 2, "format = 'xls' is unknown"),
}  # fmt: skip
SETTINGS: dict[str, tuple[str, list[str], int, str]] = {
    "table": ("lm", ["trian.steps", "3"], 2, "trian is not a setting of Config; did you mean 'train'?"),
    "key": ("lm", ["train.stpes", "3"], 2, "train.stpes is not a setting of Train; did you mean 'steps'?"),
    "inner key": ("lm", ["train.optim.rate", "3"], 2, "train.optim.rate is not a setting of Optim"),
    "model key": ("lm", ["model.layerz", "3"], 2, "no setting 'layerz' to change; did you mean 'layers'?"),
    "model inner key": ("lm", ["model.attention.headz", "3"], 2, "no setting 'headz' of tower.attention"),
    "steps": ("lm", ["train.steps", "many"], 2, "train.steps must be int, got 'many'"),
    "rate": ("lm", ["train.optim.lr", "-1"], 2, "train.optim.lr = -1.0: give more than 0"),
    "rate nan": ("lm", ["train.optim.lr", "nan"], 2, "train.optim.lr = nan: give a finite number"),
    "rate inf": ("lm", ["train.optim.lr", "inf"], 2, "train.optim.lr = inf: give a finite number"),
    "betas": ("lm", ["train.optim.betas", "[2, 3]"], 2, "train.optim.betas = (2.0, 3.0): give 0 to less than 1"),
    "eps": ("lm", ["train.optim.eps", "-1"], 2, "train.optim.eps = -1.0: give 0 or more"),
    "clip": ("lm", ["train.clip", "0"], 2, "train.clip = 0.0: give more than 0"),
    "patience": ("lm", ["train.patience", "0"], 2, "train.patience = 0: give 1 or more"),
    "precision": ("lm", ["train.precision", "fp8"], 2, "train.precision = 'fp8' is unknown; known: bf16, fp32"),
    "metric": ("lm", ["train.metric", "bleu"], 2, "bleu does not suit the task lm; choose loss, perplexity"),
    "seed": ("lm", ["train.seed", "-1"], 2, "train.seed = -1: give 0 to 9223372036854775807"),
    "adapt": ("lm", ["adapt.rank", "4"], 2, 'adapt.rank is used by adapt.method = "lora" and "qlora" alone'),
    "preset": ("lm", ["model.preset", "3"], 2, 'model.preset = 3: give a name, such as "gpt2"'),
    "dropout": ("lm", ["model.dropout", "nan"], 2, "model.dropout = nan: give a finite number"),
    "width": ("lm", ["model.dim", "-16"], 2, "tower.dim = -16: give 1 or more"),
    "vocab": ("lm", ["model.vocab", "5"], 2, "30 tokens, the model 5: they do not belong together; leave vocab"),
    "length": ("lm", ["data.length", "64"], 2, "data.length = 64, but the model's context is 32 tokens"),
    "context": ("pairs", ["model.max-len", "4"], 2, "has 6 tokens, the model's context is 4; say data.length = 4"),
    "flip": ("lm", ["data.flip", "true"], 2, "flip is not used by the task lm; leave it out"),
    "pack": ("classes", ["data.pack", "none"], 2, "pack is not used by the task classify; leave it out"),
    "tokenizer": ("pictures", ["tokenizer.kind", "bpe"], 2, "[tokenizer] is not used by the task image"),
    "tokenizer kind": ("lm", ["tokenizer.kind", "bp"], 2, "tokenizer.kind = 'bp' is unknown"),
    "tokenizer vocab": ("lm", ["tokenizer.vocab", "9"], 2, 'tokenizer.vocab is not used by kind = "chars"'),
    "tokenizer type": ("lm", ["tokenizer.lower", "3"], 2, "tokenizer.lower must be bool, got 3"),
    "tokenizer folder": ("lm", ["tokenizer.folder", "folder"], 4, "folder has no tokenizer.json; regard tokenizer"),
    "tokenizer name": ("lm", ["tokenizer.folder", "3"], 2, "folder = 3; give the name of a folder"),
    "config": ("no", [], 2, "no.toml cannot be read: No such file"),
    "half": ("half", [], 2, "half.toml is no TOML: Invalid value"),
    "blank": ("blank", [], 2, "blank.toml.task is missing; Config needs task, data, model"),
    "latin": ("latin", [], 2, "latin.toml is not UTF-8 text"),
}  # fmt: skip


def fails(arguments: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == code
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert said.err.startswith("error: ") and text in said.err


def flags(changes: list[str]) -> list[str]:
    return [f"--{t}" if i % 2 == 0 else t for i, t in enumerate(changes)]


@pytest.mark.parametrize("name", [*DATA, *SETTINGS])
def test_mistake_is_one_sentence_and_can_be_mended(
    name: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, changes, code, text = {**DATA, **SETTINGS}[name]
    fails(["train", f"{config}.toml", *flags(changes)], code, text, capsys)
    left = {p.name for p in (home / "runs" / config).glob("*")}
    assert left <= BEFORE  # so that the next try needs no other flag


@pytest.mark.parametrize("name", ["missing", "column", "hub", "key", "flip", "width", "betas"])
def test_plan_says_the_same(name: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, changes, code, text = {**DATA, **SETTINGS}[name]
    fails(["plan", f"{config}.toml", *flags(changes)], code, text, capsys)
    assert not (home / "runs").exists()


def test_config_that_is_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    fails(["train", "folder"], 2, "folder cannot be read: Is a directory", capsys)


def test_broken_picture_is_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = pytest.importorskip("PIL.Image")
    for name in ("a", "b"):
        (home / "folder" / name).mkdir()
        image.new("L", (8, 8)).save(home / "folder" / name / "1.png")
    (home / "folder/b/2.png").write_bytes(b"\x89PNG no more")
    given = ["train", "pictures.toml", "--data.train", "folder"]
    fails(given, 4, "folder/b/2.png is not a picture that can be read", capsys)


OTHERS = {  # preset, task -> what is said
    (
        "bert-base",
        "lm",
    ): "the task lm is for a decoder or a recurrent model, and [model] is an encoder",
    ("vaswani-base", "lm"): "and [model] is an encoder-decoder; say preset = gpt2 or llama",
    ("vit-small", "lm"): "and [model] is a model of pictures",
    ("bert-base", "prefix"): "the task prefix is for a decoder, and [model] is an encoder",
    (
        "gpt2",
        "mlm",
    ): "the task mlm is for an encoder, and [model] is a decoder; say preset = bert-base",
    ("gru-lm", "mlm"): "and [model] is a recurrent model",
    ("gpt2", "spans"): "the task spans is for an encoder-decoder, and [model] is a decoder",
    ("bert-base", "infill"): "the task infill is for an encoder-decoder",
}


@pytest.mark.parametrize("preset, task", OTHERS)
def test_config_of_another_mechanism_is_refused(
    preset: str, task: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = LM.replace('task = "lm"', f'task = "{task}"').replace("gpt2", preset)
    if preset == "gru-lm":
        text = text.replace("max-len = 32\n" + SMALL, "layers = 1\ndim = 16\n")
    if preset == "vit-small":
        text = text.replace("max-len = 32\n", "")
    text = (
        text.replace("held = 0.2\n", "")
        .replace("16\nrows", "512\nrows")
        .replace("windows", "stream")
    )
    (home / "lm.toml").write_text(text)
    fails(["train", "lm.toml"], 2, OTHERS[preset, task], capsys)


def test_tokenizer_that_does_not_fit_the_model_is_refused(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "lm.toml", "--quiet"]) == 0
    (home / "more.txt").write_text(TEXT + "ÄÖÜ 0123456789" * 9)
    text = LM.replace("story", "more").replace(
        'preset = "gpt2"\nmax-len = 32\n' + SMALL, 'folder = "runs/lm"\n'
    )
    (home / "fine.toml").write_text(text)
    capsys.readouterr()
    fails(
        ["train", "fine.toml"],
        2,
        "folder comes with its tokenizer, so [tokenizer] is not used",
        capsys,
    )
    assert main(["tokenizer", "train", "more.txt", "--kind", "chars", "--out", "tok"]) == 0
    capsys.readouterr()
    (home / "fine.toml").write_text(text.replace('kind = "chars"', 'folder = "tok"'))
    fails(
        ["train", "fine.toml"],
        2,
        "the model 30: they do not belong together; leave [tokenizer] out",
        capsys,
    )
    (home / "tok/tokenizer.json").write_text("{")
    fails(["train", "fine.toml"], 4, "tokenizer.json", capsys)
    given = ["train", "lm.toml", "--output-dir", "other", "--tokenizer.folder", "tok"]
    fails(given, 2, "tokenizer.kind is not used beside tokenizer.folder; leave one out", capsys)
    words = CLASSES.replace('preset = "bert-base"\nmax-len = 32\n' + SMALL, 'folder = "runs/lm"\n')
    (home / "fine.toml").write_text(words.replace('[tokenizer]\nkind = "chars"\n', ""))
    assert main(["train", "fine.toml", "--quiet"]) == 0  # a new head on it
    (home / "lm.toml").write_text(
        text.replace("runs/lm", "runs/fine").replace('[tokenizer]\nkind = "chars"\n', "")
    )
    capsys.readouterr()
    given = ["train", "lm.toml", "--output-dir", "runs/third"]
    fails(given, 2, "[model] has a head of another kind (classify); name a language model", capsys)
