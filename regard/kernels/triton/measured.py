"""Which of several forms of the same work is fastest on this GPU: measured when a shape is first met, and kept in the
user's cache folder by the card's name and the versions, so that no constant of another card decides. Where somebody
waits, as in a server, measuring is put off: the first form serves until `measure` is called."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import statistics
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from regard.kernels.c.native import _cache
from regard.kernels.packed import Weight

ON = True  # False: the first form, always
CLEARLY = 0.97  # how much faster another than the first must be: as fast is not faster
Form = Callable[[Any], Any]  # of a weight


class _Thread(threading.local):
    """Whether this thread puts measuring off, and what it has met since."""

    def __init__(self) -> None:
        self.puts_off, self.met = False, dict[str, tuple[Weight, Mapping[str, Form]]]()


_thread = _Thread()


@contextlib.contextmanager
def put_off(on: bool = True) -> Iterator[None]:
    """Inside, what is first met is remembered for `measure`."""
    before, _thread.puts_off = _thread.puts_off, on
    try:
        yield
    finally:
        _thread.puts_off = before


def unmeasured() -> bool:
    """Whether something was put off."""
    return bool(_thread.met)


def measure() -> None:
    """Measure one of those that were put off."""
    key = next(iter(_thread.met))
    _measure(key, *_thread.met.pop(key))


def fastest(key: str, weight: Weight, forms: Mapping[str, Form]) -> str:
    """The name of the fastest form of what is done with a weight: the first unless another is clearly faster. Where
    nothing can be measured, off a GPU or while a graph is being recorded, the first."""
    first = next(iter(forms))
    if not ON or not weight.is_cuda:
        return first
    known = table(card())
    if known.get(key) not in forms and not torch.cuda.is_current_stream_capturing():
        if _thread.puts_off:
            _thread.met[key] = weight, forms
        else:
            _measure(key, weight, forms)
    name = known.get(key, first)
    return name if name in forms else first


def _measure(key: str, weight: Weight, forms: Mapping[str, Form]) -> None:
    first, known = next(iter(forms)), table(card())
    with contextlib.suppress(torch.cuda.OutOfMemoryError):
        took = {name: seconds(call, weight) for name, call in forms.items()}
        best = min(took, key=took.__getitem__)
        known[key] = best if took[best] < CLEARLY * took[first] else first
        keep(card(), key, known[key])


@functools.cache
def card() -> str:
    import triton

    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"


@functools.cache
def table(card: str) -> dict[str, str]:
    return dict(_read().get(card, {}))


def keep(card: str, key: str, name: str) -> None:
    """Beside what other processes have written since; without a folder of one's own, for this process alone."""
    path, every = _path(), _read()
    every.setdefault(card, {})[key] = name
    if path is not None:
        new = path.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            new.write_text(json.dumps(every, indent=1))
            os.replace(new, path)


def _path() -> Path | None:
    folder = _cache()
    return None if folder is None else folder / "kernels.json"


def _read() -> dict[str, dict[str, str]]:
    """What is no table of tables of names counts as nothing."""
    path = _path()
    try:
        every = json.loads(path.read_text()) if path is not None else {}
        return {str(c): {str(k): str(n) for k, n in rows.items()} for c, rows in every.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def seconds(call: Form, weight: Weight) -> float:
    """Of a call in a graph of many, each of which finds its weight in the GPU's memory, not in its cache."""
    size = 2 * torch.cuda.get_device_properties(weight.device).L2_cache_size
    # Of small weights not so many that measuring takes long.
    copies = [weight, *(weight.clone() for _ in range(min(63, size // weight.nbytes)))]
    copies *= -(-8 // len(copies))
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(weight)
        graph.capture_begin()
        for each in copies:
            call(each)
        graph.capture_end()
        took = []
        for _ in range(5):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            took.append(start.elapsed_time(end) / 1e3 / len(copies))
    return statistics.median(took)
