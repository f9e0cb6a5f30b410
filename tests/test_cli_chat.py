"""regard chat: turns, piped and on a terminal."""

import os
import subprocess
from pathlib import Path

import pytest

import regard
from regard.decode.generate import tokenizer_of
from regard.text import needed, render_chat
from tests.test_cli import Done, call, command, folder, process


def answers(*said: str, system: str | None = None, tokens: int = 5) -> list[str]:
    """What the model says to each message, by the Python functions."""
    model = regard.load(folder("gpt2"))
    tokenizer = needed(tokenizer_of(model))
    messages = [] if system is None else [{"role": "system", "content": system}]
    found = []
    for text in said:
        messages.append({"role": "user", "content": text})
        prompt = tokenizer.encode(render_chat(tokenizer, messages), special=False)
        (result,) = regard.generate(model, [prompt], max_new_tokens=tokens)
        messages.append({"role": "assistant", "content": result.text})
        found.append(result.text)
    return found


def test_conversation_is_remembered() -> None:
    want = answers("Hi 😀", "שלום")
    done = call("chat", folder("gpt2"), "--max-new-tokens", 5, stdin="Hi 😀\n\nשלום\n")
    assert done == Done(0, "".join(f"{text}\n" for text in want), "")
    assert want[1] != answers("שלום")[0]


def test_process_chats_over_pipes() -> None:
    (want,) = answers("Hi")
    done = process("chat", folder("gpt2"), "--max-new-tokens", 5, stdin="Hi\n/quit\nnever\n")
    assert done == Done(0, f"{want}\n", "")


def test_clear_forgets_all_but_the_system_message() -> None:
    (want,) = answers("Hi", system="Be brief.")
    flags = ["--max-new-tokens", 5, "--system", "Be brief."]
    done = call("chat", folder("gpt2"), *flags, stdin="Hi\n/clear\nHi\n")
    assert done.out == f"{want}\n{want}\n"


def test_answer_may_fill_the_context() -> None:
    done = call("chat", folder("gpt2"), "--stop", "§§", stdin="Hi")
    assert done.code == 0 and done.err == ""


def test_conversation_that_is_too_long_says_so() -> None:
    done = call("chat", folder("gpt2"), stdin="a" * 300)
    assert (done.code, done.out) == (2, "") and "the model's context is 96" in done.err


def test_wrong_message_is_the_users_mistake() -> None:
    done = call("chat", folder("gpt2"), stdin=b"\xff\n")
    assert done.code == 4 and "line 1 of stdin is not UTF-8" in done.err


def terminal(*typed: bytes) -> tuple[int, bytes]:
    """Chat on a terminal: at each prompt type the next line, then Ctrl-D; the exit code and what the screen showed."""
    pty = pytest.importorskip("pty")
    mine, theirs = pty.openpty()
    given = command("chat", folder("gpt2"), "--max-new-tokens", 5)
    given["env"] |= {"TERM": "dumb"}
    lines, seen = [*typed, b"\x04"], b""
    with subprocess.Popen(**given, stdin=theirs, stdout=theirs, stderr=theirs) as child:
        os.close(theirs)
        try:
            while chunk := os.read(mine, 4096):
                seen += chunk
                if lines and seen.endswith(b"> "):
                    os.write(mine, lines.pop(0))
        except OSError:  # how a terminal ends
            pass
    os.close(mine)
    return child.returncode, seen


def test_terminal_shows_prompt_answer_and_end_and_mistakes_do_not_end_it() -> None:
    """A message that is too long, bytes that are no text; the answer is that to the first good message."""
    (want,) = answers("Hi")
    code, seen = terminal(b"a" * 300 + b"\n", b"\xff\n", b"Hi\n")
    assert code == 0 and b"> " in seen and want.encode() in seen
    assert b"error: " in seen and b"/clear" in seen and b"which is not Unicode text" in seen
    assert b"5 tokens, " in seen and b"ended by length" in seen and b"no cuda device" in seen


def test_template_that_fails_is_the_folders_fault(tmp_path: Path) -> None:
    regard.load(folder("gpt2")).save(tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    done = call("chat", tmp_path / "m", stdin="Hi")
    assert done.code == 4 and "chat template" in done.err
