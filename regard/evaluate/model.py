"""A model made ready to run on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from regard.checkpoint import load
from regard.decode.generate import generate, special_of, tokenizer_of, told
from regard.errors import DATA, UsageError, blaming, notice
from regard.fast.cpu import perplexity_change, prepare
from regard.files import TRAINED, resolve_model
from regard.kernels.linear import packs
from regard.models import Model, Patches
from regard.text import needed
from regard.train.plan import pick_device

DTYPES = {"auto": None, "fp32": torch.float32, "bf16": torch.bfloat16}
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Opened:
    """A model, or one from its folder or its run's, ready to run: packed for the CPU, or as it is
    on a GPU, where the engine finds its graph."""

    def __init__(
        self,
        model: str | Path | Model,
        rows: int = 1,
        *,
        device: str = "auto",
        dtype: str = "auto",
        quantize: str = "none",
    ):
        place, why = pick_device(device)
        with blaming(DATA):
            if isinstance(model, str | Path):
                model = load(resolve_model(model), device=place, dtype=DTYPES[dtype])
            self.tokenizer = tokenizer_of(model)
            told(model)
        self.plain: Model = model
        self.precision = quantize if quantize != "none" else precision_of(model, dtype)
        place = next(model.parameters()).device
        packed = quantize != "none" or place.type == "cpu"
        self.model: Any = prepare(model, self.precision, rows=rows) if packed else model
        if quantize == "none":
            self.plain = self.model
        self.about = f"{place} ({why}), {self.precision}"

    @property
    def encodes(self) -> bool:
        """Whether it is an encoder-decoder."""
        return self.model.reads_source

    def compare(self, prompt: Any) -> str:
        """What quantization costs, in a line: perplexity of the prompt, or of the plain model's
        answer to it where the prompt is a source; nothing where nothing is quantized. Then the
        plain model goes. A prompt that leaves no room is refused later."""
        if self.plain is self.model:
            return ""
        plain, self.plain = self.plain, self.model
        text, longest = isinstance(prompt, str), getattr(plain.config, "max_len", None)
        given = needed(self.tokenizer).encode(prompt) if text else list(prompt)
        if longest is not None and len(given) >= longest:
            return ""
        place = next(plain.parameters()).device
        what, source, ids = "the prompt", None, given
        if self.encodes:
            what, source = "the plain model's answer", torch.tensor([given], device=place)
            start = special_of(plain).start or 0
            ids = [start, *generate(plain, [given], max_new_tokens=32)[0].ids]
        if len(ids) < 2:
            return ""
        rows = torch.tensor([ids], device=place)
        before, after = perplexity_change(plain, self.model, rows, source=source)
        change = f"perplexity of {what} {before:.4g} -> {after:.4g} ({len(ids)} tokens)"
        return f"{self.precision}: {change}"


def precision_of(model: Model, asked: str) -> str:
    """What the model runs in. On a CPU half precision is bf16, or fp32 where the CPU has no bf16
    and none was asked."""
    weight = next(model.parameters())
    if weight.device.type != "cpu":
        return NAMES.get(weight.dtype, str(weight.dtype))
    half = weight.dtype.itemsize < 4
    return "bf16" if half and (asked == "bf16" or packs("cpu", torch.bfloat16)) else "fp32"


def trained_length(model: Model) -> int | None:
    """The longest row the model was trained on; None where its folder does not say."""
    length = model.origin.config.get(TRAINED) if model.origin is not None else None
    return length if isinstance(length, int) and length > 0 else None


def notice_length(model: Model, length: int) -> None:
    """Say that so many tokens are more than the model was trained on."""
    trained = trained_length(model)
    if trained is not None and length > trained:
        notice(
            f"{length:,} tokens are past the {trained:,} that this model was trained on; what is beyond may be worth "
            "little"
        )


def check_reads_text(model: Any) -> None:
    first = getattr(model.config, "source", None) or getattr(model.config, "embedding", None)
    if isinstance(first, Patches):
        raise UsageError(
            "this model reads images; in Python: regard.generate(regard.load(folder), image)"
        )
