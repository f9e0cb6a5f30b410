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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from regard.data.config import Data
from regard.data.read import records
from regard.errors import DATA, ENVIRONMENT, VERSION, Fault, UsageError, blaming
from regard.files import write_whole
from regard.labs.measure import MEASURES, Case, changed
from regard.labs.page import blocks
from regard.recipes import MAKERS as RECIPES
from regard.recipes.corpora import write
from regard.report.page import as_html
from regard.train.build import fresh, read_data
from regard.train.config import configure
from regard.train.log import parse
from regard.train.plan import EFFICIENCY, Job, Pass, duration, pick_device, probe, step_flops, width
from regard.train.run import begun, train
from regard.train.trainer import Callback

NAMES = ("bottleneck", "ablations", "extrapolation", "mechanisms", "indexer")
SCHEMA = 1
# Settings of a lab's file that its page needs.
TOLD = ("title", "question", "about")
HELD = 0.1  # of a user's own text, its end, to measure on


@dataclass(frozen=True)
class LabResult:
    """`page` and `results` are files; `figures` by figure, row and column, one value per seed."""

    page: Path
    results: Path
    figures: dict[str, dict[str, dict[str, list[float]]]]


@dataclass(frozen=True)
class Lab:
    """An experiment as its file has it: `settings` are those of its measure and its page, `small` what differs in its
    quick form."""

    name: str
    what: str
    time: str
    data: str
    seeds: list[int]
    run: dict[str, Any]
    variants: dict[str, dict[str, Any]]
    settings: dict[str, Any]
    small: dict[str, Any]

    def stages(self, variant: str) -> list[dict[str, Any]]:
        """The configs of its runs, each going on from the one before."""
        first = dict(self.variants[variant])
        later = first.pop("then", [])
        kept = {name: self.run[name] for name in ("data", "train")}
        quick = {name: x for name, x in self.small.items() if name in kept}
        every = [merged(merged(kept, stage), quick) for stage in later]
        return [merged(merged(self.run, first), self.small), *every]


def read(name: str, quick: bool = False) -> Lab:
    if name not in NAMES:
        close = sorted(NAMES, key=lambda n: -difflib.SequenceMatcher(None, name, n).ratio())[:3]
        near = "the nearest are {}, {} and {}".format(*close)
        raise UsageError(f"there is no lab {name!r:.60}; {near} (regard lab lists all)")
    path = files(__package__).joinpath(f"{name}.toml")
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    own = {key: tables.pop(key) for key in ("what", "time", "data", "seeds", "run", "variants")}
    small = tables.pop("quick")
    run = small.pop("run")
    if quick:
        own, tables = {**own, "seeds": own["seeds"][:1]}, {**tables, **small}
    return Lab(name, **own, settings=tables, small=run if quick else {})


def merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Tables joined; one that has a kind replaces the other whole."""
    both = dict(base)
    for name, value in more.items():
        inner = isinstance(value, dict) and "kind" not in value
        both[name] = merged(both.get(name) or {}, value) if inner else value
    return both


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
    """Run an experiment as `regard lab` does: bottleneck, ablations, extrapolation, mechanisms or indexer.

    `folder`: where runs, page.html and results.json lie, by default runs/lab-NAME; there it goes on, and what is done
    is not done again. `data`: your own text instead of the lab's. `variants`: some of them alone. `quick`: a tiny form
    of it, to see that all works. `force`: although this machine is too small. `callbacks` hear every event of the runs,
    and {"kind": "case", "text": ...} before them."""
    spec = read(name, quick)
    home = Path(folder or Path("runs") / f"lab-{name}{'-quick' if quick else ''}")
    own = (data,) if isinstance(data, str) else tuple(data)
    if own and "own" not in spec.settings:
        raise UsageError(f"the lab {name} makes its own data; leave data (--data) out")
    for each in variants:
        if each not in spec.variants:
            raise UsageError(f"{name} has no variant {each!r:.60}; {', '.join(spec.variants)}")
    place, _ = pick_device(device)
    if spec.settings.get("gpu") and place.type == "cpu" and not (quick or force):
        seconds = len(seeds or spec.seeds) * needs(spec, place)
        raise Fault(
            f"the lab {name} is for a GPU: on this machine it would take about {duration(seconds)}; run it anyway by "
            "force=True (--force), or a tiny form of it by quick=True (--quick)",
            ENVIRONMENT,
        )
    text = prepare(spec, home, own, quick)
    cases = [(v, s) for s in seeds or spec.seeds for v in spec.variants if v in (variants or [v])]
    for number, (variant, seed) in enumerate(cases, 1):
        if not (home / slug(variant) / str(seed) / "figures.json").is_file():
            for hear in callbacks:
                hear({"kind": "case", "text": f"{number} of {len(cases)}: {variant}, seed {seed}"})
            one(spec, home, text, variant, seed, device, callbacks)
    command = ["regard", "lab", name, *(["--quick"] if quick else [])]
    command += [word for path in own for word in ("--data", path)]
    command += ["--seeds", *map(str, seeds)] if seeds else []
    return told(spec, home, shlex.join(command))


def one(
    spec: Lab, home: Path, text: Path, variant: str, seed: int, device: str, callbacks: Any
) -> None:
    """Train a variant, stage by stage, and measure it."""
    here = home / slug(variant) / str(seed)
    runs: list[Path] = []
    for i, tables in enumerate(spec.stages(variant)):
        settings = tables.pop("change", {})
        if runs:
            start = runs[-1] / "best"
            if settings:
                changed(start, settings).save(start := here / f"start-{i + 1}")
            tables["model"] = {"folder": str(start.resolve())}
        else:
            tables["tokenizer"] = {"folder": str((home / "tokenizer").resolve())}
        tables = merged({"data": sides(text)}, merged(tables, {"train": {"seed": seed}}))
        runs.append(here / f"run-{i + 1}")
        if facts_of(runs[-1]).get("status") != "done":
            again = begun(runs[-1])
            if not again:
                # What the first reader of the text wrote serves all runs.
                shutil.rmtree(runs[-1], ignore_errors=True)
                runs[-1].mkdir(parents=True)
                (runs[-1] / "lock").touch()
                (runs[-1] / "data").symlink_to((home / "data").resolve())
            train(tables, runs[-1], resume=again, keep=1, device=device, callbacks=callbacks)
    case = Case(spec.settings, variant, seed, runs, text, device)
    figures = MEASURES[spec.settings["measure"]](case)
    info = [facts_of(run) for run in runs]
    facts = {
        "figures": figures,
        "parameters": info[0]["parameters"],
        "seconds": sum(each["seconds"] for each in info),
        "device": info[0].get("device_name") or info[0]["device"],
        "steps": [each["step"] for each in info],
    }
    write_whole(here / "figures.json", json.dumps(facts, indent=1))


def told(spec: Lab, home: Path, command: str) -> LabResult:
    """What all finished cases found, as results.json and page.html."""
    figures: dict[str, Any] = {}
    runs: dict[str, Any] = {}
    for variant in spec.variants:
        for path in sorted((home / slug(variant)).glob("*/figures.json")):
            case = json.loads(path.read_text(encoding="utf-8"))
            for name, rows in case.pop("figures").items():
                for row, values in rows.items():
                    cells = figures.setdefault(name, {}).setdefault(row, {})
                    for x, value in values.items():
                        cells.setdefault(x, []).append(value)
            runs.setdefault(variant, {})[path.parent.name] = case
    results = {
        "schema": SCHEMA,
        "lab": spec.name,
        "command": command,
        "regard": VERSION,
        "torch": torch.__version__,
        "processor": f"{platform.machine()}, {torch.get_num_threads()} threads",
        **{key: spec.settings[key] for key in TOLD},
        "runs": runs,
        "config": {variant: spec.stages(variant) for variant in spec.variants},
        "figures": figures,
    }
    paths = home / "page.html", home / "results.json"
    write_whole(paths[1], json.dumps(results, indent=1))
    write_whole(paths[0], as_html(spec.settings["title"], blocks(results)))
    return LabResult(*paths, figures)


def facts_of(run: Path) -> dict[str, Any]:
    path = run / "run.json"
    return (parse(path.read_text("utf-8", "replace")) if path.is_file() else None) or {}


def slug(name: str) -> str:
    return re.sub(r"\W+", "-", name.lower()).strip("-")


def needs(spec: Lab, device: torch.device) -> float:
    """Seconds of training for one seed on this machine, by the speed of its products."""
    flops, speed = 0.0, 1.0
    for variant in spec.variants:
        config = configure(merged(spec.stages(variant)[0], {"data": {"train": "text"}}))
        changes = {k: v for k, v in config.model.items() if k != "preset"}
        model = fresh(config.model["preset"], changes, 0, "meta", config.data.length)
        rows, length = config.data.rows or 1, config.data.length or 1
        step, bf16 = Pass(rows, length, device=device.type), config.train.precision == "bf16"
        flops += step_flops(Job(model, step, config.train)) * config.train.steps
        if speed == 1.0:
            kind = f"{device.type} {config.train.precision}"
            speed = probe(device, bf16, step, width(model)) * EFFICIENCY[kind]
    return flops / speed


# --- the text --------------------------------------------------------------------------------------


def prepare(spec: Lab, home: Path, own: tuple[str, ...], quick: bool) -> Path:
    """The lab's folder with its text, tokenizer and ids, made once. A folder that was made by other settings, or is not
    a lab's, is refused."""
    source = files(__package__).joinpath(f"{spec.name}.toml").read_bytes()
    identity = {"lab": spec.name, "quick": quick, "data": list(own)}
    identity["settings"] = hashlib.sha256(source).hexdigest()[:16]
    mark, text = home / "lab.json", home / "text"
    if home.is_dir() and any(home.iterdir()):
        there = json.loads(mark.read_text(encoding="utf-8")) if mark.is_file() else {}
        if there != identity:
            what = "a lab with other settings or data" if there else "something else"
            raise UsageError(f"{home} has {what}; name another folder (--output-dir FOLDER)")
    home.mkdir(parents=True, exist_ok=True)
    write_whole(mark, json.dumps(identity))
    if not text.is_dir():
        made = home / ".text"
        shutil.rmtree(made, ignore_errors=True)
        if own:
            _own(own, made)
        else:
            MAKERS[spec.data](made, **spec.settings.get("make", {}))
        made.rename(text)
    first = merged(spec.stages(next(iter(spec.variants)))[0], {"data": sides(text)})
    read_data(configure(first), None, home)
    return text


def sides(text: Path) -> dict[str, str]:
    """What is learned, and what is held out."""
    return {path.stem: str(path.resolve()) for path in text.iterdir() if "-" not in path.stem}


def _own(paths: tuple[str, ...], folder: Path) -> None:
    with blaming(DATA):
        found = records(Data(paths).source(), ("text",))
        whole = "\n".join(str(record["text"]) for record in found)
    cut = int(len(whole) * (1 - HELD))
    write(folder, {"train.txt": [whole[:cut]], "valid.txt": [whole[cut:]]})


def make_letters(folder: Path, most: int, count: int, tests: int) -> None:
    """`count` words of 1 to `most` random letters, and the same backwards; test-N.tsv has words of N letters."""
    rng = random.Random(0)

    def lines(size: int, length: int | None = None) -> list[str]:
        words = ("".join(rng.choices(string.ascii_lowercase, k=length or rng.randint(1, most)))
                 for _ in range(size))  # fmt: skip
        return ["source\ttarget\n", *(f"{word}\t{word[::-1]}\n" for word in words)]

    apart = {f"test-{n}.tsv": lines(tests, n) for n in range(4, most + 1, 4)}
    write(folder, {"train.tsv": lines(count), "valid.tsv": lines(tests), **apart})


def make_sources(folder: Path, most: int) -> None:
    """The Python files of the standard library and of installed packages, up to so many characters; one in a hundred is
    held out."""
    kept: dict[str, list[str]] = {"train.jsonl": [], "valid.jsonl": []}
    seen, total = set(), 0
    homes = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    for path in sorted({path for home in homes for path in Path(home).rglob("*.py")}):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        mark = hashlib.sha256(text.encode()).digest()
        if text.strip() and mark not in seen and total < most:
            seen.add(mark)
            total += len(text)
            name = "train.jsonl" if mark[0] % 100 else "valid.jsonl"
            kept[name].append(json.dumps({"text": text}) + "\n")
    write(folder, kept)


MAKERS: dict[str, Callable[..., Any]] = {
    **RECIPES,
    "letters": make_letters,
    "sources": make_sources,
}
