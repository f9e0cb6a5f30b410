"""Random requests on random engines, each held against its answer alone; and faults raised anywhere inside a step.

    python -m tests.decode.storm --requests 10000                every decoding family; about half an hour on one core
    python -m tests.decode.storm --requests 2000 --faults 1000   the same while steps raise, until 1,000 have
    python -m tests.decode.storm --first 17 --requests 20        one round again

A round is an engine at random (layout, runner, rows, chunk, pages) with twenty requests at random: settings, arrivals,
cancels, deadlines, priorities, masks, callbacks that raise, prompts that share their beginnings, samples, beams,
look-up, texts past the context. Every finished answer must be the one that the request gets alone: to the bit by the
invariant model in float32, to the token in float64. One that was stopped is the beginning of it. No page stays behind.
test_storm.py runs a few rounds of it.
"""

import argparse
import functools
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import regard
import regard.decode.scheduler as scheduler_module
from regard.cache import taken_back
from regard.decode.check import context_of, written
from regard.decode.engine import Engine
from regard.decode.runners.steps import why_plain
from regard.decode.settings import Event, Request, Result, Settings
from regard.errors import UsageError
from regard.fast.invariant import invariant
from tests.decode.tiny import Counted, full
from tests.laws.mechanisms import stir
from tests.tiny import tiny

FAMILIES = [
    "gpt2", "pythia-160m", "llama-3.1-8b", "mistral-7b", "mixtral-8x7b", "qwen2-0.5b", "qwen3-0.6b", "phi-3-mini",
    "gemma-3-1b", "olmo-2-1b", "olmo-3-7b", "gpt-oss-20b", "deepseek-v2-lite", "deepseek-v3", "deepseek-v3.2",
    "qwen3-next-80b", "t5-small", "t5-v1.1-small", "bart-base", "marian", "vaswani-base", "captioner", "gru-lm",
    "bahdanau", "luong",
]  # fmt: skip
ROUND = 20  # requests
PACKAGE = str(Path(regard.__file__).parent)
CLOSE = 2e-5  # log probabilities are float32


class Strike(KeyboardInterrupt):
    """What is raised inside a step, with the name of the function that it hit."""


@functools.cache
def zoo(name: str, exact: bool) -> Any:
    """A family at a tiny size: float64; or (exact) float32 and invariant."""
    model = stir(tiny(name))
    return invariant(model.float()) if exact else model


# --- what is asked ------------------------------------------------------------------------------------------------


@dataclass
class Asked:
    """A request, where its callbacks raise, and what became of it."""

    request: Request
    guilty: int | None = None  # tokens after which its `stop` or its mask raises
    events: list[Event] = field(default_factory=list)
    done: list[Result] | None = None
    cancelled: bool = False


def settings_of(rng: random.Random, model: Any, long: bool) -> Settings:
    chosen: dict[str, Any] = {"max_new_tokens": rng.randint(1, 10)}
    if rng.random() < 0.7:
        chosen["eos"] = (3, 5, 8)
    kinds = ["greedy", "drawn", "samples"] + (["beams"] if not long else [])
    kinds += ["lookup"] if taken_back(model.cache_specs()) else []
    kind = rng.choice(kinds)
    if kind in ("drawn", "samples"):
        chosen |= {"temperature": 1.3, "top_k": rng.choice([0, 9]), "seed": rng.randint(0, 5)}
        chosen |= rng.choice([{}, {"top_p": 0.9}, {"min_p": 0.05}])
    if kind == "samples":
        chosen["samples"] = rng.randint(2, 3)
    elif kind == "beams":
        chosen |= {"beams": rng.choice([2, 3]), "early_stopping": rng.choice(["first", "never"])}
    elif kind == "lookup":
        chosen["lookup"] = 3
    if rng.random() < 0.3:
        chosen |= rng.choice(
            [
                {"repetition_penalty": 1.2, "frequency_penalty": 0.1},
                {"banned": (1, 2), "logit_bias": ((4, 2.0),)},
                {"min_new_tokens": 1, "forced_first": 7},
            ]
        )
    if rng.random() < 0.3 and "beams" not in chosen:
        chosen["top_logprobs"] = rng.randint(1, 6)
    if long:
        chosen["overflow"] = rng.choice(["crop", "sinks"])
    elif rng.random() < 0.2:
        chosen["prompt_logprobs"] = True
    return Settings(**chosen)


def mask_of(rng: random.Random, vocab: int, guilty: int | None) -> Callable[[int, list[int]], Any]:
    """Two of three tokens, others after each text; none from some length on; as booleans or as bits."""
    turn, end, bits = rng.randrange(3), rng.choice([4, 99]), rng.random() < 0.5

    def mask(sample: int, ids: list[int]) -> Any:
        if guilty is not None and len(ids) >= guilty:
            raise ValueError("my mask broke")
        allowed = [len(ids) < end and (turn + sum(ids) + i) % 3 > 0 for i in range(vocab)]
        if not bits:
            return torch.tensor(allowed)
        words = [
            sum(1 << k for k, x in enumerate(allowed[i : i + 32]) if x) for i in range(0, vocab, 32)
        ]
        return torch.tensor(words).to(torch.int32)

    return mask


def stop_of(at: int) -> Callable[[int, list[int]], bool]:
    def stop(sample: int, ids: list[int]) -> bool:
        if len(ids) >= at:
            raise ValueError("my callback broke")
        return False

    return stop


def ask(rng: random.Random, model: Any, shared: list[int], key: int) -> Asked:
    vocab, longest, guilty = written(model).vocab, context_of(model), None
    long = longest is not None and rng.random() < 0.1
    most = longest + 6 if long else 12
    ids = shared[: rng.randint(0, 12)] + [rng.randrange(vocab) for _ in range(rng.randint(1, 4))]
    if long:
        ids = (ids * 40)[: rng.randint(longest - 6, most)]
    source = None
    if model.reads_source:
        ids, source = (
            ids if long else ids[:3],
            torch.tensor([rng.randrange(vocab) for _ in range(rng.randint(1, 6))]),
        )
        if hasattr(model.config, "source") and hasattr(model.config.source, "patch"):
            size = model.config.source.size
            weight = next(model.parameters())
            g = torch.Generator().manual_seed(key % 5)
            source = torch.randn(3, size, size, generator=g, dtype=torch.float64).to(weight.dtype)
    s = settings_of(rng, model, long)
    request = Request(ids, s, source=source, key=key, priority=rng.choice([0, 0, 0, 1, 2, -1]))
    if s.beams == 1:
        what = rng.random()
        if what < 0.3:
            guilty = rng.randint(0, s.max_new_tokens) if rng.random() < 0.2 else None
            request.mask = mask_of(rng, vocab, guilty)
        elif what < 0.4:
            guilty = rng.randint(1, s.max_new_tokens)
            request.stop = stop_of(guilty)
    if rng.random() < 0.1:
        request.deadline = rng.choice([0.0, 20.0, 60.0, 1e9])
    return Asked(request, guilty)


def options_of(rng: random.Random, model: Any, exact: bool) -> dict[str, Any]:
    """An engine at random; pools so small that requests are put back."""
    chosen = {
        "rows": rng.randint(1, 8),
        "chunk": rng.choice([3, 7, 16, 512]),
        "backend": "ordered" if exact else "sdpa",
    }
    if rng.random() < 0.3:
        return chosen | {"layout": "contiguous"}
    page = rng.choice([2, 4])
    chosen |= {"page": page, "pages": rng.choice([40, 60, 200]), "prefix": rng.random() < 0.7}
    if not exact and not why_plain(model, anywhere=True) and rng.random() < 0.6:
        chosen["runner"] = "graph"
    return chosen


# --- faults -------------------------------------------------------------------------------------------------------


class Starved(Counted):
    """A model whose passes find too little memory, as often as `share` says."""

    def __init__(self, inner: Any, rng: random.Random, share: float):
        super().__init__(inner)
        self.rng, self.share, self.raised = rng, share, 0

    def _count(self, ids: Tensor, lengths: Any, logits: Tensor) -> Tensor:
        if self.rng.random() < self.share:
            self.raised += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super()._count(ids, lengths, logits)


def struck(call: Callable[[], Any], at: int) -> Any:
    """`call`, with a Strike at the `at`-th call of a function of the package in it."""
    left = at

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal left
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            left -= 1
            if left == 0:
                sys.setprofile(None)
                raise Strike(frame.f_code.co_qualname)

    sys.setprofile(count)
    try:
        return call()
    finally:
        sys.setprofile(None)


# --- one round ----------------------------------------------------------------------------------------------------


def play(
    seed: int, faults: bool = False, starved: bool = False, requests: int = ROUND
) -> Counter[str]:
    """A round of requests; what it counted. What differs is an AssertionError that names the round. Deadlines are in
    steps: the engine's clock is ours, and nobody else's."""
    clock = SimpleNamespace(monotonic=iter(range(10**9)).__next__)
    with mock.patch.object(scheduler_module, "time", clock):
        return _play(seed, faults, starved, requests)


def _play(seed: int, faults: bool, starved: bool, requests: int) -> Counter[str]:
    rng, counts = random.Random(seed), Counter[str]()
    name = FAMILIES[seed % len(FAMILIES)]
    exact = seed // len(FAMILIES) % 2 == 0
    model = zoo(name, exact)
    options = options_of(rng, model, exact)
    if starved:
        options.pop("runner", None)
    served = Starved(model, rng, 0.1) if starved else model
    engine = Engine(served, **options)
    shared = [rng.randrange(written(model).vocab) for _ in range(12)]
    waiting = [ask(rng, model, shared, key) for key in range(requests)]
    asked: dict[int, Asked] = {}
    past: list[str] = []

    def note(events: list[Event]) -> None:
        for event in events:
            mine = asked[event.request]
            said = f"{event} of a request that is done: {mine.done}; before: {past[-12:]}"
            assert mine.done is None, said
            mine.done = event.done
            if event.token is not None:
                mine.events.append(event)

    def step() -> list[Event]:
        if faults and rng.random() < 0.25:
            try:
                return struck(engine.step, int(2 ** rng.uniform(0, 12)))
            except Strike as hit:
                counts["faults"] += 1
                past.append(f"hit in {hit}")
                return []
        past.append("step")
        return engine.step()

    for _ in range(4000):
        what = rng.random()
        if waiting and what < 0.4:
            mine = waiting.pop()
            try:
                asked[engine.submit(mine.request)] = mine
            except UsageError as error:
                if "pages" not in str(error):
                    raise
                counts["too large for its pool"] += 1
        elif what < 0.415 and asked:
            number = rng.choice(list(asked))
            asked[number].cancelled = True
            past.append(f"cancel {number}")
            note(engine.cancel(number))
        elif what < 0.44 and len(list(engine.scheduler.running())) > 1:
            with torch.inference_mode():
                engine.scheduler.preempt_last()
        elif waiting or not engine.idle:
            note(step())
        else:
            break
        held(engine)
    assert engine.idle and not waiting, "it does not come to an end"
    left = [
        engine.scheduler.finished,
        engine.scheduler.resumed,
        engine.scheduler.deadlines,
        engine.scheduler.scores,
    ]
    assert not any(left), f"of requests that are done something is left: {left}"
    full(engine.pool)
    for number, mine in asked.items():
        try:
            counts[judge(mine, model, exact)] += 1
        except AssertionError as error:
            raise AssertionError(
                f"round {seed} ({name}, {'exact' if exact else 'float64'}, {options}), request {number}, "
                f"{mine.request.settings}: {error}"
            ) from error
    counts["out of memory"] += getattr(served, "raised", 0)
    return counts


def held(engine: Engine) -> None:
    """The books of pages agree with the tables of all rows."""
    if engine.pool is None:
        return
    graphs = [] if engine.graph is None else list(engine.graph.batches.values())
    slots = [slot for batch in graphs for slot in batch.slots]
    tables = [slot.pages for slot in slots]
    tables += [pages for slot in slots for pages in getattr(slot, "own", [])]
    tables += [m.pages for m in {id(s.memory): s.memory for s in slots if s.memory}.values()]
    plain = [batch for batch in engine.scheduler.batches.values() if batch not in graphs]
    caches = [cache for batch in plain for cache in batch.caches()]
    caches += [cache.cross for cache in caches if cache.cross is not None]
    tables += [table for cache in caches for table in getattr(cache, "tables", [])]
    engine.pool.check(tables)


def alone(request: Request, model: Any, exact: bool) -> list[Result]:
    backend = "ordered" if exact else "sdpa"
    engine = Engine(model, layout="contiguous", runner="torch", backend=backend)
    engine.submit(replace(request, number=-1, deadline=None, priority=0))
    (done,) = [event.done for event in engine.run() if event.done is not None]
    return done


def judge(asked: Asked, model: Any, exact: bool) -> str:
    """How a request ended; its answer must be the one that it gets alone, or the beginning of it."""
    got, want = asked.done, alone(asked.request, model, exact)
    assert got is not None and len(got) == len(want), "it was not answered"
    s = asked.request.settings
    for sample, (a, b) in enumerate(zip(got, want, strict=True)):
        if s.beams == 1:
            shown = [e.token for e in asked.events if e.row == sample]
            assert shown == a.ids, f"events said {shown}, the result {a.ids}"
        if a.error is not None and "out of memory" in a.error:
            a.finish = "cancelled"
        if a.finish in ("cancelled", "deadline"):
            assert s.beams > 1 or a.ids == b.ids[: len(a.ids)], f"{a.ids}, alone {b.ids}"
            continue
        if s.beams > 1 and (asked.cancelled or asked.request.deadline is not None):
            # The best beam of a search that was stopped may be one that had ended.
            continue
        size = len(a.ids)
        assert (a.ids, a.finish) == (b.ids, b.finish), f"{a}, alone {b}"
        assert a.error == b.error or (a.error or "").endswith(b.error or ""), f"{a}, alone {b}"
        if not a.ids and not a.prompt_logprobs and asked.request.mask is not None:
            # In a graph a mask that allows no first token is asked before the prompt is read.
            continue
        for x, y in (
            (a.logprobs, b.logprobs),
            (a.prompt_logprobs, b.prompt_logprobs),
            *zip(a.top_logprobs, b.top_logprobs, strict=True),
            *zip(a.prompt_top_logprobs, b.prompt_top_logprobs, strict=True),
        ):
            assert x == y if exact else near(x, y), f"{x}, alone {y}"
        assert len(a.top_logprobs) == (size if s.top_logprobs else 0)
        assert len(a.prompt_logprobs) == (len(asked.request.ids) if s.prompt_logprobs else 0)
    return got[0].finish


def near(a: Any, b: Any) -> bool:
    """Numbers up to rounding; tokens and what is missing are equal."""
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(near, a, b))
    return a == b or (isinstance(a, float) and isinstance(b, float) and abs(a - b) < CLOSE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--faults", type=int, default=0, help="go on until so many were raised")
    parser.add_argument("--first", type=int, default=0, help="the first round")
    parser.add_argument("--every", type=int, default=1, help="play one round of so many")
    args = parser.parse_args()
    torch.set_num_threads(1)
    counts, wrong, began, seed = Counter[str](), 0, time.perf_counter(), args.first
    ends = ("eos", "length", "stop", "error", "cancelled", "deadline")
    while sum(counts[e] for e in ends) < args.requests or counts["faults"] < args.faults:
        try:
            counts += play(seed, args.faults > 0, seed % 7 == 3)
        except Exception as error:
            wrong += 1
            print(f"WRONG round {seed}: {type(error).__name__}: {error}", flush=True)
        seed += args.every
        if (seed - args.first) // args.every % 10 == 0:
            print(
                f"{time.perf_counter() - began:.0f} s, round {seed}, {wrong} wrong: {dict(counts)}",
                flush=True,
            )
    print(
        f"{sum(counts[e] for e in ends)} requests in {time.perf_counter() - began:.0f} s, {wrong} rounds wrong: "
        f"{dict(counts)}"
    )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
