"""regard look: what a model attends to, as one page or as pictures."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from regard.cli.parse import Count, Folder, Machine
from regard.cli.shared import open_model, read_text
from regard.errors import DATA, ENVIRONMENT, Fault, UsageError
from regard.see.format import clip, visible

PAGES, PICTURES = (".html", ".htm"), (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Options:
    """What a model attends to while it reads a text: one page of HTML, or pictures.

    regard look MODEL "the king said to the queen"              writes look.html
    regard look MODEL "guten Morgen" --target "good morning"    an encoder-decoder, with this translation
    regard look MODEL --image cat.png                           a vision model
    regard look MODEL "the king" --compare OTHER                two models side by side
    """

    model: Folder
    text: Annotated[Positional[str | None], arg(metavar="[TEXT]")] = None
    """what the model reads; - is stdin"""
    output: Annotated[str, arg(metavar="FILE")] = "look.html"
    """.html: one page; .png, .svg or .pdf: pictures of all heads, of the head asked for, and of the alignment"""
    target: Annotated[str | None, arg(metavar="TEXT")] = None
    """what an encoder-decoder writes; default: what it writes by itself, greedily"""
    image: Annotated[str | None, arg(metavar="FILE")] = None
    """the picture that a vision model reads"""
    layer: Count = None
    """show this layer first; of a long text its head is on the page in full"""
    head: Count = None
    """show this head first"""
    compare: Annotated[str | None, arg(metavar="MODEL")] = None
    """a second model that reads the same, beside the first"""
    machine: Machine = field(default_factory=Machine)


def run(options: Options) -> int:
    from regard.report.run import write
    from regard.see.look import look
    from regard.see.page import page

    path = checked(options)
    text = read_text("-") if options.text == "-" else options.text or ""
    names = [options.model] if options.compare is None else [options.model, options.compare]
    panels = []
    for folder, title in zip(names, titles(names)):
        opened = open_model(folder, options.machine, 1)
        panel = look(
            opened.model,
            opened.tokenizer,
            title,
            text,
            image=options.image,
            target=options.target,
            layer=options.layer,
            head=options.head,
            precision=opened.precision,
            compared=options.compare is not None,
        )
        panels.append(panel)
    what = clip(visible(text), 80) if text else Path(options.image or "").name
    if path.suffix.lower() in PAGES:
        write(path, page(f"What is attended to in “{what}”", panels))
        print(path)
        return 0
    from regard.see.plots import pictures

    for name in pictures(path, panels[0], what):
        print(name)
    return 0


def checked(options: Options) -> Path:
    """The file to write, before any work is done for it."""
    path, drawn = Path(options.output), options.output.lower().endswith(PICTURES)
    if path.suffix.lower() not in (*PAGES, *PICTURES):
        raise UsageError(
            f"--output {path}: give a name that ends in .html, or in {', '.join(PICTURES)}"
        )
    if not path.parent.is_dir():
        raise UsageError(f"--output {path}: there is no folder {path.parent}; make it first")
    if not writable(path):
        raise UsageError(f"--output {path} cannot be written; name a file in a folder of yours")
    if drawn and options.compare is not None:
        raise UsageError(
            "--compare puts two models on one page; give --output a name that ends in .html"
        )
    if drawn:
        try:
            import matplotlib.backends.backend_agg  # noqa: F401
        except ImportError:
            raise Fault(
                "pictures need matplotlib: pip install 'regard[plots]', or --output look.html",
                ENVIRONMENT,
            ) from None
    if options.image is not None and not Path(options.image).is_file():
        raise Fault(f"--image {options.image} is no file; give a PNG or JPEG", DATA)
    return path


def writable(path: Path) -> bool:
    """Whether the file can be replaced, found by writing beside it: rights alone do not tell."""
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            return not path.is_dir() and (not path.exists() or os.access(path, os.W_OK))
    except OSError:
        return False


def titles(folders: Sequence[str]) -> list[str]:
    """A name for each model: its folder's, with the run's where that is best, last or a step; else
    the path."""
    names = []
    for folder in folders:
        *above, last = (p for p in Path(os.path.abspath(folder)).parts if p != "checkpoints")
        inside = above and (last in ("best", "last") or last.startswith("step-"))
        names.append(f"{above[-1]}/{last}" if inside else last)
    return names if len(set(names)) == len(names) else list(folders)
