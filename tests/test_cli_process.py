"""How the process of `regard` lives and ends: signals, pipes, closed streams, full disks, terminals."""

import io
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from regard.cli.main import Screen, main
from tests.test_cli import Done, call, command, folder


def redirected(how: str, *arguments: Any) -> Done:
    """`regard arguments` in a shell, with its streams as `how` says."""
    given = command(*arguments)
    given["args"] = ["sh", "-c", f'"$@" {how}', "sh", *given["args"]]
    done = subprocess.run(**given, stdin=subprocess.DEVNULL, capture_output=True)
    return Done(done.returncode, done.stdout.decode(), done.stderr.decode())


def test_interrupt_ends_with_130_and_no_traceback() -> None:
    given = command("chat", folder("gpt2"), "--max-new-tokens", 4)
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    # A shell that starts tests in the background has them, and what they start, ignore interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    child = subprocess.Popen(**given, **pipes)
    signal.signal(signal.SIGINT, before)
    with child:
        assert child.stdin is not None and child.stdout is not None and child.stderr is not None
        child.stdin.write(b"hello\n")
        child.stdin.flush()
        assert child.stdout.readline()  # it has answered, and now waits for the next line
        child.send_signal(signal.SIGINT)
        assert child.wait(20) == 130
        assert child.stderr.read() == b""


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
    assert child.returncode == 0 and text == call(*given["args"][3:]).out
    assert b"40 tokens, " in seen and b"tokens/s" in seen and b"ended by length" in seen
    assert (b"\x1b[2m" in seen) == colour


# --- streams that are closed or full ------------------------------------------------------------------------------


def test_closed_stdin_is_an_empty_one() -> None:
    assert redirected("<&-", "translate", folder("t5")) == Done(0, "", "")
    assert call("chat", folder("gpt2"), stdin=None) == Done(0, "", "")
    done = call("generate", folder("gpt2"), stdin=None)
    assert done == Done(2, "", "error: the prompt is empty; give at least one token\n")


def test_closed_stdout_is_told() -> None:
    done = redirected(">&-", "--help")
    assert done == Done(1, "", "error: stdout is closed, so nothing could be written\n")


def test_closed_stderr_hides_only_the_talk() -> None:
    assert redirected("2>&-", "--version") == call("--version")
    assert redirected("2>&-", "generate", "--halp") == Done(2, "", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which is Linux's")
@pytest.mark.parametrize("name", ["--help", "translate"])
def test_full_disk_is_one_line(name: str) -> None:
    given = ["translate", folder("t5"), "--max-new-tokens", 2] if name == "translate" else [name]
    done = redirected(">/dev/full <<E\nHund\nE", *given)
    assert done == Done(1, "", "error: No space left on device\n")


@pytest.mark.parametrize("name", ["generate --help", "generate"])
def test_reader_that_leaves_ends_it_quietly(name: str) -> None:
    more = [folder("gpt2"), "--max-new-tokens", 2] if name == "generate" else []
    given = command(*name.split(), *more)
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(**given, input=b"Hund\n", stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(os.name != "posix", reason="names of files are bytes on POSIX alone")
def test_name_that_is_no_text_is_said_with_escapes(tmp_path: Path) -> None:
    given = command("generate", tmp_path / os.fsdecode(b"\xff"), "hi")
    done = subprocess.run(**given, stdin=subprocess.DEVNULL, capture_output=True)
    assert done.returncode == 4 and done.stdout == b""
    assert done.stderr.startswith(b"error: ") and b"\\udcff" in done.stderr


def test_control_characters_reach_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither from names in messages nor from text that a model writes; through a pipe text is as it is."""
    assert main(["generate", "no\x1b]0;title\x07 folder", "hi"]) == 4
    said = capsys.readouterr().err
    assert "\x1b" not in said and "\x07" not in said and "title" in said
    screen = io.StringIO()
    Screen(screen).write("a\x1b[2Jb\r\n\tc\u202e")
    assert screen.getvalue() == "a␛[2Jb␍\n\tc\ufffd"
