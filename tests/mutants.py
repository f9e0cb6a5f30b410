"""Do the tests notice? Small mistakes are planted in the library, one at a time, and the tests that reach them are run.

    python -m tests.mutants                      150 of them, on every core: what `make mutants` runs
    python -m tests.mutants --count 20 --seed 3  others
    python -m tests.mutants --only 17 42         these of them again, with what pytest says

First what `make test` runs is run once to see which test calls which function, kept in .cache/mutants/map.json (--again
makes it anew). A mistake is a changed comparison, constant or sign, two swapped arguments or a dropped term; but not
another size of a chunk or a room, nor the way of another device, where a comment there says that it is chosen for
speed: any size and either way give the same. A survivor either changes no result, or shows a test that is missing. Not
a part of CI: it takes as long as several suites.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import hashlib
import itertools
import json
import os
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAP = ROOT / ".cache" / "mutants" / "map.json"
# The slots and steps of a graph are left out: without a GPU few tests can reach them.
TARGETS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in (
        "attention/*.py", "mask.py", "position.py", "cache/*.py", "layers.py", "moe.py", "models/*.py",
        "decode/*.py", "decode/runners/*.py", "checkpoint/rules.py", "checkpoint/tensors.py", "training/trainer.py",
        "training/losses.py", "training/objectives.py", "training/index_losses.py",
        "data/corrupt.py", "training/optim.py", "training/checkpoint.py",
    )
    for path in (ROOT / "regard").glob(pattern)
    if path.name not in ("__init__.py", "memory.py", "slots.py", "steps.py")
)  # fmt: skip
# Seconds of tests, by the map, that one mistake is worth; and the longest it may take before it counts as a hang.
WORTH, LONGEST = 120, 400

# --- which test calls which function: a plugin of pytest --------------------------------------------------------------

_calls: dict[str, Any] = {}
_passed: set[str] = set()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    report: Any = yield
    if report.when == "call" and report.passed:
        _passed.add(item.nodeid)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    reached: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and "regard" in frame.f_code.co_filename:
            reached.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    start = time.perf_counter()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        return (yield)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        functions = {(os.path.relpath(f, ROOT), name) for f, name in reached}
        mine = sorted(f"{f}:{name}" for f, name in functions if f in TARGETS)
        _calls[item.nodeid] = [time.perf_counter() - start, mine]


def pytest_sessionfinish() -> None:
    if _calls:
        folder = MAP.parent / "parts"
        folder.mkdir(parents=True, exist_ok=True)
        calls = {test: found for test, found in _calls.items() if test in _passed}
        (folder / f"{os.getpid()}.json").write_text(json.dumps(calls), encoding="utf-8")


def make_map(jobs: int) -> None:
    shutil.rmtree(MAP.parent, ignore_errors=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.mutants", "-n", str(jobs)]
    command += ["-m", "not wide"]
    subprocess.run(command, cwd=ROOT, env=environment(ROOT), check=False)
    calls: dict[str, Any] = {}
    for path in (MAP.parent / "parts").glob("*.json"):
        calls |= json.loads(path.read_text(encoding="utf-8"))
    MAP.write_text(json.dumps(calls), encoding="utf-8")


def environment(root: Path) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}


# --- the mistakes -----------------------------------------------------------------------------------------------------


class Mutant(NamedTuple):
    file: str
    line: int
    function: str  # the function around it, as Python names it; "" outside of any
    start: int  # where the source is replaced
    end: int
    old: str
    new: str

    def __str__(self) -> str:
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        return f"{self.file}:{self.line}  {old}  ->  {new}"


COMPARE = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
SIGN = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*"}
# Calls whose two arguments may change places, or that could not run if they did.
SAME = re.compile(
    r"\b(min|max|minimum|maximum|equal|promote_types|transpose|isinstance|gcd|addcmul_)$"
)
# What is said, declared or checked is not what is computed.
QUIET = (ast.Raise, ast.Assert, ast.AnnAssign, ast.arg, ast.JoinedStr)
LOOKS = ("strict", "stacklevel", "indent")
# In a comment beside a name at the top of a file, or above it: any other value gives the same results. So does either
# answer to the question which device this is, where the comment stands at that line: a mistake would do on one kind of
# machine what is right on another. What else the line has is still changed.
SPEED = re.compile(r"#.*\bchosen for speed\b")
DEVICE = re.compile(r"\bdevice\.type\b")


def mutants(file: str) -> Iterator[Mutant]:
    source = (ROOT / file).read_text(encoding="utf-8")
    starts = list(itertools.accumulate((len(x) for x in source.splitlines(True)), initial=0))
    lines = source.splitlines(True)

    def place(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    def text(node: ast.expr) -> str:
        return source[slice(*span(node))]

    def span(node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)

    def for_speed(node: ast.AST) -> bool:
        at_the_top = isinstance(node, ast.Assign) and not node.col_offset
        which_device = isinstance(node, ast.Compare) and DEVICE.search(text(node.left))
        if not (at_the_top or which_device):
            return False
        first = node.lineno - 1
        while lines[first - 1].lstrip().startswith("#"):
            first -= 1
        return any(map(SPEED.search, lines[first : node.end_lineno]))

    def replaced(node: ast.expr) -> list[str]:
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            op = COMPARE[type(node.ops[0])]
            return [f"({text(node.left)}) {op} ({text(node.comparators[0])})"]
        if isinstance(node, ast.BinOp) and type(node.op) in SIGN:
            left, right = text(node.left), text(node.right)
            return [f"(({left}) {SIGN[type(node.op)]} ({right}))", f"({left})", f"({right})"]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not)):
            return [f"({text(node.operand)})"]
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return [repr(node.value + 1), repr(node.value * 2 or 1)]
        if isinstance(node, ast.Constant) and type(node.value) is bool:
            return [repr(not node.value)]
        if isinstance(node, ast.Call) and len(node.args) >= 2:
            a, b = node.args[:2]
            known = ast.Starred not in (type(a), type(b)) and not SAME.search(text(node.func))
            if known and text(a) != text(b):
                whole, (first, _), (_, last) = span(node)[0], span(a), span(b)
                end = span(node)[1]
                return [source[whole:first] + f"{text(b)}, {text(a)}" + source[last:end]]
        return []

    def walk(node: ast.AST, function: str, inside: str) -> Iterator[Mutant]:
        """`inside`: how Python begins the name of a function that is defined here."""
        children = ast.iter_child_nodes(node)
        if isinstance(node, QUIET) or for_speed(node):
            return
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function, inside = f"{inside}{node.name}", f"{inside}{node.name}.<locals>."
            children = iter(node.body)
        elif isinstance(node, ast.Lambda):
            function, inside = f"{inside}<lambda>", f"{inside}<lambda>.<locals>."
            children = iter([node.body])
        elif isinstance(node, ast.ClassDef):
            inside, children = f"{inside}{node.name}.", iter(node.body)
        if isinstance(node, ast.expr):
            for new in replaced(node):
                start, end = span(node)
                yield Mutant(file, node.lineno, function, start, end, source[start:end], new)
        for child in children:
            # zip(strict=True) is a check; a stack level tells whose line a warning names, an indent how a file looks.
            if not (isinstance(child, ast.keyword) and child.arg in LOOKS):
                yield from walk(child, function, inside)

    yield from walk(ast.parse(source), "", "")


def chosen(count: int, seed: int) -> list[Mutant]:
    """At most one for a line, the lines drawn from all targets alike: by the hash of what stands there, so that a
    change elsewhere leaves the others as they are."""
    lines: dict[tuple[str, int], list[Mutant]] = {}
    for file in TARGETS:
        for mutant in mutants(file):
            lines.setdefault((file, mutant.line), []).append(mutant)

    def order(some: list[Mutant]) -> str:
        first = some[0]
        text = f"{seed} {first.file} {first.function} {[(m.old, m.new) for m in some]}"
        return hashlib.sha256(text.encode()).hexdigest()

    some = sorted(lines.values(), key=order)[:count]
    return [random.Random(order(each)).choice(each) for each in some]


# --- trying them ------------------------------------------------------------------------------------------------------


def tests_for(mutant: Mutant, calls: dict[str, Any]) -> list[str]:
    """The tests that call its function, or outside of any that call the file: from every test file alike, its quickest
    first, so that many quick tests of one do not leave those of another out. A function within another may be called
    where Python tells nobody (flex attention): then those of the other one. One that is called at import alone, as
    where a table is made, is outside of any."""
    called = {f for _, functions in calls.values() for f in functions}
    name = f"{mutant.file}:{mutant.function}"
    while name not in called and ".<locals>." in name:
        name = name.rpartition(".<locals>.")[0]
    anywhere = name not in called
    mine = sorted(
        (seconds, test)
        for test, (seconds, functions) in calls.items()
        if name in functions
        or (anywhere and any(f.startswith(f"{mutant.file}:") for f in functions))
    )
    files: dict[str, float] = {}
    turns: list[tuple[float, float, str]] = []
    for seconds, test in mine:
        file = test.partition("::")[0]
        files[file] = files.get(file, 0.0) + seconds
        turns.append((files[file], seconds, test))
    turns.sort()
    spent = itertools.accumulate(seconds for _, seconds, _ in turns)
    return [test for (_, _, test), total in zip(turns, spent) if total < WORTH]


def noticed(mutant: Mutant, tests: list[str], tree: Path, loud: bool) -> bool:
    path, source = tree / mutant.file, (ROOT / mutant.file).read_text(encoding="utf-8")
    path.write_text(source[: mutant.start] + mutant.new + source[mutant.end :], encoding="utf-8")
    names = tree / ".tests"
    names.write_text("\n".join(tests), encoding="utf-8")
    flags = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", f"--rootdir={tree}"]
    command = [sys.executable, "-m", "pytest", *flags, f"@{names}"]
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment(tree), timeout=LONGEST, capture_output=not loud
        )
        return done.returncode != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_text(source, encoding="utf-8")


def copy_tree(to: Path) -> Path:
    """What git knows of the project, so that a mistake is planted beside it and not in it."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
        files = [ROOT / name for name in names.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        parts = {path: path.relative_to(ROOT).parts for path in ROOT.rglob("*")}
        files = [p for p, names in parts.items() if not any(x.startswith(".") for x in names)]
    for path in files:
        if path.is_file():
            target = to / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)
    return to


def there() -> set[str]:
    """Every test that there is: one that is gone would look as if it had noticed something."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "not wide"]
    found = subprocess.run(
        command, cwd=ROOT, env=environment(ROOT), check=False, capture_output=True, text=True
    )
    return set(found.stdout.splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--again", action="store_true", help="see anew which test calls what")
    parser.add_argument("--only", type=int, nargs="*", default=[], metavar="NUMBER")
    options = parser.parse_args()
    if options.again or not MAP.exists():
        make_map(options.jobs)
    known = there()
    calls = {
        test: found
        for test, found in json.loads(MAP.read_text(encoding="utf-8")).items()
        if test in known
    }
    some = list(enumerate(chosen(options.count, options.seed)))
    some = [(i, m) for i, m in some if not options.only or i in options.only]
    trees: queue.Queue[Path] = queue.Queue()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        for job in range(options.jobs):
            trees.put(copy_tree(Path(folder) / str(job) / "main"))

        def attempt(numbered: tuple[int, Mutant]) -> tuple[int, Mutant, int, bool]:
            number, mutant = numbered
            tests, tree = tests_for(mutant, calls), trees.get()
            try:
                found = bool(tests) and noticed(mutant, tests, tree, bool(options.only))
            finally:
                trees.put(tree)
            return number, mutant, len(tests), found

        survivors = 0
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            for done in concurrent.futures.as_completed(pool.submit(attempt, x) for x in some):
                number, mutant, tests, found = done.result()
                survivors += not found
                if not found:
                    print(f"survived {number:4} ({tests} tests)  {mutant}", flush=True)
    share = 1 - survivors / max(1, len(some))
    print(f"{len(some) - survivors} of {len(some)} mistakes noticed, {share:.1%}")


if __name__ == "__main__":
    main()
