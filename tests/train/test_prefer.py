"""Preferences: the loss and its gradients by the formula, in float64; the reference; what is read from files."""

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard.attention import GQA
from regard.block import Tower
from regard.cli.main import main
from regard.data.config import Data, load
from regard.data.feed import IGNORE, Batch
from regard.data.read import DataError
from regard.data.tokens import Coder
from regard.errors import UsageError
from regard.layers import LM, MLP
from regard.models import Tokens, TransformerConfig
from regard.models.adapt import low_ranks, switched_off
from regard.report import folder as runs
from regard.report import run as report
from regard.text import CHATML
from regard.training.config import Adapt, adapted
from regard.training.objectives import FORMS, REWARDS, Prefer, Tally, prefer
from tests.train.test_chat import REPLY, USER, jsonl, tokenizer
from tests.train.test_tasks import VOCAB, feed_for, model_for

NEAR = {"rtol": 1e-10, "atol": 1e-10}


def rewards(model: Any, reference: Any, ids: Tensor, labels: Tensor, mean: bool) -> Tensor:
    """log p(answer) / p_ref(answer), token by token, written out as TRL's trainer has it."""
    logs = []
    for each in (model, reference):
        p = each(ids).log_softmax(-1)
        token = p.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        logs.append((token * (labels != IGNORE)).sum(1))
    ratio = logs[0] - logs[1].detach()
    return ratio / (labels != IGNORE).sum(1) if mean else ratio


def formula(model: Any, reference: Any, batch: Batch, how: Prefer) -> Tensor:
    sides = ((batch.ids, batch.labels), (batch.rejected, batch.rejected_labels))
    mean = how.form == "normalised"
    chosen, rejected = (rewards(model, reference, *side, mean) for side in sides)  # type: ignore[arg-type]
    x = how.beta * (chosen - rejected)
    return -F.logsigmoid(x).sum()


def moved(model: Any, by: float = 0.05) -> Any:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(torch.randn_like(p), alpha=by)
    return other


@pytest.mark.parametrize("form", FORMS)
def test_loss_and_gradients_are_those_of_the_formula(form: str) -> None:
    start, how = model_for("prefer"), Prefer(0.7, form)
    model, batch = moved(start), feed_for("prefer").batch(0)
    found = []
    for loss in (
        lambda: prefer(model, batch, how, start)[0],
        lambda: formula(model, start, batch, how),
    ):
        model.zero_grad()
        value = loss()
        value.backward()
        found.append({"loss": value.detach(), **{n: p.grad for n, p in model.named_parameters()}})
    torch.testing.assert_close(*found, **NEAR)
    assert prefer(model, batch, how, start)[1] == len(batch.ids)


@pytest.mark.parametrize("form", FORMS)
def test_rewards_are_told_as_the_formula_has_them(form: str) -> None:
    """As TRL defines them: beta times the log ratio; over several batches, each pair counts the same."""
    start, how, tally = model_for("prefer"), Prefer(0.7, form), Tally()
    model, wanted = moved(start), []
    for k in range(3):
        batch = feed_for("prefer").batch(k)
        prefer(model, batch, how, start, tally)
        sides = ((batch.ids, batch.labels), (batch.rejected, batch.rejected_labels))
        mean = form == "normalised"
        wanted.append([how.beta * rewards(model, start, *side, mean) for side in sides])  # type: ignore[arg-type]
    chosen, rejected = (torch.cat(side) for side in zip(*wanted))
    margin = chosen - rejected
    means = [(margin > 0).double(), margin, chosen, rejected]
    told = tally.means()
    assert list(told) == [*REWARDS] and tally.means() == {}
    assert [*told.values()] == pytest.approx([x.mean().item() for x in means], rel=1e-9)


def test_bias_of_the_head_that_learns_alone_gets_its_gradient() -> None:
    tower, words = Tower(12, 1, GQA(2), MLP(16)), Tokens(VOCAB)
    model = TransformerConfig(words, tower, LM(bias=True)).make().double().requires_grad_(False)
    batch, how, start = feed_for("prefer").batch(0), Prefer(0.7), copy.deepcopy(model)
    bias = model.head.bias.requires_grad_()
    grads = []
    for loss in (prefer(model, batch, how, start)[0], formula(model, start, batch, how)):
        grads += torch.autograd.grad(loss, bias)
    torch.testing.assert_close(*grads, **NEAR)


def test_pair_without_labels_counts_nothing_wherever_it_stands() -> None:
    """A process that has no rows of a batch reads such a pair."""
    start, batch = model_for("prefer"), feed_for("prefer").batch(0)
    model, how = moved(start), Prefer(0.7)
    idle = batch.each(lambda x: torch.cat([x[:1], x]))
    idle.labels[0] = idle.rejected_labels[0] = IGNORE
    found = []
    for each in (batch, idle):
        tally = Tally()
        loss, count = prefer(model, each, how, start, tally)
        found.append({"loss": loss, "count": count, **tally.means()})
    torch.testing.assert_close(*found, **NEAR)


def test_answers_of_one_token_are_their_own_mean() -> None:
    start, batch = model_for("prefer"), feed_for("prefer").batch(0)
    for labels in (batch.labels, batch.rejected_labels):
        first = (labels != IGNORE).long().argmax(1, keepdim=True)
        kept = labels.gather(1, first)
        labels.fill_(IGNORE).scatter_(1, first, kept)
    model = moved(start)
    both = [prefer(model, batch, Prefer(0.7, form), start)[0] for form in FORMS]
    torch.testing.assert_close(*both, **NEAR)


def test_answers_that_are_as_likely_are_not_counted_as_preferred() -> None:
    """Before the first step all are."""
    start, tally = model_for("prefer"), Tally()
    prefer(start, feed_for("prefer").batch(0), Prefer(), copy.deepcopy(start), tally)
    assert tally.means() == dict.fromkeys(REWARDS, 0.0)


def test_fifty_steps_go_the_way_of_the_formula() -> None:
    start = model_for("prefer").float()
    losses: list[list[float]] = []
    for form in ("ours", "theirs"):
        model, each = copy.deepcopy(start), []
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        for k in range(50):
            batch = feed_for("prefer").batch(k)
            how = Prefer(0.5)
            total = (
                prefer(model, batch, how, start)[0]
                if form == "ours"
                else formula(model, start, batch, how)
            )
            loss = total / len(batch.ids)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            each.append(loss.item())
        losses.append(each)
    ours, theirs = map(torch.tensor, losses)
    assert (ours - theirs).abs().max() < 1e-4 and ours[-9:].mean() < 0.8 * ours[0]
    assert ours[0] == pytest.approx(0.6931, abs=1e-4)


def test_lora_switched_off_is_the_reference() -> None:
    start = model_for("prefer")
    model = adapted(copy.deepcopy(start), Adapt("lora", targets="all"))
    batch = feed_for("prefer").batch(0)
    with torch.no_grad():
        for low in low_ranks(model).values():
            low.b.normal_()
    count = len(low_ranks(model))
    model.train()
    with switched_off(model):
        assert not low_ranks(model) and not model.training
        torch.testing.assert_close(model(batch.ids), start(batch.ids))
    assert len(low_ranks(model)) == count and model.training
    both = [prefer(model, batch, Prefer(0.3), reference)[0] for reference in (None, start)]
    torch.testing.assert_close(*both, **NEAR)


# --- from files ---------------------------------------------------------------------------------------------------


def read(tmp_path: Path, row: dict[str, Any], **more: Any) -> Any:
    file = jsonl(tmp_path / "pairs.jsonl", [row])
    data = Data(str(file), rows=1, **more)
    return load("prefer", data, Coder(tokenizer(CHATML)), tmp_path / "shards").feed


WORSE = {"role": "assistant", "content": "no"}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": [REPLY], "rejected": [WORSE]},
        {"prompt": [USER], "chosen": "ho", "rejected": "no"},
        {"prompt": "hi", "chosen": [REPLY], "rejected": [WORSE]},
        {"prompt": "hi", "chosen": [USER, REPLY], "rejected": [USER, WORSE]},
        {"chosen": [USER, REPLY], "rejected": [USER, WORSE]},
        {"chosen": [USER, REPLY, USER, REPLY], "rejected": [USER, REPLY, USER, WORSE]},
    ],
)
def test_answers_are_learned_and_what_they_share_is_not(row: Any, tmp_path: Path) -> None:
    batch, decode = read(tmp_path, row).batch(0), tokenizer(CHATML).decode
    for labels, said in ((batch.labels, "ho"), (batch.rejected_labels, "no")):
        assert decode(labels[labels >= 0], skip_special=False) == f"{said}<|im_end|>\n"


def test_texts_stand_as_they_are(tmp_path: Path) -> None:
    batch = read(tmp_path, {"prompt": "a: ", "chosen": "yes", "rejected": "no way"}).batch(0)
    decode = partial(tokenizer(CHATML).decode, skip_special=False)
    assert decode(batch.labels[batch.labels >= 0]) == "yes</s>" and decode(batch.ids[0]) == "a: yes"
    assert decode(batch.rejected_labels[batch.rejected_labels >= 0]) == "no way</s>"


@pytest.mark.parametrize(
    "row, wrong",
    [
        ({"prompt": "a", "chosen": "", "rejected": "b"}, "chosen is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": []}, "rejected is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same; leave the pair out"),
        ({"prompt": [USER], "chosen": [REPLY], "rejected": [REPLY]}, "are the same"),
        ({"chosen": [USER], "rejected": [USER, WORSE]}, "no message is the assistant's"),
        ({"chosen": "a", "rejected": "b"}, "prompt"),
    ],
)
def test_bad_pairs_are_refused_in_a_sentence(row: Any, wrong: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"^line 1 of .*: .*{wrong}"):
        read(tmp_path, row)


def test_pairs_too_long_are_dropped_together(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "chosen": "b " * n, "rejected": "c"} for n in (1, 50)]
    file = jsonl(tmp_path / "pairs.jsonl", rows)
    data = Data(str(file), rows=1, length=16, overlong="drop")
    feed = load("prefer", data, Coder(tokenizer(CHATML)), tmp_path / "shards").feed
    assert "1 pairs of answers" in feed.describe() and "dropped" in feed.describe()


def test_runs_with_each_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    jsonl(
        tmp_path / "pairs.jsonl", [{"prompt": "hi", "chosen": x, "rejected": "no"} for x in "abcd"]
    )
    data = '[data]\ntrain = "pairs.jsonl"\nheld = 0.5\nrows = 2\n[train]\nsteps = 3\n'
    model = '[model]\npreset = "llama"\nlayers = 1\ndim = 16\nheads = 2\nkv-heads = 2\nffn-dim = 16\nmax-len = 64\n'
    first = f'task = "prefer"\n{model}{data}[tokenizer]\nkind = "bytes"\n'
    Path("first.toml").write_text(first, encoding="utf-8")
    # Evaluated twice: once is a row of the report, and no curve.
    assert main(["train", "first.toml", "--quiet", "--train.evaluate", "2"]) == 0
    events = Path("runs/first/metrics.jsonl").read_text().splitlines()
    first, *_, last = map(json.loads, events)
    assert first["loss"] == pytest.approx(0.6931, abs=1e-4)
    for event in (first, last):
        assert event.keys() >= {*REWARDS} and 0 <= event["reward_accuracy"] <= 1
        margin = event["reward_chosen"] - event["reward_rejected"]
        assert event["reward_margin"] == pytest.approx(margin, abs=1e-6)
    assert last["kind"] == "evaluation" and last["reward_margin"] != 0
    titles = " ".join(figure.title for figure in report.curves([runs.read("runs/first")]))
    assert "reward_accuracy, in evaluations" in titles and "larger reward" in titles
    lora = f'task = "prefer"\n[model]\nfolder = "runs/first/last"\n{data}[adapt]\nmethod = "lora"\n'
    Path("lora.toml").write_text(lora, encoding="utf-8")
    assert main(["train", "lora.toml", "--quiet", "--prefer.form", "normalised"]) == 0
    named = ["--prefer.reference", "runs/first/last", "--output-dir", "runs/named"]
    assert main(["train", "lora.toml", "--quiet", *named]) == 0
    assert (
        main(["train", "lora.toml", "--quiet", "--prefer.reference", "no", "--output-dir", "n"])
        == 4
    )
    assert "no" in capsys.readouterr().err
    with pytest.raises(UsageError, match=r"\[prefer\] is not used by the task lm"):
        regard.train(
            {
                "task": "lm",
                "model": {"preset": "gpt2"},
                "data": {"train": "x"},
                "prefer": {"beta": 1},
            },
            "m",
        )


def test_tally_is_of_the_means_since_it_was_asked() -> None:
    tally = Tally()
    assert tally.means() == {}
    tally.add(a=torch.tensor(3.0), count=torch.tensor(1))
    assert tally.means() == {"a": 3.0}
    for a, count in ((3.0, 1), (4.0, 0), (5.0, 3)):
        tally.add(a=torch.tensor(a), count=torch.tensor(count))
    assert tally.means(lambda x: 2 * x) == {"a": 3.0}
    # Where nothing was counted there is nothing to divide.
    tally.add(a=torch.tensor(0.0), count=torch.tensor(0))
    assert tally.means() == {"a": 0.0}
