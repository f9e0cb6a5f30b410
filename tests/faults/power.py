"""A disk that forgets: what a file system may hold after the power has gone, by what was synchronised before.

A file's bytes are sure once it is synchronised, a name in a folder once the folder is. Of the rest any part may have
reached the disk: names in any choice, bytes as nothing, zeros or all.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.trace import Call

Step = tuple[str, Path, Any]


@dataclass(eq=False)
class File:
    now: bytes = b""
    safe: bytes | None = None  # None: never synchronised


@dataclass(eq=False)
class Folder:
    now: dict[str, Any] = field(default_factory=dict)
    safe: dict[str, Any] = field(default_factory=dict)
    pending: list[dict[str, Any]] = field(default_factory=list)  # names -> nodes; None: removed

    def change(self, names: dict[str, Any]) -> None:
        self.pending.append(names)
        put(self.now, names)


def put(entries: dict[str, Any], names: dict[str, Any]) -> None:
    for name, node in names.items():
        entries.pop(name, None)
        if node is not None:
            entries[name] = node


def recorded(call: Call) -> Step | None:
    """A call that changes the disk, as (name, path, more); None for another."""
    name, args = call.name, call.args
    if not name:
        return None
    if name == "create":
        return "create", call.path(1, 0), None
    if name in ("mkdir", "rmdir", "unlink"):
        return name, call.path(0), None
    if name == "unlinkat":
        return "unlink", call.path(1, 0), None
    if name == "rename":
        return name, call.path(0), call.path(1)
    if name == "renameat":
        return "rename", call.path(1, 0), call.path(3, 2)
    if name in ("fsync", "fdatasync"):
        return "fsync", call.file(0), None
    if name == "ftruncate":
        return name, call.file(0), args[1]
    if name == "write":
        lines = Path(f"/proc/{call.pid}/fdinfo/{args[0]}").read_text().split()
        return name, call.file(0), (int(lines[1]), call.memory(args[1], args[2]))
    raise AssertionError(f"a write uses {name}: teach it to this model")


class Disk:
    """The folder as it is now, all of it sure; then `apply` what a trace shows."""

    def __init__(self, folder: Path):
        self.folder, self.root = folder.resolve(), Folder()
        for path in sorted(self.folder.rglob("*")):
            node = Folder() if path.is_dir() else File(path.read_bytes(), path.read_bytes())
            parent, name = self._parent(path)
            parent.now[name] = parent.safe[name] = node

    def _parent(self, path: Path) -> tuple[Folder, str]:
        return self._node(path.parent), path.name

    def _node(self, path: Path) -> Any:
        node: Any = self.root
        for part in path.relative_to(self.folder).parts:
            node = node.now[part]
        return node

    def apply(self, name: str, path: Path, more: Any) -> None:
        path = Path(os.path.normpath(path))
        if not path.is_relative_to(self.folder):
            return
        if name == "fsync":
            node = self._node(path)
            node.safe = dict(node.now) if isinstance(node, Folder) else node.now
            if isinstance(node, Folder):
                node.pending = []
        elif name == "write":
            at, data = more
            node = self._node(path)
            node.now = node.now[:at].ljust(at, b"\0") + data + node.now[at + len(data) :]
        elif name == "ftruncate":
            node = self._node(path)
            node.now = node.now[:more].ljust(more, b"\0")
        elif name == "rename":
            self._rename(path, Path(more))
        else:
            parent, leaf = self._parent(path)
            if (name in ("create", "mkdir")) != (leaf in parent.now):
                new = {"create": File, "mkdir": Folder}.get(name)
                parent.change({leaf: new() if new else None})

    def _rename(self, path: Path, target: Path) -> None:
        source, name = self._parent(path)
        other, new = self._parent(target)
        assert source is other, "a rename between folders: teach it to this model"
        source.change({name: None, new: source.now[name]})

    def states(self) -> Iterator[dict[str, bytes | None]]:
        """What may be found after a crash now: path -> bytes, or None for a folder; each state once."""
        changes = list(pending(self.root))
        choices = [
            set(),
            set(changes),
            *({c} for c in changes),
            *({*changes} - {c} for c in changes),
        ]
        seen = set()
        for chosen in choices:
            for bytes_ in ("nothing", "zeros", "all"):
                state = dict(self._state(self.root, "", chosen, bytes_))
                key = hash(tuple(sorted((n, hash(x)) for n, x in state.items())))
                if key not in seen:
                    seen.add(key)
                    yield state

    def _state(
        self, node: Folder, at: str, chosen: set[tuple[int, int]], bytes_: str
    ) -> Iterator[tuple[str, bytes | None]]:
        entries = dict(node.safe)
        for i, names in enumerate(node.pending):
            if (id(node), i) in chosen:
                put(entries, names)
        for name, child in entries.items():
            if isinstance(child, Folder):
                yield f"{at}{name}", None
                yield from self._state(child, f"{at}{name}/", chosen, bytes_)
            else:
                yield f"{at}{name}", left(child, bytes_)


def left(file: File, bytes_: str) -> bytes:
    """What is in a file whose last bytes may not have been written."""
    if file.safe == file.now or bytes_ == "all":
        return file.now
    return (file.safe or b"") if bytes_ == "nothing" else b"\0" * len(file.now)


def pending(node: Folder) -> Iterator[tuple[int, int]]:
    """Changes of names that are not sure, as (folder, number); in removed and renamed folders too."""
    seen: set[int] = set()

    def walk(folder: Folder) -> Iterator[tuple[int, int]]:
        if id(folder) in seen:
            return
        seen.add(id(folder))
        yield from ((id(folder), i) for i in range(len(folder.pending)))
        changed = [n for names in folder.pending for n in names.values()]
        for child in [*folder.safe.values(), *folder.now.values(), *changed]:
            if isinstance(child, Folder):
                yield from walk(child)

    return walk(node)
