"""regard recipes: configs that are known to work, listed, shown, or copied with their data."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.errors import UsageError
from regard.recipes import NAMES, Recipe, copy, recipe

if TYPE_CHECKING:
    from regard.cli.options_work import Recipes


def run(options: Recipes) -> int:
    if options.action == "list":
        if options.name is not None:
            raise UsageError(
                f"list shows all recipes; see one by: regard recipes show {options.name}"
            )
        print(listed([recipe(name) for name in NAMES], options.json))
        return 0
    if options.name is None:
        said = ", ".join(NAMES)
        raise UsageError(f"say which recipe: regard recipes {options.action} NAME, one of {said}")
    found = recipe(options.name)
    if options.action == "show":
        if options.to is not None:
            raise UsageError("show takes one recipe; to write it somewhere: regard recipes copy")
        whole = json.dumps({**told(found), "text": found.text}) + "\n"
        sys.stdout.write(whole if options.json else found.text)
        return 0
    to = Path(options.to or options.name)
    return copied(found, to / options.name if options.to and to.is_dir() else to, options.json)


def copied(found: Recipe, to: Path, as_json: bool) -> int:
    """Write config and data, and say what to do next."""
    print(f"making the data of {found.name}", file=sys.stderr, flush=True)
    config, data, said = copy(found.name, Path(str(to).removesuffix(".toml")))
    print(said, file=sys.stderr)
    command = f"regard train {config}"
    if as_json:
        paths = {"config": str(config), "data": str(data)}
        print(json.dumps({**paths, "made": said, "first": found.first or None, "next": command}))
        return 0
    print(config, data, sep="\n")
    if found.first:
        print(
            f"{found.name} goes on from a run of {found.first}: regard recipes copy {found.first} and regard train "
            f"{found.first}.toml come first; or name another model with --model.folder FOLDER",
            file=sys.stderr,
        )
    print(f"next: {command}", file=sys.stderr)
    return 0


def told(found: Recipe) -> dict[str, Any]:
    """What is known about a recipe."""
    names = ("name", "what", "size", "time", "data")
    return {name: getattr(found, name) for name in names} | {"first": found.first or None}


def listed(found: list[Recipe], as_json: bool) -> str:
    if as_json:
        return json.dumps([told(r) for r in found])
    rows = [
        ("recipe", "parameters", "two cores", "what"),
        *((r.name, r.size, r.time, r.what) for r in found),
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths)), row[3]]) for row in rows]
    return "\n".join(lines)
