"""What a run shows while it goes on: a block that renews itself on a terminal, a plain line now and
then elsewhere.

Listeners only note what they hear; the block is drawn four times a second at most, by a thread of
its own.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from regard.see.format import clip, clock, number, short, small, spark, visible

EVERY = 10.0  # seconds between plain lines
RATE = 4  # pictures a second
KEEP = 0.98  # of the smoothed loss, each step
TRAIL = 256  # values that stand for the whole curve
SHOWN = 2  # samples
SHOW: dict[str, Callable[[float], str]] = {"loss": "{:.4f}".format, "perplexity": "{:.2f}".format}
Event = dict[str, Any]


def view(steps: int, quiet: bool) -> Plain | Live:
    """The block where stderr is a terminal that can show it, else lines; `quiet`: evaluations and
    warnings alone."""
    if quiet or not sys.stderr.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        return Plain(steps, quiet)
    try:
        from rich.console import Console
    except ImportError:
        return Plain(steps, quiet)
    console = Console(stderr=True)
    return Live(steps, console) if console.is_terminal else Plain(steps, quiet)


# --- what has been heard --------------------------------------------------------------------------


class Trail:
    """A curve of any length in few values: when they are too many, neighbours become their mean."""

    def __init__(self, most: int = TRAIL):
        self.values: list[float] = []
        self.most, self.each = most, 1
        self.total, self.count = 0.0, 0

    def add(self, value: float) -> None:
        self.total, self.count = self.total + value, self.count + 1
        if self.count < self.each:
            return
        self.values.append(self.total / self.count)
        self.total, self.count = 0.0, 0
        if len(self.values) == self.most:
            pairs = zip(self.values[::2], self.values[1::2])
            self.values, self.each = [(a + b) / 2 for a, b in pairs], 2 * self.each


class Meter:
    """Where a run stands, from its events."""

    def __init__(self, steps: int, now: Callable[[], float] = time.monotonic):
        self.steps, self.now = steps, now
        self.began, self.done, self.step = now(), 0, 0
        self.at: Event = {}
        self.mean, self.weight = 0.0, 0.0
        self.tokens, self.seconds = 0, 0.0
        self.evaluation, self.best = "", ""
        self.samples: list[str] = []
        self.trail = Trail()

    def hear(self, event: Event) -> None:
        kind = event["kind"]
        if kind == "step":
            self.at, self.step, self.done = event, event["step"], self.done + 1
            self.tokens += event["tokens"]
            self.seconds += event["seconds"]
            self.mean = KEEP * self.mean + (1 - KEEP) * event["loss"]
            self.weight = KEEP * self.weight + 1 - KEEP
            self.trail.add(event["loss"])
        elif kind == "evaluation":
            self.evaluation = evaluation_line(event)
            self.best = self.evaluation if event["best"] else self.best
        elif kind == "samples":
            self.samples = [sample_line(s) for s in event["samples"][:SHOWN]]

    @property
    def ema(self) -> float:
        return self.mean / self.weight if self.weight else math.nan

    def rate(self) -> float:
        """Tokens a second since the last call."""
        rate = self.tokens / self.seconds if self.seconds > 0 else 0.0
        self.tokens, self.seconds = 0, 0.0
        return rate

    def left(self) -> float:
        """Seconds to go at the pace so far, evaluations and checkpoints included."""
        pace = (self.now() - self.began) / max(self.done, 1)
        return pace * max(self.steps - self.step, 0)


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


# --- lines ----------------------------------------------------------------------------------------


class Plain(Meter):
    """12:04:10 step 60/300 loss 3.412 lr 6.0e-4 tok/s 3570 eta 00:04:35, every ten seconds and at
    the end."""

    def __init__(self, steps: int, quiet: bool, now: Callable[[], float] = time.monotonic):
        super().__init__(steps, now)
        self.quiet, self.last = quiet, now()

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, event: Event) -> None:
        self.hear(event)
        kind = event["kind"]
        if text := trouble(event):
            say(text)
        elif kind == "evaluation":
            say(self.evaluation)
        elif kind == "samples" and not self.quiet:
            say("\n".join(self.samples))
        elif kind == "step" and not self.quiet and self.due():
            at, self.last = self.at, self.now()
            line = f"step {self.step}/{self.steps} loss {at['loss']:.3f} lr {small(format(at['lr'], '.1e'))}"
            line += f" tok/s {self.rate():.0f} eta {clock(self.left())}"
            say(f"{time.strftime('%H:%M:%S')} {line}")

    def due(self) -> bool:
        return self.now() - self.last >= EVERY or self.step == self.steps


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- the block ------------------------------------------------------------------------------------


class Live(Meter):
    """The block, by rich, on a console of it."""

    def __init__(self, steps: int, console: Any):
        from rich.live import Live as Block

        super().__init__(steps)
        self.console, self.lock = console, threading.Lock()
        self.renewed, self.shown_rate = self.now(), 0.0
        self.block = Block(
            console=console,
            get_renderable=self.picture,
            refresh_per_second=RATE,
            vertical_overflow="crop",
            # stdout may be a file, and it is for data
            redirect_stdout=False,
        )

    def __enter__(self) -> Live:
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
        return Text("\n").join(
            Text(line, style=style, no_wrap=True, overflow="crop") for line, style in lines
        )

    def lines(self, width: int) -> list[tuple[str, str]]:
        """(text, style) of each line."""
        if not self.at:
            return [("before the first step", "dim")]
        # A rate over a second or more does not jump.
        if self.now() - self.renewed >= 1:
            self.shown_rate, self.renewed = self.rate(), self.now()
        at, share = self.at, min(self.step / max(self.steps, 1), 1.0)
        room = max(min(width - 40, 40), 0)
        bar = ("━" * round(share * room)).ljust(room, "╌")
        head = (
            f"step {self.step}/{self.steps}  {bar}  {100 * share:.0f} %  left {clock(self.left())}"
        )
        speed = self.shown_rate or self.tokens / max(self.seconds, 1e-9)
        figures = (
            f"loss {at['loss']:.4f} (mean {self.ema:.4f})  lr {small(format(at['lr'], '.2e'))}"
        )
        figures += f"  grad {at['norm']:.2f}  {short(speed)} tok/s"
        curve = spark(self.trail.values, max(min(width - 6, 60), 0))
        best = self.best if self.best != self.evaluation else ""
        lines = [(head, "bold"), (figures, ""), (f"loss  {curve}" if curve else "", "cyan")]
        lines += [(self.evaluation, "green"), (best, "green")]
        lines += [(line, "dim") for line in self.samples]
        return [(clip(line, width), style) for line, style in lines if line]
