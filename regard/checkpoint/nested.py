"""A rule for a part of a config that has keys of its own: the towers of CLIP and SigLIP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from regard.errors import UsageError

Data = dict[str, Any]


@dataclass(frozen=True)
class Nested:
    """A key that holds the keys of a part, for the part of ours at `place`. Null is an empty one; in older folders
    `<key>_dict` has the last word."""

    place: str
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

    def read(self, name: str, theirs: Data, ours: Data) -> None:
        part = self.part(name, theirs)
        for key, r in self.rules.items():
            r.read(key, part, ours[self.place])

    def write(self, name: str, ours: Data, theirs: Data) -> None:
        part = self.part(name, theirs)
        for key, r in reversed([*self.rules.items()]):
            r.write(key, ours[self.place], part)
        theirs[name] = part
        if theirs.get(f"{name}_dict"):
            theirs[f"{name}_dict"] = None
