"""regard data peek: a batch of training data as the model will get it, for people or as JSON; and
regard tokenizer train: learn a tokenizer from files."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import sys
import tempfile
import uuid
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import UseAppendAction as Many
from tyro.conf import arg

from regard.cli.shared import Count, DataFiles, Files, FolderName, Pairs, Reading, Switch, pairs
from regard.errors import Notice, UsageError, notice
from regard.see.format import columns as breadth

if TYPE_CHECKING:
    from torch import Tensor

    from regard.data.config import Loaded
    from regard.data.feed import Feed
    from regard.data.read import Source
    from regard.data.tokens import Coder
    from regard.data.train_tokenizer import Recipe

SHADES = " .:-=+*#%@"
# Characters of a file that are read at least; rows of a batch that are printed at most.
SAMPLE, ROWS = 1 << 18, 8


@dataclass(frozen=True)
class Options:
    """Print a real batch of training data: tokens, ids, and what is learned from them.

    regard data peek story.toml                                     as training with this config will see it
    regard data peek story.txt --tokenizer MODEL --length 64        documents packed into rows
    regard data peek in.de --target in.en --tokenizer MODEL         source and target
    regard data peek reviews.tsv --columns text=1 --columns label=0 --task classify --tokenizer MODEL
    """

    # data files; * and ? are understood; .gz and the like too; or a training config (.toml), which says
    # all the rest
    files: DataFiles
    target: Files = ()  # files with the other side, line by line; classes of npy and idx files
    # a model folder, a run's folder, or what regard tokenizer train wrote
    tokenizer: FolderName = None
    # auto: seq2seq with a target, image for pictures, classify with a label, else lm
    task: Literal[
        "auto", "lm", "chat", "prefer", "prefix", "mlm", "spans", "infill", "seq2seq", "classify", "tag", "answer",
        "image", "segment", "caption", "draw",
    ] = "auto"  # fmt: skip
    # tokens of a row; default: 128 where documents are packed, else as long as the data
    length: Count = None
    rows: Count = None  # rows of a batch; default: 4
    tokens: Count = None  # tokens of a batch (of each side), padding included
    # how documents share rows; spans and infill repair whole rows, which is stream to them
    pack: Literal["documents", "stream", "windows", "none"] = "documents"
    # what happens to examples that are longer than a row; default: split where documents are packed
    overlong: Literal["error", "truncate", "drop", "split"] | None = None
    seed: int = 0  # another number, another order
    batch: int = 0  # which batch
    json: Switch = False  # one JSON object
    reading: Reading = Reading()


def run(options: Options) -> int:
    if not options.files:
        raise UsageError("name a data file")
    if options.batch < 0:
        raise UsageError(f"--batch is {options.batch}; give a number from 0")
    # SIGTERM, too, removes the temporary folder, which has its name before it is there.
    folder = Path(tempfile.gettempdir(), f"regard-peek-{uuid.uuid4().hex}")
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        folder.mkdir(mode=0o700)
        if options.files[0].endswith(".toml"):
            peek = from_config(options, folder)
        else:
            with in_flags():
                peek = from_files(options, folder)
        print(peek.json() if options.json else peek.text())
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        shutil.rmtree(folder, ignore_errors=True)
        signal.signal(signal.SIGTERM, before)
    return 0


def from_config(options: Options, folder: Path) -> Peek:
    """The batch that training with a config would make."""
    if replace(options, batch=0, json=False) != Options(options.files[:1]):
        alone = "give it alone, with --batch and --json; other settings belong into it"
        raise UsageError(f"{options.files[0]} says how data is read: {alone}")
    from regard.training.build import marks, read_data, start_of, tell_marks
    from regard.training.config import check, read

    config = read(Path(options.files[0]))
    check(config)
    _, coder, loaded = read_data(config, start_of(config, device="meta"), folder)
    for text in tell_marks(config.task, config.data.template, coder):
        notice(text)
    feed = config.fed(loaded.feed, marks(coder))
    return Peek(replace(options, seed=config.train.seed), config.task, loaded, coder, feed)


def from_files(options: Options, folder: Path) -> Peek:
    """A batch from the beginning of the files; the rest is not read."""
    from regard.data.config import KINDS, ROWED, Data, load
    from regard.data.corrupt import Corrupted
    from regard.data.tokens import Coder
    from regard.files import resolve_model
    from regard.text import Tokenizer, needed
    from regard.training.build import marks, tell_marks
    from regard.training.tasks import TASKS

    reading, coder = options.reading.settings(), None
    task = task_of(options, reading) if options.task == "auto" else options.task
    if KINDS[TASKS[task].reads].texts:
        if options.tokenizer is None:
            how = "--tokenizer FOLDER (a model, a run, or what regard tokenizer train wrote)"
            config = "give a config: regard data peek CONFIG.toml"
            raise UsageError(f"text needs a tokenizer: {how}; or {config}")
        home = Path(options.tokenizer)
        alone = home / "tokenizer"
        home = alone if (alone / "tokenizer.json").is_file() else resolve_model(home)
        coder = Coder(needed(Tokenizer.from_folder(home)))
    row, pack = TASKS[task], options.pack
    # spans and infill corrupt whole rows, which documents cannot share.
    pack = "stream" if row.reads in ROWED and not row.packed and pack == "documents" else pack
    packed = row.reads in ROWED and pack != "none"
    asked: dict[str, Any] = {n: getattr(options, n) for n in ("target", "tokens")} | {"pack": pack}
    asked["overlong"] = options.overlong or ("split" if packed and pack == "documents" else "error")
    asked["length"] = 128 if options.length is None and packed else options.length
    asked["rows"] = 4 if options.rows is None and options.tokens is None else options.rows
    # Enough characters for these batches and for shuffling; of pictures, how many of each class.
    wanted = (options.tokens or asked["rows"] * (asked["length"] or 128)) * (options.batch + 1)
    sample = max(32 * wanted, SAMPLE) if coder else (asked["rows"] or 1) * (options.batch + 1)
    data = Data(options.files, **asked, **reading)
    loaded = load(row.reads, data, coder, folder, options.seed, sample=sample)
    for text in tell_marks(task, "", coder):
        notice(text)
    if options.overlong is None and "split" in getattr(loaded.feed, "note", ""):
        notice("documents that are longer than a row are split here; training asks: data.overlong")
    feed: Feed = loaded.feed
    if row.corruption is not None:
        feed = Corrupted(loaded.feed, row.corruption(marks(coder)), options.seed)
    return Peek(options, task, loaded, coder, feed)


def task_of(options: Options, reading: dict[str, Any]) -> str:
    from regard.data.read import ARRAYS, format_of

    kind, roles = format_of(Path(options.files[0]), reading["format"]), reading["columns"]
    if kind in ARRAYS:
        return "image"
    if options.target or "target" in roles:
        return "seq2seq"
    if kind == "squad":
        return "answer"
    return "tag" if "tags" in roles else "classify" if "label" in roles else "lm"


@contextlib.contextmanager
def in_flags() -> Iterator[None]:
    """Reword mistakes and notices about settings: they name the flags instead."""
    names = "|".join(
        f.name for f in (*fields(Options), *fields(Reading), *fields(TokenizerOptions))
    )

    def reworded(text: str) -> str:
        text = re.sub(
            rf"\b(?:data\.)?({names}) = ", lambda found: f"--{found[1].replace('_', '-')} ", text
        )
        return text.replace("--header false", "--header False")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", Notice)
        try:
            yield
        except UsageError as error:
            error.args = (reworded(str(error)),)
            raise
    for each in caught:
        if issubclass(each.category, Notice):
            notice(reworded(str(each.message)))


class Peek:
    """One batch and what it was made of."""

    def __init__(
        self, options: Options, task: str, loaded: Loaded, coder: Coder | None, feed: Feed
    ):
        self.options, self.task, self.loaded, self.coder = options, task, loaded, coder
        self.feed, self.batch = feed, feed.batch(options.batch)
        self.rows = [self._row(i) for i in range(len(self.batch.ids))]

    def _row(self, i: int) -> dict[str, Any]:
        """An example without its padding; a picture has labels alone."""
        b = self.batch
        row: dict[str, Any] = {"labels": b.labels[i].tolist()}
        if self.coder is None:
            return row
        ids = b.ids[i, : None if b.lengths is None else int(b.lengths[i])].tolist()
        row |= {"ids": ids, "tokens": self.coder.tokens(ids)}
        if b.labels.shape == b.ids.shape:
            row["labels"] = row["labels"][: len(ids)]
            row["counted"] = [label >= 0 for label in row["labels"]]
        if b.source is not None and b.source.dim() == 2:
            length = None if b.source_lengths is None else int(b.source_lengths[i])
            row["source_ids"] = b.source[i, :length].tolist()
            row["source"] = self.coder.tokens(row["source_ids"])
        if b.rejected is not None and b.rejected_labels is not None:
            worse = b.rejected_labels[i]
            row["rejected"] = self.coder.tokens(worse[worse >= 0].tolist())
        if b.doc is not None:
            row["doc"] = b.doc[i, : len(ids)].tolist()
        return row

    def json(self) -> str:
        facts = {
            "version": 1,
            "task": self.task,
            "sampled": bool(self.loaded.notes.get("sampled")),
            "counts": self.loaded.notes,
            "about": self.feed.describe(),
            "batches_a_pass": self.feed.epoch,
            "fingerprint": self.feed.fingerprint,
            "lengths": histogram(self.loaded.lengths),
            "shape": list(self.batch.ids.shape),
            "batch": self.options.batch,
            "rows": self.rows,
        }
        return json.dumps(facts, ensure_ascii=False)

    def text(self) -> str:
        notes, b, classes = self.loaded.notes, self.batch, self.loaded.classes
        sampled = ", the beginning" if notes.get("sampled") else ""
        counts = f"{notes['records'] - notes['empty']:,} examples"
        if notes["empty"]:
            counts += f" and {notes['empty']:,} empty ones, which are left out"
        head = f"{', '.join(self.options.files)}{sampled}: {counts}"
        # How many tokens there are, ends and marks among them, is in the next line.
        if notes.get("tokens"):
            head += f"; {notes['unknown'] / notes['tokens']:.2%} of the tokens are unknown"
        if classes:
            head += f"; {len(classes)} classes: {', '.join(classes)[:120]}"
        shape = " x ".join(map(str, b.ids.shape))
        counted = f"{b.tokens:,} of {b.labels.numel():,} labels are counted"
        number = f"task {self.task}, seed {self.options.seed}, batch {self.options.batch}"
        if sampled:
            head += "; the rest was not read, and what follows is of these"
        lines = [head, self.feed.describe(), f"{number}: {shape}, {counted}"]
        if bars := histogram(self.loaded.lengths):
            most = max(count for _, count in bars)
            lines += [f"examples of {self.loaded.lengths.mean():,.0f} tokens on average"]
            lines += [f"  up to {n:>9,}  {x:>9,}  {'#' * round(40 * x / most)}" for n, x in bars]
        width = shutil.get_terminal_size((100, 24)).columns
        for i, row in enumerate(self.rows[:ROWS]):
            lines += ["", f"row {i}"]
            given = (b.ids, b.source, b.labels)
            if pictures := [x for x in given if x is not None and x.dim() > 2]:
                lines += picture(pictures[0][i])
            if self.coder is not None:
                lines += self._table(row, self.coder, width)
            if self.task == "segment":
                names = [self.loaded.classes[k] for k in row["labels"]]
                side = isqrt(len(names))
                lines += ["  " + " ".join(names[k : k + side]) for k in range(0, len(names), side)]
            if label := self._label(row):
                lines.append(f"  label  {label}")
        if self.rows[ROWS:]:
            lines += ["", f"and {len(self.rows) - ROWS:,} more rows; --json prints all"]
        return "\n".join(lines)

    def _table(self, row: dict[str, Any], coder: Coder, width: int) -> list[str]:
        """Tokens, ids, and what is learned; a dot under what is not."""
        lines = []
        if "source" in row:
            table = {"source": row["source"], "ids": list(map(str, row["source_ids"]))}
            lines = [*columns(table, [], width), ""]
        table = {"input": row["tokens"], "ids": list(map(str, row["ids"]))}
        if "counted" in row:
            labels = [max(label, 0) for label in row["labels"]]
            classes = self.loaded.classes if self.task == "tag" else ()
            names = [classes[i] for i in labels] if classes else coder.tokens(labels)
            table["label"] = [x if yes else "." for x, yes in zip(names, row["counted"])]
        if "rejected" in row:
            lines = [*columns({"rejected": row["rejected"]}, [], width), ""]
        doc = row.get("doc", [])
        borders = [k for k in range(1, len(doc)) if doc[k] != doc[k - 1]]
        return lines + columns(table, borders, width)

    def _label(self, row: dict[str, Any]) -> str:
        """The label of a whole example, if it has one."""
        label = row["labels"]
        if isinstance(label, int):
            return f"{self.loaded.classes[label]} ({label})" if label >= 0 else "not counted"
        if self.task != "answer" or self.coder is None:
            return ""
        first, last = label
        words = self.coder.tokens(row["ids"][first : last + 1]) if first >= 0 else ["(cut off)"]
        words = ["(unanswered)"] if last == 0 else words
        return f"{first} to {last}: {' '.join(map(visible, words))}"


# --- on a plain terminal --------------------------------------------------------------------------


def columns(table: dict[str, list[str]], borders: list[int], width: int) -> list[str]:
    """Lists side by side, one token below the other, in blocks that fit the width; a bar where a
    document ends."""
    edge = max(map(len, table)) + 4
    begin = [f"  {name}".ljust(edge) for name in table]
    blocks = [begin]
    for i, column in enumerate(zip(*(map(visible, cells) for cells in table.values()))):
        size, bar = max(map(breadth, column)), "| " if i in borders else ""
        used = breadth(blocks[-1][0])
        if used + size + len(bar) > width and used > edge:
            blocks.append(begin)
        cells = [f"{bar}{cell}{' ' * (size - breadth(cell) + 1)}" for cell in column]
        blocks[-1] = [line + cell for line, cell in zip(blocks[-1], cells)]
    return [line.rstrip() for block in blocks for line in block]


def histogram(lengths: Any) -> list[tuple[int, int]]:
    """(2^k, how many are at most that, and more than half), the shortest first."""
    powers = [(int(n) - 1).bit_length() for n in lengths if n > 0]
    return (
        [(1 << k, powers.count(k)) for k in range(min(powers), max(powers) + 1)] if powers else []
    )


def visible(text: str) -> str:
    """Spaces and control characters made visible."""
    shown = json.dumps(text, ensure_ascii=False)[1:-1].replace('\\"', '"').replace("\\\\", "\\")
    return shown.replace(" ", "\u2581") or "''"


def picture(x: Tensor) -> list[str]:
    """A picture (c h w) in characters, at most 56 wide; every second line, as characters are twice
    as high."""
    grey = x.float().mean(0)
    step = max(-(-grey.shape[1] // 56), 1)
    grey = grey[:: 2 * step, ::step]
    low, high = float(grey.min()), float(grey.max())
    level = ((grey - low) / max(high - low, 1e-9) * (len(SHADES) - 1)).round().long()
    return ["  " + "".join(SHADES[v] for v in row).rstrip() for row in level.tolist()]


@dataclass(frozen=True)
class TokenizerOptions:
    """Learn a tokenizer from files; the folder then has tokenizer.json and tokenizer_config.json.

    regard tokenizer train story.txt --out tok --vocab 4096
    regard tokenizer train in.de --target in.en --task seq2seq --out tok         one for both sides
    regard tokenizer train in.de --target in.en --task seq2seq --sides --out tok     tok/source and tok/target
    """

    files: DataFiles  # data files; * and ? are understood; .gz, .xz, .bz2, .zip, .zst too
    out: Annotated[str, arg(metavar="FOLDER")]  # the folder to write
    # bpe is byte-level and loses nothing
    kind: Literal["bpe", "wordpiece", "unigram", "chars", "bytes"] = "bpe"
    vocab: int = 8000  # tokens at most, special ones among them
    # which special tokens are usual: an end; begin and end; class, separator and mask
    task: Literal["lm", "seq2seq", "mlm"] = "lm"
    # special tokens instead: pad=<pad>; parts: pad, unk, bos, eos, cls, sep, mask
    special: Pairs = ()
    more: Annotated[Many[tuple[str, ...]], arg(metavar="TOKEN")] = ()  # one more special token
    # which of beginning and end are put around a text
    around: Literal["auto", "none", "start", "end", "both"] = "auto"
    lower: Switch = False  # all letters small
    min_count: int = 2  # pairs that are seen less often are not joined
    target: Files = ()  # files with the other side
    sides: Switch = False  # a tokenizer for each side
    overwrite: Switch = False  # replace the tokenizer that is there
    reading: Reading = Reading()


def tokenizer(options: TokenizerOptions) -> int:
    from regard.data.read import Source
    from regard.data.train_tokenizer import Recipe

    if not options.files:
        raise UsageError("name a data file")
    source = Source(options.files, options.target, **options.reading.settings())
    same = ("kind", "vocab", "task", "more", "lower", "min_count")
    recipe = Recipe(
        **{name: getattr(options, name) for name in same},
        special=pairs(options.special, "--special") or None,
        around=None if options.around == "auto" else options.around,
    )
    named = [r for r in "text second source target".split() if r in source.columns]  # noqa: SIM905
    roles = ["source", "target"] if source.beside else named or ["text"]
    if options.sides and len(roles) != 2:
        raise UsageError("--sides needs two sides: --target FILE, or --columns source=, target=")
    out = Path(options.out)
    groups = {out / role: [role] for role in roles} if options.sides else {out: roles}
    for folder in groups:
        file = next((path for path in (folder, *folder.parents) if path.is_file()), None)
        if file is not None:
            how = "a tokenizer is a folder; name another: --out FOLDER"
            raise UsageError(f"{file} is a file, {how}")
        if (folder / "tokenizer.json").exists() and not options.overwrite:
            how = "name another folder, or say --overwrite"
            raise UsageError(f"{folder / 'tokenizer.json'} exists; {how}")
    for folder, wanted in groups.items():
        with in_flags():
            print(learn(folder, source, roles, wanted, recipe))
    return 0


def learn(folder: Path, source: Source, roles: list[str], wanted: list[str], recipe: Recipe) -> str:
    """Write a tokenizer learned from the texts of the `wanted` roles; describe it."""
    from regard.data.read import DataError, LongText, records
    from regard.data.tokens import shown
    from regard.data.train_tokenizer import train_tokenizer, write_files
    from regard.text import Tokenizer, needed

    count = chars = 0
    sample: list[str] = []

    def counted(parts: Iterable[str], sampled: bool) -> Iterator[str]:
        nonlocal chars
        for part in parts:
            chars += len(part)
            if sampled:
                sample.append(part[:2000])
            sampled = False
            yield part

    def texts() -> Iterator[Iterable[str]]:
        nonlocal count
        for record in records(source, roles, long=True):
            for role in wanted:
                text = record[role]
                if not isinstance(text, str | LongText):
                    raise DataError(f"{record.where}: {role} must be text, got {shown(text)}")
                count += 1
                sampled = count % max(count // 100, 1) == 0 and len(sample) < 500
                yield counted([text] if isinstance(text, str) else text, sampled)

    write_files(folder, train_tokenizer(texts(), recipe))
    tokenizer = needed(Tokenizer.from_folder(folder))
    ids = [len(tokenizer.encode(text, special=False)) for text in sample]
    rate = sum(map(len, sample)) / max(sum(ids), 1)
    made = f"{recipe.kind}, {tokenizer.vocab:,} tokens, {rate:.2f} characters per token"
    return f"{folder}: {made}; learned from {count:,} texts ({chars:,} characters)"
