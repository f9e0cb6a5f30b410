"""Two replicas of the app on Ray Serve; one is killed while clients ask. Needs the extra `ray`."""

import json
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator

import psutil
import pytest

from tests.test_cli import ROOT, folder

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'regard[ray]'")
pytest.importorskip("msgspec")


ENV = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
# A busy machine takes its time.
ENV |= {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120", "RAY_agent_register_timeout_ms": "120000"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENV.items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        from ray import serve

        from regard.serve.ray import build

        try:
            ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
        except Exception as error:
            pytest.skip(f"Ray does not start on this machine: {error}")
        serve.start(http_options={"port": port})
        serve.run(build({"models": f"gpt2={folder('gpt2')}", "replicas": "2"}), name="regard")
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()
        ray.shutdown()


def ask(url: str, i: int, stream: bool) -> tuple[str, str]:
    """ "ok" and the answer, or what went wrong."""
    body = {"model": "gpt2", "messages": [{"role": "user", "content": f"Hi {i}"}]}
    body |= {"max_completion_tokens": 30, "temperature": 0, "stream": stream}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), headers
    )
    try:
        text = urllib.request.urlopen(request, timeout=60).read().decode()
    except urllib.error.HTTPError as error:
        return str(error.code), error.read().decode()
    if not stream:
        return "ok", json.loads(text)["choices"][0]["message"]["content"]
    events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    if events[-1] != "[DONE]":
        return "told", json.loads(events[-1])["error"]["message"]
    choices = [json.loads(event)["choices"] for event in events[:-1]]
    return "ok", "".join(c[0]["delta"].get("content") or "" for c in choices if c)


def replicas() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [p for p in children if "ServeReplica:regard:Replica" in "".join(p.cmdline())]


def test_death_of_a_replica_loses_no_answer_in_silence(url: str) -> None:
    want = {i: ask(url, i, False)[1] for i in range(8)}
    found: Counter[str] = Counter()
    end = time.monotonic() + 20

    def client(k: int) -> None:
        i = k
        while time.monotonic() < end:
            i += 1
            kind, text = ask(url, i % 8, stream=i % 2 == 0)
            found[kind if kind != "ok" or text == want[i % 8] else f"wrong: {text}"] += 1

    threads = [threading.Thread(target=client, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    time.sleep(4)
    victim = replicas()[0]
    os.kill(victim.pid, 9)
    for thread in threads:
        thread.join()
    # A stream that had begun may end with a sentence; nothing else but right answers.
    assert found["ok"] > 20 and set(found) <= {"ok", "told"} and found["told"] <= 6, found


def test_page_and_errors_come_through(url: str) -> None:
    with urllib.request.urlopen(url) as page:
        assert b"<title>regard</title>" in page.read()
        assert "default-src 'none'" in page.headers["content-security-policy"]
    assert urllib.request.urlopen(f"{url}/ready").status == 200
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(f"{url}/v1/nothing")
    assert error.value.code == 404 and "error" in json.loads(error.value.read())
