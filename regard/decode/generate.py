"""Text in, text out: joins a model, its tokenizer and the engine. `generate`, `stream`, `translate`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.decode.check import check_source, context_of, hears
from regard.decode.defaults import folder_settings, settings_of, special_of, tokenizer_of
from regard.decode.engine import MANY, ROWS, Engine
from regard.decode.runners.steps import unused, why_plain
from regard.decode.settings import Event, Request, Result
from regard.decode.sources import source_size
from regard.decode.speech import check_hears, opening
from regard.errors import UsageError
from regard.fast.cpu.native import NativeAttention
from regard.fast.invariant import invariant as steady
from regard.machine import free_memory
from regard.text import Stream, Tokenizer, needed
from regard.text.tokenizer import check_stop

Prompt = str | Sequence[int] | Tensor
PAGE = 16  # tokens, chosen for speed
# One answer of the most probable tokens, whatever a folder says of drawing and of beams.
GREEDY: dict[str, Any] = {"temperature": 0.0, "beams": 1}
LEAST = 2**28  # bytes of pages on a GPU, chosen for speed
TOTAL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # bytes of this machine
Mask = Callable[[int, list[int]], Any] | None


class Unanswered(UsageError):
    """A request that failed while it ran, by no mistake of the caller: a command ends with this code, not with 2."""

    code = 1


def generate(
    model: Any,
    prompts: Prompt | Sequence[Prompt],
    *,
    stop: str | Sequence[str] = (),
    rows: int | None = None,
    layout: str | None = None,
    invariant: bool = False,
    draft_model: Any = None,
    mask: Mask = None,
    defaults: str = "model",
    **settings: Any,
) -> list[Result]:
    """Answers to prompts, which are texts or lists of ids (an encoder-decoder's source; images for a captioner).

    settings: see regard.decode.settings.Settings. Those that are not given are as the model's folder says
    (generation_config.json, as transformers reads it); with `defaults="plain"` they are Settings' own, and only the
    folder's end tokens are taken. With n_best or samples above 1 a prompt's results follow each other.
    `rows` bounds the batch (64 if not said; in a CUDA graph 256, or 64 prompts with all their beams); more prompts than
    fit are served as rows become free. `layout`: paged or contiguous; if it is not said, paged where that is fastest
    (in a CUDA graph, and for beams of a prepared model), and contiguous elsewhere. `invariant`: an answer has the same
    bits whatever the other prompts are (slower; see regard.fast.invariant). `draft_model`: a small model of the same
    vocabulary that guesses tokens ahead (`draft` of them, 4 if not said), or "mtp": the model's own MTP layers
    (`draft`: as many as they are). `mask(sample, ids)` gives the tokens that may
    follow the ids of an answer, as a grammar does: see Request.

    An answer that fails (the model gives no numbers) is a result too: its finish is "error", `error` says why, ids and
    text are what it had; the others are as ever, and a warning counts the failed ones. What the model raises for every
    prompt is raised."""
    rest = (rows, layout, invariant, draft_model, mask, defaults)
    groups = answers(model, prompts, stop, *rest, **settings)
    results = [result for group in groups for result in group]
    fault = failed(results)
    if fault:
        warnings.warn(fault, RuntimeWarning, stacklevel=2)
    return results


def engine_for(
    model: Any, requests: list[Request], rows: int | None, layout: str | None, draft: Any
) -> Engine:
    """An engine for just these requests: in a CUDA graph if they and the model can be, with pages for all that run
    together."""
    s, weight = requests[0].settings, next(model.parameters())
    # A state takes no guess back in a graph.
    still = s.lookup > 0 and any(spec.state for spec in model.cache_specs())
    own = isinstance(draft, str)
    plain = still or own or layout == "contiguous" or why_plain(model, draft=draft)
    most = ROWS if plain else MANY if s.beams == 1 else ROWS * s.beams
    rows = min(rows or most, len(requests) * s.rows)
    # C code reads the tokens of beams where they lie; torch's own attention would copy pages into rows for every token,
    # and samples were a little faster in rows.
    native = s.beams > 1 and any(isinstance(part, NativeAttention) for part in model.modules())
    if plain and layout != "paged" and not (native and layout is None):
        return Engine(model, layout="contiguous", runner="torch", rows=rows, draft=draft)
    # A page of one token is never partly filled: beams that go on from one another copy nothing.
    page = 1 if plain and s.beams > 1 else PAGE
    each = -(-rows // s.rows)

    def needs(sizes: Iterable[int]) -> list[int]:
        return sorted((-(-size // page) for size in sizes), reverse=True)

    texts = needs(len(r.ids) + r.settings.max_new_tokens for r in requests)
    read = needs(source_size(model, r) for r in requests)
    pages = s.rows * sum(texts[:each]) + sum(read[:each])

    def size(of: Any) -> int:
        """Bytes of a page."""
        numbers = sum(spec.numbers() for spec in of.cache_specs())
        return numbers * page * weight.element_size()

    numbers = size(model)
    if plain:
        most = max(s.rows * texts[0] + read[0], TOTAL // max(1, numbers))
        how: Any = {"runner": "torch", "prefix": False, "draft": draft}
        return Engine(model, rows=rows, page=page, pages=min(pages + 2 * rows, most), **how)
    # As many pages beside a draft model, which has its part of each, as without: the next call finds them.
    pages = max(LEAST // max(1, numbers), 1 << pages.bit_length())
    wanted = pages * (numbers + (0 if draft is None else size(draft)))
    memory = min(wanted, (free_memory(weight.device) + unused(model)) * 9 // 10)
    guesser = {} if draft is None else {"draft": draft}
    return Engine(model, rows=rows, page=page, memory=memory, **guesser)


def ahead(model: Any, draft: Any) -> int:
    """How many tokens are guessed at once, where nothing says it."""
    layers = getattr(model, "mtp", None) if isinstance(draft, str) else None
    return 4 if layers is None else layers.config.depth


def failed(results: Sequence[Result]) -> str:
    """A sentence about the answers that ended with an error; empty where none did."""
    errors = [r.error for r in results if r.finish == "error"]
    if not errors:
        return ""
    return f"{len(errors)} of {len(results)} answers could not be completed: {errors[0]}"


def answers(
    model: Any, prompts: Prompt | Sequence[Prompt], stop: str | Sequence[str] = (), rows: int | None = None,
    layout: str | None = None, invariant: bool = False, draft_model: Any = None, mask: Mask = None,
    defaults: str = "model", begin: Sequence[int] = (), **settings: Any
) -> list[list[Result]]:  # fmt: skip
    """`generate`, each prompt's answers in a list of their own, in the order of the prompts; one that failed is among
    them, and nobody is warned of it. `begin`: the tokens that a decoder begins with, where it is not the folder that
    says it."""
    if draft_model is not None:
        settings.setdefault("draft", ahead(model, draft_model))
    job = Job(model, stop, settings, mask=mask, defaults=defaults, begin=begin)
    many = job.requests(prompts)
    if invariant:
        how: Any = {"layout": layout or "contiguous", "backend": "ordered", "draft": draft_model}
        engine = Engine(steady(model), rows=rows or ROWS, **how)
    else:
        engine = engine_for(model, many, rows, layout, draft_model)
    results: dict[int, list[Result]] = {}
    sizes = [len(r.ids) + (0 if r.source is None else len(r.source)) for r in many]
    # The longest first.
    numbers = {engine.submit(many[i]): i for i in sorted(range(len(many)), key=lambda i: -sizes[i])}
    causes: list[Exception] = []
    for event in engine.run():
        if event.done is not None:
            results[numbers[event.request]] = event.done
            causes += [] if event.cause is None else [event.cause]
    # Where nobody has an answer to lose, what the model raised is shown whole.
    if causes and len(causes) == len(many):
        raise causes[0]
    return [[job.finish(r, k, x) for k, x in enumerate(results[i])] for i, r in enumerate(many)]


def stream(
    model: Any,
    prompt: Prompt,
    *,
    stop: str | Sequence[str] = (),
    draft_model: Any = None,
    mask: Mask = None,
    defaults: str = "model",
    **settings: Any,
) -> Generator[str, None, Result]:
    """The answer to one prompt while it is made, in pieces: one for each token that completes a character; joined, they
    are generate's text. The generator's return value is the Result. If the answer fails, that is raised at its end."""
    if draft_model is not None:
        settings.setdefault("draft", ahead(model, draft_model))
    job = Job(model, stop, settings, live=True, mask=mask, defaults=defaults)
    if job.settings.rows > 1:
        raise UsageError("a stream is one answer; leave beams and samples out")
    (request,) = job.requests(prompt)
    engine = engine_for(model, [request], None, None, draft_model)
    engine.submit(request)
    pieces = []
    for event in engine.run():
        if event.done is None:
            pieces.append(job.take(request, 0))
            if pieces[-1]:
                yield pieces[-1]
        else:
            if event.cause is not None:
                raise event.cause
            result = job.finish(request, 0, event.done[0])
    if result.text is not None:
        rest, result.text = result.text, "".join([*pieces, result.text])
        if rest:
            yield rest
    if result.finish == "error":
        raise Unanswered(f"the prompt could not be answered: {result.error}")
    return result


def translate(
    model: Any, lines: Sequence[str], *, rows: int | None = None, defaults: str = "model", **settings: Any
) -> list[str] | list[list[str]]:  # fmt: skip
    """One translation per line, by beam search (of 4 beams, where neither the caller nor the model's folder says how
    many); with n_best or samples above 1 a list of them per line. Empty lines stay empty. A line that fails is as far
    as it came, and a warning says so."""
    if not model.reads_source:
        raise UsageError(
            "translate needs an encoder-decoder (T5, BART, Marian, ...); for others use generate"
        )
    tokenizer = needed(tokenizer_of(model))
    sources = [tokenizer.encode(line) if line.strip() else [] for line in lines]
    full = [source for source in sources if source]
    settings = translating(model, full, settings, defaults)
    if rows is None and why_plain(model):
        rows = 2 * ROWS
    groups = answers(model, full, rows=rows, defaults=defaults, **settings) if full else []
    fault = failed([result for group in groups for result in group])
    if fault:
        warnings.warn(fault, RuntimeWarning, stacklevel=2)
    found = iter(groups)
    texts = [[r.text or "" for r in next(found)] if source else [""] for source in sources]
    wanted = settings_of(model, settings, defaults)(1)
    several = max(wanted.n_best, wanted.samples) > 1
    return texts if several else [text for (text,) in texts]


def transcribe(
    model: Any, windows: Sequence[Tensor], *, language: str | None = None, task: str | None = None, rows: int = 8,
    defaults: str = "model", **settings: Any
) -> Iterator[Result]:  # fmt: skip
    """The text of each window of a recording, a spectrogram (n t) as `regard.data.sound.Spectra` makes it, in order,
    `rows` of them at a time. Where nobody names a language it is that of the first window."""
    check_hears(model)
    begin = opening(model, windows[0], language, task) if windows else []
    for at in range(0, len(windows), rows):
        block = windows[at : at + rows]
        for group in answers(model, block, begin=begin, defaults=defaults, **settings):
            yield from group


def translating(
    model: Any, sources: Sequence[Sequence[int]], given: dict[str, Any], defaults: str = "model"
) -> dict[str, Any]:
    """What is given to translate sources with, and what neither that nor the model's folder says: 4 beams, and as many
    tokens as translations need."""
    named = folder_settings(model)[0] if defaults == "model" else {}
    more: dict[str, Any] = {}
    if "beams" not in named and not given.get("temperature", named.get("temperature", 0)):
        more["beams"] = 4
    if not {"max_length", "max_new_tokens"} & named.keys():
        more["max_new_tokens"] = default_length(model, sources) if sources else 1
    return more | given


def default_length(model: Any, sources: Sequence[Sequence[int]]) -> int:
    """Twice the longest source and ten, within the model's context."""
    longest = 2 * max(map(len, sources)) + 10
    context = context_of(model)
    return longest if context is None else min(longest, context - 1)


def unread(tokenizer: Tokenizer, prompt: str) -> str:
    """What of a prompt the model cannot read, as a sentence; "" if nothing."""
    lost = tokenizer.unknown(prompt)
    shown = ", ".join(f"{part!r:.20}" for part in lost[:8]) + (", ..." if lost[8:] else "")
    return f"the tokenizer has no token for {shown}: the model reads <unk> instead" if lost else ""


class Job:
    """One call: its settings and its tokenizer. Where text is wanted with each token (`live`, or to find stop strings)
    it holds the text of every answer so far; else an answer is turned into text when it is complete."""

    def __init__(
        self, model: Any, stop: str | Sequence[str], settings: dict[str, Any], live: bool = False, mask: Mask = None,
        defaults: str = "model", begin: Sequence[int] = ()
    ):  # fmt: skip
        self.model, self.stop, self.mask = model, check_stop(stop), mask
        not_for_beams = (
            "stop" if self.stop else "a mask" if mask is not None else "a stream" if live else ""
        )
        self.live = live or bool(self.stop)
        self.two = model.reads_source
        self.begin = list(begin)
        self.tokenizer = tokenizer_of(model)
        self.sized = settings_of(model, settings, defaults, not_for_beams)
        self.settings = self.sized(1)
        self.streams: dict[tuple[int, int], Stream] = {}
        self.texts: dict[tuple[int, int], list[str]] = {}
        if self.stop and self.settings.beams > 1:
            raise UsageError(
                "stop strings end a text while it is made; beam search cannot stop so, leave one out"
            )

    def requests(self, prompts: Prompt | Sequence[Prompt]) -> list[Request]:
        # Of sound one prompt is (n t), where a picture is (c h w).
        if isinstance(prompts, Tensor) and hears(self.model):
            prompts = [prompts] if prompts.dim() == 2 else list(prompts)
        return [self.request(p, i) for i, p in enumerate(_many(prompts))]

    def opened(self, source: Tensor) -> list[int]:
        """What a decoder begins with."""
        if self.begin or not hears(self.model):
            return self.begin or [special_of(self.model).start or 0]
        check_source(source, self.model)
        return opening(self.model, source)

    def request(self, prompt: Prompt, key: int) -> Request:
        given = self.read(prompt)
        if not self.two:
            ids = _ids(given)
            request = Request(ids, self.sized(len(ids)), key=key)
        else:
            source = given if isinstance(given, Tensor) else torch.tensor(given, dtype=torch.long)
            if source.dim() == 1 and len(source) == 0:
                raise UsageError("the source is empty; give at least one token")
            ids = self.opened(source)
            request = Request(ids, self.sized(len(ids)), source, key=key)
        request.mask = self.mask
        if self.stop:
            needed(self.tokenizer)
        if self.live and self.tokenizer is not None:
            request.stop = lambda sample, ids, r=request: self.push(r, sample, ids[-1])
        return request

    def read(self, prompt: Prompt) -> list[int] | Tensor:
        if isinstance(prompt, str):
            ids = needed(self.tokenizer).encode(prompt)
            if text := unread(needed(self.tokenizer), prompt):
                warnings.warn(text, stacklevel=2)
            return ids
        return prompt if isinstance(prompt, Tensor) and prompt.dim() > 1 else _ids(prompt)

    def push(self, request: Request, sample: int, token: int) -> bool:
        """Add a token to an answer's text; whether that completed a stop string."""
        at = (id(request), sample)
        if at not in self.streams:
            assert self.tokenizer is not None
            after = [] if self.two else request.ids
            self.streams[at] = Stream(self.tokenizer, self.stop, after=after)
            self.texts[at] = []
        self.texts[at].append(self.streams[at].push([token]))
        return self.streams[at].stopped is not None

    def take(self, request: Request, sample: int) -> str:
        """The text that has come since the last call."""
        pieces = self.texts.get((id(request), sample), [])
        text = "".join(pieces)
        pieces.clear()
        return text

    def finish(self, request: Request, sample: int, result: Result) -> Result:
        """The result with its text; of a live one, with the text that has not been taken."""
        if self.tokenizer is None:
            return result
        if self.live:
            left = self.streams.get((id(request), sample))
            result.text = self.take(request, sample) + (left.finish() if left else "")
        else:
            after = [] if self.two else request.ids
            result.text = self.tokenizer.decode(result.ids, after=after)
        return result


def _many(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many: a text, a list of ids or an image is one."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        prompts = torch.from_numpy(prompts)
    if isinstance(prompts, Tensor):
        return [prompts] if prompts.dim() in (1, 3) else list(prompts)
    if not isinstance(prompts, Sequence) and not hasattr(prompts, "__array__"):
        raise UsageError(f"a prompt is text or a list of whole numbers, got {prompts!r:.60}")
    if len(prompts) and isinstance(prompts[0], Integral):
        return [prompts]  # type: ignore[list-item]
    if not len(prompts):
        raise UsageError("no prompt given; give a text, a list of ids, or a list of them")
    return [torch.from_numpy(p) if isinstance(p, np.ndarray) else p for p in prompts]  # type: ignore[misc]


def _ids(prompt: Any) -> list[int]:
    ids = prompt.tolist() if isinstance(prompt, Tensor) else prompt
    if isinstance(ids, list) and set(map(type, ids)) == {int}:
        return list(ids)
    whole = isinstance(ids, Sequence) or hasattr(ids, "__array__")
    if not whole or not all(isinstance(i, Integral) and not isinstance(i, bool) for i in ids):
        raise UsageError(f"a prompt is text or a list of whole numbers, got {prompt!r:.60}")
    return [int(i) for i in ids]


__all__ = ["Event", "Result", "generate", "special_of", "stream", "tokenizer_of", "translate"]
