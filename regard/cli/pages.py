"""Pages of HTML: regard look, what a model attends to, also as pictures; regard report, a run's folder; and regard
compare, runs side by side."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from regard.cli import shared as cli
from regard.cli.main import tell
from regard.errors import DATA, ENVIRONMENT, Fault, UsageError
from regard.files import write_whole
from regard.see.format import clip, strict, visible

if TYPE_CHECKING:
    from regard.report.run import Run

SCHEMA = 1
PAGES, MARKDOWN = (".html", ".htm"), (".md", ".markdown")
PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class LookOptions:
    """What a model attends to while it reads a text: one page of HTML, or pictures.

    regard look MODEL "the king said to the queen"              writes look.html
    regard look MODEL "guten Morgen" --target "good morning"    an encoder-decoder, with this translation
    regard look MODEL --image cat.png                           a vision model
    regard look MODEL "the king" --compare OTHER                two models side by side
    """

    model: cli.Folder
    # what the model reads; - is stdin
    text: Annotated[Positional[str | None], arg(metavar="[TEXT]")] = None
    # .html: one page; .png, .svg or .pdf: pictures of all heads, of the head asked for, and of the
    # alignment
    output: Annotated[str, arg(metavar="FILE")] = "look.html"
    # what an encoder-decoder writes; default: what it writes by itself, greedily
    target: cli.Text = None
    image: cli.FileName = None  # the picture that a vision model reads
    # a second model that reads the same, beside the first
    compare: Annotated[str | None, arg(metavar="MODEL")] = None
    layer: cli.Count = None  # show this layer first; of a long text its head is on the page in full
    head: cli.Count = None  # show this head first
    machine: cli.Machine = cli.Machine()


def look(options: LookOptions) -> int:
    from regard.see.look import look
    from regard.see.page import page

    endings = f".html, or in {', '.join(PICTURES)}"
    path = cli.output_file(options.output, (*PAGES, *PICTURES), endings)
    drawn = path.suffix.lower() in PICTURES
    if drawn and options.compare is not None:
        raise UsageError(
            "--compare puts two models on one page; give --output a name that ends in .html"
        )
    if drawn and importlib.util.find_spec("matplotlib") is None:
        what = "pip install 'regard[plots]', or --output look.html"
        raise Fault(f"pictures need matplotlib: {what}", ENVIRONMENT)
    if options.image is not None and not Path(options.image).is_file():
        raise Fault(f"--image {options.image} is not a file; give a PNG or JPEG", DATA)
    text = cli.given_text(options.text or "")
    names = [options.model] if options.compare is None else [options.model, options.compare]
    asked = {name: getattr(options, name) for name in ("image", "target", "layer", "head")}
    panels = []
    for folder, title in zip(names, titles(names)):
        opened = cli.open_model(folder, options.machine)
        how: Any = {"precision": opened.precision, "compared": options.compare is not None}
        panels.append(look(opened.model, opened.tokenizer, title, text, **asked, **how))
    what = clip(visible(text), 80) if text else Path(options.image or "").name
    if not drawn:
        write_whole(path, page(f"What is attended to in “{what}”", panels))
        print(path)
        return 0
    from regard.see.plots import pictures

    for name in pictures(path, panels[0], what):
        print(name)
    return 0


def titles(folders: Sequence[str]) -> list[str]:
    """A name for each model: its folder's, with the run's where that is best, last or a step; else
    the path."""
    names = []
    for folder in folders:
        *above, last = (p for p in Path(os.path.abspath(folder)).parts if p != "checkpoints")
        inside = above and (last in ("best", "last") or last.startswith("step-"))
        names.append(f"{above[-1]}/{last}" if inside else last)
    return names if len(set(names)) == len(names) else list(folders)


@dataclass(frozen=True)
class ReportOptions:
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


def report(options: ReportOptions) -> int:
    from regard.report.run import look, report, summary

    path, (record,) = opened(options.output, [options.run])
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


def compare(options: CompareOptions) -> int:
    from regard.report.run import comparison, differing, labels, summary, table

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
        print(f"wrote {path}", file=sys.stderr)
    return 0


def opened(output: str | None, folders: Sequence[str]) -> tuple[Path | None, list[Run]]:
    """The file of --output, checked before any work is done for it, and the runs."""
    from regard.report.run import read

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
