"""Fine-tuning: Regard against transformers' Trainer, with PEFT for LoRA; the same start, the same batches.

    python bench/tune.py [--rows 8] [--length 2048] [--steps 40] [--documents] [--only "regard full" ...]

A model of SmolLM2-135M's shape (on a CPU a tiny one) learns a little of one half of the text, then is tuned on
conversations made of the other half, packed end to end, of which the answers alone are learned. With --documents no
side lets a conversation see another one: Regard by its document masks, Trainer by position_ids that begin anew. Each
side is a process of its own: all get warm together, then each is timed alone. Memory is the allocator's peak of the
timed steps; the loss is the mean of the last ten. Needs accelerate and peft; bitsandbytes is not compared with.
"""

from __future__ import annotations

import argparse
import lzma
import multiprocessing
import random
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from measure import floats, header

import regard
from regard.data.feed import IGNORE, Batch
from regard.data.train_tokenizer import Recipe, train_tokenizer
from regard.models.adapt import quantize
from regard.text import Tokenizer
from regard.training.checkpoint import Checkpoints
from regard.training.config import Adapt, adapted
from regard.training.objectives import causal
from regard.training.optim import Optim, Schedule
from regard.training.trainer import Train, Trainer

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
TEXT = Path(__file__).resolve().parents[2] / "shared" / "data" / "lm" / "tinystories_2mb.txt.xz"
SMOL: dict[str, Any] = dict(
    vocab=49152, dim=576, layers=30, heads=9, kv_heads=3, ffn_dim=1536, max_len=8192, tied=True
)
SHAPE = SMOL if GPU else SMOL | dict(vocab=4096, dim=64, layers=2, heads=2, kv_heads=1, ffn_dim=128)
METHODS = ("full", "lora", "qlora")
RATES = {"start": 1e-3, "full": 1e-4, "lora": 1e-3, "qlora": 1e-3}
RANK, ALPHA, BETAS = 16, 32.0, (0.9, 0.95)
WARM, LAST = 5, 10
Step = Callable[[int, float], None]  # its number and its loss


# --- data -----------------------------------------------------------------------------------------------------------


def conversations(path: Path) -> list[tuple[str, str]]:
    """Stories as questions and answers."""
    stories = lzma.decompress(path.read_bytes()).decode().split("<|endoftext|>")
    halves = (s.strip().partition(".")[::2] for s in stories)
    return [(f"Tell me a story: {a.strip()}.\n", b.strip()) for a, b in halves if b.strip()]


def batches(path: Path, rows: int, length: int, count: int, half: int, docs: bool) -> list[Batch]:
    """Of one half of the conversations, again and again; questions have no labels in the second half."""
    pairs = conversations(path)
    files = train_tokenizer((a + b for a, b in pairs), Recipe(vocab=min(8192, SHAPE["vocab"])))
    tokenizer = Tokenizer.from_files(files, {})
    assert tokenizer is not None
    draw, need = random.Random(half), rows * (length + 1) * count
    ids, labels, doc = [], [], []
    pairs = pairs[half::2]
    while len(ids) < need:
        for question, answer in draw.sample(pairs, len(pairs)):
            q, a = tokenizer.encode(question), [*tokenizer.encode(answer), 0]
            ids += [*q, *a]
            labels += [*([IGNORE] * len(q) if half else q), *a]
            doc += [len(doc)] * (len(q) + len(a))
    shape = (count, rows, length + 1)
    x, y, d = (torch.tensor(z[:need]).view(shape) for z in (ids, labels, doc))
    return [
        Batch(i[:, :-1].contiguous(), j[:, 1:].contiguous(), doc=e[:, :-1] if docs else None)
        for i, j, e in zip(x, y, d)
    ]


class Given:
    """A feed of batches that are there."""

    fingerprint = "given"

    def __init__(self, made: list[Batch]):
        self.made, self.epoch = made, len(made)

    def batch(self, k: int, rank: int = 0, world: int = 1) -> Batch:
        return self.made[k]

    def evaluation(self) -> Any:
        return iter(())

    def describe(self) -> str:
        return "given"


# --- the sides --------------------------------------------------------------------------------------------------------


def ours(model: Any, made: list[Batch], method: str, compiled: bool, note: Step) -> Any:
    if method == "qlora":
        quantize(model, DEVICE)
    model = model.to(DEVICE)
    if method in ("lora", "qlora"):
        torch.manual_seed(0)
        model = adapted(model, Adapt(method, RANK, ALPHA, targets="all"))
    config = Train(
        steps=len(made),
        precision=floats()[-1],
        compile=compiled,
        optim=Optim(lr=RATES[method], decay=0.0, betas=BETAS),
        schedule=Schedule("constant"),
    )

    def told(event: dict[str, Any]) -> None:
        if event["kind"] == "step":
            note(event["step"], event["loss"])

    checkpoints = Checkpoints(Path(tempfile.mkdtemp()), lambda model, path: None)
    trainer = Trainer(model, Given(made), causal, config, checkpoints, lambda path: model, [told])
    trainer.model.train()
    for k in range(1, len(made) + 1):
        trainer._step(k)
    return trainer.model


def theirs(folder: Path, made: list[Batch], method: str, compiled: bool, note: Step) -> None:
    import transformers

    narrow = torch.bfloat16 if method != "full" and "bf16" in floats() else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=narrow)
    if method == "lora":
        import peft

        torch.manual_seed(0)
        how = dict(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, peft.LoraConfig(**how))

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return sum(len(b.ids) for b in made)

        def __getitem__(self, i: int) -> dict[str, Any]:
            batch, r = made[i // len(made[0].ids)], i % len(made[0].ids)
            # They shift: the label of a token stands at its own place.
            labels = torch.cat([batch.labels.new_tensor([IGNORE]), batch.labels[r][:-1]])
            row = {"input_ids": batch.ids[r], "labels": labels}
            if batch.doc is not None:
                first = batch.doc[r].diff(prepend=batch.doc[r][:1] - 1) != 0
                place = torch.arange(len(first))
                row["position_ids"] = place - torch.where(first, place, 0).cummax(0).values
            return row

    class Ordered(transformers.Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    class Told(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in (logs or {}):
                note(state.global_step, logs["loss"])

    options = transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=len(made[0].ids),
        max_steps=len(made),
        learning_rate=RATES[method],
        lr_scheduler_type="constant",
        adam_beta2=BETAS[1],
        weight_decay=0.0,
        max_grad_norm=1.0,
        bf16=floats()[-1] == "bf16",
        use_cpu=not GPU,
        torch_compile=compiled,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Ordered(model, options, train_dataset=Rows(), callbacks=[Told()])
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()


SIDES = [
    f"{who} {method}{more}"
    for more in ("", " compiled")
    for method in METHODS
    for who in ("regard", "trainer")
    if (who, method) != ("trainer", "qlora")
]


def serve(side: str, folder: Path, made: list[Batch], pipe: Connection) -> None:
    """Trains; says when it is warm, waits for its turn, and tells seconds, peak and the last losses."""
    who, method, *more = side.split()
    losses: list[float] = []
    start = [0.0]

    def note(step: int, loss: float) -> None:
        losses.append(loss)
        if step == WARM:
            pipe.send(None)
            pipe.recv()
            if GPU:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            start[0] = time.perf_counter()

    if who == "regard":
        half = method != "full" and "bf16" in floats()
        dtype = torch.bfloat16 if half else None
        ours(regard.load(folder, dtype=dtype), made, method, bool(more), note)
    else:
        theirs(folder, made, method, bool(more), note)
    if GPU:
        torch.cuda.synchronize()
    took = time.perf_counter() - start[0]
    peak = torch.cuda.max_memory_allocated() / 2**30 if GPU else 0.0
    pipe.send((took, peak, losses))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=8 if GPU else 2)
    parser.add_argument("--length", type=int, default=2048 if GPU else 128)
    parser.add_argument("--steps", type=int, default=40 if GPU else 10)
    parser.add_argument("--start", type=int, default=60 if GPU else 10)
    parser.add_argument("--patience", type=int, default=600, help="seconds to get warm in")
    parser.add_argument("--documents", action="store_true")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--only", nargs="*", default=SIDES, choices=SIDES)
    o = parser.parse_args()
    print(f"{header()}; {DEVICE}; {SHAPE}; {vars(o)}", flush=True)
    size, folder = (o.text, o.rows, o.length), Path(tempfile.mkdtemp()) / "start"
    torch.manual_seed(0)
    model = regard.build("llama", **SHAPE)
    model = ours(model, batches(*size, o.start, 0, False), "start", False, lambda *_: None)
    model.cpu().save(folder)
    del model
    if GPU:
        torch.cuda.empty_cache()
    made = batches(*size, WARM + o.steps, 1, o.documents)
    context, pipes, processes = multiprocessing.get_context("spawn"), {}, {}
    for side in o.only:
        pipes[side], end = context.Pipe()
        processes[side] = context.Process(target=serve, args=(side, folder, made, end))
        processes[side].start()
        # Without it, a side that dies would leave this one waiting.
        end.close()
    print(f"{'':24} {'tokens/s':>10} {'peak GiB':>9} {'first':>8} {'last':>8}", flush=True)
    until = time.monotonic() + o.patience
    for side, pipe in pipes.items():
        try:
            if not pipe.poll(max(until - time.monotonic(), 0)):
                raise EOFError
            pipe.recv()
        except EOFError:
            print(f"{side:24} failed, or was not warm in time", flush=True)
            processes[side].terminate()
            pipe.close()
    for side, pipe in pipes.items():
        if not pipe.closed:
            pipe.send(None)
            took, peak, losses = pipe.recv()
            rate = o.rows * o.length * o.steps / took
            last = sum(losses[-LAST:]) / LAST
            print(f"{side:24} {rate:10,.0f} {peak:9.2f} {losses[0]:8.4f} {last:8.4f}", flush=True)
        processes[side].join()


if __name__ == "__main__":
    main()
