"""One forward pass on the CPU, Regard against transformers (sdpa), the same weights, in one interleaved run.

    python bench/forward.py [--repeats 9] [--quick]

Prints, for each model, shape and dtype: the largest difference of the logits, both medians, the ratio (above 1:
Regard is
faster) and the memory that the forward needed at its peak, each side in a process of its own. It changes nothing.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from typing import Any

import torch
from measure import child, floats, growth, header, medians

os.environ.setdefault("HF_HUB_OFFLINE", "1")
SHAPES = [(1, 512), (8, 128)]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def peer(name: str, dtype: torch.dtype) -> Any:
    """transformers' model of that shape, with random weights."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    if name == "gpt2-124m":
        config = transformers.GPT2Config()
        cls = transformers.GPT2LMHeadModel
    else:
        config = transformers.LlamaConfig(
            vocab_size=32000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12,
            num_attention_heads=12, num_key_value_heads=4, max_position_embeddings=2048,
        )  # fmt: skip
        cls = transformers.LlamaForCausalLM
    config._attn_implementation = "sdpa"
    return cls(config).to(dtype).eval()


def measure_peak(side: str, name: str, dtype: str, b: str, t: str) -> None:
    import regard

    model = peer(name, DTYPES[dtype])
    if side == "regard":
        model = regard.from_hf(model)
    with torch.inference_mode():
        model(torch.zeros(1, 2, dtype=torch.long))  # first-call buffers count for neither side
        print(growth(lambda: model(torch.zeros(int(b), int(t), dtype=torch.long))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="three repeats, no memory")
    parser.add_argument("--peak", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak:
        return measure_peak(*args.peak)
    import transformers

    import regard

    print(f"{header()}, transformers {transformers.__version__}")
    print(f"{'model':<11} {'tokens':>8} {'dtype':>5} {'max diff':>9} {'peer ms':>8} {'ours ms':>8} {'ratio':>6}"
          f" {'peer MB':>8} {'ours MB':>8}")  # fmt: skip
    for name in ("gpt2-124m", "llama"):
        for dtype in floats():
            theirs = peer(name, DTYPES[dtype])
            ours = regard.from_hf(theirs)
            for b, t in SHAPES:
                ids = torch.randint(0, 32000, (b, t), generator=torch.Generator().manual_seed(0))
                with torch.inference_mode():
                    diff = (ours(ids) - theirs(ids).logits).abs().max().item()
                    repeats = 3 if args.quick else args.repeats
                    peer_s, ours_s = medians([partial(theirs, ids), partial(ours, ids)], repeats)
                sides = ("peer", "regard")
                peaks = (
                    [0.0, 0.0]
                    if args.quick
                    else [child(__file__, s, name, dtype, b, t) for s in sides]
                )
                print(f"{name:<11} {b:>3}x{t:<4} {dtype:>5} {diff:>9.1e} {peer_s * 1e3:>8.1f} {ours_s * 1e3:>8.1f}"
                      f" {peer_s / ours_s:>6.2f} {peaks[0]:>8.0f} {peaks[1]:>8.0f}")  # fmt: skip


if __name__ == "__main__":
    main()
