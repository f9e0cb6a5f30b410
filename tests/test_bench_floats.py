"""Benches ask what the machine multiplies before they wait for it; and what a speed costs is told beside it."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.kernels import linear

BENCH = Path(__file__).resolve().parents[1] / "bench"
# Of benches that name bf16: those that need a GPU, and what they do with it on a CPU where there is none.
GPU = {"gpu_kernels", "gpu_measure", "packed", "user", "draw"}
ASKED = {"dates": "a flag, fp32 unless it is given", "look": "on a GPU alone", "measure": "floats"}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCH)
    names = {path.stem for path in BENCH.glob("*.py")}
    for name in names & set(sys.modules):
        monkeypatch.delitem(sys.modules, name)
    return monkeypatch


def test_every_bench_that_names_bf16_asks_whether_it_is_fast() -> None:
    sources = {path.stem: path.read_text(encoding="utf-8") for path in BENCH.glob("*.py")}
    named = {name for name, text in sources.items() if "bf16" in text or "bfloat16" in text}
    silent = {
        name for name in named if "import" not in sources[name] or "floats" not in sources[name]
    }
    assert silent - GPU - set(ASKED) == set()
    assert {*GPU, *ASKED} <= named


@pytest.mark.parametrize("fast", [True, False])
def test_floats_are_those_that_are_multiplied(fast: bool, bench: pytest.MonkeyPatch) -> None:
    bench.setattr(linear, "half_is_fast", lambda: fast)
    bench.setattr(torch.cuda, "is_available", lambda: False)
    import decode
    import measure
    import train

    assert measure.floats() == (["fp32", "bf16"] if fast else ["fp32"])
    assert ("bf16" in decode.precisions()) == fast
    bench.setattr(train, "GPU", False)
    assert any("bf16" in side for side in train.sides(Path())) == fast


def test_price_is_that_of_the_probabilities(bench: pytest.MonkeyPatch) -> None:
    import quality

    torch.manual_seed(0)
    model = regard.build("llama", vocab=50, dim=64, layers=2, heads=4, max_len=32).eval()
    for p in model.parameters():
        p.data *= 4
    rows = torch.randint(50, (3, 32))
    same = quality.price(model, model, rows)
    assert same.before == same.after and same.divergence == 0 and same.same == 1
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(
            model(rows)[:, :-1].flatten(0, 1), rows[:, 1:].flatten()
        )
    assert same.before == pytest.approx(loss.exp().item(), rel=1e-4)
    packed = regard.prepare(model, "int8")
    cost = quality.price(model, packed, rows)
    with torch.inference_mode():
        p, q = model(rows).log_softmax(-1), packed(rows).log_softmax(-1)
    apart = torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum") / rows.numel()
    assert cost.divergence == pytest.approx(apart.item(), rel=1e-2, abs=1e-7)
    assert cost.same == pytest.approx((p.argmax(-1) == q.argmax(-1)).float().mean().item())
    assert "KL" in str(cost)
