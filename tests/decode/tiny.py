"""Tiny models of every kind that writes, and how the tests of this folder ask them.

Everything is float64: batches, chunks and layouts sum in different orders, and on random tiny models float32 rounding
could flip a near-tie. In float64 a flip would need a tie of one part in 1e15, so equal texts are asked for.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from regard.attention import GQA
from regard.block import Tower
from regard.cache import Pool
from regard.decode.engine import Engine
from regard.decode.settings import Event, Request, Result, Settings
from regard.layers import MLP
from regard.models import EncoderDecoderConfig, Patches, RecurrentConfig, Seq2SeqConfig, Tokens
from regard.position import Sinusoidal
from tests.laws.mechanisms import DIM, VOCAB, decoder, stir

DECODERS = ["gqa_rope", "window", "mla", "dsa_mla", "mixed", "delta", "delta_gqa"]
# What tests of states ask for besides.
STATES = ["delta_channels", "ssd_alone"]
RECURRENT = ["gru", "lstm_attention"]
PAIRS = ["pair", "twin", "captioner", "seq2seq", "seq2seq_plain"]
MODELS = [*DECODERS, *RECURRENT, *PAIRS]


@functools.cache
def model(name: str) -> Any:
    torch.manual_seed(0)
    if name in (*DECODERS, *STATES):
        return decoder(name)
    tokens, ffn = Tokens(VOCAB, Sinusoidal(64)), MLP(20)
    encoder = Tower(DIM, 1, GQA(3), ffn, causal=False)
    writer = Tower(DIM, 2, GQA(3), ffn, cross=GQA(4, 2))
    # Whose sources lie where its texts do.
    alike = Tower(DIM, 2, GQA(3), ffn, cross=GQA(3))
    config: Any = {
        "gru": RecurrentConfig(VOCAB, DIM, layers=2),
        "lstm_attention": RecurrentConfig(VOCAB, DIM, cell="lstm", attention="bilinear"),
        "pair": EncoderDecoderConfig(tokens, encoder, tokens, writer),
        "twin": EncoderDecoderConfig(tokens, encoder, tokens, alike),
        "captioner": EncoderDecoderConfig(Patches(8, 4), encoder, tokens, writer, shared=False),
        "seq2seq": Seq2SeqConfig(VOCAB, VOCAB, DIM, attention="additive"),
        "seq2seq_plain": Seq2SeqConfig(VOCAB, VOCAB, DIM, cell="lstm", attention=None),
    }[name]
    return stir(config.make())


def prompts(sizes: Iterable[int], seed: int = 0) -> list[list[int]]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (n,), generator=g).tolist() for n in sizes]


def request(
    name: str, prompt: Sequence[int], settings: Settings, key: int = 0, **more: Any
) -> Request:
    """For a model with an encoder the prompt is the source, or the seed of an image; its answer starts at token 0."""
    source: Tensor | None = None
    ids = list(prompt)
    if name in PAIRS:
        ids = [0]
        source = torch.tensor(prompt)
        if name == "captioner":
            g = torch.Generator().manual_seed(sum(prompt))
            source = torch.randn(3, 8, 8, generator=g, dtype=torch.float64)
    return Request(ids, settings, source=source, key=key, **more)


def run(engine: Engine) -> dict[int, list[Result]]:
    return {e.request: e.done for e in engine.run() if e.done is not None}


def answers(
    name: str,
    asked: Sequence[tuple[Sequence[int], Settings]],
    order: Sequence[int] | None = None,
    **options: Any,
) -> list[list[list[int]]]:
    """The ids of every answer to every (prompt, settings), submitted in any order; keyed by its place in `asked`."""
    engine = Engine(model(name), **{"page": 4, "pages": 200} | options)
    numbers = {}
    for i in order or range(len(asked)):
        numbers[i] = engine.submit(request(name, *asked[i], key=i))
    found = run(engine)
    full(engine.pool)
    return [[r.ids for r in found[numbers[i]]] for i in range(len(asked))]


def full(pool: Pool | None) -> None:
    """No row holds a page, and every page can be had."""
    if pool is not None:
        pool.check()


def tokens_of(events: Iterable[Event], number: int, row: int = 0) -> list[int]:
    """What a reader of the stream sees of one sample."""
    return [e.token for e in events if e.request == number and e.row == row and e.token is not None]


class Counted:
    """A model that counts its forward passes and the tokens fed, and may spoil logits: see `spoil`."""

    def __init__(self, inner: Any):
        self.inner, self.passes, self.fed = inner, 0, 0
        self.spoil: Any = None  # (ids, logits) -> logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def next_logits(self, ids: Tensor, lengths: Any = None, **rest: Any) -> Tensor:
        return self._count(ids, lengths, self.inner.next_logits(ids, lengths, **rest))

    def __call__(self, ids: Tensor, lengths: Any = None, **rest: Any) -> Tensor:
        return self._count(ids, lengths, self.inner(ids, lengths, **rest))

    def _count(self, ids: Tensor, lengths: Any, logits: Tensor) -> Tensor:
        self.passes += 1
        self.fed += ids.numel() if lengths is None else int(torch.as_tensor(lengths).sum())
        return logits if self.spoil is None else self.spoil(ids, logits)
