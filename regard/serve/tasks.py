"""What encoders, encoder-decoders and eyes are asked for: vectors, translations, labels, words behind masks, attention;
and, by an admin, models in and out. The model works between two steps of its engine."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from regard.decode.check import check_tokens, written
from regard.decode.generate import default_length, special_of
from regard.decode.settings import Result
from regard.errors import UsageError
from regard.evaluate.model import Classifier, Embedder, embedded, fill
from regard.see.look import Given, align, cross_site, named
from regard.see.page import maps as exact_maps
from regard.see.probe import Probe
from regard.serve import shapes
from regard.serve.answers import Ask, chat_logprobs, entries_of, ids_of, prompts_of, shown
from regard.serve.edge import Exchange, Refusal
from regard.serve.host import Models
from regard.text import needed

CELLS = 4 << 20  # numbers of maps in one answer
LARGE = "these maps are too large for one answer; name layers, heads or rows"


async def embeddings(app: Models, x: Exchange, body: shapes.Embedding) -> None:
    host = app.host(body.model)
    given: list[Any] = [body.input] if isinstance(body.input, str) else body.input
    if any(isinstance(i, str) and not i.strip() for i in given):
        raise Refusal(400, "input has an empty text; give at least one token", "input")
    embedder = Embedder(host.opened, normalize=True)

    def read() -> list[list[int]]:
        if all(isinstance(i, str) for i in given):
            return [row.tolist() for row in embedder.rows(given) if row is not None]
        return prompts_of(app, host, given)

    ids, longest = await app.worker(read), embedder.rows.longest

    def run() -> np.ndarray:
        for row in ids:
            check_tokens(row, written(embedder.model).vocab)
            if longest is not None and len(row) > longest:
                context = f"the model's context is {longest}"
                raise UsageError(f"a text of input has {len(row)} tokens, {context}; shorten it")
        rows = [torch.tensor(row) for row in ids]
        return embedded(embedder.model, rows, embedder.normalize, embedder.pooling)

    vectors = await host.work(run)
    if body.dimensions is not None and body.dimensions != vectors.shape[1]:
        why = f"the vectors of {host.name} have {vectors.shape[1]} numbers; leave dimensions out"
        raise Refusal(400, why, "dimensions")
    if not np.isfinite(vectors).all():
        raise Refusal(500, "a vector is not finite")
    coded, used = body.encoding_format == "base64", sum(map(len, ids))
    data = [base64.b64encode(v.tobytes()).decode() if coded else v.tolist() for v in vectors]
    app.spent(x, host, prompt=used)
    rows = [{"object": "embedding", "index": i, "embedding": v} for i, v in enumerate(data)]
    usage = {"prompt_tokens": used, "total_tokens": used}
    await x.json({"object": "list", "data": rows, "model": host.name, "usage": usage})


async def translations(app: Models, x: Exchange, body: shapes.Translation) -> None:
    host = app.writer(body.model)
    model = host.model
    if not model.reads_source:
        raise Refusal(400, f"{host.name} is no encoder-decoder; use /v1/completions", "model")
    lines = [body.input] if isinstance(body.input, str) else body.input
    full = [line for line in lines if line.strip()]

    def prepare() -> Ask:
        prompts = prompts_of(app, host, full) if full else []
        most = body.max_tokens or default_length(model, prompts or [[]])
        more = {"max_new_tokens": most, "length_penalty": body.length_penalty, "temperature": 0.0}
        return Ask(app, x, host, body, prompts, **more)

    ask = await app.worker(prepare)
    about, found = ask.head("list", "trans-"), iter(await ask.results())
    # Empty lines stay empty.
    empty = Result([], [], 0.0, "eos", text="")
    results = [next(found)[0] if line.strip() else empty for line in lines]
    data: list[dict[str, Any]] = [
        {"index": i, "text": r.text, "score": r.score, "finish_reason": r.finish}
        | {"logprobs": chat_logprobs(host, entries_of(r))}
        for i, r in enumerate(results)
    ]
    if body.align:
        tokenizer = needed(host.tokenizer)

        def pairs() -> list[list[tuple[int, int]]]:
            site, both = cross_site(model), zip(lines, results)
            return [align(model, tokenizer, site, a, r) if r.ids else [] for a, r in both]

        for row, words in zip(data, await host.work(pairs, "align")):
            row["align"] = words
    await x.json({**about, "data": data, "usage": ask.spent()})


async def classify(app: Models, x: Exchange, body: shapes.Classification) -> None:
    host = app.host(body.model)

    def run() -> list[Any]:
        classifier = Classifier(host.opened, name=host.name)
        if classifier.pictures is not None:
            raise UsageError(f"{host.name} reads pictures, which this server does not take")
        texts = [body.input] if isinstance(body.input, str) else body.input
        return classifier(classifier.read(texts, name="input"))

    data = [
        {"index": i, "labels": [{"label": n, "score": p} for n, p in ranking[: body.top]]}
        for i, ranking in enumerate(await host.work(run))
    ]
    await x.json({"object": "list", "model": host.name, "data": data})


async def fill_masks(app: Models, x: Exchange, body: shapes.Fill) -> None:
    host = app.host(body.model)
    masks = await host.work(lambda: fill(host.opened, body.input, top=body.top))
    data = [[{"token": token, "score": p} for token, p in mask] for mask in masks]
    await x.json({"object": "list", "model": host.name, "data": data})


async def look(app: Models, x: Exchange, body: shapes.Look) -> None:
    """Where every head looks, exactly: of a request that ran, its prompt and its answer are read once more."""
    host = app.host(body.model)
    tokenizer, model = needed(host.tokenizer), host.model
    start = [special_of(model).start or 0] if model.reads_source else []
    if (body.id is None) == (body.input is None):
        raise Refusal(400, "give the id of a request that ran, or input", "id")
    if body.source is not None and not start:
        raise Refusal(400, f"{host.name} has no encoder; leave source out", "source")
    source, begins = None, 0
    if body.id is not None:
        ran = app.ran.get(body.id)
        if ran is None or ran.model != host.name or ran.user != x.who:
            why = f"{body.id!r:.60} is not among the last requests of {host.name}"
            raise Refusal(404, why, "id")
        if body.choice >= len(ran.texts):
            raise Refusal(400, f"the request has {len(ran.texts)} answers", "choice")
        prompt, answer = ran.texts[body.choice]
        source, ids = (prompt, [*start, *answer]) if start else (None, [*prompt, *answer])
        begins = len(ids) - len(answer)
    else:
        if start and body.source is None:
            raise Refusal(400, "an encoder-decoder looks at a source", "source")
        given = [body.input, body.source] if start else [body.input]
        read = await app.worker(lambda: [ids_of(app, host, each or "") for each in given])
        ids, source = start + read[0], read[1] if start else None
    device = next(model.parameters()).device
    chosen: dict[str, Any] = {"layers": body.layers, "heads": body.heads, "rows": body.rows}

    @torch.inference_mode()
    def run() -> dict[str, Any]:
        check_tokens(ids, written(model).vocab)
        longest = getattr(model.config, "max_len", None)
        if longest is not None and len(ids) > longest:
            raise UsageError(f"{len(ids)} tokens are more than the context of {longest}")
        heads = sum(1 for m in model.modules() if hasattr(m, "heads")) if body.heads is None else 1
        rows = len(ids) if body.rows is None else len(body.rows)
        if rows * len(ids) * max(1, heads) > CELLS:
            raise UsageError(LARGE)
        more = {} if source is None else {"source": torch.tensor([source], device=device)}
        probe = Probe(**chosen, what=body.what)
        model.hidden(torch.tensor([ids], device=device), probe=probe, **more)
        maps = {site: each[0][0].float() for site, each in probe.of(body.what).items()}
        if sum(m.numel() for m in maps.values()) > CELLS:
            raise UsageError(LARGE)
        return {site: torch.nan_to_num(m, neginf=-1e9).tolist() for site, m in maps.items()}

    def views() -> list[dict[str, Any]]:
        """The row of the last token of an answer never ran."""
        fed = ids[:-1] if body.id is not None or start else ids
        names = [named(tokenizer, i) for i in ids]
        about = Given(torch.tensor([fed], device=device), names[: len(fed)])
        if source is not None:
            more: Any = {"source": [named(tokenizer, i) for i in source], "written": names[1:]}
            about = replace(about, source_ids=torch.tensor([source], device=device), **more)
        return exact_maps(model, about, None if start else begins or None, most=CELLS, **chosen)

    kind = {"object": "attention", "model": host.name}
    if body.encoding_format == "base64":
        await x.json({**kind, "views": await host.work(views, "layers", look=True)})
        return
    maps = await host.work(run, "layers", look=True)
    shown_as = {"tokens": ids} | ({} if source is None else {"source": source})
    texts = {name: [shown(host.token(i)) for i in row] for name, row in shown_as.items()}
    await x.json({**kind, "what": body.what, **texts, "answer": begins, "maps": maps})


async def admin_load(app: Models, x: Exchange, body: shapes.Model) -> None:
    """Make a model ready that the command line named."""
    if body.model not in app.folders:
        raise Refusal(404, f"{body.model!r:.80} was not named when the server began", "model")
    if body.model not in app.hosts:
        await app.worker(lambda: app.load(body.model))
    await x.json({"model": body.model, "loaded": True})


async def admin_unload(app: Models, x: Exchange, body: shapes.Model) -> None:
    await app.unload(body.model)
    await x.json({"model": body.model, "loaded": False})
