"""regard report: a run's folder as one page."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from regard.cli.options_work import Report
from regard.errors import UsageError
from regard.report.heads import look
from regard.report.page import Block, as_html, as_markdown
from regard.report.run import report, write
from regard.report.runs import read, strict, summary

SCHEMA = 1
PAGES = {".html": as_html, ".htm": as_html, ".md": as_markdown, ".markdown": as_markdown}


def run(options: Report) -> int:
    path = checked(options.output)
    found = read(options.run)
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    if options.json:
        more = {"evaluations": found.evaluations, "samples": len(found.samples)}
        told = {**summary(found).json(), **strict(more), "notes": found.notes}
        print(json.dumps({"schema": SCHEMA, "run": found.name, **told}, ensure_ascii=False))
        return 0
    path = path or found.folder / "report.html"
    save(path, found.name, report(found, *look(found)))
    print(summary(found).verdict, file=sys.stderr)
    print(path)
    return 0


def checked(output: str | None) -> Path | None:
    """The file of --output, before any work is done for it."""
    if output is None:
        return None
    path = Path(output)
    if path.suffix.lower() not in PAGES:
        raise UsageError(f"--output {output}: give a name that ends in .html or .md")
    if not path.parent.is_dir():
        raise UsageError(f"--output {output}: there is no folder {path.parent}; make it first")
    return path


def save(path: Path, title: str, blocks: list[Block]) -> None:
    write(path, PAGES[path.suffix.lower()](title, blocks))
