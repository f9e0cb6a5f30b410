"""A trained encoder asked for what it was trained to say: the words behind masks, or where in a text the answer to a
question stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from regard.data.feed import types_of
from regard.data.tokens import Coder
from regard.errors import DATA, Fault, UsageError
from regard.evaluate.model import Opened, Ranking
from regard.layers import MLM, Answer
from regard.models import Model
from regard.text import needed
from regard.train.measure import best_spans, context_of

# How people write a mask, beside the tokenizer's own.
MASKS = ("[MASK]", "<mask>")
# Tokens that two windows of a long text share, or half a window where that is less.
OVERLAP = 128


class Found(NamedTuple):
    """Characters `start` to `end` of the context are `text`; all None where the context has no answer. `score`: the
    probability of the first token times that of the last."""

    text: str | None
    start: int | None
    end: int | None
    score: float


@torch.inference_mode()
def fill(
    model: str | Path | Model | Opened, text: str, *, top: int = 5, device: str = "auto"
) -> list[Ranking]:
    """For each mask in the text the `top` most probable tokens and their probabilities. A mask is the tokenizer's own
    mask token, [MASK] or <mask>. `model` is a folder, a run's folder, or a model."""
    opened = model if isinstance(model, Opened) else Opened(model, device=device)
    net: Any = opened.model
    if not isinstance(getattr(net.config, "head", None), MLM):
        hint = 'an encoder-decoder writes instead: regard generate MODEL "..."'
        if not net.reads_source:
            hint = 'train one: a config with task = "mlm", then regard train CONFIG'
        raise Fault(f"this model has no head that fills masks; {hint}", DATA)
    tokenizer = needed(opened.tokenizer)
    own, coder = tokenizer.tokens.get("mask_token"), Coder(tokenizer)
    if own is None or coder.mask is None:
        raise Fault("the tokenizer of this model has no mask token", DATA)
    for mask in MASKS:
        text = text.replace(mask, own)
    ids, limit = torch.tensor(tokenizer.encode(text)), context_of(net)
    places = (ids == coder.mask).nonzero()[:, 0]
    if not len(places):
        raise UsageError(f"the text has no mask; put {own} where a word is to be found")
    if limit is not None and len(ids) > limit:
        why = f"the text has {len(ids):,} tokens, the model's context is {limit:,}"
        raise Fault(f"{why}; give fewer words around the mask", DATA)
    if not 1 <= top <= coder.vocab:
        raise UsageError(f"top is {top}; give a number from 1 to {coder.vocab:,}, the vocabulary")
    place = next(net.parameters()).device
    logits = net(ids[None].to(place))[0, places.to(place), : coder.vocab]
    best = logits.float().softmax(-1).topk(top)
    rows = zip(best.indices.tolist(), best.values.tolist())
    return [list(zip(coder.tokens(row), values)) for row, values in rows]


@torch.inference_mode()
def answer(
    model: str | Path | Model | Opened,
    question: str,
    context: str,
    *,
    longest: int = 30,
    device: str = "auto",
) -> Found:
    """The piece of the context, of at most `longest` tokens, that answers the question. `model` is a folder, a run's
    folder, or a model.

    A context that does not fit is read in windows that overlap, each scored alone. The answer is the span whose two
    logits sum to the most in any of them; there is none if even the smallest logits of a window's first token, which
    stands for that, sum to more (as BERT has it for SQuAD 2.0). Probabilities are of the tokens of the window's
    context, and of none."""
    opened = model if isinstance(model, Opened) else Opened(model, device=device)
    net: Any = opened.model
    if not isinstance(getattr(net.config, "head", None), Answer):
        how = 'a config with task = "answer" and [model] folder = "MODEL", then regard train CONFIG'
        raise Fault(f"this model has no head that finds answers; train one: {how}", DATA)
    if longest < 1:
        raise UsageError(f"longest is {longest}; give a number from 1")
    coder = Coder(needed(opened.tokenizer))
    (asked,), ((ids, places),) = coder.encode([question]), coder.located([context])
    if not asked or not ids:
        raise UsageError(f"the {'context' if asked else 'question'} is empty; give a text")
    head, limit = [*coder.before, *asked, *coder.between], context_of(net)
    room = len(ids) if limit is None else limit - len(head) - len(coder.after)
    if room < 2 and limit is not None:
        why = f"the question has {len(asked):,} tokens, the model's context is {limit:,}"
        raise Fault(f"{why}: no room for a text beside it; shorten the question", DATA)
    step = max(room - min(OVERLAP, room // 2), 1)
    best, nothing = (-torch.inf, (0, 0), 0.0), (torch.inf, 0.0)
    for window in range(0, max(len(ids) - room, 0) + step, step):
        part = ids[window : window + room]
        row = torch.tensor([[*head, *part, *coder.after]], device=next(net.parameters()).device)
        types = {}
        if coder.divider is not None and net.config.embedding.types > 1:
            types = {"types": types_of(row, coder.divider)}
        logits = net(row, **types)[0].float().cpu()  # t 2
        logits[1 : len(head)] = logits[len(head) + len(part) :] = -torch.inf
        p, ((span,), ((total,),)) = logits.softmax(0), best_spans(logits[None], longest)
        (a, b), score = span.tolist(), float(total)
        if score > best[0]:
            place = (window + a - len(head), window + b - len(head))
            best = score, place, float(p[a, 0] * p[b, 1])
        nothing = min(nothing, (float(logits[0].sum()), float(p[0].prod())))
    if nothing[0] >= best[0]:
        return Found(None, None, None, nothing[1])
    start, end = places[best[1][0]][0], places[best[1][1]][1]
    return Found(context[start:end], start, end, best[2])
