"""Figures of merit, from answers and references alone; regard.measure gets the answers out of a model.

Shares (accuracy, exact, f1) go from 0 to 1, bleu and chrf from 0 to 100.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

from regard.data.read import needed
from regard.errors import UsageError, nearest
from regard.train.tasks import TASKS

Span = tuple[int, int]  # first and last token


class Metric(NamedTuple):
    higher: bool  # whether more is better


METRICS: dict[str, Metric] = {
    "loss": Metric(False),
    "perplexity": Metric(False),
    "bleu": Metric(True),
    "bleu_lc": Metric(True),  # upper and lower case are the same
    "chrf": Metric(True),
    "exact": Metric(True),
    "accuracy": Metric(True),
    "f1": Metric(True),  # macro_f1, span_f1 or overlap_f1
}
TEXTUAL = ("bleu", "bleu_lc", "chrf")  # those of sacreBLEU


def better(name: str, new: float, old: float) -> bool:
    """Whether a new value is better than an old one. NaN is never better, and anything is better than it."""
    metric = METRICS[known(name)]
    if math.isnan(new) or math.isnan(old):
        return not math.isnan(new)
    return new > old if metric.higher else new < old


def known(name: str) -> str:
    if name not in METRICS:
        raise UsageError(f"there is no metric {name!r}; {nearest(name, METRICS)}")
    return name


def suited(names: Iterable[str], task: str) -> tuple[str, ...]:
    """The metrics, each once; an error where one is unknown, does not suit the task, or lacks its package."""
    chosen = tuple(dict.fromkeys(map(known, names)))
    row = TASKS[task]
    for name in chosen:
        if name not in row.metrics + row.other_metrics:
            fit = [n for n in METRICS if n in row.metrics + row.other_metrics]
            raise UsageError(f"{name} does not suit the task {task}; choose {', '.join(fit)}")
    if any(name in TEXTUAL for name in chosen):
        _sacrebleu()
    return chosen


# --- texts --------------------------------------------------------------------------------------------------------


def text_scores(
    names: Iterable[str], texts: Sequence[str], references: Sequence[str]
) -> tuple[dict[str, float], dict[str, str]]:
    """Values by name of bleu, bleu_lc, chrf and exact, and sacreBLEU's signatures of those that have one."""
    values: dict[str, float] = {}
    signatures: dict[str, str] = {}
    for name in names:
        if name == "exact":
            values[name] = share(texts, references)
            continue
        peer = _sacrebleu()
        # `force` keeps it from guessing, on stderr, that the text should not have been cut into words
        plain = {"lowercase": name == "bleu_lc", "force": True}
        metric = peer.CHRF() if name == "chrf" else peer.BLEU(**plain)
        values[name] = float(metric.corpus_score(list(texts), [list(references)]).score)
        signatures[name] = str(metric.get_signature())
    return values, signatures


def _sacrebleu() -> Any:
    return needed("sacrebleu.metrics", "BLEU and chrF", "sacrebleu")


def perplexity(loss: float) -> float:
    """exp of the mean negative log-likelihood."""
    return math.exp(loss) if loss < 709.0 else math.inf


# --- labels -------------------------------------------------------------------------------------------------------


def label_scores(
    task: str, predicted: Sequence[Any], wanted: Sequence[Any], classes: Sequence[str]
) -> tuple[dict[str, float], dict[str, str]]:
    """Values by name of all that suits the task, and which F1 it is. An example has one label (classify, image), a
    list of them (tag) or a span (answer); labels are numbers of classes."""
    values: dict[str, float] = {}
    if task == "answer":
        values["exact"] = share(predicted, wanted)
        values["f1"], kind = overlap_f1(predicted, wanted), "mean over answers, in tokens"
        return values, {"f1": kind}
    each = [list(chain(*side)) if task == "tag" else side for side in (predicted, wanted)]
    values["accuracy"] = share(*each)
    if task == "tag" and marks_spans(classes):
        rows = [[[classes[i] for i in row] for row in side] for side in (predicted, wanted)]
        values["f1"], kind = span_f1(*rows), "spans of B- and I- tags, all together"
    else:
        values["f1"], kind = macro_f1(*each), "macro, mean over classes"
    return values, {"f1": kind}


def share(predicted: Sequence[Hashable], wanted: Sequence[Hashable]) -> float:
    """How many are equal, of all: accuracy of labels, exact match of texts and spans."""
    return _ratio(sum(a == b for a, b in zip(predicted, wanted, strict=True)), len(wanted))


def macro_f1(predicted: Sequence[Hashable], wanted: Sequence[Hashable]) -> float:
    """The mean over classes of F1 = 2 TP / (2 TP + FP + FN), each class that was found or wanted counting the same,
    with two classes too: F1 of one of two classes depends on which is called the positive one."""
    positive, true = Counter(predicted), Counter(wanted)
    right = Counter(a for a, b in zip(predicted, wanted, strict=True) if a == b)
    each = [_f1(right[c], positive[c], true[c]) for c in {*positive, *true}]
    return _ratio(sum(each), len(each))


def span_f1(predicted: Sequence[Sequence[str]], wanted: Sequence[Sequence[str]]) -> float:
    """F1 of the spans that rows of tags B-x, I-x, O mean, all rows together: right is what has the same first and last
    token and the same x."""
    right = positive = true = 0
    for a, b in zip(predicted, wanted, strict=True):
        one, other = spans_of(a), spans_of(b)
        right, positive, true = right + len(one & other), positive + len(one), true + len(other)
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
    return _ratio(total, len(wanted))


def _f1(right: int, positive: int, true: int) -> float:
    return _ratio(2 * right, positive + true)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
