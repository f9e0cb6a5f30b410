"""The command `regard`: finds the subcommand, and turns what goes wrong into one line and an exit
code.

Nothing heavy is imported here: `regard --help` needs neither torch nor tyro. Text goes to stdout,
talk to stderr.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

from regard.cli.shared import fail
from regard.errors import ENVIRONMENT, RUN, VERSION, Fault, Notice, UsageError, nearest
from regard.kernels.c.threads import use_threads, wait_asleep
from regard.see.format import visible

HELP = """Regard: train and run Transformers of every family, on this machine.

  regard generate MODEL "Once upon a time"           answer a prompt, as the text is made
  regard translate MODEL lines.de > lines.en         one line in, one line out
  regard chat MODEL                                  talk with a model that has a chat template

commands
  generate    answer a prompt (text or ids), greedily, drawn, or by beam search
  translate   translate lines with an encoder-decoder; --align shows which words belong together
  chat        a conversation, turn by turn
  train       train a model from a TOML file; stopped any way, it goes on to the same bits
  eval        measure a model on data: loss, BLEU, chrF, accuracy, F1
  classify    label lines with a trained classifier
  embed       one vector a line
  merge       join an adapter (LoRA) and its model into one folder
  convert     bring in a GGUF file or pickled weights as a model folder
  plan        what a run will need: parameters, memory, disk, time; nothing is trained
  report      a run as one page of HTML
  compare     runs side by side
  look        what a model attends to in a text or a picture: one page of HTML, or pictures
  parity      bug or rounding? a model run in every way it can be, each held against float64
  recipes     list, show or copy configs that are known to work
  data peek   print the first real batch of training data, with what is learned from it
  tokenizer train   learn a tokenizer from files
  explain     a mechanism as formula, numbers and code; without a topic, the list of them
  doctor      what this machine has and can do
  bench       compare the speed of decoding with other libraries (from a source checkout)

MODEL is a Hugging Face folder: config.json, model.safetensors, tokenizer.json. Nothing is downloaded.
Options of a command: regard generate --help.   Version: regard --version.
Exit codes: 0 done, 1 failed while running, 2 wrong command line, 3 device or package missing, 4 model folder or data
missing or broken, 5 a check that was asked for failed, 130 interrupted."""

COMMANDS = (
    *("generate", "translate", "chat", "train", "eval", "classify", "embed", "merge", "convert"),
    *("plan", "report", "compare", "look", "parity", "recipes", "data", "tokenizer", "explain"),
    *("doctor", "bench"),
)
SET = ("train", "plan")  # take settings of a config as flags: --train.steps 100
SECOND = {"data": "peek", "tokenizer": "train"}  # commands of two words
BENCHES = {"decode": ("decode", "invariant", "user")}  # name -> scripts in bench/
ON_GPU = ("user",)  # scripts that need one
BENCH_HELP = """regard bench decode [--quick]              every comparison of decoding that this machine can run
regard bench decode --part gpt2 ...        the options of bench/decode.py, which then runs alone"""
FULL = "out of memory ({}); ask for fewer beams, samples or tokens, or try --dtype bf16 or --quantize int8"


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit code. User mistakes are one line on stderr, never a traceback."""
    try:
        open_streams()
        with warnings.catch_warnings():
            if not sys.warnoptions:  # what libraries tell programmers is nothing to users
                warnings.simplefilter("ignore")
                warnings.simplefilter("default", Notice)
                warnings.showwarning = note
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
    except BrokenPipeError:  # the reader has gone
        return give_up(141)
    except OSError as error:  # a full disk, say
        where = f"{error.filename}: " if error.filename else ""
        return give_up(fail(f"{where}{error.strerror or error}", RUN))
    except (MemoryError, RuntimeError) as error:
        text = (str(error) or "no memory left").partition("\n")[0]
        if isinstance(error, MemoryError) or "memory" in text:
            return fail(FULL.format(text), RUN)
        if "CUDA" not in text:
            raise
        return fail(f"{text}; try --device cpu", ENVIRONMENT)


def note(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    """What loading and saving have to say (regard.errors.notice), one line each."""
    if os.environ.get("RANK", "0") == "0":
        print("note:", visible(" ".join(str(message).splitlines())), file=sys.stderr)


def give_up(code: int) -> int:
    """Drop what is not written yet: Python would try it again at exit, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def open_streams() -> None:
    """A stream that the caller has closed: stdin is empty then, stderr silent, and without stdout
    nothing is done."""
    closed = [name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is None]
    for name in closed:  # also so that no other file gets its number
        mode = "r" if name == "stdin" else "w"
        setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    for stream in (sys.stdout, sys.stderr):  # UTF-8 whatever the locale says, for odd names too
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", newline="\n")  # type: ignore[union-attr]
    if sys.stdout.isatty():
        sys.stdout = Screen(sys.stdout)
    if "stdout" in closed:
        raise Fault("stdout is closed, so nothing could be written", RUN)


class Screen:
    """A terminal for text from models and files: it can be read, but cannot move the cursor or set
    a title."""

    def __init__(self, stream: Any):
        self.stream = stream

    def write(self, text: str) -> int:
        return self.stream.write(visible(text, "\n\t"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def dispatch(arguments: list[str]) -> int:
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name in ("-h", "--help", "help"):
        print(HELP)
        return 0
    if name in ("-V", "--version"):
        print("regard", VERSION)
        return 0
    if name not in COMMANDS:
        what = "option" if name.startswith("-") else "command"
        raise UsageError(f"there is no {what} {name!r}; {nearest(name, COMMANDS)}")
    if name == "bench":
        return bench(rest)
    called = name
    if name in SECOND:
        word = SECOND[name]
        if rest[:1] != [word]:
            raise UsageError(f"say regard {name} {word}; see regard {name} {word} --help")
        called, rest = f"{name} {word}", rest[1:]
    from regard.cli.parse import folded, parse

    # A command's file has its flags on top; it imports torch only to run.
    command = importlib.import_module(f"regard.cli.{name}")
    options = parse(command.Options, called, folded(rest) if name in SET else rest)
    # None: help was asked for.
    if options is None:
        return 0
    if name not in SECOND:
        wait_asleep()
        use_threads()
    return command.run(options)


def bench(arguments: list[str]) -> int:
    """Run scripts of the source checkout's bench/; the exit code is the first that is not 0."""
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name in ("-h", "--help"):
        print(BENCH_HELP)
        return 0
    if name not in BENCHES:
        raise UsageError(f"there is no bench {name!r}; {nearest(name, BENCHES)}")
    home = Path(__file__).resolve().parents[2] / "bench"
    if not (home / f"{name}.py").is_file():
        raise Fault(
            f"{home / name}.py is not there: benches are part of the source checkout, not of the installed package; "
            "run this inside a clone, installed with pip install -e .",
            ENVIRONMENT,
        )
    if importlib.util.find_spec("transformers") is None:
        raise Fault("the package transformers is missing; pip install transformers", ENVIRONMENT)
    codes = []
    for script in BENCHES[name] if rest in ([], ["--quick"]) else (name,):
        why = left_out(script)
        print(f"--- bench/{script}.py" + (f": left out, {why}" if why else ""), flush=True)
        if not why:
            command = [sys.executable, str(home / f"{script}.py"), *rest]
            codes.append(subprocess.run(command).returncode)
    return next((code for code in codes if code), 0)


def left_out(script: str) -> str:
    """Why this machine cannot run a bench, or nothing."""
    if script not in ON_GPU:
        return ""
    import torch

    return "" if torch.cuda.is_available() else "torch finds no CUDA device here"
