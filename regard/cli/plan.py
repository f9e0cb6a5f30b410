"""regard plan: what a run will need, as a table."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from regard.cli.parse import Changes, Switch, check_counts
from regard.errors import DATA, ENVIRONMENT, Fault, UsageError, blaming

if TYPE_CHECKING:
    import torch

    from regard.train.plan import Forecast

SLOW = 3600  # seconds after which a quicker config is pointed at
OFTEN = 30  # passes over the data after which it is known by heart
Row = tuple[str, str]


@dataclass(frozen=True)
class Options:
    """What a run will need, before it is begun: parameters, memory, disk, work and time. Nothing is trained.

    regard plan story.toml
    regard plan story.toml --model.layers 12 --train.precision bf16
    regard plan MODEL                                what a model folder needs to run
    """

    config: Annotated[Positional[str], arg(metavar="CONFIG|MODEL")]
    """a TOML file as for regard train, or a model folder"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N"""
    output_dir: Annotated[str | None, arg(metavar="FOLDER")] = None
    """the run's folder, whose data and tokenizer are used if they are there; default: runs/ and the config's name"""
    keep: int = 2
    """checkpoints that stay, beside the best"""
    json: Switch = False
    """one JSON object"""
    changes: Changes = field(default_factory=dict)
    """settings of the config, changed: the same as --NAME VALUE with a dot in NAME"""


def run(options: Options) -> int:
    from regard.train.config import read
    from regard.train.plan import Forecast, pick_device

    device, _ = pick_device(options.device)
    check_counts(options, "keep")
    if Path(options.config).is_dir():
        if options.changes:
            raise UsageError(f"{options.config} is a model folder, which has no settings to change")
        return show_folder(options, device)
    with blaming(2):
        config = read(Path(options.config), options.changes)
    folder = Path(options.output_dir or Path("runs") / Path(options.config).stem)
    return show(options, Forecast(config, folder, device, options.keep))


def show(options: Options, f: Forecast) -> int:
    from regard.train.plan import size

    print_rows(rows(f)) if not options.json else print(json.dumps(facts(f)))
    if f.short:
        enough = any(change.total <= f.free for change in f.less)
        what = "change what `less` names" if enough else "take a smaller model"
        need = f"about {size(f.plan.memory.total)} of memory, {size(f.free)} are free"
        raise Fault(f"this run does not fit: it needs {need}; {what}", ENVIRONMENT)
    if f.full:
        need = f"{size(f.plan.disk)}, {size(f.room)} are free"
        raise Fault(f"its checkpoints do not fit: they need {need}; make room", ENVIRONMENT)
    return 0


def print_rows(rows: list[Row]) -> None:
    print("\n".join(f"{name:<8}{text}" for name, text in rows))


def rows(f: Forecast) -> list[Row]:
    from regard.models.base import parameters
    from regard.train.build import notices
    from regard.train.plan import EFFICIENCY, duration, number, size, trainable

    plan, train, model = f.plan, f.config.train, f.model
    count, learns = parameters(model), trainable(model)
    only = f", {learns:,} are trained" if learns < count else ""
    kind = "AdamW" if train.optim.name == "adamw" else "Muon and AdamW"
    called = {"optimizer": kind, "copies": "bf16 copies"}
    needs = asdict(plan.memory).items()
    parts = " + ".join(f"{called.get(name, name)} {size(n)}" for name, n in needs if n)
    names = f"{train.steps:,} steps x {f.tokens:,} tokens"
    share = train.steps * f.tokens / max(count, 1)
    passes = f"{f.passes:.3g} passes over the data, {share:.3g} tokens a parameter"
    speed = f"{number(f.speed)}FLOP/s on {f.device.type}, {train.precision}"
    part = f"{EFFICIENCY[f.kind]:.0%} of what products were just measured at"
    how = f"if it runs at {speed} ({part})"
    if f.step is not None:
        how = f"{train.steps:,} steps of {short_time(f.step)}, as just measured"
    if f.held:
        how += (
            f", and {f.evaluations:,} evaluations" if f.evaluations > 1 else ", and an evaluation"
        )
    keep = plan.disk // plan.checkpoint - 2
    table = [
        ("model", f"{number(count)} parameters{only}: {describe(model)}"),
        ("data", f.facts.describe()),
        ("run", f"{names} ({passes}), {number(f.flops)}FLOP"),
        ("memory", f"{parts} = about {size(plan.memory.total)} of {size(f.free)} free"),
        ("disk", f"{size(plan.checkpoint)} a checkpoint; {keep} that stay, the best and a new one: "
                 f"{size(plan.disk)} of {size(f.room)} free"),
        ("time", f"about {duration(f.seconds)}: {how}; the tokenizer, samples and checkpoints not counted"),
    ]  # fmt: skip
    table += kv_row(model, f.plan.job.step.length)
    table += [("notice", text) for text in notices(f.config, model)]
    return table + [("less", str(change)) for change in f.less] + hint(f)


def hint(f: Forecast) -> list[Row]:
    data, over = f.config.data, f.facts.over
    if over and data.overlong == "error" and data.pack not in ("stream", "windows"):
        longer = f"{over:,} examples are longer than {data.length} tokens, so training would stop"
        return [("hint", f"{longer}; say data.overlong = truncate, drop or split")]
    if f.seconds > SLOW and f.device.type == "cpu":
        return [("hint", "regard recipes list shows configs that train in minutes")]
    if f.passes > OFTEN:
        return [("hint", "the data is read often: it may be learned by heart, so hold some out")]
    return []


def facts(f: Forecast) -> dict[str, Any]:
    from regard.models.base import parameters
    from regard.train.plan import cache_bytes, trainable

    plan = f.plan
    return {
        "parameters": parameters(f.model),
        "trained": trainable(f.model),
        "data": asdict(f.facts),
        "steps": f.config.train.steps,
        "tokens": f.tokens,
        "passes": f.passes,
        "flops": f.flops,
        "memory": {**asdict(plan.memory), "total": plan.memory.total, "free": f.free},
        "disk": {"checkpoint": plan.checkpoint, "total": plan.disk, "free": f.room},
        "seconds": f.seconds,
        "measured": f.step,
        "speed": f.speed,
        "kv": cache_bytes(f.model),
        "fits": not (f.short or f.full),
        "changes": [asdict(change) for change in f.less],
    }


def show_folder(options: Options, device: torch.device) -> int:
    """What a model needs to run: its weights, and what it keeps of each token."""
    from regard.checkpoint import load
    from regard.files import resolve_model
    from regard.models.base import parameters
    from regard.train.measure import context_of
    from regard.train.plan import cache_bytes, free_memory, number, size

    with blaming(DATA):
        model = load(resolve_model(options.config), device="meta")
    weights, free = sum(p.nbytes for p in model.parameters()), free_memory(device)
    if options.json:
        needs = {"parameters": parameters(model), "weights": weights, "free": free}
        print(json.dumps({**needs, "kv": cache_bytes(model), "fits": weights <= free}))
    else:
        rows = [("model", f"{number(parameters(model))} parameters: {describe(model)}")]
        rows += [("memory", f"weights {size(weights)} of {size(free)} free on {device.type}")]
        print_rows(rows + kv_row(model, context_of(model) or 1024))
    if weights > free:
        raise Fault(f"the weights need {size(weights)}, {size(free)} are free", ENVIRONMENT)
    return 0


# --- words for numbers ----------------------------------------------------------------------------


def short_time(seconds: float) -> str:
    """0.21 s, 3.4 ms."""
    return f"{seconds:.2g} s" if seconds >= 0.1 else f"{1000 * seconds:.2g} ms"


def describe(model: Any) -> str:
    """The shape of a model, in a line."""
    from regard.attention import DSA
    from regard.layers import MLP

    c = model.config
    parts = (getattr(c, name, None) for name in ("tower", "encoder", "decoder"))
    towers = [part for part in parts if part is not None]
    if not towers:
        looks = f", {c.attention} attention" if c.attention else ""
        return f"{c.layers} layers of {c.cell} x {c.dim}{looks}"
    layers = " and ".join(f"{tower.layers} layers x {tower.dim}" for tower in towers)
    first = towers[-1].each("attention")[-1]
    inner = first.attention if isinstance(first, DSA) else first
    groups = getattr(inner, "groups", inner.heads)
    heads = (
        f"{inner.heads} heads"
        if groups == inner.heads
        else f"{inner.heads} query / {groups} kv heads"
    )
    place = "rope" if inner.rope is not None else towers[-1].relative and towers[-1].relative.kind
    vectors = getattr(getattr(c, "embedding", None) or getattr(c, "target", None), "position", None)
    place = place or (vectors.kind if vectors is not None else "")
    ffn = towers[-1].each("ffn")[-1]
    kind = f"{'gated ' if ffn.gated else ''}{ffn.activation}" if isinstance(ffn, MLP) else "experts"
    tied = "tied embeddings" if getattr(getattr(c, "head", None), "tied", False) else ""
    return ", ".join(
        text for text in (layers, f"{heads} ({first.kind})", place, kind, tied) if text
    )


def kv_row(model: Any, length: int) -> list[Row]:
    from regard.train.plan import cache_bytes, size

    cache = cache_bytes(model)
    if cache is None:
        return []
    token, full = cache["token"], cache["mha"]
    beside = "" if token == full else f" (mha would be {size(full)}, {full / token:.1f} x)"
    return [
        (
            "kv",
            f"{size(token)} a token in bf16{beside}, {size(token * length)} at {length:,} tokens",
        )
    ]
