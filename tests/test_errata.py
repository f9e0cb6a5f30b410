"""What the source texts get wrong and a worked example does not show: `docs/errata.md` points here, row by row."""

import ast
import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attention import GQA, MLA, Terms, attend, softmax
from regard.attention.core import scores as dots
from regard.attention.online import online
from regard.attention.pooling import combine, one_loop, two_loops
from regard.attention.sparse import hadamard
from regard.block import Stack, Tower
from regard.decode.generate import generate
from regard.errors import UsageError
from regard.layers import MLM, MLP, LMHead, Norm
from regard.learn.explain import find
from regard.learn.mechanisms import dot_products, multiply_adds, weightless
from regard.mask import Causal, Full, Span, Visible
from regard.models import EncoderDecoderConfig, Tokens, Transformer, TransformerConfig
from regard.models.recurrent import BahdanauStep, MemoryAttention, Seq2SeqConfig
from regard.models.transformer import TokenEmbedding
from regard.position import Rope, Sinusoidal, rotate, sinusoid
from regard.presets import build
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
    close(online(q, k, v, seen, Terms(1.0), (1, 1))[0, 0, 0], expected @ v[0, 0, 1:])


def test_output_row_is_its_weights_times_the_values() -> None:
    attention, x, watch = layer(GQA(heads=1)), words(1, 4), Watch()
    attention.wo.weight.data.copy_(torch.eye(DIM))
    out = run(attention, x[0], probe=watch)
    close(out[1], sum(watch.weights[0, 1, j] * watch.v[0, j] for j in range(4)))


def test_printed_weights_of_the_second_token_give_another_output() -> None:
    values = torch.tensor([[0.43, 0.41, 0.50, 0.35], [0.73, 0.85, 0.64, 0.58]]).double()
    out = combine(values, torch.tensor([0.67, 0.33], dtype=torch.float64).log())
    close(out, torch.tensor([0.5290, 0.5552, 0.5462, 0.4259]).double(), atol=1e-6, rtol=0)
    assert (out - torch.tensor([0.56, 0.56, 0.53, 0.47])).abs().max() > 0.03


def test_attention_without_its_softmax_is_cubic() -> None:
    def parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx = context(5, Full())
        kept = attention.entries(x, ctx)
        heads = attention.queries(x, ctx), kept["k"], kept["v"]
        q, k, v = (each.transpose(1, 2) for each in heads)
        return q, k, v

    attention, x = layer(GQA(heads=3)), words(1, 5)
    (q, k, v), (q2, k2, v2) = parts(x), parts(2 * x)
    close(dots(q2, k2, Terms(1.0)) @ v2, 8 * (dots(q, k, Terms(1.0)) @ v))
    weighed = attend(*(each.transpose(1, 2) for each in (q, k, 2 * v)))
    close(weighed, 2 * attend(*(each.transpose(1, 2) for each in (q, k, v))))  # linear in v alone


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


def test_batch_is_no_axis_of_the_product() -> None:
    """As many rows as tokens and features: transposed whole, a batch would fit too."""
    q, k, v = torch.randn(3, 4, 4, 1, 4).double()
    out = attend(q, k, v)
    for i in range(4):
        close(out[i], attend(q[i : i + 1], k[i : i + 1], v[i : i + 1])[0])


def test_self_attention_has_three_projections() -> None:
    own, same = layer(GQA(heads=1)), layer(GQA(heads=1))
    same.wk.weight.data.copy_(same.wq.weight)
    symmetric = []
    for attention in (own, same):
        run(attention, words(1, 5)[0], Full(), probe=(watch := Watch()))
        symmetric.append(torch.allclose(watch.scaled, watch.scaled.mT))
    assert symmetric == [False, True]  # one matrix for both: a score cannot have a direction


def test_keys_and_values_are_made_from_one_memory() -> None:
    attention, memory = layer(GQA(heads=3)), words(1, 6)
    kept = attention.entries(
        words(1, 4), context(4, Full(), memory=memory, memory_pos=Span.run(0, 6))
    )
    for name, weight in (("k", attention.wk.weight), ("v", attention.wv.weight)):
        close(kept[name].flatten(2), memory @ weight.T)
    topic = find("worked-cross")
    one, two = topic.tables({"v": "0.3 0.8 0.5; 0.1 0.2 0.4"}), topic.tables({})
    head = torch.tensor([row[1:] for row in one[6].rows]).double()
    close(head, torch.tensor([[0.4896, 0.4509], [0.5073, 0.4640]]).double(), atol=5e-5, rtol=0)
    assert one[5].rows == two[5].rows and one[6].rows != two[6].rows


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


def test_one_attention_is_masked_or_not_by_an_argument() -> None:
    attention, x, other = layer(GQA(heads=3)), words(1, 5)[0], words(1, 5)[0]
    other[:4] = x[:4]
    for mask, moves in ((Causal(), False), (Full(), True)):
        before, after = run(attention, x, mask), run(attention, other, mask)
        assert torch.allclose(before[:4], after[:4]) != moves


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


def test_cosines_differ_by_a_product_of_sines() -> None:
    p, q, w = 3, 5, 10000 ** (-2 / 6)
    sine, cosine = (sinusoid(torch.tensor([p, q]), 6).diff(dim=0)[0, 2:4]).tolist()
    half, mean = (q - p) * w / 2, (p + q) * w / 2
    assert (
        sine
        == pytest.approx(2 * math.cos(mean) * math.sin(half))
        == pytest.approx(0.0912, abs=5e-5)
    )
    assert cosine == pytest.approx(-2 * math.sin(mean) * math.sin(half))
    assert cosine == pytest.approx(-0.0171, abs=5e-5)


def test_sinusoids_have_no_last_position() -> None:
    vectors = Sinusoidal(5000).make(8)(torch.tensor([[4999, 5000, 10**6]]))
    close(vectors[0], sinusoid(torch.tensor([4999, 5000, 10**6]), 8))
    assert (vectors[0].diff(dim=0).abs().amax(-1) > 0.1).all()


def test_each_pair_turns_by_its_own_angle() -> None:
    x, rope = torch.tensor([1.0, 2, 3, 4]).double(), Rope(layout="interleaved")
    cos, sin = (each[0, 0, 0] for each in rope.angles(torch.tensor([[3]]), 4, torch.float64))
    turned = rotate(x, cos, sin, rope.layout)
    right = torch.tensor([-1.27223, -1.83886, 2.87867, 4.08819]).double()
    close(turned, right, atol=5e-6, rtol=0)
    alike = rotate(x, cos[1:].repeat(2), sin[1:].repeat(2), rope.layout)  # 3 / theta^2 for each
    close(alike[:2], torch.tensor([0.93956, 2.02910]).double(), atol=5e-6, rtol=0)


# --- latent attention, layers and costs ---------------------------------------------------------------------------


def test_mla_widths_are_those_of_the_checkpoint() -> None:
    with torch.device("meta"):
        mla = MLA(128, 512, 128, 64, query_latent=1536, rope=Rope()).make(7168)
    assert mla.w_dkv.weight.shape == (512 + 64, 7168)  # the latent and one rotary key
    assert mla.w_ukv.weight.shape == (128 * (128 + 128), 512)  # only the latent is widened
    assert mla.w_dq.weight.shape == (1536, 7168)  # queries have a rank of their own
    assert mla.wo.weight.shape == (7168, 128 * 128)
    assert mla.cache_spec().token == {"latent": (512,), "k_rope": (64,)}


def test_merging_values_and_output_costs_four_times_as_much() -> None:
    mla = weightless(MLA(128, 576, 128), 7168)
    w_uv = mla.w_ukv.weight.view(mla.h, mla.d + mla.e, mla.c)[0, mla.d :]
    w_o = mla.wo.weight.view(7168, mla.h, mla.e)[:, 0]
    apart, merged = w_uv.numel() + w_o.numel(), (w_o @ w_uv).numel()
    assert (apart, merged) == (991_232, 4_128_768)


def test_rotary_queries_come_from_the_query_latent() -> None:
    attention = layer(MLA(3, latent=10, head_dim=6, rope_dim=4, query_latent=7, rope=Rope()))
    x, ctx = words(1, 4), context(4)
    latent = attention.query_input(x)
    rotary = F.linear(latent, attention.w_uq.weight).unflatten(-1, (3, 10))[..., 6:]
    close(attention.queries(latent, ctx)[..., 6:], ctx.rotate(rotary, attention.config.rope))
    assert attention.w_uq.in_features == 7  # no way from x past the latent


def test_encoder_of_images_has_its_norms_before() -> None:
    image = build("vit-small", device="meta", layers=1).tower
    text = build("vaswani-base", device="meta", layers=1).encoder
    assert (image.blocks[0].order, text.blocks[0].order) == ("pre", "post")
    assert image.norm is not None and text.norm is None


def test_layer_norm_adds_no_noise() -> None:
    norm, x, y = Norm().make(DIM).double(), words(1, 4), words(1, 4)
    batch = torch.nn.BatchNorm1d(DIM).double()
    alone, among = norm(x), norm(torch.cat([x, y], 1))[:, :4]
    close(norm.train()(x), norm.eval()(x))
    close(alone, among)
    assert not torch.allclose(batch(x[0]), batch(torch.cat([x[0], y[0]]))[:4])


def test_language_model_needs_seven_settings() -> None:
    given = {"vocab": 11, "dim": 12, "max_len": 9, "layers": 2, "heads": 3, "ffn_dim": 16}
    model = build("gpt2", **given, dropout=0.1).train()
    assert model(ids(1, 9) % 11).shape == (1, 9, 11)
    assert len(model.tower.blocks) == 2 and model.tower.blocks[0].ffn.up.out_features == 16


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


def test_alignment_is_computed_and_its_score_is_trained() -> None:
    attention = MemoryAttention("additive", 4, 5).double()
    assert {size for p in attention.parameters() for size in p.shape} <= {1, 4, 5}
    for length in (3, 8):
        memory = torch.randn(1, length, 5).double()
        kept = {"h": memory, "k": attention.score.key(memory)}
        assert attention(torch.randn(1, 2, 4).double(), kept).shape == (1, 2, 5)


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
