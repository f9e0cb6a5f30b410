"""Topics about training and decoding."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.attention import GQA
from regard.block import Tower
from regard.checkpoint import load
from regard.data.feed import Batch
from regard.data.read import needed
from regard.decode.sampling import beam_search, min_p, top_k, top_p
from regard.errors import Notice, UsageError
from regard.layers import LM, MLP
from regard.learn.topics import Numbers, Table, positive, real, rows_of, spread, topic, whole
from regard.models import Tokens, TransformerConfig
from regard.train.checkpoint import Checkpoints
from regard.train.loss import (
    SMOOTHINGS,
    causal,
    causal_lm_loss,
    masked_lm_loss,
    smooth,
    smoothed_loss,
    teacher_forcing,
)
from regard.train.measure import text_scores
from regard.train.optim import SHAPES, Optim, Schedule, noam
from regard.train.trainer import Train, Trainer

SAMPLING, OBJECTIVE = "regard/decode/sampling.py", "regard/train/loss.py"


@topic(f"{SAMPLING}::top_p", f"{SAMPLING}::top_k", f"{SAMPLING}::min_p")
def decoding(
    x: Numbers = (2.0, 1.0, 0.5, 0.0, -1.0), topk: int = 3, p: float = 0.7, temperature: float = 0.7
) -> list[Table]:
    """How is the next token chosen?

    greedy: argmax_v x_v;   drawn: v ~ softmax(x / T) after a filter
    top-k: the k largest;   top-p: the fewest whose mass is >= p, one at least;   min-p: p times the largest
    What is left is renormalised. x: logits of the next token."""
    logits = real(x)
    if not 0 <= p <= 1:
        raise UsageError(f"--p is {p:g}; give a probability from 0 to 1")
    ways = {
        "softmax": logits,
        f"T = {temperature:g}": logits / positive("temperature", temperature),
        f"top-k {topk}": top_k(logits, topk),
        f"top-p {p:g}": top_p(logits, p),
        "min-p 0.1": min_p(logits, 0.1),
    }
    columns = [spread(way.softmax(-1)) for way in ways.values()]
    rows = list(zip(range(len(x)), x, *columns))
    return [Table("probabilities", ["token", "logit", *ways], rows)]


@topic(f"{SAMPLING}::beam_search", "regard/decode/beam.py::advance")
def beam(
    w: Numbers = (0.6, 0.4), x: Numbers = (0.4, 0.35, 0.25, 0.9, 0.05, 0.05), beams: int = 2
) -> list[Table]:
    """What does greedy decoding miss?

    keep the `beams` prefixes with the largest sum_t log p(y_t | y_<t); at the end divide by length^penalty
    w: probabilities of the first token; x: of the second, one row for each first."""
    first, second = real(w), rows_of("x", x, count=len(w))
    size = max(first.numel(), second.shape[1])
    if bool((first <= 0).any() | (second <= 0).any()):
        raise UsageError("--w and --x are probabilities; give numbers above 0")

    def step(prefix: tuple[int, ...]) -> Tensor:
        row = second[prefix[0]] if prefix else first
        return torch.cat([(row / row.sum()).log(), row.new_full((size - len(row),), -torch.inf)])

    rows = []
    for width in sorted({1, whole("beams", beams, 1, 100)}):
        for rank, (ids, total) in enumerate(beam_search(step, width, 2)):
            rows.append(
                [width, rank + 1, " ".join(map(str, ids)), total, real((total,)).exp().item()]
            )
    return [Table("what is found", ["beams", "rank", "tokens", "log p", "p"], rows)]


@topic(f"{OBJECTIVE}::smooth", "regard/train/loss.py::Smoothing")
def label_smoothing(
    x: Numbers = (1.0, 2.0, 3.0, 0.5, -1.0), label: int = 2, eps: float = 0.1
) -> list[Table]:
    """Why not ask for the right word with certainty?

    loss = - sum_v q_v log softmax(x)_v;   V-1: q = 1 - eps, the others eps / (V-1)
    V: q = 1 - eps + eps / V, the others eps / V (torch);   V-2: as V-1, and nothing on padding
    A logit need no longer grow without end. x: logits; label: counted from 0."""
    if len(x) < 3:
        raise UsageError("--x needs three logits or more: one word, another and padding")
    given, target = real(x)[None], torch.tensor([whole("label", label, 0, len(x) - 1)])
    columns, ends = {"q one-hot": spread(smooth(target, len(x), 0.0)[0])}, ["loss", ""]
    ends.append(f"{smoothed_loss(given, target, 0.0)[0].item():.4f}")
    for over in SMOOTHINGS:
        padding = (0 if label else len(x) - 1) if over == "V-2" else None
        columns[f"q over {over}"] = spread(smooth(target, len(x), eps, over, padding)[0])
        loss = smoothed_loss(given, target, eps, over, padding)[0].item()
        ends.append(f"{loss:.4f}")
    rows = [*zip(map(str, range(len(x))), x, *columns.values()), ends]
    return [Table(f"eps = {eps:g}, label {label}", ["word", "logit", *columns], rows)]


@topic("regard/train/optim.py::Schedule", "regard/train/optim.py::noam")
def schedules(
    steps: Numbers = (1.0, 100.0, 1000.0, 4000.0, 10000.0), dim: int = 512, warmup: int = 4000
) -> list[Table]:
    """How large should a step be, and when?

    2017: lr = dim^-0.5 min(step^-0.5, step warmup^-1.5), largest at warmup; steps count from 1
    cosine: (1 + cos(pi share)) / 2;   linear: 1 - share;   wsd: 1, then down at the end. All after a warm-up."""
    at = [whole("steps", step) for step in steps]
    last = max(*at, warmup + 2)
    decay = {"wsd": (last - warmup) // 2}
    plans = [Schedule(shape, last, warmup, decay=decay.get(shape, 0)) for shape in SHAPES]
    rows = [[step, noam(step, dim, warmup), *(plan(step) for plan in plans)] for step in at]
    columns = ["step", "lr of 2017", *(f"{shape} / peak" for shape in SHAPES)]
    return [Table(f"warm-up {warmup:,}, end at {last:,}", columns, rows)]


@topic("regard/train/measure.py::text_scores")
def bleu(
    text: str = "the cat sat on a mat", reference: str = "the cat sat on the mat"
) -> list[Table]:
    """How near is a translation to a human one?

    BLEU = 100 BP exp(1/4 sum_n log p_n),   p_n: share of n-grams that the reference has
    BP = min(1, e^(1 - r/c)): too short a text c pays. A figure of a whole corpus; of one sentence it is rough."""
    names = ("bleu", "bleu_lc", "chrf", "exact")
    values, _ = text_scores(names, [text], [reference])
    metric = needed("sacrebleu.metrics", "BLEU", "sacrebleu").BLEU(force=True)
    score = metric.corpus_score([text], [[reference]])
    rows = [[n + 1, score.counts[n], score.totals[n], p] for n, p in enumerate(score.precisions)]
    figures: list[list[Any]] = [[name, float(values[name])] for name in names]
    return [
        Table(f"n-grams, BP = {score.bp:.4f}", ["n", "right", "of", "percent"], rows),
        Table("figures", ["name", "value"], figures),
    ]


@topic(f"{OBJECTIVE}::teacher_forcing", f"{OBJECTIVE}::causal_lm_loss")
def objectives(x: Numbers = (1.0, 5.0, 3.0, 4.0, 2.0)) -> list[Table]:
    """What does a model learn from a text?

    causal: - sum_t log p(y_{t+1} | y_<=t);   masked: - sum over selected t of log p(y_t | the rest)
    seq2seq: - sum_t log p(y_t | source, y_<t), all t at once: the decoder reads the TRUE words, shifted by one
    x: ids of a target, start and end included. A loss is a sum and a count."""
    ids = torch.tensor([[whole("x", i, 0, 9999) for i in x]])
    if ids.shape[1] < 2:
        raise UsageError("--x needs two ids or more: one to read and one to say")
    reads, says = teacher_forcing(ids)
    rows = list(zip(range(reads.shape[1]), reads[0].tolist(), says[0].tolist()))
    vocab = int(ids.max()) + 1
    logits = torch.zeros(1, ids.shape[1], vocab, dtype=torch.float64)
    hidden = torch.where(torch.arange(ids.shape[1]) % 3 == 1, ids, -100)
    kinds = {
        "causal": causal_lm_loss(logits, ids),
        "masked, every third": masked_lm_loss(logits, hidden),
    }
    losses = [
        [name, total.item(), int(count), total.item() / max(int(count), 1)]
        for name, (total, count) in kinds.items()
    ]
    title = f"of a model that knows nothing: log {vocab} each"
    return [
        Table("teacher forcing", ["place", "reads", "must say"], rows),
        Table(title, ["objective", "sum", "count", "mean"], losses),
    ]


class Count:
    """Rows that count up; batch k is a function of k."""

    fingerprint, epoch, vocab = "count", 10, 11

    def batch(self, k: int, rank: int = 0, world: int = 1) -> Batch:
        ids = (torch.arange(9) + torch.arange(k, k + 6)[:, None]) % self.vocab
        return Batch(ids[:, :-1], ids[:, 1:])

    def evaluation(self) -> Iterator[Batch]:
        return iter([self.batch(10**6)])

    def describe(self) -> str:
        return "counting"


@topic("regard/train/trainer.py::Trainer.resume", "regard/train/trainer.py::Trainer")
def resume(steps: int = 6) -> list[Table]:
    """Does a run that was stopped come to the same bits?

    batch = f(seed, k),   random numbers = f(seed, k),   lr = f(k);   state = weights, moments, k
    A checkpoint holds the state; all else is a function of the step. Here a small model is trained twice."""
    whole("steps", steps, 2, 100)
    with tempfile.TemporaryDirectory(prefix="regard-") as home:
        straight: list[float] = []
        whole_run = _trained(Path(home, "one"), steps, steps, straight)
        stopped: list[float] = []
        _trained(Path(home, "two"), steps, steps // 2, stopped)
        resumed = _trained(Path(home, "two"), steps, steps, stopped)
    ends = _state(whole_run), _state(resumed)
    equal = ends[0].keys() == ends[1].keys() and all(
        torch.equal(x, ends[1][name]) for name, x in ends[0].items()
    )
    rows = [
        [k + 1, f"{a:.2f}", f"{b:.2f}", "yes" if a == b else "no"]
        for k, (a, b) in enumerate(zip(straight, stopped, strict=True))
    ]
    columns = ["step", "loss, straight", f"loss, stopped after {steps // 2}", "equal"]
    result = "equal to the bit" if equal else "different"
    return [Table(f"weights and moments at the end: {result}", columns, rows)]


def _trained(folder: Path, steps: int, stop: int, losses: list[float]) -> Trainer:
    """A small model trained up to step `stop`, from its last checkpoint if it has one."""
    torch.manual_seed(0)
    tower = Tower(16, 1, GQA(2, dropout=0.1), MLP(32), dropout=0.1)
    model = TransformerConfig(Tokens(Count.vocab), tower, LM(), max_len=16).make()

    def tell(event: dict[str, Any]) -> None:
        if event["kind"] == "step":
            losses.append(event["loss"])

    checkpoints = Checkpoints(folder, lambda m, path: m.save(path))
    plan = Train(steps, optim=Optim(lr=1e-2))
    trainer = Trainer(model, Count(), causal, plan, checkpoints, load, [tell])
    trainer.resume()
    with warnings.catch_warnings():
        # The format of a checkpoint that nobody sees.
        warnings.simplefilter("ignore", Notice)
        trainer.run(lambda: trainer.at.step >= stop)
    return trainer


def _state(trainer: Trainer) -> dict[str, Tensor]:
    return {**trainer.model.state_dict(), **trainer.optimizer.state()}


TOPICS = (decoding, beam, label_smoothing, schedules, bleu, objectives, resume)
