"""Decoding on the CPU: Regard against transformers' generate and CTranslate2, the same weights, one interleaved run.

    python bench/decode.py [--part gpt2 llama marian t5 together translate] [--quick] [--repeats 3] [--only int8 ...]

Random weights of real shape, no end token, so that every side makes the same number of tokens. For each model, batch
and search: median milliseconds and tokens per second of each side, the ratio (the better of transformers' fp32 and bf16
over ours; above 1: Regard is faster), and how many rows have the tokens of transformers' fp32. Each side is a process
of its own, as whoever uses it has it, and they take turns, with a pause in between: the threads of CTranslate2's OpenMP
spin for 0.2 s after a call, on a core that the next side wants. `translate` runs beam 4 over 200 sentences of
../shared/data/multi30k and adds the memory of each side (every one has torch in it, which CTranslate2 imports where it
finds it). CTranslate2 takes part in `gpt2` and `translate` if it can be imported; bf16 where the CPU multiplies it.
Each part takes up to four minutes on two cores; run it alone, or a few of its sides with --only (those whose names have
one of the words). It changes nothing.

A CPU without AMX, or with AVX2 alone, is had by hiding the rest from all sides:

    REGARD_ISA=avx512 ONEDNN_MAX_CPU_ISA=AVX512_CORE_VNNI CT2_FORCE_CPU_ISA=AVX512 MKL_ENABLE_INSTRUCTIONS=AVX512_E1
    REGARD_ISA=avx2 ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 CT2_FORCE_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import lzma
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measure import floats, growth, header, medians

os.environ.setdefault("HF_HUB_OFFLINE", "1")
DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "multi30k"
PARTS = ("gpt2", "llama", "marian", "t5", "together", "translate")
PROMPT, NEW, BATCHES = 32, 64, (1, 8)
LINES, LINE_NEW, BEAMS, BATCH = 200, 16, 4, 32  # of the part `translate`

Prompts = Sequence[Sequence[int]]


def precisions() -> list[str]:
    return [*floats(), "int8"]


# --- the models ---------------------------------------------------------------------------------------------------


def peer(name: str, quick: bool) -> Any:
    """transformers' model of that shape in fp32, with random weights and no end token."""
    import transformers as tf

    torch.manual_seed(0)
    dim, layers, ffn, vocab = (32, 2, 64, 500) if quick else (768, 12, 2048, 32000)
    heads, narrow = (4, dim) if quick else (12, 512)
    if name == "gpt2":
        shape = dict(n_embd=dim, n_layer=layers, n_head=heads, vocab_size=500 if quick else 50257)
        model: Any = tf.GPT2LMHeadModel(tf.GPT2Config(**shape))
    elif name == "llama":
        model = tf.LlamaForCausalLM(tf.LlamaConfig(
            vocab_size=vocab, hidden_size=dim, intermediate_size=ffn, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=heads // (2 if quick else 3), max_position_embeddings=2048,
        ))  # fmt: skip
    elif name == "t5":
        model = tf.T5ForConditionalGeneration(tf.T5Config(
            vocab_size=vocab + 128, d_model=narrow, d_kv=narrow // 8, d_ff=ffn, num_layers=min(layers, 6),
            num_heads=8, decoder_start_token_id=0,
        ))  # fmt: skip
    else:
        both = dict(layers=min(layers, 6), attention_heads=8, ffn_dim=ffn)
        model = tf.MarianMTModel(tf.MarianConfig(
            vocab_size=vocab, d_model=narrow, max_position_embeddings=512, scale_embedding=True,
            pad_token_id=vocab - 1, decoder_start_token_id=vocab - 1, eos_token_id=0, forced_eos_token_id=None,
            **{f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in both.items()},
        ))  # fmt: skip
    model.config._attn_implementation = "sdpa"
    start = model.config.decoder_start_token_id if model.config.is_encoder_decoder else None
    pad = 0 if name != "marian" else model.config.pad_token_id
    model.generation_config = tf.GenerationConfig(pad_token_id=pad, decoder_start_token_id=start)
    return model.eval()


def theirs(model: Any, prompts: Prompts, beams: int, new: int, banned: Sequence[int] = ()) -> Any:
    """transformers' generate: a decoder's prompts are padded on the left, sources on the right."""
    two, pad = model.config.is_encoder_decoder, model.generation_config.pad_token_id
    width = max(map(len, prompts))
    order = slice(None, None, 1 if two else -1)
    rows = [[[*p], [pad] * (width - len(p))][order] for p in prompts]
    real = [[[1] * len(p), [0] * (width - len(p))][order] for p in prompts]
    ids, mask = (torch.tensor([a + b for a, b in pairs]) for pairs in (rows, real))
    more = {"bad_words_ids": [[i] for i in banned]} if banned else {}
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=new, num_beams=beams, do_sample=False, **more
        )
    return out[:, 1 if two else width :].tolist()


def ours(
    model: Any, prompts: Prompts, beams: int, new: int, banned: Sequence[int] = (), rows: int = 64
) -> list[list[int]]:
    import regard

    settings: dict[str, Any] = dict(eos=(), banned=tuple(banned), forced_last=None)
    settings |= dict(beams=beams, max_new_tokens=new, rows=rows)
    return [r.ids for r in regard.generate(model, [list(p) for p in prompts], **settings)]


# --- one model: batches and searches ------------------------------------------------------------------------------


def ragged(batch: int, vocab: int, about: int) -> list[list[int]]:
    """Prompts of `about` tokens, up to a quarter more or less."""
    g = torch.Generator().manual_seed(0)
    most = 4 * max(batch - 1, 1)
    sizes = [about + about * (2 * i - batch + 1) // most for i in range(batch)]
    return [torch.randint(3, vocab - 1, (n,), generator=g).tolist() for n in sizes]


def compare(name: str, args: argparse.Namespace) -> None:
    plain = peer(name, args.quick)
    about, new = (8, 8) if args.quick else (PROMPT, NEW)
    two, vocab = bool(plain.config.is_encoder_decoder), plain.config.vocab_size
    names = [
        f"{who} {p}"
        for who, kinds in (("transformers", floats()), ("regard", precisions()))
        for p in kinds
    ]
    with tempfile.TemporaryDirectory() as home:
        plain.save_pretrained(home)
        if name == "gpt2" and importlib.util.find_spec("ctranslate2"):
            convert(Path(home), vocab)
            names += ["ctranslate2 fp32", "ctranslate2 int8"]
        del plain
        with apart([n for n in names if wanted(n, args)], Path(home)) as sides:
            for batch in BATCHES:
                for beams in (1, BEAMS) if two else (1,):
                    job = Job(ragged(batch, vocab, about), beams, new)
                    report(f"{name} batch {batch} beams {beams}", sides, job, args.repeats)


def wanted(side: str, args: argparse.Namespace) -> bool:
    return not args.only or any(word in side for word in args.only)


# --- the sides, each a process ------------------------------------------------------------------------------------

PAUSE = 0.3  # seconds in which the threads of another side come to rest


class Job(NamedTuple):
    prompts: list[list[int]]
    beams: int
    new: int
    banned: tuple[int, ...] = ()
    batch: int = 64  # prompts that are read together, where there are more


Work = Callable[[Job], list[list[int]]]


class Side:
    """A library with a model in one precision, read from a folder by a process of its own."""

    def __init__(self, name: str, folder: Path):
        context = get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(name, folder, other), daemon=True)
        self.process.start()
        other.close()
        self.note: str = self.pipe.recv()

    def __call__(self, job: Job) -> tuple[float, list[list[int]]]:
        """Seconds, and what it wrote."""
        time.sleep(PAUSE)
        self.pipe.send(job)
        found: tuple[float, list[list[int]]] = self.pipe.recv()
        return found


def serve(name: str, folder: Path, pipe: Any) -> None:
    """What a side's process does."""
    prepare_process()
    work = make(name, folder)
    pipe.send(off(folder, name.split()[1]) if name.startswith("regard") else "")
    while (job := pipe.recv()) is not None:
        start = time.perf_counter()
        found = work(job)
        pipe.send((time.perf_counter() - start, found))


@contextmanager
def apart(names: list[str], folder: Path) -> Iterator[dict[str, Side]]:
    sides = {name: Side(name, folder) for name in names}
    yield sides
    for side in sides.values():
        side.pipe.send(None)
        side.process.join()


def make(name: str, folder: Path) -> Work:
    """What a side does with a job, its model read from the folder."""
    library, precision = name.split()
    if library == "ctranslate2":
        return ctranslate2_work(folder, "int8" if precision == "int8" else "float32")
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    if library == "regard":
        import regard

        fast = regard.prepare(regard.load(folder, dtype=kind), precision, consume=True)
        return lambda job: ours(
            fast, job.prompts, job.beams, job.new, job.banned, job.batch * job.beams
        )
    import transformers

    kept = json.loads((folder / "config.json").read_text())
    cls = getattr(transformers, kept["architectures"][0])
    model = cls.from_pretrained(folder, dtype=kind, attn_implementation="sdpa")
    model.generation_config.eos_token_id = None  # the folder's config may name one

    def work(job: Job) -> list[list[int]]:
        order = sorted(range(len(job.prompts)), key=lambda i: -len(job.prompts[i]))
        found: dict[int, list[int]] = {}
        for at in range(0, len(order), job.batch):
            part = order[at : at + job.batch]
            rows = theirs(model, [job.prompts[i] for i in part], job.beams, job.new, job.banned)
            found |= dict(zip(part, rows, strict=True))
        return [found[i] for i in range(len(order))]

    return work


def ctranslate2_work(folder: Path, kind: str) -> Work:
    import ctranslate2

    home = folder / ("int8" if kind == "int8" else "fp32")
    how = {"compute_type": kind, "inter_threads": 1, "intra_threads": torch.get_num_threads()}
    if json.loads((folder / "config.json").read_text())["model_type"] == "gpt2":
        decoder = ctranslate2.Generator(str(home), **how)
        words = json.loads((home / "vocabulary.json").read_text())

        def call(source: list[list[str]], job: Job) -> list[list[str]]:
            limits = dict(max_length=job.new, min_length=job.new, include_prompt_in_result=False)
            out = decoder.generate_batch(
                source, beam_size=job.beams, max_batch_size=job.batch, **limits
            )
            return [result.sequences[0] for result in out]
    else:
        both = ctranslate2.Translator(str(home), **how)
        words = Words(json.loads((folder / "config.json").read_text())["vocab_size"]).words

        def call(source: list[list[str]], job: Job) -> list[list[str]]:
            limits = dict(
                max_decoding_length=job.new, min_decoding_length=job.new, max_batch_size=job.batch
            )
            out = both.translate_batch(source, beam_size=job.beams, **limits)
            return [result.hypotheses[0] for result in out]

    number = {word: i for i, word in enumerate(words)}

    def work(job: Job) -> list[list[int]]:
        found = call([[words[i] for i in prompt] for prompt in job.prompts], job)
        return [[number[word] for word in row] for row in found]

    return work


@torch.inference_mode()
def off(folder: Path, precision: str) -> str:
    """What a speed costs: by how much logits differ from the plain model's. (What that means for a model which has
    learned something: bench/quality.py quantised.)"""
    import regard

    plain = regard.load(folder, dtype=torch.float32)
    x = torch.arange(3, 3 + PROMPT)[None]
    more = {"source": x} if plain.reads_source else {}
    y, z = (m(x, **more).float() for m in (plain, regard.prepare(plain, precision)))
    return f"logits off by {((z - y).norm() / y.norm()).item():.2%}"


def report(
    title: str, sides: dict[str, Side], job: Job, repeats: int, notes: dict[str, str] | None = None
) -> None:
    """Time the sides in turn and print a line for each."""
    found = {name: side(job)[1] for name, side in sides.items()}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(repeats):
        for name in sides if i % 2 else reversed(sides):
            times[name].append(sides[name](job)[0])
    medians = {name: statistics.median(t) for name, t in times.items()}
    best = min((t for name, t in medians.items() if name.startswith("transformers")), default=None)
    truth = found.get("transformers fp32") or found.get("regard fp32") or next(iter(found.values()))
    for name, seconds in medians.items():
        same = sum(a == b for a, b in zip(truth, found[name], strict=True))
        ratio = "" if best is None or name.startswith("transformers") else f"{best / seconds:.2f}"
        rate = len(job.prompts) * job.new / seconds
        note = (notes or {}).get(name) or sides[name].note
        print(f"{title:<26} {name:<18} {seconds * 1e3:>9.1f} {rate:>9.1f} {ratio:>6}  "
              f"{same}/{len(truth)} {note}".rstrip(), flush=True)  # fmt: skip
    for p in ("fp32", "int8"):
        if f"ctranslate2 {p}" in medians and f"regard {p}" in medians:
            ratio = f"{medians[f'ctranslate2 {p}'] / medians[f'regard {p}']:.2f}"
            print(f"{title:<26} regard {p} is {ratio} times as fast as ctranslate2 {p}", flush=True)


# --- many requests ---


def together(args: argparse.Namespace) -> None:
    """16 requests of 32 to 64 new tokens, all there at once: by one engine, in pages too, and one after the other."""
    import regard
    from regard import Engine, Request, Settings

    model = regard.prepare(regard.from_hf(peer("gpt2", args.quick)), "int8")
    vocab = model.config.embedding.vocab
    asked = [
        Request(prompt, Settings(max_new_tokens=32 + i % 5 * 8, eos=()))
        for i, prompt in enumerate(ragged(16, vocab, 8 if args.quick else PROMPT))
    ]

    def run(**how: Any) -> int:
        engine, said = Engine(model, **how), 0
        for request in asked:
            engine.submit(request)
        for event in engine.run():
            said += event.token is not None
        return said

    ways = {"one after the other": dict(rows=1), "16 together": dict(rows=16)}
    ways["16 together, in pages"] = dict(rows=16, pages=200)
    times = medians([partial(run, **how) for how in ways.values()], args.repeats)
    for name, seconds in zip(ways, times, strict=True):
        print(
            f"together: GPT-2 int8, 16 requests {name}: {seconds:.2f} s, {times[0] / seconds:.2f} times",
            flush=True,
        )


# --- translation of real sentences --------------------------------------------------------------------------------


def sentences(quick: bool) -> list[list[int]]:
    """German test sentences as ids below the model's vocabulary, each with its end token 0."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    def read(name: str) -> list[str]:
        with lzma.open(DATA / f"{name}.de.xz", "rt", encoding="utf-8") as file:
            return file.read().splitlines()

    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(
        vocab_size=400 if quick else 16000, special_tokens=["</s>", "<unk>"], show_progress=False
    )
    core.train_from_iterator(read("train")[: 2000 if quick else None], trainer)
    lines = read("test_2016_flickr")[: 8 if quick else LINES]
    return [[*core.encode(line).ids, 0] for line in lines]


class Words:
    """What CTranslate2's converter asks of a tokenizer."""

    eos_token, unk_token, bos_token = "</s>", "<unk>", "<s>"

    def __init__(self, vocab: int):
        self.words = ["</s>", "<unk>", *(f"t{i}" for i in range(2, vocab - 1)), "<pad>"]

    def get_vocab(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self.words)}


def convert(folder: Path, vocab: int) -> None:
    """The folder's weights for CTranslate2, in fp32 and in int8."""
    from ctranslate2.converters import TransformersConverter

    class Converter(TransformersConverter):
        def load_tokenizer(self, *_: Any, **__: Any) -> Words:
            return Words(vocab)

    for precision, kind in (("fp32", None), ("int8", "int8")):
        Converter(str(folder)).convert(str(folder / precision), quantization=kind)


def translate(args: argparse.Namespace) -> None:
    if not DATA.is_dir():
        print(f"translate: left out, {DATA} is not on this machine")
        return
    with tempfile.TemporaryDirectory() as home:
        folder, lines = Path(home), sentences(args.quick)
        model = peer("marian", args.quick)
        model.save_pretrained(folder)
        vocab, new = model.config.vocab_size, 4 if args.quick else LINE_NEW
        job = Job(lines, BEAMS, new, (vocab - 1,), BATCH)
        (folder / "job.json").write_text(json.dumps(job))
        names = [f"regard {p}" for p in precisions()]
        if importlib.util.find_spec("ctranslate2"):
            convert(folder, vocab)
            names += ["ctranslate2 fp32", "ctranslate2 int8"]
        else:
            print("translate: without CTranslate2, which is not installed here")
        names = [name for name in names if wanted(name, args)]
        if wanted("transformers", args):
            few = job._replace(prompts=lines[:BATCH])
            with apart([f"transformers {p}" for p in floats()], folder) as sides:
                times = {name: side(few)[0] for name, side in sides.items()}
            names.insert(
                0, min(times, key=times.__getitem__)
            )  # only the better one does the whole work
            said = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in times.items())
            print(f"translate: on {len(few.prompts)} sentences: {said}")
        notes = {name: "{:.0f} MB for the model and its work, {:.0f} MB the process".format(*peak(name, folder))
                 for name in names}  # fmt: skip
        with apart(names, folder) as sides:
            report(f"translate {len(lines)} beams {BEAMS}", sides, job, args.repeats, notes)


def peak(side: str, folder: Path) -> list[float]:
    """Megabytes at the peak: what reading the model and translating added, and the whole process."""
    command = [sys.executable, __file__, "--peak", side, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return [float(x) / 1e6 for x in done.stdout.split()[-2:]]


def measure_peak(side: str, folder: str) -> None:
    job = Job(*json.loads((Path(folder) / "job.json").read_text()))
    library = importlib.import_module(side.split()[0])
    for name in ("load", "prepare", "generate", "MarianMTModel"):
        getattr(library, name, None)  # libraries import what they need when they are asked for it
    added = growth(lambda: make(side, Path(folder))(job))
    status = Path("/proc/self/status").read_text()
    print(added, int(status.split("VmHWM:")[1].split()[0]) * 1024)


def prepare_process() -> None:
    """What every process of this bench does first."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from regard.kernels.c.threads import use_threads

    use_threads()
    warnings.simplefilter("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--translate", action="store_true", help="the same as --part translate")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: whether it runs at all")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", help="sides whose names have one of these words")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    prepare_process()
    if args.peak:
        return measure_peak(*args.peak)
    import transformers

    args.repeats = 1 if args.quick else args.repeats
    print(f"{header()}, transformers {transformers.__version__}")
    print(f"{'':<26} {'side':<18} {'ms':>9} {'tokens/s':>9} {'ratio':>6}  same")
    for name in ["translate"] if args.translate else args.part:
        ways = {"translate": translate, "together": together}
        ways[name](args) if name in ways else compare(name, args)


if __name__ == "__main__":
    main()
