"""Objectives: padding, packing and prefixes change nothing that they should not; what is counted is what is learned."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from regard.attention import GQA, MLA
from regard.block import Tower
from regard.data.feed import IGNORE, Batch
from regard.errors import UsageError
from regard.layers import LM, MLM, MLP, Answer, Classify, Tag
from regard.models import (
    EncoderDecoder,
    EncoderDecoderConfig,
    Patches,
    Recurrent,
    RecurrentConfig,
    Seq2Seq,
    Seq2SeqConfig,
    Tokens,
    Transformer,
    TransformerConfig,
)
from regard.position import Rope, Sinusoidal
from regard.training.losses import Smoothing, masked_lm_loss, smoothed_loss
from regard.training.objectives import answer, causal, classify, masked, prefix, seq2seq

V, M = 17, 12
TIGHT = {"rtol": 1e-10, "atol": 1e-10}  # float64


def decoder(attention: Any = None) -> Transformer:
    tower = Tower(M, 2, attention or GQA(3, rope=Rope()), MLP(16))
    return Transformer(TransformerConfig(Tokens(V), tower, LM())).double()


def encoder(head: Any) -> Transformer:
    tower = Tower(M, 2, GQA(3), MLP(16), causal=False)
    return Transformer(TransformerConfig(Tokens(V, Sinusoidal(32)), tower, head)).double()


def pair() -> EncoderDecoder:
    tokens = Tokens(V, Sinusoidal(32))
    towers = (
        Tower(M, 1, GQA(3), MLP(16), causal=False),
        Tower(M, 1, GQA(3), MLP(16), cross=GQA(3)),
    )
    return EncoderDecoder(EncoderDecoderConfig(tokens, towers[0], tokens, towers[1])).double()


def ids(*shape: int) -> Tensor:
    return torch.randint(V, shape)


def padded(parts: list[Tensor], fill: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=fill)


def ragged(*sizes: int) -> tuple[list[Tensor], list[Tensor], Batch]:
    """Rows of ids and labels, and the batch they make; padding is a real word, so that reading it would show."""
    x, y = ([ids(n) for n in sizes] for _ in range(2))
    lengths = torch.tensor(sizes)
    return x, y, Batch(padded(x, 5), padded(y, IGNORE), lengths)


# --- language models ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [
        decoder(),
        decoder(MLA(3, latent=8)),
        Recurrent(RecurrentConfig(V, M, attention="dot")).double(),
    ],
    ids=["gqa", "mla", "recurrent"],
)
def test_causal_loss_of_padded_rows_is_the_sum_of_the_rows(model: Any) -> None:
    x, y, batch = ragged(9, 4, 1)
    alone = [masked_lm_loss(model(a[None]), b[None])[0] for a, b in zip(x, y)]
    total, count = causal(model, batch)
    torch.testing.assert_close(total, sum(alone), **TIGHT)
    assert count == 14 == batch.tokens


@pytest.mark.parametrize(
    "attention", [GQA(3, rope=Rope()), MLA(3, latent=8, rope_dim=4, rope=Rope())]
)
def test_causal_loss_of_packed_documents_does_not_leak(attention: Any) -> None:
    """RoPE knows distances only: a document reads the same wherever it stands in a row."""
    model, (x, y, _) = decoder(attention), ragged(6, 3, 5)
    doc = torch.tensor([[0] * 6 + [1] * 3 + [2] * 5 + [-1] * 2])
    packed = Batch(
        torch.cat([*x, ids(2)])[None], torch.cat([*y, torch.tensor([IGNORE] * 2)])[None], doc=doc
    )
    alone = [masked_lm_loss(model(a[None]), b[None])[0] for a, b in zip(x, y)]
    torch.testing.assert_close(causal(model, packed)[0], sum(alone), **TIGHT)
    leaky = causal(model, Batch(packed.ids, packed.labels))[0]
    assert (leaky - sum(alone)).abs() > 1e-3


def test_causal_loss_refuses_packed_documents_for_a_recurrent_model() -> None:
    batch = Batch(ids(1, 4), ids(1, 4), doc=torch.zeros(1, 4).long())
    with pytest.raises(UsageError, match="recurrent"):
        causal(Recurrent(RecurrentConfig(V, M)), batch)


def test_masked_loss_counts_selected_tokens_of_real_rows_only() -> None:
    model, (x, _, batch) = encoder(MLM()), ragged(9, 4)
    batch.labels[:, ::2] = IGNORE
    alone = [masked_lm_loss(model(a[None]), b[None, : len(a)])[0] for a, b in zip(x, batch.labels)]
    total, count = masked(model, batch)
    torch.testing.assert_close(total, sum(alone), **TIGHT)
    assert count == 4 + 2


def test_masked_loss_keeps_packed_documents_apart() -> None:
    model, a, b = encoder(MLM()), ids(1, 5), ids(1, 5)
    doc = torch.tensor([[0] * 5 + [1] * 5])

    def loss(rest: Tensor) -> Tensor:
        labels = torch.cat([a, torch.full_like(a, IGNORE)], 1)
        return masked(model, Batch(torch.cat([a, rest], 1), labels, doc=doc))[0]

    torch.testing.assert_close(loss(b), loss(b.flip(1)), **TIGHT)


# --- from sequence to sequence ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "smoothing", [Smoothing(0.0), Smoothing(0.1), Smoothing(0.1, "V")], ids=str
)
@pytest.mark.parametrize(
    "model",
    [pair(), Seq2Seq(Seq2SeqConfig(V, V, M, bidirectional=True)).double()],
    ids=["transformer", "recurrent"],
)
def test_seq2seq_loss_of_padded_pairs_is_the_sum_of_the_pairs(
    model: Any, smoothing: Smoothing
) -> None:
    x, y, target = ragged(7, 3, 5)
    z, _, source = ragged(4, 8, 2)
    batch = Batch(target.ids, target.labels, target.lengths, source.ids, source.lengths)
    alone = []
    for a, b, c in zip(x, y, z):
        logits = model(a[None], source=c[None])
        alone.append(smoothed_loss(logits, b[None], smoothing.eps, smoothing.over)[0])
    total, count = seq2seq(model, batch, smoothing)
    torch.testing.assert_close(total, sum(alone), **TIGHT)
    assert count == 15


def test_prefix_loss_counts_only_what_the_prefix_could_not_see() -> None:
    model, x = decoder(), ids(2, 8)
    batch = Batch(x[:, :-1], x[:, 1:], prefix=torch.tensor([[3] * 7, [1] * 7]))
    total, count = prefix(model, batch)
    assert count == (7 - 2) + 7
    # what is counted does not move when a counted word changes that is not read before it
    other = x.clone()
    other[0, 7] = (other[0, 7] + 1) % V
    labels = batch.labels.clone()
    labels[0, -1] = IGNORE
    less = prefix(model, Batch(x[:, :-1], labels, prefix=batch.prefix))[0]
    same = prefix(model, Batch(other[:, :-1], labels, prefix=batch.prefix))[0]
    torch.testing.assert_close(less, same, **TIGHT)
    assert total > less


def test_prefix_loss_with_a_prefix_of_one_token_is_causal() -> None:
    model, batch = decoder(), Batch(ids(2, 8), ids(2, 8), prefix=torch.ones(2, 8).long())
    for mine, theirs in zip(prefix(model, batch), causal(model, Batch(batch.ids, batch.labels))):
        torch.testing.assert_close(mine, theirs)
    two = Batch(batch.ids, batch.labels, prefix=torch.full((2, 8), 5))
    hidden = model.hidden(batch.ids)[:, 4:]
    assert not torch.allclose(
        prefix(model, two)[0], masked_lm_loss(model.logits(hidden), batch.labels[:, 4:])[0]
    )


def test_prefix_loss_needs_a_prefix() -> None:
    with pytest.raises(UsageError, match="batch.prefix"):
        prefix(decoder(), Batch(ids(1, 4), ids(1, 4)))


# --- labels -------------------------------------------------------------------------------------------------------


def test_classify_loss_of_texts_and_images() -> None:
    model, (x, _, batch) = encoder(Classify(4)), ragged(9, 4, 2)
    labels = torch.tensor([3, IGNORE, 1])
    want = [cross_entropy(model(a[None]), b[None]) for a, b in zip(x, labels) if b != IGNORE]
    total, count = classify(model, Batch(batch.ids, labels, batch.lengths))
    torch.testing.assert_close(total, sum(want), **TIGHT)
    assert count == 2
    tower = Tower(M, 1, GQA(3), MLP(16), causal=False)
    vit = Transformer(TransformerConfig(Patches(8, 4, 1), tower, Classify(4))).double()
    pictures, labels = torch.randn(3, 1, 8, 8).double(), torch.tensor([0, 1, 2])
    total, count = classify(vit, Batch(pictures, labels), Smoothing(0.1, "V"))
    want_ = cross_entropy(vit(pictures), labels, label_smoothing=0.1, reduction="sum")
    torch.testing.assert_close(total, want_, **TIGHT)


@pytest.mark.parametrize("eps", [0.0, 0.1])
def test_classify_loss_of_an_image_with_a_guest_weighs_both_classes(eps: float) -> None:
    tower = Tower(M, 1, GQA(3), MLP(16), causal=False)
    vit = Transformer(TransformerConfig(Patches(8, 4, 1), tower, Classify(4))).double()
    pictures, share = torch.randn(3, 1, 8, 8).double(), torch.tensor([0.0, 0.25, 1.0])
    labels, guests = torch.tensor([0, 1, IGNORE]), torch.tensor([3, 2, 1])
    total, count = classify(
        vit, Batch(pictures, labels, pasted_labels=guests, pasted_area=share), Smoothing(eps, "V")
    )
    logits = vit(pictures)

    def one(row: int, label: int) -> Tensor:
        return cross_entropy(logits[row], torch.tensor(label), label_smoothing=eps)

    torch.testing.assert_close(total, one(0, 0) + 0.75 * one(1, 1) + 0.25 * one(1, 2), **TIGHT)
    assert count == 2


def test_tag_loss_of_padded_rows_is_the_sum_of_the_rows() -> None:
    model, (x, _, batch) = encoder(Tag(4)), ragged(9, 4)
    labels = [torch.randint(4, (len(a),)) for a in x]
    want = sum(cross_entropy(model(a[None])[0], b, reduction="sum") for a, b in zip(x, labels))
    total, count = classify(model, Batch(batch.ids, padded(labels, IGNORE), batch.lengths))
    torch.testing.assert_close(total, want, **TIGHT)
    assert count == 13


def test_answer_loss_is_start_and_end_over_the_rows_own_tokens() -> None:
    model, (x, _, batch) = encoder(Answer()), ragged(9, 4, 3)
    labels = torch.tensor([[2, 5], [0, 3], [IGNORE, IGNORE]])  # the last has no answer
    want = torch.zeros(()).double()
    for a, (start, end) in list(zip(x, labels))[:2]:
        logits = model(a[None])[0]
        want += cross_entropy(logits[:, 0], start) + cross_entropy(logits[:, 1], end)
    total, count = answer(model, Batch(batch.ids, labels, batch.lengths))
    torch.testing.assert_close(total, want, **TIGHT)
    assert count == 4


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_labels_of_two_texts_are_those_of_a_model_that_knows_which_is_which(count: int) -> None:
    """Where a model has segment types it reads them; where it has fewer than two there is nothing to read."""
    tower = Tower(M, 1, GQA(3), MLP(16), causal=False)
    tokens = Tokens(V, Sinusoidal(32), types=count)
    model: Any = Transformer(TransformerConfig(tokens, tower, Classify(4))).double()
    x, y, types = ids(3, 8), torch.tensor([3, 0, 1]), torch.arange(8).expand(3, -1) // 4
    logits = model(x) if count < 2 else model(x, types=types)
    total, _ = classify(model, Batch(x, y, types=types))
    torch.testing.assert_close(total, cross_entropy(logits, y, reduction="sum"), **TIGHT)
    if count > 1:
        assert not torch.allclose(logits, model(x))
    without, _ = classify(model, Batch(x, y))
    torch.testing.assert_close(without, cross_entropy(model(x), y, reduction="sum"), **TIGHT)
