"""Laws that every row of TASKS obeys: packed, padded, split into micro-batches, stopped and resumed, evaluated, an
example is worth what it is worth alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import regard
from regard.attention import DSA, GQA, MLA
from regard.block import Tower
from regard.data.config import KINDS, PICTURED, ROWED, Data, check_used
from regard.data.corrupt import Infill, Marks, Spans
from regard.data.feed import Base, Batch, Batching, Feed, LabelFeed, PairFeed, PreferFeed, TextFeed
from regard.data.image_feed import CaptionFeed, DrawingFeed, ImageFeed
from regard.data.shards import Column
from regard.errors import UsageError
from regard.layers import LM, MLM, MLP
from regard.mask import Span, Visible
from regard.models import (
    Canvas,
    EncoderDecoderConfig,
    PainterConfig,
    Patches,
    Tokens,
    TransformerConfig,
)
from regard.position import Rope, Sinusoidal
from regard.training.checkpoint import Checkpoints
from regard.training.config import Config
from regard.training.measure import measure
from regard.training.optim import Optim, Schedule, accumulate
from regard.training.tasks import TASKS
from regard.training.trainer import Train, Trainer
from tests.train.toy import weights
from tests.wide import wide

VOCAB, SPECIAL, SENTINELS = 29, 4, (25, 26, 27, 28)
MARKS = Marks(VOCAB, (0, 1, 2, 3, *SENTINELS), mask=1, sentinels=SENTINELS, start=2, end=3)
DIM, EXAMPLES = 12, 9
TIGHT = {"rtol": 1e-9, "atol": 1e-9}  # float64
tasks = pytest.mark.parametrize("task", TASKS)
# Of what trains a whole run.
FEW = ["lm", "prefer", "spans", "tag", "image", "sparse_index"]
kinds = pytest.mark.parametrize("task", wide(TASKS, keep=FEW))
PAIRED = (Spans, Infill)  # they make an encoder's text and a decoder's of a row


# --- a model, data and a config for each task ---------------------------------------------------------------------


def model_for(task: str, dropout: float = 0.0) -> Any:
    """Positions are relative where documents may share a row: absolute ones count through it."""
    torch.manual_seed(0)
    kind = TASKS[task].models[0]
    rope = GQA(2, rope=Rope(), dropout=dropout)
    if TASKS[task].indexed:
        rope = DSA(MLA(2, latent=8, rope_dim=4, rope=Rope()), 2, 4, 3, rope_dim=4)

    def tower(attention: Any, causal: bool, **more: Any) -> Tower:
        return Tower(DIM, 2, attention, MLP(16), causal=causal, dropout=dropout, **more)

    new_head = TASKS[task].head
    head = None if new_head is None else new_head(3)
    if kind == "encoder-decoder":
        tokens, plain = Tokens(VOCAB, Sinusoidal(64)), GQA(2)
        towers = tower(plain, False), tower(plain, True, cross=plain)
        return EncoderDecoderConfig(tokens, towers[0], tokens, towers[1]).make().double()
    if kind == "captioner":
        towers = tower(GQA(2), False), tower(GQA(2), True, cross=GQA(2))
        words = Tokens(VOCAB, Sinusoidal(64))
        parts = (Patches(8, 4, 1), towers[0], words, towers[1])
        return EncoderDecoderConfig(*parts, shared=False).make().double()
    if kind == "painter":
        towers = tower(GQA(2), False), tower(GQA(2), False, cross=GQA(2))
        words = Tokens(VOCAB, Sinusoidal(64))
        return PainterConfig(words, towers[0], Canvas(8, 4), towers[1]).make().double()
    if kind == "model of pictures":
        return TransformerConfig(Patches(8, 4, 1), tower(GQA(2), False), head).make().double()
    causal = kind == "decoder"
    words = head or (LM() if causal else MLM())
    return TransformerConfig(Tokens(VOCAB), tower(rope, causal), words).make().double()


def texts(seed: int, least: int = 3, most: int = 14) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    sizes = draw.integers(least, most, EXAMPLES)
    return [draw.integers(SPECIAL, SENTINELS[0], size) for size in sizes]


def plain_feed(task: str, pack: str, held: Base | None = None, seed: int = 0) -> Any:
    """Batches of three rows, of different lengths where they are not packed."""
    reads, draw = TASKS[task].reads, np.random.default_rng(seed)
    batching, rows = Batching(length=16, rows=3), texts(seed)
    column, more = Column.of(rows), {"held": held}
    if reads in ROWED:
        if reads == "chat":
            # The first token of a chat is not learned, some of the others are.
            said = [np.arange(len(row)) % 3 > 0 for row in rows]
            more["learned"] = Column.of(said, np.uint8)
        return TextFeed(column, batching, pack=pack, shift=reads != "mlm", **more)
    if reads == "prefer":
        sides = [texts(seed), texts(seed + 1)]
        said = [Column.of([np.arange(len(x)) > 1 for x in side], np.uint8) for side in sides]
        return PreferFeed(*zip(map(Column.of, sides), said), batching, **more)
    if reads == "seq2seq":
        return PairFeed(column, Column.of(texts(seed + 1)), batching, start=2, end=3, **more)
    if reads in PICTURED:
        pictures = draw.integers(0, 256, (EXAMPLES, 8, 8, 1), np.uint8)
    if reads == "caption":
        numbers, more = Column(np.arange(EXAMPLES)), {**more, "texts": column, "start": 2, "end": 3}
        return CaptionFeed(Column(pictures), numbers, batching, **more)
    if reads == "draw":
        numbers, around = Column(np.arange(EXAMPLES)), ((2,), (3,))
        more |= {"texts": column, "around": around}
        return DrawingFeed(Column(pictures), numbers, batching, **more)
    if reads in ("image", "segment"):
        classes = draw.integers(0, 3, (EXAMPLES, 4) if reads == "segment" else EXAMPLES)
        return ImageFeed(Column(pictures), Column(classes), batching, **more)
    labels = Column(draw.integers(0, 3, EXAMPLES))
    if reads == "tag":
        labels = Column.of([draw.integers(0, 3, len(row)) for row in rows])
    elif reads == "answer":
        labels = Column(np.sort(draw.integers(0, 3, (EXAMPLES, 2)), 1))
    return LabelFeed(column, labels, batching, around=((2,), (3,)), **more)


def config_for(task: str, pack: str = "none") -> Config:
    steps = 4
    train = Train(
        steps=steps,
        micro_batches=2,
        save=1,
        evaluate=2,
        optim=Optim(lr=3e-3),
        schedule=Schedule(steps=8),
    )
    return Config(task, Data("x", pack=pack), {"preset": "gpt2"}, train=train)


def feed_for(task: str, pack: str = "none") -> Feed:
    return config_for(task, pack).fed(plain_feed(task, pack, plain_feed(task, pack, seed=7)), MARKS)


def alone(batch: Batch) -> list[Batch]:
    """Its examples, each a batch without padding and without the others of its row."""

    def cut(x: Tensor | None, i: int, kept: slice | Tensor) -> Tensor | None:
        return None if x is None else x[i : i + 1, kept]

    found = []
    for i in range(len(batch.ids)):
        if batch.doc is None:
            size = None if batch.lengths is None else int(batch.lengths[i])
            places: list[slice | Tensor] = [slice(size)]
        else:
            numbers = range(int(batch.doc[i].max()) + 1)
            places = [torch.nonzero(batch.doc[i] == n)[:, 0] for n in numbers]
        for place in places:
            first = int(place[0]) if isinstance(place, Tensor) else 0
            along = batch.labels.shape == batch.ids.shape
            labels = cut(batch.labels, i, place) if along else batch.labels[i : i + 1]
            prefix = cut(batch.prefix, i, place)
            read = slice(None if batch.source_lengths is None else int(batch.source_lengths[i]))
            found.append(
                Batch(
                    batch.ids[i : i + 1] if batch.ids.dim() > 2 else batch.ids[i : i + 1, place],
                    labels,  # type: ignore[arg-type]
                    source=cut(batch.source, i, read),
                    prefix=None if prefix is None else prefix - first,
                    rejected=cut(batch.rejected, i, slice(None)),
                    rejected_labels=cut(batch.rejected_labels, i, slice(None)),
                )
            )
    return found


def on(model: Any, batch: Batch) -> Batch:
    """Pictures in the model's own precision."""
    dtype = next(model.parameters()).dtype
    return batch.each(lambda x: x.to(dtype) if x.is_floating_point() else x)


def same_as_alone(task: str, batch: Batch) -> None:
    model, objective = model_for(task), config_for(task).objective
    whole = on(model, batch)
    total, count = objective(model, whole)
    each = [objective(model, part) for part in alone(whole)]
    torch.testing.assert_close(total, sum(loss for loss, _ in each), **TIGHT)
    assert int(count) == sum(int(n) for _, n in each) > 0


# --- the laws -----------------------------------------------------------------------------------------------------


@tasks
def test_packed_is_alone(task: str) -> None:
    if TASKS[task].reads not in ROWED:
        with pytest.raises(UsageError, match="pack is not used"):
            check_used(Data("x", pack="none"), TASKS[task].reads, task)
    elif not TASKS[task].packed:
        with pytest.raises(UsageError, match="data.pack = none or stream"):
            config_for(task, "documents")
    else:
        for batch in (feed_for(task, "documents").batch(k) for k in range(2)):
            assert batch.doc is not None and batch.doc.max() > 0
            same_as_alone(task, batch)


@tasks
def test_padded_is_alone(task: str) -> None:
    batches = [feed_for(task).batch(k) for k in range(3)]
    worded = bool(KINDS[TASKS[task].reads].texts)
    assert not worded or any(batch.lengths is not None for batch in batches)
    for batch in batches:
        same_as_alone(task, batch)


@tasks
@pytest.mark.parametrize("pack", ["documents", "none"])
def test_tokens_see_what_the_mask_of_the_task_shows(task: str, pack: str) -> None:
    """Another token changes the hidden states that see it, and no other."""
    row, model = TASKS[task], model_for(task).eval()
    if row.reads not in ROWED or not (row.packed or pack == "none") or row.corruption in PAIRED:
        pytest.skip("the model's own mask holds, or documents share no row")
    batch = feed_for(task, pack).batch(0)
    mask = row.mask(batch)
    span = Span.run(0, batch.ids.shape[1])
    rule = mask or model.config.tower.mask
    shown = Visible(rule, span, span).tensor()[:, 0].expand(len(batch.ids), -1, -1)
    more = {} if mask is None else {"mask": mask}
    before = model.hidden(batch.ids, **more)
    for place in (0, 2, 5):
        ids = batch.ids.clone()
        ids[:, place] = torch.where(ids[:, place] == SPECIAL, SPECIAL + 1, SPECIAL)
        moved = (model.hidden(ids, **more) - before).abs().amax(-1) > 1e-12
        assert not (moved & ~shown[:, :, place]).any()
        assert moved[:, place].all()


@tasks
def test_split_into_micro_batches_is_whole(task: str) -> None:
    model, config = model_for(task), config_for(task)
    model, found = config.learning(model), []
    batch = on(model, feed_for(task).batch(0))
    for parts in (1, 2, 3):
        model.zero_grad()
        loss, count = accumulate(lambda f, b: f(model, b), config.objective, batch.split(parts))
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append({"loss": loss.detach(), "count": count, **grads})
    assert len(found[0]) > 2
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], **TIGHT)


def trainer_for(task: str, folder: Path, tell: Any = lambda event: None) -> Trainer:
    config, model = config_for(task), model_for(task, dropout=0.1).float()
    checkpoints = Checkpoints(folder, lambda m, path: m.save(path))
    return Trainer(
        config.learning(model),
        feed_for(task),
        config.objective,
        config.train,
        checkpoints,
        regard.load,
        [tell],
    )


@kinds
def test_stopped_and_resumed_is_not_stopped(task: str, tmp_path: Path) -> None:
    want = trainer_for(task, tmp_path / "whole")
    before = {n: x.clone() for n, x in want.model.state_dict().items()}
    want.run()
    for stop in (1, 3):
        t = trainer_for(task, tmp_path / "parts")
        t.resume()
        assert t.run(lambda t=t, stop=stop: t.at.step >= stop) == "asked"
    got = trainer_for(task, tmp_path / "parts")
    assert got.resume() and got.run() == "done" and got.at == want.at
    a, b = weights(got), weights(want)
    assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
    assert any(not torch.equal(x, before[n]) for n, x in want.model.state_dict().items())


@kinds
def test_one_evaluation_pass_is_the_mean_over_examples(task: str, tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    t = trainer_for(task, tmp_path, events.append)
    t.run()
    model, objective = t.model.eval(), config_for(task).objective
    each = [objective(model, part) for batch in t.feed.evaluation() for part in alone(batch)]
    with torch.no_grad():
        want = float(sum(x for x, _ in each)) / sum(int(n) for _, n in each)
    told = [event["loss"] for event in events if event["kind"] == "evaluation"]
    assert told[-1] == pytest.approx(want, rel=1e-5)
    model.train()
    found = measure(model, task, t.feed, None, objective, ["loss"], samples=0)
    assert found.values["loss"] == pytest.approx(want, rel=1e-5) and model.training
