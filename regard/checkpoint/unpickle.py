"""The process that reads pickled weights and writes safetensors; see `convert.pickled`, which starts and watches it.

torch.load with weights_only builds tensors and plain containers and calls nothing else. The process has a limit on its
memory and may open no connection and start no program, should that ever fail to hold. It answers in lines of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.checkpoint.store import DTYPES, narrowed, write_weights
from regard.errors import UsageError

NESTED = ("state_dict", "model_state_dict", "model")
SPARE = 2**32
FORBIDDEN = ("socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn")


def main(folder: str, dtype: str, *files: str) -> None:
    confine(sum(os.path.getsize(file) for file in files))
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in tensors_of(file).items():
            if name in tensors:
                raise UsageError(f"{file} repeats the tensor {name} of another file")
            tensors[name] = tensor
    kind = getattr(torch, dtype) if dtype else None
    planned = {
        name: torch.empty_like(x, device="meta", dtype=kind if x.is_floating_point() else None)
        for name, x in tensors.items()
    }

    def read(name: str) -> Tensor:
        say(read=name)
        return narrowed(tensors[name].detach(), planned[name].dtype, name)

    say(bytes=sum(x.nbytes for x in planned.values()), tensors=len(planned))
    try:
        write_weights(Path(folder), planned, read=read)
    except OSError as error:
        raise UsageError(f"the weights cannot be written: {error.strerror}") from None
    say(done=True)


def confine(size: int) -> None:
    """No more memory than files of this size need, no connections, no programs."""
    # The allocator reserves address space ahead, a gigabyte at the first tensor: counted before.
    torch.empty(1)
    # A system without /proc has no such limit either.
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + 2 * size + SPARE
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))

    def refuse(event: str, _: Any) -> None:
        if event.startswith(FORBIDDEN):
            raise RuntimeError(f"{event} is forbidden here")

    sys.addaudithook(refuse)


def tensors_of(file: str) -> dict[str, Tensor]:
    """The state dict in a file, mapped rather than read where its format allows that."""
    with open(file, "rb") as opened:
        zipped = opened.read(4) == b"PK\x03\x04"
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:
        raise UsageError(refusal(file, error)) from None
    for name in NESTED:
        if isinstance(state, dict) and isinstance(state.get(name), dict):
            state = state[name]
    if not isinstance(state, dict) or not state:
        raise UsageError(f"{file} holds a {type(state).__name__}, not a state dict with tensors")
    for name, x in state.items():
        plain = isinstance(name, str) and isinstance(x, Tensor) and x.layout == torch.strided
        if not plain or x.dtype not in DTYPES.values():
            what = f"{x.layout} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
            raise UsageError(f"{file} holds under {name!r:.80} a {what}, not a plain tensor")
    return state


def refusal(file: str, error: Exception) -> str:
    text = str(error)
    named = re.search(r"GLOBAL (\S+)", text)
    if type(error).__name__ == "UnpicklingError" and named:
        return (
            f"{file} is refused: it asks for {named[1]}, and to read that could run code. Get the model as "
            "safetensors, or save its state_dict() alone where you trust it"
        )
    if isinstance(error, MemoryError) or "allocate memory" in text:
        return f"{file} asks for more memory than a file of its size can need"
    why = text.rpartition("WeightsUnpickler error: ")[2].strip().partition("\n")[0]
    return f"{file} is not a whole file of pickled weights ({why:.200}); copy or download it again"


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except UsageError as error:
        say(error=str(error))
        sys.exit(1)
