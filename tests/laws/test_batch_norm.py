"""BatchNorm as a norm of the blocks: what it computes, what it keeps, and that all that decodes agrees on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.errors import UsageError
from regard.layers import BatchNorm
from regard.training.parallel import DataParallel, ShardedDataParallel
from tests.open.stranger import decodes, stands, tiny


def trained(**changes: Any) -> Any:
    """A model that has read a few batches, so that its running means are not where they began."""
    model = tiny(norm="batch", **changes).train()
    for _ in range(3):
        model(torch.randint(60, (4, 16)))
    return model.eval()


def test_batch_norm_takes_each_feature_over_all_tokens() -> None:
    """By hand, and beside torch's on the same tokens in one row."""
    x = torch.randn(3, 5, 4) * 2 + 1
    norm, theirs = BatchNorm(momentum=0.25).make(4), nn.BatchNorm1d(4, momentum=0.25)
    mean, var = x.mean((0, 1)), x.var((0, 1), unbiased=False)
    torch.testing.assert_close(norm(x), (x - mean) / (var + 1e-5).sqrt())
    torch.testing.assert_close(norm.mean.data, 0.25 * mean)
    # torch keeps the unbiased variance, of 15 tokens.
    torch.testing.assert_close(norm.var.data, 0.75 + 0.25 * var * 15 / 14)
    theirs(x.flatten(0, 1))
    torch.testing.assert_close(norm(x).flatten(0, 1), theirs(x.flatten(0, 1)))
    y = torch.randn(2, 1, 4)
    torch.testing.assert_close(norm.eval()(y)[:, 0], theirs.eval()(y[:, 0]))


def test_batch_norm_leaks_in_training_alone() -> None:
    """A token depends on a later one and on another text, until the running means are used."""
    model, ids = trained(), torch.randint(60, (2, 8))
    later, other = ids.clone(), ids.clone()
    later[0, -1] = (ids[0, -1] + 1) % 60
    other[1] = (ids[1] + 1) % 60

    def same(changed: Tensor) -> bool:
        return torch.allclose(model(ids)[0, :-1], model(changed)[0, :-1], atol=1e-5)

    assert same(later) and same(other)
    model.train()
    assert not same(later) and not same(other)


@pytest.mark.parametrize("order", ["pre", "post", "sandwich", "inner", "parallel"])
def test_batch_norm_decodes_as_it_reads(order: str) -> None:
    """Token by token with a cache, prepared or not, as one forward says; in evaluation."""
    model = trained(order=order)
    decodes(model)
    ids = [5, 9, 2, 7]
    for form in (model, regard.prepare(model)):
        made = regard.generate(form, [ids], max_new_tokens=6)[0].ids
        row = torch.tensor([[*ids, *made]])
        assert model(row)[0, 3:-1].argmax(-1).tolist() == made
        torch.testing.assert_close(form(row), model(row))


def test_batch_norm_is_trained_saved_and_read_again(tmp_path: Path) -> None:
    model = stands(tmp_path, norm="batch")
    norm = model.tower.blocks[0].norm1
    # Its running mean is that of what was learned, and a weight of the folder.
    assert norm.mean.abs().max() > 1e-3 and not norm.mean.requires_grad
    assert model.config.tower.norm == BatchNorm()


@pytest.mark.parametrize("team", [DataParallel, ShardedDataParallel])
def test_batch_norm_is_not_shared_between_processes(team: type[DataParallel]) -> None:
    """Each would norm by its own part of the batch."""
    with pytest.raises(UsageError, match="of a whole batch"):
        object.__new__(team).wrap(tiny(norm="batch"))


@pytest.mark.parametrize("again", [{"micro_batches": 2}, {"activation_checkpointing": True}])
def test_batch_norm_reads_a_whole_batch_once(again: dict[str, Any], tmp_path: Path) -> None:
    """A part would have another mean, and a block that is computed again would count its batch twice."""
    (tmp_path / "a.txt").write_text("a king, a queen and a frog. " * 40)
    config = {
        "task": "lm",
        "model": {"preset": "gpt2", "layers": 1, "dim": 16, "heads": 2, "norm": "batch"},
        "data": {"train": str(tmp_path / "a.txt"), "length": 16, "rows": 4, "pack": "stream"},
        "tokenizer": {"kind": "chars"},
        "train": {"steps": 1, "evaluate": 0, **again},
    }
    with pytest.raises(UsageError, match=f"{next(iter(again))} = .*another norm"):
        regard.train(config, tmp_path / "run")


def test_norm_is_chosen_by_a_word() -> None:
    sizes: dict[str, Any] = {"vocab": 20, "layers": 1, "dim": 16, "heads": 2}
    word, table = (
        regard.build("gpt2", **sizes, norm=norm) for norm in ("batch", {"kind": "batch"})
    )
    assert word.config == table.config and word.config.tower.norm == BatchNorm()
    assert regard.build("gpt2", **sizes, norm="norm").config.tower.norm == regard.Norm()
    # A table without its kind is of the default one, as it was before there were kinds.
    plain = regard.build("gpt2", **sizes, norm={"eps": 1e-6, "plus_one": False})
    assert plain.config.tower.norm == regard.Norm(1e-6)
    with pytest.raises(UsageError, match="one of norm, batch"):
        regard.build("gpt2", **sizes, norm="bach")
