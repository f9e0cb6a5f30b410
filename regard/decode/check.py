"""What a user can get wrong about a request, found before anything is allocated: a fault in a step would hit all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.cache import FIRST, Pool, taken_back
from regard.decode.settings import OWN, Request, named
from regard.errors import UsageError
from regard.models.embedding import Patches, Tokens, context
from regard.models.sound import Sound


def check(request: Request, model: Any) -> None:
    """The prompt, the settings and the source against the model's vocabulary and context."""
    s = request.settings
    if not isinstance(request.ids, list):
        raise UsageError(f"ids must be a list of token ids, got {request.ids!r:.60}")
    if not request.ids:
        raise UsageError("the prompt is empty; give at least one token")
    tokens = written(model)
    check_tokens([*request.ids, *named(s)], tokens.vocab)
    if len({*s.banned, *(s.eos if s.min_new_tokens else ())}) >= tokens.vocab:
        raise UsageError(f"all {tokens.vocab} tokens are banned; leave at least one")
    longest = context_of(model)
    if longest is not None and most_cached(request, model) > longest:
        room = longest - len(request.ids)
        fewer = f"or ask for at most {room} new tokens, " if room > 0 else ""
        raise UsageError(
            f"{len(request.ids)} tokens of prompt and {s.max_new_tokens} new ones are more than the model's context of "
            f"{longest}; shorten the prompt, {fewer}"
            f"or go on with {longest} tokens of the text: the last ones, or its first {FIRST} and the last: "
            "overflow='crop' or 'sinks' (--overflow crop)"
        )
    if longest is not None and s.overflow == "sinks" and longest <= FIRST:
        raise UsageError(
            f"a context of {longest} has no room for {FIRST} sinks; take overflow='crop'"
        )
    if longest is not None and s.prompt_logprobs and len(request.ids) > longest:
        raise UsageError(
            f"prompt_logprobs are of a prompt that is read whole, and {len(request.ids)} tokens are more than the "
            f"model's context of {longest}; shorten it, or leave prompt_logprobs out"
        )
    if request.mask is not None and (s.beams > 1 or not callable(request.mask)):
        call = "a mask is called with (sample, ids) before each choice of one text"
        got = "beam search has many: leave one out" if s.beams > 1 else f"got {request.mask!r:.60}"
        raise UsageError(f"{call}; {got}")
    if type(request.priority) is not int:
        raise UsageError(
            f"priority is {request.priority!r}; give a whole number, greater ones first"
        )
    if (s.lookup or s.draft) and not taken_back(model.cache_specs()):
        raise UsageError(
            "a recurrent model cannot take tokens back, so it cannot speculate; leave lookup and draft out"
        )
    if request.key is not None and not -(2**52) <= request.key < 2**52:
        raise UsageError(f"key is {request.key}; give a number from -2**52 to 2**52 - 1")
    check_source(request.source, model)


def check_tokens(ids: list[int], vocab: int, name: str = "token") -> None:
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab:
        return
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int):
            raise UsageError(f"{name} {i!r} is no whole number; give ids from 0 to {vocab - 1}")
        if not 0 <= i < vocab:
            raise UsageError(f"{name} {i} is outside the vocabulary (0 to {vocab - 1})")


def hears(model: Any) -> bool:
    """Whether a model reads sound."""
    return isinstance(getattr(model.config, "source", None), Sound)


def check_source(source: Tensor | None, model: Any) -> None:
    """An encoder-decoder reads ids (s), an image (c h w) or a spectrogram (n t); others read their prompt alone."""
    config = model.config
    if not model.reads_source:
        if source is not None:
            raise UsageError("this model has no encoder; leave source out, and give a prompt")
        return
    if source is None:
        raise UsageError(
            "an encoder-decoder needs a source: Request(ids, source=ids of the source)"
        )
    reads = getattr(config, "source", None)
    if isinstance(reads, (Patches, Sound)):
        want, what = reads.shape, "an image" if isinstance(reads, Patches) else "a spectrogram"
        if tuple(source.shape) != want or not source.is_floating_point():
            raise UsageError(
                f"the source must be {what} of real numbers of shape {want}, got {source.dtype} {tuple(source.shape)}"
            )
        return
    if source.dim() != 1 or source.dtype not in (torch.int64, torch.int32) or not len(source):
        raise UsageError(
            f"the source must be whole numbers of shape (s,), one at least, got {source.dtype} {tuple(source.shape)}"
        )
    vocab = reads.vocab if isinstance(reads, Tokens) else config.source_vocab
    check_tokens([int(source.min()), int(source.max())], vocab, "source token")
    longest = context(config.max_len, reads) if isinstance(reads, Tokens) else None
    if longest is not None and len(source) > longest:
        raise UsageError(
            f"the source has {len(source)} tokens, the model's context is {longest}; shorten it"
        )


def check_draft(draft: Any, model: Any) -> None:
    """Whether a draft model, or the model's own MTP layers, can guess for a model at all."""
    if draft is None:
        return
    if isinstance(draft, str):
        if draft != OWN:
            raise UsageError(
                f"draft is {draft!r}; give a small model, or {OWN!r}: the model's own layers"
            )
        if getattr(model, "mtp", None) is None:
            why = f"draft={OWN!r} asks for guesses of the model's MTP layers, and it has none"
            raise UsageError(f"{why}; give a small model, or look guesses up: lookup=4")
        return
    ours, own = written(model).vocab, written(draft).vocab
    if own != ours:
        raise UsageError(
            f"the draft model has {own} tokens, the model {ours}; they must share a vocabulary"
        )
    if draft.reads_source:
        raise UsageError(
            "an encoder-decoder cannot draft: it would need the source; give a decoder"
        )
    if not taken_back(draft.cache_specs()):
        raise UsageError("a recurrent model cannot take tokens back, so it cannot draft")


def check_drafted(request: Request, draft: Any, model: Any) -> None:
    """The draft model reads the same text, so its context must hold it."""
    if draft is None:
        raise UsageError(
            "draft asks for guesses of a draft model; give one: Engine(model, draft=small_model)"
        )
    tokens, longest = most_cached(request, model), context_of(draft)
    if longest is not None and tokens > longest:
        raise UsageError(
            f"{len(request.ids)} tokens of prompt and {request.settings.max_new_tokens} new ones are more than the "
            f"draft model's context of {longest}; leave draft out, or shorten the request"
        )


def check_pages(request: Request, pool: Pool, model: Any, source: int, apart: bool) -> None:
    """Alone it must fit the pool: rows share the prompt's full pages and those of a `source`, the rest is each row's
    own. The last token is said, not kept. `apart`: beams feed the prompt's last token, each to a page of its own."""
    s, page, have = request.settings, pool.page, len(pool.users)
    tokens = min(most_cached(request, model), len(request.ids) + s.max_new_tokens - 1)
    shared = min(len(request.ids), tokens) // page
    own = -(-tokens // page) - shared
    if apart:
        first = len(request.ids) - 1
        shared, own = -(-first // page), -((first - tokens) // page)
    need = source + shared + s.rows * own
    if need > have:
        rows = "" if s.rows == 1 else f" in {s.rows} rows"
        rows += f" and a source of {source} pages" if source else ""
        raise UsageError(
            f"{len(request.ids)} + {s.max_new_tokens} tokens{rows} need {need} pages of {page}, the pool has "
            f"{have}; shorten the request, or make more pages"
        )


def context_of(model: Any) -> int | None:
    """The longest text that a model writes, its prompt included."""
    tokens = written(model)
    return context(model.config.max_len, tokens) if isinstance(tokens, Tokens) else None


def most_cached(request: Request, model: Any) -> int:
    """The most tokens of an answer, its prompt included, that the cache holds at once: all; with overflow crop or sinks
    no more than the context. With overflow error they may be more, which `check` refuses."""
    size, longest = len(request.ids) + request.settings.max_new_tokens, context_of(model)
    if longest is None or request.settings.overflow == "error":
        return size
    return min(size, longest)


def written(model: Any) -> Any:
    """The config that tells the vocabulary a model writes in."""
    config = model.config
    return getattr(config, "target", None) or getattr(config, "embedding", None) or config
