"""Rows of any settings side by side: what each chooses from, and what it chooses, is what its own settings say, written
down once more and plainly."""

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.decode import sampling
from regard.decode.filters import FILTERS
from regard.decode.sampling import (
    MASK,
    RULES,
    TOPS,
    SamplingTensors,
    adjusted,
    choose,
    draw,
    followers,
    ruled,
    uniform,
    used_by,
    uses,
)
from regard.decode.sequence import Sequence
from regard.decode.settings import Request, Settings

VOCAB, ROWS = 37, 5


def rule_settings(rng: random.Random) -> dict[str, Any]:
    """Some of all settings that change logits."""

    def tokens(most: int) -> tuple[int, ...]:
        return tuple(rng.sample(range(VOCAB), rng.randint(1, most)))

    def biases() -> tuple[tuple[tuple[int, ...], float], ...]:
        sizes = [1, 1, 2, 2, 3]
        words = [tuple(rng.randrange(4) for _ in range(size)) for size in sizes]
        return tuple((ids, rng.choice([-math.inf, -2.0, 3.0])) for ids in words)

    every: dict[str, Any] = {
        "repetition_penalty": rng.choice([0.5, 1.7]),
        "presence_penalty": rng.choice([-0.8, 0.6]),
        "frequency_penalty": rng.choice([-0.3, 0.4]),
        "encoder_repetition_penalty": rng.choice([0.6, 1.9]),
        "no_repeat_ngram_size": rng.randint(1, 3),
        "encoder_no_repeat_ngram_size": rng.randint(1, 3),
        "logit_bias": tuple((i, rng.uniform(-3, 3)) for i in tokens(4) + tokens(2)),
        "sequence_bias": biases(),
        "banned": tokens(3),
        "begin_suppress_tokens": tokens(5),
        "eos": (0, *tokens(3)),
        "min_new_tokens": rng.randint(0, 7),
        "forced_first": rng.choice([0, 5]),
        "forced_last": rng.choice([0, 6]),
        "exponential_decay_length_penalty": (rng.randint(0, 4), rng.choice([0.7, 1.4])),
        "renormalize_logits": True,
    }
    found = {name: value for name, value in every.items() if rng.random() < 0.25}
    # Ends come with a least length, a forced token and a decay, or without.
    return {"max_new_tokens": rng.randint(7, 9), **found}


def made(rng: random.Random, settings: Settings, number: int) -> Sequence:
    """A row that has said up to as much as it may; half of them have a source, with words that it cannot say."""
    ids = [rng.randrange(5) for _ in range(rng.randint(1, 9))]
    source = torch.tensor([rng.choice([1, 2, 3, VOCAB, VOCAB + 3]) for _ in range(6)])
    request = Request(ids, settings, source if rng.random() < 0.5 else None, number=number)
    return Sequence(request, 0, [rng.randrange(5) for _ in range(rng.randrange(6))])


def after(where: list[int], text: list[int], size: int) -> set[int]:
    """Tokens that follow the end of a text anywhere."""
    tail = text[len(text) - size + 1 :] if size - 1 <= len(text) else None
    ends = range(size - 1, len(where))
    return {where[i] for i in ends if where[i - size + 1 : i] == tail}


def plainly(x: Tensor, row: Sequence) -> Tensor:
    """The logits of one row (V) as its settings change them."""
    s, x, said, count = row.request.settings, x.clone(), row.ids, len(row.ids)
    text, read = row.request.ids + said, [i for i in row.request.read if i < VOCAB]
    for token, bias in s.logit_bias:
        x[token] += bias
    for (*before, token), bias in s.sequence_bias:
        if len(before) <= len(text) and text[len(text) - len(before) :] == before:
            x[token] += bias
    forbidden = {*s.banned}
    if count == (0 if s.forced_first is None else 1):
        forbidden |= {*s.begin_suppress_tokens}
    if s.no_repeat_ngram_size:
        forbidden |= after(text, text, s.no_repeat_ngram_size)
    if s.encoder_no_repeat_ngram_size:
        forbidden |= after(row.request.read, text, s.encoder_no_repeat_ngram_size)
    for token in forbidden & {*range(VOCAB)}:
        x[token] = -math.inf
    for seen, times in (
        ({*read}, 1 / s.encoder_repetition_penalty),
        ({*text}, s.repetition_penalty),
    ):
        for token in seen:
            x[token] = x[token] / times if x[token] > 0 else x[token] * times
    for token in {*said}:
        x[token] -= s.presence_penalty + s.frequency_penalty * said.count(token)
    if count < s.min_new_tokens:
        x[list(s.eos)] = -math.inf
    must = s.forced_first if count == 0 else None
    if must is None and count == s.max_new_tokens - 1:
        must = s.forced_last
    if must is not None:
        x = torch.full_like(x, -math.inf)
        x[must] = 0.0
    if s.exponential_decay_length_penalty is not None:
        start, factor = s.exponential_decay_length_penalty
        for token in {*s.eos}:
            if x[token].isfinite():
                x[token] += x[token].abs() * (factor ** max(0, count - start) - 1)
    return x.log_softmax(-1) if s.renormalize_logits and s.beams > 1 else x


def given(
    tensors: SamplingTensors, rows: list[Sequence], at: list[int], every: bool
) -> tuple[dict[str, Tensor], Tensor]:
    """The columns of some rows, and how much each has said."""
    some = [rows[i] for i in at]
    used: frozenset[str] = frozenset()
    used = used.union(*(used_by(r.request.settings, len(r.ids), len(r.ids)) for r in some))
    columns = tensors.at(slice(None) if every else torch.tensor(at), used - {TOPS})
    if RULES in used:
        texts = [(row.request, row.ids) for row in some]
        columns[RULES] = ruled(texts, torch.zeros(len(at), VOCAB))
    return columns, torch.tensor([len(row.ids) for row in some])


@pytest.mark.parametrize("searched", [False, True])
@pytest.mark.parametrize("seed", range(25))
def test_logits_of_rows_that_come_and_go_are_those_of_their_settings(
    seed: int, searched: bool
) -> None:
    """Beside rows of other settings, at places that others had, while all go on."""
    rng, more = random.Random(seed), {"beams": 2} if searched else {}
    g = torch.Generator().manual_seed(seed)
    tensors = SamplingTensors(ROWS, VOCAB, torch.device("cpu"))
    rows: list[Any] = [None] * ROWS
    for step in range(6):
        places = rng.sample(range(ROWS), ROWS if step == 0 else rng.randint(1, 2))
        for place in places:
            kind = rule_settings(rng) if rng.random() < (0.3 if step == 0 else 0.7) else {}
            rows[place] = made(rng, Settings(**kind | more), place)
        tensors.put(places, [rows[place] for place in places])
        for every in (True, False):
            at = list(range(ROWS)) if every else rng.sample(range(ROWS), 3)
            logits = 2.0 * torch.randn(len(at), VOCAB, generator=g)
            columns, count = given(tensors, rows, at, every)
            got = adjusted(logits, columns, count)
            want = torch.stack([plainly(x, rows[i]) for x, i in zip(logits, at, strict=True)])
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        # Some say a token more.
        tokens, live = torch.tensor(rng.choices(range(5), k=ROWS)), torch.ones(ROWS).long()
        live[rng.randrange(ROWS)] = 0
        tensors.said(slice(None), tokens, live)
        for row, token, goes in zip(rows, tokens.tolist(), live.tolist(), strict=True):
            row.ids += [token] * goes


@pytest.mark.parametrize("way", ["native", "torch"])
@pytest.mark.parametrize("seed", range(15))
def test_choices_of_rows_are_those_of_their_settings(
    seed: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy beside drawn, with filters and masks or without; none where all is forbidden."""
    if way == "torch":
        monkeypatch.setattr(sampling.native, "draw", lambda *_: None)
    rng, g = random.Random(100 + seed), torch.Generator().manual_seed(seed)
    kinds: list[dict[str, Any]] = [{}, {}]
    for _ in range(ROWS - 2):
        drawn = {"top_k": rng.randint(1, 9), "top_p": 0.8, "min_p": 0.1}
        kind = {name: value for name, value in drawn.items() if rng.random() < 0.5}
        kinds.append({"temperature": rng.choice([0.4, 1.3]), "seed": rng.randint(-9, 9), **kind})
    kinds[1] = {"top_k": 2, "min_p": 0.5} | rule_settings(rng)
    rng.shuffle(kinds)
    rows = [made(rng, Settings(**kind), i) for i, kind in enumerate(kinds)]
    tensors = SamplingTensors(ROWS, VOCAB, torch.device("cpu"))
    tensors.put(range(ROWS), rows)
    logits = 2.0 * torch.randn(ROWS, VOCAB, generator=g)
    allowed = torch.ones(ROWS, VOCAB, dtype=torch.bool)
    columns, count = given(tensors, rows, list(range(ROWS)), True)
    if rng.random() < 0.7:
        allowed = torch.rand(ROWS, VOCAB, generator=g) < 0.6
        allowed[rng.randrange(ROWS)] = False
        words = tensors.room()
        for i, row in enumerate(allowed.tolist()):
            words[i] = 0
            for token in (token for token, may in enumerate(row) if may):
                word = int(words[i, token // 32]) % 2**32 | 1 << token % 32
                words[i, token // 32] = word - 2**32 * (word >> 31)
        columns[MASK] = tensors.at(slice(None), frozenset({MASK}))[MASK]
    want = []
    for i, row in enumerate(rows):
        s, x = row.request.settings, plainly(logits[i], row).masked_fill(~allowed[i], -math.inf)
        if x.max() == -math.inf:
            want.append(-1)
        elif not s.temperature:
            want.append(int(x.argmax()))
        else:
            kept = (x / s.temperature)[None]
            for name, each in FILTERS.items():
                if getattr(s, name) != each.neutral:
                    kept = each.keep(kept, getattr(s, name))
            u = uniform(*(torch.tensor([n]) for n in (s.seed, row.key, len(row.ids))))
            want.append(int(draw(kept, u)))
    assert choose(logits, columns, count).tolist() == want


def test_draw_names_a_token_that_there_is() -> None:
    """Also where none is probable, so that what looks it up finds something."""
    nothing = torch.full((2, 4), -torch.inf)
    assert draw(nothing, torch.tensor([0.0, 0.9])).tolist() == [3, 3]


@pytest.mark.parametrize(
    "given, want",
    [
        ({}, set()),
        ({"top_k": 3, "top_p": 0.5, "min_p": 0.1}, set()),
        ({"temperature": 0.5, "min_p": 0.1}, {"temperature", "min_p"}),
        ({"temperature": 0.5, "seed": 3}, {"temperature"}),
        ({"logit_bias": ((1, 2.0),)}, {"bias"}),
        ({"banned": (1,)}, {"bias"}),
        ({"sequence_bias": (((1,), 2.0),)}, {"bias"}),
        ({"sequence_bias": (((1, 2), 2.0),)}, {RULES}),
        ({"sequence_bias": (((1, 2), 2.0), ((1,), 2.0))}, {RULES, "bias"}),
        ({"no_repeat_ngram_size": 1}, {RULES}),
        ({"encoder_no_repeat_ngram_size": 1}, {RULES}),
        ({"begin_suppress_tokens": (1,)}, {RULES}),
        ({"exponential_decay_length_penalty": (0, 2.0)}, {"decay"}),
        ({"renormalize_logits": True}, set()),
        ({"renormalize_logits": True, "beams": 2}, {"renormalize_logits"}),
        ({"eos": (1,), "min_new_tokens": 1}, {"held"}),
        ({"forced_first": 0}, {"held"}),
        ({"forced_last": 0}, {"held"}),
        ({"eos": (1,), "top_logprobs": 1}, {TOPS}),
    ],
    ids=lambda x: str(sorted(x) if isinstance(x, set) else x),
)
def test_a_choice_depends_on_no_more_than_it_must(given: dict[str, Any], want: set[str]) -> None:
    assert uses(Settings(**given)) == want


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_followers_are_found_wherever_the_run_stands(size: int, seed: int) -> None:
    rng = random.Random(seed)
    for length in range(1, 30):
        text = [rng.randrange(3) for _ in range(length)]
        where = [rng.randrange(3) for _ in range(rng.randrange(20))]
        for place in (text, where):
            assert {*followers(place, text, size)} == after(place, text, size)
