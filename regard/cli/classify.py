"""regard classify: lines or pictures in, labels out; and the reading of lines that regard embed shares."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from regard.cli.model import Opened, opened, read_lines
from regard.cli.options_work import Classify
from regard.data.images import SUFFIXES
from regard.data.read import needed as package
from regard.data.tokens import Coder
from regard.errors import DATA, Fault, UsageError
from regard.evaluate.measure import context_of
from regard.layers import Classify as ClassifyHead
from regard.models import Patches
from regard.models.adapt import classes_of
from regard.text import Tokenizer, needed

# a name to print, if there are several files; ids or a picture, or nothing for an empty line
Example = tuple[str, Tensor | None]


def run(options: Classify) -> int:
    for name in ("top", "rows"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name} is {getattr(options, name)}; give a number from 1")
    check_file(options.file)
    ready = Opened(options.model, options.machine, options.rows)
    model = ready.model
    if not isinstance(getattr(model.config, "head", None), ClassifyHead):
        raise Fault(
            "this model has no classification head; answers would be random; train one: a config with task = "
            f'"classify" and [model] folder = "{options.model}", then regard train CONFIG',
            DATA,
        )
    names = names_of(model)
    if isinstance(model.config.embedding, Patches):
        blocks = in_blocks(Pictures(model).read(options.file), rows_at_once(options))
    else:
        lines = Lines(needed(ready.tokenizer), context_of(model), options.overlong)
        blocks = lines.read(options.file, rows_at_once(options))
    for block in blocks:
        given = [x for _, x in block if x is not None]
        answers = iter(probabilities(model, given) if given else ())
        for name, x in block:
            p = [] if x is None else next(answers)
            ranked = sorted(zip(names, p), key=lambda pair: -pair[1])
            line = as_json(ranked, name) if options.json else as_text(ranked, name, options.top)
            sys.stdout.write(line + "\n")
        sys.stdout.flush()
    return 0


def names_of(model: Any) -> list[str]:
    """The names of a classifier's classes; numbers, where its folder names none."""
    numbers = range(model.config.head.labels)
    said = [str(name) for name in classes_of(model)]
    nameless = len(said) != len(numbers) or said == [f"LABEL_{i}" for i in numbers]
    return [str(i) for i in numbers] if nameless else said


@torch.inference_mode()
def probabilities(model: Any, given: Sequence[Tensor]) -> list[list[float]]:
    """Of each class, for pictures or for rows of ids."""
    device = next(model.parameters()).device
    if given[0].is_floating_point():
        logits = model(torch.stack(list(given)).to(device))
    else:
        logits = model(*padded(given, device))
    return logits.float().softmax(-1).tolist()


def as_text(ranked: Sequence[tuple[str, float]], name: str, top: int) -> str:
    cells = [cell for label, p in ranked[:top] for cell in (label, f"{p:.4f}")]
    return "\t".join([*cells, name] if name else cells)


def as_json(ranked: Sequence[tuple[str, float]], name: str) -> str:
    label, highest = ranked[0] if ranked else (None, None)
    found = {"label": label, "probability": highest, "probabilities": dict(ranked)}
    return json.dumps({**found, **({"file": name} if name else {})}, ensure_ascii=False)


# --- lines --------------------------------------------------------------------------------------------------------


def check_file(path: str) -> None:
    """A name that is wrong is told before the model is read."""
    if path != "-" and not Path(path).exists():
        raise Fault(f"{path} does not exist; give a file, or - for stdin", DATA)


def rows_at_once(options: Any) -> int:
    """Who types lines wants an answer to each."""
    return 1 if options.file == "-" and sys.stdin.isatty() else options.rows


def in_blocks(examples: Iterator[Example], rows: int) -> Iterator[list[Example]]:
    while block := list(islice(examples, rows)):
        yield block


def padded(rows: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Rows of ids side by side, and how long each is if they differ."""
    sizes = torch.tensor([len(row) for row in rows])
    ids = pad_sequence(list(rows), batch_first=True)
    return ids.to(device), None if (sizes == sizes[0]).all() else sizes.to(device)


class Lines:
    """Lines as rows of ids, with the tokens the model expects around them. What spells a special token is text."""

    def __init__(self, tokenizer: Tokenizer, longest: int | None, overlong: str):
        self.coder, self.longest, self.overlong = Coder(tokenizer), longest, overlong

    def read(self, path: str, rows: int) -> Iterator[list[Example]]:
        """Some lines at a time."""
        with opened(path) as (stream, name):
            numbered = enumerate(read_lines(stream, name), 1)
            while part := list(islice(numbered, rows)):
                cut = self.coder.encode([line if line.strip() else "" for _, line in part])
                yield [
                    ("", self.row(ids, f"line {number} of {name}") if line.strip() else None)
                    for (number, line), ids in zip(part, cut, strict=True)
                ]

    def row(self, ids: list[int], where: str) -> Tensor | None:
        before, after = self.coder.before, self.coder.after
        room = None if self.longest is None else self.longest - len(before) - len(after)
        if room is not None and len(ids) > room and self.overlong == "error":
            raise Fault(
                f"{where} has {len(ids) + len(before) + len(after)} tokens, the model's context is {self.longest}; "
                "split the line, or say --overlong truncate",
                DATA,
            )
        whole = [*before, *ids[:room], *after]
        return torch.tensor(whole) if whole else None


# --- pictures -----------------------------------------------------------------------------------------------------


class Pictures:
    """Pictures as a model reads them: scaled to its size, x / 255 minus mean over std. Those are 0.5, as in training,
    unless the folder's preprocessor_config.json says otherwise."""

    def __init__(self, model: Any):
        self.wanted: Patches = model.config.embedding
        self.mean, self.std, self.filter = normal_of(model)

    def read(self, path: str) -> Iterator[Example]:
        if path == "-":
            with opened(path) as (stream, name):
                for line in read_lines(stream, name):
                    yield "", self.picture(Path(line)) if line.strip() else None
        elif Path(path).is_dir():
            files = sorted(f for f in Path(path).rglob("*") if f.suffix.lower() in SUFFIXES)
            if not files:
                raise Fault(f"{path} has no pictures: PNG or JPEG files", DATA)
            for file in files:
                yield str(file), self.picture(file)
        elif path.endswith((".npy", ".npz")):
            yield from (("", self.tensor(x)) for x in self.array(Path(path)))
        else:
            yield "", self.picture(Path(path))

    def picture(self, file: Path) -> Tensor:
        library = package("PIL.Image", "reading PNG and JPEG pictures", "pillow")
        size = (self.wanted.size, self.wanted.size)
        try:
            with library.open(file) as picture:
                picture = picture.convert("L" if self.wanted.channels == 1 else "RGB")
                x = np.asarray(picture.resize(size, self.filter), dtype=np.uint8)
        except Exception as error:  # a broken picture raises almost anything
            raise Fault(f"{file} is no picture that can be read: {error}", DATA) from None
        return self.tensor(x[..., None] if x.ndim == 2 else x)

    def array(self, file: Path) -> np.ndarray:
        """Bytes (n h w c); of an npz its array x, or the only one."""
        try:
            found = np.load(io.BytesIO(file.read_bytes()), allow_pickle=False)
            names = [] if isinstance(found, np.ndarray) else list(found)
            x = found[names[0] if len(names) == 1 else "x"] if names else found
        except Exception as error:  # zipfile and numpy have many
            raise Fault(
                f"{file} holds no array of pictures, in npz named x: {error}", DATA
            ) from None
        x = x[..., None] if x.ndim == 3 else x
        want = (self.wanted.size, self.wanted.size, self.wanted.channels)
        if x.dtype != np.uint8 or x.shape[1:] != want:
            raise Fault(
                f"{file} holds {x.dtype} {x.shape}; the model reads bytes (n, {', '.join(map(str, want))})",
                DATA,
            )
        return x

    def tensor(self, x: np.ndarray) -> Tensor:
        scaled = (x.astype(np.float32) / 255 - self.mean) / self.std
        return torch.from_numpy(np.ascontiguousarray(scaled.transpose(2, 0, 1)))


def normal_of(model: Any) -> tuple[np.ndarray, np.ndarray, int]:
    """Mean and standard deviation of the channels, and the number of Pillow's filter for scaling."""
    try:
        said = json.loads(model.origin.files.get("preprocessor_config.json", b"{}"))
        mean, std = said.get("image_mean") or 0.5, said.get("image_std") or 0.5
        if not said.get("do_normalize", True):
            mean, std = 0.0, 1.0
        sides = [np.atleast_1d(np.array(side, np.float32)) for side in (mean, std)]
        return sides[0], sides[1], int(said.get("resample", 3))
    except (ValueError, TypeError, AttributeError) as error:
        raise Fault(f"preprocessor_config.json is not as it should be: {error}", DATA) from None
