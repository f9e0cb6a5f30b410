"""regard compare: runs side by side, as a table, as JSON, or as a page."""

from __future__ import annotations

import json
import sys

from regard.cli.options_work import Compare
from regard.cli.report import SCHEMA, checked, save
from regard.errors import UsageError
from regard.report.run import aligned, comparison, differing, labels
from regard.report.runs import read, strict, summary


def run(options: Compare) -> int:
    if len(options.runs) < 2:
        raise UsageError("compare needs two runs or more: regard compare runs/a runs/b")
    path = checked(options.output)
    runs = [read(folder) for folder in options.runs]
    for each in runs:
        for note in each.notes:
            print(f"note: {each.folder}: {note}", file=sys.stderr)
    if options.json:
        figures = [summary(each).json() for each in runs]
        found = [{"run": name, **figure} for name, figure in zip(labels(runs), figures)]
        told = {"schema": SCHEMA, "differs": strict(differing(runs)), "runs": found}
        print(json.dumps(told, ensure_ascii=False))
    else:
        print(aligned(runs))
    if path is not None:
        save(path, "Compared: " + ", ".join(labels(runs)), comparison(runs))
        print(f"wrote {path}", file=sys.stderr)
    return 0
