"""A rule for a part of a config that has keys of its own: the towers of CLIP, SigLIP and T5Gemma."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from regard.errors import UsageError

Data = dict[str, Any]


@dataclass(frozen=True)
class Nested:
    """A key that holds the keys of a part, for the part of ours at `place`, or for several by the names that the rules
    call them. Null is an empty one; in older folders `<key>_dict` has the last word."""

    place: str | Mapping[str, str]
    rules: Mapping[str, Any]
    inert: str = ""

    @property
    def keys(self) -> frozenset[str]:
        names = (n for name, r in self.rules.items() for n in getattr(r, "names", (name,)))
        return frozenset([*names, *self.inert.split()])

    def part(self, name: str, theirs: Data) -> Data:
        both = [theirs.get(key) or {} for key in (name, f"{name}_dict")]
        for key, value in zip((name, f"{name}_dict"), both, strict=True):
            if not isinstance(value, dict):
                raise UsageError(f"config.json: {key} is {value!r:.60}; it must be an object")
        return {**both[0], **both[1]}

    def at(self, ours: Data) -> Data:
        if isinstance(self.place, str):
            return ours[self.place]
        return {name: ours[place] for name, place in self.place.items()}

    @property
    def ordered(self) -> list[tuple[str, Any]]:
        """The rules in the order of reading."""
        return sorted(self.rules.items(), key=lambda item: getattr(item[1], "last", False))

    def read(self, name: str, theirs: Data, ours: Data) -> None:
        part = self.part(name, theirs)
        for key, r in self.ordered:
            r.read(key, part, self.at(ours))

    def write(self, name: str, ours: Data, theirs: Data) -> None:
        part = self.part(name, theirs)
        for key, r in reversed(self.ordered):
            r.write(key, self.at(ours), part)
        theirs[name] = part
        if theirs.get(f"{name}_dict"):
            theirs[f"{name}_dict"] = None
