"""How each mistake ends: one line, an exit code; and how the process of `regard` ends otherwise."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from tests.test_cli import SMALL, call, command, folder, process, put

# --- mistakes -----------------------------------------------------------------------------------------------------

GPT2 = "gpt2"  # stands for the folder in the table
WRONG: dict[str, tuple[list[Any], int, str]] = {
    "command": (["generat", "x"], 2, "did you mean 'generate'?"),
    "option": (["--halp"], 2, "there is no option '--halp'"),
    "flag": (["generate", GPT2, "hi", "--max-new-tokns", 3], 2, "did you mean --max-new-tokens?"),
    "far flag": (["generate", GPT2, "hi", "--zzz"], 2, "see regard generate --help"),
    "short flag": (["generate", GPT2, "-x"], 2, "-x"),
    "no model": (["generate"], 2, "MODEL"),
    "too many": (["generate", GPT2, "a", "b"], 2, "b"),
    "no value": (["generate", GPT2, "a", "--top-p"], 2, "--top-p"),
    "type": (["generate", GPT2, "a", "--beams", "x"], 2, "--beams"),
    "choice": (["generate", GPT2, "a", "--dtype", "fp8"], 2, "'fp8'"),
    "quantize": (["generate", GPT2, "a", "--quantize", "int9"], 2, "'int9'"),
    "range": (["generate", GPT2, "a", "--top-p", 1.5], 2, "top_p is 1.5"),
    "nan": (["generate", GPT2, "a", "--temperature", "nan"], 2, "temperature is nan"),
    "absurd": (["generate", GPT2, "a", "--beams", 10**9], 2, "beams is 1000000000"),
    "zero": (["generate", GPT2, "a", "--max-new-tokens", 0], 2, "max_new_tokens is 0"),
    "together": (["generate", GPT2, "a", "--beams", 2, "--temperature", 1], 2, "beam search"),
    "n-best": (["generate", GPT2, "a", "--n-best", 3], 2, "n_best=3"),
    "samples": (["generate", GPT2, "a", "--samples", 3], 2, "temperature 0"),
    "draft": (["generate", GPT2, "a", "--draft", 3], 2, "--draft-model FOLDER"),
    "draft folder": (["generate", GPT2, "a", "--draft-model", "nowhere"], 4, "nowhere is no folder"),
    "bias": (["generate", GPT2, "a", "--logit-bias", "5:3"], 2, "ID=BIAS"),
    "stop": (["generate", GPT2, "a", "--stop="], 2, "stop must be"),
    "stop and beams": (["generate", GPT2, "a", "--stop", "x", "--beams", 2], 2, "stop strings"),
    "ids": (["generate", GPT2, "a b", "--ids"], 2, "--ids wants whole numbers"),
    "id": (["generate", GPT2, "400", "--ids"], 2, "outside the vocabulary (0 to 399)"),
    "empty": (["generate", GPT2, ""], 2, "the prompt is empty"),
    "too long": (["generate", GPT2, "a" * 200], 2, "context of 96"),
    "surrogate": (["generate", GPT2, "\udcff"], 2, "surrogate"),
    "device": (["generate", GPT2, "a", "--device", "gpu"], 2, "choose auto, cpu, cuda"),
    "no folder": (["generate", "nowhere", "a"], 4, "nowhere is no folder"),
    "no tokenizer": (["generate", "bare", "a"], 2, "carries no tokenizer"),
    "encoder": (["generate", "bert", "5", "--ids"], 2, "does not decode"),
    "image": (["generate", "captioner", "5", "--ids"], 2, "this model reads images"),
    "translate what": (["translate", GPT2], 2, "translate needs an encoder-decoder"),
    "translate file": (["translate", "t5", "nowhere.txt"], 4, "nowhere.txt cannot be read: No such"),
    "translate folder": (["translate", "t5", "."], 4, ". cannot be read: Is a directory"),
    "translate rows": (["translate", "t5", "--rows", 0], 2, "--rows is 0"),
    "translate block": (["translate", "t5", "--block", 0], 2, "--block is 0"),
    "translate beams": (["translate", "t5", "--beams", 0], 2, "beams is 0"),
    "chat template": (["chat", "t5"], 4, "carries no chat template"),
    "chat tokenizer": (["chat", "bare"], 4, "carries no tokenizer"),
    "bench": (["bench", "encode"], 2, "did you mean 'decode'?"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_mistake_is_one_line_and_an_exit_code(name: str) -> None:
    arguments, code, part = WRONG[name]
    known = (GPT2, "bare", "bert", "captioner", "t5")
    done = call(*(folder(a) if i == 1 and a in known else a for i, a in enumerate(arguments)))
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith("error: ") and done.err.count("\n") == 1 and part in done.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a cuda device")
def test_missing_device_is_the_environments_fault() -> None:
    done = call("generate", folder("gpt2"), "a", "--device", "cuda")
    assert done.code == 3 and "this machine has 0 cuda devices" in done.err


@pytest.mark.parametrize(
    "name, content",
    [("config.json", b"{"), ("model.safetensors", b"x" * 9), ("tokenizer.json", b"[")],
)
def test_broken_folder_is_the_datas_fault(name: str, content: bytes, tmp_path: Path) -> None:
    regard.build("gpt2", vocab=50, max_len=40, **SMALL).save(tmp_path / "m")
    put(tmp_path / "m", {name: content})
    done = call("generate", tmp_path / "m", "a")
    assert done.code == 4 and done.err.startswith("error: ") and done.err.count("\n") == 1


def test_stdin_that_is_no_text_is_the_datas_fault() -> None:
    done = call("generate", folder("gpt2"), stdin=b"ab\xff")
    assert done.code == 4 and "stdin is no UTF-8 text: byte 2 is 0xff" in done.err


def test_broken_weights_end_the_answer_with_an_error(tmp_path: Path) -> None:
    model = regard.load(folder("gpt2"))
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    model.save(tmp_path / "m")
    done = call("generate", tmp_path / "m", "a")
    assert (done.code, done.out) == (1, "") and "not a number" in done.err


def test_missing_package_is_the_environments_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tyro", None)
    monkeypatch.delitem(sys.modules, "regard.cli_options")
    done = call("generate", folder("gpt2"), "a")
    assert done.code == 3 and done.err == "error: the package tyro is missing; pip install tyro\n"


def test_bench_is_refused_outside_a_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("regard.cli.__file__", str(tmp_path / "regard" / "cli.py"))
    done = call("bench", "decode")
    assert done.code == 3 and "part of the source checkout" in done.err


def test_bench_passes_its_options_and_exit_code_on(capfd: pytest.CaptureFixture[str]) -> None:
    assert call("bench", "decode", "--part", "nothing").code == 2
    assert "invalid choice: 'nothing'" in capfd.readouterr().err


# --- the process --------------------------------------------------------------------------------------------------


def test_interrupt_ends_with_130_and_no_traceback() -> None:
    given = command("chat", folder("gpt2"), "--max-new-tokens", 4)
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with subprocess.Popen(**given, **pipes) as child:
        assert child.stdin is not None and child.stdout is not None and child.stderr is not None
        child.stdin.write(b"hello\n")
        child.stdin.flush()
        assert child.stdout.readline()  # it has answered, and now waits for the next line
        child.send_signal(signal.SIGINT)
        assert child.wait(20) == 130
        assert child.stderr.read() == b""


def test_broken_pipe_is_quiet() -> None:
    given = command("generate", folder("gpt2"), "The", "--max-new-tokens", 80)
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with subprocess.Popen(**given, **pipes) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait(20) == 141


@pytest.mark.parametrize("colour", [True, False])
def test_rate_is_shown_on_a_terminal_only_and_obeys_no_color(colour: bool) -> None:
    pty = pytest.importorskip("pty")
    mine, theirs = pty.openpty()
    given = command("generate", folder("gpt2"), "The dog", "--max-new-tokens", 40)
    given["env"] |= {"TERM": "xterm"} | ({} if colour else {"NO_COLOR": "1"})
    with subprocess.Popen(**given, stdout=subprocess.PIPE, stderr=theirs) as child:
        os.close(theirs)
        assert child.stdout is not None
        text = child.stdout.read().decode()
        seen = b""
        try:
            while chunk := os.read(mine, 4096):
                seen += chunk
        except OSError:  # how a terminal ends
            pass
        os.close(mine)
    assert child.returncode == 0 and text == process(*given["args"][3:]).out
    assert b"40 tokens, " in seen and b"tokens/s" in seen and b"ended by length" in seen
    assert (b"\x1b[2m" in seen) == colour
