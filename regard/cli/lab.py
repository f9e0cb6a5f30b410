"""regard lab: experiments by one command each."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Annotated, Any

from tyro.conf import Positional, arg

from regard.cli.shared import Files, FolderName, Switch
from regard.errors import UsageError
from regard.see.format import aligned


@dataclass(frozen=True)
class Options:
    """An experiment: trained for three seeds, measured, and told on one page with tables and plots.

    regard lab                             the experiments, and the time each needs
    regard lab bottleneck                  writes runs/lab-bottleneck/page.html and results.json
    regard lab bottleneck --quick          a tiny form of it, to see that all works
    regard lab ablations --data my.txt     on your own text
    """

    name: Annotated[Positional[str | None], arg(metavar="[NAME]")] = None  # which experiment
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

    if options.name is None:
        given = {n: x for n, x in vars(options).items() if n not in ("name", "json", "device")}
        if any(given.values()):
            raise UsageError("say which lab: regard lab NAME; regard lab lists them")
        rows = [{"lab": x["name"], "time": x["time"], "what": x["what"]} for x in map(read, NAMES)]
        table = aligned([tuple(rows[0]), *(tuple(row.values()) for row in rows)])
        print(json.dumps(rows) if options.json else table)
        return 0
    more = {n: x for n, x in vars(options).items() if n not in ("name", "output_dir", "json")}
    result = lab(options.name, options.output_dir, **more, callbacks=[tell])
    print(json.dumps(vars(result), default=str) if options.json else result.page)
    return 0


def tell(event: dict[str, Any]) -> None:
    """How it goes, on stderr."""
    if event["kind"] == "case":
        print(event["text"], file=sys.stderr, flush=True)
    elif event["kind"] == "evaluation":
        print(f"  step {event['step']}: loss {event['loss']:.4f}", file=sys.stderr, flush=True)
