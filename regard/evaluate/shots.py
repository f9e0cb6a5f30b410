"""Few-shot prompts: a language model reads examples of a task in front of a question and goes on with the answer (Brown
et al. 2020, 2.1; without examples: zero-shot). Nothing is trained."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np

from regard.config import Seed, Whole, ranged
from regard.data.feed import Batching, TextFeed
from regard.data.read import Source, records
from regard.data.shards import Column
from regard.data.tokens import Coder
from regard.decode.generate import generate
from regard.errors import DATA, Fault, UsageError
from regard.train.measure import share

METRICS = ("exact", "loss", "perplexity")
Pair = tuple[str, str]  # source and target


@dataclass(frozen=True)
@ranged
class Shots:
    """`count` examples, drawn by `seed` for each question; `template` says how one is written."""

    count: Whole
    template: str = "{source}\n{target}\n\n"
    seed: Seed = 0

    def __post_init__(self) -> None:
        if not all(self.parts[1:]):
            what = "{source}, then {target}, then what ends an answer, such as a line break"
            raise UsageError(f"template is {self.template!r}; it needs {what}")

    @property
    def parts(self) -> tuple[str, str, str]:
        """What stands before the source, between the two, and behind the target."""
        before, _, rest = self.template.partition("{source}")
        between, _, stop = rest.partition("{target}")
        return before, between, stop

    @property
    def named(self) -> str:
        return f"{self.count} shot{'' if self.count == 1 else 's'}"

    def written(self, pair: Pair) -> str:
        return "".join(part for two in zip(self.parts, (*pair, "")) for part in two)

    def prompt(self, pool: list[Pair], number: int, asked: Pair) -> str:
        """Examples, never the one that is asked for, and then the question."""
        draw = random.Random(f"{self.seed} {number}").sample
        chosen = draw(pool, min(self.count + 1, len(pool))) if self.count else []
        chosen = [pair for pair in chosen if pair != asked][: self.count]
        if len(chosen) < self.count:
            raise Fault(
                f"{self.count} shots need as many other examples, there are {len(chosen)}", DATA
            )
        before, between, _ = self.parts
        return "".join(map(self.written, chosen)) + f"{before}{asked[0]}{between}"


def pairs(source: Source) -> list[Pair]:
    found = [(r["source"], r["target"]) for r in records(source, ("source", "target"))]
    if wrong := [i for i, pair in enumerate(found, 1) if not all(isinstance(x, str) for x in pair)]:
        raise Fault(f"example {wrong[0]}: source and target must be text", DATA)
    return found


class Questions:
    """Questions with their shots, in ids: `whole` with the answer, of which the first `given` are the prompt."""

    def __init__(
        self, shots: Shots, asked: list[Pair], pool: list[Pair], coder: Coder, longest: int | None
    ):
        self.asked, self.coder, self.stop = asked, coder, shots.parts[2]
        prompts = [shots.prompt(pool, i, pair) for i, pair in enumerate(asked)]
        whole = [prompt + pair[1] + self.stop for prompt, pair in zip(prompts, asked)]
        texts = ([text.rstrip(" ") for text in prompts], whole)
        self.prompts, self.whole = ([[*coder.before, *x] for x in coder.encode(t)] for t in texts)
        # A token may join the prompt's end and the answer's beginning: it is a part of the answer.
        both = [*zip(self.prompts, self.whole)]
        self.given = [sum(1 for _ in takewhile(lambda x: x[0] == x[1], zip(*x))) for x in both]
        self.most = max(len(ids) - n for ids, n in zip(self.whole, self.given))
        for number, ids in enumerate(self.prompts, 1):
            if longest is not None and len(ids) + self.most > longest:
                why = f"example {number} with {shots.named} has {len(ids):,} tokens, and answers "
                why += f"{self.most:,}: more than the model's context of {longest:,}"
                raise Fault(f"{why}; ask for fewer shots, or give shorter ones", DATA)

    def feed(self, batching: Batching) -> TextFeed:
        """Of which the answers alone are counted."""
        how: Any = {"prompts": np.array(self.given, np.int64), "pad": self.coder.pad}
        feed = TextFeed(Column.of(self.whole), batching, pack="none", shift=True, **how)
        feed.held = feed
        return feed

    def exact(self, model: Any) -> float:
        """How many of the greedy answers are the target's text."""
        results = generate(model, self.prompts, stop=self.stop, max_new_tokens=self.most)
        texts = [(r.text or "").strip() for r in results]
        return share(texts, [target.strip() for _, target in self.asked])
