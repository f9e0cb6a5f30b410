"""The state-space dual is attention whose scores decay, decodes by its state on every runner, and needs no feed-forward
beside it; so does a delta rule that forgets by channel."""

from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.attention import MLA, SSD, DeltaRule
from regard.cache import Contiguous
from regard.mask import Causal
from tests.laws.mechanisms import TIGHT, context, layer
from tests.open.stranger import decodes, stands, tiny

DIM = 24
CONFIGS = {
    "grouped": SSD(6, 5, 2, 7, conv=3, bias=True),
    "alone": SSD(1, 4, key_dim=3, conv=1, conv_bias=False),
    "bounded": SSD(4, 3, 4, 5, least=0.3, most=0.6),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("size", [1, 7, 70])
def test_dual_is_attention_whose_scores_decay(name: str, size: int) -> None:
    """o_t = sum_{i <= t} (C_t B_i) e^(-A (s_{i+1} + ... + s_t)) s_i x_i + D x_t, all pairs at once."""
    c = CONFIGS[name]
    ours, x = layer(c, DIM), torch.randn(2, size, DIM).double()
    inputs = torch.nn.functional.pad(ours.inputs(x), (0, 0, c.conv - 1, 0))
    q, k, v = ours.split(ours.convolve(inputs, None))
    step = torch.nn.functional.softplus(ours.wa(x) + ours.dt_bias).clamp(c.least, c.most)
    total = (step * ours.a_log.exp()).cumsum(1)  # b t h
    later = torch.ones(size, size, dtype=torch.bool).triu(1)[..., None]
    decay = (total[:, None] - total[:, :, None]).masked_fill(later, -torch.inf).exp()  # b t i h
    scores = torch.einsum("bthd,bihd->btih", q, k) * decay
    o = torch.einsum("btih,bih,bihe->bthe", scores, step, v) + ours.skip[:, None] * v
    y = ours.norm(o.flatten(2) * torch.nn.functional.silu(ours.wz(x)))
    torch.testing.assert_close(ours(x, context(size)), ours.wo(y), **TIGHT)


def test_steps_start_between_their_bounds() -> None:
    start = SSD(30_000, 1, key_dim=1, steps=(0.01, 0.2)).make(2)
    step = torch.nn.functional.softplus(start.dt_bias.detach())
    assert 0.0099 < float(step.min()) < 0.011 and 0.19 < float(step.max()) < 0.2001
    channels = DeltaRule(3, None, 1000, 1, channels=True, rank=2, steps=(0.01, 0.2)).make(2)
    assert channels.dt_bias.shape == (3000,)


@torch.no_grad()
def test_work_and_memory_do_not_grow_with_the_text() -> None:
    ours = layer(CONFIGS["grouped"], DIM)
    cache = Contiguous([ours.cache_spec()], 1, dtype=torch.float64)
    for size in (5, 90):
        x = torch.randn(1, size, DIM).double()
        ours(x, regard.Context(cache.begin(size), Causal(), cache.layer(0)))
        assert cache.states[0]["s"].shape == (1, 6, 7, 5)
    assert ours.flops(3) == ours.flops(300) == 5 * 6 * 7 * 5


# --- every runner, and training -----------------------------------------------------------------------------------

_SSD = SSD(4, 16, 2, 16)
_KDA = DeltaRule(4, None, 8, 8, channels=True, rank=8, gate="sigmoid", reach=2.0, steps=(0.01, 0.2))
_ROTARY = regard.GQA(4, 2, 8, rope=regard.Rope())
TOWERS: dict[str, dict[str, Any]] = {
    "dual": {"attention": _SSD},
    "dual, no feed-forward": {"attention": _SSD, "ffn": None},
    "by channel": {"attention": _KDA},
    "shared keys without positions": {"attention": MLA(4, 16, head_dim=8, rope_dim=4)},
    "orders by layer": {"attention": (_KDA, _ROTARY), "order": ("pre", "inner")},
    "a feed-forward in some": {"attention": (_SSD, _ROTARY), "ffn": (None, regard.MLP(48))},
}


@pytest.mark.parametrize("name", TOWERS)
def test_every_runner_decodes_it(name: str) -> None:
    decodes(tiny(**TOWERS[name]))


@pytest.mark.parametrize("name", ["dual, no feed-forward", "by channel", "orders by layer"])
def test_it_trains_and_comes_back(name: str, tmp_path: Path) -> None:
    stands(tmp_path, **TOWERS[name])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("name", TOWERS)
@torch.inference_mode()
def test_prepared_model_says_what_it_said(name: str, precision: str) -> None:
    model = tiny(**TOWERS[name])
    ids = torch.randint(60, (2, 9), generator=torch.Generator().manual_seed(0))
    want, got = model(ids), regard.prepare(model, precision)(ids).float()
    off = (got - want).norm() / want.norm()
    assert off < {"fp32": 1e-5, "bf16": 0.05, "int8": 0.1}[precision]
