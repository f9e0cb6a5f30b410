"""regard convert: GGUF files and pickled weights become model folders with safetensors."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from regard.checkpoint.convert import Originals, find, pickled
from regard.checkpoint.gguf import describe, from_gguf, gguf_dtype
from regard.cli.model import blaming, dim
from regard.cli.options_work import Convert
from regard.errors import DATA, RUN, UsageError, notice
from regard.text.gguf_tokens import tokenizer_files

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def run(options: Convert) -> int:
    out, dtype = Path(options.folder), DTYPES.get(options.dtype)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError(f"{out} is there already and not an empty folder; name another")
    with blaming(DATA):
        found = find(Path(options.source))
    if found.pickled:
        convert_pickled(found, out, dtype)
    else:
        convert_gguf(found.weights[0], out, dtype)
    print(out)
    return 0


def convert_pickled(found: Originals, out: Path, dtype: torch.dtype | None) -> None:
    if found.left_out:
        notice(f"left out: {', '.join(found.left_out)}")
    with blaming(DATA):
        why_not = pickled(found, out, dtype, progress)
    if why_not:
        notice(f"the folder is written, but Regard does not read the model in it: {why_not}")


def convert_gguf(path: Path, out: Path, dtype: torch.dtype | None) -> None:
    with blaming(DATA):
        described = describe(path)
        files, notices = tokenizer_files(described.file.metadata)
    for text in notices:
        notice(text)
    stored, most = gguf_dtype(described.file)
    dtype = dtype or stored
    with blaming(RUN):
        from_gguf(described, out, dtype, files, progress)
    kind = described.config["architectures"][0]
    notice(
        f"a {kind}; most of its weights are {most}, written as {str(dtype).removeprefix('torch.')}"
    )


def progress(done: int, total: int) -> None:
    """A line that is written over, on a terminal."""
    if sys.stderr.isatty():
        end = "\r\x1b[K" if done == total else ""
        print(
            f"\r{dim(f'tensor {done} of {total}')}\x1b[K{end}", end="", file=sys.stderr, flush=True
        )
