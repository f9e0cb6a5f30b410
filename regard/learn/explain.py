"""Every topic of `regard explain`, as text or as JSON; docs/mechanisms has the same tables."""

from __future__ import annotations

import json
import math
from typing import Any

from regard.errors import UsageError
from regard.learn import mechanisms, training
from regard.learn.topics import Table, Topic, find, shown

TOPICS: tuple[Topic, ...] = (*mechanisms.TOPICS, *training.TOPICS)
ALIASES = {
    "positions": "sinusoidal",
    "mha": "multi-head",
    "mqa": "gqa",
    "indexer": "dsa",
    "flash": "online-softmax",
    "look-ahead": "masks",
    "look-ahead-mask": "masks",
    "scaled-dot-product": "attention",
    "scaled-dot-product-attention": "attention",
    "cross": "cross-attention",
    "ffn": "feed-forward",
    "sampling": "decoding",
    "quantization": "quantisation",
    "teacher-forcing": "objectives",
    "rnn": "rnn-path",
    "layernorm": "norms",
    "rmsnorm": "norms",
    "t5": "t5-bias",
    "learning-rate": "schedules",
}


def explained(
    name: str, numbers: tuple[str, ...], given: dict[str, Any], *, as_json: bool = False
) -> str:
    """The topic with the numbers of one call."""
    topic = find(name, TOPICS, ALIASES)
    if numbers:
        first = next(iter(topic.inputs))
        if first in given or isinstance(topic.inputs[first], str):
            raise UsageError(f"{topic.name} takes {topic.takes()}; say each number once")
        given = {first: numbers, **given}
    values = topic.read(given)
    tables = topic.compute(**values)
    if as_json:
        return json.dumps(_data(topic, values, tables), allow_nan=False)
    return "\n".join([f"{topic.name}: {topic.question}", "", *_lines(topic, values, tables)])


def _lines(topic: Topic, values: dict[str, Any], tables: list[Table]) -> list[str]:
    given = "   ".join(f"--{n.replace('_', '-')} {shown(value)}" for n, value in values.items())
    lines = [*(f"  {line}" for line in topic.formula.splitlines()), "", f"given: {given}", ""]
    for table in tables:
        lines += [*table.text().splitlines(), ""]
    return [*lines, *(f"code: {place}" for place in topic.code)]


def _data(topic: Topic, values: dict[str, Any], tables: list[Table]) -> dict[str, Any]:
    def plain(cell: Any) -> Any:
        return None if isinstance(cell, float) and not math.isfinite(cell) else cell

    return {
        "topic": topic.name,
        "question": topic.question,
        "formula": topic.formula.splitlines(),
        "code": list(topic.code),
        "given": values,
        "tables": [
            {
                "title": table.title,
                "columns": list(table.columns),
                "rows": [[plain(cell) for cell in row] for row in table.rows],
            }
            for table in tables
        ],
    }


def listed(as_json: bool = False) -> str:
    """Every topic with its question."""
    if as_json:
        return json.dumps([{"topic": t.name, "question": t.question} for t in TOPICS])
    width = max(len(t.name) for t in TOPICS)
    lines = [f"{t.name:<{width}}  {t.question}" for t in TOPICS]
    return "\n".join([*lines, "", "regard explain TOPIC, with numbers of your own or without"])
