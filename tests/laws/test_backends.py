"""Every backend computes the same attention; a row that sees nothing gives zeros, forward and backward."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from regard.attention import BACKENDS, attend, core
from regard.attention.core import Terms, reference, softmax
from regard.attention.online import online
from regard.attention.scores import Additive
from regard.errors import UsageError
from regard.mask import Causal, Documents, Full, Mask, Padding, Prefix, Span, Visible, Window
from tests.laws.mechanisms import FEW, TIGHT, TOWERS, decoder, ids
from tests.wide import crossed, wide

DIFFERENTIABLE = [b for b in BACKENDS if b != "flex"]  # torch has no CPU backward for flex


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """flex runs the same rules without tracing each call anew, which costs a third of a second. That each rule can be
    traced is a law of its own below."""
    monkeypatch.setattr(
        flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", wide(TOWERS, keep=FEW))
@pytest.mark.usefixtures("untraced")
@torch.no_grad()
def test_backend_equals_reference_for_every_mechanism(name: str, backend: str) -> None:
    each = isinstance(TOWERS[name]["attention"], tuple) or "borrowing" in TOWERS[name]
    model, x = decoder(name, layers=2 if each else 1), ids(3, 9)
    for lengths in (None, [9, 4, 6]):
        want = model(x, lengths, backend="reference")
        torch.testing.assert_close(model(x, lengths, backend=backend), want, **TIGHT)


RULES: dict[str, Mask] = {
    "full": Full(),
    "causal": Causal(),
    "ahead": Causal(2),
    "window": Causal() & Window(3),
    "padding": Padding(torch.tensor([5, 9])),
    "documents": Causal()
    & Documents(torch.tensor([[0] * 4 + [1] * 5, [0] * 2 + [1] * 3 + [2] * 4])),
    "prefix": Prefix(torch.tensor([3, 6])),
}
SPANS = {
    "square": (Span.run(0, 9), Span.run(0, 9)),
    "bottom_right": (Span.run(6, 3), Span.run(0, 9)),
    "last": (Span.run(8, 1), Span.run(0, 9)),
    "ragged": (Span.ragged(torch.tensor([9, 5]), 9), Span.ragged(torch.tensor([9, 5]), 9)),
}


def operands(t: int = 9, s: int = 9, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(2, n, h, d).to(dtype) for n, h, d in ((t, 6, 8), (s, 3, 8), (s, 3, 5))]


def assert_equals_reference(backend: str, rule: str, spans: str, extras: list[str]) -> None:
    q_pos, k_pos = SPANS[spans]
    q, k, v = operands(q_pos.size)
    mask, bias = Visible(RULES[rule], q_pos, k_pos), torch.randn(1, 6, q_pos.size, 9).double()
    known = {
        "none": {},
        "bias": {"bias": bias, "softcap": 1.0},
        "sinks": {"sinks": torch.randn(6).double()},
    }
    for extra in (known[name] for name in extras):
        want = attend(q, k, v, mask.tensor(), backend="reference", **extra)
        torch.testing.assert_close(attend(q, k, v, mask, backend=backend, **extra), want, **TIGHT)


@pytest.mark.parametrize("rule, spans", crossed(RULES, SPANS))
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.usefixtures("untraced")
def test_backend_equals_reference_for_every_mask(backend: str, rule: str, spans: str) -> None:
    assert_equals_reference(backend, rule, spans, ["none", "bias", "sinks"])


TRACED = [(rule, "square", "none") for rule in RULES]
TRACED += [("causal", spans, "none") for spans in SPANS if spans != "square"]
TRACED += [("causal", "square", extra) for extra in ("bias", "sinks")]


@pytest.mark.parametrize(
    "rule, spans, extra",
    wide(
        TRACED,
        keep=[
            ("documents", "square", "none"),
            ("causal", "ragged", "none"),
            ("causal", "square", "sinks"),
        ],
    ),
)
def test_flex_traced_equals_reference(rule: str, spans: str, extra: str) -> None:
    """Each rule, each pair of spans and each extra once: the product of them is above, untraced."""
    assert_equals_reference("flex", rule, spans, [extra])


@pytest.mark.parametrize(
    "name",
    wide(
        ["gqa_rope", "window", "mla_wide_value", "softcap_sinks_t5"],
        keep=["mla_wide_value", "softcap_sinks_t5"],
    ),
)
@torch.no_grad()
def test_flex_traced_in_a_model_equals_reference(name: str) -> None:
    model, x = decoder(name, layers=1), ids(3, 9)
    want = model(x, [9, 4, 6], backend="reference")
    torch.testing.assert_close(model(x, [9, 4, 6], backend="flex"), want, **TIGHT)


@pytest.mark.parametrize("backend", DIFFERENTIABLE)
def test_backend_has_the_gradients_of_the_reference(backend: str) -> None:
    mask = Visible(Causal(), Span.run(0, 9), Span.run(0, 9))
    grads = []
    for name in ("reference", backend):
        torch.manual_seed(0)
        inputs = [x.requires_grad_() for x in operands()]
        sinks, bias = torch.randn(6).double(), torch.randn(2, 6, 9, 9).double()
        extra = [sinks.requires_grad_(), bias.requires_grad_()]
        out = attend(*inputs, mask, sinks=sinks, bias=bias, backend=name)
        grads.append(torch.autograd.grad(out.square().sum(), inputs + extra))
    for ours, want in zip(grads[1], grads[0]):
        torch.testing.assert_close(ours, want, **TIGHT)


@pytest.mark.parametrize("backend", BACKENDS)
def test_backend_takes_any_score_function(backend: str) -> None:
    q, k, v = operands()

    def distance(q: Tensor, k: Tensor) -> Tensor:
        return -(q[..., :, None, :] - k[..., None, :, :]).square().sum(-1) / 2

    want = attend(q, k, v, score=distance, backend="reference")
    torch.testing.assert_close(attend(q, k, v, score=distance, backend=backend), want, **TIGHT)


@pytest.mark.parametrize("block", [1, 3, 32])
def test_online_attention_equals_three_loops(block: int) -> None:
    """Maximum, sum, weighted sum, each a loop over the keys, against the one pass with a running maximum."""
    q, k, v = torch.randn(4).double(), torch.randn(7, 4).double() * 3, torch.randn(7, 2).double()
    top = -math.inf
    for key in k:
        top = max(top, float(q @ key) / 2)
    total = 0.0
    for key in k:
        total += math.exp(float(q @ key) / 2 - top)
    out = torch.zeros(2).double()
    for key, value in zip(k, v):
        out += math.exp(float(q @ key) / 2 - top) / total * value
    ours = online(q[None, None, None], k[None, None], v[None, None], None, Terms(0.5), (1, block))
    torch.testing.assert_close(ours[0, 0, 0], out, **TIGHT)


def test_online_is_stable_where_exp_overflows() -> None:
    q, k, v = (torch.randn(1, 2, 40, 4) * s for s in (200.0, 200.0, 1.0))
    want = reference(q, k, v, None, Terms(1.0))
    torch.testing.assert_close(online(q, k, v, None, Terms(1.0)), want)
    assert torch.isfinite(want).all()


def test_softmax_is_shift_invariant_and_sums_to_one() -> None:
    x = torch.randn(3, 7).double()
    torch.testing.assert_close(softmax(x + 1e3), softmax(x))
    torch.testing.assert_close(softmax(x).sum(-1), torch.ones(3).double())


@pytest.mark.parametrize("name", wide(TOWERS, keep=FEW))
def test_mechanism_trains_in_bfloat16(name: str) -> None:
    """Ragged rows; every parameter gets a finite gradient, but the indexer's: it has a loss of its own."""
    model = decoder(name).bfloat16()
    out = model(ids(3, 9), [9, 0, 4])
    out.float().square().mean().backward()
    assert out.dtype == torch.bfloat16 and torch.isfinite(out).all()
    for key, p in model.named_parameters():
        assert (p.grad is None) == ("indexer" in key), key
        assert p.grad is None or torch.isfinite(p.grad).all(), key


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_sinks_stand_beside_any_score(backend: str, grouped: bool, softcap: float | None) -> None:
    """Additive scores of a key of zeros are not zero; the sink's logit is the sink's alone."""
    score = Additive(4, 4, 8).double()
    q, k, v = (torch.randn(2, n, h, 4).double() for n, h in ((3, 2), (40, 1), (40, 1)))
    if not grouped:
        k, v = k.expand(-1, -1, 2, -1), v.expand(-1, -1, 2, -1)
    sinks = torch.tensor([0.3, -0.2]).double()
    with torch.no_grad():
        ours = attend(q, k, v, score=score, sinks=sinks, softcap=softcap, backend=backend)
        x = score(q.transpose(1, 2), k.transpose(1, 2).expand(-1, 2, -1, -1))
        x = x if softcap is None else softcap * torch.tanh(x / softcap)
        a = torch.cat([sinks[None, :, None, None].expand(2, 2, 3, 1), x], -1).softmax(-1)
        want = (a[..., 1:] @ v.transpose(1, 2)).transpose(1, 2)
    torch.testing.assert_close(ours, want, **TIGHT)


def test_flex_is_compiled_without_its_variant_for_short_queries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That has no float32 form for grouped heads. On the CPU nothing is compiled."""
    monkeypatch.setattr(torch, "compile", lambda kernel: kernel)
    compiled, plain = (core._flex_kernel.__wrapped__(flag) for flag in (True, False))
    assert plain is compiled.func is flex_attention.flex_attention
    assert compiled.keywords == {"kernel_options": {"FORCE_USE_FLEX_ATTENTION": True}}


@torch.no_grad()
def test_flex_makes_a_block_mask_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    made, plain = [], flex_attention.create_block_mask

    def count(*args: object, **more: object) -> object:
        made.append(args)
        return plain(*args, **more)

    monkeypatch.setattr(flex_attention, "create_block_mask", count)
    model, x = decoder("gqa_rope", layers=3), ids(2, 5)
    torch.testing.assert_close(model(x, backend="flex"), model(x), **TIGHT)
    assert len(made) == 1
    torch.testing.assert_close(
        model(x, mask=Full(), backend="flex"), model(x, mask=Full()), **TIGHT
    )
    assert len(made) == 1


# --- 10,000 random masks ------------------------------------------------------------------------------------------

# (t, s, masks): every share of visible keys from none to all, rows that see nothing among them
SHAPES = [(1, 1, 500), (1, 7, 2000), (3, 2, 2000), (4, 6, 3000), (5, 40, 1000), (8, 8, 1500)]


def random_masks(t: int, s: int, count: int) -> Tensor:
    share = torch.rand(count, 1, 1, 1)
    mask = torch.rand(count, 1, t, s) < share
    mask[::3, :, 0] = False  # a fully masked row in every third
    mask[::50] = False  # nothing at all in every fiftieth
    return mask


@pytest.mark.parametrize("t, s, count", SHAPES)
def test_random_masks_hold_blind_rows_and_full_ones(t: int, s: int, count: int) -> None:
    """What the law below runs over: rows that see nothing, rows that see all, and all between."""
    seen = random_masks(t, s, count).sum(-1)
    assert (seen == 0).any() and (seen == s).any() and seen.unique().tolist() == list(range(s + 1))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("t, s, count", SHAPES)
@pytest.mark.parametrize("backend", DIFFERENTIABLE)
def test_random_masks_give_finite_values_and_gradients(
    backend: str, t: int, s: int, count: int, biased: bool
) -> None:
    mask = random_masks(t, s, count)
    q, k, v = (torch.randn(count, n, 2, 4, requires_grad=True) for n in (t, s, s))
    bias = torch.randn(count, 2, t, s, requires_grad=True) if biased else None
    scale = 30.0  # scores in the hundreds: sharp rows as well
    out = attend(q, k, v, mask, bias=bias, scale=scale, backend=backend)
    out.square().sum().backward()
    for x in (out, q.grad, k.grad, v.grad, *([bias.grad] if bias is not None else [])):
        assert torch.isfinite(x).all()
    blind = ~mask.any(-1)[:, 0]  # b t
    assert (out[blind] == 0).all() and (q.grad[blind] == 0).all()
    unseen = ~mask.any(2)[:, 0]  # b s: keys that nobody sees
    assert (v.grad[unseen] == 0).all() and (k.grad[unseen] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", DIFFERENTIABLE)
def test_random_masks_are_finite_in_half_precision(backend: str, dtype: torch.dtype) -> None:
    mask = random_masks(4, 6, 300)
    q, k, v = (torch.randn(300, n, 2, 4).to(dtype).requires_grad_() for n in (4, 6, 6))
    bias = torch.randn(300, 2, 4, 6).to(dtype)
    for extra in (None, bias):
        out = attend(q, k, v, mask, bias=extra, backend=backend)
        grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
        assert out.dtype == dtype and all(torch.isfinite(x).all() for x in (out, *grads))
        assert (out[~mask.any(-1)[:, 0]] == 0).all()
        exact = attend(*(x.double() for x in (q, k, v)), mask, bias=extra, backend="reference")
        assert (out - exact).abs().max() < 0.06  # 8 bits of mantissa on values near 3


@torch.no_grad()
def test_random_masks_are_finite_in_flex() -> None:
    mask = random_masks(4, 6, 100)
    q, k, v = (torch.randn(100, n, 2, 4) for n in (4, 6, 6))
    out = attend(q, k, v, mask, backend="flex")
    torch.testing.assert_close(out, attend(q, k, v, mask, backend="reference"))


@pytest.mark.parametrize("backend", DIFFERENTIABLE)
def test_hidden_keys_may_hold_anything_finite(backend: str) -> None:
    """What the mask hides has no influence at all, not even in the last bit."""
    q, k, v = operands()
    mask = Visible(Causal(), Span.run(0, 9), Span.run(0, 9)).tensor().clone()
    mask[..., 6:] = False
    want = attend(q, k, v, mask, backend=backend)
    k[:, 6:], v[:, 6:] = 1e6, -1e6
    assert torch.equal(attend(q, k, v, mask, backend=backend), want)


def test_attend_refuses_what_it_cannot_do() -> None:
    q, k, v = operands()
    with pytest.raises(UsageError, match=r"backend 'spda' is unknown; did you mean 'sdpa'\?"):
        attend(q, k, v, backend="spda")
    with pytest.raises(UsageError, match="6 query heads cannot share 4 key heads evenly"):
        attend(q, torch.randn(2, 9, 4, 8).double(), v)
    with pytest.raises(UsageError, match="mask is torch.float64; give bool"):
        attend(q, k, v, torch.zeros(1, 1, 9, 9).double())
    with pytest.raises(UsageError, match="flex attention has no backward on the CPU"):
        attend(q.requires_grad_(), k, v, backend="flex")


@pytest.mark.parametrize("backend", DIFFERENTIABLE)
def test_dropout_of_weights_keeps_their_expectation(backend: str) -> None:
    """Each output is a mean of 4,000 draws; its standard error is about 0.02."""
    q, k, v = (torch.randn(1, n, 1, 4) for n in (2, 6, 6))
    many = [x.expand(4000, -1, -1, -1) for x in (q, k, v)]
    mean = attend(*many, dropout=0.3, backend=backend).mean(0)
    torch.testing.assert_close(mean, attend(q, k, v)[0], rtol=0, atol=0.1)
