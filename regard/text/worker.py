"""A process beside this one that does what strangers decide the cost of, and that can be ended while it does it.

It answers each line of JSON with one line of JSON. `Worker.ask` waits for the answer no longer than it is told to. A
process that is late, has died or was left amid a line is replaced by the next request, so that nothing of it stays."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from typing import Any

START = 60.0  # seconds for the process to begin


class Worker:
    """A Python program, given as arguments of the interpreter; one request at a time."""

    def __init__(self, *program: str) -> None:
        self.program = program
        self.lock = threading.Lock()
        self.owner = 0
        self.process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Start it now: later there may be no files or no memory left for it. Without, the first request does."""
        with self.lock:
            self._begun()

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The answer; {"late": True} after `seconds`, {"memory": True} where it died."""
        line = json.dumps(request).encode() + b"\n"
        with self.lock:
            return self._talk(self._begun(), line, seconds)

    def end(self) -> None:
        with self.lock:
            self._end()

    def _begun(self) -> subprocess.Popen[bytes]:
        # After a fork the pipes belong to another process too.
        if self.process is None or self.owner != os.getpid() or self.process.poll() is not None:
            # In a session of its own, so that Ctrl-C at the terminal is not meant for it.
            self.process = subprocess.Popen(
                [sys.executable, *self.program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            self.owner = os.getpid()
            assert self.process.stdin is not None
            os.set_blocking(self.process.stdin.fileno(), False)
            if "ready" not in self._talk(self.process, b"", START):
                raise OSError("a process that this one needs did not begin")
        return self.process

    def _talk(self, process: subprocess.Popen[bytes], line: bytes, seconds: float) -> Any:
        """Write a line, if there is one, and read one; whatever goes wrong ends the process."""
        answer: dict[str, Any] | None = None
        try:
            answer = _exchanged(process, line, seconds)
            return answer
        except BrokenPipeError:
            return {"memory": True}
        finally:
            if answer is None or {"late", "memory"} & answer.keys():
                self._end()

    def _end(self) -> None:
        if self.process is not None:
            process, self.process = self.process, None
            process.kill()
            process.communicate()


def _exchanged(process: subprocess.Popen[bytes], line: bytes, seconds: float) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    into = process.stdin.fileno()
    out = process.stdout.fileno()
    # Not select.select, which takes no file from number 1,024 on.
    ends = select.poll()
    ends.register(out, select.POLLIN)
    if line:
        ends.register(into, select.POLLOUT)
    left = memoryview(line)
    answer = bytearray()
    end = time.monotonic() + seconds
    while not answer.endswith(b"\n"):
        ready = dict(ends.poll(max(0.0, end - time.monotonic()) * 1000))
        if not ready:
            return {"late": True}
        if into in ready:
            left = left[os.write(into, left) :]
            if not left:
                ends.unregister(into)
        if out in ready:
            part = os.read(out, 1 << 16)
            if not part:
                return {"memory": True}
            answer += part
    return json.loads(answer)
