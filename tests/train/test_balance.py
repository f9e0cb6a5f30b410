"""Mixtures of experts in training: the balance loss is transformers', the correction bias follows the load, experts
even out, and a stop changes no bit."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model, save_model

import regard
from regard.attention import GQA
from regard.block import Tower
from regard.data.feed import IGNORE, Batch
from regard.errors import UsageError
from regard.models import EncoderDecoderConfig, Tokens
from regard.moe import MixtureOfExperts, MoE, balance_loss
from regard.position import Learned
from regard.training.checkpoint import Checkpoints
from regard.training.objectives import BALANCE, balanced, causal, mixtures, seq2seq
from regard.training.optim import Optim, accumulate, clip
from regard.training.trainer import Train, Trainer
from tests.train import toy

EXPERTS = 4
SIZES = dict(layers=1, dim=16, heads=2, kv_heads=2, vocab=toy.VOCAB, max_len=16)


def mixture(**more: Any) -> Any:
    """A model whose router sends nearly everything to its first experts."""
    torch.manual_seed(0)
    model = regard.build("mixtral-8x7b", **SIZES, ffn=MoE(EXPERTS, 1, 16, **more))
    layer = mixtures(model)[0]
    # The mean of what the router reads is not 0: one expert gains by it. Tokens differ by enough that a step of the
    # correction bias moves some of them, not all at once.
    layer.router.weight.data[0] += 0.5 * torch.ones(16)
    model.embedding.weight.data = 5 * model.embedding.weight.data + 0.2
    return model


def trainer(folder: Path, model: Any, **changes: Any) -> Trainer:
    def save(m: Any, path: Path) -> None:
        path.mkdir(parents=True)
        save_model(m, str(path / "weights"))

    def load(path: Path) -> Any:
        again = copy.deepcopy(model)
        load_model(again, path / "weights")
        return again

    checkpoints = Checkpoints(folder, save)
    return Trainer(model, toy.Toy(), causal, toy.config(**changes), checkpoints, load)


@torch.no_grad()
def busiest(model: Any) -> float:
    """The share of tokens that the most chosen expert gets."""
    chosen: list[torch.Tensor] = []
    for layer in mixtures(model):
        layer.register_forward_pre_hook(lambda m, x: chosen.append(m.route(x[0].flatten(0, 1))[0]))
    model.eval()(torch.cat([toy.Toy().batch(k).ids for k in range(8)]))
    counts = torch.cat(chosen).flatten().bincount(minlength=EXPERTS)
    return float(counts.max() / counts.sum())


def test_gradients_are_those_of_mixtral_with_its_auxiliary_loss() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.MixtralConfig(
        vocab_size=23, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=16,
        output_router_logits=True, router_aux_loss_coef=0.3, pad_token_id=0,
    )  # fmt: skip
    theirs = transformers.MixtralForCausalLM(config).train()
    ours = regard.from_hf(theirs).train()
    ids = torch.randint(1, 23, (3, 9))
    theirs(ids, labels=ids).loss.backward()
    labels = torch.cat([ids[:, 1:], torch.full((3, 1), IGNORE)], 1)
    loss = balanced(causal, ours, 0.3)
    _, count = accumulate(lambda f, b: f(ours, b), loss, [Batch(ids, labels)])
    clip(ours.parameters(), None, count)
    plain = regard.from_hf(theirs)
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        p.data.copy_(q.grad)
    theirs_grad = {n: p.grad for n, p in theirs.named_parameters()}
    with torch.no_grad():
        for n, p in theirs.named_parameters():
            p.copy_(theirs_grad[n])
    want = regard.from_hf(theirs)
    for (name, a), b in zip(plain.named_parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(
            a, b, rtol=1e-5, atol=1e-7, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_padding_has_no_part_in_the_balance() -> None:
    model = mixture().train()
    ids, lengths = torch.randint(23, (2, 9)), torch.tensor([9, 4])
    labels = ids.clone()
    labels[1, 4:] = IGNORE
    loss, found = balanced(causal, model, 1.0), []
    for fill in (0, 5):
        x = ids.clone()
        x[1, 4:] = fill
        found.append(loss(model, Batch(x, labels, lengths))[0])
    torch.testing.assert_close(*found)


def test_balance_of_packed_documents_is_that_of_the_same_in_rows() -> None:
    model = mixture().train()
    ids, end = torch.randint(23, (1, 6)), torch.tensor([[5, 5, 5]])
    doc = torch.tensor([[0, 0, 0, 0, 1, 1, -1, -1, -1]])
    packed = torch.cat([ids, end], 1)
    rows = torch.cat([ids[:, :4], torch.cat([ids[:, 4:], end[:, :2]], 1)])
    lengths = torch.tensor([4, 2])
    seen = torch.arange(4) < lengths[:, None]
    batches = (
        Batch(packed, packed.masked_fill(doc < 0, IGNORE), doc=doc),
        Batch(rows, rows.masked_fill(~seen, IGNORE), lengths),
    )
    torch.testing.assert_close(*(balanced(causal, model, 9.0)(model, batch) for batch in batches))


def test_balance_of_a_decoder_counts_all_that_its_two_towers_read() -> None:
    """Padding of both sides too: the lengths are those of one of them."""
    tokens, plain = Tokens(toy.VOCAB, Learned(16)), GQA(2)
    source = Tower(16, 1, plain, MoE(EXPERTS, 1, 16), causal=False)
    target = Tower(16, 1, plain, MoE(EXPERTS, 1, 16), cross=plain)
    model = EncoderDecoderConfig(tokens, source, tokens, target).make().double().train()
    x = torch.randint(toy.VOCAB, (2, 5))
    lengths = torch.tensor([5, 3])
    batch = Batch(x, x, lengths, source=x.repeat(1, 2), source_lengths=2 * lengths)
    loss, count = balanced(seq2seq, model, 2.0)(model, batch)
    alone, same = seq2seq(model, batch)
    torch.testing.assert_close(loss, alone + 2.0 * count * balance_loss(model))
    assert count == same == 10


def test_correction_bias_needs_no_balance_loss_beside_it() -> None:
    batch, model = toy.Toy().batch(0), mixture(score="sigmoid", corrected=True).train()
    assert torch.equal(balanced(causal, model, None)(model, batch)[0], causal(model, batch)[0])


def test_balance_loss_is_no_part_of_an_evaluation() -> None:
    model, batch = mixture().eval(), toy.Toy().batch(0)
    with torch.no_grad():
        assert torch.equal(balanced(causal, model, 9.0)(model, batch)[0], causal(model, batch)[0])


@pytest.mark.parametrize("corrected", [False, True])
def test_training_evens_out_the_use_of_experts(tmp_path: Path, corrected: bool) -> None:
    kind, shares = dict(score="sigmoid", corrected=True) if corrected else {}, []
    for name, balance, speed in (("without", 0.0, 0.0), ("with", None, 0.01)):
        model = mixture(**kind).requires_grad_(False)
        (layer,) = (m for m in model.modules() if isinstance(m, MixtureOfExperts))
        layer.router.requires_grad_(True)
        start, optim = busiest(model), Optim(lr=3e-2, decay=0.0)
        more: Any = dict(steps=60, evaluate=0, save=0, optim=optim)
        t = trainer(tmp_path / name, model, balance=balance, bias_speed=speed, **more)
        t.run()
        shares.append(busiest(t.model))
    assert start > 0.9 and shares[0] > 0.9 and shares[1] < 0.6, (start, shares)


@pytest.mark.parametrize("corrected", [False, True])
def test_stopped_and_resumed_mixture_is_not_stopped(tmp_path: Path, corrected: bool) -> None:
    kind = dict(score="sigmoid", corrected=True) if corrected else {}
    runs = []
    for name, stops in (("whole", ()), ("parts", (2, 5))):
        for stop in (*stops, 99):
            t = trainer(tmp_path / name, mixture(**kind), steps=7, save=1, evaluate=0)
            t.resume()
            t.run(lambda t=t, stop=stop: t.at.step >= stop)
        runs.append(toy.weights(t))
    assert all(torch.equal(x, runs[0][n]) for n, x in runs[1].items())


def test_a_step_that_is_not_finite_leaves_the_bias(tmp_path: Path) -> None:
    model = mixture(score="sigmoid", corrected=True)
    t = trainer(tmp_path, model, steps=1, nan="skip", evaluate=0)
    t.objective = lambda m, b, f=t.objective: (f(m, b)[0] * torch.nan, torch.tensor(1))
    t.run()
    assert all(not m.correction.any() and m.load is None for m in mixtures(model))


def test_frozen_mixtures_are_left_alone() -> None:
    model = mixture().requires_grad_(False)
    assert not mixtures(model) and balanced(causal, model, None) is causal
    assert any(isinstance(m, MixtureOfExperts) for m in model.modules())
    assert balanced(causal, mixture(), None) is not causal and BALANCE > 0


def test_weights_below_zero_are_refused() -> None:
    for name in ("balance", "bias_speed"):
        with pytest.raises(UsageError, match=name):
            Train(**{name: -0.1})
