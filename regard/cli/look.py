"""regard look: what a model attends to, as one page of HTML or as pictures."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from regard.cli import shared as cli
from regard.errors import DATA, ENVIRONMENT, Fault, UsageError
from regard.files import write_whole
from regard.see.format import clip, visible

PAGES, PICTURES = (".html", ".htm"), (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Options:
    """What a model attends to while it reads a text: one page of HTML, or pictures.

    regard look MODEL "the king said to the queen"              writes look.html
    regard look MODEL "guten Morgen" --target "good morning"    an encoder-decoder, with this translation
    regard look MODEL --image cat.png                           a vision model
    regard look MODEL "the king" --compare OTHER                two models side by side
    regard look MODEL "the king saw the king" --heads           every head in numbers, the sharpest first
    """

    model: cli.Folder
    # what the model reads; - is stdin
    text: Annotated[Positional[str | None], arg(metavar="[TEXT]")] = None
    # .html: one page; .png, .svg or .pdf: a picture of all heads, of a layer's, or of one head, and of an
    # encoder-decoder's alignment in a second file; the files are printed
    output: Annotated[str, arg(metavar="FILE")] = "look.html"
    # what an encoder-decoder writes; default: what it writes by itself, greedily
    target: cli.Text = None
    image: cli.FileName = None  # the picture that a vision model reads
    # an npy file with the features (s m) that a model of one tower with cross-attention attends to
    memory: cli.FileName = None
    # a second model that reads the same, beside the first
    compare: Annotated[str | None, arg(metavar="MODEL")] = None
    # a picture shows this layer alone, a page shows it first; of a long text its head is there in full
    layer: cli.Count = None
    head: cli.Count = None  # a picture shows this head alone, a page shows it first
    # print every head in numbers: how far it reads, how sharply, how much of the token before, of the same token
    # elsewhere, of the first token, of what came after the same token before; a page has the table too, to click on
    heads: cli.Switch = False
    # the column that --heads is sorted by, such as induction; layer: the model's own order; default: entropy
    sort: Annotated[str | None, arg(metavar="COLUMN")] = None

    machine: cli.Machine = cli.Machine()


def run(options: Options) -> int:
    from regard.see.heads import as_text, checked_sort, ranked
    from regard.see.look import panel
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
    if options.sort is not None and not options.heads:
        raise UsageError(f"--sort {options.sort} orders the table of heads; add --heads")
    sort = checked_sort(options.sort or "entropy")
    text = cli.given_text(options.text or "")
    names = [options.model] if options.compare is None else [options.model, options.compare]
    asked = {
        name: getattr(options, name) for name in ("image", "target", "memory", "layer", "head")
    }
    panels = []
    for folder, title in zip(names, titles(names)):
        opened = cli.open_model(folder, options.machine)
        how: Any = {"precision": opened.precision, "compared": options.compare is not None}
        panels.append(panel(opened.model, opened.tokenizer, title, text, **asked, **how))
    for each in panels if options.heads else ():
        print(f"{each.name}: {each.note}\n\n{as_text(ranked(each.heads, sort))}\n")
        if each.without:
            print(f"{each.without}\n")
    what = clip(visible(text), 80) if text else Path(options.image or "").name
    if not drawn:
        write_whole(
            path, page(f"What is attended to in “{what}”", panels, sort if options.heads else "")
        )
        print(path)
        return 0
    from regard.see.plots import pictures

    for name in pictures(path, panels[0], what):
        print(name)
    return 0


def titles(folders: Sequence[str]) -> list[str]:
    """A name for each model: its folder's, after the run's for best, last or a step; the paths where
    names repeat."""
    names = []
    for folder in folders:
        *above, last = (p for p in Path(os.path.abspath(folder)).parts if p != "checkpoints")
        inside = above and (last in ("best", "last") or last.startswith("step-"))
        names.append(f"{above[-1]}/{last}" if inside else last)
    return names if len(set(names)) == len(names) else list(folders)
