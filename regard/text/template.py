"""Chat templates are programs from strangers: they run in a process of their own, which can be ended.

`python template.py` is that process: each line it reads is a request, each line it writes the answer, both JSON. In it
jinja2's immutable sandbox keeps a template from reaching out, and the system keeps it below MEMORY. It is ended
where a template runs too long, whatever it is doing: compiling, looping, or inside a call of C code (`worker.py`).
"""

from __future__ import annotations

import contextlib
import json
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any

MEMORY = 1 << 30
# Around what a {% generation %} block wrote, where that is asked for: characters that no text holds.
OPEN, CLOSE = "\U0010effe", "\U0010efff"


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
    parts = []
    length = 0
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


if __name__ == "__main__":
    serve()
