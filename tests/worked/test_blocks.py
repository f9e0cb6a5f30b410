"""Worked examples: norms, feed-forward, the residual block, dropout."""

import torch

from regard.attention import GQA
from regard.block import Block, Stack, Tower
from regard.layers import MLP, FeedForward, Norm, activation
from tests.worked.examples import Example, fill, run


@torch.no_grad()
def test_ffn_2x2_table_cuts_off_the_negative(example: Example) -> None:
    g = example.given
    for case, bias in (("plain", False), ("biased", True)):
        layer = fill(FeedForward(MLP(2, bias=bias), 2), up=g.up, down=g.down)
        if bias:
            fill(layer, up__bias=g.up_bias, down__bias=g.down_bias)
        example.right(layer.up(g.x), f"{case}.pre")
        example.right(layer.act(layer.up(g.x)), f"{case}.hidden")
        example.right(layer(g.x), f"{case}.output")


@torch.no_grad()
def test_ffn_3_in_steps_multiplies_correctly(example: Example) -> None:
    g = example.given
    zero = torch.zeros(
        1, 2
    ).double()  # a block's output is as wide as its input: a third, empty row
    down, bias = torch.cat([g.down, zero]), torch.cat([g.down_bias, zero[0, :1]])
    layer = FeedForward(MLP(2), 3)
    fill(layer, up=g.up, down=down, up__bias=g.up_bias, down__bias=bias)
    example.both(layer.up(g.x), "pre")
    example.right(layer.act(layer.up(g.x)), "hidden")
    example.both(layer(g.x)[:, :2], "output")
    example.right(layer.down(g.printed_hidden)[:, :2], "output_of_printed")


@torch.no_grad()
def test_add_and_layernorm_divides_by_the_biased_deviation(example: Example) -> None:
    g = example.given
    x = g.x + g.sublayer
    example.right(x, "sum")
    for eps in ("0", "1e-5", "1e-6", "1e-12"):
        norm = Norm(float(eps)).make(2).double()
        assert (norm.weight == g.weight).all() and (norm.bias == g.bias).all()
        example.right(norm(x), f"eps_{eps}")
        example.wrong(norm(x), "unbiased")
    # LayerNorm(x) = (x - mean) / sqrt(variance + eps): two values tell mean and variance
    normed = Norm(0.0).make(2).double()(x)
    deviation = (x[1] - x[0]) / (normed[1] - normed[0])
    example.right(deviation**2, "variance")
    example.right(x[0] - normed[0] * deviation, "mean")
    example.right(Norm(1e-6, rms=True).make(2).double()(x), "rms_1e-6")
    same = Norm(1e-5).make(2).double()(torch.full((2,), 3.0).double())
    assert (same == 0).all()  # eps keeps a constant vector from 0/0


@torch.no_grad()
def test_layernorm_statistics_per_token_do_not_leak(example: Example) -> None:
    g, norm = example.given, Norm(example.given.eps).make(2).double()
    example.both(norm(g.x), "normed")
    later = torch.tensor([[0.0, 0.0], [5.0, -7.0]]).double()
    assert torch.equal(norm(g.x + later)[0], norm(g.x)[0])


@torch.no_grad()
def test_block_composition_adds_the_second_residual_to_the_first_sum(example: Example) -> None:
    g, eye = example.given, torch.eye(3).double()

    def stack(order: str, final: bool) -> Stack:
        ffn = MLP(4, "relu", bias=False)
        tower = Tower(3, 1, GQA(heads=1), ffn, order=order, final_norm=final)
        whole = Stack(tower).double().eval()
        fill(whole.blocks[0].attention, wq=eye, wk=eye, wv=eye, wo=eye)
        fill(whole.blocks[0].ffn, up=g.up, down=g.down)
        return whole

    post = stack("post", final=False)
    block = post.blocks[0]
    example.right(run(block.attention, g.x), "attention")
    example.right(block.norm1(g.x + run(block.attention, g.x)), "middle")
    example.both(run(post, g.x), "post")
    example.right(run(stack("pre", final=False), g.x), "pre")
    example.right(run(stack("pre", final=True), g.x), "pre_final")


def test_inverted_dropout_takes_the_probability_of_dropping(example: Example) -> None:
    g = example.given
    tower = Tower(4, 1, GQA(heads=1), MLP(4), dropout=g.drop)
    block = Block(tower, tower.attention, tower.ffn)  # type: ignore[arg-type]
    for seed in range(200):  # look for the mask of the example
        torch.manual_seed(seed)
        out = block.ffn.add(g.z)
        if torch.equal(out != 0, g.kept > 0):
            break
    example.both(out, "output")
    torch.testing.assert_close(out[0], g.z[0] / g.keep)
    block.eval()
    assert torch.equal(block.ffn.add(g.z), g.z)


def test_gelu_has_an_exact_and_a_tanh_form(example: Example) -> None:
    for name in ("gelu", "gelu_tanh"):
        example.right(activation(name)(example.given.x), name)
    x = torch.linspace(-6, 6, 100001, dtype=torch.float64)
    apart = (activation("gelu")(x) - activation("gelu_tanh")(x)).abs().max()
    torch.testing.assert_close(apart.item(), 4.732e-4, atol=1e-7, rtol=0)
