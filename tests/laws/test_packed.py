"""A packed document has the logits and the gradients of the document alone: for every mechanism, every kind of
position, every mask that keeps documents apart, on every backend."""

import pytest
import torch
from torch import Tensor

from regard.attention import GQA, attend, core
from regard.block import Tower
from regard.layers import LM, MLP
from regard.mask import Causal, Documents, Full, Mask, Prefix, Span, Visible
from regard.models import Tokens, Transformer, TransformerConfig
from regard.position import Alibi, Learned, LongRope, Rope, Sinusoidal, T5Bias
from tests.laws.mechanisms import DIM, TIGHT, TOWERS, VOCAB, decoder, ids, stir
from tests.laws.test_positions import ROPES

# Rows of 14 tokens; the last two of the second are padding.
SIZES = [[5, 1, 8], [3, 9]]
LONG = LongRope(short=(1.0, 1.5, 1.1, 2.0), long=(3.0, 2.0, 4.0, 5.0), original_len=6, factor=4.0)
VECTORS = {
    "learned": Learned(14),
    "learned_offset": Learned(14, offset=2),
    "learned_skip": Learned(14, offset=2, skip=1),
    "sinusoidal": Sinusoidal(14),
    "sinusoidal_halves": Sinusoidal(14, layout="halves"),
    "sinusoidal_fairseq": Sinusoidal(14, layout="fairseq"),
}
BIASES = {"t5": T5Bias(3, 8, 6), "t5_causal": T5Bias(3, 8, 6, causal=True), "alibi": Alibi(3)}
POSITIONS = [*VECTORS, *BIASES, *ROPES, "longrope"]
MASKS = {"causal": Causal(), "both ways": Full()}


def model_of(position: str, causal: bool) -> Transformer:
    """The smallest that has this kind of position."""
    torch.manual_seed(3)
    rope = {**ROPES, "longrope": Rope(scaling=LONG)}.get(position)
    tower = Tower(DIM, 2, GQA(3, rope=rope), MLP(20), causal=causal, relative=BIASES.get(position))
    tokens = Tokens(VOCAB, VECTORS.get(position))
    return stir(Transformer(TransformerConfig(tokens, tower, LM(tied=False))))


def packed(seed: int = 1) -> tuple[Tensor, Tensor]:
    """ids and their documents (2 14)."""
    doc = torch.full((2, 14), -1)
    for row, sizes in enumerate(SIZES):
        doc[row, : sum(sizes)] = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return ids(2, 14, seed), doc


def check(model: Transformer, mask: Mask | None, backend: str = "sdpa", learn: bool = True) -> None:
    """`mask` is what a document alone is read with, beside `Documents` where several are packed."""
    x, doc = packed()
    weights = torch.randn(2, 14, VOCAB, generator=torch.Generator().manual_seed(5)).double()
    with torch.set_grad_enabled(learn):
        both = Documents(doc) if mask is None else mask & Documents(doc)
        out = model(x, mask=both, backend=backend)
        total = torch.zeros([], dtype=out.dtype)
        for row in range(2):
            for number in range(int(doc[row].max()) + 1):
                here = doc[row] == number
                text = model(x[row : row + 1, here], mask=mask, backend=backend)[0]
                torch.testing.assert_close(out[row, here], text, **TIGHT)
                total = total + (text * weights[row, here]).sum()
    if not learn:
        return
    parameters = dict(model.named_parameters())
    want = torch.autograd.grad(total, parameters.values(), allow_unused=True)
    real = weights * (doc >= 0)[..., None]
    ours = torch.autograd.grad((out * real).sum(), parameters.values(), allow_unused=True)
    for name, a, b in zip(parameters, ours, want):
        assert (a is None) == (b is None), name
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-8, msg=name)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("position", POSITIONS)
def test_packed_is_alone_for_every_kind_of_position(position: str, mask: str) -> None:
    check(model_of(position, mask == "causal"), MASKS[mask])


@pytest.mark.parametrize("name", TOWERS)
def test_packed_is_alone_for_every_mechanism(name: str) -> None:
    check(decoder(name), Causal())


@pytest.mark.parametrize("backend", ["reference", "online", "ordered"])
@pytest.mark.parametrize("position", ["learned", "sinusoidal", "alibi", "half"])
def test_packed_is_alone_on_every_backend(position: str, backend: str) -> None:
    check(model_of(position, True), Causal(), backend, learn=backend == "reference")


@pytest.mark.parametrize("position", ["learned_skip", "sinusoidal", "t5", "half"])
@torch.no_grad()
def test_packed_prefixes_are_those_of_each_document_alone(position: str) -> None:
    """A prefix of two tokens in each document, that sees both ways."""
    model, (x, doc) = model_of(position, True), packed()
    ends = torch.zeros_like(doc)
    for row in range(2):
        for number in range(int(doc[row].max()) + 1):
            here = doc[row] == number
            ends[row, here] = int(here.nonzero()[0, 0]) + 2
    out = model(x, mask=Prefix(ends) & Documents(doc))
    for row in range(2):
        for number in range(int(doc[row].max()) + 1):
            here = doc[row] == number
            alone = model(x[row : row + 1, here], mask=Prefix(torch.tensor([2])))[0]
            torch.testing.assert_close(out[row, here], alone, **TIGHT)


@pytest.mark.parametrize("causal", [True, False])
def test_kernel_by_document_is_given_what_stands_for_the_mask(
    causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's, on its definition: one document after the other. It is left out where it lacks a word for something."""
    calls: list[int] = []

    def one_by_one(
        q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, causal: bool, scale: float
    ) -> Tensor:
        q, k, v = (x.transpose(1, 2).flatten(0, 1)[None] for x in (q, k, v))
        mask, out = Causal() if causal else Full(), []
        for begin, end in ends.unfold(0, 2, 1).tolist():
            part, run = slice(begin, end), Span.run(0, end - begin)
            seen = Visible(mask, run, run)
            assert 0 < end - begin <= longest
            out.append(attend(q[:, part], k[:, part], v[:, part], seen, scale=scale))
        calls.append(len(ends) - 1)
        return torch.cat(out, 1)[0].unflatten(0, (2, 14)).transpose(1, 2)

    monkeypatch.setattr(core, "side_by_side", lambda q, v: True)
    monkeypatch.setattr(core, "by_document", one_by_one)
    (_, doc), run = packed(), Span.run(0, 14)
    q, k, v = (torch.randn(2, 14, heads, 6).double() for heads in (4, 2, 2))
    documents = Causal() & Documents(doc) if causal else Documents(doc)
    mask, real = Visible(documents, run, run), (doc >= 0)[:, :, None, None]
    for more in (
        {},
        {"scale": 0.3},
        {"softcap": 2.0},
        {"bias": torch.randn(2, 4, 14, 14).double()},
    ):
        found = attend(q, k, v, mask, **more)  # type: ignore[arg-type]
        want = attend(q, k, v, mask.tensor(), backend="reference", **more)  # type: ignore[arg-type]
        torch.testing.assert_close(found * real, want * real, **TIGHT)
    # Without and with a scale; the documents of both rows, and the padding behind the second as one.
    assert calls == [6, 6]
    attend(q, k, v, mask, dropout=0.5)
    attend(q, k, v, mask.tensor())
    one = Documents(doc[:1])  # for both rows
    attend(q, k, v, Visible(Causal() & one if causal else one, run, run))
    assert calls == [6, 6]
