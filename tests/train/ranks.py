"""Trainings for several processes: each job is one, by the process alone or by the team that torchrun started.

python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.train.ranks JOBS.json
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

import regard
from regard.attention import GQA
from regard.block import Tower
from regard.data.feed import IGNORE, Base, Batch
from regard.errors import UsageError
from regard.layers import LM, MLP
from regard.models import Tokens, TransformerConfig
from regard.models.mtp import MTP
from regard.position import Rope
from regard.training import objectives
from regard.training.checkpoint import Checkpoints, clean
from regard.training.optim import Optim, Schedule
from regard.training.parallel import Parallel, SingleProcess, team_of
from regard.training.trainer import Train, Trainer

ROOT = Path(__file__).resolve().parents[2]
VOCAB = 23
SMALL: dict[str, Any] = dict(layers=2, dim=16, heads=2, ffn_dim=32, vocab=VOCAB)


class Few:
    """1, 5 and 4 rows in turn: the first is too few for two processes, the second does not halve."""

    epoch = 3

    def take(self, k: int) -> np.ndarray:
        return np.arange((1, 5, 4)[k % 3]) + 10 * k

    def fixed(self) -> Iterator[np.ndarray]:
        return iter([np.arange(4), np.arange(4, 7)])


class Rows(Base):
    """Row n counts up from a start that n decides; the first n % 4 labels are not counted."""

    order, epoch, held, fingerprint = Few(), 3, None, "rows"

    def __init__(self, kind: str):
        self.kind = kind
        self.seen: list[list[int]] = []

    def evaluation(self) -> Iterator[Batch]:
        return self.everything()

    def make(self, numbers: np.ndarray, part: slice, k: int | None) -> Batch:
        mine = torch.from_numpy(numbers[part])
        self.seen.append(mine.tolist())
        ids = (mine[:, None] * 7 + torch.arange(9)) % VOCAB
        told = torch.arange(8) >= mine[:, None] % 4
        labels = ids[:, 1:].masked_fill(~told, IGNORE)
        source = ids.flip(1) if self.kind == "seq2seq" else None
        return Batch(ids[:, :-1], labels, source=source)

    def describe(self) -> str:
        return "rows"


def model(kind: str, dropout: float) -> Any:
    torch.manual_seed(0)
    if kind == "seq2seq":
        return regard.build("vaswani-base", **SMALL, dropout=dropout)
    if kind == "bert":  # its pooler learns nothing
        changes = {**SMALL, "dropout": dropout, "tower.attention.dropout": dropout, "max_len": 16}
        return regard.build("bert-base", **changes)
    attention = GQA(4, kv_heads=2, rope=Rope(), qk_norm=1e-6, dropout=dropout)
    ffn = MLP(24, activation="silu", gated=True, bias=False, dropout=dropout)
    tower = Tower(16, 2, attention, ffn, dropout=dropout)
    mtp = MTP(2) if kind == "mtp" else None
    return TransformerConfig(Tokens(VOCAB), tower, LM(), max_len=16, mtp=mtp).make()


def full(step: int, *_: Any) -> None:
    raise UsageError(f"step-{step:08d}: no room")


LOSSES = {"seq2seq": objectives.seq2seq, "bert": objectives.masked}
LOSSES |= dict.fromkeys(("gqa", "mtp"), objectives.causal)


def trainer(job: dict[str, Any], team: SingleProcess, events: list[dict[str, Any]]) -> Trainer:
    folder, kind = Path(job["folder"]), job.get("kind", "gqa")
    changes = {"steps": 6, "save": 2, "evaluate": 3, **job.get("train", {})}
    optim = Optim(job.get("optim", "adamw"), lr=3e-3)
    schedule = Schedule(warmup=2)
    parallel = Parallel(job.get("mode", "ddp"), job.get("degree"))
    config = Train(optim=optim, schedule=schedule, parallel=parallel, **changes)
    checkpoints = Checkpoints(folder, lambda m, path: m.save(path), keep=99)
    if job.get("full"):
        checkpoints.check = full  # type: ignore[method-assign]
    loss, made = LOSSES[kind], model(kind, job.get("dropout", 0.0))

    def tell(event: dict[str, Any]) -> None:
        events.append(event)
        if job.get("loud"):
            print(json.dumps(event), flush=True)

    def harmed(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        total, count = loss(model, batch)
        rank, step = job["poison"]
        hit = torch.is_grad_enabled() and rank == team.rank and step == t.at.step
        return (total * torch.nan if hit else total), count

    feed = Rows(kind)
    act = harmed if "poison" in job else loss
    t = Trainer(made, feed, act, config, checkpoints, regard.load, [tell], team=team)
    if job.get("torn") and team.rank:
        tear(t, job["torn"])
    return t


def tear(t: Trainer, step: int) -> None:
    """At the checkpoint of this step, die when the others have written their shards."""
    from torch.distributed.checkpoint import HuggingFaceStorageWriter as Writer

    real = Writer.write_data

    def write(self: Any, *args: Any) -> Any:
        if t.at.step == step:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, *args)

    Writer.write_data = write  # type: ignore[method-assign]


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Do a job; what this process saw of it."""
    events: list[dict[str, Any]] = []
    told: dict[str, Any] = {"events": events, "error": ""}
    team = team_of(Parallel(job.get("mode", "ddp"), job.get("degree")), "cpu")
    try:
        t = trainer(job, team, events)
        team.once(lambda: clean(t.checkpoints.folder))
        told["resumed"] = t.resume()
        stop, who = job.get("stop", 10**9), job.get("asked", 0)
        told["why"] = t.run(lambda: team.rank == who and t.at.step >= stop)
        told |= {"step": t.at.step, "seen": t.feed.seen, "skipped": t.at.skipped}  # type: ignore[attr-defined]
    except UsageError as error:
        told["error"] = str(error)
    return told


def saved(folder: Path, step: int) -> dict[str, Tensor]:
    """Weights and the optimiser's state of a checkpoint, as they lie on disk."""
    path = folder / f"step-{step:08d}"
    return load_file(path / "model.safetensors") | SingleProcess().read(path, {})


def main(file: Path) -> None:
    torch.set_num_threads(1)
    (file.parent / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()), encoding="utf-8")
    with team_of(Parallel(patience=7), "cpu") as team:
        for n, job in enumerate(json.loads(file.read_text(encoding="utf-8"))):
            told = json.dumps(work(job))
            (file.parent / f"told-{n}-{team.rank}").write_text(told, encoding="utf-8")


def forked(file: Path, world: int) -> int:
    """What torchrun does, with one import of torch for all."""
    import regard.training.parallel  # noqa: F401  it takes as long

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": str(world)}
    pids = []
    for rank in range(world):
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        pids.append(os.fork())
        if not pids[-1]:
            main(file)
            return 0
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return next((code for code in codes if code), 0)


# --- from outside -------------------------------------------------------------------------------------------------


class Run:
    """torchrun, or `forked`, at work on jobs, one after another."""

    def __init__(
        self, folder: Path, jobs: list[dict[str, Any]], world: int = 2, torchrun: bool = True
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.world, file = folder, world, folder / "jobs.json"
        file.write_text(json.dumps(jobs), encoding="utf-8")
        command = [sys.executable, "-m", "tests.train.ranks", str(file), str(world)]
        if torchrun:
            run = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(world), "-m"]
            command = [sys.executable, "-m", *run, "tests.train.ranks", str(file)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.errors = (folder / "errors.txt").open("w", encoding="utf-8")
        self.agent = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=self.errors, text=True
        )

    def hear(self, events: int) -> bool:
        """Wait for so many events of loud jobs; whether they came before the end."""
        assert self.agent.stdout is not None
        return all(self.agent.stdout.readline() for _ in range(events))

    def pids(self) -> list[int]:
        """The processes of the team, by rank."""
        return [int((self.folder / f"pid-{r}").read_text()) for r in range(self.world)]

    def wait(self) -> int:
        self.agent.communicate(timeout=300)
        self.errors.close()
        return self.agent.returncode

    def said(self) -> str:
        return (self.folder / "errors.txt").read_text(encoding="utf-8")


def done(folder: Path, jobs: list[dict[str, Any]], world: int = 2) -> list[list[dict[str, Any]]]:
    """Let a team do these jobs; what each process saw of each."""
    run = Run(folder, jobs, world, torchrun=False)
    assert run.wait() == 0, run.said()
    paths = [[folder / f"told-{n}-{r}" for r in range(world)] for n in range(len(jobs))]
    return [[json.loads(path.read_text(encoding="utf-8")) for path in each] for each in paths]


def gone(pids: list[int], limit: float) -> float | None:
    """Seconds until none of these processes runs; None after `limit`."""
    start = time.monotonic()
    while any(map(alive, pids)):
        if time.monotonic() - start > limit:
            return None
        time.sleep(0.02)
    return time.monotonic() - start


def alive(pid: int) -> bool:
    """Whether a process runs; one that is dead but not yet buried does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


if __name__ == "__main__":
    here = Path(sys.argv[1])
    sys.exit(forked(here, int(sys.argv[2])) if sys.argv[2:] else main(here))
