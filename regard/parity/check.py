"""Bug or rounding? One model run in every way it can be run, each held against float64.

    checks = parity(model)  # a list of Check: equal, rounding, tie or bug, and where the first bug is

Every run is recorded tensor by tensor (record.py), compared step by step with what float64 makes of the run's own
numbers (oracle.py), and judged by what rounding can do there (rounding.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from regard.attention.protocol import Mechanism
from regard.errors import UsageError
from regard.fast.watch import Form
from regard.models import Model
from regard.parity.oracle import oracle, steps
from regard.parity.record import Given, Trace
from regard.parity.rounding import SAMPLES, Envelope, Finding, judge
from regard.parity.ways import Runner, sample

Run = Callable[[Given], Trace]


@dataclass(frozen=True)
class Check:
    """One run against another. `worst`: the largest error of both in units of the envelope; `where`: the tensor that
    has it, which for a bug or a tie is the first one outside. A tie: scores of an indexer are equal, and the runs chose
    different keys among them; neither is wrong."""

    name: str
    verdict: str  # equal, rounding, tie, bug
    difference: float  # the largest between the answers
    worst: float
    where: str
    run: str = ""  # which of both has the bug, or chose other keys than ours
    row: int = 0
    position: int = 0


# --- the runs -----------------------------------------------------------------------------------------------------


def runs_of(model: Model, given: Given) -> dict[str, Run]:
    """Every way in which this model can be run."""
    # Rows of text may have different lengths; images have none.
    text = given.ids.dim() == 2
    size = given.ids.shape[1] if text else 1
    half = max(1, size // 2)
    chunks = [half, 1, *([size - half - 1] if size > half + 1 else [])]

    def cached(layout: str, chunks: list[int], shuffled: bool = False) -> Run:
        return lambda g: Runner(model, g).cached(layout, chunks, shuffled)

    def formed(form: str) -> Run:
        return lambda g: Runner(Form(form).copy(model), g).alone()

    runs: dict[str, Run] = {
        "reference": lambda g: Runner(model, g, "reference").alone(),
        "fused": lambda g: Runner(model, g).alone(),
        "batch": lambda g: Runner(model, g).together(),
    }
    if text:
        runs["padded"] = lambda g: Runner(model, g).together(cut=True)
    if model.decodes:
        runs["contiguous"] = cached("contiguous", chunks)
        runs["prefill"] = cached("contiguous", [size])
        runs["decode"] = cached("contiguous", [1] * size)
        runs["reordered"] = cached("contiguous", chunks, shuffled=True)
        if any(spec.token for spec in model.cache_specs()):
            runs["paged"] = cached("paged", chunks, shuffled=True)
            if None not in model.windows():
                runs["ring"] = cached("ring", [3] * (size // 3))
    mechanisms = (m for m in model.modules() if isinstance(m, Mechanism))
    runs |= {form: formed(form) for m in mechanisms for form in m.forms}
    runs["bf16"] = lambda g: Runner(copy.deepcopy(model).bfloat16(), g).alone()
    if torch.cuda.is_available():
        runs["GPU"] = lambda g: on_gpu(model, g)
    return runs


def on_gpu(model: Model, given: Given) -> Trace:
    # Else convolutions are of ten bits.
    with torch.backends.cudnn.flags(allow_tf32=False):
        return Runner(copy.deepcopy(model).cuda(), given).alone()


# --- the checks ---------------------------------------------------------------------------------------------------

CHECKS = {
    "fused against reference": ("fused", "reference"),
    "batch against single": ("batch", "fused"),
    "padded against unpadded": ("padded", "fused"),
    "cached against uncached": ("contiguous", "fused"),
    "ring against uncached": ("ring", "fused"),
    "paged against uncached": ("paged", "fused"),
    "prefill against decode": ("prefill", "decode"),
    "rows reordered": ("reordered", "fused"),
    "absorbed against expanded": ("absorbed", "expanded"),
    "bf16 against fp32": ("bf16", "fused"),
    "packed against plain": ("packed", "fused"),
    "GPU against CPU": ("GPU", "fused"),
    "ours against transformers": ("fused", "transformers"),
}


class Court:
    """Runs, judged once each."""

    def __init__(self, model: Model, given: Given, runs: dict[str, Run]):
        self.model, self.given, self.runs = model, given, runs
        self.oracles: dict[torch.dtype, tuple[Model, Trace]] = {}
        self.envelopes: dict[tuple[torch.dtype, bool], Envelope] = {}
        self.done: dict[str, tuple[Trace, Finding]] = {}

    @torch.no_grad()
    def judged(self, name: str) -> tuple[Trace, Finding]:
        if name not in self.done:
            trace = self.runs[name](self.given)
            envelope = self.envelope(trace.dtype, trace.whole)
            exact = self.oracles[trace.dtype][0]
            self.done[name] = trace, judge(steps(exact, self.given, trace), envelope)
        return self.done[name]

    def envelope(self, dtype: torch.dtype, whole: bool) -> Envelope:
        many = self.given.times(SAMPLES)
        if dtype not in self.oracles:
            exact = oracle(self.model, dtype)
            self.oracles[dtype] = exact, Runner(exact, many, "reference").together()
        if (dtype, whole) not in self.envelopes:
            exact, trace = self.oracles[dtype]
            trace = trace.blocks() if whole else trace
            self.envelopes[dtype, whole] = Envelope(exact, many, trace, dtype)
        return self.envelopes[dtype, whole]

    def check(self, name: str, one: str, other: str) -> Check:
        (a, first), (b, second) = self.judged(one), self.judged(other)
        x, y = a.tensors["logits"], b.tensors["logits"]
        both = a.real["logits"] & b.real["logits"]
        if a.lengths is not None and (self.model.reads_source or not self.model.decodes):
            # A cut text is another text to what sees all of it.
            both &= a.lengths[:, None] == x.shape[1]
        gap = float((x - y)[both].abs().max()) if both.any() else 0.0
        grave = ("rounding", "tie", "bug").index
        finding, run = max((first, one), (second, other), key=lambda pair: grave(pair[0].verdict))
        if finding.verdict == "bug":
            at = finding.row, finding.position
            return Check(name, "bug", gap, finding.worst, finding.where, run, *at)
        worst = max(first, second, key=lambda f: f.worst)
        if finding.verdict == "tie":
            return Check(name, "tie", gap, worst.worst, finding.where, run)
        return Check(name, "rounding" if gap else "equal", gap, worst.worst, worst.where)


def parity(
    model: Model,
    given: Given | None = None,
    *,
    more: dict[str, Run] | None = None,
    sound: Model | None = None,
    only: Collection[str] = tuple(CHECKS),
) -> list[Check]:
    """The checks of CHECKS (or `only` some) that this model and machine allow. `more`: runs made elsewhere ("packed",
    "transformers"); `sound`: the model that the runs are held against, if it is not the one that runs."""
    given = sample(model) if given is None else given
    check_weights(sound or model)
    runs = runs_of(model, given) | (more or {})
    court = Court(sound or model, given, runs)
    chosen = {name: pair for name, pair in CHECKS.items() if name in only}
    return [court.check(name, *pair) for name, pair in chosen.items() if set(pair) <= set(runs)]


def check_weights(model: Model) -> None:
    for name, weight in model.named_parameters():
        if not weight.is_floating_point() or not bool(weight.isfinite().all()):
            raise UsageError(
                f"the weight {name} has numbers that are not finite; parity needs finite ones"
            )
