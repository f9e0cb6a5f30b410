"""Who may ask, what is counted, what is logged: the edge of the server."""

import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from regard.cli.serve import Options as Flags
from regard.cli.serve import run
from regard.decode.engine import Engine
from regard.errors import UsageError
from regard.serve import app as apps
from regard.serve import model_worker
from regard.serve.edge import HTTPError, Metrics, new_key
from tests.serve.running import Client, running
from tests.serve.test_faults import head

ASK = {"model": "demo", "prompt": "12 + 30", "max_tokens": 3, "temperature": 0}
LINE = re.compile(r'([a-zA-Z_:][\w:]*)(?:\{((?:\w+="(?:[^"\\]|\\.)*",?)*)\})? (\S+)')


def numbers(client: Client) -> dict[str, float]:
    """The lines of /metrics, each of which Prometheus can read."""
    found = dict[str, float]()
    for line in client.request("GET", "/metrics")[2].decode().splitlines():
        if not line.startswith("#"):
            match = LINE.fullmatch(line)
            assert match, line
            found[line.rpartition(" ")[0]] = float(match[3])
    return found


@pytest.mark.parametrize("count", [1, 999_999, 1_234_567, 12_345_678, 2**53 - 1])
def test_counters_are_told_in_full(count: int) -> None:
    metrics = Metrics()
    metrics.add("a_total", count, model='odd "name\\')
    metrics.time("b_seconds", 1234567.0625)
    text = metrics.text({"c": float(count)})
    assert f"\nc {count}\n" in text and f'a_total{{model="odd \\"name\\\\"}} {count}\n' in text
    assert "b_seconds_sum 1234567.0625\n" in text


def test_tokens_and_requests_are_counted_by_model(plain: Client) -> None:
    before = numbers(plain)
    used = [plain.post("/v1/completions", ASK)["usage"] for _ in range(3)]
    after = numbers(plain)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    asked = 'regard_requests_total{model="demo",path="/v1/completions",status="200"}'
    assert grown(asked) == 3
    for kind, theirs, field in (("prompt", "prompt", "prompt"), ("new", "generation", "completion")):  # fmt: skip
        count = sum(u[f"{field}_tokens"] for u in used)
        assert grown(f'regard_tokens_total{{model="demo",kind="{kind}"}}') == count
        assert grown(f'vllm:{theirs}_tokens_total{{model_name="demo"}}') == count
    for name in ("time_to_first_token", "e2e_request_latency"):
        assert grown(f'vllm:{name}_seconds_count{{model_name="demo"}}') == 3
        assert grown(f'vllm:{name}_seconds_bucket{{model_name="demo",le="+Inf"}}') == 3
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert after[f'vllm:{name}{{model_name="demo"}}'] == 0
    plain.post("/v1/completions", {**ASK, "temperature": 9}, 400)
    assert (
        numbers(plain)['vllm:e2e_request_latency_seconds_count{model_name="demo"}']
        == (after['vllm:e2e_request_latency_seconds_count{model_name="demo"}'])
    )


@pytest.mark.parametrize("kind", ["bug", "refusal", "step", "stream"])
def test_a_failure_is_in_the_log_under_the_id_of_its_answer(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever raises, wherever: frames in the log, an id there and in the answer, nothing of the frames in it."""
    with running({"demo": "demo"}) as client:
        engine = client.app.workers["demo"].engine
        assert engine is not None

        def planted(*_: Any, **__: Any) -> Any:
            if kind == "refusal":
                raise HTTPError(503, "not now")
            raise RuntimeError("a fault with a /secret/path")

        where: dict[str, tuple[Any, str]]
        where = {"step": (engine.model, "next_logits"), "stream": (client.app, "remember")}
        monkeypatch.setattr(*where.get(kind, (client.app, "serving")), planted)
        status, headers, content = client.request(
            "POST", "/v1/completions", {**ASK, "stream": kind == "stream"}
        )
    assert status == {"stream": 200, "refusal": 503}.get(kind, 500)
    last = content.decode().strip().split("data: ")[-1]
    error, name = json.loads(last)["error"], headers["x-request-id"]
    assert name in error["message"] and error["type"] == "server_error" and "secret" not in last
    told = [r for r in caplog.records if name in r.getMessage() and r.levelno == logging.ERROR]
    assert len(told) == 1 and told[0].exc_info is not None
    frames = logging.Formatter().formatException(told[0].exc_info)
    assert "in planted" in frames and ("secret" in frames) == (kind != "refusal")


def test_an_idle_server_frees_pages_that_were_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And says so in its log, once; where the books are right it says nothing."""
    monkeypatch.setattr(model_worker, "REST", 0.02)

    def errors() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]

    with running({"demo": "demo"}) as client:
        engine = client.app.workers["demo"].engine
        assert engine is not None and engine.pool is not None
        want, checked = client.post("/v1/completions", ASK)["choices"], list[bool]()
        client.idle()

        def check() -> None:
            checked.append(True)
            Engine.check(engine)

        monkeypatch.setattr(engine, "check", check)
        client.post("/v1/completions", ASK)
        wait_for(lambda: bool(checked))
        assert not errors()
        # As a row that ended and gave nothing back would leave it.
        engine.pool.hold(engine.pool.take())
        assert client.post("/v1/completions", ASK)["choices"] == want
        wait_for(lambda: bool(errors()))
        assert errors() == ["the pages of demo were not in order; all are free now"]
        engine.pool.check()
        assert client.post("/v1/completions", ASK)["choices"] == want


def wait_for(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_others_than_this_machine_need_keys(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = list[str]()

    def listen(host: str, _: int) -> Any:
        begun.append(host)
        raise KeyboardInterrupt

    monkeypatch.setattr(apps, "listen", listen)
    with pytest.raises(UsageError, match=r"--keys keys\.json.*--no-keys"):
        run(Flags(("demo",), host=host))
    with pytest.raises(UsageError, match="cannot both be"):
        run(Flags(("demo",), host=host, no_keys=True, keys="keys.json"))
    assert not begun
    for more in ({"no_keys": True}, {"keys": "keys.json"}):
        with pytest.raises(KeyboardInterrupt):
            run(Flags(("demo",), host=host, **more))  # type: ignore[arg-type]
    for here in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        with pytest.raises(KeyboardInterrupt):
            run(Flags(("demo",), host=here))
    assert begun == [host, host, "127.0.0.1", "127.1.2.3", "::1", "localhost"]


def test_names_that_a_stranger_gave_this_machine(plain: Client) -> None:
    """A page of evil.example, whose name leads here, is not answered; programs and the machine's own pages are."""
    plain.app.local = False
    try:
        for name, origin, status in (
            ("evil.example", None, 200), ("evil.example", "http://evil.example", 403),
            ("evil.example:80", "http://evil.example:80", 403), ("10.0.0.7:80", "http://10.0.0.7:80", 200),
            ("[::1]:80", "http://[::1]:80", 200), (socket.gethostname(), f"http://{socket.gethostname()}", 200),
            ("10.0.0.7", "http://evil.example", 403),
        ):  # fmt: skip
            headers = {"host": name, **({"origin": origin} if origin else {})}
            assert plain.request("POST", "/v1/completions", ASK, headers)[0] == status, headers
    finally:
        plain.app.local = True


def test_nobody_waits_for_a_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine is called is asked before the first request, and once."""
    asked = list[str]()
    monkeypatch.setattr(socket, "getfqdn", lambda: asked.append("name") or "here.example")  # type: ignore[func-returns-value]
    apps.own_names.cache_clear()
    with running({"demo": "demo"}, local=False) as client:
        assert asked == ["name"]
        for name, status in (("evil.example", 403), ("here.example", 200), ("HERE.example", 200)):
            headers = {"host": name, "origin": f"http://{name}"}
            assert client.request("POST", "/v1/completions", ASK, headers)[0] == status
        assert asked == ["name"]
    apps.own_names.cache_clear()


def test_a_key_bounds_the_priority_of_its_requests(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    ann, bob = (new_key(keys, name, False) for name in ("ann", "bob"))
    entries = json.loads(keys.read_text())
    entries["keys"][0]["priority"] = 5
    keys.write_text(json.dumps(entries))
    with running({"demo": "demo"}, keys=keys) as client:
        for client.key, most in ((ann, 5), (bob, 0)):
            for priority in (-7, 0, most):
                client.post("/v1/completions", {**ASK, "priority": priority})
            error = client.post("/v1/completions", {**ASK, "priority": most + 1}, 400)["error"]
            assert error["param"] == "priority" and str(most) in error["message"]


@contextmanager
def admin(tmp_path: Path) -> Iterator[Client]:
    """A server with a second model that loads slowly."""
    key = new_key(tmp_path / "keys.json", "boss", True)
    more: Any = {"keys": tmp_path / "keys.json", "start": ["demo"], "key": key}
    with running({"demo": "demo", "two": "demo"}, **more) as client:
        load = client.app.load

        def slow(name: str) -> None:
            time.sleep(0.2)
            load(name)

        client.app.load = slow  # type: ignore[method-assign]
        yield client


def engines(name: str) -> int:
    return sum(thread.name == f"engine of {name}" for thread in threading.enumerate())


def test_a_model_is_loaded_once_whoever_asks_and_leaves(tmp_path: Path) -> None:
    with admin(tmp_path) as client:
        body = json.dumps({"model": "two"}).encode()
        left = socket.create_connection(("127.0.0.1", client.port))
        left.sendall(head(body, f"Authorization: Bearer {client.key}\r\n", "/admin/load") + body)
        while not client.app.changing.locked():
            time.sleep(0.002)
        left.close()
        found = list[int]()

        def ask(path: str) -> None:
            found.append(client.request("POST", path, {"model": "two"})[0])

        def together(*paths: str) -> list[int]:
            found.clear()
            threads = [threading.Thread(target=ask, args=(path,)) for path in paths]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return sorted(found)

        assert together("/admin/load", "/admin/load", "/admin/load") == [200, 200, 200]
        assert engines("two") == 1
        # One takes it out; for the other there is nothing left.
        assert together("/admin/unload", "/admin/unload") == [200, 503]
        while engines("two"):
            time.sleep(0.01)
        assert set(together("/admin/load", "/admin/unload", "/admin/load")) <= {200, 503}
        client.post("/admin/load", {"model": "two"})
        assert engines("two") == 1 and "two" in client.app.workers
