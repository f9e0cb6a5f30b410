"""regard merge: an adapter and the model it stands on become one folder, which needs neither."""

from __future__ import annotations

from pathlib import Path

from regard.checkpoint import load
from regard.checkpoint.adapter import RECORD
from regard.cli.model import blaming, talk
from regard.cli.options_work import Merge
from regard.errors import DATA, RUN, UsageError


def run(options: Merge) -> int:
    adapter, out = Path(options.adapter), Path(options.out)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError(f"{out} is there already and not an empty folder; name another")
    with blaming(DATA):
        if adapter.is_dir() and not (adapter / RECORD).is_file():
            raise UsageError(
                f"{adapter} has no {RECORD}: it is no adapter, there is nothing to merge"
            )
        model = load(adapter)
    with blaming(RUN):
        model.save(out)
    talk(f"{type(model).__name__}, {sum(p.numel() for p in model.parameters()):,} parameters")
    print(out)
    return 0
