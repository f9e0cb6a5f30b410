"""Clients that leave, stall, flood and lie; engines that fail; a server that is told to end."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from regard.errors import Fault
from regard.serve.app import App, listen
from regard.serve.edge import Limits
from regard.serve.model_worker import Options
from regard.text.chat import TEMPLATES
from tests.serve.running import Client, running, served
from tests.text.test_worker import many_files

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
    worker = demo.app.workers["demo"]
    while not worker.handles:
        time.sleep(0.002)
    if kind == "reset":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    sock.close()
    demo.idle()
    assert worker.engine is not None and worker.engine.idle
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
        while len(client.app.workers["demo"].open) < 2:
            time.sleep(0.002)
        status, headers, content = client.request("POST", "/v1/completions", SHORT)
        assert status == 429 and int(headers["retry-after"]) >= 1
        assert json.loads(content)["error"]["code"] == "queue_full"
        for thread in threads:
            thread.join()
        assert client.request("POST", "/v1/completions", SHORT)[0] == 200


def test_an_answer_that_is_late_is_told() -> None:
    with running({"demo": "demo"}, limits=Limits(deadline=0.01)) as client:
        assert client.post("/v1/completions", LONG, 400)["error"]["code"] == "deadline_exceeded"


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
        while not client.app.active:
            time.sleep(0.01)
        client.idle()
        sock.close()
        assert client.request("POST", "/v1/completions", SHORT)[0] == 200


def test_a_step_that_raises_ends_the_one_at_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    with running({"demo": "demo"}) as client:
        engine = client.app.workers["demo"].engine
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


@contextmanager
def process(
    *more: str, stderr: Any = subprocess.PIPE, before: str = ""
) -> Iterator[subprocess.Popen[str]]:
    """`regard serve demo` as a process of its own, which does something before."""
    code = (
        before
        + "from regard.__main__ import main; import sys; sys.exit(main(['serve', 'demo', *sys.argv[1:]]))"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *more]
    with subprocess.Popen(command, stderr=stderr, text=True, env=env) as running:
        try:
            yield running
        finally:
            running.kill()


def client_of(running: subprocess.Popen[str]) -> Client:
    """Wait until it says where it is."""
    assert running.stderr is not None
    line = running.stderr.readline()
    while "http://" not in line:
        assert line, "the server did not start"
        line = running.stderr.readline()
    return Client(None, int(line.partition("127.0.0.1:")[2].partition("/")[0]))  # type: ignore[arg-type]


def when_ready(port: int) -> Client:
    """Of a server that says nothing, or not where it is read."""
    client = Client(None, port)  # type: ignore[arg-type]
    while True:
        try:
            if client.request("GET", "/ready")[0] == 200:
                return client
        except OSError:
            time.sleep(0.05)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_told_to_end_it_finishes_what_runs() -> None:
    with process("--port", "0") as running:
        client, found = client_of(running), list[Any]()
        body = {**LONG, "stream": True, "n": 2}
        thread = threading.Thread(
            target=lambda: found.append(client.events("/v1/completions", body))
        )
        thread.start()
        while "regard_streams 1" not in client.request("GET", "/metrics")[2].decode():
            time.sleep(0.005)
        running.send_signal(signal.SIGTERM)
        thread.join()
        assert running.wait(30) == 0
        ends = [c["finish_reason"] for chunk in found[0] for c in chunk["choices"]]
        assert ends.count("length") + ends.count("stop") == 2
        assert running.stderr is not None
        rest = running.stderr.read()
        assert "12 + 30" not in rest and "Traceback" not in rest


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_killed_under_load_it_breaks_off_and_starts_again() -> None:
    """Clients see that the answer is not whole, and the port is free at once."""
    port = free_port()
    body = json.dumps({**LONG, "stream": True}).encode()
    with process("--port", str(port), "--quiet") as running:
        client = when_ready(port)
        expected = client.post("/v1/completions", SHORT)["choices"]
        socks = [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]
        for sock in socks:
            sock.sendall(head(body) + body)
        for sock in socks[:4]:
            assert sock.recv(100).startswith(b"HTTP/1.1 200")
        running.kill()
    for sock in socks:
        found = b""
        with sock, suppress(ConnectionError):
            while part := sock.recv(65536):
                found += part
        # Neither the end of the events nor that of the chunks.
        assert b"[DONE]" not in found and not found.endswith(b"0\r\n\r\n")
    with served(App({"demo": "demo"}), listen("127.0.0.1", port)) as client:
        assert client.post("/v1/completions", SHORT)["choices"] == expected


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_log_on_a_full_disk_disturbs_nobody() -> None:
    port = free_port()
    with open("/dev/full", "w") as full, process("--port", str(port), stderr=full) as running:
        client = when_ready(port)
        for _ in range(3):
            client.post("/v1/completions", SHORT)
            client.post("/v1/completions", {"model": "none", "prompt": "a"}, 404)
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) == 0


def test_port_that_is_taken_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Fault) as error:
            listen("127.0.0.1", port)
    what = "cannot be listened on: Address already in use; choose another with --port or --host"
    assert str(error.value) == f"127.0.0.1:{port} {what}" and error.value.code == 3
    for host, port in (("192.0.2.99", 0), ("nowhere.invalid", 0), ("127.0.0.1", 1 << 16)):
        with pytest.raises(Fault, match="cannot be listened on"):
            listen(host, port)


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits of a process")
def test_no_file_left_for_a_connection() -> None:
    """It waits until one is, and fills no log with frames meanwhile."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); "
    with process("--port", "0", before=limit) as running:
        client = client_of(running)
        socks = [socket.create_connection(("127.0.0.1", client.port)) for _ in range(100)]
        time.sleep(0.3)
        for sock in socks:
            sock.close()
        client.post("/v1/completions", SHORT)
        running.send_signal(signal.SIGTERM)
        assert running.stderr is not None
        said = running.stderr.read()
        assert running.wait(30) == 0 and "Traceback" not in said


@pytest.mark.parametrize("years", [-10, 10])
def test_clock_that_jumps_changes_nothing(
    plain: Client, monkeypatch: pytest.MonkeyPatch, years: int
) -> None:
    """Deadlines, rates and timeouts are by a clock that only goes forward."""
    body = {**LONG, "temperature": 0}
    expected = plain.post("/v1/completions", body)["choices"]
    real, found, worker = time.time, list[Any](), plain.app.workers["demo"]
    thread = threading.Thread(target=lambda: found.append(plain.post("/v1/completions", body)))
    thread.start()
    while not worker.handles and thread.is_alive():
        time.sleep(0.001)
    monkeypatch.setattr(time, "time", lambda: real() + years * 365 * 86400)
    thread.join()
    assert found[0]["choices"] == expected
    assert plain.post("/v1/completions", SHORT)["choices"]


def test_100_megabytes_are_refused_and_not_kept(demo: Client) -> None:
    size, part = 100 << 20, b" " * (1 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with socket.create_connection(("127.0.0.1", demo.port), timeout=60) as sock:
        sock.sendall(head(b"").replace(b"Length: 0", f"Length: {size}".encode()))
        for _ in range(100):
            sock.sendall(part)
        assert sock.recv(100).startswith(b"HTTP/1.1 413")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 30 << 10, f"{grown >> 10} MiB"
    demo.idle()


def test_second_head_that_does_not_come() -> None:
    """A connection that was used once gets no longer to send its next head than a fresh one."""
    with running({"demo": "demo"}, limits=Limits(write_timeout=0.5)) as client:
        with socket.create_connection(("127.0.0.1", client.port), timeout=20) as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            found = b""
            while not found.endswith(b"}"):
                found += sock.recv(4096)
            sock.sendall(b"GET /hea")
            with suppress(ConnectionResetError):
                assert sock.recv(4096) == b""
        # Neither does a body that nobody waits for.
        with socket.create_connection(("127.0.0.1", client.port), timeout=20) as sock:
            sock.sendall(head(b"x" * 1000, path="/nowhere") + b"{")
            with suppress(ConnectionResetError):
                while sock.recv(4096):
                    pass


def test_answer_that_is_never_fetched_is_dropped() -> None:
    """One that is whole lies in the buffer of its connection, and goes with it."""
    with running({"demo": "demo"}, limits=Limits(write_timeout=0.3)) as client:
        # What the system holds for a connection is small, so that the rest lies with us.
        for sock in client.server.servers[0].sockets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        body = json.dumps({"model": "demo", "input": ["a"] * 64}).encode()
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            reader.connect(("127.0.0.1", client.port))
            reader.sendall(head(body, path="/v1/embeddings") + body)
            connections, lain = client.server.server_state.connections, 0
            while not lain:
                lain = sum(c.transport.get_write_buffer_size() for c in list(connections))
            while connections:
                time.sleep(0.01)
        assert client.request("POST", "/v1/completions", SHORT)[0] == 200


def test_idle_connections_take_nothing_from_others() -> None:
    with running({"demo": "demo"}, limits=Limits(read_timeout=1.5)) as client:
        expected = client.post("/v1/completions", SHORT)["choices"]
        socks = [socket.create_connection(("127.0.0.1", client.port)) for _ in range(200)]
        for i, sock in enumerate(socks):
            sock.sendall(b"POST /v1/completions HT"[: i % 20])
        assert client.post("/v1/completions", SHORT)["choices"] == expected
        while client.server.server_state.connections:
            time.sleep(0.01)
        for sock in socks:
            sock.close()


def test_a_chat_finds_its_template_whatever_became_of_the_process(demo: Client) -> None:
    """With more files open than select.select can tell apart; and after somebody ended the process."""
    body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    with many_files():
        TEMPLATES.end()
        demo.post("/v1/chat/completions", body)
    assert TEMPLATES.process is not None
    TEMPLATES.process.kill()
    TEMPLATES.process.wait()
    demo.post("/v1/chat/completions", body)


def test_no_process_for_a_template_is_a_reason_to_come_back(
    demo: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    TEMPLATES.end()
    with monkeypatch.context() as patch:
        patch.setattr(TEMPLATES, "program", ("-c", "pass"))
        status, headers, content = demo.request("POST", "/v1/chat/completions", body)
        assert status == 503 and headers["retry-after"] and b"overloaded" in content
    demo.post("/v1/chat/completions", body)
