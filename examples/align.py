"""Which words of a source an encoder-decoder reads while it writes: printed as pairs, and drawn.

    python examples/align.py MODEL lines.txt --lines 10 --to pictures

MODEL is a folder of a translation model (or of a run), lines.txt has a source a line. For each line: the translation
(beam 5), its pairs of words, and FOLDER/01.png with the last cross-attention, a mean over its heads.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

import regard
from regard.decode.generate import special_of, tokenizer_of
from regard.files import resolve_model
from regard.see.align import cross_site
from regard.see.plots import alignment, links, save
from regard.see.probe import Probe
from regard.text import needed


@torch.inference_mode()
def weights(model: Any, source: list[int], target: list[int]) -> torch.Tensor:
    """(t s): the last cross-attention while `target` is written, a mean over its heads."""
    site = cross_site(model)
    probe = Probe(layers=[site])
    ids = torch.tensor([[special_of(model).start or 0, *target[:-1]]])
    model(ids, source=torch.tensor([source]), probe=probe)
    return probe.maps[site][0][0].float().mean(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("file", type=Path)
    parser.add_argument("--lines", type=int, default=10)
    parser.add_argument("--to", type=Path, default=Path("pictures"))
    options = parser.parse_args()
    model = regard.load(resolve_model(options.model)).eval()
    tokenizer = needed(tokenizer_of(model))
    options.to.mkdir(parents=True, exist_ok=True)
    lines = options.file.read_text(encoding="utf-8").split("\n")[: options.lines]
    for number, result in enumerate(regard.generate(model, lines, beams=5, max_new_tokens=80), 1):
        line, target = lines[number - 1], list(result.ids)
        source = tokenizer.encode(line)
        names = [[tokenizer.decode([i]).strip() or "·" for i in ids] for ids in (source, target)]
        a = weights(model, source, target)
        pairs = ", ".join(
            f"{names[0][s]}~{names[1][t]}" for s, t, weight, _ in links(a, 0.2) if weight >= 0.2
        )
        print(f"{number:2}  {line}\n    {result.text}\n    {pairs}")
        save(alignment(a, *names), options.to / f"{number:02}.png")


if __name__ == "__main__":
    main()
