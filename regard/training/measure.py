"""How good a model is on data: the loss, and what its answers are worth. Joins training's feeds and objectives, the
decoder and the tokenizer; the training loop and `regard eval` use it.

Of the metrics, which need answers and references alone, shares (accuracy, exact, f1, iou) go from 0 to 1, bleu, chrf
and those of ROUGE from 0 to 100.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.data.feed import IGNORE, Batch, Feed, Objective
from regard.data.read import needed as package
from regard.decode.engine import evaluation
from regard.decode.generate import default_length, generate
from regard.errors import UsageError, nearest
from regard.fast import train as memory
from regard.models import Model
from regard.models.embedding import Tokens, context
from regard.text import Tokenizer, needed
from regard.training.objectives import REWARDS, Tally, label_logits, padding
from regard.training.tasks import ROUGE, TASKS, Task

# Kinds of data whose answers are labels, and whose answers are texts.
LABELLED, WRITING = ("classify", "image", "segment", "tag", "answer"), ("seq2seq", "caption")
# Kinds whose examples have several labels, each a class.
MANY = ("segment", "tag")
# Kinds whose answers, labels or pictures, one call of the model gives.
CALLED = (*LABELLED, "draw")
DRAWINGS = 12  # texts whose drawings are shown
ROWS = {"cpu": 64, "cuda": 256}  # sources that are decoded at once
PROMPT, NEW, TEMPERATURE = 16, 48, 0.8  # of the samples of a language model
Sample = dict[str, Any]
Span = tuple[int, int]  # first and last token
# Metrics, and whether more of it is better. f1 is macro_f1, span_f1 or overlap_f1.
METRICS = {"loss": False, "perplexity": False} | dict.fromkeys(
    (
        "bleu",
        "bleu_lc",
        "chrf",
        *ROUGE,
        "exact",
        "accuracy",
        "f1",
        "iou",
        "nearest",
        "sts",
        *REWARDS,
    ),
    True,
)
METRICS["reward_rejected"] = False
TEXTUAL = ("bleu", "bleu_lc", "chrf")  # those of sacreBLEU; bleu_lc takes A and a for the same


@dataclass(frozen=True)
class Measured:
    """Values by the name of the metric, signatures of those that have several definitions, and some answers: what was
    given (source), said (text) and expected (reference; a language model's samples have none); `pictures` by name, and
    `classes` of their patches."""

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
    precision: str = "fp32",
    between: Callable[[], None] = lambda: None,
    tally: Tally | None = None,
) -> Measured:
    """The metrics of a model on `feed.evaluation()`; the model, its mode and the random numbers stay as they are.

    `loss` is the objective's; `perplexity` is of the task's own objective, without label smoothing. Texts are decoded
    greedily and compared with the text of the labels, as the tokenizer writes it. (`regard eval` compares with the
    file's own text.) `precision` is that of losses and labels; decoding runs in the weights' own. `between` is called
    before each batch and each sample: what it raises ends the measuring. `tally`: the objective's, of its rewards."""
    names = suited(metrics, task)
    where = next(model.parameters()).device
    row = TASKS[task]
    losses = {"loss": objective, "perplexity": row.objective}
    totals = {losses[name]: [0.0, 0.0] for name in names if name in losses}
    textual = [name for name in names if row.reads in WRITING and name not in losses]
    if textual:
        needed(tokenizer)
    taken = Taken(row, None if textual else samples)
    drawn = torch.random.fork_rng(devices=[where] if where.type == "cuda" else [])
    with drawn, evaluation(list(model.modules())):
        _read(model, feed, totals, taken, precision, between)
        if row.reads in LABELLED:
            shown = [
                _labelled(taken, i, tokenizer, classes) for i in spread(len(taken.read), samples)
            ]
            values, signatures = label_scores(row.reads, taken.predicted, taken.wanted, classes)
        elif row.reads == "draw":
            drawings = Drawings(taken)
            values, signatures = {"nearest": drawings.nearest}, {}
            shown = drawings.samples(tokenizer, DRAWINGS if samples else 0)
        else:
            texts = _said(model, taken, tokenizer, None if textual else samples, between)
            shown = [texts[i] for i in spread(len(texts), samples)]
            sides = [[text[side] for text in texts if textual] for side in ("text", "reference")]
            # No signature: it would promise the file's own references, and these went through the tokenizer.
            values, signatures = text_scores(textual, *sides)[0], {}
    for name in [n for n in losses if n in names]:
        whole, n = totals[losses[name]]
        values[name] = whole / n if n else math.nan
    values |= {} if tally is None else tally.means()
    if "perplexity" in names:
        values["perplexity"] = perplexity(values["perplexity"])
    signatures = {name: text for name, text in signatures.items() if name in names}
    return Measured({name: values[name] for name in names}, signatures, shown)


def _read(
    model: Any,
    feed: Feed,
    totals: dict[Objective, list[float]],
    taken: Taken,
    precision: str,
    between: Callable[[], None],
) -> None:
    """Each batch once: its losses and counts are added to `totals`, and what is needed of it later to `taken`."""
    where = next(model.parameters()).device
    for given in feed.evaluation():
        between()
        heard, batch = Heard(model), given.to(where)
        with memory.precision(precision, where):
            for loss, total in totals.items():
                part, count = loss(heard, batch)
                total[:] = total[0] + float(part), total[1] + int(count)
            logits = label_logits(heard, batch) if taken.task.reads in CALLED else None
        taken.add(given, logits)
    if not taken.batches:
        raise UsageError("nothing is held out to be measured; name valid files, or held = 0.1")


# --- while it is measured -----------------------------------------------------------------------------------------


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


class Taken:
    """What stays of the batches. Of labelled examples `predicted` and `wanted` labels, and what was `read` of some
    (ids, or a picture whose patches have labels), by their number; of drawings `predicted` and `wanted` pictures, and
    what was `read` of all; of others `pairs` (source or picture, target) or (beginning of a text, nothing). `few`:
    that many of each batch are enough to show."""

    def __init__(self, task: Task, few: int | None):
        self.task, self.few = task, few
        self.batches = 0
        self.predicted: list[Any] = []
        self.wanted: list[Any] = []
        self.read: list[tuple[int, Any]] = []
        self.pairs: list[tuple[Any, list[int]]] = []

    def add(self, batch: Batch, logits: Tensor | None) -> None:
        self.batches += 1
        rows = range(len(batch.ids))
        if logits is not None and self.task.reads == "draw":
            self.predicted += logits.float().cpu()
            self.wanted += batch.labels
            lengths = batch.lengths
            self.read += [(i, _real(batch.ids, lengths, i)) for i in rows]
        elif logits is not None:
            self._label(batch, logits.float().cpu())
        elif batch.source is not None and (batch.source.dim() == 2 or self.few is None):
            for i in rows[: self.few]:
                x, labels = batch.source[i], batch.labels[i]
                source = _real(batch.source, batch.source_lengths, i) if x.dim() == 1 else x
                self.pairs.append((source, labels[labels != IGNORE].tolist()))
        elif self.task.continued:
            for i in rows[: self.few]:
                ids = _real(batch.ids, batch.lengths, i)
                if batch.doc is not None:
                    ids = ids[: int((batch.doc[i] == batch.doc[i, 0]).sum())]
                # At most half of the row's first document; of a chat, up to the first answer.
                asked = [*(batch.labels[i, : len(ids)] != IGNORE).tolist(), True].index(True) + 1
                half = min(PROMPT, max(len(ids) // 2, 1))
                self.pairs.append((ids[: asked if self.task.reads == "chat" else half], []))

    def _label(self, batch: Batch, logits: Tensor) -> None:
        counted = batch.labels != IGNORE
        best = _spans(logits, batch.lengths) if self.task.reads == "answer" else logits.argmax(-1)
        counts = counted if counted.dim() == 1 else counted.any(-1)
        for k, i in enumerate(counts.nonzero()[:, 0].tolist()):
            if self.few is None or k < self.few:
                self.read.append((len(self.predicted), self._given(batch, i)))
            here = counted[i] if self.task.reads == "tag" else ...
            for side, x in ((self.predicted, best), (self.wanted, batch.labels)):
                label = x[i][here].tolist()
                side.append(tuple(label) if isinstance(label, list) else label)

    def _given(self, batch: Batch, i: int) -> Any:
        if self.task.reads == "segment":
            return batch.ids[i]
        return [] if self.task.reads == "image" else _real(batch.ids, batch.lengths, i)


def _real(x: Tensor, lengths: Tensor | None, i: int) -> list[int]:
    """A row without its padding."""
    return x[i, : None if lengths is None else int(lengths[i])].tolist()


def _spans(logits: Tensor, lengths: Tensor | None) -> Tensor:
    """(b t 2) -> (b 2): of all first <= last tokens the pair whose logits sum to the most. A row's first token stands
    for no answer: it is no part of another span."""
    if lengths is not None:
        logits = logits.masked_fill(padding(logits, lengths)[..., None], -torch.inf)
    span, best = best_spans(logits)
    return span.masked_fill(logits[:, 0].sum(-1, keepdim=True) >= best, 0)


def best_spans(logits: Tensor, longest: int | None = None) -> tuple[Tensor, Tensor]:
    """(b t 2) -> the span (b 2) of at most `longest` tokens whose logits sum to the most, without a row's first token,
    and that sum (b 1)."""
    start, end = logits[:, 1:].unbind(-1)
    n = min(longest or start.shape[1], start.shape[1])
    # The best first token of every last one.
    highest, back = F.pad(start, (n - 1, 0), value=-torch.inf).unfold(1, n, 1).max(-1)
    best, last = (highest + end).max(-1, keepdim=True)
    return last + torch.cat([back.gather(-1, last) - n + 2, torch.ones_like(last)], -1), best


# --- answers ------------------------------------------------------------------------------------------------------


def translations(
    model: Any,
    sources: Sequence[Sequence[int] | Tensor],
    *,
    beams: int = 1,
    between: Callable[[], None] = lambda: None,
) -> list[list[int]]:
    """What an encoder-decoder says to each source, in ids: at most twice as many as the longest source that is decoded
    with it, and ten; of a picture twice NEW. Sources of about one length are decoded together."""
    rows = ROWS.get(next(model.parameters()).device.type, 64)
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    hypotheses: list[list[int]] = [[]] * len(sources)
    for start in range(0, len(order), rows):
        between()
        numbers = order[start : start + rows]
        part: list[Any] = [sources[i] for i in numbers]
        most = default_length(model, [[0] * NEW if isinstance(x, Tensor) else x for x in part])
        with eager(model):
            how: Any = {"beams": beams, "n_best": 1, "temperature": 0.0, "max_new_tokens": most}
            results = generate(model, part, rows=rows * beams, **how)
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
    model: Any, taken: Taken, tokenizer: Tokenizer | None, few: int | None, between: Any
) -> list[Sample]:
    """Some of what was taken, answered in text."""
    pairs = [taken.pairs[i] for i in spread(len(taken.pairs), few)]
    if tokenizer is None or not pairs:
        return []
    if taken.task.continued:
        return [_continued(model, ids, tokenizer, between) for ids, _ in pairs]
    texts = translations(model, [source for source, _ in pairs], between=between)
    sides = ([[] if isinstance(a, Tensor) else a for a, _ in pairs], texts, [c for _, c in pairs])
    names, decode = ("source", "text", "reference"), tokenizer.decode
    return [dict(zip(names, map(decode, row))) for row in zip(*sides, strict=True)]


def context_of(model: Model) -> int | None:
    """Tokens that fit into every side of the model; None: as many as you like."""
    sides = [getattr(model.config, name) for name in model.towers.values()]
    limits = [context(model.config.max_len, side) for side in sides if isinstance(side, Tokens)]
    return min((n for n in limits if n is not None), default=None)


def _continued(model: Any, ids: list[int], tokenizer: Tokenizer, between: Any) -> Sample:
    between()
    longest = context_of(model)
    room = NEW if longest is None else min(NEW, longest - len(ids))
    given = tokenizer.decode(ids)
    if room < 1:
        return {"source": given, "text": ""}
    with eager(model):
        how: Any = {"max_new_tokens": room, "temperature": TEMPERATURE, "beams": 1, "samples": 1}
        (result,) = generate(model, [ids], **how)
    return {"source": given, "text": tokenizer.decode(result.ids, after=ids)}


def _labelled(taken: Taken, k: int, tokenizer: Tokenizer | None, classes: Sequence[str]) -> Sample:
    number, ids = taken.read[k]
    if taken.task.reads == "segment":
        return _segmented(taken, number, ids, classes)

    def text(label: Any) -> str:
        if taken.task.reads == "answer":
            return tokenizer.decode(ids[label[0] : label[1] + 1]) if tokenizer else str(label)
        labels = label if isinstance(label, tuple) else (label,)
        return " ".join(classes[i] if i < len(classes) else str(i) for i in labels)

    source = tokenizer.decode(ids) if tokenizer and ids else f"example {number + 1}"
    predicted, true = taken.predicted[number], taken.wanted[number]
    return {"source": source, "text": text(predicted), "reference": text(true)}


def _segmented(taken: Taken, number: int, picture: Tensor, classes: Sequence[str]) -> Sample:
    """A picture with the classes that were found and the true ones, patch by patch; in words, how many of each."""
    predicted, true = taken.predicted[number], taken.wanted[number]

    def text(labels: Sequence[int]) -> str:
        count = Counter(labels)
        return ", ".join(f"{count[i]} of {name}" for i, name in enumerate(classes) if count[i])

    side = math.isqrt(len(true))
    sides = {"found": predicted, "true": true}
    grids = {
        name: [labels[i : i + side] for i in range(0, len(labels), side)]
        for name, labels in sides.items()
    }
    sample = {"source": f"example {number + 1}", "text": text(predicted), "reference": text(true)}
    return sample | {"pictures": {"picture": grey(picture)}, "classes": grids}


class Drawings:
    """What was drawn of texts, (n c h w), beside the mean of all pictures that each text has in the data."""

    def __init__(self, taken: Taken):
        self.texts = [tuple(ids) for _, ids in taken.read]
        self.drawn, wanted = torch.stack(taken.predicted), torch.stack(taken.wanted)
        self.known = [*dict.fromkeys(self.texts)]
        number = {text: i for i, text in enumerate(self.known)}
        self.asked = torch.tensor([number[text] for text in self.texts])
        self.means = torch.stack([wanted[self.asked == i].mean(0) for i in range(len(self.known))])
        away = [(self.means - x).square().flatten(1).sum(1) for x in self.drawn]
        self.found = torch.stack(away).argmin(1)

    @property
    def nearest(self) -> float:
        """The share of drawings that are nearer to the mean of their text's pictures than to that of any other text."""
        return float((self.found == self.asked).double().mean())

    def samples(self, tokenizer: Tokenizer | None, few: int) -> list[Sample]:
        """Of some texts the drawing and the mean, in shades of grey; `text`: the one that the drawing is nearest to."""
        shown: list[Sample] = []
        for i in spread(len(self.known), few):
            first = self.texts.index(self.known[i])
            ids = (self.known[i], self.known[int(self.found[first])])
            asked, found = (needed(tokenizer).decode([*each]) for each in ids)
            pictures = {
                "drawn": grey(self.drawn[first]),
                "mean of such pictures": grey(self.means[i]),
            }
            shown.append({"source": asked, "text": found, "reference": asked, "pictures": pictures})
        return shown


def grey(picture: Tensor) -> list[list[int]]:
    """(c h w) from -1, black, to 1, white, as bytes (h w)."""
    return ((picture.mean(0) + 1) * 127.5).round().clamp(0, 255).int().tolist()


# --- metrics --------------------------------------------------------------------------------------


def better(name: str, new: float, old: float) -> bool:
    """Whether a new value is better than an old one. NaN is never better, and anything is better than it."""
    known(name)
    if math.isnan(new) or math.isnan(old):
        return not math.isnan(new)
    return new > old if METRICS[name] else new < old


def known(name: str) -> str:
    if name not in METRICS:
        raise UsageError(f"there is no metric {name!r}; {nearest(name, METRICS)}")
    return name


def listed(names: Iterable[str]) -> tuple[str, ...]:
    """The metrics, each once; rouge means all of ROUGE."""
    each = (ROUGE if name == "rouge" else (known(name),) for name in names)
    return tuple(dict.fromkeys(chain.from_iterable(each)))


def suited(names: Iterable[str], task: str) -> tuple[str, ...]:
    """The metrics, each once; an error where one is unknown, does not suit the task, or lacks its package."""
    chosen = listed(names)
    row = TASKS[task]
    for name in chosen:
        if name not in row.metrics + row.other_metrics:
            fit = [n for n in METRICS if n in row.metrics + row.other_metrics]
            raise UsageError(f"{name} does not suit the task {task}; choose {', '.join(fit)}")
    if any(name in TEXTUAL for name in chosen):
        _sacrebleu()
    if any(name in ROUGE for name in chosen):
        _rouge()
    return chosen


def text_scores(
    names: Iterable[str], texts: Sequence[str], references: Sequence[str]
) -> tuple[dict[str, float], dict[str, str]]:
    """Values by name of bleu, bleu_lc, chrf, exact and those of ROUGE, and signatures of those that have one."""
    values: dict[str, float] = {}
    signatures: dict[str, str] = {}
    for name in names:
        if name == "exact":
            values[name] = share(texts, references)
            continue
        if name in ROUGE:
            values[name], signatures[name] = rouge(name, texts, references)
            continue
        peer = _sacrebleu()
        # `force` keeps it from guessing, on stderr, that the text should not have been cut into words
        plain = {"lowercase": name == "bleu_lc", "force": True}
        metric = peer.CHRF() if name == "chrf" else peer.BLEU(**plain)
        values[name] = float(metric.corpus_score(list(texts), [list(references)]).score)
        signatures[name] = str(metric.get_signature())
    return values, signatures


def rouge(name: str, texts: Sequence[str], references: Sequence[str]) -> tuple[float, str]:
    """The mean over texts of F1, times 100: of words (rouge1), of pairs (rouge2), of the longest common subsequence in
    the whole text (rougeL) or line by line (rougeLsum). Words are stems of a to z and 0 to 9, as summaries are usually
    published."""
    scorer = _rouge().RougeScorer([name], use_stemmer=True)
    scores = [scorer.score(*pair)[name].fmeasure for pair in zip(references, texts, strict=True)]
    version = importlib.metadata.version("rouge-score")
    return 100 * fmean(scores), f"f1|mean|stems|rouge-score:{version}"


def _sacrebleu() -> Any:
    return package("sacrebleu.metrics", "BLEU and chrF", "sacrebleu")


def _rouge() -> Any:
    return package("rouge_score.rouge_scorer", "ROUGE", "rouge-score")


def perplexity(loss: float) -> float:
    """exp of the mean negative log-likelihood."""
    return math.exp(loss) if loss < 709.0 else math.inf


def label_scores(
    kind: str, predicted: Sequence[Any], wanted: Sequence[Any], classes: Sequence[str]
) -> tuple[dict[str, float], dict[str, str]]:
    """Values by name of all that suits the kind, and how F1 and IoU are counted. An example has one label (classify,
    image), a list of them (tag, segment) or a span (answer); labels are numbers of classes."""
    if kind == "answer":
        f1 = overlap_f1(predicted, wanted)
        return {"exact": share(predicted, wanted), "f1": f1}, {"f1": "mean over answers, in tokens"}
    each = [list(chain(*side)) if kind in MANY else side for side in (predicted, wanted)]
    if kind == "segment":
        how = "mean over classes, patches of all pictures together"
        return {"accuracy": share(*each), "iou": mean_iou(*each)}, {"iou": how}
    if kind == "tag" and marks_spans(classes):
        rows = [[[classes[i] for i in row] for row in side] for side in (predicted, wanted)]
        f1, how = span_f1(*rows), "spans of B- and I- tags, all together"
    else:
        f1, how = macro_f1(*each), "macro, mean over classes"
    return {"accuracy": share(*each), "f1": f1}, {"f1": how}


def share(predicted: Sequence[Hashable], wanted: Sequence[Hashable]) -> float:
    """How many are equal, of all: accuracy of labels, exact match of texts and spans."""
    return sum(a == b for a, b in zip(predicted, wanted, strict=True)) / max(len(wanted), 1)


def macro_f1(predicted: Sequence[Hashable], wanted: Sequence[Hashable]) -> float:
    """The mean over classes of F1 = 2 TP / (2 TP + FP + FN), each class that was found or wanted counting the same,
    with two classes too: F1 of one of two classes depends on which is called the positive one."""
    positive, true = Counter(predicted), Counter(wanted)
    right = Counter(a for a, b in zip(predicted, wanted, strict=True) if a == b)
    each = [_f1(right[c], positive[c], true[c]) for c in {*positive, *true}]
    return sum(each) / max(len(each), 1)


def mean_iou(predicted: Sequence[Hashable], wanted: Sequence[Hashable]) -> float:
    """The mean over classes of IoU = TP / (TP + FP + FN), intersection over union: each class that was found or wanted
    counts the same, however few patches it has."""
    positive, true = Counter(predicted), Counter(wanted)
    right = Counter(a for a, b in zip(predicted, wanted, strict=True) if a == b)
    each = [right[c] / (positive[c] + true[c] - right[c]) for c in {*positive, *true}]
    return sum(each) / max(len(each), 1)


def span_f1(predicted: Sequence[Sequence[str]], wanted: Sequence[Sequence[str]]) -> float:
    """F1 of the spans that rows of tags B-x, I-x, O mean, all rows together: right is what has the same first and last
    token and the same x."""
    right = positive = true = 0
    for a, b in zip(predicted, wanted, strict=True):
        one, other = spans_of(a), spans_of(b)
        right += len(one & other)
        positive += len(one)
        true += len(other)
    return _f1(right, positive, true)


def spans_of(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """(x, first, last) of each span. An I-x that follows no x begins one."""
    spans: set[tuple[str, int, int]] = set()
    inside, first = "", 0
    for i, tag in enumerate([*tags, "O"]):
        mark, _, kind = tag.partition("-")
        goes_on = mark == "I" and kind == inside
        if inside and not goes_on:
            spans.add((inside, first, i - 1))
        if not goes_on:
            inside, first = (kind, i) if mark in ("B", "I") else ("", i)
    return spans


def marks_spans(tags: Iterable[str]) -> bool:
    """Whether these are tags of spans: O, and others that begin with B- or I-."""
    rest = set(tags) - {"O"}
    return bool(rest) and all(tag[:2] in ("B-", "I-") and tag[2:] for tag in rest)


def overlap_f1(predicted: Sequence[Span], wanted: Sequence[Span]) -> float:
    """The mean over answers of F1 = 2 common / (found + wanted), counted in tokens."""
    total = 0.0
    for (a, b), (c, d) in zip(predicted, wanted, strict=True):
        common = max(min(b, d) - max(a, c) + 1, 0)
        total += _f1(common, b - a + 1, d - c + 1)
    return total / max(len(wanted), 1)


def _f1(right: int, positive: int, true: int) -> float:
    return 2 * right / max(positive + true, 1)
