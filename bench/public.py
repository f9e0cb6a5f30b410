"""The protocols that others publish speeds by, run with the README's functions and their defaults on a GPU.

    python bench/public.py                      all parts; at most four minutes on an H200
    python bench/public.py --only steps,nano    some of steps, nano, gpt2, 8b
    python bench/public.py --quick              tiny sizes, on a CPU too: whether it runs at all

steps  megakernels': a Llama-3.2-1B shape, 32 tokens in, 128 out, greedy, by `regard.generate`; batch 1, and others the
       same way. A step is the time of the whole call over 128, the prompt, its reading and the text's way back
       included; beside it what each of the last 127 tokens adds: (time of 128 tokens - time of 1) / 127
gpt2   GPT-2 of 124M, batch 1, 32 in and 128 out: tokens over the time of the whole call
8b     a Qwen3-8B shape, 1 and 4 rows, counted as in `steps`
nano   nano-vllm's bench.py: 256 requests, prompts of 100 to 1,024 random tokens, 100 to 1,024 new ones, temperature
       0.6, no end token, a Qwen3-0.6B shape, its seed and its order of draws (133,966 new tokens); by `regard.Engine`
       with its defaults, and with 64, 128 and 256 rows; from the first request handed in to the last answer

Weights are random, in bf16. A gate stands before each figure: the log probabilities that Regard gave with its tokens,
in batches as large as the timed ones, against those of the same weights in float32 by the plain forward; and
transformers' own (bf16, sdpa), of the same tokens. If our mean error is above 1.1 times theirs, or our largest above
1.5 times their largest (a largest error of some thousand varies by that much), the figure is printed as not valid.

Sizes are timed up, then down, and so on; printed is the median, with the least and the most. The last line is all of it
as JSON. Nothing but torch, triton and transformers must be installed. It changes nothing.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import platform
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

import torch
from gpu_measure import prompts
from measure import floats

import regard
from regard.checkpoint.hf import Origin, express, plan
from regard.decode.runners.steps import why_plain
from regard.decode.settings import Request, Settings
from regard.errors import VERSION

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
KIND = torch.bfloat16 if "bf16" in floats() else torch.float32
IN, OUT = 32, 128
ROWS = (1, 2, 3, 4, 8, 16, 32, 64, 128, 256)
# What others have published, on an H200: microseconds a step, tokens a second.
PUBLISHED = {
    "steps": {"megakernel": 759.8, "CUDA graphs": 794.7},
    "gpt2": {"SGLang": 965, "vLLM": 767},
}
TINY = {"layers": 2, "dim": 64, "heads": 4, "vocab": 512}
NARROW = {**TINY, "kv_heads": 2, "head_dim": 16, "ffn_dim": 128}
# Texts that a gate reads at least, and at most.
LEAST, MOST = 16, 64
MEAN, LARGEST = 1.1, 1.5  # times transformers' error that ours may be
OTHER = 0.1  # a mean error of transformers' that is no rounding: another version reads the config in another way


# --- the gate -----------------------------------------------------------------------------------------------------


@dataclass
class Gate:
    """Errors of log probabilities against float32: ours, transformers', and of how many tokens."""

    tokens: int
    mean: float
    largest: float
    their_mean: float
    their_largest: float

    @property
    def valid(self) -> bool:
        # Where nothing is rounded differently, both are noise of float32.
        if self.largest < 1e-4:
            return True
        near = self.mean <= MEAN * self.their_mean and self.largest <= LARGEST * self.their_largest
        return near and self.their_mean < OTHER

    def __str__(self) -> str:
        ours, theirs = (
            f"{mean:.5f} / {most:.4f}"
            for mean, most in ((self.mean, self.largest), (self.their_mean, self.their_largest))
        )
        return f"{ours}   {theirs}   {'valid' if self.valid else 'NOT VALID'}"


class Judge:
    """A model's weights in float32, and in transformers' model."""

    def __init__(self, model: Any):
        # Before anything decodes with it: a graph holds joined weights.
        self.plain = copy.deepcopy(model).float()
        self.peer = peer(model)

    @torch.no_grad()
    def __call__(self, texts: Sequence[list[int]], results: Sequence[Any]) -> Gate:
        ours, theirs = [], []
        for prompt, answers, said in together(texts, results):
            true = log_probs(self.plain(torch.tensor(answers, device=DEVICE)), answers, prompt)
            logits = self.peer(torch.tensor(answers, device=DEVICE)).logits
            theirs.append((log_probs(logits, answers, prompt) - true).abs().flatten())
            ours.append((torch.tensor(said, device=DEVICE) - true).abs().flatten())
        mine, other = torch.cat(ours), torch.cat(theirs)
        numbers = (float(x) for e in (mine, other) for x in (e.mean(), e.max()))
        return Gate(len(mine), *numbers)


def together(
    texts: Sequence[list[int]], results: Sequence[Any], rows: int = 8
) -> Iterator[tuple[int, list[list[int]], list[list[float]]]]:
    """Prompts with their answers, those of the same two lengths in one batch: the prompts' length, whole texts, and
    the log probabilities that were given with the answers."""
    sizes = lambda pair: (len(pair[0]), len(pair[1].ids))  # noqa: E731
    pairs = sorted(zip(texts, results, strict=True), key=sizes)
    for (prompt, _), same in groupby(pairs, key=sizes):
        group = list(same)
        for first in range(0, len(group), rows):
            some = group[first : first + rows]
            yield prompt, [t + r.ids for t, r in some], [r.logprobs for _, r in some]


def log_probs(logits: torch.Tensor, texts: list[list[int]], prompt: int) -> torch.Tensor:
    """Of what follows the prompts (b t)."""
    logits = logits[:, prompt - 1 : -1].float()
    chosen = torch.tensor(texts, device=logits.device)[:, prompt:, None]
    return logits.gather(-1, chosen)[..., 0] - logits.logsumexp(-1)


def peer(model: Any) -> Any:
    """transformers' model with the same weights, as the folder that `model.save` writes would give it."""
    import transformers

    transformers.logging.set_verbosity_error()
    family, theirs, why = express(model, model.origin or Origin(model.family))
    assert family is not None, why
    tensors = {}
    for step in plan(model, family, theirs):
        ours = [model.get_parameter(name).detach() for name in step.ours]
        tensors |= dict(zip(step.theirs, step.save(ours), strict=True))
    config = transformers.AutoConfig.for_model(**theirs)
    before = torch.get_default_dtype()
    torch.set_default_dtype(KIND)
    try:
        with torch.device(DEVICE):
            made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    finally:
        torch.set_default_dtype(before)
    missing = made.load_state_dict(tensors, strict=False)
    # What is tied has one name in the weights.
    assert not missing.unexpected_keys and set(missing.missing_keys) <= {"lm_head.weight"}, missing
    made.tie_weights()
    return made.eval()


# --- time ---------------------------------------------------------------------------------------------------------


def seconds(call: Callable[[], Any]) -> float:
    wait = torch.cuda.synchronize if ON_GPU else lambda: None
    wait()
    start = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - start


def balanced(calls: dict[Any, Callable[[], Any]], rounds: int) -> dict[Any, list[float]]:
    """Seconds of each call, in turn: up, down, up, ..."""
    times: dict[Any, list[float]] = {name: [] for name in calls}
    for i in range(rounds):
        for name in list(calls)[:: -1 if i % 2 else 1]:
            times[name].append(seconds(calls[name]))
    return times


def spread(values: Sequence[float], digits: int = 1) -> dict[str, float]:
    middle = statistics.median(values)
    return {
        name: round(x, digits)
        for name, x in (("median", middle), ("least", min(values)), ("most", max(values)))
    }


# --- the parts ----------------------------------------------------------------------------------------------------


def stepped(model: Any, sizes: Sequence[int], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Greedy answers to prompts of 32 tokens for each number of rows: gates, then times, as `steps` counts them."""
    new, judge, vocab = (8 if args.quick else OUT), Judge(model), model.config.embedding.vocab
    texts = {rows: prompts(rows, IN, IN, rows, vocab) for rows in sizes}
    calls: dict[tuple[int, int], Callable[[], Any]] = {}

    def call(texts: list[list[int]], tokens: int) -> Any:
        return regard.generate(model, texts, max_new_tokens=tokens, eos=(), rows=len(texts))

    gates = {}
    # The most rows first: what is then recorded and kept in memory serves the others.
    for rows in sorted(sizes, reverse=True):
        for _ in range(3):
            call(texts[rows], new), call(texts[rows], 1)
        asked = [prompts(rows, IN, IN, 1000 + i, vocab) for i in range(-(-LEAST // rows))]
        said = [pair for some in asked for pair in zip(some, call(some, new), strict=True)]
        some = said[:: max(1, len(said) // MOST)]
        gates[rows] = judge(*zip(*some, strict=True))
    for rows in sizes:
        for tokens in (new, 1):
            calls[rows, tokens] = lambda r=rows, n=tokens: call(texts[r], n)
    times = balanced(calls, args.rounds)
    found = []
    print(
        "  rows   us a step   least to most    us each adds   tokens/s   error: mean / most, theirs"
    )
    for rows in sizes:
        whole, first = times[rows, new], times[rows, 1]
        step = spread([1e6 * t / new for t in whole])
        added = 1e6 * (statistics.median(whole) - statistics.median(first)) / (new - 1)
        rate = rows * new / statistics.median(whole)
        low = f"{step['least']:,.1f} to {step['most']:,.1f}"
        print(
            f"  {rows:4d} {step['median']:11,.1f} {low:>16} {added:14,.1f} {rate:11,.0f}   {gates[rows]}"
        )
        row = {"rows": rows, "us_a_step": step, "us_each_adds": round(added, 1)}
        found.append({**row, "tokens_per_second": round(rate, 1), **told(gates[rows])})
    return found


def told(gate: Gate) -> dict[str, Any]:
    return {"valid": gate.valid, "gate": vars(gate)}


def built(preset: str, args: argparse.Namespace, tiny: dict[str, Any], **changes: Any) -> Any:
    torch.manual_seed(0)
    more = tiny if args.quick else changes
    return regard.build(preset, device=DEVICE, dtype=KIND, **more)


def steps(args: argparse.Namespace) -> Any:
    model = built("llama-3.2-1b", args, NARROW)
    sizes = ROWS[:5] if args.quick else ROWS
    return {"graph": why_plain(model) or "yes", "rows": stepped(model, sizes, args)}


def gpt2(args: argparse.Namespace) -> Any:
    return stepped(built("gpt2", args, TINY), (1,), args)


def eight(args: argparse.Namespace) -> Any:
    shape = {"layers": 36, "dim": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128}
    model = built("qwen3-0.6b", args, NARROW, **shape, ffn_dim=12288, tied=False)
    return stepped(model, (1, 4), args)


def nano(args: argparse.Namespace) -> Any:
    model = built("qwen3-0.6b", args, NARROW)
    judge, asked = Judge(model), requests(args, model.config.embedding.vocab)
    tokens = sum(r.settings.max_new_tokens for r in asked)
    order = (0, 2, 4) if args.quick else (0, 64, 128, 256)
    # The most rows first: their memory is kept, and serves the others.
    for rows in order[:0:-1]:
        answered(model, rows, asked)
    said: dict[int, list[Any]] = {}
    times = balanced({n: lambda n=n: said.update({n: answered(model, n, asked)}) for n in order}, 2)
    some = range(0, len(asked), max(1, len(asked) // LEAST))
    gates = {n: judge([asked[i].ids for i in some], [said[n][i] for i in some]) for n in order}
    print(f"  {len(asked)} requests, {tokens:,} new tokens")
    print("  rows       tokens/s   least to most      error: mean / most, theirs")
    found = []
    for rows in order:
        rates = spread([tokens / t for t in times[rows]], 0)
        name = f"{rows}" if rows else "default"
        low = f"{rates['least']:,.0f} to {rates['most']:,.0f}"
        print(f"  {name:>7} {rates['median']:11,.0f} {low:>18}   {gates[rows]}")
        found.append({"rows": name, "tokens_per_second": rates, **told(gates[rows])})
    return {"requests": len(asked), "tokens": tokens, "rows": found}


def requests(args: argparse.Namespace, vocab: int) -> list[Request]:
    """As nano-vllm's bench.py draws them: all prompts, then how long each answer is."""
    r, count, least, most = random.Random(0), 256, 100, 1024
    if args.quick:
        count, least, most = 6, 4, 16
    words = min(10000, vocab - 1)
    texts = [[r.randint(0, words) for _ in range(r.randint(least, most))] for _ in range(count)]
    return [
        Request(text, Settings(max_new_tokens=r.randint(least, most), temperature=0.6), key=i)
        for i, text in enumerate(texts)
    ]


def answered(model: Any, rows: int, asked: Sequence[Request]) -> list[Any]:
    """All requests by an engine of so many rows; 0: as many as it takes by itself."""
    engine = regard.Engine(model, **({"rows": rows} if rows else {}))
    numbers = [engine.submit(copy.copy(request)) for request in asked]
    done = {event.request: event.done for event in engine.run() if event.done is not None}
    return [done[number][0] for number in numbers]


def main() -> None:
    parts = {"steps": steps, "gpt2": gpt2, "8b": eight, "nano": nano}
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes: whether it runs at all")
    parser.add_argument("--only", default=",".join(parts), help="of steps,gpt2,8b,nano")
    parser.add_argument("--rounds", type=int, default=6, help="times each size is timed")
    args = parser.parse_args()
    chosen = args.only.split(",")
    unknown = [name for name in chosen if name not in parts]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}; choose from {', '.join(parts)}")
    if not (ON_GPU or args.quick):
        print("error: this bench needs a CUDA device, and torch finds none here", file=sys.stderr)
        sys.exit(3)
    begin, out = time.perf_counter(), about()
    print(", ".join(f"{name} {value}" for name, value in out.items()))
    for name in chosen:
        start = time.perf_counter()
        print(
            f"{name}: {json.dumps(PUBLISHED[name])} published" if name in PUBLISHED else f"{name}:"
        )
        try:
            out[name] = parts[name](args)
        except Exception as error:
            out[name] = {"error": f"{type(error).__name__}: {error}"}
            traceback.print_exc(file=sys.stdout)
        # Its model, which a graph refers to and which refers to the graph, makes room for the next.
        gc.collect()
        torch.cuda.empty_cache()
        print(f"  ({time.perf_counter() - start:.0f} s)", flush=True)
    print(json.dumps({**out, "seconds": round(time.perf_counter() - begin, 1)}))
    sys.exit(any("error" in out[name] for name in chosen))


def about() -> dict[str, Any]:
    import transformers

    try:
        import triton
    except ImportError:
        triton = None
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "card": torch.cuda.get_device_name() if ON_GPU else "no GPU",
        "dtype": str(KIND).removeprefix("torch."),
        "regard": VERSION,
        "torch": torch.__version__,
        "triton": getattr(triton, "__version__", None),
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    main()
