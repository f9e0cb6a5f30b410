"""Text while it is generated: pieces that never cut a character, ended by stop strings that may span tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from regard.errors import UsageError
from regard.text.tokenizer import Tokenizer, check_unicode


class Stream:
    """Ids in, text out.    "".join(push(ids) ...) + finish() == tokenizer.decode(all ids), cut before a stop string

    Each push costs the same, however long the text is: only what may still change is kept. With `stop`, text that may
    be the beginning of a stop string is kept too. The stop string that is complete first ends the stream (of two that
    are complete together, the longer one): `stopped` is that string, `consumed` the number of ids up to it.
    `after` are the ids before the text (the prompt), so that a first space is kept."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: str | Sequence[str] = (),
        *,
        after: Sequence[int] = (),
        skip_special: bool = True,
    ):
        self.tokenizer, self.skip_special = tokenizer, skip_special
        self.stop = check_stop(stop)
        self.stopped: str | None = None
        self.consumed = 0
        self._text = tokenizer.detokenizer()
        self._held = ""
        self._beginnings = {s[:n] for s in self.stop for n in range(1, len(s))}
        self._firsts = {s[0] for s in self.stop}
        self._longest = max(map(len, self.stop), default=0)
        if after:
            self._text.begin(tokenizer.pieces(after, skip_special=skip_special))

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids make certain; nothing once the stream has stopped."""
        texts, pieces = [], self.tokenizer.pieces
        for chunk in [[i] for i in ids] if self.stop else [list(ids)]:
            if self.stopped is not None:
                break
            self.consumed += len(chunk)
            texts.append(
                self._until_stop(self._text.push(pieces(chunk, skip_special=self.skip_special)))
            )
        return "".join(texts)

    def finish(self) -> str:
        """The rest of the text: no id follows."""
        if self.stopped is not None:
            return ""
        text = self._until_stop(self._text.finish())
        held, self._held = self._held, ""
        return text + held

    def _until_stop(self, text: str) -> str:
        """What can be shown of the kept text and `text`."""
        if not self.stop or not text:
            return text
        text = self._held + text
        stops = [(at + len(s), at, s) for s in self.stop if (at := text.find(s)) >= 0]
        if stops:
            _, at, self.stopped = min(stops)
            self._held = ""
            return text[:at]
        first = max(0, len(text) - self._longest + 1)
        ends = (k for k in range(first, len(text)) if text[k] in self._firsts)
        end = next((k for k in ends if text[k:] in self._beginnings), len(text))
        self._held = text[end:]
        return text[:end]


def check_stop(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Stop strings as they are given -> a tuple of them."""
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    for s in strings:
        if not isinstance(s, str) or not s:
            raise UsageError(
                f"stop must be texts of one character or more, got {s!r}; leave it out for none"
            )
        check_unicode(s, "stop")
    return strings
