"""Fine-tuning: a new head on a body that stays, what learns and what does not, and LoRA until it is merged."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.config import from_dict
from regard.data.config import Data
from regard.data.feed import Batch
from regard.errors import UsageError
from regard.fast.train import checkpointed, precision
from regard.layers import LM, MLM, Answer, Classify, Head, Tag
from regard.models.adapt import LoRA, LowRank, low_ranks, merge, rounded, with_head
from regard.training.config import Adapt, Config, adapted
from regard.training.objectives import causal, classify
from regard.training.optim import Optim, Optimizer, accumulate, clip

TEXT: dict[str, Any] = dict(dim=24, layers=2, heads=3, ffn_dim=20, vocab=50, max_len=40)
BODIES: dict[str, Callable[[], regard.Model]] = {
    "gpt2": lambda: regard.build("gpt2", **TEXT),
    "llama": lambda: regard.build("llama", **TEXT, kv_heads=1),
    "bert": lambda: regard.build("bert-base", **TEXT),
    "vit": lambda: regard.build("vit-small", dim=24, layers=2, heads=3, ffn_dim=20, size=12, patch=4),
    "mla": lambda: regard.build("gpt2", **{**TEXT, "attention": regard.MLA(3, 16)}),
    "t5": lambda: regard.build("t5-small", dim=24, layers=2, heads=3, ffn_dim=20, vocab=50),
}  # fmt: skip
LABELLED = [Classify(3), Tag(3), Answer()]


def body(name: str) -> Any:
    """With biases and gains that are not zeros and ones, so that a mistake shows."""
    model = BODIES[name]()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model


def given(name: str) -> tuple[Tensor, ...]:
    if name == "vit":
        return (torch.randn(4, 3, 12, 12),)
    return torch.randint(50, (4, 7)), torch.tensor([7, 3, 5, 1])


def batch(name: str) -> Batch:
    return Batch(given(name)[0], torch.tensor([0, 1, 2, 0]), *given(name)[1:])


def copies(model: Any) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.state_dict().items()}


def train(model: Any, objective: Any, data: Batch, steps: int, lr: float = 1e-2) -> list[float]:
    optimizer, losses = Optimizer(model, Optim(lr=lr, decay=0.0)), []
    for _ in range(steps):
        loss, count = accumulate(objective, model, [data])
        clip(optimizer.named.values(), None, count)
        optimizer.step()
        optimizer.zero()
        losses.append(float(loss / count))
    return losses


# --- heads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", LABELLED, ids=lambda head: head.kind)
@pytest.mark.parametrize("name", BODIES)
def test_new_head_keeps_the_body_to_the_bit(name: str, head: Any) -> None:
    model = body(name)
    before = {id(p): p.detach().clone() for p in model.parameters()}
    made, x = with_head(model, head), given(name)
    kept = [p for n, p in made.named_parameters() if not n.startswith("head.")]
    assert kept and all(torch.equal(p, before[id(p)]) for p in kept)
    one, patches = isinstance(head, Classify), isinstance(head, Tag) and name == "vit"
    # The class token of an image has no label.
    read = made.hidden(*x).shape[1] - (1 if patches else 0)
    assert made(*x).shape == ((4, 3) if one else (4, read, head.labels))


def test_new_head_is_decided_by_the_seed() -> None:
    def out(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return with_head(BODIES["bert"](), Classify(3)).head.out.weight  # type: ignore[union-attr, return-value]

    torch.manual_seed(5)
    first = BODIES["bert"]()
    torch.manual_seed(5)
    assert torch.equal(first.embedding.weight, BODIES["bert"]().embedding.weight)
    assert torch.equal(out(5), out(5)) and not torch.equal(out(5), out(6))


@pytest.mark.parametrize(
    "name, form",
    [
        ("gpt2", Classify(3, None, "last", False)),
        ("llama", Classify(3, None, "last", False)),
        ("bert", Classify(3, "tanh", dropout=0.1)),
        ("vit", Classify(3, None)),
    ],
)
def test_classify_takes_the_form_that_suits_the_body(name: str, form: Classify) -> None:
    assert with_head(body(name), Classify(3)).config.head == form


def test_the_form_that_is_said_stays() -> None:
    said = Classify(3, "relu", "last")
    assert with_head(body("gpt2"), said).config.head == said


@pytest.mark.parametrize("name", ["gpt2", "llama", "mla"])
def test_classification_at_the_last_token_ignores_padding(name: str) -> None:
    model, (ids, lengths) = with_head(body(name), Classify(3)), given(name)
    logits, other = model(ids, lengths), ids.clone()
    for row, n in enumerate(lengths.tolist()):
        other[row, n:] = 49 - other[row, n:]
        torch.testing.assert_close(logits[row], model(ids[row : row + 1, :n])[0])
    assert torch.equal(logits, model(other, lengths))
    assert torch.equal(model(ids, lengths.tolist()), logits)
    changed = ids.clone()
    changed[0, 0] = 49 - changed[0, 0]  # the last token has seen the first
    assert not torch.equal(model(changed, lengths)[0], logits[0])


def test_pooler_becomes_the_dense_layer_of_a_classifier() -> None:
    config = regard.build("bert-base", **TEXT).config
    model: Any = regard.build(config, head=None, pooler="tanh")
    pooler = model.pooler
    made: Any = with_head(model, Classify(3))
    assert made.head.dense is pooler and made.pooler is None and made.config.pooler is None


def test_head_of_an_encoder_decoder_stands_on_its_encoder() -> None:
    model: Any = body("t5")
    ids, lengths = given("t5")
    memory, _ = model.encode(ids, lengths)
    made = with_head(model, Tag(3))
    assert torch.equal(made.hidden(ids, lengths), memory)
    again: Any = with_head(body("t5"), LM(tied=False))
    assert again(ids, source=ids).shape == (4, 7, 50)


def test_heads_that_cannot_be_are_refused_in_one_sentence() -> None:
    with pytest.raises(
        UsageError, match=r"has seen nothing else; say Classify\(labels, token='last'"
    ):
        with_head(body("gpt2"), Classify(3, "relu"))
    with pytest.raises(UsageError, match="an image has no vocabulary"):
        with_head(body("vit"), MLM())
    with pytest.raises(UsageError, match="a recurrent model keeps the head"):
        with_head(regard.build("gru-lm", dim=8, vocab=20), Classify(3))
    with pytest.raises(
        UsageError, match="token = 'middle' is unknown; known: both, each, first, last, mean"
    ):
        Classify(3, token="middle")


# --- what learns --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", ["all", Adapt().targets], ids=["all", "default"])
@pytest.mark.parametrize("name", BODIES)
@torch.no_grad()  # which kernel attends may depend on who needs a gradient
def test_lora_changes_nothing_at_first(name: str, targets: Any) -> None:
    model, x = with_head(body(name), Classify(3)), given(name)
    before = model(*x)
    adapted(model, Adapt("lora", targets=targets))
    assert low_ranks(model) and torch.equal(model(*x), before)
    with precision("bf16", "cpu"):
        assert torch.equal(model(*x), copy.deepcopy(merge(model))(*x))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "bert", "mla"])
def test_only_lora_and_the_head_get_gradients(name: str, recompute: bool) -> None:
    model = adapted(with_head(body(name), Classify(3)), Adapt("lora", dropout=0.1)).train()
    model = checkpointed(model) if recompute else model
    with torch.no_grad():
        for low in low_ranks(model).values():
            low.b.normal_()
    with precision("bf16" if recompute else "fp32", "cpu"):
        accumulate(classify, model, [batch(name)])
    got = {n for n, p in model.named_parameters() if p.grad is not None}
    lora = {f"{n}.{part}" for n in low_ranks(model) for part in "ab"}
    head = {n for n, _ in model.named_parameters() if n.startswith("head.")}
    assert got == lora | head
    assert all(p.grad.abs().sum() > 0 for n, p in model.named_parameters() if n in lora)  # type: ignore[union-attr]


@pytest.mark.parametrize("method", ["lora", "frozen"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit"])
def test_training_lowers_the_loss_and_leaves_the_body(name: str, method: str) -> None:
    model = adapted(with_head(body(name), Classify(3)), Adapt(method))
    before = copies(model)
    losses = train(model, classify, batch(name), 20)
    assert losses[-1] < 0.9 * losses[0]
    after, moved = copies(model), {n for n, p in model.named_parameters() if p.requires_grad}
    assert moved and all(not torch.equal(after[n], before[n]) for n in moved)
    assert all(torch.equal(after[n], before[n]) for n in before.keys() - moved)
    assert any(n.endswith("wq.b") for n in moved) == (method == "lora")


def test_vocabulary_head_that_came_with_the_model_is_left_by_lora_and_a_new_one_is_not() -> None:
    model = adapted(body("llama"), Adapt("lora"))
    assert {n.split(".")[-1] for n in Optimizer(model, Optim()).named} == {"a", "b"}
    ids = given("llama")[0]
    assert train(model, causal, Batch(ids[:, :-1], ids[:, 1:]), 20)[-1] < 3.5
    fresh = adapted(with_head(body("llama"), LM(tied=False)), Adapt("lora"))
    assert "head.weight" in Optimizer(fresh, Optim()).named
    whole = adapted(body("llama"), Adapt("frozen"))
    assert list(Optimizer(whole, Optim()).named) == ["head.weight"]


def test_full_is_the_model_itself() -> None:
    model = body("gpt2")
    assert adapted(model, Adapt()) is model and all(p.requires_grad for p in model.parameters())


def test_targets_choose_layers_by_their_last_name() -> None:
    def names(name: str, **settings: Any) -> set[str]:
        model = adapted(with_head(body(name), Classify(3)), Adapt("lora", **settings))
        return {n.removeprefix("tower.blocks.") for n in low_ranks(model) if ".1." not in n}

    assert names("gpt2") == {"0.attention.wq", "0.attention.wv"}
    assert names("mla") == {"0.attention.w_uq", "0.attention.w_ukv"}
    assert names("gpt2", targets="up") == {"0.ffn.up"}
    every = {f"0.attention.{w}" for w in ("wq", "wk", "wv", "wo")} | {"0.ffn.up", "0.ffn.down"}
    assert names("gpt2", targets=("all",)) == every


def test_indexer_is_left_as_it_is() -> None:
    model = regard.build("gpt2", **{**TEXT, "attention": regard.DSA(regard.GQA(3), 2, 8, 4)})
    assert not any("indexer" in name for name in low_ranks(adapted(model, Adapt("lora"))))


@pytest.mark.parametrize(
    "settings, said",
    [
        (dict(method="lorra"), "adapt.method = 'lorra' is unknown; did you mean 'lora'?"),
        (dict(rank=0), "adapt.rank = 0: give 1 or more"),
        (dict(alpha=0.0), "adapt.alpha = 0.0: give more than 0"),
        (dict(dropout=1.0), "adapt.dropout = 1.0: give 0 to less than 1"),
        (dict(targets=()), "adapt.targets is empty"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        Adapt(**settings)
    assert said in str(caught.value)


def test_layers_that_are_not_there_are_refused() -> None:
    with pytest.raises(
        UsageError, match="no linear layer wqq; known: all, down, up, wk, wo, wq, wv"
    ):
        adapted(body("gpt2"), Adapt("lora", targets=("wqq", "wv")))
    with pytest.raises(UsageError, match="this model has none with weights of its own"):
        adapted(body("gpt2"), Adapt("frozen"))


def test_adapt_is_a_strict_table_of_the_config() -> None:
    table = {"task": "lm", "data": Data(train=("a.txt",)), "model": {"folder": "m"}}
    config = from_dict(Config, {**table, "adapt": {"method": "lora", "targets": ["wq", "up"]}})
    assert config.adapt == Adapt("lora", targets=("wq", "up"))
    assert from_dict(Config, {**table, "adapt": {"targets": "all"}}).adapt.targets == "all"
    assert from_dict(Config, table).adapt == Adapt()
    with pytest.raises(
        UsageError, match=r"adapt.rnk is not a setting of Adapt; did you mean 'rank'"
    ):
        from_dict(Config, {**table, "adapt": {"rnk": 4}})
    with pytest.raises(UsageError, match=r"is for a trained model: name one, \[model\] folder"):
        from_dict(Config, {**table, "model": {"preset": "gpt2"}, "adapt": {"method": "lora"}})


# --- merging ------------------------------------------------------------------------------------------------------


def stirred(name: str, head: Head | None = None, **settings: Any) -> Any:
    model = body(name) if head is None else with_head(body(name), head)
    model = adapted(model, Adapt("lora", **settings)).eval()
    with torch.no_grad():
        for low in low_ranks(model).values():
            low.b.normal_(std=0.3)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_weight_is_the_float64_sum_rounded_once(dtype: torch.dtype) -> None:
    base = torch.nn.Linear(7, 5).to(dtype)
    low = LowRank(base, LoRA(3, 6.0))
    low.b.data.normal_()
    assert low.a.dtype == low.b.dtype == torch.float32
    exact = base.weight.double() + 2.0 * (low.b.double() @ low.a.double())
    merged = low.merged().weight
    assert merged.dtype == dtype and torch.equal(merged, rounded(exact, merged))
    # no other number of this type is nearer
    for to in (-torch.inf, torch.inf):
        other = torch.nextafter(merged.detach(), torch.full_like(merged, to))
        assert ((merged.double() - exact).abs() <= (other.double() - exact).abs()).all()


def test_rounding_to_half_precision_is_done_once() -> None:
    """1 + 2^-8 + 2^-40 lies above the middle of two bfloat16; float32 loses the 2^-40 and then ties go to even."""
    x = torch.tensor(
        [1 + 2**-8 + 2**-40, -(1 + 2**-8 + 2**-40), 1 + 2**-8, 0.1], dtype=torch.float64
    )
    half = torch.empty(0, dtype=torch.bfloat16)
    assert x[0].to(torch.bfloat16) == 1.0  # what torch does
    assert rounded(x, half).tolist()[:3] == [1 + 2**-7, -(1 + 2**-7), 1.0]
    assert rounded(x, half)[3] == torch.tensor(0.1, dtype=torch.bfloat16)
    assert torch.equal(rounded(x, torch.empty(0)), x.float())


@pytest.mark.parametrize("targets", ["all", Adapt().targets], ids=["all", "default"])
@pytest.mark.parametrize("name", BODIES)
def test_merged_model_says_what_the_adapted_one_said(name: str, targets: Any) -> None:
    model, x = stirred(name, Classify(3), targets=targets), given(name)
    before, plain = model(*x), with_head(copy.deepcopy(body(name)), Classify(3))
    merge(model)
    assert not low_ranks(model) and [type(m) for m in model.modules()] == [
        type(m) for m in plain.modules()
    ]
    torch.testing.assert_close(model(*x), before, rtol=1e-4, atol=1e-5)  # float32 rounding


def test_latent_attention_decodes_with_lora_as_it_reads() -> None:
    """The absorbed form multiplies by the weight itself, which has LoRA in it."""
    model, ids = stirred("mla"), given("mla")[0]
    cache = model.cache(4)
    steps = [model(ids[:, i : i + 1], cache=cache)[:, 0] for i in range(7)]
    torch.testing.assert_close(torch.stack(steps, 1), model(ids), rtol=1e-4, atol=1e-4)


def test_experts_router_takes_lora() -> None:
    model = regard.build("llama", **TEXT, kv_heads=1, ffn=regard.MoE(4, 2, 12))
    ids = given("llama")[0]
    adapted(model, Adapt("lora", targets="router"))
    for low in low_ranks(model).values():
        low.b.data.normal_()
    before = model(ids)
    torch.testing.assert_close(merge(model)(ids), before, rtol=1e-4, atol=1e-5)
