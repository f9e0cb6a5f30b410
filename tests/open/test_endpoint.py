"""A stranger adds an endpoint by a row of ENDPOINTS: routes, refusals, bounds, /openapi.json and the walk of the
attackers know it."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("msgspec")
pytest.importorskip("uvicorn")

from regard.serve import schemas
from regard.serve.edge import Bound, Guard, HTTPRequest, Limits, new_key
from regard.serve.endpoints import ENDPOINTS, Endpoint
from regard.serve.model_worker import ModelWorker
from regard.serve.prompts import prompts_of
from tests.open.stranger import ROOT, added, home, promised
from tests.serve.attacks import walk
from tests.serve.running import Client, running
from tests.serve.test_faults import head

PATH = "/v1/surprise"
TEXTS = ["12 + 30", "Sort: river apple"]


class Surprise(schemas.Model):
    """POST /v1/surprise: how little a model expects a text, in nats for each of its tokens."""

    input: schemas.Prompts
    top: int | None = None


async def surprise(http: HTTPRequest, worker: ModelWorker, body: Surprise) -> Any:
    rows = await prompts_of(worker, body.input, "input")
    pieces = measured(worker.model, rows)
    found = await worker.work(http, pieces, [len(ids) for ids in rows], len(rows))
    worker.app.spent(http, worker, prompt=sum(map(len, rows)))
    return {"model": worker.name, "data": found[: body.top]}


def measured(model: Any, rows: list[list[int]]) -> Generator[None, None, list[float]]:
    found = []
    for row in rows:
        ids = torch.tensor([row])
        with torch.inference_mode():
            logprobs = model(ids)[0, :-1].log_softmax(-1)
        found.append(-logprobs.gather(-1, ids[0, 1:, None]).mean().item())
        yield
    return found


ROW = Endpoint("how little a text is expected", surprise, Surprise, Bound.PIECES, "completions")


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with added(ENDPOINTS, PATH, ROW), running({"demo": "demo"}) as client:
        yield client


@pytest.fixture
def slow(client: Client, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every forward takes 20 ms more; how many tokens each has read."""
    model = client.app.workers["demo"].model
    read: list[int] = []
    real = model.hidden

    def hidden(*given: Any, **more: Any) -> Any:
        read.append(given[0].numel())
        time.sleep(0.02)
        return real(*given, **more)

    monkeypatch.setattr(model, "hidden", hidden)
    return read


def test_added_endpoint_answers(client: Client) -> None:
    worker = client.app.workers["demo"]
    assert worker.tokenizer is not None
    rows = [worker.tokenizer.encode(text) for text in TEXTS]
    *_, want = _through(measured(worker.model, rows))
    answer = client.post(PATH, {"model": "demo", "input": TEXTS})
    assert answer == {"model": "demo", "data": pytest.approx(want)}
    assert len(client.post(PATH, {"model": "demo", "input": TEXTS, "top": 1})["data"]) == 1
    metrics = client.request("GET", "/metrics")[2].decode()
    assert f'regard_requests_total{{model="demo",path="{PATH}",status="200"}} 2' in metrics


def _through(pieces: Generator[None, None, Any]) -> Iterator[Any]:
    yield (yield from pieces)


@pytest.mark.parametrize(
    "body, param, said",
    [
        ({"input": TEXTS, "inputs": "a"}, "inputs", "unknown field `inputs`"),
        ({"input": 3}, "input", "got `int`"),
        ({"input": "a", "top": "b"}, "top", "Expected `int"),
        ({}, "input", "missing required field"),
        ({"input": []}, "input", "length >= 1"),
        ({"input": [1 << 30]}, "input", "the vocabulary ends with"),
    ],
)
def test_wrong_body_is_refused_by_the_field(
    client: Client, body: dict[str, Any], param: str, said: str
) -> None:
    error = client.post(PATH, {"model": "demo", **body}, 400)["error"]
    assert error["param"] == param and said in error["message"]


def test_wrong_requests_are_refused_as_ours_are(
    client: Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    assert client.request("GET", PATH)[:2][1]["allow"] == "POST"
    assert client.request("GET", PATH)[0] == 405
    assert PATH in client.post("/v1/surprice", {}, 404)["error"]["message"]
    assert client.post(PATH, {"model": "dem", "input": "a"}, 404)["error"]["param"] == "model"
    assert client.request("POST", PATH, b"{")[0] == 400
    assert client.request("POST", PATH, b"{}", {"content-type": "text/plain"})[0] == 415
    key = new_key(tmp_path / "keys.json", "ann", False)
    monkeypatch.setattr(client.app, "guard", Guard(tmp_path / "keys.json"))
    body = {"model": "demo", "input": "a b"}
    assert client.request("POST", PATH, body)[0] == 401
    assert client.request("POST", PATH, body, {"authorization": f"Bearer {key}"})[0] == 200


def test_added_endpoint_is_described_and_walked(client: Client) -> None:
    about = client.get("/openapi.json")
    row = about["paths"][PATH]["post"]
    assert row["summary"] == ROW.help
    schema = row["requestBody"]["content"]["application/json"]["schema"]
    part = about["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    assert part["properties"].keys() == {"model", "input", "top"}
    fields = {place for path, place, _ in walk(client.port) if path == PATH}
    assert {("model",), ("input",), ("input", 0), ("top",)} <= fields


def test_its_work_is_bounded_as_others_is(
    client: Client, monkeypatch: pytest.MonkeyPatch, slow: list[int]
) -> None:
    worker = client.app.workers["demo"]
    body = {"model": "demo", "input": [[5] * 50] * 20}

    def refusal(status: int, **limits: Any) -> dict[str, Any]:
        monkeypatch.setattr(client.app, "limits", Limits(**limits))
        return client.post(PATH, body, status)["error"]

    assert "at most 40 in one piece" in refusal(400, whole=40)["message"]
    assert refusal(413, body=50)["message"].startswith("the body is larger")
    assert refusal(400, prompts=10)["param"] == "input"
    assert not slow
    assert refusal(400, deadline=0.1)["code"] == "deadline_exceeded"
    assert 0 < len(slow) < 20
    # Alone it may be as large as it is; beside another it is told to come back.
    limits = Limits(queue_tokens=500)
    monkeypatch.setattr(client.app, "limits", limits)
    first = threading.Thread(target=client.post, args=(PATH, body))
    first.start()
    while not worker.requests:
        assert first.is_alive()
    assert refusal(429, queue_tokens=500)["code"] == "queue_full"
    first.join()
    assert worker.requests == worker.tokens == worker.numbers == 0


def test_its_work_ends_when_its_client_leaves(client: Client, slow: list[int]) -> None:
    worker = client.app.workers["demo"]
    body = json.dumps({"model": "demo", "input": [[5] * 50] * 100}).encode()
    with socket.create_connection(("127.0.0.1", client.port)) as sock:
        sock.sendall(head(body, path=PATH) + body)
        while not slow:
            time.sleep(0.002)
    client.idle()
    # As many rounds as the rest would need.
    for _ in range(100):
        passed = threading.Event()
        worker.inbox.put(passed.set)
        passed.wait()
    assert len(slow) < 50 and not worker.jobs and worker.requests == 0
    client.post(PATH, {"model": "demo", "input": TEXTS})


def test_work_that_the_table_does_not_bound_is_our_mistake(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A row that says nothing of its work cannot do any."""
    monkeypatch.setitem(ENDPOINTS, PATH, replace(ROW, bound=Bound.AT_ONCE))
    assert client.request("POST", PATH, {"model": "demo", "input": "a b"})[0] == 500
    assert "the table says how it is bounded" in caplog.text


def test_guide_lists_the_table() -> None:
    guide = (ROOT / "docs" / "guides" / "serve.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(?:GET|POST) (/\S*)` \| (.*) \| (.*) \|$", guide, re.MULTILINE)
    ours = {path: row for path, row in ENDPOINTS.items() if path != PATH}
    assert rows == [(path, row.help, row.bound.value) for path, row in ours.items()]


def test_endpoint_costs_as_many_files_as_the_architecture_says() -> None:
    assert home(ENDPOINTS) == "regard/serve/endpoints.py"
    own = "regard/serve/surprise.py"
    assert len({own, home(ENDPOINTS)}) == promised("add an endpoint")
