"""What users can call, frozen: every public name of `regard` with its signature, in public_names.txt.

A change of that file is a change for users. Where it is meant: python -m tests.test_public_names, and say so in
CHANGELOG.md.
"""

import difflib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import regard

FILE = Path(__file__).with_name("public_names.txt")


def lines() -> Iterator[str]:
    for name in regard.__all__:
        value = getattr(regard, name)
        if inspect.isclass(value):
            # inspect finds none for an exception that is made as ValueError is.
            error = issubclass(value, Exception)
            yield f"class {name}{'(text)' if error else signature(value)}"
            yield from (f"  {name}.{line}" for line in members(value))
        elif callable(value):
            yield f"{name}{signature(value)}"
        elif isinstance(value, dict):
            yield f"{name}: {', '.join(sorted(value))}"
        else:
            yield f"{name}: {type(value).__name__}"


def members(cls: type) -> Iterator[str]:
    """The public methods and properties that a class has from this package."""
    for name in sorted(n for n in dir(cls) if not n.startswith("_")):
        home = next(c for c in cls.__mro__ if name in vars(c))
        value = inspect.getattr_static(cls, name)
        if not home.__module__.startswith("regard."):
            continue
        if isinstance(value, property):
            yield f"{name}: property"
        elif callable(getattr(cls, name)):
            yield f"{name}{signature(getattr(cls, name))}"


def signature(value: Any) -> str:
    """Names, order and defaults; not annotations, which may be spelt in several ways."""
    plain = inspect.signature(value)
    parameters = [p.replace(annotation=p.empty) for p in plain.parameters.values()]
    text = str(plain.replace(parameters=parameters, return_annotation=plain.empty))
    return re.sub(r"<function .*? at 0x\w+>", "...", text)


def test_public_names_and_signatures_are_frozen() -> None:
    frozen = FILE.read_text(encoding="utf-8").splitlines()
    changes = list(difflib.unified_diff(frozen, list(lines()), "frozen", "now", lineterm="", n=0))
    how = "if this is meant: python -m tests.test_public_names, and say so in CHANGELOG.md"
    assert not changes, "\n".join([*changes, how])


if __name__ == "__main__":
    FILE.write_text("".join(f"{line}\n" for line in lines()), encoding="utf-8")
