"""Laws of tuning a finished model: labels keep their meaning; before the first step preferences compare equals."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard.checkpoint.hf import Origin
from regard.data.train_tokenizer import Recipe, train_tokenizer
from regard.models.adapt import class_names, labels, with_head
from tests.wide import crossed

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SIZES: dict[str, Any] = {"layers": 2, "dim": 32, "heads": 2, "ffn_dim": 64, "max_len": 64}


def folder_of(home: Path, preset: str, dtype: str = "fp32", **more: Any) -> Path:
    """A tiny model in this type, with a tokenizer of bytes."""
    torch.manual_seed(0)
    kinds = {"bert-base": "mlm", "t5-small": "seq2seq"}
    files = train_tokenizer(["a"], Recipe(kind="bytes", task=kinds.get(preset, "lm")))
    model = regard.build(preset, **{**SIZES, "vocab": 300, **more}, dtype=TYPES[dtype])
    folder = model.save(home / f"{preset}-{dtype}")
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def steps_of(folder: Path, kind: str = "step") -> list[dict[str, Any]]:
    events = map(json.loads, (folder / "metrics.jsonl").read_text("utf-8").splitlines())
    return [event for event in events if event["kind"] == kind]


# --- policy = reference ---------------------------------------------------------------------------


PAIRS = [{"prompt": f"say {i} ", "chosen": f"yes {i}", "rejected": f"no, {i}"} for i in range(8)]


@pytest.mark.filterwarnings("ignore::regard.errors.Notice")
@pytest.mark.parametrize(
    "method, dtype, preset",
    crossed(["full", "lora", "qlora", "full, named", "lora, named"], TYPES, ["gpt2", "llama"]),
)
def test_policy_and_reference_are_the_same_bits_before_the_first_step(
    method: str, dtype: str, preset: str, tmp_path: Path
) -> None:
    """GPT-2 has dropout, biases that are joined with GELU, and heads that are joined to one product. The reference may
    be named, the folder itself."""
    more = {"dropout": 0.1} if preset == "gpt2" else {"kv_heads": 1}
    folder = folder_of(tmp_path, preset, dtype, **more)
    changes: dict[str, Any] = {"train.steps": 2, "data.rows": 4, "data.held": 0.5}
    method, named, _ = method.partition(", named")
    changes |= {"prefer.reference": str(folder)} if named else {}
    run = tmp_path / "run"
    regard.finetune(folder, lines(tmp_path / "p.jsonl", PAIRS), run, method=method, changes=changes)
    first, second = steps_of(run)
    assert (first["reward_margin"], first["reward_chosen"], first["reward_rejected"]) == (0, 0, 0)
    # Of a margin of exactly 0, four times.
    assert first["loss"] == torch.tensor(2.0).log().item() == pytest.approx(math.log(2), abs=1e-7)
    assert second["loss"] != first["loss"]


# --- labels keep their meaning --------------------------------------------------------------------


def labelled(home: Path, task: str, names: list[str] | None, method: str = "full") -> Path:
    """A model whose head has these labels, or two without names, and an opinion on each."""
    head = (regard.Tag if task == "tag" else regard.Classify)(len(names or "ab"))
    if task == "image":
        torch.manual_seed(0)
        model = regard.build("vit-small", dim=24, layers=1, heads=3, ffn_dim=20, size=12, patch=4)
        folder = home / "vit"
    else:
        folder = folder_of(home, "gpt2" if method == "lora" else "bert-base")
        model = regard.load(folder)
    model = with_head(model, head)
    for p in model.head.parameters():
        torch.nn.init.normal_(p)
    model.origin = model.origin or Origin(model.family)
    model.origin.config |= labels(names or [])
    return model.save(folder)


def tuned(home: Path, folder: Path, task: str, found: list[Any], method: str, **more: Any) -> Any:
    """Tuned on data with these labels, in steps that change nothing; and what the run said."""
    if task == "image":
        x = np.random.default_rng(0).integers(0, 255, (8, 12, 12, 3), np.uint8)
        np.savez(home / "data.npz", x=x, y=np.array((found * 8)[:8]))
        data: dict[str, Any] = {"train": str(home / "data.npz")}
    else:
        rows: list[Any] = [{"text": f"text {i}", "label": found[i % len(found)]} for i in range(8)]
        if task == "tag":
            rows = [{"words": ["a", "b"], "tags": [row["label"]] * 2} for row in rows]
        data = {"train": str(lines(home / "data.jsonl", rows)), "length": 32}
    optim = {"lr": 1e-12, "decay": 0.0}
    config = {
        "task": task,
        "model": {"folder": str(folder)},
        "data": {**data, "valid": data["train"], "rows": 4},
        "train": {"steps": 2, "optim": optim, **more},
        "adapt": {"method": method},
    }
    said: list[str] = []
    heard = [lambda event: said.extend(event.get("notices", []))]
    result = regard.train(config, home / "run", callbacks=heard)
    return result, regard.load(result.last), " ".join(said)


def opinions(model: Any, task: str) -> dict[str, torch.Tensor]:
    """What the head says of each label, by name."""
    if task == "image":
        x = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(3))
    else:
        x = torch.arange(2 * 7).view(2, 7) + 30
    with torch.no_grad():
        logits = model.eval()(x)
    return dict(zip(class_names(model), logits.unbind(-1), strict=True))


CASES: dict[str, tuple[list[str] | None, list[Any], list[str], str]] = {
    "same, in another order": (["b", "a"], ["a", "b"], ["b", "a"], ""),
    "more": (["b", "a"], ["c", "b", "0", "a"], ["b", "a", "0", "c"], "new labels: 0, c;"),
    "fewer": (["c", "a", "b"], ["a", "c"], ["c", "a", "b"], "no example has the label b;"),
    "some": (
        ["c", "b"],
        ["a", "b"],
        ["c", "b", "a"],
        "no example has the label c;.* new labels: a",
    ),
    "numbers": (["c", "b", "a"], [2, 0], ["c", "b", "a"], "taken for the model's: 0 = c, 2 = a"),
    "nameless": (None, [1, 0], ["0", "1"], ""),
    "nameless, more": (None, [1, 0, 2], ["0", "1", "2"], "new labels: 2;"),
}


@pytest.mark.parametrize(
    "case, kind",
    [
        *crossed(CASES, ("classify", "tag", "image")),
        *crossed(("more", "numbers"), ("frozen", "lora")),
    ],
)
def test_labels_keep_their_meaning(case: str, kind: str, tmp_path: Path) -> None:
    own, found, classes, says = CASES[case]
    method = kind if kind in ("frozen", "lora") else "full"
    task = "classify" if kind == method else kind
    folder = labelled(tmp_path, task, own, method)
    before = opinions(regard.load(folder), task)
    result, model, said = tuned(tmp_path, folder, task, found, method)
    after = opinions(model, task)
    assert list(after) == classes and re.search(says, said) and bool(says) == bool(said)
    for name, x in before.items():
        torch.testing.assert_close(after[name], x, rtol=0, atol=1e-5)
    # What was trained is what is measured by name, after and before.
    file = str(tmp_path / ("data.npz" if task == "image" else "data.jsonl"))
    known = [folder] if case == "numbers" or set(map(str, found)) <= before.keys() else []
    for each in (result.last, *known):
        values = regard.evaluate(each, file, metrics=["loss"]).metrics
        assert values["loss"] == pytest.approx(result.metrics["loss"], rel=1e-4)


@pytest.mark.parametrize("own, hint", [(["d", "c"], ""), (None, "labels that are numbers would")])
def test_other_labels_get_a_new_head_and_a_word(own: Any, hint: str, tmp_path: Path) -> None:
    folder = labelled(tmp_path, "classify", own)
    _, model, said = tuned(tmp_path, folder, "classify", ["a", "b"], "full")
    assert class_names(model) == ["a", "b"] and hint in said
    assert "are not the data's (a, b): its head is replaced by a new one" in said
    rows = regard.load(folder).head.out.weight
    assert not (model.head.out.weight[:, None] == rows).all(-1).any()
