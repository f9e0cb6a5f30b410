"""regard report and regard compare, as typed."""

import json
from pathlib import Path
from typing import Any

import pytest

import regard
from regard.checkpoint.hf import Origin
from regard.cli.main import main
from regard.data.tokens import Coder
from regard.data.train_tokenizer import Recipe, train_tokenizer
from regard.report.folder import read
from regard.report.run import look
from regard.text import Tokenizer, needed
from tests.look.synthetic import events, make

SMALL = {"layers": 2, "dim": 16, "heads": 2, "ffn_dim": 16, "max_len": 32}
CELLS = {"layers": 1, "dim": 8}


def checkpoint(folder: Path, preset: str, task: str, **sizes: Any) -> None:
    """A model that has learned nothing but letters, as a run's last checkpoint."""
    files = train_tokenizer(["the fox and the dog"], Recipe(task=task, kind="chars"))
    coder = Coder(needed(Tokenizer.from_files(files, {})))
    model = regard.build(preset, vocab=coder.vocab, **sizes)
    ids = {
        "eos_token_id": coder.end,
        "pad_token_id": coder.pad,
        "decoder_start_token_id": coder.start,
    }
    model.origin = Origin(model.family, config=ids, files=files)
    model.save(folder / "last")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_report_writes_the_page_and_says_where(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(home / "runs/story")
    assert main(["report", "runs/story"]) == 0
    said = capsys.readouterr()
    assert said.out == "runs/story/report.html\n"
    assert said.err == "loss 3.04, best at 250, not diverged, 3.7k tok/s, 5 min 44 s\n"
    page = (home / "runs/story/report.html").read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>")
    assert "No attention is shown: the run has no checkpoint yet." in page


def test_report_as_markdown_and_json(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(home / "runs/story")
    assert main(["report", "runs/story", "--output", "story.md"]) == 0
    assert (home / "story.md").read_text(encoding="utf-8").startswith("# story\n\n**loss 3.04")
    capsys.readouterr()
    assert main(["report", "runs/story", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == 1 and told["best"] == 250 and len(told["evaluations"]) == 6
    assert not (home / "runs/story/report.html").exists()


def test_report_of_a_killed_run_notes_it(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make(home / "run", status="running") / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    assert main(["report", "run"]) == 0
    assert "note: metrics.jsonl ends in the middle of line 306" in capsys.readouterr().err


def test_report_shows_the_attention_of_the_last_checkpoint(home: Path) -> None:
    text = {"step": 2, "source": "the fox", "text": " and"}
    checkpoint(make(home / "run", texts=[text]), "gpt2", "lm", **{**SMALL, "ffn_dim": 64})
    assert main(["report", "run"]) == 0
    page = (home / "run/report.html").read_text(encoding="utf-8")
    assert "No attention is shown" not in page
    # The mean; two layers of two heads: each in light and in dark.
    assert page.count("data:image/png") == 2 * (1 + 2 * 2)
    assert "0.self, head 1: most" in page and "1.self, mean of 2 heads" in page


@pytest.mark.parametrize(
    "preset, task, sizes, sites",
    [
        ("gpt2", "lm", SMALL, ["0.self", "1.self"]),
        ("vaswani-base", "seq2seq", SMALL, ["encoder.0.self", "encoder.1.self", "decoder.0.self",
         "decoder.1.self", "decoder.0.cross", "decoder.1.cross"]),
        ("bahdanau", "seq2seq", CELLS, ["decoder.0.cross"]),
    ],
)  # fmt: skip
def test_maps_name_the_tokens_that_look_and_are_seen(
    preset: str, task: str, sizes: dict[str, Any], sites: list[str], tmp_path: Path
) -> None:
    text = {"step": 2, "source": "the fox", "text": " dog"}
    folder = make(tmp_path / "run", texts=[text], task=task)
    if preset == "bahdanau":
        sizes = {**sizes, "source_vocab": 20}
    checkpoint(folder, preset, task, **sizes)
    maps, told = look(read(folder))
    assert list(dict.fromkeys(m.site for m in maps)) == sites and "Step 2" in told
    for m in maps:
        assert len(m.weights) == len(m.queries) and len(m.weights[0]) == len(m.keys)
        assert [sum(row) for row in m.weights] == pytest.approx([1.0] * len(m.weights), abs=1e-4)
    queries, keys = (
        "".join(t for t in tokens if len(t) == 1) for tokens in (maps[-1].queries, maps[-1].keys)
    )
    expected = ("the␣fox␣dog",) * 2 if task == "lm" else ("␣dog", "the␣fox")
    assert (queries, keys) == expected


def test_model_without_attention_is_said(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    checkpoint(folder, "gru-lm", "lm", **CELLS)
    assert look(read(folder)) == (
        [],
        "No attention is shown: this model has no attention to look at: its layers are cells that remember, without "
        "attention.",
    )


def test_broken_checkpoint_costs_the_pictures_alone(home: Path) -> None:
    folder = make(home / "run")
    (folder / "last").mkdir()
    (folder / "last/config.json").write_text("{")
    assert main(["report", "run"]) == 0
    assert "No attention is shown: " in (folder / "report.html").read_text(encoding="utf-8")


def test_report_says_why_there_is_no_attention(home: Path) -> None:
    make(home / "run", task="image")
    assert main(["report", "run"]) == 0
    assert "the model reads pictures" in (home / "run/report.html").read_text(encoding="utf-8")


def test_compare_prints_a_table_and_writes_a_page(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(home / "runs/a")
    make(home / "runs/b", events(200, 0.3), seed=7)
    assert main(["compare", "runs/a", "runs/b", "--output", "both.html"]) == 0
    said = capsys.readouterr()
    assert "best loss" in said.out and said.err == "wrote both.html\n" and "\x1b" not in said.out
    assert "Compared: a, b" in (home / "both.html").read_text(encoding="utf-8")
    assert main(["compare", "runs/a", "runs/b", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["differs"] == {"seed": [42, 7]} and [r["run"] for r in told["runs"]] == ["a", "b"]


MISTAKES = {
    "no folder": (["report", "gone"], 4, "gone is not a folder"),
    "no run": (["report", "."], 4, "has no run.json"),
    "suffix": (["report", "run", "--output", "x.pdf"], 2, "ends in .html or .md"),
    "where": (["report", "run", "--output", "gone/x.html"], 2, "there is no folder gone"),
    "alone": (["compare", "run"], 2, "needs two runs or more"),
    "other": (["compare", "run", "gone"], 4, "gone is not a folder"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_one_sentence(name: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(home / "run")
    arguments, code, text = MISTAKES[name]
    assert main(list(arguments)) == code
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert said.err.startswith("error: ") and text in said.err
