"""The gated delta rule: its two forms are one, it is transformers' Qwen3NextGatedDeltaNet, and its state takes back,
forks and packs as the tokens of attention do."""

from typing import Any

import pytest
import torch
from torch import Tensor

from regard.attention import Context, DeltaRule, delta
from regard.attention.delta import CHUNK, GatedDeltaRule, chunked, inverse, recurrent, solve
from regard.cache import Cache, Contiguous, Paged
from regard.errors import UsageError
from regard.mask import Causal, Documents, Full, Prefix, Window
from tests.laws.mechanisms import TIGHT, context, decoder, ids, stir

DIM = 20
CONFIG = DeltaRule(key_heads=2, value_heads=4, key_dim=6, value_dim=5, conv=4)


def close(a: object, b: object) -> None:
    torch.testing.assert_close(a, b, **TIGHT)


def layer(config: DeltaRule = CONFIG) -> GatedDeltaRule:
    return stir(config.make(DIM))


def inputs(
    t: int, b: int = 2, h: int = 3, d: int = 5, e: int = 4, each: bool = False
) -> list[Tensor]:
    """q, k, v, g, beta and a state, as a layer makes them; `each`: a decay for each channel, strong ones too."""
    q, k = (torch.nn.functional.normalize(torch.randn(b, t, h, d).double(), dim=-1) for _ in "qk")
    v, s = torch.randn(b, t, h, e).double(), torch.randn(b, h, d, e).double()
    g = -torch.nn.functional.softplus(torch.randn(b, t, h, *[d] * each).double())
    g = g * torch.tensor([1.0, 40.0, 0.01, 3.0, 900.0])[:d] if each else g
    return [q, k, v, g, torch.rand(b, t, h).double(), s]


# --- the two forms ------------------------------------------------------------------------------------------------


# A decay for each head or for each channel; writing with and without a correction.
kinds = pytest.mark.parametrize("each", [False, True])
rules = pytest.mark.parametrize("corrects", [True, False])


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 129, 150])
@kinds
@rules
def test_chunked_form_equals_the_recurrent_one(size: int, each: bool, corrects: bool) -> None:
    given = inputs(size, each=each)
    o, s, _ = chunked(*given, corrects=corrects)
    close((o, s), recurrent(*given, corrects=corrects))


@kinds
def test_decay_that_all_channels_share_is_that_of_the_head(each: bool) -> None:
    q, k, v, g, beta, s = inputs(70)
    form = chunked if each else recurrent
    close(form(q, k, v, g[..., None].expand_as(q), beta, s)[:2], recurrent(q, k, v, g, beta, s))


@pytest.mark.parametrize("size", [5, 67])
@kinds
@rules
def test_gradients_of_both_forms_are_equal(size: int, each: bool, corrects: bool) -> None:
    given = [x.requires_grad_() for x in inputs(size, each=each)]
    weight = torch.randn(2, size, 3, 4).double()
    both = []
    for form in (chunked, recurrent):
        o, s = form(*given, corrects=corrects)[:2]
        both.append(torch.autograd.grad((o * weight).sum() + s.square().sum(), given))
    close(*both)


@pytest.mark.parametrize("size", [1, 2, 5, 64])
@pytest.mark.parametrize("like", [0.0, 1.0])
def test_inverse_by_blocks_solves_as_a_solver_does(size: int, like: float) -> None:
    """In float32 too, and where all keys are alike: then the powers of the triangle are huge."""
    lower = (like + 0.2 * (1 - like) * torch.randn(2, size, size)).tril(-1).requires_grad_()
    right, weight = torch.randn(2, size, 3), torch.randn(2, size, 3)
    both = []
    for y in (inverse(lower) @ right, solve(lower, right)):
        both.append((y, torch.autograd.grad((y * weight).sum(), lower)[0].tril(-1)))
    torch.testing.assert_close(*both, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [9, 150])
@kinds
def test_fresh_documents_forget_the_state_in_both_forms(size: int, each: bool) -> None:
    given, fresh = inputs(size, each=each), torch.rand(2, size) < 0.1
    fresh[0, 4], fresh[1] = True, False
    o, s, _ = chunked(*given, fresh)
    close((o, s), recurrent(*given, fresh))
    alone = recurrent(
        *(x[:1, 4:] for x in given[:5]), torch.zeros(1, 3, 5, 4).double(), fresh[:1, 4:]
    )
    close(o[:1, 4:], alone[0])


def test_one_token_is_a_step_and_more_are_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each where it is the faster one."""
    ours, taken = layer(), list[tuple[str, int]]()
    for form in (chunked, recurrent):

        def noted(q: Tensor, *rest: Any, form: Any = form) -> Any:
            taken.append((form.__name__, q.shape[1]))
            return form(q, *rest)

        monkeypatch.setattr(delta, form.__name__, noted)
    for size in (1, 2, 3):
        ours(torch.randn(1, size, DIM).double(), context(size))
    assert taken == [("recurrent", 1), ("chunked", 2), ("chunked", 3)]


def test_state_before_a_chunk_is_that_of_its_tokens() -> None:
    given = inputs(150)
    _, _, before = chunked(*given, None, torch.tensor([2, 1]))
    for row, end in enumerate((2 * CHUNK, CHUNK)):
        _, s = recurrent(*(x[row : row + 1, :end] for x in given[:5]), given[5][row : row + 1])
        close(before[row : row + 1], s)


def test_a_token_that_is_written_with_beta_one_is_recalled() -> None:
    """What the rule is for: afterwards the key gives its value, whatever was there."""
    q, k, v, g, _, s = inputs(7)
    o, _ = recurrent(k, k, v, 0 * g, torch.ones_like(g), s)
    close(o, v)


# --- against transformers -----------------------------------------------------------------------------------------


def theirs(ours: GatedDeltaRule) -> torch.nn.Module:
    """Their module with our weights: q, k, v, z and b, a of each key head lie together there."""
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    c = ours.config
    config = Qwen3NextConfig(
        hidden_size=DIM,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=c.key_heads,
        linear_num_value_heads=c.heads,
        linear_key_head_dim=c.key_dim,
        linear_value_head_dim=c.value_dim,
        linear_conv_kernel_dim=c.conv,
        rms_norm_eps=c.eps,
    )
    module = Qwen3NextGatedDeltaNet(config, 0).double()
    parts = (ours.wq, ours.wk, ours.wv, ours.wz)
    by_head = [w.weight.unflatten(0, (c.key_heads, -1)) for w in parts]
    gates = [w.weight.unflatten(0, (c.key_heads, -1)) for w in (ours.wb, ours.wa)]
    with torch.no_grad():
        module.in_proj_qkvz.weight.copy_(torch.cat(by_head, 1).flatten(0, 1))
        module.in_proj_ba.weight.copy_(torch.cat(gates, 1).flatten(0, 1))
        module.conv1d.weight.copy_(ours.taps[:, None])
        module.A_log.copy_(ours.a_log)
        module.dt_bias.copy_(ours.dt_bias)
        module.norm.weight.copy_(ours.norm.weight)
        module.out_proj.weight.copy_(ours.wo.weight)
    return module


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        DeltaRule(3, key_dim=4, value_dim=7, conv=2, eps=1e-3),
        DeltaRule(1, 5, 3, 2, 1, eps=0.01),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 70])
def test_layer_is_their_gated_delta_net(config: DeltaRule, size: int) -> None:
    ours, x = layer(config), torch.randn(2, size, DIM).double()
    want = theirs(ours)(x)
    # They compute the rule in float32, whatever they are given.
    torch.testing.assert_close(ours(x, context(size)), want, rtol=1e-4, atol=1e-5)


def test_gradients_are_those_of_their_gated_delta_net() -> None:
    ours, x = layer(), torch.randn(2, 11, DIM).double().requires_grad_()
    other = theirs(ours)
    grads = [
        torch.autograd.grad(y.square().sum(), [x, m.A_log if m is other else m.a_log])
        for m, y in ((ours, ours(x, context(11))), (other, other(x)))
    ]
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-4)


# --- what it may see ----------------------------------------------------------------------------------------------


@torch.no_grad()
def test_packed_documents_equal_each_alone() -> None:
    ours, x = layer(), torch.randn(2, 90, DIM).double()
    doc = torch.tensor([[0] * 40 + [1] * 2 + [2] * 48, [0] * 1 + [1] * 63 + [2] * 26])
    out = ours(x, context(90, Causal() & Documents(doc)))
    for row, sizes in enumerate(([40, 2, 48], [1, 63, 26])):
        for part, got in zip(x[row : row + 1].split(sizes, 1), out[row : row + 1].split(sizes, 1)):
            close(got, ours(part, context(part.shape[1])))


@pytest.mark.parametrize(
    "mask", [Full(), Causal() & Window(3), Prefix(torch.tensor([2])), Causal(1)]
)
def test_mask_that_a_state_cannot_obey_is_refused(mask: object) -> None:
    with pytest.raises(UsageError, match="reads from left to right"):
        layer()(torch.randn(1, 5, DIM).double(), context(5, mask))  # type: ignore[arg-type]


def test_documents_with_a_cache_are_refused() -> None:
    ours = layer()
    cache = Contiguous([ours.cache_spec()], 1, dtype=torch.float64)
    pos, mask = cache.begin(4), Causal() & Documents(torch.zeros(1, 4))
    with pytest.raises(UsageError, match="without a cache"):
        ours(torch.randn(1, 4, DIM).double(), Context(pos, mask, cache.layer(0)))


@torch.no_grad()
def test_ring_that_forgets_is_refused() -> None:
    model = decoder("delta_gqa")
    cache = model.cache(1, "ring", window=4)
    model(ids(1, 4), cache=cache)
    with pytest.raises(UsageError, match="use layout='contiguous' or 'paged'"):
        model(ids(1, 1), cache=cache)


def test_key_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UsageError, match="key_heads=2 must divide deltarule.value_heads=3"):
        DeltaRule(2, 3)


# --- the state in a cache -----------------------------------------------------------------------------------------


def step(ours: GatedDeltaRule, cache: Cache, x: Tensor, lengths: list[int] | None = None) -> Tensor:
    pos = cache.begin(x.shape[1], None if lengths is None else torch.tensor(lengths))
    return ours(x, Context(pos, Causal(), cache.layer(0)))


@pytest.mark.parametrize("sizes", [[150, 1, 1], [3, 147, 2], [64, 64, 24], [1] * 5 + [147]])
@torch.no_grad()
def test_any_chunks_give_the_whole(sizes: list[int]) -> None:
    ours, x = layer(), torch.randn(2, 152, DIM).double()
    cache = Contiguous([ours.cache_spec()], 2, dtype=torch.float64)
    parts = [step(ours, cache, part) for part in x.split(sizes, 1)]
    close(torch.cat(parts, 1), ours(x, context(152)))


@pytest.mark.parametrize("lengths", [[10, 3, 0], [200, 70, 129], [131, 64, 65]])
@pytest.mark.parametrize("drop", [0, 1, 2, 7, 64])
@torch.no_grad()
def test_rewound_state_is_the_state_before(lengths: list[int], drop: int) -> None:
    """Of ragged rows, after long calls too: as if only what stays had been fed."""
    ours, x = layer(), torch.randn(3, max(lengths), DIM).double()
    first, more = torch.randn(3, 5, DIM).double(), torch.randn(3, 2, DIM).double()
    drops = torch.tensor([min(drop, n) for n in lengths])
    cache = Contiguous([ours.cache_spec()], 3, dtype=torch.float64)
    step(ours, cache, first)
    step(ours, cache, x, lengths)
    cache.rewind(drops)
    out = step(ours, cache, more)
    for row, n in enumerate(lengths):
        kept = x[row : row + 1, : n - int(drops[row])]
        whole = torch.cat([first[row : row + 1], kept, more[row : row + 1]], 1)
        close(out[row : row + 1], ours(whole, context(whole.shape[1]))[:, -2:])


@pytest.mark.parametrize("size", [3, 128, 129, 150, 200])
@torch.no_grad()
def test_state_after_any_of_a_calls_last_tokens_is_that_of_the_text_so_far(size: int) -> None:
    """Of them all too."""
    ours, x = layer(), torch.randn(2, size, DIM).double()
    whole = Contiguous([ours.cache_spec()], 2, dtype=torch.float64)
    step(ours, whole, x)
    for n in range(max(0, size - CHUNK), size + 1):
        part = Contiguous([ours.cache_spec()], 2, dtype=torch.float64)
        if n:
            step(ours, part, x[:, :n])
        found = whole.pasts[0](torch.arange(2), torch.tensor([n, n]))
        want = part.states[0] if n else {k: torch.zeros_like(y) for k, y in found.items()}
        close(found, want)


@torch.no_grad()
def test_a_call_can_be_taken_back_in_several_steps_and_after_a_fork() -> None:
    ours, x = layer(), torch.randn(2, 9, DIM).double()
    cache = Contiguous([ours.cache_spec()], 2, dtype=torch.float64)
    step(ours, cache, x[:, :4])
    step(ours, cache, x[:, 4:])
    cache.rewind(2)
    fork = cache.fork(torch.tensor([1, 0, 1]))
    fork.rewind(torch.tensor([0, 1, 3]))
    out = step(ours, fork, x[[0, 0, 0], :1])
    for i, (row, size) in enumerate(((1, 7), (0, 6), (1, 4))):
        whole = torch.cat([x[row : row + 1, :size], x[:1, :1]], 1)
        close(out[i : i + 1], ours(whole, context(size + 1))[:, -1:])


@torch.no_grad()
def test_more_than_the_last_call_cannot_be_taken_back() -> None:
    ours, x = layer(), torch.randn(1, 80, DIM).double()
    cache = Contiguous([ours.cache_spec()], 1, dtype=torch.float64)
    step(ours, cache, x[:, :4])
    step(ours, cache, x[:, 4:6])
    with pytest.raises(UsageError, match="what the last call fed, 64 tokens at most"):
        cache.rewind(3)
    step(ours, cache, x[:, 6:])
    with pytest.raises(UsageError, match="64 tokens at most"):
        cache.rewind(65)
    other = Contiguous([ours.cache_spec()], 1, dtype=torch.float64)
    step(ours, other, x[:, :4])
    with pytest.raises(UsageError, match="fork it before"):
        cache.join(other).rewind(1)


@pytest.mark.parametrize("kind", [Contiguous, Paged])
@torch.no_grad()
def test_rows_that_join_fork_and_go_keep_their_states(kind: type[Cache]) -> None:
    ours, x, y = layer(), torch.randn(2, 6, DIM).double(), torch.randn(1, 3, DIM).double()
    a, b = (kind([ours.cache_spec()], n, dtype=torch.float64) for n in (2, 1))
    if isinstance(a, Paged) and isinstance(b, Paged):
        b.pool = a.pool
    step(ours, a, x), step(ours, b, y)
    cache = a.join(b).take(torch.tensor([2, 0, 0]))
    more = torch.randn(3, 2, DIM).double()
    out = step(ours, cache, more)
    for i, text in enumerate((y, x[:1], x[:1])):
        whole = torch.cat([text, more[i : i + 1]], 1)
        close(out[i : i + 1], ours(whole, context(whole.shape[1]))[:, -2:])
    cache.free()
    close(step(ours, cache, more), ours(more, context(2)))


@torch.no_grad()
def test_state_of_a_half_precision_model_is_float32() -> None:
    model = decoder("delta_gqa").bfloat16()
    cache = model.cache(1)
    model(ids(1, 5), cache=cache)
    assert cache.states[0]["s"].dtype == torch.float32
    assert cache.states[0]["conv"].dtype == torch.bfloat16


@torch.no_grad()
def test_convolution_of_a_half_precision_model_adds_up_in_float32() -> None:
    """Its products rounded one by one would be further from the exact sum than that sum rounded once."""
    half = layer().bfloat16()
    x = torch.randn(2, 30, half.taps.shape[0], dtype=torch.bfloat16)
    found = half.convolve(x, None).double()
    exact = half.double().convolve(x.double(), None)
    assert (found - exact).abs().max() < 1e-2 * (exact.bfloat16() - exact).abs().max()


def test_layer_starts_with_decays_and_taps_of_their_ranges() -> None:
    """As transformers draws them, but for a decay of nothing, whose logarithm is none."""
    start = DeltaRule(1, value_heads=40_000, key_dim=1, value_dim=1, conv=3).make(2)
    decay, taps = start.a_log.detach().exp(), start.taps.detach().abs()
    assert 0.01 <= float(decay.min()) < 0.02 and 15.99 < float(decay.max()) < 16.01
    assert 0.999 * 3**-0.5 < float(taps.max()) <= 3**-0.5
    assert torch.equal(start.dt_bias, torch.ones(40_000))


@pytest.mark.parametrize("context", [1, 90])
def test_work_of_a_token_does_not_grow_with_the_text(context: int) -> None:
    """Each number of the state d e decays, is recalled, written and read."""
    assert layer().flops(context) == (1 + 2 + 2 + 2) * 4 * 6 * 5
