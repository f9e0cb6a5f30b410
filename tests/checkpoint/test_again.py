"""Save, load, save gives the same bytes: every preset, every family, and what no family can say."""

import json
from pathlib import Path
from typing import Any

import pytest

import regard
from regard.checkpoint import rules
from regard.checkpoint.hf import Origin, express
from regard.config import to_dict
from regard.decode.defaults import folder_settings
from regard.errors import Notice, UsageError
from regard.layers import MLP
from regard.moe import MoE
from regard.position import Rope
from regard.presets import PRESETS
from tests.checkpoint.families import FEW, ONE_PER_FAMILY
from tests.checkpoint.test_hf import Peers
from tests.checkpoint.test_native import NATIVE, assert_same
from tests.tiny import FEW as KINDS
from tests.tiny import OWN, tiny
from tests.wide import wide

S = dict(layers=4, dim=24, heads=3, kv_heads=3, ffn_dim=8, vocab=50, max_len=40)
LATENT = dict(layers=4, dim=24, heads=3, head_dim=8, latent=16, query_latent=12, vocab=50)
# More experts than tensors: ours stacks them.
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral-sinks": ("mixtral-8x7b", dict(S, experts=64, active=2, sinks=True)),
    "mixtral-one-layer": ("mixtral-8x7b", dict(S, layers=1, experts=64, active=2, sinks=True)),
    "v3-window": ("deepseek-v3", dict(LATENT, ffn_dim=8, experts=256, active=8, window=8)),
}

pytestmark = pytest.mark.filterwarnings("ignore::regard.errors.Notice")


def content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def check(model: regard.Model, home: Path) -> regard.Model:
    """The model of the second folder, which has the bytes of the first."""
    first = content(model.save(home / "one"))
    again = regard.load(home / "one")
    assert content(again.save(home / "two")) == first
    return again


@pytest.mark.parametrize("name", wide(PRESETS, keep=[*KINDS, *OWN]))
def test_preset_saved_again_has_the_same_bytes(name: str, tmp_path: Path) -> None:
    check(tiny(name), tmp_path)


@pytest.mark.parametrize("name", {**NATIVE, **MIXTURES})
def test_native_model_saved_again_has_the_same_bytes(name: str, tmp_path: Path) -> None:
    preset, changes = {**NATIVE, **MIXTURES}[name]
    model = regard.build(preset, **changes)
    again = check(model, tmp_path)
    assert again.config == model.config and again.origin.family == "regard"
    assert_same(again, model)


@pytest.mark.parametrize("name", wide(ONE_PER_FAMILY, keep=FEW))
def test_family_saved_again_has_the_same_bytes(name: str, peer: Peers, tmp_path: Path) -> None:
    check(regard.load(peer(name).folder), tmp_path)


@pytest.mark.parametrize("name", ["gpt2", "gru-lm"])
def test_keys_and_files_of_a_folder_are_written_again(name: str, tmp_path: Path) -> None:
    folder = tiny(name).save(tmp_path / "folder")
    data = json.loads((folder / "config.json").read_text()) | {
        "mine": {"a": [1]},
        "eos_token_id": 3,
    }
    (folder / "config.json").write_text(json.dumps(data))
    with pytest.warns(Notice, match="mine"):
        model = regard.load(folder)
    written = json.loads((check(model, tmp_path).save(folder) / "config.json").read_text())
    assert written == data


# --- what save says -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "preset, changes, why",
    [
        ("llama", dict(S, sinks=True), "llama cannot express it (tower.attention.sinks is True)"),
        ("gru-lm", dict(dim=24, layers=2, vocab=50), "no family of Hugging Face has such a model"),
    ],
)
def test_save_says_that_and_why_it_wrote_its_own_format(
    preset: str, changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.warns(Notice) as caught:
        regard.build(preset, **changes).save(tmp_path)
    (text,) = [str(w.message) for w in caught]
    assert "Regard's own format" in text and why in text
    assert caught[0].filename == __file__


ODD: list[dict[str, Any]] = [
    dict(attention=regard.MLA(4, 16)),
    dict(attention=regard.DSA(regard.GQA(4), 2, 8, 4)),
    dict(ffn=MoE(3, 2, 7)),
    dict(ffn=(MLP(9), MoE(3, 2, 7)), layers=2),
    dict(position=None),
    dict(head=None),
    dict(head=regard.Tag(3)),
    dict(head=regard.Classify(3)),
]


@pytest.mark.parametrize("name", wide(PRESETS, keep=[*KINDS, *OWN]))
def test_no_rule_fails_on_a_model_that_it_does_not_fit(name: str) -> None:
    """`save` tries every family: a rule that cannot say a model says so, and a mistake in one would be raised."""
    config = tiny(name).config
    for change in ODD:
        try:
            model = regard.build(config, device="meta", **change)
        except UsageError:
            continue
        express(model, Origin(""))


def test_mistake_in_a_rule_is_raised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def wrong(*_: Any) -> None:
        raise KeyError("a mistake")

    model = tiny("gpt2")
    monkeypatch.setattr(rules.Key, "write", wrong)
    with pytest.raises(KeyError):
        model.save(tmp_path)


def test_small_vocabulary_gets_no_id_of_the_large_one(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    regard.build("gpt2", **S | {"vocab": 65, "kv_heads": None}).save(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (config.eos_token_id, config.bos_token_id) == (None, None)
    large = regard.build("gpt2", device="meta")
    assert "eos_token_id" not in express(large, Origin("gpt2"))[1]


# --- what decides about decoding ----------------------------------------------------------------------------------

FORCED = {"forced_bos_token_id": 7, "forced_eos_token_id": 5, "bad_words_ids": [[9]]}


@pytest.mark.parametrize("saved", [None, {}, {"forced_bos_token_id": 3}])
def test_config_decides_about_decoding_only_without_a_generation_config(
    saved: dict[str, int] | None, tmp_path: Path
) -> None:
    folder = tiny("bart-base").save(tmp_path)
    data = json.loads((folder / "config.json").read_text()) | FORCED
    (folder / "config.json").write_text(json.dumps(data))
    if saved is not None:
        (folder / "generation_config.json").write_text(json.dumps(saved))
    found, _ = folder_settings(regard.load(folder))
    said = FORCED if saved is None else saved
    assert found.get("forced_first") == said.get("forced_bos_token_id")
    assert found.get("forced_last") == said.get("forced_eos_token_id")
    assert found.get("banned", ()) == tuple(w[0] for w in said.get("bad_words_ids", []))


def test_groups_that_are_null_are_one() -> None:
    """As if none were named: experts are then chosen among all."""
    assert rules._count({"n_group": None}, "n_group", 8) == 1
    assert rules._count({}, "n_group", 8) == 8 and rules._count({"n_group": 4}, "n_group", 8) == 4


def test_share_of_rope_is_written_where_it_is_not_all() -> None:
    assert "partial_rotary_factor" not in rules.rope_words(to_dict(Rope()))
    assert rules.rope_words(to_dict(Rope(partial=0.5)))["partial_rotary_factor"] == 0.5
