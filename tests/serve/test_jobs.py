"""Work between the steps of an engine: cut into pieces, taken in turn, ended when its client leaves or it is late."""

import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.decode.engine import Engine
from regard.layers import Classify
from regard.models.adapt import with_head
from regard.see.probe import Recorder
from regard.serve import answers, tasks
from regard.serve.app import App
from regard.serve.edge import Limits
from regard.serve.model_worker import PAUSE, Job, ModelWorker, Ran
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
    worker = client.app.workers[body["model"]]
    pieces, run = list[int](), Job.run

    def counted(job: Job) -> bool:
        pieces.append(0)
        return run(job)

    def reading(call: Any) -> Any:
        def read(ids: torch.Tensor, *rest: Any, **more: Any) -> Any:
            if threading.current_thread() is worker.thread and pieces:
                pieces[-1] += ids.numel()
            return call(ids, *rest, **more)

        return read

    monkeypatch.setattr(Job, "run", counted)
    for call in ("hidden", "encode"):
        if hasattr(worker.model, call):
            monkeypatch.setattr(worker.model, call, reading(getattr(worker.model, call)))
    client.post(path, body)
    assert len(pieces) >= 2 and 0 < max(pieces) <= worker.places
    assert worker.requests == worker.tokens == 0


def slowed(worker: ModelWorker, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every forward of a model takes 20 ms more; how many rows each of them had."""
    rows, real = list[int](), worker.model.hidden

    def slow(ids: torch.Tensor, *rest: Any, **more: Any) -> Any:
        rows.append(len(ids))
        time.sleep(0.02)
        return real(ids, *rest, **more)

    monkeypatch.setattr(worker.model, "hidden", slow)
    return rows


LARGE = TASKS["vectors of an encoder"][1]


def test_small_jobs_do_not_wait_for_large_ones(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During the first piece of a large one a small one comes, and ends before the large one's
    fourth."""
    worker, ended, pieces = client.app.workers["words"], list[str](), list[int]()
    real = worker.model.hidden

    def slow(ids: torch.Tensor, *rest: Any, **more: Any) -> Any:
        pieces.append(len(ids))
        end = time.monotonic() + 20
        while len(ids) > 1 and time.monotonic() < end:
            if ended or (len(pieces) <= 4 and worker.requests == 2):
                break
            time.sleep(0.001)
        return real(ids, *rest, **more)

    monkeypatch.setattr(worker.model, "hidden", slow)

    def ask(name: str, body: dict[str, Any]) -> None:
        client.post("/v1/embeddings", body)
        ended.append(name)

    large = threading.Thread(target=ask, args=("large", LARGE))
    large.start()
    while not pieces:
        assert large.is_alive()
    small = threading.Thread(target=ask, args=("small", {"model": "words", "input": "a dog"}))
    small.start()
    small.join()
    large.join()
    assert ended == ["small", "large"] and 1 in pieces[:3]


def test_streams_go_on_beside_a_job(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two pieces the engine takes a step."""
    worker = client.app.workers["demo"]
    assert worker.engine is not None
    order, step, run = list[str](), worker.engine.step, Job.run
    monkeypatch.setattr(Job, "run", lambda job: order.append("piece") or run(job))  # type: ignore[func-returns-value]
    monkeypatch.setattr(worker.engine, "step", lambda: order.append("step") or step())  # type: ignore[func-returns-value]
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
    worker = client.app.workers["words"]
    rows = slowed(worker, monkeypatch)
    body = json.dumps(LARGE).encode()
    sock = socket.create_connection(("127.0.0.1", client.port))
    sock.sendall(head(body, path="/v1/embeddings") + body)
    while not rows:
        time.sleep(0.002)
    sock.close()
    client.idle()
    # As many rounds as the whole job would need.
    for _ in LARGE["input"][::50]:
        passed = threading.Event()
        worker.inbox.put(passed.set)
        passed.wait()
    assert sum(rows) < len(LARGE["input"]) / 2
    assert worker.requests == worker.tokens == 0
    client.post("/v1/embeddings", {"model": "words", "input": "a dog"})
    assert not worker.jobs


def test_a_job_that_is_late_is_told(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = slowed(client.app.workers["words"], monkeypatch)
    monkeypatch.setattr(client.app, "limits", Limits(deadline=0.05))
    error = client.post("/v1/embeddings", LARGE, 400)["error"]
    assert error["code"] == "deadline_exceeded" and sum(rows) < len(LARGE["input"])


def test_what_waits_is_bounded_in_tokens(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = client.app.workers["words"]
    slowed(worker, monkeypatch)
    monkeypatch.setattr(client.app, "limits", Limits(queue_tokens=1000))
    # Alone a request may be larger than that.
    large = threading.Thread(target=client.post, args=("/v1/embeddings", LARGE))
    large.start()
    while not worker.requests:
        assert large.is_alive()
    status, headers, content = client.request("POST", "/v1/embeddings", LARGE)
    assert status == 429 and int(headers["retry-after"]) >= 1
    assert json.loads(content)["error"]["code"] == "queue_full"
    large.join()
    assert worker.requests == worker.tokens == 0
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
        worker = client.app.workers["demo"]
        if measuring:
            idle.append(engine.idle and worker.inbox.empty() and not worker.jobs)
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
            assert client.app.workers["demo"].thread.is_alive()
        assert all(idle)
        assert all(b - a > PAUSE * took for a, b in itertools.pairwise(busy))
        client.app.workers["demo"].warm = False
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
    # The next test sees none of it.
    client.idle()


def test_answers_are_bounded_together_and_given_back(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that nobody reads is held, part by part, no longer than its deadline; there is room for small ones."""
    monkeypatch.setattr(client.app, "limits", Limits(bodies=300_000, deadline=2.0))
    for sock in client.server.servers[0].sockets:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    large = {"model": "demo", "input": ["a"] * 400}
    body = json.dumps(large).encode()
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(("127.0.0.1", client.port))
        reader.sendall(head(body, path="/v1/embeddings") + body)
        while not client.app.held.bytes:
            time.sleep(0.002)
        held = client.app.held.bytes
        status, headers, content = client.request("POST", "/v1/embeddings", large)
        assert status == 429 and int(headers["retry-after"]) >= 1
        assert json.loads(content)["error"]["code"] == "queue_full"
        client.post("/v1/embeddings", {"model": "demo", "input": "a dog"})
        connection = next(c for c in client.server.server_state.connections if c.cycle is not None)
        assert client.app.held.bytes == held > 2 * connection.transport.get_write_buffer_size()
        # Who reads, if slowly, has the time of an answer.
        while client.app.held.bytes:
            with suppress(ConnectionError):
                reader.recv(8192)
            time.sleep(0.02)
    client.idle()
    monkeypatch.setattr(client.app, "limits", Limits(bodies=300_000))
    assert len(client.post("/v1/embeddings", large)["data"]) == 400
    assert client.app.held.bytes == 0


def test_the_prompts_of_a_client_come_one_after_the_other(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has as late a turn as rows of the same client come before it; its own rows count too."""
    engine, turns = client.app.workers["demo"].engine, list[int]()
    assert engine is not None
    submit = engine.submit
    monkeypatch.setattr(engine, "submit", lambda r: turns.append(r.turn) or submit(r))  # type: ignore[func-returns-value]
    body = {"model": "demo", "prompt": ["a", "b", "c"], "max_tokens": 1}
    for more, expected in (({}, [0, 1, 2]), ({"n": 2}, [1, 3, 5]), ({"beams": 4}, [3, 7, 11])):
        turns.clear()
        client.post("/v1/completions", body | more)
        assert turns == expected


# Log probabilities of every kind: of many tokens, by a body whose answers have them.
LISTED: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"model": "demo", "prompt": "a", "logprobs": 20, "n": 2}),
    "copies": ("/v1/completions", {"model": "demo", "prompt": "a", "logprobs": 3, "n": 2, "temperature": 0}),
    "beams": ("/v1/completions", {"model": "demo", "prompt": "a", "logprobs": 0, "beams": 2}),
    "echo": ("/v1/completions", {"model": "demo", "prompt": [7] * 90, "logprobs": 5, "echo": True, "max_tokens": 0}),
    "chat": ("/v1/chat/completions", {"model": "demo", "messages": [{"role": "user", "content": "a"}],
        "logprobs": True, "top_logprobs": 9}),
    "translations": ("/v1/translations", {"model": "t5", "input": "a dog", "beams": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", LISTED)
def test_log_probabilities_are_written_beside_the_event_loop(
    client: Client, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    named, shown = list[str](), ModelWorker.shown
    monkeypatch.setattr(answers, "MANY", 80)

    def watched(worker: ModelWorker, token: int) -> str:
        named.append(threading.current_thread().name)
        return shown(worker, token)

    monkeypatch.setattr(ModelWorker, "shown", watched)
    path, body = LISTED[name]
    more = {"max_tokens": 90} | ({} if path == "/v1/translations" else {"ignore_eos": True})
    client.post(path, more | body)
    assert len(named) >= 90 and {each.partition("_")[0] for each in named} == {"worker"}


NUMBERS = {name: LISTED[name] for name in LISTED if name != "translations"} | {
    name: TASKS[name]
    for name in ("vectors of a decoder", "vectors of a source", "labels", "masks", "maps", "views")
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_answers_are_bounded_together_and_given_back(
    client: Client, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path, body = NUMBERS[name]
    worker = client.app.workers[body["model"]]
    monkeypatch.setattr(client.app, "limits", Limits(numbers=25))
    if name in LISTED:
        error = client.post(path, {"max_tokens": 30, "ignore_eos": True} | body, 400)["error"]
        assert error["param"] == "logprobs"
        monkeypatch.setattr(client.app, "limits", Limits(numbers=10_000))
    seen, room = list[int](), worker.room

    def watched(tokens: int, numbers: int = 0) -> Any:
        seen.append(numbers)
        return room(tokens, numbers)

    monkeypatch.setattr(worker, "room", watched)
    # Alone it may be as large as it is.
    client.post(path, body)
    assert seen[0] > 0 and worker.numbers == 0
    monkeypatch.setattr(worker, "numbers", client.app.limits.numbers)
    status, headers, content = client.request("POST", path, body)
    assert status == 429 and headers["retry-after"] and b"queue_full" in content
    if worker.engine is not None:
        few = {"model": body["model"], "prompt": [5], "max_tokens": 1}
        assert client.post("/v1/completions", few)["choices"]


@pytest.mark.parametrize("name", ["maps", "views"])
def test_maps_are_refused_before_they_are_made(
    client: Client, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """All together: those of the layers before the one that is too much are given back."""
    path, body = TASKS[name]
    made, real = list[int](), Recorder._maps

    def counted(self: Recorder, *more: Any) -> Any:
        maps = real(self, *more)
        made.append(maps["weight"].numel())
        return maps

    monkeypatch.setattr(Recorder, "_maps", counted)
    client.post(path, body)
    most = sum(made) - 1
    made.clear()
    monkeypatch.setattr(tasks, "CELLS", most)
    assert client.post(path, body, 400)["error"]["param"] == "layers"
    assert sum(made) < most


def test_what_can_be_looked_into_is_bounded() -> None:
    app = App({})
    try:
        for i in range(300):
            app.remember(str(i), Ran("", "demo", [([1] * 60_000, [2])], 60_001))
        assert len(app.ran) == 17 and "299" in app.ran
        app.remember("large", Ran("", "demo", [], 1 << 17))
        assert "large" not in app.ran
        for i in range(300):
            app.remember(str(i), Ran("", "demo", [([1], [2])], 2))
        assert len(app.ran) == 256
    finally:
        app.pool.shutdown()


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
    monkeypatch.setattr(type(client.app.workers["t5"].tokenizer), "encode", None)
    assert client.post(path, {"model": "demo"} | body, 400)["error"]["param"] == param
