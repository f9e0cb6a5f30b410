"""regard parity: the table, the JSON, the exit codes, and what is left out with its reason."""

import dataclasses
import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.cli.parity import summary, table, verdict
from regard.parity import Check
from tests.look.planted import BUGS
from tests.test_cli import HOME, SMALL, call

LITTLE = ("--rows", 2, "--tokens", 6)


@cache
def folder(name: str, **changes: Any) -> Path:
    torch.manual_seed(0)
    return regard.build(name, **changes).save(Path(HOME.name) / f"parity-{name}")


def gpt2() -> Path:
    return folder("gpt2", **SMALL, vocab=60, max_len=40)


def test_sound_model_is_rounding_and_exit_code_0() -> None:
    done = call("parity", gpt2(), *LITTLE)
    assert done.code == 0
    head, *rows = done.out.splitlines()
    assert head.split()[:3] == ["check", "verdict", "difference"]
    names = [row.split("  ")[0] for row in rows]
    assert {"fused against reference", "paged against uncached", "packed against plain"} <= set(
        names
    )
    assert all(" rounding " in row or " equal " in row for row in rows)
    assert "no bug" in done.err


def test_bug_is_exit_code_5_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS["stale cache page"].plant(None, monkeypatch)
    done = call("parity", gpt2(), *LITTLE)
    assert done.code == 5
    rows = [line for line in done.out.splitlines() if " bug " in line]
    names = ["paged against uncached", "shared against alone", "packed in shared pages"]
    names += ["int8 in shared pages"]
    assert [row.split("  ")[0] for row in rows] == names
    assert all(row.endswith("block 1 attention k read from the cache") for row in rows)
    assert "bug: the paged run leaves what rounding can do at block 1 attention k" in done.err


def test_json_is_one_object_on_stdout() -> None:
    done = call("parity", gpt2(), *LITTLE, "--json")
    told = json.loads(done.out)
    assert (done.code, done.err) == (0, "")
    assert (told["schema"], told["verdict"]) == (1, "rounding")
    assert {"name", "verdict", "difference", "worst", "where"} <= set(told["checks"][0])
    if not torch.cuda.is_available():
        assert "cuda" in told["left_out"]["GPU against CPU"]


def test_json_of_a_bug_is_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS["stale cache page"].plant(None, monkeypatch)
    done = call("parity", gpt2(), *LITTLE, "--json")
    told = json.loads(done.out, parse_constant=lambda text: pytest.fail(text))
    assert (done.code, told["verdict"]) == (5, "bug")


def test_folder_is_compared_with_transformers() -> None:
    pytest.importorskip("transformers", reason="the peer of this test; it is in the dev extra")
    done = call("parity", gpt2(), *LITTLE)
    assert "ours against transformers" in done.out


def test_missing_transformers_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    done = call("parity", gpt2(), *LITTLE)
    assert done.code == 0 and "ours against transformers" not in done.out
    assert (
        "left out: ours against transformers: the package transformers is not installed" in done.err
    )


def test_model_that_transformers_does_not_have_is_checked_without_it() -> None:
    done = call("parity", folder("gru-lm", vocab=30, dim=16, layers=1), *LITTLE)
    assert done.code == 0, done.err
    assert "rows reordered" in done.out
    assert "left out: ours against transformers" in done.err


def test_peer_that_cannot_be_watched_takes_no_other_check_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither one without blocks that we find, nor one that raises when it reads."""
    pytest.importorskip("transformers", reason="the peer of this test; it is in the dev extra")
    for error in (LookupError("no list of 2 blocks to watch"), RuntimeError("a kernel is missing")):

        def watched(*_: Any, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr("regard.parity.record", watched)
        done = call("parity", gpt2(), *LITTLE)
        assert done.code == 0 and "packed against plain" in done.out
        assert "left out: ours against transformers" in done.err and str(error.args[0]) in done.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--rows", 1), "at least 2"),
        (("--tokens", 2), "at least 4 tokens"),
        (("--token", 9), "did you mean --tokens"),
    ],
)
def test_bad_options_are_one_sentence(arguments: tuple[Any, ...], said: str) -> None:
    done = call("parity", gpt2(), *arguments)
    assert done.code == 2 and done.out == ""
    assert said in done.err and done.err.count("\n") == 1


def test_bad_folders_are_one_sentence(tmp_path: Path) -> None:
    done = call("parity", tmp_path / "nothing")
    assert (done.code, done.err.count("\n")) == (4, 1)
    model = regard.load(gpt2())
    with torch.no_grad():
        next(model.parameters())[0, 0] = torch.nan
    done = call("parity", model.save(tmp_path / "nan"))
    assert (done.code, done.err.count("\n")) == (4, 1)
    assert "not finite" in done.err


def test_tie_is_told_and_is_no_bug() -> None:
    tie = Check("ours against transformers", "tie", 0.14, 0.3, "block 1 output", "transformers")
    fine = Check("fused against reference", "rounding", 1e-6, 0.4, "logits")
    assert verdict([fine, tie]) == "tie" and " tie " in table([fine, tie])
    assert "no bug, but a tie: in block 1 output" in summary([fine, tie])
    assert "the transformers run took others, and neither is wrong" in summary([fine, tie])
    assert verdict([tie, dataclasses.replace(fine, verdict="bug")]) == "bug"
