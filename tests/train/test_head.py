"""The loss in chunks: the plain loss and its gradient, with a chunk of logits at a time."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from regard.attention import GQA
from regard.block import Tower
from regard.data.feed import IGNORE
from regard.errors import UsageError
from regard.kernels.triton import loss as gpu_loss
from regard.layers import LM, MLM, MLP, Classify
from regard.models import (
    EncoderDecoder,
    EncoderDecoderConfig,
    Recurrent,
    RecurrentConfig,
    Tokens,
    Transformer,
    TransformerConfig,
)
from regard.position import Sinusoidal
from regard.training import losses
from regard.training.losses import Smoothing, head_loss, masked_lm_loss, smoothed_loss
from regard.training.objectives import vocabulary_loss

V, M, N = 23, 8, 29
SMOOTHINGS = [None, Smoothing(0.1), Smoothing(0.1, "V"), Smoothing(0.2, "V-2", padding=3)]


def case(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, bias and labels, some of them not counted."""
    hidden, weight, bias = (torch.randn(*s).to(dtype) for s in ((N, M), (V, M), (V,)))
    labels = torch.randint(V, (N,))
    labels[torch.rand(N) < 0.3] = IGNORE
    return *(x.requires_grad_() for x in (hidden, weight, bias)), labels  # type: ignore[return-value]


def plain(
    h: Tensor, w: Tensor, y: Tensor, b: Tensor | None, s: Smoothing | None, cap: float | None = None
) -> Tensor:
    logits = h @ w.t() if b is None else h @ w.t() + b
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    if s is None:
        return masked_lm_loss(logits, y)[0]
    return smoothed_loss(logits, y, s.eps, s.over, s.padding)[0]


def gradients(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss * 0.7, inputs))  # a scale other than 1 must come through


@pytest.fixture(params=[1, 3 * V, 2**25], ids=["a row", "3 rows", "all"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setitem(losses.CHUNK, "cpu", request.param)
    monkeypatch.setattr(gpu_loss, "PART", max(1, request.param // 2))
    return int(request.param)


@pytest.mark.parametrize("smoothing", SMOOTHINGS, ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("cap", [None, 1.5])
def test_head_loss_equals_the_plain_loss(
    chunk: int, smoothing: Smoothing | None, biased: bool, cap: float | None
) -> None:
    h, w, b, y = case()
    bias, inputs = (b, (h, w, b)) if biased else (None, (h, w))
    ours, count = head_loss(h, w, y, bias=bias, smoothing=smoothing, cap=cap)
    want = plain(h, w, y, bias, smoothing, cap)
    torch.testing.assert_close(ours, want, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(gradients(ours, *inputs), gradients(want, *inputs)):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)
    left_out = (y == IGNORE) | (y == 3 if smoothing == SMOOTHINGS[3] else False)
    assert count == N - left_out.sum()


def test_head_loss_with_rows_of_zeros_for_alignment_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    h, w, b, y = case()
    want = head_loss(h, w, y, bias=b, smoothing=SMOOTHINGS[3])[0]
    monkeypatch.setitem(losses.ALIGN, "cpu", 16)
    monkeypatch.setitem(losses.CHUNK, "cpu", 5 * V)
    ours = head_loss(h, w, y, bias=b, smoothing=SMOOTHINGS[3])[0]
    torch.testing.assert_close(ours, want)
    for mine, theirs in zip(gradients(ours, h, w, b), gradients(want, h, w, b)):
        torch.testing.assert_close(mine, theirs)


def test_head_loss_in_float32_is_exact_to_rounding(chunk: int) -> None:
    h, w, b, y = case(torch.float32)
    exact = plain(*(x.double() for x in (h, w)), y, b.double(), SMOOTHINGS[1])
    ours = head_loss(h, w, y, bias=b, smoothing=SMOOTHINGS[1])[0]
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), exact, rtol=1e-6, atol=1e-6)
    for mine, theirs in zip(gradients(ours, h, w, b), gradients(exact, h, w, b)):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("autocast", [True, False])
def test_head_loss_in_bfloat16_is_no_further_from_the_truth_than_the_plain_loss(
    chunk: int, autocast: bool
) -> None:
    h, w, _, y = case(torch.float32 if autocast else torch.bfloat16)
    exact = plain(h.double(), w.double(), y, None, None)
    truth = gradients(exact, h, w)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ours, theirs = head_loss(h, w, y)[0], plain(h, w, y, None, None)
    assert ours.dtype == torch.float32
    # 2^-8 is one rounding of a logit of size one; a sum over rows rounds like its largest term
    assert abs(ours.item() - exact.item()) < 2**-8 * N
    for mine, peer, true in zip(gradients(ours, h, w), gradients(theirs, h, w), truth):
        assert mine.dtype == true.dtype
        wrong, limit = ((x - true).float().norm() for x in (mine, peer))
        assert wrong < 1.5 * limit + 2**-8 * true.float().norm()


def test_head_loss_of_a_confident_row_keeps_its_gradient_in_bfloat16() -> None:
    """p - 1 of a word that is nearly sure: rounded to bf16 before the subtraction it would be 0."""
    w = torch.eye(4, dtype=torch.bfloat16).requires_grad_()
    h = torch.tensor([[7.0, 0.0, 0.0, 0.0]], dtype=torch.bfloat16, requires_grad=True)
    head_loss(h, w, torch.tensor([0]))[0].backward()
    p = h.detach().double().softmax(-1)
    assert h.grad is not None
    torch.testing.assert_close(h.grad[0, 0].double(), p[0, 0] - 1, rtol=2**-7, atol=0)


# --- what it costs ------------------------------------------------------------------------------------------------


class Spy(TorchDispatchMode):
    """The largest tensor that was made, and how many products were."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.products = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.largest = max(self.largest, out.numel() if isinstance(out, Tensor) else 0)
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
        return out


def spied(run: Callable[[], Any]) -> Spy:
    with Spy() as spy:
        run()
    return spy


def test_head_loss_never_holds_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(losses.CHUNK, "cpu", 4 * V)
    h, w, _, y = case()
    spy = spied(lambda: head_loss(h, w, y)[0].backward())
    assert spy.largest <= max(4 * V, w.numel(), h.numel())
    assert spied(lambda: plain(h, w, y, None, None)).largest >= N * V  # the spy does see


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_head_loss_makes_as_many_rows_at_a_time_as_there_is_room_for(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at least; and where no alignment is asked for, the weight is not copied."""
    h, w, _, y = case()
    h, y = h[:20], y[:20].clamp(min=0)
    for room in (rows * V, (rows - 1) * V + 1):
        monkeypatch.setitem(losses.CHUNK, "cpu", room)
        with torch.no_grad():
            spy = spied(lambda: head_loss(h, w, y))
        assert spy.products == -(-20 // rows)
        assert spy.largest == w.numel()


def test_head_loss_makes_every_chunk_in_the_same_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch warns where it has to make another."""
    monkeypatch.setitem(losses.CHUNK, "cpu", 4 * V)
    h, w, b, y = case()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        head_loss(h, w, y, bias=b)[0].backward()


@pytest.mark.parametrize("counted", [N, 12])
def test_head_loss_on_a_cpu_makes_no_logits_of_what_is_not_counted(counted: int) -> None:
    h, w, _, y = case()
    y = y.clamp(min=0)
    y[counted:] = IGNORE
    with torch.no_grad():
        spy = spied(lambda: head_loss(h, w, y))
    assert spy.largest == counted * V


def test_head_loss_multiplies_only_for_gradients_that_are_wanted() -> None:
    h, w, _, y = case()

    def products(hidden: Tensor, weight: Tensor) -> int:
        return spied(lambda: head_loss(hidden, weight, y)).products

    assert products(h, w) == 3
    assert products(h, w.detach()) == products(h.detach(), w) == 2
    assert products(h.detach(), w.detach()) == 1
    with torch.no_grad():
        assert products(h, w) == 1 and not head_loss(h, w, y)[0].requires_grad


def test_head_loss_without_a_label_is_zero() -> None:
    h, w, b, _ = case()
    loss, count = head_loss(h, w, torch.full((N,), IGNORE), bias=b)
    assert loss == 0 and count == 0
    assert all((g == 0).all() for g in gradients(loss, h, w, b))


def test_head_loss_goes_backward_once() -> None:
    h, w, _, y = case()
    loss = head_loss(h, w, y)[0]
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        loss.backward()


def test_head_loss_works_inside_recomputed_and_compiled_code() -> None:
    h, w, _, y = case()
    want = gradients(head_loss(h, w, y)[0], h, w)

    def loss(h: Tensor, w: Tensor) -> Tensor:
        return head_loss(h * 1.0, w, y)[0]

    again = gradients(checkpoint(loss, h, w, use_reentrant=False), h, w)
    compiled = gradients(torch.compile(loss, backend="aot_eager")(h, w), h, w)
    for a, b, c in zip(again, compiled, want):
        torch.testing.assert_close(a, c)
        torch.testing.assert_close(b, c)


# --- on a GPU -----------------------------------------------------------------------------------------------------

gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device: there is none here"
)


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("smoothing", SMOOTHINGS, ids=str)
@pytest.mark.parametrize("vocab", [5, 2048, 5003])
def test_gpu_turn_matches_reference(
    vocab: int, smoothing: Smoothing | None, dtype: torch.dtype
) -> None:
    s = smoothing or Smoothing(0.0)
    logits = (3 * torch.randn(64, vocab + 11, device="cuda")).to(dtype)[:, :vocab]
    labels = torch.randint(vocab, (64,), device="cuda")
    labels[::5] = IGNORE
    rest = labels, s.counted(labels), s.top(vocab), s.share(vocab), s.padding
    exact = logits.double()
    want = gpu_loss.reference(exact, *rest)
    torch.testing.assert_close(gpu_loss.turn(logits, *rest, train=False).double(), want)
    torch.testing.assert_close(gpu_loss.turn(logits, *rest).double(), want)
    tight = 1e-5 if dtype == torch.float32 else 2**-8  # a rounding of the result; p - q may cancel
    torch.testing.assert_close(logits.double(), exact, rtol=tight, atol=tight / 10)


@gpu
def test_gpu_head_loss_is_the_loss_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(losses.CHUNK, "cuda", 4 * V)
    h, w, b, y = case(torch.float32)
    want = head_loss(h, w, y, bias=b, smoothing=SMOOTHINGS[3])
    there = [x.detach().cuda().requires_grad_() for x in (h, w, b)]
    ours = head_loss(there[0], there[1], y.cuda(), bias=there[2], smoothing=SMOOTHINGS[3])
    torch.testing.assert_close(ours[0].cpu(), want[0])
    assert ours[1].cpu() == want[1]
    for mine, theirs in zip(gradients(ours[0], *there), gradients(want[0], h, w, b)):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-4, atol=1e-5)


@gpu
def test_gpu_head_loss_of_128k_words_and_16k_tokens_needs_less_than_a_gigabyte() -> None:
    """Beside hidden states, the weight and their gradients."""
    h, w = (torch.randn(n, 768, device="cuda", requires_grad=True) for n in (16384, 131072))
    y = torch.randint(131072, (16384,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16):
        loss = head_loss(h, w, y)[0]
    loss.backward()
    kept = 4 * (h.numel() + w.numel())
    assert torch.cuda.max_memory_allocated() - before - kept < 1e9


# --- of models ----------------------------------------------------------------------------------------------------


def tower(**more: Any) -> Tower:
    return Tower(M, 1, GQA(2), MLP(12), **more)


def transformer(lm: Any) -> Transformer:
    return Transformer(TransformerConfig(Tokens(V, Sinusoidal(16)), tower(), lm))


def pair(lm: LM) -> EncoderDecoder:
    tokens = Tokens(V, Sinusoidal(16))
    both = tower(causal=False), tower(cross=GQA(2))
    return EncoderDecoder(EncoderDecoderConfig(tokens, both[0], tokens, both[1], lm))


MODELS: dict[str, Callable[[], Any]] = {
    "tied": lambda: transformer(LM()),
    "untied": lambda: transformer(LM(tied=False, bias=True)),
    "scaled": lambda: transformer(LM(scaled=True)),
    "mlm": lambda: transformer(MLM()),
    "mlm_untied": lambda: transformer(MLM(tied=False)),
    "pair": lambda: pair(LM(bias=True)),
    "recurrent": lambda: Recurrent(RecurrentConfig(V, M)),
}


@pytest.mark.parametrize("name", MODELS)
def test_vocabulary_loss_is_the_loss_of_the_models_logits(name: str) -> None:
    model = MODELS[name]().double()
    ids, labels = torch.randint(V, (2, 2, 7))
    more = {"source": ids.flip(1)} if name == "pair" else {}
    grads = []
    for loss in (
        lambda: vocabulary_loss(model, model.hidden(ids, **more), labels)[0],
        lambda: masked_lm_loss(model(ids, **more), labels)[0],
    ):
        model.zero_grad()
        loss().backward()
        grads.append({n: p.grad for n, p in model.named_parameters()})
    for key, mine in grads[0].items():
        torch.testing.assert_close(mine, grads[1][key], rtol=1e-9, atol=1e-12)


def test_vocabulary_loss_needs_a_vocabulary() -> None:
    model = transformer(Classify(3))
    with pytest.raises(UsageError, match="LM or MLM head"):
        vocabulary_loss(model, torch.randn(1, 2, M), torch.zeros(1, 2).long())
