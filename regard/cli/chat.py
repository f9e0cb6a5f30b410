"""regard chat: a conversation in turns, on a terminal or piped."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from regard.cli.generate import check_reads_text, settings_of, write
from regard.cli.main import fail
from regard.cli.model import Opened, Rate, blaming, context_of, read_lines
from regard.cli.options import Chat
from regard.cli.parse import values
from regard.decode.generate import stream
from regard.decode.settings import Settings
from regard.errors import DATA, UsageError
from regard.text import encode_chat, needed, render_chat
from regard.text.tokenizer import check_unicode

LONGEST = 1024  # tokens of an answer, where the context is longer


def run(options: Chat) -> int:
    given = settings_of(values(options))
    if options.max_new_tokens is None:
        del given["max_new_tokens"]
    Settings.of(given)
    check_unicode(options.system or "", "--system")
    opened_model = Opened(options.model, options.machine, rows=1)
    check_reads_text(opened_model.model)
    talk_to = Conversation(opened_model, options, given)
    for line in lines():
        text = line.strip()
        if text == "/quit":
            break
        if text == "/clear":
            talk_to.clear()
        elif text:
            try:
                talk_to.say(line)
            except UsageError as error:
                if not sys.stdin.isatty():
                    raise
                fail(f"{error} (/clear forgets the conversation)", 2)
    return 0


def lines() -> Iterator[str]:
    """What the user says, line by line, until Ctrl-D."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  input() then has a history and can be edited
        # what is no UTF-8 is then told as a mistake in the message
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # type: ignore[union-attr]
        while True:
            try:
                yield input("> ")
            except EOFError:
                print()
                return
    yield from read_lines(sys.stdin.buffer, "stdin")


class Conversation:
    """The messages so far. An answer that is interrupted stays, as far as it came."""

    def __init__(self, opened_model: Opened, options: Chat, settings: dict[str, Any]):
        self.opened, self.options, self.settings = opened_model, options, settings
        self.messages: list[dict[str, str]] = []
        self.clear()
        with blaming(DATA):
            self.tokenizer = needed(opened_model.tokenizer)
            render_chat(self.tokenizer, [*self.messages, {"role": "user", "content": "?"}])

    def clear(self) -> None:
        system = self.options.system
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def say(self, text: str) -> None:
        """Write the answer to a message, and remember both."""
        asked = [*self.messages, {"role": "user", "content": text}]
        prompt = encode_chat(self.tokenizer, asked)
        self.opened.compare(prompt)
        settings = {"max_new_tokens": self.room(len(prompt)), **self.settings}
        pieces = stream(self.opened.model, prompt, stop=self.options.stop, **settings)
        rate, why = Rate(streaming=True), "Ctrl-C"
        said: list[str] = []
        try:
            why = write(pieces, rate, said).finish
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
        sys.stdout.write("\n")
        sys.stdout.flush()
        rate.done(f", ended by {why}")
        self.messages = [*asked, {"role": "assistant", "content": "".join(said)}]

    def room(self, used: int) -> int:
        """Tokens that an answer may have."""
        longest = context_of(self.opened.model)
        if longest is None or self.opened.two:
            return LONGEST if longest is None else min(LONGEST, longest - 1)
        if used >= longest:
            raise UsageError(
                f"the conversation has {used} tokens, the model's context is {longest}; start a new one"
            )
        return min(LONGEST, longest - used)
