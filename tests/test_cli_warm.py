"""regard warm: what it did and how long it took, in a few lines; a second time nothing is left to do."""

import re
from pathlib import Path

import pytest

import regard
from regard.cli.main import main
from regard.decode.warm import Warmed

SMALL = {"layers": 1, "dim": 32, "heads": 4, "vocab": 60}


def folder(path: Path, preset: str, **more: object) -> str:
    return str(regard.build(preset, **SMALL, **more).save(path / preset))


@pytest.mark.parametrize("preset", ["gpt2", "t5-small"])
def test_it_says_what_it_did_on_a_cpu(
    preset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = folder(tmp_path, preset)
    assert main(["warm", model, "--device", "cpu", "--rows", "2"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 3 and "C code" in out[0]
    assert re.fullmatch(r"no graph: it was prepared in \w+ for a CPU", out[1])
    assert re.fullmatch(
        r"an answer after [\d.]+ s, the next after [\d.]+ s; [\d.]+ s in all", out[2]
    )


def test_it_says_what_it_did_on_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    done = Warmed(412, 63, 108, rows=8, length=4096, first=1.2, again=0.01, seconds=41.5)
    monkeypatch.setattr("regard.decode.runners.steps.why_plain", lambda model: "")
    monkeypatch.setattr(
        "regard.decode.warm.warm", lambda model, *given, tell: asked.append(given) or done
    )
    assert main(["warm", folder(tmp_path, "gpt2"), "--rows", "8", "--length", "4096"]) == 0
    out = capsys.readouterr().out
    assert asked == [(8, 4096)]
    assert (
        "1 to 8 rows, texts of up to 4,096 tokens: 412 kernels compiled, 63 forms measured" in out
    )
    assert "108 graphs can be recorded" in out and "41.5 s in all" in out


def test_what_writes_no_text_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warm", folder(tmp_path, "bert-base")]) == 0
    assert "this model writes no text" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--rows", "--length"])
def test_counts_are_from_1(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warm", "MODEL", flag, "0"]) == 2
    assert capsys.readouterr().err == f"error: {flag} is 0; give a number from 1\n"
