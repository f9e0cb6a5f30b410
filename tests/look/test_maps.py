"""Links and thumbnails of attention maps, against cases worked out by hand."""

import pytest
import torch

from regard.errors import UsageError
from regard.see.plots import Link, links
from regard.see.probe import thumbnail


def test_best_source_of_each_target_is_linked() -> None:
    a = torch.tensor([[0.1, 0.7, 0.2], [0.45, 0.1, 0.45], [0.0, 0.0, 0.0]])
    found = links(a)
    assert [(x.source, x.target) for x in found] == [(1, 0), (0, 1)]
    assert found[0] == Link(1, 0, a[0, 1].item(), True)


def test_links_name_the_strongest_and_the_strong() -> None:
    a = torch.tensor([[0.7, 0.3, 0], [0.25, 0.25, 0.5], [0, 0, 0], [0.4, 0.4, 0.2]]).double()
    assert [(x.target, x.source, x.best) for x in links(a, least=0.3)] == [
        (0, 0, True),
        (0, 1, False),
        (1, 2, True),
        (3, 0, True),
        (3, 1, False),
    ]
    with pytest.raises(UsageError, match="least=0.0"):
        links(a, 0.0)


def test_thumbnail_keeps_the_largest_weight_of_each_field() -> None:
    a = torch.eye(8)[None, None]
    assert torch.equal(thumbnail(4)(a)[0, 0], torch.eye(4))
    assert torch.equal(thumbnail(9)(a), a)
