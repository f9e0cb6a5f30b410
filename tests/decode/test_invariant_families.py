"""Batch-invariant mode for every family: ids and log probabilities of a request have the same bits alone and in any
company, order, chunk, page, with shared prefixes and after preemption. Models are tiny, random, of widths that leave
tails in every kernel; equality is exact, there is no tolerance."""

import functools
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.attention import DSA, GQA, MLA, SSD, Compressed, DeltaRule
from regard.block import PerLayer, Streams
from regard.decode.engine import Engine
from regard.decode.settings import Request, Settings
from regard.fast.invariant import invariant
from regard.models import RecurrentConfig, Seq2SeqConfig
from regard.moe import MoE
from regard.position import Rope, Temperature
from tests.wide import wide

VOCAB, SIDE = 120, 12
SMALL: dict[str, Any] = {"dim": 52, "layers": 2, "vocab": VOCAB}
DENSE = {**SMALL, "ffn_dim": 90, "max_len": 160}
PAIR = {**SMALL, "ffn_dim": 90, "heads": 4, "head_dim": 13}
GROUPED = GQA(6, 2, 10, rope=Rope())
WINDOW = GQA(4, 2, 10, rope=Rope(), window=20, sinks=True, softcap=4.0, qk_norm=1e-6)
DELTA = DeltaRule(2, 4, 11, 9, conv=3)
CHANNELS = DeltaRule(4, None, 11, 9, channels=True, rank=7, gate="sigmoid", reach=2.0)
DUAL = SSD(6, 7, 2, 9, bias=True, least=0.01)
COMPRESSED = Compressed(
    4, 10, 14, 9, Rope(layout="interleaved"), 4, groups=2, rank=7, rate=3, overlap=True, topk=4,
    index_heads=3, index_dim=6,
)  # fmt: skip
LATENT = MLA(4, 22, 10, 6, query_latent=14, rope=Rope(layout="interleaved"))
CHUNKED = GQA(6, 2, 10, rope=Rope(), chunk=12, qk_norm=1e-6, qk_norm_bare=True, clip=0.9)
WARM = GQA(6, 2, 10, temperature=Temperature(5, 0.3, 1))
WEIGHED = MoE(6, 2, 19, shared=1, score="sigmoid", normalized=False, weigh_input=True)
FINE = MoE(
    12, 3, 19, shared=1, score="sigmoid", groups=4, active_groups=2, gain=2.5, corrected=True
)

FAMILIES: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: regard.build("gpt2", **DENSE, heads=4),
    "llama": lambda: regard.build("llama", **DENSE, attention=GROUPED),
    "window": lambda: regard.build("llama", **DENSE, attention=WINDOW),
    "mla": lambda: regard.build("llama", **DENSE, attention=LATENT),
    "mixtral": lambda: regard.build("llama", **SMALL, attention=GROUPED, ffn=MoE(8, 2, 23)),
    "deepseek": lambda: regard.build("llama", **SMALL, attention=LATENT, ffn=FINE),
    "llama4": lambda: regard.build(
        "llama", **SMALL, attention=(CHUNKED, WARM), ffn=WEIGHED, residual_gain=0.7, logit_gain=0.5
    ),
    "mixer": lambda: regard.build(
        "llama", **SMALL, attention=GROUPED, ffn=MoE(7, 2, 23, mixer=0.2)
    ),
    "dsa_gqa": lambda: regard.build("llama", **DENSE, attention=DSA(GROUPED, 3, 9, 11, rope_dim=4)),
    "dsa_window": lambda: regard.build("llama", **DENSE, attention=DSA(WINDOW, 3, 9, 50)),
    "dsa_mla": lambda: regard.build("llama", **DENSE, attention=DSA(LATENT, 2, 8, 20, rope_dim=4)),
    "dsa_fp8": lambda: regard.build(
        "llama", **SMALL, attention=DSA(LATENT, 2, 8, 20, 4, True, "fp8"), ffn=FINE
    ),
    "delta": lambda: regard.build("llama", **DENSE, attention=(DELTA, DELTA)),
    "delta_channels": lambda: regard.build("llama", **DENSE, attention=CHANNELS),
    "ssd_gqa": lambda: regard.build("llama", **DENSE, attention=(DUAL, GROUPED)),
    "ssd_alone": lambda: regard.build("llama", **SMALL, attention=DUAL, ffn=None),
    "delta_gqa": lambda: regard.build("llama", **DENSE, attention=(DELTA, GROUPED)),
    "compressed": lambda: regard.build("llama", **DENSE, attention=COMPRESSED),
    "streams": lambda: regard.build("llama", **DENSE, attention=GROUPED, streams=Streams(3, 4)),
    "per_layer": lambda: regard.build(
        "llama", **DENSE, attention=GROUPED, per_layer=PerLayer(11, VOCAB)
    ),
    "borrowing": lambda: regard.build("llama", **DENSE, attention=GROUPED, borrowing=1),
    "elman": lambda: RecurrentConfig(VOCAB, 30, 2, "elman").make(),
    "gru_dot": lambda: RecurrentConfig(VOCAB, 30, 1, "gru", "scaled_dot").make(),
    "gru_additive": lambda: RecurrentConfig(VOCAB, 30, 1, "gru", "additive").make(),
    "lstm_bilinear": lambda: RecurrentConfig(VOCAB, 30, 2, "lstm", "bilinear").make(),
    "bahdanau": lambda: Seq2SeqConfig(VOCAB, VOCAB, 30, bidirectional=True).make(),
    "luong": lambda: Seq2SeqConfig(VOCAB, VOCAB, 30, 2, "lstm", "bilinear", True).make(),
    "hard": lambda: RecurrentConfig(VOCAB, 30, 1, "gru", "hard", combine="linear").make(),
    "sum": lambda: Seq2SeqConfig(VOCAB, VOCAB, 30, 1, "gru", "sum", True).make(),
    "sutskever": lambda: Seq2SeqConfig(VOCAB, VOCAB, 30, 2, "elman", None).make(),
    "t5": lambda: regard.build("t5-small", **PAIR),
    "t5_gated": lambda: regard.build("t5-v1.1-small", **PAIR),
    "bart": lambda: regard.build("bart-base", **PAIR),
    "marian": lambda: regard.build("marian", **PAIR),
    "captioner": lambda: regard.build("captioner", **PAIR, size=SIDE, patch=4),
}
FEW = ["gpt2", "window", "deepseek", "dsa_fp8", "delta_gqa", "lstm_bilinear", "bahdanau", "t5"]
BEAMS = ("llama", "deepseek", "dsa_mla", "lstm_bilinear", "bahdanau", "t5", "captioner")
WAYS: dict[str, dict[str, Any]] = {
    "all at once": {"layout": "contiguous"},
    "three rows, odd chunks and pages, shared prefixes": {"rows": 3, "chunk": 7, "page": 3},
    "no shared prefixes, preempted": {"prefix": False, "chunk": 32, "page": 2, "pages": 30},
}
# Whose sources lie in pages too: with as many as the largest needs, texts that were let in miss one.
SOURCES = ["t5", "t5_gated", "bart", "marian"]
KINDS = [
    {"temperature": 0.9, "top_p": 0.95, "seed": 3},
    {},
    {"temperature": 1.2, "top_k": 30, "min_p": 0.01, "min_new_tokens": 4},
    {"temperature": 1.0, "min_p": 0.05, "repetition_penalty": 1.1},
]
Answers = list[tuple[list[int], list[float], float]]


class Watched(Engine):
    """Counts how often a request was put back for want of pages."""

    preempted = 0

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        preempt = self.scheduler.preempt_last

        def noted() -> None:
            self.preempted += 1
            preempt()

        self.scheduler.preempt_last = noted  # type: ignore[method-assign]


@functools.cache
def build(name: str, dtype: torch.dtype) -> Any:
    """A model whose weights matter: norms away from 1, biases away from 0, logits that differ."""
    torch.manual_seed(0)
    model = FAMILIES[name]().eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(std=1.3 * p.shape[-1] ** -0.5)
            else:
                p.add_(0.3 * torch.randn_like(p))
    return model.to(dtype)


def texts() -> list[list[int]]:
    g = torch.Generator().manual_seed(1)
    found = [torch.randint(VOCAB, (n,), generator=g).tolist() for n in (3, 40, 17, 33, 1, 26)]
    found[3][:12] = found[1][:12]  # something for the prefix cache to find
    return found


def source(name: str, i: int) -> Tensor:
    """What an encoder reads: the text, or an image made of its number."""
    if name == "captioner":
        return torch.randn(3, SIDE, SIDE, generator=torch.Generator().manual_seed(i))
    return torch.tensor(texts()[i])


def ask(
    name: str, model: Any, which: Iterable[int], beams: int = 1, **options: Any
) -> tuple[dict[int, Answers], Watched]:
    """The answers to some requests, in the order in which they are given; each has settings of its own."""
    engine = Watched(model, backend="ordered", **options)
    numbers = {}
    for i in which:
        kind = KINDS[i % len(KINDS)] if beams == 1 else {"n_best": 2, "length_penalty": 0.7}
        settings = Settings(max_new_tokens=12 if beams == 1 else 9, beams=beams, **kind)  # type: ignore[arg-type]
        if hasattr(model, "encode"):
            request = Request([0], settings, source(name, i), key=i)
        else:
            request = Request(texts()[i], settings, key=i)
        numbers[engine.submit(request)] = i
    done = {e.request: e.done for e in engine.run() if e.done is not None}
    answers = {i: [(r.ids, r.logprobs, r.score) for r in done[n]] for n, i in numbers.items()}
    return answers, engine


def check(name: str, dtype: torch.dtype, ways: dict[str, dict[str, Any]], beams: int = 1) -> None:
    model, each = invariant(build(name, dtype)), range(len(texts()))
    alone = {i: ask(name, model, [i], beams, layout="contiguous")[0][i] for i in each}
    assert len(set(map(str, alone.values()))) == len(each)  # else equality would say little
    for way, options in ways.items():
        if name in SOURCES and "prefix" in options:
            options = options | {"pages": 26}
        order = random.Random(way).sample(each, len(each))
        together, engine = ask(name, model, order, beams, **options)
        assert together == alone, way
        assert "preempted" not in way or engine.pool is None or engine.preempted, (
            "no page was missed"
        )


@pytest.mark.parametrize(
    "name, dtype",
    wide(
        [(name, dtype) for name in FAMILIES for dtype in (torch.float32, torch.bfloat16)],
        keep=[*((name, torch.float32) for name in FEW), ("deepseek", torch.bfloat16)],
    ),
)
def test_invariant_bits_do_not_depend_on_company(name: str, dtype: torch.dtype) -> None:
    ways = list(WAYS.items())
    # bf16 rounds otherwise, but runs the same way: one of them tells.
    check(name, dtype, dict(ways if dtype is torch.float32 else ways[-1:]))


@pytest.mark.parametrize("name", wide(BEAMS, keep=["llama", "bahdanau", "t5"]))
def test_invariant_beams_do_not_depend_on_company(name: str) -> None:
    ways = {"all at once": {}, "preempted": {"page": 2, "pages": 36}}
    check(name, torch.float32, ways, beams=3)


@pytest.mark.parametrize("name", ["mixtral", "delta_gqa"])
def test_invariant_bits_survive_speculation(name: str) -> None:
    """Guessed tokens make longer products and other tiles, states go back; a row's bits stay."""
    model = invariant(build(name, torch.float32))
    text = [5, 9, 2, 5, 9, 2, 5, 9]
    found = []
    for lookup in (0, 4):
        engine = Engine(model, backend="ordered")
        engine.submit(Request(text, Settings(max_new_tokens=30, lookup=lookup)))
        found += [(e.done[0].ids, e.done[0].logprobs) for e in engine.run() if e.done]
    assert found[0] == found[1]


@pytest.mark.parametrize("name", FAMILIES)
def test_invariant_model_equals_the_model(name: str) -> None:
    """Other sums of the same numbers: float32 rounding after two layers, and no more."""
    model = build(name, torch.float32)
    ids, more = torch.randint(VOCAB, (2, 25)), {}
    if hasattr(model, "encode"):
        more = {"source": torch.stack([source(name, i)[:17] for i in (1, 2)])}
    with torch.no_grad():
        steady, plain = invariant(model)(ids, backend="ordered", **more), model(ids, **more)
    if name == "dsa_fp8":  # one key chosen otherwise changes a row: rounding of 8 bits ties often
        assert ((steady - plain).abs().amax(-1) < 1e-3).float().mean() > 0.9
    else:
        torch.testing.assert_close(steady, plain, rtol=1e-3, atol=1e-4)
