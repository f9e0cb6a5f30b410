"""regard compare: runs side by side, as a table, as JSON, or as a page."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from regard.cli.parse import Switch
from regard.cli.report import SCHEMA, checked, save
from regard.errors import UsageError


@dataclass(frozen=True)
class Options:
    """Runs side by side: what differs in their settings, and their curves and figures.

    regard compare runs/a runs/b                      a table
    regard compare runs/a runs/b --output compare.html
    """

    runs: Annotated[Positional[tuple[str, ...]], arg(metavar="RUN")]
    """two folders of runs or more"""
    output: Annotated[str | None, arg(metavar="FILE")] = None
    """also write one HTML page, or Markdown"""
    json: Switch = False
    """one JSON object"""


def run(options: Options) -> int:
    from regard.report.run import comparison, differing, labels, read, summary, table
    from regard.see.format import strict

    if len(options.runs) < 2:
        raise UsageError("compare needs two runs or more: regard compare runs/a runs/b")
    path = checked(options.output)
    runs = [read(folder) for folder in options.runs]
    for each in runs:
        for note in each.notes:
            print(f"note: {each.folder}: {note}", file=sys.stderr)
    if options.json:
        figures = [summary(each).json() for each in runs]
        rows = [{"run": name, **figure} for name, figure in zip(labels(runs), figures)]
        facts = {"schema": SCHEMA, "differs": strict(differing(runs)), "runs": rows}
        print(json.dumps(facts, ensure_ascii=False))
    else:
        print(table(runs))
    if path is not None:
        save(path, "Compared: " + ", ".join(labels(runs)), comparison(runs))
        print(f"wrote {path}", file=sys.stderr)
    return 0
