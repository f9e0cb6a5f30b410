"""Disentangled attention: equation 4 of its paper with numbers one by one, its buckets, and the table that layers
share."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.attention import GQA, Disentangled
from regard.errors import UsageError
from regard.fast.invariant import invariant
from regard.mask import Full
from regard.models.init import Start, initialize
from tests.laws.mechanisms import DIM, TIGHT, context, decoder, layer
from tests.open.stranger import stands

CONFIG = Disentangled(3, span=3, max_distance=None, norm=1e-3)


def expected(part: Any, x: Tensor) -> Tensor:
    """(t m) -> (t m), head by head and pair by pair."""
    c, t, d = part.config, len(x), part.d
    p = part.distances()
    of_k, of_q = part.distance_k or part.wk, part.distance_q or part.wq
    heads = []
    for h in range(part.h):
        at = slice(h * d, (h + 1) * d)
        q, k, v = (w(x)[:, at] for w in (part.wq, part.wk, part.wv))
        p_k, p_q = of_k(p)[:, at], of_q(p)[:, at]
        rows = []
        for i in range(t):
            scores = []
            for j in range(t):
                r = min(max(i - j + c.span, 0), 2 * c.span - 1)
                terms = [q[i] @ k[j]]
                terms += [q[i] @ p_k[r]] if c.content_to_position else []
                terms += [k[j] @ p_q[r]] if c.position_to_content else []
                scores.append(sum(terms) / math.sqrt(part_count(c) * d))
            rows.append(torch.stack(scores).softmax(0) @ v)
        heads.append(torch.stack(rows))
    return part.wo(torch.cat(heads, -1))


def part_count(c: Disentangled) -> int:
    return 1 + c.content_to_position + c.position_to_content


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("to, of", [(True, True), (True, False), (False, True), (False, False)])
def test_scores_are_those_of_the_equation(to: bool, of: bool, shared: bool) -> None:
    config = replace(CONFIG, content_to_position=to, position_to_content=of, shared=shared)
    part, x = layer(config), torch.randn(9, DIM).double()
    torch.testing.assert_close(part(x[None], context(9, Full()))[0], expected(part, x), **TIGHT)


def test_without_terms_of_distance_it_is_multi_head_attention() -> None:
    part = layer(replace(CONFIG, content_to_position=False, position_to_content=False))
    plain: Any = layer(GQA(3, bias=True, out_bias=True))
    plain.load_state_dict({n: p for n, p in part.state_dict().items() if "distance" not in n})
    x = torch.randn(2, 7, DIM).double()
    torch.testing.assert_close(part(x, context(7)), plain(x, context(7)), **TIGHT)


def test_near_distances_have_buckets_and_far_ones_share_them() -> None:
    gap = torch.arange(-40, 41)
    rows = Disentangled(1, span=8, max_distance=32).bucket(gap) - 8
    assert torch.equal(rows[36:45], gap[36:45])  # up to span / 2
    assert torch.equal(rows.flip(0).clamp(min=-7), -rows.clamp(min=-7))
    assert bool((rows.diff() >= 0).all()) and rows.max() == 7 and rows.min() == -8
    alone = Disentangled(1, span=8, max_distance=None).bucket(gap) - 8
    assert torch.equal(alone, gap.clamp(-8, 7))


def test_layers_of_a_tower_share_the_vectors_of_distances(tmp_path: Path) -> None:
    model: Any = decoder("disentangled", layers=3)
    first, *others = (block.attention.distances for block in model.tower.blocks)
    assert all(each is first for each in others)
    names = [name for name, _ in model.named_parameters() if "distances" in name]
    assert names == [
        f"tower.blocks.0.attention.distances.{n}" for n in ("weight", "norm.weight", "norm.bias")
    ]
    again: Any = regard.load(model.save(tmp_path), dtype=torch.float64)
    assert again.tower.blocks[2].attention.distances is again.tower.blocks[0].attention.distances
    ids = torch.tensor([[3, 1, 4, 1, 5, 9]])
    assert torch.equal(again(ids), model(ids))


def test_vectors_of_distances_are_drawn_as_tables() -> None:
    model: Any = decoder("disentangled")
    initialize(model, Start("normal", 0.5))
    assert 0.3 < float(model.tower.blocks[0].attention.distances.weight.detach().std()) < 0.7


def test_disentangled_attention_trains_decodes_and_comes_back(tmp_path: Path) -> None:
    attention = {"kind": "disentangled", "heads": 4, "span": 5, "max_distance": 12}
    stands(tmp_path, attention=attention)


def test_invariant_mode_is_refused() -> None:
    with pytest.raises(UsageError, match="no invariant mode for DistanceVectors"):
        invariant(decoder("disentangled").float())


@pytest.mark.parametrize("settings, words", [
    (dict(span=8, max_distance=5), "leaves nothing to share; give more than 5, or none"),
    (dict(head_dim=None, heads=5), "does not divide dim=24; choose one of"),
])  # fmt: skip
def test_wrong_setting_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Disentangled(**{"heads": 3, **settings}).make(DIM)
