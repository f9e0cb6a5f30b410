"""MHA, GQA and MQA are one layer; the matrix form is the per-token sum; without positions, order does not matter."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention import ATTENTION, GQA, Context
from regard.attention.multihead import GroupedQueryAttention
from regard.cache import Contiguous
from regard.mask import Full, Span
from tests.laws.mechanisms import DIM, MECHANISMS, TIGHT, context, layer


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, **TIGHT)


def test_every_kind_of_attention_has_an_example() -> None:
    assert {config.kind for config in MECHANISMS.values()} == set(ATTENTION)


@pytest.mark.parametrize("name", MECHANISMS)
def test_mechanism_keeps_the_shape_and_declares_its_cache(name: str) -> None:
    attention, x = layer(MECHANISMS[name]), torch.randn(2, 7, DIM).double()
    kept, spec = {}, attention.cache_spec()

    class Store:
        window = None

        @property
        def state(self) -> dict[str, Tensor]:
            return {name: torch.zeros(2, *shape).double() for name, shape in spec.state.items()}

        def update(self, **entries: Tensor) -> tuple:
            kept.update({k: tuple(v.shape[2:]) for k, v in entries.items()})
            return entries, ctx.pos

        def put(self, state: dict[str, Tensor], past: object) -> None:
            kept.update({k: tuple(v.shape[1:]) for k, v in state.items()})

    ctx = context(7)
    ctx.store = Store()
    assert attention(x, ctx).shape == x.shape
    assert kept == spec.token | spec.state


@torch.no_grad()
def test_beams_that_share_a_source_see_what_copies_of_it_show() -> None:
    """Windowed cross-attention over a ragged source, queries of two tokens: 2 sources, 3 beams each."""
    attention = layer(GQA(3, window=2))
    x, memory = torch.randn(6, 2, DIM).double(), torch.randn(2, 6, DIM).double()
    cache = Contiguous([attention.cache_spec()], 2, dtype=torch.float64)
    cache.begin(6, torch.tensor([6, 4]))
    pos = Span.run(3, 2)
    attention(x[:2], Context(pos, Full(), cache.layer(0), memory, cache.span))
    cache.freeze()
    copies = cache.fork(torch.arange(6) // 3)
    ours, want = (
        attention(x, Context(pos, Full(), c.layer(0), None, c.span)) for c in (cache, copies)
    )
    torch.testing.assert_close(ours, want, **TIGHT)


def as_torch(ours: GroupedQueryAttention) -> nn.MultiheadAttention:
    theirs = nn.MultiheadAttention(DIM, ours.h, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([ours.wq.weight, ours.wk.weight, ours.wv.weight]))
        theirs.in_proj_bias.copy_(torch.cat([ours.wq.bias, ours.wk.bias, ours.wv.bias]))
        theirs.out_proj.weight.copy_(ours.wo.weight)
        theirs.out_proj.bias.copy_(ours.wo.bias)
    return theirs


@pytest.mark.parametrize("causal", [False, True])
def test_gqa_with_kv_heads_equal_heads_is_torch_mha(causal: bool) -> None:
    ours = layer(GQA(heads=4, kv_heads=4, bias=True, out_bias=True))
    x = torch.randn(2, 7, DIM).double()
    hidden = torch.ones(7, 7).triu(1).bool() if causal else None
    want, _ = as_torch(ours)(x, x, x, attn_mask=hidden, need_weights=False)
    close(ours(x, context(7, None if causal else Full())), want)


def test_gqa_cross_is_torch_multi_head_attention_forward() -> None:
    ours, x, memory = (
        layer(GQA(heads=3, bias=True, out_bias=True), memory_dim=10),
        torch.randn(2, 5, DIM).double(),
        torch.randn(2, 8, 10).double(),
    )
    ctx = context(5, Full(), memory=memory, memory_pos=context(8).pos)
    want, _ = F.multi_head_attention_forward(
        x.transpose(0, 1),
        memory.transpose(0, 1),
        memory.transpose(0, 1),
        DIM,
        3,
        None,
        torch.cat([ours.wq.bias, ours.wk.bias, ours.wv.bias]),
        None,
        None,
        False,
        0.0,
        ours.wo.weight,
        ours.wo.bias,
        use_separate_proj_weight=True,
        q_proj_weight=ours.wq.weight,
        k_proj_weight=ours.wk.weight,
        v_proj_weight=ours.wv.weight,
    )
    close(ours(x, ctx), want.transpose(0, 1))


def test_gqa_with_one_group_is_mqa() -> None:
    """Shazeer 2019, written out: heads have queries of their own, and one key and value for all."""
    ours, x = layer(GQA(heads=4, kv_heads=1)), torch.randn(2, 6, DIM).double()
    q = torch.einsum("btm,hdm->bhtd", x, ours.wq.weight.view(4, 6, DIM))
    k, v = x @ ours.wk.weight.T, x @ ours.wv.weight.T
    logits = torch.einsum("bhtd,bsd->bhts", q, k) / math.sqrt(6)
    weights = logits.masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf).softmax(-1)
    o = torch.einsum("bhts,bsd->bthd", weights, v).flatten(2)
    close(ours(x, context(6)), o @ ours.wo.weight.T)


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_gqa_is_mha_with_repeated_key_and_value_weights(groups: int) -> None:
    few, many = layer(GQA(6, groups, bias=True)), layer(GQA(6, bias=True))
    weights = few.state_dict()
    for name in ("wk.weight", "wk.bias", "wv.weight", "wv.bias"):
        heads = weights[name].unflatten(0, (groups, -1))
        weights[name] = heads.repeat_interleave(6 // groups, 0).flatten(0, 1)
    many.load_state_dict(weights)
    x = torch.randn(2, 7, DIM).double()
    close(few(x, context(7)), many(x, context(7)))


@pytest.mark.parametrize("heads, groups", [(8, 8), (8, 2), (8, 1)])
def test_gqa_cache_holds_two_vectors_for_each_group(heads: int, groups: int) -> None:
    spec = GQA(heads, groups, head_dim=16).make(64).cache_spec()
    assert spec.numbers() == 2 * groups * 16


@torch.no_grad()
def test_per_token_sum_equals_matrix_form() -> None:
    """o_t = sum_s a_ts v_s, a_ts = exp(q_t.k_s / sqrt d) / sum_r exp(q_t.k_r / sqrt d), token by token."""
    ours, x = layer(GQA(heads=2, head_dim=4)), torch.randn(1, 5, DIM).double()
    out = []
    for t in range(5):
        heads = []
        for h in range(2):
            part = slice(4 * h, 4 * h + 4)
            q = ours.wq.weight[part] @ x[0, t]
            seen = x[0, : t + 1]
            e = [math.exp(float(q @ (ours.wk.weight[part] @ y)) / math.sqrt(4)) for y in seen]
            values = [ours.wv.weight[part] @ y for y in seen]
            heads.append(sum(w / sum(e) * v for w, v in zip(e, values)))
        out.append(ours.wo.weight @ torch.cat(heads))
    close(ours(x, context(5)), torch.stack(out)[None])


# DSA is left out: its ties go to the earliest position, so order matters there
APART = ("dsa", "delta", "ssd", "disentangled")
BLIND = [n for n, c in MECHANISMS.items() if c.rope is None and c.kind not in APART]
AWARE = [n for n, c in MECHANISMS.items() if c.rope is not None or c.kind == "disentangled"]


@pytest.mark.parametrize("name", BLIND)
def test_self_attention_without_positions_is_permutation_equivariant(name: str) -> None:
    attention, x, order = layer(MECHANISMS[name]), torch.randn(2, 7, DIM), torch.randperm(7)
    x = x.double()
    plain = attention(x, context(7, Full()))
    close(attention(x[:, order], context(7, Full())), plain[:, order])


@pytest.mark.parametrize("name", AWARE)
def test_self_attention_with_positions_is_not_permutation_equivariant(name: str) -> None:
    attention, x, order = layer(MECHANISMS[name]), torch.randn(2, 7, DIM), torch.randperm(7)
    x = x.double()
    plain = attention(x, context(7, Full()))
    moved = attention(x[:, order], context(7, Full()))
    assert (moved - plain[:, order]).abs().max() > 1e-3


@pytest.mark.parametrize("context, keys", [(3, 3), (4, 4), (9, 4)])
def test_work_of_a_query_is_scores_and_values_of_every_head(context: int, keys: int) -> None:
    wide = GQA(6, 2, head_dim=5, value_dim=7)
    assert replace(wide, window=4).make(DIM).flops(context) == 2 * keys * 6 * (5 + 7)
    assert wide.make(DIM).flops(context) == 2 * context * 6 * (5 + 7)
