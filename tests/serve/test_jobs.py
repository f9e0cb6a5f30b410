"""Work between the steps of an engine: cut into pieces, taken in turn, ended when its client leaves or it is late."""

import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.decode.engine import Engine
from regard.layers import Classify
from regard.models.adapt import with_head
from regard.serve.edge import Limits
from regard.serve.host import PAUSE, Host, Job
from tests.serve.running import Client, running
from tests.serve.test_faults import LONG, SHORT, head
from tests.test_cli import SMALL, folder, put
from tests.text import tiny

# What each task is asked for; more than a step reads, where one request may ask for so much.
WORDS = "the dog in the park"
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "vectors of a decoder": ("/v1/embeddings", {"model": "demo", "input": [WORDS * 8] * 100}),
    "vectors of ids": ("/v1/embeddings", {"model": "demo", "input": [[5] * 100] * 100}),
    "vectors of an encoder": ("/v1/embeddings", {"model": "words", "input": [WORDS] * 400}),
    "vectors of a source": ("/v1/embeddings", {"model": "t5", "input": [WORDS * 4] * 100}),
    "labels": ("/v1/classify", {"model": "labels", "input": [WORDS] * 400}),
    "masks": ("/v1/fill", {"model": "words", "input": "[MASK] " * 20, "top": 300}),
    "maps": ("/v1/look", {"model": "demo", "input": WORDS * 8}),
    "views": ("/v1/look", {"model": "demo", "input": WORDS * 8, "encoding_format": "base64"}),
    "alignment": (
        "/v1/translations",
        {"model": "t5", "input": [WORDS] * 20, "beams": 1, "max_tokens": 4, "align": True},
    ),
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    home, size = tmp_path_factory.mktemp("models"), dict(vocab=300, max_len=24, dropout=0.0)
    torch.manual_seed(0)
    words = regard.build("bert-base", **size, **SMALL)
    labels = with_head(regard.build("bert-base", **size, **SMALL), Classify(3))
    folders: dict[str, str | Path] = {"demo": "demo", "t5": folder("t5")}
    folders["words"] = put(words.save(home / "words"), tiny.bert())
    folders["labels"] = put(labels.save(home / "labels"), tiny.bert())
    with running(folders) as client:
        yield client


@pytest.mark.parametrize("name", TASKS)
def test_no_piece_reads_more_than_a_step(
    client: Client, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path, body = TASKS[name]
    host = client.app.hosts[body["model"]]
    pieces, run = list[int](), Job.run

    def counted(job: Job) -> bool:
        pieces.append(0)
        return run(job)

    def reading(call: Any) -> Any:
        def read(ids: torch.Tensor, *rest: Any, **more: Any) -> Any:
            if threading.current_thread() is host.thread and pieces:
                pieces[-1] += ids.numel()
            return call(ids, *rest, **more)

        return read

    monkeypatch.setattr(Job, "run", counted)
    for call in ("hidden", "encode"):
        if hasattr(host.model, call):
            monkeypatch.setattr(host.model, call, reading(getattr(host.model, call)))
    client.post(path, body)
    assert len(pieces) >= 2 and 0 < max(pieces) <= host.places
    assert host.requests == host.tokens == 0


def slowed(host: Host, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every forward of a model takes 20 ms more; how many rows each of them had."""
    rows, real = list[int](), host.model.hidden

    def slow(ids: torch.Tensor, *rest: Any, **more: Any) -> Any:
        rows.append(len(ids))
        time.sleep(0.02)
        return real(ids, *rest, **more)

    monkeypatch.setattr(host.model, "hidden", slow)
    return rows


LARGE = TASKS["vectors of an encoder"][1]


def test_small_jobs_do_not_wait_for_large_ones(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, ended = client.app.hosts["words"], list[str]()
    slowed(host, monkeypatch)

    def ask(name: str, body: dict[str, Any]) -> None:
        client.post("/v1/embeddings", body)
        ended.append(name)

    large = threading.Thread(target=ask, args=("large", LARGE))
    large.start()
    while not host.jobs:
        assert large.is_alive()
    small = threading.Thread(target=ask, args=("small", {"model": "words", "input": "a dog"}))
    small.start()
    small.join()
    large.join()
    assert ended == ["small", "large"]


def test_streams_go_on_beside_a_job(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two pieces the engine takes a step."""
    host = client.app.hosts["demo"]
    assert host.engine is not None
    order, step, run = list[str](), host.engine.step, Job.run
    monkeypatch.setattr(Job, "run", lambda job: order.append("piece") or run(job))  # type: ignore[func-returns-value]
    monkeypatch.setattr(host.engine, "step", lambda: order.append("step") or step())  # type: ignore[func-returns-value]
    long = {"model": "demo", "prompt": "Sort:", "max_tokens": 200, "logit_bias": {"0": -100}}
    stream = threading.Thread(target=client.post, args=("/v1/completions", long))
    stream.start()
    while "step" not in order:
        assert stream.is_alive()
    client.post(*TASKS["vectors of a decoder"])
    stream.join()
    beside = order[order.index("piece") : len(order) - order[::-1].index("step")]
    assert "piece piece" not in " ".join(beside)


def test_a_job_ends_when_its_client_leaves(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    host = client.app.hosts["words"]
    rows = slowed(host, monkeypatch)
    body = json.dumps(LARGE).encode()
    sock = socket.create_connection(("127.0.0.1", client.port))
    sock.sendall(head(body, path="/v1/embeddings") + body)
    while not rows:
        time.sleep(0.002)
    sock.close()
    client.idle()
    assert sum(rows) < len(LARGE["input"]) / 2
    assert host.requests == host.tokens == 0
    client.post("/v1/embeddings", {"model": "words", "input": "a dog"})
    assert not host.jobs


def test_a_job_that_is_late_is_told(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = slowed(client.app.hosts["words"], monkeypatch)
    monkeypatch.setattr(client.app, "limits", Limits(deadline=0.05))
    error = client.post("/v1/embeddings", LARGE, 400)["error"]
    assert error["code"] == "deadline_exceeded" and sum(rows) < len(LARGE["input"])


def test_what_waits_is_bounded_in_tokens(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    host = client.app.hosts["words"]
    slowed(host, monkeypatch)
    monkeypatch.setattr(client.app, "limits", Limits(queue_tokens=1000))
    # Alone a request may be larger than that.
    large = threading.Thread(target=client.post, args=("/v1/embeddings", LARGE))
    large.start()
    while not host.requests:
        assert large.is_alive()
    status, headers, content = client.request("POST", "/v1/embeddings", LARGE)
    assert status == 429 and int(headers["retry-after"]) >= 1
    assert json.loads(content)["error"]["code"] == "queue_full"
    large.join()
    assert host.requests == host.tokens == 0
    client.post("/v1/embeddings", {"model": "words", "input": "a dog"})


@pytest.mark.parametrize("name", ["vectors of a decoder", "labels", "masks", "maps"])
def test_a_text_that_cannot_be_cut_is_bounded(
    client: Client, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(client.app, "limits", Limits(whole=4))
    path, body = TASKS[name]
    error = client.post(path, body, 400)["error"]
    assert error["param"] == "input" and "at most 4 in one piece" in error["message"]


def test_nobody_waits_for_what_is_warmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are measured while nobody waits; where somebody does, graphs are recorded in little of the time."""
    idle, busy, took = list[bool](), list[float](), 0.02

    def warm(engine: Engine, measuring: bool = True) -> bool:
        host = client.app.hosts["demo"]
        if measuring:
            idle.append(engine.idle and host.inbox.empty() and not host.jobs)
        else:
            busy.append(time.monotonic())
        time.sleep(took)
        return True

    with running({"demo": "demo"}) as client:
        expected = client.post("/v1/completions", SHORT)["choices"]
        # As if much were to be done.
        monkeypatch.setattr(Engine, "warm", warm)
        monkeypatch.setattr(Engine, "cold", True)
        thread = threading.Thread(target=client.post, args=("/v1/completions", LONG))
        thread.start()
        while thread.is_alive():
            assert client.post("/v1/completions", SHORT)["choices"] == expected
        while not idle:
            assert client.app.hosts["demo"].thread.is_alive()
        assert all(idle)
        assert all(b - a > PAUSE * took for a, b in itertools.pairwise(busy))
        client.app.hosts["demo"].warm = False
        assert client.request("GET", "/ready")[0] == 503
        monkeypatch.setattr(Engine, "cold", False)
        assert client.post("/v1/completions", SHORT)["choices"] == expected
        assert client.request("GET", "/ready")[0] == 200


def test_bodies_are_bounded_together_and_given_back(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large ones are told to come back; for small ones there is always room."""
    monkeypatch.setattr(client.app, "limits", Limits(bodies=50_000, read_timeout=60.0))
    unfinished = b'{"model": "words", "input": "' + b"a" * 150_000
    sock = socket.create_connection(("127.0.0.1", client.port))
    sock.sendall(head(unfinished + b" ", path="/v1/embeddings") + unfinished)
    while not client.app.held.bytes:
        time.sleep(0.002)
    status, headers, content = client.request("POST", "/v1/embeddings", unfinished + b'"}')
    assert status == 429 and int(headers["retry-after"]) >= 1
    assert json.loads(content)["error"]["code"] == "queue_full"
    client.post("/v1/embeddings", {"model": "words", "input": "a dog"})
    sock.close()
    client.idle()
    assert client.app.held.bytes == 0
    # Alone it may be larger than all together; its text is too long for the model.
    assert client.request("POST", "/v1/embeddings", unfinished + b'"}')[0] == 400


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USER = {"role": "user", "content": "a"}
MANY: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": [USER] * 600}, "messages"),
    (
        "/v1/chat/completions",
        {"messages": [USER, {"role": "assistant", "tool_calls": [CALL] * 600}]},
        "messages",
    ),
    ("/v1/responses", {"input": [USER] * 600}, "input"),
    ("/tokenize", {"messages": [USER] * 600}, "messages"),
    (
        "/v1/completions",
        {"prompt": "a", "logit_bias": {str(i): 1 for i in range(2000)}},
        "logit_bias",
    ),
    ("/v1/completions", {"prompt": ["a"] * 200}, "prompt"),
    ("/v1/translations", {"model": "t5", "input": ["a"] * 200}, "input"),
    ("/v1/translations", {"model": "t5", "input": "a " * 100_000}, "input"),
    ("/v1/completions", {"model": "t5", "prompt": [5] * 5000}, "prompt"),
]


@pytest.mark.parametrize("path, body, param", MANY)
def test_what_is_too_much_is_refused_before_it_is_read(
    client: Client, monkeypatch: pytest.MonkeyPatch, path: str, body: Any, param: str
) -> None:
    for name in ("regard.serve.answers.as_chat", "regard.serve.prompts.encode_chat"):
        monkeypatch.setattr(name, lambda *_, **__: pytest.fail("it was read"))
    monkeypatch.setattr(type(client.app.hosts["t5"].tokenizer), "encode", None)
    assert client.post(path, {"model": "demo"} | body, 400)["error"]["param"] == param
