"""What `import regard` offers, and what a model says about itself."""

import ast
import importlib
import inspect
import pydoc
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import regard
from tests.tiny import FEW, OWN
from tests.wide import wide

SMALL: dict[str, Any] = dict(layers=3, dim=24, heads=3, ffn_dim=20, vocab=50, max_len=40)


@pytest.mark.parametrize("name", regard.__all__)
def test_public_name_can_be_imported(name: str) -> None:
    assert getattr(regard, name) is not None


def test_public_names_are_listed_once_and_in_order() -> None:
    assert regard.__all__ == sorted(set(regard.__all__))
    assert set(regard.__all__) <= set(dir(regard))


@pytest.mark.parametrize("name", regard.__all__)
def test_public_callable_is_described_as_what_is_called(name: str) -> None:
    """Packages that can be called too: help, editors and notebooks show the function's words."""
    value = getattr(regard, name)
    if isinstance(value, ModuleType) and callable(value):
        function = getattr(importlib.import_module(f"regard.{name}.run"), name)
        assert inspect.getdoc(value) == inspect.getdoc(function)
        assert inspect.signature(value) == inspect.signature(function)
        assert inspect.getdoc(function) in re.sub(
            r"(?m)^ +", "", pydoc.plain(pydoc.render_doc(value))
        )
    if callable(value):
        assert inspect.getdoc(value)


def test_type_checkers_know_every_public_name() -> None:
    """The stub has what __init__.py finds, from where it finds it; py.typed makes them look."""
    home = Path(regard.__file__).parent
    assert (home / "py.typed").is_file()
    stub = ast.parse((home / "__init__.pyi").read_text(encoding="utf-8"))
    found, listed = {}, None
    for node in stub.body:
        if isinstance(node, ast.ImportFrom):
            found |= {alias.name: node.module for alias in node.names}
        elif isinstance(node, ast.Assign):
            listed = ast.literal_eval(node.value)
    assert found == {**regard._WHERE, "presets": "regard"} and listed == regard.__all__


def test_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'lload'"):
        regard.lload  # noqa: B018


def test_import_does_no_work() -> None:
    script = "import sys, regard; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_building_does_not_import_the_compiler() -> None:
    """torch._dynamo takes as long to import as all of torch."""
    script = "import sys, regard.presets; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a cuda device")
def test_a_cpu_imports_no_kernels_for_gpus() -> None:
    """triton takes longer to import than all of ours."""
    script = "import sys, regard.decode.generate; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


# --- model.summary() ----------------------------------------------------------------------------------------------


def number(model: regard.Model, line: str, context: int | None = None) -> int:
    """The first number of the summary's line that starts with `line`."""
    found = next(x for x in model.summary(context).splitlines() if x.startswith(line))
    return int(re.findall(r"[\d,]+", found)[0].replace(",", ""))


@pytest.mark.parametrize("name", wide(regard.PRESETS, keep=[*FEW, *OWN]))
def test_summary_counts_every_parameter_once(name: str) -> None:
    model = regard.build(name, device="meta")
    assert number(model, "all") == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    "name, parameters",
    [
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        ("llama-2-7b", 6_738_415_616),
        ("llama-3.1-8b", 8_030_261_248),
        ("mistral-7b", 7_241_732_096),
        ("mixtral-8x7b", 46_702_792_704),
        ("deepseek-v3", 671_026_419_200),
        ("t5-small", 60_506_624),
        ("vit-base", 86_567_656),
    ],
)
def test_preset_has_the_published_number_of_parameters(name: str, parameters: int) -> None:
    model = regard.build(name, device="meta")
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize(
    "name, size",
    [
        ("gpt2", 12 * 2 * 768 * 2),
        ("llama-3.1-8b", 131_072),  # 32 layers x 8 key heads x (128 + 128) x 2 bytes
        ("llama-2-7b", 524_288),
        ("deepseek-v3", 70_272),  # 61 layers x (512 + 64) x 2 bytes
        ("deepseek-v3.2", 61 * (512 + 64 + 128) * 2),  # and the index's key
        ("t5-small", 6 * 2 * 512 * 2),
    ],
)
def test_summary_gives_the_cache_bytes_of_a_token(name: str, size: int) -> None:
    model = regard.build(name, device="meta", dtype=torch.bfloat16)
    assert number(model, "cache per token") == size


def test_summary_of_an_encoder_has_no_cache() -> None:
    assert (
        "cache per token                none" in regard.build("bert-base", device="meta").summary()
    )


@pytest.mark.parametrize("name", wide(regard.PRESETS, keep=[*FEW, *OWN]))
def test_flops_are_counted_for_every_preset(name: str) -> None:
    assert regard.build(name, device="meta").flops_per_token(16) > 0


@pytest.mark.parametrize("context", [1, 10, 40])
@pytest.mark.parametrize("tied", [True, False])
def test_flops_of_a_dense_decoder_equal_the_count_by_hand(context: int, tied: bool) -> None:
    model = regard.build("llama", device="meta", **SMALL, kv_heads=1, tied=tied)
    m, f, h, d, vocab = 24, 20, 3, 8, 50
    projections = m * h * d + 2 * m * 1 * d + h * d * m  # q; k and v of one head; out
    feed_forward = 3 * m * f  # gate, up, down
    pairs = context * h * (d + d)  # q . k, and weight times v
    by_hand = 2 * (3 * (projections + feed_forward + pairs) + m * vocab)
    assert model.flops_per_token(context) == by_hand
    assert number(model, "FLOPs per token", context) == by_hand


def test_flops_of_a_body_are_those_without_the_head() -> None:
    whole = regard.build("bert-base", **SMALL)
    body = replace(whole.config, head=None).make()
    m, vocab = 24, 50
    assert whole.flops_per_token(8) - body.flops_per_token(8) == 2 * (m * m + m * vocab)


def test_flops_count_the_chosen_experts_only() -> None:
    sizes = dict(SMALL, kv_heads=1, experts=6)
    one, two = (regard.build("mixtral-8x7b", device="meta", **sizes, active=a) for a in (1, 2))
    assert two.flops_per_token(8) - one.flops_per_token(8) == 2 * 3 * (3 * 24 * 20)


def test_flops_of_a_window_stop_growing() -> None:
    model = regard.build("mistral-7b", device="meta", **SMALL, kv_heads=1, window=8)
    assert model.flops_per_token(8) == model.flops_per_token(40) > model.flops_per_token(7)


def test_flops_of_sparse_attention_grow_with_the_index_alone() -> None:
    attention = regard.DSA(regard.GQA(3), index_heads=2, index_dim=4, topk=8)
    model = regard.build("gpt2", device="meta", **SMALL, attention=attention)
    assert model.flops_per_token(40) - model.flops_per_token(39) == 3 * 2 * 2 * 4


def test_summary_counts_at_the_context_that_is_asked_for_or_the_longest() -> None:
    """Of a model that has no longest text, at 1,024 keys."""
    for given, context, want in ((40, None, 40), (40, 7, 7), (None, None, 1024), (None, 9, 9)):
        model = regard.build("llama", device="meta", **{**SMALL, "max_len": given}, kv_heads=1)
        flops = f"{model.flops_per_token(want):>14,} at {want:,} keys"
        assert flops in model.summary(context)


def test_summary_lists_layers_by_part() -> None:
    lines = regard.build("bart-base", device="meta", **{"decoder.layers": 3}).summary().splitlines()
    layers = {line.split()[0]: line.split()[1] for line in lines if "coder" in line}
    assert layers == {"encoder": "6", "decoder": "3"}
