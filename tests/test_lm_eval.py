"""EleutherAI's lm-eval on our models gives the scores of its own `hf` model on the same folder, to the last digit."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.checkpoint import save
from regard.errors import UsageError
from tests.text import tiny
from tests.tiny import tiny as small

lm_eval = pytest.importorskip("lm_eval", reason="needs lm-eval: pip install lm-eval")
pytest.importorskip("transformers")

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NAMES = ["a little dog", "the ball", "Hund", "l'été", "o'clock", "the park"]
TASKS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "choice": (
        {
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "answer",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        [
            {"question": f"Once upon a time {n} had", "choices": NAMES[:4], "answer": i % 4}
            for i, n in enumerate(NAMES * 5)
        ],
    ),
    # Longer than the model's context, and shorter.
    "text": (
        {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "text",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        },
        [{"text": f"The dog said: {n}. " * (1 + 2 * i)} for i, n in enumerate(NAMES)],
    ),
    "write": (
        {
            "output_type": "generate_until",
            "doc_to_text": "{{question}}",
            "doc_to_target": "answer",
            "generation_kwargs": {"until": ["e", "\n\n"], "max_gen_toks": 12, "do_sample": False},
            "metric_list": [{"metric": "exact_match"}, {"metric": "chrf"}],
        },
        [{"question": f"Ein {n} " * (1 + i), "answer": "Wiese"} for i, n in enumerate(NAMES)],
    ),
}


def folder_of(kind: str, home: Path) -> Path:
    files = {"gpt2": tiny.gpt2, "llama-3.2-1b": tiny.qwen2}[kind]()
    size = {"layers": 2, "dim": 32, "heads": 4, "vocab": 400, "max_len": 64}
    model = regard.build(kind, **size, **({} if kind == "gpt2" else {"kv_heads": 2}))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4 if p.dim() > 1 else 1)  # so that tokens are not all as probable
    save(model, home)
    for name, data in files.items():
        (home / name).write_bytes(data)
    settings = json.loads(files["tokenizer_config.json"])
    settings |= {"chat_template": TEMPLATE, "eos_token": "<|endoftext|>"}
    (home / "tokenizer_config.json").write_text(json.dumps(settings))
    return home


def scores(model: str, folder: Path, home: Path, **more: Any) -> dict[str, Any]:
    """Every metric of every task, and every answer."""
    from lm_eval.tasks import TaskManager

    import regard.evaluation.harness  # noqa: F401  registers the model

    tasks = []
    for name, (settings, rows) in TASKS.items():
        file = home / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        place = {"data_files": {"test": str(file)}, "cache_dir": str(home / "cache")}
        base = {"task": name, "dataset_path": "json", "dataset_kwargs": place, "test_split": "test"}
        tasks.append({**base, **settings})
    found = lm_eval.simple_evaluate(
        model=model,
        model_args=f"pretrained={folder},dtype={'float32' if model == 'hf' else 'fp32'}",
        tasks=tasks,
        task_manager=TaskManager(include_defaults=False),
        device="cpu",
        batch_size=4,
        bootstrap_iters=0,
        **more,
    )
    values = {
        (task, metric): value
        for task, table in found["results"].items()
        for metric, value in table.items()
        if isinstance(value, float)
    }
    values["answers"] = [s["filtered_resps"] for s in found["samples"]["write"]]
    return values


def check(folder: Path, home: Path, **more: Any) -> None:
    ours, theirs = (scores(name, folder, home, **more) for name in ("regard", "hf"))
    assert ours.keys() == theirs.keys() and ours["answers"] == theirs["answers"]
    for name in ours.keys() - {"answers"}:
        # Counts are equal; sums of logarithms, of which a perplexity is the exponential, up to float32's rounding.
        far = 1e-6 if name[0] == "text" else 0
        assert ours[name] == pytest.approx(theirs[name], rel=far, abs=0), name


@pytest.mark.parametrize("kind", ["gpt2", "llama-3.2-1b"])
def test_scores_are_those_of_the_hf_model(kind: str, tmp_path: Path) -> None:
    folder = folder_of(kind, tmp_path / "model")
    check(folder, tmp_path)
    if kind == "gpt2":
        check(folder, tmp_path, apply_chat_template=True, system_instruction="Be brief.")


def test_scores_of_a_published_model(shared: Path, tmp_path: Path) -> None:
    check(shared / "weights/stories260K", tmp_path)


def test_a_last_message_that_goes_on_is_left_open(tmp_path: Path) -> None:
    from regard.evaluation.harness import Regard

    model = Regard(str(folder_of("gpt2", tmp_path / "model")))
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "It is "}]
    assert model.apply_chat_template(chat, False) == "<|user|>Hi\n<|assistant|>It is "
    assert model.apply_chat_template(chat[:1]) == "<|user|>Hi\n<|assistant|>"


def test_what_is_wrong_is_one_sentence(tmp_path: Path) -> None:
    from regard.evaluation.harness import Regard

    folder = folder_of("gpt2", tmp_path / "model")
    with pytest.raises(UsageError, match="name the model's folder: --model_args pretrained=FOLDER"):
        Regard()
    with pytest.raises(UsageError, match=r"dtyp is not one of the model_args .* mean 'dtype'"):
        Regard(str(folder), dtyp="fp32")
    save(small("bert-base"), tmp_path / "bert")
    with pytest.raises(UsageError, match="lm-eval asks language models; the task of .* is mlm"):
        Regard(str(tmp_path / "bert"))
    request: Any = type("", (), {"args": ("Once", {"until": [], "max_gen_toks": 64})})
    with pytest.raises(UsageError, match="64 tokens are to be generated, the context is 64"):
        Regard(str(folder)).generate_until([request])


def test_the_command_is_lm_evals_own(tmp_path: Path) -> None:
    """Its flags, its table; the model is ours where none is named, and mistakes are a line."""
    command = [sys.executable, "-m", "regard", "lm-eval"]
    args = ["--model_args", "pretrained=nowhere", "--tasks", "choice"]
    task = {"task": "choice", "dataset_path": "json", **TASKS["choice"][0], "test_split": "test"}
    file = tmp_path / "choice.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in TASKS["choice"][1]))
    task["dataset_kwargs"] = {"data_files": {"test": str(file)}, "cache_dir": str(tmp_path)}
    (tmp_path / "choice.yaml").write_text(json.dumps(task))
    args += ["--include_path", str(tmp_path)]
    done = subprocess.run([*command, *args], capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 4 and last.startswith("error: ") and "nowhere" in last
    assert "Initializing regard model" in done.stderr and "Traceback" not in done.stderr
