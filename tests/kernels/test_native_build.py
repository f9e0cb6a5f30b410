"""The C code is compiled once, by the user for the user alone, for the instruction set that was
asked for, and its absence is told, never a failure."""

import json
import os
import platform
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from regard.kernels.c import native

ROOT = Path(__file__).resolve().parents[2]
# compiled with less care, which is quicker
SAY = """from regard.kernels.c import native
native.FLAGS = [f.replace("-O3", "-O1") for f in native.FLAGS]
print(native.build(), "|", native.why())"""


# A process with torch in it, whose import takes seconds, and nothing of regard's. For each line it forks one that runs
# the code in that environment, and tells how it ended.
FORKS = """
import json, os, sys, traceback
import torch
for line in sys.stdin:
    code, env = json.loads(line)
    if os.fork() == 0:
        os.environ.clear()
        os.environ.update(env)
        try:
            exec(code, {})
        except BaseException:
            print(traceback.format_exc())
            os._exit(1)
        finally:
            sys.stdout.flush()
        os._exit(0)
    print("ended with", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


@cache
def forks() -> subprocess.Popen[str]:
    """It ends when its input does, with the tests."""
    env, pipe = {**os.environ, "PYTHONPATH": str(ROOT)}, subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", FORKS], env=env, stdin=pipe, stdout=pipe, text=True
    )


def told(code: str = SAY, **env: str) -> str:
    """What a process prints that has imported nothing of regard's before."""
    process = forks()
    assert process.stdin is not None and process.stdout is not None
    print(json.dumps([code, {**os.environ, **env}]), file=process.stdin, flush=True)
    said = ""
    for line in process.stdout:
        if line.startswith("ended with "):
            assert line == "ended with 0\n", said
            return said.strip()
        said += line
    raise AssertionError("the process that forks has ended")


def test_switched_off_is_told(tmp_path: Path) -> None:
    assert told(REGARD_NATIVE="0") == "False | switched off by REGARD_NATIVE=0"


def test_missing_compiler_is_told(tmp_path: Path) -> None:
    said = told(CC="no-such-compiler", XDG_CACHE_HOME=str(tmp_path))
    assert said == "False | no C compiler 'no-such-compiler'; install gcc or name one in $CC"


def test_failing_compiler_is_told(tmp_path: Path) -> None:
    assert "could not compile the native code" in told(CC="false", XDG_CACHE_HOME=str(tmp_path))
    assert list((tmp_path / "regard").iterdir()) == []


def test_nothing_is_compiled_unless_it_is_asked_for(tmp_path: Path) -> None:
    code = "from regard.kernels.c import native; print(native.library(), '|', native.why())"
    if native.why():
        pytest.skip(f"no native code: {native.why()}")
    assert told(code, XDG_CACHE_HOME=str(tmp_path)) == f"None | {native.LATER}"
    assert list((tmp_path / "regard").iterdir()) == []


def test_compiled_once_found_without_a_compiler_and_anew_if_spoiled(tmp_path: Path) -> None:
    if native.why():
        pytest.skip(f"no native code: {native.why()}")
    assert told(XDG_CACHE_HOME=str(tmp_path)) == "True |"
    (library,) = (tmp_path / "regard").iterdir()
    before = library.stat().st_mtime_ns
    there = {"XDG_CACHE_HOME": str(tmp_path), "PATH": "", "CC": "no-such-compiler"}
    assert told(**there) == "True |"
    assert library.stat().st_mtime_ns == before
    assert (tmp_path / "regard").stat().st_mode & 0o777 == 0o700
    library.write_bytes(library.read_bytes()[:1000])
    assert told(XDG_CACHE_HOME=str(tmp_path)) == "True |"
    assert library.stat().st_size > 1000


def test_library_of_a_wheel_is_found_beside_its_sources(tmp_path: Path) -> None:
    """And no other: one of other sources is not this one."""
    if native.why():
        pytest.skip(f"no native code: {native.why()}")
    shutil.copytree(native.SOURCES, tmp_path / "c")
    shutil.copy(native.library()._name, tmp_path / "c")  # type: ignore[union-attr]
    code = f"""from pathlib import Path
from regard.kernels.c import native
native.SOURCES = Path({str(tmp_path / "c")!r})
print(native.library() is not None, "|", native.why())"""
    there = {"XDG_CACHE_HOME": str(tmp_path / "none"), "PATH": "", "CC": "no-such-compiler"}
    assert told(code, **there) == "True |"
    with open(tmp_path / "c" / "gemm.c", "a", encoding="utf-8") as file:
        file.write("/* another */")
    assert told(code, **there) == f"False | {native.LATER}"


def test_folder_that_others_may_write_to_is_not_used(tmp_path: Path) -> None:
    if native.why():
        pytest.skip(f"no native code: {native.why()}")
    (tmp_path / "regard").mkdir()
    (tmp_path / "regard").chmod(0o777)
    assert told(XDG_CACHE_HOME=str(tmp_path)) == "True |"  # compiled for this process alone
    assert list((tmp_path / "regard").iterdir()) == []


# --- instruction sets ---

SSE = "flags : fpu sse2"
AVX2 = f"{SSE} avx2 fma"
AVX2VNNI = f"{AVX2} avx_vnni"
AVX512F = f"{AVX2} avx512f avx512bw avx512cd avx512dq avx512vl"
AVX512 = f"{AVX512F} avx512_vnni"
AVX512BF16 = f"{AVX512} avx512_bf16"
AMX = f"{AVX512BF16} avx_vnni amx_tile amx_bf16 amx_int8"
CPUS = {
    "amx": (
        "x86_64",
        AMX,
        ["amx", "avx512bf16", "avx512", "avx512f", "avx2vnni", "avx2", "sse"],
    ),
    "avx512bf16": ("x86_64", AVX512BF16, ["avx512bf16", "avx512", "avx512f", "avx2", "sse"]),
    "avx512": ("x86_64", AVX512, ["avx512", "avx512f", "avx2", "sse"]),
    "avx512f": ("x86_64", AVX512F, ["avx512f", "avx2", "sse"]),
    "avx2vnni": ("x86_64", AVX2VNNI, ["avx2vnni", "avx2", "sse"]),
    "avx2": ("x86_64", AVX2, ["avx2", "sse"]),
    "sse": ("x86_64", SSE, ["sse"]),
    "dotprod": ("aarch64", "Features : fp asimd asimddp", ["dotprod", "neon"]),
    "neon": ("aarch64", "Features : fp asimd", ["neon"]),
}


@pytest.fixture(params=CPUS)
def cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A CPU whose best form is the name."""
    machine, found, _ = CPUS[request.param]
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(native, "_cpu", lambda: found)
    monkeypatch.setattr(native, "_tiles_allowed", lambda: True)
    monkeypatch.delenv("REGARD_ISA", raising=False)
    return request.param


def test_every_form_is_the_best_of_some_cpu() -> None:
    assert list(CPUS) == list(native.FORMS)


def test_best_form_of_a_cpu_is_taken_and_others_hide_it(
    cpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = CPUS[cpu][2]
    assert native.forms() == known and native.form() == cpu
    for lower in known[1:]:
        monkeypatch.setenv("REGARD_ISA", lower)
        assert native.form() == lower
    assert len({native._name(form) for form in known}) == len(known)  # a library for each


def test_tiles_that_the_system_forbids_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(native, "_cpu", lambda: AMX)
    monkeypatch.setattr(native, "_tiles_allowed", lambda: False)
    assert native.forms() == CPUS["amx"][2][1:]


@pytest.mark.parametrize("asked", ["avx12", *native.FORMS])
def test_form_that_the_cpu_cannot_run_is_told(
    cpu: str, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = CPUS[cpu][2]
    monkeypatch.setenv("REGARD_ISA", asked)
    monkeypatch.setattr(native, "_kept", None)
    if asked in known:
        assert native.form() == asked
        return
    assert not native.build()
    assert native.why() == (
        f"REGARD_ISA={asked} is not an instruction set of this CPU; it has {', '.join(known)}"
    )
