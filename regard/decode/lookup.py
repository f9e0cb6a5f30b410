"""Guessing by looking up: what followed the last few tokens when they last occurred (Saxena 2023, prompt look-up)."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 3  # tokens that are looked up together; fewer where so many do not recur


class Index:
    """Where each run of 1 to LONGEST tokens was last followed by another; grows with the text, a few steps a token."""

    def __init__(self, text: Sequence[int]):
        self.text: list[int] = []
        self.found: dict[tuple[int, ...], int] = {}  # a run of tokens -> the place after it
        self.extend(text)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            end = len(self.text)  # runs that end here are followed by `token` now
            for n in range(1, min(LONGEST, end) + 1):
                self.found[tuple(self.text[end - n : end])] = end
            self.text.append(token)

    def after(self, room: int) -> list[int]:
        """Up to `room` tokens that followed the text's end the last time, by the longest run that is known."""
        for n in range(min(LONGEST, len(self.text)), 0, -1):
            place = self.found.get(tuple(self.text[-n:]))
            if place is not None:
                return self.text[place : place + room]
        return []
