"""regard train and regard finetune: a run, shown while it goes on: by a block that renews itself on a terminal, by a
plain line now and then elsewhere."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from tyro.conf import Positional, UseAppendAction, arg

from regard.cli.shared import Changes, Count, FolderName, Switch, values
from regard.errors import UsageError
from regard.see.format import clip, clock, number, short, small, spark, visible

EXITS = {signal.SIGINT: 130, signal.SIGTERM: 143}
EVERY = 10.0  # seconds between plain lines
RATE = 4  # pictures per second
KEEP = 0.98  # of the smoothed loss, each step
TRAIL = 256  # values that stand for the whole curve at most
SHOWN = 2  # samples
SHOW: dict[str, Callable[[float], str]] = {"loss": "{:.4f}".format, "perplexity": "{:.2f}".format}
Event = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """Where a run is, and how it goes."""

    # the run's folder; default: runs/ and the name of the config, or of the data
    output_dir: FolderName = None
    overwrite: Switch = False  # start anew in a folder that has a run
    smoke: Switch = False  # three steps, to find at once what would fail later
    keep: Count = None  # checkpoints that stay, beside the best; default: 2
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    quiet: Switch = False  # no progress lines
    force: Switch = False  # start although the plan says that memory or disk will not do
    # tensorboard, wandb or trackio, where they are installed
    log_to: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="TRACKER")] = ()
    # settings of the config, changed: the same as --NAME VALUE with a dot in NAME
    changes: Changes = field(default_factory=dict)


@dataclass(frozen=True)
class Options:
    """Train a model from a TOML file; stop it any way you like, and go on with --resume.

    regard train story.toml                          into runs/story
    regard train story.toml --train.optim.lr 3e-4    change one setting
    regard train --resume runs/story                 go on after a stop, to the same bits
    regard train --resume runs/story --train.steps 2000      train longer
    regard train story.toml --smoke                  three steps, an evaluation, a save, a reload: runs/story-smoke
    regard train --help-all                          every setting of a config: type, default, meaning
    """

    # a TOML file with task, [model], [data], [tokenizer], [train]; with --resume the run's folder
    config: Annotated[Positional[str], arg(metavar="CONFIG")]
    resume: Switch = False  # go on from the newest sound checkpoint, with the run's own settings
    run: Run = Run()


@dataclass(frozen=True)
class FinetuneOptions:
    """Tune a model on a file, without a config: the file's columns decide the task, and the run's config.toml says all
    that was decided. Stopped any way, it goes on: regard train --resume RUN.

    regard finetune MODEL --data chats.jsonl --method lora       what the assistant says in "messages"
    regard finetune MODEL --data stories.txt                     plain text, all weights
    regard finetune MODEL --data reviews.csv --train.epochs 2    columns text and label; any setting can be changed
    regard finetune MODEL --data alpaca.json --train.steps 500   columns instruction, input and output
    """

    # a model folder
    model: Annotated[Positional[str], arg(metavar="MODEL")]
    # a text, JSON, JSONL, CSV, TSV or Parquet file, or a folder of pictures
    data: Annotated[str, arg(metavar="FILE")]
    task: Annotated[str | None, arg(metavar="TASK")] = None  # default: what the columns say
    method: Literal["full", "frozen", "lora", "qlora"] = "full"  # qlora: LoRA on 4 bits
    valid: Annotated[str | None, arg(metavar="FILE")] = None  # default: a twentieth of the data
    run: Run = Run()


def finetune(options: FinetuneOptions) -> int:
    from regard.train.finetune import finetune as start

    return _shown(options, start, "model", "data", "output_dir")


def run(options: Options) -> int:
    from regard.train.run import train

    return _shown(options, train, "config", "output_dir")


def _shown(options: Any, start: Callable[..., Any], *names: str) -> int:
    """Start a run with the options, those of these `names` in their order, and show it."""
    from regard.train.run import again

    given = values(options)
    quiet, ordered = given.pop("quiet"), [given.pop(name) for name in names]
    with signals() as received, contextlib.ExitStack() as stack:
        shown, stop = Screen(quiet, stack), lambda: bool(received)
        result = start(*ordered, **given, callbacks=[shown], stop=stop)
    first = os.environ.get("RANK", "0") == "0"
    if result.status == "asked":
        if first:
            say(f"stopped after step {result.step}, saved; go on: {again(result.folder)}")
        # Where another process was asked to stop, this one was not.
        return EXITS[signal.Signals(received[0])] if received else EXITS[signal.SIGTERM]
    if first:
        if given["smoke"]:
            reload(result.folder / "last")
        print(result.last)
    return 0


def say(text: str) -> None:
    """Talk goes to stderr, on a terminal or not: plain lines."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def signals() -> Iterator[list[int]]:
    """The first SIGINT or SIGTERM lets the step end; the second ends at once."""
    received: list[int] = []

    def note(number: int, frame: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)
        # Not by print, which may be what was interrupted.
        with contextlib.suppress(OSError):
            os.write(2, b"finishing this step, then saving; again to stop at once\n")

    old = {number: signal.signal(number, note) for number in EXITS}
    try:
        yield received
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def reload(folder: Path) -> None:
    """Load what was saved and let it write something."""
    from regard.checkpoint import load
    from regard.decode.generate import generate, tokenizer_of

    model = load(folder)
    say("reloaded: " + type(model).__name__)
    if tokenizer_of(model) is not None and model.decodes and not model.reads_source:
        with contextlib.suppress(UsageError):
            (result,) = generate(model, [[0]], max_new_tokens=8)
            say(f"sample: {result.text!r}")


# --- what a run shows -----------------------------------------------------------------------------


class Screen:
    """Shows the events of a run: what it is, then its progress."""

    def __init__(self, quiet: bool, stack: contextlib.ExitStack):
        self.quiet, self.stack = quiet, stack
        self.view: Any = None

    def __call__(self, event: Event) -> None:
        match event["kind"]:
            case "begin":
                notices = (f"note: {text}" for text in event["notices"])
                for text in (event["about"], *notices, event.get("resumed")):
                    if text:
                        say(text)
                self.view = self.stack.enter_context(view(event["steps"], self.quiet))
            case "end":
                self.stack.close()
            case "warning" if self.view is None:
                say(f"warning: {event['text']}")
            case _ if self.view is not None:
                self.view(event)


def view(steps: int, quiet: bool) -> Plain | Live:
    """The block where stderr is a terminal that can show it, else lines; `quiet`: evaluations and
    warnings alone."""
    if not quiet and sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        with contextlib.suppress(ImportError):
            from rich.console import Console

            console = Console(stderr=True)
            if console.is_terminal:
                return Live(steps, console)
    return Plain(steps, quiet)


class Meter:
    """Where a run stands, from its events, which it only notes: they come in the loop's own time."""

    def __init__(self, steps: int, now: Callable[[], float] = time.monotonic):
        self.steps, self.now = steps, now
        self.began, self.done, self.step = now(), 0, 0
        self.at: Event = {}
        self.mean, self.weight = 0.0, 0.0
        self.tokens, self.seconds = 0, 0.0
        self.evaluation, self.best = "", ""
        self.samples: list[str] = []
        # The smoothed loss of every so many steps: the whole run in a few values.
        self.curve: list[float] = []
        self.each = 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def hear(self, event: Event) -> None:
        kind = event["kind"]
        if kind == "step":
            self.at, self.step, self.done = event, event["step"], self.done + 1
            self.tokens += event["tokens"]
            self.seconds += event["seconds"]
            self.mean = KEEP * self.mean + (1 - KEEP) * event["loss"]
            self.weight = KEEP * self.weight + 1 - KEEP
            if self.done % self.each == 0:
                self.curve.append(self.ema)
            if len(self.curve) == TRAIL:
                self.curve, self.each = self.curve[1::2], 2 * self.each
        elif kind == "evaluation":
            self.evaluation = evaluation_line(event)
            self.best = self.evaluation if event["best"] else self.best
        elif kind == "samples":
            self.samples = [sample_line(s) for s in event["samples"][:SHOWN]]

    @property
    def ema(self) -> float:
        return self.mean / self.weight if self.weight else math.nan

    def rate(self) -> float:
        """Tokens per second since the last call."""
        rate = self.tokens / self.seconds if self.seconds > 0 else 0.0
        self.tokens, self.seconds = 0, 0.0
        return rate

    def left(self) -> str:
        """The time to go at the pace so far, evaluations and checkpoints included."""
        pace = (self.now() - self.began) / max(self.done, 1)
        return clock(pace * max(self.steps - self.step, 0))


def evaluation_line(event: Event) -> str:
    """eval  step 150  loss 3.0410  ppl 20.93  bleu 31.2, the best so far"""
    parts = [f"eval  step {event['step']}"]
    for name, value in event.items():
        if name not in ("kind", "step", "best") and isinstance(value, (int, float)):
            shown = SHOW.get(name, number)(value)
            parts.append(f"{'ppl' if name == 'perplexity' else name} {shown}")
    return "  ".join(parts) + (", the best so far" if event["best"] else "")


def sample_line(sample: Event) -> str:
    wanted = sample.get("reference")
    known = f"  (wanted {clip(visible(wanted), 60)})" if wanted is not None else ""
    source, text = (clip(visible(sample.get(k) or ""), 60) for k in ("source", "text"))
    return f"sample  {source} → {text}{known}"


def trouble(event: Event) -> str:
    """What must be said at once, or nothing."""
    if event["kind"] == "warning":
        return f"note: {event['text']}"
    if event["kind"] == "broken":
        what = f"loss {event['loss']}, gradient {event['norm']}"
        return f"step {event['step']}: {what}: the weights were not touched"
    return ""


class Plain(Meter):
    """12:04:10 step 60/300 loss 3.412 lr 6.0e-4 tok/s 3570 eta 00:04:35, every ten seconds and at
    the end."""

    def __init__(self, steps: int, quiet: bool, now: Callable[[], float] = time.monotonic):
        super().__init__(steps, now)
        self.quiet, self.last = quiet, now()

    def __call__(self, event: Event) -> None:
        self.hear(event)
        kind = event["kind"]
        if text := trouble(event):
            say(text)
        elif kind == "evaluation":
            say(self.evaluation)
        elif kind == "samples" and not self.quiet:
            say("\n".join(self.samples))
        elif kind == "step" and not self.quiet:
            if self.now() - self.last < EVERY and self.step != self.steps:
                return
            self.last, lr = self.now(), small(format(event["lr"], ".1e"))
            line = f"step {self.step}/{self.steps} loss {event['loss']:.3f} lr {lr}"
            if "reward_margin" in event:
                line += f" preferred {event['reward_accuracy']:.0%} by {event['reward_margin']:.3g}"
            line += f" tok/s {self.rate():.0f} eta {self.left()}"
            say(f"{time.strftime('%H:%M:%S')} {line}")


class Live(Meter):
    """A block on a console of rich, drawn four times a second at most, by a thread of its own."""

    def __init__(self, steps: int, console: Any):
        from rich.live import Live as Block

        super().__init__(steps)
        self.console, self.lock = console, threading.Lock()
        self.renewed, self.shown_rate = self.now(), 0.0
        # stdout may be a file, and it is for data
        how: Any = {"vertical_overflow": "crop", "redirect_stdout": False}
        show = self.picture
        self.block = Block(console=console, get_renderable=show, refresh_per_second=RATE, **how)

    def __enter__(self) -> Self:
        self.block.start(refresh=False)
        return self

    def __exit__(self, *_: object) -> None:
        self.block.stop()

    def __call__(self, event: Event) -> None:
        with self.lock:
            self.hear(event)
        if text := trouble(event):
            self.console.print(text, markup=False, highlight=False)

    def picture(self) -> Any:
        """The lines of the block, each cut to the width that the terminal has now."""
        from rich.text import Text

        with self.lock:
            lines = self.lines(self.console.width)
        cut: Any = {"no_wrap": True, "overflow": "crop"}
        return Text("\n").join(Text(line, style=style, **cut) for line, style in lines)

    def lines(self, width: int) -> list[tuple[str, str]]:
        """(text, style) of each line."""
        if not self.at:
            return [("before the first step", "dim")]
        # A rate over a second or more does not jump.
        if self.now() - self.renewed >= 1:
            self.shown_rate, self.renewed = self.rate(), self.now()
        speed = self.shown_rate or self.tokens / max(self.seconds, 1e-9)
        at, share = self.at, min(self.step / max(self.steps, 1), 1.0)
        room = max(min(width - 40, 40), 0)
        bar = ("━" * round(share * room)).ljust(room, "╌")
        head = f"step {self.step}/{self.steps}  {bar}  {100 * share:.0f} %  left {self.left()}"
        loss, lr = f"{at['loss']:.4f} (mean {self.ema:.4f})", small(format(at["lr"], ".2e"))
        figures = f"loss {loss}  lr {lr}  grad {at['norm']:.2f}  {short(speed)} tok/s"
        curve = spark(self.curve, max(min(width - 6, 60), 0))
        best = self.best if self.best != self.evaluation else ""
        lines = [(head, "bold"), (figures, ""), (f"loss  {curve}" if curve else "", "cyan")]
        lines += [(self.evaluation, "green"), (best, "green")]
        lines += [(line, "dim") for line in self.samples]
        return [(clip(line, width), style) for line, style in lines if line]
