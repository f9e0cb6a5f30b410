"""What looking costs: the time of a row's map beside the forward that it watches, and the memory of all maps.

    python bench/look.py [--device cpu|cuda] [--keys 16384] [--layers 2] [--repeats 3]

Time: a model of GPT-2's width with rotary positions. Watched are one decoding step behind `keys` tokens in a cache, 12
layers, and a forward over all of them, `layers` layers; the probe asks for the last row, of one head of the last layer,
of all heads of it, and of all heads of all layers. The share is the time spent inside the probe over that of the same
forward without one (medians, taken in turn). Target: a map costs below 5 % of the forward.

Memory: GPT-2 (12 layers, 12 heads) over 1,024 tokens; the peak of `hidden` above the weights, without a probe, with
every map kept as a thumbnail of 64 x 64, and with every map kept whole; then the peak of the process `regard look`
that writes the page, beside one that loads the same folder and makes a forward. Target: less than 100 MB more.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from measure import child, growth, header, medians

import regard
from regard.see.probe import Probe, Recorder, thumbnail

TOKENS = 1024
WAYS: dict[str, Callable[[], Probe | None]] = {
    "no probe": lambda: None,
    "thumbnails": lambda: Probe(reduce=thumbnail(64)),
    "whole maps": Probe,
}

PROCESSES = ("load, hidden", "regard look")


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


def asked(last: int) -> dict[str, Callable[[], Probe]]:
    return {
        "one head": lambda: Probe([last], [0], [-1]),
        "one layer": lambda: Probe([last], rows=[-1]),
        "every layer": lambda: Probe(rows=[-1]),
    }


@torch.inference_mode()
def times(clock: Clock, keys: int, layers: int, repeats: int, cached: bool) -> None:
    """Of a forward over `keys` tokens, or of one token behind as many in a cache (of zeros: time does not mind)."""
    torch.manual_seed(0)
    device = clock.device
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = regard.build("llama", layers=layers, max_len=2 * keys, device=device, dtype=dtype)
    ids = torch.randint(32000, (1, 1 if cached else keys), device=device)
    cache = model.cache(1, capacity=keys + 8 * repeats) if cached else None
    if cache is not None:
        cache.begin(keys)

    def run(probe: Probe | None = None) -> None:
        model.hidden(ids, cache=cache, probe=probe)
        wait(device)

    print(
        f"{'a decoding step' if cached else 'a forward'}, the last row of {keys:,} keys, {layers} layers of "
        f"12 heads over 4, {dtype}, {device}"
    )
    for line in clock.shares(run, asked(layers - 1), repeats):
        print(f"  {line}", flush=True)


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


BUILD = """
import pathlib, sys, regard
from regard.data.train_tokenizer import Recipe, train_tokenizer, write_files
regard.build("gpt2").save(sys.argv[1])
write_files(pathlib.Path(sys.argv[1]), train_tokenizer([sys.argv[2]], Recipe("chars")))
"""
FORWARD = """
import sys, torch, regard
model = regard.load(sys.argv[1])
with torch.inference_mode():
    model.hidden(torch.zeros(1, int(sys.argv[2]), dtype=torch.long))
"""


def process(way: str) -> float:
    """The peak of a whole process, in bytes. (A child's peak begins with its parent's: this one must be small.)"""
    with tempfile.TemporaryDirectory() as name:
        folder, text = f"{name}/model", "a " * (TOKENS // 2)
        subprocess.run([sys.executable, "-c", BUILD, folder, text], check=True)
        look = ["-m", "regard", "look", folder, text, "--output", f"{name}/page.html"]
        what = look if way == "regard look" else ["-c", FORWARD, folder, str(TOKENS)]
        made = subprocess.Popen([sys.executable, *what], stdout=subprocess.DEVNULL)
        _, code, used = os.wait4(made.pid, 0)
        if code:
            sys.exit(f"{way}: failed")
        return used.ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--keys", type=int, default=16384)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peak", default=None, metavar="WAY", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak is not None:
        print(process(args.peak) if args.peak in PROCESSES else peak(args.device, args.peak))
        return
    print(header())
    clock = Clock(args.device)
    times(clock, args.keys, 12, 10 * args.repeats, cached=True)
    times(clock, args.keys, args.layers, args.repeats, cached=False)
    found = {way: child(__file__, way, "--device", args.device) for way in WAYS}
    print(f"GPT-2, 12 layers of 12 heads, {TOKENS:,} tokens, peak of hidden() above the weights")
    for way, most in found.items():
        print(f"  {way:10} {most:8.1f} MB, {most - found['no probe']:+8.1f} MB")
    if args.device == "cpu":
        print("the same model, the peak of a whole process")
        for way in PROCESSES:
            print(f"  {way:11} {child(__file__, way):8.1f} MB")


if __name__ == "__main__":
    main()
