"""MLA: two forms of one formula; at full rank it is multi-head attention."""

from typing import Any

import pytest
import torch

from regard.attention import GQA, MLA, Context
from regard.attention.latent import LatentAttention
from regard.cache import Contiguous
from regard.mask import Causal, Full
from regard.position import Rope, Yarn
from tests.laws.mechanisms import DIM, MECHANISMS, TIGHT, context, layer

LATENT = [n for n, c in MECHANISMS.items() if isinstance(c, MLA)]


@pytest.mark.parametrize("name", LATENT)
def test_mla_absorbed_equals_expanded(name: str) -> None:
    mla, x, ctx = layer(MECHANISMS[name]), torch.randn(2, 9, DIM).double(), context(9)
    q, kept = mla.queries(mla.query_input(x), ctx), mla.entries(x, ctx)
    mask, bias = ctx.visible(ctx.pos, mla.config.window), torch.randn(2, mla.h, 9, 9).double()
    for extra in (None, bias):
        torch.testing.assert_close(
            mla.absorbed(q, kept, mask, ctx, extra),
            mla.expanded(q, kept, mask, ctx, extra),
            rtol=1e-11,  # two orders of the same products, float64
            atol=1e-12,
        )


def test_mla_forms_agree_in_float32() -> None:
    mla, x, ctx = layer(MECHANISMS["mla"]).float(), torch.randn(2, 9, DIM), context(9)
    q, kept, mask = mla.queries(x, ctx), mla.entries(x, ctx), ctx.visible(ctx.pos)
    difference = mla.absorbed(q, kept, mask, ctx) - mla.expanded(q, kept, mask, ctx)
    assert difference.abs().max() < 1e-5


def test_mla_takes_the_form_that_costs_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of s keys, t queries that attend c wide instead of d cost t s (c - d) more, and spare s c d; without a cache
    gradients may be asked for, and keys of every head are there for all queries."""
    chosen: list[str] = []
    for form in LatentAttention.forms:
        plain = getattr(LatentAttention, form)

        def note(self: LatentAttention, *rest: Any, form: str = form, plain: Any = plain) -> Any:
            chosen.append(form)
            return plain(self, *rest)

        monkeypatch.setattr(LatentAttention, form, note)
    for latent, t, form in ((8, 1, 0), (8, 7, 0), (8, 8, 1), (8, 9, 1), (4, 99, 0), (3, 99, 0)):
        mla = layer(MLA(2, latent=latent, head_dim=4))
        x, want = torch.randn(1, t, DIM).double(), mla(torch.randn(1, t, DIM).double(), context(t))
        assert chosen == ["expanded"]
        cache = Contiguous([mla.cache_spec()], 1, capacity=t, dtype=torch.float64)
        found = mla(x, Context(cache.begin(t), Causal(), cache.layer(0)))
        assert found.shape == want.shape and chosen[1:] == [LatentAttention.forms[form]]
        chosen.clear()


@pytest.mark.parametrize("context, keys", [(3, 3), (4, 4), (9, 4)])
def test_mla_pays_for_keys_and_values_of_every_head(context: int, keys: int) -> None:
    more: Any = dict(head_dim=6, rope_dim=4, value_dim=7, rope=Rope())
    assert MLA(3, 10, window=4, **more).make(DIM).flops(context) == 2 * keys * 3 * (6 + 4 + 7)
    assert MLA(3, 10, **more).make(DIM).flops(context) == 2 * context * 3 * (6 + 4 + 7)


@pytest.mark.parametrize("mask", [None, Full()])
def test_mla_at_full_rank_is_mha_without_rope(mask: Full | None) -> None:
    """W_DKV = identity, W_UK and W_UV = the heads' own W_K and W_V: the latent is the token itself."""
    mha, mla = layer(GQA(heads=3)), layer(MLA(heads=3, latent=DIM, normed=False))
    _copy(mha, mla)
    x = torch.randn(2, 7, DIM).double()
    torch.testing.assert_close(mla(x, context(7, mask)), mha(x, context(7, mask)), **TIGHT)


def test_mla_of_the_joint_rank_of_keys_and_values_is_mha_without_rope() -> None:
    """W_K and W_V of all heads stacked have rank r: a latent of r numbers holds them without loss."""
    mha, mla = layer(GQA(heads=3)), layer(MLA(heads=3, latent=10, normed=False))
    down, up = torch.randn(10, DIM).double(), torch.randn(2 * DIM, 10).double() / 10
    with torch.no_grad():
        mha.wk.weight.copy_((up @ down)[:DIM])
        mha.wv.weight.copy_((up @ down)[DIM:])
        mla.w_uq.weight.copy_(mha.wq.weight)
        mla.w_dkv.weight.copy_(down)
        mla.w_ukv.weight.copy_(torch.cat([w.view(3, 8, 10) for w in up.chunk(2)], 1).flatten(0, 1))
        mla.wo.weight.copy_(mha.wo.weight)
    x = torch.randn(2, 7, DIM).double()
    torch.testing.assert_close(mla(x, context(7)), mha(x, context(7)), **TIGHT)


def _copy(mha: torch.nn.Module, mla: LatentAttention) -> None:
    keys, values = (w.weight.view(3, 8, DIM) for w in (mha.wk, mha.wv))
    with torch.no_grad():
        mla.w_uq.weight.copy_(mha.wq.weight)
        mla.w_dkv.weight.copy_(torch.eye(DIM))
        mla.w_ukv.weight.copy_(torch.cat([keys, values], 1).flatten(0, 1))
        mla.wo.weight.copy_(mha.wo.weight)


def test_mla_cache_is_the_latent_and_one_rope_key_whatever_the_heads() -> None:
    specs = [
        MLA(h, latent=32, head_dim=16, rope_dim=8, rope=Rope()).make(64).cache_spec()
        for h in (1, 16)
    ]
    assert specs[0] == specs[1] and specs[0].numbers() == 32 + 8


def test_mla_scale_counts_both_parts_of_a_head_and_yarn() -> None:
    rope = Rope(scaling=Yarn(4.0, 64, mscale=1.0, mscale_all=1.0))
    plain = MLA(2, latent=8, head_dim=12, rope_dim=4, rope=Rope()).make(DIM)
    scaled = MLA(2, latent=8, head_dim=12, rope_dim=4, rope=rope).make(DIM)
    assert plain.scale == 16**-0.5
    assert scaled.scale == pytest.approx(16**-0.5 * (0.1 * torch.log(torch.tensor(4.0)) + 1) ** 2)
