"""regard train: a run from a config file, shown while it goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg
from tyro.conf import UseAppendAction as Many

from regard.cli.shared import Changes, Count, Switch

EXITS = {signal.SIGINT: 130, signal.SIGTERM: 143}


@dataclass(frozen=True)
class Options:
    """Train a model from a TOML file; stop it any way you like, and go on with --resume.

    regard train story.toml                          into runs/story
    regard train story.toml --train.optim.lr 3e-4    change one setting
    regard train --resume runs/story                 go on after a stop, to the same bits
    regard train --resume runs/story --train.steps 2000      train longer
    regard train story.toml --smoke --output-dir try      three steps, an evaluation, a save, a reload
    """

    # a TOML file with task, [model], [data], [tokenizer], [train]; with --resume the run's folder
    config: Annotated[Positional[str], arg(metavar="CONFIG")]
    # the run's folder; default: runs/ and the config's name
    output_dir: Annotated[str | None, arg(metavar="FOLDER")] = None
    resume: Switch = False  # go on from the newest sound checkpoint, with the run's own settings
    overwrite: Switch = False  # start anew in a folder that has a run
    smoke: Switch = False  # three steps, to find at once what would fail later
    keep: Count = None  # checkpoints that stay, beside the best; default: 2
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    quiet: Switch = False  # no progress lines
    force: Switch = False  # start although the plan says that memory or disk will not do
    # tensorboard, wandb or trackio, where they are installed
    log_to: Annotated[Many[tuple[str, ...]], arg(metavar="TRACKER")] = ()
    # settings of the config, changed: the same as --NAME VALUE with a dot in NAME
    changes: Changes = field(default_factory=dict)


def run(options: Options) -> int:
    from regard.train.run import again, train

    with signals() as received, Screen(options.quiet) as screen:
        result = train(
            options.config,
            options.output_dir,
            changes=options.changes,
            resume=options.resume,
            overwrite=options.overwrite,
            smoke=options.smoke,
            keep=options.keep,
            device=options.device,
            force=options.force,
            log_to=options.log_to,
            callbacks=[screen],
            stop=lambda: bool(received),
        )
    first = os.environ.get("RANK", "0") == "0"
    if result.status == "asked":
        if first:
            say(f"stopped after step {result.step}, saved; go on: {again(result.folder)}")
        # Where another process was asked to stop, this one was not.
        return EXITS[signal.Signals(received[0])] if received else EXITS[signal.SIGTERM]
    if first:
        if options.smoke:
            reload(result.folder / "last")
        print(result.last)
    return 0


def say(text: str) -> None:
    """Talk goes to stderr, on a terminal or not: plain lines."""
    print(text, file=sys.stderr, flush=True)


class Screen:
    """Shows the events of a run: what it is, then its progress, by regard.cli.live."""

    def __init__(self, quiet: bool):
        self.quiet, self.stack = quiet, contextlib.ExitStack()
        self.view: Any = None

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def __call__(self, event: dict[str, Any]) -> None:
        match event["kind"]:
            case "begin":
                from regard.cli.live import view

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
    from regard.errors import UsageError

    model = load(folder)
    say("reloaded: " + type(model).__name__)
    if tokenizer_of(model) is not None and model.decodes and not model.reads_source:
        with contextlib.suppress(UsageError):
            (result,) = generate(model, [[0]], max_new_tokens=8)
            say(f"sample: {result.text!r}")
