"""What the server costs: against `regard.generate` in the same process, with grammars, beside looks inside, with many
streams, and at its start.

    python bench/serve.py                    the model that is included
    python bench/serve.py --model FOLDER     another one
    python bench/serve.py --only grammars    one of: generate, grammars, look, start
    python bench/serve.py --streams 1000     streams at once

Rounds of both kinds take turns, so that a busy machine disturbs both; the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import regard
from regard.evaluate.model import Opened
from regard.serve.edge import Limits
from regard.serve.host import Options
from tests.serve.running import Client, running
from tests.serve.storm import crowd

Round = Callable[[], Any]


def medians(one: Round, other: Round, rounds: int) -> tuple[float, float]:
    """Seconds of each, in turns; the first of them warms up."""
    times: list[list[float]] = [[], []]
    for _ in range(rounds + 1):
        for run, taken in zip((one, other), times):
            began = time.perf_counter()
            run()
            taken.append(time.perf_counter() - began)
    first, second = (statistics.median(taken[1:]) for taken in times)
    return first, second


def overhead(client: Client, model: Any, rows: int, tokens: int, rounds: int, stream: bool) -> None:
    """Seconds of a batch of answers, asked for at once."""
    prompts = [[70 + i % 200, *range(70, 86)] for i in range(rows)]
    given = {"temperature": 1.0, "max_new_tokens": tokens, "eos": (), "seed": 1}
    given["logit_bias"] = {0: -100.0}
    body = {"model": "demo", "max_tokens": tokens, "seed": 1, "logit_bias": {"0": -100}}
    ask = client.events if stream else client.post
    with ThreadPoolExecutor(rows) as pool:
        a, b = medians(
            lambda: regard.generate(model, prompts, **given),
            lambda: list(
                pool.map(lambda p: ask("/v1/completions", {**body, "prompt": p}), prompts)
            ),
            rounds,
        )
    what, rate = "streams" if stream else "answers", rows * tokens / b
    print(
        f"{rows} {what} of {tokens} tokens: generate {a:.3f} s, server {b:.3f} s, {b / a:.2f} times"
    )
    print(f"{rate:.0f} tokens/s")


def grammars(client: Client, rows: int, tokens: int, rounds: int) -> None:
    """Seconds of a batch of answers whose form is given, against answers of any form and as many tokens."""
    # Long enough that no answer ends before its tokens are used up.
    item = {"type": "object", "properties": {"name": {"type": "string"}, "id": {"type": "integer"}}}
    item |= {"required": ["name", "id"], "additionalProperties": False}
    schema = {"type": "array", "items": item, "minItems": tokens}
    form = {"type": "json_schema", "json_schema": {"name": "list", "schema": schema}}
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": tokens}
    free = {**body, "logit_bias": {"0": -100, "1": -100, "2": -100, "3": -100, "4": -100}}

    def ask(body: dict[str, Any]) -> None:
        def one(seed: int) -> None:
            answer = client.post("/v1/chat/completions", {**body, "seed": seed})
            assert answer["usage"]["completion_tokens"] == tokens, answer

        list(pool.map(one, range(rows)))

    with ThreadPoolExecutor(rows) as pool:
        a, b = medians(lambda: ask(free), lambda: ask({**free, "response_format": form}), rounds)
    print(
        f"{rows} answers of {tokens} tokens: any form {a:.3f} s, a schema {b:.3f} s, {b / a:.2f} times"
    )


def look(client: Client, rows: int, tokens: int, rounds: int) -> None:
    """Seconds of a batch of answers, alone and while another client looks into one token, twice a second."""
    body = {"model": "demo", "max_tokens": tokens, "logit_bias": {"0": -100}, "prompt": [70] * 16}
    ran = client.post("/v1/completions", body)["id"]
    view = {"model": "demo", "id": ran, "rows": [20], "encoding_format": "base64"}

    def ask() -> list[Any]:
        bodies = [{**body, "seed": seed} for seed in range(rows)]
        answers = pool.map(lambda each: client.post("/v1/completions", each), bodies)
        return [answer["choices"][0]["text"] for answer in answers]

    def watched() -> None:
        over = threading.Event()

        def watch() -> None:
            while not over.wait(0.5):
                client.post("/v1/look", view)

        eye = pool.submit(watch)
        try:
            assert ask() == alone
        finally:
            over.set()
            eye.result()

    with ThreadPoolExecutor(rows + 1) as pool:
        alone = ask()
        a, b = medians(ask, watched, rounds)
    print(
        f"{rows} answers of {tokens} tokens: alone {a:.3f} s, beside looks {b:.3f} s, {b / a:.2f} times"
    )


def ready(model: str) -> None:
    """From the command to the first and the tenth answer."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "regard", "serve", f"m={model}", "--port", "0", "--quiet"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    line = process.stderr.readline()
    port = int(line.rpartition("127.0.0.1:")[2].partition("/")[0])
    while urllib.request.urlopen(f"http://127.0.0.1:{port}/ready").status != 200:
        time.sleep(0.01)
    up, client, times = time.perf_counter() - began, Client(None, port), []  # type: ignore[arg-type]
    for _ in range(10):
        start = time.perf_counter()
        client.post("/v1/completions", {"model": "m", "prompt": [70, 71], "max_tokens": 8})
        times.append(time.perf_counter() - start)
    process.terminate()
    process.wait()
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import regard; regard.load({model!r})"], check=False)
    load = time.perf_counter() - start
    print(f"ready after {up:.1f} s (import torch and load alone: {load:.1f} s)")
    print(f"first answer {times[0]:.3f} s, tenth {times[-1]:.3f} s")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--streams", type=int, default=0)
    parser.add_argument("--only", choices=("generate", "grammars", "look", "start"))
    asked = parser.parse_args()
    from regard.files import resolve_model

    folder = str(resolve_model(asked.model))
    model = Opened(folder).model
    limits = Limits(queue=4096, streams=4096)
    size = (asked.rows, asked.tokens, asked.rounds)
    with running({"demo": folder}, options=Options(), limits=limits) as client:
        if asked.only in (None, "generate"):
            for stream in (False, True):
                overhead(client, model, *size, stream)
        if asked.only in (None, "grammars"):
            grammars(client, *size)
        if asked.only in (None, "look"):
            look(client, *size)
        if asked.streams:
            crowd(client, asked.streams)
    if asked.only in (None, "start"):
        ready(folder)


if __name__ == "__main__":
    main()
