"""Processes that can be ended: whatever became of one, the next request has a good one."""

import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from regard.text.worker import Worker

# Says what it is told, or does something worse.
PROGRAM = """
import json, os, sys, time
print('{"ready": true}', flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request.get("do") == "die":
        os._exit(1)
    if request.get("do") == "stall":
        print('{"half', end="", flush=True)
        time.sleep(60)
    if request.get("do") == "babble":
        print("no JSON", flush=True)
    if request.get("do") == "sleep":
        time.sleep(60)
    print(json.dumps(request), flush=True)
"""


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker("-c", PROGRAM)
    yield made
    made.end()


@contextmanager
def many_files() -> Iterator[None]:
    """More files than select.select can tell apart are open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard), hard))
    held = list[int]()
    try:
        while not held or held[-1] < 1100:
            held.append(os.dup(0))
        yield
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def answers(worker: Worker) -> bool:
    return worker.ask({"a": 1}, 30) == {"a": 1}


@pytest.mark.skipif(sys.platform == "win32", reason="needs poll")
def test_it_begins_while_many_files_are_open(worker: Worker) -> None:
    with many_files():
        assert answers(worker)
    assert answers(worker)


@pytest.mark.parametrize("what, told", [("die", "memory"), ("stall", "late"), ("sleep", "late")])
def test_one_that_broke_is_replaced(worker: Worker, what: str, told: str) -> None:
    assert answers(worker)
    assert worker.ask({"do": what}, 30 if what == "die" else 0.1) == {told: True}
    assert answers(worker)


def test_an_answer_that_is_none_does_not_become_the_next_ones(worker: Worker) -> None:
    with pytest.raises(ValueError, match="Expecting"):
        worker.ask({"do": "babble"}, 30)
    assert answers(worker)


def test_one_that_was_killed_between_two_requests_is_replaced(worker: Worker) -> None:
    worker.begin()
    assert worker.process is not None
    os.kill(worker.process.pid, signal.SIGKILL)
    worker.process.wait()
    assert answers(worker)


def test_a_request_that_is_not_read_does_not_wait_for_ever(worker: Worker) -> None:
    assert worker.ask({"do": "sleep"}, 0.1) == {"late": True}
    stuck = Worker("-c", "print('{\"ready\": true}', flush=True); import time; time.sleep(60)")
    assert stuck.ask({"a": "x" * (1 << 20)}, 0.2) == {"late": True}


def test_one_that_cannot_begin_says_so_and_is_tried_again() -> None:
    worker = Worker("-c", "pass")
    for _ in range(2):
        with pytest.raises(OSError, match="did not begin"):
            worker.ask({}, 30)
    # No file is left for its pipes.
    worker = Worker("-c", PROGRAM)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    last = os.dup(0)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (last, hard))
        with pytest.raises(OSError, match="Too many"):
            worker.begin()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(last)
    assert answers(worker)
    worker.end()
