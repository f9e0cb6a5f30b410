"""regard data peek: the first batch as the model will get it, for people or as JSON."""

from __future__ import annotations

import json
import shutil
import tempfile
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from regard.checkpoint import load as load_model
from regard.cli.data import Peek, check_given, settings
from regard.cli.model import resolved
from regard.data.config import Data, Loaded, load
from regard.data.corrupt import Corrupted, Marks, MaskTokens
from regard.data.feed import IGNORE, Batch, Feed
from regard.data.read import ARRAYS, format_of
from regard.data.tokens import Coder
from regard.errors import UsageError
from regard.text import Tokenizer, needed
from regard.train.check import check
from regard.train.config import read
from regard.train.run import marks, read_data

SHADES = " .:-=+*#%@"
NONE = "."  # under a token that is not learned


def peek(options: Peek) -> int:
    check_given(options.files)
    if options.batch < 0:
        raise UsageError(f"--batch is {options.batch}; give a number from 0")
    with tempfile.TemporaryDirectory(prefix="regard-peek-") as folder:
        if options.files[0].endswith(".toml"):
            shown = from_config(options, Path(folder))
        else:
            shown = from_files(options, Path(folder))
        print(shown.json() if options.json else shown.text())
    return 0


def from_config(options: Peek, folder: Path) -> Shown:
    """The batch that training with a config would make."""
    kept = {n: getattr(options, n) for n in ("files", "batch", "json")}
    if len(options.files) > 1 or options != Peek(**kept):
        raise UsageError(
            f"{options.files[0]} says how data is read: give it alone, with --batch and --json; other settings belong "
            "into it"
        )
    config = read(Path(options.files[0]))
    check(config)
    start = None
    if "folder" in config.model:
        start = load_model(resolved(config.model["folder"]), device="meta")
    _, coder, loaded = read_data(config, start, folder)
    feed = config.fed(loaded.feed, marks(coder))
    return Shown(replace(options, seed=config.train.seed), config.task, loaded, coder, feed)


def from_files(options: Peek, folder: Path) -> Shown:
    task, coder = task_of(options), None
    if task != "image":
        if options.tokenizer is None:
            raise UsageError(
                "text needs a tokenizer: --tokenizer FOLDER (a model, a run, or what regard tokenizer train wrote); or "
                "give a config: regard data peek CONFIG.toml"
            )
        home = Path(options.tokenizer)
        alone = home / "tokenizer"
        home = alone if (alone / "tokenizer.json").is_file() else Path(resolved(str(home)))
        coder = Coder(needed(Tokenizer.from_folder(home)))
    loaded = load(task, data_of(options, task), coder, folder, options.seed)
    feed: Feed = loaded.feed
    if task == "mlm" and coder is not None:
        found = Marks(coder.vocab, coder.reserved, coder.mask)
        feed = Corrupted(loaded.feed, MaskTokens(found), options.seed)
    return Shown(options, task, loaded, coder, feed)


def task_of(options: Peek) -> str:
    said = settings(options.reading)
    if options.task != "auto":
        return options.task
    if said["format"] in ARRAYS or format_of(Path(options.files[0]), said["format"]) in ARRAYS:
        return "image"
    roles = said["columns"]
    if options.target or "target" in roles:
        return "seq2seq"
    if format_of(Path(options.files[0]), said["format"]) == "squad":
        return "answer"
    return "tag" if "tags" in roles else "classify" if "label" in roles else "lm"


def data_of(options: Peek, task: str) -> Data:
    packed = task in ("lm", "mlm") and options.pack != "none"
    length = 128 if options.length is None and packed else options.length
    rows = 4 if options.rows is None and options.tokens is None else options.rows
    return Data(
        train=options.files,
        target=options.target,
        length=length,
        rows=rows,
        tokens=options.tokens,
        pack=options.pack,
        overlong=options.overlong,
        **settings(options.reading),
    )


class Shown:
    """One batch and what it was made of."""

    def __init__(self, options: Peek, task: str, loaded: Loaded, coder: Coder | None, feed: Feed):
        self.options, self.task, self.loaded, self.coder = options, task, loaded, coder
        self.feed = feed
        self.batch: Batch = self.feed.batch(options.batch)

    def head(self) -> list[str]:
        notes, b = self.loaded.notes, self.batch
        said = f"{', '.join(self.options.files)}: {notes['records']:,} examples, {notes['empty']:,} empty"
        if notes.get("tokens"):
            unknown = notes["unknown"] / notes["tokens"]
            said += f"; {notes['tokens']:,} tokens, {unknown:.2%} unknown"
        if self.loaded.classes:
            said += f"; {len(self.loaded.classes)} classes: {', '.join(self.loaded.classes)[:120]}"
        shape = " x ".join(map(str, b.ids.shape))
        counted = f"{b.tokens:,} of {b.labels.numel():,} labels are counted"
        number = f"task {self.task}, seed {self.options.seed}, batch {self.options.batch}"
        return [said, self.feed.describe(), f"{number}: {shape}, {counted}"]

    def text(self) -> str:
        width = shutil.get_terminal_size((100, 24)).columns
        lines = self.head()
        for i in range(len(self.batch.ids)):
            lines += ["", f"row {i}", *self._row(i, width)]
        return "\n".join(lines)

    def _row(self, i: int, width: int) -> list[str]:
        b = self.batch
        if self.coder is None:
            return [*picture(b.ids[i]), f"  label  {self._class(int(b.labels[i]))}"]
        lines = []
        if b.source is not None:
            source = _real(b.source[i], b.source_lengths, i)
            table = {"source": self.coder.tokens(source), "ids": list(map(str, source))}
            lines += [*columns(table, [], width), ""]
        ids = _real(b.ids[i], b.lengths, i)
        table = {"input": self.coder.tokens(ids, target=True), "ids": list(map(str, ids))}
        if b.labels.dim() == 2 and b.labels.shape == b.ids.shape:
            table["label"] = self._labels(b.labels[i, : len(ids)])
        lines += columns(table, self._borders(i, len(ids)), width)
        if b.labels.dim() == 1:
            lines.append(f"  label  {self._class(int(b.labels[i]))}")
        elif self.task == "answer":
            first, last = b.labels[i].tolist()
            found = self.coder.tokens(ids[first : last + 1]) if first != IGNORE else ["(cut off)"]
            found = ["(unanswered)"] if last == 0 else found
            lines.append(f"  label  {first} to {last}: {' '.join(map(visible, found))}")
        return lines

    def _labels(self, labels: Tensor) -> list[str]:
        found = labels.tolist()
        if self.task == "tag":
            return [NONE if i == IGNORE else self.loaded.classes[i] for i in found]
        assert self.coder is not None
        said = self.coder.tokens([max(i, 0) for i in found], target=True)
        return [NONE if i == IGNORE else text for i, text in zip(found, said)]

    def _class(self, label: int) -> str:
        return "not counted" if label == IGNORE else f"{self.loaded.classes[label]} ({label})"

    def _borders(self, i: int, size: int) -> list[int]:
        """The places where another document begins."""
        if self.batch.doc is None:
            return []
        doc = self.batch.doc[i, :size].tolist()
        return [k for k in range(1, size) if doc[k] != doc[k - 1]]

    def json(self) -> str:
        b, feed = self.batch, self.feed
        rows: list[dict[str, Any]] = []
        for i in range(len(b.ids)):
            row: dict[str, Any] = {"labels": b.labels[i].tolist()}
            if self.coder is not None:
                ids = _real(b.ids[i], b.lengths, i)
                row |= {"ids": ids, "tokens": self.coder.tokens(ids, target=True)}
            if b.labels.shape == b.ids.shape:
                row["labels"] = row["labels"][: len(row["ids"])]
                row["counted"] = [label != IGNORE for label in row["labels"]]
            if b.source is not None and self.coder is not None:
                row["source_ids"] = _real(b.source[i], b.source_lengths, i)
                row["source"] = self.coder.tokens(row["source_ids"])
            if b.doc is not None:
                row["doc"] = b.doc[i, : len(row["ids"])].tolist()
            rows.append(row)
        found = {
            "version": 1,
            "task": self.task,
            "counts": self.loaded.notes,
            "about": feed.describe(),
            "batches_a_pass": feed.epoch,
            "fingerprint": feed.fingerprint,
            "shape": list(b.ids.shape),
            "batch": self.options.batch,
            "rows": rows,
        }
        return json.dumps(found, ensure_ascii=False)


def _real(row: Tensor, lengths: Tensor | None, i: int) -> list[int]:
    """The ids of a row without padding."""
    return row[: None if lengths is None else int(lengths[i])].tolist()


# --- on a plain terminal ------------------------------------------------------------------------------------------


def columns(table: dict[str, list[str]], borders: list[int], width: int) -> list[str]:
    """Lists side by side, one token below the other, in blocks that fit the width; a bar where a document ends."""
    names = list(table)
    cells = [list(map(visible, table[name])) for name in names]
    edge = max(map(len, names)) + 4
    blocks: list[list[str]] = [[f"  {name}".ljust(edge) for name in names]]
    for i, column in enumerate(zip(*cells)):
        size = max(map(breadth, column))
        bar = "| " if i in borders else ""
        if breadth(blocks[-1][0]) + size + len(bar) > width and breadth(blocks[-1][0]) > edge:
            blocks.append([f"  {name}".ljust(edge) for name in names])
        blocks[-1] = [
            line + bar + cell + " " * (size - breadth(cell) + 1)
            for line, cell in zip(blocks[-1], column)
        ]
    return [line.rstrip() for block in blocks for line in block]


def visible(text: str) -> str:
    """Spaces and control characters made visible."""
    shown = json.dumps(text, ensure_ascii=False)[1:-1].replace('\\"', '"').replace("\\\\", "\\")
    return shown.replace(" ", "\u2581") or "''"


def breadth(text: str) -> int:
    """Columns of a terminal that a text takes."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.combining(c) > 0 for c in text)


def picture(x: Tensor) -> list[str]:
    """A picture (c h w) in characters, at most 56 wide; every second line, as characters are twice as high."""
    grey = x.float().mean(0)
    step = max(-(-grey.shape[1] // 56), 1)
    grey = grey[:: 2 * step, ::step]
    low, high = float(grey.min()), float(grey.max())
    level = ((grey - low) / max(high - low, 1e-9) * (len(SHADES) - 1)).round().long()
    return ["  " + "".join(SHADES[v] for v in row).rstrip() for row in level.tolist()]
