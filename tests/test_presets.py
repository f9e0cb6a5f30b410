"""`build`: a model by name, with any setting changed, and any mechanism in any model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import regard
from regard.attention.latent import LatentAttention
from regard.attention.sparse import SparseAttention
from regard.config import customize, to_dict
from regard.errors import UsageError
from regard.presets import PRESETS

SMALL: dict[str, Any] = dict(layers=2, dim=24, heads=3, ffn_dim=20, vocab=50, max_len=40)
TEXT = {name: value for name, value in SMALL.items() if name != "max_len"}


def ids(rows: int = 2, size: int = 7) -> torch.Tensor:
    return torch.randint(50, (rows, size), generator=torch.Generator().manual_seed(0))


# --- names --------------------------------------------------------------------------------------------------------


def test_build_changes_a_plain_name_in_both_towers() -> None:
    config = regard.build("t5-small", layers=3, device="meta").config
    assert (config.encoder.layers, config.decoder.layers) == (3, 3)


def test_build_changes_a_dotted_name_in_one_place() -> None:
    config = regard.build("bart-base", device="meta", **{"decoder.layers": 3}).config
    assert (config.encoder.layers, config.decoder.layers) == (6, 3)


def test_build_changes_heads_of_self_and_cross_attention() -> None:
    decoder = regard.build("bart-base", heads=6, device="meta").config.decoder
    assert (decoder.attention.heads, decoder.cross.heads) == (6, 6)


def test_build_changes_the_vocabulary_of_source_and_target() -> None:
    config = regard.build("marian", vocab=77, device="meta").config
    assert (config.source.vocab, config.target.vocab) == (77, 77)


def test_build_changes_the_context_and_its_positions() -> None:
    config = regard.build("gpt2", max_len=77, device="meta").config
    assert (config.max_len, config.embedding.position.max_len) == (77, 77)


def everywhere(data: Any, key: str, path: str = "") -> dict[str, Any]:
    """Every place of a setting, by its dotted name."""
    if isinstance(data, list):
        return {
            k: v for i, x in enumerate(data) for k, v in everywhere(x, key, f"{path}{i}.").items()
        }
    if not isinstance(data, dict):
        return {}
    own = {f"{path}{key}": data[key]} if key in data else {}
    inner = (
        everywhere(value, key, f"{path}{name}.") for name, value in data.items() if name != key
    )
    return own | {k: v for found in inner for k, v in found.items()}


def names_in(data: Any) -> set[str]:
    parts = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    own = set(data) - {"kind"} if isinstance(data, dict) else set()
    return own.union(*map(names_in, parts))


@pytest.mark.parametrize("preset", PRESETS)
def test_plain_name_changes_every_place_or_says_the_dotted_names(preset: str) -> None:
    """A place that is None is a part that the family lacks: it is changed only where all are."""
    config = PRESETS[preset][1]()
    if any(count > 8 for count in everywhere(to_dict(config), "layers").values()):
        # Every kind of layer is among these.
        config = customize(config, {"layers": 8})
    data = to_dict(config)
    for name in sorted(names_in(data)):
        before = everywhere(data, name)
        value = next((v for v in before.values() if v is not None), None)
        new = (
            not value if isinstance(value, bool) else {int: 6, float: 0.25}.get(type(value), value)
        )
        try:
            after = everywhere(to_dict(customize(config, {name: new})), name)
        except UsageError as error:
            said = str(error)
            unnamed = [place for place in before if dotted(place) not in said]
            if "is several settings" in said and unnamed:
                pytest.fail(f"{name}: {unnamed} not in {said}")
            continue
        places = {k for k, v in before.items() if v is not None} or set(before)
        changed = after if name in ("layers", "attention", "ffn") else before
        assert {k for k in places & changed.keys() if after[k] != to_dict(new)} == set()


def dotted(place: str) -> str:
    """Without the number of a layer."""
    return ".".join(part for part in place.split(".") if not part.isdigit())


def test_bias_is_several_settings() -> None:
    names = "head.bias, tower.attention.bias, tower.attention.key_bias, tower.attention.out_bias, tower.ffn.bias"
    with pytest.raises(UsageError, match=f"'bias' is several settings; say which: {names}$"):
        regard.build("gpt2", bias=False)


def test_activation_reaches_the_feed_forward_and_the_head() -> None:
    config = regard.build("bert-base", activation="relu", device="meta").config
    assert (config.tower.ffn.activation, config.head.activation) == ("relu", "relu")


def test_dropout_reaches_every_place_that_the_family_has() -> None:
    config = regard.build("gpt2", dropout=0.2, device="meta").config
    tower = config.tower
    places = (config.embedding.dropout, tower.dropout, tower.attention.dropout, tower.ffn.dropout)
    assert places == (0.2, 0.2, 0.2, None)
    config = regard.build("t5-small", dropout=0.2, device="meta").config
    assert set(everywhere(to_dict(config), "dropout").values()) == {0.2}
    config = regard.build("vit-small", dropout=0.2, device="meta").config
    assert (config.embedding.dropout, config.tower.attention.dropout) == (0.2, 0.2)


def test_block_from_scratch_drops_inside_its_feed_forward_too() -> None:
    """Twice, after the activation and after the second projection, as nn.Sequential has it in many texts; GPT-2 by
    itself, as transformers has it, after the projection alone."""
    small: dict[str, Any] = {"layers": 1, "dim": 16, "heads": 2, "vocab": 9, "dropout": 0.5}
    x = torch.randn(2, 3, 16)
    for more, inside in (({}, 0.0), ({"ffn.dropout": 0.25}, 0.25)):
        block = regard.build("gpt2", **small, **more).train().tower.blocks[0]
        act = nn.GELU(approximate="tanh")
        up, down = block.ffn.up, block.ffn.down
        theirs = nn.Sequential(up, act, nn.Dropout(inside), down, nn.Dropout(0.5)).train()
        ours = []
        for part in (theirs, block.ffn):
            torch.manual_seed(3)
            ours.append(part(x))
        torch.testing.assert_close(*ours)
        assert 0 < int((ours[0] == 0).sum()) < ours[0].numel()


def test_dotted_name_is_stronger_in_any_order() -> None:
    for changes in ({"dropout": 0.2, "tower.dropout": 0.1}, {"tower.dropout": 0.1, "dropout": 0.2}):
        config = regard.build("gpt2", device="meta", **changes).config
        assert (config.tower.dropout, config.embedding.dropout) == (0.1, 0.2)


def test_dotted_name_means_the_layers_that_have_it() -> None:
    changes = {"tower.ffn.experts": 8, "groups": 1, "active_groups": 1}
    config = regard.build("deepseek-v3", device="meta", **changes).config
    assert {f.experts for f in config.tower.ffn if isinstance(f, regard.MoE)} == {8}


@pytest.mark.parametrize(
    "preset, changes, ffn_dim, head_dim",
    [
        ("gpt2", {"dim": 128, "heads": 4}, 512, None),
        ("gpt2", {"dim": 128, "heads": 4, "ffn_dim": 100}, 100, None),
        ("gpt2", {"dim": 128, "heads": 4, "tower.ffn.ffn_dim": 100}, 100, None),
        ("gpt2", {"layers": 2}, 3072, None),
        ("llama", {"dim": 128, "heads": 4}, 344, None),
        ("mistral-7b", {"dim": 64}, 224, None),
        ("qwen3-0.6b", {"dim": 128, "heads": 4, "kv_heads": 2}, 384, 64),
        ("qwen3-0.6b", {"dim": 128, "head_dim": 16}, 384, 16),
        ("mixtral-8x7b", {"dim": 64}, 224, None),
        ("vit-small", {"dim": 64, "heads": 2}, 256, None),
    ],
)
def test_widths_follow_dim(preset: str, changes: dict, ffn_dim: int, head_dim: int | None) -> None:
    tower = regard.build(preset, device="meta", **changes).config.tower
    assert (tower.ffn.ffn_dim, tower.attention.head_dim) == (ffn_dim, head_dim)


def test_widths_follow_dim_in_each_tower() -> None:
    apart = {"decoder.dim": 128, "decoder.memory_dim": 512, "shared": False}
    config = regard.build("t5-small", device="meta", heads=4, **apart).config
    assert (config.encoder.ffn.ffn_dim, config.decoder.ffn.ffn_dim) == (2048, 512)
    assert (config.decoder.attention.head_dim, config.decoder.cross.head_dim) == (32, 32)
    experts = regard.build("deepseek-v2-lite", device="meta", dim=256).config.tower
    assert [f.ffn_dim for f in experts.ffn[:2]] == [1368, 176]


def test_build_leaves_the_preset_as_it_is() -> None:
    before = PRESETS["gpt2"][1]()
    regard.build("gpt2", layers=1, device="meta")
    assert PRESETS["gpt2"][1]() == before


def test_build_from_a_config_changes_it_too() -> None:
    config = PRESETS["gpt2"][1]()
    assert regard.build(config, layers=1, device="meta").config == customize(config, {"layers": 1})


@pytest.mark.parametrize(
    "name, words",
    [
        ("gpt-2", ["'gpt-2'", "did you mean 'gpt2'?"]),
        ("lama", ["'lama'", "did you mean 'llama'?"]),
        ("zzz", ["'zzz'", "known:", "gpt2", "bert-base", "luong"]),
    ],
)
def test_unknown_preset_names_the_nearest(name: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        regard.build(name)
    assert [w for w in words if w not in str(caught.value)] == []


@pytest.mark.parametrize(
    "change, words",
    [
        ({"layer": 2}, ["'layer'", "did you mean 'layers'?"]),
        ({"n_heads": 2}, ["'n_heads'", "did you mean 'heads'?"]),
        ({"tower.layer": 2}, ["'layer' of tower", "did you mean 'layers'?"]),
        ({"decoder.layers": 2}, ["'decoder'", "known:", "tower"]),
        ({"head.tied.more": 2}, ["head.tied is True", "'more'"]),
        ({"kind": "x"}, ["'kind'"]),
        ({"tower.kind": "x"}, ["'kind' of tower"]),
        ({"layers": "two"}, ["tower.layers", "int", "'two'"]),
        ({"attention": "mla"}, ["tower.attention", "'mla'"]),
        ({"activation": "gleu"}, ["'gleu'", "did you mean 'gelu'?"]),
    ],
)
def test_unknown_setting_says_what_is_possible(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        regard.build("gpt2", device="meta", **change)
    assert [w for w in words if w not in str(caught.value)] == []


# --- numbers that must fit ----------------------------------------------------------------------------------------


def test_heads_that_do_not_divide_say_what_would() -> None:
    with pytest.raises(
        UsageError, match=r"heads=5 does not divide dim=24; choose one of \[1, 2, 3"
    ):
        regard.build("gpt2", **SMALL | {"heads": 5})


def test_key_heads_that_do_not_divide_say_what_would() -> None:
    with pytest.raises(
        UsageError, match=r"kv_heads=4 must divide .*heads=6; choose .*\[1, 2, 3, 6"
    ):
        regard.build("llama", **SMALL | {"heads": 6, "kv_heads": 4})


def test_changes_need_only_fit_together_at_the_end() -> None:
    config = regard.build("llama", device="meta", heads=7, kv_heads=7, dim=14).config
    assert (config.tower.dim, config.tower.attention.kv_heads) == (14, 7)


@pytest.mark.parametrize("layers, dense, sparse", [(2, 2, 0), (5, 3, 2), (70, 3, 67)])
def test_settings_by_layer_follow_the_number_of_layers(
    layers: int, dense: int, sparse: int
) -> None:
    model = regard.build("deepseek-v3", layers=layers, dim=16, device="meta")
    kinds = [ffn.kind for ffn in model.config.tower.each("ffn")]
    assert kinds == ["mlp"] * dense + ["moe"] * sparse


def test_attention_by_layer_is_one_a_layer() -> None:
    each = (regard.GQA(3), regard.MLA(3, 16))
    model = regard.build("gpt2", **SMALL, attention=each)
    assert [type(b.attention).__name__ for b in model.tower.blocks] == [
        "GroupedQueryAttention",
        "LatentAttention",
    ]
    with pytest.raises(UsageError, match="lists 2 layers, layers=3"):
        regard.build("gpt2", **SMALL | {"layers": 3, "attention": each[:1] + each[:1]})


# --- any mechanism in any model -----------------------------------------------------------------------------------

_MLA = regard.MLA(heads=4, latent=16, head_dim=6)
_ROTARY = regard.MLA(
    heads=4, latent=16, head_dim=6, rope_dim=4, query_latent=12, rope=regard.Rope()
)
_DSA = regard.DSA(_MLA, index_heads=2, index_dim=8, topk=3)


@pytest.mark.parametrize("attention", [_MLA, _ROTARY, _DSA], ids=["mla", "rotary", "dsa"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral-7b", "qwen3-0.6b", "mixtral-8x7b"])
@torch.no_grad()
def test_decoder_with_another_attention_decodes_as_it_reads(name: str, attention: Any) -> None:
    sizes = {k: v for k, v in SMALL.items() if k != "heads"}
    sizes |= {"experts": 3} if name == "mixtral-8x7b" else {}
    model = regard.build(name, **sizes, attention=attention)
    kind = SparseAttention if attention is _DSA else LatentAttention
    assert all(isinstance(b.attention, kind) for b in model.tower.blocks)
    cache, words = model.cache(2), ids()
    steps = [model(words[:, i : i + 1], cache=cache) for i in range(words.shape[1])]
    torch.testing.assert_close(torch.cat(steps, 1), model(words), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["bert-base", "roberta-base", "distilbert-base"])
@torch.no_grad()
def test_encoder_with_mla_reads_padded_rows_as_alone(name: str) -> None:
    sizes = {k: v for k, v in SMALL.items() if k != "heads"}
    model = regard.build(name, **sizes, attention=_MLA)
    words = ids().clamp(min=2)  # RoBERTa's padding is 1
    both = model(words.where(torch.tensor([[7], [4]]) > torch.arange(7), 1), [7, 4])
    torch.testing.assert_close(both[1:, :4], model(words[1:, :4]), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_encoder_decoder_with_mla_runs() -> None:
    model = regard.build("t5-small", **TEXT | {"heads": 4}, attention=_MLA)
    assert isinstance(model.encoder.blocks[0].attention, LatentAttention)
    assert isinstance(model.decoder.blocks[0].attention, LatentAttention)
    assert model(ids(), source=ids(size=5)).shape == (2, 7, 50)


def test_issue_s_own_example_runs() -> None:
    tiny = regard.build("gpt2", layers=2, attention=regard.MLA(heads=4, latent=64))
    assert tiny(torch.tensor([[1, 2, 3]])).shape == (1, 3, 50257)


# --- what comes out -----------------------------------------------------------------------------------------------


def test_build_gives_a_model_in_evaluation_mode() -> None:
    assert not any(m.training for m in regard.build("bert-base", **SMALL).modules())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_build_dtype_is_that_of_every_weight(dtype: torch.dtype) -> None:
    model = regard.build("gpt2", dtype=dtype, **SMALL)
    assert {p.dtype for p in model.parameters()} == {dtype}


def test_build_on_meta_holds_no_memory() -> None:
    model = regard.build("deepseek-v3", device="meta")
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_ambient_device_is_where_models_are_made(tmp_path: Path) -> None:
    """By every way in: a block, torch's default device; an argument wins over both."""
    tiny = dict(layers=1, dim=8, heads=2, vocab=16)
    folder = regard.build("gpt2", **tiny).save(tmp_path / "gpt2")

    def devices(model: Any) -> set[str]:
        return {p.device.type for p in model.parameters()}

    with torch.device("meta"):
        assert devices(regard.build("gpt2", **tiny)) == {"meta"}
        assert devices(regard.load(folder)) == {"meta"}
        assert devices(regard.build("gpt2", device="cpu", **tiny)) == {"cpu"}
        here = regard.load(folder, device="cpu")
    torch.set_default_device("meta")
    try:
        assert devices(regard.build("gpt2", **tiny)) == {"meta"}
    finally:
        torch.set_default_device(None)
    assert devices(regard.build("gpt2", **tiny)) == {"cpu"}
    for x, y in zip(here.parameters(), regard.load(folder).parameters(), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("preset", ["gpt2", "bert-base", "vit-small"])
def test_a_model_of_one_tower_attends_to_a_memory(preset: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    cross = {"tower.cross": regard.GQA(heads=2), "tower.memory_dim": 6}
    sizes = {"size": 8, "patch": 4} if preset == "vit-small" else {"vocab": 20, "max_len": 16}
    model = regard.build(preset, layers=2, dim=16, heads=2, ffn_dim=32, **sizes, **cross).double()
    x = torch.randn(2, 3, 8, 8).double() if preset == "vit-small" else torch.tensor([[1, 2]] * 2)
    memory = torch.randn(2, 5, 6).double()
    given = model.hidden(x, memory=memory)
    other = model.hidden(x, memory=memory.flip(2))
    assert (given - other).abs().max() > 1e-3
    # Padding is not attended to.
    longer = torch.cat([memory, memory], 1)
    torch.testing.assert_close(model.hidden(x, memory=longer, memory_lengths=[5, 5]), given)
    again = regard.load(model.save(tmp_path / "model"), dtype=torch.float64)
    assert torch.equal(again.hidden(x, memory=memory), given)
    probe = regard.Probe()
    model.hidden(x, memory=memory, probe=probe)
    assert probe.maps["1.cross"][0].shape == (2, 2, given.shape[1], 5)
    assert not model.decodes and "does not decode" in model.summary()


@pytest.mark.parametrize(
    "cross, memory, message",
    [
        (True, None, r"the memory is None; this model attends to one of shape \(2, s, 6\)"),
        (
            True,
            (2, 5, 8),
            r"the memory is \(2, 5, 8\); .* \(2, s, 6\): model\(ids, memory=features\)",
        ),
        (True, (1, 5, 6), r"the memory is \(1, 5, 6\)"),
        (True, (6,), r"the memory is \(6,\)"),
        (False, (2, 5, 6), "no cross-attention; leave memory out"),
    ],
)
def test_a_memory_that_does_not_fit_is_refused(
    cross: bool, memory: tuple[int, ...] | None, message: str
) -> None:
    more = {"tower.cross": regard.GQA(heads=2), "tower.memory_dim": 6} if cross else {}
    model = regard.build("gpt2", layers=1, dim=16, heads=2, vocab=20, **more)
    with pytest.raises(UsageError, match=message):
        model(torch.tensor([[1, 2]] * 2), memory=None if memory is None else torch.zeros(memory))
    if cross:
        with pytest.raises(UsageError, match="does not decode step by step"):
            regard.generate(model, [[1, 2]])


def test_build_with_the_same_seed_gives_the_same_weights() -> None:
    def state() -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        return regard.build("llama", **SMALL, kv_heads=1).state_dict()

    one, other = state(), state()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_built_model_saves_in_its_preset_s_family(tmp_path: Path) -> None:
    regard.build("mistral-7b", **SMALL, kv_heads=1).save(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "mistral"
