"""A class for each patch of a picture: the head, the loss, IoU, the data, and the task on the command line."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import regard
from regard.data.feed import Batch
from regard.training.measure import label_scores, mean_iou
from regard.training.objectives import classify
from tests.test_cli import call
from tests.test_cli_look import data

SMALL: dict[str, Any] = dict(size=8, patch=4, channels=1, layers=2, dim=16, heads=2, ffn_dim=32)


def model() -> Any:
    torch.manual_seed(0)
    return regard.build("vit-small", **SMALL, head=regard.Tag(3)).double()


def test_each_patch_has_logits_of_its_own_and_the_class_token_none(tmp_path: Path) -> None:
    net, pictures = model(), torch.randn(2, 1, 8, 8).double()
    logits, hidden = net(pictures), net.hidden(pictures)
    assert logits.shape == (2, 4, 3) and hidden.shape == (2, 5, 16)
    plain = torch.nn.functional.linear(hidden[:, 1:], net.head.out.weight, net.head.out.bias)
    torch.testing.assert_close(logits, plain)
    again = regard.load(net.save(tmp_path / "model"), dtype=torch.float64)
    assert torch.equal(again(pictures), logits) and again.config == net.config


def test_loss_is_the_cross_entropy_of_each_patch() -> None:
    net, pictures = model(), torch.randn(2, 1, 8, 8).double()
    wanted = torch.tensor([[0, 1, 2, 0], [2, 2, 1, 0]])
    loss, count = classify(net, Batch(pictures, wanted))
    p = net(pictures).softmax(-1)
    plain = -sum(p[i, j, wanted[i, j]].log() for i in range(2) for j in range(4))
    torch.testing.assert_close(loss, plain)
    assert int(count) == 8


def test_iou_counts_every_class_the_same() -> None:
    # One of two a is found, both b are; c is found where none is.
    assert mean_iou("acbb", "aabb") == pytest.approx((1 / 2 + 2 / 2 + 0) / 3)
    # One b too many.
    assert mean_iou("abbb", "aabb") == pytest.approx((1 / 2 + 2 / 3) / 2)
    rows = [(0, 0, 1, 1)], [(0, 2, 1, 1)]
    values, signatures = label_scores("segment", rows[1], rows[0], ["a", "b", "c"])
    assert (
        values == {"accuracy": 0.75, "iou": pytest.approx(0.5)} and "patches" in signatures["iou"]
    )


CONFIG = """
task = "segment"
model = { preset = "vit-small", size = 8, patch = 4, channels = 1, layers = 1, dim = 32, heads = 2, ffn-dim = 32 }
data = { train = "x.npz", valid = "x.npz", rows = 8 }
train = { steps = 120, evaluate = 60, metric = "iou", optim = { name = "muon", lr = 4e-3 } }
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Squares that are dark or light, and a config that learns which."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("regard.training.plan.PROBED", 0.01)
    lit = np.random.default_rng(0).random((32, 2, 2)) < 0.5
    x = (lit.repeat(4, 1).repeat(4, 2) * 255).astype(np.uint8)
    np.savez("x.npz", x=x, y=np.where(lit, "light", "no"))
    Path("segment.toml").write_text(CONFIG)
    return tmp_path


def test_segments_are_learned_measured_said_and_shown(home: Path) -> None:
    done = call("train", "segment.toml", "--quiet")
    assert done.code == 0, done.err
    done = call("eval", "runs/segment", "--data", "x.npz", "--json")
    found = json.loads(done.out)
    assert found["task"] == "segment" and found["metrics"]["iou"] == 1, done.err
    assert set(found["metrics"]) == {"iou", "accuracy", "loss"}
    picture = np.zeros((8, 8), np.uint8)
    picture[4:, :4] = 255
    Image.fromarray(picture).save("a.png")
    assert call("generate", "runs/segment", "a.png").out == "no    no\nlight no\n"
    wrong = call("generate", "runs/segment", "a.png", "--temperature", "1")
    assert wrong.code == 2 and "leave all other settings out" in wrong.err
    wrong = call("classify", "runs/segment", "a.png")
    assert wrong.code == 2 and "regard generate MODEL picture.png" in wrong.err
    assert call("look", "runs/segment", "--image", "a.png", "--output", "a.html").code == 0
    (view,) = data(Path("a.html"))[0]["views"]
    assert view["rows"] == ["class", "1,1", "1,2", "2,1", "2,2"]
    assert call("report", "runs/segment").code == 0
    text = Path("runs/segment/report.html").read_text()
    assert text.count("step 120: ") >= 4 and "of light" in text
    last = json.loads(Path("runs/segment/samples.jsonl").read_text().splitlines()[-1])
    assert last["classes"]["found"] == last["classes"]["true"] and last["text"] == last["reference"]
    assert np.shape(last["classes"]["true"]) == (2, 2) and np.shape(
        last["pictures"]["picture"]
    ) == (8, 8)


def test_peek_shows_the_classes_below_the_picture(home: Path) -> None:
    np.savez("x.npz", x=np.zeros((8, 8, 8), np.uint8), y=np.array([[["a", "b"], ["c", "d"]]] * 8))
    done = call("data", "peek", "segment.toml")
    assert done.code == 0 and "  a b\n  c d\n" in done.out, done.err


def test_classes_that_do_not_fit_are_refused(home: Path) -> None:
    Path("fine.toml").write_text(CONFIG.replace("patch = 4", "patch = 2"))
    done = call("train", "fine.toml")
    assert done.code == 2 and "classes of 4 patches of a picture, the model reads 16" in done.err
    np.savez("one.npz", x=np.zeros((2, 8, 8), np.uint8), y=np.array([0, 1]))
    Path("one.toml").write_text(CONFIG.replace("x.npz", "one.npz"))
    done = call("train", "one.toml")
    assert done.code and "must be (n, rows, columns) numbers or names, got int64 (2,)" in done.err
    Path("folder/cat").mkdir(parents=True)
    Path("folder.toml").write_text(CONFIG.replace("x.npz", "folder"))
    done = call("train", "folder.toml")
    assert done.code == 2 and "an npz file with one for each patch" in done.err
    net = regard.build("vit-small", **{**SMALL, "patch": 2}, head=regard.Tag(2))
    np.savez("n.npz", x=np.load("x.npz")["x"], y=np.arange(128).reshape(32, 2, 2) % 2)
    done = call("eval", net.save(home / "fine"), "--data", "n.npz")
    assert done.code and "classes are of 4 patches, the model reads 16" in done.err
    plain = regard.build("vit-small", **SMALL, head=regard.Classify(2))
    done = call("generate", plain.save(home / "plain"), "a.png")
    assert done.code == 2 and "regard classify MODEL picture.png" in done.err
