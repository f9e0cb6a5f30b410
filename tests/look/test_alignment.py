"""What copies a text must look at the word that it writes: the probe finds the diagonal while small models decode."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import regard
from regard.data.feed import Batch
from regard.see.probe import Probe
from regard.training.objectives import seq2seq

START, END, FIRST, VOCAB = 0, 2, 3, 23
SHORTEST, LONGEST = 3, 8
SMALL: dict[str, dict[str, Any]] = {
    "vaswani-base": dict(dim=48, heads=4, ffn_dim=96, layers=1, max_len=16, dropout=0.0),
    "bahdanau": dict(dim=48, layers=1, source_vocab=VOCAB),
}
LEARN = {"vaswani-base": (400, 4e-3), "bahdanau": (250, 1e-2)}  # steps, rate
families = pytest.mark.parametrize("name", SMALL)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """So small a model is slower on more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def made(name: str) -> Any:
    torch.manual_seed(0)
    return regard.build(name, vocab=VOCAB, **SMALL[name])


def copies(rows: int, size: int, g: torch.Generator) -> Batch:
    """Texts of random words, to be written as they are."""
    words = torch.randint(FIRST, VOCAB, (rows, size), generator=g)
    ends = torch.cat([words, torch.full((rows, 1), END)], 1)
    return Batch(torch.cat([torch.full((rows, 1), START), words], 1), ends, source=ends)


@functools.cache
def trained(name: str) -> Any:
    """A few seconds of teacher forcing, the rate rising for 50 steps and falling to nothing."""
    model, g, (steps, rate) = made(name).train(), torch.Generator().manual_seed(0), LEARN[name]
    optimizer = torch.optim.Adam(model.parameters())
    for k in range(steps):
        size = int(torch.randint(SHORTEST, LONGEST + 1, (), generator=g))
        loss, count = seq2seq(model, copies(64, size, g))
        optimizer.zero_grad()
        (loss / count).backward()
        optimizer.param_groups[0]["lr"] = rate * min(1, (k + 1) / 50) * (1 - k / steps)
        optimizer.step()
    return model.eval()


def last_cross(probe: Probe) -> list[torch.Tensor]:
    """The maps of the last cross-attention, one for each call."""
    return [calls for site, calls in probe.maps.items() if site.endswith(".cross")][-1]


def decoded(model: Any, **settings: Any) -> tuple[float, float]:
    """Of 24 texts it has not seen: the share of words copied, and of those whose best source is their own."""
    g, right, straight, total = torch.Generator().manual_seed(1), 0, 0, 0
    for size in [*range(SHORTEST, LONGEST + 1)] * 4:
        probe, source = Probe(), copies(1, size, g).labels[0].tolist()
        asked = dict(max_new_tokens=size, eos=[], **settings)
        (result,) = regard.generate(probe.on(model), [source], **asked)
        # A map for each step; its first row, the best beam.
        weights = torch.cat([step[:1] for step in last_cross(probe)], 2).mean(1)[0]  # t s
        assert weights.shape == (size, size + 1)
        right += sum(a == b for a, b in zip(result.ids, source, strict=False))
        straight += int((weights.argmax(-1) == torch.arange(size)).sum())
        total += size
    return right / total, straight / total


@pytest.mark.parametrize("beams", [1, 3])
@families
def test_alignment_of_a_copy_is_the_diagonal(name: str, beams: int) -> None:
    words, alignment = decoded(trained(name), beams=beams)
    assert words >= 0.95 and alignment >= 0.95


@families
def test_alignment_of_a_prepared_model_is_the_diagonal(name: str) -> None:
    """The native step of a machine that has one is watched like any other."""
    words, alignment = decoded(regard.prepare(trained(name), "bf16"))
    assert words >= 0.95 and alignment >= 0.95


@families
def test_alignment_before_training_is_not_the_diagonal(name: str) -> None:
    words, alignment = decoded(made(name).eval())
    assert words < 0.5 and alignment < 0.5


@families
@torch.no_grad()
def test_alignment_of_a_padded_batch_is_the_diagonal_of_each_row(name: str) -> None:
    g, probe = torch.Generator().manual_seed(2), Probe(what=("weight", "chosen"))
    long, short = copies(1, LONGEST, g), copies(1, SHORTEST, g)
    source, fed = torch.zeros(2, LONGEST + 1).long(), torch.zeros(2, LONGEST + 1).long()
    for row, batch in enumerate((long, short)):
        size = batch.ids.shape[1]
        source[row, :size], fed[row, :size] = batch.labels[0], batch.ids[0]
    sizes = [LONGEST + 1, SHORTEST + 1]
    trained(name)(fed, sizes, source=source, source_lengths=sizes, probe=probe)
    weights = last_cross(probe)[0].mean(1)  # b t s
    for row, size in enumerate((LONGEST, SHORTEST)):
        assert weights[row, :size].argmax(-1).tolist() == [*range(size)]
    assert (weights[1, :, SHORTEST + 1 :] == 0).all()
