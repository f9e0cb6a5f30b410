"""What a first request would wait for, done before: for images, and for servers that start.

On a GPU kernels are compiled, and forms of products measured, for every number of rows and every bucket of lengths.
What comes of it stays on disk, in Triton's folder and in ours, where the next process finds it. Graphs live as long as
a process: each is recorded once, which shows that it can be.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from regard.decode.engine import Engine
from regard.decode.generate import GREEDY, Job
from regard.decode.runners.steps import USUAL, widths
from regard.decode.settings import Request
from regard.decode.sources import source_length
from regard.kernels.c import native
from regard.kernels.triton import measured
from regard.kernels.triton.linear import triton
from regard.models.base import Model
from regard.models.embedding import Patches
from regard.models.sound import Sound

LONGEST = 32_768  # tokens of a text, unless more are asked for
SEVERAL = 8  # rows of a model without a graph, where nothing depends on how many there are
SOURCE = 512  # tokens of a source, where the model names no length


class Warmed(NamedTuple):
    """What was done now; where all was there before, no kernel and no form."""

    kernels: int  # that were compiled
    forms: int  # of products, that were measured
    graphs: int  # that were recorded
    rows: int  # up to these,
    length: int  # and texts of so many tokens
    first: float  # seconds until the first answer of one token was there,
    again: float  # and the next one
    seconds: float


def warm(
    model: Model,
    rows: int | None = None,
    length: int | None = None,
    memory: float | None = None,
    tell: Callable[[str], Any] = lambda text: None,
) -> Warmed:
    """Compile, measure and record what engines of so many rows (as many as one takes by itself) meet with texts of so
    many tokens (the model's context, up to 32,768). In this process nobody waits for that any more: as long as the
    model lives its graphs stay, in a cache of `memory`, as an Engine takes it. The next process finds what was compiled
    and measured on disk. `tell` hears how far it is."""
    start, before = time.perf_counter(), (compiled(), known())
    more: dict[str, Any] = {} if rows is None else {"rows": rows}
    engine = Engine(model, memory=memory, **more)
    rows, most = engine.scheduler.rows, min(length or LONGEST, engine.longest or LONGEST)
    first, again = (_answered(engine, _requests(model, [8])) for _ in range(2))
    if engine.graph is not None:
        steps = engine.graph.steps
        kinds = engine.graph.stepped([*USUAL, Job(model, (), {}).settings])
        shapes = [(width, bound) for width in widths(rows) for bound in _bounds(steps.bucket, most)]
        # The first does the work of all others until they are recorded.
        steps.want([(steps.rows, steps.length), *shapes], kinds)
        while engine.warm():
            tell(f"{len(steps.recorder.wanted)} shapes of steps are left")
    for requests in _asked(engine, rows, most):
        tell(f"{len(requests)} texts of up to {max(len(r.ids) for r in requests)} tokens")
        _answered(engine, requests)
    recorders = [] if engine.graph is None else engine.graph.recorders()
    graphs = sum(len(recorder.graphs) for recorder in recorders)
    kernels, forms = compiled() - before[0], known() - before[1]
    took = time.perf_counter() - start
    return Warmed(kernels, forms, graphs, rows, most, first, again, took)


def built() -> str:
    """The C code for this CPU, compiled unless it was: a sentence about it."""
    start, there = time.perf_counter(), native.library() is not None
    if not native.build():
        return f"there is no C code: {native.why()}"
    took = f"compiled in {time.perf_counter() - start:.1f} s"
    return f"C code for {native.form()}: {'was compiled before' if there else took}"


def compiled() -> int:
    """Kernels in Triton's folder."""
    return len(list(folder.glob("*/*.cubin"))) if (folder := triton_folder()) else 0


def known() -> int:
    """Forms that were measured on this card."""
    return len(measured.table(measured.card())) if triton_folder() else 0


def triton_folder() -> Path | None:
    """Where kernels are kept; None where there are none, off a GPU."""
    if triton is None or not torch.cuda.is_available():
        return None
    from triton import knobs

    return Path(knobs.cache.dir)


def _bounds(bucket: Callable[[int], int], most: int) -> list[int]:
    """The buckets of texts of up to `most` tokens."""
    return sorted({bucket(min(1 << i, most)) for i in range(most.bit_length() + 1)})


def _asked(engine: Engine, rows: int, most: int) -> Iterator[list[Request]]:
    """What reads prompts, and what the folder's settings ask for: each number of rows, each length, and a text of which
    another has left pages."""
    model, graph = engine.model, engine.graph is not None
    for count in widths(rows) if graph else (min(rows, SEVERAL),):
        yield _requests(model, [8] * min(count, rows), **GREEDY)
        yield _requests(model, [8] * min(count, rows))
    # Pictures and spectrograms are all of one size.
    if not graph or isinstance(getattr(model.config, "source", None), (Patches, Sound)):
        return
    if model.reads_source:
        most = min(most, source_length(model) or SOURCE)
    if engine.pool is not None:
        most = min(most, len(engine.pool.users) // 2 * engine.pool.page)
    for size in (1 << i for i in range(5, most.bit_length())):
        yield _requests(model, [size - 2], **GREEDY)
        yield _requests(model, [size - 2], last=1, **GREEDY)


def _requests(model: Model, sizes: list[int], last: int = 0, **settings: Any) -> list[Request]:
    """Texts of so many tokens, of which no two begin alike; those with another `last` are alike but for that."""
    vocab, reads = len(getattr(model, model.words).weight), getattr(model.config, "source", None)
    texts: list[Any] = [[(n + i + k) % vocab for k in range(n)] for i, n in enumerate(sizes)]
    for text in texts:
        text[-1] = (text[-1] + last) % vocab
    if isinstance(reads, (Patches, Sound)):
        texts = [torch.zeros(reads.shape)] * len(sizes)
    return Job(model, (), {**settings, "max_new_tokens": 2}).requests(texts)


def _answered(engine: Engine, requests: list[Request]) -> float:
    """Seconds until all are answered."""
    start = time.perf_counter()
    for request in requests:
        engine.submit(request)
    for event in engine.run():
        if event.cause is not None:
            raise event.cause
    return time.perf_counter() - start
