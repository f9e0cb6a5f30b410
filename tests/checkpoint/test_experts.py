"""Words of families with experts that their classes in transformers do not read, or that Regard refuses."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from regard.checkpoint.families import FAMILIES
from regard.checkpoint.hf import express, read_config
from regard.errors import UsageError
from tests.checkpoint.families import Peer

Peers = Callable[[str], Peer]
LONG = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 4, long_factor=[2.0] * 4)
LONG |= dict(original_max_position_embeddings=8, short_mscale=1.2, long_mscale=1.2)


def config_of(peers: Peers, name: str, **changes: Any) -> Any:
    peer = peers(name)
    said = json.loads((peer.folder / "config.json").read_text())
    family = FAMILIES[said["model_type"]]
    return read_config(said | changes, family, peer.case.architecture)


def test_width_that_turns_is_a_share_of_a_head(peer: Peers) -> None:
    """As MiniMax writes it; transformers 5.17 does not look at it."""
    plain = {"rope_type": "default", "rope_theta": 500.0}
    found = config_of(peer, "minimax-m2-partial", rope_parameters=plain, rotary_dim=4)
    assert (
        found == config_of(peer, "minimax-m2-partial") and found.tower.attention.rope.partial == 0.5
    )
    # What rope_parameters says is stronger.
    assert found == config_of(peer, "minimax-m2-partial", rotary_dim=2)


@pytest.mark.parametrize(
    "name, changes, said",
    [
        ("phimoe", {"rope_parameters": LONG | {"long_mscale": 1.5}}, "long_mscale is 1.5; Regard can only do one"),
        ("phimoe", {"rope_parameters": LONG | {"rope_type": "yarn"}}, "rope_type is 'yarn'; known: default, longrope"),
        ("llama4", {"rope_parameters": LONG | {"rope_type": "yarn"}}, "rope_type is 'yarn'; known: default, dynamic"),
        ("llama4", {"layer_types": ["sliding_attention"] * 5}, "known: full_attention, chunked_attention"),
        ("llama4", {"no_rope_layers": [1, 0]}, "no_rope_layers is .1, 0.: it must say it of each layer"),
        ("llama4", {"attention_chunk_size": None}, "attention_chunk_size is None, but layer_types has chunks"),
        ("glm-moe-dsa", {"indexer_types": ["full", "shared"]}, "Regard can only do 'full' in all 2 layers"),
        ("glm-moe-dsa", {"indexer_types": None, "index_topk_pattern": "FS"}, "'full', 'shared'.; Regard can"),
        ("glm-moe-dsa", {"indexer_types": None, "index_topk_freq": 3, "index_skip_topk_offset": 1}, "'shared'"),
        ("mistral4", {"rope_parameters": {"partial_rotary_factor": 0.75}}, "is 0.75, but qk_rope_head_dim is 4"),
    ],
)  # fmt: skip
def test_what_regard_cannot_do_is_refused(
    name: str, changes: dict[str, Any], said: str, peer: Peers
) -> None:
    with pytest.raises(UsageError, match=said):
        config_of(peer, name, **changes)


@pytest.mark.parametrize(
    "name, place, value, key",
    [
        ("llama4", "attention.chunk", 3, "attention_chunk_size"),
        ("llama4", "attention.temperature.length", 7, "floor_scale"),
        ("granitemoe", "residual_gain", 0.5, "residual_multiplier"),
        ("mistral4", "attention.temperature.scale", 0.4, "rope_parameters"),
        ("phimoe", "ffn.mixer", 0.3, "router_jitter_noise"),
        ("minimax-m2", "attention.rope.base", 77.0, "rope_parameters"),
        ("qwen3-moe", "attention.window", 3, "sliding_window"),
        ("glm4-moe", "attention.qk_norm", 1e-5, "use_qk_norm"),
        ("ernie4_5-moe", "ffn.gain", 2.0, ""),
    ],
)  # fmt: skip
def test_what_is_changed_is_said_in_their_words(
    name: str, place: str, value: Any, key: str, peer: Peers
) -> None:
    """Or, where they have none, in ours."""
    import regard

    model = regard.load(peer(name).folder)
    changed = regard.build(model.config, device="meta", **{f"tower.{place}": value})
    changed.origin = model.origin
    family, theirs, _ = express(changed, model.origin)
    if not key:
        assert family is None
        return
    assert family is not None and theirs[key] != model.origin.config.get(key)
    assert read_config(theirs, family, model.origin.architecture) == changed.config
