"""regard merge: an adapter and its model become one model folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from regard.cli.shared import check_new_folder, talk
from regard.errors import DATA, RUN, UsageError, blaming


@dataclass(frozen=True)
class Options:
    """Write an adapter and the model it stands on as one model folder, which needs neither.

    regard merge runs/tuned/best merged              then: regard generate merged "Once upon a time"
    """

    adapter: Annotated[Positional[str], arg(metavar="ADAPTER")]
    """a folder with adapter.json, as training with LoRA writes it"""
    out: Annotated[Positional[str], arg(metavar="OUT")]
    """the new folder; one that has files in it is refused"""


def run(options: Options) -> int:
    from regard.checkpoint import load
    from regard.checkpoint.adapter import RECORD

    adapter, out = Path(options.adapter), Path(options.out)
    check_new_folder(out)
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
