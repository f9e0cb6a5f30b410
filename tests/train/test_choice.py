"""Which model of a run is the best: by a named metric, and the mean of the last checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.errors import UsageError
from regard.train.checkpoint import Checkpoints
from regard.train.objectives import causal
from regard.train.optim import average
from regard.train.trainer import AVERAGE, Trainer
from tests.train.toy import Toy, config, model


def trainer(
    folder: Path, told: list[dict[str, Any]], measure: Any = None, **changes: Any
) -> Trainer:
    checkpoints = Checkpoints(folder, lambda m, path: m.save(path), keep=2)
    made = config(**changes)
    return Trainer(
        model(), Toy(), causal, made, checkpoints, regard.load, [told.append], measure=measure
    )


def test_best_is_by_the_metric_that_was_named(tmp_path: Path) -> None:
    values = iter([0.5, 0.9, 0.7, 0.8])
    told: list[dict[str, Any]] = []
    more = {"samples": [{"text": "a"}]}
    measure = lambda m, between: ({"loss": 1.0, "accuracy": next(values)}, more)  # noqa: E731
    t = trainer(tmp_path, told, measure, evaluate=3, metric="accuracy", patience=2)
    assert t.run() == "patience"
    evaluations = [e for e in told if e["kind"] == "evaluation"]
    assert [e["accuracy"] for e in evaluations] == [0.5, 0.9, 0.7, 0.8]
    assert [e["best"] for e in evaluations] == [True, True, False, False]
    assert all("loss" in e and e["samples"] == [{"text": "a"}] for e in evaluations)
    assert (t.at.best, t.at.best_value) == (6, 0.9) and t.checkpoints.path(6).is_dir()


def test_a_metric_that_is_not_measured_is_named(tmp_path: Path) -> None:
    t = trainer(tmp_path, [], evaluate=3, metric="accuracy")
    with pytest.raises(UsageError, match=r"train.metric = 'accuracy' was not measured"):
        t.run()
    with pytest.raises(UsageError, match="train.metric = 'acuracy' is unknown"):
        config(metric="acuracy")


@pytest.mark.parametrize("good", [True, False])
def test_mean_of_the_last_checkpoints_is_kept_if_it_is_the_best(tmp_path: Path, good: bool) -> None:
    told: list[dict[str, Any]] = []
    values = [0.5, 0.6, 0.9 if good else 0.1]
    measure = lambda m, between: ({"accuracy": values.pop(0)}, {})  # noqa: E731
    t = trainer(tmp_path, told, measure, evaluate=6, save=2, average=3, metric="accuracy")
    assert t.run() == "done" and t.at.averaged == good and (tmp_path / AVERAGE).is_dir() == good
    (event,) = [e for e in told if e["kind"] == "average"]
    assert event["of"] == 3 and event["best"] == good
    names = [path.name for path in t.checkpoints.steps()]
    assert names[-3:] == ["step-00000008", "step-00000010", "step-00000012"]
    last = regard.load(t.checkpoints.path(12)).state_dict()
    assert all(x.equal(last[n]) for n, x in t.model.state_dict().items())  # training may go on
    if good:
        mean = average(regard.load(tmp_path / n).state_dict() for n in names[-3:])
        found = regard.load(tmp_path / AVERAGE).state_dict()
        assert all(torch.equal(x, mean[n]) for n, x in found.items())
