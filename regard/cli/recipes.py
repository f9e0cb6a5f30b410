"""regard recipes: configs that are known to work, each with its data."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from regard.cli.shared import FolderName, Switch, say
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
    regard recipes run prefer --smoke        trains it, and first the recipe that it goes on from; here in three steps
    """

    # list, show, copy or run
    action: Annotated[Positional[Literal["list", "show", "copy", "run"]], arg(metavar="ACTION")] = (
        "list"
    )
    name: Annotated[Positional[str | None], arg(metavar="[RECIPE]")] = None  # which recipe
    # copy, run: name of the new file, without .toml; default: the recipe's
    to: Annotated[Positional[str | None], arg(metavar="[TO]")] = None
    # copy, run: the run or model that it goes on from; default: of the recipe that comes first
    first: FolderName = None
    smoke: Switch = False  # run: three steps of each, into runs/NAME-smoke
    json: Switch = False  # one JSON object


def run(options: Options) -> int:
    from regard.recipes import NAMES, recipe

    action, name = options.action, options.name
    if action == "list":
        if name is not None:
            raise UsageError(f"list shows all recipes; see one by: regard recipes show {name}")
        listed = [recipe(name) for name in NAMES]
        rows = ((r.name, r.size, r.time, r.first or "-", r.what) for r in listed)
        table = aligned([("recipe", "parameters", "two cores", "after", "what"), *rows])
        print(json.dumps([described(r) for r in listed]) if options.json else table)
        return 0
    if name is None:
        names = ", ".join(NAMES)
        raise UsageError(f"say which recipe: regard recipes {action} NAME, one of {names}")
    chosen = recipe(name)
    if action == "show":
        if options.to is not None:
            raise UsageError("show takes one recipe; to write it somewhere: regard recipes copy")
        whole = json.dumps({**described(chosen), "text": chosen.text}) + "\n"
        sys.stdout.write(whole if options.json else chosen.text)
        return 0
    if options.first is not None and not chosen.first:
        raise UsageError(f"--first is for a recipe that goes on from a run; {name} begins anew")
    to = Path(options.to or name)
    to = to / name if options.to and to.is_dir() else to
    to = to.with_name(to.name.removesuffix(".toml"))
    return train(options, name, to) if action == "run" else copy(options, chosen, to)


def copy(options: Options, chosen: Recipe, to: Path) -> int:
    """Write the config and its data, and those of earlier recipes that are not there yet."""
    from regard.recipes import stages

    *before, last = stages(chosen.name, to)
    before = [stage for stage in before if not (options.first or there(stage[1]))]
    made = [written(*stage, options.first) for stage in (*before, last)]
    commands = [f"regard train {config}" for config, _, _ in made]
    if options.json:
        config, data, about = made[-1]
        facts: dict[str, Any] = {"config": str(config), "data": str(data), "made": about}
        facts |= {"first": chosen.first or None, "before": commands[:-1], "next": commands[-1]}
        print(json.dumps(facts))
        return 0
    for config, data, _ in made:
        print(config, data, sep="\n")
    for i, command in enumerate(commands):
        say(f"{'then' if i else 'next'}: {command}")
    return 0


def train(options: Options, name: str, to: Path) -> int:
    """Train a recipe, and before it those that it goes on from, unless their runs are there."""
    from regard.cli.train import Options as TrainOptions
    from regard.cli.train import Run
    from regard.cli.train import run as start
    from regard.recipes import stages
    from regard.training.run import begun, finished

    home, smoke = Path("runs"), options.smoke
    folder, code = options.first, 0
    for each, place in stages(name, to)[-1 if options.first else 0 :]:
        config, run = place.with_name(f"{place.name}.toml"), home / place.name
        if not config.exists() and not begun(run):
            written(each, place, options.first)
        # What the config says, unless it is another folder.
        other = folder and (smoke or options.first)
        changes = {"model.folder": str(Path(folder).resolve())} if folder and other else {}
        folder = f"{run}-smoke" if smoke else str(run)
        if not smoke and finished(run):
            say(f"{run} is there, and done")
            continue
        resume = not smoke and begun(run)
        source = str(run if resume else config)
        flags = Run(smoke=smoke, changes=changes)
        say(f"regard train {'--resume ' if resume else ''}{source}")
        if code := start(TrainOptions(source, resume, flags)):
            return code
    return code


def there(place: Path) -> bool:
    """Whether a recipe was copied to this place, or its run has begun."""
    from regard.training.run import begun

    return place.with_name(f"{place.name}.toml").exists() or begun(Path("runs", place.name))


def written(name: str, place: Path, first: str | None) -> tuple[Path, Path, str]:
    """Copy a recipe; its config, its data, and a sentence about the data."""
    from regard.recipes import copy

    say(f"making the data of {name}")
    config, data, about = copy(name, place, None if first is None else Path(first))
    say(about)
    return config, data, about


def described(chosen: Recipe) -> dict[str, Any]:
    """What is known about a recipe."""
    names = ("name", "what", "size", "time", "data")
    return {name: getattr(chosen, name) for name in names} | {"first": chosen.first or None}
