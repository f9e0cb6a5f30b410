"""A run that was stopped, killed, spoiled or starved goes on to the same bits; what is not finite touches no weight."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.config import UsageError
from regard.train import keep
from regard.train.batch import Batch
from regard.train.keep import Keeper, fault, locked
from regard.train.objective import causal
from regard.train.trainer import Diverged, Trainer, seed_of
from tests.train.toy import Toy, trainer, weights

ROOT = Path(__file__).resolve().parents[2]


def same(a: Trainer, b: Trainer) -> bool:
    x, y = weights(a), weights(b)
    return x.keys() == y.keys() and all(torch.equal(x[n], y[n]) for n in x)


def finished(folder: Path, **changes: Any) -> Trainer:
    t = trainer(folder, **changes)
    t.resume()
    assert t.run() == "done"
    return t


# --- going on -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_resume_is_bitwise_equal(tmp_path: Path, precision: str, name: str) -> None:
    from regard.train.optim import Optim

    changes = {"precision": precision, "optim": Optim(name, lr=3e-3)}
    want = finished(tmp_path / "whole", **changes)
    for stop in (1, 3, 4, 7, 11):  # a chain of resumes
        t = trainer(tmp_path / "parts", **changes)
        t.resume()
        assert t.run(lambda t=t, stop=stop: t.at.step >= stop) == "asked"
    got = finished(tmp_path / "parts", **changes)
    assert same(got, want)
    assert got.at == want.at


def test_any_split_into_parts_trains_alike(tmp_path: Path) -> None:
    changes = {"parts": 3, "steps": 1}
    torch.manual_seed(0)
    runs = [trainer(tmp_path / str(n), **{**changes, "parts": n}) for n in (1, 3)]
    for t in runs:
        t.model.eval()  # without dropout, whose draws depend on the shape
        t.model.train = lambda mode=True, m=t.model: m  # type: ignore[method-assign]
        t.run()
    a, b = (dict(t.model.named_parameters()) for t in runs)
    assert all(torch.allclose(a[n], b[n], atol=1e-6) for n in a)


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
    assert "step-00000002" in {p.name for p in t.keeper.steps()}
    again = trainer(tmp_path, evaluate=1, patience=2, steps=12)
    assert again.resume() and again.run() == "patience"


# --- kill -9 ------------------------------------------------------------------------------------------------------


def spawn(folder: Path, **changes: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.train.toy", str(folder), json.dumps(changes)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)


def test_killed_runs_go_on_to_the_same_bits(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # bits depend on it
    try:
        want = finished(tmp_path / "whole", steps=40, save=1)
        draw, kills = random.Random(0), 0
        for _ in range(5):
            process = spawn(tmp_path / "killed", steps=40, save=1)
            assert process.stdout is not None
            for _ in range(draw.randint(1, 12)):  # events, half of them right after a checkpoint
                process.stdout.readline()
            time.sleep(draw.random() * 0.004)
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                kills += 1
            process.wait()
        process = spawn(tmp_path / "killed", steps=40, save=1)
        assert process.wait(timeout=60) == 0 and kills
        got = trainer(tmp_path / "killed", steps=40, save=1)
        assert got.resume() and got.at.step == 40 and same(got, want)
        assert not list((tmp_path / "killed").glob(".step-*"))
    finally:
        torch.set_num_threads(before)


def test_every_call_of_a_write_may_be_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop at each fsync, rename and removal in turn: the checkpoint before is there, or the new one."""
    calls = 0

    class Killed(BaseException):
        pass

    def dying(real: Any, at: int) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                raise Killed
            return real(*args, **kwargs)

        return call

    t = trainer(tmp_path, save=1, evaluate=0)
    t.run(lambda: t.at.step >= 2)
    t.at.step = 3
    for at in range(1, 200):
        calls = 0
        with monkeypatch.context() as m:
            m.setattr(keep, "sync", dying(keep.sync, at))
            m.setattr(Path, "rename", dying(Path.rename, at))
            m.setattr(Path, "write_bytes", dying(Path.write_bytes, at))
            m.setattr(shutil, "rmtree", dying(shutil.rmtree, at))
            try:
                t.save()
            except Killed:
                pass
            else:
                break
        t.keeper.clean()
        found = t.keeper.latest()
        assert found is not None and found.name in ("step-00000002", "step-00000003"), at
        shutil.rmtree(tmp_path / "step-00000003", ignore_errors=True)
    assert at > 10 and t.keeper.latest() == tmp_path / "step-00000003"


# --- spoiled files ------------------------------------------------------------------------------------------------


def test_every_corruption_is_found(tmp_path: Path) -> None:
    t = trainer(tmp_path, evaluate=0)
    t.run(lambda: t.at.step >= 4)
    path, draw = t.keeper.steps()[-1], random.Random(0)
    files = sorted(p for p in path.rglob("*") if p.is_file())
    for _ in range(120):
        file = draw.choice(files)
        old = file.read_bytes()
        new = bytearray(old)
        how = draw.choice(["flip", "cut", "grow", "gone"])
        if how == "flip":
            new[draw.randrange(len(new))] ^= 1 << draw.randrange(8)
        elif how == "cut":
            del new[draw.randrange(len(new)) :]
        elif how == "grow":
            new += b" "
        file.unlink()
        if how != "gone":
            file.write_bytes(new)
        assert fault(path), (file.name, how)
        file.write_bytes(old)
    assert not fault(path)


def test_broken_checkpoint_is_passed_over_and_said(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    t = trainer(tmp_path, evaluate=0)
    t.run(lambda: t.at.step >= 4)
    (t.keeper.steps()[-1] / "model.safetensors").write_bytes(b"no")
    again = trainer(tmp_path, events.append, evaluate=0)
    assert again.resume() and again.at.step == 2
    assert "step-00000004: model.safetensors changed" in events[0]["text"]


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
    with pytest.raises(UsageError, match="the settings of training changed since"):
        trainer(tmp_path, evaluate=0, clip=0.5).resume()
    other = trainer(tmp_path, evaluate=0)
    other.feed = type("Other", (Toy,), {"fingerprint": "other"})()
    with pytest.raises(UsageError, match="the data changed since"):
        other.resume()


def test_second_trainer_refuses(tmp_path: Path) -> None:
    with locked(tmp_path):
        again = pytest.raises(
            UsageError, match=f"another trainer .process {os.getpid()}. is at work"
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


@pytest.mark.parametrize("how", ["loss", "gradient"])
@pytest.mark.parametrize("at", [1, 4, 6])
def test_nan_touches_no_weight(tmp_path: Path, at: int, how: str) -> None:
    t = trainer(tmp_path, parts=1, save=0, evaluate=0)
    t.objective = Poisoned(at, how)
    steps: list[dict[str, Any]] = []
    before: dict[str, Any] = {}

    def tell(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == at - 1:
            before.update({n: x.clone() for n, x in weights(t).items()})
        steps.append(event)

    before.update({n: x.clone() for n, x in weights(t).items()})
    t.tell = tell
    with pytest.raises(Diverged, match=f"step {at}: the loss is"):
        t.run()
    after = weights(t)
    assert before.keys() <= after.keys() and all(torch.equal(after[n], before[n]) for n in before)
    assert steps[-1]["kind"] == "broken"


def test_skipped_step_is_left_out_and_remembered(tmp_path: Path) -> None:
    t = trainer(tmp_path, parts=1, evaluate=0, nan="skip")
    t.objective = Poisoned(5, "gradient")
    assert t.run() == "done" and t.at.skipped == [5]
    again = trainer(tmp_path, parts=1, evaluate=0, nan="skip")
    assert again.resume() and again.at.skipped == [5]


def test_going_back_leaves_the_step_out(tmp_path: Path) -> None:
    t = trainer(tmp_path / "back", parts=1, evaluate=0, nan="back")
    t.objective = Poisoned(6, "loss")
    assert t.run() == "done" and t.at.skipped == [6]
    skip = trainer(tmp_path / "skip", parts=1, evaluate=0, nan="back")
    skip.at.skipped = [6]
    skip.run()
    assert same(t, skip)


def test_keep_is_checked(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="keep = 0: at least one checkpoint must stay"):
        Keeper(tmp_path, lambda m, p: None, keep=0)
