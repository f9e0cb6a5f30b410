"""regard explain: a mechanism as formula, numbers and code."""

from __future__ import annotations

import ast
from dataclasses import asdict, dataclass, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from regard.cli.shared import Switch, output_file
from regard.errors import UsageError


def flag(text: str, metavar: str = "N ...") -> Any:
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
    regard explain --interview 6                              a question of interviews, derived and in numbers
    """

    topic: Annotated[Positional[str | None], flag("what to explain", "[TOPIC]")] = None
    numbers: Annotated[Positional[tuple[str, ...]], flag("for its first option", "[N ...]")] = ()
    output: Annotated[str | None, flag("draw its numbers: .png, .svg or .pdf", "FILE")] = None
    interview: Annotated[
        tuple[int, ...] | None, flag("a question of interviews, or their list", "[N]")
    ] = None
    json: Annotated[Switch, arg(help="one JSON object")] = False


def _flags() -> list[tuple[str, Any, None]]:
    """An option for each input of a topic, and which topics take it. They are read from the sources:
    importing them would import torch, and help does not wait for that."""
    takers: dict[str, list[str]] = {}
    folder = Path(__file__).parents[1] / "learn"
    texts = (file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.py")))
    for node in (node for text in texts for node in ast.parse(text).body):
        marks = [ast.unparse(mark) for mark in getattr(node, "decorator_list", ())]
        if isinstance(node, ast.FunctionDef) and any(m.startswith("topic(") for m in marks):
            for each in node.args.args:
                takers.setdefault(each.arg, []).append(node.name.strip("_").replace("_", "-"))
    kind = tuple[str, ...] | None
    return [(n, Annotated[kind, flag(f"for {', '.join(t)}")], None) for n, t in takers.items()]


Options = make_dataclass("Options", _flags(), bases=(Question,), frozen=True)
Options.__doc__ = Question.__doc__


def run(options: Question) -> int:
    from regard.learn.explain import called, explained, listed

    own = {field.name for field in fields(Question)}
    given = {n: x for n, x in asdict(options).items() if n not in own and x is not None}
    if options.interview is not None:
        return _interview(options, given)
    if options.topic is None:
        if given or options.output:
            raise UsageError("say which topic: regard explain TOPIC; regard explain lists them")
        print(listed(options.json))
        return 0
    text = explained(options.topic, options.numbers, given, as_json=options.json)
    if options.output:
        _draw(options.output, *called(options.topic, options.numbers, given))
    print(text)
    return 0


def _interview(options: Any, given: dict[str, Any]) -> int:
    from regard.learn.explain import described
    from regard.learn.interview import asked, listed

    wanted = options.interview
    if options.topic is not None or given or len(wanted) > 1 or (options.output and not wanted):
        raise UsageError(
            "--interview stands alone, with the number of a question or without; "
            "--output FILE and --json go with it: regard explain --interview 6"
        )
    if wanted and options.output:
        _draw(options.output, asked(wanted[0]), {})
    print(described(asked(wanted[0]), {}, options.json) if wanted else listed(options.json))
    return 0


def _draw(output: str, topic: Any, values: dict[str, Any]) -> None:
    from regard.learn.picture import drawn
    from regard.see.plots import FORMATS, save

    path = output_file(output, tuple(FORMATS), ".png, .svg or .pdf")
    save(drawn(topic, values), path)
