"""How the tiny chat model is made that the package carries (regard/serve/demo): text, tokenizer, weights.

    python examples/demo_model.py regard/serve/demo        # half an hour on one busy core

It answers sums, dates, sorting and a few questions about itself, learnt from text that this file makes. It is there so
that `regard serve demo` needs nothing else, and to be looked into; it knows nothing besides.
"""

from __future__ import annotations

import datetime
import json
import random
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import regard

MONTHS = [datetime.date(2000, m, 1).strftime("%B") for m in range(1, 13)]
WORDS = """apple bread chair dance earth flame grass house island jungle kite lemon moon night ocean piano queen river
stone tiger under valley water yellow zebra cloud dream field green light music paper""".split()  # noqa: SIM905
ABOUT = {
    "Who are you?": "I am the demo of Regard, a very small Transformer.",
    "What can you do?": "I add numbers, write dates, sort words and count letters.",
    "How large are you?": "I have three layers and half a million weights.",
    "What is attention?": "Each token looks at the tokens before it and takes what it needs.",
    "Hello": "Hello! Ask me for a sum, a date, or words to sort.",
    "Hello!": "Hello! Ask me for a sum, a date, or words to sort.",
    "Hi": "Hello! Ask me for a sum, a date, or words to sort.",
    "Thank you": "You are welcome.",
    "Thank you!": "You are welcome.",
}
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"]
LENGTH, ROWS = 96, 32


def turn(rng: random.Random) -> tuple[str, str]:
    """A question and its answer."""
    kind = rng.randrange(10)
    if kind < 4:
        a, b = (rng.randrange(10 ** rng.choice((1, 2, 2))) for _ in "ab")
        ask = rng.choice(("What is {} + {}?", "{} + {}", "Add {} and {}.")).format(a, b)
        return ask, f"{a} + {b} = {a + b}"
    if kind < 7:
        day = datetime.date(1900, 1, 1) + datetime.timedelta(days=rng.randrange(73000))
        month = MONTHS[day.month - 1]
        text = rng.choice(("{d} {m} {y}", "{m} {d}, {y}")).format(d=day.day, m=month, y=day.year)
        return rng.choice(("Write {} as ISO.", "{}")).format(text), day.isoformat()
    if kind < 8:
        words = rng.sample(WORDS, rng.randint(2, 4))
        return "Sort: " + " ".join(words), " ".join(sorted(words))
    if kind < 9:
        word = rng.choice(WORDS)
        return f"How many letters has {word}?", f"{word} has {len(word)} letters."
    return rng.choice([*ABOUT.items()])


def text(rng: random.Random) -> str:
    """A conversation of one to three turns."""
    turns = [turn(rng) for _ in range(rng.choice((1, 1, 2, 3)))]
    system = "<|system|>You are a small model.<|end|>" if rng.random() < 0.1 else ""
    return system + "".join(f"<|user|>{a}<|end|><|assistant|>{b}<|end|>" for a, b in turns)


def tokenizer(rng: random.Random) -> Tokenizer:
    """Bytes and the most frequent pairs of them; digits stay apart, so that sums can be learnt."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=384, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    plain = (f"{a} {b}" for a, b in (turn(rng) for _ in range(20000)))
    made.train_from_iterator(plain, trainer)
    return made


def main(folder: Path, steps: int = 2400) -> None:
    torch.manual_seed(0)
    rng = random.Random(0)
    words = tokenizer(rng)
    model = regard.build(
        "llama-3.2-1b", layers=3, dim=128, heads=4, kv_heads=2, head_dim=32, ffn_dim=320,
        vocab=words.get_vocab_size(), max_len=512, scaling=None,
    )  # fmt: skip
    print(sum(p.numel() for p in model.parameters()), "weights", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    start = time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min((step + 1) / 100, 1 - step / steps)
        rows = []
        for _ in range(ROWS):
            ids: list[int] = []
            while len(ids) < LENGTH + 1:
                # Each text alone, from its beginning; texts in one row are few and read as turns.
                ids += words.encode(text(rng)).ids
            rows.append(ids[: LENGTH + 1])
        batch = torch.tensor(rows)
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            print(f"{step} {loss.item():.3f} {time.monotonic() - start:.0f} s", flush=True)
    model.to(torch.bfloat16).save(folder)
    words.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    end = words.token_to_id("<|end|>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:3]))
