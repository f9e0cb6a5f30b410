"""The command `regard`: finds the subcommand, and turns errors into one line and an exit code.

Nothing heavy is imported here: `regard --help` needs neither torch nor tyro. Text goes to stdout,
talk to stderr.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from typing import Any

from regard.errors import ENVIRONMENT, RUN, VERSION, Fault, Notice, UsageError, nearest
from regard.kernels.c.threads import use_threads, wait_asleep
from regard.see.format import visible

COMMANDS = {
    "generate": "answer a prompt (text or ids), greedily, drawn, or by beam search",
    "translate": "translate lines with an encoder-decoder; --align shows which words belong together",
    "transcribe": "speech in a wav file as text, or as English text",
    "chat": "a conversation, turn by turn",
    "serve": "an OpenAI-compatible server over models on this machine",
    "warm": "compile and measure, once, what the first requests would wait for",
    "train": "train a model from a TOML file; stopped any way, it goes on to the same bits",
    "finetune": "tune a model on a file, without a config: all of it, or LoRA, or LoRA on 4 bits",
    "eval": "measure a model on data: loss, BLEU, chrF, accuracy, F1",
    "lm-eval": "EleutherAI's lm-eval, where it is installed, on a model folder",
    "classify": "label lines with a trained classifier",
    "fill": "the most probable words behind the masks of a text",
    "answer": "find the answer to a question in a text",
    "embed": "one vector per line",
    "pull": "bring a model from the Hugging Face Hub into its cache, every file checked",
    "merge": "join an adapter (LoRA) and its model into one folder",
    "convert": "bring in a GGUF file or pickled weights as a model folder",
    "plan": "what a run will need: parameters, memory, disk, time; nothing is trained",
    "report": "a run as one page of HTML",
    "compare": "runs side by side",
    "look": "what a model attends to in a text or a picture: one page of HTML, or pictures",
    "parity": "bug or rounding? a model run in every way it can be, each held against float64",
    "lab": "an experiment, trained and measured for three seeds, as a page; without a name, the list of them",
    "presets": "models by name, with sizes; every setting of one",
    "recipes": "list, show or copy configs that are known to work",
    "data peek": "print the first real batch of training data, with what is learned from it",
    "tokenizer train": "learn a tokenizer from files",
    "explain": "a mechanism as formula, numbers and code; without a topic, the list of them",
    "doctor": "what this machine has and can do",
}
# Commands that stand in the file of another: `fill` is `fill(FillOptions)` in that of `eval`.
HOSTS = {"convert": "merge", "data": "tokenizer", "eval": "answer classify embed fill lm-eval"}
HOSTS |= {"generate": "chat translate", "report": "compare", "train": "finetune"}
GUESTS = {guest: host for host, guests in HOSTS.items() for guest in guests.split()}
HELP = """Regard: train and run Transformers of every family, on this machine.

  regard generate MODEL "Once upon a time"           answer a prompt, as the text is made
  regard translate MODEL lines.de > lines.en         one line in, one line out
  regard chat MODEL                                  talk with a model that has a chat template

commands
{}

MODEL is a Hugging Face folder (config.json, model.safetensors, tokenizer.json), or the name of one that was pulled.
Options of a command: regard generate --help.   Version: regard --version.
Exit codes: 0 done, 1 failed while running, 2 wrong command line, 3 device or package missing, 4 model folder or data
missing or broken, 5 a check that was asked for failed, 130 interrupted."""
FULL = "out of memory ({}); ask for fewer beams, samples or tokens, or try "
FULL += "--dtype bf16 or --quantize int8"


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit code. User mistakes are one line on stderr, never a traceback."""
    try:
        open_streams()
        with warnings.catch_warnings():
            # Warnings of libraries are for programmers.
            if not sys.warnoptions:
                warnings.simplefilter("ignore")
                warnings.simplefilter("default", Notice)
                warnings.showwarning = lambda text, *_, **__: tell("note", str(text))
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
    # The reader has gone.
    except BrokenPipeError:
        return give_up(141)
    # A full disk, say.
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        code = fail(f"{where}{error.strerror or error}", RUN)
        # Without a file name it was stdout.
        return code if where else give_up(code)
    except (MemoryError, RuntimeError) as error:
        text = (str(error) or "no memory left").partition("\n")[0]
        if isinstance(error, MemoryError) or "memory" in text:
            return fail(FULL.format(text), RUN)
        if "CUDA" not in text:
            raise
        return fail(f"{text}; try --device cpu", ENVIRONMENT)


def tell(kind: str, text: str) -> None:
    """A note or an error, one line on stderr; of several processes the first alone speaks."""
    if os.environ.get("RANK", "0") == "0":
        text = " ".join(text.splitlines()).encode("utf-8", "backslashreplace").decode("utf-8")
        print(f"{kind}:", visible(text), file=sys.stderr)


def fail(text: str, code: int) -> int:
    tell("error", text)
    return code


def give_up(code: int) -> int:
    """Drop what is not written yet: Python would try again at exit, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def open_streams() -> None:
    """Replace streams that the caller closed: stdin is then empty and stderr silent; without stdout
    nothing is done."""
    closed = [name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is None]
    # Also, no other file then gets their numbers.
    for name in closed:
        mode = "r" if name == "stdin" else "w"
        setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    # UTF-8 whatever the locale says, for odd names too.
    how: Any = {"encoding": "utf-8", "errors": "backslashreplace", "newline": "\n"}
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(**how)  # type: ignore[union-attr]
    if sys.stdout.isatty():
        sys.stdout = Screen(sys.stdout)
    if "stdout" in closed:
        raise Fault("stdout is closed, so nothing could be written", RUN)


class Screen:
    """A terminal for text from models and files, which cannot move its cursor or set its title."""

    def __init__(self, stream: Any):
        self.stream = stream

    def write(self, text: str) -> int:
        return self.stream.write(visible(text, "\n\t"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def first_words() -> dict[str, str]:
    """The first word of each command, and its second where it has one."""
    return dict(name.partition(" ")[::2] for name in COMMANDS)


def command_of(name: str) -> tuple[Any, Any]:
    """The class of a command's options and the function that runs it: `Options` and `run` of its
    file. `name` is its first word."""
    file = importlib.import_module(f"regard.cli.{GUESTS.get(name, name)}")
    if name not in GUESTS:
        return file.Options, file.run
    flags = f"{name.title().replace('-', '')}Options"
    return getattr(file, flags), getattr(file, name.replace("-", "_"))


def dispatch(arguments: list[str]) -> int:
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help", "help"):
        print(HELP.format("\n".join(f"  {name:<10}  {text}" for name, text in COMMANDS.items())))
        return 0
    if name in ("-V", "--version"):
        print("regard", VERSION)
        return 0
    known = first_words()
    if name not in known:
        what = "option" if name.startswith("-") else "command"
        raise UsageError(f"there is no {what} {name!r}; {nearest(name, known)}")
    called = name
    if word := known[name]:
        if rest[:1] in (["-h"], ["--help"]):
            rest = [word, "--help"]
        if rest[:1] != [word]:
            raise UsageError(f"say regard {name} {word}; see regard {name} {word} --help")
        called, rest = f"{name} {word}", rest[1:]
    from regard.cli.shared import parse

    # A command's file has its flags on top; it imports torch only to run.
    flags, run = command_of(name)
    options = parse(flags, called, rest)
    # Help was asked for, and printed.
    if options is None:
        return 0
    if not word:
        wait_asleep()
        use_threads()
    return run(options)
