"""What experiments measure of a trained model: figures by name, each with rows of columns."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention.sparse import choose, dots_exact, fp8_dots, hadamard, index_scores, packed_fp8
from regard.checkpoint import load
from regard.data.feed import Batch
from regard.data.tokens import Coder
from regard.decode.generate import engine_for, tokenizer_of
from regard.decode.settings import Request, Settings
from regard.evaluation.run import evaluate
from regard.machine import pick_device
from regard.models import Model
from regard.presets import build
from regard.report.folder import read as read_report
from regard.see.heads import Pair, Read, entropy
from regard.see.probe import Probe
from regard.text import needed
from regard.training.build import make_model
from regard.training.config import Config as RunConfig
from regard.training.config import read as read_config
from regard.training.index_losses import densely, watching
from regard.training.objectives import causal, causal_mask

Figures = dict[str, dict[str, dict[Any, float]]]


@dataclass(frozen=True)
class Case:
    """A variant trained with a seed: the lab's settings and its folder, and those of its runs, one after the other."""

    settings: dict[str, Any]
    variant: str
    seed: int
    home: Path
    runs: list[Path]
    device: str

    @property
    def best(self) -> Path:
        return self.runs[-1] / "best"

    @property
    def valid(self) -> str:
        return str(next((self.home / "text").glob("valid.*")))

    def load(self) -> Any:
        return load(self.best, device=str(pick_device(self.device)[0]))

    def loss(self, model: Any, length: int | None = None) -> float:
        """On the held-out text, per token."""
        how: Any = {"metrics": ["loss"], "length": length, "device": self.device}
        return evaluate(model, self.valid, **how).metrics["loss"]

    @property
    def config(self) -> RunConfig:
        return read_config(self.runs[0] / "config.toml")

    def start(self, model: Model) -> Any:
        """The model as it was before the first step."""
        torch.manual_seed(self.seed)
        start = make_model(self.config, None, Coder(needed(tokenizer_of(model))), [])
        return start.to(next(model.parameters()).device)

    def batch(self, model: Model) -> Batch:
        """`sampled` rows of the held-out text, as long as those of training."""
        rows, length = self.settings["sampled"], self.config.data.length or 1
        with open(self.valid, encoding="utf-8") as file:
            ids = needed(tokenizer_of(model)).encode(file.read(rows * length * 12))
        most = min(rows, (len(ids) - 1) // length)
        x = torch.tensor(ids[: most * length + 1], device=next(model.parameters()).device)
        return Batch(x[:-1].view(most, length), x[1:].view(most, length))


def changed(folder: Path, changes: dict[str, Any]) -> Model:
    """A trained model with other settings and the same weights."""
    model = load(folder)
    twin = build(model.config, **changes)
    twin.load_state_dict(model.state_dict())
    twin.origin = model.origin
    return twin


def bottleneck(case: Case) -> Figures:
    """The share of answers without an error, by the length of the source."""
    how: Any = {"metrics": ["exact"], "beams": 1, "device": case.device}
    files = {n: str(case.home / "text" / f"test-{n}.tsv") for n in case.settings["lengths"]}
    scores = {n: evaluate(case.best, path, **how).metrics for n, path in files.items()}
    return {"Accuracy": {case.variant: {n: score["exact"] for n, score in scores.items()}}}


def ablations(case: Case) -> Figures:
    """The loss; the gradient of each layer before and after training; of the first variant the loss without each of its
    heads."""
    model = case.load()
    loss, batch = case.loss(case.best), case.batch(model)
    figures: Figures = {
        "Loss": {case.variant: {"held-out loss": loss}},
        "Gradients at the start": {case.variant: gradients(case.start(model), batch)},
        "Gradients at the end": {case.variant: gradients(model, batch)},
    }
    if case.variant == case.settings["heads"]:
        figures["Without one head"] = without_heads(case, model, loss)
    return figures


def gradients(model: Any, batch: Batch) -> dict[Any, float]:
    """The length of the loss's gradient by the weights of each layer, counted from 1."""
    backward(model, batch)
    return {i: length(block.parameters()) for i, block in enumerate(model.tower.blocks, 1)}


def backward(model: Any, batch: Batch) -> None:
    total, count = causal(model, batch)
    (total / count).backward()


def length(weights: Iterable[Tensor]) -> float:
    """Of the gradient by all these weights together."""
    return torch.nn.utils.get_total_norm([p.grad for p in weights if p.grad is not None]).item()


@torch.no_grad()
def without_heads(case: Case, model: Any, loss: float) -> dict[str, dict[Any, float]]:
    """How much the loss rises where nothing of a head reaches the output projection."""
    rows: dict[str, dict[Any, float]] = {}
    for i, block in enumerate(model.tower.blocks, 1):
        weight, heads = block.attention.wo.weight, block.attention.config.heads
        for h, columns in enumerate(weight.split(weight.shape[1] // heads, 1), 1):
            kept = columns.clone()
            columns.zero_()
            rows.setdefault(f"layer {i}", {})[h] = case.loss(model) - loss
            columns.copy_(kept)
    return rows


def scale(case: Case) -> Figures:
    """The loss, the entropy of attention's rows, and gradients of queries, by the width of a head."""
    model = case.load()
    batch, config = case.batch(model), model.tower.config
    width = config.attention.width(config.dim)
    row = "with 1/sqrt(d)" if config.attention.scale is None else "without"
    figures: Figures = {"Loss": {row: {width: case.loss(case.best)}}}
    for when, each in (("start", case.start(model)), ("end", model)):
        matrix, query = query_gradients(each, batch)
        found = {"Entropy of rows": row_entropy(each, batch)}
        found |= {"Gradient into W_Q": matrix, "Gradient into a query": query}
        for name, value in found.items():
            figures.setdefault(name, {})[f"{row}, at the {when}"] = {width: value}
    return figures


def query_gradients(model: Any, batch: Batch) -> tuple[float, float]:
    """The length of the loss's gradient by W_Q of all layers together, and by one query of a head: the median."""
    attentions, queries = [block.attention for block in model.tower.blocks], list[Tensor]()

    def keep(module: nn.Module, args: Any, q: Tensor) -> None:
        q.retain_grad()
        queries.append(q)

    hooks = [each.wq.register_forward_hook(keep) for each in attentions]
    backward(model, batch)
    for hook in hooks:
        hook.remove()
    heads = attentions[0].config.heads
    grads = [q.grad.unflatten(-1, (heads, -1)) for q in queries if q.grad is not None]
    middle = torch.cat(grads).norm(dim=-1).median().item()
    return length(each.wq.weight for each in attentions), middle


@torch.no_grad()
def row_entropy(model: Any, batch: Batch) -> float:
    """In nats, the mean over layers, heads and rows of attention."""
    probe = Probe()
    model.hidden(batch.ids, mask=causal_mask(batch), probe=probe)
    return mean(entropy(Read(a.flatten(0, 2), Pair((), ()))) for (a,) in probe.maps.values())


def depth(case: Case) -> Figures:
    """The loss, and the gradients of the first and the last layer before training, by how many layers there are."""
    model = case.load()
    layers, row = model.tower.config.layers, case.variant.rpartition(", ")[0]
    # A BatchNorm that has read nothing yet has no mean to use in evaluation.
    found = gradients(case.start(model).train(), case.batch(model))
    lengths = {
        f"{row}, {name} layer": {layers: found[i]} for name, i in (("first", 1), ("last", layers))
    }
    return {"Loss": {row: {layers: case.loss(case.best)}}, "Gradients at the start": lengths}


def extrapolation(case: Case) -> Figures:
    """The loss in rows of 1, 2, ... times the trained length; with RoPE also scaled by as much, untrained."""
    trained, times = case.config.data.length or 1, case.settings["times"]
    rows = {case.variant: {n: case.loss(case.best, n * trained) for n in times}}
    for name, scaling in case.settings["scaled"].items() if case.variant == "RoPE" else ():
        rows[name] = {}
        for n in times:
            more = {"factor": float(n), **({"original_len": trained} if scaling == "yarn" else {})}
            model = changed(case.best, {"tower.attention.rope.scaling": {"kind": scaling, **more}})
            rows[name][n] = case.loss(model, n * trained)
    return {"Loss by length": rows}


def mechanisms(case: Case) -> Figures:
    """The loss and its way there; bytes of the cache, and speed, with so many tokens in it."""
    model, run = case.load(), case.runs[0]
    # Most CPUs have no products of bfloat16.
    model = model.to(torch.bfloat16) if next(model.parameters()).is_cuda else model
    each = (case.config.data.rows or 1) * (case.config.data.length or 1) / 1e6
    points = read_report(run).curve("loss")
    cuts = [points[len(points) * i // 12 : len(points) * (i + 1) // 12] for i in range(12)]
    curve = {round(each * cut[-1][0], 1): mean(y for _, y in cut) for cut in cuts if cut}
    memory, speed = {}, {}
    for size in case.settings["contexts"]:
        specs = model.cache_specs()
        states = [torch.Size(x).numel() for spec in specs for x in spec.state.values()]
        memory[f"{size:,}"] = 2.0 * (size * sum(s.numbers() for s in specs) + sum(states))
        speed[f"{size:,}"] = rate(model, size, case.settings["batch"], case.settings["timed"])
    v = case.variant
    return {
        "Loss": {v: {"held-out loss": case.loss(case.best)}},
        "Loss on the way": {v: curve},
        "Bytes of the cache": {v: memory},
        "Tokens per second": {v: speed},
    }


def rate(model: Any, size: int, batch: int, timed: int) -> float:
    """Tokens per second of decoding `batch` rows of `timed` tokens, `size` tokens before them in the cache: while all
    write, by the engine that regard.generate makes, the fastest of three tries."""
    settings = Settings(max_new_tokens=timed, min_new_tokens=timed, temperature=0.0)
    prompts = torch.randint(5, model.config.embedding.vocab, (3, batch, size)).tolist()
    return max(written([Request(ids, settings) for ids in each], model) for each in prompts)


def written(requests: list[Request], model: Any) -> float:
    """Tokens per second from when all have begun until the first is through."""
    engine = engine_for(model, requests, None, None, None)
    waiting, start, last, count = {engine.submit(r) for r in requests}, 0.0, 0.0, 0
    events = engine.step()
    while not any(event.done for event in events):
        new = [event.request for event in events if event.token is not None]
        if not waiting:
            count, last = count + len(new), time.perf_counter()
        elif not (waiting := waiting.difference(new)):
            start = time.perf_counter()
        events = engine.step()
    return count / (last - start)


@torch.no_grad()
def indexer(case: Case) -> Figures:
    """How much of the choice by exact scores other forms choose, and of attention's weights each choice holds."""
    model, found = case.load(), {name: dict[str, Any]() for name in ("Recall", "Weight held")}
    batch = case.batch(model)
    # What the layers read, and where dense attention went.
    with densely(model), watching(model) as seen:
        model.hidden(batch.ids, mask=causal_mask(batch), probe=seen)
    for call in seen.calls.values():
        index, x, ctx, best = call.layer.indexer, call.x, call.ctx, dict[int, Any]()
        q, k = index.queries(call.layer.attention.query_input(x), ctx), index.keys(x, ctx)
        visible = call.layer.visible(ctx.pos, ctx).rows(slice(0, x.shape[1]))[:, 0]
        target = torch.cat(call.target, 1)
        target = target / target.sum(-1, keepdim=True)
        forms = {"exact": dots_exact(q, k), "fp8": fp8_dots(q, packed_fp8(k))}
        forms["fp8, Hadamard"] = fp8_dots(hadamard(q), packed_fp8(hadamard(k)))
        for name, dots in forms.items():
            scores = index_scores(dots, index.weights(x)).masked_fill(~visible, -torch.inf)
            for n in case.settings["keys"]:
                chosen = torch.zeros_like(scores).scatter(-1, choose(scores, n), 1.0)
                shares = {"Recall": best.setdefault(n, chosen) / n, "Weight held": target}
                for figure, share in shares.items():
                    # Queries that see no more than n keys have no choice.
                    value = (share * chosen).sum(-1)[:, n:].mean().item()
                    found[figure].setdefault(name, {}).setdefault(n, []).append(value)
    del found["Recall"]["exact"]
    return {
        f: {r: {n: mean(v) for n, v in x.items()} for r, x in rows.items()}
        for f, rows in found.items()
    }


MEASURES = {
    f.__name__: f for f in (bottleneck, ablations, scale, depth, extrapolation, mechanisms, indexer)
}
