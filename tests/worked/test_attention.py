"""Worked examples: dot-product attention, masks, heads and groups, the cache."""

import torch

from regard.attention import BACKENDS, GQA, Terms, attend, softmax, weights
from regard.attention.core import scores
from regard.cache import Contiguous
from regard.mask import Causal, Full, Span, Visible
from tests.worked.examples import Example, Watch, context, fill, run


def heads_first(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """(t d) -> (1 1 t d)"""
    return [x[None, None] for x in tensors]


def test_sdpa_2x2_follows_from_its_factors(example: Example) -> None:
    g = example.given
    (q, k), terms = heads_first(g.q, g.k), Terms(g.head_dim**-0.5)
    example.both(scores(q, k, Terms(1.0))[0, 0], "scores")
    example.both(scores(q, k, terms)[0, 0], "scaled")
    example.both(weights(q, k, None, terms)[0, 0], "weights")
    for backend in BACKENDS:
        o = attend(*(x[None, :, None] for x in (g.q, g.k, g.v)), backend=backend)
        example.both(o[0, :, 0], "output")


@torch.no_grad()
def test_cross_attention_head1_projects_with_the_transposed_weights(example: Example) -> None:
    g, watch = example.given, Watch()
    # the text feeds keys and values from two matrices: here they are two halves of one memory
    memory = torch.cat([g.memory_k, g.memory_v], -1)
    layer = fill(
        GQA(heads=1, head_dim=g.head_dim).make(3, memory_dim=6),
        wq=g.wq,
        wk=torch.cat([g.wk, 0 * g.wk], -1),
        wv=torch.cat([0 * g.wv, g.wv], -1),
        wo=torch.eye(3, 2).double(),
    )
    ctx = {"memory": memory[None], "memory_pos": Span.run(0, 2), "probe": watch}
    out = run(layer, g.x, Full(), **ctx)
    example.both(watch.q[0], "q")
    example.both(watch.k[0], "k")
    example.both(watch.v[0], "v")
    example.both(watch.scaled[0] / watch.scale, "scores")
    example.right(watch.scaled[0], "scaled")
    example.both(watch.weights[0], "weights")
    example.both(out[:, :2], "head")


@torch.no_grad()
def test_cross_attention_concat_projection_joins_heads_then_projects(example: Example) -> None:
    g = example.given
    eye = torch.eye(4).double()
    layer = GQA(heads=2, head_dim=2).make(2, memory_dim=4)
    fill(layer, wk=eye, wv=eye, wo=g.wo)
    joined = torch.cat(list(g.heads), -1)  # each token attends to one memory token: its heads
    ctx = context(1, Full(), memory=joined[:, None], memory_pos=Span.run(0, 1))
    example.right(layer.entries(joined[:, None], ctx)["v"].flatten(1), "joined")
    example.both(layer(torch.ones(2, 1, 2).double(), ctx)[:, 0], "output")
    example.right(layer.wo(g.printed), "output_of_printed")


@torch.no_grad()
def test_masked_self_attention_4x4_is_a_convex_mixture_of_the_past(example: Example) -> None:
    g, watch = example.given, Watch()
    layer = fill(GQA(heads=1).make(4), wq=g.wq, wk=g.wk, wv=g.wv, wo=torch.eye(4).double())
    out = run(layer, g.x, probe=watch)
    seen = Visible(Causal(), Span.run(0, 4), Span.run(0, 4)).tensor()[0, 0]
    example.both(watch.q[0], "q")
    example.right(watch.scaled[0] / watch.scale, "scores")
    example.right(watch.scaled[0], "scaled")
    example.right(watch.scaled[0].masked_fill(~seen, -torch.inf), "masked")
    assert torch.equal(seen, g.additive_mask == 0)
    example.both(watch.weights[0], "weights")
    example.both(out, "output")
    torch.testing.assert_close(watch.scaled[0], watch.scaled[0].T)  # q = k: symmetric
    for i, row in enumerate(out):
        visible = watch.v[0, : i + 1]
        assert (row >= visible.amin(0) - 1e-12).all() and (row <= visible.amax(0) + 1e-12).all()


def test_masked_self_attention_from_seed_projection_continues_properly(example: Example) -> None:
    g, watch, eye = example.given, Watch(), torch.eye(4).double()
    layer = fill(GQA(heads=1).make(4), wq=eye, wk=eye, wv=eye, wo=eye)
    out = run(layer, g.q, probe=watch)
    example.right(watch.scaled[0] / watch.scale, "scores")
    example.both(watch.scaled[0], "scaled")
    example.right(watch.weights[0], "weights")
    example.right(out, "output")


def test_softmax_of_masked_scores_sums_to_one_in_every_row(example: Example) -> None:
    x = example.given.scores
    a = softmax(x, x > -torch.inf)
    example.both(a, "weights")
    torch.testing.assert_close(a.sum(-1), torch.ones(4).double())
    torch.testing.assert_close(softmax(x), a)  # -inf in the scores says the same


def test_kv_cache_incremental_equals_one_causal_pass(example: Example) -> None:
    g = example.given
    layer = fill(GQA(heads=1).make(4), wq=g.wq, wk=g.wk, wv=g.wv, wo=torch.eye(4).double())
    cache = Contiguous([layer.cache_spec()], 1, dtype=torch.float64)
    assert set(layer.cache_spec().token) == {"k", "v"}  # no query is ever kept
    steps = []
    for x in g.x:
        ctx = context(1, store=cache.layer(0))
        ctx.pos = cache.begin(1)
        with torch.no_grad():
            steps.append(layer(x[None, None], ctx)[0, 0])
    example.right(torch.stack(steps), "steps")
    example.right(run(layer, g.x), "steps")


def test_causal_masks_keep_the_past_and_align_bottom_right(example: Example) -> None:
    g = example.given

    def keep(start: int, queries: int, keys: int) -> torch.Tensor:
        return Visible(Causal(), Span.run(start, queries), Span.run(0, keys)).tensor()[0, 0]

    full = keep(0, g.size, g.size)
    example.right(full, "keep")
    example.right(~full, "blocked")
    for size in (4, 5):
        zeros = torch.zeros(size, size).double()
        example.right(zeros.masked_fill(~keep(0, size, size), -torch.inf), f"additive_{size}")
    finite = torch.zeros(5, 5).double().masked_fill(~full, -1e9)
    example.right(finite, "finite_5")
    example.wrong(finite.tolist(), "finite_5")
    example.both(keep(g.keys - g.queries, g.queries, g.keys), "rectangular")


def test_scale_then_bias_order_adds_the_bias_after_scaling(example: Example) -> None:
    g = example.given
    q, k = heads_first(g.q, g.k)
    seen = Visible(Causal(), Span.run(0, 3), Span.run(0, 3)).tensor()
    scale = g.head_dim**-0.5
    example.both(weights(q, k, None, Terms(scale, bias=g.bias[None, None]))[0, 0], "biased")
    example.both(weights(q, k, seen, Terms(scale))[0, 0], "causal")
    eye = torch.eye(3).double()
    for backend in BACKENDS:
        qkv = (x[None, :, None] for x in (g.q, g.k, eye))
        a = attend(*qkv, bias=g.bias[None, None], backend=backend)  # values I show the weights
        example.both(a[0, :, 0], "biased")


def test_fully_masked_row_policies_are_zeros_here(example: Example) -> None:
    g = example.given
    seen = ~g.blocked
    for dtype in (torch.float64, torch.float32, torch.float16):
        a = softmax(g.logits.to(dtype), seen).double()
        example.right(a, "weights")
        for other in ("minus_inf", "dtype_minimum", "float64_minus_1e9", "float32_minus_1e9"):
            example.wrong(a, other)
    q, k = torch.ones(1, 1, 1, 1).double(), g.logits[None, :, None, None]
    v = g.values[None, :, None]
    for backend in BACKENDS:
        example.right(attend(q, k, v, seen[None, None, None], backend=backend)[0, 0, 0], "output")


def test_mha_gqa_mqa_map_consecutive_heads_to_a_group(example: Example) -> None:
    g = example.given
    for groups in (4, 2, 1):
        w = getattr(g, f"g{groups}")
        config = GQA(heads=g.heads, kv_heads=groups, head_dim=g.head_dim)
        layer = fill(config.make(8), wq=g.wq, wk=w.wk, wv=w.wv, wo=g.wo)
        for backend in BACKENDS:
            out = run(layer, g.x, Full(), backend=backend)
            (example.both if groups == 2 else example.right)(out, f"g{groups}")
            example.right(run(layer, g.x, backend=backend), f"g{groups}_causal")
        # the same as heads of their own whose rows repeat
        wide = [x.unflatten(0, (groups, -1)) for x in (w.wk, w.wv)]
        wk, wv = (x.repeat_interleave(g.heads // groups, 0).flatten(0, 1) for x in wide)
        same = fill(GQA(g.heads, head_dim=g.head_dim).make(8), wq=g.wq, wk=wk, wv=wv, wo=g.wo)
        example.right(run(same, g.x), f"g{groups}_causal")
