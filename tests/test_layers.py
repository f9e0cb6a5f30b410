"""Norms, activations, the feed-forward and the heads."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import UsageError
from regard.layers import (
    ACTIVATIONS,
    LM,
    MLM,
    MLP,
    Answer,
    Classify,
    LabelHead,
    LMHead,
    Norm,
    RMSNorm,
    Tag,
    activation,
    make_head,
    plus,
    times,
)


def test_layer_norm_uses_the_biased_variance() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0, 6.0]])
    want = (x - 3) / math.sqrt(14 / 4 + 1e-5)
    torch.testing.assert_close(Norm().make(4)(x), want)


def test_rms_norm_divides_by_the_root_mean_square() -> None:
    x = torch.tensor([[1.0, -2.0, 3.0, 4.0]])
    norm = Norm(rms=True, eps=0.0).make(4)
    assert isinstance(norm, RMSNorm)
    torch.testing.assert_close(norm(x), x / math.sqrt(30 / 4))


def test_rms_norm_of_half_precision_is_computed_in_float32() -> None:
    """Squares of 300 overflow float16."""
    x = torch.full((1, 8), 300.0).half()
    assert torch.equal(Norm(rms=True).make(8).half()(x), torch.ones(1, 8).half())


def test_rms_norm_of_one_plus_w_multiplies_before_it_rounds() -> None:
    """1 + 2^-10 is no bfloat16, and neither is what it is multiplied by."""
    norm, x = Norm(rms=True, plus_one=True).make(8), torch.randn(5, 8)
    assert torch.equal(norm(x), Norm(rms=True).make(8)(x))
    with torch.no_grad():
        norm.weight.fill_(2.0**-10)
    half = x.bfloat16()
    want = half.float() * half.float().square().mean(-1, keepdim=True).add(1e-5).rsqrt()
    got = norm.bfloat16()(half)
    assert torch.equal(got, (want * (1 + 2.0**-10)).bfloat16())


def test_norm_without_a_bias() -> None:
    norm = Norm(biased=False).make(4)
    assert [n for n, _ in norm.named_parameters()] == ["weight"]
    with pytest.raises(UsageError, match="norm"):
        Norm(rms=True, biased=False)


@pytest.mark.parametrize("biased", [True, False])
def test_layer_norm_of_one_plus_w_is_one_of_a_greater_weight(biased: bool) -> None:
    norm, plain, x = (
        Norm(plus_one=True, biased=biased).make(6),
        Norm(biased=biased).make(6),
        torch.randn(5, 6),
    )
    with torch.no_grad():
        for part in (norm, plain):
            part.weight.copy_(torch.arange(6.0))
            for bias in [part.bias] if biased else []:
                bias.fill_(0.5)
        plain.weight += 1
    assert torch.equal(norm(x), plain(x))


def test_norm_does_not_see_other_tokens() -> None:
    for rms in (False, True):
        norm, x = Norm(rms=rms).make(6), torch.randn(2, 3, 6)
        torch.testing.assert_close(norm(x)[:, 1], norm(x[:, 1]))


def test_activations_are_their_formulas() -> None:
    x = torch.linspace(-3, 3, 13).double()
    want = {
        "relu": x.clamp(min=0),
        "gelu": x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
        "gelu_tanh": 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        "silu": x / (1 + torch.exp(-x)),
        "tanh": (torch.exp(2 * x) - 1) / (torch.exp(2 * x) + 1),
        "quick_gelu": x / (1 + torch.exp(-1.702 * x)),
        "relu2": x.clamp(min=0) ** 2,
    }
    assert want.keys() == ACTIVATIONS.keys()
    for name, y in want.items():
        torch.testing.assert_close(ACTIVATIONS[name](x), y)


def test_unknown_activation_names_the_nearest() -> None:
    with pytest.raises(
        UsageError, match=r"activation 'gelu_tan' is unknown; did you mean 'gelu_tanh'\?"
    ):
        activation("gelu_tan")


def test_mlp_is_down_of_activation_of_up() -> None:
    ffn, x = MLP(8, "relu").make(4), torch.randn(2, 3, 4)
    w, b, v, c = ffn.up.weight, ffn.up.bias, ffn.down.weight, ffn.down.bias
    torch.testing.assert_close(ffn(x), (x @ w.T + b).clamp(min=0) @ v.T + c)


def test_gated_mlp_multiplies_gate_and_up() -> None:
    ffn, x = MLP(8, "silu", gated=True, bias=False).make(4), torch.randn(2, 3, 4)
    h = F.silu(x @ ffn.gate.weight.T) * (x @ ffn.up.weight.T)
    torch.testing.assert_close(ffn(x), h @ ffn.down.weight.T)
    assert not any(name.endswith("bias") for name, _ in ffn.named_parameters())


def test_mlp_dropout_acts_in_training_only() -> None:
    ffn, x = MLP(64, dropout=0.5).make(4), torch.randn(2, 3, 4)
    assert not torch.equal(ffn(x), ffn(x))
    ffn.eval()
    assert torch.equal(ffn(x), ffn(x))


@pytest.mark.parametrize("join, formula", [(plus, torch.add), (times, torch.mul)])
def test_sums_and_products_are_made_in_place_where_nobody_needs_what_was_there(
    join: Callable[..., Tensor], formula: Callable[..., Tensor]
) -> None:
    """Without gradients, and where the result fits: never into the stream, nor into a narrower type."""
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    for grad, dtype in ((False, torch.float32), (False, torch.bfloat16), (True, torch.float32)):
        stream, part = x.clone(), y.to(dtype, copy=True)
        with torch.set_grad_enabled(grad):
            out = join(stream, part)
        assert out.dtype == torch.float32 and torch.equal(out, formula(x, y.to(dtype)))
        assert torch.equal(stream, x)
        assert (out is part) == (not grad and dtype == torch.float32)


def test_tied_head_holds_no_weight_of_its_own() -> None:
    head, h, table = LMHead(LM(), 4, 7), torch.randn(2, 3, 4), torch.randn(7, 4)
    assert not list(head.parameters())
    torch.testing.assert_close(head(h, table), h @ table.T)


def test_untied_head_uses_its_weight_and_bias() -> None:
    head, h = LMHead(LM(tied=False, bias=True), 4, 7), torch.randn(2, 3, 4)
    torch.nn.init.normal_(head.bias)
    torch.testing.assert_close(head(h, torch.randn(7, 4)), h @ head.weight.T + head.bias)


def test_scaled_head_multiplies_hidden_by_one_over_root_dim() -> None:
    h, table = torch.randn(2, 3, 4), torch.randn(7, 4)
    torch.testing.assert_close(LMHead(LM(scaled=True), 4, 7)(h, table), h @ table.T / 2)


def test_masked_lm_head_is_dense_activation_norm_vocabulary() -> None:
    head, h, table = LMHead(MLM(), 4, 7), torch.randn(2, 3, 4), torch.randn(7, 4)
    want = F.layer_norm(F.gelu(head.dense(h)), (4,), eps=1e-12) @ table.T + head.bias
    torch.testing.assert_close(head(h, table), want)


def test_masked_lm_head_of_a_narrow_embedding() -> None:
    head, h, words = LMHead(MLM(), 4, 7, width=3), torch.randn(2, 5, 4), torch.randn(7, 3)
    want = head.norm(F.gelu(head.dense(h))) @ words.T + head.bias
    torch.testing.assert_close(head(h, words), want)
    with pytest.raises(UsageError, match=r"embedding\.width=3 is not dim=4"):
        make_head(LM(), 4, 7, 3)


def test_classify_reads_the_first_token() -> None:
    head, h = LabelHead(Classify(3), 4), torch.randn(2, 5, 4)
    torch.testing.assert_close(head(h), head.out(torch.tanh(head.dense(h[:, 0]))))
    plain = LabelHead(Classify(3, dense=None), 4)
    torch.testing.assert_close(plain(h), plain.out(h[:, 0]))


@pytest.mark.parametrize(
    "config, shape",
    [
        (LM(), (2, 5, 7)),
        (LM(tied=False), (2, 5, 7)),
        (MLM(), (2, 5, 7)),
        (Classify(3), (2, 3)),
        (Tag(3), (2, 5, 3)),
        (Answer(), (2, 5, 2)),
    ],
)
def test_head_gives_its_shape(config: LM | MLM | Classify | Tag | Answer, shape: tuple) -> None:
    assert make_head(config, 4, 7)(torch.randn(2, 5, 4), torch.randn(7, 4)).shape == shape


def test_classify_reads_the_last_token_where_it_says_so() -> None:
    head, h = LabelHead(Classify(3, None, "last", bias=False), 4), torch.randn(2, 5, 4)
    assert head.out.bias is None
    torch.testing.assert_close(head(h), h[:, -1] @ head.out.weight.T)
    with pytest.raises(
        UsageError,
        match="token = 'lst' is unknown; did you mean 'last'. known: both, each, first, last, mean",
    ):
        Classify(3, token="lst")
