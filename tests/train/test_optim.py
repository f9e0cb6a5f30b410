"""The step: groups, AdamW and Muon as one, their state, clipping, token-exact accumulation, averages."""

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import regard
from regard.attention import DSA, GQA
from regard.block import Tower
from regard.config import from_dict, to_dict
from regard.data.feed import IGNORE, Batch, Objective
from regard.errors import UsageError
from regard.layers import LM, MLP, Classify
from regard.models import Patches, Tokens, Transformer, TransformerConfig
from regard.moe import MoE
from regard.position import Learned, Rope
from regard.presets import PRESETS
from regard.training.index_losses import dense_index, sparse_index
from regard.training.objectives import causal, masked
from regard.training.optim import (
    OPTIMIZERS,
    Muon,
    Optim,
    Optimizer,
    accumulate,
    clip,
    decays,
    hidden,
    kinds,
    length,
    local,
    orthogonal,
)
from regard.training.parallel import Inside
from tests.tiny import tiny
from tests.train.test_head import spied

V, M = 17, 12


def decoder(tied: bool = True, ffn: Any = None, attention: Any = None) -> Transformer:
    tower = Tower(M, 2, attention or GQA(3, sinks=True), ffn or MLP(16))
    return Transformer(TransformerConfig(Tokens(V, Learned(16)), tower, LM(tied=tied)))


def batch(rows: int = 6, size: int = 9, vocab: int = V) -> Batch:
    ids = torch.randint(vocab, (rows, size))
    labels = ids.roll(-1, 1)
    labels[torch.rand(rows, size) < 0.4] = IGNORE  # rows count differently
    return Batch(ids, labels)


# --- groups -------------------------------------------------------------------------------------------------------


def test_decay_falls_on_matrices_and_a_head_that_is_tied() -> None:
    tied, untied = decoder(), decoder(tied=False)
    plain = {n for n, p in tied.named_parameters() if p.dim() == 2 and "embedding" not in n}
    assert decays(tied) == plain | {"embedding.weight"}
    assert decays(untied) == plain | {"head.weight"}
    kind = kinds(tied)
    assert kind["embedding.position.weight"] == kind["embedding.weight"] == "table"
    assert kind["tower.blocks.0.attention.sinks"] == "vector"


def test_decay_spares_class_tokens_and_positions_of_images() -> None:
    tower = Tower(M, 1, GQA(3), MLP(16), causal=False)
    kind = kinds(Transformer(TransformerConfig(Patches(8, 4, 1), tower, Classify(4))))
    assert kind["embedding.extra"] == kind["embedding.position"] == "table"
    assert kind["embedding.project.weight"] == kind["head.out.weight"] == "matrix"


FAMILIES = ["gpt2", "qwen3-0.6b", "mixtral-8x7b", "deepseek-v3.2", "bert-base", "vit-base"]
FAMILIES += ["vaswani-base", "t5-small", "bart-base", "captioner", "painter", "gru-lm", "bahdanau"]


@pytest.mark.parametrize("name", FAMILIES)
def test_kinds_of_the_families_agree_with_their_names(name: str) -> None:
    """Names tell what the code finds out by itself: tables are embeddings, positions, types and relative biases."""
    model = regard.build(name, layers=1, device="meta")
    words = ("embedding.", "source.", "target.", "canvas.", "relative.")
    for key, kind in kinds(model).items():
        p = dict(model.named_parameters())[key]
        table = any(word in key for word in words) and ".norm" not in key and ".project" not in key
        assert kind == ("vector" if p.dim() == 1 else "table" if table else "matrix"), key


# --- the optimiser ------------------------------------------------------------------------------------------------


def test_adamw_steps_are_those_of_torch_with_two_groups() -> None:
    ours, theirs = decoder().double(), decoder().double()
    theirs.load_state_dict(ours.state_dict())
    mine = Optimizer(ours, Optim(lr=0.01, decay=0.3))
    named, yes = dict(theirs.named_parameters()), decays(theirs)
    groups = [
        {"params": [p for n, p in named.items() if n in yes], "weight_decay": 0.3},
        {"params": [p for n, p in named.items() if n not in yes], "weight_decay": 0.0},
    ]
    peer = torch.optim.AdamW(groups, lr=0.005, betas=(0.9, 0.95), eps=1e-8)
    for seed in range(3):
        torch.manual_seed(seed)
        data = batch()
        for model, step in ((ours, lambda: mine.step(0.5)), (theirs, peer.step)):
            model.zero_grad()
            causal(model, data)[0].backward()
            step()
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p, named[name], rtol=1e-10, atol=1e-12)


def test_adamw_is_torchs_fused_one_where_there_is_one() -> None:
    """One kernel for all parameters."""
    for device, fused in (("cpu", True), ("meta", False)):
        (adamw,) = Optimizer(decoder().to(device), Optim()).parts
        assert adamw.defaults["fused"] == fused


def test_muon_takes_hidden_matrices_and_leaves_the_rest_to_adamw() -> None:
    """Stacks of experts are hidden matrices; the embedding and the untied head are not."""
    model = decoder(tied=False, ffn=MoE(4, 2, 8))
    state = _trained(model, "muon").state()
    muon = {key.rpartition(":")[0] for key in state if key.endswith("momentum_buffer")}
    inner = {n for n, p in model.named_parameters() if n.startswith("tower.") and p.dim() > 1}
    assert muon == {n for n in inner if "router" not in n} != inner and {
        model.get_parameter(n).dim() for n in muon
    } == {2, 3}
    assert {"head.weight:exp_avg", "embedding.weight:exp_avg"} <= state.keys()


@pytest.mark.parametrize("name", FAMILIES)
def test_muon_takes_what_is_between_embeddings_and_head(name: str) -> None:
    model = regard.build(name, layers=1, device="meta")
    outer = ("embedding.", "source.", "target.", "canvas.", "relative.", "head.", "router.")
    kind = kinds(model)
    inner = {n for n in kind if not any(w in n for w in outer) and kind[n] == "matrix"}
    assert hidden(model) == inner != set()


@pytest.mark.parametrize("name", PRESETS)
def test_muon_leaves_what_is_no_product_of_many_rows_to_adamw(name: str) -> None:
    """What chooses experts, gates of one row, taps of convolutions, biases of experts."""
    model = tiny(name)
    turned, named = hidden(model), dict(model.named_parameters())
    odd = {n for n in named if re.search(r"router|shared_gate|taps|_bias$", n)}
    assert not turned & odd and all(min(named[n].shape[-2:]) > 1 for n in turned)
    assert {n for n in odd if n.endswith("_bias")}.isdisjoint(decays(model))


def test_muon_leaves_a_matrix_of_one_row_or_column_to_adamw() -> None:
    """Whatever it is called: such a product has one direction, and nothing to even out."""
    shapes = {"one": (1, 8), "other": (8, 1), "each": (3, 1, 8), "many": (8, 8), "stack": (3, 8, 8)}
    shapes["expert"] = (1, 8, 8)
    model = nn.ParameterDict({name: torch.zeros(shape) for name, shape in shapes.items()})
    assert {n for n, kind in kinds(model).items() if kind == "matrix"} >= {"one", "other", "many"}
    assert hidden(model) == {"many", "stack", "expert"}


@pytest.mark.parametrize("size", [1e-3, 1.5e-7, 0.0])
def test_orthogonal_is_the_same_whatever_the_length(size: float) -> None:
    """Down to 1e-7, below which a gradient is as good as none."""
    x = torch.randn(5, 4)
    x = x / x.norm()
    torch.testing.assert_close(orthogonal(size * x), orthogonal(x) * (size > 0))


def test_orthogonal_multiplies_on_the_shorter_side() -> None:
    """A table of 64 columns makes no square of its rows."""
    for shape in ((64, 3), (3, 64), (2, 64, 3)):
        x = torch.randn(shape)
        assert spied(lambda x=x: orthogonal(x)).largest == x.numel()


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (3, 6, 10), (3, 10, 6), (12, 6, 10)])
def test_muon_steps_are_those_of_torch_for_each_matrix(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    ours = nn.Parameter(torch.randn(shape))
    each = [ours] if ours.dim() == 2 else list(ours)
    theirs = [nn.Parameter(x.detach().clone()) for x in each]
    settings = {"lr": 0.02, "momentum": 0.9}
    mine = Muon([{"params": [ours], "weight_decay": 0.3}], **settings)
    peer = torch.optim.Muon(theirs, weight_decay=0.3, adjust_lr_fn="match_rms_adamw", **settings)
    for _ in range(3):
        ours.grad = torch.randn(shape)
        for p, g in zip(theirs, [ours.grad] if ours.dim() == 2 else ours.grad, strict=True):
            p.grad = g.clone()
        mine.step()
        peer.step()
    want = torch.stack([p.detach() for p in theirs]).reshape(shape)
    torch.testing.assert_close(ours.detach(), want, rtol=0, atol=2e-3)


def _trained(model: nn.Module, name: str, steps: int = 3, first: int = 0) -> Optimizer:
    optimizer = Optimizer(model, Optim(name, lr=0.01))
    _go_on(model, optimizer, steps, first)
    return optimizer


def _go_on(model: nn.Module, optimizer: Optimizer, steps: int, first: int) -> None:
    for k in range(first, first + steps):
        torch.manual_seed(k)
        optimizer.zero()
        causal(model, batch())[0].backward()
        optimizer.step(1 / (k + 1))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_goes_on_to_the_bit_from_a_state_of_plain_tensors(name: str) -> None:
    whole, first = decoder(), decoder()
    first.load_state_dict(whole.state_dict())
    _trained(whole, name, 5)
    kept = _trained(first, name, 3).state()
    data = save({key: x.contiguous() for key, x in kept.items()})  # safetensors: no pickle
    second, optimizer = copy.deepcopy(first), None
    optimizer = Optimizer(second, Optim(name, lr=0.01))
    given = load(data)
    optimizer.load(given)
    _go_on(second, optimizer, 2, 3)
    # What was given is not written to.
    assert all(torch.equal(x, load(data)[key]) for key, x in given.items())
    for name_, p in whole.named_parameters():
        assert torch.equal(p, dict(second.named_parameters())[name_]), name_


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_lowers_the_loss(name: str) -> None:
    model, data = decoder(), batch(16)
    before = causal(model, data)[0].item()
    optimizer = Optimizer(model, Optim(name, lr=0.02))
    for _ in range(30):
        optimizer.zero()
        accumulate(Inside(model), causal, [data])
        clip(optimizer.named.values(), 1.0)
        optimizer.step()
    assert causal(model, data)[0].item() < 0.7 * before


def test_optimizer_leaves_parameters_without_a_gradient_alone() -> None:
    model = decoder(attention=DSA(GQA(3, rope=Rope()), 2, 4, topk=3))
    before = {n: p.clone() for n, p in model.named_parameters()}
    _trained(model, "adamw")
    for (
        name,
        p,
    ) in model.named_parameters():  # the causal loss does not reach the indexer: nor may decay
        assert torch.equal(p, before[name]) == ("indexer" in name), name


def test_optimizer_refuses_a_state_that_does_not_fit() -> None:
    adamw, muon = _trained(decoder(), "adamw").state(), _trained(decoder(), "muon").state()
    key = "tower.blocks.0.attention.wq.weight:exp_avg"
    wrong: list[tuple[str, dict[str, Tensor], str]] = [
        ("adamw", {"tower.blocks.7.norm1.weight:exp_avg": torch.zeros(M)}, "another model"),
        ("adamw", muon, "does not fit"),
        ("muon", adamw, "does not fit"),
        ("adamw", adamw | {key: torch.zeros(3)}, "does not fit"),
        ("adamw", {k: x for k, x in adamw.items() if k != key}, "incomplete"),
    ]
    for name, state, why in wrong:
        with pytest.raises(UsageError, match=why):
            Optimizer(decoder(), Optim(name)).load(state)


def test_state_of_another_model_names_the_nearest_parameter() -> None:
    key = "tower.blocks.0.attention.wq.wieght"
    state = {f"{key}:exp_avg": torch.zeros(3, M)}
    with pytest.raises(
        UsageError, match=f"{key}'; did you mean '{key.replace('wieght', 'weight')}'"
    ):
        Optimizer(decoder(), Optim()).load(state)


def test_state_with_a_mean_is_refused_where_none_is_kept_and_the_reverse() -> None:
    model = decoder()
    _go_on(model, with_mean := Optimizer(model, Optim(), ema=0.9), 1, 0)
    with pytest.raises(
        UsageError, match=r"weight:mean' of shape .*does not fit|does not fit: .*:mean"
    ):
        Optimizer(decoder(), Optim()).load(with_mean.state())
    with pytest.raises(UsageError, match="no mean of 'embedding.weight': .* without train.ema"):
        Optimizer(decoder(), Optim(), ema=0.9).load(_trained(decoder(), "adamw").state())


def test_optim_settings_are_checked_and_readable() -> None:
    config = Optim("muon", lr=0.02)
    assert from_dict(Optim, json.loads(json.dumps(to_dict(config)))) == config
    for settings, why in (
        ({"name": "adam"}, "did you mean 'adamw'"),
        ({"lr": 0.0}, "optim.lr = 0.0: give more than 0"),
    ):
        with pytest.raises(UsageError, match=why):
            Optim(**settings)
    model = decoder().requires_grad_(False)
    with pytest.raises(UsageError, match="nothing to train"):
        Optimizer(model, config)


# --- gradients ----------------------------------------------------------------------------------------------------


def step_gradient(objective: Objective, model: nn.Module, parts: list[Batch]) -> dict[str, Tensor]:
    model.zero_grad()
    total, count = accumulate(Inside(model), objective, parts)
    clip(model.parameters(), None, count)
    assert total.isfinite()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype, tight", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("objective", [causal, masked, dense_index, sparse_index])
def test_accumulated_gradient_does_not_depend_on_the_split(
    objective: Objective, dtype: torch.dtype, tight: float
) -> None:
    model = decoder(attention=DSA(GQA(3, rope=Rope()), 2, 4, topk=3)).to(dtype)
    data = batch()
    counts = (data.labels != IGNORE).sum(1)
    assert len(counts.unique()) > 1  # else a mean of means would do
    whole = step_gradient(objective, model, [data])
    for parts in (2, 3, 6):
        split = step_gradient(objective, model, data.split(parts))
        for key, want in whole.items():
            torch.testing.assert_close(
                split[key], want, rtol=tight, atol=tight * want.abs().max().item()
            )


def test_accumulated_gradient_is_that_of_the_mean() -> None:
    model, data = decoder().double(), batch()
    mine = step_gradient(causal, model, data.split(3))
    mean = nn.functional.cross_entropy(model(data.ids).flatten(0, 1), data.labels.flatten())
    model.zero_grad()
    mean.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(mine[name], p.grad, rtol=1e-10, atol=1e-14)


def test_step_without_a_label_leaves_zeros() -> None:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.zeros(3)
    assert clip([weight], 1.0, torch.tensor(0)) == 0
    assert torch.equal(weight.grad, torch.zeros(3))


def with_gradients(*values: list[float]) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.zeros(len(v))) for v in values]
    for p, v in zip(made, values):
        p.grad = torch.tensor(v)
    return made


def test_clip_shortens_to_the_limit_and_returns_the_length() -> None:
    made = [
        *with_gradients([3.0, 0.0], [4.0]),
        nn.Parameter(torch.zeros(2)),
    ]  # one without a gradient
    norm = clip(made, 1.0)
    torch.testing.assert_close(norm, torch.tensor(5.0))
    want = torch.tensor([3.0, 0.0, 4.0]) / (5.0 + 1e-6)
    torch.testing.assert_close(torch.cat([p.grad for p in made if p.grad is not None]), want)
    short = with_gradients([0.3])
    assert clip(short, 1.0) == torch.tensor(0.3) and torch.equal(short[0].grad, torch.tensor([0.3]))
    assert clip(with_gradients([30.0]), None) == 30
    assert clip([], 1.0) == 0


def test_clip_divides_by_the_count_first() -> None:
    for count in (10, torch.tensor(10)):
        made = with_gradients([30.0, 0.0], [40.0])
        torch.testing.assert_close(clip(made, 1.0, count), torch.tensor(5.0))
        want = torch.tensor([3.0, 0.0]) / (5.0 + 1e-6)
        torch.testing.assert_close(made[0].grad, want)
    within = with_gradients([30.0])
    assert clip(within, 4.0, 10) == 3 and torch.equal(within[0].grad, torch.tensor([3.0]))


def test_clip_keeps_away_from_a_division_by_nothing() -> None:
    """max_norm / (norm + 1e-6): of a length that is no longer than 1e-6 a sixth would else be missing."""
    made = with_gradients([3e-6], [4e-6])
    clip(made, 1e-6)
    torch.testing.assert_close(made[0].grad, torch.tensor([3e-6]) / 6, atol=0, rtol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_clip_reports_a_length_that_is_not_finite_and_changes_nothing(bad: float) -> None:
    made = with_gradients([3.0, 4.0], [bad])
    assert not clip(made, 1.0).isfinite()
    assert torch.equal(made[0].grad, torch.tensor([3.0, 4.0]))


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """2 x 3 processes, of which this is one and the others only seem to be there."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=6)
    try:
        yield init_device_mesh("cpu", (2, 3))
    finally:
        distributed.destroy_process_group()


def test_length_counts_what_is_shared_out_by_all_and_copies_once(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other process has a part as long as this one's."""

    def all_reduce(x: Tensor, group: distributed.ProcessGroup) -> None:
        x.mul_(group.size())

    monkeypatch.setattr(distributed, "all_reduce", all_reduce)
    shared, copied = Shard(0), Replicate()
    kinds = {(shared, copied): 2, (copied, shared): 3, (shared, shared): 6, (copied, copied): 1}
    grads, square = [torch.tensor([3.0, 1.0]), torch.tensor([2.0])], 14.0
    for i, (places, times) in enumerate(kinds.items(), 1):
        for part in (torch.full((2,), float(i)), torch.full((3,), 0.5)):
            grads.append(DTensor.from_local(part, mesh, places, run_check=False))
            square += times * float(part.square().sum())
    torch.testing.assert_close(length(grads), torch.tensor(square**0.5))
    assert local(grads[-1]) is not grads[-1] and local(grads[0]) is grads[0]


# --- averages -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ema", [0.2, 0.999])
def test_moving_mean_follows_the_weights_faster_at_first(ema: float) -> None:
    """m <- d m + (1 - d) w with d = min(ema, (1 + k) / (10 + k)); the weights of training come back after it."""
    model = decoder().double()
    optimizer = Optimizer(model, Optim(), ema)
    mean = {n: p.detach().clone() for n, p in model.named_parameters()}
    for k in range(1, 5):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
        optimizer.average(k)
        d = min(ema, (1 + k) / (10 + k))
        own = {n: p.detach().clone() for n, p in model.named_parameters()}
        mean = {n: d * mean[n] + (1 - d) * own[n] for n in mean}
        with optimizer.averaged():
            torch.testing.assert_close(dict(model.named_parameters()), mean)
        assert all(torch.equal(p, own[n]) for n, p in model.named_parameters())
    plain = Optimizer(model, Optim())
    plain.average(1)
    with plain.averaged():
        assert all(torch.equal(p, own[n]) for n, p in model.named_parameters())
