"""Drawing a token on a GPU: kernels/triton/draw.py against the sorts of decode/filters.py, each as a CUDA graph.

PYTHONPATH=. python bench/draw.py

Prints microseconds, the ratio, and how many tokens are equal. Those that are not must have a u or a top-p
so near to a boundary that rounding decides: `near` counts what is explained by that.
"""

from __future__ import annotations

import statistics
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # nothing needs to be installed

from regard.decode.filters import FILTERS
from regard.decode.sampling import draw
from regard.kernels.triton.draw import draw_filtered
from regard.kernels.triton.sample import best

VOCAB, CALLS = 128256, 20
SETTINGS: dict[str, dict[str, float]] = {
    "temperature": {},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "top_k top_p": {"top_k": 50, "top_p": 0.9},
    "all": {"top_k": 50, "top_p": 0.9, "min_p": 0.05},
}
# Standard deviation of the logits: nearly flat, and as peaked as a language model's; rounded to bf16 there are ties.
LOGITS = {
    "flat": (1.0, torch.float32),
    "peaked": (3.0, torch.float32),
    "bf16": (3.0, torch.bfloat16),
}


def keep(logits: Tensor, columns: dict[str, Tensor]) -> Tensor:
    kept = logits.float() / columns["temperature"].clamp(min=1e-6)
    for name, each in FILTERS.items():
        if name in columns:
            kept = each.keep(kept, columns[name])
    return kept


def plain(logits: Tensor, u: Tensor, columns: dict[str, Tensor]) -> Tensor:
    drawn = draw(keep(logits, columns), u)
    return torch.where(columns["temperature"][:, 0] > 0, drawn, logits.argmax(-1))


def replayed(call: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """Microseconds per call, from a graph of CALLS of them, and the last result."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            result = call()
    times = []
    for _ in range(9):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last) * 1000 / CALLS)
    return statistics.median(times), result.clone()


def near(logits: Tensor, u: Tensor, columns: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Whether a token is one that the plain form draws with its u or its top-p moved by up to 1e-4."""
    found = torch.zeros_like(tokens, dtype=torch.bool)
    for shift in (-1e-4, -1e-5, -1e-6, 0.0, 1e-6, 1e-5, 1e-4):
        moved = {n: c + shift if n == "top_p" else c for n, c in columns.items()}
        kept = keep(logits, moved)
        mass = kept.double().softmax(-1).cumsum(-1)
        low = torch.searchsorted(mass, (u - 1e-4).clamp(min=0)[:, None], right=True)[:, 0]
        high = torch.searchsorted(mass, (u + 1e-4)[:, None], right=True)[:, 0]
        own = kept.gather(-1, tokens[:, None])[:, 0] > -torch.inf
        found |= own & (low <= tokens) & (tokens <= high)
    return found


def measure(rows: int, kind: str, name: str) -> None:
    scale, dtype = LOGITS[kind]
    g = torch.Generator("cuda").manual_seed(rows)
    logits = (torch.randn(rows, VOCAB, device="cuda", generator=g) * scale).to(dtype)
    u = torch.rand(rows, device="cuda", generator=g, dtype=torch.float64)
    settings = {"temperature": 0.8, **SETTINGS[name]}
    columns = {n: torch.full((rows, 1), v, device="cuda") for n, v in settings.items()}
    ours, tokens = replayed(lambda: draw_filtered(logits, u, columns))
    theirs, want = replayed(lambda: plain(logits, u, columns))
    again = [draw_filtered(logits, u, columns) for _ in range(3)]
    same = all(torch.equal(tokens, other) for other in again)
    equal = tokens == want
    explained = (equal | near(logits, u, columns, tokens)).sum()
    print(
        f"{rows:4} {kind:7} {name:12} {ours:8.1f} us {theirs:9.1f} us {theirs / ours:6.1f} x   "
        f"equal {int(equal.sum())}/{rows}  near {int(explained)}/{rows}  "
        f"{'deterministic' if same else 'NOT DETERMINISTIC'}",
        flush=True,
    )


def main() -> None:
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    print("rows logits  filter        kernels        sort       ratio")
    for rows in (1, 8, 64):
        for kind, name in [("flat", "top_p"), ("bf16", "top_p")] + [
            ("peaked", n) for n in SETTINGS
        ]:
            try:
                with torch.no_grad():
                    measure(rows, kind, name)
            except Exception:
                print(f"{rows:4} {kind:7} {name:12} failed")
                traceback.print_exc()
        logits = torch.randn(rows, VOCAB, device="cuda")
        gap = (best(logits)[1] - logits.logsumexp(-1)).abs().max()
        took, _ = replayed(lambda x=logits: best(x)[1])
        print(f"{rows:4} best {took:.1f} us, norm off by {gap:.1e}")


if __name__ == "__main__":
    main()
