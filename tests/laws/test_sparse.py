"""DSA: dense when it may choose everything, the same choice in every layout, work that grows with k."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from regard.attention import DSA, GQA, MLA, attend
from regard.attention import sparse as select
from regard.attention.sparse import (
    choose,
    fp8_bytes,
    fp8_dots,
    hadamard,
    index_scores,
    packed_fp8,
    to_fp8,
)
from regard.cache import LAYOUTS
from regard.mask import Causal, Full, Span, Visible
from regard.training.index_losses import divergence
from tests.laws.mechanisms import DIM, MECHANISMS, OPTIONS, TIGHT, context, layer

SPARSE = {n: c for n, c in MECHANISMS.items() if isinstance(c, DSA)}


def wide(name: str, topk: int = 99) -> DSA:
    return replace(SPARSE[name], topk=topk)


@pytest.mark.parametrize("name", SPARSE)
def test_dsa_with_topk_covering_all_keys_is_the_dense_layer_to_the_bit(name: str) -> None:
    dsa, x = layer(wide(name)), torch.randn(2, 9, DIM).double()
    assert torch.equal(dsa(x, context(9)), dsa.attention(x, context(9)))


@pytest.mark.parametrize("mask", [Causal(), Full()], ids=["causal", "full"])
@pytest.mark.parametrize("name", SPARSE)
def test_dsa_gathering_all_keys_equals_the_dense_layer(name: str, mask: Causal | Full) -> None:
    dsa, x = layer(wide(name)), torch.randn(2, 9, DIM).double()
    torch.testing.assert_close(gathered(dsa, x, mask), dsa.attention(x, context(9, mask)), **TIGHT)


def gathered(dsa: torch.nn.Module, x: Tensor, mask: Causal | Full) -> Tensor:
    ctx = context(x.shape[1], mask)
    c_q = dsa.attention.query_input(x)
    kept = {**dsa.attention.entries(x, ctx), "index_k": dsa.indexer.kept(dsa.indexer.keys(x, ctx))}
    seen = dsa.visible(ctx.pos, ctx)
    q, index_q = dsa.attention.queries(c_q, ctx), dsa.indexer.queries(c_q, ctx)
    return dsa.project_out(dsa.weigh(dsa.sparse(x, q, index_q, kept, seen, ctx, None), x))


@pytest.mark.parametrize("name", SPARSE)
def test_dsa_is_dense_attention_masked_to_its_choice(name: str) -> None:
    """The definition: choose from the scores, then hide every other key from the dense layer."""
    dsa, x, ctx = layer(SPARSE[name]), torch.randn(2, 9, DIM).double(), context(9)
    c_q = dsa.attention.query_input(x)
    kept = dsa.attention.entries(x, ctx)
    seen = dsa.visible(ctx.pos, ctx).tensor()[:, 0]
    index_k = dsa.indexer.kept(dsa.indexer.keys(x, ctx))
    index = dsa.indexer.scores(dsa.indexer.queries(c_q, ctx), index_k, x)
    chosen = choose(index.masked_fill(~seen, -torch.inf), dsa.config.topk)
    mask = torch.zeros(2, 9, 9).scatter(-1, chosen, 1.0).bool() & seen
    want = dsa.attention.core_attention(
        dsa.attention.queries(c_q, ctx), kept, mask[:, None], ctx, None
    )
    torch.testing.assert_close(dsa(x, ctx), dsa.project_out(dsa.weigh(want, x)), **TIGHT)


@pytest.mark.parametrize("name", SPARSE)
def test_dsa_in_chunks_of_queries_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dsa, x = layer(SPARSE[name]), torch.randn(2, 9, DIM).double()
    whole = dsa(x, context(9))
    monkeypatch.setitem(select.WORK, "cpu", 1)  # one query at a time
    torch.testing.assert_close(dsa(x, context(9)), whole, **TIGHT)


@pytest.mark.parametrize("name", ["dsa_mla", "dsa_gqa"])
def test_dsa_attends_to_k_keys_and_no_more(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted: each query meets topk keys, so the attention's work is t k, whatever the length."""
    seen: list[tuple[int, int, int]] = []

    def spy(q: Tensor, k: Tensor, v: Tensor, *rest: object, **more: object) -> Tensor:
        seen.append((q.shape[0], q.shape[1], k.shape[1]))
        return attend(q, k, v, *rest, **more)  # type: ignore[arg-type]

    for module in ("multihead", "latent"):
        monkeypatch.setattr(f"regard.attention.{module}.attend", spy)
    dsa = layer(SPARSE[name])
    for length in (12, 40):
        seen.clear()
        dsa(torch.randn(2, length, DIM).double(), context(length))
        assert sum(b * t * s for b, t, s in seen) == 2 * length * dsa.config.topk


def test_choose_gives_the_k_largest_in_ascending_order() -> None:
    scores = torch.randn(3, 4, 11)
    want = scores.topk(5).indices.sort(-1).values
    assert torch.equal(choose(scores, 5), want)


def test_choose_ties_go_to_the_earliest_position() -> None:
    assert choose(torch.zeros(1, 9), 4).tolist() == [[0, 1, 2, 3]]
    scores = torch.tensor([[0.0, 2.0, 0.0, 1.0, 2.0, 0.0, 1.0]])
    assert choose(scores, 4).tolist() == [[1, 3, 4, 6]]
    assert choose(scores, 5).tolist() == [[0, 1, 3, 4, 6]]


def test_choose_does_not_depend_on_the_width_of_the_buffer() -> None:
    scores = torch.randint(0, 3, (200, 10)).float()  # few values: ties everywhere
    for more in (1, 7, 300):
        buffer = torch.cat([scores, torch.full((200, more), -torch.inf)], 1)
        assert torch.equal(choose(buffer, 4), choose(scores, 4))


def test_choice_does_not_depend_on_where_slots_lie() -> None:
    dsa = DSA(GQA(2), 1, 4, topk=4).make(8)
    scores, order = torch.randint(0, 3, (5, 6, 10)).float(), torch.randperm(10)
    by_position = order.argsort()[None].expand(5, 10)  # slot of position p
    slots = dsa.choice(scores[..., order], 4, by_position)
    assert torch.equal(order[slots].sort(-1).values, choose(scores, 4))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dsa_choice_with_ties_does_not_depend_on_the_layout(layout: str) -> None:
    """Every index score is exactly 0 here: each query must take the earliest keys it sees, in every layout."""
    dsa, x = layer(DSA(GQA(3), 2, 4, topk=3)), torch.randn(2, 12, DIM).double()
    torch.nn.init.zeros_(dsa.indexer.ww.weight)
    more = OPTIONS.get(layout, {}) | ({"window": 12} if layout == "ring" else {})
    cache = LAYOUTS[layout]([dsa.cache_spec()], 2, dtype=torch.float64, **more)
    out = []
    for i in range(0, 12, 4):
        ctx = context(4, store=cache.layer(0))
        ctx.pos = cache.begin(4)
        out.append(dsa(x[:, i : i + 4], ctx))
    first = torch.arange(12) < 3
    mask = (first[None] & torch.ones(12, 12).tril().bool())[None, None]
    q, kept = dsa.attention.queries(x, context(12)), dsa.attention.entries(x, context(12))
    want = dsa.attention.core_attention(q, kept, mask, context(12), None)
    torch.testing.assert_close(torch.cat(out, 1), dsa.attention.wo(want.flatten(2)), **TIGHT)


# --- the indexer --------------------------------------------------------------------------------------------------


def test_index_scores_are_the_sum_of_the_paper() -> None:
    indexer, x = layer(SPARSE["dsa_gqa"]).indexer, torch.randn(1, 6, DIM).double()
    q, k = indexer.queries(x, context(6)), indexer.keys(x, context(6))
    w = x @ indexer.ww.weight.T
    want = torch.zeros(6, 6).double()
    for t in range(6):
        for s in range(6):
            for j in range(3):
                dot = q[0, t, j] @ k[0, s] / 6**0.5
                want[t, s] += w[0, t, j] / 3**0.5 * dot.clamp(min=0)
    # the indexer may work in float32: what matters is the order
    torch.testing.assert_close(indexer.scores(q, k, x)[0].double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [1, 2, 4, 16])
def test_hadamard_is_the_matrix_of_kronecker_products(width: int) -> None:
    """H of size 2d is [[H, H], [H, -H]] of size d."""
    matrix = torch.ones(1, 1).double()
    while len(matrix) < width:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double(), matrix)
    x = torch.randn(3, 2, width).double()
    torch.testing.assert_close(hadamard(x), x @ matrix / width**0.5, **TIGHT)


@pytest.mark.parametrize("width", [1, 2, 16, 64])
def test_hadamard_keeps_dot_products(width: int) -> None:
    q, k = torch.randn(2, 5, 3, width).double()
    turned = torch.einsum("ahd,bhd->abh", hadamard(q), hadamard(k))
    torch.testing.assert_close(turned, torch.einsum("ahd,bhd->abh", q, k), **TIGHT)


def test_hadamard_is_its_own_inverse_and_flattens_an_outlier() -> None:
    x = torch.zeros(64)
    x[5] = 8.0
    torch.testing.assert_close(hadamard(hadamard(x)), x)
    assert hadamard(x).abs().max() == 1.0  # 8 / sqrt(64) in every place


@pytest.mark.parametrize("turned", [False, True])
def test_fp8_indexer_chooses_nearly_the_same_keys(turned: bool) -> None:
    """Recall of the exact choice; e4m3 keeps 3 bits of mantissa, so only near-ties may change."""
    q, k, w = torch.randn(1, 32, 4, 64), torch.randn(1, 512, 64), torch.rand(1, 32, 4)
    k[..., 7] *= 20  # an outlier feature, as trained keys have
    exact = choose(index_scores(torch.einsum("bthd,bsd->bths", q, k), w), 64)
    q, k = (hadamard(q), hadamard(k)) if turned else (q, k)
    rough = choose(index_scores(fp8_dots(q, packed_fp8(k)), w), 64)
    hits = (exact[..., :, None] == rough[..., None, :]).any(-1).float().mean()
    assert hits > 0.95


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_fp8_keys_are_kept_as_bits_of_any_type(dtype: torch.dtype) -> None:
    """D + 16 bytes, what `to_fp8` gives among them; a cache that moves numbers moves them."""
    k = torch.randn(2, 5, 24).to(dtype)
    kept = packed_fp8(k)
    assert kept.dtype == dtype and kept[0, 0].nbytes == 48
    bits, (k8, scale) = kept.view(torch.uint8), to_fp8(k)
    assert torch.equal(bits[..., :24], k8.view(torch.uint8))
    assert torch.equal(bits[..., 32:36].contiguous().view(torch.float32), scale)


@pytest.mark.parametrize("width, size", [(1, 32), (15, 32), (16, 32), (17, 48), (32, 48), (33, 64)])
def test_fp8_keys_take_whole_steps_of_16_bytes_and_one_for_the_scale(width: int, size: int) -> None:
    assert fp8_bytes(width) == size == packed_fp8(torch.randn(1, 1, width)).nbytes


def test_fp8_scale_puts_the_largest_number_at_the_end_of_the_range() -> None:
    """e4m3 ends at 448. A row of nearly nothing is not divided by it, or it would be 0 / 0."""
    rows = torch.tensor([[3.0, -7.0], [1.5e-12, 0.0], [1e-13, 0.0], [0.0, 0.0]])
    x8, scale = to_fp8(rows)
    torch.testing.assert_close(
        scale[:, 0] * 448, torch.tensor([7.0, 1.5e-12, 1e-12, 1e-12]), rtol=1e-6, atol=0
    )
    assert x8.float().tolist() == [[192.0, -448.0], [448.0, 0.0], [44.0, 0.0], [0.0, 0.0]]


def test_fp8_dots_are_close_to_exact_ones() -> None:
    q, k = torch.randn(2, 5, 3, 32), torch.randn(2, 7, 32)
    exact = torch.einsum("bthd,bsd->bths", q, k)
    # each factor is off by at most 2^-4 relatively, and such errors mostly average out
    assert (fp8_dots(q, packed_fp8(k)) - exact).abs().max() < 0.1 * exact.abs().max()


@pytest.mark.parametrize("name", ["dsa_mla", "dsa_gqa"])
def test_index_loss_falls_when_the_indexer_is_trained(name: str) -> None:
    dsa, x, ctx = layer(SPARSE[name]), torch.randn(2, 8, DIM).double(), context(8)
    seen = Visible(Causal(), Span.run(0, 8), Span.run(0, 8)).tensor()
    c_q = dsa.attention.query_input(x).detach()
    dense = dense_weights(dsa, x)
    optimizer = torch.optim.Adam(dsa.indexer.parameters(), 0.02)
    losses = []
    for _ in range(15):
        index = dsa.indexer.scores(dsa.indexer.queries(c_q, ctx), dsa.indexer.keys(x, ctx), x)
        loss = divergence(index, dense.sum(1), seen[:, 0].expand(2, -1, -1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.6 * losses[0]


@torch.no_grad()
def dense_weights(dsa: torch.nn.Module, x: Tensor) -> Tensor:
    from regard.see.probe import Probe

    probe, ctx = Probe(), context(x.shape[1])
    ctx.probe, ctx.site = probe, "0.self"
    dsa.attention(x, ctx)
    return probe.maps["0.self"][0]


def test_dsa_over_mla_uses_the_query_latent_for_its_index_queries() -> None:
    dsa = DSA(MLA(3, latent=8, query_latent=7), 2, 4, topk=2).make(DIM)
    assert dsa.indexer.wq.in_features == 7


@pytest.mark.parametrize("context, keys", [(3, 3), (4, 4), (5, 4), (90, 4)])
def test_dsa_pays_for_the_index_of_all_keys_and_for_the_chosen(context: int, keys: int) -> None:
    """2 H D for each key, and 2 h (d + e) for each that is attended to."""
    dsa = DSA(GQA(3, head_dim=5, value_dim=7), index_heads=2, index_dim=6, topk=4).make(DIM)
    assert dsa.dense(context) == (context == keys)
    assert dsa.flops(context) == 2 * context * 2 * 6 + 2 * keys * 3 * (5 + 7)
