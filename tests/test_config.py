"""Configs: frozen dataclasses <-> plain data, strictly."""

import json
from typing import Annotated, Any

import pytest

import regard
from regard.attention import DSA, GQA, MLA
from regard.block import Tower
from regard.config import (
    Amount,
    AtMost,
    Choice,
    Count,
    Divides,
    Excludes,
    Needs,
    customize,
    divisors,
    from_dict,
    settings,
    to_dict,
)  # fmt: skip
from regard.errors import UsageError, nearest
from regard.layers import LM, MLP, Classify, Norm
from regard.models import (
    EncoderDecoderConfig,
    Patches,
    Tokens,
    TransformerConfig,
)
from regard.moe import MoE
from regard.position import Alibi, Learned, Linear, Llama3, Rope, Sinusoidal, T5Bias, Yarn
from regard.presets import PRESETS

SPARSE = DSA(MLA(4, latent=8, rope_dim=4, rope=Rope(scaling=Yarn(4.0, 64))), 2, 8, topk=4)
CONFIGS = {
    "decoder": TransformerConfig(
        Tokens(50),
        Tower(16, 2, GQA(4, 2, rope=Rope(scaling=Llama3(8.0))), MLP(32, gated=True)),
        LM(),
    ),
    "layers_differ": TransformerConfig(
        Tokens(50, Learned(64, offset=2), norm=Norm(rms=True)),
        Tower(16, 2, (GQA(4, window=8), SPARSE), (MLP(32), MoE(4, 2, 8, shared=1))),
        LM(tied=False, bias=True),
        max_len=64,
    ),
    "vision": TransformerConfig(
        Patches(32, 8), Tower(16, 1, GQA(4, bias=True), MLP(32), causal=False), Classify(10)
    ),
    "pair": EncoderDecoderConfig(
        Tokens(50, Sinusoidal(64)),
        Tower(16, 1, GQA(4), MLP(32), causal=False, relative=T5Bias(4)),
        Tokens(50),
        Tower(16, 1, MLA(4, latent=8), MLP(32), cross=GQA(2), relative=Alibi(4), order="post"),
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_config_reads_back_equal_from_json(name: str) -> None:
    config = CONFIGS[name]
    assert from_dict(type(config), json.loads(json.dumps(to_dict(config)))) == config


@pytest.mark.parametrize("name", CONFIGS)
def test_config_is_hashable_and_frozen(name: str) -> None:
    assert hash(CONFIGS[name]) == hash(from_dict(type(CONFIGS[name]), to_dict(CONFIGS[name])))
    with pytest.raises(AttributeError):
        CONFIGS[name].kind = "other"  # type: ignore[misc]


def bad(**changes: object) -> dict:
    data = to_dict(CONFIGS["decoder"])
    for path, value in changes.items():
        *folders, name = path.split("__")
        place = data
        for folder in folders:
            place = place[folder]
        place[name] = value
    return data


def test_unknown_key_names_the_nearest_known_one() -> None:
    with pytest.raises(UsageError, match=r"config.tower.layer is not .* did you mean 'layers'\?"):
        from_dict(TransformerConfig, bad(tower__layer=3))
    with pytest.raises(UsageError, match=r"attention.kv_head .* did you mean 'kv_heads'\?"):
        from_dict(TransformerConfig, bad(tower__attention__kv_head=3))


def test_unknown_key_far_from_all_lists_what_is_known() -> None:
    with pytest.raises(UsageError, match="known: embedding, head, kind"):
        from_dict(TransformerConfig, bad(zzz=3))


def test_missing_key_is_named_with_all_that_are_needed() -> None:
    with pytest.raises(UsageError, match="config.layers is missing; Tower needs layers, ffn"):
        from_dict(Tower, {"dim": 16, "attention": to_dict(GQA(4))})


@pytest.mark.parametrize(
    "cls, data, match",
    [
        (
            Tower,
            {**to_dict(CONFIGS["decoder"].tower), "layers": "two"},
            "layers must be int, got 'two'",
        ),
        (Tower, {**to_dict(CONFIGS["decoder"].tower), "layers": 2.5}, "layers must be int"),
        (Tower, {**to_dict(CONFIGS["decoder"].tower), "layers": True}, "layers must be int"),
        (Tower, {**to_dict(CONFIGS["decoder"].tower), "layers": False}, "layers must be int"),
        (Tower, {**to_dict(CONFIGS["decoder"].tower), "causal": 1}, "causal must be bool"),
        (
            Tower,
            {**to_dict(CONFIGS["decoder"].tower), "norm": 3},
            "norm must be one of norm, batch",
        ),
        (Norm, {"eps": "small"}, "eps must be float"),
        (GQA, {"heads": 4, "kv_heads": "2"}, "kv_heads must be int"),
        (GQA, [4], "must be a table of settings"),
    ],
)
def test_wrong_type_says_what_was_expected(cls: type, data: object, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        from_dict(cls, data)  # type: ignore[arg-type]


def test_whole_number_serves_as_float() -> None:
    scaling = from_dict(Linear, {"factor": 4})
    assert scaling == Linear(4.0) and isinstance(scaling.factor, float)


def test_unknown_kind_lists_the_known() -> None:
    with pytest.raises(
        UsageError,
        match="attention.kind is 'flash'; known: compressed, delta, disentangled, dsa, gqa, mla, ssd",
    ):
        from_dict(TransformerConfig, bad(tower__attention__kind="flash"))
    with pytest.raises(UsageError, match=r"attention.kind is 'gq'; did you mean 'gqa'\?"):
        from_dict(TransformerConfig, bad(tower__attention__kind="gq"))


def test_kind_of_another_config_is_refused() -> None:
    with pytest.raises(UsageError, match="config.kind is 'encoder_decoder'"):
        from_dict(TransformerConfig, bad(kind="encoder_decoder"))


def test_customize_replaces_one_setting_by_its_path() -> None:
    config = CONFIGS["decoder"]
    new = customize(config, {"tower.attention.kv_heads": 1, "tower.norm.eps": 1})
    assert new.tower.attention.kv_heads == 1 and new.tower.norm.eps == 1.0
    assert config.tower.attention.kv_heads == 2


@pytest.mark.parametrize("preset", PRESETS)
def test_dotted_name_may_leave_out_where_it_begins(preset: str) -> None:
    """attention.dropout as in a config file: of the tower, of every layer, of both towers, not of what is inside."""
    config = PRESETS[preset][1]()
    data = to_dict(config)
    if data["kind"] == "pair":
        changed = to_dict(customize(config, {"attention.dropout": 0.25}))
        parts = [changed[part]["tower"]["attention"] for part in ("text", "image")]
        assert [part["dropout"] for part in parts] == [0.25, 0.25]
        return
    towers = [name for name in ("tower", "encoder", "decoder") if data.get(name)]
    if not all(_each(data[name], "attention") for name in towers) or not towers:
        with pytest.raises(UsageError, match="attention"):
            customize(config, {"attention.dropout": 0.25})
        return
    changed = to_dict(customize(config, {"attention.dropout": 0.25}))
    for name in towers:
        assert all(x["dropout"] == 0.25 for x in _each(changed[name], "attention"))
        assert _each(changed[name], "cross") == _each(data[name], "cross")
    assert changed["kind"] == data["kind"]


def _each(tower: dict[str, Any], part: str) -> list[dict[str, Any]]:
    """The parts of all layers that have a setting dropout."""
    value = tower.get(part)
    return [x for x in (value if isinstance(value, list) else [value]) if x and "dropout" in x]


def test_dotted_name_is_the_same_in_python_and_in_a_config_file() -> None:
    model = regard.build("gpt2", layers=2, dim=32, heads=4, vocab=50, **{"attention.kv_heads": 2})
    assert model.config.tower.attention.kv_heads == 2
    with pytest.raises(UsageError, match=r"no setting 'kv_head' of tower.attention; did you mean"):
        regard.build("gpt2", **{"attention.kv_head": 2})
    with pytest.raises(UsageError, match="no setting 'attentoin'; did you mean"):
        regard.build("gpt2", **{"attentoin.kv_heads": 2})


def test_customize_takes_a_whole_config_or_its_data() -> None:
    config, mla = CONFIGS["decoder"], MLA(4, latent=8)
    for value in (mla, to_dict(mla)):
        assert customize(config, {"tower.attention": value}).tower.attention == mla


@pytest.mark.parametrize(
    "path, value, match",
    [
        ("tower.atention.heads", 2, "no setting 'atention' of tower; did you mean 'attention'?"),
        ("tower.layers", "many", "tower.layers must be int"),
        ("tower.relative.heads", 2, "tower.relative is None"),
        ("max_len.size", 2, "max_len is None"),
        ("tower.dim.size", 2, "tower.dim is 16"),
    ],
)
def test_customize_of_what_is_not_there_says_so(path: str, value: object, match: str) -> None:
    with pytest.raises(UsageError) as error:
        customize(CONFIGS["decoder"], {path: value})
    assert match in str(error.value)


def test_customize_checks_the_result() -> None:
    with pytest.raises(UsageError, match="attention.kv_heads=3 must divide .*attention.heads=4"):
        customize(CONFIGS["decoder"], {"tower.attention.kv_heads": 3})


def test_nearest_hints_or_lists() -> None:
    assert nearest("heds", ["heads", "dim"]) == "did you mean 'heads'?"
    assert nearest("xyz", ["heads", "dim"]) == "known: dim, heads"


def test_divisors_are_all_of_them() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: GQA(8, 3), "kv_heads=3 must divide gqa.heads=8; choose one of .1, 2, 4, 8."),
        (lambda: GQA(5).make(24), "heads=5 does not divide dim=24; choose one of"),
        (lambda: MLA(5, latent=4).make(24), "heads=5 does not divide dim=24"),
        (
            lambda: MLA(4, latent=4, rope=Rope()),
            "mla.rope needs mla.rope_dim; give it too, such as 32",
        ),
        (lambda: DSA(GQA(4), 2, 6, 4, hadamard=True), "index_dim=6 must be a power of two"),
        (
            lambda: DSA(GQA(4), 2, 8, 4, precision="int3"),
            "dsa.precision = 'int3' is unknown; known: exact, fp8",
        ),
        (
            lambda: DSA(GQA(4), 2, 8, 4, rope_dim=4),
            "dsa.rope_dim needs dsa.attention.rope; give it too",
        ),
        (lambda: Tower(8, 3, (GQA(2),) * 2, MLP(8)), "attention lists 2 layers, layers=3"),
        (
            lambda: Tower(8, 1, GQA(2), MLP(8), order="middle"),
            "tower.order = 'middle' is unknown; known: .*post, pre",
        ),
        (
            lambda: Tower(8, 1, GQA(2), MLP(8), relative=Alibi(4)),
            "relative.heads=4, but .* .2. heads",
        ),
        (
            lambda: Tower(8, 1, GQA(2), MLP(8), cross=GQA(2, rope=Rope())),
            "positions; give cross without cross.rope",
        ),
        (lambda: MoE(4, 5, 8), "moe.active=5 is more than moe.experts=4; give at most 4"),
        (
            lambda: MoE(4, 2, 8, groups=3),
            "moe.groups=3 must divide moe.experts=4; choose one of .1, 2, 4.",
        ),
        (
            lambda: MoE(4, 2, 8, score="cosine"),
            "moe.score = 'cosine' is unknown; known: sigmoid, softmax",
        ),
        (lambda: Patches(30, 8), "patches.patch=8 must divide patches.size=30; choose one of"),
        (lambda: MLP(8, "swish").make(4), "activation 'swish' is unknown"),
    ],
)
def test_config_that_cannot_be_is_refused_with_the_way_out(make: object, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        make()  # type: ignore[operator]


# --- rules that a stranger's config declares --------------------------------------------------------------------------

SHADES = {"light": 1}


@settings
class Paint:
    """Every kind of rule, one of each."""

    layers: Count = 12
    shade: Annotated[str, Choice(SHADES)] = "light"
    coats: Annotated[Count, Divides("layers")] = 1
    dry: Annotated[Count, AtMost("coats")] | None = None
    gloss: Annotated[bool, Needs("varnish", such="0.5")] = False
    varnish: Amount | None = None
    matt: Annotated[bool, Excludes("gloss", "it is one or the other")] = False
    seen: Annotated[GQA, Excludes("seen.rope", "walls have no order")] | None = None


@pytest.mark.parametrize(
    "values, match",
    [
        ({"shade": "lihgt"}, "^paint.shade = 'lihgt' is unknown; did you mean 'light'. known: light$"),
        ({"coats": 5}, "^paint.coats=5 must divide paint.layers=12; choose one of .1, 2, 3, 4, 6, 12.$"),
        ({"coats": 0}, "paint.coats = 0: give 1 or more"),
        ({"coats": 2, "dry": 3}, "^paint.dry=3 is more than paint.coats=2; give at most 2$"),
        ({"gloss": True}, "^paint.gloss needs paint.varnish; give it too, such as 0.5, or leave gloss out$"),
        ({"gloss": True, "matt": True, "varnish": 1.0}, "^paint.matt: it is one .*; give matt without gloss$"),
        ({"seen": GQA(2, rope=Rope())}, "^paint.seen: walls .*; give seen without seen.rope$"),
    ],
)  # fmt: skip
def test_rule_that_is_broken_says_what_to_type(values: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        Paint(**values)
    with pytest.raises(UsageError, match=match.replace("paint.", "wall.")):
        from_dict(Paint, values, "wall")


def test_rules_hold_what_is_off_to_nothing() -> None:
    Paint(gloss=True, varnish=0.0, coats=3, dry=3)
    Paint(matt=True, gloss=False, seen=GQA(2))


def test_choice_of_an_open_table_grows_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHADES, "dark", 2)
    assert from_dict(Paint, {"shade": "dark"}).shade == "dark"
