"""How often a step goes from one file of the package to another: what a reader of a trace has to follow.

    python bench/crossings.py

A call counts where what it calls is in a file of regard/ and the caller in another file. Counted is `Engine.step` for
one answer: with a prepared model on a CPU, and with the graph runner. What a graph holds (`GraphSteps.step`) is played
by one call on a GPU, so it is left out; off a GPU it runs as it is.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import regard
from regard.decode.engine import Engine
from regard.decode.runners.steps import GraphSteps
from regard.decode.settings import Request, Settings

PACKAGE = str(Path(regard.__file__).parent)


class Crossings:
    """Counts calls between files while it is entered."""

    def __init__(self) -> None:
        self.pairs: Counter[tuple[str, str]] = Counter()
        self.recorded: FrameType | None = None

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "return" and frame is self.recorded:
            self.recorded = None
        if event != "call" or frame.f_back is None or self.recorded is not None:
            return
        called, caller = frame.f_code.co_filename, frame.f_back.f_code.co_filename
        if called != caller and called.startswith(PACKAGE):
            self.pairs[self.short(caller), self.short(called)] += 1
        if frame.f_code is GraphSteps.step.__code__:
            self.recorded = frame

    @staticmethod
    def short(path: str) -> str:
        return path[len(PACKAGE) + 1 :] if path.startswith(PACKAGE) else "outside"

    def __enter__(self) -> Crossings:
        sys.setprofile(self.note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


def steps(engine: Engine, tokens: int) -> tuple[int, int, Counter[tuple[str, str]]]:
    """Tokens, steps of the engine and what they crossed, in the middle of an answer that is written alone."""
    engine.submit(Request([5, 6, 7, 8], Settings(max_new_tokens=3 * tokens)))
    said = 0
    while said < tokens:
        said += len(engine.step())
    found, before, rounds = Crossings(), said, 0
    while said < 2 * tokens:
        with found:
            events = engine.step()
        said += len(events)
        rounds += 1
    while not engine.idle:
        engine.step()
    return said - before, rounds, found.pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--most", type=int, default=12, help="pairs of files to show")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = regard.build("gpt2", layers=4, dim=64, heads=4, vocab=256)
    kinds = {
        "a prepared model on a CPU": Engine(regard.prepare(model)),
        "a graph": Engine(model, runner="graph"),
    }
    for name, engine in kinds.items():
        tokens, rounds, pairs = steps(engine, 64)
        count = sum(pairs.values())
        print(
            f"{name}: {count / tokens:.0f} crossings for a token, {count / rounds:.0f} for a step"
        )
        for (caller, called), count in pairs.most_common(options.most):
            print(f"    {count / rounds:6.1f}  {caller} -> {called}")


if __name__ == "__main__":
    main()
