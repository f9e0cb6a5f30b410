"""The command `regard`: finds the subcommand, and turns what goes wrong into one line and an exit code.

Nothing heavy is imported here: `regard --help` needs neither torch nor tyro. Text goes to stdout, talk to stderr.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

from regard import __version__
from regard.config import UsageError, nearest

HELP = """Regard: run Transformers of every family, from a folder on this machine.

  regard generate MODEL "Once upon a time"           answer a prompt, as the text is made
  regard translate MODEL lines.de > lines.en         one line in, one line out
  regard chat MODEL                                  talk with a model that has a chat template

commands
  generate    answer a prompt (text or ids), greedily, drawn, or by beam search
  translate   translate lines with an encoder-decoder; --align shows which words belong together
  chat        a conversation, turn by turn
  bench       compare speed with other libraries (from a source checkout)

MODEL is a Hugging Face folder: config.json, model.safetensors, tokenizer.json. Nothing is downloaded.
Options of a command: regard generate --help.   Version: regard --version.
Exit codes: 0 done, 1 failed while running, 2 wrong command line, 3 device or package missing, 4 model folder or data
missing or broken, 130 interrupted."""

COMMANDS = ("generate", "translate", "chat", "bench")
BENCHES = ("decode",)
RUN, ENVIRONMENT, DATA = 1, 3, 4  # exit codes beside 2, which is every other UsageError
FULL = "out of memory ({}); ask for fewer beams, samples or tokens, or try --dtype bf16 or --quantize int8"


class Fault(UsageError):
    """A UsageError with an exit code of its own."""

    def __init__(self, text: str, code: int):
        super().__init__(text)
        self.code = code


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit code. User mistakes are one line on stderr, never a traceback."""
    try:
        with warnings.catch_warnings():
            if not sys.warnoptions:  # what libraries tell programmers is nothing to users
                warnings.simplefilter("ignore")
            code = dispatch(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
        return code
    except UsageError as error:
        return fail(str(error), getattr(error, "code", 2))
    except ModuleNotFoundError as error:
        package = (error.name or "regard").partition(".")[0]
        if package == "regard":
            raise
        return fail(f"the package {package} is missing; pip install {package}", ENVIRONMENT)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has gone; Python's own flush at exit must not complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (MemoryError, RuntimeError) as error:
        text = str(error) or "no memory left"
        if not isinstance(error, MemoryError) and "memory" not in text:
            raise
        return fail(FULL.format(text.partition("\n")[0]), RUN)


def fail(text: str, code: int) -> int:
    print("error:", " ".join(text.splitlines()), file=sys.stderr)
    return code


def dispatch(arguments: list[str]) -> int:
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name in ("-h", "--help", "help"):
        print(HELP)
        return 0
    if name in ("-V", "--version"):
        print("regard", __version__)
        return 0
    if name not in COMMANDS:
        what = "option" if name.startswith("-") else "command"
        raise UsageError(f"there is no {what} {name!r}; {nearest(name, COMMANDS)}")
    if name == "bench":
        return bench(rest)
    for stream in (sys.stdout, sys.stderr):  # UTF-8 whatever the locale says
        stream.reconfigure(encoding="utf-8", newline="\n")  # type: ignore[union-attr]
    from regard.cli_options import OPTIONS, parse

    options: Any = parse(OPTIONS[name], name, rest)
    return importlib.import_module(f"regard.cli_{name}").run(options)  # only now torch


def bench(arguments: list[str]) -> int:
    """regard bench decode [OPTIONS]: run bench/decode.py of the source checkout."""
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name in ("-h", "--help"):
        print(f"regard bench {'|'.join(BENCHES)} [--quick] [--repeats N] ...   runs bench/NAME.py")
        return 0
    if name not in BENCHES:
        raise UsageError(f"there is no bench {name!r}; {nearest(name, BENCHES)}")
    script = Path(__file__).resolve().parents[1] / "bench" / f"{name}.py"
    if not script.is_file():
        raise Fault(
            f"{script} is not there: benches are part of the source checkout, not of the installed package; "
            "run this inside a clone, installed with pip install -e .",
            ENVIRONMENT,
        )
    return subprocess.run([sys.executable, str(script), *rest]).returncode
