"""The topics of `regard explain`: their parts, their numbers, and what they say to wrong input."""

import ast
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.cli.explain import Options
from regard.cli.shared import flags_of
from regard.errors import UsageError
from regard.learn.explain import ALIASES, TOPICS, Table, Topic, fill, find
from regard.models.base import parameters
from regard.models.embedding import PatchEmbedding, Patches
from regard.position import Rope, rotate

ROOT = Path(__file__).resolve().parents[2]
WANTED = (
    "softmax saturation jacobian scaling attention masks multi-head gqa mla dsa online-softmax positions "
    "sinusoidal rope alibi t5-bias nadaraya-watson scores bahdanau norms kv-cache beam label-smoothing "
    "schedules bleu lora rnn-path"
)


def tables(name: str, **given: Any) -> list[Table]:
    return find(name).tables(given)


def column(table: Table, name: str) -> list[Any]:
    return [row[list(table.columns).index(name)] for row in table.rows]


@pytest.mark.parametrize("name", WANTED.split())
def test_topic_is_there(name: str) -> None:
    assert find(name).question.endswith("?")


@pytest.mark.parametrize("one", TOPICS, ids=lambda t: t.name)
def test_topic_has_all_its_parts(one: Topic) -> None:
    assert one.formula and one.inputs
    for table in one.tables({}):
        assert table.rows and all(len(row) == len(table.columns) for row in table.rows)
        assert all(len(line) <= 130 for line in table.text().splitlines())
    assert all(len(line) <= 116 for line in one.formula.splitlines())
    assert set(one.inputs) <= set(flags_of(Options))  # each input is a flag


@pytest.mark.parametrize("one", TOPICS, ids=lambda t: t.name)
def test_topic_names_code_that_exists(one: Topic) -> None:
    for place in one.code:
        path, _, name = place.partition("::")
        node: Any = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        for part in name.split("."):
            node = next((n for n in node.body if getattr(n, "name", "") == part), None)
            assert node is not None, place


def test_aliases_lead_to_topics() -> None:
    assert {find(alias).name for alias in ALIASES} == set(ALIASES.values())
    assert not set(ALIASES) & {t.name for t in TOPICS}
    assert find(" Online_Softmax ").name == "online-softmax"


# --- the numbers --------------------------------------------------------------------------------------------------


def test_online_softmax_prints_every_step() -> None:
    steps, direct = tables("online-softmax", x=(1, 3, 2), v=(1, 2, 3))
    assert column(steps, "m") == [1, 3, 3]
    assert column(steps, "d") == pytest.approx([1, 1.1353, 1.5032], abs=5e-5)
    assert column(steps, "o")[-1] == pytest.approx(2.1547, abs=5e-5)
    assert column(steps, "o")[-1] == pytest.approx(direct.rows[0][0])


def test_saturation_is_the_softmax_of_a_a_2a() -> None:
    (table,) = tables("saturation", a=(0, 1, 2, 5, 10))
    found = column(table, "weight of 2a")
    assert found == pytest.approx([0.3333, 0.5761, 0.7870, 0.9867, 0.9999], abs=5e-5)
    direct = [torch.tensor([a, a, 2.0 * a]).softmax(-1)[2].item() for a in (0, 1, 2, 5, 10)]
    assert found == pytest.approx(direct, abs=1e-6)


def test_jacobian_is_that_of_autograd() -> None:
    (table,) = tables("jacobian", x=(0.3, -1, 2))
    x = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)
    truth = torch.autograd.functional.jacobian(lambda t: t.softmax(-1), x)
    found = torch.tensor([row[1:4] for row in table.rows], dtype=torch.float64)
    torch.testing.assert_close(found, truth)
    assert column(table, "sum") == pytest.approx([0, 0, 0], abs=1e-12)


def test_attention_multiplies_weights_and_values() -> None:
    weights, out = tables("attention", q=(1, 2), k=(0, 1, 1, 0, 1, 1), v=(1, 0, 0, 1, 2, 2))
    scores = torch.tensor([2.0, 1.0, 3.0]) / math.sqrt(2)
    a = scores.softmax(-1)
    assert column(weights, "softmax") == pytest.approx(a.tolist(), abs=1e-6)
    values = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]])
    assert list(out.rows[0]) == pytest.approx((a @ values).tolist(), abs=1e-6)


def test_rope_score_is_the_same_everywhere_and_turns_as_the_library_does() -> None:
    _, half, _, scores = tables("rope", x=(1, 2, 3, 4), pos=(3,))
    cos, sin = Rope().angles(torch.tensor([[3]]), 4, torch.float64)
    truth = rotate(torch.tensor([1.0, 2, 3, 4]).double().view(1, 1, 1, 4), cos, sin, "half")
    assert list(half.rows[0][1:]) == pytest.approx(truth.flatten().tolist())
    assert len({round(x, 9) for x in column(scores, "q.k")}) == 1


def test_rnn_path_is_lambda_to_the_t() -> None:
    (table,) = tables("rnn-path", x=(0.5, 0.9), steps=(1, 7))
    assert list(table.rows[1][1:3]) == pytest.approx([0.5**7, 0.9**7])


def test_kv_cache_counts_products_and_bytes() -> None:
    (table,) = tables(
        "kv-cache", tokens=(3,), layers=(2,), heads=(4,), kv_heads=(1,), head_dim=(8,)
    )
    assert list(table.rows[0]) == [3, 1 + 2 + 3, 1 + 4 + 9, 3 * 2 * (8 + 8) * 2]


def test_beam_finds_what_greedy_misses() -> None:
    (table,) = tables("beam")
    found = {row[0]: (row[2], row[4]) for row in reversed(table.rows)}
    assert found[1] == ("0 0", pytest.approx(0.24)) and found[2] == ("1 0", pytest.approx(0.36))


def test_label_smoothing_sums_to_one_in_every_definition() -> None:
    (table,) = tables("label-smoothing", x=(1, 2, 3, 0), label=(1,), eps=(0.2,))
    for name in table.columns[2:]:
        assert sum(column(table, name)[:-1]) == pytest.approx(1)


def test_resume_comes_to_the_same_bits() -> None:
    (table,) = tables("resume", steps=(4,))
    assert "equal to the bit" in table.title and column(table, "equal") == ["yes"] * 4


def test_norms_have_mean_zero_and_root_mean_square_one() -> None:
    (table,) = tables("norms", x=(2, -3, 5), eps=(1e-12,))
    layer, rms = column(table, "LayerNorm")[:3], column(table, "RMSNorm")[:3]
    assert sum(layer) == pytest.approx(0, abs=1e-9)
    assert sum(x * x for x in rms) / 3 == pytest.approx(1)


def test_quantised_weights_come_back_within_half_a_step() -> None:
    x = (0.5, -1.0, 0.25, 2.0)
    (table,) = tables("quantisation", x=x)
    rows = table.rows[: len(x)]
    assert all(abs(row[0] - row[1]) <= 2.0 / 127 / 2 + 1e-6 for row in rows)
    assert all(abs(row[0] - row[2]) <= 3.0 / 15 / 2 + 0.02 for row in rows)  # scales are bf16


def test_vit_counts_the_weights_of_the_layer() -> None:
    (table,) = tables("vit", patch=(4, 8), size=(16,), dim=(12,))
    made = [parameters(PatchEmbedding(Patches(16, p), 12)) for p in (4, 8)]
    assert column(table, "weights") == made


def test_fill_is_the_same_every_time_and_not_symmetric() -> None:
    made = [fill(torch.nn.Linear(3, 3)).weight for _ in range(2)]
    assert torch.equal(*made) and not torch.equal(made[0], made[0].T)


# --- what is wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("softmax", {"v": (1,)}, "softmax has no --v; it takes --x"),
        ("softmax", {"x": ()}, "--x needs numbers"),
        ("softmax", {"x": (math.inf,)}, "--x needs numbers"),
        ("softmax", {"x": ("one",)}, "'one' is no number"),
        ("gqa", {"heads": (8, 2)}, "takes one number for --heads"),
        ("gqa", {"heads": (2.5,)}, "give a whole number"),
        ("gqa", {"kv_heads": (3,)}, "must divide"),
        ("online-softmax", {"x": (1, 2)}, "--v has 3 numbers"),
        ("nadaraya-watson", {"k": (1,)}, "give as many of both"),
        ("nadaraya-watson", {"width": (0,)}, "above 0"),
        ("scaling", {"dim": (64,)}, "from 1 to 10"),
        ("rope", {"x": (1, 2, 3)}, "RoPE turns pairs"),
        ("mla", {"rope_dim": (3,)}, "RoPE turns pairs"),
        ("dsa", {"topk": (9,)}, "from 1 to 4"),
        ("decoding", {"p": (2,)}, "from 0 to 1"),
        ("beam", {"w": (0.0, 1.0)}, "above 0"),
        ("label-smoothing", {"x": (1, 2)}, "three logits"),
        ("label-smoothing", {"label": (7,)}, "from 0 to 4"),
        ("kv-cache", {"tokens": (10**7,)}, "to 1,000,000"),
        ("vit", {"patch": (15,)}, "must divide"),
        ("multi-head", {"dim": (10,)}, "does not divide"),
    ],
)
def test_wrong_input_is_one_sentence(name: str, given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        find(name).tables(given)


def test_unknown_topic_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'softmax'"):
        find("sofmax")
