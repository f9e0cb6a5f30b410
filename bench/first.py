"""A first model: README's example by `regard train`, against a plain loop in the style of nanoGPT with the same budget.

    python bench/first.py [--text FILE] [--seeds 3] [--steps N]

Both read the same text by the same characters, hold out the same tenth, and get the same layers, width, heads, rows,
length and steps, all from the README's own TOML; the plain loop has nanoGPT's AdamW and its rate for this text.
Printed: the loss of each side on the whole of the held-out text after the last step, and their ratio. The text is tiny
Shakespeare where ../shared/data is beside the repository, else the prose of the recipe gpt-pydoc.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import re
import statistics
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure import header
from torch import Tensor, nn

import regard
from regard import recipes

ROOT = Path(__file__).resolve().parents[1]
PLAY = ROOT.parent / "shared" / "data" / "lm" / "tinyshakespeare.txt.xz"


class Block(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(o.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """nanoGPT's model: learned positions, a tied head, N(0, 0.02), residual projections over sqrt(2 layers)."""

    def __init__(self, vocab: int, length: int, layers: int, dim: int, heads: int):
        super().__init__()
        self.words, self.places = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                last = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers) if last else 0.02)
            elif "norm" not in name:
                nn.init.zeros_(p)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.words.weight)


def plain(config: dict[str, Any], text: str, steps: int, seed: int) -> tuple[float, int]:
    """The held-out loss of the plain loop, and its parameters."""
    torch.manual_seed(seed)
    data, length, rows = config["data"], config["data"]["length"], config["data"]["rows"]
    number = {c: i for i, c in enumerate(sorted(set(text)))}
    ids = torch.tensor([number[c] for c in text])
    cut = int(len(ids) * (1 - data["held"]))
    train, held = ids[:cut], ids[cut:]
    m = config["model"]
    model = GPT(len(number), length, m["layers"], m["dim"], m["heads"])
    wide = [p for p in model.parameters() if p.dim() > 1]
    thin = [p for p in model.parameters() if p.dim() < 2]
    groups: list[dict[str, Any]] = [
        {"params": wide, "weight_decay": 0.1},
        {"params": thin, "weight_decay": 0.0},
    ]
    rate = 1e-3
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))
    warm = max(steps // 10, 1)
    for step in range(steps):
        # nanoGPT's schedule: a linear warm-up, then a cosine to a tenth.
        share = 0.55 + 0.45 * math.cos(math.pi * max(step - warm, 0) / max(steps - warm, 1))
        for group in optimizer.param_groups:
            group["lr"] = rate * min((step + 1) / warm, share)
        start = torch.randint(len(train) - length, (rows,))
        x = torch.stack([train[i : i + length + 1] for i in start.tolist()])
        loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return measured(model, held, length), sum(p.numel() for p in model.parameters())


@torch.no_grad()
def measured(model: nn.Module, ids: Tensor, length: int) -> float:
    """The mean loss of all of a text, in rows side by side."""
    total = 0.0
    for start in range(0, len(ids) - 1, length):
        x = ids[start : start + length + 1]
        total += float(F.cross_entropy(model(x[None, :-1])[0], x[1:], reduction="sum"))
    return total / (len(ids) - 1)


def ours(home: Path, steps: int, seed: int) -> tuple[float, int]:
    """The same by `regard train story.toml`."""
    run = home / f"run-{seed}"
    changes = {"train.steps": steps, "train.seed": seed}
    result = regard.train(home / "story.toml", run, changes=changes)
    return result.metrics["loss"], json.loads((run / "run.json").read_text())["parameters"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    options = parser.parse_args()
    toml = re.search(r"```toml\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert toml is not None, "README.md has no TOML"
    config = tomllib.loads(toml[1])
    steps = options.steps or config["train"]["steps"]
    print(header())
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        text = words(options.text, home)
        (home / "story.txt").write_text(text, encoding="utf-8")
        (home / "story.toml").write_text(toml[1], encoding="utf-8")
        found: dict[str, list[float]] = {"regard": [], "plain": []}
        for seed in range(options.seeds):
            for name, side in (
                ("regard", ours(home, steps, seed)),
                ("plain", plain(config, text, steps, seed)),
            ):
                found[name].append(side[0])
                print(
                    f"seed {seed}  {name:<7} {side[1]:>9,} parameters  held-out loss {side[0]:.4f}"
                )
    means = {name: statistics.mean(losses) for name, losses in found.items()}
    ratio = means["regard"] / means["plain"]
    print(f"{steps} steps, mean of {options.seeds}: regard {means['regard']:.4f}, "
          f"plain {means['plain']:.4f}, ratio {ratio:.4f}")  # fmt: skip


def words(path: Path | None, home: Path) -> str:
    if path is not None:
        return path.read_text(encoding="utf-8")
    if PLAY.is_file():
        return lzma.open(PLAY, "rt", encoding="utf-8").read()
    recipes.copy("gpt-pydoc", home / "prose")
    return "\n".join(p.read_text("utf-8") for p in sorted((home / "prose-data").rglob("*.txt")))


if __name__ == "__main__":
    main()
