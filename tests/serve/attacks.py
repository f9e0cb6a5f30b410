"""What a hostile or careless client may send: by hand what is expensive, and by a walk over /openapi.json every field
of every body, so that the next field is attacked the moment it exists. Imports no torch: attackers are processes."""

from __future__ import annotations

import copy
import http.client
import json
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
NEVER_ENDS = {"0": -100}  # demo's end of text
LEFT, CUT = (
    0,
    -1,
)  # instead of a status: the attacker's patience ended; the server closed the connection


class Attacker:
    """Sends, and keeps the statuses of what is answered within its patience."""

    def __init__(self, port: int, patience: float):
        self.port, self.end = port, time.monotonic() + patience
        self.found: list[tuple[int, str]] = []  # and what was wrong

    @property
    def left(self) -> float:
        return max(0.05, self.end - time.monotonic())

    def post(self, path: str, body: Any, **headers: str) -> int:
        data = body if isinstance(body, bytes) or hasattr(body, "__next__") else dumped(body)
        return self.ask("POST", path, data, {"content-type": "application/json", **headers})

    def ask(self, method: str, path: str, data: Any = None, headers: Any = {}) -> int:  # noqa: B006
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self.left)
        status, text = LEFT, ""
        try:
            with suppress(BrokenPipeError, ConnectionResetError):
                # A server may answer before it has read all.
                connection.request(method, path, data, headers)
            answer = connection.getresponse()
            status = answer.status
            while part := answer.read(1 << 16):
                text = text or part[:3000].decode(errors="replace")
                connection.timeout = self.left
                if time.monotonic() > self.end:
                    break
        except TimeoutError:
            pass
        except (http.client.HTTPException, OSError):
            status = status or CUT
        finally:
            connection.close()
        self.found.append((status, text if status >= 400 else ""))
        return status

    def open(self, path: str, body: Any, window: int | None = None) -> socket.socket:
        """A request whose answer is not waited for; with a small window for it."""
        sock = socket.socket()
        sock.settimeout(self.left)
        if window is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        sock.connect(("127.0.0.1", self.port))
        data, head = dumped(body), f"POST {path} HTTP/1.1\r\nHost: localhost\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        sock.sendall(head.encode() + data)
        return sock

    def hold(self, socks: list[socket.socket]) -> None:
        """Keep them open, unread, while patience lasts."""
        time.sleep(self.left)
        for sock in socks:
            sock.close()
        self.found.append((LEFT, ""))


def dumped(body: Any) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


# --- what is expensive --------------------------------------------------------------------------------------------


def chat(model: str = "demo", text: str = "What is 12 + 30?", **more: Any) -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 30}
    return body | more


def schema(given: Any, model: str = "llama", **more: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": given}}
    return chat(model, response_format=form, **more)


def pattern(text: str) -> dict[str, Any]:
    return schema({"type": "string", "pattern": text}, max_tokens=300)


def nested(depth: int, wrap: Callable[[Any], Any], leaf: Any) -> Any:
    for _ in range(depth):
        leaf = wrap(leaf)
    return leaf


def complete(prompt: Any, model: str = "demo", **more: Any) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": 400, "logit_bias": NEVER_ENDS} | more


def tool(parameters: Any, name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def obj(properties: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, **more}


def deep(path: str, opening: bytes, depth: int, closing: bytes = b"") -> Callable[[Attacker], Any]:
    return lambda a: a.post(path, opening * depth + closing * depth)


def streams(a: Attacker) -> None:
    """Sixty answers at once, each as long as it may be."""
    a.hold([a.open(COMPLETIONS, complete("Sort:", stream=True, seed=i)) for i in range(60)])


def slow_readers(a: Attacker) -> None:
    body = complete("Sort:", stream=True, n=16, logprobs=20)
    a.hold([a.open(COMPLETIONS, body, window=1024) for _ in range(8)])


def unread_maps(a: Attacker) -> None:
    body = {"model": "demo", "input": [5] * 500, "encoding_format": "base64"}
    a.hold([a.open(LOOK, body, window=1024) for _ in range(20)])


def leavers(path: str, body: dict[str, Any], count: int = 60) -> Callable[[Attacker], None]:
    def run(a: Attacker) -> None:
        for _ in range(count):
            sock = a.open(path, body)
            time.sleep(0.02)
            sock.close()
        a.found.append((LEFT, ""))

    return run


def idle(start: bytes, count: int) -> Callable[[Attacker], None]:
    """Connections that say little or nothing."""

    def run(a: Attacker) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        socks = []
        with suppress(OSError):
            for _ in range(count):
                socks.append(socket.create_connection(("127.0.0.1", a.port), timeout=2))
                socks[-1].sendall(start)
        a.hold(socks)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    return run


def counts_of_rows(a: Attacker) -> None:
    """Numbers of rows that were never met."""
    for rows in (*range(1, 40), 63, 64, 65, 100, 127):
        if time.monotonic() < a.end:
            a.post(COMPLETIONS, complete(["Sort:"] * rows, max_tokens=3))


def flood(path: str) -> Callable[[Attacker], Any]:
    return lambda a: [a.ask("GET", path) for _ in range(150) if time.monotonic() < a.end]


def posts(path: str, make: Callable[[], Any]) -> Callable[[Attacker], Any]:
    """One request; its body is made by the attacker."""
    return lambda a: a.post(path, make())


LINE = "river apple sort queen "
E, TOKENIZE, FILL, LOOK = "/v1/embeddings", "/tokenize", "/v1/fill", "/v1/look"
CLASSIFY, TRANSLATE = "/v1/classify", "/v1/translations"
BIG = -(10**18), 10**18
Attack = Callable[[Attacker], Any]
ATTACKS: dict[str, Attack] = {
    # Texts.
    "2,048 texts to embed": posts(E, lambda: {"model": "demo", "input": [LINE * 20] * 2048}),
    "2,048 short texts": posts(E, lambda: {"model": "demo", "input": ["a"] * 2048}),
    "1,000 lists of ids": posts(E, lambda: {"model": "demo", "input": [[5] * 500] * 1000}),
    "texts and ids mixed": posts(E, lambda: {"model": "demo", "input": [LINE * 20, [5]] * 1000}),
    "2,048 texts for an encoder": posts(E, lambda: {"model": "words", "input": ["a dog "] * 2048}),
    "2,048 sources": posts(E, lambda: {"model": "t5", "input": ["a dog "] * 2048}),
    "a source of 900,000 tokens": posts(E, lambda: {"model": "t5", "input": "a b " * 450_000}),
    "ids of a source, 900,000": posts(E, lambda: {"model": "t5", "input": [5] * 900_000}),
    "2,048 texts to classify": posts(
        CLASSIFY, lambda: {"model": "labels", "input": ["a dog "] * 2048}
    ),
    "2 MB to classify": posts(CLASSIFY, lambda: {"model": "labels", "input": "a b " * 480_000}),
    "2 MB with masks": posts(FILL, lambda: {"model": "words", "input": "a [MASK] " * 200_000}),
    "masks and many words each": posts(
        FILL, lambda: {"model": "words", "input": "[MASK]" * 100, "top": 300}
    ),
    "a look at 250 tokens": posts(LOOK, lambda: {"model": "demo", "input": "a " * 250}),
    "a look, base64": posts(
        LOOK, lambda: {"model": "demo", "input": "a " * 150, "encoding_format": "base64"}
    ),
    "a look at 200,000 heads": posts(
        LOOK, lambda: {"model": "demo", "input": "a", "heads": [0] * 200_000, "rows": [0] * 200_000}
    ),
    "a look at 200,000 layers": posts(
        LOOK, lambda: {"model": "demo", "input": "a", "layers": ["0.self"] * 150_000}
    ),
    "a look at a long source": posts(
        LOOK, lambda: {"model": "t5", "input": "a", "source": [5] * 400_000, "rows": [0]}
    ),
    "128 lines, 32 beams": posts(
        TRANSLATE, lambda: {"model": "t5", "input": ["a dog in the park"] * 128, "beams": 32}
    ),
    "2,048 lines to translate": posts(
        TRANSLATE, lambda: {"model": "t5", "input": ["a dog"] * 2048}
    ),
    "a line of 900,000 tokens": posts(
        TRANSLATE, lambda: {"model": "t5", "input": "a b " * 450_000}
    ),
    "lines to align": posts(
        TRANSLATE,
        lambda: {"model": "t5", "input": ["a dog " * 20] * 100, "beams": 1, "align": True},
    ),
    # Prompts to tokenise, and templates.
    "2 MB of one letter": posts(COMPLETIONS, lambda: complete("a" * 1_900_000, "llama")),
    "2 MB of words": posts(COMPLETIONS, lambda: complete("hello world " * 160_000)),
    "2 MB of spaces": posts(COMPLETIONS, lambda: complete(" " * 1_900_000, "llama")),
    "prompts of 15,000 characters": posts(COMPLETIONS, lambda: complete([LINE * 600] * 128)),
    "2 MB of chat": posts(CHAT, lambda: chat("demo", "ab " * 600_000)),
    "150,000 special tokens": posts(CHAT, lambda: chat("demo", "<|im_start|>" * 150_000)),
    "40,000 messages": posts(
        CHAT, lambda: chat(messages=[{"role": "user", "content": "a"}] * 40_000)
    ),
    "40,000 items": posts(
        RESPONSES, lambda: {"model": "demo", "input": [{"role": "user", "content": "a"}] * 40_000}
    ),
    "10,000 calls in a message": posts(
        CHAT,
        lambda: chat(
            messages=[
                {"role": "user", "content": "a"},
                {"role": "assistant", "tool_calls": [CALL] * 10_000},
            ]
        ),
    ),
    "2 MB to tokenise": posts(TOKENIZE, lambda: {"model": "llama", "prompt": "é一" * 150_000}),
    "messages to tokenise": posts(
        TOKENIZE, lambda: {"model": "demo", "messages": [{"role": "user", "content": "a"}] * 40_000}
    ),
    "900,000 ids to read": posts(
        "/detokenize", lambda: {"model": "llama", "tokens": [5] * 900_000}
    ),
    # Schemas, patterns, enums, tools.
    "multipleOf": posts(
        CHAT,
        lambda: schema(
            {"type": "integer", "multipleOf": 999_983, "minimum": BIG[0], "maximum": BIG[1]}
        ),
    ),
    "pattern b{1000}, thrice": posts(CHAT, lambda: pattern("^((b{1000}){1000}){1000}$")),
    "pattern (a+)+": posts(CHAT, lambda: pattern("^(a+)+$")),
    "pattern with a far choice": posts(CHAT, lambda: pattern("^[ab]*a[ab]{500}$")),
    "pattern of classes": posts(CHAT, lambda: pattern("^(\\p{L}{1,500}\\p{N}{1,500}){1,500}$")),
    "pattern of alternatives": posts(
        CHAT, lambda: pattern("^(" + "|".join(f".*{i}.*" for i in range(300)) + ")$")
    ),
    "pattern of parentheses": posts(CHAT, lambda: pattern("(" * 5000 + "a" + ")" * 5000)),
    "an enum of 6,000": posts(CHAT, lambda: schema({"enum": [f"v{i}" for i in range(6000)]})),
    "an enum of long texts": posts(
        CHAT, lambda: schema({"enum": ["x" * 600 + str(i) for i in range(100)]})
    ),
    "anyOf in allOf": posts(
        CHAT,
        lambda: schema(
            {
                "allOf": [
                    {"anyOf": [obj({f"{k}{i}": {"type": "integer"}}) for k in "ab"]}
                    for i in range(200)
                ]
            }
        ),
    ),
    "ambiguous alternatives": posts(
        CHAT,
        lambda: schema(
            {"anyOf": [obj({"a": {"type": "string"}, f"b{i}": {}}) for i in range(400)]},
            max_tokens=300,
        ),
    ),
    "1,500 properties": posts(
        CHAT, lambda: schema(obj({f"p{i}": {"type": "string"} for i in range(1500)}))
    ),
    "lists of 1,000 in lists": posts(
        CHAT,
        lambda: schema(
            nested(
                5,
                lambda x: {"type": "array", "items": x, "minItems": 1000, "maxItems": 1000},
                {"type": "integer"},
            )
        ),
    ),
    "a text of 1e9 letters": posts(CHAT, lambda: schema({"type": "string", "minLength": 10**9})),
    "a schema that is itself": posts(CHAT, lambda: schema({"$ref": "#"})),
    "a schema 450 deep": posts(
        CHAT, lambda: schema(nested(450, lambda x: {"type": "array", "items": x}, {}))
    ),
    "a grammar's own settings": posts(
        CHAT,
        lambda: schema({"x-guidance": {"whitespace_pattern": "(a|b)*(a|b)*c{0,9999}"}} | obj({})),
    ),
    "another schema each time": lambda a: [
        a.post(CHAT, schema(obj({f"p{i}": {"enum": [str(i)]}}), max_tokens=2))
        for i in range(100)
        if time.monotonic() < a.end
    ],
    "128 tools with patterns": posts(
        CHAT,
        lambda: chat(
            tools=[
                tool(
                    obj({"a": {"type": "string", "pattern": f"^(a{{1,99}}b){{1,{i + 1}}}$"}}),
                    f"f{i}",
                )
                for i in range(128)
            ],
            tool_choice="required",
        ),
    ),
    "a tool 300 deep": posts(
        CHAT,
        lambda: chat(
            tools=[tool(nested(300, lambda x: obj({"a": x}), {}))], tool_choice="required"
        ),
    ),
    # Stops, biases, numbers of prompts and samples.
    "16 long stops": posts(
        COMPLETIONS, lambda: complete(["Sort:"] * 16, stop=["a" * 250 + str(i) for i in range(16)])
    ),
    "150,000 biases": posts(
        COMPLETIONS, lambda: complete("a", logit_bias={str(i): 1 for i in range(150_000)})
    ),
    "128 prompts with biases": posts(
        COMPLETIONS,
        lambda: complete(["Sort:"] * 128, logit_bias={str(i): -1 for i in range(200)}),
    ),
    "128 prompts": posts(COMPLETIONS, lambda: complete([f"Sort: {i}" for i in range(128)])),
    "128 long prompts": posts(
        COMPLETIONS, lambda: complete([[i + 5] * 480 for i in range(128)], max_tokens=20)
    ),
    "128 prompts, 16 answers": posts(COMPLETIONS, lambda: complete(["Sort:"] * 128, n=16)),
    "answers with log probabilities": posts(
        COMPLETIONS, lambda: complete(["Sort:"] * 8, n=16, logprobs=20)
    ),
    "echo with log probabilities": posts(
        COMPLETIONS,
        lambda: complete([[7] * 400] * 128, max_tokens=0, echo=True, logprobs=20),
    ),
    # Answers that are large when they are there: these are waited for.
    "answers, each token with 20 more": posts(
        COMPLETIONS, lambda: complete(["Sort:"] * 4, n=16, logprobs=20, max_tokens=40)
    ),
    "chats, each token with 20 more": posts(
        CHAT, lambda: chat(n=16, logprobs=True, top_logprobs=20, max_tokens=60)
    ),
    "echoes, each token with 20 more": posts(
        COMPLETIONS, lambda: complete([[7] * 400] * 12, max_tokens=0, echo=True, logprobs=20)
    ),
    "16 million log probabilities": posts(
        COMPLETIONS, lambda: complete(["Sort:"] * 128, n=16, logprobs=20)
    ),
    "copies of an answer": posts(
        COMPLETIONS,
        lambda: complete(["Sort:"] * 16, n=16, temperature=0, logprobs=20, max_tokens=30),
    ),
    "maps of 500 tokens": posts(
        LOOK, lambda: {"model": "demo", "input": [5] * 500, "encoding_format": "base64"}
    ),
    "maps that nobody reads": unread_maps,
    "128 prompts, 32 beams": posts(
        COMPLETIONS, lambda: complete([f"Sort: {i}" for i in range(128)], beams=32, n=16)
    ),
    "priority over others": posts(
        COMPLETIONS, lambda: complete([f"Sort: {i}" for i in range(64)], priority=1000)
    ),
    "numbers of rows": counts_of_rows,
    # Connections and bodies.
    "60 streams": streams,
    "slow readers": slow_readers,
    "clients that leave a chat": leavers(COMPLETIONS, complete("Sort:", n=16)),
    "clients that leave texts": leavers(E, {"model": "demo", "input": [LINE] * 1000}, 20),
    "1,500 idle connections": idle(b"", 1500),
    "500 heads that never end": idle(b"POST /v1/completions HTTP/1.1\r\nHost: lo", 500),
    "300 bodies that never end": idle(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 2000000\r\n\r\n" + b'{"prompt": "' + b"a" * 100_000,
        300,
    ),
    "a body of 100 MB": posts(CHAT, lambda: b"a" * (100 << 20)),
    "100 MB in chunks": posts(CHAT, lambda: (b"a" * (1 << 20) for _ in range(100))),
    "a million brackets": deep(CHAT, b"[", 1_000_000),
    "a schema 100,000 deep": deep(CHAT, b'{"items":', 100_000, b"}"),
    "a million digits": posts(
        COMPLETIONS, lambda: b'{"model":"demo","prompt":"a","seed":' + b"9" * 1_000_000 + b"}"
    ),
    "bytes that are no text": posts(CHAT, lambda: b'{"model":"\xff\xfe\\ud800' + b"\0" * 1000),
    "64 KB of headers": lambda a: a.ask("GET", "/health", headers={"x": "a" * 60_000}),
    "what it takes, 150 times": flood("/openapi.json"),
    "its metrics, 150 times": flood("/metrics"),
}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
# Of these the suite takes its short form.
NASTIEST = (
    *("2,048 texts to embed", "texts and ids mixed", "a source of 900,000 tokens"),
    *("2 MB of words", "150,000 special tokens", "a look at 250 tokens", "multipleOf"),
    *("pattern b{1000}, thrice", "128 prompts, 16 answers", "128 long prompts", "60 streams"),
)


# --- the walk over the schema -------------------------------------------------------------------------------------


# What a body must have beside what its schema says.
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "demo", "prompt": "a", "max_tokens": 2},
    CHAT: chat(max_tokens=2),
    RESPONSES: {"model": "demo", "input": "a", "max_output_tokens": 2},
    E: {"model": "words", "input": "a dog"},
    TRANSLATE: {"model": "t5", "input": "a dog", "max_tokens": 2, "beams": 1},
    CLASSIFY: {"model": "labels", "input": "a dog"},
    FILL: {"model": "words", "input": "a [MASK]"},
    LOOK: {"model": "demo", "input": "a"},
    TOKENIZE: {"model": "demo", "prompt": "a"},
    "/detokenize": {"model": "demo", "tokens": [5]},
}
HUGE = "@@huge@@"  # stands for a number that JSON can say and Python's json will not
# Wrong types, numbers out of any range, nothing, much, and deep.
HOSTILE: list[Any] = [
    *(None, True, 0, -1, 10**18, 1e308, float("nan"), float("-inf"), HUGE),
    *("", "a" * 200_000, "\ud800", "\0", [], {}, [[]], ["a"] * 20_000, [0] * 20_000),
    *({str(i): i for i in range(10_000)}, {"a": {"b": [None]}}, nested(400, lambda x: [x], 1)),
    nested(400, lambda x: {"a": x}, "b"),
]
OTHERS = ("demo", "llama", "words", "labels", "t5", "eyes", "none")


def example(part: Any, parts: dict[str, Any]) -> Any:
    """The smallest value that a schema allows."""
    while "$ref" in part:
        part = parts[part["$ref"].rpartition("/")[2]]
    if "anyOf" in part:
        return example(part["anyOf"][0], parts)
    if "enum" in part:
        return part["enum"][0]
    if "const" in part:
        return part["const"]
    kind = part.get("type", "object")
    if kind == "object":
        properties = part.get("properties", {})
        return {k: example(properties[k], parts) for k in part.get("required", ())}
    if kind == "array":
        return [example(part.get("items", {}), parts)] * max(1, part.get("minItems", 0))
    return {"string": "a", "boolean": False, "null": None}.get(kind, part.get("minimum", 0))


def places(part: Any, parts: dict[str, Any], depth: int = 0) -> Iterator[tuple[Any, ...]]:
    """Every field of a schema, and those inside it: keys, and 0 for the items of a list; with them the smallest value
    of what holds it."""
    while "$ref" in part:
        part = parts[part["$ref"].rpartition("/")[2]]
    for each in part.get("anyOf", ()):
        yield from places(each, parts, depth)
    for key, inner in part.get("properties", {}).items() if depth < 6 else ():
        yield (key,)
        yield from ((key, *rest) for rest in places(inner, parts, depth + 1))
    if isinstance(part.get("items"), dict) and depth < 6:
        yield (0,)
        yield from ((0, *rest) for rest in places(part["items"], parts, depth + 1))


def at(part: Any, place: tuple[Any, ...], parts: dict[str, Any]) -> Any:
    """The schemas at a place, whichever of the alternatives they are in: the first that has it."""
    while "$ref" in part:
        part = parts[part["$ref"].rpartition("/")[2]]
    if not place:
        return part
    inner = part.get("items") if place[0] == 0 else part.get("properties", {}).get(place[0])
    if isinstance(inner, dict):
        found = at(inner, place[1:], parts)
        if found is not None:
            return found
    each = (at(x, place, parts) for x in part.get("anyOf", ()))
    return next((x for x in each if x is not None), None)


def put(body: Any, place: tuple[Any, ...], value: Any, part: Any, parts: dict[str, Any]) -> Any:
    """A body with a value at a place; what lies on the way is made as small as its schema allows."""
    body = copy.deepcopy(body)
    here = body
    for i, key in enumerate(place):
        if i == len(place) - 1:
            inner = value
        else:
            following = place[i + 1]
            inner = here.get(key) if isinstance(here, dict) else here[0] if here else None
            if not isinstance(inner, list if following == 0 else dict):
                holder = holding(part, place[: i + 1], following, parts)
                inner = example(holder, parts) if holder else [None] if following == 0 else {}
        if isinstance(here, list):
            here[:] = [inner]
        else:
            here[key] = inner
        here = inner
    return body


def holding(part: Any, place: tuple[Any, ...], key: Any, parts: dict[str, Any]) -> Any:
    """Of the alternatives at a place the one that has a field."""
    found = at(part, place, parts) or {}
    options = [found, *found.get("anyOf", ())]
    while any("$ref" in x for x in options):
        options = [parts[x["$ref"].rpartition("/")[2]] if "$ref" in x else x for x in options]
    wanted = "items" if key == 0 else key
    holds = (x for x in options if (x if key == 0 else x.get("properties", {})).get(wanted))
    return next(holds, None)


def walk(port: int) -> list[tuple[str, tuple[Any, ...], Any]]:
    """Every endpoint, every field of its body, and every hostile value."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/openapi.json")
    about = json.loads(connection.getresponse().read())
    connection.close()
    parts, found = about["components"]["schemas"], list[tuple[str, tuple[Any, ...], Any]]()
    for path, methods in about["paths"].items():
        if "post" not in methods or path.startswith("/admin/"):
            continue
        part = methods["post"]["requestBody"]["content"]["application/json"]["schema"]
        base = BODIES.get(path) or example(part, parts) | {"model": "demo"}
        for place in dict.fromkeys(places(part, parts)):
            values = [*HOSTILE, *(OTHERS if place == ("model",) else ())]
            found += [(path, place, put(base, place, value, part, parts)) for value in values]
    return found


def walked(a: Attacker, share: int, shares: int, every: int) -> None:
    """A part of the walk: one in `every` of what falls to this share."""
    for path, place, body in walk(a.port)[share::shares][::every]:
        status = a.post(path, dumped(body).replace(dumped(HUGE), b"1" + b"0" * 400))
        if status >= 400:
            a.found[-1] = status, f"{path} {place} {a.found[-1][1]}"
