"""regard train and regard finetune: a run, and its progress: a block on a terminal, lines elsewhere."""

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

from regard.cli.shared import Changes, Count, FolderName, Switch, say, values
from regard.errors import UsageError
from regard.see.format import clip, clock, number, short, small, spark, visible

EXITS = {signal.SIGINT: 130, signal.SIGTERM: 143}
EVERY = 10.0  # seconds between plain lines
RATE = 4  # redraws per second
KEEP = 0.98  # of the smoothed loss, each step
TRAIL = 256  # points of the curve at most
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
    from regard.training.finetune import finetune as start

    return _shown(options, start, "model", "data", "output_dir")


def run(options: Options) -> int:
    from regard.training.run import train

    return _shown(options, train, "config", "output_dir")


def _shown(options: Any, start: Callable[..., Any], *names: str) -> int:
    """Start a run with the options, those of these `names` in their order, and show it."""
    from regard.training.run import again

    given = values(options)
    quiet, ordered = given.pop("quiet"), [given.pop(name) for name in names]
    with signals() as received, Display(quiet, None if quiet else terminal()) as display:
        result = start(*ordered, **given, callbacks=[display], stop=lambda: bool(received))
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


@contextlib.contextmanager
def signals() -> Iterator[list[int]]:
    """The first SIGINT or SIGTERM lets the step end; the second ends at once."""
    received: list[int] = []

    def note(number: int, frame: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)
        # The signal may have interrupted print.
        with contextlib.suppress(OSError):
            os.write(2, b"finishing this step, then saving; again to stop at once\n")

    old = {number: signal.signal(number, note) for number in EXITS}
    try:
        yield received
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def reload(folder: Path) -> None:
    """Load what was saved, and generate a sample."""
    from regard.checkpoint import load
    from regard.decode.generate import generate, tokenizer_of

    model = load(folder)
    say("reloaded: " + type(model).__name__)
    if tokenizer_of(model) is not None and model.decodes and not model.reads_source:
        with contextlib.suppress(UsageError):
            (result,) = generate(model, [[0]], max_new_tokens=8)
            say(f"sample: {result.text!r}")


# --- progress -------------------------------------------------------------------------------------


def terminal() -> Any:
    """A console of rich on stderr, or None where what is shown there cannot be renewed."""
    if not sys.stderr.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console(stderr=True)
    return console if console.is_terminal else None


class Smoothed:
    """An exponential moving average of the loss, and its curve over the whole run in a few values."""

    def __init__(self) -> None:
        self.sum = self.weight = 0.0
        self.curve: list[float] = []
        self.count, self.each = 0, 1

    def add(self, loss: float) -> None:
        self.count += 1
        self.sum = KEEP * self.sum + (1 - KEEP) * loss
        self.weight = KEEP * self.weight + 1 - KEEP
        if self.count % self.each == 0:
            self.curve.append(self.mean)
        if len(self.curve) == TRAIL:
            self.curve, self.each = self.curve[1::2], 2 * self.each

    @property
    def mean(self) -> float:
        return self.sum / self.weight if self.weight else math.nan


class Display:
    """Shows the events of a run: on a console of rich as a block that a thread redraws four times a
    second, elsewhere as a line every ten seconds. `quiet` leaves evaluations and warnings."""

    def __init__(
        self, quiet: bool = False, console: Any = None, now: Callable[[], float] = time.monotonic
    ):
        self.quiet, self.console, self.now = quiet, console, now
        self.block: Any = None
        self.lock = threading.Lock()
        self.steps, self.began, self.shown = 0, 0.0, 0.0
        self.at: Event = {}
        self.loss = Smoothed()
        self.tokens, self.seconds, self.speed = 0, 0.0, 0.0
        self.evaluation, self.best = "", ""
        self.samples: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.block is not None:
            self.block.stop()

    def __call__(self, event: Event) -> None:
        match event["kind"]:
            case "begin":
                self.begin(event)
            case "step":
                self.step(event)
            case "evaluation":
                self.evaluation = evaluation_line(event)
                self.best = self.evaluation if event["best"] else self.best
                if self.block is None:
                    say(self.evaluation)
            case "samples":
                self.samples = [sample_line(sample) for sample in event["samples"][:SHOWN]]
                if self.block is None and not self.quiet:
                    say("\n".join(self.samples))
            case "warning":
                self.tell(f"{'note' if self.began else 'warning'}: {event['text']}")
            case "broken":
                what = f"loss {event['loss']}, gradient {event['norm']}"
                self.tell(f"step {event['step']}: {what}: the weights were not touched")
            case "end":
                self.__exit__()

    def tell(self, text: str) -> None:
        """Print at once, above the block where there is one."""
        if self.block is None:
            say(text)
        else:
            self.console.print(text, markup=False, highlight=False)

    def begin(self, event: Event) -> None:
        notices = (f"note: {text}" for text in event["notices"])
        for text in filter(None, (event["about"], *notices, event.get("resumed"))):
            say(text)
        self.steps, self.began = event["steps"], self.now()
        self.shown = self.began
        if self.console is not None:
            from rich.live import Live

            # stdout may be a file, and it is for data.
            how: Any = {"vertical_overflow": "crop", "redirect_stdout": False}
            how |= {"get_renderable": self.picture, "refresh_per_second": RATE}
            self.block = Live(console=self.console, **how)
            self.block.start(refresh=False)

    def step(self, event: Event) -> None:
        with self.lock:
            self.at = event
            self.tokens += event["tokens"]
            self.seconds += event["seconds"]
            self.loss.add(event["loss"])
        late = self.now() - self.shown >= EVERY or event["step"] == self.steps
        if late and self.block is None and not self.quiet:
            say(f"{time.strftime('%H:%M:%S')} {self.line()}")

    def rate(self, every: float) -> float:
        """Tokens per second, over at least `every` seconds: over a shorter time they jump."""
        if self.now() - self.shown >= every:
            self.speed = self.tokens / self.seconds if self.seconds > 0 else 0.0
            self.tokens, self.seconds, self.shown = 0, 0.0, self.now()
        return self.speed or self.tokens / max(self.seconds, 1e-9)

    def left(self) -> str:
        """The time to go at the pace so far, evaluations and checkpoints included."""
        pace = (self.now() - self.began) / max(self.loss.count, 1)
        return clock(pace * max(self.steps - self.at["step"], 0))

    def line(self) -> str:
        """step 60/300 loss 3.412 lr 6.0e-4 tok/s 3570 eta 00:04:35"""
        at, lr = self.at, small(format(self.at["lr"], ".1e"))
        line = f"step {at['step']}/{self.steps} loss {at['loss']:.3f} lr {lr}"
        if "reward_margin" in at:
            line += f" preferred {at['reward_accuracy']:.0%} by {at['reward_margin']:.3g}"
        return f"{line} tok/s {self.rate(0):.0f} eta {self.left()}"

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
        at, share = self.at, min(self.at["step"] / max(self.steps, 1), 1.0)
        room = max(min(width - 40, 40), 0)
        bar = ("━" * round(share * room)).ljust(room, "╌")
        head = f"step {at['step']}/{self.steps}  {bar}  {100 * share:.0f} %  left {self.left()}"
        loss, lr = f"{at['loss']:.4f} (mean {self.loss.mean:.4f})", small(format(at["lr"], ".2e"))
        speed = short(self.rate(1))
        figures = f"loss {loss}  lr {lr}  grad {at['norm']:.2f}  {speed} tok/s"
        curve = spark(self.loss.curve, max(min(width - 6, 60), 0))
        best = self.best if self.best != self.evaluation else ""
        lines = [(head, "bold"), (figures, ""), (f"loss  {curve}" if curve else "", "cyan")]
        lines += [(self.evaluation, "green"), (best, "green")]
        lines += [(line, "dim") for line in self.samples]
        return [(clip(line, width), style) for line, style in lines if line]


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
