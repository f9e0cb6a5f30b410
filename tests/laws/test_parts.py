"""Feed-forward and experts work position by position; experts that are all used are a weighted sum."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from regard.layers import ACTIVATIONS, MLP
from regard.moe import MixtureOfExperts, MoE
from tests.laws.mechanisms import DIM, TIGHT, stir

FEEDS = {f"mlp_{name}": MLP(32, name) for name in ACTIVATIONS} | {
    "gated": MLP(32, "silu", gated=True, bias=False),
    "moe": MoE(6, 2, 16),
    "moe_shared": MoE(6, 2, 16, shared=2, score="sigmoid", gain=2.5, corrected=True),
    "moe_biased": MoE(6, 2, 16, "quick_gelu", bias=True, limit=0.4),
    "moe_groups": MoE(8, 3, 16, groups=4, active_groups=2, normalized=False),
}


@pytest.mark.parametrize("name", FEEDS)
def test_feed_forward_is_position_wise(name: str) -> None:
    """Each token alone, and the tokens in any order, give the same as all at once."""
    ffn, x, order = stir(FEEDS[name].make(DIM)), torch.randn(2, 6, DIM).double(), torch.randperm(6)
    whole = ffn(x)
    alone = torch.cat([ffn(x[:, t : t + 1]) for t in range(6)], 1)
    torch.testing.assert_close(alone, whole, **TIGHT)
    torch.testing.assert_close(ffn(x[:, order]), whole[:, order], **TIGHT)


def expert(moe: MixtureOfExperts, e: int) -> nn.Module:
    """Expert e as the feed-forward that it is."""
    config = MLP(moe.config.ffn_dim, moe.config.activation, gated=True, bias=False)
    ffn = config.make(DIM).double()
    weights = {"gate": moe.gate[e], "up": moe.up[e], "down": moe.down[e]}
    ffn.load_state_dict({f"{name}.weight": w.detach() for name, w in weights.items()})
    return ffn


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_moe_with_one_expert_is_a_gated_mlp(score: str) -> None:
    moe, x = stir(MoE(1, 1, 16, score=score).make(DIM)), torch.randn(2, 6, DIM).double()
    torch.testing.assert_close(moe(x), expert(moe, 0)(x), **TIGHT)


def routing(moe: MixtureOfExperts, x: Tensor) -> Tensor:
    return x @ moe.router.weight.T


def test_moe_with_all_experts_active_is_the_softmax_weighted_sum() -> None:
    moe, x = stir(MoE(4, 4, 16).make(DIM)), torch.randn(2, 6, DIM).double()
    gate = routing(moe, x).softmax(-1)
    want = sum(gate[..., e, None] * expert(moe, e)(x) for e in range(4))
    torch.testing.assert_close(moe(x), want, rtol=1e-5, atol=1e-5)  # routed in float32


def test_moe_equals_its_definition_token_by_token() -> None:
    """The two best of five, weights normalised over them, times the gain, plus the shared expert."""
    config = MoE(5, 2, 16, shared=1, gain=1.7)
    moe, x = stir(config.make(DIM)), torch.randn(7, DIM).double()
    for row in x:
        gate = routing(moe, row).softmax(-1)
        best = gate.argsort(descending=True)[:2].tolist()
        total = sum(gate[e] for e in best)
        want = moe.shared(row) + sum(1.7 * gate[e] / total * expert(moe, e)(row) for e in best)
        torch.testing.assert_close(moe(row[None, None])[0, 0], want, rtol=1e-5, atol=1e-5)


def test_moe_with_equal_experts_is_that_expert() -> None:
    """Normalised weights sum to 1: which experts are chosen cannot matter then."""
    moe, x = stir(replace(FEEDS["moe"], experts=6).make(DIM)), torch.randn(2, 5, DIM).double()
    with torch.no_grad():
        for stacked in (moe.gate, moe.up, moe.down):
            stacked.copy_(stacked[:1].expand_as(stacked))
    torch.testing.assert_close(moe(x), expert(moe, 0)(x), rtol=1e-6, atol=1e-6)
