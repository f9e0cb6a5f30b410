"""Whether the other processes live. A process that waits for another inside a collective cannot look for itself: a
thread beside it does.

torchrun ends the rest when a process dies, but what waits on a GPU does not hear it, and a process that is stopped
(SIGSTOP, a machine that hangs) does not die. So every process says each second that it lives, in torchrun's store, and
ends when another is silent for `patience` of its own beats (so that all may be stopped together, and go on), or the
store is gone and torchrun with it: no orphans. To end at any time is safe: checkpoints are written whole or not at all.

The thread needs Python's lock, which writing a large checkpoint holds for as long as the disk takes: the patience must
be longer than that.
"""

from __future__ import annotations

import os
import sys
import threading
from datetime import timedelta

import torch.distributed as dist

BEAT = 1.0  # seconds
DONE = "done"


class Pulse:
    """Between `start`, which all processes call together, and `stop`."""

    def __init__(self, rank: int, world: int, patience: int):
        self.rank, self.patience = rank, patience
        again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.keys = [f"regard/pulse/{again}/{r}" for r in range(world)]
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        wait = timedelta(seconds=BEAT * patience)
        # a connection of its own: in torch's one, it would wait behind what waits for other processes
        self.store = dist.TCPStore(address, port, is_master=False, timeout=wait)
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="pulse", daemon=True)

    def start(self) -> None:
        self.store.set(self.keys[self.rank], "0")
        self.store.wait(self.keys, timedelta(minutes=5))
        self.thread.start()

    def stop(self) -> None:
        """This process is through; the others need not miss it."""
        self.ended.set()
        self.thread.join()
        self.store.set(self.keys[self.rank], DONE)

    def _watch(self) -> None:
        beats, silent, count = [b""] * len(self.keys), [0] * len(self.keys), 0
        while not self.ended.wait(BEAT):
            count += 1
            try:
                self.store.set(self.keys[self.rank], str(count))
                now = self.store.multi_get(self.keys)
            except (RuntimeError, ValueError):
                return self._end("torchrun is gone")
            for other, beat in enumerate(now):
                lives = beat != beats[other] or beat == DONE.encode()
                silent[other] = 0 if lives else silent[other] + 1
                if silent[other] == self.patience:
                    return self._end(f"process {other} gave no sign for {self.patience} seconds")
            beats = now

    def _end(self, why: str) -> None:
        if not self.ended.is_set():
            print(f"{why}: process {self.rank} ends", file=sys.stderr, flush=True)
            os._exit(1)
