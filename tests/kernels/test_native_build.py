"""The C code is compiled once, by the user for the user alone, and its absence is told, never a failure."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from regard.kernels import native

ROOT = Path(__file__).resolve().parents[2]
# compiled with less care, which is quicker
SAY = """from regard.kernels import native
native.FLAGS = [f.replace("-O3", "-O1") for f in native.FLAGS]
print(native.build(), "|", native.why())"""


def told(code: str = SAY, **env: str) -> str:
    """What a fresh process prints."""
    whole = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    done = subprocess.run([sys.executable, "-c", code], env=whole, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_switched_off_is_told(tmp_path: Path) -> None:
    assert told(REGARD_NATIVE="0") == "False | switched off by REGARD_NATIVE=0"


def test_missing_compiler_is_told(tmp_path: Path) -> None:
    said = told(CC="no-such-compiler", XDG_CACHE_HOME=str(tmp_path))
    assert said == "False | no C compiler 'no-such-compiler'; install gcc or name one in $CC"


def test_failing_compiler_is_told(tmp_path: Path) -> None:
    assert "could not compile the native code" in told(CC="false", XDG_CACHE_HOME=str(tmp_path))
    assert list((tmp_path / "regard").iterdir()) == []


def test_nothing_is_compiled_unless_it_is_asked_for(tmp_path: Path) -> None:
    code = "from regard.kernels import native; print(native.library(), '|', native.why())"
    if native.why():
        pytest.skip(f"no native code: {native.why()}")
    assert told(code, XDG_CACHE_HOME=str(tmp_path)) == f"None | {native.LATER}"
    assert list((tmp_path / "regard").iterdir()) == []


def test_compiled_once_and_a_spoiled_library_anew(tmp_path: Path) -> None:
    if native.why():
        pytest.skip(f"no native code: {native.why()}")
    assert told(XDG_CACHE_HOME=str(tmp_path)) == "True |"
    (library,) = (tmp_path / "regard").iterdir()
    before = library.stat().st_mtime_ns
    assert told(XDG_CACHE_HOME=str(tmp_path)) == "True |"
    assert library.stat().st_mtime_ns == before
    assert (tmp_path / "regard").stat().st_mode & 0o777 == 0o700
    library.write_bytes(library.read_bytes()[:1000])
    assert told(XDG_CACHE_HOME=str(tmp_path)) == "True |"
    assert library.stat().st_size > 1000


def test_folder_that_others_may_write_to_is_not_used(tmp_path: Path) -> None:
    if native.why():
        pytest.skip(f"no native code: {native.why()}")
    (tmp_path / "regard").mkdir()
    (tmp_path / "regard").chmod(0o777)
    assert told(XDG_CACHE_HOME=str(tmp_path)) == "True |"  # compiled for this process alone
    assert list((tmp_path / "regard").iterdir()) == []
