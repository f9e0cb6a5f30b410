"""Work whose cost a client chooses, in processes with limits of time and memory: grammars that are compiled on trial,
long texts that become ids.

Each process keeps what it needs of the models' tokenizers, and does every request in a fork of itself. The fork is
ended by the system where it takes too much of the processor or of memory, and its memory goes with it; the process
stays as it is. A grammar that was tried and found cheap is compiled again where it is used, since nothing of it can be
handed over. This file imports no torch: the processes run it too."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import signal
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from regard.errors import UsageError
from regard.serve.edge import HTTPError
from regard.text import Tokenizer, encode_chat
from regard.text.worker import Worker

T = TypeVar("T")
WALL = 60.0  # seconds, for a machine that is busy with other things
WAITING = 64  # requests that wait for a process
OPENED = 8  # tokenizers that a process keeps
STEPS = 64  # tokens of a text that is written on trial
# Seconds of the processor, and bytes of memory, for a request.
TRIAL, TEXT = (0.5, 64 << 20), (10.0, 1 << 30)
# Of llguidance, for what it does in the engine's thread: about 0.1 s to begin with a pattern, 10 ms for a step, 1 kB
# for a state.
LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=100_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)


class Vocabulary:
    """A tokenizer as llguidance reads one. `ends`: the ids that end a text."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, size: int, ends: list[int]):
        self.plain = tokenizer
        self.size = size
        self.eos_token_id = ends[0]
        self.tokens = [tokenizer.token_bytes(i) for i in range(size)]
        added = tokenizer.core.get_added_tokens_decoder().items()
        self.special_token_ids = [i for i, token in added if token.special and i < size]
        self.reader = LLTokenizer(TokenizerWrapper(self), n_vocab=size, eos_token=ends)

    def __call__(self, text: str) -> list[int]:
        return self.plain.encode(text, special=False, literal=True)

    def matcher(self, grammar: str) -> LLMatcher:
        return LLMatcher(self.reader, grammar, log_level=0, limits=LIMITS)


# --- the process --------------------------------------------------------------------------------------------------


class Opened:
    """What a process keeps of a model."""

    def __init__(self, files: dict[str, str], config: Any, size: int, ends: list[int]):
        known = {name: b64decode(content) for name, content in files.items()}
        tokenizer = Tokenizer.from_files(known, config)
        assert tokenizer is not None
        self.tokenizer = tokenizer
        self.size = size
        self.ends = ends
        self.vocabulary: Vocabulary | None = None
        self.used = 0  # bytes that a trial takes of a grammar that is nothing

    def chosen(self, kind: str) -> Callable[..., dict[str, Any]]:
        """What does a kind of request; what all of them need is made before the fork."""
        if kind == "trial" and self.vocabulary is None:
            self.vocabulary = Vocabulary(self.tokenizer, self.size, self.ends)
            self.vocabulary("")
            empty = LLMatcher.grammar_from_json_schema({"type": "null"})
            self.used = in_fork(lambda: self.trial(empty), *TRIAL).get("bytes", 0)
        kinds: dict[str, Callable[..., dict[str, Any]]]
        kinds = {"trial": self.trial, "texts": self.texts, "chat": self.chat}
        return kinds[kind]

    def trial(self, grammar: str) -> dict[str, Any]:
        """Whether a grammar can be compiled and followed: a text is written by it, of tokens that chance chooses."""
        assert self.vocabulary is not None
        before = memory_used()
        draw = random.Random(0)
        matcher = self.vocabulary.matcher(grammar)
        words = np.zeros(-(-self.size // 32), np.int32)
        for _ in range(STEPS):
            if matcher.is_error() or matcher.is_stopped():
                break
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if matcher.is_error():
                break
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")
            bits[self.ends] = 0
            going_on = np.flatnonzero(bits)
            if not len(going_on):
                break
            matcher.consume_token(int(draw.choice(going_on)))
        if matcher.is_error():
            return {"error": matcher.get_error().partition("\n")[0]}
        # What is taken from memory that lay free cannot be seen.
        return {"bytes": max(64 << 10, memory_used() - before - self.used) + len(grammar)}

    def texts(self, texts: list[str], most: int, how: dict[str, bool]) -> dict[str, Any]:
        rows = [self.tokenizer.encode(text, **how) for text in texts]
        longest = max(map(len, rows))
        return {"ids": rows} if longest <= most else {"count": longest}

    def chat(self, most: int, **given: Any) -> dict[str, Any]:
        ids = encode_chat(self.tokenizer, **given)
        return {"ids": ids} if len(ids) <= most else {"count": len(ids)}


def serve() -> None:
    """The process: lines of JSON in and out, as `Worker` has them."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    answers, sys.stdout = sys.stdout, sys.stderr
    with suppress(OSError):
        # Those who only write come first.
        os.nice(5)
    opened: dict[str, Opened] = {}
    answer: dict[str, Any] = {"ready": True}
    print(json.dumps(answer), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        key, kind, given = request["of"], request["kind"], request["given"]
        if kind == "open":
            opened[key] = Opened(**given)
            while len(opened) > OPENED:
                del opened[next(iter(opened))]
            answer = {"open": True}
        elif key not in opened:
            answer = {"unknown": True}
        else:
            do = opened[key].chosen(kind)
            answer = in_fork(lambda: do(**given), *request["limits"])  # noqa: B023 - it is done at once
        print(json.dumps(answer), file=answers, flush=True)


def in_fork(job: Callable[[], dict[str, Any]], seconds: float, memory: int) -> dict[str, Any]:
    """What `job` says; {"late": True} and {"memory": True} where it took too much."""
    out, into = os.pipe()
    if not (child := os.fork()):
        try:
            import resource

            # The signal ends it, whatever it is doing: nothing here hears it.
            signal.setitimer(signal.ITIMER_PROF, seconds)
            with suppress(ValueError, OSError):
                most = memory_used(0) + memory
                resource.setrlimit(resource.RLIMIT_AS, (most, most))
            try:
                answer = job()
            except MemoryError:
                answer = {"memory": True}
            except UsageError as error:
                answer = {"error": str(error)}
            except Exception as error:
                answer = {"failed": f"{type(error).__name__}: {error}"}
            with os.fdopen(into, "w") as file:
                json.dump(answer, file)
        finally:
            os._exit(0)
    os.close(into)
    with os.fdopen(out) as file:
        said = file.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return {"late": True} if os.WTERMSIG(status) == signal.SIGPROF else {"memory": True}
    return json.loads(said) if said else {"memory": True}


def memory_used(column: int = 1) -> int:
    """Bytes of this process: in memory, or (column 0) of its addresses; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[column]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


# --- the one who asks it ------------------------------------------------------------------------------------------


class About:
    """What a process must know of a model, and by what name it knows that."""

    def __init__(self, origin: Any, size: int, ends: list[int]):
        self.origin = origin
        self.size = size
        self.ends = ends
        self.more = {"config": origin.config, "size": size, "ends": ends}
        digest = hashlib.sha256(repr(self.more).encode())
        for name, content in sorted(origin.files.items()):
            digest.update(f"{name} {len(content)} ".encode() + content)
        self.key = digest.hexdigest()

    def told(self) -> dict[str, Any]:
        files = self.origin.files.items()
        return {"files": {name: b64encode(data).decode() for name, data in files}, **self.more}


class Sandbox:
    """One process, and the thread that waits for it."""

    def __init__(self, limits: tuple[float, int]) -> None:
        code = f"import sys; sys.path[:] = {sys.path!r}\nfrom {__name__} import serve; serve()"
        self.worker = Worker("-P", "-c", code)
        self.limits = limits
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="sandbox")
        self.waiting = 0

    def begin(self) -> None:
        """Start the process and the thread now: later there may be no room for them."""
        self.pool.submit(self.worker.begin)

    async def run(self, job: Callable[[], T]) -> T:
        """Run something in the thread; too many who wait for it are told to come back."""
        if self.waiting >= WAITING:
            raise HTTPError(429, "too many wait for this; come back", code="queue_full", wait=2)
        self.waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self.pool, job)
        except OSError:
            why = "no process could be begun for this; come back later"
            raise HTTPError(503, why, code="overloaded", wait=1) from None
        finally:
            self.waiting -= 1

    def ask(self, about: About, kind: str, **given: Any) -> dict[str, Any]:
        """The process's answer; in the thread."""
        request = {"of": about.key, "kind": kind, "given": given, "limits": self.limits}
        answer = self.worker.ask(request, WALL)
        if "unknown" in answer:
            self.worker.ask({"of": about.key, "kind": "open", "given": about.told()}, WALL)
            answer = self.worker.ask(request, WALL)
        if not {"bytes", "ids", "count", "error", "late", "memory"} & answer.keys():
            raise RuntimeError(f"the sandbox failed: {answer}")
        return answer


# One for all servers of this process.
GRAMMARS, TEXTS = Sandbox(TRIAL), Sandbox(TEXT)
