"""A stranger adds a command: a file in cli/, and its name and line of help in the table of commands."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import regard.cli
from regard.cli.main import COMMANDS, main
from tests.open.stranger import ROOT, added, home, promised

GREET = '''
"""regard greet: a command of a stranger's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from regard.cli.shared import Switch, check_counts
from regard.errors import DATA, Fault


@dataclass(frozen=True)
class Options:
    """Greet somebody.

    regard greet Ann --times 2        twice
    """

    name: Annotated[Positional[str], arg(metavar="NAME")]  # who is greeted
    # how often the greeting is said
    times: int = 1
    word: Literal["hello", "good-bye"] = "hello"  # what is said
    loud: Switch = False  # in capitals


def run(options: Options) -> int:
    check_counts(options, "times")
    if options.name == "nobody":
        raise Fault("nobody is there; name somebody", DATA)
    text = f"{options.word}, {options.name}"
    print("\\n".join([text.upper() if options.loud else text] * options.times))
    return 0
'''
HELP = "say hello to somebody"


@pytest.fixture
def greet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The stranger's file lies beside ours."""
    (tmp_path / "greet.py").write_text(GREET)
    monkeypatch.setattr(regard.cli, "__path__", [*regard.cli.__path__, str(tmp_path)])
    with added(COMMANDS, "greet", HELP):
        yield "greet"
    sys.modules.pop("regard.cli.greet", None)


def test_added_command_runs(greet: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([greet, "Ann", "--times", "2", "--loud"]) == 0
    assert capsys.readouterr().out == "HELLO, ANN\nHELLO, ANN\n"


def test_added_command_is_listed_and_has_its_help(
    greet: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--help"]) == main([greet, "--help"]) == 0
    listed, said = capsys.readouterr().out.split("Greet somebody.")
    assert f"\n  {greet:<10}  {HELP}\n" in listed
    assert "regard greet Ann --times 2        twice" in said
    assert "usage: regard greet [-h] NAME" in said
    for flag in ("NAME", "--times INT", "--word {hello,good-bye}", "--loud"):
        assert f"\n  {flag}" in said
    for text in ("who is greeted", "how often the greeting is said", "what is said"):
        assert text in said


@pytest.mark.parametrize(
    "given, code, why",
    [
        (["Ann", "--tims", "2"], 2, "there is no option '--tims'; did you mean --times?"),
        (["Ann", "--times", "two"], 2, "--times needs a whole number, got 'two'"),
        (["Ann", "--times", "0"], 2, "--times is 0; give a number from 1"),
        (["Ann", "--word", "helo"], 2, "--word is 'helo'; did you mean 'hello'?"),
        ([], 2, "NAME"),
        (["nobody"], 4, "nobody is there; name somebody"),
    ],
)
def test_mistakes_in_an_added_command_are_one_sentence(
    greet: str, given: list[str], code: int, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([greet, *given]) == code
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: ") and why in said.err
    assert said.err.count("\n") == 1


def test_slip_in_the_name_of_an_added_command(
    greet: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gret", "Ann"]) == 2
    assert capsys.readouterr().err == "error: there is no command 'gret'; did you mean 'greet'?\n"


def test_command_costs_as_many_files_as_the_architecture_says() -> None:
    assert home(COMMANDS) == "regard/cli/main.py"
    assert len({home(COMMANDS), "regard/cli/greet.py"}) == promised("add a command")


def test_added_filter_is_a_flag() -> None:
    """In a process of its own, since a command reads the tables once, when it is first asked for; without torch."""
    script = """
import sys
from regard.cli.main import main
from regard.decode.filters import FILTERS, Filter

def odd(logits, value):
    "Draw from the ids that X divides; 1: from all. Nobody needs it."

FILTERS["only_multiples"] = Filter(odd, (1.0, 100.0), neutral=1.0)
assert main(["generate", "--help"]) == 0 and "torch" not in sys.modules
sys.exit(main(["generate", "m", "hi", "--only-multiples", "101", "--temperature", "1"]))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert "--only-multiples X  draw from the ids that X divides; 1: from all\n" in done.stdout
    why = "error: only_multiples is 101.0; give a number from 1.0 to 100.0\n"
    assert (done.returncode, done.stderr) == (2, why)
