"""regard data peek, regard tokenizer train: what they can be told, and the second's work (the first's is in
regard.cli.peek). Importing this needs neither torch nor numpy."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg
from tyro.conf import UseAppendAction as Many

from regard.cli.parse import Count, Switch
from regard.errors import UsageError

if TYPE_CHECKING:
    from regard.data.read import Source

Files = Annotated[Positional[tuple[str, ...]], arg(metavar="FILE ...")]
Named = Annotated[Many[tuple[str, ...]], arg(metavar="NAME=VALUE")]
More = Annotated[Many[tuple[str, ...]], arg(metavar="FILE")]
Folder = Annotated[str | None, arg(metavar="FOLDER")]


@dataclass(frozen=True)
class Reading:
    """How the files are read."""

    format: str = "auto"
    """text, tsv, csv, jsonl, squad, parquet, hub, npz, npy, idx, images; auto: by the name"""
    unit: Literal["file", "line", "paragraph"] = "file"
    """what is one document of plain text"""
    marker: str = ""
    """a text that stands between documents, such as <|endoftext|>"""
    columns: Named = ()
    """which column has a role (text, second, source, target, label, words, tags, start, end), by number from 0 or by
    name: text=1"""
    header: Annotated[bool | None, arg(metavar="True|False")] = None
    """whether the first line names the columns; left out: it does if columns are given by name"""
    size: Count = None
    """scale pictures to N x N"""


@dataclass(frozen=True)
class Peek:
    """Print a real batch of training data: tokens, ids, and what is learned from them.

    regard data peek story.toml                                     as training with this config will see it
    regard data peek story.txt --tokenizer MODEL --length 64        documents packed into rows
    regard data peek in.de --target in.en --tokenizer MODEL         source and target
    regard data peek reviews.tsv --columns text=1 --columns label=0 --task classify --tokenizer MODEL
    """

    files: Files
    """data files; * and ? are understood; .gz and .xz too; or a training config (.toml), which says all the rest"""
    target: More = ()
    """files with the other side, line by line; classes of npy and idx files"""
    tokenizer: Folder = None
    """a model folder, a run's folder, or what regard tokenizer train wrote"""
    task: Literal["auto", "lm", "mlm", "seq2seq", "classify", "tag", "answer", "image"] = "auto"
    """auto: seq2seq with a target, image for pictures, classify with a label, else lm"""
    length: Count = None
    """tokens of a row; default: 128 where documents are packed, else as long as the data"""
    rows: Count = None
    """rows of a batch; default: 4"""
    tokens: Count = None
    """tokens of a batch (of each side), padding included"""
    pack: Literal["documents", "stream", "windows", "none"] = "documents"
    """how documents of a language model share rows"""
    overlong: Literal["error", "truncate", "drop", "split"] = "error"
    """what happens to examples that are longer than a row"""
    seed: int = 0
    """another number, another order"""
    batch: int = 0
    """which batch"""
    json: Switch = False
    """one JSON object"""
    reading: Reading = field(default_factory=Reading)


@dataclass(frozen=True)
class Train:
    """Learn a tokenizer from files; the folder then has tokenizer.json and tokenizer_config.json.

    regard tokenizer train story.txt --out tok --vocab 4096
    regard tokenizer train in.de --target in.en --task seq2seq --out tok         one for both sides
    regard tokenizer train in.de --target in.en --task seq2seq --sides --out tok     tok/source and tok/target
    """

    files: Files
    """data files; * and ? are understood; .gz and .xz too"""
    out: Annotated[str, arg(metavar="FOLDER")]
    """the folder to write"""
    kind: Literal["bpe", "wordpiece", "unigram", "chars", "bytes"] = "bpe"
    """bpe is byte-level and loses nothing"""
    vocab: int = 8000
    """tokens at most, special ones among them"""
    task: Literal["lm", "seq2seq", "mlm"] = "lm"
    """which special tokens are usual: an end; begin and end; class, separator and mask"""
    special: Named = ()
    """special tokens instead: pad=<pad>; parts: pad, unk, bos, eos, cls, sep, mask"""
    more: Annotated[Many[tuple[str, ...]], arg(metavar="TOKEN")] = ()
    """one more special token"""
    around: Literal["auto", "none", "start", "end", "both"] = "auto"
    """which of beginning and end are put around a text"""
    lower: Switch = False
    """all letters small"""
    min_count: int = 2
    """pairs that are seen less often are not joined"""
    target: More = ()
    """files with the other side"""
    sides: Switch = False
    """a tokenizer for each side"""
    overwrite: Switch = False
    """replace the tokenizer that is there"""
    reading: Reading = field(default_factory=Reading)


def run(options: Peek | Train) -> int:
    if isinstance(options, Peek):
        from regard.cli.peek import peek

        return peek(options)
    return train(options)


def check_given(files: tuple[str, ...]) -> None:
    if not files:
        raise UsageError("name a data file")


def pairs_of(given: tuple[str, ...], flag: str) -> dict[str, str]:
    """NAME=VALUE ... as a table."""
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name or not equals or not value:
            raise UsageError(f"{flag} is {text!r:.60}; give NAME=VALUE, for example {flag} text=1")
        found[name] = value
    return found


def settings(reading: Reading) -> dict[str, Any]:
    """The settings of a Source."""
    said = {name: getattr(reading, name) for name in ("format", "unit", "marker", "header", "size")}
    return {**said, "columns": pairs_of(reading.columns, "--columns")}


# --- regard tokenizer train ---------------------------------------------------------------------------------------


def train(options: Train) -> int:
    from regard.data.read import Source
    from regard.data.train_tokenizer import Recipe, train_tokenizer, write_files

    check_given(options.files)
    source = Source(options.files, options.target, **settings(options.reading))
    special = pairs_of(options.special, "--special")
    recipe = Recipe(
        kind=options.kind,
        vocab=options.vocab,
        task=options.task,
        special=special or None,
        more=options.more,
        around=None if options.around == "auto" else options.around,
        lower=options.lower,
        min_count=options.min_count,
    )
    roles = roles_of(source)
    if options.sides and len(roles) != 2:
        raise UsageError("--sides needs two sides: --target FILE, or --columns source=, target=")
    out = Path(options.out)
    groups = {out / role: (role,) for role in roles} if options.sides else {out: roles}
    for folder in groups:
        file = next((path for path in (folder, *folder.parents) if path.is_file()), None)
        if file is not None:
            raise UsageError(
                f"{file} is a file, a tokenizer is a folder; name another: --out FOLDER"
            )
        if (folder / "tokenizer.json").exists() and not options.overwrite:
            raise UsageError(
                f"{folder / 'tokenizer.json'} exists; name another folder, or say --overwrite"
            )
    for folder, wanted in groups.items():
        count = _Counted(source, roles, wanted)
        write_files(folder, train_tokenizer(count, recipe))
        print(_summary(folder, options.kind, count))
    return 0


class _Counted:
    """The texts of some roles, counted as they go by."""

    def __init__(self, source: Source, roles: tuple[str, ...], wanted: tuple[str, ...]):
        self.source, self.roles, self.wanted = source, roles, wanted
        self.texts = self.chars = 0
        self.sample: list[str] = []

    def __iter__(self) -> Any:
        from regard.data.read import DataError, records

        for record in records(self.source, self.roles):
            for role in self.wanted:
                text = record[role]
                if not isinstance(text, str):
                    raise DataError(f"{role} must be text, one is {text!r:.60}")
                self.texts, self.chars = self.texts + 1, self.chars + len(text)
                if self.texts % max(self.texts // 100, 1) == 0 and len(self.sample) < 500:
                    self.sample.append(text[:2000])
                yield text


def roles_of(source: Source) -> tuple[str, ...]:
    """The roles that hold text."""
    if source.beside:
        return ("source", "target")
    return tuple(r for r in ("text", "second", "source", "target") if r in source.columns) or (
        "text",
    )


def _summary(folder: Path, kind: str, count: _Counted) -> str:
    from regard.text import Tokenizer, needed

    tokenizer = needed(Tokenizer.from_folder(folder))
    ids = [len(tokenizer.encode(text, special=False)) for text in count.sample]
    rate = sum(map(len, count.sample)) / max(sum(ids), 1)
    return (
        f"{folder}: {kind}, {tokenizer.vocab:,} tokens, {rate:.2f} characters a token; learned from "
        f"{count.texts:,} texts ({count.chars:,} characters)"
    )
