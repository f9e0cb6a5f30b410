"""regard eval: a model and data in, a small table of metrics out."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.checkpoint import load
from regard.cli.classify import names_of, normal_of
from regard.cli.data import Reading, settings
from regard.cli.model import (
    DTYPES,
    blaming,
    past_training,
    pick_device,
    precision_of,
    resolved,
    run_data,
    talk,
    trained_length,
)
from regard.cli.options_work import Eval
from regard.data.config import Data, check_used, feed_of, shards_of
from regard.data.corrupt import Corrupted, Marks, MaskTokens
from regard.data.feed import IGNORE, Base, Batch, Batching, Feed, ImageFeed
from regard.data.read import Record, Source, records
from regard.data.shards import Column
from regard.data.tokens import Coder
from regard.decode.generate import tokenizer_of
from regard.errors import DATA, Fault, UsageError
from regard.evaluate import metrics as evaluate
from regard.evaluate.measure import LABELLED, ROWS, context_of, measure, translations
from regard.fast.prepare import prepare
from regard.layers import MLM, Answer, Classify, Tag
from regard.models import Model, Patches
from regard.text import needed
from regard.train.loss import masked_lm_loss
from regard.train.tasks import TASKS

CHECK = 5  # the exit code of a check that failed
SEED = 0  # of the masks of a masked language model
ROW = 1024  # tokens of a language model's row, if its context is longer
BATCH, TOKENS = 32, 8192  # rows and tokens of a batch
CUT = ("lm", "mlm")  # texts longer than a row become several
ROLES = {
    "classify": ("text", "second"),
    "tag": ("words",),
    "answer": ("text", "second"),
    "seq2seq": ("source", "target"),
}


def run(options: Eval) -> int:
    if not options.data:
        raise UsageError("name the data to measure on: --data FILE")
    for name in options.metric:
        evaluate.known(name)
    if options.beams < 1:
        raise UsageError(f"--beams is {options.beams}; give a number from 1")
    if options.min is not None and not math.isfinite(options.min):
        raise UsageError(f"--min is {options.min}; give a finite number")
    judge = Judge(options)
    names = evaluate.suited(options.metric or TASKS[judge.task].metrics, judge.task)
    with tempfile.TemporaryDirectory(prefix="regard-eval-") as folder:
        values, signatures = judge.measured(names, Path(folder))
    talk(f"{judge.task}: {judge.about}")
    if options.json:
        finite = {n: v if math.isfinite(v) else None for n, v in values.items()}
        found = {"task": judge.task, "metrics": finite, "signatures": signatures}
        print(json.dumps({**found, "data": judge.about}, ensure_ascii=False))
    else:
        print(table(values, signatures))
    first = names[0]
    if options.min is not None and evaluate.better(first, options.min, values[first]):
        kind = "at least" if evaluate.METRICS[first].higher else "at most"
        raise Fault(f"{first} is {values[first]:.6g}, asked for {kind} {options.min:g}", CHECK)
    return 0


def table(values: dict[str, float], signatures: dict[str, str]) -> str:
    rows = [("metric", "value", "signature")]
    rows += [(n, f"{v:.4f}", signatures.get(n, "")) for n, v in values.items()]
    wide = [max(len(row[i]) for row in rows) for i in range(2)]
    return "\n".join(f"{a:<{wide[0]}}  {b:>{wide[1]}}  {c}".rstrip() for a, b, c in rows)


def task_of(model: Model) -> str:
    """What a model was made for, by its kind and its head."""
    config, head = model.config, getattr(model.config, "head", None)
    if hasattr(model, "encode"):
        if isinstance(getattr(config, "source", None), Patches):
            raise UsageError("eval does not measure models that write about pictures")
        return "seq2seq"
    if isinstance(head, Classify):
        return "image" if isinstance(config.embedding, Patches) else "classify"
    if head is None and not hasattr(config, "cell"):
        raise Fault(
            "this model has no head, so it answers nothing; regard embed gives vectors", DATA
        )
    return {Tag: "tag", Answer: "answer", MLM: "mlm"}.get(type(head), "lm")


class Judge:
    """A model from its folder, what it is for, and the data it is measured on."""

    def __init__(self, options: Eval):
        self.options, machine = options, options.machine
        device, _ = pick_device(machine.device)
        with blaming(DATA):
            folder = resolved(options.model)
            self.model = load(folder, device=device, dtype=DTYPES[machine.dtype])
            self.task = task_of(self.model)
            self.tokenizer = None if self.task == "image" else needed(tokenizer_of(self.model))
        self.coder = None if self.tokenizer is None else Coder(self.tokenizer)
        self.classes = names_of(self.model) if self.task in LABELLED[:3] else []
        self.quantized = machine.quantize != "none"
        if self.quantized:
            self.model = prepare(self.model, machine.quantize, rows=BATCH)
        self.run = run_data(options.model)
        # An example that training cut is cut here too.
        self.overlong = options.overlong
        if self.overlong == "error" and self.run.get("overlong") == "truncate":
            self.overlong = "truncate"
        self.length, self.about = self._length(), ""

    @cached_property
    def fast(self) -> Model:
        """The model made ready for decoding."""
        if self.quantized or next(self.model.parameters()).device.type != "cpu":
            return self.model
        how = precision_of(self.model, self.options.machine.dtype)
        return prepare(self.model, how, rows=ROWS["cpu"] * self.options.beams)

    def _length(self) -> int | None:
        """Tokens of a row; None: as many as an example has. What is not asked for is as it was in training."""
        longest, asked = context_of(self.model), self.options.length
        if asked is not None and not 0 < asked <= (longest or asked):
            most = "" if longest is None else f" to {longest}, the model's context"
            raise UsageError(f"--length is {asked}; give a number from 1{most}")
        past_training(self.model, asked or 0)
        trained = self.run.get("length") or trained_length(self.model)
        if self.task in CUT:
            return asked or min(trained or ROW, longest or ROW)
        return asked or (trained if self.overlong == "truncate" else None) or longest

    def measured(
        self, names: Sequence[str], folder: Path
    ) -> tuple[dict[str, float], dict[str, str]]:
        """Values and signatures of the metrics; texts are compared with the file's own, not with what the tokenizer
        makes of them."""
        textual = [n for n in names if self.task == "seq2seq" and n not in ("loss", "perplexity")]
        values, signatures = self._texts(textual) if textual else ({}, {})
        # without label smoothing perplexity needs no pass of its own
        rest = dict.fromkeys("loss" if n == "perplexity" else n for n in names if n not in textual)
        if rest:
            hidden = self.quantized and self.task not in LABELLED
            loss = by_logits if hidden else TASKS[self.task].objective
            given: Any = (self.model, self.task, self._feed(folder), self.tokenizer, loss, [*rest])
            found = measure(*given, classes=self.classes, samples=0)
            values |= found.values
            signatures |= found.signatures
        if "perplexity" in names:
            values["perplexity"] = evaluate.perplexity(values["loss"])
        return {n: values[n] for n in names}, {n: t for n, t in signatures.items() if n in names}

    # --- data ---

    @cached_property
    def data(self) -> Data:
        said, wanted = self._reading(), getattr(self.model.config, "embedding", None)
        check_used(Data(self.options.data, self.options.target, **said), self.task)
        if isinstance(wanted, Patches):
            said["size"] = said["size"] or wanted.size
        return Data(
            train=self.options.data,
            target=self.options.target,
            length=self.length,
            rows=BATCH,
            tokens=None if self.length is None else max(TOKENS, self.length),
            overlong="split" if self.task in CUT else self.overlong,
            pack="none",
            **said,
        )

    def _reading(self) -> dict[str, Any]:
        """How the files are read: as is said, and else as the run's own files were, if these are of that kind."""
        said, usual = settings(self.options.reading), settings(Reading())
        more = {n: self.run[n] for n in usual if n in self.run and said[n] == usual[n]}
        with suppress(UsageError):
            check_used(Data(self.options.data, self.options.target, **{**said, **more}), self.task)
            return {**said, **more}
        return said

    def _feed(self, folder: Path) -> Feed:
        """All of the data, as what is held out."""
        source, batching = self.data.source(), self.data.batching(SEED)
        shards = shards_of(self.task, source, self.coder, folder / "data", self.classes or None)
        columns, notes = shards.columns, shards.notes
        self.about = examples(notes["records"] - notes["empty"])
        if self.coder is None:
            feed: Base = self._pictures(columns, batching)
        else:
            self.about += f", {notes['tokens']:,} tokens"
            self._check(source, columns)
            feed = feed_of(self.task, self.data, self.coder, batching, columns, "", None)
        feed.held = feed
        if self.task != "mlm" or self.coder is None:
            return feed
        marks = Marks(self.coder.vocab, self.coder.reserved, self.coder.mask)
        return Corrupted(feed, MaskTokens(marks), SEED)

    def _pictures(self, columns: dict[str, Column], batching: Batching) -> ImageFeed:
        c, shape = self.model.config.embedding, columns["images"].values.shape[1:]
        if shape != (c.size, c.size, c.channels):
            said, want = (" x ".join(map(str, x)) for x in (shape, (c.size, c.size, c.channels)))
            raise Fault(f"the pictures are {said}, the model reads {want}", DATA)
        mean, std, _ = normal_of(self.model)
        ends = {"mean": mean.tolist(), "std": std.tolist()}
        return ImageFeed(columns["images"], columns["labels"], batching, **ends)

    def _check(self, source: Source, columns: dict[str, Column]) -> None:
        """Name the first example that is too long, unless such are cut."""
        if self.data.overlong != "error" or self.length is None or self.coder is None:
            return
        ends = len(self.coder.before) + len(self.coder.after)
        more = {"ids": ends, "source": ends, "target": 1}
        if all((c.lengths + more[n]).max() <= self.length for n, c in columns.items() if n in more):
            return
        two = self.task == "answer" or "second" in source.columns
        used = [role for role in ROLES[self.task] if two or role != "second"]
        for number, record in enumerate(records(source, used), 1):
            size = max(self._sizes(record))
            if size > self.length:
                raise self._too_long(number, size, str(record[used[0]]))

    def _sizes(self, record: Record) -> list[int]:
        """Tokens of each side of an example."""
        assert self.coder is not None
        c, values = self.coder, record.values()
        texts = [" ".join(map(str, v)) if isinstance(v, list) else str(v) for v in values]
        counts, ends = [len(ids) for ids in c.encode(texts)], len(c.before) + len(c.after)
        if self.task == "seq2seq":
            return [counts[0] + ends, len(c.encode(texts[1:], target=True)[0]) + 1]
        return [sum(counts) + ends + len(c.between) * (len(counts) - 1)]

    def _too_long(self, number: int, size: int, text: str) -> Fault:
        return Fault(
            f"example {number} of {', '.join(self.options.data)} ({text!r:.40}) has {size:,} tokens, a row holds "
            f"{self.length:,}; shorten it, or say --overlong truncate",
            DATA,
        )

    def _texts(self, names: Sequence[str]) -> tuple[dict[str, float], dict[str, str]]:
        """Translate every source of the files, and compare with its target."""
        assert self.coder is not None and self.tokenizer is not None
        sources, references = [], []
        for number, record in enumerate(records(self.data.source(), ("source", "target")), 1):
            line, reference = record["source"], record["target"]
            if not isinstance(line, str) or not isinstance(reference, str):
                raise Fault(f"example {number}: source and target must be text", DATA)
            ids = self.tokenizer.encode(line) if line.strip() else []
            if self.length is not None and len(ids) > self.length:
                if self.overlong == "error":
                    raise self._too_long(number, len(ids), line)
                after = self.coder.after
                ids = [*ids[: self.length - len(after)], *after]
            sources.append(ids)
            references.append(reference)
        self.about = examples(len(sources))
        said = iter(translations(self.fast, [s for s in sources if s], beams=self.options.beams))
        texts = [self.tokenizer.decode(next(said)) if source else "" for source in sources]
        return evaluate.text_scores(names, texts, references)


def examples(n: int) -> str:
    return f"{n:,} example{'' if n == 1 else 's'}"


def by_logits(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """The loss of a quantized model, whose head gives logits but no weights; row by row, for logits are large."""
    total, count = batch.labels.new_zeros((), dtype=torch.float32), (batch.labels != IGNORE).sum()
    for one in batch.split(len(batch.ids)):
        more = {"source": one.source, "source_lengths": one.source_lengths}
        given = {} if one.source is None else more
        lengths = one.lengths if one.source is None else None
        total += masked_lm_loss(model(one.ids, lengths, **given), one.labels)[0]
    return total, count
