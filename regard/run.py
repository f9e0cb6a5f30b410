"""Text in, text out: joins a model, its tokenizer and the engine. `generate`, `stream`, `translate`."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from regard.config import UsageError, nearest
from regard.decode.engine import Engine
from regard.decode.invariant import invariant as steady
from regard.decode.settings import Event, Request, Result, Settings
from regard.text import Special, Stream, Tokenizer, needed, special_ids

Prompt = str | Sequence[int] | Tensor


def generate(
    model: Any,
    prompts: Prompt | Sequence[Prompt],
    *,
    stop: str | Sequence[str] = (),
    rows: int = 64,
    layout: str = "contiguous",
    invariant: bool = False,
    draft_model: Any = None,
    **settings: Any,
) -> list[Result]:
    """Answers to prompts, which are texts or lists of ids (an encoder-decoder's source; images for a captioner).

    settings: see regard.decode.settings.Settings. With n_best or samples above 1 a prompt's results follow each other.
    `rows` bounds the batch; more prompts than fit are served as rows become free. `invariant`: an answer has the same
    bits whatever the other prompts are (slower; see regard.decode.invariant). `draft_model`: a small model of the same
    vocabulary that guesses tokens ahead (`draft` of them, 4 if not said)."""
    if draft_model is not None:
        settings.setdefault("draft", 4)
    job = Job(model, stop, settings)
    many = job.requests(prompts)
    backend = "ordered" if invariant else "sdpa"
    runner = steady(model) if invariant else model
    engine = Engine(runner, layout=layout, rows=rows, backend=backend, draft=draft_model)
    results: dict[int, list[Result]] = {}
    numbers = {}
    for i in sorted(range(len(many)), key=lambda i: -_size(many[i])):
        numbers[engine.submit(many[i])] = i
    for event in engine.run():
        if event.done is not None:
            results[numbers[event.request]] = event.done
    return [job.finish(many[i], k, r) for i in range(len(many)) for k, r in enumerate(results[i])]


def stream(
    model: Any, prompt: Prompt, *, stop: str | Sequence[str] = (), **settings: Any
) -> Generator[str, None, Result]:
    """The answer to one prompt piece by piece, as it is made; joined, they are generate's text. The generator's return
    value is the Result."""
    job = Job(model, stop, settings)
    if job.settings.rows > 1:
        raise UsageError("a stream is one answer; leave beams and samples out")
    (request,) = job.requests(prompt)
    engine = Engine(model, layout="contiguous", rows=1)
    engine.submit(request)
    text = []
    for event in engine.run():
        if event.done is not None:
            result = event.done[0]
        piece = job.take(request, 0)
        if piece:
            text.append(piece)
            yield piece
    rest = job.rest(request, 0)
    if rest:
        yield rest
    if result.finish == "error":
        raise UsageError(f"the prompt could not be answered: {result.error}")
    result.text = "".join([*text, rest]) if job.tokenizer is not None else None
    return result


def translate(
    model: Any, lines: Sequence[str], *, beams: int = 4, rows: int = 128, **settings: Any
) -> list[str]:
    """One translation a line, by beam search. Empty lines stay empty."""
    if not hasattr(model, "encode"):
        raise UsageError(
            "translate needs an encoder-decoder (T5, BART, Marian, ...); for others use generate"
        )
    full = [line for line in lines if line.strip()]
    if not full:
        return [""] * len(lines)
    settings.setdefault("max_new_tokens", default_length(model, full))
    found = iter(generate(model, full, beams=beams, rows=rows, **settings))
    return [(next(found).text or "") if line.strip() else "" for line in lines]


def default_length(model: Any, lines: Sequence[str]) -> int:
    """Twice the longest source and ten, within the model's context."""
    tokenizer = needed(tokenizer_of(model))
    longest = 2 * max(len(tokenizer.encode(line)) for line in lines) + 10
    context = getattr(model.config, "max_len", None)
    return longest if context is None else min(longest, context - 1)


class Job:
    """One call: its settings, its tokenizer, and the text of every answer so far."""

    def __init__(self, model: Any, stop: str | Sequence[str], settings: dict[str, Any]):
        self.model, self.stop = model, stop
        self.two = hasattr(model, "encode")
        self.tokenizer = tokenizer_of(model)
        self.settings = _settings(model, settings)
        self.streams: dict[tuple[int, int], Stream] = {}
        self.texts: dict[tuple[int, int], list[str]] = {}
        if stop and self.settings.beams > 1:
            raise UsageError(
                "stop strings end a text while it is made; beam search cannot stop so, leave one out"
            )

    def requests(self, prompts: Prompt | Sequence[Prompt]) -> list[Request]:
        return [self.request(p, i) for i, p in enumerate(_many(prompts))]

    def request(self, prompt: Prompt, key: int) -> Request:
        given = self.read(prompt)
        if not self.two:
            request = Request(_ids(given), self.settings, key=key)
        else:
            source = given if isinstance(given, Tensor) else torch.tensor(given, dtype=torch.long)
            if source.dim() == 1 and len(source) == 0:
                raise UsageError("the source is empty; give at least one token")
            start = special_of(self.model).start
            request = Request([0 if start is None else start], self.settings, source, key=key)
        if self.tokenizer is not None and self.settings.beams == 1:
            request.stop = lambda sample, ids, r=request: self.push(r, sample, ids[-1])
        elif self.stop:
            needed(self.tokenizer)
        return request

    def read(self, prompt: Prompt) -> list[int] | Tensor:
        if isinstance(prompt, str):
            return needed(self.tokenizer).encode(prompt)
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

    def rest(self, request: Request, sample: int) -> str:
        at = (id(request), sample)
        return self.take(request, sample) + (
            self.streams[at].finish() if at in self.streams else ""
        )

    def finish(self, request: Request, sample: int, result: Result) -> Result:
        if result.finish == "error":
            raise UsageError(f"a prompt could not be answered: {result.error}")
        if self.tokenizer is not None:
            if self.settings.beams > 1:
                after = [] if self.two else request.ids
                result.text = self.tokenizer.decode(result.ids, after=after)
            else:
                result.text = self.rest(request, sample)
        return result


def tokenizer_of(model: Any) -> Tokenizer | None:
    """The tokenizer of the model's folder, made once."""
    origin = model.origin
    if origin is None:
        return None
    if not hasattr(origin, "tokenizer"):
        origin.tokenizer = Tokenizer.from_files(origin.files, origin.config)
    return origin.tokenizer


def special_of(model: Any) -> Special:
    if model.origin is None:
        return Special()
    tokenizer = tokenizer_of(model)
    return tokenizer.special if tokenizer else special_ids(model.origin.files, model.origin.config)


def _settings(model: Any, given: dict[str, Any]) -> Settings:
    """The user's settings, with the end and forced tokens that the model's folder names."""
    known = {f.name for f in fields(Settings)}
    for name in given:
        if name not in known:
            raise UsageError(f"generate has no setting {name!r}; {nearest(name, known)}")
    found: dict[str, Any] = {"eos": special_of(model).eos}
    origin = model.origin
    if origin is not None:
        saved = json.loads(origin.files.get("generation_config.json", b"{}"))
        said = {**origin.config, **{k: v for k, v in saved.items() if v is not None}}
        found["forced_first"] = said.get("forced_bos_token_id")
        last = said.get("forced_eos_token_id")
        found["forced_last"] = last[0] if isinstance(last, list) else last
        words = said.get("bad_words_ids") or []
        found["banned"] = tuple(word[0] for word in words if len(word) == 1)
    return Settings.of({**found, **given})


def _many(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many: a text, a list of ids or an image is one."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Tensor):
        return [prompts] if prompts.dim() in (1, 3) else list(prompts)
    if len(prompts) and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    if not len(prompts):
        raise UsageError("no prompt given; give a text, a list of ids, or a list of them")
    return list(prompts)  # type: ignore[arg-type]


def _ids(prompt: Any) -> list[int]:
    ids = prompt.tolist() if isinstance(prompt, Tensor) else list(prompt)
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise UsageError(f"a prompt is text or a list of whole numbers, got {prompt!r:.60}")
    return ids


def _size(request: Request) -> int:
    return len(request.ids) + (0 if request.source is None else request.source.shape[0])


__all__ = ["Event", "Result", "generate", "stream", "translate"]
