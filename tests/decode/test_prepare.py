"""A prepared model says what its original says, as exactly as its precision allows, and leaves the original alone."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from regard.attention import GQA, MLA
from regard.attention import sparse as select
from regard.block import Tower
from regard.cache import LAYOUTS
from regard.errors import Notice, UsageError
from regard.fast.cpu import model as prepared
from regard.fast.cpu import perplexity, prepare
from regard.fast.cuda import decoder as decoder_of_slots
from regard.kernels import linear
from regard.kernels.c.linear import usable
from regard.kernels.linear import PRECISIONS
from regard.layers import ACTIVATIONS, LM, MLM, MLP, Answer, Classify, Norm, Tag
from regard.models import (
    EncoderDecoder,
    EncoderDecoderConfig,
    Model,
    Patches,
    RecurrentConfig,
    Seq2SeqConfig,
    Tokens,
    Transformer,
    TransformerConfig,
)
from regard.models.adapt import LoRA, inject, merge
from regard.moe import MixtureOfExperts, MoE
from regard.position import Learned, Rope, Sinusoidal
from regard.see.probe import Probe
from tests.laws.mechanisms import FEW, TOWERS, VOCAB, decoder, ids, options, stir
from tests.wide import crossed, wide

# |logits - original| / |original| of two stirred layers, 24 to 64 wide: each rounding adds to the one before
BOUND = {"fp32": 2e-6, "bf16": 0.03, "int8": 0.06, "int4": 0.35}
precisions = pytest.mark.parametrize("precision", PRECISIONS)


@pytest.fixture(autouse=True)
def half(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What asks for bf16 gets it, slow as it may be here."""
    spec = getattr(request.node, "callspec", None)
    if spec is not None and spec.params.get("precision") == "bf16":
        monkeypatch.setattr(prepared, "half_is_fast", lambda: True)


def small(name: str, **more: object) -> Transformer:
    return decoder(name, **more).float()


def feed(model: Model, x: Tensor, cache: object, sizes: list[int], **first: object) -> Tensor:
    """x in pieces; `first` goes with the first one."""
    out = []
    for part in x.split(sizes, 1):
        out.append(model(part, cache=cache, **first))
        first = {}
    return torch.cat(out, 1)


class Choices:
    """Which keys a sparse attention reads, and which experts a token is sent to: another choice is
    not rounding. Those of the original are kept, and the prepared model is made to choose alike;
    `regret` is how much better its own choices were by its own scores, as a share of the largest
    score."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.kept: list[Tensor] = []
        self.calls, self.replay, self.regret = 0, False, 0.0
        self.choose, self.best = select.choose, MixtureOfExperts.choose
        monkeypatch.setattr(select, "choose", self.keys)
        monkeypatch.setattr(MixtureOfExperts, "choose", lambda *args: self.experts(*args))

    def apart(self, make: Callable[[], Model]) -> Model:
        """What is chosen in the meantime (int8 gives the model tokens to read) is forgotten."""
        made = make()
        self.kept, self.calls, self.regret = [], 0, 0.0
        return made

    def next(self, chosen: Tensor) -> Tensor:
        """Layers choose one after the other, and again for the next piece of a text."""
        if not self.replay:
            self.kept.append(chosen)
        self.calls += 1
        return self.kept[(self.calls - 1) % len(self.kept)]

    def compare(self, scores: Tensor, own: Tensor, theirs: Tensor) -> None:
        real = scores.masked_fill(scores == -torch.inf, 0.0)
        lost = (real.gather(-1, own).sum(-1) - real.gather(-1, theirs).sum(-1)).max()
        self.regret = max(self.regret, (lost / real.abs().max()).item())

    def keys(self, scores: Tensor, k: int) -> Tensor:
        own, (n, s) = self.choose(scores, k), scores.shape[-2:]
        theirs = self.next(own)
        if not self.replay:
            return own
        # of all queries' keys those of the last n queries, as far as they are there
        wide = scores.new_zeros(len(scores), n, max(s, theirs.shape[1]))
        wanted = wide.scatter(-1, theirs[:, s - n : s], 1.0)[..., :s].bool()
        theirs = self.choose(scores.masked_fill(wanted & (scores > -torch.inf), torch.inf), k)
        self.compare(scores, own, theirs)
        return theirs

    def experts(self, part: MixtureOfExperts, scores: Tensor, k: int) -> Tensor:
        own = self.best(part, scores, k)
        theirs = self.next(own)
        self.compare(scores, own, theirs)
        return theirs


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> Choices:
    return Choices(monkeypatch)


def error(y: Tensor, want: Tensor) -> float:
    assert y.shape == want.shape and y.isfinite().all()
    return ((y - want).norm() / want.norm()).item()


@precisions
@pytest.mark.parametrize("name", ["mla", "dsa_mla", "moe"])
def test_prepared_model_has_what_lora_adds_to_weights_that_others_read(
    name: str, precision: str
) -> None:
    """MLA's absorbed form reads its up-projection, a mixture its router: neither is packed."""
    if name == "moe":
        model = small("gqa_rope", ffn=MoE(4, 2, 16))
        lora = [f"tower.blocks.{i}.ffn.router" for i in range(2)]
    else:
        model = small(name)
        lora = [n for n, _ in model.named_modules() if n.endswith("w_ukv")]
    before = model(ids(2, 9))
    inject(model, lora, LoRA(4, 8.0))
    for n, p in model.named_parameters():
        if n.endswith(".b"):
            p.data.normal_(std=0.3)
    x, fast = ids(2, 9), prepare(model, precision)
    with torch.no_grad():
        want, plain = model(x), prepare(merge(copy.deepcopy(model)), precision)
        # what was merged first is packed alike; a mixture may choose other experts after rounding
        got, same = feed(fast, x, fast.cache(2), [8, 1]), feed(plain, x, plain.cache(2), [8, 1])
        assert error(got, same) < 1e-5 if precision == "fp32" else error(got, same) < 0.02
        if precision == "fp32":
            assert error(got, want) < BOUND["fp32"] < error(want, before)


# --- the same answers ---------------------------------------------------------------------------------------------


@precisions
@pytest.mark.parametrize("name", wide(TOWERS, keep=FEW))
@torch.inference_mode()
def test_prepared_decoder_equals_its_original(name: str, precision: str, choices: Choices) -> None:
    model, x = small(name), ids(2, 9)
    fast = choices.apart(lambda: prepare(model, precision))
    want, choices.replay = model(x), True
    # A state alone carries the rounding of every step on: 2.1e-6 were seen in float32.
    bound = BOUND[precision] * (2 if name == "ssd_alone" else 1)
    assert error(fast(x), want) < bound
    assert error(feed(fast, x, fast.cache(2), [4, 1, 1, 3]), want) < bound
    assert choices.regret < BOUND[precision]


@precisions
@pytest.mark.parametrize("layout", LAYOUTS)
@torch.inference_mode()
def test_prepared_decoder_runs_in_every_layout(layout: str, precision: str) -> None:
    for name in ("window", "mla_window"):
        model, x = small(name), ids(3, 9)
        fast = prepare(model, precision)
        cache = fast.cache(3, layout, **options(model, layout, 9))
        assert error(feed(fast, x, cache, [4, 1, 4]), model(x)) < BOUND[precision]


@pytest.mark.parametrize(
    "act, gated, precision", crossed(ACTIVATIONS, [True, False], ["fp32", "bf16", "int8"])
)
@torch.inference_mode()
def test_prepared_feed_forward_equals_its_original(act: str, gated: bool, precision: str) -> None:
    for bias in (True, False):
        model = small("gqa_rope", ffn=MLP(32, act, gated, bias))
        for x in (ids(1, 1), ids(2, 5), ids(4, 10)):
            assert error(prepare(model, precision)(x), model(x)) < max(BOUND[precision], 1e-5)


@precisions
@torch.inference_mode()
def test_capped_logits_are_capped_in_every_head(precision: str) -> None:
    """Of all, of the best alone, and of a graph's, whose added rows can never be said."""
    free, x = small("gqa_rope"), ids(2, 5)
    model = Transformer(replace(free.config, head=LM(tied=False, logit_softcap=0.5))).eval()
    model.load_state_dict(free.state_dict())
    plain, fast = model(x), prepare(model, precision)
    torch.testing.assert_close(plain, 0.5 * torch.tanh(free(x) / 0.5))
    assert error(fast(x), plain) < BOUND[precision]
    _, values, best = fast.next_best(x, 3, (), False)
    torch.testing.assert_close(values, fast(x)[:, -1].gather(1, best))
    graph = decoder_of_slots(model).head.capped(torch.tensor([[-torch.inf, 5.0, 0.0]]))
    assert graph[0, 0] == -torch.inf and graph[0, 1:].tolist() == pytest.approx([0.5, 0.0])


def pair(cross: GQA | MLA, order: str = "pre", **more: object) -> EncoderDecoder:
    tokens, ffn = Tokens(VOCAB, Sinusoidal(64), scaled=True), MLP(64, "relu")
    encoder = Tower(32, 2, GQA(4, bias=True), ffn, causal=False, order=order)
    own = GQA(4, 2, rope=Rope(), bias=True, out_bias=True)
    tower = Tower(32, 2, own, ffn, cross=cross, order=order)
    head = LM(bias=True, scaled=True)
    return stir(EncoderDecoder(EncoderDecoderConfig(tokens, encoder, tokens, tower, head, **more))).float()  # type: ignore[arg-type]  # fmt: skip


CROSS = {
    "mha": GQA(4),
    "mqa": GQA(4, 1, bias=True, value_dim=6),
    "qk_norm": GQA(4, qk_norm=1e-6),
    "mla": MLA(4, latent=9, query_latent=7),
}


@precisions
@pytest.mark.parametrize("order", ["pre", "post"])
@pytest.mark.parametrize("cross", CROSS)
@torch.inference_mode()
def test_prepared_encoder_decoder_equals_its_original(
    cross: str, order: str, precision: str
) -> None:
    model, x, source = pair(CROSS[cross], order), ids(3, 7), ids(3, 6, seed=2)
    more = {"source": source, "source_lengths": [6, 2, 5]}
    fast = prepare(model, precision)
    want = model(x, **more)
    assert error(fast(x, **more), want) < BOUND[precision]
    assert error(feed(fast, x, fast.cache(3), [3, 1, 1, 2], **more), want) < BOUND[precision]
    memory, _ = fast.encode(source)
    assert memory.shape == (3, 6, 32)


MIXTURES = {
    "mixtral": MoE(8, 2, 32),
    "shared": MoE(8, 3, 32, shared=1, normalized=False),
    "grouped": MoE(
        8, 2, 32, shared=1, score="sigmoid", groups=4, active_groups=2, corrected=True, gain=1.5
    ),
}


@precisions
@pytest.mark.parametrize("name", MIXTURES)
@torch.inference_mode()
def test_prepared_mixture_of_experts_equals_its_original(
    name: str, precision: str, choices: Choices
) -> None:
    model, x = small("gqa_rope", ffn=MIXTURES[name]), ids(4, 9)
    fast = choices.apart(lambda: prepare(model, precision))
    want, choices.replay = model(x), True
    assert len(torch.cat([c.flatten() for c in choices.kept]).unique()) > 3
    assert error(fast(x), want) < BOUND[precision]
    assert choices.regret < BOUND[precision]


@precisions
@pytest.mark.parametrize("tied", [True, False])
@torch.inference_mode()
def test_prepared_recurrent_models_equal_their_originals(tied: bool, precision: str) -> None:
    x, source = ids(2, 6), ids(2, 5, seed=2)
    for attention in (None, "additive", "bilinear"):
        model = RecurrentConfig(VOCAB, 32, 2, "gru", attention, tied).make().eval()
        fast = prepare(model, precision)
        want = model(x)
        assert error(fast(x), want) < BOUND[precision]
        assert error(feed(fast, x, fast.cache(2), [3, 1, 2]), want) < BOUND[precision]
    model = Seq2SeqConfig(VOCAB, VOCAB, 32, bidirectional=True, tied=tied).make().eval()
    fast, want = prepare(model, precision), model(x, source=source)
    assert error(fast(x, source=source), want) < BOUND[precision]
    ours = feed(fast, x, fast.cache(2), [3, 1, 2], source=source)
    assert error(ours, want) < BOUND[precision]


@precisions
@pytest.mark.parametrize("head", [None, MLM(), Classify(3), Tag(3), Answer()])
@torch.inference_mode()
def test_prepared_encoder_gives_what_its_head_gives(head: object, precision: str) -> None:
    tokens = Tokens(VOCAB, Learned(10), types=2, norm=Norm())
    tower = Tower(32, 2, GQA(4, bias=True), MLP(64, "gelu"), causal=False, order="post")
    model = stir(Transformer(TransformerConfig(tokens, tower, head, "tanh"))).float()  # type: ignore[arg-type]
    fast, x = prepare(model, precision), ids(2, 6)
    y, want = fast(x, [6, 4]), model(x, [6, 4])
    if y.dim() == 3:
        # A prepared model computes nothing at padding.
        y, want = (torch.cat([out[0], out[1, :4]]) for out in (y, want))
    assert y.dtype == torch.float32 and error(y, want) < BOUND[precision]
    assert error(fast.pool(x).float(), model.pool(x)) < BOUND[precision]


@precisions
@torch.inference_mode()
def test_prepared_image_model_gives_labels(precision: str) -> None:
    tower = Tower(32, 2, GQA(4), MLP(64), causal=False)
    model = stir(Transformer(TransformerConfig(Patches(8, 4), tower, Classify(3)))).float()
    images = torch.randn(2, 3, 8, 8)
    assert error(prepare(model, precision)(images), model(images)) < BOUND[precision]


@torch.inference_mode()
def test_prepared_model_shows_its_attention_to_a_probe() -> None:
    model, x = small("gqa_rope"), ids(1, 5)
    ours, theirs = Probe(), Probe()
    prepare(model)(x, probe=ours), model(x, probe=theirs)
    torch.testing.assert_close(ours.maps["1.self"][0], theirs.maps["1.self"][0])


@torch.inference_mode()
def test_prepared_fp32_takes_a_model_of_another_dtype() -> None:
    model, x = decoder("gqa_rope"), ids(2, 5)
    fast = prepare(model)
    assert fast(x).dtype == torch.float32
    assert error(fast(x), model(x).float()) < BOUND["fp32"]


@precisions
@torch.inference_mode()
def test_prepared_model_runs_on_a_machine_without_the_ops(
    monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    for module in (linear, prepared):
        monkeypatch.setattr(module, "usable", lambda precision: False)
    monkeypatch.setattr(prepared, "half_is_fast", lambda: precision == "bf16")
    model, x = small("gqa_rope"), ids(2, 9)
    fast = prepare(model, precision)
    assert error(feed(fast, x, fast.cache(2), [4, 1, 4]), model(x)) < BOUND[precision]
    wide = torch.bfloat16 if precision == "bf16" else torch.float32
    assert fast.cache(1).dtype == wide  # bf16 would be slow here


@pytest.mark.parametrize(
    "precision, name",
    crossed(["int8", "int4"], [name for name in TOWERS if name.startswith("mla")]),
)
@torch.inference_mode()
def test_a_row_of_latent_attention_has_its_bits_in_any_company(name: str, precision: str) -> None:
    """int8 rounds activations: what differs in its last bit may be a step apart after it."""
    fast, x = prepare(small(name), precision), ids(6, 40)
    alone = torch.cat([feed(fast, row[None], fast.cache(1), [20] + [1] * 20) for row in x])
    for sizes in ([20] + [1] * 20, [7, 13] + [1] * 20, [40], [3] * 13 + [1]):
        assert torch.equal(feed(fast, x, fast.cache(6), sizes), alone), sizes


# --- the original, and memory -------------------------------------------------------------------------------------


@precisions
def test_original_stays_as_it_was(precision: str) -> None:
    for model in (small("qk_norm"), pair(GQA(4)), RecurrentConfig(VOCAB, 32).make()):
        more = {"source": ids(2, 4)} if isinstance(model, EncoderDecoder) else {}
        model.train()
        tensors = {n: (p, p.clone()) for n, p in model.named_parameters()}
        before = model(ids(2, 5), **more)
        fast = prepare(model, precision)
        fast(ids(2, 5), **more)
        # Where oneDNN has no bf16 product, torch's first one has switched it off: other last bits.
        torch.backends.mkldnn.set_flags(True)
        assert torch.equal(model(ids(2, 5), **more), before)
        assert model.training and all(m.training for m in model.modules())
        assert dict(model.named_parameters()).keys() == tensors.keys()
        for name, p in model.named_parameters():
            assert p is tensors[name][0] and torch.equal(p, tensors[name][1]) and p.requires_grad
        assert fast.config is model.config and fast.origin is model.origin


def test_prepared_model_shares_what_needs_no_change() -> None:
    model = small("gqa_rope")
    fast = prepare(model)
    assert fast.embedding.weight.data_ptr() == model.embedding.weight.data_ptr()
    if not usable("fp32"):  # native products have an order of their own
        assert fast.head.product.weight.data_ptr() == model.head.weight.data_ptr()
    half = prepare(pair(GQA(4)), "int8")
    assert half.source.weight is half.target.weight


def test_consumed_model_leaves_its_products_and_keeps_its_embedding() -> None:
    model = small("gqa_rope")
    want = model(ids(2, 5))
    fast = prepare(model, "int8", consume=True)
    torch.testing.assert_close(fast(ids(2, 5)), want, rtol=0.3, atol=0.3)  # int8
    linears = [m for m in model.tower.modules() if isinstance(m, torch.nn.Linear)]
    assert linears and all(m.weight.numel() == 0 for m in linears)
    assert model.embedding.weight.numel()


@pytest.mark.parametrize("precision, dtype", [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_cache_of_a_prepared_model_has_its_dtype(precision: str, dtype: torch.dtype) -> None:
    assert prepare(small("mla"), precision).cache(1).dtype == dtype


# --- what is refused ----------------------------------------------------------------------------------------------


def refused(match: str) -> object:
    return pytest.raises(UsageError, match=match)


def test_unknown_precision_names_the_choices() -> None:
    with refused("precision 'fp16' is unknown; choose one of fp32, bf16, int8, int4"):
        prepare(small("mha"), "fp16")


def test_bf16_on_a_cpu_that_does_not_multiply_it_is_fp32_and_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prepared, "half_is_fast", lambda: False)
    with pytest.warns(
        Notice, match="this CPU does not multiply bf16: fp32, which is faster, is taken"
    ):
        fast = prepare(small("mha"), "bf16")
    assert fast.precision == "fp32" and fast.cache(1).dtype == torch.float32


def test_prepared_model_is_for_running(tmp_path: Path) -> None:
    fast = prepare(small("mha"), "int8")
    with refused("prepared in int8 is for running.*save the original"):
        fast.save(tmp_path / "model")
    assert not (tmp_path / "model").exists()
    with refused("cannot be trained"):
        fast.train()
    with refused("cannot be moved or cast"):
        fast.to(torch.float64)
    with refused("already prepared in int8; prepare the original"):
        prepare(fast, "int4")


# --- the price ----------------------------------------------------------------------------------------------------


def test_perplexity_is_the_mean_over_all_tokens_but_the_first() -> None:
    model, x = small("gqa_rope"), ids(3, 7)
    log_p = model(x)[:, :-1].log_softmax(-1).gather(-1, x[:, 1:, None])
    assert perplexity(model, x) == pytest.approx(log_p.mean().neg().exp().item(), rel=1e-5)
    assert perplexity(prepare(model), x) == pytest.approx(perplexity(model, x), rel=1e-5)


@pytest.mark.parametrize("precision, worst", [("bf16", 0.02), ("int8", 0.01), ("int4", 0.3)])
def test_perplexity_changes_little(precision: str, worst: float) -> None:
    model = pair(GQA(4))
    source = ids(4, 6, seed=2)
    before, after = (perplexity(m, ids(4, 12), source) for m in (model, prepare(model, precision)))
    assert abs(after / before - 1) < worst


def test_perplexity_needs_two_tokens() -> None:
    model = small("mha")
    with refused("at least two tokens"):
        perplexity(model, ids(2, 1))


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_samples_that_stand_together_and_then_texts_that_do_not(layout: str) -> None:
    """Samples of one prompt share a position; a step that was recorded of them serves no others."""
    import regard
    from regard.decode.settings import Request, Settings
    from regard.files import DEMO

    engine = regard.Engine(regard.prepare(regard.load(DEMO)), layout=layout)
    for _ in range(2):
        engine.submit(Request([70, 71], Settings(max_new_tokens=8, samples=2, temperature=1.0)))
        list(engine.run())
        for size in (2, 5):
            engine.submit(Request([70] * size, Settings(max_new_tokens=8)))
        list(engine.run())
