"""Clients that leave, stall, flood and lie; engines that fail; a server that is told to end."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from regard.serve.edge import Limits
from regard.serve.host import Options
from tests.serve.running import Client, running

LONG = {"model": "demo", "prompt": "12 + 30", "max_tokens": 150, "logit_bias": {"0": -100}}
SHORT = {"model": "demo", "prompt": "12 + 30", "max_tokens": 3, "temperature": 0}


def raw(client: Client, data: bytes, wait: float = 10.0) -> bytes:
    """What comes back for bytes, until the server closes or nothing more comes."""
    with socket.create_connection(("127.0.0.1", client.port), timeout=wait) as sock:
        found = b""
        try:
            sock.sendall(data)
            while part := sock.recv(65536):
                found += part
        except (TimeoutError, ConnectionError):
            pass
        return found


def head(body: bytes, more: str = "", path: str = "/v1/completions") -> bytes:
    lines = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{more}"
    return (lines + f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n").encode()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["fin", "reset"])
def test_a_client_that_leaves_is_forgotten(demo: Client, stream: bool, kind: str) -> None:
    expected = demo.post("/v1/completions", SHORT)["choices"]
    body = json.dumps({**LONG, "stream": stream}).encode()
    sock = socket.create_connection(("127.0.0.1", demo.port))
    sock.sendall(head(body) + body)
    host = demo.app.hosts["demo"]
    while not host.tickets:
        time.sleep(0.002)
    if kind == "reset":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    sock.close()
    demo.idle()
    assert host.engine is not None and host.engine.idle
    assert demo.post("/v1/completions", SHORT)["choices"] == expected


def test_a_full_queue_says_when_to_come_back() -> None:
    limits = Limits(queue=2)
    with running({"demo": "demo"}, limits=limits, options=Options(rows=1)) as client:
        threads = [
            threading.Thread(target=client.request, args=("POST", "/v1/completions", LONG))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        while len(client.app.hosts["demo"].open) < 2:
            time.sleep(0.002)
        status, headers, content = client.request("POST", "/v1/completions", SHORT)
        assert status == 429 and int(headers["retry-after"]) >= 1
        assert json.loads(content)["error"]["code"] == "queue_full"
        for thread in threads:
            thread.join()
        assert client.request("POST", "/v1/completions", SHORT)[0] == 200


def test_an_answer_that_is_late_is_told() -> None:
    with running({"demo": "demo"}, limits=Limits(deadline=0.01)) as client:
        assert client.post("/v1/completions", LONG, 408)["error"]["type"] == "timeout_error"


def test_a_reader_that_stalls_is_dropped() -> None:
    limits = Limits(write_timeout=0.3)
    with running({"demo": "demo"}, limits=limits) as client:
        body = json.dumps(
            {**LONG, "max_tokens": 400, "n": 16, "stream": True, "logprobs": 20}
        ).encode()
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        sock.connect(("127.0.0.1", client.port))
        sock.sendall(head(body) + body)
        while not client.app.exchanges:
            time.sleep(0.01)
        client.idle()
        sock.close()
        assert client.request("POST", "/v1/completions", SHORT)[0] == 200


def test_a_step_that_raises_ends_the_one_at_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    with running({"demo": "demo"}) as client:
        engine = client.app.hosts["demo"].engine
        assert engine is not None
        expected = client.post("/v1/completions", SHORT)["choices"]
        real = engine.model.next_logits

        def broken(ids: Any, *rest: Any, **more: Any) -> Any:
            if (ids == 77).any():
                raise RuntimeError("a fault with a /secret/path")
            return real(ids, *rest, **more)

        monkeypatch.setattr(engine.model, "next_logits", broken)
        found: list[Any] = []
        bad = {"model": "demo", "prompt": [77, 78], "max_tokens": 3}
        threads = [
            threading.Thread(target=lambda b=b: found.append(client.request("POST", "/v1/completions", b)))
            for b in (SHORT, bad, SHORT)
        ]  # fmt: skip
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(status for status, _, _ in found) == [200, 200, 500]
        for status, _, content in found:
            assert b"secret" not in content
            assert status == 500 or json.loads(content)["choices"] == expected
        assert client.post("/v1/completions", SHORT)["choices"] == expected


BODIES: dict[str, tuple[bytes, int]] = {
    "no JSON": (b"{", 400),
    "empty": (b"", 400),
    "not UTF-8": (b'{"model": "demo", "prompt": "\xff\xfe"}', 400),
    "half a pair": (b'{"model": "demo", "prompt": "\\ud800"}', 400),
    "NaN": (b'{"model": "demo", "prompt": "a", "temperature": NaN}', 400),
    "long number": (b'{"model": "demo", "prompt": "a", "seed": ' + b"9" * 400 + b"}", 400),
    "large": (b'{"model": "demo", "prompt": "a", "temperature": 1e308}', 400),
    "deep": (b"[" * 100_000, 400),
    "deep in a field": (b'{"model": "demo", "prompt": ' + b'{"a":' * 3000 + b"1" + b"}" * 3001, 400),
    "a mark in front": (b"\xef\xbb\xbf{}", 400),
    "too large": (b" " * (3 << 20), 413),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_bodies_that_are_wrong(demo: Client, name: str) -> None:
    body, status = BODIES[name]
    found, _, content = demo.request("POST", "/v1/completions", body)
    assert found == status and json.loads(content)["error"]["message"], content


def test_nul_and_odd_characters_are_text(demo: Client) -> None:
    for text in ("a\0b", "👩‍👩‍👧 \u202e x", "e\u0301", "\ufeff"):
        ids = demo.post("/tokenize", {"model": "demo", "prompt": text})["tokens"]
        assert demo.post("/detokenize", {"model": "demo", "tokens": ids})["prompt"] == text
        body = {"model": "demo", "prompt": text, "max_tokens": 2, "echo": True}
        assert demo.post("/v1/completions", body)["choices"][0]["text"].startswith(text)


HTTP: dict[str, tuple[bytes, tuple[bytes, ...]]] = {
    "no HTTP": (b"\x16\x03\x01 hello\r\n\r\n", (b"400",)),
    "long headers": (head(b"", "X: " + "a" * 100_000 + "\r\n"), (b"400", b"431", b"")),
    "many headers": (head(b"", "".join(f"X{i}: 1\r\n" for i in range(200))), (b"431",)),
    "wrong length": (b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n", (b"400",)),
    "two lengths": (head(b"{}", "Content-Length: 5\r\n") + b"{}", (b"400",)),
    "both": (head(b"0\r\n\r\n", "Transfer-Encoding: chunked\r\n") + b"0\r\n\r\n", (b"400",)),
    "chunks too large": (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + b"200000\r\n" + b" " * 0x200000 + b"\r\n"
        + b"200000\r\n" + b" " * 0x200000 + b"\r\n0\r\n\r\n",
        (b"413", b""),
    ),
    "another host": (b"GET /health HTTP/1.1\r\nHost: evil.example\r\n\r\n", (b"403",)),
    "another page": (
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example\r\n\r\n", (b"403",)
    ),
    "no JSON said": (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}", (b"415",)),
}  # fmt: skip


@pytest.mark.parametrize("name", HTTP)
def test_http_that_is_wrong(demo: Client, name: str) -> None:
    data, statuses = HTTP[name]
    found = raw(demo, data, 0.7)
    assert found.split(b" ")[1:2] in [[s] if s else [] for s in statuses], found[:200]
    assert demo.get("/health") == {"status": "ok"}


def test_heads_and_bodies_that_do_not_come() -> None:
    with running({"demo": "demo"}, limits=Limits(read_timeout=0.3)) as client:
        assert raw(client, b"POST /v1/comp", 5.0) == b""
        found = raw(client, head(b"x" * 100) + b"{", 5.0)
        assert b" 408 " in found and b"timeout_error" in found


def test_errors_name_no_paths(demo: Client) -> None:
    for body in (
        {"model": "demo"},
        {"model": "../../etc/passwd", "prompt": "a"},
        {"model": "demo", "prompt": [10**6]},
    ):
        _, headers, content = demo.request("POST", "/v1/completions", body)
        assert "/" not in json.loads(content)["error"]["message"].replace("../../etc/passwd", "")
        assert headers["x-request-id"].startswith("req_")


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_told_to_end_it_finishes_what_runs() -> None:
    code = "from regard.__main__ import main; import sys; sys.exit(main(['serve', 'demo', '--port', '0']))"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    line = process.stderr.readline()
    while "http://" not in line:
        assert line, "the server did not start"
        line = process.stderr.readline()
    port = int(line.partition("127.0.0.1:")[2].partition("/")[0])
    client = Client(None, port)  # type: ignore[arg-type]
    found: list[Any] = []
    body = {**LONG, "stream": True, "n": 2}
    thread = threading.Thread(target=lambda: found.append(client.events("/v1/completions", body)))
    thread.start()
    while "regard_streams 1" not in client.request("GET", "/metrics")[2].decode():
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    thread.join()
    assert process.wait(30) == 0
    ends = [c["finish_reason"] for chunk in found[0] for c in chunk["choices"]]
    assert ends.count("length") + ends.count("stop") == 2
    rest = process.stderr.read()
    assert "12 + 30" not in rest and "Traceback" not in rest
