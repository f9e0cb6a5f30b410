"""Draw every picture of regard/see/plots.py: python docs/plots.py FOLDER. Each comes in light and in dark.

The attention maps are made by rule, so that the pictures need no trained model: heads that look at the token before,
at the first, at themselves, or near.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard.attention import softmax
from regard.errors import UsageError
from regard.learn import numbers, numbers_cost, numbers_position
from regard.position import Linear, Rope
from regard.see import numbers_maps, plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEXT = "the old king said to his daughter that the sea had taken all his ships"
SENTENCE = TEXT.split()
SOURCE = ["ein", "kleiner", "Hund", "läuft", "schnell", "durch", "den", "hohen", "Schnee", "."]
TARGET = ["a", "little", "dog", "runs", "through", "the", "deep", "snow", "quickly", "."]
ORDER = (0, 1, 2, 3, 5, 6, 7, 8, 4, 9)  # the source word of each target word


def rule_maps(layers: int, heads: int, tokens: int) -> Tensor:
    """Causal weights (layers heads tokens tokens) of four kinds of head, the sharper the deeper."""
    at = torch.arange(tokens, dtype=torch.float64)
    back = at[:, None] - at
    kinds = (
        -(back - 1).abs(),
        -at.expand(tokens, -1),
        -back.abs(),
        torch.cos(back * 0.9) - back / 40,
    )
    noise = torch.randn(layers, heads, tokens, tokens, generator=torch.Generator().manual_seed(0))
    scores = torch.stack(
        [torch.stack([kinds[(i + j) % 4] for j in range(heads)]) for i in range(layers)]
    )
    scores = scores * torch.arange(1, layers + 1)[:, None, None, None] + 0.8 * noise
    return softmax(scores, back >= 0)


def aligned() -> Tensor:
    """Cross-attention (targets sources) that mostly follows ORDER."""
    near = -0.7 * (torch.tensor(ORDER)[:, None] - torch.arange(len(SOURCE))).abs().double()
    return softmax(near + 1.2 * (near == 0))


def chosen(keys: int = 40, topk: int = 8) -> numbers_maps.Selection:
    """An indexer that mostly agrees with the attention it chooses for; the last keys are hidden."""
    draw = torch.Generator().manual_seed(1)
    dense = 2.2 * torch.randn(keys, generator=draw, dtype=torch.float64)
    index = (dense + 0.6 * torch.randn(keys, generator=draw, dtype=torch.float64)).clamp(min=0)
    seen = torch.arange(keys) < keys - 4
    return numbers_maps.selection(index.masked_fill(~seen, -torch.inf), softmax(dense, seen), topk)


def pictures() -> dict[str, Callable[[bool], Figure]]:
    """Every picture by the name of its file; it takes whether it is dark."""
    maps, n, cost, place = rule_maps(4, 8, len(SENTENCE)), numbers, numbers_cost, numbers_position
    lengths = [2**i for i in range(10, 18)]
    learned = place.sinusoidal_table(64, 48).vectors @ rotation(48) + 0.2 * rotation(64)[:, :48]
    ropes = {
        "base 10,000": Rope(),
        "base 500,000": Rope(500000.0),
        "base 10,000, stretched by 4": Rope(scaling=Linear(4.0)),
    }
    x, v = torch.tensor([1.0, 3.0, 2.0, 4.0, 0.5]), torch.tensor([1.0, 2.0, 3.0, 1.5, 4.0])
    a = torch.linspace(0, 15, 151, dtype=torch.float64)
    few = torch.tensor([0.0, 1.0, 2.0, 5.0], dtype=torch.float64)
    caches = {
        name: cost.cache_table(cost.cache_variants(name), lengths)
        for name in ("llama-3.1-8b", "deepseek-v3.2")
    }
    return {
        "head-grid": lambda dark: plots.head_grid(maps, dark=dark),
        "one-head": lambda dark: plots.one_head(
            maps[2, 0], SENTENCE, SENTENCE, "Layer 2, head 0", dark=dark
        ),
        "one-head-numbers": lambda dark: plots.one_head(
            maps[1, 3, :7, :7], SENTENCE[:7], SENTENCE[:7], "Layer 1, head 3", dark=dark
        ),
        "alignment": lambda dark: plots.alignment(aligned(), SOURCE, TARGET, least=0.09, dark=dark),
        "selection": lambda dark: plots.selection_strip(chosen(), dark=dark),
        "sinusoidal": lambda dark: plots.position_table(
            place.sinusoidal_table(96, 64), "Sinusoidal positions", dark=dark
        ),
        "learned": lambda dark: plots.position_table(
            place.learned_table(learned), "Learned positions (an example made by rule)", dark=dark
        ),
        "rope-clocks": lambda dark: plots.rope_dials(
            place.rope_clocks(Rope(), 16, [0, 1, 2, 5, 10], [0, 1, 2, 3, 4, 6]), dark=dark
        ),
        "distance": lambda dark: plots.distance_curves(
            place.distance_scores(ropes, 64, 129, alibi=4), dark=dark
        ),
        "saturation": lambda dark: plots.saturation_curves(n.saturations(a), dark=dark),
        "jacobian": lambda dark: plots.jacobian_tiles(n.saturations(few), dark=dark),
        "variance": lambda dark: plots.variance_curves(
            n.dot_spread([4, 8, 16, 32, 64, 128]), dark=dark
        ),
        "online-softmax": lambda dark: plots.online_steps(n.online_pass(x, v), dark=dark),
        "cache-llama": lambda dark: plots.cache_bars(
            caches["llama-3.1-8b"], "Cache of Llama 3.1 8B in bf16, 32 layers", dark=dark
        ),
        "cache-deepseek": lambda dark: plots.cache_bars(
            caches["deepseek-v3.2"], "Cache of DeepSeek-V3.2 in bf16, 61 layers", dark=dark
        ),
        "forgetting": lambda dark: plots.forgetting_curves(
            cost.forgetting([1.05, 0.99, 0.9, 0.5], 100), dark=dark
        ),
        "cost": lambda dark: plots.cost_curves(
            cost.layer_costs(512, [2**i for i in range(6, 16)]), dark=dark
        ),
    }


def rotation(size: int) -> Tensor:
    """A fixed orthogonal matrix: what training does to features, it does in no order one could see."""
    draw = torch.Generator().manual_seed(2)
    return torch.linalg.qr(torch.randn(size, size, generator=draw, dtype=torch.float64))[0]


def draw(folder: Path) -> Iterator[Path]:
    """Write NAME.png and NAME-dark.png for every picture."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures().items():
        for dark in (False, True):
            yield plots.save(picture(dark), folder / f"{name}{'-dark' if dark else ''}.png")


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python docs/plots.py FOLDER", file=sys.stderr)
        return 2
    try:
        for path in draw(Path(sys.argv[1])):
            print(path)
    except (UsageError, OSError) as error:
        print("error:", error, file=sys.stderr)
        return getattr(error, "code", 2)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
