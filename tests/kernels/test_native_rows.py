"""Norms, entering the cache, the choice among logits: in C what their plain forms are, and these what torch's are."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.decode import sampling
from regard.kernels.c.rows import (
    draw,
    lse_and_topk,
    norm,
    plain_lse_and_topk,
    plain_norm,
    plain_update_cache,
    update_cache,
)
from regard.position import Rope, rotate

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

close = torch.testing.assert_close
DTYPES = [torch.float32, torch.bfloat16]


def last(rows: int, slots: int) -> Tensor:
    return torch.full((rows,), slots - 1)


# --- turning, and entering the cache ---


def entry(
    r: int, h: int, g: int, d: int, e: int, rope: Rope | None, pos: Tensor
) -> tuple[Tensor, tuple[Any, ...]]:
    """A joined row for `update_cache`, and its other arguments up to the stores."""
    cos, sin = (None, None) if rope is None else rope.angles(pos[:, None], d, torch.float32)
    x = torch.randn(r, (h + g) * d + g * e)
    return x, (h, g, d, e, cos, sin, rope.layout if rope else "half")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rope",
    [None, *(Rope(layout=x, partial=p) for x in ("half", "interleaved") for p in (1.0, 0.5))],
)
@pytest.mark.parametrize("d, e", [(4, 3), (20, 20), (64, 128)])
def test_update_cache_turns_as_rope_does_and_fills_the_cache(
    form: str, rope: Rope | None, dtype: torch.dtype, d: int, e: int
) -> None:
    r, h, g, pos = 3, 4, 2, torch.tensor([5, -1, 0])
    x, arguments = entry(r, h, g, d, e, rope, pos)
    q, k, v = x.split((h * d, g * d, g * e), -1)
    qk = torch.cat([q, k], -1).view(r, 1, h + g, d)
    turned = (rotate(qk, *arguments[4:]) if rope else qk)[:, 0]
    stores = (
        torch.zeros(4, 6, g, d, dtype=dtype),
        torch.zeros(g, 6, 4, e, dtype=dtype).permute(2, 1, 0, 3),
    )
    v = v.clone()
    update_cache(x, *arguments, *stores, pos)
    # a cos - b sin with and without a rounding between; bf16 may then round to either neighbour
    close(x[:, : (h + g) * d].view(r, h + g, d), turned, atol=1e-6, rtol=1e-6)
    close(
        stores[0][0, 5],
        turned[0, h:].to(dtype),
        atol=1e-6,
        rtol=1e-6 if dtype.itemsize == 4 else 8e-3,
    )
    assert torch.equal(
        stores[0][[0, 2], [5, 0]], x[[0, 2], h * d : (h + g) * d].view(2, g, d).to(dtype)
    )
    assert torch.equal(stores[1][[0, 2], [5, 0]], v[[0, 2]].view(2, g, e).to(dtype))
    for store in stores:
        store[[0, 2], [5, 0]] = 0
        assert (store == 0).all()  # and nothing else was written


def test_update_cache_writes_to_the_pages_it_is_given(form: str) -> None:
    pos, home = torch.tensor([2, -1, 0, 2]), torch.tensor([6, 0, 1, 3])
    x, arguments = entry(4, 2, 1, 8, 5, Rope(), pos)
    stores = torch.zeros(7, 3, 1, 8), torch.zeros(7, 3, 1, 5)
    alone = torch.zeros(4, 3, 1, 8), torch.zeros(4, 3, 1, 5)
    update_cache(x.clone(), *arguments, *alone, pos)
    # The second page of each row, of three slots; nothing reads the first.
    place = torch.stack([torch.full_like(home, -1), home], 1).int()
    later = torch.where(pos < 0, -1, pos + 3)
    update_cache(x, *arguments, *stores, later, place, 3)
    for mine, want in zip(stores, alone, strict=True):
        assert torch.equal(mine[home[[0, 2, 3]]], want[[0, 2, 3]]) and not mine[[0, 2, 4, 5]].any()
    if form == "native":
        with pytest.raises(IndexError, match="outside of the cache"):
            update_cache(x, *arguments, *stores, later, place + 1, 3)
        with pytest.raises(IndexError, match="outside of the cache"):
            update_cache(x, *arguments, *stores, later + 3, place, 3)


def test_update_cache_takes_one_angle_for_all_rows(form: str) -> None:
    pos, stores = torch.tensor([3, 3]), [torch.zeros(2, 4, 1, 8) for _ in range(4)]
    x, arguments = entry(2, 2, 1, 8, 8, Rope(), pos)
    y, one = x.clone(), list(arguments)
    one[4], one[5] = one[4][:1].clone(), one[5][:1].clone()
    update_cache(x, *arguments, *stores[:2], pos)
    update_cache(y, *one, *stores[2:], pos)
    assert torch.equal(x, y) and torch.equal(stores[0], stores[2])


def test_update_cache_rounds_to_bf16_as_torch_does(form: str) -> None:
    bits = torch.randint(-(2**31), 2**31, (1, 4096)).to(torch.int32)
    bits[0, :6] = torch.tensor([0, 0x7F800000, -0x800000, 0x7F7FFFFF, 0x3F808000, 0x3F818000])
    x = bits.view(torch.float32)  # every kind of number: subnormal, infinite, ties
    store = torch.zeros(1, 1, 1, 4096, dtype=torch.bfloat16)
    row = torch.cat([torch.zeros(1, 2), x], 1)
    update_cache(
        row,
        1,
        1,
        1,
        4096,
        None,
        None,
        "half",
        torch.zeros(1, 1, 1, 1).bfloat16(),
        store,
        last(1, 1),
    )
    want, real = x[0].bfloat16(), ~x[0].isnan()
    assert torch.equal(store.view(-1)[real].view(torch.int16), want[real].view(torch.int16))
    assert store.view(-1)[~real].isnan().all()


def test_update_cache_outside_of_the_cache_is_refused(form: str) -> None:
    x, arguments = entry(2, 1, 1, 4, 4, None, last(2, 4))
    with pytest.raises((IndexError, RuntimeError)):
        update_cache(x, *arguments, torch.zeros(2, 3, 1, 4), torch.zeros(2, 3, 1, 4), last(2, 4))
    with pytest.raises((IndexError, RuntimeError)):
        update_cache(x, *arguments, torch.zeros(1, 3, 1, 4), torch.zeros(1, 3, 1, 4), last(2, 3))


@pytest.mark.usefixtures("in_c", "threads")
@pytest.mark.parametrize("count", [1, 2])
def test_update_cache_on_threads_is_the_plain_form(count: int) -> None:
    torch.set_num_threads(count)
    pos = torch.randint(-1, 9, (200,))
    x, arguments = entry(200, 8, 4, 64, 64, Rope(), pos)
    mine, want = ((x.clone(), torch.zeros(200, 9, 4, 64), torch.zeros(200, 9, 4, 64)) for _ in "ab")
    update_cache(mine[0], *arguments, *mine[1:], pos)
    plain_update_cache(want[0], *arguments, *want[1:], pos)
    for a, b in zip(mine, want, strict=True):
        close(a, b, atol=1e-6, rtol=1e-6)


# --- norms ---


@pytest.mark.parametrize("m", [1, 5, 16, 33, 64, 500, 768])
@pytest.mark.parametrize("shape", [(), (3,), (2, 1, 4)])
def test_norm_is_torchs(form: str, m: int, shape: tuple[int, ...]) -> None:
    x, w, b = torch.randn(*shape, m) * 3 + 1, torch.randn(m), torch.randn(m)
    near = {"atol": 2e-6, "rtol": 2e-6}  # a few roundings of numbers up to 10
    close(norm(x, w, b, 1e-5, "layer"), F.layer_norm(x, (m,), w, b, 1e-5), **near)
    close(norm(x, w, None, 1e-5, "layer"), F.layer_norm(x, (m,), w, None, 1e-5), **near)
    close(norm(x, w, None, 1e-6, "rms"), F.rms_norm(x, (m,), w, 1e-6), **near)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norm_is_exact_to_float32(form: str, kind: str) -> None:
    x, w = torch.randn(4, 4096) + 10, torch.ones(4096)
    wide = plain_norm(x.double(), w.double(), None, 1e-6, kind)
    # the mean of numbers near 10 rounds by 5e-7
    close(norm(x, w, None, 1e-6, kind).double(), wide, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norm_keeps_nan_in_its_row(form: str, kind: str) -> None:
    x = torch.randn(3, 40)
    x[1, 39] = torch.nan
    y = norm(x, torch.ones(40), None, 1e-5, kind)
    assert y[1].isnan().all() and y[[0, 2]].isfinite().all()


def test_norm_takes_strides_and_gives_gradients(form: str) -> None:
    x, w = torch.randn(4, 96), torch.randn(48)
    close(norm(x[:, ::2], w, None, 1e-5, "rms"), plain_norm(x[:, ::2], w, None, 1e-5, "rms"))
    w.requires_grad_()
    norm(x[:, :48], w, None, 1e-5, "rms").sum().backward()
    assert w.grad is not None


@pytest.mark.usefixtures("in_c", "threads")
@pytest.mark.parametrize("count", [1, 2])
def test_norm_on_threads_is_the_plain_form(count: int) -> None:
    torch.set_num_threads(count)
    x, w, b = torch.randn(700, 512), torch.randn(512), torch.randn(512)
    close(norm(x, w, b, 1e-5, "layer"), plain_norm(x, w, b, 1e-5, "layer"), atol=2e-6, rtol=2e-6)


# --- the choice among logits ---


@pytest.mark.parametrize("vocab", [1, 15, 16, 63, 64, 65, 1000, 1024, 1025, 32001])
@pytest.mark.parametrize("k", [1, 2, 8, 64])
def test_choose_is_logsumexp_and_topk(form: str, vocab: int, k: int) -> None:
    logits, k = torch.randn(3, vocab) * 4, min(k, vocab)
    norm_, values, ids = lse_and_topk(logits, k)
    close(norm_, logits.logsumexp(-1), atol=2e-6, rtol=1e-6)  # one rounding of numbers up to 20
    assert torch.equal(values, logits.topk(k).values)
    assert torch.equal(values, logits.gather(1, ids))


@pytest.mark.usefixtures("in_c")
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_choose_in_c_is_the_plain_form(data: st.DataObject) -> None:
    def pick(*values: Any) -> Any:
        return data.draw(st.sampled_from(values))

    torch.manual_seed(data.draw(st.integers(0, 99)))
    r, vocab = pick(1, 3), pick(20, 64, 100, 1024, 3000)
    logits = torch.randn(r, vocab + 5)[:, 2 : vocab + 2] * pick(0.1, 3, 50)
    kind = pick("plain", "ties", "few", "none", "sorted", "reversed")
    if kind == "ties":
        logits = logits.round()
    elif kind in ("few", "none"):
        logits = logits.masked_fill(
            torch.rand_like(logits) < (0.95 if kind == "few" else 1), -torch.inf
        )
    elif kind != "plain":
        logits = logits.sort(-1, descending=kind == "reversed").values
    banned = data.draw(st.lists(st.integers(0, vocab - 1), max_size=5, unique=True))
    k = pick(1, 2, 5, 15)
    mine, want = lse_and_topk(logits, k, banned), plain_lse_and_topk(logits, k, banned)
    close(mine[0], want[0], atol=2e-6, rtol=1e-6)
    assert torch.equal(mine[1], want[1]) and torch.equal(mine[2], want[2])


def test_choose_takes_the_smaller_id_of_equals(form: str) -> None:
    logits = torch.zeros(2, 3000)
    logits[1, 2000:2010] = 1.0
    ids = lse_and_topk(logits, 12)[2]
    assert ids[0].tolist() == list(range(12))
    assert ids[1].tolist() == [*range(2000, 2010), 0, 1]


def test_choose_counts_banned_ids_in_the_sum_alone(form: str) -> None:
    logits = torch.randn(2, 100)
    best = logits.argmax(-1).tolist()
    norm_, _, ids = lse_and_topk(logits, 100 - len(set(best)), best)
    close(norm_, logits.logsumexp(-1), atol=1e-6, rtol=1e-6)
    assert not torch.isin(ids, torch.tensor(best)).any()
    assert lse_and_topk(torch.full((1, 4), -torch.inf), 2, [0, 2])[2].tolist() == [[1, 3]]


def test_choose_refuses_more_than_there_are(form: str) -> None:
    for k, banned in ((5, []), (4, [1]), (0, [])):
        with pytest.raises(AssertionError, match="of 4 logits"):
            lse_and_topk(torch.randn(1, 4), k, banned)


@pytest.mark.parametrize("at", [0, 17, 1500, 1999])
def test_choose_tells_rows_that_are_not_finite(form: str, at: int) -> None:
    logits = torch.randn(5, 2000)
    logits[1, at], logits[2, at], logits[4] = torch.nan, torch.inf, -torch.inf
    logits[3, at], logits[3, 1000] = torch.inf, torch.nan
    norm_, _, ids = lse_and_topk(logits, 3)
    assert norm_[1].isnan() and norm_[3].isnan()
    assert norm_[2] == torch.inf and ids[2, 0] == at and norm_[4] == -torch.inf
    close(norm_[0], logits[0].logsumexp(-1), atol=1e-6, rtol=1e-6)
    assert ((ids >= 0) & (ids < 2000)).all()
    assert all(len(set(row)) == 3 for row in ids.tolist())


@pytest.mark.usefixtures("in_c")
def test_choose_sums_exponentials_to_a_part_in_a_million() -> None:
    """One large logit and 5,000 equal ones below it: log(1 + 5000 e^-x) shows the error of e^-x alone."""
    below = torch.linspace(0, 12, 200)
    logits = -below[:, None].repeat(1, 5001)
    logits[:, 0] = 0
    share = lse_and_topk(logits, 1)[0].double().exp() - 1
    want = 5000 * logits[:, 1].double().exp()
    # float32 holds the logarithm to 2.4e-7 of a number up to 8.6: 5e-7 in what it is the logarithm of
    assert ((share - want).abs() / (1 + want)).max() < 1.5e-6


@pytest.mark.usefixtures("in_c", "threads")
def test_choose_has_the_same_bits_on_any_threads() -> None:
    logits, found = torch.randn(9, 20000), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.append(lse_and_topk(logits, 5))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    assert torch.equal(found[0][2], plain_lse_and_topk(logits, 5)[2])


# --- the draw ---

DRAWN: list[dict[str, float]] = [
    {}, {"top_k": 1}, {"top_k": 40}, {"top_p": 0.0}, {"top_p": 0.9}, {"min_p": 0.05},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.01}, {"top_p": 1.0, "top_k": 10**6},
]  # fmt: skip


@pytest.mark.usefixtures("in_c")
@pytest.mark.parametrize("vocab", [1, 2, 31, 97, 1000, 30001])
@pytest.mark.parametrize("by", DRAWN, ids=str)
def test_draws_in_c_are_the_plain_ones(vocab: int, by: dict[str, float]) -> None:
    """The plain form in float64, which C leaves to torch; rows that are greedy among others, equal logits, masks."""
    torch.manual_seed(vocab)
    # Rows enough for threads; of a large vocabulary the plain form takes a second for those.
    n, words = 64 if vocab < 10_000 else 16, -(-vocab // 32)
    logits = torch.randn(n, vocab + 3)[:, 1 : vocab + 1] * 3
    logits = torch.where(torch.rand(n, vocab) < 0.1, logits.round(), logits)
    columns = {name: torch.full((n, 1), value) for name, value in by.items()}
    columns["temperature"] = torch.full((n, 1), 0.8)
    columns["temperature"][::7] = 0.0
    columns |= {"seed": torch.randint(0, 1 << 62, (n, 1)), "key": torch.arange(n)[:, None]}
    mask = torch.randint(-(2**31), 2**31, (n, words)).to(torch.int32)
    mask[::4, ::3], mask[::4, 1::3] = 0, -1
    mask[:, -1] &= (1 << (vocab - 1) % 32 + 1) - 1
    mask[5] = 0
    for more in ({}, {"mask": mask}):
        found = draw(logits, columns | more, torch.arange(n))
        assert found is not None and (not more or found[5] == -1)
        assert torch.equal(found, sampling.choose(logits.double(), columns | more, torch.arange(n)))
    greedy = draw(logits, {"mask": mask}, torch.arange(n))
    assert greedy is not None
    assert torch.equal(greedy, sampling.choose(logits.double(), {"mask": mask}, torch.arange(n)))


@pytest.mark.usefixtures("in_c")
def test_draws_in_c_follow_the_probabilities() -> None:
    """A row's token changes where its random number passes a border of the cumulative probability."""
    n = 20000
    columns = {"temperature": torch.ones(n, 1), "seed": torch.full((n, 1), 3)}
    columns["key"] = torch.arange(n)[:, None]
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().expand(n, 4)
    found = draw(logits, columns, torch.zeros(n, dtype=torch.long))
    assert found is not None
    u = sampling.uniform(columns["seed"][:, 0], columns["key"][:, 0], torch.zeros(n).long())
    borders = torch.tensor([0.1, 0.3, 0.6])
    apart = (u[:, None] - borders).abs().amin(1) > 1e-6
    assert torch.equal(found[apart], torch.bucketize(u, borders, right=True)[apart])
