"""The router: who is chosen, with which weight. (What experts compute: tests/laws/test_parts.py.)"""

import copy

import pytest
import torch
from torch import Tensor

from regard.attention import GQA
from regard.block import Tower
from regard.checkpoint.hf import cast
from regard.errors import UsageError
from regard.fast.train import checkpointed
from regard.layers import LM
from regard.models import Tokens, Transformer, TransformerConfig
from regard.moe import MixtureOfExperts, MoE, balance_loss, update_bias


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


@pytest.mark.parametrize("active, groups, active_groups", [(3, 3, 1), (5, 3, 2), (2, 6, 1)])
def test_more_experts_than_the_chosen_groups_hold_are_refused(
    active: int, groups: int, active_groups: int
) -> None:
    """The rest would be experts of groups that were ruled out, at a weight of nothing."""
    with pytest.raises(
        UsageError, match=rf"ffn\.active={active} .* hold {6 // groups * active_groups}"
    ):
        MoE(6, active, 8, groups=groups, active_groups=active_groups)


def test_router_with_sigmoid_ranks_groups_by_their_two_best() -> None:
    """sigmoid(3) + sigmoid(-3) = 1 is less than sigmoid(2) + sigmoid(1) and than 2 sigmoid(0.5)."""
    chosen, _ = router(
        [3.0, -3.0, 2.0, 1.0, 0.5, 0.5], active=3, groups=3, active_groups=2, score="sigmoid"
    )
    assert 0 not in chosen and 1 not in chosen


def test_router_with_sigmoid_counts_no_more_than_two_of_a_group() -> None:
    """2 sigmoid(1) beats sigmoid(0.9) + sigmoid(0.8), and would not if the third of each counted."""
    chosen, _ = router([1.0, 1.0, -9.0, 0.9, 0.8, 0.8], active=2, groups=2, score="sigmoid")
    assert chosen == [0, 1]


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


def test_router_works_in_float64_where_the_model_does() -> None:
    moe = MoE(4, 2, 8).make(6).double()
    assert moe.route(torch.randn(3, 6).double())[1].dtype == torch.float64


def test_router_stays_in_float32_under_autocast() -> None:
    moe, x = MoE(4, 2, 8).make(6), torch.randn(3, 6)
    with torch.autocast("cpu", torch.bfloat16):
        logits = moe.logits(x)
    assert torch.equal(logits, moe.logits(x))


# --- balance ------------------------------------------------------------------------------------------------------


def mixture(**more: object) -> Transformer:
    torch.manual_seed(3)
    tower = Tower(12, 2, GQA(2), MoE(6, 2, 8, **more))  # type: ignore[arg-type]
    return TransformerConfig(Tokens(20), tower, LM()).make().train()


def routers(model: Transformer) -> list[MixtureOfExperts]:
    return [m for m in model.modules() if isinstance(m, MixtureOfExperts)]


IDS = torch.randint(20, (2, 7), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("padded", [False, True])
def test_balance_loss_is_that_of_transformers(padded: bool) -> None:
    reading = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    model, seen = mixture(), []
    for layer in routers(model):
        plain = layer.logits
        layer.logits = lambda x, plain=plain: seen.append(plain(x)) or seen[-1]  # type: ignore
    counted = torch.arange(7) < torch.tensor([7, 4])[:, None] if padded else None
    model(IDS)
    ours = balance_loss(model, counted)
    theirs = reading.load_balancing_loss_func(
        tuple(seen), 6, 2, None if counted is None else counted.long()
    )
    torch.testing.assert_close(ours, theirs)
    weights = [layer.router.weight for layer in routers(model)]
    for a, b in zip(
        torch.autograd.grad(ours, weights, retain_graph=True),
        torch.autograd.grad(theirs, weights),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_balance_loss_is_least_where_every_expert_gets_as_much() -> None:
    moe = MoE(3, 1, 4).make(3).train()
    with torch.no_grad():
        moe.router.weight.copy_(torch.eye(3))
    moe(torch.eye(3)[None])
    torch.testing.assert_close(balance_loss(moe), torch.tensor(1.0))
    moe(torch.eye(3)[[0, 0, 1]][None])
    assert balance_loss(moe) > 1.01


def test_balance_loss_of_a_sigmoid_router_takes_the_share_of_each_score() -> None:
    """E sum_e f_e P_e: of two tokens, one on each of the first two experts, scores 3 : 1 : 0 and 1 : 2 : 1."""
    moe = MoE(3, 1, 4, score="sigmoid").make(2).train()
    scores = torch.tensor([[0.75, 0.25, 0.0], [0.2, 0.4, 0.2]])
    with torch.no_grad():
        moe.router.weight.copy_(torch.special.logit(scores, eps=1e-9).T)
    moe(torch.eye(2)[None])
    want = 3 * (0.5 * (0.75 + 0.25) / 2 + 0.5 * (0.25 + 0.5) / 2)
    torch.testing.assert_close(balance_loss(moe), torch.tensor(want))


@pytest.mark.parametrize("count, loss", [(0, 0.0), (1, 3.0)])
def test_balance_loss_of_hardly_a_token(count: int, loss: float) -> None:
    """One token weighs on one expert of three alone; none, as in a batch of padding, on none."""
    moe = MoE(3, 1, 4).make(3).train()
    with torch.no_grad():
        moe.router.weight.copy_(60 * torch.eye(3))
    moe(torch.eye(3)[None, [1, 2]])
    counted = torch.arange(2)[None] < count
    torch.testing.assert_close(balance_loss(moe, counted), torch.tensor(loss))


def test_balance_is_read_once_and_only_of_training() -> None:
    model = mixture()
    with torch.no_grad():
        model(IDS)
    assert balance_loss(model) == 0
    model.eval()(IDS)
    assert balance_loss(model) == 0
    model.train()(IDS)
    copy.deepcopy(model)
    assert balance_loss(model) > 0
    assert balance_loss(model) == 0


def test_balance_under_activation_checkpointing_is_exact() -> None:
    grads, loads = [], []
    for model in (mixture(), checkpointed(mixture())):
        loss = model(IDS).square().mean() + balance_loss(model)
        loss.backward()
        assert all(layer.routed is None for layer in routers(model))
        grads.append([p.grad for p in model.parameters()])
        loads.append([layer.load for layer in routers(model)])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-7)
    assert all(torch.equal(a, b) for a, b in zip(*loads, strict=True))


def test_bias_goes_against_the_load_of_all_micro_batches() -> None:
    whole, split = (mixture(score="sigmoid", corrected=True) for _ in range(2))
    whole(IDS)
    balance_loss(whole)
    for row in IDS:
        split(row[None])
        balance_loss(split)
    for layer, other in zip(routers(whole), routers(split), strict=True):
        assert layer.load is not None and torch.equal(layer.load, other.load)
        assert layer.load.sum() == IDS.numel() * 2
    expected = [(layer.load.mean() - layer.load).sign() * 0.01 for layer in routers(whole)]
    update_bias(whole, 0.01)
    for layer, bias in zip(routers(whole), expected, strict=True):
        assert bias.abs().sum() > 0 and torch.equal(layer.correction, bias)
        assert layer.load is None
    update_bias(whole, 0.01)
    assert torch.equal(routers(whole)[0].correction, expected[0])


# --- SparseMixer --------------------------------------------------------------------------------------------------


def test_mixer_weighs_each_choice_among_those_that_are_near_it() -> None:
    """By hand: 2.0 meets 1.9 alone, as 1 is more than 2 * 0.1 * 2 below it; then 1.9 is alone."""
    chosen, weight = router([1.0, 2.0, 1.9, -3.0], active=2, mixer=0.1)
    assert chosen == [1, 2]
    close(weight, [torch.tensor([2.0, 1.9]).softmax(-1)[0].item(), 1.0])


def test_mixer_refuses_groups_and_a_bias_on_the_choice() -> None:
    for more in (dict(groups=2, active_groups=1), dict(corrected=True)):
        with pytest.raises(UsageError, match=r"ffn.mixer scores by softmax"):
            MoE(4, 2, 4, mixer=0.1, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("luck", [0.5, 0.9])
def test_mixer_in_training_is_that_of_transformers(
    luck: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is chosen, with which weights and which gradient, where both draw the same numbers."""
    modeling = pytest.importorskip("transformers.models.phimoe.modeling_phimoe")
    moe, draw = MoE(6, 2, 4, mixer=0.3).make(8).train(), torch.Generator()

    def exponential(x: Tensor) -> Tensor:
        return x.copy_(-torch.rand(x.shape, generator=draw).clamp(min=1e-6).log())

    monkeypatch.setattr(torch.Tensor, "exponential_", exponential)
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda x, *_: x)
    monkeypatch.setattr(torch, "rand_like", lambda x: torch.full_like(x, luck))
    x, found = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)), []
    weigh = torch.randn(64, 2, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        moe.router.weight.copy_(torch.randn(6, 8, generator=torch.Generator().manual_seed(2)))
    for theirs in (False, True):
        draw.manual_seed(3)
        moe.zero_grad()
        if theirs:
            weight, chosen = modeling.sparsemixer(moe.router(x), 0.3, True)
        else:
            chosen, weight = moe.route(x)
        (weight * weigh).sum().backward()
        found.append((chosen, weight.detach(), moe.router.weight.grad.clone()))
    assert torch.equal(found[0][0], found[1][0])
    # Theirs counts 0.3333 of a weight, ours a third.
    torch.testing.assert_close(found[0][1:], found[1][1:], rtol=2e-4, atol=1e-6)
    moe.eval()
    best = moe.route(x)[0]
    assert not torch.equal(best, found[0][0])


def test_groups_are_ranked_by_so_many_of_their_best() -> None:
    """Of two groups the first has the best expert, the second the two that are best together."""
    logits = [3.0, 0.0, 2.5, 2.4]
    for best, group in ((1, [0, 1]), (2, [2, 3])):
        chosen, _ = router(logits, active=2, groups=2, active_groups=1, group_best=best)
        assert chosen == group


def test_weight_on_the_input_is_what_an_expert_reads() -> None:
    moe = MoE(3, 1, 5, "relu2", score="sigmoid", normalized=False, weigh_input=True).make(4)
    x = torch.randn(2, 7, 4)
    chosen, weight = moe.route(x.flatten(0, 1))
    rows = [moe.expert(x.flatten(0, 1)[i] * weight[i], int(chosen[i, 0])) for i in range(14)]
    torch.testing.assert_close(moe(x).flatten(0, 1), torch.stack(rows))


def test_wide_router_stays_float32_in_half_precision() -> None:
    for wide, kind in ((True, torch.float32), (False, torch.bfloat16)):
        tower = Tower(16, 1, GQA(2), MoE(4, 2, 8, wide_router=wide))
        model = cast(Transformer(TransformerConfig(Tokens(9), tower, LM())), torch.bfloat16)
        assert model.tower.blocks[0].ffn.router.weight.dtype == kind
        assert model(torch.tensor([[1, 2, 3]])).isfinite().all()
