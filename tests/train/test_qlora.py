"""QLoRA: a base in 4 bits, with the gradients of the base turned back; runs with it and with a mean of weights."""

import copy
import json
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import regard
from regard.config import from_dict
from regard.data.feed import Batch
from regard.errors import UsageError
from regard.fast.train import precision
from regard.kernels.linear import unpacked
from regard.models.adapt import Int4Linear, low_ranks, merge, quantize
from regard.training.config import Adapt, adapted
from regard.training.objectives import causal
from tests.wide import crossed, wide

TEXT: dict[str, Any] = dict(dim=64, layers=2, heads=2, ffn_dim=96, vocab=50, max_len=40)
BODIES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": dict(kv_heads=1),
    "mla": dict(attention=regard.MLA(2, 32)),
    "moe": dict(kv_heads=1, ffn=regard.MoE(4, 2, 32)),
}


def body(name: str) -> Any:
    torch.manual_seed(0)
    return regard.build("gpt2" if name in ("gpt2", "mla") else "llama", **TEXT | BODIES[name])


def pair(name: str) -> tuple[Any, Any]:
    """A model in 4 bits with LoRA, and its twin whose weights are those turned back."""
    four = adapted(quantize(body(name)), Adapt("qlora", 4, targets="all"))
    for low in low_ranks(four).values():
        nn.init.normal_(low.b, std=0.1)
    twin = copy.deepcopy(four)
    for low in low_ranks(twin).values():
        low.base = low.base.plain() if isinstance(low.base, Int4Linear) else low.base
    return four, twin


@pytest.mark.parametrize("name, how", crossed(BODIES, ["fp32", "bf16"]))
def test_gradients_are_those_of_the_dense_twin(name: str, how: str) -> None:
    x, grads = torch.randint(50, (3, 9)), []
    for model in pair(name):
        assert any(isinstance(m, Int4Linear) for m in model.modules()) == (not grads)
        with precision(how, "cpu"):
            loss, _ = causal(model, Batch(x[:, :-1], x[:, 1:]))
        loss.backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    limits = dict(rtol=1e-5, atol=1e-6) if how == "fp32" else dict(rtol=0.05, atol=0.02)
    assert len(grads[0]) == 2 * len(low_ranks(model))
    for key, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][key], **limits)


def test_base_is_held_once_and_in_4_bits() -> None:
    model = body("llama")
    before = {n: m.weight.numel() for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    quantize(model)
    assert not [m for m in model.tower.modules() if isinstance(m, nn.Linear)]
    for name, numbers in before.items():
        layer = model.get_submodule(name)
        assert not [p for p in layer.parameters() if p.dim() > 1]
        # 4 bits each, and a scale and a zero of 16 bits for 32; outputs are filled up to 64.
        padded = numbers / layer.out_features * (-(-layer.out_features // 64) * 64)
        assert layer.q.nbytes + layer.scales.nbytes == padded * 5 / 8


def test_nothing_but_the_input_is_kept_for_the_way_back() -> None:
    layer, kept = Int4Linear(nn.Linear(64, 96)), []
    x = torch.randn(5, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x).sum().backward()
    assert {t.data_ptr() for t in kept} <= {layer.q.data_ptr(), layer.scales.data_ptr()}


def test_widths_that_groups_do_not_divide_and_routers_stay() -> None:
    odd = quantize(regard.build("gpt2", **{**TEXT, "dim": 40}))
    assert isinstance(odd.tower.blocks[0].attention.wq, nn.Linear)
    assert isinstance(odd.tower.blocks[0].ffn.down, Int4Linear)
    mixed = quantize(body("moe"))
    assert isinstance(mixed.tower.blocks[0].ffn.router, nn.Linear)


def test_weight_turned_back_is_what_the_product_reads() -> None:
    layer, x = Int4Linear(nn.Linear(64, 70)), torch.randn(3, 64)
    assert layer.weight.shape == (70, 64)
    assert torch.equal(layer.weight.t().bfloat16(), unpacked(layer.q, layer.scales)[:, :70])
    torch.testing.assert_close(layer(x), layer.plain()(x))
    assert copy.deepcopy(layer).float().scales.dtype == torch.float32
    assert torch.equal(copy.deepcopy(layer).float()(x), layer(x))


@pytest.mark.parametrize("targets", ["all", "wq", None])
def test_merged_model_has_no_layer_in_4_bits(targets: str | None) -> None:
    """Whether LoRA is on all of them, on some, or on none: the numbers stay, as torch holds them."""
    model, ids = quantize(body("llama")), torch.randint(50, (2, 7))
    if targets is not None:
        adapted(model, Adapt("qlora", 4, targets=targets))
    for low in low_ranks(model).values():
        nn.init.normal_(low.b, std=0.1)
    before, plain = model(ids), [(n, repr(m)) for n, m in body("llama").named_modules()]
    assert merge(model) is model
    assert [(n, repr(m)) for n, m in model.named_modules()] == plain  # kinds and widths
    torch.testing.assert_close(model(ids), before, rtol=1e-4, atol=1e-5)  # float32 rounding
    assert not any(p.requires_grad for n, p in model.named_parameters() if "wk" in n)


# --- runs -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qlora")
    (folder / "story.txt").write_text("The cat sat on the mat, and that was all. " * 60)
    sizes = dict(preset="llama", layers=2, dim=32, heads=2, kv_heads=1, ffn_dim=64)
    config = tables(folder, sizes, {"steps": 2}) | {"tokenizer": {"kind": "chars"}}
    regard.train(config, folder=folder / "base")
    return folder


def tables(home: Path, model: Any, train: Any, method: str = "full") -> dict[str, Any]:
    data = dict(train=str(home / "story.txt"), held=0.1, length=32, rows=2, pack="windows")
    adapt = {"method": method} | ({"targets": "all", "rank": 4} if method == "qlora" else {})
    return {"task": "lm", "model": model, "data": data, "train": train, "adapt": adapt}


@pytest.mark.parametrize(
    "method, more",
    wide([("qlora", {}), ("full", {"ema": 0.9}), ("qlora", {"ema": 0.9})], keep=[("qlora", {})]),
)
def test_stopped_run_goes_on_to_the_same_bits(
    method: str, more: dict[str, Any], home: Path, tmp_path: Path
) -> None:
    train = {"steps": 6, "save": 2, "evaluate": 2, "optim": {"lr": 1e-2}, **more}
    config = tables(home, {"folder": str(home / "base" / "last")}, train, method)
    whole = regard.train(config, folder=tmp_path / "whole")
    asked = chain(repeat(False, 4), repeat(True))
    half = regard.train(config, folder=tmp_path / "half", stop=lambda: next(asked))
    assert half.status == "asked" and 0 < half.step < 6
    half = regard.train(tmp_path / "half", resume=True)
    assert half.metrics == whole.metrics and half.best_value == whole.best_value
    name = "adapter_model" if method == "qlora" else "model"
    for file in (f"{name}.safetensors", "trainer/state.safetensors"):
        one, two = load_file(whole.last / file), load_file(half.last / file)
        assert one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)


def test_adapter_loads_as_what_was_evaluated(home: Path, tmp_path: Path) -> None:
    """Merged into the base that was rounded to 4 bits, not into the one that was never trained with."""
    config = tables(home, {"folder": str(home / "base" / "last")}, {"steps": 3}, "qlora")
    result = regard.train(config, folder=tmp_path / "run")
    assert json.loads((result.last / "adapter.json").read_text())["int4"] is True
    assert (result.last / "adapter_config.json").is_file()
    model: Any = regard.load(home / "base" / "last")
    four = adapted(quantize(model), Adapt("qlora", 4, targets="all"))
    regard.checkpoint.load_adapter(result.last, into=four)
    ids = torch.randint(10, (2, 12))
    merged: Any = regard.load(result.last)
    assert not [m for m in merged.modules() if isinstance(m, Int4Linear)]
    torch.testing.assert_close(merged(ids), four.eval()(ids), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(merge(four)(ids), merged(ids))


# --- a moving mean, and blocks that are computed again ---


def test_mean_of_weights_is_what_the_formula_says(home: Path, tmp_path: Path) -> None:
    weights, config = [], tables(home, {"folder": str(home / "base" / "last")}, {})
    for steps in (1, 2, 3):
        train = {"steps": steps, "schedule": {"shape": "constant"}}
        plain = regard.train(config | {"train": train}, folder=tmp_path / f"plain{steps}")
        weights.append(load_file(plain.last / "model.safetensors"))
    mean = load_file(home / "base" / "last" / "model.safetensors")
    for k, now in enumerate(weights, 1):
        d = min(0.5, (1 + k) / (10 + k))
        mean = {n: d * mean[n] + (1 - d) * now[n] for n in mean}
    train = {"steps": 3, "schedule": {"shape": "constant"}, "ema": 0.5}
    result = regard.train(config | {"train": train}, folder=tmp_path / "mean")
    saved, state = (
        load_file(result.last / f) for f in ("model.safetensors", "trainer/state.safetensors")
    )
    for name, x in mean.items():
        torch.testing.assert_close(saved[name], x, rtol=1e-6, atol=1e-7)
    raw = {n.removesuffix(":mean"): x for n, x in state.items() if n.endswith(":mean")}
    assert torch.equal(raw["tower.norm.weight"], weights[-1]["model.norm.weight"])


@pytest.mark.parametrize("layers, again", [(True, [0, 1, 2]), ((1,), [1]), ((), []), (False, [])])
def test_layers_that_are_computed_again(
    layers: Any, again: list[int], home: Path, tmp_path: Path
) -> None:
    from regard.fast.train import Recomputed, checkpointed
    from regard.training.trainer import Train

    model: Any = regard.build("llama", **TEXT | dict(layers=3, kv_heads=1))
    model = checkpointed(model, layers) if layers else model
    assert [i for i, b in enumerate(model.tower.blocks) if isinstance(b, Recomputed)] == again
    assert from_dict(Train, {"activation_checkpointing": layers}).activation_checkpointing == layers


def test_layers_that_are_not_there_are_refused() -> None:
    from regard.fast.train import checkpointed

    with pytest.raises(UsageError, match="names layer 7; the model has 0 to 1"):
        checkpointed(body("llama"), (0, 7))
    with pytest.raises(UsageError, match="names layer -1; the model has 0 to 1"):
        checkpointed(body("llama"), (-1,))
