"""A family: everything about one of Hugging Face's model types, as data. families/ tells how to write one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, takewhile
from typing import Any

from regard.checkpoint.rules import ConfigRule, Data, Keys
from regard.checkpoint.tensors import To, Weights, written_out
from regard.models.init import Start
from regard.models.mtp import MTP


@dataclass(frozen=True)
class Family:
    """Everything about one of Hugging Face's model types, as data. families/ tells how to write one."""

    name: str
    # What their tensor names begin with when a head sits on the body.
    base: str
    # A config of ours with this family's fixed choices; rules fill in the rest.
    blank: Any
    # Their class -> our head; None: the bare body. The first is what a folder without
    # `architectures` means.
    heads: Mapping[str, Any]
    # Their keys -> rules (a group under the first of its names), and the keys that decide nothing.
    config: Keys
    # Their names after `base` -> ours (`To` where more is to be said), as `written_out` and `steps` read them.
    tensors: Weights
    # By the kind of head.
    head_tensors: Mapping[str, Weights]
    inert: str = ""
    # Their other words for a key.
    aliases: Mapping[str, str] = field(default_factory=dict)
    # How new weights are drawn.
    start: Start = Start()
    # Known models, by name: their keys, where these differ from what a missing key means. A dotted
    # key is a place of ours that none of theirs decides.
    presets: Mapping[str, Data] = field(default_factory=dict)
    # Nothing tied means that each side has its own table, be it a copy.
    apart: bool = False
    # Patterns of stored tensors that follow from the config, and of those kept for other programs
    # and written back.
    derived: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()
    # Other spellings in stored names, as patterns -> those that are written.
    spellings: Mapping[str, str] = field(default_factory=dict)
    # Parts of names that transformers' modules have now, where weights are still stored by the old; {a,b} where
    # several are stored in one.
    modules: Mapping[str, str] = field(default_factory=dict)
    # What its MTP layers are, of which `head_tensors` of the language model tell the tensors.
    mtp: MTP | None = None

    @cached_property
    def rows(self) -> dict[str, To]:
        table = self.tensors.items()
        return written_out(
            {" ".join(self.base + n for n in key.split()): row for key, row in table}
        )

    @cached_property
    def head_rows(self) -> dict[str, dict[str, To]]:
        return {kind: written_out(table) for kind, table in self.head_tensors.items()}

    def _at(self, place: str) -> tuple[str, ...]:
        """Their names for a tensor of ours."""
        end = place.rpartition(".")[2]
        tables = (self.rows, *self.head_rows.values())
        rows = (row for table in tables for row in table.items())
        return tuple(n.replace("*", end) for n, to in rows if to.ours.replace("*", end) == place)

    @cached_property
    def pooler(self) -> str:
        """The tensor that shows that the bare body has a pooler."""
        return "".join(self._at("pooler.weight"))

    def mtp_depth(self, names: Collection[str], layers: int) -> int:
        """How many MTP layers there are among these tensors, behind so many others."""
        shown = "".join(self._at("mtp.tower.blocks.{i}.norm1.weight"))
        each = (shown.replace("{i}", str(k)).replace("{n}", str(layers + k)) for k in count())
        return sum(1 for _ in takewhile(names.__contains__, each))

    @cached_property
    def twins(self) -> list[tuple[str, tuple[str, ...], str]]:
        """A tensor, what it repeats (the first of these that is stored), our switch for that: a tied head, tables that
        two sides share, and one tensor under two names."""
        words = self._at("embedding.weight")
        target = self._at("target.weight")
        words += self._at("source.weight")
        first = words[:1]
        bias = self._at("head.bias")
        tied = [(name, target + first, "head.tied") for name in self._at("head.weight")]
        shared = [(name, first, "shared") for name in words[1:] + target]
        return tied + shared + [(name, bias[:1], "") for name in bias[1:]]

    @cached_property
    def rules(self) -> list[tuple[str, ConfigRule]]:
        """In the order of reading."""
        return sorted(self.config.items(), key=lambda item: getattr(item[1], "last", False))

    @cached_property
    def keys(self) -> frozenset[str]:
        """All that the family has a word for."""
        names = (n for name, r in self.config.items() for n in getattr(r, "names", (name,)))
        return frozenset([*names, *self.inert.split()])
