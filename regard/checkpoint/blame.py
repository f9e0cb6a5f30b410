"""Which keys of a config.json made what went wrong: an error names them, whatever it is about."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from regard.checkpoint.family import Family
from regard.checkpoint.rules import ConfigRule, Data, Key, wrong
from regard.config import to_dict, walk
from regard.errors import UsageError


class Looked(dict[str, Any]):
    """Their keys, and which of them a rule looked at."""

    def __init__(self, theirs: Data):
        super().__init__(theirs)
        self.seen = set[str]()

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)

    def keys_of(self, name: str, rule: ConfigRule) -> list[str]:
        return [key for key in self if key in {*self.seen, *getattr(rule, "names", (name,))}]

    def values_of(self, name: str, rule: ConfigRule) -> str:
        return said(self, self.keys_of(name, rule))


def said(theirs: Data, keys: Iterable[str]) -> str:
    return ", ".join(f"{key} is {theirs[key]!r:.80}" for key in keys)


def keys_behind(error: str, theirs: Data, family: Family, architecture: str) -> list[str]:
    """Their keys that made what an error about a config of ours names, by its places or by its words."""
    ours = to_dict(family.blank) | {"head": to_dict(family.heads[architecture])}

    def places() -> dict[str, str]:
        found = ((p + name, v) for p, part in walk(ours) for name, v in part.items())
        # What has parts is no place; an empty one is a wrong value.
        return {place: repr(v) for place, v in found if v == {} or "{" not in repr(v)}

    named = re.finditer(r"config((\.\w+|\[\d+\])+)", error)
    wanted = [re.sub(r"\[\d+\]", "", found[1])[1:] for found in named]
    words = set(re.findall(r"\w+", error))
    keys = list[str]()
    before = places()
    for name, rule in family.rules:
        looked = Looked(theirs)
        rule.read(name, looked, ours)
        now = places()
        made = {p for p, value in now.items() if before.get(p) != value}
        # A value that the blank has already is theirs too.
        fills = rule.each() if isinstance(rule, Key) else ()
        made |= {re.sub(r"\.\d+", "", p) for p in fills}
        if wanted:
            pairs = [(f"{p}.", f"{place}.") for p in made for place in wanted]
            hit = any(p.startswith(place) or place.startswith(p) for p, place in pairs)
        else:
            hit = any(p.rpartition(".")[2] in words for p in made)
        keys += looked.keys_of(name, rule) if hit else []
        before = now
    return list(dict.fromkeys(keys))


@contextmanager
def naming(theirs: Data, family: Family, architecture: str) -> Iterator[None]:
    """What is said of our config is said of the keys that made it so."""
    try:
        yield
    except UsageError as error:
        what = str(error).removeprefix("config.json: ")
        keys = keys_behind(what, theirs, family, architecture)
        raise wrong(f"{said(theirs, keys)}: {what}") if keys else error from None


@contextmanager
def blaming(what: Callable[[], str]) -> Iterator[None]:
    """Whatever a wrong value made go wrong is the config's fault."""
    try:
        yield
    except UsageError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        raise wrong(f"{what()}: not possible ({e!r})") from None
