"""Configs that are known to work, each a commented TOML file beside this one, and the makers of their data.

The first lines of a file say what it is: # what: ..., # data: a name of MAKERS, # size: parameters, # time: on two
cores, and # first: the recipe whose run it goes on from, if there is one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from regard.errors import UsageError, nearest
from regard.recipes import corpora, dates, summaries

MAKERS: dict[str, Callable[[Path], str]] = {
    "dates": dates.make,
    "pydoc": corpora.make_pydoc,
    "digits": corpora.make_digits,
    "captions": corpora.make_captions,
    "drawings": corpora.make_drawings,
    "segments": corpora.make_segments,
    "summaries": summaries.make,
    "verses": corpora.make_pairs,
    "parts": corpora.make_parts,
    "sums": corpora.make_sums,
}
NAMES = (
    *("dates", "dates-gru", "gpt-pydoc", "vit-digits", "kjv", "bert-pretrain", "bert-finetune"),
    *("t5-pretrain", "bart-pretrain", "dsa-base", "dsa-warmup", "dsa-sparse", "captions"),
    *("chat", "prefer", "digits-from-text", "segment", "summaries"),
)


@dataclass(frozen=True)
class Recipe:
    """A config and what its first lines say."""

    name: str
    text: str
    what: str
    data: str
    size: str
    time: str
    first: str = ""

    @property
    def folder(self) -> str:
        """Where the config looks for its data, beside itself."""
        return f"{self.name}-data"


def recipe(name: str) -> Recipe:
    if name not in NAMES:
        raise UsageError(f"there is no recipe {name!r}; {nearest(name, NAMES)}")
    text = files(__name__).joinpath(f"{name}.toml").read_text(encoding="utf-8")
    head = text.partition("\n\n")[0].splitlines()
    facts = dict(line.removeprefix("# ").split(": ", 1) for line in head if ": " in line)
    known = ("what", "data", "size", "time", "first")
    return Recipe(name, text, **{key: facts[key] for key in known if key in facts})


def stages(name: str, to: Path) -> list[tuple[str, Path]]:
    """The recipes that `name` goes on from and itself, in their order, each with the place of its copy. Copies
    that come first are named after the last one, unless that has the recipe's own name."""
    found = [(name, to)]
    while first := recipe(found[0][0]).first:
        own = to.name == name
        found.insert(0, (first, to.with_name(first if own else f"{to.name}-{first}")))
    return found


def copy(name: str, to: Path, start: Path | None = None) -> tuple[Path, Path, str]:
    """Write the config `to`.toml and make its data in the folder `to`-data; both, and what the data is. A recipe that
    goes on from a run names the folder `start`, or the run of the recipe that comes first. What is there is never
    overwritten."""
    source = recipe(name)
    config, data = to.with_name(f"{to.name}.toml"), to.with_name(f"{to.name}-data")
    for path in (config, data):
        if path.exists():
            how = f"give another name: regard recipes copy {name} NAME"
            raise UsageError(f"{path} is there already; {how}")
    begun = to.with_name(f".{data.name}.new")
    shutil.rmtree(begun, ignore_errors=True)
    about = MAKERS[source.data](begun)
    begun.rename(data)
    text = source.text.replace(f'"{source.folder}/', f'"{data.name}/')
    if source.first:
        # A config names folders from where it lies; runs are written to where one is.
        run = os.path.relpath(start or Path("runs", stages(name, to)[-2][1].name), to.parent)
        text = text.replace(f'"runs/{source.first}"', f'"{run}"')
    config.write_text(text, encoding="utf-8")
    return config, data, about
