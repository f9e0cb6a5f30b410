"""What encoders, encoder-decoders and eyes are asked for: vectors, translations, labels, words behind masks, attention;
and, by an admin, models in and out.

Texts become ids in a thread, some at a time; then the model works between two steps of its engine, in pieces. What a
piece finds becomes a part of the answer at once, as JSON, so that nothing large is left for the end."""

from __future__ import annotations

import base64
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from msgspec import Raw, json
from torch import Tensor

from regard.decode.check import check_tokens, written
from regard.decode.generate import special_of, translating
from regard.decode.settings import Result
from regard.errors import UsageError
from regard.evaluation.model import Classifier, Embedder, Filler, embedded, grouped
from regard.see.align import align, cross_site
from regard.see.look import Given, named
from regard.see.page import maps as exact_maps
from regard.see.probe import Probe
from regard.serve import schemas
from regard.serve.answers import Ask, chat_logprobs, entries_of
from regard.serve.edge import HTTPError, HTTPRequest
from regard.serve.model_worker import Models, ModelWorker
from regard.serve.prompts import check_size, least_tokens, parts, prompts_of, room, several
from regard.text import needed

CELLS = 4 << 20  # numbers of maps in one answer
PIECE = 1 << 14  # characters that are tokenised, and numbers that are written as JSON, at a time
URLS = ("data:image/png;base64", "data:image/jpeg;base64")
R = TypeVar("R")
Data = dict[str, Any]
Pieces = Generator[None, None, R]


async def in_turn(
    app: Models, given: Sequence[Any], read: Callable[[Sequence[Any], int], list[R]]
) -> list[R]:
    """What `read` makes of texts (or lists of ids), some at a time, so that those of others come in between; it is told
    how many there were before."""
    found = list[R]()
    start = 0
    for some in parts(given, [len(each) for each in given], PIECE):
        found += await app.in_thread(partial(read, some, start), "input")
        start += len(some)
    return found


def written_out(work: Iterable[Iterable[Any]]) -> Pieces[list[Raw]]:
    """What is found in each piece of the work, as JSON."""
    found = list[Raw]()
    for piece in work:
        found += [Raw(json.encode(each)) for each in piece]
        yield
    return found


def check_texts(worker: ModelWorker, texts: Sequence[Any]) -> None:
    """Refuse texts that cannot be as short as they must be, before they are read."""
    sizes = [len(text) for text in texts if isinstance(text, str)]
    check_size(worker, max(sizes, default=0), room(worker), "input")
    worker.check_whole([least_tokens(worker, size) for size in sizes])


async def embeddings(http: HTTPRequest, worker: ModelWorker, body: schemas.Embedding) -> Data:
    given = several(body.input, "a text", "input")
    if any(isinstance(i, str) and not i.strip() for i in given):
        raise HTTPError(400, "input has an empty text; give at least one token", "input")
    check_texts(worker, given)
    app = worker.app
    embedder = await app.in_thread(lambda: Embedder(worker.opened, normalize=True), "model")
    rows = await in_turn(app, given, _reader(worker, embedder, given))
    sizes = [len(row) for row in rows]
    config = worker.model.config
    towers: Any = [getattr(config, name) for name in worker.model.towers]
    numbers = len(rows) * (*towers, config)[0].dim
    vectors = written_out(_vectors(worker, embedder, rows, body))
    found = await worker.work(http, vectors, sizes, numbers)
    app.spent(http, worker, prompt=sum(sizes))
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": i, "embedding": v} for i, v in enumerate(found)],
        "model": worker.name,
        "usage": {"prompt_tokens": sum(sizes), "total_tokens": sum(sizes)},
    }


def _reader(
    worker: ModelWorker, embedder: Embedder, given: Sequence[Any]
) -> Callable[[Sequence[Any], int], list[Tensor]]:
    """What makes rows of texts, or of texts and lists of ids."""
    if all(isinstance(i, str) for i in given):
        rows = embedder.rows
        return lambda some, start: [row for row in rows(some, start, "input") if row is not None]
    encode = needed(worker.tokenizer).encode
    longest = embedder.rows.longest

    def read(some: Sequence[Any], start: int) -> list[Tensor]:
        each = [encode(row) if isinstance(row, str) else row for row in some]
        for row in each:
            check_tokens(row, written(embedder.model).vocab)
            if longest is not None and len(row) > longest:
                context = f"the model's context is {longest}"
                raise UsageError(f"a text of input has {len(row)} tokens, {context}; shorten it")
        # Three times as fast as torch.tensor, while other threads stand still.
        return [torch.from_numpy(np.array(row, np.int64)) for row in each]

    return read


def _vectors(
    worker: ModelWorker, embedder: Embedder, rows: Sequence[Tensor], body: schemas.Embedding
) -> Iterator[list[Any]]:
    for group in grouped(rows, [len(row) for row in rows], worker.places):
        vectors = embedded(embedder.model, group, embedder.normalize, embedder.pooling)
        width = vectors.shape[1]
        if body.dimensions not in (None, width):
            why = f"the vectors of {worker.name} have {width} numbers; leave dimensions out"
            raise HTTPError(400, why, "dimensions")
        if not np.isfinite(vectors).all():
            raise HTTPError(500, "a vector is not finite")
        coded = body.encoding_format == "base64"
        yield [base64.b64encode(v.tobytes()).decode() if coded else v.tolist() for v in vectors]


async def translations(http: HTTPRequest, worker: ModelWorker, body: schemas.Translation) -> Data:
    model = worker.model
    if not model.reads_source:
        raise HTTPError(400, f"{worker.name} is no encoder-decoder; use /v1/completions", "model")
    lines = [body.input] if isinstance(body.input, str) else body.input
    full = [line for line in lines if line.strip()]
    prompts = await prompts_of(worker, full, "input") if full else []

    def prepare() -> Ask:
        given = {"max_new_tokens": body.max_tokens, "length_penalty": body.length_penalty}
        given = {name: value for name, value in given.items() if value is not None}
        more = translating(model, prompts, {**given, "temperature": 0.0})
        return Ask(http, worker, body, prompts, "input", **more)

    ask = await worker.app.in_thread(prepare)
    about = ask.head("list", "trans-")
    found = iter(await ask.results())
    # Empty lines stay empty.
    empty = Result([], [], 0.0, "eos", text="")
    results = [next(found)[0] if line.strip() else empty for line in lines]
    listed = await worker.app.in_thread(
        lambda: [chat_logprobs(worker, entries_of(r)) for r in results]
    )
    data: list[Data] = [
        {"index": i, "text": r.text, "score": r.score, "finish_reason": r.finish, "logprobs": each}
        for i, (r, each) in enumerate(zip(results, listed))
    ]
    if body.align:
        sizes = [len(prompt) for prompt in ask.prompts]
        pairs = written_out(_aligned(worker, lines, results))
        # The encoder has read each source whole before.
        words = await worker.work(http, pairs, sizes, 0, "align", whole=False)
        for row, each in zip(data, words):
            row["align"] = each
    return {**about, "data": data, "usage": ask.spent()}


def _aligned(
    worker: ModelWorker, lines: Sequence[str], results: Sequence[Result]
) -> Iterator[list[Any]]:
    tokenizer = needed(worker.tokenizer)
    site = cross_site(worker.model)
    for line, result in zip(lines, results):
        yield [align(worker.model, tokenizer, site, line, result) if result.ids else []]


async def classify(http: HTTPRequest, worker: ModelWorker, body: schemas.Classification) -> Data:
    app = worker.app
    classifier = await app.in_thread(lambda: Classifier(worker.opened, name=worker.name), "input")
    given = [body.input] if isinstance(body.input, str) else body.input
    if classifier.pictures is None:
        check_texts(worker, given)
        rows = await in_turn(app, given, lambda some, at: classifier.read(some, at, "input"))
        whole = [row for row in rows if row is not None]
        sizes = [len(row) for row in whole]
    else:
        rows = await in_turn(app, given, lambda some, at: _pictures(classifier, some, at))
        whole = [row for row in rows if row is not None]
        patches = classifier.pictures.wanted
        sizes = [patches.extra + patches.count] * len(whole)

    def rankings() -> Iterator[list[Any]]:
        for group in grouped(whole, sizes, worker.places):
            best = [ranking[: body.top] for ranking in classifier(group)]
            yield [[{"label": name, "score": p} for name, p in ranking] for ranking in best]

    numbers = len(whole) * min(body.top or len(classifier.names), len(classifier.names))
    found = iter(await worker.work(http, written_out(rankings()), sizes, numbers))
    each = [[] if row is None else next(found) for row in rows]
    data = [{"index": i, "labels": labels} for i, labels in enumerate(each)]
    return {"object": "list", "model": worker.name, "data": data}


def _pictures(classifier: Classifier, urls: Sequence[str], start: int) -> list[Tensor | None]:
    """What data: URLs hold; `start` of them came before."""
    assert classifier.pictures is not None
    found = list[Tensor | None]()
    for i, url in enumerate(urls, start):
        kind, _, coded = url.partition(",")
        try:
            if kind not in URLS:
                raise ValueError(f"a picture begins with {URLS[0]}, or {URLS[1]},")
            found.append(classifier.pictures.file(base64.b64decode(coded, validate=True)))
        except ValueError as error:
            raise HTTPError(400, f"input[{i}]: {error}", f"input[{i}]") from None
    return found


async def fill_masks(http: HTTPRequest, worker: ModelWorker, body: schemas.Fill) -> Data:
    check_texts(worker, [body.input])
    filler = await worker.app.in_thread(lambda: Filler(worker.opened), "input")
    ids = await worker.app.in_thread(lambda: filler.read(body.input), "input")
    masks = ([[{"token": t, "score": p} for t, p in mask]] for mask in filler(ids, body.top))
    data = await worker.work(http, written_out(masks), [len(ids)], len(ids) * body.top)
    return {"object": "list", "model": worker.name, "data": data}


class Seen(NamedTuple):
    """The ids that are looked at. `start`: those that every answer of an encoder-decoder has in front; `begins`: how
    many stand before an answer."""

    ids: list[int]
    source: list[int] | None
    start: list[int]
    begins: int

    @property
    def sizes(self) -> list[int]:
        return [len(self.ids), len(self.source or ())]


async def look(http: HTTPRequest, worker: ModelWorker, body: schemas.Look) -> Data:
    """Of a request that ran, its prompt and its answer are read once more."""
    start = [special_of(worker.model).start or 0] if worker.model.reads_source else []
    if (body.id is None) == (body.input is None):
        raise HTTPError(400, "give the id of a request that ran, or input", "id")
    if body.source is not None and not start:
        raise HTTPError(400, f"{worker.name} has no encoder; leave source out", "source")
    if body.id is not None:
        seen = _that_ran(http, worker, body, start)
    else:
        if start and body.source is None:
            raise HTTPError(400, "an encoder-decoder looks at a source", "source")
        (ids,) = await prompts_of(worker, body.input, "input")
        (source,) = await prompts_of(worker, body.source, "source") if start else [None]
        seen = Seen([*start, *ids], source, start, 0)
    worker.check_whole(seen.sizes, "id" if body.input is None else "input")
    rows = len(seen.ids) if body.rows is None else len(set(body.rows))
    cells = min(CELLS, rows * max(seen.sizes) * heads_of(worker.model.config, body.heads))
    kind = {"object": "attention", "model": worker.name}
    if body.encoding_format == "base64":
        views = await worker.work(http, _views(worker, body, seen), seen.sizes, cells, "layers")
        return {**kind, "views": views}
    maps = await worker.work(http, _maps(worker, body, seen), seen.sizes, cells, "layers")
    tokens = {"tokens": seen.ids} | ({} if seen.source is None else {"source": seen.source})
    texts = {name: [worker.shown(i) for i in row] for name, row in tokens.items()}
    return {**kind, "what": body.what, **texts, "answer": seen.begins, "maps": maps}


def _that_ran(http: HTTPRequest, worker: ModelWorker, body: schemas.Look, start: list[int]) -> Seen:
    """The prompt and an answer of one of the last requests of who asks."""
    ran = worker.app.ran.get(body.id or "")
    if ran is None or ran.model != worker.name or ran.user != http.who:
        why = f"{body.id!r:.60} is not among the last requests of {worker.name}"
        raise HTTPError(404, why, "id")
    if body.choice >= len(ran.texts):
        raise HTTPError(400, f"the request has {len(ran.texts)} answers", "choice")
    prompt, answer = ran.texts[body.choice]
    before = start or prompt
    return Seen([*before, *answer], prompt if start else None, start, len(before))


@torch.inference_mode()
def _maps(
    worker: ModelWorker, body: schemas.Look, seen: Seen
) -> Pieces[dict[str, list[list[Raw]]]]:
    model = worker.model
    device = next(model.parameters()).device
    check_tokens(seen.ids, written(model).vocab)
    longest = getattr(model.config, "max_len", None)
    if longest is not None and len(seen.ids) > longest:
        raise UsageError(f"{len(seen.ids)} tokens are more than the context of {longest}")
    more = {} if seen.source is None else {"source": torch.tensor([seen.source], device=device)}
    probe = Probe(body.layers, body.heads, body.rows, what=body.what, most=CELLS)
    model.hidden(torch.tensor([seen.ids], device=device), probe=probe, **more)
    found = {site: each[0][0].float() for site, each in probe.of(body.what).items()}
    yield
    maps = dict[str, list[list[Raw]]]()
    size = 0
    for site, each in found.items():
        maps[site] = []
        for head in torch.nan_to_num(each, neginf=-1e9):
            maps[site].append([])
            for row in head:
                maps[site][-1].append(Raw(json.encode(row.tolist())))
                size += len(row)
                if size > PIECE:
                    size = 0
                    yield
    return maps


def _views(worker: ModelWorker, body: schemas.Look, seen: Seen) -> Pieces[list[Data]]:
    """As the page draws them. The row of the last token of an answer never ran."""
    tokenizer = needed(worker.tokenizer)
    device = next(worker.model.parameters()).device
    fed = seen.ids[:-1] if body.id is not None or seen.start else seen.ids
    names = [named(tokenizer, i) for i in seen.ids]
    about = Given(torch.tensor([fed], device=device), names[: len(fed)])
    if seen.source is not None:
        more: Data = {"source": [named(tokenizer, i) for i in seen.source], "written": names[1:]}
        about = replace(about, source_ids=torch.tensor([seen.source], device=device), **more)
    yield
    prompt = None if seen.start else seen.begins or None
    chosen: Data = {"layers": body.layers, "heads": body.heads, "rows": body.rows}
    return exact_maps(worker.model, about, prompt, most=CELLS, **chosen)


def heads_of(config: Any, heads: Sequence[int] | None) -> int:
    """Maps that a look at these heads (None: all) of every layer shows."""
    towers = (getattr(config, name, None) for name in ("tower", "encoder", "decoder"))
    counts = list[int]()
    for tower in filter(None, towers):
        sites = (*tower.each("attention"), *[tower.cross] * tower.layers)
        counts += [getattr(site, "heads", 0) for site in sites]
    return max(1, sum(counts if heads is None else (min(n, len(set(heads))) for n in counts)))


async def admin_load(http: HTTPRequest, app: Models, body: schemas.Model) -> Data:
    """Of those that the command line named."""
    if body.model not in app.folders:
        raise HTTPError(404, f"{body.model!r:.80} was not named when the server began", "model")

    async def load() -> None:
        if body.model not in app.workers:
            await app.in_thread(lambda: app.load(body.model), "model")

    await app.change(load())
    return {"model": body.model, "loaded": True}


async def admin_unload(http: HTTPRequest, app: Models, body: schemas.Model) -> Data:
    await app.change(app.unload(body.model))
    return {"model": body.model, "loaded": False}
