"""How the weights of each scheme are drawn: the deviation of every kind of them."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from regard.attention import GQA
from regard.block import Tower
from regard.layers import LM, MLM, MLP, Classify, LMHead, Norm, make_head
from regard.models import Patches, Tokens, TransformerConfig
from regard.models.init import Start, initialize, start_of
from regard.models.recurrent import Seq2SeqConfig
from regard.moe import MoE
from regard.position import Learned, Sinusoidal, T5Bias

SCHEMES = ("normal", "gpt2", "t5", "uniform", "deit", "modernbert")
DIM, LAYERS, STD, HEAD = 64, 3, 0.03, 16
schemes = pytest.mark.parametrize("scheme", SCHEMES)


def drawn(scheme: str, **changes: Any) -> nn.Module:
    tower = {"attention": GQA(4, sinks=True), "ffn": MLP(100), **changes}
    words = changes.pop("words", Tokens(100, Learned(80)))
    tower.pop("words", None)
    model = TransformerConfig(words, Tower(DIM, LAYERS, **tower), LM(tied=False)).make()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(7.0)
    initialize(model, Start(scheme, STD))
    return model


def deviation(p: torch.Tensor) -> float:
    return float(p.detach().std())


def matrix(scheme: str, inputs: int) -> float:
    """Of what multiplies; a uniform one within a has a / sqrt(3)."""
    if scheme == "uniform":
        return inputs**-0.5 / math.sqrt(3)
    return STD / math.sqrt(inputs) if scheme == "t5" else STD


def writer(scheme: str, inputs: int) -> float:
    """Of what writes into the stream."""
    deep = scheme in ("gpt2", "modernbert")
    return STD / math.sqrt(2 * LAYERS) if deep else matrix(scheme, inputs)


@schemes
def test_matrices_tables_norms_and_biases_of_a_tower(scheme: str) -> None:
    model = drawn(scheme, norm=Norm())
    table = 0.02 if scheme == "uniform" else STD
    head = {"uniform": DIM**-0.5, "modernbert": writer(scheme, DIM)}.get(scheme, STD)
    want = {"embedding.weight": table, "embedding.position.weight": table, "head.weight": head}
    for i in range(LAYERS):
        block = f"tower.blocks.{i}."
        for name in ("wk", "wv"):
            want[f"{block}attention.{name}.weight"] = matrix(scheme, DIM)
        less = math.sqrt(HEAD) if scheme == "t5" else 1
        want[f"{block}attention.wq.weight"] = matrix(scheme, DIM) / less
        want[f"{block}attention.wo.weight"] = writer(scheme, DIM)
        want[f"{block}ffn.up.weight"] = matrix(scheme, DIM)
        want[f"{block}ffn.down.weight"] = writer(scheme, 100)
    found = dict(model.named_parameters())
    for name, std in want.items():
        assert deviation(found[name]) == pytest.approx(std, rel=0.06), name
        if scheme == "uniform" and name.startswith("tower"):
            assert found[name].abs().max() <= found[name].shape[1] ** -0.5
    for name, p in found.items():
        if name.endswith("sinks"):
            assert 0 < p.abs().max() < 6 * STD
        elif name not in want:
            one = "norm" in name and name.endswith("weight")
            assert bool((p == (1.0 if one else 0.0)).all()), name


def test_norms_that_add_one_start_at_zero() -> None:
    model = drawn("normal", norm=Norm(1e-6, rms=True, plus_one=True))
    norms = [p for n, p in model.named_parameters() if "norm" in n]
    assert norms and not any(p.any() for p in norms)


@schemes
@pytest.mark.parametrize("scaled", [False, True])
def test_scaled_embeddings_of_2017_are_one_in_the_sum(scheme: str, scaled: bool) -> None:
    model: Any = drawn(scheme, words=Tokens(100, Sinusoidal(9), scaled=scaled))
    std = {False: 0.02, True: DIM**-0.5}[scaled] if scheme == "uniform" else STD
    assert deviation(model.embedding.weight) == pytest.approx(std, rel=0.06)


@schemes
def test_experts_start_as_one_feed_forward_each(scheme: str) -> None:
    model: Any = drawn(scheme, ffn=MoE(40, 2, 24, bias=True))
    for block in model.tower.blocks:
        part = block.ffn
        for weight, std in (
            (part.gate, matrix(scheme, DIM)), (part.up, matrix(scheme, DIM)),
            (part.down, writer(scheme, 24)), (part.router.weight, matrix(scheme, DIM)),
        ):  # fmt: skip
            assert deviation(weight) == pytest.approx(std, rel=0.06)
        assert deviation(part.router.bias) == pytest.approx(STD, rel=0.4)
        assert not any(p.any() for p in (part.gate_bias, part.up_bias, part.down_bias))


@schemes
def test_relative_biases_start_small_where_scores_are(scheme: str) -> None:
    model: Any = drawn(scheme, attention=GQA(4), relative=T5Bias(4, 1000))
    (weight,) = model.tower.relative.parameters()
    std = STD / math.sqrt(DIM) if scheme == "t5" else STD
    assert deviation(weight) == pytest.approx(std, rel=0.06)


def test_position_of_padding_is_zero() -> None:
    model: Any = drawn("normal", words=Tokens(100, Learned(80, offset=2, skip=1)))
    weight = model.embedding.position.weight
    assert not weight[1].any() and weight[0].all() and weight[2].all()
    assert drawn("normal").embedding.position.weight.all()  # type: ignore[union-attr,operator]


@schemes
def test_images_start_with_class_tokens_and_positions(scheme: str) -> None:
    part = Patches(32, 4, extra=2).make(DIM)
    initialize(nn.Sequential(part), Start(scheme, STD))
    inputs = 3 * 4 * 4
    assert deviation(part.project.weight) == pytest.approx(matrix(scheme, inputs), rel=0.06)
    assert part.project.bias is not None and not part.project.bias.any()
    if scheme == "deit":
        assert not part.position.any() and not part.extra.any()
    else:
        std = 0.02 if scheme == "uniform" else STD
        assert deviation(part.position) == pytest.approx(std, rel=0.06)
        assert deviation(part.extra) == pytest.approx(std, rel=0.4)


@schemes
@pytest.mark.parametrize("layers", [1, 8])
def test_heads_start_by_the_depth_of_their_body(scheme: str, layers: int) -> None:
    labels = make_head(Classify(90, "gelu", norm=Norm()), DIM, 0)
    words = make_head(MLM(tied=False), DIM, 90)
    assert isinstance(words, LMHead) and words.weight is not None
    for head in (labels, words):
        initialize(head, Start(scheme, STD), layers)
    deep = STD / math.sqrt(2 * layers)
    dense = deep if scheme == "modernbert" else matrix(scheme, DIM)
    for head in (labels, words):
        assert deviation(head.dense.weight) == pytest.approx(dense, rel=0.06)  # type: ignore[union-attr]
    last = {"modernbert": deep, "uniform": DIM**-0.5}.get(scheme, STD)
    assert deviation(words.weight) == pytest.approx(last, rel=0.06)
    own = DIM**-0.5 if scheme == "modernbert" else matrix(scheme, DIM)
    assert deviation(labels.out.weight) == pytest.approx(own, rel=0.06)  # type: ignore[union-attr]


def test_models_of_no_family_start_by_where_their_norms_stand() -> None:
    for order, scheme in (("pre", "gpt2"), ("post", "uniform")):
        config = TransformerConfig(Tokens(9), Tower(8, 1, GQA(2), MLP(8), order=order), LM())
        assert start_of(config) == Start(scheme)


def test_parts_that_are_made_by_themselves_start_small() -> None:
    """Before a scheme draws them, or where none does: a deviation of 0.02, tables that are multiplied by sqrt(dim)
    1 / sqrt(dim), tables of recurrent models within 0.1."""
    moe, words = MoE(8, 2, 64).make(DIM), Tokens(200, types=100).make(DIM)
    parts = [moe.gate, moe.up, moe.down, words.weight, words.types]
    parts += [Learned(200).make(DIM).weight, T5Bias(50, 200).make().weight]  # type: ignore[list-item]
    parts += [Patches(64, 4).make(DIM).position, make_head(LM(tied=False), DIM, 200).weight]  # type: ignore[list-item]
    for part in parts:
        assert part is not None and deviation(part) == pytest.approx(0.02, rel=0.04)
    scaled = Tokens(200, scaled=True).make(DIM).weight
    assert deviation(scaled) == pytest.approx(DIM**-0.5, rel=0.04)
    pair: Any = Seq2SeqConfig(200, 300, 40).make()
    for table in (pair.source.weight.detach(), pair.target.weight.detach()):
        assert 0.0999 < float(table.max()) <= 0.1 and -0.0999 > float(table.min()) >= -0.1
