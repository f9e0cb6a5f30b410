"""Topics of `regard explain` that the newest models brought: entries of many tokens, several residual
streams, layers that see chunks, and sound."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from regard.attention import GQA, Compressed, Context, softmax
from regard.attention.compressed import CompressedAttention, Compressor, Windows
from regard.block import Mix, Streams
from regard.data.sound import Spectra, mel_filters
from regard.errors import UsageError
from regard.learn.explain import Matrix, Numbers, Table, Tables, positive, real, topic, whole
from regard.learn.mechanisms import grid, sight, weightless
from regard.mask import Causal, Chunk, Mask, Span, Window
from regard.models import Sound
from regard.models.base import parameters
from regard.position import Rope, Temperature
from regard.presets import PRESETS

COMPRESSED, SOUND = "regard/attention/compressed.py", "regard/data/sound.py"
# DeepSeek-V4's layers: the last tokens alone, with entries of 4 that an indexer chooses, with all of 128.
SLIDING = Compressed(64, 512, 1024, 128, Rope(), 64, groups=8, rank=1024)
SPARSE = replace(SLIDING, rate=4, overlap=True, topk=512, index_heads=64, index_dim=128)
V4 = {"sliding": SLIDING, "sparse, rate 4": SPARSE, "heavy, rate 128": replace(SLIDING, rate=128)}


@topic(f"{COMPRESSED}::Compressor", f"{COMPRESSED}::CompressedAttention.shown")
def compressed(
    x: Numbers, v: Numbers, rate: int = 4, local: int = 3, longest: int = 1_000_000
) -> Tables:
    """How can a query look back at a million tokens through a few hundred entries?

    C_w = norm(sum_j a_j c_j),   a = softmax of z_j + B_j over the tokens j of window w, feature by feature
    o_t = attention of t over the last `local` tokens and over each C_w whose window has ended; keys are values
    An entry stands for --rate tokens. Sparse layers let an indexer choose the best entries, heavy ones see them all.
    x: z, and v: c, of one feature for each token; B = 0. longest: tokens of the text in the last table."""
    n, r = len(x), whole("rate", rate, 1, 20)
    if len(v) != n or not r <= n <= 20:
        raise UsageError(f"--x has {n} numbers, --v {len(v)}; give {r} to 20, as many of both")
    config = Compressed(1, 4, 1, whole("local", local), Rope(), 2, rate=r)
    here, made = Span.run(0, n), cast(Any, Compressor(config, 1, 4).double().requires_grad_(False))
    made.norm, windows = nn.Identity(), Windows.of(here, r)
    # The first feature does not turn. Row j brings the weights of the tokens at place j of their windows.
    z = real(x)[None, :, None]
    marks = (torch.arange(n) % r == torch.arange(r)[:, None]).double()[..., None]
    weights, sums = (
        made(c.expand(-1, -1, 4), z.expand(len(c), -1, 4), windows)[..., 0]
        for c in (marks, real(v)[None, :, None])
    )
    tokens = torch.arange(weights.numel())
    columns = {
        "token": tokens,
        "window": tokens // r,
        "z": x,
        "c": v,
        "weight a": weights.T.ravel(),
    }
    yield Table.of("weights within windows that have ended", columns, "bars")
    ctx = Context(here, Causal())
    near = ctx.visible(here, config.local).tensor()[0, 0]
    # Without an indexer positions alone decide.
    shown = CompressedAttention(config, 1).shown(z, z, {}, windows, ctx)[0]
    columns = {
        "entry": range(len(sums[0])),
        "turned to": windows.place[0],
        "sum of a c": sums[0],
        "first seen by": shown.long().argmax(0),
    }
    yield Table.of("entries, before their norm", columns)
    seen = ([" ".join(".1"[int(s)] for s in row) for row in each] for each in (near, shown))
    columns = dict(zip(("query", "tokens as they are", "entries"), (range(n), *seen)))
    yield Table.of("1: seen", columns)
    rows = []
    for name, kind in {"all tokens": GQA(64, 1, 512), **V4}.items():
        size, layer = whole("longest", longest), weightless(kind, 4096)
        entries = size // (getattr(kind, "rate", None) or size + 1)
        rows.append([name, entries, layer.flops(size), layer.cache_spec().numbers()])
    names = ["layer", "entries", "FLOP of a query", "kept per token"]
    yield Table(f"layers of DeepSeek-V4 after {size:,} tokens", names, rows, "bars FLOP")


@topic("regard/block.py::Streams", "regard/block.py::Mix")
def hyper_connections(
    x: Matrix, rounds: Numbers = (1.0, 2.0, 5.0, 20.0), layers: int = 60, dim: int = 4096
) -> Tables:
    """What if a model had several residual streams, and learned how to mix them?

    X' = M^T X + w f(norm(p X)),   X: n streams of width m;   p = sigmoid(u) + eps,   w = 2 sigmoid(v)
    M = softmax(N) + eps, then its columns and its rows divided by their sums by turns (Sinkhorn and Knopp)
    u, v and N are made of X for each token. Rows and columns of M sum to 1 (it is doubly stochastic): each new stream
    is a mean of the old ones, and their sum stays, through however many layers. x: N, a row for each stream."""
    given = torch.atleast_2d(real(x))
    if len(given) != given.shape[1]:
        size = " x ".join(map(str, given.shape))
        raise UsageError(f"--x is {size}; give as many rows as columns, divided by semicolons")
    depth = sorted({1, *(whole("layers", layers, 4, 200) // part for part in (4, 2, 1))})
    off, kept = [], {}
    for r in (whole("rounds", each, 1, 100) for each in rounds):
        found = mixed(given, r, depth)
        m = found[1].mT
        off.append([r, *((m.sum(axis) - 1).abs().max().item() for axis in (0, 1))])
        kept[f"rounds {r}"] = [found[i][:, 0].sum().item() for i in depth]
    yield Table("how far sums of M are from 1", ["rounds", "columns", "rows"], off, "bars")
    yield grid(f"M after {off[-1][0]} rounds", m, "from", "to ", "map")
    yield Table.of("sum of the streams, at first 1 0 ...", {"layers": depth, **kept})
    rows = []
    for n in (1, 2, 4, 8):
        with torch.device("meta"):
            rows.append([n, n * whole("dim", dim), parameters(Mix(Streams(n), dim))])
    names = ["streams", "numbers per token", "weights of a mix"]
    yield Table(f"what they cost at width {dim:,}", names, rows, "bars")


def mixed(given: Tensor, rounds: int, depth: list[int]) -> dict[int, Tensor]:
    """What layers, so many as each of `depth` says, whose parts add nothing make of streams (n n) that are 1 in one
    place each; the numbers N are the same in all."""
    n = len(given)
    mix = Mix(Streams(n, rounds), n).double().requires_grad_(False)
    mix.weight.zero_()
    mix.bias[2 * n :] = given.flatten()
    x, found = torch.eye(n, dtype=torch.float64)[None, None], {}
    for layer in range(1, max(depth) + 1):
        x = mix(x, torch.zeros_like)
        found[layer] = x[0, 0]
    return found


@topic("regard/mask.py::Chunk", "regard/position.py::Temperature")
def chunked_attention(
    pos: Numbers = (100.0, 8191.0, 16383.0, 65535.0, 262143.0),
    tokens: int = 8,
    window: int = 3,
    scale: float = 0.1,
    x: float = 8.0,
) -> Tables:
    """How can most layers look at a few tokens, and the model still read a long text?

    chunk: j <= i and floor(i / c) = floor(j / c), with rotary positions;   every fourth layer: j <= i, without any
    there q_p (1 + s ln(1 + floor((p + 1) / 8192))), s: --scale, so that one key still stands out among many
    A window slides with the query; a chunk (Llama 4) begins anew, and its first token sees itself alone.
    window: c of the masks. x: by how much the score of one key is above all others, before the temperature."""
    n, c = whole("tokens", tokens, 2, 20), whole("window", window)
    here: dict[str, Mask] = {"causal": Causal(), f"causal & chunk {c}": Causal() & Chunk(c)}
    yield sight({**here, f"causal & window {c}": Causal() & Window(c)}, n)
    places = [whole("pos", p, 1) for p in pos]
    grows = Temperature(8192, positive("scale", scale), 1)
    gains = grows.gain(torch.tensor([places]), torch.float64).flatten().tolist()
    columns = {"position": places, "factor": gains}
    yield Table.of("temperature of a query", columns, "lines", "times q", "pos")
    # p keys of score 0 are one of ln p.
    rows: list[list[Any]] = [
        [p, *(softmax(real((x * g, math.log(p))))[0].item() for g in (1.0, gain))]
        for p, gain in zip(places, gains)
    ]
    names = ["position", "as it is", "with the temperature"]
    yield Table("weight of the one key", names, rows, "lines", "weight", "pos")
    tower = cast(Any, PRESETS["llama-4-scout"][1]()).tower
    each, rows = tower.each("attention"), []
    for kind in dict.fromkeys(each):
        name = "all tokens" if kind.chunk is None else f"chunks of {kind.chunk:,}"
        turned = "none" if kind.rope is None else "rotary"
        layer = weightless(kind, tower.dim)
        work = (layer.flops(size) for size in (8192, 131072, 1048576))
        rows.append([name, each.count(kind), turned, *work, layer.cache_spec().numbers()])
    names = ["sees", "layers", "positions", *(f"FLOP, {k}" for k in ("8k", "128k", "1M"))]
    yield Table("Llama 4 Scout: a query in one layer, at most", [*names, "kept per token"], rows)


@topic(
    f"{SOUND}::Spectra.window", f"{SOUND}::mel_filters", "regard/models/sound.py::SoundEmbedding"
)
def spectrogram(
    x: Numbers = (250.0, 1000.0, 4000.0), bands: int = 10, size: int = 6, dim: int = 512
) -> Tables:
    """How does sound become tokens?

    P_ft = |sum over 400 samples of hann_s x_s e^(-2 pi i f s / 400)|^2, every 160 of 16,000 samples a second
    S_bt = log10 of sum_f mel_bf P_ft;   kept: (max(S, max S - 8) + 4) / 4
    tokens = gelu(conv(gelu(conv S))) + waves: two convolutions of three frames, the second takes every other frame
    x: tones in hertz, one after the other, each as long; size: tokens of the first table, of two frames each."""
    b, sound = whole("bands", bands, 2, 40), Sound(bands, whole("size", size, 2, 6))
    hear = Spectra(sound, None)
    if not x or len(x) > hear.size or not all(0 < hertz < hear.rate / 2 for hertz in x):
        raise UsageError(f"--x are tones in hertz, above 0 and below {hear.rate // 2:,}")
    parts = torch.arange(hear.size).tensor_split(len(x))
    tones = [(2 * math.pi * h / hear.rate * part).sin() for h, part in zip(x, parts)]
    heard = hear.window(torch.cat(tones).numpy()).double().round(decimals=2)
    yield grid("log-mel spectrogram", heard, "band", "frame ", "map")
    filters = torch.from_numpy(mel_filters(b, 1 + hear.fft // 2, hear.rate))
    step, inside = hear.rate / hear.fft, filters > 0
    rows: list[list[Any]] = [
        [i, *(float(step * f) for f in (seen.nonzero()[0], row.argmax(), seen.nonzero()[-1]))]
        for i, (row, seen) in enumerate(zip(filters, inside), 1)
    ]
    yield Table("bins of each band, in hertz", ["band", "from", "most", "to"], rows, "bars most")
    whisper, layer = Sound(), weightless(Sound(), whole("dim", dim))
    seconds = Spectra(whisper, None)
    rows = [
        ["samples", f"{seconds.size:,}", 0],
        ["log-mel spectrogram", " x ".join(map(str, whisper.shape)), 0],
        ["first convolution", f"{dim} x {whisper.shape[1]}", parameters(layer.first)],
        ["second, and waves: tokens", f"{whisper.tokens} x {dim}", parameters(layer.second)],
    ]
    title = f"{seconds.seconds:g} seconds, as Whisper hears them"
    yield Table(title, ["step", "shape", "weights"], rows)
