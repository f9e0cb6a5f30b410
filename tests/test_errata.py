"""What the source texts get wrong and a worked example does not show: `docs/errata.md` points here, row by row."""

import ast
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attention import GQA, MLA, Terms, attend, softmax
from regard.attention.core import online
from regard.attention.pooling import one_loop, two_loops
from regard.attention.sparse import hadamard
from regard.block import Stack, Tower
from regard.decode.generate import generate
from regard.errors import UsageError
from regard.layers import MLM, MLP, LMHead
from regard.learn.mechanisms import dot_products, multiply_adds
from regard.mask import Causal, Full, Span, Visible
from regard.models import EncoderDecoderConfig, Tokens, Transformer, TransformerConfig
from regard.models.recurrent import BahdanauStep, Seq2SeqConfig
from regard.models.transformer import TokenEmbedding
from regard.position import Rope, Sinusoidal, rotate, sinusoid
from regard.training.losses import causal_lm_loss, teacher_forcing
from tests.laws.mechanisms import DIM, VOCAB, context, decoder, ids, layer, stir
from tests.worked.examples import Watch, run

ROOT = Path(__file__).resolve().parents[1]
close = torch.testing.assert_close


def words(batch: int, size: int) -> Tensor:
    return torch.randn(batch, size, DIM).double()


# --- softmax and the weighted sum ---------------------------------------------------------------------------------


def test_softmax_normalises_the_last_axis_of_any_shape() -> None:
    a = softmax(torch.randn(2, 3, 4).double())
    close(a.sum(-1), torch.ones(2, 3).double())


def test_softmax_feels_differences_not_sizes() -> None:
    close(softmax(torch.full((3,), 1000.0)), torch.full((3,), 1 / 3))


def test_saturated_row_still_trains_its_values() -> None:
    q, k, v = (torch.randn(1, 3, 1, 4).double().requires_grad_() for _ in range(3))
    attend(1e4 * q, k, v).sum().backward()
    assert q.grad.abs().max() < 1e-9 and v.grad.abs().max() > 0.9


def test_online_softmax_starts_with_hidden_keys() -> None:
    x, v = torch.tensor([-torch.inf, 1.0, 2.0]).double(), torch.randn(3, 2).double()
    expected = softmax(x[1:])
    close(two_loops(x)[0][1:], expected)
    close(one_loop(x, v)[0], expected @ v[1:])
    q, k, seen = torch.ones(1, 1, 1, 1).double(), torch.tensor([9.0, 1, 2]).double(), x > -1
    k, v, seen = k[None, None, :, None], v[None, None], seen[None, None, None]
    close(online(q, k, v, seen, Terms(1.0), block=1)[0, 0, 0], expected @ v[0, 0, 1:])


def test_output_row_is_its_weights_times_the_values() -> None:
    attention, x, watch = layer(GQA(heads=1)), words(1, 4), Watch()
    attention.wo.weight.data.copy_(torch.eye(DIM))
    out = run(attention, x[0], probe=watch)
    close(out[1], sum(watch.weights[0, 1, j] * watch.v[0, j] for j in range(4)))


# --- projections and heads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [5, DIM])  # as many tokens as features: the wrong side fits too
def test_projection_mixes_features_not_positions(size: int) -> None:
    attention, x = layer(GQA(heads=3)), words(2, size)
    q = attention.queries(x, context(size)).flatten(2)
    close(q, x @ attention.wq.weight.T)
    if size == DIM:
        assert not torch.allclose(q, attention.wq.weight @ x)
    assert attention(x, context(size)).shape == x.shape


def test_head_width_is_free_and_the_output_fits_the_residual() -> None:
    attention = GQA(heads=2, head_dim=4).make(4)
    assert attention.wo.weight.shape == (4, 8)
    with pytest.raises(UsageError, match="does not divide dim=3"):
        GQA(heads=2).make(3)


def test_heads_are_joined_token_by_token() -> None:
    v = torch.arange(12.0).view(1, 2, 3, 2).transpose(1, 2)  # b t h d from heads first
    alone = torch.eye(3, dtype=torch.bool)[None, None]
    close(attend(v, v, v, alone).flatten(2)[0, 0], torch.tensor([0.0, 1, 6, 7]))


def test_output_is_a_sum_over_heads() -> None:
    attention, x, watch = layer(GQA(heads=3)), words(1, 5), Watch()
    out = run(attention, x[0], probe=watch)
    wo = attention.wo.weight.T.unflatten(0, (3, -1))  # h d m
    close(out, sum(watch.weights[i] @ watch.v[i] @ wo[i] for i in range(3)))


def test_cross_attention_projects_keys_and_values_apart() -> None:
    tower = Tower(DIM, 2, GQA(3), MLP(8), cross=GQA(3), causal=True)
    blocks, memory = stir(Stack(tower)).blocks, words(1, 6)
    ctx = context(4, Full(), memory=memory, memory_pos=Span.run(0, 6))
    first, second = (block.cross.entries(words(1, 4), ctx) for block in blocks)
    assert first["k"].shape == first["v"].shape == (1, 6, 3, 8)
    assert not torch.allclose(first["k"], first["v"])
    assert not torch.allclose(first["k"], second["k"])  # each layer has its own


def test_multi_query_has_exactly_one_key_head() -> None:
    assert GQA(heads=6, kv_heads=1).make(DIM).wk.weight.shape == (DIM // 6, DIM)


def test_rotation_keeps_dot_products_and_a_projection_does_not() -> None:
    q, k = torch.tensor([1.0, 2.0]), torch.tensor([3.0, -1.0])
    close(hadamard(q) @ hadamard(k), q @ k)
    assert q @ k == 1 and q[0] * k[0] == 3  # projected to the first axis


# --- who sees whom ------------------------------------------------------------------------------------------------


def test_causal_token_sees_itself_and_the_first_one_only_itself() -> None:
    attention, x, watch = layer(GQA(heads=3)), words(1, 5), Watch()
    run(attention, x[0], probe=watch)
    assert (watch.weights.diagonal(dim1=-2, dim2=-1) > 0).all()
    close(watch.weights[:, 0, 0], torch.ones(3).double())


def test_encoder_needs_its_padding_mask() -> None:
    model, x = decoder("mha", causal=False), ids(2, 7)
    padded = model(x, [4, 7])
    close(padded[:1, :4], model(x[:1, :4]))
    assert not torch.allclose(model(x)[:1, :4], padded[:1, :4])


@pytest.mark.parametrize("name", ["gqa_rope", "mla", "dsa_mla"])
def test_prefill_equals_single_steps(name: str) -> None:
    model, x = decoder(name), ids(1, 5)
    cache = model.cache(1)
    steps = [model(x[:, i : i + 1], cache=cache) for i in range(5)]
    cache = model.cache(1)
    close(model(x, cache=cache), torch.cat(steps, 1))
    close(model(x), torch.cat(steps, 1))


def test_causal_layer_stores_no_mask() -> None:
    attention = layer(GQA(heads=1))
    assert not list(attention.buffers()) and len(attention.state_dict()) == 4
    q, k, v = (w(words(1, 5))[:, :, None] for w in (attention.wq, attention.wk, attention.wv))
    mask = Visible(Causal(), Span.run(0, 5), Span.run(0, 5))
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    peer = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)
    close(attend(q, k, v, mask, backend="reference"), peer)


@pytest.mark.parametrize("training", [True, False])
def test_generation_leaves_the_mode_as_it_was(training: bool) -> None:
    model = decoder("mha").train(training)
    model.tower.blocks[1].eval()
    before = [module.training for module in model.modules()]
    generate(model, [3, 1, 4], max_new_tokens=3)
    assert [module.training for module in model.modules()] == before


def test_one_masked_pass_equals_every_prefix_alone() -> None:
    model, x = decoder("mha"), ids(1, 6)
    alone = torch.cat([model(x[:, : i + 1])[:, -1:] for i in range(6)], 1)
    close(model(x), alone)
    close(causal_lm_loss(model(x), x)[0], causal_lm_loss(alone, x)[0])  # all losses at once


def test_decoder_never_reads_the_word_it_predicts() -> None:
    tower = {"attention": GQA(3), "ffn": MLP(16)}
    config = EncoderDecoderConfig(
        Tokens(VOCAB),
        Tower(DIM, 1, causal=False, **tower),
        Tokens(VOCAB, Sinusoidal(16)),
        Tower(DIM, 2, cross=GQA(3), **tower),
    )
    recurrent = Seq2SeqConfig(VOCAB, VOCAB, DIM, attention="additive")
    target, other = ids(1, 7), ids(1, 7).clone()
    other[0, 4] = (other[0, 4] + 1) % VOCAB
    for model in (stir(config.make()), stir(recurrent.make())):
        (read, said), (read2, said2) = teacher_forcing(target), teacher_forcing(other)
        assert (said != said2)[0].nonzero().item() == 3  # row 3 must predict the changed word
        a, b = model(read, source=ids(1, 5)), model(read2, source=ids(1, 5))
        close(a[:, :4], b[:, :4])
        assert not torch.allclose(a[:, 4], b[:, 4])


# --- positions ----------------------------------------------------------------------------------------------------


def test_positions_do_not_depend_on_the_batch() -> None:
    embedding = stir(TokenEmbedding(Tokens(VOCAB, Sinusoidal(16)), 6))
    x, pos = ids(7, 5), Span.run(0, 5)
    added = embedding(x, pos) - F.embedding(x, embedding.weight)
    close(added, sinusoid(torch.arange(5), 6).expand(7, 5, 6))


def test_positions_are_added_once_before_the_first_layer() -> None:
    tower = Tower(DIM, 2, GQA(3), MLP(8), final_norm=False)
    model = stir(Transformer(TransformerConfig(Tokens(VOCAB, Sinusoidal(16)), tower)))
    for block in model.tower.blocks:  # layers that add nothing show what came in
        for part in (block.attention.wo, block.ffn.down):
            part.weight.data.zero_()
        block.ffn.down.bias.data.zero_()
    expected = F.embedding(ids(1, 5), model.embedding.weight) + sinusoid(torch.arange(5), DIM)
    close(model(ids(1, 5)), expected)


def test_first_position_adds_zero_and_one() -> None:
    word, sum_ = torch.tensor([[0.21, -0.34, 0.56], [0.21, 0.66, 0.56]]).double()
    close(word + sinusoid(torch.tensor(0), 3), sum_)


def test_rope_angles_are_an_outer_product() -> None:
    freq = Rope().frequencies(8, torch.float64)
    assert len(freq.unique()) == 4  # each block turns at its own speed
    for size in (6, 4):  # 4 tokens and 4 pairs: an elementwise product would fit too
        cos, sin = Rope().angles(torch.arange(size)[None], 8, torch.float64)
        assert cos.shape == (1, size, 1, 4)
        close(cos[0, :, 0], torch.outer(torch.arange(size).double(), freq).cos())


def test_rope_quarter_turn_swaps_each_pair() -> None:
    x, zero, one = torch.tensor([1.0, 2, 3, 4]), torch.zeros(2), torch.ones(2)
    close(rotate(x, zero, one, "interleaved"), torch.tensor([-2.0, 1, -4, 3]))
    close(rotate(x, zero, one, "half"), torch.tensor([-3.0, -4, 1, 2]))


def test_rope_turns_forwards() -> None:
    v, angle = torch.tensor([1.0, 2.0]).double(), torch.tensor([0.3]).double()
    turned = rotate(v, angle.cos(), angle.sin(), "half")
    close(turned, torch.tensor([0.3642961, 2.2061932]).double(), atol=1e-7, rtol=0)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("size, heads, dim", [(3, 3, 4), (2, 1, 2)])
def test_rope_turns_each_head_by_its_own_position(
    layout: str, size: int, heads: int, dim: int
) -> None:
    x, rope = torch.randn(1, size, heads, dim).double(), Rope(layout=layout)
    cos, sin = rope.angles(torch.arange(size)[None], dim, x.dtype)
    y = rotate(x, cos, sin, layout)
    assert y.shape == x.shape
    close(y.norm(dim=-1), x.norm(dim=-1))
    for t in range(size):
        for h in range(heads):
            close(y[0, t, h], rotate(x[0, t, h], cos[0, t, 0], sin[0, t, 0], layout))


def test_rope_score_does_not_fall_steadily_with_distance() -> None:
    cos, _ = Rope().angles(torch.tensor([[5, 6, 64, 100]]), 64, torch.float64)
    mean = cos[0, :, 0].mean(-1)  # q.k / d of vectors of ones at these distances
    close(mean, torch.tensor([0.734499, 0.736231, 0.4346, 0.5586]).double(), atol=5e-5, rtol=0)
    assert mean[1] > mean[0] and mean[3] > mean[2]


# --- latent attention, layers and costs ---------------------------------------------------------------------------


def test_mla_widths_are_those_of_the_checkpoint() -> None:
    with torch.device("meta"):
        mla = MLA(128, 512, 128, 64, query_latent=1536, rope=Rope()).make(7168)
    assert mla.w_dkv.weight.shape == (512 + 64, 7168)  # the latent and one rotary key
    assert mla.w_ukv.weight.shape == (128 * (128 + 128), 512)  # only the latent is widened
    assert mla.w_dq.weight.shape == (1536, 7168)  # queries have a rank of their own
    assert mla.wo.weight.shape == (7168, 128 * 128)
    assert mla.cache_spec().token == {"latent": (512,), "k_rope": (64,)}


def test_layers_have_weights_of_their_own() -> None:
    def count(layers: int) -> int:
        stack = Stack(Tower(DIM, layers, GQA(3), MLP(16), final_norm=False))
        return len({id(p) for p in stack.parameters()})

    assert count(3) == 3 * count(1)


def test_masked_lm_head_transforms_before_the_vocabulary() -> None:
    names = set(LMHead(MLM(), DIM, VOCAB).state_dict())
    assert names == {"dense.weight", "dense.bias", "norm.weight", "norm.bias", "bias"}


def test_projections_outweigh_scores_in_short_texts() -> None:
    assert multiply_adds(GQA(heads=8), 512, tokens=128) == (134_217_728, 16_777_216)
    projecting, mixing = multiply_adds(GQA(heads=8), 512, tokens=1024)  # n = 2 d
    assert projecting == mixing


def test_cache_saves_a_power_of_the_length() -> None:
    assert dot_products(1000, cached=True) == 500_500
    assert dot_products(1000, cached=False) == 333_833_500


def test_bahdanau_asks_with_the_previous_state() -> None:
    step, memory = stir(BahdanauStep(5, 5)), torch.randn(1, 4, 5).double()
    y, before = torch.randn(1, 5).double(), torch.randn(1, 1, 5).double()
    kept = {"h": memory, "k": step.attention.score.key(memory)}
    context_vector = step.attention(before[0][:, None], kept)[:, 0]  # known before the new state
    (after,) = step(y, (before,), kept)
    (again,) = step.rnn.plain(torch.cat([y, context_vector], -1)[:, None], (before,))[1]
    close(after, again)


def test_recurrent_decoder_gives_logits() -> None:
    logits = Seq2SeqConfig(VOCAB, VOCAB, DIM).make()(ids(1, 3), source=ids(1, 4))
    assert (logits.sum(-1) - 1).abs().min() > 1e-3 and (logits < 0).any()


# --- the page -----------------------------------------------------------------------------------------------------


def test_every_test_named_in_the_page_exists() -> None:
    page = (ROOT / "docs" / "errata.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(tests/[\w/]+\.py)::(\w+)", page))
    assert len(named) > 80
    for path in {path for path, _ in named}:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        missing = {name for file, name in named if file == path} - defined
        assert not missing, f"docs/errata.md points at {missing}, not in {path}"
