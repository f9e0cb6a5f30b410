"""Chat templates are programs from strangers: they run in a process of their own, which can be ended.

`python template.py` is that process: each line it reads is a request, each line it writes the answer, both JSON. In it
jinja2's immutable sandbox keeps a template from reaching out, and the system keeps it below MEMORY. `render` asks it,
and ends it where a template runs too long, whatever it is doing: compiling, looping, or inside a call of C code.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from datetime import datetime
from functools import lru_cache
from typing import Any

MEMORY = 1 << 30
START = 60.0  # seconds for the process to begin
# Around what a {% generation %} block wrote, where that is asked for: characters that no text holds.
OPEN, CLOSE = "\U0010effe", "\U0010efff"


# --- the process that renders -------------------------------------------------------------------------------------


def serve() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    # What a template prints by mistake must not be taken for an answer.
    answers, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        try:
            answer = json.dumps(_rendered(**json.loads(line)))
        except MemoryError:
            print(json.dumps({"memory": True}), file=answers, flush=True)
            return
        except (Exception, RecursionError) as error:
            answer = json.dumps({"error": str(error)})
        print(answer, file=answers, flush=True)


def _rendered(
    source: str, variables: dict[str, Any], max_length: int, marked: bool
) -> dict[str, Any]:
    parts, length = [], 0
    for part in _compiled(source, marked).generate(**variables):
        length += len(part)
        if length > max_length:
            return {"long": True}
        parts.append(part)
    return {"text": "".join(parts)}


@lru_cache(maxsize=16)
def _compiled(source: str, marked: bool) -> Any:
    """The template in the one environment that Regard has; blocks and extra functions as
    transformers' apply_chat_template has them. `marked`: what {% generation %} wrote stands between
    OPEN and CLOSE."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} ... {% endgeneration %} marks what to train on."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            mark = (OPEN, CLOSE) if marked else ("", "")
            first, last = (nodes.Output([nodes.TemplateData(x)], lineno=line) for x in mark)
            return [first, nodes.Scope(body).set_lineno(line), last]

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    # As in transformers: jinja2's own escapes HTML.
    environment.filters["tojson"] = lambda x, **how: json.dumps(x, **{"ensure_ascii": False, **how})
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


# --- the one who asks it ------------------------------------------------------------------------------------------


class Worker:
    """The process, begun when it is first needed and again after it was ended; one request at a time."""

    def __init__(self) -> None:
        self.lock, self.owner = threading.Lock(), 0
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The answer; {"late": True} after `seconds`, {"memory": True} where it died."""
        with self.lock:
            process = self._begun()
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
                answer = self._line(process, seconds)
            except BrokenPipeError:
                answer = {"memory": True}
            if {"late", "memory"} & answer.keys():
                self._end()
            return answer

    def _begun(self) -> subprocess.Popen[bytes]:
        # After a fork the pipes belong to another process too.
        if self.process is None or self.owner != os.getpid() or self.process.poll() is not None:
            # In a session of its own, so that Ctrl-C at the terminal is not meant for it.
            self.process = subprocess.Popen(
                [sys.executable, "-P", __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            self.owner = os.getpid()
            self._line(self.process, START)
        return self.process

    def _line(self, process: subprocess.Popen[bytes], seconds: float) -> dict[str, Any]:
        assert process.stdout is not None
        end, line = time.monotonic() + seconds, b""
        while not line.endswith(b"\n"):
            left = end - time.monotonic()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                return {"late": True}
            part = os.read(process.stdout.fileno(), 1 << 16)
            if not part:
                return {"memory": True}
            line += part
        return json.loads(line)

    def _end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


WORKER = Worker()


if __name__ == "__main__":
    serve()
