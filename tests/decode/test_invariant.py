"""Batch-invariant mode, part by part: each gives a row the same bits in any company. Whole models are in
test_invariant_families.py. Equality is exact unless a tolerance is named."""

import sys
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from regard.attention import DSA, GQA, attend
from regard.attention.ordered import QUERIES, _heights, agrees, cancelling, dots
from regard.attention.scores import Additive
from regard.attention.sparse import Indexer, dots_exact
from regard.errors import UsageError
from regard.fast.invariant import WIDE, Product, Steady, invariant
from regard.layers import ACTIVATIONS
from regard.models import Model, Seq2SeqConfig
from regard.moe import MoE
from regard.position import Rope

GROUPED = GQA(6, 2, 20, rope=Rope())
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def build(attention: GQA | DSA = GROUPED) -> Model:
    return regard.build("llama", dim=96, layers=2, attention=attention, ffn_dim=250, vocab=300)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets how many threads torch computes on, until the test is over."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# --- the model ----------------------------------------------------------------------------------------------------


def test_plain_batching_does_change_bits() -> None:
    """Why the mode exists, in one token or in many, as the CPU has it. If this fails, torch has become invariant and
    the mode can go."""
    model, ids = build(), torch.randint(0, 300, (8, 40))
    with torch.no_grad():
        alike = [torch.equal(model(x)[:1], model(x[:1])) for x in (ids, ids[:, :1])]
    assert not all(alike)


def test_invariant_model_shares_its_weights() -> None:
    model = build()
    theirs = {p.data_ptr() for p in model.parameters()}
    assert {p.data_ptr() for p in invariant(model).parameters()} == theirs


def test_invariant_model_of_an_invariant_model_is_itself() -> None:
    model = invariant(build())
    assert invariant(model) is model


def test_invariant_mode_refuses_a_prepared_model() -> None:
    with pytest.raises(UsageError, match="prepared in fp32.*give the original"):
        invariant(regard.prepare(build(), "fp32"))


def test_invariant_mode_refuses_other_devices() -> None:
    with pytest.raises(UsageError, match="no invariant mode on meta.*model.to"):
        invariant(build().to("meta"))


def test_invariant_mode_refuses_parts_that_it_does_not_know() -> None:
    model = build()
    model.extra = nn.Conv3d(3, 3, 1)
    with pytest.raises(UsageError, match="no invariant mode for Conv3d"):
        invariant(model)


# --- products -----------------------------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("shape", [(250, 96), (96, 250), (37, 50), (8, 24), (1, 33), (512, 300)])
def test_product_gives_a_row_the_same_bits_among_any_number(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    x, w = (y.to(dtype) for y in cancelling(*shape))
    x = torch.cat([x, x.flip(0), x[:44]])  # 300 rows: more than one product holds
    product = Product(w, torch.randn(shape[0]).to(dtype) * 1e-6)
    whole = product(x)
    for start, n in ((0, 1), (7, 1), (299, 1), (3, 2), (50, 15), (11, 33), (90, 64), (1, 200)):
        assert torch.equal(product(x[start : start + n]), whole[start : start + n])
    order = torch.randperm(300)
    assert torch.equal(product(x[order]), whole[order])


def test_search_for_a_class_sees_another_order_of_the_sum_in_bfloat16() -> None:
    """Of ordinary numbers hardly a product differs after rounding to 8 bits; those of `cancelling` all do."""
    x, w = (y.bfloat16() for y in cancelling(40, 64))

    def fickle(x: Tensor) -> Tensor:
        """Sums from the other end in products of 24 rows and more."""
        parts = (x.float()[:, None] * w.float()).unbind(-1)
        return sum(parts if len(x) < 24 else parts[::-1], start=torch.zeros(())).bfloat16()  # type: ignore[attr-defined]

    assert agrees(fickle, x[:16], 2, 16)
    assert not agrees(fickle, x[:32], 2, 32)
    assert not any(agrees(fickle, x[: c[1]], *c) for c in WIDE[:-1])


@pytest.mark.parametrize(
    "steady, found",
    [
        ([], QUERIES[-1]),
        ([(8, 24), (16, 24), (8, 32), (16, 32)], (8, 64)),
        ([(2, 24), (4, 32), (16, 24), (16, 32)], (16, 64)),
    ],
)
def test_tiles_are_the_first_at_which_both_products_are_steady(
    steady: list[tuple[int, int]], found: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of queries 24 wide with keys, and of 32 weights with values; where none is, those of one height."""

    def fake(run: Callable[[Tensor], Tensor], x: Tensor, low: int, high: int) -> bool:
        assert len(x) == high and run(x).shape == (1, high, 32 if x.shape[1] == 24 else 40)
        return (low, x.shape[1]) in steady

    monkeypatch.setattr(sys.modules[agrees.__module__], "agrees", fake)
    assert _heights.__wrapped__(24, 40, torch.float32, "cpu", 1) == found


# --- functions of single numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("name", [*ACTIVATIONS, "sigmoid"])
def test_steady_activation_has_no_tails(
    name: str, count: int, threads: Callable[[int], None]
) -> None:
    threads(count)
    act = Steady(ACTIVATIONS.get(name, torch.sigmoid))
    x = 3 * torch.randn(200_003)
    whole = act(x)
    for n in (1, 5, 31, 63, 1000, 32_769, 70_001, 131_075):
        for start in (0, 13):
            assert torch.equal(act(x[start : start + n]), whole[start : start + n])


@dtypes
@pytest.mark.parametrize("name", ["exp", "tanh", "sin", "cos", "log"])
def test_functions_that_are_used_as_they_are_have_no_tails(name: str, dtype: torch.dtype) -> None:
    act, x = getattr(torch, name), (9 * torch.rand(5000) + 0.1).to(dtype)
    whole = act(x)
    for n in range(1, 130):
        assert torch.equal(act(x[7 : 7 + n].clone()), whole[7 : 7 + n])


# --- attention ----------------------------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (5, 1)])
def test_ordered_attention_does_not_depend_on_company(
    heads: tuple[int, int], dtype: torch.dtype
) -> None:
    """Fewer rows, fewer queries at other places, more masked keys, a bias or none of them: the same bits."""
    (h, g), (b, t, s) = heads, (3, 21, 300)
    q, k, v = (torch.randn(b, n, heads, 20).to(dtype) for n, heads in ((t, h), (s, g), (s, g)))
    seen = torch.arange(s)[None] <= torch.arange(t)[:, None] + 240
    seen = seen.expand(b, 1, t, s)
    bias = torch.randn(1, h, t, s)
    whole = attend(q, k, v, seen, bias=bias, backend="ordered")
    for row, start, n, keys in ((0, 0, 1, 241), (1, 20, 1, 261), (2, 5, 7, 300), (1, 3, 18, 264)):
        rows, at = slice(row, row + 1), slice(start, start + n)
        part = attend(
            q[rows, at], k[rows, :keys], v[rows, :keys], seen[rows, :, at, :keys],
            bias=bias[:, :, at, :keys], backend="ordered",
        )  # fmt: skip
        assert torch.equal(part, whole[rows, at])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ordered_attention_in_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, n, 3, 20).to(dtype) for n in (9, 70, 70))
    exact = attend(*(x.double() for x in (q, k, v)), backend="reference")
    found = attend(q, k, v, backend="ordered")
    torch.testing.assert_close(found, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)


@dtypes
def test_ordered_attention_leaves_a_score_its_own_dtype(dtype: torch.dtype) -> None:
    weight = torch.randn(20, 20).to(dtype)
    q, k, v = (torch.randn(2, n, 3, 20).to(dtype) for n in (9, 70, 70))

    def score(q: Tensor, k: Tensor) -> Tensor:
        return q @ weight @ k.mT / 20

    found, want = (attend(q, k, v, score=score, backend=x) for x in ("ordered", "reference"))
    torch.testing.assert_close(found, want, rtol=0.02, atol=0.02)  # of 8 bits


@dtypes
def test_ordered_index_products_equal_the_exact_ones(dtype: torch.dtype) -> None:
    q, k = torch.randn(2, 9, 3, 20).to(dtype), torch.randn(2, 45, 20).to(dtype)
    torch.testing.assert_close(dots(q, k), dots_exact(q, k), rtol=1e-5, atol=1e-5)  # sums of 20


@dtypes
@pytest.mark.parametrize("precision", ["exact", "fp8"])
def test_invariant_index_scores_do_not_depend_on_company(
    precision: str, dtype: torch.dtype
) -> None:
    model = build(attention=DSA(GQA(6, 2, 20), 5, 200, 4, precision=precision)).to(dtype)
    indexer = next(m for m in invariant(model).modules() if isinstance(m, Indexer))
    q, k, x = (torch.randn(3, *size).to(dtype) for size in ((25, 5, 200), (150, 200), (25, 96)))
    k = indexer.kept(k)
    with torch.no_grad():
        whole = indexer.scores(q, k, x)
        for row, start, n, keys in ((0, 0, 1, 1), (1, 24, 1, 33), (2, 3, 17, 150), (1, 7, 9, 97)):
            rows, at = slice(row, row + 1), slice(start, start + n)
            part = indexer.scores(q[rows, at], k[rows, :keys], x[rows, at])
            assert torch.equal(part, whole[rows, at, :keys])


@dtypes
def test_invariant_additive_score_does_not_depend_on_company(dtype: torch.dtype) -> None:
    model = invariant(Seq2SeqConfig(30, 30, 200, attention="additive").make().to(dtype))
    score = next(m for m in model.modules() if isinstance(m, Additive))
    q, k = torch.randn(5, 1, 16, 200).to(dtype), torch.randn(5, 1, 32, 200).to(dtype)
    whole = score.join(q, k)
    torch.testing.assert_close(whole, Additive.join(score, q, k), rtol=0.02, atol=0.05)  # of 8 bits
    for n in range(1, 5):
        assert torch.equal(score.join(q[n:], k[n:]), whole[n:])


def test_router_gives_ties_to_the_first_expert() -> None:
    moe = MoE(9, 2, 4, score="sigmoid", groups=3, active_groups=2).make(6)
    with torch.no_grad():
        chosen, _ = moe.route(torch.zeros(5, 6))
    assert chosen.tolist() == [[0, 1]] * 5
    assert F.one_hot(chosen, 9).sum() == 10
