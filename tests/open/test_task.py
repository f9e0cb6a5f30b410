"""A stranger adds a task: its objective in a file of its own, and a row of TASKS."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard.cli.main import main
from regard.data.feed import IGNORE, Batch
from regard.layers import Classify
from regard.training.config import toml
from regard.training.losses import NONE, Smoothing
from regard.training.objectives import (
    DPO,
    REWARDS,
    Prefer,
    Tally,
    answer_logs,
    causal_mask,
    label_logits,
    vocabulary_loss,
)
from regard.training.tasks import TASKS, Task
from tests.open.stranger import SIZES, added, config, decodes, home, promised

# --- what the stranger's file has ---------------------------------------------------------------------------------


def steady(model: Any, batch: Batch, smoothing: Smoothing = NONE) -> tuple[Tensor, Tensor]:
    """The next token's loss, plus 1e-2 log(sum of exp(logits))^2: logits do not drift (PaLM's z-loss)."""
    hidden = model.hidden(batch.ids, mask=causal_mask(batch))
    loss, count = vocabulary_loss(model, hidden, batch.labels, smoothing)
    size = model.logits(hidden).logsumexp(-1).square()
    return loss + 1e-2 * (size * (batch.labels != IGNORE)).sum(), count


def hinge(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """max(0, 1 - how much larger the label's logit is than the largest other), summed over rows."""
    logits = label_logits(model, batch)
    own = F.one_hot(batch.labels, logits.shape[-1]).bool()
    other = logits.masked_fill(own, -torch.inf).amax(-1)
    return (1 - logits[own] + other).relu().sum(), torch.tensor(len(logits))


def calm(
    model: Any,
    batch: Batch,
    how: Prefer = DPO,
    reference: Any = None,
    tally: Tally | None = None,
) -> tuple[Tensor, Tensor]:
    """(margin - 1 / (2 beta))^2 of two answers, which wants no more of a margin than that (IPO)."""
    assert batch.rejected is not None and batch.rejected_labels is not None
    better = answer_logs(model, batch.ids, batch.labels)
    margin = better - answer_logs(model, batch.rejected, batch.rejected_labels)
    count = torch.tensor(len(margin))
    if tally is not None:
        tally.add(count=count, **dict.fromkeys(REWARDS, margin.sum()))
    return (margin - 1 / (2 * how.beta)).square().sum(), count


GPT = (("decoder",), "gpt2 or llama")
MINE = {
    "steady": Task("lm", steady, *GPT, recipe={"task": "lm"}, packed=True, continued=True),
    "hinge": Task(
        "classify",
        hinge,
        ("encoder", "decoder"),
        "bert-base",
        metrics=("accuracy", "f1", "loss"),
        head=Classify,
        smoothed=False,
    ),
    "calm": Task(
        "prefer",
        calm,
        *GPT,
        metrics=("loss", "reward_margin"),
        recipe={"task": "lm", "more": ("<|im_start|>", "<|im_end|>")},
        smoothed=False,
        compared=True,
    ),
}


# --- and that it is one of ours -----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def mine() -> Iterator[None]:
    with ExitStack() as stack:
        for name, row in MINE.items():
            stack.enter_context(added(TASKS, name, row))
        yield


def tables(folder: Path, task: str) -> dict[str, Any]:
    """A short run of each task, on data of its kind."""
    made = {**config(folder, {}), "task": task}
    rows = dict(held=0.2, rows=4, length=64)
    if task == "hinge":
        path = folder / "labels.tsv"
        path.write_text(
            "".join(f"{'ab'[i % 2]}\t{'cold' if i % 2 else 'warm'} {i}\n" for i in range(60))
        )
        made["data"] = dict(train=str(path), columns={"text": 1, "label": 0}, **rows)
    if task == "calm":
        path = folder / "pairs.tsv"
        pairs = (f"what is {i}?\t{i} it is\tno {i}\n" for i in range(40))
        path.write_text("prompt\tchosen\trejected\n" + "".join(pairs))
        made["data"] = dict(train=str(path), **rows)
    return made


@pytest.mark.parametrize("task", MINE)
def test_added_task_trains_resumes_and_is_loaded(task: str, tmp_path: Path) -> None:
    settings = tables(tmp_path, task)
    events: list[dict[str, Any]] = []
    whole = regard.train(settings, folder=tmp_path / "whole", callbacks=[events.append])
    losses = [event["loss"] for event in events if event["kind"] == "step"]
    assert losses[-1] < losses[0] and whole.best is not None
    assert set(whole.metrics) >= {"loss"} and all(map(math.isfinite, whole.metrics.values()))
    steps: list[int] = []
    count = [lambda event: steps.extend([event["step"]] if event["kind"] == "step" else [])]
    parts = {"folder": tmp_path / "parts", "callbacks": count}
    cut = regard.train(settings, stop=lambda: len(steps) >= 5, **parts)
    assert (cut.status, cut.step) == ("asked", 5)
    last = regard.train(tmp_path / "parts", resume=True, callbacks=count).last
    one, two = (regard.load(path) for path in (whole.last, last))
    assert all(x.equal(two.state_dict()[name]) for name, x in one.state_dict().items())
    again = regard.load(one.save(tmp_path / "again"))
    ids = torch.tensor([[5, 9, 2, 7]])
    assert again.config == one.config and torch.equal(again(ids), one(ids))
    if task != "hinge":
        decodes(one)


@pytest.mark.parametrize("task", ["steady", "hinge"])
def test_model_of_an_added_task_is_evaluated(task: str, tmp_path: Path) -> None:
    """By what it is: a language model, a classifier."""
    settings = tables(tmp_path, task)
    run = regard.train(settings, folder=tmp_path / "run").folder
    reading = {"columns": settings["data"]["columns"]} if task == "hinge" else {}
    found = regard.evaluate(run, settings["data"]["train"], reading=reading)
    wanted = {"steady": "loss", "hinge": "accuracy"}[task]
    assert math.isfinite(found.metrics[wanted])


def test_rewards_and_samples_of_added_tasks_are_told(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    regard.train(tables(tmp_path, "calm"), folder=tmp_path / "a", callbacks=[events.append])
    assert all("reward_margin" in event for event in events if event["kind"] == "step")
    regard.train(tables(tmp_path, "steady"), folder=tmp_path / "b", callbacks=[events.append])
    samples = [x for event in events if event["kind"] == "samples" for x in event["samples"]]
    assert samples and all(sample["text"] for sample in samples)


def test_added_task_is_planned_and_trained_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("regard.training.plan.PROBED", 0.01)
    monkeypatch.setattr("regard.training.plan.MEASURED", 0.0)
    settings = tables(tmp_path, "steady")
    Path("run.toml").write_text(toml(settings), encoding="utf-8")
    assert main(["plan", "run.toml"]) == 0 and "12 steps of " in capsys.readouterr().out
    assert main(["train", "run.toml", "--quiet"]) == 0
    assert regard.load("runs/run").config.tower.layers == SIZES["layers"]


def test_wrong_setting_of_an_added_task_is_said_as_of_ours(tmp_path: Path) -> None:
    def refused(task: str, **changes: Any) -> str:
        with pytest.raises(regard.UsageError) as error:
            regard.train({**tables(tmp_path, task), **changes}, folder=tmp_path / "no")
        return str(error.value)

    assert "did you mean 'steady'" in refused("stead")
    assert "label smoothing is not used by the task hinge" in refused(
        "hinge", smoothing={"eps": 0.1}
    )
    assert "[prefer] is not used by the task steady" in refused("steady", prefer={"beta": 0.5})
    assert "bleu does not suit the task calm" in refused("calm", train={"metric": "bleu"})
    assert "the task hinge is for an encoder or a decoder" in refused(
        "hinge", model={"preset": "t5-small", "layers": 1}
    )


def test_task_costs_as_many_files_as_the_architecture_says() -> None:
    assert home(TASKS) == "regard/training/tasks.py"
    own = "regard/training/steady.py"
    assert len({own, home(TASKS)}) == promised("add a task")
