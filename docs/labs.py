"""Writes docs/experiments: a page for each experiment of `regard lab`, from its results and prose about them.

    python docs/labs.py            write the pages
    python docs/labs.py --check    fail where a page on disk differs from what would be written
    python docs/labs.py --join RESULTS ...    add further seeds and figures, from results.json of other runs of a lab

docs/experiments/NAME.json is the results.json of a run of the lab; docs/source/experiments/NAME.md is prose. Tables and
pictures are made of the results, as the lab's own page makes them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS.parent), str(DOCS)]

from drawing import alone  # noqa: E402

from regard.labs.run import NAMES, blocks, read  # noqa: E402
from regard.report.page import Block, as_markdown  # noqa: E402

HOME, SOURCE = DOCS / "experiments", DOCS / "source" / "experiments"


def page(name: str) -> dict[str, str]:
    """Its files: the page, and its pictures."""
    results = json.loads((HOME / f"{name}.json").read_text(encoding="utf-8"))
    files, parts = {}, []
    for block in blocks(results):
        if block.kind == "figures":
            for figure in block.figures:
                picture = f"pictures/{name}-{len(files) + 1}.svg"
                files[picture] = alone(str(figure.svg))
                parts.append(f"![{figure.title}]({picture})\n")
        elif not block.folded:
            parts.append(markdown(block))
    prose = (SOURCE / f"{name}.md").read_text(encoding="utf-8").strip()
    note = (
        f"<!-- written by docs/labs.py from {name}.json and docs/source/experiments/{name}.md -->"
    )
    end = f"Settings: [{name}.toml](../../regard/labs/{name}.toml). Results: [{name}.json]({name}.json).\n"
    text = "\n".join([note, "", f"# {results['title']}", "", prose, "", *parts, end])
    return {f"{name}.md": text, **files}


def markdown(block: Block) -> str:
    """A block alone, as Markdown has it."""
    return as_markdown("", [block]).partition("\n")[2].strip() + "\n"


def index(names: list[str]) -> str:
    rows = [
        f"| [{name}]({name}.md) | {read(name)['what']} | {read(name)['time']} |" for name in names
    ]
    head = ["<!-- written by docs/labs.py -->", "", "# Experiments", ""]
    head += [
        "Each is one command, `regard lab NAME`, and a page with tables, plots and settings. `--quick`"
    ]
    head += [
        "tries it in seconds, `--data FILE` takes your own text. The figures here are of real runs; their"
    ]
    head += ["JSON lies beside them.", ""]
    return "\n".join([*head, "| lab | what is compared | time |", "|---|---|---|", *rows, ""])


def join(path: Path) -> None:
    """Add what another run of a lab found to docs/experiments; a seed of a variant counts once."""
    new = json.loads(path.read_text(encoding="utf-8"))
    home = HOME / f"{new['name']}.json"
    old = json.loads(home.read_text(encoding="utf-8"))
    if old.get("text") != new["text"]:
        sys.exit(f"{home.name} is of another text: {old.get('text')}, not {new['text']} (bytes)")
    for variant, cases in new["runs"].items():
        there = old["runs"].setdefault(variant, {})
        if twice := there.keys() & cases.keys():
            sys.exit(f"{home.name} has seed {', '.join(sorted(twice))} of {variant} already")
        there.update(cases)
    for name, rows in new["figures"].items():
        for row, cells in rows.items():
            for x, values in cells.items():
                kept = old["figures"].setdefault(name, {}).setdefault(row, {})
                kept.setdefault(x, []).extend(values)
    home.write_text(json.dumps(old, indent=1) + "\n", encoding="utf-8", newline="\n")


def build() -> dict[str, str]:
    names = [name for name in NAMES if (HOME / f"{name}.json").is_file()]
    files = {"README.md": index(names)}
    for name in names:
        files |= page(name)
    return files


def main() -> int:
    if "--join" in sys.argv:
        for path in sys.argv[sys.argv.index("--join") + 1 :]:
            join(Path(path))
    files = build()
    wrong = [
        n
        for n, text in files.items()
        if not (HOME / n).is_file() or (HOME / n).read_text("utf-8") != text
    ]
    if "--check" in sys.argv:
        print(*[f"{name}: differs" for name in wrong], sep="\n", end="" if not wrong else "\n")
        return 1 if wrong else 0
    for name in wrong:
        (HOME / name).parent.mkdir(parents=True, exist_ok=True)
        (HOME / name).write_text(files[name], encoding="utf-8", newline="\n")
    print(f"{len(files)} files in {HOME}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
