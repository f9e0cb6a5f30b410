"""Two processes train as one does; stopped, killed or poisoned, alone or together, they lose nothing."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.attention import GQA
from regard.block import Tower
from regard.errors import UsageError
from regard.layers import LM, MLP
from regard.models import Tokens, TransformerConfig
from regard.training.checkpoint import Checkpoints
from regard.training.parallel import DataParallel, Lost, Parallel, SingleProcess, lost, team_of
from tests.train.ranks import Rows, Run, alive, done, gone, saved, work
from tests.wide import wide

MODES = ("ddp", "fsdp", "tensor")


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    """As torchrun sets for its own; bits depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def alike(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Every tensor equal up to rounding of its largest number."""
    assert a.keys() == b.keys()
    for name in a:
        far = (a[name] - b[name]).abs().max() / b[name].abs().max().clamp(min=1e-30)
        # Adam's steps are as long for small gradients as for large ones, with their rounding.
        within = 1e-5 if ":exp_avg" in name else 1e-4
        assert far <= within, (name, float(far))


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def losses(told: dict[str, Any]) -> list[float]:
    assert not told["error"]
    return [e["loss"] for e in told["events"] if e["kind"] in ("step", "evaluation")]


# --- as one ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", wide(["gqa", "seq2seq", "bert", "mtp"], keep=["gqa"]))
def test_processes_together_train_as_one_alone(kind: str, tmp_path: Path) -> None:
    """Batches of 1, 5 and 4 rows with labels left out; in two parts; tied weights; a layer that never learns; averaged
    weights."""
    base = {"train": {"micro_batches": 2, "save": 0, "ema": 0.9}, "kind": kind}
    modes = ("ddp",) if kind == "bert" else MODES
    found = done(tmp_path, [{**base, "folder": str(tmp_path / m), "mode": m} for m in modes])
    one = work({**base, "folder": str(tmp_path / "alone")})
    want = saved(tmp_path / "alone", 6)
    for mode, (first, second) in zip(modes, found, strict=True):
        assert losses(first) == pytest.approx(losses(one), rel=1e-5), mode
        assert not second["events"], "only the first process tells"
        got = saved(tmp_path / mode, 6)
        # softmax does not feel the keys' bias: its gradient is nothing but rounding
        no = [name for name in want if ".wk.bias" in name or ".key.bias" in name]
        alike(
            {n: x for n, x in got.items() if n not in no},
            {n: want[n] for n in want if n not in no},
        )


def test_every_row_is_seen_by_one_process(tmp_path: Path) -> None:
    feed = Rows("gqa")
    for k in range(6):
        whole = feed.batch(k)
        parts = [feed.batch(k, rank, 3) for rank in range(3)]
        assert sum(p.tokens for p in parts) == whole.tokens
        seen = torch.cat([p.ids for p in parts if p.tokens])
        assert torch.equal(seen, whole.ids)


# --- going on ----------------------------------------------------------------------------------------------------


def test_stopped_teams_go_on_to_the_same_bits_and_other_teams_from_there(tmp_path: Path) -> None:
    few: dict[str, Any] = {"train": {"save": 0, "evaluate": 0, "ema": 0.9}}
    base: dict[str, Any] = {**few, "dropout": 0.1}
    jobs, other = [], {**few, "folder": str(tmp_path / "other")}
    for mode in MODES:
        part = {**base, "mode": mode, "folder": str(tmp_path / f"{mode}-parts")}
        jobs.append({**base, "mode": mode, "folder": str(tmp_path / mode)})
        jobs += [{**part, "stop": 1, "asked": 1}, {**part, "stop": 3}, part]
    jobs += [{**other, "mode": mode, "stop": n} for n, mode in enumerate(MODES[1:], 3)]
    jobs.append({**few, "folder": str(tmp_path / "turns"), "stop": 4})
    assert (
        work({**few, "folder": str(tmp_path / "turns"), "stop": 2})["why"] == "asked"
    )  # 1 -> 2 -> 1
    assert work({**few, "folder": str(tmp_path / "other"), "stop": 2})["why"] == "asked"
    found = done(tmp_path, jobs)
    for i, mode in enumerate(MODES):
        runs = whole, first, second, third = [told[0] for told in found[4 * i : 4 * i + 4]]
        assert [t["why"] for t in runs] == ["done", "asked", "asked", "done"]
        assert (first["step"], second["step"]) == (1, 3) and second["resumed"] and third["resumed"]
        assert equal(saved(tmp_path / f"{mode}-parts", 6), saved(tmp_path / mode, 6)), mode
        assert not [e for e in third["events"] if e["kind"] == "warning"]
    (warning, *_) = found[-1][0]["events"]
    assert warning["kind"] == "warning" and "up to rounding, not to the bit" in warning["text"]
    assert "alone x 1" in warning["text"] and "ddp x 2" in warning["text"]
    work({**few, "folder": str(tmp_path / "one")})
    for name in ("turns", "other"):
        assert work({**few, "folder": str(tmp_path / name)})["why"] == "done"
        alike(saved(tmp_path / name, 6), saved(tmp_path / "one", 6))
    model = regard.load(tmp_path / "other" / "step-00000004")  # written by tensor parallel, as any
    assert model(torch.zeros(1, 3, dtype=torch.long)).shape == (1, 3, 23)


# --- what goes wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", wide(["ddp", "fsdp"], keep=["fsdp"]))
def test_what_is_wrong_in_one_process_stops_all_at_the_same_step(mode: str, tmp_path: Path) -> None:
    jobs = [
        {"mode": mode, "folder": str(tmp_path / nan), "train": {"nan": nan}}
        for nan in ("stop", "skip")
    ]
    jobs = [{**job, "poison": [1, 4]} for job in jobs]  # in the second process
    jobs.append({"mode": mode, "folder": str(tmp_path / "full"), "full": True})
    found = done(tmp_path, jobs)
    for job, told in zip(jobs[:-1], found[:-1], strict=True):
        for t in told:
            if job["train"]["nan"] == "stop":  # type: ignore[index]
                assert t["error"].startswith("step 4: the loss is nan"), job
            else:
                assert t["why"] == "done" and t["skipped"] == [4], job
    assert [t["error"] for t in found[-1]] == ["step-00000002: no room"] * 2


def test_killed_process_ends_the_others_and_the_next_start_goes_on(tmp_path: Path) -> None:
    few = {"steps": 9, "evaluate": 0}
    job: dict[str, Any] = {"mode": "fsdp", "dropout": 0.1, "folder": str(tmp_path / "whole")}
    killed = {**job, "folder": str(tmp_path / "killed"), "loud": True, "train": {**few, "save": 1}}
    run = Run(tmp_path / "run", [killed])
    assert run.hear(5), run.said()
    pids = run.pids()
    os.kill(pids[1], signal.SIGKILL)
    took = gone(pids, 10)
    assert took is not None, "after 10 s the other process still runs"
    assert run.wait() != 0 and not any(map(alive, pids))
    again, whole = done(tmp_path / "again", [killed, {**job, "train": {**few, "save": 0}}])
    assert again[0]["resumed"] and again[0]["why"] == "done" and not whole[0]["resumed"]
    assert equal(saved(tmp_path / "killed", 9), saved(tmp_path / "whole", 9))


def test_half_precision_shards_that_are_torn_are_no_checkpoint(tmp_path: Path) -> None:
    """bf16 in fsdp: as one process up to rounding; killed between two shards, it goes on from the checkpoint before to
    the same bits; without one of its shards a checkpoint is passed over."""
    half = {"precision": "bf16", "save": 2, "evaluate": 0}
    job: dict[str, Any] = {"mode": "fsdp", "dropout": 0.1, "train": half}
    torn, whole = ({**job, "folder": str(tmp_path / name)} for name in ("torn", "whole"))
    run = Run(tmp_path / "run", [{**torn, "torn": 4}], torchrun=False)
    assert run.wait() != 0
    names = sorted(p.name for p in (tmp_path / "torn").iterdir())
    assert names == [".step-00000004.shards", "step-00000002"], run.said()
    assert len(list((tmp_path / "torn" / names[0]).iterdir())) == 1
    plain: dict[str, Any] = {"mode": "fsdp", "train": half}
    jobs = [torn, whole, {**plain, "folder": str(tmp_path / "two")}]
    again, never, two = done(tmp_path / "again", jobs)
    one = work({**plain, "folder": str(tmp_path / "one")})
    assert again[0]["resumed"] and again[0]["why"] == "done" and not never[0]["resumed"]
    assert equal(saved(tmp_path / "torn", 6), saved(tmp_path / "whole", 6))
    assert losses(two[0]) == pytest.approx(losses(one), rel=0.01)
    shards = sorted((tmp_path / "whole/step-00000006/trainer/shards").iterdir())
    assert len(shards) == 2
    shards[1].unlink()
    files = Checkpoints(tmp_path / "whole", lambda model, path: None)
    assert str(files.latest()).endswith("step-00000004")
    assert files.broken == [
        f"step-00000006: trainer/shards/{shards[1].name} changed, is missing or is new"
    ]


# --- alone, and what is refused -----------------------------------------------------------------------------------


def test_one_process_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert type(team_of(Parallel("fsdp"), "cpu")) is SingleProcess
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert type(team_of(Parallel("tensor"), "cpu")) is SingleProcess
    monkeypatch.setenv("WORLD_SIZE", "6")
    with pytest.raises(UsageError, match=r"degree = 4 does not divide 6 .*one of \[1, 2, 3, 6\]"):
        team_of(Parallel("tensor", 4), "cpu")


def test_only_a_failed_collective_is_a_lost_process() -> None:
    gloo = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:5"
    assert lost(RuntimeError(gloo)) and lost(torch.distributed.DistNetworkError("x"))
    for error in (
        UsageError("/data/igloo/story.txt does not exist"),
        RuntimeError("cannot open /data/gloo/story.h: 3"),
        RuntimeError("PytorchStreamReader failed reading /data/igloo/x"),
        UsageError(gloo),
        None,
    ):
        assert not lost(error)
    team = object.__new__(DataParallel)
    team.heartbeat = None
    team.__exit__(UsageError, UsageError("/data/igloo/story.txt does not exist"), None)
    with pytest.raises(Lost, match="another process has ended"):
        team.__exit__(RuntimeError, RuntimeError(gloo), None)


def test_parallel_says_what_is_possible() -> None:
    with pytest.raises(UsageError, match="parallel.patience = 0: give 1 or more"):
        Parallel(patience=0)
    with pytest.raises(UsageError, match="mode = 'fsp' is unknown; did you mean 'fsdp'?"):
        Parallel("fsp")
    with pytest.raises(UsageError, match="degree = 2: it is for mode tensor alone"):
        Parallel("ddp", 2)


@pytest.mark.parametrize(
    "model, why",
    [
        ("deepseek-v3", "its attention is not multi-head or grouped-query"),
        ("mixtral-8x7b", "its feed-forward is a mixture of experts"),
        ("t5-small", "it has relative position biases"),
        ("gru-lm", "it has no blocks"),
    ],
)
def test_tensor_parallel_refuses_what_it_cannot_split(model: str, why: str) -> None:
    from regard.training.parallel import check

    built = regard.build(model, layers=1, device="meta")
    with pytest.raises(UsageError, match=f"cannot split this model: {why}; choose ddp or fsdp"):
        check(built, 2)


def test_tensor_parallel_names_the_degrees_that_fit() -> None:
    from regard.training.parallel import check

    tower = Tower(24, 2, GQA(6, kv_heads=2), MLP(32))
    model = TransformerConfig(Tokens(23), tower, LM()).make()
    check(model, 2)
    with pytest.raises(
        UsageError, match=r"3 processes cannot split .*\(2, 6, 32\).* one of \[1, 2\]"
    ):
        check(model, 3)
