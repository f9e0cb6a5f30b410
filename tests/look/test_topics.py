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
from regard.learn.explain import CHAPTERS, TOPICS, Table, Topic, called, fill, find, names
from regard.models.base import parameters
from regard.models.embedding import PatchEmbedding, Patches
from regard.position import Rope, rotate
from regard.presets import build
from tests.worked.examples import read

ROOT = Path(__file__).resolve().parents[2]
WANTED = (
    "softmax saturation jacobian scaling attention masks multi-head gqa mla dsa online-softmax positions "
    "sinusoidal rope alibi t5-bias nadaraya-watson scores bahdanau norms kv-cache beam label-smoothing "
    "schedules bleu lora rnn-path transformer self-attention batch-norm dropout clipping cost worked-masked "
    "worked-cross worked-feed-forward worked-embedding worked-greedy flash-attention"
)
# How people say it -> the topic.
WORDS = {
    "self attention": "self-attention",
    "Self-Attention": "self-attention",
    "positional encoding": "sinusoidal",
    "Positional_Encodings": "sinusoidal",
    "transformer": "transformer",
    "The Transformer Architecture": "transformer",
    "flash attention": "flash-attention",
    "FlashAttention": "flash-attention",
    "tiling": "flash-attention",
    "recomputation": "flash-attention",
    "Lightning Indexer": "dsa",
    "decoupled RoPE": "mla",
    "GELU": "feed-forward",
    "dropout": "dropout",
    "Beam search": "beam",
    "multi-query": "gqa",
    "Multi-Query Attention": "gqa",
    "look-ahead mask": "masks",
    "lookahead mask": "masks",
    "teacher forcing": "objectives",
    "layer norm": "norms",
    "LayerNorm": "norms",
    "LayerNorm vs BatchNorm": "batch-norm",
    "query key value": "attention",
    "Queries, Keys, and Values (QKV)": "attention",
    "fill mask": "objectives",
    "mlm": "objectives",
    "gradient clipping": "clipping",
    "K - V caching": "kv-cache",
    "worked-attention": "attention",
    "worked-2x2": "attention",
    "worked-4x4": "worked-masked",
    "quantization": "quantisation",
    "Kimi Delta Attention": "delta-rule",
    "state space models": "state-space-dual",
    "Mamba-2": "state-space-dual",
    "DeBERTa": "disentangled",
    "Explain the roles of Query (Q), Key (K), and Value (V) in attention": "attention",
}


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


@pytest.mark.parametrize(("said", "meant"), WORDS.items())
def test_words_that_people_use_find_their_topic(said: str, meant: str) -> None:
    assert find(said).name == meant


def test_every_topic_is_in_one_chapter_and_no_word_has_two_topics() -> None:
    listed = [name for topics in CHAPTERS.values() for name in topics]
    assert sorted(listed) == sorted(t.name for t in TOPICS)
    for topics in CHAPTERS.values():
        for name, words in topics.items():
            for word in words.split(", "):
                assert word and find(word).name == name, word
    assert "" not in names()


def test_words_that_only_share_one_with_a_topic_are_not_taken_for_it() -> None:
    for said in ("linear layer", "gated attention", "decoding theory", "softmax one"):
        with pytest.raises(UsageError, match="the nearest are"):
            find(said)


def test_name_of_several_words_needs_no_quotes() -> None:
    topic, values = called("layer", ("norm", "1", "2"), {})
    assert topic == find("norms") and values["x"] == (1, 2)
    assert called("softmax", ("1", "2"), {}) == (find("softmax"), {"x": (1, 2)})
    with pytest.raises(
        UsageError, match="there is no topic 'softmax one'; the nearest are softmax"
    ):
        called("softmax", ("one",), {})


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


def cells(table: Table) -> torch.Tensor:
    """The numbers of a matrix that is printed as a table."""
    return torch.tensor([list(row[1:]) for row in table.rows], dtype=torch.float64)


def test_attention_multiplies_weights_and_values() -> None:
    *_, weights, out = tables("attention", q=(1, 2), k=(0, 1, 1, 0, 1, 1), v=(1, 0, 0, 1, 2, 2))
    a = (torch.tensor([2.0, 1.0, 3.0], dtype=torch.float64) / math.sqrt(2)).softmax(-1)
    torch.testing.assert_close(cells(weights)[0], a)
    values = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]], dtype=torch.float64)
    torch.testing.assert_close(cells(out)[0], a @ values)


# The topic -> the entry of the worked examples, and the values of its tables in order.
WORKED = {
    "attention": ("sdpa_2x2", "scores scaled weights output"),
    "worked-masked": ("masked_self_attention_4x4", "q q q scores scaled masked weights output"),
    "worked-cross": ("cross_attention_head1", "q k v scores scaled weights head"),
    "worked-feed-forward": ("ffn_3_in_steps", "pre hidden output"),
    "worked-embedding": ("embedding_plus_pe_d4", "- sum scaled_sum"),
    "worked-greedy": ("greedy_decoding", ""),
}


@pytest.mark.parametrize("name", WORKED)
def test_worked_numbers_are_the_right_ones(name: str) -> None:
    """Every value that the examples know, and none of the wrong ones that texts print."""
    entry, keys = WORKED[name]
    known = read()[entry]
    found = tables(name)
    for table, key in zip(found, keys.split()):
        if key == "-":
            continue
        right = torch.tensor(_numbers(known["right"][key]), dtype=torch.float64)
        torch.testing.assert_close(cells(table), right, atol=1e-9, rtol=0)
        if key in known.get("wrong", {}):
            wrong = torch.tensor(_numbers(known["wrong"][key]), dtype=torch.float64)
            assert (cells(table) - wrong).abs().max() > 1e-3
    for flag, numbers in find(name).inputs.items():
        given = {"w1": "up", "w2": "down", "b1": "up_bias", "b2": "down_bias"}.get(flag, flag)
        if given in known["given"] and flag not in ("base", "text"):
            assert torch.equal(torch.tensor(numbers), torch.tensor(known["given"][given]))


def test_worked_heads_are_joined_and_projected() -> None:
    right = read()["cross_attention_concat_projection"]["right"]
    *_, joined, out = tables("worked-cross")
    for table, key in ((joined, "joined"), (out, "output")):
        right_value = torch.tensor(right[key], dtype=torch.float64)
        torch.testing.assert_close(cells(table), right_value, atol=1e-9, rtol=0)


def test_worked_feed_forward_takes_the_other_example_too() -> None:
    known = read()["ffn_2x2_table"]
    given = {"x": "x", "w1": "up", "w2": "down", "b1": "up_bias", "b2": "down_bias"}
    rows = {flag: known["given"][name] for flag, name in given.items()}
    typed = {f: [" ; ".join(" ".join(map(str, r)) for r in x) if isinstance(x[0], list) else
                 " ".join(map(str, x))] for f, x in rows.items()}  # fmt: skip
    for table, key in zip(tables("worked-feed-forward", **typed), ("pre", "hidden", "output")):
        right = torch.tensor(known["right"]["biased"][key], dtype=torch.float64)
        torch.testing.assert_close(cells(table), right, atol=1e-9, rtol=0)


def test_worked_greedy_says_the_text_and_its_probability() -> None:
    right = read()["greedy_decoding"]["right"]
    steps, (row,) = (table.rows for table in tables("worked-greedy"))
    assert [step[-1] for step in steps] == [*right["tokens"], "<END>"]
    assert row[0] == " ".join(right["tokens"])
    assert row[1:] == pytest.approx([right["log_probability"], right["probability"]], abs=1e-9)


def _numbers(data: Any) -> Any:
    if isinstance(data, list):
        return [_numbers(item) for item in data]
    return float(data)


def test_self_attention_is_the_layer_under_the_look_ahead_mask() -> None:
    first, second, out = tables("self-attention")
    for head in (cells(first), cells(second)):
        torch.testing.assert_close(head.sum(-1), torch.ones(3).double())
        assert torch.equal(head.triu(1), torch.zeros(3, 3).double())
    assert not torch.allclose(cells(first), cells(second)) and cells(out).shape == (3, 4)


def test_layer_norm_leaves_other_tokens_alone_and_batch_norm_does_not() -> None:
    layer, batch, moved = tables("batch-norm")
    torch.testing.assert_close(cells(layer).mean(1), torch.zeros(3).double(), atol=1e-9, rtol=0)
    torch.testing.assert_close(cells(batch).mean(0), torch.zeros(4).double(), atol=1e-9, rtol=0)
    x = torch.tensor(find("batch-norm").inputs["x"], dtype=torch.float64)
    torch.testing.assert_close(
        cells(batch), torch.nn.functional.batch_norm(x, None, None, training=True)
    )
    assert column(moved, "largest change")[0] == 0 < column(moved, "largest change")[1]


def test_dropout_keeps_the_mean() -> None:
    x, p = (2.0, -3.0), 0.25
    (table,) = tables("dropout", x=x, p=(p,))
    drawn = torch.nn.functional.dropout(torch.tensor(x).expand(20_000, 2), p)
    for i, row in enumerate(table.rows):
        assert sorted(set(drawn[:, i].abs().tolist())) == [0.0, pytest.approx(abs(row[1]))]
        assert row[2] == 0 and row[3] == pytest.approx(row[0]) and row[5] == row[0]
        assert drawn[:, i].var().item() == pytest.approx(row[4], rel=0.05)


def test_clipping_keeps_the_direction() -> None:
    (table,) = tables("clipping", x=(3, 4), size=(1,))
    assert column(table, "clipped") == pytest.approx([0.6, 0.8], abs=1e-6)
    (table,) = tables("clipping", x=(3, 4), size=(9,))
    assert column(table, "clipped") == [3, 4]


def test_cost_meets_at_twice_the_width() -> None:
    table, steps = tables("cost", tokens=(2048,), dim=(1024,))
    assert list(steps.rows[0]) == [2048, 2048, 1]
    assert table.rows[0][1] == table.rows[0][2] == 4 * 2048 * 1024**2


def test_transformer_counts_the_weights_of_real_models() -> None:
    setups, kinds = tables("transformer", layers=(2,), dim=(64,), heads=(4,), width=(128,))
    for row in setups.rows:
        model = build(row[1], layers=2, dim=64, heads=4, ffn_dim=128)
        assert row[-1] == parameters(model)
    gpt, bert, full = setups.rows
    assert gpt[5] == bert[5] == 0 and full[5] * 2 == full[4]
    assert len(kinds.rows) == 3


def test_rope_score_is_the_same_everywhere_and_turns_as_the_library_does() -> None:
    _, half, _, scores = tables("rope", x=(1, 2, 3, 4), pos=(3,))
    cos, sin = Rope().angles(torch.tensor([[3]]), 4, torch.float64)
    truth = rotate(torch.tensor([1.0, 2, 3, 4]).double().view(1, 1, 1, 4), cos, sin, "half")
    assert list(half.rows[0][1:]) == pytest.approx(truth.flatten().tolist())
    assert len({round(x, 9) for x in column(scores, "q.k")}) == 1


def test_rnn_path_is_lambda_to_the_t_and_real_cells_forget() -> None:
    table, path, cells = tables("rnn-path", x=(0.5, 0.9), steps=(1, 7, 90))
    assert list(table.rows[1][1:]) == pytest.approx([0.5**7, 0.9**7])
    assert list(path.rows[1]) == [7, 7, 1]
    for name in ("elman", "gru", "lstm"):
        near, later, gone = column(cells, name)
        assert 1 > near > later > gone == 0


def test_kv_cache_counts_products_and_bytes() -> None:
    products, memory = tables(
        "kv-cache", tokens=(3,), layers=(2,), heads=(4,), kv_heads=(1,), head_dim=(8,)
    )
    assert list(products.rows[0]) == [3, 1 + 2 + 3, 1 + 4 + 9]
    assert list(memory.rows[0]) == [3, 3 * 2 * (8 + 8) * 2]


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
        ("worked-masked", {"wk": ("0.1 0.2 0.3 0.4;",)}, "queries have 4 numbers, keys 1"),
        ("worked-cross", {"head": ("1 2 3; 4 5 6",)}, "--head is 2 x 3, but 2 x 2 fits"),
        ("worked-feed-forward", {"b1": ("1",)}, "--b1 is 1 x 1, but 1 x 2 fits"),
        ("worked-greedy", {"x": ("-1 0 0 0 1;",)}, "numbers from 0"),
        ("worked-greedy", {"text": "the cat"}, "are not rows of 2"),
        ("dropout", {"p": (1,)}, "from 0 to below 1"),
        ("batch-norm", {"x": ("1 2 3;",)}, "two tokens or more"),
        ("transformer", {"layers": (10**6,)}, "from 1 to 200"),
        ("transformer", {"heads": (7,)}, "heads"),
        ("self-attention", {"heads": (3,)}, "heads"),
        ("clipping", {"size": (0,)}, "above 0"),
    ],
)
def test_wrong_input_is_one_sentence(name: str, given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        find(name).tables(given)


@pytest.mark.parametrize(
    ("said", "near"), [("sofmax", "softmax"), ("transfomer", "transformer"), ("zzz", "")]
)
def test_unknown_topic_names_the_three_nearest(said: str, near: str) -> None:
    with pytest.raises(UsageError, match=rf"the nearest are {near}\S*, \S+ and \S+ \(") as found:
        find(said)
    assert "\n" not in str(found.value)
