"""Recurrent models: cells equal torch's, cached equals uncached, padding changes nothing, no token sees ahead."""

from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from regard.attention import Context, weights
from regard.attention.pooling import combine
from regard.config import from_dict, to_dict
from regard.errors import UsageError
from regard.mask import Causal, Span, Visible
from regard.models.recurrent import (
    CELLS,
    BahdanauStep,
    LuongAttention,
    MemoryAttention,
    Recurrence,
    RecurrentConfig,
    Seq2SeqConfig,
)

LOOKS = [None, "dot", "scaled_dot", "bilinear", "additive", "average", "sum", "hard"]
IDS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8], [9, 7, 9, 3, 2, 3]])
SOURCE = torch.tensor([[1, 2, 3, 4, 5], [6, 5, 4, 3, 2], [7, 7, 1, 1, 2]])
every_cell = pytest.mark.parametrize("cell", CELLS)
every_look = pytest.mark.parametrize("look", LOOKS)


def lm(cell="gru", look=None, layers=2):
    return RecurrentConfig(11, 6, layers, cell, look).make().eval()


def seq2seq(cell="gru", look="additive", layers=2):
    both = look in ("bilinear", "additive", "average", "sum")
    return Seq2SeqConfig(11, 8, 6, layers, cell, look, bidirectional=both).make().eval()


def chunks(model, ids, cache, sizes, **first):
    """The logits of `ids` fed to a cache in pieces; `first` goes with the first piece."""
    out = []
    for piece in ids.split(sizes, 1):
        out.append(model(piece, cache=cache, **first))
        first = {}
    return torch.cat(out, 1)


class Watch:
    """A stand-in for a probe: keeps the weights of every site."""

    def __init__(self):
        self.seen = {}

    def at(self, site):
        return SimpleNamespace(see=lambda *args: self.keep(site, *args))

    def keep(self, site, q, k, v, mask, terms):
        tensor = mask.tensor() if isinstance(mask, Visible) else mask
        assert site not in self.seen
        self.seen[site] = weights(q, k, tensor, terms)


# --- parts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("layers", [1, 3])
@every_cell
def test_cell_written_out_equals_torch(cell, layers, both):
    rnn = Recurrence(cell, 5, 4, layers, 0.0, both)
    x = torch.randn(2, 7, 5)
    state = tuple(torch.randn_like(s) for s in rnn.start(x))
    assert_close(rnn.plain(x, state), rnn(x, state))
    n = torch.tensor([7, 4])
    (plain, ends), (fused, want) = rnn.plain(x, state, n), rnn(x, state, n)
    assert_close((plain[0], plain[1, :4], ends), (fused[0], fused[1, :4], want))


@every_cell
def test_recurrence_state_does_not_move_on_padding(cell):
    rnn = Recurrence(cell, 5, 4, 2, 0.0)
    x = torch.randn(3, 6, 5)
    start = tuple(torch.randn_like(s) for s in rnn.start(x))
    _, state = rnn(x, start, torch.tensor([6, 2, 0]))
    for row, n in enumerate([6, 2]):
        alone = rnn(x[row : row + 1, :n], tuple(s[:, row : row + 1].contiguous() for s in start))[1]
        assert_close(tuple(s[:, row : row + 1] for s in state), alone)
    assert_close(tuple(s[:, 2] for s in state), tuple(s[:, 2] for s in start))


@pytest.mark.parametrize("score", LOOKS[1:])
def test_memory_of_one_state_returns_that_state(score):
    attention, h = MemoryAttention(score, 4, 4), torch.randn(2, 1, 4)
    kept, mask = attention.recall(h, Context(Span.run(0, 1), Causal()))
    assert_close(attention(h, kept, mask), h)


def test_luong_attention_is_tanh_of_context_and_state():
    layer, h, memory = LuongAttention("dot", 4, 4), torch.randn(2, 3, 4), torch.randn(2, 5, 4)
    out = layer(h, Context(Span.run(0, 3), memory=memory, memory_pos=Span.run(0, 5)))
    c = torch.softmax(h @ memory.transpose(1, 2), -1) @ memory
    assert_close(out, torch.tanh(torch.cat([c, h], -1) @ layer.combine.weight.T))


def test_linear_combination_is_the_affine_map_of_context_and_state():
    layer, h = LuongAttention("average", 4, 6, "linear"), torch.randn(2, 3, 4)
    memory = torch.randn(2, 5, 6)
    out = layer(h, Context(Span.run(0, 3), memory=memory, memory_pos=Span.run(0, 5)))
    both = torch.cat([memory.mean(1, keepdim=True).expand(-1, 3, -1), h], -1)
    assert_close(out, both @ layer.combine.weight.T + layer.combine.bias)


@pytest.mark.parametrize(
    "how, plain", [("average", "average"), ("sum", "sum"), ("hard", "one_hot")]
)
@pytest.mark.parametrize("backend", ["reference", "online", "sdpa", "ordered"])
def test_memory_without_softmax_is_its_pooling_over_what_is_visible(how, plain, backend):
    attention, q, memory = MemoryAttention(how, 4, 4), torch.randn(2, 3, 4), torch.randn(2, 5, 4)
    seen, watch = torch.rand(2, 1, 3, 5) < 0.6, Watch()
    seen[0, 0, 1], seen[1, 0, 2] = False, True
    scores = q @ memory.mT
    expected = combine(memory[:, None], scores, plain, seen[:, 0])
    found = attention(q, {"h": memory}, seen, probe=watch.at("here"), backend=backend)
    assert_close(found, expected)
    assert_close(watch.seen["here"][:, 0] @ memory, expected)
    if how != "average":
        assert set(watch.seen["here"].unique().tolist()) == {0.0, 1.0}


def test_hard_choice_passes_gradient_to_the_chosen_state_only():
    attention = MemoryAttention("hard", 2, 2)
    q = torch.tensor([[[1.0, 0.0]]], requires_grad=True)
    memory = torch.tensor([[[1.0, 5.0], [2.0, 3.0], [2.0, 4.0]]], requires_grad=True)
    attention(q, {"h": memory}).sum().backward()
    assert not q.grad.any()
    assert memory.grad.tolist() == [[[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]]  # the earlier of equals


def test_bahdanau_step_asks_with_the_previous_state():
    step, y, memory = BahdanauStep(4, 6), torch.randn(2, 4), torch.randn(2, 5, 6)
    h = torch.randn(2, 4)
    kept = {"h": memory, "k": step.attention.score.key(memory)}
    a = torch.softmax(step.attention.score(h[:, None], memory), -1)
    x = torch.cat([y, (a @ memory)[:, 0]], -1)
    w, u, b, d = step.rnn.rnn.all_weights[0]
    (expected,) = CELLS["gru"].gates(x @ w.T + b, h @ u.T + d, (h,))
    assert_close(step(y, (h[None],), kept)[0][0], expected)


# --- the language model -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["contiguous", "paged"])
@every_look
@every_cell
def test_lm_cached_equals_uncached(cell, look, layout):
    model = lm(cell, look)
    cache = model.cache(3, layout)
    with torch.no_grad():
        assert_close(chunks(model, IDS, cache, [3, 1, 1, 1]), model(IDS))


@every_look
@every_cell
def test_lm_padded_batch_equals_rows_alone(cell, look):
    model, lengths = lm(cell, look), [6, 2, 4]
    out = model(IDS, lengths)
    for row, n in enumerate(lengths):
        assert_close(out[row, :n], model(IDS[row : row + 1, :n])[0])


@pytest.mark.parametrize("layout", ["contiguous", "paged"])
@every_look
@every_cell
def test_lm_ragged_cache_equals_rows_alone(cell, look, layout):
    model, first = lm(cell, look), [3, 1, 0]
    cache = model.cache(3, layout)
    with torch.no_grad():
        model(IDS[:, :3], first, cache=cache)
        out = [model(IDS[:, i : i + 1], cache=cache) for i in (3, 4)]
        for row, n in enumerate(first):
            alone = model(torch.cat([IDS[row, :n], IDS[row, 3:5]])[None])
            assert_close(torch.cat(out, 1)[row], alone[0, -2:])


@every_look
@every_cell
def test_lm_future_token_changes_no_earlier_logit(cell, look):
    model, other = lm(cell, look), IDS.clone()
    other[:, 4] = 0
    before, after = model(IDS), model(other)
    assert_close(before[:, :4], after[:, :4], rtol=0, atol=0)
    assert not torch.equal(before[:, 4:], after[:, 4:])


def test_lm_fork_continues_the_chosen_rows():
    model = lm("lstm", "additive")
    cache = model.cache(3)
    with torch.no_grad():
        model(IDS[:, :4], cache=cache)
        twin = cache.fork(torch.tensor([2, 2]))
        assert_close(model(IDS[:2, 4:5], cache=twin)[1], model(_joined(2, 1))[0, -1:])


def _joined(row, other):
    return torch.cat([IDS[row, :4], IDS[other, 4:5]])[None]


@every_look
def test_lm_gradient_reaches_every_weight(look):
    model = lm("lstm", look)
    model(IDS).log_softmax(-1)[..., 0].sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in model.parameters())


def test_lm_probe_sees_rows_that_sum_to_one_and_changes_nothing():
    model, watch = lm("gru", "bilinear"), Watch()
    assert torch.equal(model(IDS, probe=watch), model(IDS))
    assert list(watch.seen) == ["1.self"]
    assert_close(watch.seen["1.self"].sum(-1), torch.ones(3, 1, 6))
    assert not watch.seen["1.self"].triu(1).any()


@pytest.mark.parametrize("backend", ["reference", "online"])
@pytest.mark.parametrize("look", LOOKS[1:])
def test_recurrent_backends_agree(look, backend):
    model, other = lm("gru", look), seq2seq("gru", look)
    assert_close(model(IDS, backend=backend), model(IDS))
    assert_close(other(IDS, source=SOURCE, backend=backend), other(IDS, source=SOURCE))


def test_lm_cache_grows_only_with_attention():
    assert sum(spec.numbers() for spec in lm("lstm").cache_specs()) == 0
    assert sum(spec.numbers() for spec in lm("lstm", "dot").cache_specs()) == 6


def test_lm_flops_grow_with_context_only_with_attention():
    assert lm("gru").flops_per_token(9) == lm("gru").flops_per_token(1)
    model = lm("gru", "dot", layers=1)
    matrices = 3 * 6 * 6 * 2 + 12 * 6 + 11 * 6  # cell, combine, head
    assert model.flops_per_token(9) == 2 * matrices + 2 * 9 * (6 + 6)


def test_memory_costs_its_keys_and_its_states():
    """Keys of the additive score are as wide as a state, all others are the states of the memory themselves."""
    assert MemoryAttention("additive", 6, 10).flops(9) == 2 * 9 * (6 + 10)
    assert MemoryAttention("bilinear", 6, 10).flops(9) == 2 * 9 * (10 + 10)


# --- seq2seq ------------------------------------------------------------------------------------------------------


@every_look
@every_cell
def test_seq2seq_cached_equals_uncached(cell, look):
    model = seq2seq(cell, look)
    with torch.no_grad():
        out = chunks(model, IDS, model.cache(3), [2, 1, 2, 1], source=SOURCE)
        assert_close(out, model(IDS, source=SOURCE))


@every_look
@every_cell
def test_seq2seq_padded_batch_equals_rows_alone(cell, look):
    model, lengths, source_lengths = seq2seq(cell, look), [6, 2, 4], [3, 5, 1]
    out = model(IDS, lengths, source=SOURCE, source_lengths=source_lengths)
    for row, (n, s) in enumerate(zip(lengths, source_lengths, strict=True)):
        alone = model(IDS[row : row + 1, :n], source=SOURCE[row : row + 1, :s])
        assert_close(out[row, :n], alone[0])


@every_look
@every_cell
def test_seq2seq_ragged_cache_equals_rows_alone(cell, look):
    model, first, source_lengths = seq2seq(cell, look), [3, 1, 2], [3, 5, 1]
    cache = model.cache(3)
    with torch.no_grad():
        model(IDS[:, :3], first, source=SOURCE, source_lengths=source_lengths, cache=cache)
        out = model(IDS[:, 3:5], cache=cache)
        for row, (n, s) in enumerate(zip(first, source_lengths, strict=True)):
            ids = torch.cat([IDS[row, :n], IDS[row, 3:5]])[None]
            assert_close(out[row], model(ids, source=SOURCE[row : row + 1, :s])[0, -2:])


@every_look
@every_cell
def test_seq2seq_future_token_changes_no_earlier_logit(cell, look):
    model, other = seq2seq(cell, look), IDS.clone()
    other[:, 4] = 0
    before, after = model(IDS, source=SOURCE), model(other, source=SOURCE)
    assert_close(before[:, :4], after[:, :4], rtol=0, atol=0)
    assert not torch.equal(before[:, 4:], after[:, 4:])


@every_look
def test_seq2seq_reads_the_whole_source(look):
    model = seq2seq("gru", look)
    for i in range(5):
        other = SOURCE.clone()
        other[:, i] = 0
        assert not torch.equal(model(IDS, source=SOURCE), model(IDS, source=other))


@pytest.mark.parametrize(
    "look, site", [("additive", "decoder.0.cross"), ("dot", "decoder.1.cross")]
)
def test_seq2seq_probe_sees_alignments_that_sum_to_one(look, site):
    model, watch = seq2seq("gru", look), Watch()
    inputs = {"source": SOURCE, "source_lengths": [3, 5, 1]}
    assert torch.equal(model(IDS, probe=watch, **inputs), model(IDS, **inputs))
    assert list(watch.seen) == [site]
    assert_close(watch.seen[site].sum(-1), torch.ones(3, 1, 6))
    assert not watch.seen[site][2, ..., 1:].any()


@every_look
def test_seq2seq_gradient_reaches_every_weight(look):
    model = seq2seq("lstm", look)
    model(IDS, source=SOURCE).log_softmax(-1)[..., 0].sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in model.parameters())


def test_seq2seq_fork_takes_the_source_along():
    model = seq2seq("gru", "additive")
    cache = model.cache(3)
    with torch.no_grad():
        model(IDS[:, :4], source=SOURCE, cache=cache)
        out = model(IDS[:2, 4:5], cache=cache.fork(torch.tensor([2, 2])))
        assert_close(out[1], model(_joined(2, 1), source=SOURCE[2:])[0, -1:])


def test_seq2seq_bad_lengths_leave_the_cache_empty():
    model = seq2seq()
    cache = model.cache(3)
    with pytest.raises(UsageError, match="lengths"):
        model(IDS, [7, 1, 1], source=SOURCE, cache=cache)
    assert cache.cross is None and cache.even == 0


# --- what a user can get wrong ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"cell": "rnn"}, "elman, gru, lstm"),
        ({"attention": "luong"}, "known: additive, average, bilinear, dot"),
        ({"layers": 0}, "layers = 0: give 1 or more"),
        ({"attention": "sum", "combine": "relu"}, "known: linear, tanh"),
        ({"attention": None, "combine": "linear"}, "such as bilinear"),
    ],
)
def test_config_wrong_setting_names_the_choices(settings, message):
    with pytest.raises(UsageError, match=message):
        RecurrentConfig(11, 6, **settings)
    with pytest.raises(UsageError, match=message):
        Seq2SeqConfig(11, 8, 6, **settings)


def test_config_dot_of_two_directions_says_what_to_choose():
    with pytest.raises(UsageError, match="6 and 12; choose bilinear or additive"):
        Seq2SeqConfig(11, 8, 6, attention="dot", bidirectional=True)


def test_config_linear_before_the_cell_is_refused():
    with pytest.raises(
        UsageError, match="attention='additive' finds after the cell, which is nothing"
    ):
        Seq2SeqConfig(11, 8, 6, combine="linear")


LINEAR = RecurrentConfig(11, 6, attention="hard", combine="linear")


@pytest.mark.parametrize("config", [RecurrentConfig(11, 6), LINEAR, Seq2SeqConfig(11, 8, 6)])
def test_config_reads_back_equal(config):
    assert from_dict(type(config), to_dict(config)) == config


def test_config_written_before_there_was_a_combination_is_luongs():
    old = to_dict(RecurrentConfig(11, 6, attention="dot"))
    assert old.pop("combine") == "tanh"
    assert from_dict(RecurrentConfig, old).combine == "tanh"


def test_seq2seq_without_source_says_what_to_type():
    with pytest.raises(UsageError, match="source=source_ids"):
        seq2seq()(IDS)


def test_seq2seq_second_source_is_refused():
    model = seq2seq()
    cache = model.cache(3)
    model(IDS, source=SOURCE, cache=cache)
    with pytest.raises(UsageError, match="already holds a source"):
        model(IDS, source=SOURCE, cache=cache)


def test_lm_ids_outside_the_vocabulary_are_refused():
    with pytest.raises(UsageError, match="between 0 and 10"):
        lm()(torch.tensor([[11]]))


def test_lm_rewind_is_refused():
    model = lm()
    cache = model.cache(3)
    model(IDS, cache=cache)
    with pytest.raises(UsageError, match="cannot be rewound"):
        cache.rewind(1)


def test_freed_cache_starts_anew():
    model = seq2seq()
    cache = model.cache(3)
    with torch.no_grad():
        first = model(IDS, source=SOURCE, cache=cache)
        cache.free()
        assert_close(model(IDS, source=SOURCE, cache=cache), first)
    model = lm("lstm", "dot")
    cache = model.cache(3)
    with torch.no_grad():
        first = model(IDS, cache=cache)
        cache.free()
        assert_close(model(IDS, cache=cache), first)
