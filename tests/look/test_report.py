"""A run's folder read, summed up, and made into a page that can do no harm."""

import json
import math
import re
import shlex
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regard.files import write_whole
from regard.report.compare import comparison, differing, labels, table
from regard.report.folder import Unreadable, read, summary
from regard.report.page import as_html, as_markdown
from regard.report.run import Map, report, toml
from regard.see.format import number
from tests.look.synthetic import INFO, events, make, samples

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&|`*_ \u202e\x1b[31m"
ALLOWED = """html head meta title style body main h1 h2 h3 p div dl dt dd bdi table thead tbody tr th td pre code
details summary figure figcaption strong input label svg line text polyline circle path rect image""".split()  # noqa: SIM905


class Page(HTMLParser):
    """What a browser would make of a page: tags, attributes, text."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "input", "line", "polyline", "circle", "path", "rect", "image"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def maps() -> list[Map]:
    rows = np.array([[1.0, 0.0], [0.25, 0.75]])
    return [Map("decoder.0.cross", head, ["er", "sagte"], ["he", "said"], rows) for head in (0, 1)]


# --- summing up ---------------------------------------------------------------------------------------------------


def test_verdict_says_it_in_one_line(tmp_path: Path) -> None:
    found = summary(read(make(tmp_path / "story")))
    assert found.verdict == "loss 3.04, best at 250, not diverged, 3.7k tok/s, 5 min 44 s"
    assert found.best == 250 and found.value == 3.041 and found.last == pytest.approx(3.141)
    assert found.rate == pytest.approx(1024 / 0.28)


@pytest.mark.parametrize(
    "told, changes, expected",
    [
        (events(20), {"status": "running", "seconds": 0.01}, "training loss 4.48, never evaluated, not diverged"),
        (events(20), {"status": "running", "seconds": 0.01}, "5.6 s, still running or killed at step 20"),
        (events(100), {"status": "asked"}, "stopped on request at step 100 of 300"),
        (events(100), {"metric": "bleu"}, "bleu 10, best at 100"),
        (events(10), {"status": "diverged"}, "never evaluated, diverged"),
        ([{**e, "loss": e["loss"] + e["step"] / 20} for e in events(100)], {}, ", diverged,"),
        ([*events(9), {"kind": "broken", "step": 10, "loss": math.nan, "norm": 1.0}], {},
         "not diverged, 1 step not finite"),
        ([{"kind": "checkpoint", "step": 0, "path": "x"}], {}, "no step was made"),
    ],
)  # fmt: skip
def test_verdict_of(
    tmp_path: Path, told: list[dict[str, Any]], changes: Any, expected: str
) -> None:
    assert expected in summary(read(make(tmp_path / "run", told, **changes))).verdict


def test_summary_is_strict_json(tmp_path: Path) -> None:
    told = [{**events(1)[0], "loss": math.nan}]
    found = summary(read(make(tmp_path / "run", told))).json()
    assert found["loss"] is None and found["diverged"] is True
    json.dumps(found, allow_nan=False)


def test_step_made_twice_counts_once(tmp_path: Path) -> None:
    again = [*events(30), *({**e, "loss": 1.0} for e in events(30)[20:])]
    run = read(make(tmp_path / "run", again))
    assert [x for x, _ in run.curve("loss")] == list(range(1, 31))
    assert run.curve("loss")[-1] == (30, 1.0) and run.curve("loss")[0][1] > 4


# --- what is missing or broken ------------------------------------------------------------------------------------


def test_line_cut_by_a_kill_is_noted(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    path = folder / "metrics.jsonl"
    whole = read(folder)
    path.write_bytes(path.read_bytes()[:-20])
    run = read(folder)
    assert len(run.evaluations) == len(whole.evaluations) - 1 and run.steps == whole.steps
    assert run.notes == ["metrics.jsonl ends in the middle of line 306, which is left out"]
    assert run.notes[0] in as_html("run", report(run))


def spoil(folder: Path, how: str) -> None:
    info = {**INFO, "name": "run"}
    match how:
        case "no run.json":
            (folder / "run.json").unlink()
        case "no metrics":
            (folder / "metrics.jsonl").unlink()
        case "no JSON":
            (folder / "run.json").write_text("{")
        case "list":
            (folder / "run.json").write_text("[1]")
        case "format":
            (folder / "run.json").write_text(json.dumps({**info, "format": 9}))
        case "kind":
            (folder / "run.json").write_text(json.dumps({**info, "config": "x"}))
        case "bytes":
            (folder / "run.json").write_bytes(b"\xff\xfe\x00")
        case "line":
            text = (folder / "metrics.jsonl").read_text().splitlines()
            (folder / "metrics.jsonl").write_text("\n".join([text[0], "{oops", *text[1:]]))
        case "no step":
            (folder / "samples.jsonl").write_text('{"text": "a"}\n')


@pytest.mark.parametrize(
    "how, said",
    [
        ("no run.json", "has no run.json"),
        ("no metrics", "has no metrics.jsonl"),
        ("no JSON", "run.json is no JSON"),
        ("list", "is of format 'list'"),
        ("format", "is of format 9; this version reads format 1"),
        ("kind", "config is 'x', which is not what a run writes"),
        ("bytes", "run.json is no JSON"),
        ("line", "line 2 of"),
        ("no step", "is not an object with a step"),
    ],
)
def test_broken_folder_is_one_sentence(tmp_path: Path, how: str, said: str) -> None:
    folder = make(tmp_path / "run")
    spoil(folder, how)
    with pytest.raises(Unreadable) as error:
        read(folder)
    assert said in str(error.value) and "\n" not in str(error.value) and error.value.code == 4


@pytest.mark.parametrize("at", [3, {"step": 3}, {"changes": {}}, {"step": 3, "changes": {"a": 1}}])
def test_resumption_that_no_run_wrote_is_one_sentence(tmp_path: Path, at: object) -> None:
    with pytest.raises(Unreadable, match="resumed has .* not what a run writes"):
        read(make(tmp_path / "run", resumed=[at]))


def test_run_that_tells_little_still_has_a_page(tmp_path: Path) -> None:
    folder = make(tmp_path / "run", events(1))
    (folder / "run.json").write_text('{"format": 1}')
    (folder / "samples.jsonl").unlink()
    page = as_html("run", report(read(folder)))
    for text in ("The run was not evaluated.", "kept no samples", "No attention was looked at"):
        assert text in page


# --- the page -----------------------------------------------------------------------------------------------------


def test_page_holds_all_parts_and_nothing_from_outside(tmp_path: Path) -> None:
    run = read(make(tmp_path / "story"))
    text = as_html(run.name, report(run, maps(), "Step 300."))
    page = Page(text)
    assert page.open == [] and not set(page.tags) - set(ALLOWED)
    for name, value in page.attributes:
        assert not name.startswith("on")
        if name in ("src", "href"):
            assert value is not None and value.startswith("data:image/png")
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "") and "@import" not in text
    for part in ("loss 3.04, best at 250", "train.optim.lr = 3e-4", "12,345,678", "0123abc", "nrefs:1|case:lc",
                 "said 300", "is dead", "sagte → said", "--resume", "tokens / s"):  # fmt: skip
        assert part in page.text, part
    # Curves, loss and gradient on a log axis too, the mean of the heads, thumbnails.
    assert page.tags.count("svg") == 5 + 2 + 1 + 2


def test_page_begins_with_what_one_wants_first(tmp_path: Path) -> None:
    run = read(make(tmp_path / "story"))
    page = as_html(run.name, report(run))
    tiles = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page)
    assert dict(tiles) == {
        "best loss": "3.041",
        "training loss": number(summary(run).loss, 3),
        "tokens / s": "3.7k",
        "time": "5 min 44 s",
        "memory": "1.5 GiB",
        "parameters": "12.3M",
    }
    places = [page.index(f"<h2>{name}") for name in ("Curves", "Samples", "About the run")]
    assert page.index('class="tiles"') < places[0] and places == sorted(places)
    assert "| best loss | 3.041 | evaluation at step 250 |" in as_markdown("x", report(run))
    killed = read(make(tmp_path / "killed", events(20), memory=None, device="cuda"))
    names = re.findall(r"<dt>(.*?)</dt>", as_html("x", report(killed)))
    assert names == ["training loss", "tokens / s", "time", "parameters"]


def test_log_axis_is_a_switch_and_on_where_values_span_much(tmp_path: Path) -> None:
    """A picture of its own for each axis: the switch works without a script."""
    deep = [{**e, "loss": math.exp(-e["step"] / 50)} for e in events(300)]
    for told, on in ((events(300), False), (deep, True)):
        page = as_html("x", report(read(make(tmp_path / str(on), told))))
        loss = page.split("<figure")[1].split("</figure>")[0]
        assert ('type="checkbox"' in loss) and ("checked" in loss) == on
        assert loss.count("<svg") == 2 and "loss, log scale" in loss.split('class="log"')[1]
        assert 'type="checkbox"' not in page.split("<figure")[2]  # the learning rate


def test_one_point_is_told_and_not_drawn(tmp_path: Path) -> None:
    """Of an evaluation at one step there is a row in the table, and no picture with a dot on an empty axis."""
    told = events(300)
    last = max(e["step"] for e in told if e["kind"] == "evaluation")
    once = [e for e in told if e["kind"] != "evaluation" or e["step"] == last]
    drawn = {}
    for name, some in (("all", told), ("once", once)):
        run = read(make(tmp_path / name, some))
        page = as_html("x", report(run))
        drawn[name] = set(re.findall(r"<strong>([^<]*), in evaluations", page))
        assert number(run.evaluations[-1][run.metrics[-1]]) in page
    assert drawn["all"] and not drawn["once"]


def test_samples_stand_side_by_side_with_what_was_wanted(tmp_path: Path) -> None:
    texts = [
        {"step": k, "source": "صباح الخير", "text": text, "reference": "good morning"}
        for k, text in ((1, "go"), (2, "good good"), (3, "good morning"))
    ]
    page = as_html("x", report(read(make(tmp_path / "run", texts=texts))))
    assert "<bdi>صباح الخير</bdi>" in page
    cards = re.findall(r'class="card(.*?)">\s*<h3>(.*?)</h3><p dir="auto">(.*?)</p>', page)
    assert cards == [
        ("", "step 1", "go"),
        ("", "step 2", "good good"),
        (" same", "step 3, as the reference", "good morning"),
        (" aim", "reference", "good morning"),
    ]


def test_text_of_a_run_cannot_act(tmp_path: Path) -> None:
    texts = [{"step": 1, "source": EVIL, "text": EVIL + "\ud800", "reference": EVIL}]
    told = [
        {**e, **({EVIL: 1.0, "signatures": {EVIL: EVIL}} if "best" in e else {})}
        for e in events(60)
    ]
    strange = {"name": EVIL, "command": ["regard", EVIL], "changes": {EVIL: EVIL}}
    run = read(
        make(tmp_path / "run", told, texts, **strange, device_name=EVIL, config={EVIL: EVIL})
    )
    odd = [Map(EVIL, 0, [EVIL], [EVIL], np.ones((1, 1)))]
    for blocks in (report(run, odd, EVIL), comparison([run, run])):
        page = Page(as_html(run.name, blocks))
        assert not set(page.tags) - set(ALLOWED) and page.open == []
        assert not [name for name, _ in page.attributes if name.startswith("on")]
        assert "\x1b" not in page.text and "\u202e" not in page.text
        assert "<script>alert(1)</script>" in page.text  # as text
        markdown = as_markdown(run.name, blocks)
        outside = "".join(markdown.split("```")[::2])
        assert "<script" not in outside and "<img" not in outside and "\x1b" not in markdown
        markdown.encode("utf-8")


def test_markdown_table_cells_keep_their_place(tmp_path: Path) -> None:
    texts = [{"step": 1, "source": "a|b", "text": "one\ntwo | three"}]
    markdown = as_markdown("x", report(read(make(tmp_path / "run", texts=texts))))
    assert "| step | from: a\\|b |" in markdown and "| 1 | one ⏎ two \\| three |" in markdown


def test_long_run_stays_a_small_page(tmp_path: Path) -> None:
    many = [{**samples()[0], "step": k} for k in range(2000)]
    told = [e for k in range(20) for e in [{**x, "step": x["step"] + 300 * k} for x in events(300)]]
    run = read(make(tmp_path / "run", told, many))
    assert len(run.steps) == 6000 and len(run.evaluations) == 120
    page = as_html("run", report(run))
    assert len(page) < 200_000 and "evaluations are shown" in page


def test_reproducing_goes_into_another_folder(tmp_path: Path) -> None:
    given = ["/usr/bin/regard", "train", "my story.toml", "--output-dir", "a b", "--overwrite"]
    run = read(make(tmp_path / "story", command=given))
    page = Page(as_html("x", report(run))).text
    assert shlex.join(run.command) == "regard train 'my story.toml' --output-dir 'a b' --overwrite"
    assert "regard train 'my story.toml' --output-dir 'a b' --resume\n" in page
    assert f"regard train 'my story.toml' --output-dir {tmp_path}/story-again\n" in page


def test_settings_are_toml_that_reads_back() -> None:
    config = {
        "task": "lm",
        "model": {"preset": 'a "b"\n', "tied": True, "odd key": 1},
        "train": {"optim": {"lr": 3e-4, "betas": [0.9, 0.98], "none": None}, "steps": 3},
        "data": {"mix": [{"name": "ä", "share": 0.5}], "empty": {}},
    }
    expected = json.loads(json.dumps(config))
    del expected["train"]["optim"]["none"]
    assert tomllib.loads(toml(config)) == expected


def test_write_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.html"
    write_whole(path, "old \ud800")
    assert path.read_text() == "old ?"

    def full(handle: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("regard.files.os.fsync", full)
    with pytest.raises(OSError, match="no space left"):
        write_whole(path, "new")
    assert path.read_text() == "old ?"


# --- side by side -------------------------------------------------------------------------------------------------


def test_comparison_shows_what_differs_alone(tmp_path: Path) -> None:
    config = {**INFO["config"], "model": {"preset": "gpt2", "layers": 8, "heads": 2}}
    one = read(make(tmp_path / "one"))
    two = read(make(tmp_path / "two", events(200, 0.4), config=config, seed=7))
    assert differing([one, two]) == {
        "seed": [42, 7],
        "model.layers": [4, 8],
        "model.heads": [None, 2],
    }
    rows = table([one, two]).splitlines()
    found = {row[:20].strip(): row[20:].split() for row in rows}
    assert found["model.heads"] == ["-", "2"] and found["best loss"] == ["3.041", "3.541"]
    assert found["at step"] == ["250", "200"] and found["tokens / s"] == ["3.7k", "3.7k"]
    column = rows[0].index("two")
    assert all(row[column - 1] == " " and row[column] != " " for row in rows if row[0] != "-")


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    runs = [read(make(tmp_path / home / "story")) for home in ("a", "b")]
    assert labels(runs) == [str(tmp_path / "a/story"), str(tmp_path / "b/story")]
    assert differing(runs) == {} and "the settings are the same" in table(runs)


def test_compared_curves_lie_in_one_picture(tmp_path: Path) -> None:
    runs = [read(make(tmp_path / name, events(200))) for name in ("one", "two")]
    page = as_html("x", comparison(runs))
    # Bars, curves of training, metrics, and on a log axis too: loss and gradient, the metric loss.
    assert Page(page).tags.count("svg") == 2 + 4 + 2 + 3
    loss = page.split('aria-label="loss: ')[1].split("</svg>")[0]
    assert loss.count("<polyline") == 4 and ">one</text>" in loss and ">two</text>" in loss
