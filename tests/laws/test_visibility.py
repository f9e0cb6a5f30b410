"""What may not be seen has no influence: the future, padding, other documents, what lies outside a window."""

import pytest
import torch
from torch import Tensor

from regard.attention import GQA
from regard.block import Tower
from regard.layers import MLP
from regard.mask import Causal, Documents, Full, Mask, Prefix, Window
from regard.models import EncoderDecoder, EncoderDecoderConfig, Tokens
from regard.position import Sinusoidal
from regard.see.probe import Probe
from tests.laws.mechanisms import DIM, TIGHT, TOWERS, VOCAB, decoder, ids, stir

mechanisms = pytest.mark.parametrize("name", TOWERS)
BACKENDS = ["reference", "online", "sdpa"]


def influence(name: str, mask: Mask | None, size: int = 9) -> Tensor:
    """(t s): whether changing token s changes the logits at t."""
    model, x = decoder(name, layers=1), ids(1, size)
    want, rows = model(x, mask=mask), []
    for s in range(size):
        other = x.clone()
        other[0, s] = (x[0, s] + 1) % VOCAB
        rows.append((model(other, mask=mask) != want)[0].any(-1))
    return torch.stack(rows, 1)


@pytest.mark.parametrize("backend", BACKENDS)
@mechanisms
@torch.no_grad()
def test_future_token_never_changes_an_earlier_logit(name: str, backend: str) -> None:
    """Not even its last bit."""
    model, x = decoder(name), ids(2, 8)
    want = model(x, backend=backend)
    for at in (1, 4, 7):
        other = x.clone()
        other[:, at:] = ids(2, 8 - at, seed=9)
        assert torch.equal(model(other, backend=backend)[:, :at], want[:, :at])


@mechanisms
@torch.no_grad()
def test_padded_batch_equals_its_rows_alone(name: str) -> None:
    model, x, lengths = decoder(name), ids(4, 8), [8, 3, 5, 1]
    out = model(x, lengths)
    for row, n in enumerate(lengths):
        torch.testing.assert_close(out[row, :n], model(x[row : row + 1, :n])[0], **TIGHT)


@pytest.mark.parametrize("name", ["mha", "gqa_rope", "softcap", "mla", "gqa_t5", "mla_alibi"])
@torch.no_grad()
def test_padded_batch_of_an_encoder_equals_its_rows_alone(name: str) -> None:
    model, x, lengths = decoder(name, causal=False), ids(3, 8), [8, 3, 5]
    out = model(x, lengths)
    for row, n in enumerate(lengths):
        torch.testing.assert_close(out[row, :n], model(x[row : row + 1, :n])[0], **TIGHT)


@mechanisms
@torch.no_grad()
def test_padding_may_hold_any_token(name: str) -> None:
    model, x, lengths = decoder(name), ids(3, 8), [8, 3, 5]
    other = x.clone()
    other[1, 3:], other[2, 5:] = 0, VOCAB - 1
    ours, want = model(other, lengths), model(x, lengths)
    assert all(torch.equal(ours[i, :n], want[i, :n]) for i, n in enumerate(lengths))


@mechanisms
@torch.no_grad()
def test_empty_row_of_a_batch_stays_finite_and_harmless(name: str) -> None:
    model, x = decoder(name), ids(2, 6)
    out = model(x, [6, 0])
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out[:1], model(x[:1]), **TIGHT)


@torch.no_grad()
def test_padded_source_and_target_equal_their_rows_alone() -> None:
    tokens, ffn = Tokens(VOCAB, Sinusoidal(64)), MLP(20)
    model = stir(
        EncoderDecoder(
            EncoderDecoderConfig(
                tokens,
                Tower(DIM, 2, GQA(3), ffn, causal=False),
                tokens,
                Tower(DIM, 2, GQA(3), ffn, cross=GQA(4, 2)),
            )
        )
    )
    x, source, n, m = ids(3, 5), ids(3, 7, seed=2), [5, 2, 4], [3, 7, 1]
    out = model(x, n, source=source, source_lengths=m)
    for i in range(3):
        alone = model(x[i : i + 1, : n[i]], source=source[i : i + 1, : m[i]])
        torch.testing.assert_close(out[i, : n[i]], alone[0], **TIGHT)


@pytest.mark.parametrize("name", ["mha", "gqa_rope", "mla", "dsa_gqa"])
@torch.no_grad()
def test_documents_do_not_leak_into_each_other(name: str) -> None:
    """Packed rows: changing one document leaves the others' logits as they are, to the bit."""
    model, x = decoder(name), ids(2, 9)
    doc = torch.tensor([[0] * 4 + [1] * 5, [0] * 2 + [1] * 3 + [2] * 4])
    want = model(x, mask=Causal() & Documents(doc))
    other = x.clone()
    other[0, :4], other[1, 2:5] = ids(1, 4, seed=8)[0], ids(1, 3, seed=9)[0]
    ours = model(other, mask=Causal() & Documents(doc))
    assert torch.equal(ours[0, 4:], want[0, 4:])
    assert torch.equal(ours[1, :2], want[1, :2]) and torch.equal(ours[1, 5:], want[1, 5:])


STEPS = torch.arange(9)
CASES: dict[str, tuple[Mask, Tensor]] = {
    "full": (Full(), torch.ones(9, 9).bool()),
    "causal": (Causal(), torch.ones(9, 9).tril().bool()),
    "ahead": (Causal(2), torch.ones(9, 9).tril(2).bool()),
    "window": (Causal() & Window(3), torch.ones(9, 9).tril().triu(-2).bool()),
    "prefix": (
        Prefix(torch.tensor([4])),
        torch.ones(9, 9).tril().bool() | (STEPS[None] < 4).expand(9, 9),
    ),
    "documents": (
        Documents(STEPS[None] // 3),
        torch.block_diag(*[torch.ones(3, 3)] * 3).bool(),
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["mha", "gqa_rope", "sinks", "mla"])
@torch.no_grad()
def test_mask_decides_which_token_influences_which(name: str, case: str) -> None:
    mask, want = CASES[case]
    assert torch.equal(influence(name, mask), want)


@torch.no_grad()
def test_window_of_a_layer_is_a_band() -> None:
    assert torch.equal(influence("window", None), torch.ones(9, 9).tril().triu(-3).bool())


@pytest.mark.parametrize("chunk", [1, 3, 9])
@pytest.mark.parametrize("name", ["mha", "gqa_rope", "sinks", "window", "mla", "dsa_gqa"])
@torch.no_grad()
def test_ring_shows_its_window_whatever_the_chunk(name: str, chunk: int) -> None:
    """On a model without a window too: a token sees the last 3, its own among them."""
    model, x = decoder(name), ids(2, 9)
    cache = model.cache(2, "ring", window=3, chunk=chunk)
    ours = torch.cat([model(part, cache=cache) for part in x.split(chunk, 1)], 1)
    torch.testing.assert_close(ours, model(x, mask=Causal() & Window(3)), **TIGHT)


@pytest.mark.parametrize("name", ["window", "mla_window"])
@torch.no_grad()
def test_window_of_an_encoder_reaches_to_either_side(name: str) -> None:
    size = 4 if name == "window" else 5
    model, x = decoder(name, layers=1, causal=False), ids(1, 9)
    probe = Probe()
    model(x, probe=probe)
    band = (STEPS[:, None] - STEPS).abs() < size
    assert torch.equal(probe.maps["0.self"][0][0, 0] > 0, band)


@torch.no_grad()
def test_windows_reach_further_layer_by_layer() -> None:
    """Two layers of window 4 see 2 * 3 tokens back."""
    model, x = decoder("window", layers=2), ids(1, 9)
    other = x.clone()
    other[0, 0] = (x[0, 0] + 1) % VOCAB
    changed = (model(other) != model(x))[0].any(-1)
    assert changed.tolist() == [True] * 7 + [False] * 2


@pytest.mark.parametrize("wide_first", [True, False])
@torch.no_grad()
def test_layers_with_different_windows_keep_their_own(wide_first: bool) -> None:
    """Layers share the positions, not the mask: a narrow layer beside a wide one still sees two tokens."""
    narrow, wide = GQA(3, window=2), GQA(3)
    model = decoder("mha", attention=(wide, narrow) if wide_first else (narrow, wide))
    probe = Probe()
    model(ids(1, 6), probe=probe)
    seen = [probe.maps[f"{i}.self"][0][0, 0] > 0 for i in (0, 1)]
    band, triangle = torch.ones(6, 6).tril().triu(-1).bool(), torch.ones(6, 6).tril().bool()
    want = [triangle, band] if wide_first else [band, triangle]
    assert all(torch.equal(a, b) for a, b in zip(seen, want))
