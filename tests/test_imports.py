"""The shape of the package, kept true: layers, sizes, the README's tree, no unsafe loading."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "regard"

LAYERS = [
    {"errors", "kernels"},
    {
        "block",
        "layers",
        "moe",
        "attention",
        "cache",
        "mask",
        "position",
        "config",
        "files",
        "machine",
    },
    {"models"},
    {"fast"},
    {"checkpoint", "text"},
    {"data", "presets"},
    {"decode"},
    {"see"},
    {"training"},
    {"evaluation"},
    {"parity", "report", "learn", "recipes", "serve"},
    {"labs"},
    {"cli"},
    {"__init__", "__main__"},
]
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}
# Parts of one layer keep apart, but for the heart: one layer of small files.
HEART = LAYERS[1] | LAYERS[2]


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in sources():
        yield path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"), str(path))


def part_of(module: str) -> str:
    """The row of the layer table: regard.attention.core -> attention, regard -> __init__."""
    return (module.split(".") + ["__init__"])[1]


def imports(path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, absolute module) of every import in a file of the package, those in functions too."""
    folder = path.parts[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = folder[: len(folder) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            # `from regard import mask` means the module, if there is one.
            for alias in (alias for alias in node.names if alias.name != "__version__"):
                module = base == "regard" and (alias.name in LEVEL or exists(alias.name))
                yield node.lineno, f"{base}.{alias.name}" if module else base
        elif isinstance(node, ast.Call) and called(node).endswith(("import_module", "__import__")):
            names = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
            yield from ((node.lineno, str(name)) for name in names)


def exists(name: str) -> bool:
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()


def called(node: ast.Call) -> str:
    return ast.unparse(node.func)


def breach(part: str, module: str) -> str | None:
    """Why `part` of the package may not import `module`, or None where it may."""
    if module.split(".")[0] != "regard":
        known = {*sys.stdlib_module_names, "torch", "triton"}
        outside = part == "kernels" and module.split(".")[0] not in known
        return "kernels use torch and triton only" if outside else None
    target = part_of(module)
    if target not in LEVEL:
        return f"{target} is not in the layer table"
    if LEVEL[target] > LEVEL[part]:
        return f"{part} (L{LEVEL[part]}) must not import {target} (L{LEVEL[target]}) above it"
    if LEVEL[target] == LEVEL[part] and target != part and part not in HEART:
        return f"{part} and {target} are of one layer and must not import each other"
    return None


def test_imports_point_down() -> None:
    wrong = []
    for path, tree in trees():
        part = path.with_suffix("").parts[1]
        if part not in LEVEL:
            wrong.append(f"{path}: {part} is not in the layer table of {Path(__file__).name}")
            continue
        for line, module in imports(path, tree):
            why = breach(part, module)
            if why:
                wrong.append(f"{path}:{line} imports {module}: {why}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "part, source, allowed",
    [
        ("attention", "from ..mask import causal", True),
        ("attention", "from regard import mask", True),
        ("attention", "from .. import presets", False),
        ("attention", "def f():\n    from regard.models.transformer import Decoder", False),
        ("attention", "import regard", False),
        ("attention", "import importlib\nimportlib.import_module('regard.training')", False),
        ("training", "from .data import Batch", True),
        ("training", "from ..decode.engine import Engine", True),
        ("data", "from ..decode.engine import Engine", False),
        ("text", "from ..checkpoint.store import Store", False),
        ("serve", "from regard.decode import engine", True),
        ("kernels", "import math, torch, triton.language", True),
        ("kernels", "import numpy", False),
        ("models", "from regard.nowhere import thing", False),
    ],
)
def test_layer_rule_sees_every_form_of_import(part: str, source: str, allowed: bool) -> None:
    found = imports(Path("regard", part, "file.py"), ast.parse(source))
    assert all(breach(part, module) is None for _, module in found) == allowed


def test_import_regard_needs_only_torch_numpy_safetensors() -> None:
    script = """
import sys

BLOCKED = set('''transformers tokenizers huggingface_hub tyro rich sacrebleu matplotlib msgspec
starlette uvicorn datasets'''.split())


class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in BLOCKED:
            raise ModuleNotFoundError(f'import regard must not need {name}', name=name)


sys.meta_path.insert(0, Block())
import regard

regard.presets, regard.load, regard.build
"""
    run = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr


def unsafe(node: ast.AST) -> str | None:
    """What a syntax node does that could run code out of a file it reads, or None."""
    banned = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
    if isinstance(node, ast.Import):
        names = {alias.name.split(".")[0] for alias in node.names} & banned
        return f"imports {', '.join(names)}" if names else None
    if isinstance(node, ast.ImportFrom):
        module, names = node.module or "", {alias.name for alias in node.names}
        if module.split(".")[0] in banned:
            return f"imports {module}"
        return "imports torch.load" if module == "torch" and "load" in names else None
    if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load":
        return "uses torch.load"
    if isinstance(node, ast.Call) and called(node) in {"eval", "exec"}:
        return f"calls {called(node)}"
    if isinstance(node, ast.keyword) and node.arg in {"trust_remote_code", "allow_pickle"}:
        refused = isinstance(node.value, ast.Constant) and node.value.value is False
        return None if refused else f"passes {node.arg}"
    return None


# The one file that may use torch.load: it does so in a process of its own.
UNPICKLER = Path("regard/checkpoint/convert.py")


def guarded(path: Path, tree: ast.Module) -> set[ast.AST]:
    """Uses of torch.load that are allowed: in that file, called, and with weights_only=True spelt out."""
    return {
        node.func
        for node in ast.walk(tree)
        if path == UNPICKLER
        and isinstance(node, ast.Call)
        and called(node) == "torch.load"
        and any(ast.unparse(keyword) == "weights_only=True" for keyword in node.keywords)
    }


def faults(path: Path, tree: ast.Module) -> list[str]:
    allowed = guarded(path, tree)
    found = [(node, unsafe(node)) for node in ast.walk(tree) if node not in allowed]
    return [f"{path}:{getattr(node, 'lineno', '?')} {why}" for node, why in found if why]


def test_no_pickle_or_remote_code() -> None:
    wrong = [fault for path, tree in trees() for fault in faults(path, tree)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "path, source, allowed",
    [
        (UNPICKLER, "torch.load(file, mmap=True, weights_only=True)", True),
        (UNPICKLER, "torch.load(file)", False),
        (UNPICKLER, "torch.load(file, weights_only=False)", False),
        (UNPICKLER, "torch.load(file, weights_only=safe)", False),
        (UNPICKLER, "load = torch.load", False),
        (UNPICKLER, "import pickle", False),
        (Path("regard/checkpoint/store.py"), "torch.load(file, weights_only=True)", False),
        (Path("regard/checkpoint/store.py"), "from torch import load", False),
    ],
)
def test_torch_load_is_for_one_file_and_for_weights_only(
    path: Path, source: str, allowed: bool
) -> None:
    assert (not faults(path, ast.parse(source))) == allowed


def test_no_circle_of_imports() -> None:
    """Modules that import each other cannot be read one after the other; imports in functions count too."""
    every = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sources()}
    arrows = {name: targets(path, every) - {name} for name, path in every.items()}
    while low := {name for name, below in arrows.items() if not below & arrows.keys()}:
        arrows = {name: below for name, below in arrows.items() if name not in low}
    assert not arrows, f"in a circle, or above one: {sorted(arrows)}"


def targets(path: Path, every: dict[str, Path]) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & every.keys()


def test_readme_tree_is_true() -> None:
    """One screen: every folder and every file at the top, in the first code block that opens with `regard/`."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = re.search(r"^```\w*\nregard/\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert tree, "README.md has no code block that starts with the line `regard/`"
    listed = set(re.findall(r"(?:^  |(?<=py ))(\w+(?:/|\.py))(?= |$)", tree[1], re.MULTILINE))
    # A folder that moved leaves what Python compiled of it.
    real = {f"{path.parent.name}/" for path in PACKAGE.glob("[a-z]*/*") if path.is_file()}
    real |= {path.name for path in PACKAGE.glob("[a-z]*.py")}
    assert listed == real


def test_wings_keep_their_budgets() -> None:
    """The table in docs/architecture.md is the law: every file belongs to one wing, and no wing outgrows its line."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [a-z ]+ \| ([a-z_, ]+) \| ([\d,]+) \|$", text, re.MULTILINE)
    assert rows, "docs/architecture.md has no table of wings"
    rooms = [room for row in rows for room in row[0].split(", ")]
    assert len(rooms) == len(set(rooms)), "a room stands in two wings"
    lines: dict[str, int] = dict.fromkeys(rooms, 0)
    for path in sources():
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        assert room in lines, f"{path} belongs to no wing of docs/architecture.md"
        lines[room] += len(path.read_text(encoding="utf-8").splitlines())
    for held, most in rows:
        count = sum(lines[room] for room in held.split(", "))
        assert count <= int(most.replace(",", "")), f"{held}: {count} lines, at most {most}"


# Lines that a reader must hold in mind at once. A launch of a kernel has an argument a line.
MOST_OF_A_FILE, MOST_OF_A_CLASS, MOST_OF_A_FUNCTION = 700, 300, 60
TABLES = {"learn/mechanisms.py"}
LAUNCHES = {"kernels/triton/attention.py:decode"}


def too_long(name: str, source: str) -> list[str]:
    """What is, but for kernels, which Triton compiles whole."""
    found = []
    if len(source.splitlines()) > MOST_OF_A_FILE and name not in TABLES:
        found.append(name)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            most = MOST_OF_A_CLASS
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            most = MOST_OF_A_FUNCTION
        else:
            continue
        kernel = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
        lines = (node.end_lineno or 0) - node.lineno + 1
        if lines > most and not kernel and f"{name}:{node.name}" not in LAUNCHES:
            found.append(f"{name}:{node.name} {lines}")
    return found


def test_nothing_is_too_long_to_read() -> None:
    files = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    found = (too_long(name, path.read_text(encoding="utf-8")) for name, path in files.items())
    assert not [each for some in found for each in some]


@pytest.mark.parametrize(
    "source, seen",
    [
        ("def f():\n" + "    pass\n" * 59, []),
        ("def f():\n" + "    pass\n" * 60, ["x.py:f 61"]),
        ("@triton.jit\ndef f():\n" + "    pass\n" * 99, []),
        ("class A:\n" + "    a = 1\n" * 300, ["x.py:A 301"]),
        ("a = 1\n" * 701, ["x.py"]),
    ],
)
def test_what_is_too_long_is_seen(source: str, seen: list[str]) -> None:
    assert too_long("x.py", source) == seen


def test_no_machine_paths() -> None:
    # every file that git has or would take
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs a git checkout: the list of tracked files comes from git")
    pattern = re.compile(rb"(?:^|[^A-Za-z])/(?:work|farm|tmp|root|home|opt|Users)/")
    wrong = []
    for name in names.split("\0"):
        path = ROOT / name
        data = path.read_bytes() if name and path.is_file() else b""
        if b"\0" in data:
            continue
        for number, line in enumerate(data.split(b"\n"), 1):
            if pattern.search(line):
                wrong.append(f"{name}:{number} {line.strip()[:100].decode(errors='replace')}")
    assert not wrong, "\n".join(wrong)


# What a block is made of: these are replaced in fast/, by a row of a table, and nowhere else.
PARTS = {
    "attention", "cross", "ffn", "project_qkv", "attend", "core_attention", "project_out", "project_up",
    "project_down", "expert_input", "mix", "add_residual", "project", "forward", "hidden", "encode", "logits",
    "route", "choice", "dots", "join", "entries", "queries",
}  # fmt: skip


def swaps(path: Path, tree: ast.Module) -> list[str]:
    """Where a file gives an object that is not itself another part, method or class."""
    wrong = []
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in (x for t in targets for x in ast.walk(t)):
            if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store):
                own = isinstance(target.value, ast.Name) and target.value.id == "self"
                module = ast.unparse(target.value).startswith("sys.modules[")
                swapped = target.attr == "__class__" and not module
                if swapped or (target.attr in PARTS and not own):
                    wrong.append(f"{path}:{node.lineno} {ast.unparse(target)} = ...")
            held = isinstance(target, ast.Subscript) and ast.unparse(target.value)
            if held and held.endswith((".__dict__", "._modules")):
                wrong.append(f"{path}:{node.lineno} {held}[...] = ...")
    return wrong


def test_only_fast_replaces_a_part_of_a_model() -> None:
    """Models are put together by models/ and their files at the top, and changed by fast/ alone."""
    wrong = []
    for path, tree in trees():
        if path.parts[1] not in ("fast", "models", "kernels", "cache"):
            wrong += swaps(path, tree)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "source, allowed",
    [
        ("self.attention = attention.make(dim)", True),
        ("block.attention = Fast(block.attention)", False),
        ("layer.__dict__['choice'] = choice", False),
        ("module.__class__ = Fast", False),
        ("model.forward, model.other = f, g", False),
        ("new.states = []", True),
    ],
)
def test_swaps_are_seen(source: str, allowed: bool) -> None:
    assert (not swaps(Path("regard/see/file.py"), ast.parse(source))) == allowed
