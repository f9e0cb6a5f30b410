"""What the server costs: against `regard.generate` in the same process, with many streams, and at its start.

    python bench/serve.py                    the model that is included
    python bench/serve.py --model FOLDER     another one
    python bench/serve.py --streams 1000     streams at once

Rounds of both kinds take turns, so that a busy machine disturbs both; the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import regard
from regard.evaluate.model import Opened
from regard.serve.edge import Limits
from regard.serve.host import Options
from tests.serve.running import Client, running
from tests.serve.storm import crowd


def overhead(client: Client, model: Any, rows: int, tokens: int, rounds: int, stream: bool) -> None:
    """Seconds of a batch of answers, asked for at once."""
    prompts = [[70 + i % 200, *range(70, 86)] for i in range(rows)]
    given = {"temperature": 1.0, "max_new_tokens": tokens, "eos": (), "seed": 1}
    given["logit_bias"] = {0: -100.0}
    bodies = [
        {"model": client.app_name, "prompt": ids, "max_tokens": tokens, "seed": 1, "logit_bias": {"0": -100}}  # type: ignore[attr-defined]
        for ids in prompts
    ]  # fmt: skip
    ask = client.events if stream else client.post
    library, server = [], []
    with ThreadPoolExecutor(rows) as pool:
        for _ in range(rounds + 1):
            began = time.perf_counter()
            regard.generate(model, prompts, **given)
            middle = time.perf_counter()
            list(pool.map(lambda body: ask("/v1/completions", body), bodies))
            library.append(middle - began)
            server.append(time.perf_counter() - middle)
    a, b = statistics.median(library[1:]), statistics.median(server[1:])
    what, rate = "streams" if stream else "answers", rows * tokens / b
    print(
        f"{rows} {what} of {tokens} tokens: generate {a:.3f} s, server {b:.3f} s, {b / a:.2f} times"
    )
    print(f"{rate:.0f} tokens/s")


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
    asked = parser.parse_args()
    from regard.files import resolve_model

    folder = str(resolve_model(asked.model))
    model = Opened(folder).model
    limits = Limits(queue=4096, streams=4096)
    with running({"demo": folder}, options=Options(), limits=limits) as client:
        client.app_name = "demo"  # type: ignore[attr-defined]
        for stream in (False, True):
            overhead(client, model, asked.rows, asked.tokens, asked.rounds, stream)
        if asked.streams:
            crowd(client, asked.streams)
    ready(folder)


if __name__ == "__main__":
    main()
