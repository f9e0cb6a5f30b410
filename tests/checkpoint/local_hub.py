"""A Hugging Face Hub on this machine: a folder for each model, and faults on demand."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """`models`: name -> folder; `revisions`: name of a branch or tag -> commit. `spoilt`: files that arrive changed;
    `cut`: files of which half arrives; `gated`: models for those who were let in. `asked` are the paths of requests."""

    models: dict[str, Path] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    spoilt: set[str] = field(default_factory=set)
    cut: set[str] = field(default_factory=set)
    gated: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    agents: list[str] = field(default_factory=list)
    url: str = ""


def large(name: str) -> bool:
    return name.endswith(".safetensors")


def digest(name: str, data: bytes) -> str:
    """What the hub knows a file by: sha256 of a large one, git's hash of a small one."""
    if large(name):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def listed(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    small = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    entry: dict[str, Any] = {"rfilename": path.name, "size": len(data), "blobId": small}
    if large(path.name):
        entry["lfs"] = {"sha256": digest(path.name, data), "size": len(data), "pointerSize": 134}
    return entry


@contextmanager
def local_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None: ...

        def refuse(self, code: int, name: str) -> None:
            self.send_response(code)
            self.send_header("X-Error-Code", name)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(self.path.partition("?")[0])
            hub.asked.append(f"{self.command} {path}")
            hub.agents.append(self.headers.get("User-Agent", ""))
            if path.startswith("/api/models/"):
                name, _, revision = path.removeprefix("/api/models/").partition("/revision/")
                return self.model(name, revision or "main")
            name, _, rest = path.removeprefix("/").partition("/resolve/")
            revision, _, file = rest.partition("/")
            return self.file(name, revision, file)

        def found(self, name: str, revision: str) -> str | None:
            """The commit, or an answer that says why not."""
            if name not in hub.models:
                self.refuse(401, "RepoNotFound")
            elif name in hub.gated:
                self.refuse(403, "GatedRepo")
            elif revision not in hub.revisions and revision not in hub.revisions.values():
                self.refuse(404, "RevisionNotFound")
            else:
                return hub.revisions.get(revision, revision)
            return None

        def model(self, name: str, revision: str) -> None:
            if commit := self.found(name, revision):
                files = [listed(path) for path in sorted(hub.models[name].iterdir())]
                body = json.dumps({"id": name, "sha": commit, "siblings": files}).encode()
                self.answer(body, {"Content-Type": "application/json"})

        def file(self, name: str, revision: str, file: str) -> None:
            commit = self.found(name, revision)
            if commit is None:
                return
            path = hub.models[name] / file
            if not path.is_file():
                return self.refuse(404, "EntryNotFound")
            data = path.read_bytes()
            tag = {"ETag": f'"{digest(file, data)}"', "X-Repo-Commit": commit}
            if file in hub.spoilt:
                data = bytes([data[0] ^ 1]) + data[1:]
            self.answer(data, tag, cut=file in hub.cut)

        def answer(self, body: bytes, headers: dict[str, str], cut: bool = False) -> None:
            begin = 0
            if given := self.headers.get("Range"):
                begin = int(given.removeprefix("bytes=").partition("-")[0])
                headers["Content-Range"] = f"bytes {begin}-{len(body) - 1}/{len(body)}"
            self.send_response(206 if given else 200)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body) - begin))
            self.end_headers()
            if self.command == "HEAD":
                return
            self.wfile.write(body[begin : begin + len(body) // 2] if cut else body[begin:])
            if cut:
                self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
