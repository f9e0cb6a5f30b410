"""The same record of a transformers model that computes the same: what its blocks give, by hooks.

transformers is not imported here: the model is handed in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import UsageError
from regard.models import Model
from regard.parity.cells import Cells, Trace
from regard.parity.oracle import Given
from regard.parity.record import towers
from regard.parity.ways import Played


@torch.no_grad()
def record(theirs: Any, ours: Model, given: Given) -> Trace:
    """One row after the other through `theirs`, the tensors under our names."""
    trace = Played(ours, given).trace
    trace.dtype = next(theirs.parameters()).dtype
    rows, size = trace.size
    hooks, now = [], [0]

    def noting(name: str, source: bool, first: bool) -> Any:
        def note(module: Any, args: tuple, kwargs: dict[str, Any], out: Any = None) -> None:
            x = (args[0] if args else kwargs["hidden_states"]) if first else out
            x = x[0] if isinstance(x, tuple) else x
            cells = Cells([now[0]], [0], [x.shape[1]])
            trace.put(name, x, cells, source)

        return note

    for name, _, stack, source in towers(ours):
        layers = blocks(theirs, name.strip(), len(stack.blocks))
        note = noting(f"{name}embedding", source, True)
        hooks.append(layers[0].register_forward_pre_hook(note, with_kwargs=True))
        for i, layer in enumerate(layers):
            note = noting(f"{name}block {i} output", source, False)
            hooks.append(layer.register_forward_hook(note, with_kwargs=True))
    try:
        for row in range(rows):
            now[0] = row
            y = answer(theirs, given, row)
            first = y.dim() == 2
            trace.put(
                "logits", y[:, None] if first else y, Cells([row], [0], [1 if first else size])
            )
    finally:
        for hook in hooks:
            hook.remove()
    return trace


def blocks(theirs: nn.Module, tower: str, count: int) -> nn.ModuleList:
    """The list of blocks: the outermost of that length, of an encoder-decoder within its `tower`."""
    for name, module in theirs.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count and tower in name:
            return module
    raise UsageError(
        f"{type(theirs).__name__} of transformers has no list of {count} blocks to watch"
    )


def answer(theirs: Any, given: Given, row: int) -> Tensor:
    """What its head gives, or its last hidden states."""
    ids = given.ids[row : row + 1]
    if given.source is not None:
        source = given.source[row : row + 1]
        out = theirs(input_ids=source, decoder_input_ids=ids)
    else:
        out = theirs(pixel_values=ids) if ids.dim() == 4 else theirs(input_ids=ids)
    if hasattr(out, "start_logits"):
        return torch.stack([out.start_logits, out.end_logits], -1)
    for name in ("prediction_logits", "logits"):
        if hasattr(out, name):
            return getattr(out, name)
    return out.last_hidden_state
