"""A picture model at another image size: its grid of positions interpolated as transformers does it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import regard
from regard.cli.main import main
from regard.errors import UsageError
from tests.test_cli import folder


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Four by four patches, and a class token in front."""
    torch.manual_seed(0)
    small = dict(layers=1, dim=16, heads=2, ffn_dim=24)
    model = regard.build("vit-small", size=16, patch=4, channels=1, labels=2, **small)
    model.embedding.position.data.normal_()
    path = model.save(tmp_path / "vit")
    size = {"size": {"height": 16, "width": 16}, "image_mean": [0.2]}
    (path / "preprocessor_config.json").write_text(json.dumps(size))
    return path


@pytest.mark.parametrize("size", [8, 12, 28])
def test_logits_at_another_size_are_those_of_transformers(size: int, home: Path) -> None:
    from transformers import ViTForImageClassification

    peer = ViTForImageClassification.from_pretrained(home).eval()
    images = torch.randn(2, 1, size, size, generator=torch.Generator().manual_seed(size))
    # transformers looks at the size it was made for, unless it is told not to
    with torch.no_grad():
        want = peer(images, interpolate_pos_encoding=True).logits
    model = regard.load(home, image_size=size)
    assert model.config.embedding.size == size
    torch.testing.assert_close(model(images), want, rtol=1e-4, atol=1e-5)


def test_another_size_is_saved_and_the_own_changes_nothing(home: Path, tmp_path: Path) -> None:
    saved = regard.load(home, image_size=12).save(tmp_path / "resized")
    assert json.loads((saved / "config.json").read_text())["image_size"] == 12
    settings = json.loads((saved / "preprocessor_config.json").read_text())
    assert settings == {"size": {"height": 12, "width": 12}, "image_mean": [0.2]}
    images = torch.randn(1, 1, 12, 12)
    want = regard.load(home, image_size=12)(images)
    torch.testing.assert_close(regard.load(saved)(images), want, rtol=0, atol=0)
    one, other = regard.load(home), regard.load(home, image_size=16)
    torch.testing.assert_close(one.embedding.position, other.embedding.position)


def test_sizes_that_cannot_be_are_told(home: Path) -> None:
    with pytest.raises(UsageError, match="patch=4 must divide .*size=10"):
        regard.load(home, image_size=10)
    with pytest.raises(UsageError, match="this model reads no images"):
        regard.load(folder("gpt2"), image_size=16)


def test_fine_tuning_goes_on_at_another_size(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).integers(0, 256, (8, 12, 12), dtype=np.uint8)
    np.savez("x.npz", x=x, y=np.arange(8) % 2)
    model, data = "model = { folder = 'vit', size = 12 }", "data = { train = 'x.npz', rows = 4 }"
    Path("t.toml").write_text(f"task = 'image'\n{model}\n{data}\ntrain = {{ steps = 2 }}\n")
    assert main(["train", "t.toml", "--quiet"]) == 0
    assert regard.load("runs/t/last").config.embedding.size == 12
