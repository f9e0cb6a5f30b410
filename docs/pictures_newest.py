"""The pictures of docs/mechanisms about what the newest models brought, each from the library's numbers."""

from __future__ import annotations

import math

import torch
from drawing import QUERIES, grids, picture, series, steps

from regard.attention import Compressed, Context
from regard.attention.compressed import CompressedAttention, Windows
from regard.data.sound import Spectra
from regard.learn.newest import chunked_attention as chunked_topic
from regard.learn.newest import hyper_connections as streams_topic
from regard.mask import Causal, Chunk, Span, Visible, Window
from regard.models import Sound
from regard.position import Rope
from regard.report import page


@picture
def compressed() -> str:
    here, config = Span.run(0, 16), Compressed(1, 4, 1, 4, Rope(), 2, rate=4)
    ctx, windows, none = Context(here, Causal()), Windows.of(here, 4), torch.empty(0)
    shown = CompressedAttention(config, 1).shown(none, none, {}, windows, ctx)[0]
    near = ctx.visible(here, config.local).tensor()[0, 0]
    parts = {"tokens as they are": near.double().tolist(), "entries": shown.double().tolist()}
    axes = "row: query, column: token, or entry of four tokens"
    return grids(parts, axes, "What each of sixteen queries sees: grey is hidden")


@picture
def hyper_connections() -> str:
    rounds = [float(n) for n in range(1, 21)]
    rows = streams_topic.tables({"rounds": rounds, "layers": (4.0,)})[0].rows
    curves = [
        series(name, rounds, [float(row[i] or 0) for row in rows], dots=True)
        for i, name in ((1, "columns"), (2, "rows"))
    ]
    title = "How far the sums of a mixing matrix of three streams are from 1"
    return page.lines(curves, title, "rounds", "largest distance", log=True)


@picture
def chunked_attention() -> str:
    here, parts = Span.run(0, 9), {}
    rules = {"chunk 3": Causal() & Chunk(3), "window 3": Causal() & Window(3)}
    for name, rule in rules.items():
        parts[name] = Visible(rule, here, here).tensor()[0, 0].double().tolist()
    return grids(parts, QUERIES, "What each of nine queries may see of nine keys: grey is hidden")


@picture
def query_temperature() -> str:
    at = [float(round(p)) for p in steps(100, 262144, 161)]
    rows = chunked_topic.tables({"pos": at})[2].rows
    curves = [
        series(name, at, [float(row[i] or 0) for row in rows])
        for i, name in ((1, "as it is"), (2, "with the temperature"))
    ]
    title = "Weight of one key whose score is 8 above that of all others"
    return page.lines(curves, title, "position of the query", "weight")


@picture
def spectrogram() -> str:
    hear = Spectra(Sound(16, 12), None)
    seconds = torch.arange(hear.size) / hear.rate
    # From 200 to 4,000 Hz, by as many octaves in each moment.
    rate = math.log(20) / hear.seconds
    tone = (2 * math.pi * 200 * ((rate * seconds).exp() - 1) / rate).sin()
    levels = hear.window(tone.numpy()).flip(0).double()
    axes = "row: band, the lowest at the bottom; column: frame of 10 ms"
    shown = ((levels - levels.min()) / (levels.max() - levels.min())).tolist()
    title = "A tone that rises from 200 to 4,000 Hz: sixteen bands, twenty-four frames"
    return grids({"log-mel spectrogram": shown}, axes, title)
