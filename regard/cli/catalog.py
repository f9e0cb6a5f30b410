"""What there is by name: regard presets (models), regard recipes (configs that are known to work, with their data),
regard lab (experiments), regard explain (mechanisms)."""

from __future__ import annotations

import ast
import json
import sys
from dataclasses import asdict, dataclass, fields, make_dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from regard.cli.shared import Files, FolderName, Switch, output_file
from regard.errors import UsageError, check_choice
from regard.see.format import aligned

if TYPE_CHECKING:
    from regard.recipes import Recipe

Name = Annotated[Positional[str | None], arg(metavar="[NAME]")]


def print_rows(rows: list[dict[str, Any]], as_json: bool, right: tuple[int, ...] = ()) -> int:
    """A list, as a table with a head or as JSON."""
    table = [tuple(rows[0]), *(tuple(row.values()) for row in rows)]
    print(json.dumps(rows) if as_json else aligned(table, right))
    return 0


@dataclass(frozen=True)
class PresetsOptions:
    """Models by name, for [model] preset = "NAME" and regard.build("NAME").

    regard presets               the list, with sizes
    regard presets gpt2          every setting of one, which [model] can change
    """

    name: Name = None  # which one
    json: Switch = False  # one JSON object


def presets(options: PresetsOptions) -> int:
    from regard.cli.settings import sizes_of
    from regard.config import to_dict
    from regard.models.base import parameters
    from regard.presets import PRESETS, build
    from regard.train.config import _written
    from regard.train.trainer import flat

    if options.name is None:
        head = ("preset", "family", "layers", "dim", "heads", "vocab")
        rows = ((n, family, *sizes_of(make())) for n, (family, make) in PRESETS.items())
        return print_rows([dict(zip(head, row)) for row in rows], options.json, (2, 3, 4, 5))
    check_choice("preset", options.name, PRESETS)
    config = to_dict(PRESETS[options.name][1]())
    count = parameters(build(options.name, device="meta"))
    if options.json:
        print(json.dumps({"preset": options.name, "parameters": count, "config": config}))
        return 0
    print(f'# {count:,} parameters; [model] preset = "{options.name}", and any of these changed')
    for name, value in flat(config).items():
        # Layers that differ are listed one by one; those alike are shown once.
        each = value if isinstance(value, list) else [value]
        for same, run in groupby(enumerate(each), lambda pair: pair[1]):
            at = [i for i, _ in run]
            layers = f"  # layers {at[0] + 1} to {at[-1] + 1}" if len(each) > 1 else ""
            print(f"{name} = {'none' if same is None else _written(same)}{layers}")
    return 0


@dataclass(frozen=True)
class RecipesOptions:
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


def recipes(options: RecipesOptions) -> int:
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


@dataclass(frozen=True)
class LabOptions:
    """An experiment: trained for three seeds, measured, and told on one page with tables and plots.

    regard lab                             the experiments, and the time each needs
    regard lab bottleneck                  writes runs/lab-bottleneck/page.html and results.json
    regard lab bottleneck --quick          a tiny form of it, to see that all works
    regard lab ablations --data my.txt     on your own text
    """

    name: Name = None  # which experiment
    data: Files = ()  # your own text instead of the lab's; may be given several times
    seeds: tuple[int, ...] = ()  # default: 1 2 3
    variants: tuple[str, ...] = ()  # some of them alone; default: all
    output_dir: FolderName = None  # where it is written, and goes on; default: runs/lab-NAME
    quick: Switch = False  # a tiny form of it, to see that all works
    force: Switch = False  # although this machine is too small
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    json: Switch = False  # one JSON object


def lab(options: LabOptions) -> int:
    from regard.labs.run import NAMES, lab, read

    given = dict(vars(options))
    name, as_json = given.pop("name"), given.pop("json")
    if name is None:
        if any(x for n, x in given.items() if n != "device"):
            raise UsageError("say which lab: regard lab NAME; regard lab lists them")
        labs = map(read, NAMES)
        rows = [{"lab": x["name"], "time": x["time"], "what": x["what"]} for x in labs]
        return print_rows(rows, as_json)

    def tell(event: dict[str, Any]) -> None:
        text = event.get("text")
        if event["kind"] == "evaluation":
            text = f"  step {event['step']}: loss {event['loss']:.4f}"
        if event["kind"] in ("case", "evaluation"):
            print(text, file=sys.stderr, flush=True)

    result = lab(name, given.pop("output_dir"), **given, callbacks=[tell])
    print(json.dumps(vars(result), default=str) if as_json else result.page)
    return 0


def told(text: str, metavar: str = "N ...") -> Any:
    return arg(metavar=metavar, help=text, help_behavior_hint="")


@dataclass(frozen=True)
class Question:
    """A mechanism in a formula, in numbers that you may change, and the file that implements it.

    regard explain                                            the topics, by chapter
    regard explain positional encoding                        any word for a topic will do
    regard explain softmax 1 2 3                              numbers: the first thing that a topic takes
    regard explain online-softmax --x 1 3 2 --v 1 2 3         one step per key
    regard explain attention --q "1 0; 0 1" --k "1 0; 0 1; 1 1" --v "1; 2; 4"
    regard explain transformer --output transformer.png       the picture of a topic
    """

    topic: Annotated[Positional[str | None], told("what to explain", "[TOPIC]")] = None
    numbers: Annotated[Positional[tuple[str, ...]], told("for its first option", "[N ...]")] = ()
    output: Annotated[str | None, told("draw its numbers: .png, .svg or .pdf", "FILE")] = None
    json: Annotated[Switch, arg(help="one JSON object")] = False


def _flags() -> list[tuple[str, Any, None]]:
    """An option for each input of a topic, and which topics take it; read from their source, as
    importing them would import torch, for which help need not wait."""
    takers: dict[str, list[str]] = {}
    source = Path(__file__).parents[1] / "learn" / "mechanisms.py"
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        marks = [ast.unparse(mark) for mark in getattr(node, "decorator_list", ())]
        if isinstance(node, ast.FunctionDef) and any(m.startswith("topic(") for m in marks):
            for each in node.args.args:
                takers.setdefault(each.arg, []).append(node.name.strip("_").replace("_", "-"))
    kind = tuple[str, ...] | None
    return [(n, Annotated[kind, told(f"for {', '.join(t)}")], None) for n, t in takers.items()]


ExplainOptions = make_dataclass("ExplainOptions", _flags(), bases=(Question,), frozen=True)
ExplainOptions.__doc__ = Question.__doc__


def explain(options: Question) -> int:
    from regard.learn.explain import called, explained, listed

    own = {field.name for field in fields(Question)}
    given = {n: x for n, x in asdict(options).items() if n not in own and x is not None}
    if options.topic is None:
        if given or options.output:
            raise UsageError("say which topic: regard explain TOPIC; regard explain lists them")
        print(listed(options.json))
        return 0
    said = explained(options.topic, options.numbers, given, as_json=options.json)
    if options.output:
        from regard.learn.picture import drawn
        from regard.see.plots import FORMATS, save

        path = output_file(options.output, tuple(FORMATS), ".png, .svg or .pdf")
        save(drawn(*called(options.topic, options.numbers, given)), path)
    print(said)
    return 0
