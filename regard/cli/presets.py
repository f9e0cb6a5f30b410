"""regard presets: models by name, with sizes, and every setting of one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import groupby

from regard.cli.shared import Name, Switch, print_rows
from regard.errors import check_choice


@dataclass(frozen=True)
class Options:
    """Models by name, for [model] preset = "NAME" and regard.build("NAME").

    regard presets               the list, with sizes
    regard presets gpt2          every setting of one, which [model] can change
    regard presets --families    the families of Hugging Face that are read, and what works with each
    """

    name: Name = None  # which one
    families: Switch = False  # what works with each family
    json: Switch = False  # one JSON object


def run(options: Options) -> int:
    from regard.checkpoint.families import MATRIX
    from regard.cli.settings import sizes_of
    from regard.config import to_dict
    from regard.models.base import parameters
    from regard.presets import PRESETS, build
    from regard.training.config import _written
    from regard.training.trainer import flat

    if options.families:
        rows = json.loads(MATRIX.read_text(encoding="utf-8")).items()
        return print_rows([{"family": name, **cells} for name, cells in rows], options.json)
    if options.name is None:
        head = ("preset", "family", "layers", "dim", "heads", "vocab")
        every = ((n, family, *sizes_of(make())) for n, (family, make) in PRESETS.items())
        return print_rows([dict(zip(head, row)) for row in every], options.json, (2, 3, 4, 5))
    check_choice("preset", options.name, PRESETS)
    config = to_dict(PRESETS[options.name][1]())
    count = parameters(build(options.name, device="meta"))
    if options.json:
        print(json.dumps({"preset": options.name, "parameters": count, "config": config}))
        return 0
    print(f'# {count:,} parameters; [model] preset = "{options.name}", and any of these changed')
    for name, value in flat(config).items():
        # Layers that differ are listed one by one; those alike are shown once.
        each = value if isinstance(value, list) else [value]
        for same, run in groupby(enumerate(each), lambda pair: pair[1]):
            at = [i for i, _ in run]
            layers = f"  # layers {at[0] + 1} to {at[-1] + 1}" if len(each) > 1 else ""
            print(f"{name} = {'none' if same is None else _written(same)}{layers}")
    return 0
