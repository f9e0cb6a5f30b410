"""T5Gemma's two configs in one: what each says, what both say together, and what neither can mean."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

import regard
from regard.checkpoint import store
from regard.checkpoint.hf import read
from regard.errors import UsageError
from regard.models.init import initialize
from tests.checkpoint.families import CASES, Peer, at_tokens, batch

Peers = Callable[[str], Peer]


def changed(peer: Peer, part: str, **keys: Any) -> regard.Model:
    """The folder's model, with these keys of a part."""
    said = json.loads((peer.folder / "config.json").read_text())
    return read({**said, part: said[part] | keys}, store.weights(peer.folder), None, None)


def test_each_part_has_sizes_and_a_window_of_its_own(peer: Peers) -> None:
    """An encoder's counts the tokens on each side, without the query's own."""
    config: Any = regard.from_hf(peer("t5gemma").model).config
    windows = [[a.window for a in t.each("attention")] for t in (config.encoder, config.decoder)]
    assert windows == [[4, None], [3, None, 3]]
    config = regard.from_hf(peer("t5gemma-odd").model).config
    assert (config.encoder.dim, config.decoder.dim, config.decoder.memory_dim) == (21, 24, 21)
    assert (config.source.vocab, config.target.vocab) == (50, 47)


def test_longest_input_is_that_of_the_longer_part(peer: Peers, tmp_path: Any) -> None:
    model = changed(peer("t5gemma"), "encoder", max_position_embeddings=90)
    assert model.config.max_len == 90
    longer = regard.build(model.config, max_len=95)
    longer.origin = copy.copy(model.origin)
    said = json.loads((longer.save(tmp_path) / "config.json").read_text())
    assert [said[part]["max_position_embeddings"] for part in ("encoder", "decoder")] == [95, 95]
    assert regard.load(tmp_path).config == longer.config


@pytest.mark.parametrize(
    "part, key, value, why",
    [
        ("encoder", "layer_types", 5, "layer_types is 5; it must be a list"),
        ("decoder", "layer_types", ["full_attention"], "layer_types must list as many words"),
        ("decoder", "sliding_window", "x", "sliding_window is 'x'; it must be a whole number"),
        ("decoder", "is_causal", False, "is_causal is False, Regard can only do True"),
        ("encoder", "hidden_activation", "swash", "hidden_activation is 'swash'; known: relu"),
        ("encoder", "num_hidden_layers", 10**9, "num_hidden_layers is 1,000,000,000, but"),
    ],
)
def test_wrong_value_of_a_part_is_refused(
    part: str, key: str, value: Any, why: str, peer: Peers
) -> None:
    with pytest.raises(UsageError, match=why):
        changed(peer("t5gemma"), part, **{key: value})


def test_head_of_its_own_starts_smaller_in_a_larger_vocabulary() -> None:
    torch.manual_seed(0)
    model = regard.from_hf(CASES["t5gemma-odd"].make())
    assert model.origin.start is not None
    initialize(model, model.origin.start)
    assert model.head.weight.std().item() == pytest.approx(0.02 * 47**-0.5, rel=0.1)
    assert model.target.weight.std().item() == pytest.approx(0.02, rel=0.1)


@torch.no_grad()
def test_prepared_model_answers_alike(peer: Peers) -> None:
    """With caps on scores, windows of both kinds, and an encoder of another width."""
    for name in ("t5gemma", "t5gemma-odd"):
        model, given = regard.from_hf(peer(name).model), batch(peer(name).model.config)
        wanted = at_tokens(model(**given), given)
        largest = wanted.abs().max().item()
        for how, bound in (((), 1e-5), (("int8",), 0.2)):
            answer = at_tokens(regard.prepare(model, *how)(**given), given)
            assert (answer - wanted).abs().max().item() < bound * largest


def test_decoder_reads_states_as_wide_as_the_encoder_makes_them(peer: Peers) -> None:
    config = regard.from_hf(peer("t5gemma-odd").model).config
    with pytest.raises(UsageError, match=r"width 20, encoder\.dim=21; give it as decoder\.memory"):
        regard.build(config, **{"decoder.memory_dim": 20})
