"""The choice of a token: its distribution, its random numbers, its filters and penalties."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.decode.filters import min_p, top_k, top_p
from regard.decode.sampler import Sampler
from regard.decode.sampling import adjusted, draw, greedy, repeat, uniform, used_by, uses
from regard.decode.sequence import Sequence
from regard.decode.settings import Request, Settings
from regard.errors import UsageError

DRAWS = 200_000
VOCAB = 37


def random_logits(*shape: int, seed: int = 0) -> Tensor:
    return 2.0 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sampler(settings: list[Settings], prompts: list[list[int]] | None = None) -> Sampler:
    """Of rows at their first token."""
    prompts = prompts or [[1]] * len(settings)
    both = zip(settings, prompts, strict=True)
    return Sampler([Sequence(Request(p, s, number=i), 0) for i, (s, p) in enumerate(both)])


def chosen(
    logits: Tensor, settings: list[Settings], prompts: list[list[int]] | None = None
) -> list[int]:
    return [row.ids[-1] for row in said(logits, settings, prompts).sequences]


def said(
    logits: Tensor, settings: list[Settings], prompts: list[list[int]] | None = None
) -> Sampler:
    made = sampler(settings, prompts)
    made.choose(logits)
    return made


# --- the distribution ---------------------------------------------------------------------------------------------


def quantile(degrees: int, z: float = 3.719) -> float:
    """Of chi-square, by Wilson and Hilferty: (X / n)^(1/3) is nearly normal with mean 1 - 2/9n and variance 2/9n.
    z = 3.719 leaves one right sampler in ten thousand outside; the seeds are fixed, so it is in or out for good."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + z * math.sqrt(spread)) ** 3


def chi_square(counts: Tensor, probs: Tensor) -> tuple[float, int]:
    """The statistic and its degrees of freedom, over the tokens that can be drawn."""
    can = probs > 0
    assert int(counts[~can].sum()) == 0, "a token was drawn that may not be"
    expect = probs[can] * counts.sum()
    assert float(expect.min()) > 5, "too rare a token for the chi-square approximation"
    return float(((counts[can] - expect) ** 2 / expect).sum()), int(can.sum()) - 1


def exact(p: Tensor, keep: Tensor) -> Tensor:
    kept = torch.where(keep, p, 0.0)
    return kept / kept.sum()


def nucleus(p: Tensor, mass: float, by: Tensor) -> Tensor:
    """The tokens in ascending order of `by`, up to and with the one that makes the mass."""
    keep, total = torch.zeros_like(p, dtype=torch.bool), 0.0
    for i in by.argsort().tolist():
        keep[i] = True
        total += float(p[i])
        if total >= mass:
            return keep
    return keep


def meant(p: Tensor, setting: dict[str, Any]) -> Tensor:
    """The distribution that settings mean, one after the other, written down once more and plainly."""
    for name, value in setting.items():
        if name == "temperature":
            p = exact(p ** (1 / value), p >= 0)
        elif name == "top_k":
            p = exact(p, p >= p.sort(descending=True).values[value - 1])
        elif name == "top_p":
            p = exact(p, nucleus(p, value, -p))
        elif name == "min_p":
            p = exact(p, p >= value * p.max())
        else:
            surprise = -p.log()
            p = exact(p, nucleus(p, value, (surprise - (p * surprise).sum()).abs()))
    return p


def drawn(logits: Tensor, settings: Settings, rows: int = 2000) -> Tensor:
    """How often each token was chosen in DRAWS draws: `rows` requests at many positions each."""
    many, counts = sampler([settings] * rows), torch.zeros(logits.shape[-1])
    for _ in range(DRAWS // rows):
        used = uses(settings)
        tokens = many.pick(logits.expand(rows, -1), many.sequences, list(range(rows)), used)
        counts += torch.bincount(tokens, minlength=logits.shape[-1])
        for row in many.sequences:
            row.ids.append(0)
    return counts.double()


@pytest.mark.parametrize(
    "setting",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"temperature": 1.0, "top_k": 2},
        {"temperature": 1.0, "top_k": 7},
        {"temperature": 1.0, "top_p": 0.5},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.0, "min_p": 0.02},
        {"temperature": 1.0, "min_p": 0.3},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.95, "min_p": 0.05},
    ],
    ids=lambda s: "-".join(f"{k}={v}" for k, v in s.items()),
)
def test_draws_pass_chi_square(setting: dict[str, Any]) -> None:
    logits = random_logits(VOCAB) / 2
    probs = meant(logits.double().softmax(-1), setting)
    counts = drawn(logits, Settings(**setting, seed=5))
    statistic, degrees = chi_square(counts, probs)
    assert degrees > 0
    assert statistic < quantile(degrees)


def test_chi_square_sees_a_wrong_sampler() -> None:
    logits = random_logits(VOCAB) / 2
    probs = meant(logits.double().softmax(-1), {"temperature": 1.02})
    statistic, degrees = chi_square(drawn(logits, Settings(temperature=1.0)), probs)
    assert statistic > quantile(degrees)


def test_quantile_is_that_of_the_tables() -> None:
    """Chi-square's 0.999 quantiles (z = 3.0902): 27.877 for 9 degrees of freedom, 149.449 for 100."""
    assert quantile(9, 3.0902) == pytest.approx(27.877, rel=1e-2)
    assert quantile(100, 3.0902) == pytest.approx(149.449, rel=1e-3)


def test_token_without_probability_is_never_drawn() -> None:
    """Not even by the smallest and the largest number that `uniform` can give."""
    logits = torch.tensor([[-torch.inf, 0.3, -torch.inf, 0.7]])
    ends = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    assert draw(logits.expand(2, -1), ends).tolist() == [1, 3]
    tail = torch.tensor([[0.1, 0.2, -torch.inf]])
    assert draw(tail, ends[1:]).tolist() == [1]


# --- the random numbers -------------------------------------------------------------------------------------------


def keys(n: int, seed: int = 0, request: int = 0, position: int = 0) -> list[Tensor]:
    return [torch.full((n,), x) for x in (seed, request, position)]


@pytest.mark.parametrize("counter", range(3), ids=["seed", "request", "position"])
def test_uniform_is_equidistributed_along_each_counter(counter: int) -> None:
    given = keys(DRAWS)
    given[counter] = torch.arange(DRAWS)
    u = uniform(*given)
    assert float(u.min()) >= 0 and float(u.max()) < 1
    for cells in (97, 1000):
        counts = torch.bincount((u * cells).long(), minlength=cells).double()
        statistic, degrees = chi_square(counts, torch.full((cells,), 1 / cells).double())
        assert statistic < quantile(degrees)


def test_uniform_neighbours_are_independent() -> None:
    """Pairs of numbers at one position and the next fill a 30 by 30 square evenly."""
    u = uniform(*keys(DRAWS)[:2], torch.arange(DRAWS))
    cell = (u[:-1] * 30).long() * 30 + (u[1:] * 30).long()
    counts = torch.bincount(cell, minlength=900).double()
    statistic, degrees = chi_square(counts, torch.full((900,), 1 / 900).double())
    assert statistic < quantile(degrees)


def test_uniform_is_the_published_splitmix64() -> None:
    """Its output for state 0 (Vigna's splitmix64.c): 0xe220a8397b1dcdaf, then 0x6e789e6aa1b965f4."""
    from regard.decode.sampling import _mix, _signed

    first = _mix(torch.tensor(0))
    second = _mix(torch.tensor(_signed(0x9E3779B97F4A7C15)))
    assert [int(x) % 2**64 for x in (first, second)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


def test_uniform_depends_on_its_key_alone() -> None:
    g = torch.Generator().manual_seed(0)
    given = [torch.randint(-(2**62), 2**62, (50,), generator=g) for _ in range(3)]
    together = uniform(*given)
    alone = torch.stack([uniform(*(x[i] for x in given)) for i in range(50)])
    assert torch.equal(together, alone)
    order = torch.randperm(50, generator=g)
    assert torch.equal(uniform(*(x[order] for x in given)), together[order])


def test_draws_do_not_depend_on_neighbours() -> None:
    logits = random_logits(6, VOCAB)
    each = [
        Settings(temperature=0.9, top_p=0.8, seed=3),
        Settings(),
        Settings(temperature=1.4, top_k=5, presence_penalty=1.0),
        Settings(temperature=0.7, min_p=0.1, logit_bias=((4, 1.0),)),
        Settings(temperature=1.0, min_p=0.2, banned=(2,)),
        Settings(temperature=2.0, repetition_penalty=1.5),
    ]
    prompts = [[1, 2]] * 6
    together = chosen(logits, each, prompts)
    for i, s in enumerate(each):
        alone = sampler([s], prompts[:1])
        alone.sequences[0].request.number = i  # what keys its random numbers
        alone.choose(logits[i : i + 1])
        assert alone.sequences[0].ids == [together[i]]


# --- filters ------------------------------------------------------------------------------------------------------

FILTERS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "top_k": (top_k, "TopKLogitsWarper"),
    "top_p": (top_p, "TopPLogitsWarper"),
    "min_p": (min_p, "MinPLogitsWarper"),
}


@pytest.mark.parametrize("value", [0.05, 0.5, 0.9])
@pytest.mark.parametrize("name", FILTERS)
def test_filter_equals_transformers_warper(name: str, value: float) -> None:
    from transformers.generation import logits_process

    logits = random_logits(64, 211, seed=2)
    ours, theirs = FILTERS[name]
    given = int(100 * value) if name == "top_k" else value
    expect = getattr(logits_process, theirs)(given)(torch.zeros(64, 1, dtype=torch.long), logits)
    torch.testing.assert_close(ours(logits, given), expect, rtol=0, atol=0)


@pytest.mark.parametrize("name", FILTERS)
def test_filter_takes_a_value_for_each_row(name: str) -> None:
    f, _ = FILTERS[name]
    logits = random_logits(3, VOCAB)
    values = [3, 30, 1] if name == "top_k" else [0.2, 0.9, 0.5]
    column = torch.tensor(values)[:, None]
    alone = torch.cat([f(logits[i : i + 1], v) for i, v in enumerate(values)])
    assert torch.equal(f(logits, column), alone)


@pytest.mark.parametrize("name", ["top_k", "top_p"])
def test_filter_breaks_ties_by_the_lowest_id(name: str) -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0, 0.0]])
    kept = top_k(logits, 2) if name == "top_k" else top_p(logits, 0.5)
    assert kept.isfinite().tolist() == [[False, True, True, False, False]]


def test_top_p_ends_where_the_mass_is_reached() -> None:
    """Four tokens of exactly a quarter each: a mass of a half is two of them, not three."""
    for p, kept in ((0.25, 1), (0.5, 2), (0.75, 3), (0.51, 3)):
        for value in (p, torch.tensor([[p]])):
            assert top_p(torch.zeros(1, 4), value).isfinite().sum() == kept


@pytest.mark.parametrize("name", FILTERS)
def test_filter_keeps_one_token_at_least(name: str) -> None:
    f, _ = FILTERS[name]
    strict = {"top_k": 1, "top_p": 0.0, "min_p": 1.0}[name]
    assert f(random_logits(20, VOCAB), strict).isfinite().sum(-1).tolist() == [1] * 20


@pytest.mark.parametrize("name", FILTERS)
def test_filter_at_its_idle_value_keeps_all(name: str) -> None:
    f, _ = FILTERS[name]
    idle = {"top_k": torch.tensor([[0]]), "top_p": 1.0, "min_p": 0.0}[name]
    logits = torch.cat([random_logits(3, VOCAB), torch.full((3, 1), -80.0)], 1)  # and a far tail
    assert torch.equal(f(logits, idle), logits)


@pytest.mark.parametrize("f, value", [(top_k, 0), (top_k, -1), (top_p, -0.1), (top_p, 1.1)])
def test_filter_refuses_what_leaves_no_meaning(f: Callable[..., Tensor], value: float) -> None:
    with pytest.raises(UsageError, match="give"):
        f(random_logits(1, 5), value)


# --- greedy and penalties -----------------------------------------------------------------------------------------


def test_greedy_gives_ties_to_the_lowest_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0]])
    assert greedy(logits).tolist() == [1, 0]
    assert chosen(logits, [Settings(), Settings()]) == [1, 0]


def test_temperature_zero_is_greedy_whatever_the_filters() -> None:
    logits = random_logits(4, VOCAB)
    settings = [
        Settings(),
        Settings(top_k=3),
        Settings(top_p=0.2, seed=9),
        Settings(min_p=0.9),
    ]
    assert chosen(logits, settings) == logits.argmax(-1).tolist()
    warm = [*settings, Settings(temperature=1.0)]  # with a neighbour that draws
    assert chosen(torch.cat([logits, logits[:1]]), warm)[:4] == logits.argmax(-1).tolist()


def test_small_temperature_approaches_greedy() -> None:
    logits = random_logits(50, VOCAB)
    assert chosen(logits, [Settings(temperature=1e-4)] * 50) == logits.argmax(-1).tolist()


def test_presence_and_frequency_penalties_are_openai_s() -> None:
    """mu_j - c_j * frequency - [c_j > 0] * presence, c_j counting what was said, not the prompt."""
    logits = random_logits(1, 9)
    made = sampler([Settings(presence_penalty=0.7, frequency_penalty=0.3)], [[0, 1, 1, 5]])
    for token in (2, 4, 2, 2):
        made.choose(torch.full((1, 9), -50.0).index_fill(1, torch.tensor([token]), 50.0))
    assert made.sequences[0].ids == [2, 4, 2, 2]
    expect = logits.clone()
    expect[0, 2] -= 3 * 0.3 + 0.7
    expect[0, 4] -= 1 * 0.3 + 0.7
    assert made._columns is not None
    columns = made._columns.at(slice(None), uses(made.sequences[0].request.settings))
    torch.testing.assert_close(adjusted(logits, columns, torch.tensor([4])), expect)


def test_repetition_penalty_counts_prompt_and_answer() -> None:
    """Divides what is positive, multiplies what is negative (Keskar et al. 2019)."""
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0, 0.0]])
    counts = torch.tensor([[1.0, 3.0, 0.0, 0.0, 1.0]])
    assert repeat(logits, counts, 2.0).tolist() == [[1.0, -4.0, 2.0, -2.0, 0.0]]
    given = torch.tensor([[3.0, 2.9, 2.8, 0.0, 0.0]])
    made = said(given, [Settings(repetition_penalty=2.0)], [[0]])
    assert made.sequences[0].ids == [1]  # 0 is in the prompt
    made.choose(given)
    assert made.sequences[0].ids == [1, 2]  # and 1 was said


def test_counts_of_said_tokens_survive_rows_that_come_and_go() -> None:
    """Counts are kept from step to step and made anew with the batch: both ways they count the same."""
    s = Settings(frequency_penalty=0.8, temperature=0.7)
    given = [random_logits(3, 9, seed=i) for i in range(6)]
    steady = sampler([s] * 3)
    moving = sampler([s] * 3)
    for step, logits in enumerate(given):
        steady.choose(logits)
        moving.choose(logits)
        if step % 2:
            moving._columns = None
    assert [r.ids for r in steady.sequences] == [r.ids for r in moving.sequences]


def test_logprobs_are_the_models_own() -> None:
    """Before temperature, filters, bias and penalties."""
    logits = random_logits(4, VOCAB)
    s = Settings(temperature=1.9, top_k=4, logit_bias=((3, 2.0),), repetition_penalty=1.3)
    made = said(logits, [s] * 4)
    for row, logp in zip(made.sequences, logits.log_softmax(-1)):
        assert row.logprobs == pytest.approx([float(logp[row.ids[0]])])


def test_forced_token_comes_whatever_is_probable() -> None:
    logits = random_logits(2, VOCAB)
    assert chosen(
        logits, [Settings(forced_first=8), Settings(forced_first=9, temperature=1.0)]
    ) == [8, 9]


def test_ends_become_more_probable_in_the_rows_that_ask_for_it() -> None:
    """By |logit| (factor ** tokens since - 1), from the token on that it begins with. A neighbour has an end token too,
    and another that must wait for it."""
    decay, ends = (2, 1.5), (1, 3)
    each = [
        Settings(eos=ends, exponential_decay_length_penalty=decay),
        Settings(eos=ends),
        Settings(eos=ends, min_new_tokens=4),
        Settings(eos=(2,), exponential_decay_length_penalty=decay, banned=(2,)),
    ]
    logits = random_logits(1, 5, seed=3)
    for said in range(6):
        made = sampler(each)
        columns = made.columns(5, torch.device("cpu"))
        used = frozenset({"decay", "held", "bias"})
        count = torch.full((4,), said)
        got = adjusted(logits.expand(4, -1), columns.at(slice(None), used), count)
        want = logits.repeat(4, 1)
        want[0, [1, 3]] += want[0, [1, 3]].abs() * (1.5 ** max(0, said - 2) - 1)
        want[2, [1, 3]] = want[2, [1, 3]].where(torch.tensor(said >= 4), -torch.inf)
        want[3, 2] = -torch.inf
        torch.testing.assert_close(got, want)


def test_a_row_is_held_where_an_end_must_wait_or_a_token_is_prescribed() -> None:
    """Of the tokens from one number to another; elsewhere its choice does not wait for that."""
    for kind in (
        {}, {"min_new_tokens": 3}, {"forced_first": 2}, {"forced_last": 4},
        {"forced_first": 0, "forced_last": 0},
    ):  # fmt: skip
        s = Settings(max_new_tokens=6, eos=(1,), presence_penalty=1.0, **kind)
        for first, last in itertools.combinations_with_replacement(range(6), 2):
            must = [
                n < s.min_new_tokens
                or (n == 0 and s.forced_first is not None)
                or (n == 5 and s.forced_last is not None)
                for n in range(first, last + 1)
            ]
            want = {"presence_penalty", "held"} if any(must) else {"presence_penalty"}
            assert used_by(s, first, last) == want, (kind, first, last)


def test_end_token_waits_for_the_least_length() -> None:
    logits = torch.zeros(1, 5).index_fill(1, torch.tensor([3]), 9.0)
    assert chosen(logits, [Settings(eos=(3,))]) == [3]
    assert chosen(logits, [Settings(eos=(3,), min_new_tokens=1)]) == [0]
