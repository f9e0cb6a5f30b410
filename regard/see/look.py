"""What a model attends to while it reads a text or a picture, as a panel of a page or as
pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attention import DSA, MLA, DeltaRule
from regard.block import Attention, Tower
from regard.data.read import Pictures
from regard.decode.generate import default_length, generate, special_of
from regard.errors import DATA, Fault, UsageError, blaming, notice
from regard.models import Patches
from regard.models.embedding import context
from regard.see.page import Panel
from regard.see.trace import Full, Given, Picture, Pooled, View, chosen, trace
from regard.text import Tokenizer, needed

BLANK = " \n\r\t"
BLANKS = dict(zip(BLANK, "␣⏎␍⇥")) | {"▁": "␣", "Ġ": "␣", "Ċ": "⏎"}


def look(
    model: Any,
    tokenizer: Tokenizer | None,
    name: str,
    text: str = "",
    *,
    image: str | None = None,
    target: str | None = None,
    layer: int | None = None,
    head: int | None = None,
    precision: str = "fp32",
    compared: bool = False,
) -> Panel:
    """A model's attention to the text or the picture; `target` is what an encoder-decoder writes,
    by default what it writes by itself. `layer` and `head` are shown first. `compared`: another
    model reads the same."""
    given = Input(model, tokenizer, name, text, image, target, compared).given()
    views = trace(model, given, layer, head)
    count = f"{len(given.fed)} tokens"
    if given.source_ids is not None:
        count = f"{len(given.source)} source tokens, {len(given.fed)} target tokens"
    of = mechanisms(model.config)
    shapes = (shape(view, of.get(view.name, "")) for view in views)
    return Panel(name, f"{count}, {precision}; {', '.join(shapes)}", views, layer, head)


def shape(view: View, mechanism: str) -> str:
    heads = sorted({len(layer.heads) for layer in view.layers})
    count = "–".join(map(str, dict.fromkeys((heads[0], heads[-1]))))
    layers, each = len(view.layers), "head" if count == "1" else "heads"
    text = f"{view.title.lower()}: {layers} layer{'s' * (layers > 1)} of {count} {each}"
    return f"{text} ({mechanism})" if mechanism else text


def mechanisms(config: Any) -> dict[str, str]:
    """What kind of attention each view of a model shows: mha, gqa, mla, ..."""
    parts = {name: getattr(config, name, None) for name in ("tower", "encoder", "decoder")}
    towers = {name: tower for name, tower in parts.items() if isinstance(tower, Tower)}
    kinds = {name: [kind(a) for a in tower.each("attention")] for name, tower in towers.items()}
    cross = getattr(towers.get("decoder"), "cross", None)
    names = {name: " and ".join(dict.fromkeys(each)) for name, each in kinds.items()}
    return names | {"self": names.get("tower", ""), "cross": kind(cross) if cross else ""}


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


# --- what the model reads -------------------------------------------------------------------------


@dataclass
class Input:
    """What a model reads, as ids or an image, with a name for each token."""

    model: Any
    tokenizer: Tokenizer | None
    name: str
    text: str
    image: str | None
    target: str | None
    compared: bool

    def __post_init__(self) -> None:
        self.encodes, self.config = self.model.reads_source, self.model.config
        self.device = next(self.model.parameters()).device
        self.first = getattr(self.config, "source" if self.encodes else "embedding", None)
        sees, image = isinstance(self.first, Patches), self.image is not None
        if self.target is not None and not self.encodes:
            raise UsageError(
                f"--target asks how words align, and {self.name} has no cross-attention; leave --target out"
            )
        if self.compared and sees != image and (image or self.text):
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
        if not self.encodes:
            return Given(x, names, picture=picture)
        written = self.written(ids, x)
        fed = self.fits(
            [special_of(self.model).start or 0, *written[:-1]], self.config, "the target"
        )
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
        if self.target is not None:
            ids = needed(self.tokenizer).encode_target(self.target)
            return self.fits(ids, self.config, "the target")
        most = default_length(self.model, [source or [0] * x.shape[-1]])
        ids = generate(self.model, [source] if source else x, max_new_tokens=most)[0].ids
        if not ids:
            raise UsageError("the model wrote nothing; give what it should write: --target TEXT")
        return ids

    def named(self, ids: Sequence[int]) -> list[str]:
        return [str(i) if self.tokenizer is None else named(self.tokenizer, i) for i in ids]

    def picture(self, wanted: Patches) -> tuple[Tensor, Picture]:
        """The image (1 c h w) as the model reads it, and as people see it."""
        reader = Pictures(wanted, self.model.origin)
        try:
            with blaming(DATA):
                x = reader.file(Path(self.image or ""))
        except Fault as error:
            more = "; give a PNG or JPEG: --image FILE" if error.code == DATA else ""
            raise Fault(f"{error}{more}", error.code) from None
        seen = (x.numpy().transpose(1, 2, 0) * reader.std + reader.mean) * 255
        pixels = np.broadcast_to(np.clip(np.rint(seen), 0, 255), (*seen.shape[:2], 3))
        shown = Picture(pixels.astype(np.uint8), wanted.patch, wanted.extra)
        return x[None].to(self.device), shown


def named(tokenizer: Tokenizer, index: int) -> str:
    """A token as people would write it, or as the vocabulary does where it is a space or part of a
    letter."""
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


# --- pictures -------------------------------------------------------------------------------------


def pictures(path: Path, panel: Panel, what: str) -> list[Path]:
    """All heads; the one that was asked for; where there is cross-attention, the alignment by its
    last layer."""
    from regard.see.plots import alignment, head_grid, one_head, save

    def beside(word: str) -> Path:
        return path.with_name(f"{path.stem}-{word}{path.suffix}")

    rows = [(view, layer) for view in panel.views for layer in view.layers]
    maps = [torch.stack([thumb(head, view) for head in layer.heads]) for view, layer in rows]
    several = len(panel.views) > 1
    names = [
        f"{view.name} {layer.number}" if several else str(layer.number) for view, layer in rows
    ]
    paths = [save(head_grid(maps, f"{panel.name}: “{what}”", names=names), path)]
    last = max(panel.views, key=lambda view: view.name == "cross")
    at, head = chosen(last, panel.layer, panel.head)
    layer = last.layers[at]
    title = f"{panel.name}, {last.title.lower()}, layer {layer.number}"
    # Where a cell is a token, no head is pooled.
    exact = (each for each in layer.heads if last.step == (1, 1) or isinstance(each, Full))
    full = [torch.from_numpy(cells(each)) for each in exact]
    if not full:
        notice("the text is too long for pictures of single heads")
        return paths
    # Of a long text the asked head alone is in full.
    single = full[min(head, len(full) - 1)]
    if panel.layer is not None or panel.head is not None:
        drawn = one_head(single, last.rows, last.columns, f"{title}, head {head}")
        paths.append(save(drawn, beside("head")))
    if last.name == "cross":
        mean = panel.head is None and len(full) == len(layer.heads)
        each = torch.stack(full).mean(0) if mean else single
        of = f"mean of {len(full)} heads" if mean else f"head {head}"
        drawn = alignment(each, last.columns, last.rows, f"{title}, {of}")
        paths.append(save(drawn, beside("alignment")))
    return paths


def cells(head: Full | Pooled) -> np.ndarray:
    return head.weight if isinstance(head, Full) else head.cells


def thumb(head: Full | Pooled, view: View) -> Tensor:
    """A head as small as the others of its view."""
    a = torch.from_numpy(cells(head))
    if view.whole or isinstance(head, Pooled):
        return a
    return F.max_pool2d(a[None], view.step, ceil_mode=True)[0]
