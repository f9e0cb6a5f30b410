"""How good a model is on data: the loss, and what its answers are worth (metrics.py). Joins training's feeds and
objectives, the decoder and the tokenizer; the training loop and `regard eval` use it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard.data.feed import IGNORE, Batch, Feed, Objective
from regard.decode.generate import default_length, generate
from regard.errors import UsageError
from regard.fast import train as memory
from regard.models import Model
from regard.models.embedding import Tokens, context
from regard.text import Tokenizer, needed
from regard.train.metrics import label_scores, perplexity, suited, text_scores
from regard.train.tasks import TASKS

LABELLED = ("classify", "image", "tag", "answer")
ROWS = {"cpu": 64, "cuda": 256}  # sources that are decoded at once
PROMPT, NEW, TEMPERATURE = 16, 48, 0.8  # of the samples of a language model
Sample = dict[str, str]


@dataclass
class Measured:
    """Values by the name of the metric, signatures of those that have several definitions, and some answers: what was
    given (source), said (text) and expected (reference; a language model's samples have none)."""

    values: dict[str, float] = field(default_factory=dict)
    signatures: dict[str, str] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)


@torch.no_grad()
def measure(
    model: Any,
    task: str,
    feed: Feed,
    tokenizer: Tokenizer | None,
    objective: Objective,
    metrics: Sequence[str],
    *,
    classes: Sequence[str] = (),
    samples: int = 4,
    limit: int | None = None,
    precision: str = "fp32",
    beams: int = 1,
    device: torch.device | str | None = None,
    between: Callable[[], None] = lambda: None,
) -> Measured:
    """The metrics of a model on `feed.evaluation()`; the model, its mode and the random numbers stay as they are.

    `loss` is the objective's; `perplexity` is of the task's own objective, without label smoothing. Texts are decoded
    greedily, or by `beams`, and compared with the text of the labels, as the tokenizer writes it: `limit` of them, or
    all. (`regard eval` compares with the file's own text.) `precision` is that of losses and labels; decoding runs in
    the weights' own. `between` is called before each batch and each sample: what it raises ends the measuring."""
    names = suited(metrics, task)
    where = torch.device(next(model.parameters()).device if device is None else device)
    losses = {"loss": objective, "perplexity": TASKS[task].objective}
    means = {losses[name]: Mean() for name in names if name in losses}
    textual = [name for name in names if task == "seq2seq" and name not in losses]
    if textual:
        needed(tokenizer)
    taken = Taken(task, None if textual else samples)
    with left_alone(model, where):
        for given in feed.evaluation():
            between()
            with memory.precision(precision, where):
                logits = _answered(model, task, given.to(where), means)
            taken.add(given, logits)
        if not taken.batches:
            raise UsageError("nothing is held out to be measured; name valid files, or held = 0.1")
        result = Measured({n: means[loss].value for n, loss in losses.items() if n in names})
        if "perplexity" in names:
            result.values["perplexity"] = perplexity(result.values["perplexity"])
        if task in LABELLED:
            shown = spread(len(taken.read), samples)
            result.samples = [_labelled(taken, i, tokenizer, classes) for i in shown]
            scores = label_scores(task, taken.predicted, taken.wanted, classes)
        else:
            few = limit if textual else samples
            texts = _said(model, taken, tokenizer, few, beams, between)
            result.samples = [texts[i] for i in spread(len(texts), samples)]
            # No signature: it would promise the file's own references, and these went through the tokenizer.
            scores = text_scores(textual, *_sides(texts))[0] if textual else {}, {}
    values = {**result.values, **scores[0]}
    result.values = {name: values[name] for name in names}
    result.signatures = {name: text for name, text in scores[1].items() if name in names}
    return result


# --- while it is measured -----------------------------------------------------------------------------------------


def _answered(model: Any, task: str, batch: Batch, means: dict[Objective, Mean]) -> Tensor | None:
    """Add a batch to every mean; the logits of labels, where the task has some."""
    heard = Heard(model)
    for loss, mean in means.items():
        mean.add(*loss(heard, batch))
    if task not in LABELLED:
        return None
    return heard(batch.ids, batch.lengths)


@contextmanager
def left_alone(model: Any, device: torch.device) -> Iterator[None]:
    """The model in evaluation mode; afterwards each of its parts in the mode it was in, and random numbers go on as if
    nothing had been drawn."""
    modes = [(module, module.training) for module in model.modules()]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode


class Heard:
    """A model that remembers what it said to the ids it read last, so that the losses of a batch and its labels cost
    one call."""

    def __init__(self, model: Any):
        self.model = model
        self.outputs: dict[str, tuple[Tensor, Tensor]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, ids: Tensor, *args: Any, **settings: Any) -> Tensor:
        return self._once("forward", self.model, ids, *args, **settings)

    def hidden(self, ids: Tensor, *args: Any, **settings: Any) -> Tensor:
        return self._once("hidden", self.model.hidden, ids, *args, **settings)

    def _once(self, name: str, act: Any, ids: Tensor, *args: Any, **settings: Any) -> Tensor:
        if name not in self.outputs or self.outputs[name][0] is not ids:
            self.outputs[name] = ids, act(ids, *args, **settings)
        return self.outputs[name][1]


@dataclass
class Mean:
    total: float = 0.0
    count: int = 0

    def add(self, part: Tensor, count: Tensor) -> None:
        self.total, self.count = self.total + float(part), self.count + int(count)

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else math.nan


class Taken:
    """What stays of the batches. Of labelled examples `predicted` and `wanted` labels, and what was `read` of some, by
    their number; of others `pairs` (source, target) or (beginning of a text, nothing). `few`: that many of each batch
    are enough to show."""

    def __init__(self, task: str, few: int | None):
        self.task, self.few, self.batches = task, few, 0
        self.predicted: list[Any] = []
        self.wanted: list[Any] = []
        self.read: list[tuple[int, list[int]]] = []
        self.pairs: list[tuple[list[int], list[int]]] = []

    def add(self, batch: Batch, logits: Tensor | None) -> None:
        self.batches += 1
        rows = range(len(batch.ids))
        if logits is not None:
            self._label(batch, logits.float().cpu())
        elif batch.source is not None:
            for i in rows[: self.few]:
                source, labels = _real(batch.source, batch.source_lengths, i), batch.labels[i]
                self.pairs.append((source, labels[labels != IGNORE].tolist()))
        elif self.task == "lm":
            self.pairs += [(_beginning(batch, i), []) for i in rows[: self.few]]

    def _label(self, batch: Batch, logits: Tensor) -> None:
        counted = batch.labels != IGNORE
        best = _spans(logits, batch.lengths) if self.task == "answer" else logits.argmax(-1)
        counts = counted if counted.dim() == 1 else counted.any(-1)
        for k, i in enumerate(counts.nonzero()[:, 0].tolist()):
            if self.few is None or k < self.few:
                ids = [] if self.task == "image" else _real(batch.ids, batch.lengths, i)
                self.read.append((len(self.predicted), ids))
            here = counted[i] if self.task == "tag" else ...
            for side, x in ((self.predicted, best), (self.wanted, batch.labels)):
                label = x[i][here].tolist()
                side.append(tuple(label) if isinstance(label, list) else label)


def _real(x: Tensor, lengths: Tensor | None, i: int) -> list[int]:
    """A row without its padding."""
    return x[i, : None if lengths is None else int(lengths[i])].tolist()


def _beginning(batch: Batch, i: int) -> list[int]:
    """The first tokens of a row, at most half of its first document."""
    ids = _real(batch.ids, batch.lengths, i)
    if batch.doc is not None:
        ids = ids[: int((batch.doc[i] == batch.doc[i, 0]).sum())]
    return ids[: min(PROMPT, max(len(ids) // 2, 1))]


def _spans(logits: Tensor, lengths: Tensor | None) -> Tensor:
    """(b t 2) -> (b 2): of all first <= last tokens the pair whose logits sum to the most. A row's first token stands
    for no answer: it is no part of another span."""
    if lengths is not None:
        place = torch.arange(logits.shape[1], device=logits.device)
        logits = logits.masked_fill((place >= lengths[:, None])[..., None], -torch.inf)
    start, end = logits.unbind(-1)
    highest, first = start[:, 1:].cummax(-1)
    best, last = (highest + end[:, 1:]).max(-1, keepdim=True)
    span = 1 + torch.cat([first.gather(-1, last), last], -1)
    return span.masked_fill(start[:, :1] + end[:, :1] >= best, 0)


# --- answers ------------------------------------------------------------------------------------------------------


def translations(
    model: Any,
    sources: Sequence[Sequence[int]],
    *,
    beams: int = 1,
    between: Callable[[], None] = lambda: None,
) -> list[list[int]]:
    """What an encoder-decoder says to each source, in ids: at most twice as many as the longest source that is decoded
    with it, and ten. Sources of about one length are decoded together."""
    rows = ROWS.get(next(model.parameters()).device.type, 64)
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    hypotheses: list[list[int]] = [[]] * len(sources)
    for start in range(0, len(order), rows):
        between()
        numbers = order[start : start + rows]
        part = [list(sources[i]) for i in numbers]
        most = default_length(model, part)
        with eager(model):
            results = generate(model, part, beams=beams, rows=rows * beams, max_new_tokens=most)
        for i, result in zip(numbers, results, strict=True):
            hypotheses[i] = result.ids
    return hypotheses


def eager(model: Any) -> Any:
    """Each step of decoding has another shape: a model that training compiled would be compiled over and over."""
    compiled = any(module._compiled_call_impl is not None for module in model.modules())
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def spread(count: int, few: int | None) -> list[int]:
    """`few` of `count` numbers, far from each other; all, where `few` is None or more."""
    few = count if few is None else min(few, count)
    return [(2 * i + 1) * count // (2 * few) for i in range(few)]


def _said(
    model: Any,
    taken: Taken,
    tokenizer: Tokenizer | None,
    few: int | None,
    beams: int,
    between: Callable[[], None],
) -> list[Sample]:
    """Some of what was taken, answered in text."""
    pairs = [taken.pairs[i] for i in spread(len(taken.pairs), few)]
    if tokenizer is None or not pairs:
        return []
    if taken.task == "lm":
        return [_continued(model, ids, tokenizer, between) for ids, _ in pairs]
    texts = translations(model, [source for source, _ in pairs], beams=beams, between=between)
    return [
        {
            "source": tokenizer.decode(a),
            "text": tokenizer.decode(b),
            "reference": tokenizer.decode(c),
        }
        for (a, c), b in zip(pairs, texts, strict=True)
    ]


def context_of(model: Model) -> int | None:
    """Tokens that fit into every side of the model; None: as many as you like."""
    sides = [getattr(model.config, name, None) for name in ("embedding", "source", "target")]
    limits = [context(model.config.max_len, side) for side in sides if isinstance(side, Tokens)]
    return min((n for n in limits if n is not None), default=None)


def _sides(samples: Sequence[Sample]) -> tuple[list[str], list[str]]:
    return [s["text"] for s in samples], [s["reference"] for s in samples]


def _continued(
    model: Any, ids: list[int], tokenizer: Tokenizer, between: Callable[[], None]
) -> Sample:
    between()
    longest = context_of(model)
    room = NEW if longest is None else min(NEW, longest - len(ids))
    given = tokenizer.decode(ids)
    if room < 1:
        return {"source": given, "text": ""}
    with eager(model):
        (result,) = generate(model, [ids], max_new_tokens=room, temperature=TEMPERATURE)
    return {"source": given, "text": tokenizer.decode(result.ids, after=ids)}


def _labelled(taken: Taken, k: int, tokenizer: Tokenizer | None, classes: Sequence[str]) -> Sample:
    number, ids = taken.read[k]

    def text(label: Any) -> str:
        if taken.task == "answer":
            return tokenizer.decode(ids[label[0] : label[1] + 1]) if tokenizer else str(label)
        labels = label if isinstance(label, tuple) else (label,)
        return " ".join(classes[i] if i < len(classes) else str(i) for i in labels)

    source = tokenizer.decode(ids) if tokenizer and ids else f"example {number + 1}"
    predicted, true = taken.predicted[number], taken.wanted[number]
    return {"source": source, "text": text(predicted), "reference": text(true)}
