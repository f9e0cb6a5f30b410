"""The loss of MTP layers: by its formula, of packed documents, beside the model's; what learns and what not."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard.data.feed import IGNORE, Batch
from regard.errors import UsageError
from regard.mask import Span
from regard.models.mtp import MTP
from regard.moe import MoE
from regard.training.objectives import MTP_WEIGHT, Tally, causal, further_loss

SIZES: dict[str, Any] = dict(
    dim=32, heads=4, kv_heads=2, layers=2, ffn_dim=24, vocab=40, max_len=48
)
NEAR = {"rtol": 1e-10, "atol": 1e-10}


def model(depth: int = 1, **changes: Any) -> Any:
    torch.manual_seed(0)
    m = regard.build("llama", **SIZES, **changes, mtp=MTP(depth)).double()
    with torch.no_grad():
        for p in m.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return m


def texts(*sizes: int) -> list[list[int]]:
    g = torch.Generator().manual_seed(1)
    return [torch.randint(0, 40, (n,), generator=g).tolist() for n in sizes]


def row(text: list[int]) -> Batch:
    ids = torch.tensor([text])
    return Batch(ids[:, :-1], ids[:, 1:].clone())


def formula(m: Any, text: list[int]) -> Tensor:
    """Position by position: what each layer says of the token that lies further on."""
    ids = torch.tensor([text[:-1]])
    h, total = m.hidden(ids), torch.zeros((), dtype=torch.double)
    depth = m.mtp.config.depth
    for k in range(depth):
        size = len(text) - 2 - k
        if size < 1:
            break
        pos = Span.run(0, size, ids.device)
        h = m.further(h[:, :size], ids[:, 1 + k :], pos, k)
        want = torch.tensor(text[2 + k :])
        total = total + F.cross_entropy(m.logits(h)[0], want, reduction="sum") / depth
    return total


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_loss_is_that_of_the_formula(depth: int) -> None:
    m, (text,) = model(depth), texts(12)
    batch = row(text)
    loss, count = further_loss(m, m.hidden(batch.ids), batch)
    torch.testing.assert_close(loss, formula(m, text), **NEAR)
    assert count.item() == pytest.approx(sum(len(text) - 2 - k for k in range(depth)) / depth)


@pytest.mark.parametrize("depth", [1, 2])
def test_packed_documents_are_as_alone(depth: int) -> None:
    m, each = model(depth), texts(9, 3, 2, 11)
    ids = torch.tensor([[i for text in each for i in text[:-1]]])
    labels = torch.tensor([[i for text in each for i in text[1:]]])
    doc = torch.tensor([[n for n, text in enumerate(each) for _ in text[1:]]])
    batch = Batch(ids, labels, doc=doc)
    mask = causal(m.eval(), batch)
    m.train()
    tally = Tally()
    whole, count = causal(m, batch, tally=tally)
    alone = [causal(m, row(text)) for text in each]
    torch.testing.assert_close(whole, torch.stack([x for x, _ in alone]).sum(), **NEAR)
    further = sum(formula(m, text) for text in each)
    assert not isinstance(further, int)
    torch.testing.assert_close(whole - mask[0], MTP_WEIGHT * further, **NEAR)
    assert count == sum(n for _, n in alone)
    told = sum(len(text) - 2 - k for text in each for k in range(depth) if len(text) > 2 + k)
    assert tally.means()["mtp_loss"] == pytest.approx(further.item() / (told / depth))


def test_labels_that_do_not_count_are_not_predicted() -> None:
    """As in a conversation, of which the assistant's words alone are learned."""
    m, (text,) = model(), texts(12)
    batch = row(text)
    batch.labels[:, :6] = IGNORE
    loss, count = further_loss(m, m.hidden(batch.ids), batch)
    ids = batch.ids
    h = m.further(m.hidden(ids)[:, :-1], ids[:, 1:], Span.run(0, 10, ids.device))
    want = F.cross_entropy(m.logits(h)[0, 5:], torch.tensor(text[7:]), reduction="sum")
    torch.testing.assert_close(loss, want, **NEAR)
    assert count == 5


def test_weight_multiplies_and_zero_leaves_the_loss_alone() -> None:
    m, (text,) = model(), texts(12)
    batch = row(text)
    plain = causal(m.eval(), batch)[0]
    m.train()
    for weight in (0.0, 0.3, 1.7):
        found = causal(m, batch, mtp=weight)[0]
        torch.testing.assert_close(found, plain + weight * formula(m, text), **NEAR)
    causal(m, batch)[0].backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in m.parameters())


def test_experts_of_mtp_layers_count_for_the_balance() -> None:
    from regard.moe import balance_loss
    from regard.training.objectives import balanced

    ffn = MoE(ffn_dim=8, experts=4, active=2)
    m, (text,) = model(**{"tower.ffn": ffn}), texts(12)
    m.train()
    total, count = balanced(causal, m, 0.5)(m, row(text))
    plain, _ = causal(m, row(text))
    assert len([x for x in m.modules() if type(x).__name__ == "MixtureOfExperts"]) == 3
    torch.testing.assert_close(total - plain, 0.5 * count * balance_loss(m, None), **NEAR)


# --- runs ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("\n\n".join("abcdefghij" * 9 for _ in range(60)))
    return file


def config(corpus: Path, **more: Any) -> dict[str, Any]:
    small = {k: x for k, x in SIZES.items() if k != "vocab"}
    made: dict[str, Any] = {
        "task": "lm",
        "data": {"train": str(corpus), "rows": 8, "length": 32, "held": 0.1, "pack": "stream"},
        "tokenizer": {"vocab": 270},
        "model": {"preset": "llama", "mtp": "mtp", **small},
        "train": {"steps": 60, "optim": {"lr": 3e-3}, "schedule": {"warmup": 0}},
    }
    for key, value in more.items():
        made[key] = {**made[key], **value} if isinstance(made.get(key), dict) else value
    return made


def steps(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("kind") == "step"]


def test_run_learns_them_and_keeps_them(corpus: Path, tmp_path: Path) -> None:
    regard.train(config(corpus), tmp_path / "run")
    told = [line["mtp_loss"] for line in steps(tmp_path / "run")]
    assert len(told) == 60 and told[-1] < 0.5 * told[0]
    m = regard.load(tmp_path / "run")
    assert m.config.mtp == MTP()
    plain = regard.generate(m, ["abcd"], max_new_tokens=20)
    assert regard.generate(m, ["abcd"], max_new_tokens=20, draft_model="mtp")[0].ids == plain[0].ids


def test_micro_batches_change_nothing_but_rounding(corpus: Path, tmp_path: Path) -> None:
    for name, parts in (("one", 1), ("four", 4)):
        regard.train(config(corpus, train={"micro_batches": parts, "steps": 4}), tmp_path / name)
    pairs = zip(steps(tmp_path / "one"), steps(tmp_path / "four"), strict=True)
    for one, four in pairs:
        assert one["mtp_loss"] == pytest.approx(four["mtp_loss"], rel=1e-4)
        assert one["loss"] == pytest.approx(four["loss"], rel=1e-4)


def test_weight_of_zero_leaves_the_layers_as_they_are(corpus: Path, tmp_path: Path) -> None:
    regard.train(config(corpus, train={"steps": 2}), tmp_path / "first")
    start = regard.load(tmp_path / "first")
    how = config(corpus, train={"mtp": 0.0, "steps": 3}, model={})
    how["model"], how["tokenizer"] = {"folder": str(tmp_path / "first")}, {}
    regard.train(how, tmp_path / "second")
    end = regard.load(tmp_path / "second")
    assert all("mtp_loss" not in line for line in steps(tmp_path / "second"))
    own, other = start.state_dict(), end.state_dict()
    same = {name: torch.equal(x, other[name]) for name, x in own.items()}
    assert all(same[name] == name.startswith("mtp.") for name in same)


def test_lora_leaves_them(corpus: Path, tmp_path: Path) -> None:
    regard.train(config(corpus, train={"steps": 2}), tmp_path / "first")
    how = config(corpus, train={"steps": 2})
    how |= {"model": {"folder": str(tmp_path / "first")}, "tokenizer": {}}
    how["adapt"] = {"method": "lora", "targets": "all"}
    regard.train(how, tmp_path / "second")
    assert all("mtp_loss" not in line for line in steps(tmp_path / "second"))
    how["train"]["mtp"] = 0.3
    with pytest.raises(UsageError, match="LoRA leaves MTP layers as they are"):
        regard.train(how, tmp_path / "third")


def test_setting_without_layers_is_refused(corpus: Path, tmp_path: Path) -> None:
    how = copy.deepcopy(config(corpus, train={"mtp": 0.3}))
    del how["model"]["mtp"]
    with pytest.raises(UsageError, match="this model has none"):
        regard.train(how, tmp_path / "run")
    how["task"] = "prefix"
    with pytest.raises(UsageError, match=r"train\.mtp is not used by the task prefix"):
        regard.train(how, tmp_path / "run")


@pytest.mark.parametrize("changes, says", [
    ({"head": None}, "the model's own table and head"),
    ({"tower.causal": False}, "causal=False"),
    ({"embedding.width": 16}, "an LM without embedding.width"),
])  # fmt: skip
def test_models_that_cannot_have_them(changes: dict[str, Any], says: str) -> None:
    plain = regard.build("llama", **SIZES).config
    from regard.config import customize

    with pytest.raises(UsageError, match=says):
        replace(customize(plain, changes), mtp=MTP())
