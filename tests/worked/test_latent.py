"""Worked examples: latent attention, the lightning indexer, what is cached and stored."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from regard.attention import DSA, GQA, MLA, attend
from regard.attention.latent import LatentAttention
from regard.attention.sparse import Indexer, choose, dots_exact, hadamard, index_scores
from regard.learn.mechanisms import cache_numbers, mla_weights
from regard.mask import Causal, Span, Visible
from regard.position import Rope
from tests.worked.examples import Example, Watch, context, fill, run


def by_head(heads: int, *parts: Tensor) -> Tensor:
    """(h d, n), (h r, n) -> (h (d + r), n): each head's rows of every part together."""
    return torch.cat([w.unflatten(0, (heads, -1)) for w in parts], 1).flatten(0, 1)


def latent_layer(g: SimpleNamespace, normed: bool) -> LatentAttention:
    config = MLA(
        g.heads,
        g.latent,
        head_dim=g.head_dim,
        rope_dim=g.rope_dim,
        value_dim=g.value_dim,
        query_latent=g.query_latent,
        rope=Rope(g.base),
        normed=normed,
        norm_eps=g.norm_eps,
    )
    return fill(
        config.make(4),
        w_dq=g.w_dq,
        w_uq=by_head(g.heads, g.w_uq, g.w_qr),
        w_dkv=torch.cat([g.w_dkv, g.w_kr]),
        w_ukv=by_head(g.heads, g.w_uk, g.w_uv),
        wo=g.wo,
    )


@torch.no_grad()
@pytest.mark.parametrize("form", ["expanded", "absorbed"])
def test_mla_absorbed_vs_explicit_agree_at_every_step(example: Example, form: str) -> None:
    g = example.given
    for case in ("plain", "normed"):
        layer, watch = latent_layer(g, normed=case == "normed"), Watch()
        x, ctx = g.x[None], context(3, probe=watch)
        kept = layer.entries(x, ctx)
        example.right(layer.query_input(x)[0], f"{case}.query_latent")
        example.right(kept["latent"][0], f"{case}.latent")
        example.right(kept["k_rope"][0], f"{case}.k_rope")
        q = layer.queries(layer.query_input(x), ctx)
        o = getattr(layer, form)(q, kept, ctx.visible(ctx.pos), ctx)
        example.right(watch.scaled, f"{case}.scaled")
        example.right(watch.weights, f"{case}.weights")
        example.right(o[0].flatten(1), f"{case}.joined")
        example.right(layer.wo(o.flatten(2))[0], f"{case}.output")
        example.right(run(layer, g.x), f"{case}.output")
        assert watch.scale == 0.5 and layer.cache_spec().numbers() == 5


@torch.no_grad()
def test_mla_eq41_identity_row_convention_moves_the_key_weights_to_the_query(
    example: Example,
) -> None:
    g = example.given
    layer = MLA(heads=1, latent=3, head_dim=2, normed=False).make(4)
    fill(layer, w_uq=g.wq, w_dkv=g.w_dkv, w_ukv=torch.cat([g.w_uk, torch.ones(2, 3).double()]))

    def watched(x: Tensor, form: str) -> Watch:
        watch = Watch()
        ctx = context(len(x), probe=watch)
        q, kept = layer.queries(x[None], ctx), layer.entries(x[None], ctx)
        getattr(layer, form)(q, kept, ctx.visible(ctx.pos), ctx)
        return watch

    for form in ("expanded", "absorbed"):
        watch = watched(g.x, form)
        example.right(watch.scaled[0] / watch.scale, "scores")
    example.right(watched(torch.eye(4).double(), "absorbed").q[0], "merged")


def test_cache_and_weight_counts_follow_from_the_configs(example: Example) -> None:
    g = example.given
    mla = MLA(g.heads, g.latent, g.head_dim, g.rope_dim, None, g.query_latent, Rope())

    def groups(count: int) -> int:  # three groups share 126 heads: a cache does not know of heads
        heads = g.heads // count * count
        return cache_numbers(GQA(heads, count, g.head_dim), g.dim)

    example.right(groups(g.heads), "mha")
    example.right(groups(1), "mqa")
    example.right([groups(count) for count in g.groups.tolist()], "gqa")
    example.both(cache_numbers(mla, g.dim), "mla")
    example.right(cache_numbers(mla, g.dim) / groups(1), "mla_as_groups")
    example.right(groups(1) / groups(g.heads), "mqa_share")
    with torch.device("meta"):
        layer = mla.make(g.dim)
    example.both(layer.wo.in_features, "joined")
    apart, merged = mla_weights(MLA(g.heads, g.latent + g.rope_dim, g.head_dim), g.dim)
    example.right(apart, "apart_576")
    example.right(merged, "merged_576")
    example.right(merged / apart, "ratio_576")
    apart, merged = mla_weights(mla, g.dim)
    example.right(apart, "apart_512")
    example.right(merged, "merged_512")


@torch.no_grad()
def test_lightning_indexer_sums_weighted_relus_and_takes_the_best(example: Example) -> None:
    g, x = example.given, example.given.x[None]
    q, k = g.q[None], g.k[None]
    config = DSA(GQA(heads=1, head_dim=2), index_heads=2, index_dim=2, topk=g.topk)
    indexer = fill(Indexer(config, 3, 3), ww=g.ww)
    dots = dots_exact(q, k)
    scores = index_scores(dots, indexer.ww(x))
    seen = Visible(Causal(), Span.run(0, 4), Span.run(0, 4)).tensor()[:, 0]
    masked = scores.masked_fill(~seen, -torch.inf)
    example.right(indexer.ww(x)[0], "w")
    example.right(dots[0], "dots")
    example.both(scores[0], "index")
    example.right(masked[0], "index_causal")
    example.right(indexer.scores(q, k, x)[0], "index_scaled")
    torch.testing.assert_close(dots_exact(hadamard(q), hadamard(k)), dots)
    chosen = choose(masked, g.topk)
    kept = [[s for s in row if seen[0, t, s]] for t, row in enumerate(chosen[0].tolist())]
    example.right(kept, "chosen")
    # the layer's own gathering, with the given scores as a bias on zero products
    layer, bias = config.make(3), g.main_scores[None, None]
    zeros, values = torch.zeros(1, 4, 1, 2).double(), g.main_values[None, :, None]
    sparse = layer.attend_chosen(zeros, {"k": zeros, "v": values}, chosen, seen, bias, context(4))
    example.right(sparse[0, :, 0], "sparse")
    dense = attend(zeros, zeros, values, seen[:, None], bias=bias)
    example.right(dense[0, :, 0], "dense")
