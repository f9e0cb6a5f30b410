"""Text to image: the painter, its data, its loss and what its drawings are worth."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard.data.feed import Batch, Batching
from regard.data.image_feed import DrawingFeed
from regard.data.shards import Column
from regard.errors import UsageError
from regard.training.measure import Drawings, Taken
from regard.training.objectives import draw
from regard.training.tasks import TASKS

SIZES: dict[str, Any] = dict(layers=2, dim=16, heads=2, ffn_dim=32, vocab=20, size=8, patch=2)


def painter() -> Any:
    torch.manual_seed(0)
    return regard.build("painter", **SIZES, channels=3, max_len=9).double()


def test_patches_attend_to_the_text_and_stand_in_their_places() -> None:
    model, probe, ids = painter(), regard.Probe(), torch.tensor([[1, 2, 3], [3, 2, 1]])
    pictures = model(ids, probe=probe)
    assert pictures.shape == (2, 3, 8, 8) and not torch.allclose(*pictures)
    assert probe.maps["decoder.1.cross"][0].shape == (2, 2, 16, 3)
    assert probe.maps["encoder.0.self"][0].shape == (2, 2, 3, 3)
    # One patch is one square: its pixels change alone.
    hidden = model.hidden(ids)
    moved = hidden.clone()
    moved[:, 5] += 1
    changed = (model.logits(moved) != model.logits(hidden)).any(1)
    assert changed[:, 2:4, 2:4].all() and int(changed.sum()) == 2 * 4


def test_padding_of_a_text_is_not_seen(tmp_path: Path) -> None:
    model, ids = painter(), torch.tensor([[1, 2, 3]])
    padded = torch.tensor([[1, 2, 3, 7, 7]])
    torch.testing.assert_close(model(padded, [3]), model(ids))
    again = regard.load(model.save(tmp_path / "model"), dtype=torch.float64)
    assert torch.equal(again(ids), model(ids))


def test_a_painter_that_cannot_be_is_refused() -> None:
    config = painter().config
    with pytest.raises(UsageError, match=r"decoder\.cross given"):
        replace(config, decoder=replace(config.decoder, cross=None))
    with pytest.raises(UsageError, match=r"must divide"):
        regard.build("painter", **{**SIZES, "patch": 3})
    with pytest.raises(UsageError, match="does not decode step by step"):
        painter().cache(1)


def test_loss_is_the_square_of_the_error_of_each_pixel() -> None:
    def wrong_by_two(ids: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
        return wanted + 2

    wanted = torch.zeros(2, 1, 4, 4)
    wanted[1] = -100  # not counted
    loss, count = draw(wrong_by_two, Batch(torch.zeros(2, 3, dtype=torch.long), wanted))
    assert (float(loss), int(count)) == (64.0, 16)


def test_feed_has_each_text_beside_its_picture() -> None:
    pixels = np.arange(3 * 16, dtype=np.uint8).reshape(3, 4, 4, 1)
    texts = Column.of([np.array(row) for row in ([5], [6, 7], [8, 9, 10])])
    more: Any = {"texts": texts, "around": ((2,), (3,)), "pad": 1}
    feed = DrawingFeed(Column(pixels), Column(np.arange(3)), Batching(rows=3), **more)
    (batch,) = feed.everything()
    rows = {int(ids[1]): (ids.tolist(), int(n)) for ids, n in zip(batch.ids, batch.lengths)}
    assert rows == {
        5: ([2, 5, 3, 1, 1], 3),
        6: ([2, 6, 7, 3, 1], 4),
        8: ([2, 8, 9, 10, 3], 5),
    }
    for ids, label in zip(batch.ids, batch.labels):
        i = [5, 6, 8].index(int(ids[1]))
        torch.testing.assert_close(
            label * 127.5 + 127.5, torch.tensor(pixels[i]).permute(2, 0, 1).float()
        )


def test_nearest_is_the_share_of_drawings_that_are_nearest_to_what_was_asked() -> None:
    taken = Taken(TASKS["draw"], None)
    # Of text 1 two pictures, whose mean is 0; of text 2 one, of 1.
    for text, wanted, drawn in ((1, -0.5, 0.1), (1, 0.5, 0.9), (2, 1.0, 0.8)):
        taken.read.append((len(taken.predicted), [text]))
        taken.predicted.append(torch.full((1, 2, 2), drawn))
        taken.wanted.append(torch.full((1, 2, 2), wanted))
    drawings = Drawings(taken)
    assert drawings.means.flatten(1).tolist() == [[0.0] * 4, [1.0] * 4]
    assert drawings.nearest == 2 / 3
