"""regard look: what a model attends to, as one page or as pictures."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attention import DSA, MLA, DeltaRule
from regard.block import Attention, Tower
from regard.cli.classify import Pictures
from regard.cli.model import Opened, blaming, decoded, opened, start_of
from regard.cli.options_look import Look
from regard.decode.generate import default_length, generate
from regard.errors import DATA, ENVIRONMENT, Fault, UsageError
from regard.models import Patches
from regard.models.embedding import context
from regard.report.run import write
from regard.report.show import clip, visible
from regard.see.pools import Pooled
from regard.see.trace import Full, Given, Picture, View, chosen, trace
from regard.see.view import Panel, page
from regard.text import Tokenizer, needed

PAGES, PICTURES = (".html", ".htm"), (".png", ".svg", ".pdf")
BLANK = " \n\r\t"
BLANKS = dict(zip(BLANK, "␣⏎␍⇥")) | {"▁": "␣", "Ġ": "␣", "Ċ": "⏎"}


def run(options: Look) -> int:
    path = checked(options)
    text = read(options.text)
    names = [options.model] if options.compare is None else [options.model, options.compare]
    titles = called(names)
    panels = [looked(options, *each, text) for each in zip(names, titles)]
    what = clip(visible(text), 80) if text else Path(options.image or "").name
    if path.suffix.lower() in PAGES:
        write(path, page(f"What is attended to in “{what}”", panels))
        print(path)
        return 0
    for name in pictures(path, panels[0], what):
        print(name)
    return 0


def checked(options: Look) -> Path:
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


def read(text: str | None) -> str:
    if text != "-":
        return text or ""
    with opened("-") as (stream, name):
        return decoded(stream.read(), name).removesuffix("\n").removesuffix("\r")


def called(folders: Sequence[str]) -> list[str]:
    """A name for each model: its folder's, with the run's where that is best, last or a step; else the path."""
    names = []
    for folder in folders:
        *above, last = (p for p in Path(os.path.abspath(folder)).parts if p != "checkpoints")
        inside = above and (last in ("best", "last") or last.startswith("step-"))
        names.append(f"{above[-1]}/{last}" if inside else last)
    return names if len(set(names)) == len(names) else list(folders)


def looked(options: Look, folder: str, name: str, text: str) -> Panel:
    """A model's attention to the text or the picture."""
    ready = Opened(folder, options.machine, 1)
    given = Reading(ready, options, name, text).given()
    views = trace(ready.model, given, options.layer, options.head)
    count = f"{len(given.fed)} tokens"
    if given.source_ids is not None:
        count = f"{len(given.source)} source tokens, {len(given.fed)} target tokens"
    of = mechanisms(ready.model.config)
    shapes = (shape(view, of.get(view.name, "")) for view in views)
    told = f"{count}, {ready.precision}; {', '.join(shapes)}"
    return Panel(name, told, views, options.layer, options.head)


def shape(view: View, mechanism: str) -> str:
    heads = sorted({len(layer.heads) for layer in view.layers})
    count = "–".join(map(str, dict.fromkeys((heads[0], heads[-1]))))
    layers, each = len(view.layers), "head" if count == "1" else "heads"
    said = f"{view.title.lower()}: {layers} layer{'s' * (layers > 1)} of {count} {each}"
    return f"{said} ({mechanism})" if mechanism else said


def mechanisms(config: Any) -> dict[str, str]:
    """What kind of attention each view of a model shows: mha, gqa, mla, ..."""
    towers = {name: getattr(config, name, None) for name in ("tower", "encoder", "decoder")}
    found = {name: tower for name, tower in towers.items() if isinstance(tower, Tower)}
    kinds = {name: [kind(a) for a in tower.each("attention")] for name, tower in found.items()}
    cross = getattr(found.get("decoder"), "cross", None)
    said = {name: " and ".join(dict.fromkeys(each)) for name, each in kinds.items()}
    return said | {"self": said.get("tower", ""), "cross": kind(cross) if cross else ""}


def kind(attention: Attention) -> str:
    match attention:
        case DSA():
            return f"{kind(attention.attention)}; dsa chooses {attention.topk} keys"
        case MLA():
            return f"mla, latent of {attention.latent}"
        case DeltaRule():
            return "delta rule, a state that weighs no tokens"
    groups = attention.kv_heads or attention.heads
    if groups == attention.heads:
        return "mha"
    return "mqa" if groups == 1 else f"gqa, {groups} key heads"


# --- what the model reads -----------------------------------------------------------------------------------------


class Reading:
    """The input of a model, as ids or an image, with a name for each token."""

    def __init__(self, ready: Opened, options: Look, name: str, text: str):
        self.name, self.model, self.tokenizer = name, ready.model, ready.tokenizer
        self.two, self.options, self.text = ready.two, options, text
        self.config = ready.model.config
        self.device = next(ready.model.parameters()).device
        self.first = getattr(self.config, "source" if self.two else "embedding", None)
        self.check()

    def check(self) -> None:
        sees, image = isinstance(self.first, Patches), self.options.image is not None
        if self.options.target is not None and not self.two:
            raise UsageError(
                f"--target asks how words align, and {self.name} has no cross-attention; leave --target out"
            )
        if self.options.compare is not None and sees != image and (image or self.text):
            reads = "pictures" if sees else "text"
            raise UsageError(
                f"{self.name} reads {reads}; give --compare two models that read the same"
            )
        if sees and not image:
            raise UsageError(f"{self.name} reads pictures; give one: --image FILE")
        if image and not sees:
            raise UsageError(f'{self.name} reads text; give that instead of --image: "some text"')
        if image and self.text:
            raise UsageError(f"{self.name} reads a picture alone; leave the text out")
        if not image and not self.text.strip():
            raise UsageError('there is no text to look at; say regard look MODEL "some text"')

    def given(self) -> Given:
        picture, names, ids = None, [], []
        if isinstance(self.first, Patches):
            x, picture = self.picture(self.first)
            names = patches(self.first)
        else:
            ids = self.fits(needed(self.tokenizer).encode(self.text), self.first, "the text")
            x, names = torch.tensor([ids], device=self.device), self.named(ids)
        if not self.two:
            return Given(x, names, picture=picture)
        written = self.written(ids, x)
        fed = self.fits([start_of(self.model), *written[:-1]], self.config, "the target")
        target = torch.tensor([fed], device=self.device)
        return Given(target, self.named(fed), x, names, self.named(written), picture)

    def fits(self, ids: list[int], side: Any, what: str) -> list[int]:
        tokens = getattr(side, "target", side)
        limit = getattr(self.config, "max_len", None)
        longest = context(limit, tokens) if hasattr(tokens, "position") else limit
        if not ids:
            raise UsageError(f"{what} has no tokens; give some words")
        if longest is not None and len(ids) > longest:
            raise UsageError(
                f"{what} has {len(ids)} tokens, the model's context is {longest}; "
                f"shorten it: about {longest / len(ids):.0%} of it fits"
            )
        return ids

    def written(self, source: list[int], x: Tensor) -> list[int]:
        """The target that was given, or what the model makes of the source."""
        if self.options.target is not None:
            found = needed(self.tokenizer).encode_target(self.options.target)
            return self.fits(found, self.config, "the target")
        most = default_length(self.model, [source or [0] * x.shape[-1]])
        found = generate(self.model, [source] if source else x, max_new_tokens=most)[0].ids
        if not found:
            raise UsageError("the model wrote nothing; give what it should write: --target TEXT")
        return found

    def named(self, ids: Sequence[int]) -> list[str]:
        return [str(i) if self.tokenizer is None else named(self.tokenizer, i) for i in ids]

    def picture(self, wanted: Patches) -> tuple[Tensor, Picture]:
        """The image (1 c h w) as the model reads it, and as people see it."""
        config = SimpleNamespace(embedding=wanted)
        reader = Pictures(SimpleNamespace(config=config, origin=self.model.origin))
        try:
            with blaming(DATA):
                x = reader.picture(Path(self.options.image or ""))
        except Fault as error:
            more = "; give a PNG or JPEG: --image FILE" if error.code == DATA else ""
            raise Fault(f"{error}{more}", error.code) from None
        seen = (x.numpy().transpose(1, 2, 0) * reader.std + reader.mean) * 255
        pixels = np.broadcast_to(np.clip(np.rint(seen), 0, 255), (*seen.shape[:2], 3))
        shown = Picture(pixels.astype(np.uint8), wanted.patch, wanted.extra)
        return x[None].to(self.device), shown


def named(tokenizer: Tokenizer, index: int) -> str:
    """A token as people would write it, or as the vocabulary does where it is a space or part of a letter."""
    text = tokenizer.decode([index], skip_special=False)
    if text and not text.strip(BLANK):
        return "".join(BLANKS[letter] for letter in text)
    piece = "".join(tokenizer.pieces([index], skip_special=False))
    if text.strip() and "\ufffd" not in text:
        return text.strip()
    return "".join(BLANKS.get(letter, letter) for letter in piece) or str(index)


def patches(wanted: Patches) -> list[str]:
    """Names of the tokens of an image: the class token, then patches by row and column from 1."""
    side = wanted.size // wanted.patch
    extra = ["class", "distil", *(f"extra {i}" for i in range(2, wanted.extra))][: wanted.extra]
    return extra + [f"{i + 1},{j + 1}" for i in range(side) for j in range(side)]


# --- pictures -----------------------------------------------------------------------------------------------------


def pictures(path: Path, panel: Panel, what: str) -> list[Path]:
    """All heads; the one that was asked for; where there is cross-attention, the alignment by its last layer."""
    from regard.see.plots import alignment, head_grid, one_head, save

    def beside(word: str) -> Path:
        return path.with_name(f"{path.stem}-{word}{path.suffix}")

    rows = [(view, layer) for view in panel.views for layer in view.layers]
    maps = [torch.stack([thumb(head, view) for head in layer.heads]) for view, layer in rows]
    several = len(panel.views) > 1
    names = [
        f"{view.name} {layer.number}" if several else str(layer.number) for view, layer in rows
    ]
    found = [save(head_grid(maps, f"{panel.name}: “{what}”", names=names), path)]
    last = max(panel.views, key=lambda view: view.name == "cross")
    at, head = chosen(last, panel.layer, panel.head)
    layer = last.layers[at]
    title = f"{panel.name}, {last.title.lower()}, layer {layer.number}"
    single = last.step == (1, 1)  # no head is pooled
    kept = [each for each in layer.heads if single or isinstance(each, Full)]
    full = [torch.from_numpy(cells(each)) for each in kept]
    if not full:
        print("note: the text is too long for pictures of single heads", file=sys.stderr)
        return found
    mine = full[min(head, len(full) - 1)]  # of a long text the asked head alone is in full
    if panel.layer is not None or panel.head is not None:
        drawn = one_head(mine, last.rows, last.columns, f"{title}, head {head}")
        found.append(save(drawn, beside("head")))
    if last.name == "cross":
        mean = panel.head is None and len(full) == len(layer.heads)
        each = torch.stack(full).mean(0) if mean else mine
        of = f"mean of {len(full)} heads" if mean else f"head {head}"
        drawn = alignment(each, last.columns, last.rows, f"{title}, {of}")
        found.append(save(drawn, beside("alignment")))
    return found


def cells(head: Full | Pooled) -> np.ndarray:
    return head.weight if isinstance(head, Full) else head.cells


def thumb(head: Full | Pooled, view: View) -> Tensor:
    """A head as small as the others of its view."""
    a = torch.from_numpy(cells(head))
    if view.whole or isinstance(head, Pooled):
        return a
    return F.max_pool2d(a[None], view.step, ceil_mode=True)[0]
