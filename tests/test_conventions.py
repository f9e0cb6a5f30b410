"""Where two conventions exist, the one Regard chose: the table at the end of `docs/errata.md` points here."""

import pytest
import torch
import torch.nn.functional as F

from regard.attention import BACKENDS, GQA, attend
from regard.decode.filters import top_k, top_p
from regard.decode.sampling import beam_search
from regard.errors import UsageError
from regard.mask import Causal, Padding, Span, Visible
from regard.position import Rope
from regard.training.losses import IGNORE, masked_lm_loss, smooth, smoothed_loss
from tests.laws.mechanisms import DIM, decoder, ids

close = torch.testing.assert_close


def test_mask_true_means_keep() -> None:
    q, k, v = (torch.randn(1, 5, 2, 4) for _ in range(3))
    keep = torch.ones(5, 5, dtype=torch.bool).tril()[None, None]
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    peer = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)
    for backend in BACKENDS:
        close(attend(q, k, v, keep, backend=backend), peer)
    blocked = attend(q, k, v, ~keep)  # the other polarity, taken for ours: only the future
    close(blocked[:, -1], torch.zeros(1, 2, 4))
    close(blocked[:, 0], attend(q[:, :1], k[:, 1:], v[:, 1:])[:, 0])


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32])
def test_mask_that_is_no_bool_is_refused(dtype: torch.dtype) -> None:
    x = torch.randn(1, 3, 1, 4)
    with pytest.raises(UsageError, match="give bool"):
        attend(x, x, x, torch.ones(1, 1, 3, 3, dtype=dtype))


@pytest.mark.parametrize("backend", ["reference", "online", "sdpa"])
def test_joined_masks_stay_finite_in_half_precision(backend: str) -> None:
    mask = Causal() & Padding(torch.tensor([3, 0]))  # the second row sees nothing at all
    seen = Visible(mask, Span.run(0, 5), Span.run(0, 5))
    q, k, v = (torch.randn(2, 5, 2, 4) for _ in range(3))
    exact = attend(q, k, v, seen, backend=backend)
    half = attend(q.half(), k.half(), v.half(), seen, backend=backend)
    close(half.float(), exact, atol=5e-3, rtol=5e-3)  # 11 bits of mantissa
    assert (exact[1] == 0).all() and half.isfinite().all()


def test_relative_scores_can_go_unscaled() -> None:
    assert GQA(heads=2, scale=1.0).make(8).scale == 1.0  # T5
    assert GQA(heads=2).make(8).scale == 0.5


def test_tied_head_is_the_embedding_itself() -> None:
    config = decoder("mha").config
    tied = type(config)(config.embedding, config.tower, type(config.head)(tied=True)).make()
    assert tied.head.weight is None
    before = tied(ids(1, 3))
    tied.embedding.weight.data *= 2
    assert not torch.allclose(tied(ids(1, 3)), before)


def test_biases_exist_where_the_config_says() -> None:
    def biased(**switches: bool) -> set[str]:
        names = GQA(heads=2, **switches).make(8).state_dict()
        return {name.removesuffix(".bias") for name in names if name.endswith("bias")}

    assert biased() == set()
    assert biased(bias=True) == {"wq", "wk", "wv"}  # Qwen2
    assert biased(bias=True, out_bias=True) == {"wq", "wk", "wv", "wo"}


def test_rope_defaults_to_half_split_and_base_10000() -> None:
    assert Rope() == Rope(base=10000.0, layout="half")


def test_label_smoothing_over_v_minus_2_leaves_padding_out() -> None:
    label = torch.tensor([2, IGNORE])
    q = smooth(label[:1], 5, 0.3, "V-2", padding=0)
    close(q, torch.tensor([[0.0, 0.1, 0.7, 0.1, 0.1]]).double())
    logits = torch.randn(2, 5)
    total, count = smoothed_loss(logits, label, 0.3, "V-2", padding=0)
    close(total, -(q[0].float() * logits[0].log_softmax(-1)).sum())
    assert count == 1
    for over, padding in (("V-3", None), ("V-2", None), ("V", 0)):
        with pytest.raises(UsageError, match="smoothing"):
            smooth(label[:1], 5, 0.3, over, padding)


def test_loss_of_half_precision_logits_is_summed_in_float32() -> None:
    logits, labels = torch.randn(2, 3, 7), torch.randint(7, (2, 3))
    low, _ = masked_lm_loss(logits.bfloat16(), labels)
    assert low.dtype == torch.float32
    close(low, masked_lm_loss(logits.bfloat16().float(), labels)[0])


def test_nucleus_ends_where_its_mass_reaches_p() -> None:
    logits = torch.tensor([0.25, 0.5, 0.125, 0.125]).log()

    def kept(p: float) -> list[int]:
        return top_p(logits, p).isfinite().nonzero()[:, 0].tolist()

    assert kept(0.5) == [1]  # "more than p" would take a second one
    assert kept(0.75) == [0, 1] and kept(0.76) == [0, 1, 2]  # of equals the lowest id
    assert kept(0.0) == [1] and kept(1.0) == [0, 1, 2, 3]
    assert top_k(logits, 3).isfinite().tolist() == [True, True, True, False]
    assert top_k(logits[None], 9).isfinite().all()
    for wrong in (lambda: top_k(logits, 0), lambda: top_p(logits, 1.5)):
        with pytest.raises(UsageError, match="give"):
            wrong()


def test_beam_that_has_ended_stays_and_competes() -> None:
    rows = {(): [0.6, 0.4], (1,): [0.9, 0.1], (1, 1): [0.5, 0.5]}  # 0 ends

    def step(prefix: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(rows[prefix]).log()

    found = beam_search(step, width=2, max_len=3, end=0)
    assert [ids for ids, _ in found] == [(0,), (1, 0)]
    close(torch.tensor([p for _, p in found]).exp(), torch.tensor([0.6, 0.36]))


def test_widths_of_heads_are_free_of_the_model() -> None:
    layer = GQA(heads=3, head_dim=10, value_dim=7).make(DIM)
    assert layer.wq.out_features == 30 and layer.wo.in_features == 21


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_dropout_falls_on_weights_after_the_softmax(backend: str) -> None:
    q, k = torch.randn(1, 6, 1, 4), torch.randn(1, 6, 1, 4)
    values = torch.eye(6)[None, :, None]  # show the weights
    a = attend(q, k, values, backend=backend)
    dropped = attend(q, k, values, dropout=0.5, backend=backend)
    kept = dropped != 0
    close(dropped[kept], 2 * a[kept])
    assert not kept.all() and (dropped.sum(-1) - 1).abs().max() > 0.1
