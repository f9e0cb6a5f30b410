"""C code for the CPU: every `native/*.c` beside this file, compiled once into one library that ctypes loads. `build`
compiles it, where a model is worth the wait; from then on everybody has it.

The library is kept in the user's cache folder under a hash of all that went into it: sources, compiler, flags, CPU.
Without a compiler, on other systems, or with REGARD_NATIVE=0 there is no library, `why` tells the reason, and callers
take their torch forms. $CC names another compiler. Nothing happens on import.

It is compiled for the best instruction set that the CPU has. REGARD_ISA names a lower one and so
hides what is above it, to see what a smaller machine would do:

    REGARD_ISA=amx       tiles of bf16 and int8 (x86-64 with AMX and AVX512-BF16)
    REGARD_ISA=avx512    vectors of 16 floats (x86-64-v4)
    REGARD_ISA=avx2      vectors of 8 floats and fused products (x86-64-v3)
    REGARD_ISA=sse       vectors of 4 floats (any x86-64)
    REGARD_ISA=neon      vectors of 4 floats (any aarch64, where there is no other)

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

import torch  # noqa: F401  its OpenMP runtime must be loaded first: the library is to share its threads

SOURCES = Path(__file__).parent
MACHINES = ("x86_64", "aarch64")
AVX512 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
AMX = {"amx_tile", "amx_bf16", "amx_int8", "avx512_bf16"}
# Best first: what the CPU must have, by the names in /proc/cpuinfo, and the -march that hides all
# that is better.
FORMS: dict[str, tuple[set[str], str]] = {
    "amx": (AVX512 | AMX, "native"),
    "avx512": (AVX512, "x86-64-v4"),
    "avx2": ({"avx2", "fma"}, "x86-64-v3"),
    "sse": ({"x86_64"}, "x86-64"),
    "neon": ({"aarch64"}, "native"),
}
# Not -ffast-math: NaN must stay NaN, and linking with it would flush denormals in the whole process.
FLAGS = shlex.split(
    "-std=gnu11 -O3 -fopenmp -shared -fPIC -Wl,-Bsymbolic -fno-math-errno "
    "-fno-trapping-math -fassociative-math -fno-signed-zeros -freciprocal-math"
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
    found = {platform.machine(), *_cpu().split()}
    return [name for name, (needs, _) in FORMS.items() if needs <= found]


def form() -> str:
    """The form that is compiled here: the best, or what REGARD_ISA names. RuntimeError if the CPU
    cannot run that."""
    known, asked = forms(), os.environ.get("REGARD_ISA")
    if asked and asked not in known:
        raise RuntimeError(
            f"REGARD_ISA={asked} is not an instruction set of this CPU; it has {', '.join(known)}"
        )
    return asked or known[0]


def _architecture() -> str:
    name = form()
    return "-march=native" if name == forms()[0] else f"-march={FORMS[name][1]}"


def has_amx() -> bool:
    """Whether the library multiplies tiles: it was compiled for AMX, and the system lets us use it."""
    found = library()
    return found is not None and bool(found.amx_allowed())


def _loaded(compile: bool) -> tuple[ctypes.CDLL | None, str]:
    if os.environ.get("REGARD_NATIVE") == "0":
        return None, "switched off by REGARD_NATIVE=0"
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        return None, f"no native code for {platform.machine()} on {sys.platform}"
    try:
        return _open(compile), ""
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return None, str(error)


def _open(compile: bool) -> ctypes.CDLL:
    compiler = shlex.split(os.environ.get("CC") or "cc")
    name, folder = f"native-{_key(compiler)}", _cache()
    for path in sorted(folder.glob(f"{name}-*.so")) if folder is not None else ():
        if path.stem.endswith(_digest(path)):  # to load a file cut short would end the process
            with contextlib.suppress(OSError):  # a disk from which nothing may be run
                return ctypes.CDLL(str(path))
    if not compile:
        raise RuntimeError(LATER)
    if folder is not None:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(_compiled(compiler, folder, name))
    with tempfile.TemporaryDirectory(prefix="regard-") as private:
        return ctypes.CDLL(_compiled(compiler, Path(private), name))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:20]


def _key(compiler: list[str]) -> str:
    """A hash of everything that decides the library."""
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, timeout=PATIENCE)
    except OSError:
        reason = f"no C compiler {compiler[0]!r}; install gcc or name one in $CC"
        raise RuntimeError(reason) from None
    decides = (compiler, FLAGS, _architecture(), _openmp(), _cpu())
    digest = hashlib.sha256(repr(decides).encode() + version.stdout)
    for source in sorted(SOURCES.glob("*.[ch]")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:20]


def _compiled(compiler: list[str], folder: Path, name: str) -> str:
    """Compiles to a name of its own, then renames it, with a hash of its bytes: other processes see a whole file or
    none."""
    handle, work = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    try:
        sources = [str(source) for source in sorted(SOURCES.glob("*.c"))]
        # The runtime comes before the compiler's own -lgomp, which is then not needed.
        flags = [*FLAGS, _architecture()]
        command = [*compiler, *flags, *sources, "-o", work, "-Wl,--as-needed", *_openmp(), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line]
            reason = lines[0] if lines else f"exit status {done.returncode}"
            raise RuntimeError(f"{compiler[0]} could not compile the native code: {reason}")
        path = folder / f"{name}-{_digest(Path(work))}.so"
        os.replace(work, path)
    finally:
        Path(work).unlink(missing_ok=True)
    return str(path)


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
def _openmp() -> list[str]:
    """The OpenMP runtime that torch has loaded: a second one would bring threads of its own."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line[line.index("/") :] for line in lines if "/libgomp" in line})[:1]


@functools.cache
def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
