"""regard convert: GGUF files and pickled weights become model folders with safetensors."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from regard.cli.shared import check_new_folder, dim
from regard.errors import DATA, RUN, blaming, notice

if TYPE_CHECKING:
    import torch

    from regard.checkpoint.convert import Originals


@dataclass(frozen=True)
class Options:
    """Bring in a model that is not stored as safetensors: pickled weights, or a GGUF file with its tokenizer.

    regard convert model-Q4_K_M.gguf model           then: regard generate model "Once upon a time"
    regard convert old-folder new-folder             pytorch_model.bin and the like, with config.json beside it
    """

    source: Annotated[Positional[str], arg(metavar="SOURCE")]
    """a GGUF file, a folder with config.json and pickled weights, or one such file in it"""
    folder: Annotated[Positional[str], arg(metavar="FOLDER")]
    """the new folder; one that has files in it is refused"""
    dtype: Literal["auto", "fp32", "fp16", "bf16"] = "auto"
    """type of the weights; auto: as they are stored, fp16 for what is quantised"""


def run(options: Options) -> int:
    import torch

    from regard.checkpoint.convert import find

    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    out, dtype = Path(options.folder), dtypes.get(options.dtype)
    check_new_folder(out)
    with blaming(DATA):
        model = find(Path(options.source))
    if model.pickled:
        convert_pickled(model, out, dtype)
    else:
        convert_gguf(model.weights[0], out, dtype)
    print(out)
    return 0


def convert_pickled(model: Originals, out: Path, dtype: torch.dtype | None) -> None:
    from regard.checkpoint.convert import pickled

    if model.left_out:
        notice(f"left out: {', '.join(model.left_out)}")
    with blaming(DATA):
        why_not = pickled(model, out, dtype, progress)
    if why_not:
        notice(f"the folder is written, but Regard does not read the model in it: {why_not}")


def convert_gguf(path: Path, out: Path, dtype: torch.dtype | None) -> None:
    from regard.checkpoint.gguf import describe, from_gguf, gguf_dtype
    from regard.text.gguf_tokens import tokenizer_files

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
