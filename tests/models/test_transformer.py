"""The call: what comes out, what is refused and how; captioning from the same parts."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor

import regard
from regard.attention import DSA, GQA, MLA, Context
from regard.block import Tower
from regard.errors import UsageError
from regard.fast.cpu import prepare
from regard.layers import LM, MLM, MLP, Answer, Classify, Norm, Tag
from regard.mask import Full, Prefix, Span
from regard.models import (
    EncoderDecoder,
    EncoderDecoderConfig,
    Patches,
    Tokens,
    Transformer,
    TransformerConfig,
)
from regard.models.base import border, last_real
from regard.models.recurrent import RecurrentConfig
from regard.models.transformer import mean_real
from regard.position import Learned, LongRope, Rope, Sinusoidal
from regard.see.probe import Probe

FFN = MLP(16)


def decoder(max_len: int | None = 10, layers: int = 2, **more: object) -> Transformer:
    attention = GQA(4, 2, rope=Rope(), head_dim=4)
    tower = Tower(8, layers, attention, FFN, **more)  # type: ignore[arg-type]
    return Transformer(TransformerConfig(Tokens(11), tower, LM(), max_len=max_len)).eval()


def encoder(head: object = None, types: int = 0, pooler: str | None = None) -> Transformer:
    tokens = Tokens(11, Learned(10), types=types, norm=Norm())
    tower = Tower(8, 2, GQA(2, bias=True), FFN, causal=False, order="post", final_norm=False)
    return Transformer(TransformerConfig(tokens, tower, head, pooler, max_len=10)).eval()  # type: ignore[arg-type]


def pair(**more: object) -> EncoderDecoder:
    tokens = Tokens(11, Sinusoidal(10), scaled=True)
    settings = {
        "source": tokens,
        "encoder": Tower(8, 2, GQA(2), FFN, causal=False),
        "target": tokens,
        "decoder": Tower(8, 2, GQA(2), FFN, cross=GQA(2)),
        "max_len": 10,
        **more,
    }
    return EncoderDecoder(EncoderDecoderConfig(**settings)).eval()  # type: ignore[arg-type]


def ids(*shape: int) -> Tensor:
    return torch.randint(11, shape)


# --- what comes out -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head, shape",
    [
        (None, (2, 5, 8)),
        (MLM(), (2, 5, 11)),
        (Classify(3), (2, 3)),
        (Tag(3), (2, 5, 3)),
        (Answer(), (2, 5, 2)),
    ],
)
def test_encoder_gives_what_its_head_gives(head: object, shape: tuple) -> None:
    assert encoder(head)(ids(2, 5)).shape == shape


def test_decoder_gives_logits_over_the_vocabulary() -> None:
    assert decoder()(ids(2, 5), [5, 3]).shape == (2, 5, 11)


def test_image_model_gives_labels() -> None:
    tower = Tower(8, 1, GQA(2), FFN, causal=False)
    model = Transformer(TransformerConfig(Patches(8, 4), tower, Classify(3, dense=None)))
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 3)


def test_types_default_to_the_first_and_change_the_output() -> None:
    model, x = encoder(types=2), ids(2, 5)
    assert torch.equal(model(x), model(x, types=torch.zeros_like(x)))
    assert not torch.equal(model(x), model(x, types=torch.ones_like(x)))


def test_pool_is_told_the_types() -> None:
    model, x = encoder(types=2, pooler="tanh"), ids(2, 5)
    types = (torch.arange(5) >= 2).long().expand(2, -1)
    want = torch.tanh(model.pooler(model.hidden(x, types=types)[:, 0]))
    torch.testing.assert_close(model.pool(x, types=types), want)
    assert not torch.equal(model.pool(x), want)


def test_pool_takes_the_poolers_vector_or_the_mean_of_real_tokens() -> None:
    x = ids(2, 5)
    with_pooler, without = encoder(pooler="tanh"), encoder()
    first = with_pooler.hidden(x, [5, 2])[:, 0]
    torch.testing.assert_close(with_pooler.pool(x, [5, 2]), torch.tanh(with_pooler.pooler(first)))
    torch.testing.assert_close(without.pool(x, [5, 2])[1], without.hidden(x[1:, :2])[0].mean(0))


def test_states_of_real_tokens_are_their_mean_and_the_last() -> None:
    """Of one token itself; of none nothing, and no division by it."""
    h = torch.randn(4, 3, 5)
    mean, last = mean_real(h, [3, 2, 1, 0]), last_real(h, [3, 2, 1, 0])
    for row, n in enumerate((3, 2, 1)):
        torch.testing.assert_close(mean[row], h[row, :n].mean(0))
        assert torch.equal(last[row], h[row, n - 1])
    assert not mean[3].any()
    torch.testing.assert_close(mean_real(h, None), h.mean(1))
    assert torch.equal(last_real(h, None), h[:, -1])


def test_mask_argument_replaces_the_towers_own() -> None:
    model, x = decoder(), ids(1, 6)
    both_ways, causal = (model(x, mask=Prefix(torch.tensor([n]))) for n in (6, 0))
    torch.testing.assert_close(causal, model(x))
    torch.testing.assert_close(both_ways, model(x, mask=Full()))
    assert not torch.allclose(both_ways, causal)


def test_shared_embedding_is_one_parameter() -> None:
    model = pair()
    assert model.source.weight is model.target.weight
    assert pair(shared=False).source.weight is not pair(shared=False).target.weight


def test_one_step_of_training_reaches_every_parameter() -> None:
    for model, more in ((decoder(), {}), (pair(), {"source": ids(2, 4)})):
        model.train()
        model(ids(2, 5), **more).square().sum().backward()
        assert all(p.grad is not None for p in model.parameters())


# --- text and images: D7 ------------------------------------------------------------------------------------------


def captioner(cross: GQA | MLA) -> EncoderDecoder:
    return pair(
        source=Patches(8, 4),
        encoder=Tower(12, 2, GQA(3), FFN, causal=False),
        decoder=Tower(8, 2, GQA(2), FFN, cross=cross, memory_dim=12),
        shared=False,
    )


@pytest.mark.parametrize("cross", [GQA(2), GQA(4, 1, head_dim=3), MLA(2, latent=6)])
def test_captioner_writes_about_an_image_with_and_without_a_cache(cross: GQA | MLA) -> None:
    model, x, images = captioner(cross), ids(2, 4), torch.randn(2, 3, 8, 8)
    logits = model(x, source=images)
    assert logits.shape == (2, 4, 11)
    cache = model.cache(2)
    parts = [model(x[:, :2], source=images, cache=cache)]
    parts += [model(x[:, i : i + 1], cache=cache) for i in (2, 3)]
    torch.testing.assert_close(torch.cat(parts, 1), logits, rtol=1e-4, atol=1e-5)


def test_captioner_sees_its_image_and_every_word_can_look_at_every_patch() -> None:
    model, x, images, probe = captioner(GQA(2)), ids(1, 4), torch.randn(2, 3, 8, 8), Probe()
    assert not torch.equal(model(x, source=images[:1], probe=probe), model(x, source=images[1:]))
    assert probe.maps["decoder.1.cross"][0].shape == (1, 2, 4, 5)  # a class token and 4 patches
    assert (probe.maps["decoder.1.cross"][0] > 0).all()


# --- bad input ----------------------------------------------------------------------------------------------------


def refused(match: str) -> object:
    return pytest.raises(UsageError, match=match)


def test_length_over_the_context_says_both_numbers() -> None:
    for model, more in ((decoder(), {}), (encoder(), {}), (pair(), {"source": ids(1, 2)})):
        with refused("12 tokens, but the model's context is 10"):
            model(ids(1, 12), **more)
    with refused("12 tokens, but the model's context is 10"):
        pair()(ids(1, 2), source=ids(1, 12))


def test_length_over_the_context_is_counted_with_the_cache() -> None:
    model = decoder()
    cache = model.cache(1)
    model(ids(1, 8), cache=cache)
    with refused("11 tokens, but the model's context is 10"):
        model(ids(1, 3), cache=cache)
    assert cache.lengths.tolist() == [8]
    model(ids(1, 2), cache=cache)


def test_length_over_the_context_counts_each_rows_own_tokens() -> None:
    """8 + 1 and 2 + 4 fit a context of 10, though 8 + 4 would not."""
    model, x = decoder(), ids(2, 8)
    cache = model.cache(2)
    model(x, [8, 2], cache=cache)
    assert model(ids(2, 4), [1, 4], cache=cache).shape == (2, 4, 11)


def test_length_over_the_learned_positions_says_both_numbers() -> None:
    tokens, tower = Tokens(11, Learned(6)), Tower(8, 1, GQA(2), FFN)
    with refused("7 tokens, but the model's context is 6"):
        Transformer(TransformerConfig(tokens, tower, LM()))(ids(1, 7))


def test_length_over_the_sinusoids_says_both_numbers() -> None:
    tokens = Tokens(11, Sinusoidal(8))
    model = Transformer(TransformerConfig(tokens, Tower(8, 1, GQA(2), FFN), LM()))
    assert model(ids(1, 8)).shape == (1, 8, 11)
    with refused("9 tokens, but the model's context is 8"):
        model(ids(1, 9))


@pytest.mark.parametrize("more", [{"rope": Rope()}, {"window": 3}])
def test_cross_attention_has_no_positions_in_common_with_its_source(more: dict) -> None:
    with refused(f"no common positions; give cross without cross.{next(iter(more))}"):
        Tower(8, 1, GQA(2), FFN, cross=GQA(2, **more))


@torch.no_grad()
def test_positions_that_count_from_ids_go_on_from_a_cache() -> None:
    """RoBERTa as a causal model: id 1 is its padding."""
    tokens = Tokens(11, Learned(12, offset=2, skip=1))
    model = Transformer(TransformerConfig(tokens, Tower(8, 2, GQA(2), FFN), LM())).eval()
    x, cache = ids(2, 9).clamp(min=2), model.cache(2)
    parts = [model(part, cache=cache) for part in x.split([4, 1, 1, 3], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(x))


def test_ids_outside_the_vocabulary_say_which() -> None:
    for wrong, got in ((11, "11"), (-1, "-1")):
        with refused(f"ids must be between 0 and 10 .* got {got}"):
            decoder()(torch.tensor([[3, wrong]]))
    with refused("source must be between 0 and 10"):
        pair()(ids(1, 2), source=torch.tensor([[11]]))
    with refused("ids must be between 0 and 10"):
        pair()(torch.tensor([[11]]), source=ids(1, 2))


@pytest.mark.parametrize("wrong", [torch.randn(1, 3), torch.zeros(3).long(), torch.ones(1, 3) > 0])
def test_ids_of_another_type_or_shape_are_refused(wrong: Tensor) -> None:
    with refused(r"whole numbers of shape \(b, t\)"):
        decoder()(wrong)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_empty_batch_is_refused(shape: tuple[int, int]) -> None:
    for model, more in ((decoder(), {}), (encoder(), {}), (pair(), {"source": ids(shape[0], 3)})):
        with refused("empty batch"):
            model(ids(*shape), **more)


def test_empty_image_batch_and_wrong_images_are_refused() -> None:
    tower = Tower(8, 1, GQA(2), FFN, causal=False)
    model = Transformer(TransformerConfig(Patches(8, 4), tower, Classify(3)))
    with refused("empty batch"):
        model(torch.randn(0, 3, 8, 8))
    for wrong in (torch.randn(1, 3, 8, 9), torch.randn(3, 8, 8), torch.zeros(1, 3, 8, 8).long()):
        with refused(r"images must be real numbers of shape \(b, 3, 8, 8\)"):
            model(wrong)
    with refused("no lengths, types or cache"):
        model(torch.randn(1, 3, 8, 8), [3])


@pytest.mark.parametrize("lengths", [[5, 6], [5], [5, -1]])
def test_lengths_that_do_not_fit_the_ids_are_refused(lengths: list[int]) -> None:
    with refused("lengths must be 2 numbers between 0 and 5"):
        decoder()(ids(2, 5), lengths)


def test_source_is_needed_once_and_must_have_as_many_rows() -> None:
    model = pair()
    with refused(r"needs its source: model\(ids, source=source_ids\)"):
        model(ids(1, 3))
    with refused("source has 2 rows, ids 1"):
        model(ids(1, 3), source=ids(2, 3))
    cache = model.cache(1)
    with refused("needs its source"):
        model(ids(1, 3), cache=cache)
    model(ids(1, 3), source=ids(1, 4), cache=cache)
    with refused("already holds a source"):
        model(ids(1, 1), source=ids(1, 4), cache=cache)


@pytest.mark.parametrize("wrong", [torch.tensor([[11]]), ids(1, 12), ids(2, 3)])
def test_refused_target_leaves_the_cache_as_it_was(wrong: Tensor) -> None:
    """The source goes in again with the right target: nothing was half written."""
    model, source, x = pair(), ids(1, 4), ids(1, 3)
    cache = model.cache(1)
    with pytest.raises(UsageError):
        model(wrong, source=source.expand(len(wrong), -1), cache=cache)
    torch.testing.assert_close(model(x, source=source, cache=cache), model(x, source=source))


def test_unknown_backend_leaves_the_cache_as_it_was() -> None:
    model, x = decoder(), ids(1, 4)
    cache = model.cache(1)
    with refused("attention backend 'flash' is unknown"):
        model(x, cache=cache, backend="flash")
    assert cache.lengths.tolist() == [0]
    torch.testing.assert_close(model(x, cache=cache), model(x))


def test_cache_of_another_batch_is_refused() -> None:
    model = decoder()
    with refused(r"ids have 2 rows, the cache 3; make it with model.cache\(2\)"):
        model(ids(2, 3), cache=model.cache(3))


def test_encoder_has_no_cache_and_takes_none() -> None:
    with refused("no cache"):
        encoder().cache(1)
    with refused("it cannot run with a cache"):
        encoder()(ids(1, 3), cache=decoder().cache(1))


def test_cache_layout_must_be_known_and_fit_the_model() -> None:
    with refused(r"cache layout 'pages' is unknown; did you mean 'paged'\?"):
        decoder().cache(1, "pages")
    with refused("use layout='contiguous' or 'paged'"):
        decoder().cache(1, "ring")


def test_types_without_types_are_refused() -> None:
    with refused("no segment types"):
        encoder()(ids(1, 3), types=ids(1, 3))


def test_heads_that_do_not_divide_say_what_would() -> None:
    with refused("heads=3 does not divide dim=8; choose one of .1, 2, 4, 8."):
        Transformer(TransformerConfig(Tokens(11), Tower(8, 1, GQA(3), FFN)))


def test_towers_that_do_not_belong_together_are_refused() -> None:
    with refused("decoder.cross given"):
        pair(decoder=Tower(8, 1, GQA(2), FFN))
    with refused("encoder.causal must be false"):
        pair(encoder=Tower(8, 1, GQA(2), FFN))
    with refused("set shared=False"):
        pair(source=Patches(8, 4))
    with refused("one vocab for both sides, got 11 and 12"):
        pair(target=Tokens(12))
    with refused("a decoder writes tokens, and target is none; give Tokens"):
        pair(target=Patches(8, 4), shared=False)


def test_patches_of_a_picture_attend_to_a_text() -> None:
    """Cross-attention from text to image: one row of weights for each patch, over the words that are there."""
    patches, layer, probe = Patches(8, 4).make(8), GQA(2).make(8), Probe()
    x, text = patches(torch.randn(2, 3, 8, 8)), torch.randn(2, 5, 8)
    words = Span.run(0, 5)
    ctx = Context(
        Span.run(0, x.shape[1]), Full(), memory=text, memory_pos=words, probe=probe, site="cross"
    )
    assert layer(x, ctx).shape == x.shape
    (weight,) = probe.maps["cross"]
    assert weight.shape == (2, 2, x.shape[1], 5)
    torch.testing.assert_close(weight.sum(-1), torch.ones(2, 2, x.shape[1]))
    moved = Context(Span.run(0, x.shape[1]), Full(), memory=text.flip(1), memory_pos=words)
    torch.testing.assert_close(layer(x, moved), layer(x, ctx))  # a text is a set without positions


@pytest.mark.parametrize("wrong", [[1, 2], "text", None])
def test_ids_that_are_no_tensor_are_a_sentence(wrong: object) -> None:
    with pytest.raises(
        UsageError, match=r"ids must be a tensor .* such as torch.tensor\(\[\[1, 2\]\]\)"
    ):
        decoder()(wrong)


def test_kind_without_settings_is_told_what_it_needs() -> None:
    with pytest.raises(
        UsageError, match="attention is 'mla', a kind without .*heads = ..., latent"
    ):
        regard.build("gpt2", attention="mla")


# --- layers that share a block ------------------------------------------------------------------------------------


def shared() -> tuple[Transformer, Transformer]:
    """Four layers of two blocks, and the same with a block for each layer."""
    torch.manual_seed(0)
    model, apart = decoder(blocks=(0, 0, 1, 1), layers=4), decoder(layers=4)
    body = {n: p for n, p in model.state_dict().items()}
    apart.load_state_dict(body)
    return model, apart


def test_shared_blocks_compute_what_blocks_of_their_own_do() -> None:
    model, apart = shared()
    words = ids(2, 6)
    assert torch.equal(model(words), apart(words))
    cache = model.cache(2)
    steps = torch.cat([model(words[:, i : i + 1], cache=cache) for i in range(6)], 1)
    torch.testing.assert_close(steps, model(words), atol=1e-5, rtol=1e-5)


def test_shared_blocks_are_counted_once_and_run_by_every_layer() -> None:
    model, apart = shared()
    assert len(model.tower.blocks) == 4 and len(set(map(id, model.tower.blocks))) == 2
    block = sum(p.numel() for p in model.tower.blocks[0].parameters())
    count = [sum(p.numel() for p in m.parameters()) for m in (model, apart)]
    assert count[1] - count[0] == 2 * block
    assert model.flops_per_token(5) == apart.flops_per_token(5)
    assert len(model.cache_specs()) == 4


def test_shared_blocks_learn_by_the_sum_of_their_layers() -> None:
    model, apart = shared()
    for m in (model, apart):
        m(torch.arange(6)[None]).square().sum().backward()
    first, second = (apart.tower.blocks[i].ffn.up.weight.grad for i in (0, 1))
    torch.testing.assert_close(model.tower.blocks[0].ffn.up.weight.grad, first + second)


def test_shared_blocks_stay_shared(tmp_path: Path) -> None:
    """In a copy, in a folder, and in a prepared model, whose weights were given up."""
    model, words = shared()[0], ids(2, 6)
    want = model(words)
    again = regard.load(model.save(tmp_path))
    for m in (copy.deepcopy(model), again, prepare(copy.deepcopy(model), "fp32", consume=True)):
        assert m.tower.blocks[0] is m.tower.blocks[1] and m.tower.blocks[1] is not m.tower.blocks[2]
        torch.testing.assert_close(m(words), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("blocks", [(0, 0), (0, 0, 2, 2), (1, 1, 1, 1)])
def test_shared_blocks_that_do_not_fit_are_refused(blocks: tuple) -> None:
    with pytest.raises(UsageError, match="each of 4 layers its block"):
        decoder(blocks=blocks, layers=4)
    with pytest.raises(UsageError, match="one attention and one ffn"):
        Tower(8, 2, (GQA(2), GQA(4)), FFN, blocks=(0, 0))


def test_narrow_embedding_is_made_as_wide_as_the_tower() -> None:
    model = Transformer(TransformerConfig(Tokens(11, width=3), Tower(8, 1, GQA(2), FFN)))
    assert model.embedding.weight.shape == (11, 3)
    x = model.embedding(torch.arange(4)[None], Span.run(0, 4))
    torch.testing.assert_close(x[0], model.embedding.project(model.embedding.weight[:4]))


def test_first_attention_may_read_the_embedding_as_it_is() -> None:
    model = decoder(first_norm=False)
    assert [b.norm1 is None for b in model.tower.blocks] == [True, False]
    for wrong in (dict(order="post"), dict(blocks=(0, 0))):
        with pytest.raises(UsageError, match="first_norm"):
            decoder(first_norm=False, **wrong)


def test_mean_label_of_a_ragged_batch_is_that_of_each_row_alone() -> None:
    model, words = encoder(Classify(3, "gelu", "mean", norm=Norm())), ids(2, 6)
    both = model(words, [6, 4])
    torch.testing.assert_close(both[1:], model(words[1:, :4]))
    torch.testing.assert_close(both[:1], model(words[:1]))


def test_border_is_that_of_the_shortest_longrope() -> None:
    """Whichever layer has it, and under the indexer of sparse attention too."""

    def gqa(length: int | None) -> GQA:
        long = None if length is None else LongRope((1.0, 1.5), (2.0, 3.0), length)
        return GQA(2, rope=Rope(scaling=long))

    plain = GQA(2, rope=Rope())
    for attention, want in (
        (plain, None), (GQA(2), None), (gqa(9), 9), ((gqa(9), plain), 9), ((plain, gqa(7)), 7),
        ((gqa(9), gqa(7)), 7), (DSA(gqa(8), 2, 4, topk=3), 8),
    ):  # fmt: skip
        config = TransformerConfig(Tokens(11), Tower(8, 2, attention, FFN), LM())
        assert border(config.make()) == want
    assert border(RecurrentConfig(11, 6).make()) is None
