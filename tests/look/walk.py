"""Parity over all that there is: every preset, and every case of every family beside transformers, plain and prepared,
in every runner, is rounding; and a mistake that is planted in one is found where it stands.

    make parity                               (or: python -m tests.look.walk, half an hour on two cores)
    python -m tests.look.walk gemma3 albert   those alone whose names begin so

One line for each model: by runner the largest error, in units of what rounding can do (below 1 is sound), then for each
family where the planted mistakes were found. The exit code is 1 if a sound model is accused or a mistake is missed.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.cache import Pool
from regard.errors import UsageError
from regard.kernels.c import native
from regard.models import Model
from regard.moe import MixtureOfExperts
from regard.parity import Check, Given, parity, record, sample
from regard.position import Rope
from tests.look.planted import override
from tests.look.zoo import stirred

# What each runner's checks are; the last that a model has is the one that must find what is planted.
RUNNERS = {
    "rows": ("fused against reference", "cached against uncached"),
    "pages": ("paged against uncached", "shared against alone"),
    "native": ("unwatched against watched", "packed against plain", "packed in shared pages"),
    "graph": ("graph against plain",),
    "int8": ("int8 against plain", "int8 in shared pages"),
}
SMALL = {
    "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn_dim": 32, "vocab": 99, "max_len": 64,
    "experts": 4, "active": 2, "groups": 2, "active_groups": 1, "latent": 16, "query_latent": 24, "rope_dim": 4,
    "value_dim": 8, "index_heads": 4, "index_dim": 8, "topk": 6, "size": 16, "patch": 8, "window": 8,
    "source_vocab": 99,
}  # fmt: skip
# Where a mistake in the last part of a block may show first, as far as a runner shows what it computes.
END = ("feed-forward", "norm after feed-forward", "norm 3", "output")
# The same of a block that has no feed-forward.
ALONE = ("norm 1", "attention heads", "attention output", "output")


# --- models -------------------------------------------------------------------------------------------------------


def preset(name: str, device: str | None = None) -> Model:
    """With every size that it has made small."""
    present = sizes(regard.PRESETS[name][1]())
    kept = {k: v for k, v in SMALL.items() if present.get(k) is not None}
    if any(isinstance(present.get(part), tuple) for part in ("attention", "ffn")):
        # Their kinds take turns; Kimi's attention is the fifth.
        kept["layers"] = 5 if "channels" in present and "latent" in present else 4
    if "kv_heads" in kept and present["kv_heads"] == present["heads"]:
        kept["kv_heads"] = kept["heads"]
    # Of a pooler: both sides of a pair give vectors of one width.
    if isinstance(present.get("dense"), int):
        kept["dense"] = kept["dim"]
    if "topk" in kept:
        kept["tower.attention.attention.rope_dim"] = kept["rope_dim"]
    # Of small heads other shares turn in pairs.
    if int((present.get("partial") or 1) * kept["dim"] / kept.get("heads", 1)) % 2:
        kept["partial"] = 0.5
    torch.manual_seed(0)
    return stirred(regard.build(name, device=device, **kept), random.Random(1))


def sizes(config: Any) -> dict[str, Any]:
    """Every setting of a config and of its parts, by its plain name; the first one found."""
    found: dict[str, Any] = {}
    for each in config if isinstance(config, tuple) else (config,):
        for name, value in vars(each).items() if dataclasses.is_dataclass(each) else ():
            found = {**sizes(value), name: value, **found}
    return found


PAIRS = ("clip-vit-base-patch32", "siglip-base-patch16-224")


def presets() -> dict[str, Callable[[], Model]]:
    """One of each kind: small, many are the same. Painters and pairs of models are refused: they answer no tokens."""
    made: dict[str, Any] = {}
    for name in (each for each in regard.PRESETS if each not in ("painter", *PAIRS)):
        config = preset(name, "meta").config
        if config not in made.values():
            made[name] = config
    return {name: partial(preset, name) for name in made}


# --- mistakes -----------------------------------------------------------------------------------------------------
#
# Each changes a copy of a model, and says where it may be found; None where the model has no such thing.

Mistake = Callable[[Any, pytest.MonkeyPatch], "tuple[str, ...] | None"]


def tail(model: Any) -> Any:
    """The second block of what writes, or the only one."""
    blocks = getattr(model, model.writer).blocks if model.towers else None
    return blocks and blocks[min(1, len(blocks) - 1)]


@torch.no_grad()
def changed_constant(model: Any, patch: pytest.MonkeyPatch) -> tuple[str, ...]:
    block = tail(model)
    if block is None:
        cell = next(m for m in model.modules() if isinstance(m, nn.RNNBase))
        cell.weight_hh_l0 *= 1.01
        return ("states",)
    if block.ffn is None:
        block.norm1.eps += 1e-3
        return ALONE
    norm = block.norm3 or block.ffn.add.norm or block.norm1
    norm.eps += 1e-3
    # One norm for both parts stands before the attention.
    return END if norm is not block.norm1 else (*END, "norm 1")


@torch.no_grad()
def dropped_term(model: Any, patch: pytest.MonkeyPatch) -> tuple[str, ...]:
    block = tail(model)
    if block is None:
        cell = next(m for m in model.modules() if isinstance(m, nn.RNNBase))
        cell.weight_ih_l0[:, 0] = 0.0
        return ("states",)
    ffn = block.ffn
    if ffn is None:
        block.attention.wo.weight[..., ::4] = 0.0
        return ALONE
    down = ffn.down if isinstance(ffn, MixtureOfExperts) else ffn.down.weight
    # Of a relu some are 0 anyway.
    down[..., ::4] = 0.0
    return END


class Late(Rope):
    """Every token stands one place too far."""

    def angles(self, pos: Tensor, *rest: Any, **more: Any) -> tuple[Tensor, Tensor]:
        return super().angles(pos + 1, *rest, **more)


def shifted_position(model: Any, patch: pytest.MonkeyPatch) -> tuple[str, ...] | None:
    block = tail(model)
    if block is None:
        return None
    words, tower = getattr(model, model.words), getattr(model, model.writer)
    if isinstance(getattr(words, "position", None), nn.Parameter):
        words.position = nn.Parameter(words.position.roll(1, -2))
        return ("embedding",)
    if getattr(words, "position", None) is not None:
        override(words.position, "forward", lambda self, real, pos, *rest: real(pos + 1, *rest))
        return ("embedding",)
    if tower.relative is not None:
        # All but the first key: ALiBi of a query further on is the same to all keys.
        each = tower.relative
        for part in each if isinstance(each, nn.ModuleList) else (each,):
            override(part, "forward", lambda self, real, q, k: real(q, k + (k > 0)))
        return ("before wo",)
    seen: tuple[str, ...] = ("attention q", "attention k", "k_rope", "read from the cache")
    shifted = False
    for layer in {id(b.attention): b.attention for b in tower.blocks}.values():
        for part in (layer, getattr(layer, "attention", layer)):
            rope = vars(part.config).get("rope")
            if rope is not None:
                late = Late(**{f.name: getattr(rope, f.name) for f in dataclasses.fields(rope)})
                part.config = dataclasses.replace(part.config, rope=late)
                shifted = True
        if hasattr(layer, "taps"):
            layer.taps = nn.Parameter(layer.taps.roll(1, -1))
            seen, shifted = ("before wo", *seen), True
    return (*seen, "before wo") if shifted else None


def page_not_copied(model: Any, patch: pytest.MonkeyPatch) -> tuple[str, ...] | None:
    if not model.decodes or not any(spec.token for spec in model.cache_specs()):
        return None
    patch.setattr(Pool, "copy", lambda self, source, target: None)
    return ("read from the cache",)


MISTAKES: dict[str, Mistake] = {
    "constant": changed_constant,
    "term": dropped_term,
    "position": shifted_position,
    "page": page_not_copied,
}


def planted(model: Model, given: Given, mistake: str, runner: str) -> tuple[Check, bool] | None:
    """What parity says of a model with a mistake, and whether it names the place; None where there is none to make."""
    # Where nothing is shared; and what is less than a step of 8 bits.
    if (mistake, runner) in (("page", "rows"), ("constant", "int8")):
        return None
    spoilt = copy.deepcopy(model)
    with pytest.MonkeyPatch.context() as patch:
        places = MISTAKES[mistake](spoilt, patch)
        for name in reversed(RUNNERS[runner]) if places is not None else ():
            for check in parity(spoilt, given, sound=model, only=[name]):
                return check, check.verdict == "bug" and check.where.endswith(places or ())
    return None


# --- the walk -----------------------------------------------------------------------------------------------------


def told(checks: list[Check], names: tuple[str, ...]) -> str:
    """The largest error of some checks, or the bug."""
    mine = [check for check in checks if check.name in names]
    bug = next((check for check in mine if check.verdict == "bug"), None)
    if bug is not None:
        return f"BUG at {bug.where}"
    return f"{max(check.worst for check in mine):.2f}" if mine else "-"


def alone(make: Callable[[], Model]) -> tuple[Model, Any]:
    """A model without a peer."""
    return make(), None


def models(wanted: list[str]) -> Iterator[tuple[str, Callable[[], tuple[Model, Any]], bool]]:
    """Name, what makes ours and theirs, and whether mistakes are planted: once a family."""

    def chosen(name: str) -> bool:
        return not wanted or name.startswith(tuple(wanted))

    own = [name for name, (family, _) in regard.PRESETS.items() if not family]
    for name, make in presets().items():
        if chosen(name):
            yield f"preset {name}", partial(alone, make), name in own
    if importlib.util.find_spec("transformers") is None:
        print("transformers is not installed: its families are left out", file=sys.stderr)
        return
    from tests.checkpoint.families import CASES, ONE_PER_FAMILY

    for name, case in CASES.items():
        if chosen(name):

            def both(case: Any = case) -> tuple[Model, Any]:
                theirs = case.make()
                return regard.from_hf(theirs), theirs

            yield name, both, name in ONE_PER_FAMILY


def main(wanted: list[str]) -> int:
    native.build()
    head = [*RUNNERS, "other", "transformers"]
    print(f"{'model':<36}" + "".join(f"{name:>14}" for name in head))
    bad = sound = found = 0
    known = {name for names in RUNNERS.values() for name in names} | {"ours against transformers"}
    for name, make, plants in models(wanted):
        ours, theirs = make()
        given = sample(ours, rows=2, tokens=9)
        more = {}
        if theirs is not None:
            more["transformers"] = lambda g, a=theirs, b=ours: record(a, b, g)
        checks = parity(ours, given, more=more)
        others = tuple(check.name for check in checks if check.name not in known)
        kinds = {**RUNNERS, "other": others, "transformers": ("ours against transformers",)}
        cells = [told(checks, names) for names in kinds.values()]
        sound += 1
        bad += any("BUG" in cell for cell in cells)
        print(f"{name:<36}" + "".join(f"{cell:>14}" for cell in cells), flush=True)
        for mistake in MISTAKES if plants else ():
            for runner in RUNNERS:
                if (result := planted(ours, given, mistake, runner)) is None:
                    continue
                check, right = result
                found, bad = found + right, bad + (not right)
                verdict = "found at" if right else f"MISSED: {check.verdict} at"
                print(f"    {mistake} in {runner}: {verdict} {check.where}", flush=True)
    print(f"{sound} models judged, {found} planted mistakes found in their places, {bad} wrong")
    return int(bad > 0)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UsageError as error:
        sys.exit(f"stopped: {error}")
