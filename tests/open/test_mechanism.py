"""A stranger adds a mechanism: a file of its own, and a row of ATTENTION."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.attention import ATTENTION
from regard.attention.protocol import Context, Mechanism
from regard.cache import LAYOUTS, CacheSpec
from regard.config import Count, settings
from regard.layers import Add, FeedForward
from regard.moe import MixtureOfExperts
from regard.see.look import mechanisms
from tests.laws import mechanisms as laws
from tests.laws import test_cached, test_heads, test_probe, test_visibility
from tests.open.stranger import added, home, promised, stands, tiny

# --- what the stranger's file has ---------------------------------------------------------------------------------


@settings
class Nearest:
    """Attention by distance: o_i = softmax(-|q_i - k_j|^2) v_j.   Cache per token: 2 h d."""

    heads: Count
    width: Count = 8
    kind: str = "nearest"

    rope: ClassVar[None] = None
    window: ClassVar[None] = None

    def make(self, dim: int, memory_dim: int | None = None, add: Add | None = None) -> Mechanism:
        return NearestAttention(self, dim, add)


class NearestAttention(Mechanism):
    def __init__(self, config: Nearest, dim: int, add: Add | None):
        super().__init__()
        self.config, self.h, self.e = config, config.heads, config.width
        wide = self.h * self.e
        self.wq, self.wk, self.wv = (nn.Linear(dim, wide, bias=False) for _ in range(3))
        self.wo, self.add = nn.Linear(wide, dim), add or Add()

    def queries(self, x: Tensor, ctx: Context) -> Tensor:
        return self.heads(self.wq(x))

    def entries(self, x: Tensor, ctx: Context) -> dict[str, Tensor]:
        return {"k": self.heads(self.wk(x)), "v": self.heads(self.wv(x))}

    def core_attention(
        self, q: Any, kept: Any, mask: Any, ctx: Context, bias: Tensor | None
    ) -> Tensor:
        how: Any = {"bias": bias, "probe": ctx.watch(), "backend": ctx.backend}
        return regard.attend(q, kept["k"], kept["v"], mask, score=nearness, **how)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.h, self.e))

    def cache_spec(self) -> CacheSpec:
        return CacheSpec(token={"k": (self.h, self.e), "v": (self.h, self.e)})

    def flops(self, context: int) -> int:
        return 4 * context * self.h * self.e


def nearness(q: Tensor, k: Tensor) -> Tensor:
    return -torch.cdist(q, k, compute_mode="donot_use_mm_for_euclid_dist").square()


# --- and that it is one of ours -----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def nearest() -> Iterator[None]:
    with added(ATTENTION, "nearest", Nearest):
        yield


def test_added_mechanism_trains_decodes_and_comes_back(tmp_path: Path) -> None:
    model = stands(tmp_path, attention={"kind": "nearest", "heads": 4})
    assert model.config.tower.attention == Nearest(4)


def test_added_mechanism_stands_beside_others() -> None:
    model = tiny(attention=(Nearest(4, width=6), regard.GQA(4, 2, rope=regard.Rope())))
    assert mechanisms(model.config)["self"].startswith("nearest")
    probe = regard.Probe()
    model(torch.tensor([[4, 8, 15]]), probe=probe)
    assert probe.maps["0.self"][0].sum(-1).allclose(torch.ones(1, 4, 3))


def test_wrong_setting_of_an_added_mechanism_is_said_as_of_ours() -> None:
    with pytest.raises(regard.UsageError, match="attention.heads = 0: give 1 or more"):
        tiny(attention={"kind": "nearest", "heads": 0})
    with pytest.raises(regard.UsageError, match="attention.with is not a setting of Nearest"):
        tiny(attention={"kind": "nearest", "heads": 4, "with": 6})
    with pytest.raises(regard.UsageError, match="did you mean 'nearest'"):
        tiny(attention={"kind": "neares", "heads": 4})


def test_laws_over_the_table_notice_an_added_mechanism(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="nearest"):
        test_heads.test_every_kind_of_attention_has_an_example()
    monkeypatch.setitem(laws.MECHANISMS, "nearest", Nearest(3))
    monkeypatch.setitem(laws.TOWERS, "nearest", {"attention": Nearest(3)})
    test_heads.test_every_kind_of_attention_has_an_example()
    test_heads.test_mechanism_keeps_the_shape_and_declares_its_cache("nearest")
    test_visibility.test_padded_batch_equals_its_rows_alone("nearest")
    test_probe.test_probe_rows_sum_to_one_and_hidden_keys_have_none("nearest")
    for layout in LAYOUTS:
        test_cached.test_cached_decode_equals_full_forward("nearest", layout)
        test_cached.test_cached_ragged_rows_equal_each_row_alone("nearest", layout)
    for backend in ("reference", "online", "ordered", "sdpa"):
        test_visibility.test_future_token_never_changes_an_earlier_logit("nearest", backend)


@pytest.mark.parametrize(
    "part, old, new",
    [
        (NearestAttention, "enter", "project_qkv"),
        (NearestAttention, "look", "attend"),
        (NearestAttention, "mix", "core_attention"),
        (NearestAttention, "leave", "project_out"),
        (FeedForward, "widen", "project_up"),
        (FeedForward, "leave", "project_down"),
        (MixtureOfExperts, "enter", "expert_input"),
        (MixtureOfExperts, "leave", "add_residual"),
        (regard.Paged, "keep", "update"),
    ],
)
def test_step_of_a_former_name_is_told_the_new_one(part: type, old: str, new: str) -> None:
    assert callable(getattr(part, new))
    with pytest.raises(regard.UsageError, match=f"Old.{old} is called {new} now: rename it"):
        type("Old", (part,), {old: getattr(part, new)})


def test_former_names_of_a_context_and_a_cache_still_work() -> None:
    cache = regard.Contiguous([CacheSpec(token={"k": (1, 4)})], 1)
    ctx = Context(cache.begin(3), store=cache.layer(0))
    x, rope = torch.randn(1, 3, 1, 4), regard.Rope()
    for old, new in (("turn", ctx.rotate(x, rope)), ("keep", ctx.update_cache(k=x)[0]["k"])):
        with pytest.warns(DeprecationWarning, match=f"^{old} is called"):
            given = getattr(ctx, old)(**({"k": x} if old == "keep" else {"x": x, "rope": rope}))
        assert torch.equal(given[0]["k"] if old == "keep" else given, new)
    for of, given in ((cache.layer(0), {"k": x}), (cache, {"layer": 0, "entries": {"k": x}})):
        with pytest.warns(DeprecationWarning, match="^keep is called update now"):
            assert torch.equal(of.keep(**given)[0]["k"], x)


def test_mechanism_costs_as_many_files_as_the_architecture_says() -> None:
    assert home(ATTENTION) == "regard/attention/__init__.py"
    own = "regard/attention/nearest.py"
    assert len({own, home(ATTENTION)}) == promised("add a mechanism")
