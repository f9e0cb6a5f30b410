"""What a run's last checkpoint attends to in the last of its samples, for the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from regard.checkpoint import load
from regard.decode.generate import special_of, tokenizer_of
from regard.errors import UsageError
from regard.report.run import Map
from regard.report.runs import Run
from regard.see.look import named
from regard.see.probe import Probe
from regard.text import Tokenizer, needed
from regard.train.measure import context_of

LONGEST, MOST, HEADS = 48, 96, 12  # tokens of a map; maps of a page; of a layer
WRITES = ("lm", "prefix")  # tasks whose samples go on where the prompt ends


def look(run: Run) -> tuple[list[Map], str]:
    """Maps, layer by layer, and what they show; or none, and why."""
    try:
        return _look(run)
    except (UsageError, OSError) as error:
        return [], f"No attention is shown: {error}."


def _look(run: Run) -> tuple[list[Map], str]:
    if run.info.get("task") == "image":
        raise UsageError("the model reads pictures, of which samples hold the labels alone")
    full = [s for s in run.samples if s["source"].strip() or s["text"].strip()]
    if not full:
        raise UsageError("the run kept no samples to look at")
    if not (run.folder / "last").is_dir():
        raise UsageError("the run has no checkpoint yet")
    model = load(run.folder / "last").eval()
    tokenizer = needed(tokenizer_of(model))
    probe = Probe()
    tokens = _read(model, tokenizer, full[-1], run.info.get("task") in WRITES, probe)
    sites = sorted(probe.maps, key=lambda site: site.endswith(".cross"))
    if not sites:
        raise UsageError("this model has no attention")
    shown = sites[-max(MOST // _heads(probe, sites[-1]), 1) :]
    maps = [each for site in shown for each in _maps(probe, site, tokens)]
    about = f"Step {full[-1]['step']}, at most {LONGEST} tokens of the last sample."
    if len(shown) < len(sites):
        about += f" The last {len(shown)} of {len(sites)} layers are shown."
    whole = max(probe.maps[site][0].shape[1] for site in shown)
    if whole > HEADS:
        about += f" The first {HEADS} of {whole} heads are shown."
    return (
        maps,
        about + " A weight is not an explanation: it says where a head reads, not what for.",
    )


@torch.inference_mode()
def _read(
    model: Any, tokenizer: Tokenizer, sample: dict[str, Any], writes: bool, probe: Probe
) -> dict[str, list[str]]:
    """Let the model read a sample; the tokens by what they are to it: source, fed, written."""
    longest = min(LONGEST, context_of(model) or LONGEST)
    source, text = sample["source"], sample["text"]
    if not model.reads_source:
        ids = tokenizer.encode(source + text if writes else source or text)[:longest]
        if not ids:
            raise UsageError("the last sample has no tokens")
        model(torch.tensor([ids]), probe=probe)
        return {"fed": [named(tokenizer, i) for i in ids]}
    given = tokenizer.encode(source)[:longest]
    written = tokenizer.encode_target(text, special=False)[:longest]
    if not given or not written:
        raise UsageError("the last sample has an empty side")
    fed = [special_of(model).start or 0, *written[:-1]]
    model(torch.tensor([fed]), source=torch.tensor([given]), probe=probe)
    sides = {"source": given, "fed": fed, "written": written}
    return {side: [named(tokenizer, i) for i in ids] for side, ids in sides.items()}


def _maps(probe: Probe, site: str, tokens: dict[str, list[str]]) -> list[Map]:
    """The heads of a layer. In cross-attention a row is named by the token that is written
    there."""
    queries = keys = tokens["fed"]
    if site.startswith("encoder."):
        queries = keys = tokens["source"]
    elif site.endswith(".cross"):
        queries, keys = tokens["written"], tokens["source"]
    weights = probe.maps[site][0][0].float()  # h t s
    queries, keys = (_fit(names, size) for names, size in zip((queries, keys), weights.shape[1:]))
    each = weights[:HEADS].tolist()
    return [Map(site, head, queries, keys, rows) for head, rows in enumerate(each)]


def _heads(probe: Probe, site: str) -> int:
    return min(probe.maps[site][0].shape[1], HEADS)


def _fit(names: Sequence[str], size: int) -> list[str]:
    return [*names[:size], *[""] * (size - len(names))]
