"""regard report: a run's folder as one page of HTML; regard compare: runs side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from regard.cli import shared as cli
from regard.cli.main import tell
from regard.errors import UsageError
from regard.files import write_whole
from regard.see.format import strict

if TYPE_CHECKING:
    from regard.report.folder import Run

SCHEMA = 1
PAGES, MARKDOWN = (".html", ".htm"), (".md", ".markdown")


@dataclass(frozen=True)
class Options:
    """A run as one self-contained HTML page: curves, samples, attention, how to reproduce it.

    regard report runs/story                      writes runs/story/report.html
    """

    run: Annotated[Positional[str], arg(metavar="RUN")]  # the folder of a run
    # default: report.html in the run's folder; a name that ends in .md gives Markdown
    output: cli.FileName = None
    # what the report says, as one JSON object on stdout; nothing is written
    json: cli.Switch = False


@dataclass(frozen=True)
class CompareOptions:
    """Runs side by side: what differs in their settings, and their curves and figures.

    regard compare runs/a runs/b                      a table
    regard compare runs/a runs/b --output compare.html
    """

    # two folders of runs or more
    runs: Annotated[Positional[tuple[str, ...]], arg(metavar="RUN")]
    output: cli.FileName = None  # also write one HTML page, or Markdown
    json: cli.Switch = False  # one JSON object


def run(options: Options) -> int:
    from regard.report.folder import summary
    from regard.report.run import look, report

    path, (record,) = opened(options.output, [options.run])
    if options.json:
        more = {"evaluations": record.evaluations, "samples": len(record.samples)}
        facts = {**summary(record).json(), **strict(more), "notes": record.notes}
        print(json.dumps({"schema": SCHEMA, "run": record.name, **facts}, ensure_ascii=False))
        return 0
    path = path or record.folder / "report.html"
    save(path, record.name, report(record, *look(record)))
    cli.say(summary(record).verdict)
    print(path)
    return 0


def compare(options: CompareOptions) -> int:
    from regard.report.compare import comparison, differing, labels, table
    from regard.report.folder import summary

    if len(options.runs) < 2:
        raise UsageError("compare needs two runs or more: regard compare runs/a runs/b")
    path, runs = opened(options.output, options.runs)
    if options.json:
        rows = [{"run": name, **summary(x).json()} for name, x in zip(labels(runs), runs)]
        facts = {"schema": SCHEMA, "differs": strict(differing(runs)), "runs": rows}
        print(json.dumps(facts, ensure_ascii=False))
    else:
        print(table(runs))
    if path is not None:
        save(path, "Compared: " + ", ".join(labels(runs)), comparison(runs))
        cli.say(f"wrote {path}")
    return 0


def opened(output: str | None, folders: Sequence[str]) -> tuple[Path | None, list[Run]]:
    """The file of --output, checked before any work is done for it, and the runs."""
    from regard.report.folder import read

    endings = (*PAGES, *MARKDOWN)
    path = None if output is None else cli.output_file(output, endings, ".html or .md")
    runs = [read(folder) for folder in folders]
    for each in runs:
        for note in each.notes:
            tell("note", note if len(runs) == 1 else f"{each.folder}: {note}")
    return path, runs


def save(path: Path, title: str, blocks: list[Any]) -> None:
    from regard.report.page import as_html, as_markdown

    page = as_markdown if path.suffix.lower() in MARKDOWN else as_html
    write_whole(path, page(title, blocks))
