"""A process stopped at its system calls (ptrace): to count them, to end it at any of them, to let one fail.

Libraries in Rust call the system without libc, so that nothing less sees all of them. x86-64 Linux alone.
"""

import ctypes
import os
import platform
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# What may change a disk: number -> name. Others only read, or give memory.
CHANGES = {
    1: "write", 18: "pwrite64", 20: "writev", 26: "msync", 40: "sendfile", 74: "fsync", 75: "fdatasync",
    76: "truncate", 77: "ftruncate", 82: "rename", 83: "mkdir", 84: "rmdir", 85: "creat", 86: "link",
    87: "unlink", 88: "symlink", 258: "mkdirat", 263: "unlinkat", 264: "renameat", 265: "linkat",
    266: "symlinkat", 285: "fallocate", 296: "pwritev", 316: "renameat2", 326: "copy_file_range",
}  # fmt: skip
OPENAT, CREATE = 257, os.O_CREAT
TRACEME, SETREGS, GETREGS, SYSCALL, OPTIONS, INFO = 0, 13, 12, 24, 0x4200, 0x420E
GOOD, EXITKILL = 1, 1 << 20
RAX, RDX, ORIG = 10, 12, 15  # places in the registers
NOWHERE = (1 << 64) - 1  # a call that does not exist: the system does nothing

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


class _Info(ctypes.Structure):
    _fields_ = [
        ("op", ctypes.c_uint8),
        ("arch", ctypes.c_uint32),
        ("ip", ctypes.c_uint64),
        ("sp", ctypes.c_uint64),
        ("number", ctypes.c_uint64),
        ("args", ctypes.c_uint64 * 6),
    ]


_Registers = ctypes.c_uint64 * 27


def missing() -> str:
    """Why calls cannot be traced here; "" where they can."""
    here = (platform.system(), platform.machine())
    return "" if here == ("Linux", "x86_64") else "needs x86-64 Linux"


def _ptrace(what: int, pid: int, a: object = None, b: object = None) -> None:
    if _libc.ptrace(what, pid, a, b) < 0:
        raise OSError(ctypes.get_errno(), f"ptrace {what}")


@dataclass
class Call:
    """A system call as it is entered; what it changed can be read while the process stands."""

    pid: int
    number: int
    args: list[int]

    @property
    def name(self) -> str:
        """What it changes; "" if nothing."""
        if self.number == OPENAT:
            return "create" if self.args[2] & CREATE else ""
        return CHANGES.get(self.number, "")

    def memory(self, at: int, size: int) -> bytes:
        with open(f"/proc/{self.pid}/mem", "rb", buffering=0) as file:
            file.seek(at)
            return file.read(size)

    def text(self, at: int) -> str:
        got = self.memory(at, 4096 - at % 4096)
        if b"\0" not in got:
            got += self.memory(at + len(got), 4096)
        return got.split(b"\0")[0].decode()

    def path(self, argument: int, folder: int | None = None) -> Path:
        """The path at an argument, under the folder that another holds as a descriptor."""
        name = Path(self.text(self.args[argument]))
        if name.is_absolute() or folder is None or ctypes.c_int(self.args[folder]).value == -100:
            return Path(os.readlink(f"/proc/{self.pid}/cwd")) / name
        return self.file(folder) / name

    def file(self, argument: int) -> Path:
        return Path(os.readlink(f"/proc/{self.pid}/fd/{self.args[argument]}"))


def offer() -> None:
    """In the child: let the parent trace, and wait for it."""
    _ptrace(TRACEME, 0)
    os.kill(os.getpid(), signal.SIGSTOP)


def over() -> None:
    """In the child: what was to be traced is done. Nobody else sends this signal, and alone it does nothing."""
    os.kill(os.getpid(), signal.SIGURG)


Act = Callable[[int, Call], str | int | None]


def follow(pid: int, act: Act) -> int | None:
    """Trace from `offer` to `over`. `act(i, call)` says what is to become of call i: None, it is made; "kill", the
    process ends before it; "tear", after half of its bytes; a number, it fails with that error. How many calls there
    were; None if the process has ended."""
    _, status = os.waitpid(pid, 0)
    assert os.WIFSTOPPED(status), "the process did not offer itself"
    _ptrace(OPTIONS, pid, None, GOOD | EXITKILL)
    count, entering, signals = 0, True, 0
    plan: str | int | None = None
    while True:
        _ptrace(SYSCALL, pid, None, signals)
        signals = 0
        _, status = os.waitpid(pid, 0)
        if not os.WIFSTOPPED(status):
            raise AssertionError(f"the traced process ended by itself: {status}")
        if os.WSTOPSIG(status) == signal.SIGURG:
            _libc.ptrace(17, pid, None, None)  # detach: it goes on alone
            return count
        if os.WSTOPSIG(status) != signal.SIGTRAP | 0x80:
            signals = os.WSTOPSIG(status)  # hand it on
            continue
        if entering:
            call = _entered(pid)
            plan = act(count, call)
            count += 1
            if plan == "kill":
                os.kill(pid, signal.SIGKILL)
                return None
            if plan is not None:
                _spoil(pid, call, plan)
        elif plan == "tear":
            os.kill(pid, signal.SIGKILL)
            return None
        elif plan is not None:
            _set(pid, RAX, -int(plan))
        entering = not entering


def _entered(pid: int) -> Call:
    info = _Info()
    _ptrace(INFO, pid, ctypes.sizeof(info), ctypes.addressof(info))
    return Call(pid, info.number, list(info.args))


def _spoil(pid: int, call: Call, plan: str | int) -> None:
    if plan == "tear":
        _set(pid, RDX, call.args[2] // 2)
    else:
        _set(pid, ORIG, NOWHERE)


def _set(pid: int, place: int, value: int) -> None:
    registers = _Registers()
    _ptrace(GETREGS, pid, None, ctypes.addressof(registers))
    registers[place] = value & NOWHERE
    _ptrace(SETREGS, pid, None, ctypes.addressof(registers))
