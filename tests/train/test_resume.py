"""A run that was stopped anywhere, an evaluation included, and goes on, is one that never was: in its weights and in
what it told. Settings that change no weight may change; a difference in any other is named."""

import json
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.config import to_dict
from regard.data.feed import Batch
from regard.errors import Notice, UsageError
from regard.fast.train import PRECISIONS
from regard.training.checkpoint import PROGRESS, STATE, Checkpoints, manifest
from regard.training.config import read
from regard.training.objectives import causal
from regard.training.optim import OPTIMIZERS, Optim, Schedule
from regard.training.trainer import FREE, RENAMED, Train, Trainer, changed, differences, flat
from tests.train.test_trainer import finished, same
from tests.train.toy import KINDS, Toy, trainer
from tests.wide import crossed, wide

Event = dict[str, Any]


class Held(Toy):
    """Three batches are held out; `walks` counts how often they were asked for."""

    walks = 0

    def evaluation(self) -> Iterator[Batch]:
        self.walks += 1
        return (self.batch(10**6 + k) for k in range(3))


def told(events: list[Event]) -> list[Event]:
    """What metrics.jsonl would hold, apart from times."""
    kept = [e for e in events if e["kind"] not in ("checkpoint", "warning")]
    return [{n: x for n, x in e.items() if n != "seconds"} for e in kept]


def holding(folder: Path, events: list[Event], **changes: Any) -> Trainer:
    t = trainer(folder, events.append, **changes)
    t.feed = Held()
    return t


def test_run_of_a_version_that_dealt_otherwise_goes_on_and_says_so(tmp_path: Path) -> None:
    t = trainer(tmp_path, steps=4)
    t.run(lambda: t.at.step >= 2)
    events: list[Event] = []
    t = trainer(tmp_path, events.append, steps=4)
    t.feed.earlier, t.feed.fingerprint = t.feed.fingerprint, "dealt anew"  # type: ignore[attr-defined, misc]
    assert t.resume() and t.at.step == 2
    (told,) = [e["text"] for e in events if e["kind"] == "warning"]
    assert "dealt the same data in another order" in told
    t.feed.earlier = "another"  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="the data changed since"):
        t.resume()


# --- stopped = not stopped ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, kind", crossed(OPTIMIZERS, KINDS))
def test_every_kind_and_optimiser_goes_on_to_the_same_bits(
    tmp_path: Path, kind: str, name: str
) -> None:
    precision = PRECISIONS[(len(kind) + len(name)) % len(PRECISIONS)]
    changes = {"kind": kind, "steps": 4, "optim": Optim(name, lr=3e-3), "precision": precision}
    want = finished(tmp_path / "whole", **changes)
    t = trainer(tmp_path / "parts", **changes)
    assert t.run(lambda: t.at.step >= 2) == "asked"
    assert same(finished(tmp_path / "parts", **changes), want)


@pytest.mark.parametrize("after", wide(range(6), keep=[0, 2, 5]))
def test_a_stop_in_an_evaluation_is_obeyed_within_a_batch(tmp_path: Path, after: int) -> None:
    """At any of its batches: saved, not recorded, and made when the run goes on."""
    settings: dict[str, Any] = {"steps": 4, "save": 2, "evaluate": 2, "micro_batches": 1}
    whole: list[Event] = []
    want = holding(tmp_path / "whole", whole, **settings)
    assert want.run() == "done"
    events: list[Event] = []
    t = holding(tmp_path / "parts", events, **settings)
    batches: list[int] = []

    def objective(model: Any, batch: Batch) -> Any:
        if not torch.is_grad_enabled():
            batches.append(t.at.step)
        return causal(model, batch)

    t.objective = objective
    assert t.run(lambda: len(batches) >= after) == "asked" and len(batches) == after
    assert t.checkpoints.latest() == t.checkpoints.path(t.at.step)
    assert len(told(events)) == t.at.step + after // 3
    again = holding(tmp_path / "parts", events, **settings)
    assert again.resume() and again.run() == "done"
    assert same(again, want) and again.at == want.at and told(events) == told(whole)


def test_a_stop_asked_for_on_an_evaluation_step_saves_and_measures_nothing(tmp_path: Path) -> None:
    events: list[Event] = []
    t = holding(tmp_path, events, evaluate=2, save=0)
    assert t.run(lambda: t.at.step == 2) == "asked" and t.feed.walks == 0  # type: ignore[attr-defined]
    assert [e["kind"] for e in events] == ["step", "step", "checkpoint"]


@pytest.mark.parametrize("save", [2, 0])
def test_checkpoint_is_written_before_its_evaluation(tmp_path: Path, save: int) -> None:
    """A kill in a long evaluation costs no step, nor does one in that of the last step."""
    settings: dict[str, Any] = {"steps": 4, "save": save, "evaluate": save}
    t = holding(tmp_path, [], **settings)

    def killed(model: Any, between: Callable[[], None]) -> Any:
        raise KeyboardInterrupt

    t.measure = killed
    with pytest.raises(KeyboardInterrupt):
        t.run()
    events: list[Event] = []
    again = holding(tmp_path, events, **settings)
    assert again.resume() and again.at.step == (save or 4) and again.run() == "done"
    first = [("evaluation", 2), ("step", 3)] if save else [("evaluation", 4)]
    assert [(e["kind"], e["step"]) for e in told(events)][:2] == first


def test_what_was_noted_is_found_out_again_if_it_is_lost(tmp_path: Path) -> None:
    events: list[Event] = []
    t = holding(tmp_path, events, steps=4, save=2, evaluate=2)
    t.run()
    assert t.checkpoints.latest() is not None
    for text in ("", "[" * 100_000, '{"progress": {"step": 9}, "seal": ""}'):
        (tmp_path / PROGRESS).write_text(text)
        again = holding(tmp_path, events, steps=4, save=2, evaluate=2)
        assert again.resume() and again.at.evaluated == 2 and again.run() == "done"
        assert again.at == t.at and told(events)[-1] == told(events)[-2]


def test_evaluation_walks_the_held_out_data_once(tmp_path: Path) -> None:
    t = holding(tmp_path, events := [], steps=2, evaluate=1)
    t.run()
    assert t.feed.walks == 2  # type: ignore[attr-defined]
    rows = [
        batch.each(lambda x, i=i: x[i : i + 1]) for batch in t.feed.evaluation() for i in range(6)
    ]  # type: ignore[misc]
    with torch.no_grad():
        each = [causal(t.model.eval(), row) for row in rows]
    mean = sum(float(loss) for loss, _ in each) / sum(int(count) for _, count in each)
    assert told(events)[-1]["loss"] == pytest.approx(mean, rel=1e-5)


def test_every_step_draws_random_numbers_of_its_own(tmp_path: Path) -> None:
    seeds: list[int] = []

    def objective(model: Any, batch: Batch) -> Any:
        seeds.append(torch.initial_seed())
        return causal(model, batch)

    for seed in (1, 2):
        t = trainer(tmp_path / str(seed), steps=5, micro_batches=1, evaluate=0, save=0, seed=seed)
        t.objective = objective
        t.feed.evaluation = lambda: iter(())  # type: ignore[method-assign]
        t.run()
    assert len(set(seeds)) == len(seeds) == 10


# --- other settings -----------------------------------------------------------------------------------------------

LEAVES = list(flat(to_dict(Train())))


@pytest.mark.parametrize("name", LEAVES)
def test_every_setting_of_training_is_free_or_named_with_both_values(name: str) -> None:
    settings = json.loads(json.dumps(to_dict(Train())))
    place = settings
    *path, key = name.split(".")
    for part in path:
        place = place[part]
    now, place[key] = place[key], 123
    may, fixed = changed(settings, Train())
    free = name.partition(".")[0] in FREE
    want = {f"train.{name}": [123, 1000 if name == "schedule.steps" else now]}
    if name == "steps":  # the schedule follows
        want["train.schedule.steps"] = [123, 1000]
    assert (may, fixed) == ((want, {}) if free else ({}, want))


def test_setting_that_an_older_version_did_not_have_had_its_default() -> None:
    settings = to_dict(Train())
    for f in fields(Train):
        assert changed({n: x for n, x in settings.items() if n != f.name}, Train()) == ({}, {})
    del settings["clip"]
    assert changed(settings, Train(clip=2.0)) == ({}, {"train.clip": [1.0, 2.0]})


def test_part_with_a_kind_is_one_setting_or_many() -> None:
    rope = {"kind": "rope", "theta": 1.0}
    settings = {"dim": 8, "attention": {"heads": 2, "position": rope}}
    assert flat(settings, parts=True) == {
        "dim": 8,
        "attention.heads": 2,
        "attention.position": rope,
    }
    inner = {f"attention.position.{name}": x for name, x in rope.items()}
    assert flat(settings) == {"dim": 8, "attention.heads": 2, **inner}


def test_settings_that_are_not_set_are_said_so() -> None:
    changes: dict[str, list[Any]] = {"train.clip": [1.0, None], "train.patience": [None, 3]}
    clip, patience = differences(changes).split("; ")
    assert clip == "train.clip was 1.0, now it is not set"
    assert patience == "train.patience was not set, now it is 3"


def test_other_settings_are_told_once(tmp_path: Path) -> None:
    finished(tmp_path, steps=4, schedule=Schedule("constant"))
    events: list[Event] = []
    t = trainer(tmp_path, events.append, steps=6, schedule=Schedule("constant"))
    assert t.resume() and t.resume()
    assert [e["kind"] for e in events] == ["settings"]


def test_longer_training_is_that_of_a_run_which_was_longer_from_the_start(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"save": 0, "schedule": Schedule("constant", warmup=3)}
    want = finished(tmp_path / "long", steps=9, **settings)
    finished(tmp_path / "short", steps=6, **settings)
    events: list[Event] = []
    t = trainer(tmp_path / "short", events.append, steps=9, **{**settings, "save": 1}, nan="skip")
    assert t.resume() and t.run() == "done" and same(t, want)
    changes = {"train.steps": [6, 9], "train.save": [0, 1], "train.nan": ["stop", "skip"]}
    assert events[0] == {"kind": "settings", "step": 6, "changes": changes}


def test_schedule_that_follows_from_steps_follows_the_new_ones(tmp_path: Path) -> None:
    finished(tmp_path, steps=6)
    events: list[Event] = []
    t = trainer(tmp_path, events.append, steps=9)
    assert t.resume() and t.run() == "done"
    assert events[0]["changes"] == {"train.steps": [6, 9], "train.schedule.steps": [6, 9]}
    rates = [e["lr"] for e in events if e["kind"] == "step"]
    assert rates == [t.config.optim.lr * Schedule(steps=9, warmup=3)(k) for k in (7, 8, 9)]


def test_schedule_that_says_its_length_keeps_it(tmp_path: Path) -> None:
    said = Schedule(steps=6, warmup=3, floor=0.1)
    finished(tmp_path, steps=6, schedule=said)
    events: list[Event] = []
    t = trainer(tmp_path, events.append, steps=8, schedule=said)
    assert t.resume() and events[0]["changes"] == {"train.steps": [6, 8]}
    other = trainer(tmp_path, steps=8, schedule=replace(said, steps=7))
    with pytest.raises(UsageError, match="train.schedule.steps was 6, now it is 7"):
        other.resume()


def test_other_metric_begins_to_count_anew(tmp_path: Path) -> None:
    t = trainer(tmp_path, steps=4)
    t.run()
    assert t.at.best is not None
    again = trainer(tmp_path, steps=6, metric="perplexity", patience=1)
    again.measure = lambda model, between: ({"loss": 1.0, "perplexity": 2.7}, {})
    assert again.resume() and again.at.best is None
    assert again.at.waited == 0 and again.run() == "patience"
    assert again.at.best == 5


def test_checkpoint_of_an_older_version_is_taken_with_a_word(tmp_path: Path) -> None:
    """It had a hash of the settings, which no later version can know, and other progress."""
    t = trainer(tmp_path, steps=4)
    t.run(lambda: t.at.step >= 2)
    path = t.checkpoints.path(2)
    state = json.loads((path / STATE).read_text())
    del state["settings"], state["progress"]["evaluated"]
    state["progress"]["averaged"] = None
    (path / STATE).write_text(json.dumps({**state, "config": "0123"}))
    (path / "trainer/manifest.json").write_bytes(manifest(path, path.name))
    events: list[Event] = []
    again = trainer(tmp_path, events.append, steps=4)
    assert again.resume() and "step-00000002 is of an older version" in events[0]["text"]
    assert again.run() == "done"


def test_a_stop_leaves_the_checkpoints_that_are_due(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, lambda m, path: path.mkdir(), keep=2, size=lambda m: 0)
    checkpoints.every = 5
    for step, want in ((5, [5]), (7, [5, 7]), (10, [5, 10]), (12, [10, 12]), (15, [10, 15])):
        checkpoints.write(step, None, {}, {"best": None})
        if step != 12:
            assert [int(p.name[5:]) for p in checkpoints.steps()] == want


def test_settings_by_their_old_names_are_read(tmp_path: Path) -> None:
    """A checkpoint and a config file from before a setting was renamed."""
    old = {n: x for n, x in to_dict(Train()).items() if n not in RENAMED.values()}
    old |= {"parts": 2, "recompute": True}
    now = Train(micro_batches=2, activation_checkpointing=True)
    assert changed(old, now) == ({}, {})
    assert changed(old, Train()) == (
        {},
        {"train.micro_batches": [2, 1], "train.activation_checkpointing": [True, False]},
    )
    path = tmp_path / "a.toml"
    text = 'task = "lm"\n[model]\npreset = "gpt2"\n[data]\ntrain = "a.txt"\n[train]\nparts = 2\n'
    path.write_text(text)
    with pytest.warns(Notice, match="train.parts is now train.micro_batches"):
        assert read(path, {"train.recompute": "true"}).train == now
    with pytest.raises(UsageError, match=r"train.parts is now train.micro_batches, .*leave it out"):
        read(path, {"train.micro-batches": "2"})


def test_settings_that_are_gone_say_what_to_type(tmp_path: Path) -> None:
    """A run that was begun with them goes on once that is typed."""
    path = tmp_path / "config.toml"
    text = 'task = "lm"\n[model]\npreset = "gpt2"\n[data]\ntrain = "a.txt"\n[train]\naverage = 3\nnan = "back"\n'
    path.write_text(text)
    with pytest.raises(
        UsageError, match=r"train.average = 3: .*say train.average = 0, and train.ema"
    ):
        read(path)
    with pytest.raises(UsageError, match=r"train.nan = back: .*say train.nan = skip"):
        read(path, {"train.average": "0"})
    assert read(path, {"train.average": "0", "train.nan": "skip"}).train == Train(nan="skip")
