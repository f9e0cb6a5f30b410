"""What heads do in numbers: each formula on maps whose answer is known, and on models of every kind."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.attention import DeltaRule
from regard.decode.generate import tokenizer_of
from regard.errors import UsageError
from regard.models import Patches
from regard.see import look as module
from regard.see.heads import MEASURES, Head, Measure, Pair, Read, as_text, measured, ranked
from regard.see.look import Given, Panel, Picture, headless, trace
from regard.see.probe import Probe
from tests.look.zoo import MODELS
from tests.test_cli import call, folder

TWICE = ["A", "B", "C", "A", "B", "C"]


def on(*columns: int, keys: int | None = None) -> Tensor:
    """A head of which row i reads this column alone."""
    a = torch.zeros(len(columns), keys or len(columns))
    a[torch.arange(len(columns)), list(columns)] = 1.0
    return a


def of(a: Tensor, names: list[str] | None = None, **more: Any) -> dict[str, float]:
    rows = names or [f"w{i}" for i in range(a.shape[0])]
    return measured(Read(a, Pair(rows, more.pop("columns", rows), **more)))


def causal(count: int) -> Tensor:
    """A head that reads all it may alike."""
    return torch.ones(count, count).tril() / torch.arange(1.0, count + 1)[:, None]


# --- maps whose answer is known -----------------------------------------------------------------------------------


def test_previous_token_head_scores_one() -> None:
    found = of(on(0, 0, 1, 2, 3))
    assert found["previous"] == 1 and found["distance"] == pytest.approx(4 / 5)
    assert found["entropy"] == 0 and found["first"] == pytest.approx(1 / 4)


def test_first_token_head_scores_one() -> None:
    found = of(on(0, 0, 0, 0))
    assert (found["first"], found["entropy"]) == (1, 0)
    assert found["distance"] == pytest.approx((0 + 1 + 2 + 3) / 4)


def test_induction_head_scores_one_on_a_text_that_comes_twice() -> None:
    """A B C A B C: at the second A it reads the B after the first one; at the first A nothing is known."""
    found = of(on(0, 0, 0, 1, 2, 3), TWICE)
    assert found["induction"] == 1 and found["same"] == 0


def test_induction_does_not_count_what_comes_later_or_the_token_itself() -> None:
    """Of A A B the second A follows an A, and is no place to copy from; of what is ahead nothing counts."""
    assert math.isnan(of(on(0, 1, 2), ["A", "A", "B"])["induction"])
    assert of(on(4, 4, 4, 4, 0, 0), TWICE)["induction"] == 0


def test_same_token_head_scores_one_and_a_token_is_not_its_own_repetition() -> None:
    assert of(on(0, 1, 2, 0, 1, 2), TWICE)["same"] == 1
    assert of(on(0, 1, 2, 3, 4, 5), TWICE)["same"] == 0
    # A head that reads ahead may find it there, too.
    assert of(on(3, 4, 5, 0, 1, 2), TWICE)["same"] == 1


@pytest.mark.parametrize("count", [2, 7, 300])
def test_uniform_head_has_the_entropy_of_its_keys(count: int) -> None:
    found = of(torch.full((count, count), 1 / count))
    assert found["entropy"] == pytest.approx(math.log(count), rel=1e-5)
    # The mean of |i - j| over n x n.
    assert found["distance"] == pytest.approx((count**2 - 1) / (3 * count), rel=1e-5)
    assert found["previous"] == found["first"] == pytest.approx(1 / count)


def test_uniform_causal_head_has_the_mean_entropy_of_its_rows() -> None:
    found = of(causal(5))
    assert found["entropy"] == pytest.approx(sum(math.log(n) for n in range(1, 6)) / 5, rel=1e-5)
    assert found["previous"] == pytest.approx((1 / 2 + 1 / 3 + 1 / 4 + 1 / 5) / 4)


def test_no_row_has_such_a_token_is_no_number() -> None:
    found = of(causal(3), ["A", "B", "C"])
    assert math.isnan(found["same"]) and math.isnan(found["induction"])
    assert all(
        math.isnan(x) for n, x in of(torch.ones(1, 1)).items() if n not in ("distance", "entropy")
    )


def test_what_a_sink_takes_is_missing_and_does_not_change_how_sharp_a_head_is() -> None:
    whole, sunk = of(on(0, 0, 1, 2)), of(0.25 * on(0, 0, 1, 2))
    assert sunk["previous"] == 0.25 * whole["previous"]
    assert (sunk["entropy"], sunk["distance"]) == (whole["entropy"], whole["distance"])


def test_rows_that_read_nothing_do_not_count_and_sums_are_read_as_shares() -> None:
    a = on(0, 0, 1, 2)
    a[2] = 0
    assert of(a)["previous"] == 1 and of(a)["distance"] == pytest.approx(2 / 3)
    assert of(4 * causal(4)) == pytest.approx(of(causal(4)), nan_ok=True)


@pytest.mark.parametrize(
    "columns, expected",
    [((0, 1, 2, 3), 1), ((3, 2, 1, 0), -1), ((2, 2, 2, 2), 0), ((0, 0, 1, 1), 2 / math.sqrt(5))],
)
def test_diagonal_of_cross_attention(columns: tuple[int, ...], expected: float) -> None:
    found = of(on(*columns), crossed=True)
    assert found["diagonal"] == pytest.approx(expected)
    assert all(math.isnan(found[name]) for name in ("distance", "previous", "induction"))


def test_diagonal_is_one_for_a_source_of_another_length_and_zero_for_a_uniform_head() -> None:
    columns = [f"s{i}" for i in range(8)]
    straight = of(on(0, 2, 4, 6, keys=8), columns=columns, crossed=True)
    even = of(torch.full((4, 8), 1 / 8), columns=columns, crossed=True)
    assert straight["diagonal"] == pytest.approx(1) and even["diagonal"] == pytest.approx(0)
    assert math.isnan(of(causal(4))["diagonal"])


def test_same_of_cross_attention_is_the_token_that_is_written() -> None:
    """The one tower where a token's own place may be the one that is read."""
    source = ["1", "9", "x"]
    found = of(on(0, 1, 2, keys=3), ["1", "9", "-"], columns=source, crossed=True)
    assert found["same"] == 1 and found["first"] == pytest.approx(1 / 3)


def test_distance_in_a_picture_is_between_patches() -> None:
    """Two by two patches behind a class token, which has no place: row 1,1 reads 2,2, across the square."""
    places = torch.tensor([[math.nan] * 2, [0.0, 0.0], [0, 1], [1, 0], [1, 1]])
    found = of(on(0, 4, 1, 1, 1), places=places)
    assert found["distance"] == pytest.approx((math.sqrt(2) + 1 + 1 + math.sqrt(2)) / 4)
    # What goes to the class token is left out; a row that reads it alone says nothing of distances.
    found = of(0.5 * on(0, 4, 1, 1, 1) + 0.5 * on(0, 0, 0, 0, 0), places=places)
    assert found["distance"] == pytest.approx((2 * math.sqrt(2) + 2) / 4)
    assert found["first"] == 0.5


# --- the table ----------------------------------------------------------------------------------------------------


def table(**columns: list[float]) -> list[Head]:
    nothing = dict.fromkeys(MEASURES, math.nan)
    rows = zip(*columns.values(), strict=True)
    return [Head("self", 0, i, nothing | dict(zip(columns, row))) for i, row in enumerate(rows)]


def test_ranked_has_what_tells_most_first_and_what_does_not_apply_last() -> None:
    heads = table(entropy=[2.0, 0.5, 1.0], same=[0.1, math.nan, 0.9])
    assert [head.head for head in ranked(heads)] == [1, 2, 0]
    assert [head.head for head in ranked(heads, "same")] == [2, 0, 1]
    assert [head.head for head in ranked(heads, "layer")] == [0, 1, 2]
    with pytest.raises(UsageError, match="no column 'sane'; did you mean 'same'"):
        ranked(heads, "sane")


def test_table_leaves_out_what_applies_to_no_head() -> None:
    lines = as_text(table(entropy=[2.0, 0.5], same=[0.1, math.nan])).splitlines()
    assert lines[0].split() == ["layer", "head", "entropy", "same"]
    assert lines[2].split() == ["0", "1", "0.50", "-"]


def test_a_row_more_is_a_column_more(monkeypatch: Any) -> None:
    last = Measure(lambda read: float(read.a[-1, -1]), "what the last row reads of itself")
    monkeypatch.setitem(MEASURES, "last", last)
    assert of(on(0, 0, 2))["last"] == 1
    assert "last" in as_text([Head("self", 0, 0, of(on(0, 0, 2)))])


# --- models -------------------------------------------------------------------------------------------------------


def given(model: Any, count: int = 7) -> Given:
    torch.manual_seed(0)
    names = [f"w{i % 4}" for i in range(count)]
    if isinstance(getattr(model.config, "embedding", None), Patches):
        side = model.config.embedding.size // model.config.embedding.patch
        names = [str(i) for i in range(side**2 + model.config.embedding.extra)]
        size = model.config.embedding.size
        pixels = torch.zeros(size, size, 3, dtype=torch.uint8).numpy()
        picture = Picture(pixels, model.config.embedding.patch, model.config.embedding.extra)
        return Given(torch.randn(1, 3, size, size), names, picture=picture)
    ids = torch.randint(15, (1, count))
    if not model.reads_source:
        return Given(ids, names)
    return Given(ids[:, :5], names[:5], ids, names, names[1:6])


def kind(name: str) -> Any:
    small: dict[str, Any] = dict(layers=2, dim=24, heads=3, ffn_dim=20)
    cells: dict[str, Any] = dict(vocab=30, dim=16)
    make = {
        "vit": lambda: regard.build("vit-base", size=16, patch=8, labels=3, **small),
        "bart": lambda: regard.build("bart-base", vocab=30, max_len=40, **small),
        "bahdanau": lambda: regard.build("bahdanau", source_vocab=30, **cells),
        "luong": lambda: regard.build("luong", source_vocab=30, attention="dot", **cells),
    }.get(name)
    return (make() if make else MODELS[name].make()).eval()


@pytest.mark.parametrize("name", [*MODELS, "vit", "bart", "bahdanau", "luong"])
def test_every_kind_of_model_has_a_table_of_all_its_heads(name: str) -> None:
    """The measures are those of the exact weights, head by head."""
    model = kind(name)
    read = given(model)
    panel = Panel(name, "", trace(model, read))
    probe = Probe()
    more = {} if read.source_ids is None else {"source": read.source_ids}
    with torch.no_grad():
        model.hidden(read.ids, probe=probe, **more)
    assert len(panel.heads) == sum(calls[0].shape[1] for calls in probe.maps.values())
    assert panel.heads
    heads = iter(panel.heads)
    for view in panel.views:
        for layer in view.layers:
            for a in probe.maps[layer.site][0][0]:
                found = next(heads)
                assert (found.view, found.layer) == (view.name, layer.number)
                expected = measured(Read(a.float(), view.tokens(a.device)))
                assert found.measures == pytest.approx(expected, rel=1e-4, abs=1e-5, nan_ok=True)
                shares = ("previous", "same", "first", "induction")
                assert all(not found.measures[name] > 1.00001 for name in shares)
    assert "entropy" in as_text(panel.heads)


def test_measures_of_a_text_that_is_pooled_are_exact(monkeypatch: Any) -> None:
    model = kind("gpt")
    whole = trace(model, given(model, 20))
    for name, value in (("WHOLE", 50), ("EVERY", 50), ("SIDE", 4)):
        monkeypatch.setattr(module, name, value)
    pooled = trace(model, given(model, 20))
    assert pooled[0].step == (5, 5)
    assert as_text(Panel("", "", pooled).heads) == as_text(Panel("", "", whole).heads)


def test_layers_without_heads_are_named() -> None:
    delta = DeltaRule(2, 2, 8, 8)
    mixed = regard.build("gpt2", layers=3, dim=24, heads=3, ffn_dim=20, vocab=30, max_len=40).config
    attention = mixed.tower.attention
    model = replace(mixed, tower=replace(mixed.tower, attention=(delta, attention, delta))).make()
    views = trace(model.eval(), given(model))
    assert {head.layer for head in Panel("", "", views).heads} == {1}
    told = headless(model.config, views)
    assert told.startswith("layers 0 and 2 of self-attention: no heads (delta rule")
    assert headless(mixed, trace(mixed.make().eval(), given(model))) == ""


@pytest.mark.parametrize("name", ["delta", "gru"])
def test_a_model_without_attention_says_what_it_has_instead(name: str) -> None:
    if name == "gru":
        model, what = regard.build("gru-lm", vocab=30, dim=16), "cells that remember"
    else:
        model, what = MODELS["gpt"], "delta rule"
        model = replace(model, tower=replace(model.tower, attention=DeltaRule(2, 2, 8, 8))).make()
    with pytest.raises(UsageError, match=f"no attention to look at: its layers are {what}"):
        trace(model.eval(), given(model))


# --- python and the command ---------------------------------------------------------------------------------------


def test_look_takes_a_folder_or_a_model_and_has_heads() -> None:
    home = folder("gpt2")
    panel = regard.look(home, "Once upon a time, once upon a time")
    assert panel.name == Path(home).name
    again = regard.look(regard.load(home), "Once upon a time, once upon a time")
    assert as_text(panel.heads) == as_text(again.heads) and len(panel.heads) == 8
    assert tokenizer_of(regard.load(home)) is not None
    assert all(0 < head.measures["induction"] < 1 for head in panel.heads)
    with pytest.raises(UsageError, match="no text to look at"):
        regard.look(home)


def test_command_prints_the_table_by_the_asked_column(tmp_path: Path) -> None:
    out = tmp_path / "a.html"
    asked = ["--heads", "--sort", "previous", "--output", out]
    done = call("look", folder("gpt2"), "Once upon a time", *asked)
    assert done.code == 0, done.err
    about, empty, names, *rows, blank, path = done.out.splitlines()
    assert "self-attention" in about and empty == blank == "" and path == str(out)
    column = names.split().index("previous")
    values = [float(row.split()[column]) for row in rows]
    assert len(values) == 8 and values == sorted(values, reverse=True)


def test_sort_without_heads_is_a_mistake_and_so_is_a_column_that_is_not(tmp_path: Path) -> None:
    done = call("look", folder("gpt2"), "Once", "--sort", "same")
    assert done.code == 2 and "add --heads" in done.err
    done = call("look", folder("gpt2"), "Once", "--heads", "--sort", "inductoin")
    assert done.code == 2 and "did you mean 'induction'" in done.err
