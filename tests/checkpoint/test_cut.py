"""transformers saves what it has joined in equal pieces, also where the pieces were of several sizes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import regard
from regard.errors import UsageError
from tests.checkpoint.cases import KV, case
from tests.checkpoint.families import error, tensors

OLMO: dict[str, Any] = dict(
    KV, pad_token_id=0, eos_token_id=2, linear_key_head_dim=4, linear_value_head_dim=10
)
TAPS = "model.layers.0.linear_attn.{}_conv1d.weight"


def test_taps_in_pieces_of_any_size_are_read_and_written_in_their_own(tmp_path: Path) -> None:
    module = case("olmo", "OlmoHybridForCausalLM", OLMO).make()
    module.save_pretrained(tmp_path / "theirs")
    model = regard.load(tmp_path / "theirs")
    assert error(model, module) < 2e-4 and error(regard.from_hf(module), module) < 2e-4
    model.save(tmp_path / "ours")
    stored = [tensors(tmp_path / "ours")[TAPS.format(part)] for part in "qkv"]
    assert [len(x) for x in stored] == [12, 12, 30]
    assert torch.equal(torch.cat(stored), module.model.layers[0].linear_attn.conv1d.weight)
    assert error(regard.load(tmp_path / "ours"), module) < 2e-4


def test_taps_of_too_few_channels_are_refused(tmp_path: Path) -> None:
    case("olmo", "OlmoHybridForCausalLM", OLMO).make().save_pretrained(tmp_path)
    stored = tensors(tmp_path)
    stored[TAPS.format("v")] = stored[TAPS.format("v")][1:].clone()
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match="v_conv1d.weight have 53 rows"):
        regard.load(tmp_path)
