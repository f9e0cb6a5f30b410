"""regard tokenizer train: learn a tokenizer from files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import UseAppendAction as Many
from tyro.conf import arg

from regard.cli.shared import DataFiles, Files, Pairs, Reading, Switch, pairs
from regard.errors import UsageError

if TYPE_CHECKING:
    from regard.data.read import Source
    from regard.data.train_tokenizer import Recipe


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
        print(learn(folder, source, roles, wanted, recipe))
    return 0


def learn(folder: Path, source: Source, roles: list[str], wanted: list[str], recipe: Recipe) -> str:
    """Write a tokenizer that is learned from the texts of some roles; what was made."""
    from regard.data.read import DataError, records
    from regard.data.train_tokenizer import train_tokenizer, write_files
    from regard.text import Tokenizer, needed

    count = chars = 0
    sample: list[str] = []

    def texts() -> Iterator[str]:
        nonlocal count, chars
        for record in records(source, roles):
            for role in wanted:
                text = record[role]
                if not isinstance(text, str):
                    raise DataError(f"{role} must be text, one is {text!r:.60}")
                count, chars = count + 1, chars + len(text)
                if count % max(count // 100, 1) == 0 and len(sample) < 500:
                    sample.append(text[:2000])
                yield text

    write_files(folder, train_tokenizer(texts(), recipe))
    tokenizer = needed(Tokenizer.from_folder(folder))
    ids = [len(tokenizer.encode(text, special=False)) for text in sample]
    rate = sum(map(len, sample)) / max(sum(ids), 1)
    made = f"{recipe.kind}, {tokenizer.vocab:,} tokens, {rate:.2f} characters per token"
    return f"{folder}: {made}; learned from {count:,} texts ({chars:,} characters)"
