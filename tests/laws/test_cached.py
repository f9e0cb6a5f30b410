"""Decoding with a cache equals the forward without one, for every mechanism in every layout."""

import pytest
import torch
from torch import Tensor

from regard.attention import GQA, MLA
from regard.block import Tower
from regard.cache import LAYOUTS, Cache
from regard.layers import MLP
from regard.models import EncoderDecoder, EncoderDecoderConfig, Tokens, Transformer
from regard.position import Alibi, Rope, Sinusoidal, T5Bias
from tests.laws.mechanisms import DIM, FEW, TIGHT, TOWERS, VOCAB, decoder, ids, options, stir
from tests.wide import crossed, wide

pytestmark = [pytest.mark.parametrize("layout", LAYOUTS)]
mechanisms = pytest.mark.parametrize("name", wide(TOWERS, keep=FEW))
EXACT = [n for n in TOWERS if "dsa" not in n and n != "mixed"]


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, **TIGHT)


def fresh(model: Transformer, layout: str, batch: int, longest: int) -> Cache:
    return model.cache(batch, layout, **options(model, layout, longest))


def feed(model: Transformer, x: Tensor, cache: Cache, sizes: list[int]) -> Tensor:
    return torch.cat([model(part, cache=cache) for part in x.split(sizes, 1)], 1)


@mechanisms
@torch.no_grad()
def test_cached_decode_equals_full_forward(name: str, layout: str) -> None:
    model, x = decoder(name), ids(2, 9)
    close(feed(model, x, fresh(model, layout, 2, 9), [1] * 9), model(x))


@mechanisms
@torch.no_grad()
def test_cached_prefill_in_chunks_equals_full_forward(name: str, layout: str) -> None:
    model, x = decoder(name), ids(2, 16)
    close(feed(model, x, fresh(model, layout, 2, 16), [5, 1, 3, 5, 1, 1]), model(x))


@mechanisms
@torch.no_grad()
def test_cached_ragged_rows_equal_each_row_alone(name: str, layout: str) -> None:
    """Rows of 4, 1 and 5 tokens, then 2, 5 and 0 more, then one each."""
    model, sizes = decoder(name), [[4, 1, 5], [2, 5, 0], [1, 1, 1]]
    rows = [ids(1, sum(n), seed=i) for i, n in enumerate(zip(*sizes))]
    cache, out, done = fresh(model, layout, 3, 7), [[], [], []], [0, 0, 0]
    for added in sizes:
        x = torch.zeros(3, max(added), dtype=torch.long)
        for i, n in enumerate(added):
            x[i, :n] = rows[i][0, done[i] : done[i] + n]
        logits = model(x, added, cache=cache)
        for i, n in enumerate(added):
            out[i].append(logits[i, :n])
            done[i] += n
    assert cache.lengths.tolist() == done
    for row, parts in zip(rows, out):
        close(torch.cat(parts), model(row)[0])


@mechanisms
@torch.no_grad()
def test_cached_decode_after_rewind_equals_full_forward(name: str, layout: str) -> None:
    """As a rejected draft: 3 tokens are taken back and other ones follow."""
    model, x, wrong = decoder(name), ids(2, 12), ids(2, 12, seed=2)
    cache = fresh(model, layout, 2, 12)
    feed(model, torch.cat([x[:, :7], wrong[:, 7:10]], 1), cache, [5, 2, 3])
    cache.rewind(3)
    close(feed(model, x[:, 7:], cache, [1, 4]), model(x)[:, 7:])


@mechanisms
@torch.no_grad()
def test_cached_decode_after_ragged_rewind_equals_each_row_alone(name: str, layout: str) -> None:
    model, x, y = decoder(name), ids(2, 8), ids(2, 2, seed=3)
    cache = fresh(model, layout, 2, 12)
    feed(model, x, cache, [5, 3])
    cache.rewind(torch.tensor([3, 1]))
    logits = model(y, cache=cache)
    for i, kept in enumerate((5, 7)):
        close(logits[i], model(torch.cat([x[i, :kept], y[i]])[None])[0, kept:])


@mechanisms
@torch.no_grad()
def test_cached_decode_after_fork_equals_full_forward(name: str, layout: str) -> None:
    """Beams: rows are copied and dropped, the branches and the old cache go on without touching each other."""
    model, x, more = decoder(name), ids(2, 7), ids(3, 4, seed=3)
    cache, parents = fresh(model, layout, 2, 12), torch.tensor([1, 1, 0])
    feed(model, x, cache, [5, 2])
    branch = cache.fork(parents)
    ours = feed(model, more, branch, [1, 2, 1])
    close(ours, model(torch.cat([x[parents], more], 1))[:, 7:])
    close(model(more[:2], cache=cache), model(torch.cat([x, more[:2]], 1))[:, 7:])


@torch.no_grad()
def test_cached_decode_after_free_equals_full_forward(layout: str) -> None:
    model, x = decoder("gqa_rope"), ids(2, 6)
    cache = fresh(model, layout, 2, 12)
    feed(model, ids(2, 8, seed=2), cache, [5, 3])
    cache.free()
    close(feed(model, x, cache, [5, 1]), model(x))


@pytest.mark.parametrize("name", ["gqa_rope", "window", "mla", "dsa_mla"])
@torch.no_grad()
def test_cached_decode_equals_full_forward_in_float32(name: str, layout: str) -> None:
    model, x = decoder(name).float(), ids(2, 9)
    ours = feed(model, x, fresh(model, layout, 2, 9), [4, 1, 4])
    assert (ours - model(x)).abs().max() < 2e-4  # logits of size 10, float32


@pytest.mark.parametrize("name", wide(EXACT, keep=[n for n in FEW if n in EXACT]))
@torch.no_grad()
def test_cached_decode_in_bfloat16_is_no_further_off_than_uncached(name: str, layout: str) -> None:
    """From the same weights in float64; without an indexer, whose choices rounding may turn."""
    model, x = decoder(name).bfloat16(), ids(2, 9)
    cache = fresh(model, layout, 2, 9)
    ours, plain = feed(model, x, cache, [4, 1, 1, 3]), model(x)
    assert ours.dtype == torch.bfloat16
    want = model.double()(x)
    off, allowed = ((y.double() - want).square().mean().sqrt() for y in (ours, plain))
    assert off < 1.3 * allowed


# --- encoder-decoder: the source is encoded once ------------------------------------------------------------------

CROSS = {"mha": GQA(3), "mqa": GQA(4, 1, bias=True), "mla": MLA(3, latent=9, query_latent=7)}
SELF = {
    "plain": {"attention": GQA(3)},
    "rope": {"attention": GQA(6, 2, rope=Rope())},
    "t5": {"attention": GQA(4), "relative": T5Bias(4, 8, 16, causal=True)},
    "alibi": {"attention": MLA(3, latent=10), "relative": Alibi(3)},
}


def pair(cross: str, own: str) -> EncoderDecoder:
    tokens, ffn = Tokens(VOCAB, Sinusoidal(64)), MLP(20, "relu")
    encoder = Tower(DIM, 2, GQA(3), ffn, causal=False)
    config = EncoderDecoderConfig(
        tokens, encoder, tokens, Tower(DIM, 2, ffn=ffn, cross=CROSS[cross], **SELF[own])
    )
    return stir(EncoderDecoder(config))


@pytest.mark.parametrize("cross, own", crossed(CROSS, SELF))
@torch.no_grad()
def test_cached_cross_attention_is_written_once_and_equals_uncached(
    cross: str, own: str, layout: str
) -> None:
    model, x, source, lengths = pair(cross, own), ids(3, 7), ids(3, 6, seed=2), [6, 2, 5]
    want = model(x, source=source, source_lengths=lengths)
    cache = fresh(model, layout, 3, 9)
    out = [model(x[:, :4], source=source, source_lengths=lengths, cache=cache)]
    assert cache.cross is not None and cache.cross.frozen
    out += [model(x[:, i : i + 1], cache=cache) for i in range(4, 7)]
    assert cache.cross.lengths.tolist() == lengths
    close(torch.cat(out, 1), want)


@torch.no_grad()
def test_cached_cross_attention_forks_with_the_beams(layout: str) -> None:
    model, x, source, more = pair("mha", "rope"), ids(2, 4), ids(2, 6, seed=2), ids(3, 2, seed=3)
    cache, parents = fresh(model, layout, 2, 9), torch.tensor([1, 0, 1])
    model(x, source=source, source_lengths=[6, 3], cache=cache)
    branch = cache.fork(parents)
    lengths = torch.tensor([6, 3])[parents]
    want = model(torch.cat([x[parents], more], 1), source=source[parents], source_lengths=lengths)
    close(model(more, cache=branch), want[:, 4:])
