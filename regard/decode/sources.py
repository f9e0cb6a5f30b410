"""What an encoder reads for a request: how long it is, and many of them as one batch."""

from __future__ import annotations

from typing import Any

import torch

from regard.decode.settings import Request
from regard.models.base import Model
from regard.models.embedding import Tokens, context


def source_length(model: Model) -> int | None:
    """The longest source that a model reads."""
    c = model.config
    return context(c.max_len, c.source) if isinstance(c.source, Tokens) else c.source.tokens


def source_size(model: Model, request: Request) -> int:
    """Tokens of what an encoder gives for a request's source."""
    source = request.source
    if source is None:
        return 0
    return len(source) if source.dim() == 1 else source_length(model) or 0


def sources(requests: list[Request], device: torch.device) -> dict[str, Any]:
    """What encoders read, as one batch; nothing for other models."""
    found = [r.source for r in requests if r.source is not None]
    if not found:
        return {}
    if found[0].dim() > 1:
        return {"source": torch.stack(found).to(device)}
    lengths = torch.tensor([len(s) for s in found], device=device)
    ids = torch.nn.utils.rnn.pad_sequence(found, batch_first=True)
    return {"source": ids.to(device), "source_lengths": lengths}
