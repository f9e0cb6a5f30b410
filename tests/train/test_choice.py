"""Which model of a run is the best: by a named metric."""

from pathlib import Path
from typing import Any

import pytest

import regard
from regard.errors import UsageError
from regard.training.checkpoint import Checkpoints
from regard.training.objectives import causal
from regard.training.trainer import Trainer
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
    with pytest.raises(
        UsageError, match=r"train.metric = 'accuracy' was not measured; known: loss$"
    ):
        t.run()
    t.measure = lambda model, between: ({"accuracy_1": 0.5, "loss": 1.0}, {})
    with pytest.raises(UsageError, match=r"not measured; did you mean 'accuracy_1'"):
        t.run()
    with pytest.raises(UsageError, match="train.metric = 'acuracy' is unknown"):
        config(metric="acuracy")
