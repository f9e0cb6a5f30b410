"""regard recipes: configs that are known to work, each with its data."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from regard.cli.shared import Switch
from regard.errors import UsageError
from regard.see.format import aligned

if TYPE_CHECKING:
    from regard.recipes import Recipe


@dataclass(frozen=True)
class Options:
    """Configs that are known to work, each with its data.

    regard recipes list
    regard recipes show dates
    regard recipes copy dates my-dates       writes my-dates.toml and its data
    """

    # list, show or copy
    action: Annotated[Positional[Literal["list", "show", "copy"]], arg(metavar="ACTION")] = "list"
    name: Annotated[Positional[str | None], arg(metavar="[RECIPE]")] = None  # which recipe
    # copy: name of the new file, without .toml; default: the recipe's
    to: Annotated[Positional[str | None], arg(metavar="[TO]")] = None
    json: Switch = False  # one JSON object


def run(options: Options) -> int:
    from regard.recipes import NAMES, copy, recipe

    action, name = options.action, options.name
    if action == "list":
        if name is not None:
            raise UsageError(f"list shows all recipes; see one by: regard recipes show {name}")
        listed = [recipe(name) for name in NAMES]
        rows = ((r.name, r.size, r.time, r.what) for r in listed)
        table = aligned([("recipe", "parameters", "two cores", "what"), *rows])
        print(json.dumps([facts(r) for r in listed]) if options.json else table)
        return 0
    if name is None:
        names = ", ".join(NAMES)
        raise UsageError(f"say which recipe: regard recipes {action} NAME, one of {names}")
    chosen = recipe(name)
    if action == "show":
        if options.to is not None:
            raise UsageError("show takes one recipe; to write it somewhere: regard recipes copy")
        whole = json.dumps({**facts(chosen), "text": chosen.text}) + "\n"
        sys.stdout.write(whole if options.json else chosen.text)
        return 0
    to = Path(options.to or name)
    to = to / name if options.to and to.is_dir() else to
    print(f"making the data of {name}", file=sys.stderr, flush=True)
    config, data, about = copy(name, Path(str(to).removesuffix(".toml")))
    print(about, file=sys.stderr)
    first, command = chosen.first, f"regard train {config}"
    if options.json:
        paths = {"config": str(config), "data": str(data)}
        print(json.dumps({**paths, "made": about, "first": first or None, "next": command}))
        return 0
    print(config, data, sep="\n")
    if first:
        print(
            f"{name} goes on from a run of {first}: regard recipes copy {first} and regard train {first}.toml come "
            "first; or name another model with --model.folder FOLDER",
            file=sys.stderr,
        )
    print(f"next: {command}", file=sys.stderr)
    return 0


def facts(chosen: Recipe) -> dict[str, Any]:
    """What is known about a recipe."""
    names = ("name", "what", "size", "time", "data")
    return {name: getattr(chosen, name) for name in names} | {"first": chosen.first or None}
