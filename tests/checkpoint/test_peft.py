"""Adapters are PEFT's files: one that PEFT made is read here, one that was made here is read by PEFT."""

import copy
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.checkpoint import adapter, hf, save_adapter
from regard.errors import UsageError
from regard.layers import Classify
from regard.models.adapt import low_ranks, with_head
from regard.training.config import Adapt, adapted
from tests.checkpoint.families import FEW, ONE_PER_FAMILY, Peer, batch, error, theirs
from tests.wide import wide


@cache
def peft() -> Any:
    """Imported by the first test that needs it: that takes seconds, which not every process that collects has to."""
    return pytest.importorskip("peft", reason="the peer; it is in the dev extra")


Peers = Callable[[str], Peer]
# Every family, and what has other names in it: bare bodies, several layers of ours in one of theirs, labels.
NAMES = [
    # Of Mamba it refuses the output, and has no name for a part of the input.
    *(name for name in ONE_PER_FAMILY if name != "mamba2"),
    *("gpt2-body", "llama-body", "bert-body", "t5-body", "vit-no-pooler", "phi3-partial"),
    *("albert-groups", "bert-ForQuestionAnswering", "gpt2-ForTokenClassification"),
]
every = pytest.mark.parametrize(
    "name",
    wide(NAMES, keep=[*FEW, "phi3", "gpt2-body", "albert-groups", "gpt2-ForTokenClassification"]),
)


def modules(model: Any) -> dict[str, Any]:
    """Their names of the layers that may have LoRA. In a mixture PEFT takes names of feed-forwards for experts."""
    family, theirs, _ = hf.express(model, model.origin)
    steps, mixed = adapter._steps(model, family, theirs), hasattr(model.config, "tower")
    mixed = mixed and any(
        getattr(ffn, "kind", "") == "moe" for ffn in model.config.tower.each("ffn")
    )
    return {n: s for n, s in steps.items() if not mixed or "attn" in n or "mamba" in n}


def equal(ours: Any, peer: Any) -> bool:
    """To 1e-5 of the largest logit, or of 1."""
    size = theirs(peer, batch(peer.config))[0].abs().max().item()
    return error(ours, peer) < 1e-5 * max(1.0, size)


def made_by_peft(peer: Peer, folder: Path, **settings: Any) -> Any:
    targets = list(modules(regard.load(peer.folder)))
    how: dict[str, Any] = dict(r=3, lora_alpha=5, init_lora_weights=False, target_modules=targets)
    torch.manual_seed(1)
    wrapped = peft().get_peft_model(
        copy.deepcopy(peer.model), peft().LoraConfig(**(how | settings))
    )
    wrapped.eval().save_pretrained(folder)
    return wrapped.base_model.model


@every
def test_what_peft_made_is_read(name: str, peer: Peers, tmp_path: Path) -> None:
    made = peer(name)
    theirs = made_by_peft(made, tmp_path / "small")
    plain, ours = regard.load(made.folder), regard.load(made.folder, adapter=tmp_path / "small")
    assert error(plain, theirs) > 1e-3 and not low_ranks(ours)
    assert equal(ours, theirs)


@every
def test_what_is_made_here_peft_reads(name: str, peer: Peers, tmp_path: Path) -> None:
    made = peer(name)
    ours: Any = regard.load(made.folder)
    inner = {n.split(".")[-2] for s in modules(ours).values() for n in s.ours}
    adapted(ours, Adapt("lora", 3, 5.0, targets=tuple(inner)))
    for low in low_ranks(ours).values():
        torch.nn.init.normal_(low.b, std=0.2)
    folder = save_adapter(ours.eval(), tmp_path / "small")
    theirs = peft().PeftModel.from_pretrained(copy.deepcopy(made.model), folder).eval()
    found = {n for n, m in theirs.base_model.model.named_modules() if hasattr(m, "lora_A")}
    assert found == modules(ours).keys()
    assert equal(ours, theirs.base_model.model)
    assert equal(regard.load(folder), theirs.base_model.model)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert-body", "bert-ForMaskedLM"])
def test_head_that_peft_learned_is_read(name: str, peer: Peers, tmp_path: Path) -> None:
    """A body with a new head for labels, which the adapter has."""
    import transformers

    made = peer(name)
    kind = transformers.AutoModelForSequenceClassification
    theirs = kind.from_pretrained(made.folder, num_labels=4, pad_token_id=0)
    how = peft().LoraConfig(r=2, init_lora_weights=False, use_rslora=True, task_type="SEQ_CLS")
    theirs = peft().get_peft_model(theirs, how).eval()
    theirs.save_pretrained(tmp_path / "small")
    if name == "bert-ForMaskedLM":
        # The pooler is new too, and PEFT did not learn it: what it began with is nowhere.
        with pytest.raises(UsageError, match="head.dense.bias is missing"):
            regard.load(made.folder, adapter=tmp_path / "small")
        return
    ours = regard.load(made.folder, adapter=tmp_path / "small")
    assert equal(ours, theirs.base_model.model)


def test_labels_learned_here_are_read_by_peft(peer: Peers, tmp_path: Path) -> None:
    import transformers

    ours: Any = with_head(regard.load(peer("llama").folder), Classify(4))
    ours.origin.config["pad_token_id"] = 0
    adapted(ours, Adapt("lora", 2, rslora=True))
    for p in (p for p in ours.parameters() if p.requires_grad):
        torch.nn.init.normal_(p, std=0.2)
    folder = save_adapter(ours.eval(), tmp_path / "small")
    kind = transformers.AutoModelForSequenceClassification
    theirs = kind.from_pretrained(peer("llama").folder, num_labels=4, pad_token_id=0)
    theirs = peft().PeftModel.from_pretrained(theirs, folder).eval()
    assert equal(ours, theirs.base_model.model)


def test_adapters_that_are_more_than_lora_or_of_another_base_are_refused(
    peer: Peers, tmp_path: Path
) -> None:
    made, small = peer("gpt2"), tmp_path / "small"
    made_by_peft(made, small)
    with pytest.raises(UsageError, match="is an adapter of another model .*h.0.attn.c_attn"):
        regard.load(peer("llama").folder, adapter=small)
    with pytest.raises(UsageError, match="another model .*matrices of transformer.h.0.attn.c_attn"):
        regard.load(peer("gpt2-7-heads-of-3").folder, adapter=small)
    with pytest.raises(UsageError, match=r"say which: regard.load\(BASE, adapter="):
        regard.load(small)
    with pytest.raises(UsageError, match="it is not an adapter; name a folder"):
        regard.load(made.folder, adapter=made.folder)
    config = json.loads((small / "adapter_config.json").read_text())
    wrong = {"use_dora": True, "bias": "all", "peft_type": "IA3", "lora_alpha": "x"}
    for name, value in {**wrong, "init_lora_weights": "pissa"}.items():
        text = json.dumps({**config, name: value})
        (small / "adapter_config.json").write_text(text)
        with pytest.raises(UsageError, match=f"says {name} = .*merge it with PEFT"):
            regard.load(made.folder, adapter=small)
    (small / "adapter_config.json").write_text(json.dumps(config | {"new": None}))
    regard.load(made.folder, adapter=small)
