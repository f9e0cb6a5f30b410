"""regard plan: what a run will need: parameters, memory, disk, time. Nothing is trained."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from regard.cli.shared import Changes, FolderName, Switch, check_counts
from regard.errors import DATA, ENVIRONMENT, Fault, UsageError, blaming

if TYPE_CHECKING:
    import torch

    from regard.training.plan import Forecast

SLOW = 3600  # seconds after which a quicker config is pointed at
OFTEN = 30  # passes over the data after which it is known by heart
ASIDE = "the tokenizer, samples and checkpoints not counted"
Row = tuple[str, str]
# A table for people, figures for programs, and what this machine lacks; nothing where it can.
Needs = tuple[list[Row], dict[str, Any], str]


@dataclass(frozen=True)
class Options:
    """What a run will need, before it is begun: parameters, memory, disk, work and time. Nothing is trained.

    regard plan story.toml
    regard plan story.toml --model.layers 12 --train.precision bf16
    regard plan MODEL                                what a model folder needs to run
    """

    # a TOML file as for regard train, or a model folder
    config: Annotated[Positional[str], arg(metavar="CONFIG|MODEL")]
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    # the run's folder, whose data and tokenizer are used if they are there; default: runs/ and the
    # config's name
    output_dir: FolderName = None
    keep: int = 2  # checkpoints that stay, beside the best
    json: Switch = False  # one JSON object
    # settings of the config, changed: the same as --NAME VALUE with a dot in NAME
    changes: Changes = field(default_factory=dict)


def run(options: Options) -> int:
    from regard.machine import pick_device
    from regard.training.config import read
    from regard.training.plan import Forecast

    device, _ = pick_device(options.device)
    check_counts(options, "keep")
    if Path(options.config).is_dir():
        if options.changes:
            raise UsageError(f"{options.config} is a model folder, which has no settings to change")
        table, facts, lacks = folder_needs(options.config, device)
    else:
        with blaming(2):
            config = read(Path(options.config), options.changes)
        folder = Path(options.output_dir or Path("runs") / Path(options.config).stem)
        table, facts, lacks = run_needs(Forecast(config, folder, device, options.keep))
    if options.json:
        print(json.dumps(facts))
    else:
        print("\n".join(f"{name:<8}{text}" for name, text in table))
    if lacks:
        raise Fault(lacks, ENVIRONMENT)
    return 0


def folder_needs(path: str, device: torch.device) -> Needs:
    """What a model needs to run: its weights, and what it keeps of each token."""
    from regard.checkpoint import load
    from regard.machine import free_memory, number, size
    from regard.models.base import parameters
    from regard.training.measure import context_of
    from regard.training.plan import cache_bytes

    with blaming(DATA):
        model = load(path, device="meta")
    weights, free = sum(p.nbytes for p in model.parameters()), free_memory(device)
    count, cache = parameters(model), cache_bytes(model)
    table = [
        ("model", f"{number(count)} parameters: {describe(model)}"),
        ("memory", f"weights {size(weights)} of {size(free)} free on {device.type}"),
        *kv_row(cache, context_of(model) or 1024),
    ]
    facts: dict[str, Any] = {"parameters": count, "weights": weights, "free": free}
    facts |= {"kv": cache, "fits": weights <= free}
    lacks = f"the weights need {size(weights)}, {size(free)} are free" if weights > free else ""
    return table, facts, lacks


def run_needs(f: Forecast) -> Needs:
    """What a run needs: figures for people, figures for programs, and why it cannot begin."""
    from regard.machine import size

    memory = f"{size(f.plan.memory.total)} of memory, {size(f.free)} are free"
    disk = f"{size(f.plan.disk)}, {size(f.room)} are free"
    lacks = ""
    if f.short:
        what = "change what `less` names" if f.less else "take a smaller model"
        lacks = f"this run does not fit: it needs about {memory}; {what}"
    elif f.full:
        lacks = f"its checkpoints do not fit: they need {disk}; make room"
    return rows_of(f), figures_of(f), lacks


def rows_of(f: Forecast) -> list[Row]:
    from regard.checkpoint.hf import own_format
    from regard.machine import number, size
    from regard.models.base import parameters
    from regard.training.build import notices
    from regard.training.memory import trainable
    from regard.training.plan import cache_bytes

    plan, train, model = f.plan, f.config.train, f.model
    count, learns = parameters(model), trainable(model)
    only = f", {learns:,} are trained" if learns < count else ""
    kind = "AdamW" if train.optim.name == "adamw" else "Muon and AdamW"
    called = {"optimizer": kind, "copies": "bf16 copies"}
    sizes = asdict(plan.memory).items()
    parts = " + ".join(f"{called.get(name, name)} {size(n)}" for name, n in sizes if n)
    names = f"{train.steps:,} steps x {f.tokens:,} tokens"
    share = train.steps * f.tokens / max(count, 1)
    passes = f"{f.passes:.3g} passes over the data, {share:.3g} tokens per parameter"
    keep = plan.disk // plan.checkpoint - 2
    disk = f"{keep} that stay, the best and a new one: {size(plan.disk)} of {size(f.room)} free"
    own = "" if f.config.adapt.low_rank else own_format(model)
    return [
        ("model", f"{number(count)} parameters{only}: {describe(model)}"),
        ("data", f.facts.describe()),
        ("run", f"{names} ({passes}), {number(f.flops)}FLOP"),
        ("memory", f"{parts} = about {size(plan.memory.total)} of {size(f.free)} free"),
        ("disk", f"{size(plan.checkpoint)} per checkpoint; {disk}"),
        ("time", time_of(f)),
        *kv_row(cache_bytes(model), plan.job.step.length),
        *([("saved", f"in {own}")] if own else []),
        *(("notice", text) for text in notices(f.config, model)),
        *(("less", str(change)) for change in f.less),
        *(("hint", text) for text in filter(None, [hint(f)])),
    ]


def time_of(f: Forecast) -> str:
    """How long it takes, and how that is known."""
    from regard.machine import duration, number
    from regard.training.plan import EFFICIENCY

    train, device = f.config.train, f.device.type
    if f.step is None:
        part = f"{EFFICIENCY[f'{device} {train.precision}']:.0%} of what products were just measured at"
        how = f"if it runs at {number(f.speed)}FLOP/s on {device}, {train.precision} ({part})"
    else:
        each = f"{f.step:.2g} s" if f.step >= 0.1 else f"{1000 * f.step:.2g} ms"
        how = f"{train.steps:,} steps of {each}, as just measured"
    if f.held:
        many = f"{f.evaluations:,} evaluations" if f.evaluations > 1 else "an evaluation"
        how += f", and {many}"
    return f"about {duration(f.seconds)}: {how}; {ASIDE}"


def figures_of(f: Forecast) -> dict[str, Any]:
    from regard.models.base import parameters
    from regard.training.memory import trainable
    from regard.training.plan import cache_bytes

    plan, memory = f.plan, f.plan.memory
    names = ("tokens", "passes", "flops", "seconds", "speed", "in_fp32")
    return {
        "parameters": parameters(f.model),
        "trained": trainable(f.model),
        "data": asdict(f.facts),
        "steps": f.config.train.steps,
        **{name: getattr(f, name) for name in names},
        "memory": {**asdict(memory), "total": memory.total, "free": f.free},
        "disk": {"checkpoint": plan.checkpoint, "total": plan.disk, "free": f.room},
        "measured": f.step,
        "kv": cache_bytes(f.model),
        "fits": not (f.short or f.full),
        "changes": [asdict(change) for change in f.less],
    }


def hint(f: Forecast) -> str:
    """What to change, the most urgent."""
    from regard.machine import duration

    data, over = f.config.data, f.facts.over
    if over and data.overlong == "error" and data.pack not in ("stream", "windows"):
        longer = f"{over:,} examples are longer than {data.length} tokens, so training would stop"
        return f"{longer}; say data.overlong = truncate, drop or split"
    if f.in_fp32 is not None and f.in_fp32 < f.seconds:
        slow = "this CPU does not multiply bf16, and widens every number first"
        return f"{slow}: --train.precision fp32 takes about {duration(f.in_fp32)}"
    if f.seconds > SLOW and f.device.type == "cpu":
        return "regard recipes list shows configs that train in minutes"
    often = "the data is read often: it may be learned by heart, so hold some out"
    return often if f.passes > OFTEN else ""


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
    last = towers[-1]
    first, ffn = last.each("attention")[-1], last.each("ffn")[-1]
    inner = first.attention if isinstance(first, DSA) else first
    groups = getattr(inner, "groups", inner.heads)
    heads = f"{inner.heads} " + (f"query / {groups} kv " if groups != inner.heads else "")
    vectors = getattr(getattr(c, "embedding", None) or getattr(c, "target", None), "position", None)
    place = last.relative or vectors
    kind = f"{'gated ' if ffn.gated else ''}{ffn.activation}" if isinstance(ffn, MLP) else "experts"
    kind = "no feed-forward" if ffn is None else kind
    words = (
        " and ".join(f"{tower.layers} layers x {tower.dim}" for tower in towers),
        f"{heads}heads ({first.kind})",
        "rope" if inner.rope is not None else place.kind if place is not None else "",
        kind,
        "tied embeddings" if getattr(getattr(c, "head", None), "tied", False) else "",
    )
    return ", ".join(word for word in words if word)


def kv_row(cache: dict[str, int] | None, length: int) -> list[Row]:
    from regard.machine import size

    if cache is None:
        return []
    token, full = cache["token"], cache["mha"]
    beside = "" if token == full else f" (mha would be {size(full)}, {full / token:.1f} x)"
    whole = f"{size(token * length)} at {length:,} tokens"
    return [("kv", f"{size(token)} per token in bf16{beside}, {whole}")]
