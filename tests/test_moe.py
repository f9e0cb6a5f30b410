"""The router: who is chosen, with which weight. (What experts compute: tests/laws/test_parts.py.)"""

import torch
from torch import Tensor

from regard.moe import MixtureOfExperts, MoE


def router(logits: list[float], correction: list[float] | None = None, **more: object) -> tuple:
    """Chosen experts and weights for one token whose router logits are given."""
    moe: MixtureOfExperts = MoE(len(logits), ffn_dim=4, **more).make(1)  # type: ignore[arg-type]
    with torch.no_grad():
        moe.router.weight.copy_(torch.tensor(logits)[:, None])
        if correction is not None:
            moe.correction.copy_(torch.tensor(correction))
        chosen, weight = moe.route(torch.ones(1, 1))
    order = chosen[0].argsort()
    return chosen[0][order].tolist(), weight[0][order]


def close(a: Tensor, b: list[float]) -> None:
    torch.testing.assert_close(a, torch.tensor(b))


def test_router_takes_the_best_and_normalises_over_them() -> None:
    chosen, weight = router([0.0, 2.0, 1.0, -1.0], active=2)
    assert chosen == [1, 2]
    close(weight, torch.tensor([2.0, 1.0]).softmax(-1).tolist())


def test_router_without_normalising_keeps_the_softmax_over_all() -> None:
    chosen, weight = router([0.0, 2.0, 1.0, -1.0], active=2, normalized=False)
    close(weight, torch.tensor([0.0, 2.0, 1.0, -1.0]).softmax(-1)[[1, 2]].tolist())


def test_router_gain_multiplies_the_weights() -> None:
    _, weight = router([0.0, 2.0, 1.0, -1.0], active=2, gain=2.5)
    close(weight.sum(), 2.5)  # type: ignore[arg-type]


def test_router_with_sigmoid_scores_each_expert_alone() -> None:
    _, weight = router([0.0, 2.0, 1.0, -1.0], active=2, score="sigmoid", normalized=False)
    close(weight, torch.tensor([2.0, 1.0]).sigmoid().tolist())


def test_router_correction_changes_the_choice_and_not_the_weight() -> None:
    chosen, weight = router(
        [0.0, 2.0, 1.0, -1.0],
        [0.0, 0.0, -1.0, 1.0],
        active=2,
        score="sigmoid",
        corrected=True,
        normalized=False,
    )
    assert chosen == [1, 3]
    close(weight, torch.tensor([2.0, -1.0]).sigmoid().tolist())


def test_router_looks_into_the_best_groups_only() -> None:
    """Groups (3, -3), (2, 1), (0, 0) by their best expert: the first and second; 1 beats -3 within them."""
    chosen, _ = router([3.0, -3.0, 2.0, 1.0, 0.0, 0.0], active=3, groups=3, active_groups=2)
    assert chosen == [0, 2, 3]


def test_router_with_sigmoid_ranks_groups_by_their_two_best() -> None:
    """sigmoid(3) + sigmoid(-3) = 1 is less than sigmoid(2) + sigmoid(1) and than 2 sigmoid(0.5)."""
    chosen, _ = router(
        [3.0, -3.0, 2.0, 1.0, 0.5, 0.5], active=3, groups=3, active_groups=2, score="sigmoid"
    )
    assert 0 not in chosen and 1 not in chosen


def test_router_works_in_float32_whatever_the_model() -> None:
    moe = MoE(4, 2, 8).make(6).bfloat16()
    _, weight = moe.route(torch.randn(3, 6).bfloat16())
    assert weight.dtype == torch.float32
    assert moe(torch.randn(1, 3, 6).bfloat16()).dtype == torch.bfloat16


def test_moe_gives_gradients_to_chosen_experts_only() -> None:
    moe, x = MoE(4, 1, 8).make(6), torch.randn(1, 1, 6)
    moe(x).sum().backward()
    chosen, _ = moe.route(x[0])
    touched = moe.down.grad.abs().sum((1, 2)) > 0
    assert touched.nonzero().flatten().tolist() == chosen[0].tolist()


def test_moe_trains_its_router_through_the_weights() -> None:
    moe, x = MoE(4, 2, 8).make(6), torch.randn(2, 3, 6)
    moe(x).square().sum().backward()
    assert moe.router.weight.grad.abs().sum() > 0
