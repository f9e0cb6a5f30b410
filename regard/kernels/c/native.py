"""C code for the CPU: every *.c beside this file, compiled once into one library that ctypes loads. `build` compiles
it, where a model is worth the wait; from then on everybody has it.

A library is named by a hash of what it is made of: sources, flags, instruction set. It lies beside this file where the
wheel brought it (`make wheel`), or in the user's cache folder; a compiler is needed to make it, not to find it. Without
one, on other systems, or with REGARD_NATIVE=0 there is no library, `why` tells the reason, and callers take their torch
forms. $CC names another compiler. Nothing happens on import.

The best form that the CPU can run is taken. REGARD_ISA names another and so hides what is above it, to see what a
smaller machine would do:

    REGARD_ISA=amx         tiles of bf16 and int8
    REGARD_ISA=avx512bf16  vectors of 16 floats, of pairs of bf16 and of fours of int8 (VNNI)
    REGARD_ISA=avx512      the same without bf16
    REGARD_ISA=avx512f     vectors of 16 floats alone: int8 in 16 bits
    REGARD_ISA=avx2vnni    vectors of 8 floats and of fours of int8
    REGARD_ISA=avx2        vectors of 8 floats alone: int8 in 16 bits
    REGARD_ISA=sse         vectors of 4 floats (any x86-64)
    REGARD_ISA=dotprod     vectors of 4 floats and of fours of int8 (aarch64 since 2018)
    REGARD_ISA=neon        vectors of 4 floats (any aarch64)

One that does not exist or that this CPU cannot run is a reason for `why`. torch's own kernels have
variables of their own: ATEN_CPU_CAPABILITY=avx2 and ONEDNN_MAX_CPU_ISA=AVX2.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch  # noqa: F401  its OpenMP runtime must be loaded first: the library is to share its threads

SOURCES = Path(__file__).parent
AVX512 = "avx512f avx512bw avx512cd avx512dq avx512vl"
BF16, V4_BF16 = f"{AVX512} avx512_vnni avx512_bf16", "-march=x86-64-v4 -mavx512vnni -mavx512bf16"
# Best first: the machine, what the CPU must have by the names in /proc/cpuinfo, and what the compiler is told.
FORMS = {
    "amx": ("x86_64", f"{BF16} amx_tile amx_bf16 amx_int8", f"{V4_BF16} -mamx-tile -mamx-bf16 -mamx-int8"),
    "avx512bf16": ("x86_64", BF16, V4_BF16),
    "avx512": ("x86_64", f"{AVX512} avx512_vnni", "-march=x86-64-v4 -mavx512vnni"),
    "avx512f": ("x86_64", AVX512, "-march=x86-64-v4"),
    "avx2vnni": ("x86_64", "avx2 fma avx_vnni", "-march=x86-64-v3 -mavxvnni"),
    "avx2": ("x86_64", "avx2 fma", "-march=x86-64-v3"),
    "sse": ("x86_64", "", "-march=x86-64"),
    "dotprod": ("aarch64", "asimddp", "-march=armv8.2-a+dotprod"),
    "neon": ("aarch64", "", "-march=armv8-a"),
}  # fmt: skip
# Not -ffast-math: NaN must stay NaN, and linking with it would flush denormals in the whole process. On ARM gcc's
# first scheduling moves loads so far ahead that sums leave the registers.
FLAGS = shlex.split(
    "-std=gnu11 -O3 -fopenmp -fPIC -fno-math-errno "
    "-fno-trapping-math -fassociative-math -fno-signed-zeros -freciprocal-math "
    "-fno-schedule-insns"
)
PATIENCE = 300  # seconds for the compiler
LATER = "it is not compiled yet"


def library() -> ctypes.CDLL | None:
    """The C code if it has been compiled, now or ever before; else None, see `why`."""
    return _found()[0]


def build() -> bool:
    """Compile it unless that was done, which takes some seconds; whether there is a library."""
    return _found(compile=True)[0] is not None


def why() -> str:
    """Why there is no library, for the user; "" if there is one."""
    return _found()[1]


_kept: tuple[ctypes.CDLL | None, str] | None = None


def _found(compile: bool = False) -> tuple[ctypes.CDLL | None, str]:
    global _kept
    if _kept is None or (compile and _kept[1] == LATER):
        _kept = _loaded(compile)
    return _kept


def forms() -> list[str]:
    """The forms of the code that this CPU can run, best first."""
    machine, found = platform.machine(), set(_cpu().split())
    mine = {name: needs.split() for name, (kind, needs, _) in FORMS.items() if kind == machine}
    able = [name for name, needs in mine.items() if found.issuperset(needs)]
    return able if "amx" not in able or _tiles_allowed() else able[1:]


def form() -> str:
    """The form that is taken here: the best, or what REGARD_ISA names. RuntimeError if the CPU cannot run that."""
    known, asked = forms(), os.environ.get("REGARD_ISA")
    if asked and asked not in known:
        raise RuntimeError(
            f"REGARD_ISA={asked} is not an instruction set of this CPU; it has {', '.join(known)}"
        )
    return asked or known[0]


def _loaded(compile: bool) -> tuple[ctypes.CDLL | None, str]:
    if os.environ.get("REGARD_NATIVE") == "0":
        return None, "switched off by REGARD_NATIVE=0"
    if sys.platform != "linux" or platform.machine() not in {kind for kind, _, _ in FORMS.values()}:
        return None, f"no native code for {platform.machine()} on {sys.platform}"
    try:
        return _open(form(), compile), ""
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return None, str(error)


def _open(form: str, compile: bool) -> ctypes.CDLL:
    # The runtime that torch has loaded, for all to see: a second one would bring threads of its own.
    ctypes.CDLL(_openmp(), mode=ctypes.RTLD_GLOBAL)
    folder = _cache()
    for place in (SOURCES, folder):
        for path in sorted(place.glob(f"{_name(form)}-*.so")) if place is not None else ():
            if path.stem.endswith(_digest(path)):  # to load a file cut short would end the process
                with contextlib.suppress(OSError):  # a disk from which nothing may be run
                    return ctypes.CDLL(str(path))
    if not compile:
        raise RuntimeError(LATER)
    if folder is not None:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(str(compiled(form, folder)))
    with tempfile.TemporaryDirectory(prefix="regard-") as private:
        return ctypes.CDLL(str(compiled(form, Path(private))))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:20]


def _name(form: str) -> str:
    """With a hash of all that decides the library."""
    digest = hashlib.sha256(repr((FLAGS, FORMS[form])).encode())
    for source in sorted(SOURCES.glob("*.[ch]")):
        digest.update(source.read_bytes())
    return f"native-{form}-{digest.hexdigest()[:20]}"


def compiled(form: str, folder: Path) -> Path:
    """Compiles elsewhere, then renames, with a hash of its bytes: other processes see a whole library or none."""
    compiler = shlex.split(os.environ.get("CC") or "cc")
    sources = [str(source) for source in sorted(SOURCES.glob("*.c"))]
    with tempfile.TemporaryDirectory(prefix=".regard-", dir=folder) as work:

        def run(*arguments: str) -> None:
            how: Any = {"cwd": work, "capture_output": True, "text": True, "timeout": PATIENCE}
            try:
                done = subprocess.run([*compiler, *arguments], **how)
            except OSError:
                reason = f"no C compiler {compiler[0]!r}; install gcc or name one in $CC"
                raise RuntimeError(reason) from None
            if done.returncode:
                lines = [line for line in done.stderr.splitlines() if "error" in line]
                reason = lines[0] if lines else f"exit status {done.returncode}"
                raise RuntimeError(f"{compiler[0]} could not compile the native code: {reason}")

        run(*FLAGS, *FORMS[form][2].split(), "-c", *sources)
        # Without -fopenmp, which would name a runtime of the compiler's.
        objects = [f"{Path(source).stem}.o" for source in sources]
        run("-shared", "-Wl,-Bsymbolic", *objects, "-o", "whole.so", "-lm")
        path = folder / f"{_name(form)}-{_digest(Path(work, 'whole.so'))}.so"
        os.replace(Path(work, "whole.so"), path)
    return path


def _cache() -> Path | None:
    """The folder for libraries, None unless it is this user's and nobody else may write to it."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "regard"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.lstat()
    except OSError:
        return None
    mine = stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid()
    shut = not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return folder if mine and shut and os.access(folder, os.W_OK) else None


@functools.cache
def _openmp() -> str:
    """The OpenMP runtime that torch has loaded; the system's, should there be none."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    names = ("/libgomp", "/libiomp", "/libomp")
    found = sorted({line[line.index("/") :] for line in lines if any(n in line for n in names)})
    return found[0] if found else "libgomp.so.1"


@functools.cache
def _tiles_allowed() -> bool:
    """Whether the system lets this process use AMX, which must be asked for: ARCH_REQ_XCOMP_PERM."""
    return ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0


@functools.cache
def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def main() -> None:
    """Every form of this architecture, compiled into this folder: what `make wheel` packs."""
    for name, (machine, _, _) in FORMS.items():
        if machine == platform.machine():
            print(compiled(name, SOURCES).name)


if __name__ == "__main__":
    main()
