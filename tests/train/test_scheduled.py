"""Scheduled sampling: which inputs are the model's own, that they are its draws, and that nothing else changes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.data.feed import Batch
from regard.decode.sampling import draw
from regard.errors import UsageError
from regard.fast.train import PRECISIONS, precision
from regard.models import EncoderDecoderConfig, Seq2SeqConfig
from regard.presets import PRESETS
from regard.training.build import kind_of
from regard.training.config import configure
from regard.training.objectives import seq2seq
from regard.training.scheduled import Sampled, ScheduledSampling, inputs
from regard.training.tasks import TASKS
from regard.training.trainer import Trainer
from tests.tiny import tiny
from tests.train.test_tasks import config_for, feed_for
from tests.train.toy import KINDS, Toy, trainer, weights
from tests.wide import wide

SAMPLED = [name for name, row in TASKS.items() if row.sampled]
PAIRS = EncoderDecoderConfig | Seq2SeqConfig
# Whisper's sources are sounds, which no task has.
FAMILIES = [
    name
    for name, (family, make) in PRESETS.items()
    if isinstance(make(), PAIRS) and family != "whisper"
]
families = pytest.mark.parametrize(
    "name", wide(FAMILIES, keep=["vaswani-base", "t5-small", "captioner", "bahdanau", "luong"])
)


def batch_for(model: Any, share: float = 1.0) -> Batch:
    """Two rows, the second shorter."""
    g = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(43, (2, 6), generator=g) for _ in range(2))
    if kind_of(model) == "captioner":
        batch = Batch(ids, labels, source=torch.randn(2, 3, 12, 12, generator=g))
    else:
        lengths = torch.tensor([5, 3])
        batch = Batch(ids, labels, source=ids[:, :5].flip(1), source_lengths=lengths)
    own = torch.rand(ids.shape, generator=g) < share
    own[:, 0] = False
    return replace(batch, own=own)


def said(model: Any, ids: Tensor, batch: Batch) -> Tensor:
    return model(ids, source=batch.source, source_lengths=batch.source_lengths)


def by_the_paper(model: Any, batch: Batch) -> Tensor:
    """Word after word without a cache for recurrent models (2015), two passes for others (2019)."""
    ids, own = batch.ids.clone(), batch.own
    assert own is not None
    if model.towers:
        logits = said(model, ids, batch)[:, :-1][own[:, 1:]]
        ids[own] = draw(logits, torch.rand(len(logits)))
        return ids
    for t in range(1, ids.shape[1]):
        new = draw(said(model, ids[:, :t], batch)[:, -1], torch.rand(len(ids)))
        ids[:, t] = torch.where(own[:, t], new, ids[:, t])
    return ids


@families
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_inputs_are_the_models_own_draws_where_they_are_marked(name: str, share: float) -> None:
    model = tiny(name).double().eval()
    batch = batch_for(model, share)
    batch = batch.each(lambda x: x.double() if x.is_floating_point() else x)
    torch.manual_seed(3)
    found = inputs(model, batch)
    torch.manual_seed(3)
    assert torch.equal(found, by_the_paper(model, batch))
    assert torch.equal(found[~batch.own], batch.ids[~batch.own])
    assert not torch.equal(found, batch.ids)


@families
@pytest.mark.parametrize("how", PRECISIONS)
def test_loss_and_gradients_are_those_of_reading_the_draws(name: str, how: str) -> None:
    """Nothing flows through the draws, and drawing takes no gradient away."""
    model, found = tiny(name).eval(), []
    batch = batch_for(model)
    torch.manual_seed(3)
    with precision(how, "cpu"):
        ids = inputs(model, batch)
    for each in (batch, replace(batch, ids=ids, own=None)):
        model.zero_grad()
        torch.manual_seed(3)
        with precision(how, "cpu"):
            loss, count = seq2seq(model, each)
        loss.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found.append({"loss": loss.detach(), "count": count, **grads})
    assert len(found[1]) > 5
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


@families
def test_no_input_marked_is_teacher_forcing_to_the_bit(name: str) -> None:
    model = tiny(name).eval()
    batch = batch_for(model, share=0.0)
    assert torch.equal(seq2seq(model, batch)[0], seq2seq(model, replace(batch, own=None))[0])


@pytest.mark.parametrize("task", SAMPLED)
def test_a_share_of_nothing_is_the_run_of_before(task: str) -> None:
    feed = feed_for(task)
    assert replace(config_for(task), scheduled_sampling=ScheduledSampling()).fed(feed, None) is feed
    marked = replace(config_for(task), scheduled_sampling=ScheduledSampling(1.0)).fed(feed, None)
    assert marked.fingerprint != feed.fingerprint
    batch, plain = marked.batch(0), feed.batch(0)
    assert batch.own is not None and batch.own[:, 1:].all() and not batch.own[:, 0].any()
    rest = zip(vars(replace(batch, own=None)).values(), vars(plain).values())
    assert all(a is b or torch.equal(a, b) for a, b in rest)
    assert all(held.own is None for held in marked.evaluation())


def test_share_rises_and_is_met() -> None:
    how = ScheduledSampling(0.25, warmup=4)
    assert [how.at(k) for k in (1, 2, 4, 9)] == [0.0625, 0.125, 0.25, 0.25]
    assert ScheduledSampling(0.25).at(1) == 0.25

    def marked(seed: int, *ks: int) -> Tensor:
        feed = Sampled(Toy(KINDS["vaswani"][1]), how, seed)
        return torch.stack([feed.batch(k).own[:, 1:] for k in ks]).float()  # type: ignore[index]

    rest = range(3, 103)
    # 100 batches of 6 rows of 7 inputs: five standard deviations
    assert abs(marked(0, *rest).mean() - 0.25) < 5 * (0.25 * 0.75 / (100 * 6 * 7)) ** 0.5
    assert marked(0, 0).mean() < marked(0, *rest).mean()
    assert torch.equal(marked(0, *rest), marked(0, *rest))
    assert not torch.equal(marked(0, *rest), marked(1, *rest))


def sampling(folder: Path, kind: str, share: float = 0.5) -> Trainer:
    t = trainer(folder, kind=kind, steps=3)
    t.feed = Sampled(t.feed, ScheduledSampling(share, warmup=2), 0)
    t._batch = t.feed.batch
    return t


@pytest.mark.parametrize("kind", ["vaswani", "bahdanau"])
def test_stopped_and_resumed_is_not_stopped(kind: str, tmp_path: Path) -> None:
    want = sampling(tmp_path / "whole", kind)
    want.run()
    t = sampling(tmp_path / "parts", kind)
    assert t.run(lambda: t.at.step >= 1) == "asked"
    got = sampling(tmp_path / "parts", kind)
    assert got.resume() and got.run() == "done"
    a, b = weights(got), weights(want)
    assert all(torch.equal(a[n], b[n]) for n in b)
    forced = trainer(tmp_path / "forced", kind=kind, steps=3)
    forced.run()
    assert any(not torch.equal(x, b[n]) for n, x in weights(forced).items())


@pytest.mark.parametrize("task", TASKS)
def test_tasks_that_answer_no_source_refuse_it(task: str) -> None:
    tables: dict[str, Any] = {
        "task": task,
        "data": {"train": "x"},
        "model": {"preset": "gpt2"},
        "scheduled-sampling": {"share": 0.25, "warmup": 100},
    }
    if TASKS[task].sampled:
        assert configure(tables).scheduled_sampling == ScheduledSampling(0.25, 100)
        return
    with pytest.raises(UsageError, match=f"is not used by the task {task}, but by seq2seq and"):
        configure(tables)


def test_warmup_without_a_share_is_refused() -> None:
    with pytest.raises(UsageError, match="give it too, such as 0.25, or leave warmup out"):
        ScheduledSampling(warmup=10)
    with pytest.raises(UsageError, match="share"):
        ScheduledSampling(1.5)
