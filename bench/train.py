"""Training speed and the loss curve: Regard's trainer, transformers' GPT-2 and a bare loop, same weights, same batches.

    python bench/train.py --part speed [--rows 64] [--steps 10] [--repeats 5]    tokens a second
    python bench/train.py --part curve [--steps 200]    losses of each step: Regard against transformers

On a CPU the model has 6 layers of 384 and rows of 256 tokens; the peers are transformers' Trainer (which needs the
package accelerate) and a bare loop in the style of nanoGPT, as it is and compiled, each in fp32 and bf16. On a GPU it
is GPT-2 of 124M with rows of 1,024; peers are transformers' GPT-2 compiled in a bare loop, and the bare GPT compiled.
Memory is the allocator's peak. It changes nothing.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure import floats, header
from torch import Tensor, nn

import regard
from regard.checkpoint import from_hf
from regard.data.feed import Batch
from regard.training.checkpoint import Checkpoints
from regard.training.objectives import causal
from regard.training.optim import Optim, Schedule
from regard.training.trainer import Train, Trainer

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
SHAPE = (
    {"layers": 12, "dim": 768, "heads": 12, "vocab": 50257, "length": 1024, "rows": 32}
    if GPU
    else {"layers": 6, "dim": 384, "heads": 6, "vocab": 65, "length": 256, "rows": 8}
)
RATE, BETAS, DECAY = 1e-3, (0.9, 0.95), 0.1


class Random:
    """Batches of random words, the same for all sides."""

    fingerprint, epoch = "random", 1

    def batch(self, k: int, rank: int = 0, world: int = 1) -> Batch:
        draw = torch.Generator().manual_seed(k)
        size = (SHAPE["rows"], SHAPE["length"] + 1)
        ids = torch.randint(SHAPE["vocab"] // 4, size, generator=draw)
        return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())

    def evaluation(self) -> Iterator[Batch]:
        return iter(())

    def describe(self) -> str:
        return "random"


# --- the sides: each gives a function that trains some steps and returns the losses -------------------------------


def theirs() -> Any:
    """transformers' GPT-2 of the shape, without dropout."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=SHAPE["vocab"],
        n_positions=SHAPE["length"],
        n_embd=SHAPE["dim"],
        n_layer=SHAPE["layers"],
        n_head=SHAPE["heads"],
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return transformers.GPT2LMHeadModel(config)


Run = Callable[[int], list[float]]


def ours(precision: str, compile: bool, folder: Path) -> Run:
    model = from_hf(theirs()).to(DEVICE)
    config = Train(
        steps=10**6,
        precision=precision,
        compile=compile,
        optim=Optim(lr=RATE, betas=BETAS, decay=DECAY),
        schedule=Schedule("constant"),
    )
    losses: list[float] = []
    trainer = Trainer(
        model,
        Random(),
        causal,
        config,
        Checkpoints(folder, lambda m, path: m.save(path)),
        regard.load,
        [lambda event: losses.append(event["loss"]) if event["kind"] == "step" else None],
    )

    def run(steps: int) -> list[float]:
        losses.clear()
        for _ in range(steps):
            trainer.at.step += 1
            trainer._step(trainer.at.step)
        return losses

    return run


def bare(model: nn.Module, loss: Callable[[nn.Module, Batch], Tensor], precision: str) -> Run:
    """A loop with nothing around it: AdamW in two groups (position tables do not decay), clipping, the loss read
    at every step, as ours is."""
    model = model.to(DEVICE).train()
    named = list(model.parameters())
    decayed = [p for n, p in model.named_parameters() if p.dim() >= 2 and "wpe" not in n]
    held = {id(p) for p in decayed}
    groups = [
        {"params": decayed, "weight_decay": DECAY},
        {"params": [p for p in named if id(p) not in held], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, fused=True)
    feed, at = Random(), [0]

    def run(steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            batch = feed.batch(at[0]).to(DEVICE)
            at[0] += 1
            with torch.autocast(DEVICE, torch.bfloat16, enabled=precision == "bf16"):
                x = loss(model, batch)
            x.backward()
            torch.nn.utils.clip_grad_norm_(named, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(x.item())
        return losses

    return run


def transformers_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch.ids).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), batch.labels.flatten())


def trainer_of_transformers(precision: str, folder: Path) -> Run:
    """transformers' own Trainer, its logging and saving switched off."""
    import transformers

    feed, at = Random(), [0]

    class Rows(torch.utils.data.Dataset):
        def __init__(self, steps: int):
            batches = [feed.batch(at[0] + k) for k in range(steps)]
            self.ids = torch.cat([b.ids for b in batches])

        def __len__(self) -> int:
            return len(self.ids)

        def __getitem__(self, i: int) -> dict[str, Tensor]:
            return {"input_ids": self.ids[i], "labels": self.ids[i]}

    model = theirs()

    def run(steps: int) -> list[float]:
        options = transformers.TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=SHAPE["rows"],
            max_steps=steps,
            learning_rate=RATE,
            bf16=precision == "bf16",
            use_cpu=not GPU,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        transformers.Trainer(model, options, train_dataset=Rows(steps)).train()
        at[0] += steps
        return []

    return run


# --- a bare GPT, as short as it can be ----------------------------------------------------------------------------


class BareBlock(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, t, m = x.shape
        q, k, v = (
            y.view(b, t, self.heads, m // self.heads).transpose(1, 2)
            for y in self.qkv(self.norm1(x)).split(m, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, m))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class BareGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        dim = SHAPE["dim"]
        self.words, self.wpe = (
            nn.Embedding(SHAPE["vocab"], dim),
            nn.Embedding(SHAPE["length"], dim),
        )
        self.blocks = nn.ModuleList(BareBlock(dim, SHAPE["heads"]) for _ in range(SHAPE["layers"]))
        self.norm = nn.LayerNorm(dim)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids) + self.wpe.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.words.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def bare_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch.ids, batch.labels)


# --- what is compared ---------------------------------------------------------------------------------------------


def sides(folder: Path) -> dict[str, Callable[[], Run]]:
    if not GPU:
        return {
            f"{name} {p}": make
            for p in floats()
            for name, make in {
                "regard": lambda p=p: ours(p, False, folder),
                "regard compiled": lambda p=p: ours(p, True, folder),
                "bare loop": lambda p=p: bare(BareGPT(), bare_loss, p),
                "bare compiled": lambda p=p: bare(torch.compile(BareGPT()), bare_loss, p),
                "transformers Trainer": lambda p=p: trainer_of_transformers(p, folder),
            }.items()
        }
    compiled = torch.compile
    return {
        "regard": lambda: ours("bf16", False, folder),
        "regard compiled": lambda: ours("bf16", True, folder),
        "bare compiled": lambda: bare(compiled(BareGPT()), bare_loss, "bf16"),
        "transformers compiled": lambda: bare(compiled(theirs()), transformers_loss, "bf16"),
    }


def serve(side: str, shape: dict[str, int], pipe: Connection) -> None:
    """A process of one side: says its peak of memory when it is warm, then the seconds of as many steps as asked."""
    SHAPE.update(shape)
    with tempfile.TemporaryDirectory() as name:
        run = sides(Path(name))[side]()
        run(3)  # compiles and warms up
        pipe.send(torch.cuda.max_memory_allocated() / 2**30 if GPU else 0.0)
        for steps in iter(pipe.recv, 0):
            start = time.perf_counter()
            run(steps)
            if GPU:
                torch.cuda.synchronize()
            pipe.send(time.perf_counter() - start)


def speed(steps: int, repeats: int, only: list[str]) -> None:
    """Each side in a process of its own: what one does to its memory is no other's gain. On a CPU they work in turn, so
    that all meet the same machine; on a GPU one alone may fill the memory, and is gone before the next begins."""
    print(f"{header()}; {DEVICE}; {SHAPE}; {steps} steps, median of {repeats}", flush=True)
    chosen = only or list(sides(Path()))
    for group in [[side] for side in chosen] if GPU else [chosen]:
        race(group, steps, repeats)


def race(group: list[str], steps: int, repeats: int) -> None:
    """The sides of a group, kept in memory together."""
    context, tokens = multiprocessing.get_context("spawn"), SHAPE["rows"] * SHAPE["length"]
    pipes, processes, peaks = {}, {}, {}
    for side in group:
        pipes[side], end = context.Pipe()
        processes[side] = context.Process(target=serve, args=(side, SHAPE, end), daemon=True)
        processes[side].start()
        # without it, a side that dies would leave this one waiting
        end.close()
        peaks[side] = pipes[side].recv()
    times: dict[str, list[float]] = {side: [] for side in pipes}
    for i in range(repeats):
        for side in list(pipes)[:: 1 if i % 2 else -1]:
            pipes[side].send(steps)
            times[side].append(pipes[side].recv())
    for side, seconds in times.items():
        pipes[side].send(0)
        processes[side].join()
        rate = tokens * steps / statistics.median(seconds)
        spread = tokens * steps / max(seconds), tokens * steps / min(seconds)
        memory = f", peak {peaks[side]:.2f} GiB" if GPU else ""
        print(
            f"{side:28} {rate:12,.0f} tokens/s ({spread[0]:,.0f} to {spread[1]:,.0f}){memory}",
            flush=True,
        )


def curve(steps: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        mine = list(ours("fp32", False, Path(name))(steps))
        peer = bare(theirs(), transformers_loss, "fp32")(steps)
    gaps = [abs(a - b) for a, b in zip(mine, peer)]
    print(f"{steps} steps, fp32, {SHAPE}")
    for k in sorted({1, min(10, steps), steps // 2 or 1, steps}):
        print(f"step {k:4}  regard {mine[k - 1]:.6f}  transformers {peer[k - 1]:.6f}")
    print(f"largest difference {max(gaps):.2e} at step {gaps.index(max(gaps)) + 1}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", choices=["speed", "curve"], default="speed")
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, default=None)
    parser.add_argument("--only", nargs="*", default=[], choices=list(sides(Path())))
    options = parser.parse_args()
    if options.rows:
        SHAPE["rows"] = options.rows
    if options.part == "curve":
        curve(options.steps or 200)
    else:
        speed(options.steps or (20 if GPU else 10), options.repeats, options.only)


if __name__ == "__main__":
    main()
