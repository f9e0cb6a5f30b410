"""The indexer's training: its target, what it moves and what it leaves alone, and that it learns to choose."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.attention import DSA, GQA, sparse
from regard.attention.core import Terms
from regard.data.feed import IGNORE, Batch
from regard.errors import UsageError
from regard.mask import Causal, Span, Visible
from regard.see.probe import Probe
from regard.training import index_losses
from regard.training.index_losses import (
    dense_index,
    densely,
    divergence,
    indexers,
    sparse_index,
    watching,
)
from regard.training.objectives import causal
from tests.laws.mechanisms import MECHANISMS, TIGHT, decoder, ids

SPARSE = [n for n, c in MECHANISMS.items() if isinstance(c, DSA)]
T = 9


def batch() -> Batch:
    labels = ids(2, T, seed=2)
    labels[0, 5:7] = IGNORE
    return Batch(ids(2, T), labels)


def seen() -> Tensor:
    return Visible(Causal(), Span.run(0, T), Span.run(0, T)).tensor()[:, 0].expand(2, -1, -1)


# --- the divergence -----------------------------------------------------------------------------------------------


def test_divergence_is_zero_where_the_scores_say_the_target_and_else_more() -> None:
    scores = torch.randn(2, T, T).double()
    target = scores.masked_fill(~seen(), -torch.inf).softmax(-1) * 3  # any scale: it is normalised
    torch.testing.assert_close(divergence(scores + 5, target, seen()), torch.zeros(2, T).double())
    other = divergence(torch.randn(2, T, T).double(), target, seen())
    assert (other[:, 1:] > 0).all() and (other[:, 0] == 0).all()  # the first token has no choice


def test_divergence_of_rows_that_see_nothing_is_zero_forward_and_backward() -> None:
    scores = torch.randn(1, 3, 4, requires_grad=True)
    mask = torch.tensor([[[True, False, True, False], [False] * 4, [True] * 4]])
    loss = divergence(scores, torch.rand(1, 3, 4), mask)
    loss.sum().backward()
    assert loss[0, 1] == 0 and scores.grad is not None
    assert scores.grad.isfinite().all() and (scores.grad[~mask] == 0).all()


def test_divergence_has_a_gradient_however_wrong_the_scores_are() -> None:
    scores = torch.tensor([[[0.0, 80.0]]], requires_grad=True)
    divergence(scores, torch.tensor([[[1.0, 0.0]]]), torch.ones(1, 1, 2).bool()).sum().backward()
    torch.testing.assert_close(scores.grad, torch.tensor([[[-1.0, 1.0]]]))


# --- stage 1 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPARSE)
def test_dense_index_compares_with_the_attention_of_the_dense_model(name: str) -> None:
    """By hand: weights of the same model with every key allowed, from the public probe."""
    model, data, probe = decoder(name), batch(), Probe()
    x: dict[int, Tensor] = {}
    with densely(model):
        for i, block in enumerate(model.tower.blocks):
            block.attention.register_forward_pre_hook(
                lambda m, args, i=i: x.__setitem__(i, args) or None
            )
        model.hidden(data.ids, probe=probe)
    want = torch.zeros(()).double()
    for i, block in enumerate(model.tower.blocks):
        layer, (h, ctx, _) = block.attention, x[i]
        exact = replace(layer.config, precision="exact")
        layer.indexer.config = exact
        c_q = layer.attention.query_input(h)
        scores = layer.indexer.scores(
            layer.indexer.queries(c_q, ctx), layer.indexer.keys(h, ctx), h
        )
        mask = layer.visible(ctx.pos, ctx).tensor()[:, 0].expand(2, -1, -1)
        target = probe.maps[f"{i}.self"][0].sum(1)
        want += (divergence(scores, target, mask) * (data.labels != IGNORE)).sum()
    total, count = dense_index(model, data)
    torch.testing.assert_close(total, want, **TIGHT)
    assert count == 2 * T - 2


@pytest.mark.parametrize("name", SPARSE)
def test_dense_index_moves_indexers_only(name: str) -> None:
    model = decoder(name)
    dense_index(model, batch())[0].backward()
    for key, p in model.named_parameters():
        assert (p.grad is not None) == ("indexer" in key), key
        assert p.grad is None or p.grad.isfinite().all()


@pytest.mark.parametrize("name", SPARSE)
def test_indexers_alone_are_left_to_learn(name: str) -> None:
    model = indexers(decoder(name))
    learning = {key for key, p in model.named_parameters() if p.requires_grad}
    assert learning == {key for key, _ in model.named_parameters() if "indexer" in key} != set()


@pytest.mark.parametrize("stage", [dense_index, sparse_index])
def test_index_objectives_in_runs_of_queries_are_the_same(
    stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = decoder("dsa_t5"), batch()
    whole = stage(model, data)[0]
    monkeypatch.setattr(index_losses, "ROWS", 1)
    torch.testing.assert_close(stage(model, data)[0], whole, **TIGHT)


@pytest.mark.parametrize("queries", [1, 2, 4, T, 99])
def test_index_objectives_make_no_more_scores_at_a_time_than_is_said(
    queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores of main attention are b h s for a query, those of the indexer b h' s; a run is rounded up."""
    runs: list[int] = []

    def counted(part: Any, rows: slice, *args: Any, **how: Any) -> Tensor:
        runs.append(rows.stop - rows.start)
        return part(rows, *args)

    # 2 rows, 6 heads and 3 of the indexer, 9 keys; and a score more than so many queries have.
    model, data = decoder("dsa_gqa"), batch()
    monkeypatch.setattr(index_losses, "checkpoint", counted)
    monkeypatch.setattr(index_losses, "ROWS", 2 * 3 * T * queries - 1)
    dense_index(model, data)
    size = min(queries, T)
    layer = [size] * (T // size) + [T % size] * (T % size > 0)
    assert runs == layer * 2
    monkeypatch.setattr(index_losses, "ROWS", 2 * 6 * T * queries - 1)
    with torch.no_grad(), densely(model), watching(model) as watch:
        model.hidden(data.ids, probe=watch)
    for call in watch.calls.values():
        assert [part.shape[1] for part in call.target] == layer


@pytest.mark.parametrize("name", SPARSE)
def test_hiding_keys_that_were_not_chosen_is_gathering_the_chosen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As short rows are trained on a GPU: the same loss, the same gradients, the same maps."""
    both, model = [], decoder(name)
    for keys in (0, 100):
        monkeypatch.setitem(sparse.HIDE, "cpu", keys)
        model.zero_grad()
        probe = Probe()
        total = sparse_index(model, batch())[0]
        total.backward()
        model(batch().ids, probe=probe)
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        both.append((total, grads, [probe.maps[f"{i}.self"][0] for i in range(2)]))
    torch.testing.assert_close(*both, **TIGHT)


@pytest.mark.parametrize("stage", [dense_index, sparse_index])
def test_index_objectives_of_packed_documents_are_the_sum_of_the_documents(stage: Any) -> None:
    model, doc = decoder("dsa_gqa"), torch.tensor([[0] * 4 + [1] * 5]).expand(2, -1)
    data = batch()
    alone = [
        stage(model, data.each(lambda x, p=part: x[:, p]))[0] for part in (slice(4), slice(4, T))
    ]
    packed = stage(model, replace(data, doc=doc))[0]
    torch.testing.assert_close(packed, sum(alone), **TIGHT)


def test_densely_gives_the_choice_back() -> None:
    model = decoder("dsa_gqa")
    with densely(model):
        dense = model(ids(1, T))
    assert model.tower.blocks[0].attention.config.topk == 4
    assert not torch.allclose(model(ids(1, T)), dense)


# --- stage 2 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_index_trains_the_model_and_its_indexers_apart(name: str) -> None:
    """The model's gradient is that of the causal loss alone; the indexers' that of the divergence alone."""
    model, data = decoder(name), batch()
    causal(model, data)[0].backward()
    alone = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    total, count = sparse_index(model, data)
    total.backward()
    for key, p in model.named_parameters():
        assert p.grad is not None, key
        if "indexer" in key:
            assert alone[key] is None
        else:
            torch.testing.assert_close(p.grad, alone[key], **TIGHT)
    assert total > causal(model, data)[0] and count == 2 * T - 2


def test_sparse_index_looks_at_the_choice_only() -> None:
    """With one key to choose there is nothing to get wrong; with all of them it is the dense divergence."""
    data = batch()
    one, every = (
        decoder("dsa_gqa", attention=replace(MECHANISMS["dsa_gqa"], topk=k))  # type: ignore[type-var]
        for k in (1, 99)
    )
    torch.testing.assert_close(sparse_index(one, data)[0], causal(one, data)[0], **TIGHT)
    apart = sparse_index(every, data)[0] - causal(every, data)[0]
    torch.testing.assert_close(apart, dense_index(every, data)[0], **TIGHT)


def test_index_objectives_need_sparse_attention() -> None:
    for stage in (dense_index, sparse_index):
        with pytest.raises(UsageError, match="not sparse"):
            stage(decoder("mha"), batch())
    with pytest.raises(UsageError, match="not sparse"), densely(decoder("mha")):
        pass


def test_index_warm_up_teaches_the_indexer_to_find_the_heavy_keys() -> None:
    """The share of attention that the choice keeps rises from little more than chance to nearly the best possible."""
    attention = DSA(GQA(2, head_dim=12), index_heads=4, index_dim=16, topk=4)
    model = decoder("mha", attention=attention, layers=1)
    data = [Batch(ids(8, 24, seed=s), ids(8, 24, seed=s)) for s in range(4)]

    def kept() -> tuple[float, float]:
        with torch.no_grad(), densely(model), watching(model) as watch:
            model.hidden(data[0].ids, probe=watch)
        call = watch.calls["0.self"]
        target = torch.cat(call.target, 1)[:, 8:]
        layer, x = call.layer, call.x
        scores = layer.indexer.scores(
            layer.indexer.queries(x, call.ctx), layer.indexer.keys(x, call.ctx), x
        )[:, 8:]
        shown = Visible(Causal(), Span.run(8, 16), Span.run(0, 24)).tensor()[:, 0]
        chosen = scores.masked_fill(~shown, -torch.inf).topk(4).indices
        total = target.sum(-1)
        mine, best = target.gather(-1, chosen).sum(-1), target.topk(4).values.sum(-1)
        return (mine / total).mean().item(), (best / total).mean().item()

    before, best = kept()
    indexer = [p for n, p in model.named_parameters() if "indexer" in n]
    optimizer = torch.optim.Adam(indexer, lr=0.02)
    for step in range(120):
        optimizer.zero_grad()
        total, count = dense_index(model, data[step % 4])
        (total / count).backward()
        optimizer.step()
    after, same = kept()
    assert same == best  # the model itself has not moved
    assert before < 0.75 * best and after > 0.92 * best, (before, after, best)


@pytest.mark.parametrize("queries", [1, 6])
def test_attention_in_runs_sees_by_a_mask_for_all_or_for_each(
    queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask (b h t s), or the same for every query (b h 1 s)."""
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 2, 6, 4, generator=g) for _ in range(2))
    mask = torch.rand(1, 1, queries, 6, generator=g) < 0.7
    mask[..., 0] = True
    whole, runs = (index_losses.Seen(None, q, None, []) for _ in range(2))  # type: ignore[arg-type]
    whole.see(q, k, k, mask, Terms(0.5))
    monkeypatch.setattr(index_losses, "ROWS", 24)
    runs.see(q, k, k, mask, Terms(0.5))
    assert len(runs.target) == 3
    torch.testing.assert_close(torch.cat(runs.target, 1), whole.target[0])
