"""regard tokenizer train: learn a tokenizer from files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import UseAppendAction as Many
from tyro.conf import arg

from regard.cli.shared import DataFiles, Files, Pairs, Reading, Switch, pairs
from regard.errors import UsageError

if TYPE_CHECKING:
    from regard.data.read import Source


@dataclass(frozen=True)
class Options:
    """Learn a tokenizer from files; the folder then has tokenizer.json and tokenizer_config.json.

    regard tokenizer train story.txt --out tok --vocab 4096
    regard tokenizer train in.de --target in.en --task seq2seq --out tok         one for both sides
    regard tokenizer train in.de --target in.en --task seq2seq --sides --out tok     tok/source and tok/target
    """

    files: DataFiles  # data files; * and ? are understood; .gz and .xz too
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


def run(options: Options) -> int:
    from regard.data.read import Source
    from regard.data.train_tokenizer import Recipe, train_tokenizer, write_files

    if not options.files:
        raise UsageError("name a data file")
    source = Source(options.files, options.target, **options.reading.settings())
    recipe = Recipe(
        kind=options.kind,
        vocab=options.vocab,
        task=options.task,
        special=pairs(options.special, "--special") or None,
        more=options.more,
        around=None if options.around == "auto" else options.around,
        lower=options.lower,
        min_count=options.min_count,
    )
    roles = ("source", "target") if source.beside else text_columns(source)
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
        texts = Texts(source, roles, wanted)
        write_files(folder, train_tokenizer(texts, recipe))
        print(summary(folder, options.kind, texts))
    return 0


def text_columns(source: Source) -> tuple[str, ...]:
    """The roles that hold text."""
    columns = (r for r in ("text", "second", "source", "target") if r in source.columns)
    return tuple(columns) or ("text",)


class Texts:
    """The texts of roles, counted as they go by."""

    def __init__(self, source: Source, roles: tuple[str, ...], wanted: tuple[str, ...]):
        self.source, self.roles, self.wanted = source, roles, wanted
        self.count = self.chars = 0
        self.sample: list[str] = []

    def __iter__(self) -> Any:
        from regard.data.read import DataError, records

        for record in records(self.source, self.roles):
            for role in self.wanted:
                text = record[role]
                if not isinstance(text, str):
                    raise DataError(f"{role} must be text, one is {text!r:.60}")
                self.count, self.chars = self.count + 1, self.chars + len(text)
                if self.count % max(self.count // 100, 1) == 0 and len(self.sample) < 500:
                    self.sample.append(text[:2000])
                yield text


def summary(folder: Path, kind: str, texts: Texts) -> str:
    from regard.text import Tokenizer, needed

    tokenizer = needed(Tokenizer.from_folder(folder))
    ids = [len(tokenizer.encode(text, special=False)) for text in texts.sample]
    rate = sum(map(len, texts.sample)) / max(sum(ids), 1)
    return (
        f"{folder}: {kind}, {tokenizer.vocab:,} tokens, {rate:.2f} characters a token; learned from "
        f"{texts.count:,} texts ({texts.chars:,} characters)"
    )
