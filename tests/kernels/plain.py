"""A fast decoder held against the plain model in float64: each logit within a bound, each token the
plain model's choice but for ties."""

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

import regard
from regard.decode.engine import Engine
from regard.decode.filters import FILTERS
from regard.decode.sampling import draw, uniform
from regard.decode.settings import Request, Result, Settings
from regard.fast.cuda.prompts import Pack

# Per logit of the small models here, whose logits have a deviation of 0.7; float32 rounds them by
# up to 7e-6.
BOUND = 5e-5
# The share of tokens that may be ties: two candidates' plain logits are nearer to each other than
# twice the bound.
FEW = 0.005


def exact(model: regard.Model) -> regard.Model:
    """The same weights in float64 on the CPU, by torch alone."""
    return copy.deepcopy(model).cpu().double()


def answer(
    model: regard.Model, asked: Sequence[Request], rows: int, **options: object
) -> list[Result]:
    """By an engine with the runner `graph`, in the order of the requests."""
    return served(Engine(model, runner="graph", rows=rows, **options), asked)  # type: ignore[arg-type]


def served(engine: Engine, asked: Sequence[Request]) -> list[Result]:
    numbers = [engine.submit(replace(r, number=-1, key=i)) for i, r in enumerate(asked)]
    done = {event.request: event.done[0] for event in engine.run() if event.done is not None}
    return [done[n] for n in numbers]


@torch.no_grad()
def largest_gap(engine: Engine, texts: Sequence[list[int]], steps: int) -> float:
    """How far a logit of any step is from the plain model's, fed the same tokens: texts that fill
    the rows, read together and then continued greedily. Without a graph, which keeps its logits to
    itself."""
    assert engine.graph is not None
    runner, seen = engine.graph.steps, {}
    runner.recorder.records = False
    logits_of, read = runner.fast.logits, runner.read
    rows: list[int] = list(range(len(texts)))

    def logits(hidden: object) -> Tensor:
        found = logits_of(hidden)
        for row, x in zip(rows, found, strict=False):
            seen.setdefault(row, []).append(x)
        return found

    def reads(pack: Pack, used: frozenset[str], *more: object) -> list[Tensor]:
        nonlocal rows
        # Spare prompts repeat the last one.
        rows = list(dict.fromkeys(pack.rows.tolist()))
        found = read(pack, used, *more)
        rows = list(range(len(texts)))
        return found

    runner.fast.logits, runner.read = logits, reads
    answers = served(engine, [Request(ids, Settings(max_new_tokens=steps)) for ids in texts])
    plain, gaps = exact(engine.model), []
    for i, (ids, result) in enumerate(zip(texts, answers, strict=True)):
        want = plain(torch.tensor([ids + result.ids]))[0, len(ids) - 1 : -1]
        # On a GPU there are rows for some more tokens.
        got = torch.stack(seen[i][:steps]).cpu().double()[:, : want.shape[-1]]
        gaps.append((got - want).abs().max().item())
    return max(gaps)


@torch.no_grad()
def ties(
    model: regard.Model, asked: Sequence[Request], answers: Sequence[Result], bound: float = BOUND
) -> float:
    """The share of answers' tokens that are not the plain model's choice, each token judged by what
    came before it. All of them must be ties: what logits within the bound of the plain ones could
    choose."""
    plain, other, total = exact(model), 0, 0
    for number, (request, answer) in enumerate(zip(asked, answers, strict=True)):
        s, ids = request.settings, list(request.ids)
        logits = plain(torch.tensor([ids + answer.ids]))[0, len(ids) - 1 : -1]
        assert answer.finish == "length" and len(answer.ids) == s.max_new_tokens == len(logits)
        tokens, place = torch.tensor(answer.ids), torch.arange(len(logits))
        u = uniform(torch.tensor(s.seed), torch.tensor(number * 1024), place)
        wrong = (chosen(logits, s, u) != tokens).nonzero()[:, 0]
        for at in wrong.tolist():
            near = close_calls(logits[at : at + 1], s, u[at : at + 1], bound)
            assert answer.ids[at] in near, (
                f"request {number}: token {at} is {answer.ids[at]}, not one of {near}"
            )
        other, total = other + len(wrong), total + len(tokens)
    return other / total


def chosen(logits: Tensor, s: Settings, u: Tensor) -> Tensor:
    """The token of each row of logits (n V), as settings say, with random numbers u (n)."""
    if not s.temperature:
        return logits.argmax(-1)
    kept, idle = logits / s.temperature, Settings()
    for name, each in FILTERS.items():
        if getattr(s, name) != getattr(idle, name):
            kept = each.keep(kept, getattr(s, name))
    return draw(kept, u)


def close_calls(logits: Tensor, s: Settings, u: Tensor, bound: float) -> set[int]:
    """What logits (1 V) could choose if each may be off by the bound: the greedy tokens near the
    best; or what is drawn if the mass, and what a filter lets through, may be off by as much as
    that changes a probability."""
    if not s.temperature:
        return set((logits[0] >= logits.max() - 2 * bound).nonzero()[:, 0].tolist())
    off, found = 4 * bound / s.temperature, set()
    for sign in (-1, 0, 1):
        loose = {"top_k": s.top_k + sign if s.top_k else 0}
        loose |= {name: getattr(s, name) * (1 + sign * off) for name in ("top_p", "min_p")}
        loose["top_p"] = min(loose["top_p"], 1.0)
        for move in (-1, 0, 1):
            moved = (u + move * off).clamp(0, 1 - 2**-53)
            found.add(int(chosen(logits, replace(s, **loose), moved)))
    return found
