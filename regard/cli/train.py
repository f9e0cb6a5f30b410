"""regard train and regard finetune: a run, shown while it goes on: by a block that renews itself on a terminal, by a
plain line now and then elsewhere; and regard plan: what a run will need, as a table."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from tyro.conf import Positional, UseAppendAction, arg

from regard.cli.shared import Changes, Count, FolderName, Switch, check_counts, values
from regard.errors import DATA, ENVIRONMENT, Fault, UsageError, blaming
from regard.see.format import clip, clock, number, short, small, spark, visible

if TYPE_CHECKING:
    import torch

    from regard.train.plan import Forecast

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
    """

    # a model folder
    model: Annotated[Positional[str], arg(metavar="MODEL")]
    # a text, JSONL, CSV or TSV file, or a folder of pictures
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


# --- what a run will need ---------------------------------------------------------------------------

SLOW = 3600  # seconds after which a quicker config is pointed at
OFTEN = 30  # passes over the data after which it is known by heart
ASIDE = "the tokenizer, samples and checkpoints not counted"
Row = tuple[str, str]
# A table for people, figures for programs, and what this machine lacks; nothing where it can.
Needs = tuple[list[Row], dict[str, Any], str]


@dataclass(frozen=True)
class PlanOptions:
    """What a run will need, before it is begun: parameters, memory, disk, work and time. Nothing is trained.

    regard plan story.toml
    regard plan story.toml --model.layers 12 --train.precision bf16
    regard plan MODEL                                what a model folder needs to run
    """

    # a TOML file as for regard train, or a model folder
    config: Annotated[Positional[str], arg(metavar="CONFIG|MODEL")]
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    # the run's folder, whose data and tokenizer are used if they are there; default: runs/ and the
    # config's name
    output_dir: FolderName = None
    keep: int = 2  # checkpoints that stay, beside the best
    json: Switch = False  # one JSON object
    # settings of the config, changed: the same as --NAME VALUE with a dot in NAME
    changes: Changes = field(default_factory=dict)


def plan(options: PlanOptions) -> int:
    from regard.train.config import read
    from regard.train.plan import Forecast, pick_device

    device, _ = pick_device(options.device)
    check_counts(options, "keep")
    if Path(options.config).is_dir():
        if options.changes:
            raise UsageError(f"{options.config} is a model folder, which has no settings to change")
        table, facts, lacks = folder_needs(options.config, device)
    else:
        with blaming(2):
            config = read(Path(options.config), options.changes)
        folder = Path(options.output_dir or Path("runs") / Path(options.config).stem)
        table, facts, lacks = run_needs(Forecast(config, folder, device, options.keep))
    if options.json:
        print(json.dumps(facts))
    else:
        print("\n".join(f"{name:<8}{text}" for name, text in table))
    if lacks:
        raise Fault(lacks, ENVIRONMENT)
    return 0


def folder_needs(path: str, device: torch.device) -> Needs:
    """What a model needs to run: its weights, and what it keeps of each token."""
    from regard.checkpoint import load
    from regard.files import resolve_model
    from regard.models.base import parameters
    from regard.train.measure import context_of
    from regard.train.plan import cache_bytes, free_memory, number, size

    with blaming(DATA):
        model = load(resolve_model(path), device="meta")
    weights, free = sum(p.nbytes for p in model.parameters()), free_memory(device)
    count, cache = parameters(model), cache_bytes(model)
    table = [
        ("model", f"{number(count)} parameters: {describe(model)}"),
        ("memory", f"weights {size(weights)} of {size(free)} free on {device.type}"),
        *kv_row(cache, context_of(model) or 1024),
    ]
    facts: dict[str, Any] = {"parameters": count, "weights": weights, "free": free}
    facts |= {"kv": cache, "fits": weights <= free}
    lacks = f"the weights need {size(weights)}, {size(free)} are free" if weights > free else ""
    return table, facts, lacks


def run_needs(f: Forecast) -> Needs:
    """What a run needs: figures for people, figures for programs, and why it cannot be begun."""
    from regard.models.base import parameters
    from regard.train.build import notices
    from regard.train.plan import EFFICIENCY, cache_bytes, duration, number, size, trainable

    plan, train, model, cache = f.plan, f.config.train, f.model, cache_bytes(f.model)
    count, learns, memory = parameters(model), trainable(model), asdict(plan.memory)
    only = f", {learns:,} are trained" if learns < count else ""
    kind = "AdamW" if train.optim.name == "adamw" else "Muon and AdamW"
    called = {"optimizer": kind, "copies": "bf16 copies"}
    parts = " + ".join(f"{called.get(name, name)} {size(n)}" for name, n in memory.items() if n)
    names = f"{train.steps:,} steps x {f.tokens:,} tokens"
    share = train.steps * f.tokens / max(count, 1)
    passes = f"{f.passes:.3g} passes over the data, {share:.3g} tokens per parameter"
    if f.step is None:
        speed = f"{number(f.speed)}FLOP/s on {f.device.type}, {train.precision}"
        part = f"{EFFICIENCY[f.kind]:.0%} of what products were just measured at"
        how = f"if it runs at {speed} ({part})"
    else:
        each = f"{f.step:.2g} s" if f.step >= 0.1 else f"{1000 * f.step:.2g} ms"
        how = f"{train.steps:,} steps of {each}, as just measured"
    if f.held:
        many = f"{f.evaluations:,} evaluations" if f.evaluations > 1 else "an evaluation"
        how += f", and {many}"
    keep, total = plan.disk // plan.checkpoint - 2, plan.memory.total
    disk = f"{keep} that stay, the best and a new one: {size(plan.disk)} of {size(f.room)} free"
    table = [
        ("model", f"{number(count)} parameters{only}: {describe(model)}"),
        ("data", f.facts.describe()),
        ("run", f"{names} ({passes}), {number(f.flops)}FLOP"),
        ("memory", f"{parts} = about {size(total)} of {size(f.free)} free"),
        ("disk", f"{size(plan.checkpoint)} per checkpoint; {disk}"),
        ("time", f"about {duration(f.seconds)}: {how}; {ASIDE}"),
        *kv_row(cache, plan.job.step.length),
        *(("notice", text) for text in notices(f.config, model)),
        *(("less", str(change)) for change in f.less),
        *(("hint", text) for text in filter(None, [hint(f)])),
    ]
    facts = {
        "parameters": count,
        "trained": learns,
        "data": asdict(f.facts),
        "steps": train.steps,
        **{name: getattr(f, name) for name in ("tokens", "passes", "flops", "seconds", "speed")},
        "memory": {**memory, "total": total, "free": f.free},
        "disk": {"checkpoint": plan.checkpoint, "total": plan.disk, "free": f.room},
        "measured": f.step,
        "kv": cache,
        "fits": not (f.short or f.full),
        "changes": [asdict(change) for change in f.less],
    }
    lacks = ""
    if f.short:
        enough = any(change.total <= f.free for change in f.less)
        what = "change what `less` names" if enough else "take a smaller model"
        need = f"about {size(total)} of memory, {size(f.free)} are free"
        lacks = f"this run does not fit: it needs {need}; {what}"
    elif f.full:
        need = f"{size(plan.disk)}, {size(f.room)} are free"
        lacks = f"its checkpoints do not fit: they need {need}; make room"
    return table, facts, lacks


def hint(f: Forecast) -> str:
    """What to change, the most urgent."""
    data, over = f.config.data, f.facts.over
    if over and data.overlong == "error" and data.pack not in ("stream", "windows"):
        longer = f"{over:,} examples are longer than {data.length} tokens, so training would stop"
        return f"{longer}; say data.overlong = truncate, drop or split"
    if f.seconds > SLOW and f.device.type == "cpu":
        return "regard recipes list shows configs that train in minutes"
    often = "the data is read often: it may be learned by heart, so hold some out"
    return often if f.passes > OFTEN else ""


def describe(model: Any) -> str:
    """The shape of a model, in a line."""
    from regard.attention import DSA
    from regard.layers import MLP

    c = model.config
    parts = (getattr(c, name, None) for name in ("tower", "encoder", "decoder"))
    towers = [part for part in parts if part is not None]
    if not towers:
        looks = f", {c.attention} attention" if c.attention else ""
        return f"{c.layers} layers of {c.cell} x {c.dim}{looks}"
    last = towers[-1]
    first, ffn = last.each("attention")[-1], last.each("ffn")[-1]
    inner = first.attention if isinstance(first, DSA) else first
    groups = getattr(inner, "groups", inner.heads)
    heads = f"{inner.heads} " + (f"query / {groups} kv " if groups != inner.heads else "")
    vectors = getattr(getattr(c, "embedding", None) or getattr(c, "target", None), "position", None)
    place = last.relative or vectors
    kind = f"{'gated ' if ffn.gated else ''}{ffn.activation}" if isinstance(ffn, MLP) else "experts"
    words = (
        " and ".join(f"{tower.layers} layers x {tower.dim}" for tower in towers),
        f"{heads}heads ({first.kind})",
        "rope" if inner.rope is not None else place.kind if place is not None else "",
        kind,
        "tied embeddings" if getattr(getattr(c, "head", None), "tied", False) else "",
    )
    return ", ".join(word for word in words if word)


def kv_row(cache: dict[str, int] | None, length: int) -> list[Row]:
    from regard.train.plan import size

    if cache is None:
        return []
    token, full = cache["token"], cache["mha"]
    beside = "" if token == full else f" (mha would be {size(full)}, {full / token:.1f} x)"
    whole = f"{size(token * length)} at {length:,} tokens"
    return [("kv", f"{size(token)} per token in bf16{beside}, {whole}")]
