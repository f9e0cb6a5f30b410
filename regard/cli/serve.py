"""`regard serve`: an OpenAI-compatible server over models on this machine."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from regard.cli import shared as cli
from regard.errors import UsageError

GIB = 2**30
GiB = Annotated[float | None, arg(metavar="GIB")]
Models = Annotated[Positional[tuple[str, ...]], arg(metavar="MODEL ...")]


@dataclass(frozen=True)
class Options:
    """Serve models over HTTP as OpenAI's API has it. MODEL is a folder, NAME=FOLDER, or demo: a tiny one that is
    included.

    regard serve demo                            then open http://127.0.0.1:8000
    regard serve runs/story tuned=runs/adapter --port 9000
    regard serve MODEL --keys keys.json --new-key ann        make a key, and print it
    """

    models: Models  # folders, NAME=FOLDER, adapters, or demo
    host: str = "127.0.0.1"  # the address to listen on; others than this machine's need --keys
    port: int = 8000  # 0: any that is free
    keys: cli.FileName = None  # file of API keys, hashed; read again when it changes
    no_keys: cli.Switch = False  # whoever reaches another --host than this machine's may ask
    new_key: cli.Text = None  # make a key of this name in --keys, print it, and end
    admin: cli.Switch = False  # of --new-key: it may load and unload models
    also: cli.Pairs = ()  # models that can be loaded later: POST /admin/load {"model": NAME}
    memory: GiB = None  # GiB for all models together
    # GiB for the cache of each model; default: 1, on a GPU 0.9 of what is free
    cache_memory: GiB = None
    rows: int | None = None  # answers that are written together (64; in a CUDA graph up to 256)
    queue: int = 256  # requests of a model that run and wait; more are told to come back
    queue_tokens: int = 1 << 21  # tokens of their prompts
    streams: int = 1024  # streams that are open at once
    deadline: float = 600.0  # seconds for an answer
    drain: float = 30.0  # seconds for what runs when the server is told to end
    max_prompt: int = 131_072  # tokens of a prompt
    # tokens of a text that others wait for: to embed, classify, fill, look at
    max_whole: int = 4096
    max_n: int = 16  # answers to one prompt
    body: float = 2.0  # MiB of a request
    # answers do not depend, to the bit, on what else runs; slower, CPU alone
    invariant: cli.Switch = False
    quiet: cli.Switch = False  # no line of log for each request
    machine: cli.Machine = cli.Machine()


def run(options: Options) -> int:
    o = options
    cli.check_counts(
        o, "rows", "queue", "queue_tokens", "streams", "max_prompt", "max_whole", "max_n"
    )
    keys = None if o.keys is None else Path(o.keys)
    if o.new_key is not None:
        from regard.serve.edge import new_key

        if keys is None:
            raise UsageError("--new-key needs a file to put it into: --keys keys.json")
        print(new_key(keys, o.new_key, o.admin))
        return 0
    named = folders(o.models)
    if not named:
        raise UsageError("give a model folder, or demo: regard serve demo")
    here = loopback(o.host)
    if keys is not None and o.no_keys:
        raise UsageError("--keys and --no-keys cannot both be; leave one out")
    if not here and keys is None and not o.no_keys:
        so = "make keys (--keys keys.json --new-key NAME) and give --keys keys.json"
        raise UsageError(
            f"whoever reaches {o.host} could use this server; {so}, or --no-keys if you mean it"
        )

    from regard.serve.app import App, listen, serve
    from regard.serve.edge import Limits
    from regard.serve.model_worker import Options as WorkerOptions

    logging.basicConfig(format="%(asctime)s %(message)s", level="WARNING" if o.quiet else "INFO")
    sock = listen(o.host, o.port)
    cache, memory = (None if x is None else x * GIB for x in (o.cache_memory, o.memory))
    how = WorkerOptions(**asdict(o.machine), rows=o.rows, invariant=o.invariant, cache_memory=cache)
    same = ("queue", "queue_tokens", "streams", "deadline", "drain")
    more = {name: getattr(o, name) for name in same} | {"whole": o.max_whole}
    limits = Limits(body=int(o.body * 2**20), prompt=o.max_prompt, n=o.max_n, **more)
    more = {"start": list(named), "keys": keys, "memory": memory, "local": here}
    app = App({**named, **cli.pairs(o.also, "--also")}, options=how, limits=limits, **more)
    address = f"http://{o.host}:{sock.getsockname()[1]}"
    # Where the line cannot be written, the server goes on without.
    with suppress(OSError):
        cli.say(f"{', '.join(app.workers)} at {address}/v1   Ctrl-C ends")
    return serve(app, sock)


def loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def folders(models: tuple[str, ...]) -> dict[str, str]:
    """Folders by name; a folder without one has its own."""
    table: dict[str, str] = {}
    for text in models:
        name, equals, folder = text.partition("=")
        if not equals:
            name, folder = Path(text).resolve().name, text
        if not name or not folder or name in table:
            raise UsageError(f"{text!r:.80}: give NAME=FOLDER, each name once")
        table[name] = folder
    return table
