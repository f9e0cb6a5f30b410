"""Each kind of rule of families/ by itself: what it reads, that it writes what it reads, and that what is said
already stays as it is."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Size, Tensor

from regard.attention import GQA
from regard.block import Tower
from regard.checkpoint import rules, tensors
from regard.checkpoint.family import Family
from regard.checkpoint.rules import Group, Key
from regard.checkpoint.tensors import To
from regard.errors import UsageError
from regard.layers import MLP

ROOT = (lambda n: n**-0.5, lambda scale: round(scale**-2))
WORDS = {"relu": 1, "gelu": 2, "gelu_new": 2}


# --- places -----------------------------------------------------------------------------------------------------------


def test_choices_are_written_out_each_for_itself() -> None:
    assert tensors.choices("a") == ["a"]
    assert tensors.choices("a.{b,c}") == ["a.b", "a.c"]
    assert tensors.choices("{a,b}.{a,b}") == ["a.a", "a.b", "b.a", "b.b"]
    # One name in braces is a number to come, not a choice.
    assert tensors.choices("{i}.{q,k}") == ["{i}.q", "{i}.k"]


def test_places_of_lists_are_those_of_all_items_or_of_one() -> None:
    data: Any = {"a": [{"b": 1}, {"b": 2, "c": 3}]}
    assert [rules.get(data, p) for p in ("a.b", "a.c", "a.1.b")] == [1, 3, 2]
    assert rules.get(data, "a.d") is rules.ABSENT and rules.get(data, "a.b.c") is rules.ABSENT
    rules.put(data, "a.b", 5)
    rules.put(data, "a.1.c", 6)
    rules.put(data, "a.0.c", 7)
    assert data == {"a": [{"b": 5}, {"b": 5, "c": 6}]}
    assert rules.need(data, "a.c") == 6
    with pytest.raises(UsageError, match="the model has no a.d"):
        rules.need(data, "a.d")


# --- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key, theirs, ours",
    [
        (Key("a"), 3, 3),
        (Key("a", 4), 3, 3),
        (Key("a", 256, ROOT), 64, 0.125),
        (Key("a", 256, ROOT), 256, 0.0625),
        (Key("a", None, ROOT), None, None),
        (Key("a", "relu", WORDS), "relu", 1),
        (Key("a", "relu", WORDS), "gelu", 2),
        (Key("a", "relu", WORDS, quiet=True), "gelu", 2),
        (Key("{a,b}", 4), 3, 3),
    ],
)
def test_key_writes_what_it_reads(key: Key, theirs: Any, ours: Any) -> None:
    found: Any = {"a": None, "b": None}
    key.read("k", {"k": theirs}, found)
    assert found == {"a": ours, "b": ours if "b" in key.places else None}
    said: Any = {}
    key.write("k", found, said)
    assert said == {"k": theirs}


def test_key_leaves_what_is_said_already() -> None:
    """Be it in another word for the same; and a quiet one what a missing key means."""
    key, said = Key("a", "relu", WORDS), {"k": "gelu_new"}
    key.write("k", {"a": 2}, said)
    assert said == {"k": "gelu_new"}
    key.write("k", {"a": 1}, said)
    assert said == {"k": "relu"}
    for quiet, want in ((False, {"k": "relu"}), (True, {})):
        said = {}
        Key("a", "relu", WORDS, quiet=quiet).write("k", {"a": 1}, said)
        assert said == want
    said = {}
    key.write("k", {"b": 1}, said)
    assert said == {}


def test_missing_and_null_keys_mean_their_defaults() -> None:
    by_others = Key("a", lambda hf: 2 * hf["n"], null=lambda hf: 3 * hf["n"])
    assert by_others.value("k", {"n": 5}) == 10
    assert by_others.value("k", {"n": 5, "k": None}) == 15
    assert Key("a", 7).value("k", {"k": None}) == 7
    assert Key("a", 7, null=0).value("k", {"k": None}) == 0
    with pytest.raises(UsageError, match="k is missing; a gpt2 model needs it"):
        Key("a").value("k", {"model_type": "gpt2"})
    with pytest.raises(UsageError, match="k is 'tanh'; known: relu, gelu, gelu_new"):
        Key("a", "relu", WORDS).value("k", {"k": "tanh"})


def test_fixed_key_is_checked() -> None:
    for fine in ({}, {"k": 1}, {"k": None}):
        rules.Fixed(1).read("k", fine, {})
    for bad in (rules.Fixed(1), rules.Fixed(1, null=0)):
        with pytest.raises(UsageError, match="Regard can only do 1"):
            bad.read("k", {"k": 2} if bad.null is rules.ABSENT else {"k": None}, {})


@pytest.mark.parametrize(
    "name, fine, bad",
    [
        ("is_causal", [True, False, None], [1, "yes", 0.0]),
        ("head_dim", [64, 0, None], [True, 64.0, "64"]),
        ("rope_theta", [1e4, 10000, None], [False, float("inf"), float("nan"), "1"]),
        ("id2label", [{}, {"0": "a"}, None], [[], "a"]),
        ("layer_types", [[], ["full_attention"], None], [{}, "full_attention"]),
        ("topk_method", ["greedy", None], [1, ["greedy"]]),
    ],
)
def test_values_that_cannot_be_meant_are_refused(
    name: str, fine: list[Any], bad: list[Any]
) -> None:
    for value in fine:
        rules.check_kinds({name: value}, [name])
    for value in bad:
        with pytest.raises(UsageError, match=f"{name} is .*; it must be"):
            rules.check_kinds({name: value}, [name])
        # A key of another family decides nothing.
        rules.check_kinds({name: value}, [])


# --- groups -----------------------------------------------------------------------------------------------------------


def tower(part: str, first: Any, second: Any, layers: int = 4) -> Any:
    return {"tower": {"layers": layers, part: [first, second]}}


FULL, SLIDING = {"window": None}, {"window": 0}
DENSE, EXPERTS = {"kind": "mlp"}, {"kind": "moe"}
PATTERN = ["full_attention", "sliding_attention"]


def slides(**how: Any) -> Group:
    return rules.sliding_layers(lambda hf, i: i % 2 > 0, 9, **how)


@pytest.mark.parametrize(
    "group, theirs, windows",
    [
        (slides(), {}, [None, 9, None, 9]),
        (slides(), {"sliding_window": 5}, [None, 5, None, 5]),
        (slides(), {"sliding_window": None}, [None] * 4),
        (slides(), {"layer_types": PATTERN[::-1] * 2, "sliding_window": 5}, [5, None, 5, None]),
        (slides(switch="on"), {"sliding_window": 5}, [None] * 4),
        (slides(switch="on"), {"sliding_window": 5, "on": True}, [None, 5, None, 5]),
        (slides(key="local", sides=2), {"local": 6}, [None, 4, None, 4]),
        (slides(key="local", sides=2), {"local": 7}, [None, 4, None, 4]),
        (slides(key="local", sides=1), {"local": 7}, [None, 8, None, 8]),
    ],
)
def test_windows_by_layer(group: Group, theirs: Any, windows: list[Any]) -> None:
    ours = tower("attention", dict(FULL), dict(SLIDING))
    group.reader(theirs, ours)
    each = ours["tower"]["attention"]
    each = each if isinstance(each, list) else [each] * 4
    assert [a["window"] for a in each] == windows
    said = copy.deepcopy(theirs)
    group.writer(copy.deepcopy(ours), said)
    assert said == theirs
    # And from nothing.
    said = {}
    group.writer(copy.deepcopy(ours), said)
    again = tower("attention", dict(FULL), dict(SLIDING))
    group.reader(said, again)
    assert again == ours


@pytest.mark.parametrize("kinds, written", [(PATTERN * 2, False), (PATTERN[::-1] * 2, True)])
def test_kinds_of_layers_are_listed_where_nothing_says_them(
    kinds: list[str], written: bool
) -> None:
    every = rules.by_layer(
        "attention", "layer_types", ("full_attention", "sliding_attention"),
        lambda hf, i: i % 2 > 0, lambda attention: attention["window"] is not None,
    )  # fmt: skip
    ours, said = tower("attention", dict(FULL), dict(SLIDING)), {}
    every.reader({"layer_types": kinds}, ours)
    every.writer(ours, said)
    assert said == ({"layer_types": kinds} if written else {})


def test_rules_by_layer_are_read_when_all_others_have_filled_in_both_kinds() -> None:
    assert slides().last and rules.experts_by_layer(1).last
    for group in (rules.rope_at("rope"), rules.expert_groups(None, (1, 1)), rules.LABELS):
        assert not group.last


def test_family_reads_late_rules_last_and_knows_the_words_of_all() -> None:
    late = Group(("late", "later"), lambda *_: None, lambda *_: None, last=True)
    table = {"late": late, "a": Key("a"), "b": rules.Fixed(1), "early": replace(late, last=False)}
    family = Family("f", "", None, {}, table, {}, {}, inert="c d")
    assert [name for name, _ in family.rules] == ["a", "b", "early", "late"]
    assert family.keys == {"late", "later", "a", "b", "c", "d"}


def test_layers_that_slide_without_a_window_are_refused() -> None:
    ours = tower("attention", dict(FULL), dict(SLIDING))
    with pytest.raises(UsageError, match="layer_types slides, but sliding_window or on is off"):
        slides(switch="on").reader({"layer_types": PATTERN * 2}, ours)
    with pytest.raises(UsageError, match="num_hidden_layers is 4; layer_types must list as many"):
        slides().reader({"layer_types": PATTERN}, ours)
    with pytest.raises(UsageError, match="num_hidden_layers is 4; layer_types must list as many"):
        slides().reader({"layer_types": ["chunked_attention"] * 4}, ours)


@pytest.mark.parametrize(
    "theirs, kinds",
    [
        ({}, "dmmm"),
        ({"first_k_dense_replace": 0}, "mmmm"),
        ({"first_k_dense_replace": None}, "mmmm"),
        ({"first_k_dense_replace": 2}, "ddmm"),
        ({"first_k_dense_replace": 4}, "dddd"),
        ({"mlp_layer_types": ["dense"] * 3 + ["sparse"]}, "dddm"),
    ],
)
def test_dense_layers_stand_before_the_experts(theirs: Any, kinds: str) -> None:
    group, ours = rules.experts_by_layer(1), tower("ffn", dict(DENSE), dict(EXPERTS))
    group.reader(theirs, ours)
    each = ours["tower"]["ffn"]
    each = each if isinstance(each, list) else [each] * 4
    assert "".join("m" if rules.is_moe(x) else "d" for x in each) == kinds
    said: Any = {**theirs, "model_type": "deepseek_v3"}
    group.writer(ours, said)
    assert said["first_k_dense_replace"] == kinds.count("d")
    assert said.get("mlp_layer_types") == theirs.get("mlp_layer_types")
    assert ours["tower"]["ffn"] == [
        DENSE if "d" in kinds else None,
        EXPERTS if "m" in kinds else None,
    ]


def test_newer_deepseeks_list_their_layers() -> None:
    ours = tower("ffn", dict(DENSE), dict(EXPERTS))
    rules.experts_by_layer(3).reader({}, ours)
    said = {"model_type": "deepseek_v32"}
    rules.experts_by_layer(3).writer(ours, said)
    assert said["mlp_layer_types"] == ["dense"] * 3 + ["sparse"]


@pytest.mark.parametrize(
    "limited, theirs, groups",
    [
        (None, {}, (8, 4)),
        (None, {"n_group": 6, "topk_group": 3}, (6, 3)),
        (None, {"n_group": None, "topk_group": None}, (1, 1)),
        ("limited", {"n_group": 6, "topk_group": 3}, (1, 1)),
        ("limited", {"n_group": 6, "topk_group": 3, "topk_method": "greedy"}, (1, 1)),
        ("limited", {"n_group": 6, "topk_group": 3, "topk_method": "limited"}, (6, 3)),
    ],
)
def test_expert_groups(limited: str | None, theirs: Any, groups: tuple[int, int]) -> None:
    group, ours = rules.expert_groups(limited, (8, 4)), tower("ffn", dict(DENSE), dict(EXPERTS))
    group.reader(theirs, ours)
    assert ours["tower"]["ffn"][1] == {**EXPERTS, "groups": groups[0], "active_groups": groups[1]}
    said: Any = {}
    group.writer(ours, said)
    again = tower("ffn", dict(DENSE), dict(EXPERTS))
    group.reader(said, again)
    assert again == ours
    assert bool(said) == (limited is None or groups != (1, 1))
    none, said = tower("ffn", dict(DENSE), None), {}
    group.writer(none, said)
    assert said == {}


@pytest.mark.parametrize("bad", [0, -1, True, 1.0, "2"])
def test_a_number_of_groups_is_a_whole_number(bad: Any) -> None:
    with pytest.raises(UsageError, match="n_group is .* it must be a whole number from 1 on"):
        rules.expert_groups(None, (8, 4)).reader({"n_group": bad}, tower("ffn", {}, {}))
    with pytest.raises(UsageError, match="topk_method is 'x'; known: greedy, limited"):
        rules.expert_groups("limited", (1, 1)).reader({"topk_method": "x"}, tower("ffn", {}, {}))


@pytest.mark.parametrize(
    "said, causal", [({}, True), ({"is_causal": None}, False), ({"is_causal": False}, False)]
)
def test_causal_is_what_is_missing(said: Any, causal: bool) -> None:
    ours: Any = {"tower": {"causal": None}}
    rules.CAUSAL.reader(said, ours)
    assert ours["tower"]["causal"] is causal
    same = dict(said)
    rules.CAUSAL.writer(ours, same)
    assert same == said
    rules.CAUSAL.writer({"tower": {"causal": not causal}}, same)
    assert same["is_causal"] is not causal
    if not causal:
        with pytest.raises(UsageError, match="with sliding_window Regard can only do True"):
            rules.CAUSAL.reader({**said, "sliding_window": 4}, ours)


@pytest.mark.parametrize(
    "said, count",
    [
        ({}, 2),
        ({"num_labels": None}, 2),
        ({"num_labels": 5}, 5),
        ({"id2label": {"0": "a", "1": "b", "2": "c"}, "num_labels": 5}, 3),
        ({"id2label": {}, "num_labels": 4}, 4),
    ],
)
def test_labels_are_counted(said: Any, count: int) -> None:
    ours: Any = {"head": {"labels": None}}
    rules.LABELS.reader(said, ours)
    assert ours["head"]["labels"] == count
    fresh: Any = {}
    rules.LABELS.writer(ours, fresh)
    assert fresh == ({} if count == 2 else {
        "id2label": {str(i): f"LABEL_{i}" for i in range(count)},
        "label2id": {f"LABEL_{i}": i for i in range(count)},
    })  # fmt: skip
    if said.get("id2label"):
        same = dict(said)
        rules.LABELS.writer(ours, same)
        assert same == said
    rules.LABELS.writer({"head": {}}, fresh := {})
    assert fresh == {}


def test_dropout_of_a_head_is_that_of_its_kind() -> None:
    group = rules.head_dropout(label=("c", "d"), tag=("t", 0.3))
    for kind, theirs, want in (
        ("label", {}, 0.1), ("label", {"d": 0.2}, 0.2), ("label", {"c": 0.4, "d": 0.2}, 0.4),
        ("label", {"c": None, "d": 0.2}, 0.2), ("tag", {}, 0.3), ("tag", {"t": 0.0}, 0.0),
    ):  # fmt: skip
        ours: Any = {"head": {"kind": kind, "dropout": None}}
        group.reader(theirs, ours)
        assert ours["head"]["dropout"] == want
        same: Any = dict(theirs)
        group.writer(ours, same)
        assert same == theirs
        group.writer({"head": {"kind": kind, "dropout": 0.9}}, same)
        assert same[{"label": "c", "tag": "t"}[kind]] == 0.9
    ours = {"head": {"kind": "lm", "dropout": None}}
    group.reader({"c": 0.4}, ours)
    group.writer(ours, said := {})
    assert ours["head"]["dropout"] is None and said == {}


def test_ids_outside_a_small_vocabulary_are_null() -> None:
    group, nothing = rules.ids_below(50, "bos", "eos"), {}  # type: ignore[var-annotated]
    group.reader({"bos": 60}, nothing)
    assert group.names == ("bos", "eos") and nothing == {}
    for vocab, want in ((49, None), (50, None), (51, 7)):
        said = {"eos": 3}
        group.writer({"embedding": {"vocab": vocab}}, said)
        assert said == ({"eos": 3, "bos": None} if want is None else {"eos": 3})


ROPE = {"base": 1e4, "partial": 1.0, "scaling": None}


@pytest.mark.parametrize(
    "theirs, ours",
    [
        ({"rope_theta": 5e5}, {"base": 5e5}),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, {"base": 5e5}),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"scaling": {"kind": "linear", "factor": 2.0}},
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 4.0}},
            {"scaling": {"kind": "linear", "factor": 4.0}},
        ),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 4.0}}, {}),
        (
            {"rope_theta": 1e4, "max_position_embeddings": 64, "rope_scaling": {"type": "yarn", "factor": 4.0}},
            {"scaling": {
                "kind": "yarn", "factor": 4.0, "fast": 32.0, "slow": 1.0, "truncated": True, "attention_factor": None,
                "mscale": None, "mscale_all": None, "original_len": 64,
            }},
        ),
        (
            {
                "rope_theta": 1e4, "max_position_embeddings": 64, "original_max_position_embeddings": 16,
                "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
            },
            {"scaling": {
                "kind": "longrope", "factor": 4.0, "short": [1.0], "long": [2.0], "attention_factor": None,
                "original_len": 16,
            }},
        ),
        ({"rope_theta": 1e4, "share": 0.25}, {"partial": 0.25}),
    ],
)  # fmt: skip
def test_rope_is_what_old_and_new_keys_say(theirs: Any, ours: Any) -> None:
    group = rules.rope_at("rope", share="share" if "share" in theirs else "")
    found: Any = {"rope": dict(ROPE)}
    group.reader(theirs, found)
    assert found["rope"] == {**ROPE, **ours}
    same = copy.deepcopy(theirs)
    group.writer(found, same)
    fresh: Any = {}
    group.writer(found, fresh)
    for said in (same, fresh):
        again: Any = {"rope": dict(ROPE)}
        group.reader(said, again)
        assert again == found


# --- tensors ----------------------------------------------------------------------------------------------------------


class Config:
    tower = Tower(16, 1, GQA(4, 2), MLP(8))


def rows(*sizes: int) -> list[Tensor]:
    return [torch.randn(n, 6) for n in sizes]


@pytest.mark.parametrize(
    "op, ours, shapes",
    [
        (tensors.SAME, rows(3), [(3, 6)]),
        (tensors.TRANSPOSED, [*rows(3), torch.randn(4)], [(6, 3), (4,)]),
        (tensors.JOINED, rows(3, 1, 2), [(6, 6)]),
        (tensors.transposed(tensors.JOINED), rows(3, 1, 2), [(6, 6)]),
        (tensors.STACKED, [torch.randn(4, 3, 2)], [(3, 2)] * 4),
        (tensors.BY_TURNS, [torch.randn(2, 3, 5), torch.randn(2, 3, 5)], [(2, 6, 5)]),
        (tensors.ROW, rows(3), [(1, 3, 6)]),
        (tensors.TOKENS, rows(2), [(1, 1, 6)] * 2),
        (tensors.TAPS, rows(4), [(4, 1, 6)]),
        (tensors.by_head("gqa", "heads"), rows(8, 4), [(12, 6)]),
    ],
)
def test_operations_run_both_ways(op: tensors.Op, ours: list[Tensor], shapes: list[Any]) -> None:
    theirs = op.save(ours, len(shapes), Config)
    assert [tuple(x.shape) for x in theirs] == shapes
    back = op.load(theirs, [x.shape for x in ours], Config)
    assert len(back) == len(ours) and all(map(torch.equal, back, ours))
    step = tensors.Step(["t"] * len(shapes), ["o"] * len(ours), [x.shape for x in ours], op, Config)
    assert step.their_shapes() == shapes


def test_rows_of_a_head_lie_together() -> None:
    a, b = torch.arange(8.0)[:, None], 10 + torch.arange(4.0)[:, None]
    (joined,) = tensors.by_head("gqa", "heads").save([a, b], 1, Config)
    assert joined[:, 0].tolist() == [0, 1, 10, 2, 3, 11, 4, 5, 12, 6, 7, 13]


def test_tables_are_written_out() -> None:
    table = {
        "wte": "embedding.weight",
        "ln_{a,b}.*": "norm_{c,d}.*",
        "qkv.*": "w{q,k,v}.*",
        "h.{i}.": {"up": To("ffn.up", needs="ffn.gate", unless="ffn.x"), "{w,b}": "{weight,bias}"},
    }
    found = {key: (to.ours, to.needs, to.unless) for key, to in tensors.written_out(table).items()}
    assert found == {
        "wte": ("embedding.weight", "", ""),
        "ln_a.*": ("norm_c.*", "", ""),
        "ln_b.*": ("norm_d.*", "", ""),
        "qkv.*": ("wq.* wk.* wv.*", "", ""),
        "h.{i}.up": (
            "tower.blocks.{i}.ffn.up",
            "tower.blocks.{i}.ffn.gate",
            "tower.blocks.{i}.ffn.x",
        ),
        "h.{i}.w": ("tower.blocks.{i}.weight", "", ""),
        "h.{i}.b": ("tower.blocks.{i}.bias", "", ""),
    }


def test_steps_are_rows_for_the_layers_that_a_model_has() -> None:
    names = ["embed", "tower.blocks.0.a.weight", "tower.blocks.0.a.bias", "tower.blocks.2.a.weight"]
    shapes = {name: Size((3, 2)) for name in names} | {"tower.blocks.2.e": Size((2, 5))}
    table = {
        "g.{i}.{j}.a.*": To("tower.blocks.{i}.a.*"),
        "x": To("embed", needs="embed", unless="nowhere"),
        "y": To("embed", needs="nowhere"),
        "z": To("embed", unless="embed"),
        "none": To("nowhere"),
        "e.{i}.{e}": To("tower.blocks.{i}.e", tensors.STACKED),
    }

    def named(inner: int) -> list[tuple[list[str], list[str]]]:
        return [(step.theirs, step.ours) for step in tensors.steps(table, shapes, None, inner)]

    rest = [(["x"], ["embed"])]
    assert named(1) == [
        (["g.0.0.a.weight"], ["tower.blocks.0.a.weight"]),
        (["g.0.0.a.bias"], ["tower.blocks.0.a.bias"]),
        (["g.1.0.a.weight"], ["tower.blocks.2.a.weight"]),
        *rest,
        (["e.1.0", "e.1.1"], ["tower.blocks.2.e"]),
    ]
    assert named(2)[2] == (["g.0.1.a.weight"], ["tower.blocks.2.a.weight"])
