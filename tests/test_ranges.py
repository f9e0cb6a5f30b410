"""Every number of every config declares its range, and a value outside it is one sentence, not a traceback."""

import dataclasses
import math
import typing
from collections.abc import Iterator
from typing import Any

import pytest

from regard.attention import GQA, Compressed
from regard.block import PerLayer, Streams
from regard.config import Range, alternatives, from_dict, ranges, to_dict, type_hints
from regard.data.config import Data
from regard.data.corrupt import Infill, Marks, MaskTokens, Spans
from regard.data.feed import Batching
from regard.data.train_tokenizer import Recipe
from regard.decode.settings import LIMITS, Settings
from regard.errors import UsageError
from regard.layers import Answer, BatchNorm, Tag
from regard.models import CONFIGS
from regard.models.adapt import LoRA
from regard.models.mtp import MTP
from regard.position import Alibi, Linear, LongRope, Proportional, Rope
from regard.presets import PRESETS
from regard.training.config import Config

MARKS = Marks(50, mask=3, sentinels=(7, 8))
# what no preset has: one sound example of each
MORE = [
    Alibi(4), Answer(), Linear(2.0), LongRope((1.0,), (2.0,), 8), Tag(2), LoRA(), Recipe("bpe"), Batching(rows=2),
    Config("lm", Data("a.txt"), {"preset": "gpt2"}), MaskTokens(MARKS), Spans(MARKS), Infill(MARKS), BatchNorm(),
    PerLayer(2, 2), MTP(), Streams(), Compressed(1, 2, 1, 1, Rope(), 2, rate=2, topk=1, index_dim=2), Proportional(),
]  # fmt: skip


def inside(value: Any) -> Iterator[Any]:
    """A config and all configs in it."""
    if isinstance(value, tuple):
        for item in value:
            yield from inside(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, (type, Marks)):
        yield value
        for f in dataclasses.fields(value):
            yield from inside(getattr(value, f.name))


def reachable(hint: Any) -> Iterator[type]:
    """The dataclasses that a type names, or a table that it names, and those that their fields name."""
    for each in alternatives(hint):
        if dataclasses.is_dataclass(each) and isinstance(each, type):
            yield each
            for inner in type_hints(each).values():
                yield from reachable(inner)
        for inner in typing.get_args(each):
            yield from reachable(inner)


SAMPLES = {
    type(part): part
    for config in (*(make() for _, make in PRESETS.values()), *MORE)
    for part in inside(config)
}
FIELDS = [(cls, name) for cls in SAMPLES for name in ranges(cls)]


def numeric(hint: Any) -> bool:
    if typing.get_origin(hint) in (dict, typing.Literal):
        return False
    return hint in (int, float) or any(map(numeric, typing.get_args(hint)))


def test_every_config_that_can_be_written_has_a_sample() -> None:
    known = {cls for root in (*CONFIGS.values(), Config) for cls in reachable(root)}
    assert known - SAMPLES.keys() == set()


@pytest.mark.parametrize("cls", SAMPLES, ids=lambda cls: cls.__name__)
def test_every_number_declares_its_range(cls: type) -> None:
    named = {n for n, hint in typing.get_type_hints(cls).items() if numeric(hint)}
    assert named - ranges(cls).keys() == set()


def outside(limits: Range) -> list[float]:
    """Values just outside, far outside and no numbers at all."""
    low = [limits.low if limits.above else limits.low - 1, -1e9]
    high = [limits.high if limits.below else limits.high + 1, 1e30]
    found = (low if limits.low > -math.inf else []) + (high if limits.high < math.inf else [])
    return [*found, math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("cls, name", FIELDS, ids=lambda x: getattr(x, "__name__", x))
def test_value_outside_its_range_is_a_usage_error(cls: type, name: str) -> None:
    sample = SAMPLES[cls]
    listed = isinstance(getattr(sample, name), tuple)
    for value in outside(ranges(cls)[name]):
        wrong: Any = (value, value) if listed else value
        with pytest.raises(UsageError, match=rf"\.{name} = .*: give "):
            dataclasses.replace(sample, **{name: wrong})


def test_range_of_a_part_is_told_by_its_path() -> None:
    data = to_dict(PRESETS["gpt2"][1]())
    data["tower"]["attention"]["kv_heads"] = 0
    with pytest.raises(UsageError, match=r"^config.tower.attention.kv_heads = 0: give 1 or more$"):
        from_dict(CONFIGS["transformer"], data)


@pytest.mark.parametrize("wrong", ["4", True, 2.5])
def test_what_is_no_whole_number_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match="gqa.heads = "):
        GQA(wrong)


@pytest.mark.parametrize("name, low, high", LIMITS, ids=lambda x: x if isinstance(x, str) else "")
def test_decode_setting_outside_its_range_is_a_usage_error(
    name: str, low: float, high: float
) -> None:
    for value in (low - 1, high + 1):
        with pytest.raises(UsageError, match=name):
            Settings(**{name: value})


def test_every_number_of_decoding_has_limits() -> None:
    tokens = {"logit_bias", "sequence_bias", "banned", "begin_suppress_tokens", "eos"}
    tokens |= {"forced_first", "forced_last", "exponential_decay_length_penalty", "filters"}
    named = {n for n, hint in typing.get_type_hints(Settings).items() if numeric(hint)}
    assert named - tokens == {name for name, _, _ in LIMITS}
