"""Pictures in, texts out: a captioner trained from a config, and asked by `regard generate`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard.data.feed import IGNORE, Batching
from regard.data.image_feed import CaptionFeed
from regard.data.shards import Column
from tests.test_cli import call, folder

image = pytest.importorskip("PIL.Image")
CONFIG = """
task = "caption"
model = { preset = "captioner", size = 8, patch = 4, channels = 1, layers = 1, dim = 32, heads = 2, max-len = 80 }
data = { train = "x.npz", valid = "x.npz", rows = 8 }
tokenizer = { kind = "chars" }
train = { steps = 60, evaluate = 60, metric = "exact", optim = { lr = 1e-2 } }
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Dark pictures and light ones, and what is said of them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("regard.training.plan.PROBED", 0.01)
    x = np.concatenate([np.full((8, 8, 8), grey, np.uint8) for grey in (20, 230)])
    np.savez("x.npz", x=x, y=np.array(["a dark one"] * 8 + ["light"] * 8))
    Path("say.toml").write_text(CONFIG)
    for name, pixels in (("dark", x[0]), ("light", x[8])):
        image.fromarray(pixels).save(f"{name}.png")
    return tmp_path


def test_captioner_learns_to_say_what_it_sees(home: Path) -> None:
    done = call("train", "say.toml", "--quiet")
    assert done.code == 0, done.err
    done = call("generate", "runs/say", "dark.png")
    assert done.out == "a dark one\n", done.err
    done = call("generate", "runs/say/last", "light.png", "--json", "--beams", 2)
    assert json.loads(done.out)["text"] == "light"
    done = call("generate", "runs/say", "dark.png", "--quantize", "int8")
    assert done.out == "a dark one\n" and "perplexity of the plain model's answer" in done.err
    done = call("eval", "runs/say", "--data", "x.npz", "--json")
    metrics = json.loads(done.out)["metrics"]
    assert set(metrics) == {"loss", "perplexity"} and metrics["loss"] < 0.1, done.err
    for more in ([], ["--quantize", "int8"]):
        wanted = ["--metric", "exact", "--metric", "chrf", "--metric", "loss", "--min", 1]
        done = call("eval", "runs/say", "--data", "x.npz", "--json", *wanted, *more)
        measured = json.loads(done.out)
        assert done.code == 0 and measured["task"] == "caption", done.err
        assert measured["metrics"]["exact"] == 1 and measured["metrics"]["chrf"] == pytest.approx(
            100
        )
    np.savez("wide.npz", x=np.zeros((2, 16, 16), np.uint8), y=np.array(["a", "b"]))
    for given, code, text in (
        (["wide.npz"], 4, "the pictures are 16 x 16 x 1, the model reads 8 x 8 x 1"),
        (["wide.npz", "--metric", "exact"], 4, "the pictures are 16 x 16 x 1, the model reads"),
        (["x.npz", "--metric", "f1"], 2, "f1 does not suit the task caption; choose loss"),
        (["dark.png"], 2, "dark.png holds no pictures; give a folder"),
    ):
        done = call("eval", "runs/say", "--data", *given)
        assert done.code == code and text in done.err, done.err
    planned = json.loads(call("plan", "say.toml", "--json").out)
    model = regard.load("runs/say/last")
    assert planned["parameters"] == sum(p.numel() for p in model.parameters())


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    "given, code, text",
    [
        (["generate", "captioner", "say.toml"], 4, "say.toml is not a picture that can be read"),
        (["generate", "captioner", "gone.png"], 4, "gone.png is not a picture that can be read"),
        (["generate", "captioner", "5", "--ids"], 2, "name a picture and leave --ids out"),
        (["train", "say.toml", "--model.max-len", "6"], 2, "a caption has 11 tokens, the model's context is 6"),
        (["train", "say.toml", "--model.size", "16"], 2, "the pictures are 8 x 8 x 1, the model reads 16"),
        (["train", "say.toml", "--data.paste", "0.5"], 2, "paste is not used by the task caption"),
        (["train", "say.toml", "--model.preset", "vit-small"], 2, "the task caption is for a captioner"),
        (["train", "say.toml", "--data.length", "4"], 2, "length is not used by the task caption"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_told(given: list[Any], code: int, text: str) -> None:
    done = call(*(folder("captioner") if a == "captioner" else a for a in given))
    assert done.code == code and text in done.err, done.err
    assert "Traceback" not in done.err


def test_picture_without_a_caption_is_told(home: Path) -> None:
    np.savez("x.npz", x=np.zeros((2, 8, 8), np.uint8), y=np.array(["a", ""]))
    done = call("train", "say.toml")
    assert done.code == 4 and "1 of 2 pictures have no caption" in done.err


def test_feed_gives_every_picture_its_text() -> None:
    """In any order, padded, and in parts that are the batch; the fingerprint sees the texts."""
    pixels = np.arange(6, dtype=np.uint8).repeat(16).reshape(6, 4, 4, 1)
    texts = [[10 + i] * (i + 1) for i in range(6)]

    def feed(words: list[list[int]]) -> CaptionFeed:
        numbers, batching = Column(np.arange(6)), Batching(rows=4)
        how = {"texts": Column.of(words), "start": 2, "end": 3}
        return CaptionFeed(Column(pixels), numbers, batching, **how)  # type: ignore[arg-type]

    batch = feed(texts).batch(0)
    assert batch.source is not None and batch.source.shape == (4, 1, 4, 4)
    seen = ((batch.source[:, 0, 0, 0] + 1) * 127.5).round().long().tolist()
    for i, number in enumerate(seen):
        real = batch.labels[i] != IGNORE
        assert batch.labels[i][real].tolist() == [*texts[number], 3]
        assert batch.ids[i][real].tolist() == [2, *texts[number]]
    parts = [feed(texts).batch(0, rank, 2) for rank in (0, 1)]
    torch.testing.assert_close(torch.cat([p.ids for p in parts]), batch.ids)
    torch.testing.assert_close(torch.cat([p.source for p in parts]), batch.source)  # type: ignore[misc]
    assert feed(texts).fingerprint == feed(texts).fingerprint != feed(texts[::-1]).fingerprint


@pytest.mark.parametrize("name", ["light.png", "LIGHT.JPG"])
def test_picture_for_a_model_of_text_is_refused(name: str, home: Path) -> None:
    (home / name).write_bytes((home / "light.png").read_bytes())
    done = call("generate", folder("gpt2"), name)
    assert done.code == 2 and done.out == "" and done.err.count("\n") == 1
    assert f"{name} is a picture, and {folder('gpt2')} reads text" in done.err
    # As it says, the name itself can be a prompt; and one that is the name of no file is text.
    tokens = ["--max-new-tokens", 2]
    assert call("generate", folder("gpt2"), *tokens, stdin=name).code == 0
    assert call("generate", folder("gpt2"), f"no-{name}", *tokens).err == ""


def test_prompt_that_is_the_name_of_a_file_is_noted(home: Path) -> None:
    (home / "dog").write_text("the cat")
    done = call("generate", folder("gpt2"), "dog", "--max-new-tokens", 2)
    assert done.code == 0 and "which is also the name of a file" in done.err
    assert f"regard generate {folder('gpt2')} < dog reads the file" in done.err
