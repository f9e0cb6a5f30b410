"""Masks are rules on positions; bound to queries and keys they take the cheapest form."""

import pytest
import torch

from regard.mask import Causal, Chunk, Documents, Full, Mask, Padding, Prefix, Span, Visible, Window


def seen(mask: Mask, q: Span, k: Span) -> list:
    return Visible(mask, q, k).tensor()[:, 0].int().tolist()


FOUR = Span.run(0, 4)


def test_span_run_is_one_row_for_all() -> None:
    span = Span.run(3, 2)
    assert span.index.tolist() == [[3, 4]] and span.start == 3 and span.size == 2


def test_span_ragged_marks_padding_with_minus_one() -> None:
    span = Span.ragged(torch.tensor([3, 1, 0]), 3)
    assert span.index.tolist() == [[0, 1, 2], [0, -1, -1], [-1, -1, -1]] and span.start is None


def test_span_ragged_starts_where_each_row_stands() -> None:
    span = Span.ragged(torch.tensor([2, 1]), 2, torch.tensor([5, 9]))
    assert span.index.tolist() == [[5, 6], [9, -1]]


def test_full_sees_everything() -> None:
    assert seen(Full(), FOUR, FOUR) == [[[1] * 4] * 4]


def test_causal_is_the_lower_triangle() -> None:
    assert seen(Causal(), FOUR, FOUR) == [torch.ones(4, 4).tril().int().tolist()]


def test_causal_ahead_looks_so_far_ahead() -> None:
    assert seen(Causal(1), FOUR, FOUR) == [torch.ones(4, 4).tril(1).int().tolist()]


def test_causal_aligns_bottom_right_when_queries_are_fewer() -> None:
    assert seen(Causal(), Span.run(2, 2), FOUR) == [[[1, 1, 1, 0], [1, 1, 1, 1]]]


def test_window_counts_the_querys_own_token() -> None:
    band = torch.ones(4, 4).tril().triu(-1).int().tolist()
    assert seen(Causal() & Window(2), FOUR, FOUR) == [band]
    assert seen(Causal() & Window(1), FOUR, FOUR) == [torch.eye(4).int().tolist()]


def test_window_without_a_direction_reaches_to_either_side() -> None:
    band = torch.ones(4, 4).tril(1).triu(-1).int().tolist()
    assert seen(Full() & Window(2), FOUR, FOUR) == [band]


def test_padding_hides_keys_past_each_rows_length() -> None:
    assert seen(Padding(torch.tensor([1, 3])), Span.run(0, 2), FOUR) == [
        [[1, 0, 0, 0]] * 2,
        [[1, 1, 1, 0]] * 2,
    ]


def test_documents_see_only_themselves() -> None:
    assert seen(Documents(torch.tensor([[0, 0, 1, 1]])), FOUR, FOUR) == [
        torch.block_diag(torch.ones(2, 2), torch.ones(2, 2)).int().tolist()
    ]


def test_prefix_sees_the_prefix_both_ways_and_the_rest_causally() -> None:
    assert seen(Prefix(torch.tensor([2])), FOUR, FOUR) == [
        [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    ]


def test_joined_masks_see_what_both_see() -> None:
    doc = Documents(torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]]))
    joined = Causal() & doc & Window(2)
    want = [
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]],
        [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]],
    ]
    assert seen(joined, FOUR, FOUR) == want and joined.rows == 2


@pytest.mark.parametrize(
    "mask",
    [Full(), Causal(), Causal(9), Window(9), Prefix(torch.tensor([4])), Padding(torch.tensor([9]))],
    ids=lambda m: type(m).__name__,
)
def test_no_mask_shows_a_slot_that_holds_nothing(mask: Mask) -> None:
    keys = Span(torch.tensor([[4, -1, 2, 3, -1]]))
    shown = Visible(mask, Span.run(4, 1), keys).tensor()[0, 0, 0]
    assert shown.tolist() == [True, False, True, True, False]


def test_positions_not_slots_decide() -> None:
    """A ring's slots: position 4 lies before 2 and 3."""
    assert seen(Causal() & Window(2), Span.run(4, 1), Span(torch.tensor([[4, 1, 2, 3]]))) == [
        [[1, 0, 0, 1]]
    ]


def test_every_mask_lowers_to_batch_one_queries_keys() -> None:
    for mask in (Full(), Causal(), Padding(torch.tensor([1, 2])), Prefix(torch.tensor([1, 2]))):
        assert Visible(mask, Span.run(0, 3), FOUR).tensor().shape[1:] == (1, 3, 4)


def test_rows_of_a_mask_are_rows_of_its_tensor() -> None:
    lengths = torch.tensor([4, 2])
    mask = Visible(Causal() & Padding(lengths), Span.ragged(lengths, 4), FOUR)
    for index in (slice(1, 3), torch.tensor([3, 0])):
        assert torch.equal(mask.rows(index), mask.tensor()[:, :, index])


@pytest.mark.parametrize("index", [slice(0, 2), slice(1, 3), slice(3, 4), slice(2, None)])
def test_part_of_the_queries_is_a_mask_of_its_own(index: slice) -> None:
    """Where their positions are plain it is lowered anew: to everything, where the last ones see all."""
    runs = Visible(Causal(1), Span.run(5, 4), Span.run(3, 6))
    ragged = Visible(Causal(), Span.ragged(torch.tensor([4, 2]), 4), FOUR)
    for whole in (runs, ragged):
        part = whole.part(index)
        assert torch.equal(part.tensor(), whole.tensor()[:, :, index])
        assert part.k is whole.k and part.mask is whole.mask
        assert (part.q.start is None) == (whole.q.start is None)
        assert part.everything == (whole is runs and bool(part.tensor().all()))
    assert runs.part(slice(3, 4)).everything and not runs.part(slice(1, 3)).everything


def test_part_of_queries_and_keys_is_a_tile_of_the_mask() -> None:
    runs = Visible(Causal(1), Span.run(5, 4), Span.run(3, 6))
    ragged = Visible(Causal(), Span.ragged(torch.tensor([4, 2]), 4), FOUR)
    for whole in (runs, ragged):
        for keys in (slice(0, 2), slice(2, 3), slice(2, 9)):
            part = whole.part(slice(1, 3), keys)
            assert torch.equal(part.tensor(), whole.tensor()[:, :, 1:3, keys])
            assert part.everything == (whole is runs and bool(part.tensor().all()))


def test_rule_on_indices_reads_one_row_of_positions_for_all() -> None:
    """Of three rows of the batch, queries and keys each have one row of positions, or all three."""
    lengths = torch.tensor([2, 4, 3])
    b, i, j = torch.meshgrid(*(torch.arange(n) for n in (3, 4, 4)), indexing="ij")
    for q in (FOUR, Span.ragged(lengths, 4)):
        for k in (FOUR, Span.ragged(lengths, 4)):
            bound = Visible(Causal() & Padding(lengths), q, k)
            assert torch.equal(bound.rule()(b, 0 * b, i, j), bound.tensor()[:, 0])


def test_rule_on_indices_equals_the_tensor() -> None:
    span = Span.ragged(torch.tensor([4, 2]), 4)
    mask = Visible(Causal() & Window(3), span, span)
    b, i, j = torch.meshgrid(*(torch.arange(n) for n in (2, 4, 4)), indexing="ij")
    assert torch.equal(mask.rule()(b, 0 * b, i, j), mask.tensor()[:, 0])


def test_causal_flag_only_for_a_square_from_the_same_start() -> None:
    assert Visible(Causal(), FOUR, FOUR).causal
    assert Visible(Causal(), Span.run(3, 4), Span.run(3, 4)).causal
    for mask, q, k in (
        (Causal(), Span.run(2, 2), FOUR),
        (Causal(1), FOUR, FOUR),
        (Full(), FOUR, FOUR),
        (Causal() & Window(2), FOUR, FOUR),
        (Causal(), Span.ragged(torch.tensor([4, 2]), 4), Span.ragged(torch.tensor([4, 2]), 4)),
    ):
        assert not Visible(mask, q, k).causal


RULES = [
    Full(),
    *(Causal(n) for n in (-2, -1, 0, 1, 3)),
    *(Window(n) for n in (1, 2, 3, 9)),
    Causal() & Window(3),
    Causal() & Window(9),
    *(Chunk(n) for n in (1, 2, 3, 9)),
    Causal() & Chunk(3),
    Window(9) & Causal(1) & Full(),
]


@pytest.mark.parametrize("mask", RULES, ids=str)
def test_what_a_mask_is_lowered_to_is_what_its_rule_says(mask: Mask) -> None:
    """Every pair of short runs: the flags are set exactly where the rule hides nothing, or the future."""
    runs = [(start, size) for start in range(4) for size in range(1, 5)]
    for q0, t in runs:
        for k0, s in runs:
            lowered = Visible(mask, Span.run(q0, t), Span.run(k0, s))
            shown = lowered.tensor()[0, 0]
            future = q0 == k0 and t == s and torch.equal(shown, torch.ones(t, s).tril().bool())
            assert lowered.everything == bool(shown.all()), (q0, t, k0, s)
            assert lowered.causal == (future and t > 1), (q0, t, k0, s)


def test_window_that_hides_nothing_costs_nothing() -> None:
    """Mistral's prompt of 8 tokens under a window of 4,096 is plain causal attention."""
    eight, mask = Span.run(0, 8), Causal() & Window(4096)
    assert Visible(mask, eight, eight).causal
    assert Visible(mask, Span.run(7, 1), eight).everything
    assert not Visible(Causal() & Window(8), Span.run(8, 1), Span.run(0, 9)).everything


def test_everything_flag_only_when_nothing_is_hidden() -> None:
    last = Span.run(3, 1)
    for mask, q, k in (
        (Full(), FOUR, FOUR),
        (Causal(), last, FOUR),
        (Causal(2), Span.run(9, 3), FOUR),
    ):
        lowered = Visible(mask, q, k)
        assert lowered.everything and lowered.tensor().all()
    for mask, q, k in (
        (Causal(), FOUR, FOUR),
        (Full(), FOUR, Span.ragged(torch.tensor([4, 2]), 4)),
        (Causal() & Window(2), last, FOUR),
    ):
        assert not Visible(mask, q, k).everything


def test_documents_side_by_side_are_told_by_where_they_begin() -> None:
    """What attention by document needs, without a mask; anything else has none of it."""
    doc = torch.tensor([[0, 0, 1, 1, 1, -1], [0, 1, 2, 2, -1, -1]])
    six = Span.run(0, 6)
    ends, longest, causal = Visible(Causal() & Documents(doc), six, six).packed
    assert ends.tolist() == [0, 2, 5, 6, 7, 8, 10, 12] and longest == 3 and causal
    assert Visible(Documents(doc), six, six).packed[1:] == (3, False)
    # The mask it stands for, written out.
    shown = torch.block_diag(*[torch.ones(n, n).tril() for n in ends.diff()]).bool()
    both = Visible(Causal() & Documents(doc), six, six).tensor()[:, 0]
    assert torch.equal(torch.block_diag(*both).bool(), shown)
    other = Documents(torch.tensor([[0, 0, 0, 1, 1, 1]]))
    apart, wide = Documents(torch.tensor([[0, 1, 0, 2, 2, 2]])), Documents(torch.arange(7)[None])
    for mask in (
        Causal(), Causal() & Documents(doc) & Window(2), Documents(doc.flip(1)), apart, wide,
        Causal() & Documents(doc) & other, Causal(1) & Documents(doc),
    ):  # fmt: skip
        assert Visible(mask, six, six).packed is None
    for q, k in ((Span.run(3, 3), six), (Span.run(3, 3), Span.run(3, 3))):
        assert Visible(Causal() & Documents(doc[:, :3]), q, k).packed is None
        assert Visible(Causal() & Documents(doc), q, k).packed is None


def test_places_are_counted_from_the_beginning_of_each_document() -> None:
    """Of the first too, be it one token long; padding has none."""
    doc = torch.tensor([[0, 1, 1, 1, 2], [0, 0, 0, 1, 1]])
    span = Span.ragged(torch.tensor([5, 4]), 5)
    assert span.within(Causal()) is span and span.within(None) is span
    placed = span.within(Causal() & Documents(doc))
    assert placed.index is span.index
    assert placed.absolute.tolist() == [[0, 0, 1, 2, 0], [0, 1, 2, 0, -1]]
    later = Span(torch.tensor([[2, 3], [2, -1]])).within(Documents(doc))
    assert later.absolute.tolist() == [[1, 2], [2, -1]] and later.size == 2


def test_rules_say_how_many_rows_they_tell_apart() -> None:
    doc = torch.zeros(3, 5, dtype=torch.long)
    for rule in (Full(), Causal(), Window(2), Causal() & Window(2)):
        assert rule.rows == 1
    for rule in (Documents(doc), Causal() & Documents(doc), Prefix(torch.tensor([1, 2, 3]))):
        assert rule.rows == 3
