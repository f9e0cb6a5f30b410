"""regard chat: a conversation in turns, on a terminal or piped."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from regard.cli import shared as cli
from regard.cli.generate import settings_of, write
from regard.cli.main import tell
from regard.errors import DATA, UsageError, blaming

if TYPE_CHECKING:
    from regard.evaluate.model import Opened

LONGEST = 1024  # tokens of an answer, where the context is longer


@dataclass(frozen=True)
class Options:
    """A conversation, with the folder's chat template. Ctrl-C stops an answer, Ctrl-D or /quit ends, /clear forgets.

    regard chat MODEL
    regard chat MODEL --system "Answer in one sentence." --temperature 0.7
    """

    model: cli.Folder
    system: cli.Text = None  # what the model is told first
    max_new_tokens: cli.Count = None  # of an answer; default: what the context leaves, at most 1024
    temperature: float = 0.0  # 0: always the most probable token
    top_p: float = 1.0  # draw from the most probable tokens that make up this probability
    seed: int = 0  # another number, another text
    stop: cli.Texts = ()  # end an answer before this text
    machine: cli.Machine = cli.Machine()


def run(options: Options) -> int:
    from regard.decode.settings import Settings
    from regard.evaluate.model import check_reads_text
    from regard.text.tokenizer import check_unicode

    given = settings_of(options)
    Settings.of(given)
    check_unicode(options.system or "", "--system")
    opened = cli.open_model(options.model, options.machine)
    check_reads_text(opened.model)
    conversation = Conversation(opened, options, given)
    for line in lines():
        text = line.strip()
        if text == "/quit":
            break
        if text == "/clear":
            conversation.clear()
        elif text:
            try:
                conversation.say(line)
            except UsageError as error:
                if not sys.stdin.isatty():
                    raise
                tell("error", f"{error} (/clear forgets the conversation)")
    return 0


def lines() -> Iterator[str]:
    """What the user says, line by line, until Ctrl-D."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield from cli.read_lines(sys.stdin.buffer, "stdin")
        return
    with contextlib.suppress(ImportError):
        # input() then has a history and can be edited.
        import readline  # noqa: F401
    # What is not UTF-8 is then told as a mistake in the message.
    sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # type: ignore[union-attr]
    with contextlib.suppress(EOFError):
        while True:
            yield input("> ")
    print()


class Conversation:
    """The messages so far. An answer that is interrupted stays, as far as it came."""

    def __init__(self, opened: Opened, options: Options, settings: dict[str, Any]):
        from regard.text import needed, render_chat

        self.opened, self.options, self.settings = opened, options, settings
        self.clear()
        with blaming(DATA):
            self.tokenizer = needed(opened.tokenizer)
            render_chat(self.tokenizer, [*self.messages, {"role": "user", "content": "?"}])

    def clear(self) -> None:
        system = self.options.system
        first = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = first

    def say(self, text: str) -> None:
        """Write the answer to a message, and remember both."""
        from regard.decode.generate import stream
        from regard.text import encode_chat

        asked = [*self.messages, {"role": "user", "content": text}]
        prompt = encode_chat(self.tokenizer, asked)
        cli.compare(self.opened, prompt)
        settings = {"max_new_tokens": self.room(len(prompt)), **self.settings}
        pieces = stream(self.opened.model, prompt, stop=self.options.stop, **settings)
        rate, why = cli.Rate(streaming=True), "Ctrl-C"
        answer: list[str] = []
        try:
            why = write(pieces, rate, answer).finish
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
        print(flush=True)
        rate.done(f", ended by {why}")
        self.messages = [*asked, {"role": "assistant", "content": "".join(answer)}]

    def room(self, used: int) -> int:
        """Tokens that an answer may have."""
        longest = getattr(self.opened.model.config, "max_len", None)
        if longest is None:
            return LONGEST
        used = 1 if self.opened.model.reads_source else used
        if used >= longest:
            raise UsageError(
                f"the conversation has {used} tokens, the model's context is {longest}; start a new one"
            )
        return min(LONGEST, longest - used)
