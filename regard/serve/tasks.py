"""What encoders, encoder-decoders and eyes are asked for: vectors, translations, labels, words behind masks, attention;
and, by an admin, models in and out.

Texts become ids in a thread, some at a time; then the model works between two steps of its engine, in pieces. What a
piece finds becomes a part of the answer at once, as JSON, so that nothing large is left for the end."""

from __future__ import annotations

import base64
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from msgspec import Raw, json
from torch import Tensor

from regard.decode.check import check_tokens, written
from regard.decode.generate import special_of, translating
from regard.decode.settings import Result
from regard.errors import UsageError
from regard.evaluate.model import Classifier, Embedder, Filler, embedded, grouped
from regard.see.align import align, cross_site
from regard.see.look import Given, named
from regard.see.page import maps as exact_maps
from regard.see.probe import Probe
from regard.serve import schemas
from regard.serve.answers import Ask, chat_logprobs, entries_of, shown
from regard.serve.edge import HTTPError, HTTPRequest
from regard.serve.model_worker import Models, ModelWorker, serves
from regard.serve.prompts import check_size, least_tokens, prompts_of, room
from regard.text import needed

CELLS = 4 << 20  # numbers of maps in one answer
PIECE = 1 << 14  # characters that are tokenised, and numbers that are written as JSON, at a time
URLS = ("data:image/png;base64", "data:image/jpeg;base64")
R = TypeVar("R")
Pieces = Generator[None, None, R]


async def in_turn(
    app: Models, given: Sequence[Any], read: Callable[[Sequence[Any], int], list[R]]
) -> list[R]:
    """What `read` makes of texts (or lists of ids), some at a time, so that those of others come in between; it is told
    how many there were before."""
    found, start, size = list[R](), 0, 0
    for i, each in enumerate(given):
        size += len(each)
        if size >= PIECE or i == len(given) - 1:
            some, before = given[start : i + 1], start
            found += await app.in_thread(lambda: read(some, before), "input")  # noqa: B023 - it is awaited
            start, size = i + 1, 0
    return found


def serving(app: Models, name: str, kind: str) -> ModelWorker:
    """A model that serves this."""
    worker = app.worker(name)
    if kind not in (kinds := serves(worker)):
        raise HTTPError(400, f"{name} does not serve {kind}; it serves {', '.join(kinds)}", "model")
    return worker


def check_texts(app: Models, worker: ModelWorker, texts: Sequence[Any]) -> None:
    """Refuse texts that cannot be as short as they must be, before they are read."""
    sizes = [len(text) for text in texts if isinstance(text, str)]
    check_size(worker, max(sizes, default=0), room(app, worker), "input")
    check_whole(app, [least_tokens(worker, size) for size in sizes])


def check_whole(app: Models, sizes: Sequence[int], param: str = "input") -> None:
    """A text that is read in one piece has so many tokens at most: others wait for it."""
    if (longest := max(sizes, default=0)) > app.limits.whole:
        most = f"this server reads at most {app.limits.whole:,} in one piece"
        raise HTTPError(400, f"a text has at least {longest:,} tokens; {most}", param)


async def embeddings(app: Models, http: HTTPRequest, body: schemas.Embedding) -> None:
    worker = serving(app, body.model, "embeddings")
    given: Any = body.input
    if isinstance(given, str) or all(isinstance(i, int) for i in given):
        given = [given]
    if any(isinstance(i, int) for i in given):
        raise HTTPError(400, "a text is one text or a list of ids; these are mixed", "input")
    if any(isinstance(i, str) and not i.strip() for i in given):
        raise HTTPError(400, "input has an empty text; give at least one token", "input")
    check_texts(app, worker, given)
    embedder = await app.in_thread(lambda: Embedder(worker.opened, normalize=True), "model")
    texts, longest = all(isinstance(i, str) for i in given), embedder.rows.longest

    def read(some: Sequence[Any], start: int) -> list[Tensor]:
        if texts:
            return [row for row in embedder.rows(some, start, "input") if row is not None]
        encode = needed(worker.tokenizer).encode
        rows = [encode(row) if isinstance(row, str) else row for row in some]
        for row in rows:
            check_tokens(row, written(embedder.model).vocab)
            if longest is not None and len(row) > longest:
                context = f"the model's context is {longest}"
                raise UsageError(f"a text of input has {len(row)} tokens, {context}; shorten it")
        # Three times as fast as torch.tensor, while other threads stand still.
        return [torch.from_numpy(np.array(row, np.int64)) for row in rows]

    rows = await in_turn(app, given, read)
    sizes = [len(row) for row in rows]
    check_whole(app, sizes)
    parts: Any = [getattr(worker.model.config, name) for name in worker.model.towers]
    numbers = len(rows) * (*parts, worker.model.config)[0].dim
    vectors = await worker.work(_vectors(worker, embedder, rows, body), sum(sizes), numbers)
    data = [{"object": "embedding", "index": i, "embedding": v} for i, v in enumerate(vectors)]
    app.spent(http, worker, prompt=sum(sizes))
    usage = {"prompt_tokens": sum(sizes), "total_tokens": sum(sizes)}
    await http.json({"object": "list", "data": data, "model": worker.name, "usage": usage})


def _vectors(
    worker: ModelWorker, embedder: Embedder, rows: Sequence[Tensor], body: schemas.Embedding
) -> Pieces[list[Raw]]:
    found, coded = list[Raw](), body.encoding_format == "base64"
    for group in grouped(rows, [len(row) for row in rows], worker.places):
        vectors = embedded(embedder.model, group, embedder.normalize, embedder.pooling)
        if body.dimensions not in (None, vectors.shape[1]):
            why = f"the vectors of {worker.name} have {vectors.shape[1]} numbers; leave dimensions out"
            raise HTTPError(400, why, "dimensions")
        if not np.isfinite(vectors).all():
            raise HTTPError(500, "a vector is not finite")
        for v in vectors:
            found.append(
                Raw(json.encode(base64.b64encode(v.tobytes()).decode() if coded else v.tolist()))
            )
        yield
    return found


async def translations(app: Models, http: HTTPRequest, body: schemas.Translation) -> None:
    worker = app.writer(body.model)
    model = worker.model
    if not model.reads_source:
        raise HTTPError(400, f"{worker.name} is no encoder-decoder; use /v1/completions", "model")
    lines = [body.input] if isinstance(body.input, str) else body.input
    full = [line for line in lines if line.strip()]

    prompts = await prompts_of(app, worker, full, "input") if full else []

    def prepare() -> Ask:
        given = {"max_new_tokens": body.max_tokens, "length_penalty": body.length_penalty}
        given = {name: value for name, value in given.items() if value is not None}
        more = translating(model, prompts, {**given, "temperature": 0.0})
        return Ask(app, http, worker, body, prompts, "input", **more)

    ask = await app.in_thread(prepare)
    about, found = ask.head("list", "trans-"), iter(await ask.results())
    # Empty lines stay empty.
    empty = Result([], [], 0.0, "eos", text="")
    results = [next(found)[0] if line.strip() else empty for line in lines]
    listed = await app.in_thread(lambda: [chat_logprobs(worker, entries_of(r)) for r in results])
    data: list[dict[str, Any]] = [
        {"index": i, "text": r.text, "score": r.score, "finish_reason": r.finish, "logprobs": each}
        for i, (r, each) in enumerate(zip(results, listed))
    ]
    if body.align:
        sizes = [len(prompt) for prompt in ask.prompts]
        words = await worker.work(_aligned(worker, lines, results), sum(sizes), 0, "align")
        for row, pairs in zip(data, words):
            row["align"] = pairs
    await http.json({**about, "data": data, "usage": ask.spent()})


def _aligned(
    worker: ModelWorker, lines: Sequence[str], results: Sequence[Result]
) -> Pieces[list[list[tuple[int, int]]]]:
    tokenizer, site, found = needed(worker.tokenizer), cross_site(worker.model), []
    for line, result in zip(lines, results):
        found.append(align(worker.model, tokenizer, site, line, result) if result.ids else [])
        yield
    return found


async def classify(app: Models, http: HTTPRequest, body: schemas.Classification) -> None:
    worker = serving(app, body.model, "classify")
    classifier = await app.in_thread(lambda: Classifier(worker.opened, name=worker.name), "input")
    given, patches = [body.input] if isinstance(body.input, str) else body.input, None
    if classifier.pictures is not None:
        patches = classifier.pictures.wanted
        rows: Any = await in_turn(
            app, given, lambda some, start: _pictures(classifier, some, start)
        )
    else:
        check_texts(app, worker, given)
        rows = await in_turn(app, given, lambda some, start: classifier.read(some, start, "input"))
    whole = [row for row in rows if row is not None]
    sizes = [len(row) if patches is None else patches.extra + patches.count for row in whole]
    check_whole(app, sizes)

    def run() -> Pieces[list[Raw]]:
        rankings = list[Raw]()
        for group in grouped(whole, sizes, worker.places):
            for ranking in classifier(group):
                labels = [{"label": n, "score": p} for n, p in ranking[: body.top]]
                rankings.append(Raw(json.encode(labels)))
            yield
        return rankings

    numbers = len(whole) * min(body.top or len(classifier.names), len(classifier.names))
    found = iter(await worker.work(run(), sum(sizes), numbers))
    each = [[] if row is None else next(found) for row in rows]
    data = [{"index": i, "labels": labels} for i, labels in enumerate(each)]
    await http.json({"object": "list", "model": worker.name, "data": data})


def _pictures(classifier: Classifier, urls: Sequence[str], start: int) -> list[Tensor]:
    """What data: URLs hold; `start` of them came before."""
    assert classifier.pictures is not None
    found = list[Tensor]()
    for i, url in enumerate(urls, start):
        kind, _, coded = url.partition(",")
        try:
            if kind not in URLS:
                raise ValueError(f"a picture begins with {URLS[0]}, or {URLS[1]},")
            found.append(classifier.pictures.file(base64.b64decode(coded, validate=True)))
        except ValueError as error:
            raise HTTPError(400, f"input[{i}]: {error}", f"input[{i}]") from None
    return found


async def fill_masks(app: Models, http: HTTPRequest, body: schemas.Fill) -> None:
    worker = serving(app, body.model, "fill")
    check_texts(app, worker, [body.input])
    filler = await app.in_thread(lambda: Filler(worker.opened), "input")
    ids = await app.in_thread(lambda: filler.read(body.input), "input")
    check_whole(app, [len(ids)])

    def run() -> Pieces[list[Raw]]:
        data = list[Raw]()
        for mask in filler(ids, body.top):
            data.append(Raw(json.encode([{"token": token, "score": p} for token, p in mask])))
            yield
        return data

    data = await worker.work(run(), len(ids), len(ids) * body.top)
    await http.json({"object": "list", "model": worker.name, "data": data})


async def look(app: Models, http: HTTPRequest, body: schemas.Look) -> None:
    """Where every head looks, exactly: of a request that ran, its prompt and its answer are read once more."""
    worker = serving(app, body.model, "look")
    tokenizer, model = needed(worker.tokenizer), worker.model
    start = [special_of(model).start or 0] if model.reads_source else []
    if (body.id is None) == (body.input is None):
        raise HTTPError(400, "give the id of a request that ran, or input", "id")
    if body.source is not None and not start:
        raise HTTPError(400, f"{worker.name} has no encoder; leave source out", "source")
    source, begins = None, 0
    if body.id is not None:
        ran = app.ran.get(body.id)
        if ran is None or ran.model != worker.name or ran.user != http.who:
            why = f"{body.id!r:.60} is not among the last requests of {worker.name}"
            raise HTTPError(404, why, "id")
        if body.choice >= len(ran.texts):
            raise HTTPError(400, f"the request has {len(ran.texts)} answers", "choice")
        prompt, answer = ran.texts[body.choice]
        source, ids = (prompt, [*start, *answer]) if start else (None, [*prompt, *answer])
        begins = len(ids) - len(answer)
    else:
        if start and body.source is None:
            raise HTTPError(400, "an encoder-decoder looks at a source", "source")
        (ids,) = await prompts_of(app, worker, body.input, "input")
        if start:
            ids, (source,) = start + ids, await prompts_of(app, worker, body.source, "source")
    device = next(model.parameters()).device
    chosen: dict[str, Any] = {"layers": body.layers, "heads": body.heads, "rows": body.rows}

    check_whole(app, [len(ids), len(source or ())], "id" if body.input is None else "input")

    @torch.inference_mode()
    def run() -> Pieces[dict[str, Any]]:
        check_tokens(ids, written(model).vocab)
        longest = getattr(model.config, "max_len", None)
        if longest is not None and len(ids) > longest:
            raise UsageError(f"{len(ids)} tokens are more than the context of {longest}")
        more = {} if source is None else {"source": torch.tensor([source], device=device)}
        probe = Probe(**chosen, what=body.what, most=CELLS)
        model.hidden(torch.tensor([ids], device=device), probe=probe, **more)
        found = {site: each[0][0].float() for site, each in probe.of(body.what).items()}
        yield
        maps, size = dict[str, list[list[Raw]]](), 0
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

    def views() -> Pieces[list[dict[str, Any]]]:
        """The row of the last token of an answer never ran."""
        fed = ids[:-1] if body.id is not None or start else ids
        names = [named(tokenizer, i) for i in ids]
        about = Given(torch.tensor([fed], device=device), names[: len(fed)])
        if source is not None:
            more: Any = {"source": [named(tokenizer, i) for i in source], "written": names[1:]}
            about = replace(about, source_ids=torch.tensor([source], device=device), **more)
        yield
        return exact_maps(model, about, None if start else begins or None, most=CELLS, **chosen)

    kind, size = {"object": "attention", "model": worker.name}, len(ids) + len(source or ())
    rows = len(ids) if body.rows is None else len(set(body.rows))
    cells = rows * max(len(ids), len(source or ())) * heads_of(model.config, body.heads)
    cells = min(CELLS, cells)
    if body.encoding_format == "base64":
        seen = await worker.work(views(), size, cells, "layers", look=True)
        await http.json({**kind, "views": seen})
        return
    maps = await worker.work(run(), size, cells, "layers", look=True)
    shown_as = {"tokens": ids} | ({} if source is None else {"source": source})
    texts = {name: [shown(worker.token(i)) for i in row] for name, row in shown_as.items()}
    await http.json({**kind, "what": body.what, **texts, "answer": begins, "maps": maps})


def heads_of(config: Any, heads: Sequence[int] | None) -> int:
    """Maps that a look at these heads (None: all) of every layer shows."""
    towers = (getattr(config, name, None) for name in ("tower", "encoder", "decoder"))
    counts = list[int]()
    for tower in filter(None, towers):
        sites = (*tower.each("attention"), *[tower.cross] * tower.layers)
        counts += [getattr(site, "heads", 0) for site in sites]
    return max(1, sum(counts if heads is None else (min(n, len(set(heads))) for n in counts)))


async def admin_load(app: Models, http: HTTPRequest, body: schemas.Model) -> None:
    """Make a model ready that the command line named."""
    if body.model not in app.folders:
        raise HTTPError(404, f"{body.model!r:.80} was not named when the server began", "model")

    async def load() -> None:
        if body.model not in app.workers:
            await app.in_thread(lambda: app.load(body.model), "model")

    await app.change(load())
    await http.json({"model": body.model, "loaded": True})


async def admin_unload(app: Models, http: HTTPRequest, body: schemas.Model) -> None:
    await app.change(app.unload(body.model))
    await http.json({"model": body.model, "loaded": False})
