"""regard report: a run's folder as one page."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from regard.cli.parse import Switch
from regard.errors import UsageError

SCHEMA = 1
MARKDOWN = (".md", ".markdown")


@dataclass(frozen=True)
class Options:
    """A run as one self-contained HTML page: curves, samples, attention, how to reproduce it.

    regard report runs/story                      writes runs/story/report.html
    """

    run: Annotated[Positional[str], arg(metavar="RUN")]
    """the folder of a run"""
    output: Annotated[str | None, arg(metavar="FILE")] = None
    """default: report.html in the run's folder; a name that ends in .md gives Markdown"""
    json: Switch = False
    """what the report says, as one JSON object on stdout; nothing is written"""


def run(options: Options) -> int:
    from regard.report.run import look, read, report, summary
    from regard.see.format import strict

    path = checked(options.output)
    record = read(options.run)
    for note in record.notes:
        print(f"note: {note}", file=sys.stderr)
    if options.json:
        more = {"evaluations": record.evaluations, "samples": len(record.samples)}
        facts = {**summary(record).json(), **strict(more), "notes": record.notes}
        print(json.dumps({"schema": SCHEMA, "run": record.name, **facts}, ensure_ascii=False))
        return 0
    path = path or record.folder / "report.html"
    save(path, record.name, report(record, *look(record)))
    print(summary(record).verdict, file=sys.stderr)
    print(path)
    return 0


def checked(output: str | None) -> Path | None:
    """The file of --output, before any work is done for it."""
    if output is None:
        return None
    path = Path(output)
    if path.suffix.lower() not in (".html", ".htm", *MARKDOWN):
        raise UsageError(f"--output {output}: give a name that ends in .html or .md")
    if not path.parent.is_dir():
        raise UsageError(f"--output {output}: there is no folder {path.parent}; make it first")
    return path


def save(path: Path, title: str, blocks: list[Any]) -> None:
    from regard.report.page import as_html, as_markdown
    from regard.report.run import write

    page = as_markdown if path.suffix.lower() in MARKDOWN else as_html
    write(path, page(title, blocks))
