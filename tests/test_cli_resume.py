"""regard train --resume as people use it: the run's folder is enough, a run can be made longer, what was changed is
recorded, and the run's own config trains again from anywhere."""

import json
import os
import re
import shlex
import shutil
import signal
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from regard import recipes
from regard.cli.main import main
from regard.data.config import Data
from regard.training.config import Config, as_toml, read
from regard.training.measure import measure
from regard.training.run import again
from regard.training.trainer import Trainer
from tests.test_cli_train import home as home

QUIET = ["--quiet", "--device", "cpu"]


def trained(*arguments: str) -> int:
    return main(["train", *arguments, *QUIET])


def weights(run: Path) -> dict[str, Any]:
    return load_file(run / "last" / "model.safetensors")


def equal(a: Path, b: Path) -> bool:
    x, y = weights(a), weights(b)
    return x.keys() == y.keys() and all(x[n].equal(y[n]) for n in x)


def lines(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / name).read_text().splitlines()]
    return [{n: x for n, x in e.items() if n != "seconds"} for e in found]


def stop_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Ctrl-C while this step is made."""
    real = Trainer._step

    def wrapped(self: Trainer, k: int) -> bool:
        if k == step:
            monkeypatch.setattr(Trainer, "_step", real)
            signal.raise_signal(signal.SIGINT)
        return real(self, k)

    monkeypatch.setattr(Trainer, "_step", wrapped)


def test_printed_line_goes_on_with_that_run(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Typed as it is, with nothing of what was changed; here and from another folder."""
    change = ["--train.seed", "7", "--data.rows", "3", "--keep", "5"]
    assert trained("story.toml", "--output-dir", "whole", *change) == 0
    stop_at(3, monkeypatch)
    assert trained("story.toml", "--output-dir", "my run", *change) == 130
    assert trained("story.toml") == 0  # another run, which must not be taken for it
    other = lines(home / "runs/story")
    said = capsys.readouterr().err
    line = next(text for text in said.splitlines() if text.startswith("stopped after step 3"))
    stop_at(6, monkeypatch)
    assert main(shlex.split(line.partition("go on: ")[2])[1:]) == 130
    (home / "elsewhere").mkdir()
    monkeypatch.chdir(home / "elsewhere")
    assert main(["train", "--resume", str(home / "my run"), "--quiet"]) == 0
    assert equal(home / "my run", home / "whole") and lines(home / "runs/story") == other
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert lines(home / "my run", name) == lines(home / "whole", name)
    run = json.loads((home / "my run/run.json").read_text())
    assert run["options"] == {"keep": 5, "device": "cpu", "log_to": []}
    assert [e["step"] for e in run["resumed"]] == [3, 6]


def test_line_of_several_processes_starts_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    line = "torchrun --nproc-per-node 2 -m regard train --resume 'my run'"
    assert again(Path("my run")) == line


def test_own_config_trains_again_from_anywhere(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert trained("story.toml", "--train.seed", "7", "--model.dim", "8") == 0
    (home / "elsewhere").mkdir()
    monkeypatch.chdir(home / "elsewhere")
    assert trained("../runs/story/config.toml", "--output-dir", "again") == 0
    assert equal(home / "runs/story", home / "elsewhere/again")


def test_run_is_made_longer_and_what_changed_is_recorded(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trained("story.toml") == 0
    capsys.readouterr()
    longer = ["--train.steps", "12", "--train.save", "3", "--train.evaluate", "0", "--keep", "4"]
    more = ["--train.patience", "9", "--train.nan", "skip"]
    assert trained("--resume", "runs/story", *longer, *more) == 0
    (said,) = [t for t in capsys.readouterr().err.splitlines() if t.startswith("going on")]
    assert said.startswith("going on after step 8; train.steps was 8, now it is 12")
    assert (
        "train.schedule.steps was 8, now it is 12" in said and "train.patience was not set" in said
    )
    run, told = home / "runs/story", json.loads((home / "runs/story/run.json").read_text())
    assert told["steps"] == told["step"] == 12 and told["status"] == "done"
    (changes,) = [e["changes"] for e in lines(run) if e["kind"] == "settings"]
    assert told["resumed"][0]["changes"] == {**changes, "keep": [2, 4]}
    assert [e["step"] for e in lines(run) if e["kind"] == "step"] == list(range(1, 13))
    assert trained("--resume", "runs/story") == 0  # with what it was resumed with
    assert "settings" not in [e["kind"] for e in lines(run)][-3:]
    config = tomllib.loads((run / "config.toml").read_text())
    assert config["train"]["steps"] == 12 and config["train"]["save"] == 3


def suggested(run: str, page: Path) -> list[list[str]]:
    """The commands that a run's report tells to type."""
    assert main(["report", run, "--output", str(page)]) == 0
    (shell,) = re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    lines = [line for line in shell.splitlines() if line.startswith("regard ")]
    return [shlex.split(line)[1:] for line in lines]


@pytest.mark.parametrize("times", [0, 1, 2])
def test_commands_of_a_report_can_be_typed(
    times: int, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From any folder, of a run as it was begun and of one that was resumed; they give what they say."""
    few = ["--train.steps", "4", "--train.save", "2", "--output-dir", "my runs/a"]
    assert main(["train", "story.toml", "--train.seed", "7", *few, "--quiet"]) == 0
    for _ in range(times):
        assert main(["train", "--resume", "my runs/a", "--quiet"]) == 0
    (home / "elsewhere").mkdir()
    monkeypatch.chdir(home / "elsewhere")
    anew, go_on, page = suggested("../my runs/a", home / "a.md")
    assert main([*anew, "--quiet"]) == main([*go_on, "--quiet"]) == main(page) == 0
    assert equal(home / "my runs/a", home / "my runs/a-again")
    assert len(json.loads((home / "my runs/a/run.json").read_text())["resumed"]) == times + 1


def test_compare_of_a_run_and_its_resumed_twin_names_that(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trained("story.toml") == 0
    shutil.copytree("runs/story", "runs/twin", symlinks=True)
    assert trained("--resume", "runs/twin", "--train.steps", "9") == 0
    capsys.readouterr()
    assert main(["compare", "runs/story", "runs/twin", "--json"]) == 0
    changed = "train.steps was 8, now it is 9; train.schedule.steps was 8, now it is 9"
    told = json.loads(capsys.readouterr().out)["differs"]
    assert told.pop("resumed") == [None, f"after step 8 ({changed})"]
    assert told == {"train.steps": [8, 9]}


def test_resuming_a_finished_run_adds_no_line(home: Path) -> None:
    """Neither of an evaluation that was made already, nor of its samples."""
    assert trained("story.toml") == 0
    run = home / "runs/story"
    before = [(run / name).read_bytes() for name in ("metrics.jsonl", "samples.jsonl")]
    kinds = [e["kind"] for e in lines(run)]
    assert "evaluation" in kinds and "checkpoint" not in kinds
    best = (run / "best").resolve()
    for _ in range(2):
        assert trained("--resume", "runs/story") == 0
        assert [(run / n).read_bytes() for n in ("metrics.jsonl", "samples.jsonl")] == before
        assert (run / "best").resolve() == best


def test_stop_in_a_long_evaluation_saves_first(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = ["story.toml", "--output-dir", "whole"]
    assert trained(*whole) == 0
    calls: list[int] = []

    def watched(*args: Any, between: Any, **settings: Any) -> Any:
        def asked() -> None:
            calls.append(1)
            if len(calls) == stop:
                signal.raise_signal(signal.SIGTERM)
            between()

        return measure(*args, between=asked, **settings)

    monkeypatch.setattr("regard.training.build.measured", watched)
    for stop in (2, 99):  # batches of the evaluation after step 4, and samples
        shutil.rmtree(home / "parts", ignore_errors=True)
        calls.clear()
        code = trained("story.toml", "--output-dir", "parts")
        if stop == 99:
            break
        assert code == 143 and len(calls) == stop
        assert "stopped after step 4, saved" in capsys.readouterr().err
        assert [e["kind"] for e in lines(home / "parts")] == ["step"] * 4
        assert trained("--resume", "parts") == 0
        assert lines(home / "parts") == lines(home / "whole")
        assert equal(home / "parts", home / "whole")
    samples = len(calls) // 2
    assert samples > 4  # it is looked at between samples too


CONFIGS = sorted(Path(recipes.__file__).parent.glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_is_written_as_it_was_read(path: Path, tmp_path: Path) -> None:
    config = read(path)
    (tmp_path / "config.toml").write_text(as_toml(config))
    assert read(tmp_path / "config.toml") == absolute(config)


def absolute(config: Config) -> Config:
    here = Path.cwd()
    model, tokenizer = (
        {n: str(here / x) if n == "folder" else x for n, x in said.items()}
        for said in (config.model, config.tokenizer)
    )
    return replace(config, data=config.data.under(here), model=model, tokenizer=tokenizer)


def test_odd_settings_are_written_as_they_were(tmp_path: Path) -> None:
    data = Data(
        'a "b" \\ \x7f\té.txt', columns={"text": "a.b c", "label": 1}, rows=4, marker="\n\n"
    )
    model = {"preset": "gpt2", "attention": {"kind": "gqa", "heads": 2}, "ffn": [{"kind": "mlp"}]}
    config = Config("lm", data, model)
    (tmp_path / "config.toml").write_text(as_toml(config))
    assert read(tmp_path / "config.toml") == absolute(config)


# --- what is refused, or mended ------------------------------------------------------------------------------------


def test_what_cannot_go_on_is_one_sentence(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trained("story.toml", "--train.steps", "2") == 0
    run = home / "runs/story"
    (home / "empty").mkdir()
    given = {
        ("runs/story",): "is the folder of a run; go on with it: regard train --resume runs/story",
        ("--resume", "empty"): "empty has nothing to go on with",
        ("--resume", "gone"): "gone cannot be read",
        ("--resume", "runs/story", "--output-dir", "x"): "leave folder (--output-dir) out",
        ("--resume", "runs/story", "--keep", "0"): "keep = 0: at least one checkpoint must stay",
        ("--resume", "runs/story", "--train.steps", "3", "--train.clip", "3"): "train.clip was 1.0",
    }
    for arguments, text in given.items():
        capsys.readouterr()
        assert trained(*arguments) == 2
        said = capsys.readouterr().err
        assert text in said and said.count("\n") == 1, said
    told = json.loads((run / "run.json").read_text())
    del told["options"]
    (run / "run.json").write_text(json.dumps(told))
    assert trained("--resume", "runs/story") == 2
    said = capsys.readouterr().err
    assert "older version" in said and "regard train story.toml --train.steps 2 --resume" in said


ODD = '{"options": {"keep": "x", "device": 3, "log_to": 4}, "seconds": "x", "resumed": 3}'


def test_damaged_run_file_is_no_traceback(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trained("story.toml", "--train.steps", "2") == 0
    for text in ("[" * 100_000, '{"a": ' * 100_000, "", "null", '{"config": 3, "options": 4}', ODD):
        (home / "runs/story/run.json").write_text(text)
        assert trained("story.toml", "--resume", "--train.steps", "2") == 0, capsys.readouterr().err


def test_folder_in_the_place_of_a_link_harms_nothing(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a copy that follows links makes it."""
    run = home / "runs/story"
    links = [run / name for name in ("last", "best")]
    assert trained("story.toml") == 0
    for link in links:
        copy = link.resolve()
        link.unlink()
        shutil.copytree(copy, link)
    assert trained("--resume", "runs/story", "--train.steps", "9") == 0
    said = capsys.readouterr().err
    assert all(f"{link.name} is a folder, not a link of ours; remove it" in said for link in links)
    assert json.loads((run / "run.json").read_text())["status"] == "done"
    assert all(not link.is_symlink() and os.listdir(link) for link in links)
    assert trained("story.toml", "--overwrite") == 0 and all(link.is_symlink() for link in links)


def test_nan_says_how_to_go_on_and_that_is_taken(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = Trainer.__init__

    def poisoned(self: Trainer, *args: Any, **settings: Any) -> None:
        real(self, *args, **settings)
        loss = self.objective

        def objective(model: Any, batch: Any) -> Any:
            total, count = loss(model, batch)
            return (total * float("nan") if self.at.step == 5 else total), count

        self.objective = objective

    monkeypatch.setattr(Trainer, "__init__", poisoned)
    assert trained("story.toml") == 1
    line = capsys.readouterr().err.strip().partition("go on: ")[2]
    assert line == "regard train --resume runs/story --train.nan skip"
    assert main(shlex.split(line)[1:]) == 0
    steps = [e["step"] for e in lines(home / "runs/story") if e["kind"] == "step"]
    assert steps == [1, 2, 3, 4, 6, 7, 8]
