"""What look can be told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from tyro.conf import Positional, arg

from regard.cli.parse import Count, Folder, Machine


@dataclass(frozen=True)
class Look:
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
