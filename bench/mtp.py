"""What an MTP layer brings: a small GPT learns the texts of help() with one, and decodes plainly and by its guesses.

    python bench/mtp.py [--steps 600] [--temperature 0 0.7] [--quick] [--repeats 5]

The recipe gpt-pydoc (0.8M parameters, characters) with `mtp="mtp"`, in a temporary folder: two minutes of
training on two cores. Then texts, greedy and drawn, from the beginnings of paragraphs that it has not read, by
`regard.generate` as it is and with `draft_model="mtp"`, in one interleaved run: tokens a pass, tokens per second, and
how many times plain that is. The texts must be the same. Run it alone.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from measure import header, medians

NEW, ROWS, GUESSES = 96, (1, 8), (1, 2, 3)


def trained(folder: Path, steps: int) -> tuple[Any, list[str]]:
    """The model, and beginnings of texts that were held out."""
    import regard

    command = [sys.executable, "-m", "regard", "recipes", "copy", "gpt-pydoc"]
    subprocess.run([*command, str(folder / "small")], check=True, stdout=subprocess.DEVNULL)
    changes: dict[str, Any] = {"model.mtp": "mtp", "train.steps": steps, "train.evaluate": 0}
    changes["train.schedule.warmup"] = min(100, steps // 2)
    regard.train(folder / "small.toml", folder / "run", changes=changes)
    valid = next(folder.rglob("valid.txt")).read_text(encoding="utf-8")
    texts = [text[:24] for text in valid.split("\n\n") if len(text) > 200]
    return regard.load(folder / "run"), texts[: max(ROWS)]


def passes(model: Any, ids: list[list[int]], guesses: int, temperature: float) -> int:
    from regard.decode.engine import Engine
    from regard.decode.settings import Request, Settings

    engine = Engine(model, layout="contiguous", draft="mtp" if guesses else None)
    for each in ids:
        engine.submit(
            Request(each, Settings(max_new_tokens=NEW, draft=guesses, temperature=temperature))
        )
    count = 0
    while not engine.idle:
        engine.step()
        count += 1
    return count


def compare(model: Any, texts: list[str], temperature: float, repeats: int) -> None:
    import regard
    from regard.decode.defaults import tokenizer_of

    coder = tokenizer_of(model)
    how: dict[str, Any] = {
        "max_new_tokens": NEW,
        "eos": (),
        "defaults": "plain",
        "temperature": temperature,
    }
    print(f"temperature {temperature}")
    print(f"{'rows':>4} {'guesses':>8} {'tokens a pass':>14} {'tokens/s':>9} {'times plain':>12}")
    for rows in ROWS:
        prompts = texts[:rows]
        ids = [coder.encode(text) for text in prompts]
        wanted = [r.ids for r in regard.generate(model, prompts, **how)]
        more = [{}, *({"draft_model": "mtp", "draft": n} for n in GUESSES)]
        for each in more[1:]:
            assert [r.ids for r in regard.generate(model, prompts, **how, **each)] == wanted
        sides = [partial(regard.generate, model, prompts, **how, **each) for each in more]
        seconds = medians(sides, repeats)
        plain = passes(model, ids, 0, temperature)
        for n, each in zip((0, *GUESSES), seconds, strict=True):
            gain = plain / passes(model, ids, n, temperature)
            rate, times = rows * NEW / each, seconds[0] / each
            print(f"{rows:4} {n or 'plain':>8} {gain:14.2f} {rate:9.0f} {times:12.2f}", flush=True)


def run() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="20 steps, one repeat")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    print(header(), flush=True)
    with tempfile.TemporaryDirectory() as home:
        model, texts = trained(Path(home), 20 if args.quick else args.steps)
        for temperature in args.temperature:
            compare(model, texts, temperature, 1 if args.quick else args.repeats)


if __name__ == "__main__":
    run()
