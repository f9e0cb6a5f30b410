"""A run that was stopped, spoiled or starved goes on to the same bits; what is not finite touches no weight.

`tests/faults` has the harder forms: kills, every system call, lost power, full disks."""

import math
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import regard
from regard.data.feed import Batch, seed_of
from regard.errors import UsageError
from regard.fast.train import Joined, Recomputed
from regard.kernels.c import native
from regard.kernels.c import train as native_train
from regard.training import trainer as training
from regard.training.checkpoint import Checkpoints, clean, fault, locked
from regard.training.objectives import causal
from regard.training.optim import Optim, Schedule
from regard.training.parallel import MODES, Parallel, SingleProcess
from regard.training.trainer import Diverged, Trainer
from tests.train.toy import Toy, config, model, trainer, weights
from tests.wide import crossed


def same(a: Trainer, b: Trainer) -> bool:
    x, y = weights(a), weights(b)
    return x.keys() == y.keys() and all(torch.equal(x[n], y[n]) for n in x)


def finished(folder: Path, **changes: Any) -> Trainer:
    t = trainer(folder, **changes)
    t.resume()
    assert t.run() == "done"
    return t


# --- going on -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, precision", crossed(["adamw", "muon"], ["fp32", "bf16"]))
def test_resume_is_bitwise_equal(tmp_path: Path, precision: str, name: str) -> None:
    changes = {"precision": precision, "optim": Optim(name, lr=3e-3)}
    want = finished(tmp_path / "whole", **changes)
    for stop in (1, 3, 4, 7, 11):  # a chain of resumes
        t = trainer(tmp_path / "parts", **changes)
        t.resume()
        assert t.run(lambda t=t, stop=stop: t.at.step >= stop) == "asked"
    got = finished(tmp_path / "parts", **changes)
    assert same(got, want)
    assert got.at == want.at


def test_resume_is_bitwise_equal_in_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native.build():
        pytest.skip(f"no native code: {native.why()}")
    calls, real = [], native_train.call_of
    monkeypatch.setattr(native_train, "call_of", lambda name: calls.append(name) or real(name))
    want = finished(tmp_path / "whole", kind="wide")
    assert {"causal", "bias_gelu"} <= set(calls)
    for stop in (1, 4, 7):
        t = trainer(tmp_path / "parts", kind="wide")
        t.resume()
        assert t.run(lambda t=t, stop=stop: t.at.step >= stop) == "asked"
    assert same(finished(tmp_path / "parts", kind="wide"), want)


def test_any_split_into_parts_trains_alike(tmp_path: Path) -> None:
    changes = {"micro_batches": 3, "steps": 1}
    torch.manual_seed(0)
    runs = [trainer(tmp_path / str(n), **{**changes, "micro_batches": n}) for n in (1, 3)]
    for t in runs:
        t.model.eval()  # without dropout, whose draws depend on the shape
        t.model.train = lambda mode=True, m=t.model: m  # type: ignore[method-assign]
        t.run()
    a, b = (dict(t.model.named_parameters()) for t in runs)
    assert all(torch.allclose(a[n], b[n], atol=1e-6) for n in a)


def test_step_k_reads_batch_k_and_draws_by_seed_step_and_rank(tmp_path: Path) -> None:
    class Third(SingleProcess):
        data_rank, data_size = 2, 3

    class Watched(Toy):
        def batch(self, k: int, rank: int = 0, world: int = 1) -> Batch:
            asked.append((k, rank, world))
            return super().batch(k)

    def objective(model: Any, batch: Batch) -> Any:
        drawn.append(torch.initial_seed())
        return causal(model, batch)

    asked: list[tuple[int, int, int]] = []
    drawn: list[int] = []
    made = config(steps=3, micro_batches=1, evaluate=0, save=0, seed=7)
    files = Checkpoints(tmp_path, lambda m, path: m.save(path))
    t = Trainer(model(), Watched(), objective, made, files, regard.load, team=Third())
    for step in (1, 2, 3):
        t._step(step)
    # Batches count from 0.
    assert asked == [(0, 2, 3), (1, 2, 3), (2, 2, 3)]
    assert drawn == [seed_of(7, step) + 2 for step in (1, 2, 3)]


def test_step_tells_the_mean_loss_the_rate_the_labels_and_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([100.0, 102.5, 200.0, 200.25])
    monkeypatch.setattr(training, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    events: list[dict[str, Any]] = []
    schedule, optim = Schedule("constant", warmup=4), Optim(lr=3e-3)
    t = trainer(tmp_path, events.append, schedule=schedule, optim=optim, micro_batches=2)

    def objective(model: Any, batch: Batch) -> Any:
        loss, count = causal(model, batch)
        return loss * 0 + 3.0, count * 0 + 1

    t.objective = objective
    t._step(1)
    t.objective = lambda model, batch: (objective(model, batch)[0], torch.tensor(0))
    t._step(2)
    names = ("loss", "norm", "lr", "tokens", "seconds")
    told = [{n: e[n] for n in names} for e in events if e["kind"] == "step"]
    # Where no label counts, nothing is divided.
    assert told[0] == {"loss": 3.0, "norm": 0.0, "lr": 3e-3 / 4, "tokens": 2, "seconds": 2.5}
    assert told[1] == {"loss": 6.0, "norm": 0.0, "lr": 3e-3 / 2, "tokens": 0, "seconds": 0.25}


@pytest.mark.parametrize("layers", [True, (1,)])
def test_blocks_that_are_computed_again_train_to_the_same_bits(
    layers: bool | tuple[int, ...], tmp_path: Path
) -> None:
    want = finished(tmp_path / "plain", steps=3)
    again = finished(tmp_path / "again", steps=3, activation_checkpointing=layers)
    assert same(again, want)
    blocks = [isinstance(block, Recomputed) for block in again.model.tower.blocks]
    assert blocks == ([True, True] if layers is True else [False, True])


@pytest.mark.parametrize("mode", MODES)
def test_queries_keys_and_values_are_one_product_unless_heads_are_split(
    mode: str, tmp_path: Path
) -> None:
    t = trainer(tmp_path, parallel=Parallel(mode))
    assert any(isinstance(m, Joined) for m in t.model.modules()) == (mode != "tensor")


def test_random_numbers_depend_on_seed_and_step_alone() -> None:
    assert seed_of(1, 2) != seed_of(2, 1) and seed_of(1, 2) == seed_of(1, 2)
    assert len({seed_of(s, k) for s in range(20) for k in range(20)}) == 400


def test_patience_ends_a_run_and_the_best_checkpoint_stays(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    t = trainer(tmp_path, events.append, evaluate=1, patience=2, steps=12)
    losses = iter([3.0, 2.0, 2.5, 2.4, 1.0])

    def objective(model: Any, batch: Batch) -> Any:
        if torch.is_grad_enabled():
            return causal(model, batch)
        return torch.tensor(next(losses)), torch.tensor(1)

    t.objective = objective
    assert t.run() == "patience" and t.at.best == 2 and t.at.step == 4
    assert "step-00000002" in {p.name for p in t.checkpoints.steps()}
    again = trainer(tmp_path, evaluate=1, patience=2, steps=12)
    assert again.resume() and again.run() == "patience"


def test_stop_after_any_step_leaves_a_checkpoint_of_it(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        t = trainer(tmp_path, save=0, evaluate=0)
        assert t.resume() == (step > 1)
        assert t.run(lambda t=t, step=step: t.at.step == step) == "asked"
        assert t.checkpoints.latest() == t.checkpoints.path(step)


# --- spoiled files ------------------------------------------------------------------------------------------------


def test_broken_checkpoint_is_passed_over_and_said(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    t = trainer(tmp_path, evaluate=0)
    t.run(lambda: t.at.step >= 4)
    (t.checkpoints.steps()[-1] / "model.safetensors").write_bytes(b"no")
    again = trainer(tmp_path, events.append, evaluate=0)
    assert again.resume() and again.at.step == 2
    assert "step-00000004: model.safetensors changed" in events[0]["text"]


def test_checkpoint_under_another_name_is_broken(tmp_path: Path) -> None:
    """Its weights would be taken for those of another step, and that step never be written."""
    t = trainer(tmp_path, evaluate=0)
    t.run(lambda: t.at.step >= 4)
    shutil.rmtree(tmp_path / "step-00000004")
    shutil.copytree(tmp_path / "step-00000002", tmp_path / "step-00000004")
    assert "of another step" in fault(tmp_path / "step-00000004")
    assert t.checkpoints.latest() == tmp_path / "step-00000002"


def test_broken_checkpoints_do_not_count_as_kept(tmp_path: Path) -> None:
    t = trainer(tmp_path, evaluate=0, keep=1)
    t.run(lambda: t.at.step >= 2)
    (tmp_path / "step-00000006").mkdir()  # spoiled beyond recognition
    again = trainer(tmp_path, evaluate=0, keep=1)
    assert again.resume() and again.run(lambda: again.at.step >= 4) == "asked"
    assert again.checkpoints.latest() == tmp_path / "step-00000004"


def test_what_a_kill_left_is_removed(tmp_path: Path) -> None:
    t = trainer(tmp_path, evaluate=0)
    t.run(lambda: t.at.step >= 2)
    for name in (".step-00000004.new-1", "..step-00000004.new-1.new-1", ".average.new-1"):
        (tmp_path / name).mkdir()
    (tmp_path / ".progress.json.new-1").touch()
    clean(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000002"]
    # What cannot be removed, a link to another disk say, stops nobody.
    (tmp_path / ".step-00000006.new-1").symlink_to(tmp_path / "step-00000002")
    clean(tmp_path)
    assert not fault(tmp_path / "step-00000002")


def test_full_disk_leaves_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    t = trainer(tmp_path, evaluate=0)
    t.run(lambda: t.at.step >= 2)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 8, 1))  # type: ignore[attr-defined]
    with pytest.raises(
        UsageError, match=r"needs .* MB, but .* has 0 MB free; .*step-00000002 is as it"
    ):
        t.run()
    monkeypatch.undo()
    again = trainer(tmp_path, evaluate=0)
    assert again.resume() and again.at.step == 2


def test_other_data_or_settings_are_refused(tmp_path: Path) -> None:
    t = trainer(tmp_path, evaluate=0)
    t.run(lambda: t.at.step >= 2)
    with pytest.raises(UsageError, match="train.clip was 1.0, now it is 0.5 .since"):
        trainer(tmp_path, evaluate=0, clip=0.5).resume()
    other = trainer(tmp_path, evaluate=0)
    other.feed = type("Other", (Toy,), {"fingerprint": "other"})()
    with pytest.raises(UsageError, match="the data changed since"):
        other.resume()


def test_second_trainer_refuses(tmp_path: Path) -> None:
    # What a process with a longer number left there.
    (tmp_path / "lock").write_text("123456789012")
    with locked(tmp_path):
        again = pytest.raises(
            UsageError, match=f"another trainer [(]process {os.getpid()}[)] is at work"
        )
        with again, locked(tmp_path):
            pass
    with locked(tmp_path):
        pass


# --- not finite ---------------------------------------------------------------------------------------------------


class Poisoned:
    """Turns the loss or a gradient of step `at` into NaN or infinity."""

    def __init__(self, at: int, how: str):
        self.at, self.how, self.calls = at, how, 0

    def __call__(self, model: Any, batch: Batch) -> Any:
        loss, count = causal(model, batch)
        if not torch.is_grad_enabled():
            return loss, count
        self.calls += 1
        if self.calls != self.at:
            return loss, count
        if self.how == "loss":
            return loss * torch.nan, count
        return loss + (loss - loss.detach()) * torch.inf, count


@pytest.mark.parametrize("at, how", crossed([1, 4, 6], ["loss", "gradient"]))
def test_nan_touches_no_weight(tmp_path: Path, at: int, how: str) -> None:
    t = trainer(tmp_path, micro_batches=1, save=0, evaluate=0)
    t.objective = Poisoned(at, how)
    steps: list[dict[str, Any]] = []
    before: dict[str, Any] = {}

    def tell(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == at - 1:
            before.update({n: x.clone() for n, x in weights(t).items()})
        steps.append(event)

    before.update({n: x.clone() for n, x in weights(t).items()})
    t.callbacks = [tell]
    with pytest.raises(Diverged, match=f"step {at}: the loss is"):
        t.run()
    after = weights(t)
    assert before.keys() <= after.keys() and all(torch.equal(after[n], before[n]) for n in before)
    assert steps[-1]["kind"] == "broken"


def test_skipped_step_is_left_out_and_remembered(tmp_path: Path) -> None:
    t = trainer(tmp_path, micro_batches=1, evaluate=0, nan="skip")
    t.objective = Poisoned(5, "gradient")
    assert t.run() == "done" and t.at.skipped == [5]
    again = trainer(tmp_path, micro_batches=1, evaluate=0, nan="skip")
    assert again.resume() and again.at.skipped == [5]


def test_skipping_has_an_end(tmp_path: Path) -> None:
    t = trainer(tmp_path, micro_batches=1, steps=40, save=1, evaluate=0, nan="skip")
    t._step(1)
    t.at.step = 1
    t.save()
    before = {n: x.clone() for n, x in weights(t).items()}

    def broken(model: Any, batch: Any) -> tuple[Any, Any]:
        loss, count = causal(model, batch)
        return loss * torch.nan, count

    t.objective = broken
    with pytest.raises(
        Diverged, match="10 steps in a row were not finite, the last of them step 11"
    ):
        t.run()
    assert t.at.best is None and all(torch.equal(x, weights(t)[n]) for n, x in before.items())


def test_skipping_ends_only_where_steps_are_skipped_in_a_row(tmp_path: Path) -> None:
    """A good step between them, and the count begins anew."""
    t = trainer(tmp_path, nan="skip")
    for step in (*range(2, 11), *range(12, 21)):
        t._broken(step, math.nan, 1.0)
    assert len(t.at.skipped) == 18
    with pytest.raises(Diverged, match="step 21"):
        t._broken(21, math.nan, 1.0)


def test_best_is_never_a_nan(tmp_path: Path) -> None:
    """Not even the first one; and what an older version took for it is not kept."""
    told: list[dict[str, Any]] = []
    t = trainer(tmp_path, told.append, micro_batches=1, save=2, evaluate=2)
    values = iter([math.nan, 3.0, math.nan, 2.0, *[math.nan] * 9])
    t.measure = lambda *_: ({"loss": next(values)}, {})
    assert t.run() == "done" and (t.at.best, t.at.best_value) == (8, 2.0)
    assert [e["step"] for e in told if e.get("best")] == [4, 8]
    t.at.best, t.at.best_value = 12, math.nan
    t._note()
    again = trainer(tmp_path, micro_batches=1, save=2, evaluate=2)
    assert again.resume() and again.at.best is again.at.best_value is None


def test_keep_is_checked(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="keep = 0: at least one checkpoint must stay"):
        Checkpoints(tmp_path, lambda m, p: None, keep=0)
