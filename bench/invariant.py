"""What batch-invariant decoding costs on the CPU: the same model plain, prepared and invariant, one interleaved run.

    python bench/invariant.py [--part gpt2 llama] [--dtype float32 bfloat16] [--quick] [--repeats 3]

Random weights of real shape, greedy, no end token: every side makes the same number of tokens. For each model and
batch: median milliseconds and tokens per second, the price (time over the plain model's; below 1: faster), and how many
tokens of the last row of the batch have the same id and the same bits of log probability when it is asked alone. The
invariant model packs its weights, so the prepared one, packed too, is shown beside it; making it ready is timed once.
Takes about a minute a part on two cores; run it alone. It changes nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from decode import BATCHES, NEW, PROMPT, Prompts, peer, ragged
from measure import floats, header, medians

PARTS = ("gpt2", "llama")
DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
Answer = tuple[list[int], list[float]]


def answers(model: Any, invariant: bool, prompts: Prompts, new: int) -> list[Answer]:
    import regard

    settings: dict[str, Any] = dict(eos=(), max_new_tokens=new, invariant=invariant)
    found = regard.generate(model, [list(p) for p in prompts], **settings)
    return [(r.ids, r.logprobs) for r in found]


def alike(a: Answer, b: Answer) -> int:
    """Tokens before the first whose id or log probability differs by a bit."""
    pairs = zip(zip(*a, strict=True), zip(*b, strict=True), strict=True)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), len(a[0]))


def ready(model: Any, prompts: Prompts) -> Any:
    """The invariant model after its first tokens: weights packed, classes of row counts found."""
    from regard.fast.invariant import invariant

    start = time.perf_counter()
    made = invariant(model)
    answers(made, True, prompts, 2)
    print(f"{'':<18} made invariant in {time.perf_counter() - start:.1f} s", flush=True)
    return made


def compare(name: str, dtype: str, args: argparse.Namespace) -> None:
    import regard

    shape = peer(name, args.quick)
    vocab, model = shape.config.vocab_size, regard.from_hf(shape).to(getattr(torch, dtype))
    about, new = (8, 8) if args.quick else (PROMPT, NEW)
    steady = ready(model, ragged(1, vocab, about))
    for batch in BATCHES:
        prompts = ragged(batch, vocab, about)
        fast = regard.prepare(model, DTYPES[dtype])
        models = {"plain": (model, False), "prepared": (fast, False), "invariant": (steady, True)}
        found: dict[str, list[Answer]] = {}

        def run(
            side: str, found: Any = found, models: Any = models, prompts: Any = prompts
        ) -> None:
            found[side] = answers(*models[side], prompts, new)

        times = dict(zip(models, medians([partial(run, s) for s in models], args.repeats)))
        for side, seconds in times.items():
            alone = answers(*models[side], prompts[-1:], new)[0]
            same = f"{alike(alone, found[side][-1])}/{new}" if batch > 1 else ""
            price = seconds / times["plain"]
            print(f"{f'{name} {dtype}':<18} {batch:>5} {side:<10} {seconds * 1e3:>9.1f} "
                  f"{batch * new / seconds:>9.1f} {price:>6.2f}  {same}".rstrip(), flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["float32"])
    parser.add_argument("--quick", action="store_true", help="tiny sizes: whether it runs at all")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from regard.kernels.c.threads import use_threads

    use_threads()
    warnings.simplefilter("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
    args.repeats = 1 if args.quick else args.repeats
    print(header())
    print(
        f"{'':<18} {'batch':>5} {'side':<10} {'ms':>9} {'tokens/s':>9} {'price':>6}  alone = batched"
    )
    for name in args.part:
        for dtype in args.dtype:
            if DTYPES[dtype] in floats():
                compare(name, dtype, args)
            else:
                print(f"{name} {dtype}: left out, this CPU does not multiply it")


if __name__ == "__main__":
    main()
