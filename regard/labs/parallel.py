"""Speed alone: tokens per second of a training step and of decoding, by length, in turn with another model's."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from regard.data.survey import Survey
from regard.decode.settings import Request, Settings
from regard.labs.measure import Case, Figures, written
from regard.machine import pick_device
from regard.training.build import fresh
from regard.training.config import Config, configure
from regard.training.plan import step_seconds

VOCAB = 256
NAMES = ("Training", "Decoding with a cache", "Decoding without a cache")


def parallel(case: Case) -> Figures:
    """Tokens per second of the variant and, measured in turn with it, of the one that it is compared with; the ratio
    of both. The weights are as they are drawn."""
    beside, device = case.settings["beside"], pick_device(case.device)[0]
    names = list(dict.fromkeys([case.variant, beside]))
    speeds: dict[str, dict[str, dict[int, float]]] = {}
    for length in case.settings["lengths"]:
        ways = {name: timers(config(case, name, length), case, device) for name in names}
        for figure in NAMES:
            tries = [{n: ways[n][figure]() for n in names} for _ in range(case.settings["tries"])]
            for n in names:
                of = speeds.setdefault(figure, {}).setdefault(n, {})
                of[length] = median(each[n] for each in tries)
    figures: Figures = {f: {case.variant: rows[case.variant]} for f, rows in speeds.items()}
    if case.variant != beside:
        ratios = {
            f: {n: rows[case.variant][n] / rows[beside][n] for n in rows[beside]}
            for f, rows in speeds.items()
        }
        figures["Times as fast"] = {f"{case.variant}, {f.lower()}": x for f, x in ratios.items()}
    return figures


def config(case: Case, name: str, length: int) -> Config:
    """A variant's, for rows of this length, as many as make the tokens of a step."""
    spec = case.settings
    model = {**spec["variants"][name]["model"], **spec["small"].get("model", {})}
    rows = {"train": "text", "length": length, "rows": max(1, spec["batch"] // length)}
    return configure(
        {**spec["run"], "model": model, "data": {**spec["run"]["data"], **rows}},
    )


def timers(config: Config, case: Case, device: torch.device) -> dict[str, Callable[[], float]]:
    """What measures tokens per second of each kind."""
    length, timed = config.data.length or 1, case.settings["timed"]
    torch.manual_seed(case.seed)
    model = fresh(config, VOCAB, str(device)).eval()
    ids = torch.randint(VOCAB, (1, length), device=device)
    tokens = (config.data.rows or 1) * length
    facts = Survey(1, longest=(length + 1,), mean=(length + 1,), vocab=VOCAB)
    settings = Settings(max_new_tokens=timed, min_new_tokens=timed, temperature=0.0)

    def training() -> float:
        return tokens / (step_seconds(config, facts, device) or float("nan"))

    def cached() -> float:
        return written([Request(ids[0].tolist(), settings)], model)

    return dict(zip(NAMES, (training, cached, lambda: recomputing(model, ids)), strict=True))


@torch.inference_mode()
def recomputing(model: Any, ids: torch.Tensor, count: int = 3) -> float:
    """Tokens per second where each is said after all before it are read anew."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        new = model.logits(model.hidden(ids)[:, -1:]).argmax(-1)
        ids = torch.cat([ids, new], 1)
        # Waits for a GPU.
        new.item()
        times.append(time.perf_counter() - start)
    return 1 / median(times)
