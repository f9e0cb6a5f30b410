"""What examples in a prompt teach a language model whose weights do not move: accuracy by the number of shots."""

from __future__ import annotations

import json
import random
from pathlib import Path
from statistics import mean
from typing import Any

from regard.evaluation.run import Shots, evaluate
from regard.labs.measure import Case, Figures
from regard.recipes.corpora import write

# What a kind may be called, and its words.
KINDS = [
    ("animal beast creature fauna", "bear crow deer duck frog goat lion wolf"),
    ("plant flora herb green", "fern lily mint moss oak pine rose rye"),
    ("tool device gear utensil", "axe drill file hoe lever rake saw vice"),
    ("garment clothes dress wear", "belt boot cap coat gown hat robe sock"),
    ("food meal fare dish", "bread cake cheese pie rice soup stew tart"),
    ("vehicle craft ride transport", "bus canoe cart ferry plane ship tram van"),
    ("place site spot area", "beach cave field hill lake moor park town"),
    ("metal ore mineral element", "brass copper gold iron lead nickel tin zinc"),
]
TEMPLATE = "{source}: {target}\n"
Rule = tuple[str, ...]


def pairs(rule: Rule) -> list[tuple[str, str]]:
    """Every word, and what its kind is called by a rule, which has a name for each kind."""
    return [(word, name) for name, (_, words) in zip(rule, KINDS) for word in words.split()]


def naming(folder: Path, count: int, rules: int, shown: int) -> None:
    """train.jsonl, so many documents, each `shown` pairs by a rule of its own; valid.jsonl and rule-N.tsv, documents
    and all pairs by `rules` that none of these has."""
    rng = random.Random(0)

    def drawn() -> Rule:
        return tuple(rng.choice(names.split()) for names, _ in KINDS)

    def document(rule: Rule) -> str:
        lines = (TEMPLATE.format(source=w, target=x) for w, x in rng.sample(pairs(rule), shown))
        return json.dumps({"text": "".join(lines)}) + "\n"

    held = [drawn() for _ in range(rules)]
    learned = [rule for rule in (drawn() for _ in range(count)) if rule not in held]
    tables = {
        f"rule-{i}.tsv": ["source\ttarget\n", *(f"{w}\t{x}\n" for w, x in pairs(rule))]
        for i, rule in enumerate(held, 1)
    }
    texts = {"train.jsonl": learned, "valid.jsonl": held}
    write(folder, {**{name: [*map(document, x)] for name, x in texts.items()}, **tables})


def prompting(case: Case) -> Figures:
    """The share of answers without an error by the number of shots, over rules that were not learned; and that of a
    reader who knows all kinds and their names, and forgets no shot."""
    model, files = case.load(), sorted((case.home / "text").glob("rule-*.tsv"))
    rows: dict[str, dict[int, float]] = {}
    for count in case.settings["shots"]:
        how: Any = {"shots": Shots(count, TEMPLATE), "metrics": ["exact"], "device": case.device}
        scores = [evaluate(model, str(f), shots_from=str(f), **how).metrics["exact"] for f in files]
        rows.setdefault(case.variant, {})[count] = mean(scores)
        if case.variant == case.settings["beside"]:
            rows.setdefault("a perfect reader", {})[count] = perfect(count)
    return {"Accuracy": rows}


def perfect(count: int) -> float:
    """Sure if one of the shots is of the word's kind, else one of the kind's names by chance. Shots are drawn without
    replacement from all other words."""
    names, words = (len(side.split()) for side in KINDS[0])
    others = len(KINDS) * words - 1
    unseen = 1.0
    for i in range(count):
        unseen *= 1 - (words - 1) / (others - i)
    return 1 - unseen + unseen / names
