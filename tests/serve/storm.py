"""Storms, longer than the suite has time for:

python -m tests.serve.storm --requests 5000        random requests, alone = among others = streamed, to the bit
python -m tests.serve.storm --mutated 20000        bodies that are spoilt: no status above 499, no hang, memory flat
python -m tests.serve.storm --streams 1000         streams at once, 20 clients a second killed: all others end right
python -m tests.serve.storm --schemas 300          random JSON schemas: every answer that is whole is valid
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from regard.serve.edge import Limits
from regard.serve.host import Options
from tests.serve.running import Client, running
from tests.serve.test_answers import joined, random_body, whole

SEEDS = [
    ("/v1/completions", {"model": "demo", "prompt": "12 + 30", "max_tokens": 2, "n": 1, "logprobs": 1, "stop": ["a"]}),
    ("/v1/chat/completions", {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}),
    ("/v1/responses", {"model": "demo", "input": [{"role": "user", "content": "Hello"}], "max_output_tokens": 2}),
    ("/v1/embeddings", {"model": "demo", "input": ["a", "b"]}),
    ("/v1/look", {"model": "demo", "input": "12 + 30", "layers": [0], "heads": [1], "rows": [-1]}),
    ("/tokenize", {"model": "demo", "prompt": "Hello", "literal": True}),
    ("/detokenize", {"model": "demo", "tokens": [70, 71]}),
]  # fmt: skip
ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    1e308,
    0.5,
    "",
    "x",
    "\0",
    "🙂" * 50,
    [],
    {},
    [[]],
    [None],
]
ODD += ["a" * 5000, [70] * 600, {"type": "object"}, [{"role": "user", "content": "x"}], "required"]
NAMES = [
    "stream",
    "temperature",
    "top_p",
    "seed",
    "tools",
    "tool_choice",
    "response_format",
    "logit_bias",
    "beams",
    "echo",
    "priority",
    "user",
    "text",
]


def mutated(rng: random.Random) -> tuple[str, bytes]:
    """A body with one to three things wrong, as data or as bytes."""
    path, body = rng.choice(SEEDS)
    body = json.loads(json.dumps(body))
    for _ in range(rng.randint(1, 3)):
        place, key = body, rng.choice([*body, *NAMES])
        while isinstance(place.get(key), (dict, list)) and place[key] and rng.random() < 0.7:
            inner = place[key]
            if isinstance(inner, list):
                if not isinstance(inner[0], dict):
                    break
                inner = inner[0]
            place, key = inner, rng.choice([*inner, "odd"])
        if rng.random() < 0.15:
            place.pop(key, None)
        else:
            place[key] = json.loads(json.dumps(rng.choice(ODD)))
    data = json.dumps(body).encode()
    if rng.random() < 0.3:
        at = rng.randrange(len(data))
        data = (
            data[:at]
            + bytes(rng.choices(b'\xff\x00"{}[]:,\\9e', k=rng.randint(0, 3)))
            + data[at + 1 :]
        )
    return path, data


def spoil(client: Client, count: int, seed: int = 0) -> dict[int, int]:
    """Statuses of spoilt bodies, by how often they came."""
    rng, counts = random.Random(seed), dict[int, int]()
    with ThreadPoolExecutor(4) as pool:
        jobs = [
            (body, pool.submit(client.request, "POST", path, body))
            for path, body in (mutated(rng) for _ in range(count))
        ]
        for body, job in jobs:
            status = job.result()[0]
            assert status < 500, (status, body)
            counts[status] = counts.get(status, 0) + 1
    client.idle()
    return counts


def equal(client: Client, count: int, others: int = 256, seed: int = 0) -> None:
    """Random requests: `others` of them at once, whole and streamed, and then each alone."""
    rng = random.Random(seed)
    for start in range(0, count, others):
        asked = [random_body(rng) for _ in range(min(others, count - start))]
        with ThreadPoolExecutor(others * 2) as pool:
            jobs = [pool.submit(client.post, *each) for each in asked]
            streams = [pool.submit(client.events, *each) for each in asked]
            together = [whole(job.result()) for job in jobs]
            assert [joined(stream.result()) for stream in streams] == together
        assert [whole(client.post(*each)) for each in asked] == together
        print(f"{start + len(asked)} requests equal", flush=True)


def crowd(client: Client, count: int) -> None:
    """Streams at once; beside them clients that are killed."""
    body = {
        "model": "demo",
        "prompt": "12 + 30",
        "max_tokens": 32,
        "temperature": 0,
        "logit_bias": {"0": -100},
    }
    expected = whole(client.post("/v1/completions", body))
    ended: list[Any] = []

    def kill() -> None:
        while len(ended) < count:
            sock = socket.create_connection(("127.0.0.1", client.port))
            data = json.dumps({**body, "stream": True}).encode()
            sock.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            )
            sock.sendall(f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
            time.sleep(0.05)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            sock.close()

    began = time.monotonic()
    with ThreadPoolExecutor(count + 1) as pool:
        pool.submit(kill)
        jobs = [pool.submit(client.events, "/v1/completions", body) for _ in range(count)]
        for job in jobs:
            try:
                ended.append(joined(job.result()))
            except AssertionError as error:
                ended.append(error)
    wrong = [e for e in ended if e != expected]
    assert not wrong, (len(wrong), wrong[0])
    client.idle(60)
    print(f"{count} streams of 32 tokens in {time.monotonic() - began:.1f} s, all as alone")


def random_schema(rng: random.Random, depth: int = 0) -> Any:
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    kind = rng.choice(kinds if depth > 2 else [*kinds, "object", "object", "array", "anyOf", "ref"])
    if kind == "enum":
        return {"enum": rng.sample([1, "a", None, True, "long text", -3.5], 3)}
    if kind == "const":
        return {"const": rng.choice(["a", 7, None])}
    if kind == "pattern":
        return {
            "type": "string",
            "pattern": rng.choice(["^[a-c]{1,3}$", "^\\d{4}-\\d{2}$", "^(x|yz)+$"]),
            "maxLength": 12,
        }
    if kind == "string":
        return {"type": "string", "maxLength": rng.randint(0, 6)}
    if kind == "integer":
        return {"type": "integer", "minimum": 0, "maximum": rng.randint(0, 999)}
    if kind == "number":
        return {"type": "number", "minimum": -10, "maximum": 10}
    if kind == "array":
        return {
            "type": "array",
            "items": random_schema(rng, depth + 1),
            "minItems": 1,
            "maxItems": 3,
        }
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth + 1) for _ in range(2)]}
    if kind == "ref":
        return {"$ref": "#/$defs/leaf"}
    if kind == "object":
        names = rng.sample(["a", "b", "key", "é"], rng.randint(1, 3))
        properties = {name: random_schema(rng, depth + 1) for name in names}
        return {
            "type": "object",
            "properties": properties,
            "required": names[:2],
            "additionalProperties": False,
        }
    return {"type": kind}


def schemas(client: Client, count: int, seed: int = 0) -> tuple[int, int]:
    """How many answers were whole (all of them valid), and how many ended by length."""
    import jsonschema

    rng, done, cut = random.Random(seed), 0, 0
    for i in range(count):
        inner = random_schema(rng)
        schema = {
            "type": "object",
            "properties": {"it": inner},
            "required": ["it"],
            "additionalProperties": False,
        }
        schema["$defs"] = {
            "leaf": {
                "type": "object",
                "properties": {"n": {"type": "boolean"}},
                "required": ["n"],
                "additionalProperties": False,
            }
        }
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": "Hi"}],
            "seed": i,
            "max_tokens": 300,
        }
        choice = client.post("/v1/chat/completions", {**body, "response_format": form})["choices"][
            0
        ]
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), schema)
            done += 1
        else:
            cut += 1
    return done, cut


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("requests", "mutated", "streams", "schemas"):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument(
        "--others", type=int, default=256, help="requests that run beside each other"
    )
    parser.add_argument("--dtype", default="fp32", help="of --requests")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    Client.timeout = 600.0
    if asked.requests:
        options, limits = (
            Options(invariant=True, rows=asked.others, dtype=asked.dtype),
            Limits(queue=4 * asked.others),
        )
        with running({"demo": "demo"}, options=options, limits=limits) as client:
            equal(client, asked.requests, asked.others, asked.seed)
    with running({"demo": "demo"}, limits=Limits(queue=2048, streams=2048)) as client:
        if asked.mutated:
            spoil(client, 500, asked.seed + 1)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            counts = spoil(client, asked.mutated, asked.seed)
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
            print(f"{asked.mutated} spoilt bodies: {counts}; memory grew by {grown:.0f} MiB")
        if asked.streams:
            crowd(client, asked.streams)
        if asked.schemas:
            done, cut = schemas(client, asked.schemas, asked.seed)
            print(f"schemas: {done} valid, {cut} cut by length")


if __name__ == "__main__":
    main()
