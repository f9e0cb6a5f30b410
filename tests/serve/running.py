"""A server on a free port, in a thread of this process, and plain ways to ask it."""

from __future__ import annotations

import gc
import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from regard.serve.app import App, Server, listen, server_for


class Client:
    """Asks a server; `app` is what answers."""

    timeout = 60.0  # seconds without a byte
    server: Server  # where it runs in this process

    def __init__(self, app: App, port: int, key: str | None = None):
        self.app, self.port, self.key = app, port, key
        self.url = f"http://127.0.0.1:{port}"

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self.timeout)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        given = {"content-type": "application/json"} if body is not None else {}
        given |= {"authorization": f"Bearer {self.key}"} if self.key else {}
        connection.request(method, path, data, given | (headers or {}))
        answer = connection.getresponse()
        found = answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        connection.close()
        return found

    def get(self, path: str) -> Any:
        return json.loads(self.request("GET", path)[2])

    def post(self, path: str, body: Any, status: int = 200) -> Any:
        found, _, content = self.request("POST", path, body)
        assert found == status, (found, content)
        return json.loads(content)

    def events(self, path: str, body: Any) -> list[Any]:
        """The events of a stream, without its last mark."""
        status, headers, content = self.request("POST", path, {**body, "stream": True})
        assert status == 200, content
        assert headers["content-type"].startswith("text/event-stream")
        lines = [line for line in content.decode().split("\n") if line.startswith("data: ")]
        if path != "/v1/responses":
            assert lines.pop() == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    def idle(self, seconds: float = 20.0) -> None:
        """Wait until nothing runs."""
        end = time.monotonic() + seconds
        workers = self.app.workers.values()
        while self.app.active or any(
            w.open or w.handles or not (w.engine is None or w.engine.idle) for w in workers
        ):
            assert time.monotonic() < end, "something still runs"
            time.sleep(0.01)


@contextmanager
def running(
    folders: dict[str, str | Path], key: str | None = None, **more: Any
) -> Iterator[Client]:
    with served(App(folders, **more), listen("127.0.0.1", 0), key) as client:
        yield client


@contextmanager
def served(app: App, sock: Any, key: str | None = None) -> Iterator[Client]:
    """A server that was made already."""
    server = server_for(app)
    thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    client = Client(app, sock.getsockname()[1], key)
    client.server = server
    try:
        yield client
    finally:
        server.should_exit = True
        thread.join(30)
        for worker in app.workers.values():
            worker.thread.join(30)
        # The models of this server are garbage from here on.
        gc.unfreeze()
