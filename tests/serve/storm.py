"""Storms, longer than the suite has time for:

python -m tests.serve.storm --requests 5000        random requests, alone = among others = streamed, to the bit
python -m tests.serve.storm --mutated 20000        bodies that are spoilt: no status above 499, no hang, memory flat
python -m tests.serve.storm --streams 1000         streams at once, 20 clients a second killed: all others end right
python -m tests.serve.storm --schemas 1000         random JSON schemas: every answer that is whole is valid
python -m tests.serve.storm --suite FOLDER         the same of JSON-Schema-Test-Suite/tests/draft2020-12
"""

from __future__ import annotations

import argparse
import json
import random
import re
import resource
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from regard.serve.edge import Limits
from regard.serve.endpoints import ENDPOINTS
from regard.serve.model_worker import Options
from regard.serve.schemas import taken
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
FIELDS = {path: taken(e.body).__struct_fields__ for path, e in ENDPOINTS.items() if e.body}
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


def mutated(rng: random.Random) -> tuple[str, bytes]:
    """A body with one to three things wrong, as data or as bytes."""
    path, body = rng.choice(SEEDS)
    body = json.loads(json.dumps(body))
    for _ in range(rng.randint(1, 3)):
        # Every field that the path takes, so that the next one is tried the moment it exists.
        place, key = body, rng.choice([*body, *FIELDS[path]])
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


def named(content: bytes) -> bool:
    """Whether an error says which field is wrong, or that there are no fields."""
    error = json.loads(content.removeprefix(b"data: ").split(b"\n")[0])["error"]
    nothing = ("the body is not JSON", "Expected `object`")
    return error["param"] is not None or error["message"].startswith(nothing)


def spoil(client: Client, count: int, seed: int = 0) -> Counter[int]:
    """Statuses of spoilt bodies, by how often they came."""
    rng, counts = random.Random(seed), Counter[int]()
    with ThreadPoolExecutor(4) as pool:
        for start in range(0, count, 1000):
            asked = [mutated(rng) for _ in range(min(1000, count - start))]
            jobs = [pool.submit(client.request, "POST", *each) for each in asked]
            for (path, body), job in zip(asked, jobs):
                status, _, content = job.result()
                assert status < 500, (status, path, body)
                assert status != 400 or named(content), (path, body, content)
                counts[status] += 1
    client.idle()
    return counts


def memory() -> float:
    """MiB of this process, now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


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


LEAF = {"type": "object", "properties": {"n": {"type": "boolean"}}, "required": ["n"]}
LIST = {"type": "object", "properties": {"v": {"type": "integer", "minimum": 0, "maximum": 9}}}
LIST["properties"] |= {"next": {"anyOf": [{"$ref": "#/$defs/list"}, {"type": "null"}]}}
DEFS = {"leaf": LEAF, "list": {**LIST, "required": ["v", "next"]}}
DEFS = {name: {**each, "additionalProperties": False} for name, each in DEFS.items()}
PATTERNS = ["^[a-c]{1,3}$", "^\\d{4}-\\d{2}$", "^(x|yz)+$", "^[^a-z]?é{2}$", "^\\w+@\\w+\\.org$"]


def random_schema(rng: random.Random, depth: int = 0) -> Any:
    """Of the kinds of the public test suite: values, enums, patterns, nested ones, alternatives, references."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "format"]
    deep = ["object", "object", "array", "tuple", "anyOf", "ref"]
    kind = rng.choice(kinds if depth > 2 else [*kinds, *deep])
    if kind == "enum":
        return {"enum": rng.sample([1, "a", None, True, "long text", -3.5, [1, "b"], {"c": 2}], 3)}
    if kind == "const":
        return {"const": rng.choice(["a", 7, None, [], {"d": [False]}, '"\\\n'])}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": 12}
    if kind == "format":
        return {"type": "string", "format": rng.choice(["date", "uuid", "ipv4", "ipv6"])}
    if kind == "string":
        return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 6)}
    if kind == "integer":
        low = rng.randint(-50, 0)
        return {"type": "integer", "minimum": low, "exclusiveMaximum": low + rng.randint(1, 999)}
    if kind == "number":
        return {"type": "number", "minimum": -10, "maximum": 10}
    if kind == "array":
        items = random_schema(rng, depth + 1)
        return {"type": "array", "items": items, "minItems": 1, "maxItems": 3}
    if kind == "tuple":
        each = [random_schema(rng, depth + 1) for _ in range(2)]
        return {"type": "array", "prefixItems": each, "items": False, "minItems": 2}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth + 1) for _ in range(2)]}
    if kind == "ref":
        return {"$ref": rng.choice(["#/$defs/leaf", "#/$defs/list"])}
    if kind == "object":
        names = rng.sample(["a", "b", "key", "é", 'quote"'], rng.randint(1, 3))
        properties = {name: random_schema(rng, depth + 1) for name in names}
        more = {"required": names[:2], "additionalProperties": False}
        return {"type": "object", "properties": properties, **more}
    return {"type": kind}


def random_schemas(count: int, seed: int = 0) -> list[Any]:
    rng = random.Random(seed)
    more = {"required": ["it"], "additionalProperties": False, "$defs": DEFS}
    made = [{"it": random_schema(rng)} for _ in range(count)]
    return [{"type": "object", "properties": each, **more} for each in made]


def suite(folder: str) -> list[Any]:
    """The schemas of a folder of the public suite, JSON-Schema-Test-Suite/tests/draft2020-12."""
    files = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    return [each["schema"] for file in files for each in file if isinstance(each["schema"], dict)]


def schemas(client: Client, asked: list[Any]) -> Counter[str]:
    """How many answers were valid or wrong; cut by length; refused, since a grammar cannot keep it; or of a schema
    that jsonschema cannot read."""
    import jsonschema
    from referencing.exceptions import Unresolvable

    # What ends texts and lists is likelier, so that few answers are cut.
    ends = [client.post("/tokenize", {"model": "demo", "prompt": end})["tokens"] for end in '"]},:']
    bias = {str(ids[-1]): 4 for ids in ends}

    def ask(i: int) -> str:
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": asked[i]}}
        body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "seed": i}
        body |= {"logit_bias": bias, "response_format": form}
        status, _, content = client.request("POST", "/v1/chat/completions", body)
        if status == 400:
            return "refused"
        assert status == 200, (status, content, asked[i])
        choice = json.loads(content)["choices"][0]
        if choice["finish_reason"] != "stop":
            return "cut"
        answer = json.loads(choice["message"]["content"])
        check = jsonschema.Draft202012Validator(asked[i], format_checker=jsonschema.FormatChecker())
        try:
            found = "valid" if check.is_valid(answer) else "wrong"
        except (re.error, Unresolvable):
            return "not to be checked"
        if found == "wrong":
            print("wrong:", json.dumps(asked[i]), json.dumps(answer), flush=True)
        return found

    with ThreadPoolExecutor(16) as pool:
        return Counter(pool.map(ask, range(len(asked))))


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("requests", "mutated", "streams", "schemas"):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument(
        "--others", type=int, default=256, help="requests that run beside each other"
    )
    parser.add_argument("--suite")
    parser.add_argument("--dtype", default="auto", help="of --requests")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    Client.timeout = 600.0
    if asked.requests:
        options = Options(invariant=True, rows=asked.others, dtype=asked.dtype)
        limits = Limits(queue=4 * asked.others)
        with running({"demo": "demo"}, options=options, limits=limits) as client:
            equal(client, asked.requests, asked.others, asked.seed)
    # A cache that is soon full, so that memory can be seen to stay.
    options, limits = Options(cache_memory=64 * 2**20), Limits(queue=2048, streams=2048)
    with running({"demo": "demo"}, options=options, limits=limits) as client:
        if asked.mutated:
            # The first ones fill what is kept: tokens, grammars, requests that can be looked into.
            spoil(client, 1000, asked.seed + 1)
            half, used, counts = asked.mutated // 2, [memory()], Counter[int]()
            for seed, count in ((asked.seed, half), (asked.seed + 2, asked.mutated - half)):
                counts += spoil(client, count, seed)
                used.append(memory())
            shown = ", ".join(f"{mib:.0f}" for mib in used)
            print(
                f"{asked.mutated} spoilt bodies: {dict(counts)}; MiB at start, middle, end: {shown}"
            )
        if asked.streams:
            crowd(client, asked.streams)
        if asked.schemas:
            print("schemas:", dict(schemas(client, random_schemas(asked.schemas, asked.seed))))
        if asked.suite:
            print("the suite's schemas:", dict(schemas(client, suite(asked.suite))))


if __name__ == "__main__":
    main()
