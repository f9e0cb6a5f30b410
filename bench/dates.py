"""How fast does the model of the demo learn? Trains on files of regard.recipes.dates; prints loss and exact match on
unseen dates as it goes.

    python -c "from pathlib import Path; from regard.recipes.dates import make; make(Path('dates'))"
    python bench/dates.py dates --threads 2 --dim 128 --lr 3e-3 --steps 2000

Needs torch, numpy and regard alone, and tokenizers for --tokenizer bpe.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import regard
from regard.data.feed import Batching, PairFeed
from regard.data.shards import Column
from regard.fast.train import precision
from regard.training.objectives import seq2seq
from regard.training.optim import Optim, Optimizer, Schedule, clip

PAD, END, UNK = range(3)  # the decoder begins with PAD, as T5's does
Rows = list[dict[str, str]]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("data", type=Path, help="the folder with train.tsv, valid.tsv and unseen.tsv")
    add("--preset", default="vaswani-base", help="or bahdanau, luong, t5-small, ...")
    add("--dim", type=int, default=128)
    add("--layers", type=int, default=2, help="of the encoder, and of the decoder")
    add("--decoder-layers", type=int, default=None)
    add("--heads", type=int, default=4)
    add("--ffn", type=int, default=512)
    add("--order", default=None, help="pre or post; default: as the preset has it")
    add("--dropout", type=float, default=0.0)
    add("--set", nargs="*", default=[], metavar="NAME=VALUE", help="other settings of the model")
    add("--optim", default="adamw", help="or muon")
    add("--lr", type=float, default=2e-3)
    add("--decay", type=float, default=0.01)
    add("--beta2", type=float, default=0.98)
    add("--clip", type=float, default=1.0)
    add("--schedule", default="linear", help="or cosine, noam, wsd, constant")
    add("--warmup", type=int, default=200)
    add("--cool", type=int, default=0, help="steps of the fall of wsd")
    add("--steps", type=int, default=2000)
    add("--tokens", type=int, default=4096, help="source tokens of a batch, padding included")
    add("--pairs", type=int, default=None, help="only the first of the training file")
    add(
        "--tokenizer", default="chars", help="chars, or a number: byte-level BPE of that vocabulary"
    )
    add("--precision", default="fp32", help="or bf16")
    add("--device", default="cpu")
    add("--threads", type=int, default=2)
    add("--seed", type=int, default=0)
    add("--every", type=int, default=250, help="steps between figures")
    add(
        "--test", type=int, default=1000, help="unseen dates to write out each time; all at the end"
    )
    add("--limit", type=float, default=None, help="end after so many seconds of training")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    train, valid, unseen = (table(args.data / f"{n}.tsv") for n in ("train", "valid", "unseen"))
    train = train[: args.pairs]
    encode, vocab = tokenizer(args.tokenizer, train)
    feed = pairs(train, encode, args)
    torch.manual_seed(args.seed)
    model = build(args, vocab).to(args.device)
    size = sum(p.numel() for p in model.parameters())
    print(" ".join(sys.argv[1:]), flush=True)
    print(f"{size:,} parameters, vocabulary {vocab}; {feed.describe()}", flush=True)
    texts = {i: t for t, i in ((c, encode(c)[0]) for c in "-0123456789")}

    def exact(rows: Rows) -> list[bool]:
        said = written(model, [[*encode(r["source"]), END] for r in rows])
        return [
            "".join(texts.get(i, "?") for i in ids if i != END) == r["target"]
            for ids, r in zip(said, rows)
        ]

    seconds = learn(model, feed, args, lambda: mean(exact(valid[: args.test])))
    print(f"trained {seconds:.1f} s; unseen dates: exact {mean(exact(valid)):.4f} of {len(valid)}")
    right = exact(unseen)
    for locale in sorted({r["locale"] for r in unseen}):
        mine = [ok for ok, r in zip(right, unseen) if r["locale"] == locale]
        print(f"  unseen language {locale}: exact {mean(mine):.3f} of {len(mine)}")


def table(path: Path) -> Rows:
    head, *lines = path.read_text(encoding="utf-8").splitlines()
    return [dict(zip(head.split("\t"), line.split("\t"))) for line in lines]


def mean(values: list[bool]) -> float:
    return sum(values) / max(len(values), 1)


def tokenizer(kind: str, rows: Rows) -> tuple[Callable[[str], list[int]], int]:
    """Text -> ids, and how many ids there are. Digits and hyphens are single tokens in either kind."""
    if kind == "chars":
        count = Counter(c for r in rows for c in r["source"] + r["target"])
        known = {c: i for i, c in enumerate(sorted(count), UNK + 1)}
        return lambda text: [known.get(c, UNK) for c in text], UNK + 1 + len(known)
    from regard.data.train_tokenizer import Recipe, train_tokenizer
    from regard.text import Tokenizer, needed

    recipe = Recipe("bpe", int(kind), special={"pad": "<pad>", "eos": "</s>", "unk": "<unk>"})
    files = train_tokenizer((r["source"] for r in rows), recipe)
    found = needed(Tokenizer.from_files(files, {}))
    cache: dict[str, list[int]] = {}

    def encode(text: str) -> list[int]:
        if text not in cache:
            iso = len(text) == 10 and text[4::3] == "--"
            parts = text if iso else [text]
            cache[text] = [i for part in parts for i in found.encode(part, special=False)]
        return cache[text]

    return encode, len(found.core.get_vocab())


def pairs(rows: Rows, encode: Callable[[str], list[int]], args: argparse.Namespace) -> PairFeed:
    source, target = (Column.of([encode(r[side]) for r in rows]) for side in ("source", "target"))
    batching = Batching(tokens=args.tokens, seed=args.seed)
    return PairFeed(source, target, batching, start=PAD, end=END, pad=PAD, around=((), (END,)))


def build(args: argparse.Namespace, vocab: int) -> Any:
    changes: dict[str, Any] = {"dim": args.dim, "vocab": vocab}
    if args.preset in ("bahdanau", "luong"):
        changes |= {"source_vocab": vocab, "layers": args.layers}
    else:
        changes |= {"heads": args.heads, "ffn_dim": args.ffn, "dropout": args.dropout}
        changes["encoder.layers"] = args.layers
        changes["decoder.layers"] = args.decoder_layers or args.layers
    if args.order:
        changes |= {"order": args.order, "final_norm": args.order == "pre"}
    for text in args.set:
        name, _, value = text.partition("=")
        changes[name] = {"true": True, "false": False}.get(value, value)
        if value.lstrip("-").isdecimal():
            changes[name] = int(value)
    return regard.build(args.preset, **changes)


def learn(
    model: Any, feed: PairFeed, args: argparse.Namespace, exact: Callable[[], float]
) -> float:
    """Train; the seconds it took, without those of the figures."""
    optimizer = Optimizer(
        model, Optim(args.optim, args.lr, args.decay, (0.9, args.beta2), eps=1e-9)
    )
    schedule = Schedule(args.schedule, args.steps, args.warmup, decay=args.cool)
    parameters = [p for p in model.parameters() if p.requires_grad]
    device, seconds, tokens, total = torch.device(args.device), 0.0, 0, 0.0
    model.train()
    for step in range(1, args.steps + 1):
        began = time.perf_counter()
        batch = feed.batch(step - 1).to(device)
        with precision(args.precision, device):
            loss, count = seq2seq(model, batch)
        loss.backward()
        clip(parameters, args.clip, count)
        optimizer.step(schedule(step))
        optimizer.zero()
        total += float(loss.detach() / count)
        tokens += batch.ids.numel() + batch.source.numel()
        seconds += time.perf_counter() - began
        over = args.limit is not None and seconds > args.limit
        if step % args.every == 0 or step == args.steps or over:
            parts = [f"step {step}", f"{seconds:.1f} s", f"{tokens / seconds:,.0f} tok/s"]
            parts += [f"loss {total / (step % args.every or args.every):.4f}"]
            model.eval()
            print("  ".join([*parts, f"exact {exact():.4f}"]), flush=True)
            model.train()
            total = 0.0
        if over:
            break
    model.eval()
    return seconds


@torch.inference_mode()
def written(model: Any, sources: list[list[int]], most: int = 12) -> list[list[int]]:
    """What the model writes for each source, always the most probable token, in batches of one length."""
    device = next(model.parameters()).device
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    found: list[list[int]] = [[] for _ in sources]
    for start in range(0, len(order), 256):
        part = order[start : start + 256]
        sizes = [len(sources[i]) for i in part]
        source = torch.full((len(part), max(sizes)), PAD, device=device)
        for row, i in enumerate(part):
            source[row, : sizes[row]] = torch.tensor(sources[i])
        lengths = torch.tensor(sizes, device=device)
        ids = torch.full((len(part), 1), PAD, device=device)
        for _ in range(most):
            logits = model(ids, source=source, source_lengths=lengths)
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
            if bool((ids == END).any(1).all()):
                break
        for i, row in zip(part, ids[:, 1:].tolist()):
            found[i] = row[: row.index(END)] if END in row else row
    return found


if __name__ == "__main__":
    main()
