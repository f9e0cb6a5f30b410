"""What a run shows while it goes on, on a terminal and elsewhere, and what trackers are told of it."""

import io
import re
import subprocess
import sys
import time
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import regard
from regard.cli import train as live
from regard.cli.train import Display, Smoothed, evaluation_line
from regard.errors import Fault, Notice, UsageError
from regard.training.log import tracker

ROOT = Path(__file__).resolve().parents[1]


def step(k: int, loss: float = 3.0, **more: Any) -> dict[str, Any]:
    told = {"norm": 0.5, "lr": 6e-4, "tokens": 1000, "seconds": 0.25}
    return {"kind": "step", "step": k, "loss": loss, **told, **more}


def begun(steps: int, **how: Any) -> Display:
    """A display that knows how long the run is."""
    shown = Display(**how)
    shown({"kind": "begin", "steps": steps, "about": "", "notices": []})
    return shown


def evaluation(k: int, best: bool = True, **more: Any) -> dict[str, Any]:
    return {
        "kind": "evaluation",
        "step": k,
        "loss": 3.041,
        "best": best,
        **more,
    }


PPL = {"perplexity": 20.926}
SAMPLES = {
    "kind": "samples",
    "step": 2,
    "samples": [{"source": "the [red]king[/]", "text": "\x1b[31msaid\n", "reference": "is"}],
}


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


# --- lines --------------------------------------------------------------------------------------------------------


def test_plain_line_comes_every_ten_seconds_and_at_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Time()
    with begun(60, now=clock) as plain:
        for k in range(1, 61):
            clock.now += 0.5
            plain(step(k, 3.4121))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    pattern = r"\d\d:\d\d:\d\d step 20/60 loss 3.412 lr 6.0e-4 tok/s 4000 eta 00:00:20"
    assert re.fullmatch(pattern, lines[0])
    assert " step 60/60 " in lines[2] and lines[2].endswith("eta 00:00:00")


def test_eta_of_a_resumed_run_counts_its_own_steps(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Time()
    plain = begun(1000, now=clock)
    for k in range(901, 921):
        clock.now += 0.5
        plain(step(k))
    assert (
        capsys.readouterr()
        .err.strip()
        .endswith("step 920/1000 loss 3.000 lr 6.0e-4 tok/s 4000 eta 00:00:40")
    )


def test_quiet_keeps_evaluations_and_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    plain = begun(2, quiet=True)
    for event in (
        step(1),
        step(2),
        evaluation(2, **PPL),
        SAMPLES,
        {"kind": "warning", "text": "odd"},
    ):
        plain(event)
    plain({"kind": "broken", "step": 2, "loss": float("nan"), "norm": 1.0})
    plain({"kind": "checkpoint", "step": 2, "path": "x"})
    assert capsys.readouterr().err.splitlines() == [
        "eval  step 2  loss 3.0410  ppl 20.93, the best so far",
        "note: odd",
        "step 2: loss nan, gradient 1.0: the weights were not touched",
    ]


def test_evaluation_line_names_every_metric() -> None:
    event = evaluation(150, best=False, **PPL, bleu=31.24, signatures={"bleu": "x"})
    assert evaluation_line(event) == "eval  step 150  loss 3.0410  ppl 20.93  bleu 31.24"
    event = evaluation(150, accuracy=0.5)
    assert evaluation_line(event) == "eval  step 150  loss 3.0410  accuracy 0.5, the best so far"
    assert (
        evaluation_line({"kind": "evaluation", "step": 1, "loss": None, "best": False})
        == "eval  step 1"
    )


def test_samples_are_shown_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    begun(2)(SAMPLES)
    said = capsys.readouterr().err
    assert said == "sample  the [red]king[/] → ␛[31msaid␊  (wanted is)\n"


# --- what is kept -------------------------------------------------------------------------------------------------


def test_curve_holds_the_whole_run_in_few_values() -> None:
    loss = Smoothed()
    for k in range(1, 10_001):
        loss.add(float(k))
        assert len(loss.curve) < live.TRAIL
    assert loss.curve == sorted(loss.curve) and len(loss.curve) >= live.TRAIL // 2
    assert loss.curve[0] < 100 and loss.curve[-1] > 9_800


def test_mean_loss_starts_at_the_first_value() -> None:
    loss = Smoothed()
    loss.add(5.0)
    assert loss.mean == pytest.approx(5.0)
    loss.add(3.0)
    assert loss.mean == pytest.approx((0.98 * 0.02 * 5 + 0.02 * 3) / (0.98 * 0.02 + 0.02))


# --- the block ----------------------------------------------------------------------------------------------------


def screen(width: int = 100, height: int = 20, **more: Any) -> Console:
    file = io.StringIO()
    return Console(
        file=file,
        force_terminal=True,
        width=width,
        height=height,
        _environ={"TERM": "xterm"},
        **more,
    )


def told(shown: Display) -> None:
    for k in range(1, 61):
        shown(step(k, 5 - k / 30))
    shown(evaluation(50, bleu=31.2))
    shown(evaluation(60, best=False))
    shown(SAMPLES)


def test_block_shows_where_the_run_stands() -> None:
    console = screen()
    shown = begun(300, console=console)
    told(shown)
    lines = [text for text, _ in shown.lines(100)]
    assert lines[0].startswith("step 60/300  ━━━━━━━━╌╌╌") and "20 %  left 00:" in lines[0]
    assert lines[0].count("━") == 8 and lines[0].count("╌") == 32
    weights = [0.98 ** (60 - k) for k in range(1, 61)]
    mean = sum(w * (5 - k / 30) for k, w in enumerate(weights, 1)) / sum(weights)
    assert lines[1] == f"loss 3.0000 (mean {mean:.4f})  lr 6.00e-4  grad 0.50  4.0k tok/s"
    assert lines[2].startswith("loss  █") and lines[2].endswith("▁")
    assert lines[3] == "eval  step 60  loss 3.0410"
    assert lines[4].startswith("eval  step 50") and lines[4].endswith("the best so far")
    assert lines[5].startswith("sample  the [red]king[/] → ␛[31msaid")


@pytest.mark.parametrize("width, height", [(200, 50), (40, 6), (10, 2), (1, 1)])
def test_block_fits_any_terminal(width: int, height: int) -> None:
    console = screen(width, height)
    with begun(300, console=console) as shown:
        told(shown)
        for now in (width, max(width // 2, 1), 1, width):  # it shrinks while the run goes on
            console.width = now
            shown.block.refresh()
    assert all(len(text) <= width for text, _ in shown.lines(width))


def test_block_before_the_first_step_and_warnings() -> None:
    console = screen()
    with begun(3, console=console) as shown:
        shown.block.refresh()
        shown({"kind": "warning", "text": "[bold]odd"})
    out = console.file.getvalue()  # type: ignore[attr-defined]
    assert "before the first step" in out and "note: [bold]odd" in out


def test_block_has_no_colour_where_none_is_wanted() -> None:
    for no_color in (False, True):
        console = screen(color_system="standard", no_color=no_color)
        with begun(3, console=console) as shown:
            told(shown)
        coloured = re.search(r"\x1b\[3[0-9]m", console.file.getvalue())  # type: ignore[attr-defined]
        assert bool(coloured) != no_color


def test_hearing_a_step_draws_nothing() -> None:
    console = screen()
    shown = begun(100_000, console=console)
    drawn: list[int] = []
    shown.block.refresh = lambda: drawn.append(1)  # type: ignore[method-assign]
    with shown:
        drawn.clear()
        begin = time.monotonic()
        for k in range(1, 20_001):
            shown(step(k))
        took = time.monotonic() - begin
        assert len(drawn) <= live.RATE * took + 2
    assert took / 20_000 < 2e-4


# --- which of them ------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    "terminal, term, quiet, block",
    [
        (True, "xterm", False, True),
        (True, "dumb", False, False),
        (True, "", False, False),
        (True, "xterm", True, False),
        (False, "xterm", False, False),
    ],
)
def test_block_is_chosen_by_the_terminal(
    terminal: bool, term: str, quiet: bool, block: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal() if terminal else io.StringIO())
    monkeypatch.setenv("TERM", term) if term else monkeypatch.delenv("TERM", raising=False)
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    with begun(10, quiet=quiet, console=None if quiet else live.terminal()) as shown:
        assert (shown.block is not None) == block


def test_terminal_without_rich_gets_plain_lines() -> None:
    script = """
import sys
import warnings
sys.modules["rich"] = sys.modules["rich.console"] = None
sys.stderr.isatty = lambda: True
from regard.cli.train import terminal
print(terminal(), "torch" in sys.modules)
"""
    env = {"PYTHONPATH": str(ROOT), "TERM": "xterm", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["None", "False"], done.stderr


# --- trackers -----------------------------------------------------------------------------------------------------

INFO = {"name": "story", "wandb": "ab12", "config": {"train": {"steps": 3}, "task": "lm"}}
EVENTS = [step(1), evaluation(1, bleu=31.2, signatures={"bleu": "x"}), SAMPLES]
TRAIN = {"train/loss": 3.0, "train/norm": 0.5, "train/lr": 6e-4, "train/tokens": 1000}
TRAIN |= {"train/seconds": 0.25, "train/tokens_per_second": 4000.0}


class Service(types.ModuleType):
    """A package that speaks as wandb does, and notes what it is told."""

    def __init__(self, name: str, fails: bool = False):
        super().__init__(name)
        self.calls: list[Any] = []
        self.fails = fails

    def init(self, **given: Any) -> None:
        self.calls.append(("init", given))

    def log(self, values: dict[str, float], step: int) -> None:
        if self.fails:
            raise OSError("the network is down")
        self.calls.append((values, step))

    def finish(self) -> None:
        self.calls.append("finish")


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_service_is_told_numbers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Service(name)
    monkeypatch.setitem(sys.modules, name, module)
    (listener,) = tracker([name, name], tmp_path, INFO)
    for event in (*EVENTS, {"kind": "end", "status": "done"}, {"kind": "end", "status": "done"}):
        listener(event)
    given = {"project": "regard", "name": "story", "config": {"train.steps": 3, "task": "lm"}}
    where = {"dir": str(tmp_path), "id": "ab12", "resume": "allow"}
    where = where if name == "wandb" else {"resume": "never"}  # trackio has no such arguments
    assert module.calls == [
        ("init", {**given, **where}),
        (TRAIN, 1),
        ({"eval/loss": 3.041, "eval/bleu": 31.2}, 1),
        "finish",
    ]


def test_a_run_that_goes_on_is_one_run_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped and gone on with, the same id is given back; begun anew, another."""
    services = {name: Service(name) for name in ("wandb", "trackio")}
    for name, module in services.items():
        monkeypatch.setitem(sys.modules, name, module)
    (tmp_path / "story.txt").write_text("the quick brown fox. " * 30)
    config = {
        "task": "lm",
        "model": {"preset": "gpt2", "layers": 1, "dim": 16, "heads": 2, "max_len": 16},
        "data": {"train": [str(tmp_path / "story.txt")], "held": 0.2, "length": 8, "rows": 2}
        | {"pack": "windows"},
        "tokenizer": {"kind": "chars"},
        "train": {"steps": 4, "save": 2},
    }
    how: dict[str, Any] = {"log_to": [*services], "device": "cpu"}
    stops = iter([False, True])
    first = regard.train(config, tmp_path / "run", **how, stop=lambda: next(stops))
    assert first.status == "asked" and first.step == 2
    regard.train(config, tmp_path / "run", resume=True, device="cpu")
    regard.train(config, tmp_path / "run", overwrite=True, **how)
    begun = {n: [x[1] for x in m.calls if x[0] == "init"] for n, m in services.items()}
    ids = [given["id"] for given in begun["wandb"]]
    assert ids[0] == ids[1] != ids[2] and len(ids) == 3
    assert {given["resume"] for given in begun["wandb"]} == {"allow"}
    assert [given["resume"] for given in begun["trackio"]] == ["never", "allow", "never"]
    steps = [call[1] for call in services["wandb"].calls if "train/loss" in call[0]]
    assert steps == [1, 2, 3, 4, 1, 2, 3, 4]


def test_tracker_that_fails_does_not_cost_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", Service("wandb", fails=True))
    (listener,) = tracker(["wandb"], tmp_path, INFO)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for event in EVENTS:
            listener(event)
    (told,) = heard
    assert told.category is Notice
    assert str(told.message) == "wandb is told no more: the network is down"


def test_tensorboard_is_told_scalars_and_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    class SummaryWriter:
        def __init__(self, log_dir: str):
            calls.append(log_dir)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            calls.append((name, value, step))

        def add_text(self, name: str, text: str, step: int) -> None:
            calls.append((name, step))

        def close(self) -> None:
            calls.append("close")

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    (listener,) = tracker(["tensorboard"], tmp_path, INFO)
    for event in (*EVENTS, {"kind": "end", "status": "done"}):
        listener(event)
    assert calls[0] == str(tmp_path / "tensorboard") and calls[-1] == "close"
    assert ("train/loss", 3.0, 1) in calls and ("eval/bleu", 31.2, 1) in calls
    assert ("samples/0", 2) in calls


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_missing_package_is_said_with_what_to_type(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=f"pip install {name}") as error:
        tracker([name], tmp_path, INFO)
    assert error.value.code == 3  # type: ignore[attr-defined]


def test_tracker_that_cannot_begin_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Service("wandb")
    monkeypatch.setattr(module, "init", lambda **_: 1 / 0)
    monkeypatch.setitem(sys.modules, "wandb", module)
    with pytest.raises(Fault, match="--log-to wandb cannot begin") as error:
        tracker(["wandb"], tmp_path, INFO)
    assert error.value.code == 3


def test_unknown_tracker_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'wandbb' is unknown"):
        tracker(["wandbb"], tmp_path, INFO)
