"""regard lab: an experiment, trained and measured for three seeds, as a page."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from regard.cli.shared import Files, FolderName, Name, Switch, print_rows, say
from regard.errors import UsageError


@dataclass(frozen=True)
class Options:
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


def run(options: Options) -> int:
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
        text = event.get("text", "")
        if event["kind"] == "evaluation":
            text = f"  step {event['step']}: loss {event['loss']:.4f}"
        if event["kind"] in ("case", "evaluation"):
            say(text)

    result = lab(name, given.pop("output_dir"), **given, callbacks=[tell])
    print(json.dumps(vars(result), default=str) if as_json else result.page)
    return 0
