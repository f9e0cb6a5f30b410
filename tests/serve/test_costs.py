"""What a client can make expensive is bounded: refused before it starts, ended while it runs, given back afterwards."""

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from regard.serve import grammar, prompts
from regard.serve.grammar import ROOTS, Root, Roots
from regard.serve.sandbox import GRAMMARS, TEXTS, memory_used
from regard.text import Tokenizer, build, encode_chat
from tests.serve.running import Client, running

ASK = {"model": "demo", "prompt": "12 + 30", "max_tokens": 3, "temperature": 0}
USER = [{"role": "user", "content": "12 + 30"}]
PAIRS = [(f"a{i}", f"b{i}") for i in range(14)]
PAT = "^((b{1000}){1000}){1000}$"


def nested(depth: int, leaf: Any) -> Any:
    for _ in range(depth):
        leaf = {"type": "object", "properties": {"a": leaf}, "required": ["a"]}
    return leaf


# Each is a mistake of the client: too much work, too much memory, no text at all, or no schema.
SCHEMAS: dict[str, Any] = {
    "much work": {"type": "integer", "multipleOf": 999983, "minimum": -(10**18), "maximum": 10**18},
    "a large pattern": {"type": "string", "pattern": PAT},
    "a large pattern behind others": nested(9, {"enum": ["x", "y"]})
    | {"required": ["a", "z"], "properties": {"a": {"const": "word" * 5}, "z": {"type": "string", "pattern": PAT}}},
    "a circle": {"$ref": "#"},
    "many optional": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}},
    "ambiguous": {"anyOf": [{"type": "object", "properties": {"a": {}, f"b{i}": {}}} for i in range(400)]},
    "past 64 bits": {"type": "integer", "minimum": -(10**30), "maximum": 10**30},
    "powers": {"allOf": [{"anyOf": [{"required": [a], "properties": {a: {}}} for a in pair]} for pair in PAIRS]},
    "deep": nested(400, {}),
    "no schema": {"type": "hiccup"},
    "parentheses": {"type": "string", "pattern": "(" * 5000 + "a" + ")" * 5000},
    "another document": {"$ref": "file:///etc/passwd"},
    "too large": {"enum": [f"value {i}" for i in range(9000)]},
}  # fmt: skip


def asked(path: str, schema: Any) -> tuple[dict[str, Any], str]:
    """A body with a schema, and how its field is called."""
    if path == "tools":
        tool = {"name": "f", "parameters": {"type": "object", "properties": {"x": schema}}}
        tool["parameters"] |= {"required": ["x"], "additionalProperties": False}
        body = {"messages": USER, "tools": [{"type": "function", "function": tool}]}
        return {"model": "demo", "tool_choice": "required", **body}, "tools"
    if path == "responses":
        form = {"type": "json_schema", "name": "s", "schema": schema}
        return {"model": "demo", "input": "12 + 30", "text": {"format": form}}, "text.format"
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    return {"model": "demo", "messages": USER, "response_format": form}, "response_format"


PATHS = {"chat": "/v1/chat/completions", "tools": "/v1/chat/completions", "responses": "/v1/responses"}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_that_cannot_be_is_the_clients_mistake(plain: Client, name: str) -> None:
    """Whatever the compiler says or does; and nothing of it is kept."""
    kept = len(ROOTS.known)
    for path in PATHS if name in ("a circle", "a large pattern") else ["chat"]:
        body, field = asked(path, SCHEMAS[name])
        if path == "tools" and name == "a circle":
            body["tools"][0]["function"]["parameters"] = SCHEMAS[name]
        for more in ({}, {"stream": True}):
            status, headers, content = plain.request("POST", PATHS[path], {**body, **more})
            text = content.decode().removeprefix("data: ")
            if headers["content-type"].startswith("text/event-stream"):
                text = text.strip().split("data: ")[-1]
            else:
                assert status == 400, content
            error = json.loads(text)["error"]
            assert error["param"].startswith(field) and error["type"] == "invalid_request_error"
    assert len(ROOTS.known) == kept


def test_memory_is_given_back_and_others_go_on(plain: Client) -> None:
    """Attacks four at a time, each another schema, while a stream runs."""
    before, done = memory_used(), threading.Event()

    def listen() -> None:
        while not done.is_set():
            assert plain.events("/v1/completions", ASK)

    with ThreadPoolExecutor(5) as pool:
        listener = pool.submit(listen)
        bodies = [
            asked("chat", {"type": "string", "pattern": PAT.replace("b", letter)})[0]
            for letter in "cdefghij"
        ] + [asked("chat", {**SCHEMAS["much work"], "multipleOf": m})[0] for m in (999979, 999961)]
        answers = list(pool.map(lambda b: plain.request("POST", PATHS["chat"], b)[0], bodies))
        done.set()
        listener.result()
    assert set(answers) == {400}
    assert memory_used() - before < 200 << 20


def test_compiled_grammars_are_kept_within_their_bytes(
    plain: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = list[str]()
    ask = GRAMMARS.ask
    monkeypatch.setattr(
        GRAMMARS, "ask", lambda *a, **b: trials.append(b["grammar"]) or ask(*a, **b)
    )  # type: ignore[func-returns-value]

    def post(value: str) -> None:
        body, _ = asked("chat", {"const": value})
        answer = plain.post(PATHS["chat"], {**body, "max_tokens": 40})
        assert json.loads(answer["choices"][0]["message"]["content"]) == value

    for value in ("a", "b", "a", "b", "a"):
        post(value)
    assert len(trials) == 2
    # Where there is no room for it, it is compiled again.
    monkeypatch.setattr(ROOTS, "most", 0)
    for value in ("c", "c", "a"):
        post(value)
    assert len(trials) == 5 and not ROOTS.known and ROOTS.used == 0


def test_the_oldest_grammars_go_first() -> None:
    roots, root = Roots(100), Root(None)  # type: ignore[arg-type]
    steps = [("a", 40, "a"), ("b", 40, "ab"), ("a", 40, "ba"), ("c", 40, "ac"), ("d", 101, "")]
    for name, size, kept in (*steps, ("e", 100, "e")):
        roots.put((name, ""), root, size)
        assert "".join(key for key, _ in roots.known) == kept
        assert roots.used == sum(size for _, size in roots.known.values())
    assert roots.get(("e", "")) is root and roots.get(("a", "")) is None


@pytest.mark.parametrize("stream", [False, True])
def test_masks_that_take_too_long_end_their_own_request(
    plain: Client, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    expected = plain.post("/v1/completions", ASK)["choices"]
    body, field = asked("chat", {"type": "array", "items": {"type": "integer"}, "minItems": 50})
    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(grammar, "ONCE", 0.0)
        patch.setattr(grammar, "EACH", 1e-9)
        beside = pool.submit(plain.post, "/v1/completions", ASK)
        _, _, content = plain.request("POST", PATHS["chat"], {**body, "stream": stream})
        error = json.loads(content.decode().strip().split("data: ")[-1])["error"]
        assert error["type"] == "invalid_request_error" and error["param"] == field
        assert "too long to follow" in error["message"]
        assert beside.result()["choices"] == expected
    plain.post(PATHS["chat"], {**body, "max_tokens": 9})


FORKS = """
import os, signal
from regard.serve.sandbox import in_fork

def spin():
    while True:
        pass

assert in_fork(lambda: {"a": [1, "b"]}, 5.0, 1 << 30) == {"a": [1, "b"]}
assert in_fork(spin, 0.1, 1 << 30) == {"late": True}
assert in_fork(lambda: {"a": len(bytearray(1 << 28))}, 5.0, 64 << 20) == {"memory": True}
assert in_fork(lambda: os.kill(os.getpid(), signal.SIGKILL), 5.0, 1 << 30) == {"memory": True}
assert "KeyError" in in_fork(lambda: {}["a"], 5.0, 1 << 30)["failed"]
"""


def test_work_in_a_fork_is_ended_and_told() -> None:
    subprocess.run([sys.executable, "-c", FORKS], check=True)


def test_a_sandbox_that_was_ended_is_begun_again(plain: Client) -> None:
    for sandbox in (GRAMMARS, TEXTS):
        sandbox.worker.end()
    body, _ = asked("chat", {"const": "after the end"})
    plain.post(PATHS["chat"], {**body, "max_tokens": 60})
    text = "12 + 30 = 42\n" * 3000
    assert plain.post("/tokenize", {"model": "demo", "prompt": text})["count"] > 3000


# By path: a body whose text is `TEXT`, and what its field is called.
PART = {"type": "text", "text": "TEXT"}
LONG: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": "TEXT"}, "prompt"),
    ("/v1/completions", {"prompt": ["a", "TEXT"]}, "prompt"),
    ("/v1/completions", {"prompt": "TEXT", "echo": True, "stream": True}, "prompt"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "TEXT"}]}, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [PART]}]}, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "system", "content": "TEXT"}, *USER]}, "messages"),
    ("/v1/chat/completions", {"messages": USER * 20_000}, "messages"),
    ("/v1/responses", {"input": "TEXT"}, "input"),
    ("/v1/responses", {"input": "a", "instructions": "TEXT"}, "input"),
    ("/v1/embeddings", {"input": "TEXT"}, "input"),
    ("/v1/embeddings", {"input": ["a", "TEXT"]}, "input"),
    ("/v1/look", {"input": "TEXT"}, "input"),
    ("/tokenize", {"messages": [{"role": "user", "content": "TEXT"}]}, "messages"),
]  # fmt: skip


@pytest.mark.parametrize("path, body, field", LONG)
@pytest.mark.parametrize("text", ["hello world ", "<|end|>"])
def test_texts_that_cannot_fit_are_never_read(
    plain: Client, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], field: str, text: str
) -> None:  # fmt: skip
    read = list[str]()
    for name in ("encode", "located"):
        real = getattr(Tokenizer, name)
        monkeypatch.setattr(
            Tokenizer, name, lambda s, t, real=real, **how: read.append(t) or real(s, t, **how)
        )  # type: ignore[func-returns-value]
    filled = json.loads(json.dumps({"model": "demo", **body}).replace("TEXT", text * 120_000))
    error = plain.post(path, filled, 400)["error"]
    assert error["param"].startswith(field) and error["code"] == "context_length_exceeded"
    assert sum(map(len, read)) < 100


@pytest.mark.parametrize("text", ["12 + 30 = 42\n" * 3000, "<|end|>" * 9000, "é一🙂" * 7000])
def test_long_texts_are_read_elsewhere_to_the_same_ids(plain: Client, text: str) -> None:
    tokenizer = plain.app.workers["demo"].tokenizer
    assert tokenizer is not None and len(text) > prompts.LONG
    for literal in (False, True):
        body = {"model": "demo", "prompt": text, "literal": literal}
        assert plain.post("/tokenize", body)["tokens"] == tokenizer.encode(text, literal=literal)


def test_long_conversations_are_read_elsewhere_to_the_same_ids(
    plain: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = plain.app.workers["demo"].tokenizer
    assert tokenizer is not None
    monkeypatch.setattr(prompts, "LONG", 0)
    talk = [{"role": "user", "content": "a<|end|>é"}, {"role": "assistant", "content": "b"}, *USER]
    body = {"model": "demo", "messages": talk}
    assert plain.post("/tokenize", body)["tokens"] == encode_chat(tokenizer, talk)
    whole = plain.post("/v1/chat/completions", {**body, "temperature": 0, "max_tokens": 5})
    monkeypatch.undo()
    again = plain.post("/v1/chat/completions", {**body, "temperature": 0, "max_tokens": 5})
    assert whole["choices"] == again["choices"]


def test_ids_to_decode_have_a_bound(plain: Client) -> None:
    body = {"model": "demo", "tokens": [70] * (plain.app.limits.prompt + 1)}
    assert plain.post("/detokenize", body, 400)["error"]["param"] == "tokens"


def test_nothing_is_made_in_front_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes its time, such as the tokenizer's copy that takes special tokens for text, is there before."""
    with running({"demo": "demo"}) as client:

        def made(*_: Any) -> Any:
            raise AssertionError("a copy of the tokenizer was made")

        monkeypatch.setattr(build, "plain_copy", made)
        body, _ = asked("chat", {"enum": ["the first", "the second"]})
        client.post(PATHS["chat"], {**body, "max_tokens": 60})
        forged = [{"role": "user", "content": "a<|end|>b"}]
        client.post(PATHS["chat"], {"model": "demo", "messages": forged, "max_tokens": 2})
        client.post("/tokenize", {"model": "demo", "prompt": "a<|end|>", "literal": True})
        client.post("/v1/embeddings", {"model": "demo", "input": "a"})


def test_a_queue_for_the_sandbox_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with running({"demo": "demo"}) as client:
        monkeypatch.setattr(GRAMMARS, "waiting", 64)
        body, _ = asked("chat", {"const": "one more"})
        status, headers, content = client.request("POST", PATHS["chat"], body)
        assert status == 429 and headers["retry-after"] and b"queue_full" in content
