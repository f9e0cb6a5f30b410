"""What a user types, timed: regard.generate with its defaults on a GPU, against transformers' generate, in one run.

    python bench/user.py                    all parts; about five minutes on an H200
    python bench/user.py --quick            tiny sizes: whether it runs at all
    python bench/user.py --part a           one part

a  a Llama-3.2-1B shape, random weights in bf16, batch 1, 8 and 64 (128 tokens of prompt, or 96 to 160; 256 new),
   greedy, drawn by top-p, and transformers warm, prefill included; the share of the memory's speed
b  every token that was chosen, scored by the model itself over the whole text: how far below the best it was
c  512 requests that arrive by and by (Poisson), prompts of 16 to 2,048 tokens, answers of 16 to 256, by
   regard.Engine, against as many tokens in batches whose rows are all alike; how long a request waits for its first
   token
d  the first token: a process of its own from `regard.load` on, with kernels compiled anew and from their cache
e  chats: 64 of 8 turns with one system prompt, by regard.Engine: how many tokens of the prompts are not read again
f  a Mixtral shape (8 experts, 2 chosen; 4 layers of it) and a Qwen3-4B shape (norms on queries and keys), random
   weights in bf16, batch 1 and 64 as in a, greedy; the share of the memory's speed, of experts those that were chosen
g  Marian-base and T5-small, random weights in bf16, 64 sources of 16 to 48 tokens, 64 new each: beams of 4 and greedy,
   against transformers on the same weights
q  a Qwen3-8B shape, random weights: bf16, fp8 and int4 by `regard.prepare`, batch 1 and 8, 128 tokens of prompt
h  on a CPU: 16 requests to a GPT-2 of 124M (prompts of 16 to 64 tokens, answers of 16 to 48), by regard.Engine with
   its defaults, together and one at a time; needs no GPU: --part h
i  speculation on the Llama-3.2-1B shape, batch 1 to 64, 256 new tokens, greedy, against plain `regard.generate`:
   `lookup=8` on a text that repeats itself every 50 tokens, and on one that never does; `draft_model=` of 73M
   parameters with 4 guesses, which agrees in 80 % and in 0 % (the share is set, the time of the draft is its own)

Nothing but torch, triton and transformers must be installed. It changes nothing.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from gpu_measure import BF16, VOCAB, bandwidth, prompts, run_parts, seconds

import regard
from regard.decode.engine import Engine
from regard.decode.runners.guesses import Guesses
from regard.decode.runners.steps import _kept
from regard.decode.settings import Request, Settings
from regard.models import Tokens, TransformerConfig
from regard.moe import MixtureOfExperts

TOP_P = {"temperature": 1.0, "top_p": 0.9, "seed": 1}


@cache
def llama(layers: int) -> Any:
    torch.manual_seed(0)
    return regard.build("llama-3.2-1b", layers=layers, device="cuda", dtype=BF16)


def layers_of(args: argparse.Namespace) -> int:
    return 2 if args.quick else 16


def texts_of(batch: int) -> list[list[int]]:
    """What both sides are given: 128 tokens, or 96 to 160 where there are several rows."""
    low, high = (128, 128) if batch == 1 else (96, 160)
    return prompts(batch, low, high, batch)


@cache
def peer(layers: int) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=2048, intermediate_size=8192, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    before = torch.get_default_dtype()
    torch.set_default_dtype(BF16)
    try:
        with torch.device("cuda"):
            return transformers.LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def theirs(model: Any, batch: int, new: int) -> float:
    """New tokens a second of transformers on the same prompts, padded on the left."""
    texts = texts_of(batch)
    width = max(map(len, texts))
    ids = torch.tensor([[0] * (width - len(t)) + t for t in texts], device="cuda")
    mask = torch.tensor([[0] * (width - len(t)) + [1] * len(t) for t in texts], device="cuda")
    asked = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        return batch * new / seconds(lambda: model.generate(ids, attention_mask=mask, **asked))


def part_a(args: argparse.Namespace) -> None:
    layers, new = layers_of(args), 32 if args.quick else 256
    model, hf = llama(layers), None
    try:
        hf = peer(layers)
        theirs(hf, 1, 4)
    except Exception as error:
        print(f"  transformers is left out: {type(error).__name__}: {error}")
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    speed = bandwidth()
    print(f"  copy {speed / 1e12:.2f} TB/s on {torch.cuda.get_device_name()}")
    print("  batch     greedy   of limit      top-p  of greedy   transformers   greedy by")
    for batch in (1, 8) if args.quick else (1, 8, 64):
        texts = texts_of(batch)

        def ours(texts: list[list[int]] = texts, **settings: Any) -> float:
            took = seconds(lambda: regard.generate(model, texts, max_new_tokens=new, **settings))
            return len(texts) * new / took

        for _ in range(3):
            # What a second call finds recorded.
            ours(), ours(**TOP_P)
        greedy, drawn, other = [], [], []
        for _ in range(3):
            greedy.append(ours())
            drawn.append(ours(**TOP_P))
            if hf is not None:
                other.append(theirs(hf, batch, new if batch < 64 else min(new, 64)))
        rate, top, peers = (statistics.median(x) if x else 0.0 for x in (greedy, drawn, other))
        cached = batch * (128 + new // 2) * layers * 2 * 8 * 64 * 2  # halfway
        limit = batch / ((weights + cached) / speed)
        times = f"{rate / peers:.1f} times" if peers else "-"
        print(
            f"  {batch:5d} {rate:10,.0f} {100 * rate / limit:8.1f} % {top:10,.0f} {100 * top / rate:8.1f} %"
            f" {peers:14,.0f}   {times}",
            flush=True,
        )
    print("  " + Engine(model, rows=64, memory=2**30).explain().replace("\n", "\n  "))


def part_b(args: argparse.Namespace) -> None:
    model = llama(layers_of(args))
    for batch in (1, 4, 8, 64):
        texts = texts_of(batch)
        for _ in range(3):
            out = regard.generate(model, texts, max_new_tokens=64)
        gaps, off = [], []
        for ids, result in zip(texts, out, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([ids + result.ids], device="cuda"))[0].float()
            logits = logits[len(ids) - 1 : -1]
            chosen = torch.tensor(result.ids, device="cuda")[:, None]
            picked = logits.gather(-1, chosen)[:, 0]
            gaps += (logits.amax(-1) - picked).tolist()
            said = torch.tensor(result.logprobs, device="cuda")
            off += (picked - logits.logsumexp(-1) - said).abs().tolist()
        other = sum(gap > 0 for gap in gaps)
        print(
            f"  batch {batch}: {len(gaps)} tokens, {other} other than the model's own argmax, largest logit gap "
            f"{max(gaps):.4f}, largest difference of a log probability {max(off):.4f} "
            f"{'ok' if max(gaps) < 0.1 and max(off) < 0.1 else 'LOOK'}"
        )


def part_c(args: argparse.Namespace) -> None:
    r, count = random.Random(1), 24 if args.quick else 512
    model = llama(layers_of(args))
    sizes = [round(16 * 128 ** r.random()) for _ in range(count)]
    asked = [
        Request(prompts(1, n, n, i)[0], Settings(max_new_tokens=round(16 * 16 ** r.random())))
        for i, n in enumerate(sizes)
    ]
    total = sum(q.settings.max_new_tokens for q in asked)
    size, new, batch = round(sum(sizes) / count), round(total / count), min(64, count)

    def static() -> None:
        """As many tokens in even batches, nothing in them that ends early or arrives late."""
        for i in range(0, count, batch):
            regard.generate(model, prompts(batch, size, size, i), max_new_tokens=new)

    # What a first use of each number of rows measures and compiles.
    for rows in (1, 2, 4, 8, 16, 32, batch):
        regard.generate(model, prompts(rows, size, size, rows), max_new_tokens=4)
    static(), static()
    base = count * new / seconds(static)
    print(
        f"  static batches of {batch}: prompts of {size}, answers of {new} tokens, {base:,.0f} tokens/s"
    )
    gaps = [r.expovariate(1.0) for _ in asked]
    for load in (0.0, 1.25, 0.8):
        # All at once; by and by, faster than static batches could serve them; and slower.
        span = total / base / load if load else 0.0
        arrive = [span * sum(gaps[: i + 1]) / sum(gaps) for i in range(count)]
        runs = sorted(arriving(model, asked, arrive) for _ in range(1 if args.quick else 5))
        wall, longest, first = runs[len(runs) // 2]
        median, late = (1e3 * first[int(share * len(first))] for share in (0.5, 0.95))
        print(
            f"  {f'Poisson, {load} times that rate' if load else 'all at once'}: {total:,} tokens in {wall:.2f} s, "
            f"{total / wall:,.0f} tokens/s, {100 * total / wall / base:.0f} % of static batches; "
            f"first token after {median:.0f} ms (median), {late:.0f} ms (95 %); longest step {1e3 * longest:.0f} ms"
        )


def arriving(
    model: Any, asked: list[Request], arrive: list[float]
) -> tuple[float, float, list[float]]:
    """Seconds for requests that arrive then; the longest step; and how long each waited for its first token."""
    engine, waits, longest = Engine(model, rows=64, memory=2**34), dict[int, float](), 0.0
    queue, born, done = list(zip(arrive, asked, strict=True)), dict[int, float](), 0
    torch.cuda.synchronize()
    start = time.perf_counter()
    while done < len(asked):
        now = time.perf_counter() - start
        while queue and queue[0][0] <= now:
            when, request = queue.pop(0)
            born[engine.submit(request)] = when
        if engine.idle:
            continue
        before = time.perf_counter()
        events = engine.step()
        longest = max(longest, time.perf_counter() - before)
        now = time.perf_counter() - start
        for e in events:
            if e.done is not None:
                done += 1
            if e.token is not None:
                waits.setdefault(e.request, now - born[e.request])
    return time.perf_counter() - start, longest, sorted(waits.values())


COLD = """
import sys, time
import torch
import regard
model = regard.load(sys.argv[1], device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
start = time.perf_counter()
pieces = regard.generate(model, [list(range(1, 100))], max_new_tokens=1)
print(time.perf_counter() - start)
start = time.perf_counter()
regard.generate(model, [list(range(1, 100))], max_new_tokens=64)
print(time.perf_counter() - start)
"""


def part_d(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        llama(layers_of(args)).save(f"{folder}/model")
        for name in ("compiled anew", "from the cache"):
            done = subprocess.run(
                [sys.executable, "-c", COLD, f"{folder}/model"],
                env={**os.environ, "TRITON_CACHE_DIR": f"{folder}/triton"},
                capture_output=True,
                text=True,
            )
            first, next_ = map(float, done.stdout.split()[-2:]) if done.stdout else (0.0, 0.0)
            print(
                f"  kernels {name}: first token {first:.2f} s after loading, 64 more {next_:.2f} s"
            )
            if done.returncode:
                print(done.stderr[-2000:])


def part_e(args: argparse.Namespace) -> None:
    r, model = random.Random(2), llama(layers_of(args))
    chats, turns = (8, 3) if args.quick else (64, 8)
    engine = Engine(model, rows=64, memory=2**34)
    system = prompts(1, 512, 512, 7)[0]
    texts = [list(system) for _ in range(chats)]
    asked = read = 0
    runner = engine.graph.steps  # type: ignore[union-attr]
    prefill = runner.prefill

    def counted(parts: Any, *more: Any) -> Any:
        nonlocal read
        read += sum(len(p.tokens) for p in parts)
        return prefill(parts, *more)

    runner.prefill = counted
    start = time.perf_counter()
    for _ in range(turns):
        numbers = {}
        for i, text in enumerate(texts):
            text += [r.randrange(VOCAB) for _ in range(r.randrange(16, 48))]
            asked += len(text)
            numbers[engine.submit(Request(list(text), Settings(max_new_tokens=64)))] = i
        for event in engine.run():
            if event.done is not None:
                texts[numbers[event.request]] += event.done[0].ids
    took = time.perf_counter() - start
    runner.prefill = prefill
    print(
        f"  {chats} chats of {turns} turns, a system prompt of {len(system)} tokens: {asked:,} tokens of prompts, "
        f"{read:,} read, {100 * (1 - read / asked):.1f} % were not read again; {took:.1f} s"
    )


def shaped(name: str, quick: bool) -> Any:
    """A model of part f."""
    torch.manual_seed(0)
    norm = regard.Norm(1e-6, rms=True)
    if name == "mixtral":
        attention = regard.GQA(32, 8, 128, rope=regard.Rope(1e6))
        dim, layers, ffn = 4096, 4, regard.MoE(8, 2, 14336)
    else:
        attention = regard.GQA(32, 8, 128, rope=regard.Rope(1e6), qk_norm=1e-6)
        dim, layers, ffn = 2560, 36, regard.MLP(9728, "silu", gated=True, bias=False)
    tower = regard.Tower(dim, 1 if quick else layers, attention, ffn, norm=norm)
    words = Tokens(32000 if name == "mixtral" else 151936)
    config = TransformerConfig(words, tower, regard.LM(tied=name != "mixtral"), max_len=8192)
    return regard.build(config, device="cuda", dtype=BF16)


@torch.no_grad()
def read_in_a_step(model: Any, texts: list[list[int]], out: Any) -> float:
    """Bytes of weights that a step reads at least: all but the embedding of an untied head and, by what the plain model
    chooses for these very texts, the experts that no row chose; the mean over steps."""
    size = sum(p.nbytes for p in model.parameters())
    size -= 0 if model.config.head.tied else model.embedding.weight.nbytes
    layers = [m for m in model.modules() if isinstance(m, MixtureOfExperts)]
    seen: dict[Any, list[torch.Tensor]] = {layer: [] for layer in layers}

    def route(layer: Any, x: torch.Tensor) -> Any:
        chosen, weight = MixtureOfExperts.route(layer, x)
        seen[layer].append(chosen)
        return chosen, weight

    for layer in layers:
        layer.route = partial(route, layer)
    for ids, result in zip(texts if layers else [], out, strict=False):
        model(torch.tensor([ids + result.ids], device="cuda"))
        for rows in seen.values():
            rows[-1] = rows[-1][len(ids) : -1]
    for layer, rows in seen.items():
        del layer.route
        every = layer.config.experts
        used = statistics.mean(len(step.unique()) for step in torch.stack(rows, 1).cpu())
        size -= (1 - used / every) * sum(w.nbytes for w in (layer.gate, layer.up, layer.down))
        print(f"    a step reads {used:.2f} of {every} experts")
    return size


def part_f(args: argparse.Namespace) -> None:
    new, speed = 32 if args.quick else 256, bandwidth()
    print(f"  copy {speed / 1e12:.2f} TB/s on {torch.cuda.get_device_name()}")
    for name in ("mixtral", "qwen3"):
        model = shaped(name, args.quick)
        each = model.config.tower.attention
        cache_token = model.config.tower.layers * 2 * each.kv_heads * each.head_dim * 2
        for batch in (1, 64):
            texts = prompts(batch, *((128, 128) if batch == 1 else (96, 160)), batch, 32000)
            asked: dict[str, Any] = {"max_new_tokens": new}
            for _ in range(3):
                out = regard.generate(model, texts, **asked)
            took = statistics.median(
                seconds(lambda: regard.generate(model, texts, **asked))  # noqa: B023
                for _ in range(3)
            )
            size = read_in_a_step(model, texts, out) + batch * (128 + new // 2) * cache_token
            share = size * new / took / speed
            print(
                f"  {name}, batch {batch}: {batch * new / took:,.0f} tokens/s, {1e3 * took / new:.3f} ms a token, "
                f"{size / 1e9:.2f} GB a step, {100 * share:.1f} % of the copy's speed, "
                f"{100 * share * speed / 4.8e12:.1f} % of 4.8 TB/s",
                flush=True,
            )
        print("  " + Engine(model, rows=64, memory=2**30).explain().replace("\n", "\n  "))


def part_q(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    attention = regard.GQA(32, 8, 128, rope=regard.Rope(1e6), qk_norm=1e-6)
    ffn, norm = regard.MLP(12288, "silu", gated=True, bias=False), regard.Norm(1e-6, rms=True)
    tower = regard.Tower(4096, 2 if args.quick else 36, attention, ffn, norm=norm)
    config = TransformerConfig(Tokens(151936), tower, regard.LM(tied=False), max_len=8192)
    model = regard.build(config, device="cuda", dtype=BF16)
    new, rates = 32 if args.quick else 256, dict[tuple[str, int], float]()
    for kind in ("bf16", "fp8", "int4"):
        start = time.perf_counter()
        served = model if kind == "bf16" else regard.prepare(model, kind)
        took, held = time.perf_counter() - start, [*served.parameters(), *served.buffers()]
        size = sum(x.nbytes for x in held) / 2**30
        print(f"  {kind}: {size:.2f} GiB, made ready in {took:.1f} s", flush=True)
        for batch in (1, 8):
            texts = prompts(batch, 128, 128, batch)
            call = partial(regard.generate, served, texts, max_new_tokens=new)
            for _ in range(3):
                call()
            rate = batch * new / statistics.median(seconds(call) for _ in range(3))
            rates[kind, batch] = rate
            print(
                f"  {kind}, batch {batch}: {rate:,.0f} tokens/s, "
                f"{rate / rates['bf16', batch]:.2f} times bf16",
                flush=True,
            )
        print("    " + Engine(served, rows=8, memory=2**30).explain().replace("\n", "\n    "))


@cache
def pair(name: str, quick: bool) -> tuple[Any, Any]:
    """transformers' model, and ours with its weights."""
    import transformers as tf

    tf.logging.set_verbosity_error()
    torch.manual_seed(0)
    layers = 1 if quick else 6
    if name == "Marian-base":
        sizes = {"layers": layers, "attention_heads": 8, "ffn_dim": 2048}
        each = {f"{side}_{k}": v for side in ("encoder", "decoder") for k, v in sizes.items()}
        hf: Any = tf.MarianMTModel(tf.MarianConfig(
            vocab_size=58101, d_model=512, max_position_embeddings=512, scale_embedding=True, pad_token_id=58100,
            decoder_start_token_id=58100, eos_token_id=0, forced_eos_token_id=None, **each,
        ))  # fmt: skip
    else:
        hf = tf.T5ForConditionalGeneration(
            tf.T5Config(num_layers=layers, decoder_start_token_id=0, tie_word_embeddings=True)
        )
    start, pad = hf.config.decoder_start_token_id, hf.config.pad_token_id
    # Nothing ends early, on either side.
    hf.generation_config = tf.GenerationConfig(pad_token_id=pad, decoder_start_token_id=start)
    hf = hf.to("cuda", BF16).eval()
    with tempfile.TemporaryDirectory() as folder:
        hf.save_pretrained(folder)
        return hf, regard.load(folder, device="cuda", dtype=BF16)


def raced(hf: Any, model: Any, texts: list[list[int]], beams: int, new: int) -> str:
    """Both sides on the same sources, in turn."""
    width, pad = max(map(len, texts)), hf.config.pad_token_id
    ids = torch.tensor([t + [pad] * (width - len(t)) for t in texts], device="cuda")
    mask = torch.tensor([[1] * len(t) + [0] * (width - len(t)) for t in texts], device="cuda")
    said: dict[str, list[list[int]]] = {}

    def ours() -> None:
        out = regard.generate(model, texts, beams=beams, max_new_tokens=new, eos=())
        said["ours"] = [x.ids for x in out]

    def other() -> None:
        asked = {"num_beams": beams, "max_new_tokens": new, "do_sample": False}
        with torch.inference_mode():
            said["theirs"] = hf.generate(ids, attention_mask=mask, **asked)[:, 1:].tolist()

    for _ in range(3):
        ours()
    other()
    each = [(len(texts) * new / seconds(ours), len(texts) * new / seconds(other)) for _ in range(3)]
    rate, peers = (statistics.median(x) for x in zip(*each, strict=True))
    alike = sum(a == b for a, b in zip(said["ours"], said["theirs"], strict=True))
    return f"{rate:8,.0f} {peers:13,.0f} {rate / peers:9.1f} times   {alike} of {len(texts)}"


def part_g(args: argparse.Namespace) -> None:
    count, new = (8, 16) if args.quick else (64, 64)
    print("               beams  positions/s  transformers              same answers")
    for name, vocab in (("Marian-base", 58000), ("T5-small", 32000)):
        hf, model = pair(name, args.quick)
        r = random.Random(3)
        texts = [[r.randrange(3, vocab) for _ in range(r.randint(16, 48))] for _ in range(count)]
        for beams in (4, 1):
            print(f"  {name:12} {beams:5d}     {raced(hf, model, texts, beams, new)}", flush=True)
        print("  " + Engine(model, rows=64, memory=2**30).explain().replace("\n", "\n  "))


def part_h(args: argparse.Namespace) -> None:
    r = random.Random(3)
    torch.manual_seed(0)
    model = regard.build("gpt2", **({"layers": 4, "dim": 256, "heads": 4} if args.quick else {}))
    asked = [
        Request([r.randrange(50257) for _ in range(r.randint(16, 64))], Settings(r.randint(16, 48)))
        for _ in range(16)
    ]
    tokens = sum(request.settings.max_new_tokens for request in asked)

    def serve(groups: list[list[Request]]) -> float:
        engine, start = Engine(model), time.perf_counter()
        for group in groups:
            for request in group:
                engine.submit(request)
            for _ in engine.run():
                pass
        return time.perf_counter() - start

    print(f"  16 requests, {tokens} tokens, {torch.get_num_threads()} threads")
    for _ in range(3):
        together, alone = serve([asked]), serve([[request] for request in asked])
        print(
            f"  together {tokens / together:.1f} tokens/s, one at a time {tokens / alone:.1f}: "
            f"{alone / together:.2f} times",
            flush=True,
        )


SPEEDS = (1, 4, 8, 32, 64)
PERIOD = 50  # tokens after which the text of `repeats` begins again


def repeats(layers: int) -> Any:
    """The shape of `llama`, whose next token depends on the last one alone: its answers go round and round."""
    torch.manual_seed(0)
    model = regard.build("llama-3.2-1b", layers=layers, tied=False, device="cuda", dtype=BF16)
    circle = torch.arange(PERIOD, device="cuda")
    with torch.no_grad():
        for block in model.tower.blocks:
            block.attention.wo.weight.zero_()
            block.ffn.down.weight.zero_()
        model.head.weight[circle.roll(-1)] = 9 * model.embedding.weight[circle]
    return model


@contextmanager
def agreeing(share: float) -> Iterator[None]:
    """Guesses are what the model chooses, in this share of the places: the draft's own are made and thrown away."""
    real = Guesses.judge

    def judge(self: Guesses, logits: Any, guesses: Any, *rest: Any) -> None:
        chosen, (width, ahead) = logits[:, :-1].argmax(-1), guesses.shape
        place = self.steps.state.pos[:width, None] + torch.arange(ahead, device=logits.device)
        right = place * 2654435761 % 1009 < share * 1009
        real(self, logits, torch.where(right, chosen, (chosen + 1) % VOCAB), *rest)

    Guesses.judge = judge  # type: ignore[method-assign]
    try:
        yield
    finally:
        Guesses.judge = real  # type: ignore[method-assign]


def part_i(args: argparse.Namespace) -> None:
    """speculation: new tokens a second of plain decoding, and how many times as fast each kind is"""
    layers, new = layers_of(args), 64 if args.quick else 256
    torch.manual_seed(1)
    sizes = {"dim": 512, "heads": 8, "kv_heads": 2, "ffn_dim": 2048}
    draft = regard.build("llama-3.2-1b", layers=2, device="cuda", dtype=BF16, **sizes)

    def rates(model: Any, texts: list[list[int]], kinds: list[dict[str, Any]]) -> list[float]:
        """Tokens a second of each kind of call: medians, in turns."""
        found: list[list[float]] = [[] for _ in kinds]
        for turn in range(8):
            for times, kind in zip(found, kinds, strict=True):
                call = partial(regard.generate, model, texts, max_new_tokens=new, eos=(), **kind)
                took = seconds(call)
                if turn >= 3:  # what a later call finds recorded
                    times.append(len(texts) * new / took)
        return [statistics.median(times) for times in found]

    print("  batch  plain, repeating   lookup   plain, random   lookup")
    circle, model = repeats(layers), llama(layers)
    for batch in SPEEDS[:2] if args.quick else SPEEDS:
        round_about = [[(i + j) % PERIOD for j in range(128)] for i in range(batch)]
        both = [{}, {"lookup": 8}]
        plain, looked = rates(circle, round_about, both)
        other, vain = rates(model, prompts(batch, 128, 128, batch), both)
        print(
            f"  {batch:5d} {plain:17,.0f} {looked / plain:8.2f} {other:15,.0f} {vain / other:8.2f}",
            flush=True,
        )
    del circle
    print("  batch         plain   draft, 80 %   draft, 0 %")
    for batch in SPEEDS[:2] if args.quick else SPEEDS:
        texts, times, plain = prompts(batch, 128, 128, batch), [], 0.0
        for share in (0.8, 0.0):
            _kept.clear()  # what was recorded had another share
            with agreeing(share):
                plain, guessed = rates(model, texts, [{}, {"draft_model": draft, "draft": 4}])
            times.append(guessed / plain)
        print(f"  {batch:5d} {plain:13,.0f} {times[0]:13.2f} {times[1]:12.2f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes: whether it runs at all")
    parts = {
        "a": part_a,
        "b": part_b,
        "c": part_c,
        "d": part_d,
        "e": part_e,
        "f": part_f,
        "g": part_g,
        "q": part_q,
    }
    parts |= {"h": part_h, "i": part_i}
    run_parts(parser, parts, "a,b,c,d,e,f,g,q,h,i", anywhere="h")
