"""What the commands share: the model made ready, text in from files and stdin, the rate line on a terminal."""

from __future__ import annotations

import codecs
import contextlib
import errno
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from regard.checkpoint import load
from regard.decode.generate import generate, special_of, tokenizer_of, told
from regard.errors import DATA, ENVIRONMENT, Fault, UsageError
from regard.fast.cpu import perplexity_change, prepare
from regard.kernels.linear import packs
from regard.models import Model
from regard.text import needed

if TYPE_CHECKING:
    from regard.cli.parse import Machine

DTYPES = {"auto": None, "fp32": torch.float32, "bf16": torch.bfloat16}
TRAINED = "trained_length"  # the key of config.json with the longest row of training
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@contextlib.contextmanager
def blaming(code: int, files: int | None = None) -> Iterator[None]:
    """Give the mistakes found in here this exit code, but for those that have their own; and this, or `files`, those
    of reading files."""
    try:
        yield
    except UsageError as error:
        raise Fault(str(error), getattr(error, "code", code)) from None
    except OSError as error:
        if error.errno == errno.ENOSPC:  # it is what was written that had no room
            raise
        name = "the model folder" if error.filename is None else str(error.filename)
        why = f"{name!r:.80} cannot be read: {error.strerror or error}"
        raise Fault(why, code if files is None else files) from None


# --- the model ----------------------------------------------------------------------------------------------------


class Opened:
    """A model from its folder, ready to run: packed for the CPU, or as it is on a GPU.

    On a GPU too it is driven by the engine, not by GraphDecoder, which serves many requests together and gives no
    pieces, log probabilities, stop strings or beams."""

    def __init__(self, folder: str, machine: Machine, rows: int):
        device, why = pick_device(machine.device)
        with blaming(DATA):
            where = resolved(folder)
            self.plain: Model = load(where, device=device, dtype=DTYPES[machine.dtype])
            self.tokenizer = tokenizer_of(self.plain)
            told(self.plain)
        self.model, quantized = self.plain, machine.quantize != "none"
        self.precision = machine.quantize if quantized else precision_of(self.plain, machine.dtype)
        if quantized or device.type == "cpu":
            self.model = prepare(self.plain, self.precision, rows=rows)
        if not quantized:
            self.plain = self.model
        talk(f"{device} ({why}), {self.precision}")

    @property
    def two(self) -> bool:
        return hasattr(self.model, "encode")

    def compare(self, prompt: Any) -> None:
        """Say what quantization costs: perplexity of the prompt, or of the plain model's answer to it where the prompt
        is a source. Then let the plain model go. A prompt that leaves no room is refused later."""
        if self.plain is self.model:
            return
        plain, self.plain = self.plain, self.model
        text, longest = isinstance(prompt, str), context_of(plain)
        given = needed(self.tokenizer).encode(prompt) if text else list(prompt)
        if longest is not None and len(given) >= longest:
            return
        what, source, ids = "the prompt", None, given
        if self.two:
            what, source = "the plain model's answer", torch.tensor([given])
            ids = [start_of(plain), *generate(plain, [given], max_new_tokens=32)[0].ids]
        if len(ids) > 1:
            where = next(plain.parameters()).device
            moved = None if source is None else source.to(where)
            rows = torch.tensor([ids], device=where)
            before, after = perplexity_change(plain, self.model, rows, source=moved)
            change = f"perplexity of {what} {before:.4g} -> {after:.4g} ({len(ids)} tokens)"
            print(f"{self.precision}: {change}", file=sys.stderr)


def resolved(folder: str) -> str:
    """The model folder that is meant: of a run's folder its best model, or its last where none was evaluated."""
    home = Path(folder)
    for place in (home, home / "best", home / "last"):
        if any((place / name).is_file() for name in ("config.json", "adapter.json")):
            return str(place)
    if (home / "run.json").is_file() or (home / "checkpoints").is_dir():
        raise Fault(f"the run {folder} has saved no model yet; wait for a checkpoint", DATA)
    return folder


def run_data(folder: str) -> dict[str, Any]:
    """The table [data] of the run that a model folder belongs to; {} where there is none."""
    home = Path(folder).resolve()
    for place in (home, *home.parents[:2]):
        try:
            said = json.loads((place / "run.json").read_text("utf-8"))
            return {**said["config"]["data"]}
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
    return {}


def start_of(model: Model) -> int:
    return special_of(model).start or 0


def context_of(model: Model) -> int | None:
    return getattr(model.config, "max_len", None)


def trained_length(model: Model) -> int | None:
    """The longest row the model was trained on; None where its folder does not say."""
    found = model.origin.config.get(TRAINED) if model.origin is not None else None
    return found if isinstance(found, int) and found > 0 else None


def past_training(model: Model, length: int) -> None:
    """Say that so many tokens are more than the model was trained on."""
    trained = trained_length(model)
    if trained is not None and length > trained:
        print(
            f"note: {length:,} tokens are past the {trained:,} that this model was trained on; what is beyond may be "
            "worth little",
            file=sys.stderr,
        )


def pick_device(name: str) -> tuple[torch.device, str]:
    """The device, and why it is that one."""
    if not re.fullmatch("auto|cpu|cuda(:[0-9]{1,4})?", name):
        raise UsageError(f"--device is {name!r:.60}; choose auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return (torch.device("cuda"), "auto") if count else (torch.device("cpu"), "no cuda device")
    kind, _, index = name.partition(":")
    if kind == "cuda" and int(index or 0) >= count:
        raise Fault(
            f"--device {name}: this machine has {count} cuda devices that torch can use; try --device cpu",
            ENVIRONMENT,
        )
    return torch.device(name), "as asked"


def precision_of(model: Model, asked: str) -> str:
    """What the model runs in. On a CPU half precision is bf16, or fp32 where the CPU has no bf16 and none was asked."""
    weight = next(model.parameters())
    if weight.device.type != "cpu":
        return NAMES.get(weight.dtype, str(weight.dtype))
    half = weight.dtype.itemsize < 4
    return "bf16" if half and (asked == "bf16" or packs("cpu", torch.bfloat16)) else "fp32"


# --- text in ------------------------------------------------------------------------------------------------------


def read_lines(stream: BinaryIO, name: str) -> Iterator[str]:
    """Lines of UTF-8, ended by \\n or \\r\\n and by nothing else: one line in must stay one line out."""
    for number, raw in enumerate(stream, 1):
        raw = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
        yield decoded(raw.removesuffix(b"\n").removesuffix(b"\r"), f"line {number} of {name}")


def decoded(raw: bytes, what: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Fault(
            f"{what} is no UTF-8 text: byte {error.start} is 0x{raw[error.start]:02x}; convert it, for example with "
            "iconv -t utf-8",
            DATA,
        ) from None


@contextlib.contextmanager
def opened(path: str) -> Iterator[tuple[BinaryIO, str]]:
    """A file, or stdin for -, and what to call it."""
    if path == "-":
        if sys.stdin.isatty():
            talk("reading the keyboard; Ctrl-D ends")
        yield sys.stdin.buffer, "stdin"
        return
    with blaming(DATA):
        file = open(path, "rb")  # noqa: SIM115  what goes wrong while it is used is no fault of the file
    with file:
        yield file, path


# --- talk ---------------------------------------------------------------------------------------------------------


def talk(text: str) -> None:
    """A line for people; files and pipes get none."""
    if sys.stderr.isatty():
        print(dim(text), file=sys.stderr)


def dim(text: str) -> str:
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb"
    return text if plain else f"\x1b[2m{text}\x1b[0m"


class Rate:
    """Tokens a second, on stderr if that is a terminal: while they come, unless text is written to the same screen,
    and when all is done."""

    def __init__(self, streaming: bool):
        self.shown = sys.stderr.isatty()
        self.live = self.shown and not (streaming and sys.stdout.isatty())
        self.begin = self.last = time.monotonic()
        self.tokens = 0

    def add(self, tokens: int, more: str = "") -> None:
        self.tokens += tokens
        now = time.monotonic()
        if self.live and now - self.last > 0.2:
            self.last = now
            print(f"\r{dim(self.text() + more)}\x1b[K", end="", file=sys.stderr, flush=True)

    def text(self) -> str:
        seconds = max(time.monotonic() - self.begin, 1e-9)
        return f"{self.tokens} tokens, {self.tokens / seconds:.1f} tokens/s"

    def done(self, more: str) -> None:
        if self.shown:
            clear = "\r\x1b[K" if self.live else ""
            print(f"{clear}{dim(self.text() + more)}", file=sys.stderr)
