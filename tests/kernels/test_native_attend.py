"""Attention of one token a row: in C what its plain form is, and that what torch's attention is."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels.c.rows import attend_one, plain_attend_one

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

close = torch.testing.assert_close
# Sums of up to some hundred products of numbers near 1, in another order, of which each step rounds by 6e-8
NEAR = {"atol": 1e-5, "rtol": 1e-5}
DTYPES = [torch.float32, torch.bfloat16]


def cache(rows: int, slots: int, g: int, d: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, slots, g, d).to(dtype)


def last(rows: int, slots: int) -> Tensor:
    return torch.full((rows,), slots - 1)


@pytest.mark.parametrize("h, g", [(1, 1), (4, 4), (6, 2), (5, 1), (12, 4)])
@pytest.mark.parametrize("d", [1, 5, 64, 128, 256])
def test_attend_one_is_scaled_dot_product_attention(form: str, h: int, g: int, d: int) -> None:
    q, k, v = torch.randn(3, h, d), cache(3, 70, g, d), cache(3, 70, g, d)
    mine = attend_one(q, k, v, last(3, 70), scale=d**-0.5)
    heads = [x.repeat_interleave(h // g, 2).transpose(1, 2) for x in (k, v)]
    close(mine, F.scaled_dot_product_attention(q[:, :, None], *heads)[:, :, 0], **NEAR)


@pytest.mark.usefixtures("in_c")
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_attend_one_in_c_is_the_plain_form(data: st.DataObject) -> None:
    def pick(*values: Any) -> Any:
        return data.draw(st.sampled_from(values))

    torch.manual_seed(data.draw(st.integers(0, 99)))
    r, g, each = pick(1, 2, 5, 6), pick(1, 2, 3), pick(1, 2, 3, 4, 5, 9)
    d, e, slots = pick(1, 5, 33, 64, 100, 128), pick(1, 5, 32, 80), pick(1, 3, 64, 65, 150)
    dtype, stored = pick(*DTYPES), r + pick(0, 2)
    order = data.draw(st.permutations([0, 1, 2]))  # the axes in memory, outermost first
    back = [order.index(axis) for axis in range(3)]

    def strided(width: int) -> Tensor:
        shape = [(stored, slots, g)[axis] for axis in order]
        return torch.randn(*shape, width).to(dtype).permute(*back, 3)

    q = torch.randn(r, g * each * d + 3)[:, 3:].unflatten(
        1, (g * each, d)
    )  # a piece of a joined row
    options: dict[str, Any] = {"scale": d**-0.5, "window": pick(None, 1, 7, 70)}
    share = options["share"] = pick(1, 2)
    if pick(True, False) and r % share == 0:
        table = torch.randint(stored, (r // share, slots + 2), dtype=torch.int32)
        options["place"] = table[:, :slots]
    if pick(True, False):
        options["bias"] = torch.randn(pick(1, r), g * each, slots + 1)
    given = (q, strided(d), strided(e), torch.randint(-1, slots, (r,)))
    close(attend_one(*given, **options), plain_attend_one(*given, **options), **NEAR)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page", [1, 3, 16])
@pytest.mark.parametrize("window, share", [(None, 1), (9, 1), (None, 3)])
def test_attend_one_over_pages_is_attention_over_rows(
    form: str, dtype: torch.dtype, page: int, window: int | None, share: int
) -> None:
    """To the bit: pages change where a key lies, not when it is added."""
    rows, pages = 5, 30
    table = torch.randperm(rows * pages, dtype=torch.int32).view(rows, pages)
    k, v = cache(rows * pages, page, 2, 33, dtype), cache(rows * pages, page, 2, 40, dtype)
    pos = torch.tensor([-1, 0, page, 7 * page - 1, pages * page - 1]).repeat_interleave(share)
    q = torch.randn(rows * share, 6, 33)
    options: dict[str, Any] = {"scale": 0.2, "window": window, "share": share}
    options["bias"] = torch.randn(rows * share, 6, pages * page)
    whole = [x[table.long()].flatten(1, 2) for x in (k, v)]
    mine = attend_one(q, k, v, pos, place=table, page=page, **options)
    assert torch.equal(mine, attend_one(q, *whole, pos, **options))
    table[4, 2] = rows * pages
    if window is None and form == "native":
        with pytest.raises(IndexError, match="outside of the cache"):
            attend_one(q, k, v, pos, place=table, page=page, **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attend_one_through_a_place_table_is_attention_over_gathered_rows(
    form: str, dtype: torch.dtype
) -> None:
    beams, slots, pos = 8, 40, torch.randint(0, 40, (8,))
    q, k, v = torch.randn(beams, 4, 16), cache(8, slots, 2, 16, dtype), cache(8, slots, 2, 5, dtype)
    place = torch.randint(beams, (beams, slots), dtype=torch.int32)
    slot = torch.arange(slots)
    gathered = k[place.long(), slot], v[place.long(), slot]
    mine = attend_one(q, k, v, pos, place=place, scale=0.25)
    close(mine, attend_one(q, *gathered, pos, scale=0.25), atol=0, rtol=0)  # the same sums


def test_attend_one_reads_only_places_of_seen_slots(form: str) -> None:
    q, k, place = torch.randn(2, 2, 8), cache(2, 6, 2, 8), torch.zeros(2, 6, dtype=torch.int32)
    pos = torch.tensor([3, 1])
    want = attend_one(q, k, k, pos, place=place, scale=1.0)
    place[0, 4:], place[1, 2:] = -7, 99
    close(attend_one(q, k, k, pos, place=place, scale=1.0), want, atol=0, rtol=0)


def test_attend_one_of_rows_that_share_is_attention_over_repeated_rows(form: str) -> None:
    q, k, v = torch.randn(6, 4, 8), cache(2, 9, 4, 8), cache(2, 9, 4, 8)
    pos = torch.tensor([8, 8, 3, 0, 5, -1])
    twice = k.repeat_interleave(3, 0), v.repeat_interleave(3, 0)
    mine = attend_one(q, k, v, pos, share=3, scale=1.0)
    close(mine, attend_one(q, *twice, pos, scale=1.0), atol=0, rtol=0)


def test_attend_one_in_a_window_is_attention_over_its_slots(form: str) -> None:
    q, k, v = torch.randn(2, 2, 8), cache(2, 100, 2, 8), cache(2, 100, 2, 8)
    mine = attend_one(q, k, v, last(2, 100), window=7, scale=1.0)
    close(mine, attend_one(q, k[:, -7:], v[:, -7:], last(2, 7), scale=1.0), **NEAR)


def test_attend_one_adds_the_bias_after_scaling(form: str) -> None:
    q, k, v, bias = torch.randn(2, 2, 8), cache(2, 5, 2, 8), cache(2, 5, 2, 8), torch.randn(1, 2, 5)
    weights = (torch.einsum("rhd,rshd->rhs", q, k) * 0.3 + bias).softmax(-1)
    want = torch.einsum("rhs,rshe->rhe", weights, v)
    close(attend_one(q, k, v, last(2, 5), scale=0.3, bias=bias), want, **NEAR)
    bias[..., 3:] = -torch.inf  # which hides
    want = attend_one(q, k, v, last(2, 3), scale=0.3, bias=bias)
    close(attend_one(q, k, v, last(2, 5), scale=0.3, bias=bias), want, **NEAR)
    bias[:] = -torch.inf
    assert (attend_one(q, k, v, last(2, 5), scale=0.3, bias=bias) == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_attend_one_that_sees_nothing_gives_zeros(form: str, dtype: torch.dtype) -> None:
    k = torch.full((2, 4, 2, 40), torch.nan, dtype=dtype)
    out = attend_one(torch.randn(2, 4, 40), k, k, torch.tensor([-1, -1]), scale=1.0)
    assert (out == 0).all()
    k[1] = 1.0  # what a row does not see may be anything
    k[1, 2:] = torch.nan
    out = attend_one(torch.randn(2, 4, 40), k, k, torch.tensor([-1, 1]), scale=1.0)
    close(out, torch.tensor([0.0, 1.0])[:, None, None].expand_as(out), **NEAR)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_attend_one_keeps_what_is_not_finite_in_its_row_and_group(
    form: str, dtype: torch.dtype, bad: float
) -> None:
    q, k, v = torch.rand(2, 4, 40), cache(2, 70, 2, 40, dtype), cache(2, 70, 2, 40, dtype)
    k[0, 3, 1, 7] = bad
    out = attend_one(q, k, v, last(2, 70), scale=1.0)
    assert out[0, 2:].isnan().all() and out[0, :2].isfinite().all() and out[1].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_attend_one_holds_over_long_rows_and_steep_scores(form: str, dtype: torch.dtype) -> None:
    q, k, v = torch.randn(1, 4, 64) * 20, cache(1, 3000, 2, 64, dtype), cache(1, 3000, 2, 64, dtype)
    k[:, 2000:] *= 2  # the maximum rises late: earlier sums fade
    scores = torch.einsum("hd,shd->hs", q[0].double(), k[0].repeat_interleave(2, 1).double())
    want = torch.einsum("hs,she->he", scores.softmax(-1), v[0].repeat_interleave(2, 1).double())
    mine = attend_one(q, k, v, last(1, 3000), scale=1.0)
    # scores of some hundreds round by 3e-5, and weights are their exponentials
    close(mine[0].double(), want, atol=5e-4, rtol=5e-4)


@pytest.mark.parametrize("pos, place", [(5, None), (2, 2), (4, 0)])
def test_attend_one_outside_of_the_cache_is_refused(form: str, pos: int, place: int | None) -> None:
    k, where = cache(2, 5, 1, 4), torch.tensor([0, pos])
    table = None if place is None else torch.full((2, 4), place, dtype=torch.int32)
    with pytest.raises((IndexError, RuntimeError)):
        attend_one(torch.randn(2, 1, 4), k, k, where, place=table, scale=1.0)
    with pytest.raises((IndexError, RuntimeError)):
        attend_one(torch.randn(6, 1, 4), k, k, last(6, 5), share=2, scale=1.0)


@pytest.mark.usefixtures("in_c")
def test_attend_one_in_c_refuses_a_place_below_zero() -> None:
    k, table = cache(2, 5, 1, 4), torch.tensor([[0, 0, 0], [0, 0, -1]], dtype=torch.int32)
    with pytest.raises(IndexError, match="outside of the cache"):
        attend_one(torch.randn(2, 1, 4), k, k, last(2, 3), place=table, scale=1.0)


@pytest.mark.usefixtures("in_c", "threads")
@pytest.mark.parametrize("r, h, g", [(1, 8, 4), (3, 4, 4), (40, 4, 2)])
def test_attend_one_has_the_same_bits_on_any_threads(r: int, h: int, g: int) -> None:
    slots = 40000 // (r * h)  # enough work for threads
    q, k, v = torch.randn(r, h, 64), cache(r, slots, g, 64), cache(r, slots, g, 64)
    pos = torch.randint(slots // 2, slots, (r,))
    outs = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        outs.append(attend_one(q, k, v, pos, scale=0.125))
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
    close(outs[0], plain_attend_one(q, k, v, pos, scale=0.125), **NEAR)


@pytest.mark.usefixtures("in_c")
@pytest.mark.parametrize("dtype", DTYPES)
def test_attend_one_gives_a_row_the_same_bits_alone_and_in_a_batch(dtype: torch.dtype) -> None:
    q, k, v = torch.randn(4, 6, 64), cache(4, 5000, 2, 64, dtype), cache(4, 5000, 2, 64, dtype)
    pos = torch.tensor([4999, 70, 1024, -1])
    together = attend_one(q, k, v, pos, scale=0.125)
    for i in range(4):
        row = slice(i, i + 1)
        assert torch.equal(attend_one(q[row], k[row], v[row], pos[row], scale=0.125), together[row])
