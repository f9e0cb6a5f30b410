"""Train the Transformer of 2017 here and now: dates in 76 languages become ISO 8601.

    make demo          (or: python examples/demo.py)

Three to six minutes on two cores; needs Babel, whose data the dates are made of. Everything is written under runs/demo.
Settings of the config may be changed: python examples/demo.py --train.steps 100
"""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import torch

import regard
from regard import recipes
from regard.cli.main import main as command
from regard.decode.generate import special_of, tokenizer_of
from regard.errors import UsageError
from regard.recipes.dates import UNSEEN
from regard.see.align import cross_site
from regard.see.plots import save, sheet
from regard.see.probe import Probe

HOME = Path("runs") / "demo"
AIM = 0.98  # exact match on unseen dates
SHOWN = ("en", "el", "ru", "hi", "ja", "ar")  # languages of the examples
DRAWN = ("en", "es", "ru")  # of the picture; those that its font has
SHADES = " ░▒▓█"
Row = dict[str, str]


def main(arguments: list[str]) -> int:
    began = time.perf_counter()
    config, data, run = (HOME / name for name in ("dates.toml", "dates-data", "dates"))
    title("1. The data: dates as CLDR writes them, in 76 languages")
    if config.exists():
        print(f"{data} is there from before")
    else:
        print(recipes.copy("dates", HOME / "dates")[2])
    for row in picked(table(data / "valid.tsv"), SHOWN):
        print(f"   {row['locale']:<4} {row['source']}  ->  {row['target']}")
    title(f"2. Training: regard.train({str(config)!r})")
    names, values = arguments[::2], arguments[1::2]
    changes = {n.removeprefix("--"): x for n, x in zip(names, values, strict=True)}
    result = regard.train(config, run, changes=changes, overwrite=True, callbacks=[progress])
    model = regard.load(result.best or result.last)
    title("3. Dates it has not seen")
    exact = score(judged(model, table(data / "valid.tsv")), "exact")
    print(f"{100 * exact:.1f} % exactly right (greedy; the aim is {100 * AIM:.0f} %)")
    title(
        "4. Languages it has not seen: where a new one shares words and order with an old one it may be right"
    )
    print(languages(judged(model, table(data / "unseen.tsv"))))
    title("5. Beam search")
    print(translations(model, table(data / "valid.tsv")))
    title("6. Where it looked while it wrote")
    rows = judged(model, picked(table(data / "valid.tsv"), DRAWN))
    print(picture(model, rows, HOME / "alignment.png"))
    title(f"7. The report: regard report {run}")
    code = command(["report", str(run)])
    print(
        f"\n{time.perf_counter() - began:.0f} seconds in all. What to try next:\n\n{next_steps(config, run)}"
    )
    return code or int(exact < AIM)


def progress(event: dict[str, Any]) -> None:
    """What the run tells, in lines."""
    match event["kind"]:
        case "begin":
            print(event["about"], flush=True)
        case "step" if event["step"] % 100 == 0:
            print(f"step {event['step']}  loss {event['loss']:.3f}", flush=True)
        case "evaluation":
            figures = (f"{n} {x:.4f}" for n, x in event.items() if isinstance(x, float))
            print(f"step {event['step']}  held-out {', '.join(figures)}", flush=True)


def title(text: str) -> None:
    print(f"\n{text}\n", flush=True)


def next_steps(config: Path, run: Path) -> str:
    steps = {
        f'echo "Freitag, 13. Mai 2033" | regard translate {run}/best --align': "any date",
        f"regard train {config} --output-dir {HOME}/wide --model.dim 192": "a wider model",
        f"regard compare {run} {HOME}/wide": "side by side",
        "regard recipes copy dates-gru": "the same dates, before Transformers",
        "regard recipes list": "prose, pictures, King James English, BERT",
        f"regard serve dates={run}/best": "then open http://127.0.0.1:8000: translate, and look inside",
    }
    width = max(map(len, steps))
    return "\n".join(f"  {line:<{width}}   {what}" for line, what in steps.items())


# --- how good it is -----------------------------------------------------------------------------------------------


def table(path: Path) -> list[Row]:
    """The lines of a TSV file by the names in its first line."""
    head, *lines = path.read_text(encoding="utf-8").splitlines()
    return [dict(zip(head.split("\t"), line.split("\t"))) for line in lines]


def picked(rows: list[Row], locales: tuple[str, ...]) -> list[Row]:
    """A date in each language, one that is written out in full if there is one."""
    rows = sorted(rows, key=lambda row: row["form"].startswith("full"))
    last = {row["locale"]: row for row in rows}
    return [last[locale] for locale in locales if locale in last]


def judged(model: Any, rows: list[Row]) -> list[Row]:
    """The rows with what the model writes, and what of it is right."""
    texts = regard.translate(model, [row["source"] for row in rows], beams=1, max_new_tokens=12)
    found = []
    for row, text in zip(rows, texts, strict=True):
        parts = {"exact": slice(None), "year": slice(4), "month": slice(5, 7), "day": slice(8, 10)}
        right = {name: "1" if text[s] == row["target"][s] else "" for name, s in parts.items()}
        found.append({**row, **right, "text": text})
    return found


def score(rows: list[Row], name: str) -> float:
    return sum(bool(row[name]) for row in rows) / max(len(rows), 1)


def languages(rows: list[Row]) -> str:
    """What is right in each language that was never seen, in per cent."""
    from babel import Locale

    names = ("exact", "year", "month", "day")
    lines = [f"{'language':<11} {'':<12}" + "".join(f"{name:>8}" for name in names)]
    for some, kind in UNSEEN.items():
        for locale in some.split():
            mine = [row for row in rows if row["locale"] == locale]
            figures = "".join(f"{100 * score(mine, name):>7.0f}%" for name in names)
            lines.append(f"{Locale.parse(locale).english_name or locale:<11} {kind:<12}{figures}")
    return "\n".join(lines)


def translations(model: Any, rows: list[Row]) -> str:
    """The three best of four beams, for a few dates."""
    lines = []
    for row in picked(rows, SHOWN):
        found = regard.generate(model, row["source"], beams=4, n_best=3, max_new_tokens=12)
        said = ", ".join(f"{result.text} ({result.score:.2f})" for result in found)
        lines.append(f"{row['source']}  ->  {said}")
    return "\n".join(lines)


# --- where it looks -----------------------------------------------------------------------------------------------


@torch.inference_mode()
def weights(model: Any, row: Row) -> torch.Tensor:
    """(t s): for each character that was written how much the last cross-attention looks at each one of the source, a
    mean over its heads."""
    tokenizer, site = tokenizer_of(model), cross_site(model)
    assert tokenizer is not None
    source, target = tokenizer.encode(row["source"]), tokenizer.encode(row["text"], special=False)
    probe = Probe(layers=[site])
    ids = torch.tensor([[special_of(model).start or 0, *target[:-1]]])
    model(ids, source=torch.tensor([source]), probe=probe)
    return probe.maps[site][0][0].float().mean(0)[:, : len(row["source"])]


def picture(model: Any, rows: list[Row], path: Path) -> str:
    """Alignments as a PNG if matplotlib is installed, and the first one as text in any case."""
    maps = [weights(model, row) for row in rows]
    said = drawn(rows[0], maps[0]) if rows else ""
    if importlib.util.find_spec("matplotlib") is None:
        return f"{said}\n\n(pip install matplotlib for a picture)"
    page = sheet(9, 3.4 * len(rows), rows=len(rows))
    for ax, row, each in zip(page.axes, rows, maps, strict=True):
        page.image(ax, each)
        page.dress(ax, "what it reads", "what it writes")
        ax.set_aspect("auto")
        ax.set_xticks(range(len(row["source"])), list(row["source"]))
        ax.set_yticks(range(len(row["text"])), list(row["text"]))
        ax.tick_params(length=0)
    page.title("what the decoder reads (across) for each character it writes (down)")
    save(page.figure, path)
    return f"{said}\n\n{path}"


def drawn(row: Row, each: torch.Tensor) -> str:
    """The weights as shades: what was read across, what was written down."""
    level = (each / each.max() * (len(SHADES) - 1)).round().int().tolist()
    lines = ["   " + row["source"]]
    lines += [f" {c} " + "".join(SHADES[n] for n in line) for c, line in zip(row["text"], level)]
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UsageError as error:
        print("error:", error, file=sys.stderr)
        sys.exit(getattr(error, "code", 2))
