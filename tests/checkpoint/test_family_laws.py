"""What holds of every family beside its logits: gradients, dropouts in training, the start of new weights, bf16."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard.checkpoint.families import FAMILIES
from regard.checkpoint.hf import plan
from regard.checkpoint.rules import Fixed
from regard.layers import Answer, Classify, Tag
from regard.models.adapt import with_head
from regard.models.init import initialize
from tests.checkpoint.families import CASES, KEPT, Peer, at_tokens, batch, theirs, written
from tests.wide import wide

Peers = Callable[[str], Peer]
every = pytest.mark.parametrize("name", wide(CASES, keep=KEPT))
ARCHITECTURES = {c.architecture: c for c in reversed(CASES.values())}
each_architecture = pytest.mark.parametrize(
    "architecture", wide(ARCHITECTURES, keep={CASES[name].architecture for name in KEPT})
)


def test_every_architecture_has_a_case() -> None:
    assert {a for family in FAMILIES.values() for a in family.heads} - ARCHITECTURES.keys() == set()


def in_our_words(model: regard.Model, module: Any, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors named as transformers names its parameters -> the same by our names."""
    from transformers.core_model_loading import revert_weight_conversion

    family = FAMILIES[model.origin.family]
    stored = revert_weight_conversion(module, dict(given))
    base = "" if any(n.startswith(family.base) for n in stored) else family.base
    named = {base + written(n): x for n, x in stored.items()}
    found: dict[str, Tensor] = {}
    for step in plan(model, family):
        if all(n in named for n in step.theirs):
            loaded = step.load([named[n] for n in step.theirs])
            found |= dict(zip(step.ours, loaded, strict=True))
    return found


# --- gradients ----------------------------------------------------------------------------------------------------


# Their delta rule computes in float32 whatever it is given, and its gradient was 5e-4 from the exact one on a CPU where
# ours was 2e-4 from it.
LOOSE = {"qwen3-next": 1e-3}


@every
def test_gradients_of_every_parameter_match(name: str, peer: Peers) -> None:
    """Relative to the largest of each tensor; what is 0 but for rounding (of a key's bias), to the whole gradient."""
    module = peer(name).model
    model, given = regard.from_hf(module), batch(module.config)
    answer, mine = theirs(module, given)[0], model(**given)
    weight = torch.randn(at_tokens(mine, given).shape, generator=torch.Generator().manual_seed(0))
    for out in (answer, mine):
        (at_tokens(out, given) * weight).sum().backward()
    parameters = dict(module.named_parameters(remove_duplicate=False))
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in parameters.items()}
    wanted = in_our_words(model, module, grads)
    module.zero_grad()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert trained.keys() <= wanted.keys()
    least = 1e-2 * max(x.abs().max().item() for x in wanted.values())
    off = {}
    for n, p in trained.items():
        got = torch.zeros_like(p) if p.grad is None else p.grad
        off[n] = (got - wanted[n]).abs().max().item() / max(wanted[n].abs().max().item(), least)
    assert {n: x for n, x in off.items() if x > LOOSE.get(name, 1e-5)} == {}


@pytest.mark.parametrize("name, preset", [("bart", "bart-base"), ("marian", "marian")])
def test_bias_of_the_logits_is_kept_and_not_trained(name: str, preset: str, peer: Peers) -> None:
    model = regard.from_hf(peer(name).model)
    assert not model.head.bias.requires_grad and (model.head.bias != 0).any()
    assert not regard.build(preset, device="meta").head.bias.requires_grad
    assert regard.build("gpt2", device="meta", **{"head.bias": True}).head.bias.requires_grad


# --- dropouts -----------------------------------------------------------------------------------------------------


def census(run: Callable[[], Any]) -> Counter[tuple[float, int]]:
    """Which dropouts act in a forward pass: the rate, and of how many numbers (0: of attention's weights)."""
    seen: Counter[tuple[float, int]] = Counter()

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if training and p:
            weights = x.dim() == 4 or x.shape[-1] == x.shape[-2:][0]
            seen[p, 0 if weights else x.numel()] += 1
        return x

    with patch.object(F, "dropout", dropout):
        run()
    return seen


# Of Falcon 0 alone is read, as transformers drops its parts by one draw; MPT's is a whole number.
STILL = ("falcon", "mpt")


def rates(config: Any) -> dict[str, float]:
    """A rate of its own for each of a config's dropouts."""
    family = FAMILIES[config.model_type]
    names = [n for n in sorted(family.keys | config.to_dict().keys()) if "drop" in n]
    # ESM's token_dropout is a switch.
    names = [
        n for n in names if n != "token_dropout" and not isinstance(family.config.get(n), Fixed)
    ]
    return {n: round(0.11 + 0.01 * i, 2) for i, n in enumerate(names) if "layerdrop" not in n}


@pytest.mark.parametrize("said", [True, False], ids=["said", "default"])
@each_architecture
def test_dropouts_in_training_are_theirs(architecture: str, said: bool) -> None:
    transformers = pytest.importorskip("transformers")
    case, cls = ARCHITECTURES[architecture], getattr(transformers, architecture)
    settings = {**copy.deepcopy(case.settings), "attn_implementation": "eager"}
    settings |= rates(cls.config_class()) if said else {}
    for part in ("text_config", "vision_config"):
        if said and part in settings:
            settings[part] |= rates(cls.config_class.sub_configs[part]())
    module = cls(cls.config_class(**settings)).train()
    model, given = regard.from_hf(module).train(), batch(module.config)
    wanted = census(lambda: theirs(module, given))
    assert census(lambda: model(**given, backend="reference")) == wanted
    # Ernie 4.5 and Mamba have none.
    if said and rates(cls.config_class()) and module.config.model_type not in STILL:
        assert wanted


@pytest.mark.parametrize("drop, kept", [(0.0, 2), (0.999, 0)])
def test_layer_drop_leaves_layers_out_of_training_alone(drop: float, kept: int) -> None:
    pytest.importorskip("transformers")
    model = regard.from_hf(CASES["bart"].make())
    changed = regard.build(model.config, **{"encoder.layer_drop": drop})
    seen: list[int] = []
    for block in changed.encoder.blocks:
        block.register_forward_hook(lambda *_: seen.append(1))
    given = batch(CASES["bart"].make().config)
    torch.manual_seed(0)
    changed.train()(**given)
    assert len(seen) == kept
    changed.eval()(**given)
    assert len(seen) == kept + 2


# --- the start of new weights -------------------------------------------------------------------------------------


def drawn() -> Any:
    """Random draws write their deviation instead: each tensor shows the one that it was drawn with."""

    def normal(
        self: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None
    ) -> Tensor:
        return self.fill_(mean + std)

    def uniform(self: Tensor, *_: Any, **__: Any) -> Tensor:
        # trunc_normal_ makes a normal number of it, and of this one 1 deviation
        return self.fill_(math.erf(0.5**0.5))

    return patch.multiple(torch.Tensor, normal_=normal, uniform_=uniform)


def largest(x: Tensor) -> float:
    return x.abs().max().item()


@each_architecture
def test_new_weights_start_as_theirs(architecture: str) -> None:
    transformers = pytest.importorskip("transformers")
    case, cls = ARCHITECTURES[architecture], getattr(transformers, architecture)
    with drawn():
        module = cls(cls.config_class(**copy.deepcopy(case.settings)), **case.options)
        model = regard.from_hf(module)
        wanted = in_our_words(model, module, module.state_dict())
        initialize(model, model.origin.start)
    assert model.origin.start == FAMILIES[model.origin.family].start
    got = dict(model.named_parameters())
    assert got.keys() <= wanted.keys()
    off = {n: (largest(p), largest(wanted[n])) for n, p in got.items()}
    assert {n: pair for n, pair in off.items() if pair[0] != pytest.approx(pair[1], rel=1e-4)} == {}


@pytest.mark.parametrize(
    "name", ["bert-body", "roberta-body", "xlm-roberta-body", "distilbert-body", "gpt2-body"]
)
@pytest.mark.parametrize("head", [Classify(3), Tag(3), Answer()], ids=lambda head: head.kind)
def test_new_head_is_the_one_that_the_folder_asks_for(name: str, head: Any) -> None:
    """Its dropout and its deviation, as transformers would put it on this body."""
    transformers = pytest.importorskip("transformers")
    case, kinds = CASES[name], {"classify": "Sequence", "tag": "Token", "answer": "Question"}
    said = case.architecture.removesuffix("Model") + f"For{kinds[head.kind]}Classification"
    said = said.replace("QuestionClassification", "QuestionAnswering")
    if said not in ARCHITECTURES:
        pytest.skip("this family has no such head")
    body = getattr(transformers, case.architecture)
    settings = {**case.settings, "initializer_range": 0.5, "num_labels": head.labels}
    settings |= rates(body.config_class(**settings))
    peer = getattr(transformers, said)
    wanted = regard.from_hf(peer(peer.config_class(**settings))).config.head
    with drawn():
        model = with_head(regard.from_hf(body(body.config_class(**settings))), head)
    assert model.config.head == wanted
    assert largest(model.head.out.weight) == 0.5


def test_family_is_drawn_with_its_deviations() -> None:
    """The law above reads what is asked for; this one what comes out."""
    torch.manual_seed(0)
    model = regard.build("gpt2", layers=2, dim=256, heads=4, vocab=500, max_len=512)
    block = model.tower.blocks[1]
    for weight, std in (
        (block.attention.wq, 0.02),
        (block.attention.wo, 0.01),
        (block.ffn.down, 0.01),
    ):
        assert weight.weight.std().item() == pytest.approx(std, rel=0.02)
        assert not weight.bias.any()
    words = regard.build("vaswani-base", layers=1, dim=256, heads=4, vocab=500)
    block = words.encoder.blocks[0]
    assert block.ffn.up.weight.std().item() == pytest.approx((3 * 256) ** -0.5, rel=0.02)
    assert words.target.weight.std().item() == pytest.approx(256**-0.5, rel=0.02)


# --- bf16 ---------------------------------------------------------------------------------------------------------


@each_architecture
@torch.no_grad()
def test_bfloat16_is_no_further_from_float64_than_theirs(architecture: str, peer: Peers) -> None:
    """Of the same rounded weights, over three batches, or 48 where a text has one answer: the root mean square; where
    tokens are routed the median token, for one that goes to another expert is far off in either."""
    module = copy.deepcopy(peer(ARCHITECTURES[architecture].name).model).bfloat16()
    # their grouped products need wider experts
    module.set_experts_implementation("eager")
    ours, exact = regard.from_hf(module), regard.from_hf(module).double()
    first = batch(module.config, 0)
    batches = [batch(module.config, seed) for seed in range(48 if exact(**first).dim() == 2 else 3)]
    # Beside one another: one call of each model.
    given = {key: torch.cat([x[key] for x in batches]) for key in first}
    given = {key: x.bfloat16() if x.is_floating_point() else x for key, x in given.items()}
    wanted = at_tokens(exact(**given), given)
    answers = (ours(**given), theirs(module, given)[0])
    off = [(at_tokens(answer, given) - wanted).square().mean(-1) for answer in answers]
    counts = ("num_experts_per_tok", "top_k_experts")
    routed = any(getattr(module.config, key, None) is not None for key in counts)
    typical = torch.median if routed else torch.mean
    mine, their = (typical(errors.flatten()).sqrt() for errors in off)
    assert mine <= 1.25 * their
