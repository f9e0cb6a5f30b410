"""A trained model measured on data: the loss, and what its answers are worth. Texts are compared
with the files' own, not with what the tokenizer makes of them."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.config import Seed, Whole, settings
from regard.data.config import KINDS, SETTINGS, Data, check_used, feed_of, shards_of, text_roles
from regard.data.corrupt import Corrupted, Marks, MaskTokens
from regard.data.feed import IGNORE, Batch, Batching, Feed, TextFeed
from regard.data.image_feed import ImageFeed
from regard.data.read import (
    Pictures,
    Source,
    first_rows,
    format_of,
    normal_of,
    pictures,
    records,
)
from regard.data.shards import Column
from regard.data.tokens import Coder
from regard.decode.generate import GREEDY, generate, tokenizer_of
from regard.errors import DATA, Fault, UsageError, blaming
from regard.evaluation import model as opening
from regard.evaluation.model import Embedder, Opened
from regard.fast.cpu import Prepared, prepare
from regard.layers import LM, MLM, Answer, Classify, Tag
from regard.machine import pick_device
from regard.models import Model, Painter
from regard.models.adapt import class_names
from regard.text import needed
from regard.training import measure as measuring
from regard.training.finetune import PAIR
from regard.training.losses import masked_lm_loss
from regard.training.measure import WRITING, Measured, measure, perplexity, suited, translations
from regard.training.tasks import TASKS

SEED = 0  # of the masks of a masked language model
ROW = 1024  # tokens of a language model's row, if its context is longer
BATCH, TOKENS = 32, 8192  # rows and tokens of a batch
CUT = ("lm", "mlm")  # texts longer than a row become several
# Settings of [data] that say how files are read, and their defaults.
READING = {name: getattr(Data(()), name) for name in SETTINGS}


@dataclass(frozen=True)
class Evaluation:
    """Metrics by name, the first one says which model is better; signatures of those that have
    several definitions."""

    task: str
    metrics: dict[str, float]
    signatures: dict[str, str]
    data: str


def evaluate(
    model: str | Path | Model,
    data: str | Sequence[str],
    *,
    target: str | Sequence[str] = (),
    metrics: Sequence[str] = (),
    beams: int = 4,
    length: int | None = None,
    overlong: str = "error",
    device: str = "auto",
    dtype: str = "auto",
    quantize: str = "none",
    reading: dict[str, Any] | None = None,
    shots: Shots | int | None = None,
    shots_from: str | Sequence[str] = (),
    pooling: str = "auto",
) -> Evaluation:
    """Measure a model, or one from its folder or its run's, on files; `target` has the other side
    of parallel ones.

    `metrics`: loss, perplexity, bleu, bleu_lc, chrf, rouge (or rouge1, rouge2, rougeL, rougeLsum), exact, accuracy, f1,
    iou; by default those of the model's task. `beams` are those of translation. `length`: tokens of a row, by default
    as in training. Examples that are longer are an error, unless `overlong` is "truncate". `device` is
    auto, cpu, cuda or cuda:N; `dtype` auto, fp32 or bf16; `quantize`: hold weights in "int8" or
    "int4". `reading`: format, unit, marker, columns, header, size, as in [data].

    `shots`: a language model gets so many examples in the prompt of each question (0: the question alone), of the files
    `shots_from`, or of its run's training data; data has columns source and target then, and exact, loss and perplexity
    are those of the answers.

    The metric "sts" is of vectors (`pooling` as in embed), whatever the model's task: Spearman's rank correlation,
    times 100, of the cosines of two texts (columns text and second) with their score (label)."""
    given = (data, target, shots_from)
    files, others, examples = ((x,) if isinstance(x, str) else tuple(x) for x in given)
    if not files:
        raise UsageError("name the data to measure on (--data FILE)")
    metrics = measuring.listed(metrics)
    if beams < 1:
        raise UsageError(f"beams is {beams}; give a number from 1")
    if "sts" in metrics:
        if set(metrics) != {"sts"} or shots is not None or others or length is not None:
            alone = "ask for it alone, without target, shots and length"
            raise UsageError(f"sts compares vectors; {alone}")
        table = Source(files, **{**READING, **(reading or {})})
        opened = Opened(model, device=device, dtype=dtype, quantize=quantize)
        return similarity(Embedder(opened, overlong=overlong, pooling=pooling), table)
    if pooling != "auto":
        raise UsageError("pooling is for the metric sts; leave it out")
    judge = Judge(model, device, dtype, quantize, beams)
    names = () if shots is not None else suited(metrics or TASKS[judge.task].metrics, judge.task)
    judge.read(files, others, {**READING, **(reading or {})}, length, overlong)
    if shots is not None:
        shots = Shots(shots) if isinstance(shots, int) else shots
        values = judge.prompted(metrics or PROMPTED, shots, examples)
        return Evaluation(judge.task, values, {}, judge.about)
    with tempfile.TemporaryDirectory(prefix="regard-eval-") as folder:
        values, signatures = judge.measure(names, Path(folder))
    return Evaluation(judge.task, values, signatures, judge.about)


def similarity(embedder: Embedder, table: Source) -> Evaluation:
    rows = [*records(table, ("text", "second", "label"))]
    try:
        scores = np.array([float(row["label"]) for row in rows])
    except (TypeError, ValueError) as error:
        raise Fault(f"the column label must hold the scores of sts: {error}", DATA) from None
    if len(rows) < 2 or not np.isfinite(scores).all() or len(set(scores)) < 2:
        raise Fault("sts needs at least two pairs with different, finite scores", DATA)
    vectors = []
    for role in ("text", "second"):
        for block in opening.batched([str(row[role]) for row in rows], BATCH):
            vectors += embedder(*block, f"the column {role}")
    if any(v is None for v in vectors):
        raise Fault("a text of sts is empty", DATA)
    x, y = np.split(np.stack(vectors), 2)  # type: ignore[arg-type]
    x, y = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (x, y))
    rank = 100 * float(np.corrcoef(ranks((x * y).sum(1)), ranks(scores))[0, 1])
    return Evaluation("embed", {"sts": rank}, {"sts": "spearman|cosine"}, _examples(len(rows)))


def ranks(values: np.ndarray) -> np.ndarray:
    """From 0; equal values share the mean of their places."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts + 1) / 2)[inverse]


def task_of(model: Model) -> str:
    """What a model was made for, by its kind and its head."""
    # A recurrent network has no setting for its head, which is always that of a language model.
    head = getattr(model.config, "head", LM())
    pictures = opening.patches_of(model) is not None
    if model.reads_source:
        return "caption" if pictures else "seq2seq"
    if isinstance(model, Painter):
        return "draw"
    if isinstance(head, Classify):
        return "image" if pictures else "classify"
    if head is None:
        raise Fault("this model has no head, so it answers nothing; embed gives vectors", DATA)
    if opening.segments(model):
        return "segment"
    return {Tag: "tag", Answer: "answer", MLM: "mlm"}.get(type(head), "lm")


def run_settings(folder: str | Path) -> dict[str, Any]:
    """The table [data] of the run that a model folder belongs to; {} where there is none."""
    home = Path(folder).resolve()
    for place in (home, *home.parents[:2]):
        try:
            return {**json.loads((place / "run.json").read_text("utf-8"))["config"]["data"]}
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
    return {}


class Judge:
    """A model, what it is for, and the data it is measured on."""

    def __init__(self, model: Any, device: str, dtype: str, quantize: str, beams: int):
        place, _ = pick_device(device)
        ours = not isinstance(model, Model)
        self.dtype, self.beams, self.about = dtype, beams, ""
        self.run = {} if isinstance(model, Model) else run_settings(model)
        with blaming(DATA):
            model = opening.loaded(model, place, dtype, packed=quantize != "none")
            self.task = task_of(model)
            texts = KINDS[TASKS[self.task].reads].texts
            self.tokenizer = needed(tokenizer_of(model)) if texts else None
        self.coder = None if self.tokenizer is None else Coder(self.tokenizer)
        named = self.task in measuring.LABELLED and self.task != "answer"
        self.classes = class_names(model) if named else []
        self.patches = opening.patches_of(model)
        self.quantized = quantize != "none" or isinstance(model, Prepared)
        self.model: Any = model if quantize == "none" else prepare(model, quantize, consume=ours)

    @cached_property
    def fast(self) -> Any:
        """The model made ready for decoding."""
        if self.quantized or next(self.model.parameters()).device.type != "cpu":
            return self.model
        precision = opening.precision_of(self.model, self.dtype)
        return prepare(self.model, precision)

    def read(
        self,
        files: tuple[str, ...],
        target: tuple[str, ...],
        reading: dict[str, Any],
        length: int | None,
        overlong: str,
    ) -> None:
        """Take the settings of the data: what is not asked for is as it was in training."""
        # An example that training cut is cut here too.
        cut = overlong == "truncate" or self.run.get("overlong") == "truncate"
        self.overlong = "truncate" if cut else overlong
        self.length = self._length(length)
        # Files are read as is said, and else as the run's own files were, if these are of that kind.
        usual = {n: self.run[n] for n, x in READING.items() if n in self.run and reading[n] == x}
        with suppress(UsageError):
            check_used(Data(files, target=target, **{**reading, **usual}), self.task)
            reading = {**reading, **usual}
        check_used(Data(files, target=target, **reading), self.task)
        if self.patches is not None:
            reading = {**reading, "size": reading["size"] or self.patches.size}
        rows: dict[str, Any] = {"length": self.length, "rows": BATCH, "pack": "none"}
        rows["tokens"] = None if self.length is None else max(TOKENS, self.length)
        rows["overlong"] = "split" if self.task in CUT else self.overlong
        self.data = Data(files, target=target, **rows, **reading)

    def _length(self, asked: int | None) -> int | None:
        """Tokens of a row; None: as many as an example has."""
        longest = measuring.context_of(self.model)
        if asked is not None and not 0 < asked <= (longest or asked):
            most = "" if longest is None else f" to {longest}, the model's context"
            raise UsageError(f"length is {asked}; give a number from 1{most}")
        opening.notice_length(self.model, asked or 0)
        trained = self.run.get("length") or opening.trained_length(self.model)
        if self.task in CUT:
            return asked or min(trained or ROW, longest or ROW)
        return asked or (trained if self.overlong == "truncate" else None) or longest

    def measure(
        self, names: Sequence[str], folder: Path
    ) -> tuple[dict[str, float], dict[str, str]]:
        """Values and signatures of the metrics."""
        textual = [n for n in names if self.task in WRITING and n not in ("loss", "perplexity")]
        values, signatures = self._texts(textual) if textual else ({}, {})
        if rest := [n for n in names if n not in textual]:
            result = self._measured(self._feed(folder), rest)
            values |= result.values
            signatures |= result.signatures
        return {n: values[n] for n in names}, {n: t for n, t in signatures.items() if n in names}

    def _measured(self, feed: Feed, names: Sequence[str]) -> Measured:
        # Without label smoothing perplexity needs no pass of its own.
        asked = [*dict.fromkeys("loss" if name == "perplexity" else name for name in names)]
        hidden = self.quantized and self.task not in measuring.CALLED
        loss = by_logits if hidden else TASKS[self.task].objective
        given: Any = (self.model, self.task, feed, self.tokenizer, loss, asked)
        result = measure(*given, classes=self.classes, samples=0)
        if "perplexity" in names:
            result.values["perplexity"] = perplexity(result.values["loss"])
        return result

    def prompted(
        self, names: Sequence[str], shots: Shots, files: tuple[str, ...]
    ) -> dict[str, float]:
        """The same by prompts with examples."""
        if self.task != "lm":
            raise UsageError(f"shots are for a language model, the task of this one is {self.task}")
        if wrong := [name for name in names if name not in PROMPTED]:
            raise UsageError(f"{wrong[0]} does not suit shots; choose {', '.join(PROMPTED)}")
        there = {"train": files} if files else {n: self.run.get(n, ()) for n in ("train", "target")}
        if shots.count and not there["train"]:
            how = "(shots_from, --shots-from FILE)"
            raise UsageError(f"name the file that the shots come from {how}")
        pool = pairs(replace(self.data, **there).source()) if shots.count else []
        assert self.coder is not None
        longest = measuring.context_of(self.model)
        asked = pairs(self.data.source())
        questions = Questions(shots, asked, pool, self.coder, longest)
        self.about = f"{_examples(len(asked))}, {shots.named} each"
        values = {"exact": questions.exact(self.fast)} if "exact" in names else {}
        if rest := [name for name in names if name != "exact"]:
            batching = replace(self.data, length=None, tokens=None).batching(SEED)
            values |= self._measured(questions.feed(batching), rest).values
        return {name: values[name] for name in names}

    def _feed(self, folder: Path) -> Feed:
        """All of the data, as what is held out."""
        source, batching, coder = self.data.source(), self.data.batching(SEED), self.coder
        home, classes = folder / "data", self.classes
        shards = shards_of(self.task, source, coder, home, classes or None, classes)
        columns, notes = shards.columns, shards.notes
        self.about = _examples(notes["records"] - notes["empty"])
        if self.patches is not None:
            self._fit(columns["images"].values.shape[1:])
            labels = columns["labels"].values if self.task == "segment" else None
            if labels is not None and labels.shape[1] != self.patches.count:
                has, want = (f"{n:,}" for n in (labels.shape[1], self.patches.count))
                raise Fault(f"classes are of {has} patches, the model reads {want}", DATA)
        if coder is not None:
            self.about += f", {notes['tokens']:,} tokens"
            if self.data.overlong == "error" and self.length is not None:
                self._check(source, columns, coder, self.length)
        feed = feed_of(self.task, self.data, coder, batching, columns, "", None)
        if isinstance(feed, ImageFeed):
            mean, std, _ = normal_of(self.model.origin)
            feed = replace(feed, mean=mean.tolist(), std=std.tolist())
        feed.held = feed
        if self.task != "mlm" or coder is None:
            return feed
        return Corrupted(feed, MaskTokens(Marks(coder.vocab, coder.reserved, coder.mask)), SEED)

    def _fit(self, shape: Sequence[int]) -> None:
        c = self.patches
        assert c is not None
        if tuple(shape) != (c.size, c.size, c.channels):
            is_, want = (" x ".join(map(str, x)) for x in (shape, (c.size, c.size, c.channels)))
            raise Fault(f"the pictures are {is_}, the model reads {want}", DATA)

    def _check(self, source: Source, columns: dict[str, Column], c: Coder, longest: int) -> None:
        """Name the first example that is too long."""
        ends = len(c.before) + len(c.after)
        more = {"ids": ends, "source": ends, "target": ends if self.task == "draw" else 1}
        if all((x.lengths + more[n]).max() <= longest for n, x in columns.items() if n in more):
            return
        used = text_roles(self.task, self.data)
        for number, record in enumerate(records(source, used), 1):
            sides = record.values()
            texts = [" ".join(map(str, v)) if isinstance(v, list) else str(v) for v in sides]
            counts = [len(ids) for ids in c.encode(texts)]
            size = sum(counts) + ends + len(c.between) * (len(counts) - 1)
            size = counts[0] + 1 if self.task == "caption" else size
            if self.task == "seq2seq":
                size = max(counts[0] + ends, len(c.encode(texts[1:], target=True)[0]) + 1)
            if size > longest:
                raise self._too_long(number, size, str(record[used[0]]))

    def _too_long(self, number: int, size: int, text: str) -> Fault:
        what = (
            f"example {number} of {', '.join(self.data.train)} ({text!r:.40}) has {size:,} tokens"
        )
        cut = "shorten it, or say overlong='truncate' (--overlong truncate)"
        return Fault(f"{what}, a row holds {self.length:,}; {cut}", DATA)

    def _texts(self, names: Sequence[str]) -> tuple[dict[str, float], dict[str, str]]:
        """Translate every source of the files, or say what is on its pictures, and compare with its target."""
        assert self.coder is not None and self.tokenizer is not None
        sources: list[Any] = []
        references: list[str] = []
        lines = [] if self.task == "caption" else pairs(self.data.source())
        if self.task == "caption":
            x, references = pictures(self.data.source())
            self._fit(x.shape[1:])
            assert self.patches is not None
            sources = [*map(Pictures(self.patches, self.model.origin).tensor, x)]
        for number, (line, reference) in enumerate(lines, 1):
            ids = self.tokenizer.encode(line) if line.strip() else []
            if self.length is not None and len(ids) > self.length:
                if self.overlong == "error":
                    raise self._too_long(number, len(ids), line)
                after = self.coder.after
                ids = [*ids[: self.length - len(after)], *after]
            sources.append(ids)
            references.append(reference)
        self.about = _examples(len(sources))
        hypotheses = iter(translations(self.fast, [s for s in sources if len(s)], beams=self.beams))
        texts = [self.tokenizer.decode(next(hypotheses)) if len(s) else "" for s in sources]
        return measuring.text_scores(names, texts, references)


def _examples(n: int) -> str:
    return f"{n:,} example{'' if n == 1 else 's'}"


def by_logits(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """The loss of a quantized model, whose head gives logits but no weights; row by row, for logits
    are large."""
    total = batch.labels.new_zeros((), dtype=torch.float32)
    count = (batch.labels != IGNORE).sum()
    for one in batch.split(len(batch.ids)):
        more = {"source": one.source, "source_lengths": one.source_lengths}
        given = {} if one.source is None else more
        lengths = one.lengths if one.source is None else None
        total += masked_lm_loss(model(one.ids, lengths, **given), one.labels)[0]
    return total, count


# --- few-shot prompts: examples of a task in front of a question (Brown et al. 2020, 2.1); nothing is trained ---------

PROMPTED = ("exact", "loss", "perplexity")
Pair = tuple[str, str]  # source and target


@settings
class Shots:
    """`count` examples, drawn by `seed` for each question; `template` says how one is written."""

    count: Whole
    template: str = "{source}\n{target}\n\n"
    seed: Seed = 0

    def __post_init__(self) -> None:
        if not all(self.parts[1:]):
            what = "{source}, then {target}, then what ends an answer, such as a line break"
            raise UsageError(f"template is {self.template!r}; it needs {what}")

    @property
    def parts(self) -> tuple[str, str, str]:
        """What stands before the source, between the two, and behind the target."""
        before, _, rest = self.template.partition("{source}")
        between, _, stop = rest.partition("{target}")
        return before, between, stop

    @property
    def named(self) -> str:
        return f"{self.count} shot{'' if self.count == 1 else 's'}"

    def prompt(self, pool: list[Pair], number: int, asked: Pair) -> str:
        """Examples, never the one that is asked for, and then the question."""
        draw = random.Random(f"{self.seed} {number}").sample
        chosen = draw(pool, min(self.count + 1, len(pool))) if self.count else []
        chosen = [pair for pair in chosen if pair != asked][: self.count]
        if len(chosen) < self.count:
            there = f"there are {len(chosen)}"
            raise Fault(f"{self.count} shots need as many other examples, {there}", DATA)
        before, between, stop = self.parts
        shown = "".join(f"{before}{source}{between}{target}{stop}" for source, target in chosen)
        return f"{shown}{before}{asked[0]}{between}"


def asking(source: Source) -> Source:
    """With the columns of a question and its answer, if none are said: by the words that `finetune` knows for them, or
    the two that a table has."""
    rows = None if source.columns else first_rows(source, 1)
    if rows is None:
        return source
    names = [*rows[0]]
    columns = {role: next((n for n in PAIR[role] if n in names), "") for role in PAIR}
    if all(columns.values()):
        return replace(source, columns=columns)
    table = format_of(source.files()[0], source.format) in ("csv", "tsv") and len(names) == 2
    return replace(source, columns={"source": "0", "target": "1"}) if table else source


def pairs(source: Source) -> list[Pair]:
    source = asking(source)
    both = [(r["source"], r["target"]) for r in records(source, ("source", "target"))]
    if wrong := [i for i, pair in enumerate(both, 1) if not all(isinstance(x, str) for x in pair)]:
        raise Fault(f"example {wrong[0]}: source and target must be text", DATA)
    return both


class Questions:
    """Questions with their shots, in ids: `whole` with the answer, of which the first `given` are the prompt."""

    def __init__(
        self, shots: Shots, asked: list[Pair], pool: list[Pair], coder: Coder, longest: int | None
    ):
        self.asked, self.coder, self.stop = asked, coder, shots.parts[2]
        prompts = [shots.prompt(pool, i, pair) for i, pair in enumerate(asked)]
        whole = [prompt + pair[1] + self.stop for prompt, pair in zip(prompts, asked)]
        texts = ([text.rstrip(" ") for text in prompts], whole)
        self.prompts, self.whole = ([[*coder.before, *x] for x in coder.encode(t)] for t in texts)
        # A token may join the prompt's end and the answer's beginning: it is a part of the answer.
        both = [*zip(self.prompts, self.whole)]
        self.given = [sum(1 for _ in takewhile(lambda x: x[0] == x[1], zip(*x))) for x in both]
        self.most = max(len(ids) - n for ids, n in zip(self.whole, self.given))
        for number, ids in enumerate(self.prompts, 1):
            if longest is not None and len(ids) + self.most > longest:
                why = f"example {number} with {shots.named} has {len(ids):,} tokens, and answers "
                why += f"{self.most:,}: more than the model's context of {longest:,}"
                raise Fault(f"{why}; ask for fewer shots, or give shorter ones", DATA)

    def feed(self, batching: Batching) -> TextFeed:
        """Of which the answers alone are counted."""
        how: Any = {"prompts": np.array(self.given, np.int64), "pad": self.coder.pad}
        feed = TextFeed(Column.of(self.whole), batching, pack="none", shift=True, **how)
        feed.held = feed
        return feed

    def exact(self, model: Any) -> float:
        """How many of the greedy answers are the target's text."""
        how: Any = {"stop": self.stop, "max_new_tokens": self.most, **GREEDY}
        results = generate(model, self.prompts, **how)
        texts = [(r.text or "").strip() for r in results]
        return measuring.share(texts, [target.strip() for _, target in self.asked])
