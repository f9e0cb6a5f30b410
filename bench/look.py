"""What looking costs: the time of a row's map beside the forward that it watches, and the memory of all maps.

    python bench/look.py [--device cpu|cuda] [--keys 16384] [--layers 2] [--repeats 3]

Time: a GPT-2-wide model of `layers` layers with rotary positions. Watched are a forward over all `keys` tokens, and one
decoding step behind as many in a cache; the probe asks for the last row, of one head of the last layer, of all heads of
it, and of all heads of all layers. The share is the time spent inside the probe over that of the same forward without
one (medians, taken in turn). Target: below 5 % of the forward.

Memory: GPT-2 (12 layers, 12 heads) over 1,024 tokens; the peak of `hidden` above the weights, without a probe, with
every map kept as a thumbnail of 64 x 64, and with every map kept whole. Target: thumbnails add less than 100 MB.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from measure import child, growth, header, medians

import regard
from regard.look.maps import thumbnail
from regard.look.probe import Probe, Recorder

TOKENS = 1024
WAYS: dict[str, Callable[[], Probe | None]] = {
    "no probe": lambda: None,
    "thumbnails": lambda: Probe(reduce=thumbnail(64)),
    "whole maps": Probe,
}


class Clock:
    """Seconds inside the probe, for as long as it runs."""

    def __init__(self, device: str):
        self.seconds, self.device, see = 0.0, device, Recorder.see

        def timed(recorder: Recorder, *args: Any) -> None:
            wait(device)
            start = time.perf_counter()
            see(recorder, *args)
            wait(device)
            self.seconds += time.perf_counter() - start

        Recorder.see = timed  # type: ignore[method-assign]

    def shares(self, run: Callable[..., None], asked: dict[str, Any], repeats: int) -> list[str]:
        """A line for each probe: all in turn with the forward that has none."""
        inside: dict[str, list[float]] = {name: [] for name in asked}

        def watched(name: str) -> None:
            self.seconds = 0.0
            run(probe=asked[name]())
            inside[name].append(self.seconds)

        plain, *rest = medians([run, *(partial(watched, name) for name in asked)], repeats)
        lines = [f"{'no probe':11} {plain * 1e3:10.2f} ms"]
        for name, seconds in zip(asked, rest, strict=True):
            mine = statistics.median(inside[name][1:])
            lines.append(
                f"{name:11} {seconds * 1e3:10.2f} ms, inside the probe {mine * 1e3:8.3f} ms: {mine / plain:.3%}"
            )
        return lines


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@torch.inference_mode()
def times(device: str, keys: int, layers: int, repeats: int) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = regard.build("llama", layers=layers, max_len=2 * keys, device=device, dtype=dtype)
    ids = torch.randint(32000, (1, keys), device=device)
    cache = model.cache(1, capacity=keys + 40 * repeats + 64)
    for part in ids.split(1024, 1):
        model.hidden(part, cache=cache)

    def whole(probe: Probe | None = None) -> None:
        model.hidden(ids, probe=probe)
        wait(device)

    def step(probe: Probe | None = None) -> None:
        model.hidden(ids[:, :1], cache=cache, probe=probe)
        wait(device)

    clock, last = Clock(device), layers - 1
    asked: dict[str, Callable[[], Probe]] = {
        "one head": lambda: Probe([last], [0], [-1]),
        "one layer": lambda: Probe([last], rows=[-1]),
        "every layer": lambda: Probe(rows=[-1]),
    }
    print(f"the last row of {keys:,} keys, {layers} layers of 12 heads over 4, {dtype}, {device}")
    for what, run, count in (("forward", whole, repeats), ("decoding step", step, 10 * repeats)):
        for line in clock.shares(run, asked, count):
            print(f"  {what:13} {line}", flush=True)


@torch.inference_mode()
def peak(device: str, way: str) -> float:
    """Bytes above the weights at the worst moment."""
    torch.manual_seed(0)
    model, probe = regard.build("gpt2", device=device), WAYS[way]()
    ids = torch.randint(50257, (1, TOKENS), device=device)
    model.hidden(ids[:, :8], probe=WAYS[way]())  # what is made once, such as threads
    if device == "cpu":
        return growth(lambda: model.hidden(ids, probe=probe))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model.hidden(ids, probe=probe)
    return torch.cuda.max_memory_allocated() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--keys", type=int, default=16384)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peak", default=None, metavar="WAY", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak is not None:
        print(peak(args.device, args.peak))
        return
    print(header())
    times(args.device, args.keys, args.layers, args.repeats)
    found = {way: child(__file__, way, "--device", args.device) for way in WAYS}
    print(f"GPT-2, 12 layers of 12 heads, {TOKENS:,} tokens, peak of hidden() above the weights")
    for way, most in found.items():
        print(f"  {way:10} {most:8.1f} MB, {most - found['no probe']:+8.1f} MB")


if __name__ == "__main__":
    main()
