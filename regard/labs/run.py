"""Experiments by one command each. A TOML file beside this one says what is trained and how variants of it differ; here
each is trained for every seed and measured, and what was found becomes one page and one JSON file.

result = regard.lab("bottleneck")      # runs/lab-bottleneck/page.html; what is done is not done again
"""

from __future__ import annotations

import difflib
import hashlib
import json
import platform
import random
import re
import shlex
import shutil
import string
import sysconfig
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from regard.data.config import Data
from regard.data.read import records
from regard.errors import DATA, ENVIRONMENT, VERSION, Fault, UsageError, blaming
from regard.files import write_whole
from regard.labs import measure
from regard.labs.alignment import alignment
from regard.labs.measure import Case, changed
from regard.labs.parallel import parallel
from regard.labs.pretraining import pretraining, verses
from regard.labs.prompting import naming, prompting
from regard.machine import duration, pick_device
from regard.recipes import MAKERS as RECIPES
from regard.recipes.corpora import write
from regard.report.page import Block, Figure, Series, as_html, bars, heat, lines
from regard.see.format import number, short, span
from regard.training.build import fresh, read_data
from regard.training.config import configure, toml
from regard.training.log import parse
from regard.training.memory import Job, Pass
from regard.training.plan import reached, step_flops
from regard.training.run import begun, train
from regard.training.trainer import Callback

Tables = dict[str, Any]
Rows = dict[str, dict[str, list[float]]]  # row -> column -> one value per seed
HELD = 0.1  # of a user's text, its end, to measure on
NAMES = (
    *("bottleneck", "ablations", "scale", "depth", "extrapolation", "mechanisms", "indexer"),
    *("alignment", "pretraining", "prompting", "parallel"),
)
LARGER = (alignment, pretraining, prompting, parallel)
MEASURES = {**measure.MEASURES, **{f.__name__: f for f in LARGER}}


@dataclass(frozen=True)
class LabResult:
    """`page` and `results` are files; `figures` by figure, row and column, one value per seed."""

    page: Path
    results: Path
    figures: dict[str, Rows]


def read(name: str, quick: bool = False) -> Tables:
    """An experiment as its file has it, or in its quick form: `small` is what that changes in every run. What is said
    about its figures names the sizes of this form."""
    if name not in NAMES:
        close = sorted(NAMES, key=lambda n: -difflib.SequenceMatcher(None, name, n).ratio())
        near = "the nearest are {}, {} and {}".format(*close)
        raise UsageError(f"there is no lab {name!r:.60}; {near} (regard lab lists all)")
    spec = tomllib.loads(files(__package__).joinpath(f"{name}.toml").read_text(encoding="utf-8"))
    tiny = spec.pop("quick")
    small = tiny.pop("run")
    more = {**tiny, "seeds": spec["seeds"][:1]} if quick else {}
    found = {**spec, **more, "name": name, "quick": quick, "small": small if quick else {}}
    run = merged(found["run"], found["small"])
    sizes = {**run.get("data", {}), **found.get("make", {}), "batch": found.get("batch")}
    for about in found["about"].values():
        about["text"] = about["text"].format(**sizes)
    return found


def merged(base: Tables, more: Tables) -> Tables:
    """Tables joined; one that has a kind replaces the other whole."""
    both = dict(base)
    for name, value in more.items():
        inner = isinstance(value, dict) and "kind" not in value
        both[name] = merged(both.get(name) or {}, value) if inner else value
    return both


def stages(spec: Tables, variant: str) -> list[Tables]:
    """The configs of a variant's runs, each going on from the one before."""
    first, run, small = dict(spec["variants"][variant]), spec["run"], spec["small"]
    kept, fewer = ({n: x for n, x in t.items() if n in ("data", "train")} for t in (run, small))
    later = [merged(merged(kept, stage), fewer) for stage in first.pop("then", [])]
    return [merged(merged(run, first), small), *later]


def lab(
    name: str,
    folder: str | Path | None = None,
    *,
    data: str | Sequence[str] = (),
    seeds: Sequence[int] = (),
    variants: Sequence[str] = (),
    quick: bool = False,
    force: bool = False,
    device: str = "auto",
    callbacks: Sequence[Callback] = (),
) -> LabResult:
    """Run an experiment as `regard lab` does, which lists them all.

    `folder`: where runs, page.html and results.json lie, by default runs/lab-NAME; there it goes on, and what is done
    is not done again. `data`: your own text instead of the lab's. `variants`: some of them alone. `quick`: a tiny form
    of it, to see that all works. `force`: although this machine is too small. `callbacks` hear every event of the runs,
    and {"kind": "case", "text": ...} before them."""
    spec = read(name, quick)
    home = Path(folder or Path("runs") / f"lab-{name}{'-quick' if quick else ''}")
    own, seeds = [data] if isinstance(data, str) else list(data), list(seeds) or spec["seeds"]
    if own and "own" not in spec:
        raise UsageError(f"the lab {name} makes its own data; leave data (--data) out")
    for each in (each for each in variants if each not in spec["variants"]):
        raise UsageError(f"{name} has no variant {each!r:.60}; {', '.join(spec['variants'])}")
    if "gpu" in spec and pick_device(device)[0].type == "cpu" and not (quick or force):
        long = duration(len(seeds) * needed(spec, torch.device("cpu")))
        raise Fault(
            f"the lab {name} is for a GPU: on this machine it would take about {long}; run it anyway by force=True "
            "(--force), or a tiny form of it by quick=True (--quick)",
            ENVIRONMENT,
        )
    prepare(spec, home, own)
    cases = [(v, s) for s in seeds for v in variants or spec["variants"]]
    for i, (variant, seed) in enumerate(cases, 1):
        here = home / slug(variant) / str(seed)
        if not (here / "figures.json").is_file():
            for hear in callbacks:
                hear({"kind": "case", "text": f"{i} of {len(cases)}: {variant}, seed {seed}"})
            figures = one(spec, home, here, Case(spec, variant, seed, home, [], device), callbacks)
            write_whole(here / "figures.json", json.dumps(figures, indent=1))
    words = ["regard", "lab", name, *["--quick"][: int(quick)]]
    words += [word for path in own for word in ("--data", path)]
    words += ["--seeds", *map(str, seeds)] if seeds != spec["seeds"] else []
    return told(spec, home, shlex.join(words))


def one(spec: Tables, home: Path, here: Path, case: Case, callbacks: Any) -> Tables:
    """Train a variant, stage by stage, and measure it."""
    for i, tables in enumerate(stages(spec, case.variant), 1):
        run, changes = here / f"run-{i}", tables.pop("change", None)
        tables = merged({"data": sides(home)}, merged(tables, {"train": {"seed": case.seed}}))
        if not case.runs:
            tables["tokenizer"] = {"folder": str((home / "tokenizer").resolve())}
        else:
            start = case.best
            if changes:
                changed(start, changes).save(start := here / f"start-{i}")
            tables["model"] = {"folder": str(start.resolve())}
        if facts(run).get("status") != "done":
            if not begun(run):
                # Ids that were made for the first run serve all.
                shutil.rmtree(run, ignore_errors=True)
                run.mkdir(parents=True)
                (run / "lock").touch()
                (run / "data").symlink_to((home / "data").resolve())
            how: Any = {"resume": begun(run), "device": case.device, "callbacks": callbacks}
            train(tables, run, keep=1, **how)
        case.runs.append(run)
    info = [facts(run) for run in case.runs]
    cpu = f"{platform.machine()}, {torch.get_num_threads()} threads"
    return {
        "figures": MEASURES[spec["name"]](case),
        "parameters": info[0]["parameters"],
        "steps": [each["step"] for each in info],
        "seconds": sum(each["seconds"] for each in info),
        "machine": f"{info[0].get('device_name') or cpu}, torch {torch.__version__}",
    }


def told(spec: Tables, home: Path, command: str) -> LabResult:
    """What all finished cases found, as results.json and page.html."""
    figures: dict[str, Any] = {}
    runs: dict[str, Any] = {}
    for variant in spec["variants"]:
        for path in sorted((home / slug(variant)).glob("*/figures.json")):
            case = json.loads(path.read_text(encoding="utf-8"))
            for name, rows in case.pop("figures").items():
                for row, x, value in (
                    (row, x, v) for row, each in rows.items() for x, v in each.items()
                ):
                    cells = figures.setdefault(name, {}).setdefault(row, {})
                    cells.setdefault(x, []).append(value)
            runs.setdefault(variant, {})[path.parent.name] = case
    page, found = home / "page.html", home / "results.json"
    sizes = {path.name: path.stat().st_size for path in sorted((home / "text").iterdir())}
    results = {
        **{key: spec[key] for key in ("name", "title", "question", "about", "quick")},
        **{"command": command, "regard": VERSION, "text": sizes, "figures": figures, "runs": runs},
        "config": {variant: stages(spec, variant) for variant in spec["variants"]},
    }
    write_whole(found, json.dumps(results, indent=1))
    write_whole(page, as_html(spec["title"], blocks(results)))
    return LabResult(page, found, figures)


def prepare(spec: Tables, home: Path, own: list[str]) -> None:
    """Make the lab's folder with its text, tokenizer and ids, once. A folder of other settings, or that is not a lab's,
    is refused."""
    mark, text = home / "lab.json", home / "text"
    written = json.dumps(
        [own, *(spec.get(n) for n in ("run", "variants", "small", "data", "make"))]
    )
    mine = {"lab": spec["name"], "settings": hashlib.sha256(written.encode()).hexdigest()}
    if home.is_dir() and any(home.iterdir()) and (there := facts(mark)) != mine:
        what = "a lab with other settings or data" if there else "something else"
        raise UsageError(f"{home} has {what}; name another folder (--output-dir FOLDER)")
    home.mkdir(parents=True, exist_ok=True)
    write_whole(mark, json.dumps(mine))
    if not text.is_dir():
        shutil.rmtree(made := home / ".text", ignore_errors=True)
        if own:
            own_text(tuple(own), made)
        else:
            MAKERS[spec["data"]](made, **spec.get("make", {}))
        made.rename(text)
    first = stages(spec, next(iter(spec["variants"])))[0]
    read_data(configure(merged(first, {"data": sides(home)})), None, home)


def sides(home: Path) -> dict[str, str]:
    """What is learned, and what is held out."""
    files = (home / "text").iterdir()
    return {path.stem: str(path.resolve()) for path in files if path.stem in ("train", "valid")}


def facts(path: Path) -> Tables:
    """A JSON file, or a run's; {} where there is none."""
    path = path if path.suffix == ".json" else path / "run.json"
    return (parse(path.read_text("utf-8", "replace")) if path.is_file() else None) or {}


def slug(name: str) -> str:
    return re.sub(r"\W+", "-", name.lower()).strip("-")


def needed(spec: Tables, device: torch.device) -> float:
    """Seconds of training for one seed on this machine, by the speed of its products."""
    flops = 0
    for variant in spec["variants"]:
        config = configure(merged(stages(spec, variant)[0], {"data": {"train": "text"}}))
        model = fresh(config, 0, "meta")
        step = Pass(config.data.rows or 1, config.data.length or 1, device=device.type)
        job = Job(model, step, config.train)
        flops += step_flops(job) * config.train.steps
    return flops / reached(job, config.train.precision, device)


# --- the text -------------------------------------------------------------------------------------


def own_text(paths: tuple[str, ...], folder: Path) -> None:
    with blaming(DATA):
        found = records(Data(paths).source(), ("text",))
        whole = "\n".join(str(record["text"]) for record in found)
    cut = int(len(whole) * (1 - HELD))
    write(folder, {"train.txt": [whole[:cut]], "valid.txt": [whole[cut:]]})


def letters(folder: Path, most: int, count: int, tests: int) -> None:
    """`count` words of 1 to `most` random letters, and the same backwards; test-N.tsv has words of N letters."""
    rng = random.Random(0)

    def lines(size: int, length: int = 0) -> list[str]:
        sizes = [length or rng.randint(1, most) for _ in range(size)]
        words = ["".join(rng.choices(string.ascii_lowercase, k=n)) for n in sizes]
        return ["source\ttarget\n", *(f"{word}\t{word[::-1]}\n" for word in words)]

    apart = {f"test-{n}.tsv": lines(tests, n) for n in range(4, most + 1, 4)}
    write(folder, {"train.tsv": lines(count), "valid.tsv": lines(tests), **apart})


def sources(folder: Path, most: int) -> None:
    """The Python files of the standard library and of installed packages, up to so many characters; about one in a
    hundred is held out."""
    homes = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    texts: dict[bytes, str] = {}
    for path in sorted({path for home in homes for path in Path(home).rglob("*.py")}):
        if most > 0:
            text = path.read_text(encoding="utf-8", errors="replace")
            if text.strip() and (mark := hashlib.sha256(text.encode()).digest()) not in texts:
                texts[mark], most = json.dumps({"text": text}) + "\n", most - len(text)
    learned = [text for i, text in enumerate(texts.values()) if i % 100]
    write(folder, {"valid.jsonl": [*texts.values()][::100], "train.jsonl": learned})


MAKERS: dict[str, Any] = {
    **RECIPES,
    **{f.__name__: f for f in (letters, sources, verses, naming)},
}


# --- the page -------------------------------------------------------------------------------------


def blocks(results: Tables) -> list[Block]:
    """For each figure a plot and a table; how to repeat it; its runs."""
    counts = {len(cases) for cases in results["runs"].values()}
    count = " to ".join(map(str, sorted({min(counts), max(counts)})))
    seeds = "one seed" if counts == {1} else f"{count} seeds: mean ± the largest distance from it"
    page = [Block("strong", results["question"]), Block("text", f"Figures of {seeds}.")]
    if results.get("quick"):
        tiny = "The quick form: tiny models, a few steps. It shows that all works; its figures mean nothing."
        page.append(Block("text", tiny))
    for name, rows in results["figures"].items():
        about, xs = results["about"][name], list(dict.fromkeys(x for r in rows.values() for x in r))
        table = [[row, *(cell(values.get(x, [])) for x in xs)] for row, values in rows.items()]
        page += [Block("heading", name), Block("text", about["text"])]
        page.append(Block("figures", figures=[drawn(name, rows, about)]))
        if "map" not in about:
            page.append(Block("table", head=(about.get("x", ""), *xs), rows=table))
    runs = []
    for variant, cases in results["runs"].items():
        first, took = next(iter(cases.values())), mean(case["seconds"] for case in cases.values())
        steps = " + ".join(map(str, first["steps"]))
        machines = "; ".join(dict.fromkeys(case["machine"] for case in cases.values()))
        facts = (short(first["parameters"]), ", ".join(cases), steps, span(took), machines)
        runs.append((variant, *facts))
    head = ("variant", "parameters", "seeds", "steps", "training, each", "on")
    whole = "\n\n".join(f"# {v}\n" + "\n".join(map(toml, c)) for v, c in results["config"].items())
    return [
        *page,
        Block("heading", "To repeat it"),
        Block("code", results["command"], language="sh"),
        Block(
            "text",
            f"By regard {results['regard']}. Every seed's figures: results.json, beside this page.",
        ),
        Block("table", head=head, rows=runs),
        Block("code", whole, language="toml", folded="Every run's settings"),
    ]


def drawn(name: str, rows: Rows, about: dict[str, Any]) -> Figure:
    """Curves over the columns where these are numbers, a map, or bars of the first column."""
    if "map" in about:
        # Their names are numbered, since characters repeat.
        names = rows, next(iter(rows.values()))
        down, across = ([name.partition(" ")[2] for name in side] for side in names)
        cells = [[mean(values) for values in row.values()] for row in rows.values()]
        return Figure(heat(cells, name, rows=down, across=across), about["y"])
    if "x" not in about:
        values = [(row, mean(next(iter(cells.values())))) for row, cells in rows.items()]
        return Figure(bars(values, name), about["y"])
    series = [
        Series(row, [(float(x), mean(values)) for x, values in cells.items()], dots=True)
        for row, cells in rows.items()
    ]
    # A share lies between nothing and all, however little of it there is.
    reach = (0, 1) if about["y"].startswith("share") else ()
    log = about.get("log", False)
    svg = lines(series, name, about["x"], about["y"], log=log, reach=reach)
    curves = [(each.name, [y for _, y in each.points]) for each in series]
    return Figure(svg, f"{about['y']} by {about['x']}", curves=curves)


def cell(values: list[float]) -> str:
    """1.234 ± 0.012; the value alone where seeds agree, or are one."""
    middle = mean(values) if values else None
    apart = max((abs(x - middle) for x in values), default=0.0) if middle is not None else 0.0
    return f"{number(middle, 4)}\u00a0±\u00a0{number(apart, 2)}" if apart else number(middle, 4)
