"""The canary law: nobody waits for somebody else's work.

One client asks for one token every 50 ms and holds a stream, while each of the attacks of attacks.py runs, alone and
four at a time. The longest wait of the canary stays below a second plus its usual one, its answers stay equal, no
answer to an attacker is a 5xx, every 400 of the walk over the schema names a field, and when all is over the server has
no more memory than before, but for 200 MB. On a machine that others use too, a second is one in which a process gets as
much done as in a second of its own.

    python -m tests.serve.canary                       the whole law, as a table
    python -m tests.serve.canary --only look --only multipleOf
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from tests.serve.attacks import (
    ATTACKS,
    BODIES,
    CHAT,
    COMPLETIONS,
    TOKENIZE,
    Attacker,
    chat,
    complete,
    schema,
    walked,
)

ALLOWED = 1.0  # seconds that the canary may wait longer than usual
GROWTH = 200.0  # MiB that the server may have more in the end
ONE = chat(max_tokens=1, temperature=0)
STREAM = complete("Sort: river apple queen", max_tokens=300, temperature=0, stream=True)
WALK = "every field of /openapi.json"


def models(home: Path, vocabulary: int = 400) -> dict[str, str]:
    """The demo, and a tiny random one of each kind: decoder, encoder, classifier, translator, eyes."""
    import torch

    import regard
    from regard.layers import Classify
    from regard.models.adapt import with_head
    from tests.test_cli import CHATML, SMALL, folder, put
    from tests.text import tiny

    torch.manual_seed(0)
    size: Any = dict(vocab=300, max_len=128, dropout=0.0, **SMALL)
    files = tiny.qwen2(chat_template=CHATML)
    if vocabulary > 400:
        core = trained(vocabulary)
        files = {"tokenizer.json": core.to_str().encode()} | {
            "tokenizer_config.json": files["tokenizer_config.json"]
        }
    made = {
        "llama": (regard.build("llama", vocab=vocabulary, max_len=2048, **SMALL), files),
        "words": (regard.build("bert-base", **size), tiny.bert()),
        "labels": (with_head(regard.build("bert-base", **size), Classify(3)), tiny.bert()),
        "eyes": (regard.build("vit-small", size=16, patch=8, **SMALL), {}),
    }
    saved = {name: put(model.save(home / name), files) for name, (model, files) in made.items()}
    return {"demo": "demo", "t5": str(folder("t5")), **{k: str(v) for k, v in saved.items()}}


def trained(vocabulary: int) -> Any:
    """A tokenizer of many tokens, learned from this repository."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers.models import BPE

    core, root = Tokenizer(BPE()), Path(__file__).parents[2]
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    more: Any = {"special_tokens": ["<|endoftext|>", "<|im_start|>"], "show_progress": False}
    more["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    mine = (path for name in ("regard", "tests", "docs") for path in (root / name).rglob("*"))
    files = sorted(str(path) for path in mine if path.suffix in (".py", ".md", ".c", ".js"))
    core.train(files, trainers.BpeTrainer(vocab_size=vocabulary, **more))
    return core


class Server:
    """A server in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], port: int):
        self.process, self.port = process, port

    def get(self, path: str) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.request("GET", path)
        text = connection.getresponse().read().decode()
        connection.close()
        return text

    def memory(self) -> float:
        """MiB of the process and its children."""
        parents = dict[int, int]()
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
                parents[int(path.parent.name)] = int(fields[1])
            except OSError:
                continue
        mine = {self.process.pid}
        for _ in range(3):
            mine |= {child for child, parent in parents.items() if parent in mine}
        pages = 0
        for pid in mine:
            try:
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            except OSError:
                continue
        return pages * os.sysconf("SC_PAGESIZE") / 2**20

    def settle(self, seconds: float = 60.0) -> None:
        """Wait until nothing runs but the canary's two requests, and this one."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            lines = self.get("/metrics").splitlines()
            now = [line.rpartition(" ")[2] for line in lines if line.startswith("regard_exchanges")]
            if now and float(now[0]) <= 3:
                return
            time.sleep(0.1)
        raise AssertionError("the server still answers somebody who has left")


@contextmanager
def serving(folders: dict[str, str], *more: str) -> Iterator[Server]:
    """`regard serve` with all models, and a cache that is soon full, so that memory can be seen to stay."""
    named = [name if name == path else f"{name}={path}" for name, path in folders.items()]
    given = [*named, "--port", "0", "--quiet", "--cache-memory", "0.06", *more]
    command = [sys.executable, "-m", "regard", "serve", *given]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stderr=log, text=True, env=env) as process,
    ):
        try:
            line = ""
            while "http://" not in line:
                assert process.poll() is None, "the server did not start"
                time.sleep(0.05)
                log.seek(0)
                line = log.read()
            port = int(line.partition("127.0.0.1:")[2].partition("/")[0])
            yield Server(process, port)
        finally:
            process.kill()


class Seen(NamedTuple):
    """What the canary saw in a while."""

    wait: float  # the longest, for one token
    gap: float  # the longest in the stream
    asked: int
    wrong: list[str]


class Canary:
    """Two threads: one asks for a token every 50 ms, one reads a stream."""

    def __init__(self, port: int):
        self.port, self.ended = port, False
        self.waits, self.gaps, self.wrong = list[float](), list[float](), list[str]()
        self.expected: dict[str, str] = {}
        self.threads = [
            threading.Thread(target=run, daemon=True) for run in (self.ask, self.follow)
        ]

    def __enter__(self) -> Canary:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.ended = True
        for thread in self.threads:
            thread.join(30)

    def compare(self, kind: str, said: str) -> None:
        if said != self.expected.setdefault(kind, said):
            self.wrong.append(f"{kind}: {said[:200]}")

    def ask(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        while not self.ended:
            began = time.monotonic()
            try:
                headers = {"content-type": "application/json"}
                connection.request("POST", CHAT, json.dumps(ONE), headers)
                answer = connection.getresponse()
                data = json.loads(answer.read())
                self.compare("one token", f"{answer.status} {data.get('choices', data)}")
            except (OSError, http.client.HTTPException) as error:
                self.wrong.append(f"one token: {error!r}")
                connection.close()
            self.waits.append(time.monotonic() - began)
            time.sleep(max(0.0, 0.05 - self.waits[-1]))

    def follow(self) -> None:
        while not self.ended:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
            said, last = "", time.monotonic()
            try:
                headers = {"content-type": "application/json"}
                connection.request("POST", COMPLETIONS, json.dumps(STREAM), headers)
                answer = connection.getresponse()
                while (line := answer.readline()) and not self.ended:
                    self.gaps.append(time.monotonic() - last)
                    last = time.monotonic()
                    if line.startswith(b"data: {"):
                        data = json.loads(line[6:])
                        said += data["choices"][0]["text"] if "choices" in data else str(data)
                if not self.ended:
                    self.compare("stream", f"{answer.status} {said}")
            except (OSError, http.client.HTTPException) as error:
                self.wrong.append(f"stream: {error!r}")
            connection.close()

    def seen(self) -> Seen:
        """Since it was last asked; what it waits for now belongs to it."""
        asked, read = len(self.waits) + 1, len(self.gaps) + 1
        while len(self.waits) < asked or len(self.gaps) < read:
            assert all(thread.is_alive() for thread in self.threads), self.wrong
            time.sleep(0.005)
        waits, gaps, wrong = list(self.waits), list(self.gaps), list(self.wrong)
        del self.waits[: len(waits)], self.gaps[: len(gaps)], self.wrong[: len(wrong)]
        return Seen(max(waits, default=0.0), max(gaps, default=0.0), len(waits), wrong)


def attack(
    name: str, port: int, patience: float, share: int, shares: int, every: int
) -> list[tuple[int, str]]:
    """In a process of its own: what came back."""
    attacker = Attacker(port, patience)
    if name == WALK:
        walked(attacker, share, shares, every)
    else:
        ATTACKS[name](attacker)
    return attacker.found


class Line(NamedTuple):
    """What became of an attack."""

    name: str
    times: int
    seconds: float
    statuses: dict[int, int]
    seen: Seen
    memory: float
    faults: list[str]
    again: bool = False

    def __str__(self) -> str:
        names = {0: "left", -1: "closed"}
        each = ", ".join(
            f"{names.get(s, s)}{f' x {n}' if n > 1 else ''}"
            for s, n in sorted(self.statuses.items())
        )
        figures = f"{self.seen.wait:6.2f} {self.seen.gap:6.2f} {self.memory:7.0f}"
        more = " (tried again: the first time was longer)" if self.again else ""
        return f"{self.name:34} {self.times:2} {self.seconds:6.1f} {figures}  {each}{more}"


HEAD = f"{'attack':34} at {'s':>6} {'wait':>6} {'gap':>6} {'MiB':>7}  answers"


def shared(seconds: float) -> float:
    """How many times as long a process takes here for its work, since others have the machine too."""
    began, used = time.monotonic(), time.process_time()
    while time.monotonic() < began + seconds:
        pass
    return (time.monotonic() - began) / (time.process_time() - used)


class Law:
    """The law on one server. `usual`: the canary's longest wait while nobody else asks; `most` that it may wait."""

    def __init__(self, server: Server, canary: Canary, pool: ProcessPoolExecutor, quiet: float):
        self.server, self.canary, self.pool = server, canary, pool
        while len(canary.waits) < 20 or len(canary.gaps) < 20:
            time.sleep(0.05)
        canary.seen()
        self.use(whole=quiet > 1)
        canary.seen()
        self.shared = pool.submit(shared, quiet).result()
        self.usual = self.canary.seen().wait
        self.most = self.usual + ALLOWED * self.shared
        self.before = server.memory()
        self.broken: list[str] = []

    def use(self, whole: bool) -> None:
        """Everything once, so that what is kept from then on is no growth: grammars, processes, and, `whole`, pools
        of pages."""
        bodies = [*BODIES.items(), (CHAT, schema({"type": "integer"}, max_tokens=2))]
        sizes = {"demo": 500} | ({"llama": 1900} if whole else {})
        for model, size in sizes.items():
            prompts = [[5 + i] * size for i in range(64)]
            bodies += [(COMPLETIONS, complete(prompts, model, max_tokens=1))]
        bodies += [
            (TOKENIZE, {"model": name, "prompt": "a " * 20_000}) for name in ("demo", "llama")
        ]
        for path, body in bodies:
            attacker = Attacker(self.server.port, 120.0)
            assert attacker.post(path, body) in (200, 400), (path, attacker.found)

    def run(self, name: str, times: int, patience: float, every: int = 1) -> Line:
        line = self.measure(name, times, patience, every)
        if line.seen.wait > self.most:
            # Where the machine itself stood still for a moment it will not do so twice.
            line = self.measure(name, times, patience, every)._replace(again=True)
        wrong = line.seen.wrong + line.faults
        if line.seen.wait > self.most:
            wrong.append(f"waited {line.seen.wait:.2f} s, at most {self.most:.2f} are allowed")
        self.broken += [f"{name} x {times}: {why}" for why in wrong[:5]]
        return line

    def measure(self, name: str, times: int, patience: float, every: int) -> Line:
        self.canary.seen()
        began = time.monotonic()
        given = [(name, self.server.port, patience, i, times, every) for i in range(times)]
        jobs = [self.pool.submit(attack, *each) for each in given]
        found = [each for job in jobs for each in job.result()]
        seconds = time.monotonic() - began
        self.server.settle(patience + 60)
        statuses = dict(Counter(status for status, _ in found))
        faults = [f"{status} {text:.300}" for status, text in found if status >= 500]
        if name == WALK:
            # A body that is JSON has a field that is wrong, which the answer names.
            unnamed = (text for status, text in found if status == 400 and '"param":null' in text)
            faults += [f"no field: {text:.300}" for text in unnamed if "is not JSON" not in text]
        memory = self.server.memory()
        return Line(name, times, seconds, statuses, self.canary.seen(), memory, faults)

    def memory(self) -> float:
        """MiB more than before, when all is over."""
        end = time.monotonic() + 20
        while (more := self.server.memory() - self.before) > GROWTH and time.monotonic() < end:
            time.sleep(0.5)
        if more > GROWTH:
            self.broken.append(f"the server has {more:.0f} MiB more than before")
        return more


@contextmanager
def law(server: Server, quiet: float) -> Iterator[Law]:
    context = get_context("spawn")
    with Canary(server.port) as canary, ProcessPoolExecutor(4, mp_context=context) as pool:
        # Attackers that have begun, so that their start is no part of an attack.
        list(pool.map(abs, range(4)))
        yield Law(server, canary, pool, quiet)


def chosen(only: Sequence[str]) -> list[str]:
    every = [*ATTACKS, WALK]
    return [name for name in every if not only or any(text in name for text in only)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", action="append", default=[], help="attacks whose name has this")
    parser.add_argument(
        "--patience", type=float, default=6.0, help="seconds until an attacker leaves"
    )
    parser.add_argument("--vocabulary", type=int, default=16_000, help="tokens of the decoder")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        folders = models(Path(home), asked.vocabulary)
        with serving(folders) as server, law(server, quiet=5.0) as held:
            print(f"usually {held.usual:.2f} s, at most {held.most:.2f} s are allowed", end="; ")
            if held.shared > 1.2:
                print(f"others slow this machine down, {held.shared:.1f} times", end="; ")
            print(f"{held.before:.0f} MiB; {len(chosen(asked.only))} attacks")
            print(HEAD, flush=True)
            for name in chosen(asked.only):
                patience = 600.0 if name == WALK else asked.patience
                for times in (1, 4):
                    print(held.run(name, times, patience), flush=True)
            print(f"{held.memory():.0f} MiB more than before")
    print("\n".join(held.broken) or "the law holds")
    return 1 if held.broken else 0


if __name__ == "__main__":
    sys.exit(main())
