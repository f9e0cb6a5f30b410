"""Text to image on the command line: train, generate, eval, look, report; and a memory to look at."""

import json
from pathlib import Path

import numpy as np
import pytest

import regard
from tests.test_cli import call, folder
from tests.test_cli_look import data

CONFIG = """
task = "draw"
model = { preset = "painter", size = 8, patch = 4, channels = 1, layers = 1, dim = 32, heads = 2, max-len = 20 }
data = { train = "x.npz", valid = "x.npz", rows = 8 }
tokenizer = { kind = "chars" }
train = { steps = 200, evaluate = 100, optim = { name = "muon", lr = 4e-3 } }
"""


def test_painter_learns_to_draw_what_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("regard.training.plan.PROBED", 0.01)
    left = np.zeros((8, 8), np.uint8)
    left[:, :4] = 255
    np.savez(
        "x.npz", x=np.stack([left] * 8 + [left.T] * 8), y=np.array(["left"] * 8 + ["the top"] * 8)
    )
    Path("draw.toml").write_text(CONFIG)
    done = call("train", "draw.toml", "--quiet")
    assert done.code == 0, done.err
    assert call("generate", "runs/draw", "left").out == ("  " + "@" * 8 + "\n") * 8
    assert call("generate", "runs/draw", "the top").out == ("  " + "@" * 16 + "\n") * 4 + "  \n" * 4
    wrong = call("generate", "runs/draw", "left", "--temperature", "1")
    assert wrong.code == 2 and "leave all other settings out" in wrong.err
    done = call("eval", "runs/draw", "--data", "x.npz", "--json")
    found = json.loads(done.out)
    assert found["task"] == "draw" and found["metrics"]["nearest"] == 1, done.err
    assert found["metrics"]["loss"] < 0.05
    done = call(
        "eval", "runs/draw", "--data", "x.npz", "--quantize", "int8", "--metric", "loss", "--json"
    )
    assert json.loads(done.out)["metrics"]["loss"] < 0.1, done.err
    np.savez("wide.npz", x=np.zeros((2, 16, 16), np.uint8), y=np.array(["a", "b"]))
    Path("wide.toml").write_text(CONFIG.replace("x.npz", "wide.npz"))
    done = call("train", "wide.toml")
    assert done.code == 2 and "the model draws 8 x 8 x 1" in done.err
    page = call("report", "runs/draw")
    assert page.code == 0, page.err
    text = Path("runs/draw/report.html").read_text()
    assert "from: the top" in text and text.count("step 200: left") >= 1
    assert "mean of such pictures" in text and "decoder.0.cross" in text
    assert call("look", "runs/draw", "left", "--output", "a.html").code == 0
    views = {view["name"]: view for view in data(Path("a.html"))[0]["views"]}
    assert views["cross"]["rows"] == ["1,1", "1,2", "2,1", "2,2"] == views["decoder"]["rows"]
    assert views["encoder"]["rows"] == views["cross"]["columns"]


def test_look_at_a_model_that_attends_to_a_memory(tmp_path: Path) -> None:
    plain = regard.load(folder("gpt2"))
    cross = {"tower.cross": regard.GQA(2), "tower.memory_dim": 6}
    model = regard.build(plain.config, **cross)
    model.origin = plain.origin
    home = model.save(tmp_path / "model")
    np.save(tmp_path / "m.npy", np.random.default_rng(0).normal(size=(5, 6)))
    out = tmp_path / "a.html"
    done = call("look", home, "the king", "--memory", tmp_path / "m.npy", "--output", out)
    assert done.code == 0, done.err
    views = {view["name"]: view for view in data(out)[0]["views"]}
    assert views["cross"]["columns"] == ["0", "1", "2", "3", "4"]
    assert views["cross"]["rows"] == views["self"]["rows"]
    done = call("look", home, "the king", "--output", out)
    assert done.code == 2 and "give one: --memory FILE.npy" in done.err
    done = call("look", folder("gpt2"), "the king", "--memory", tmp_path / "m.npy")
    assert done.code == 2 and "leave --memory out" in done.err
    np.save(tmp_path / "m.npy", np.zeros((5, 7)))
    done = call("look", home, "the king", "--memory", tmp_path / "m.npy", "--output", out)
    assert done.code == 2 and "features of shape (s, 6), it holds (5, 7)" in done.err
