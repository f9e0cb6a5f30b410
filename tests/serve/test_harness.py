"""lm-eval over HTTP, by its own `local-completions`, gives the scores of our adapter on the same folder."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")
pytest.importorskip("aiohttp")
pytest.importorskip("tenacity")

from regard.serve.model_worker import Options
from tests.serve.running import running
from tests.test_lm_eval import TASKS, folder_of, lm_eval

CONTEXT = 64


def scores(model: str, args: dict[str, Any], names: list[str], home: Path) -> dict[Any, Any]:
    from lm_eval.tasks import TaskManager

    tasks = []
    for name in names:
        file = home / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in TASKS[name][1]))
        place = {"data_files": {"test": str(file)}, "cache_dir": str(home / "cache")}
        base = {"task": name, "dataset_path": "json", "dataset_kwargs": place, "test_split": "test"}
        tasks.append({**base, **TASKS[name][0]})
    more: Any = {"task_manager": TaskManager(include_defaults=False), "bootstrap_iters": 0}
    found = lm_eval.simple_evaluate(model, args, tasks=tasks, batch_size=4, **more)
    values: dict[Any, Any] = {
        (task, metric): value
        for task, table in found["results"].items()
        for metric, value in table.items()
        if isinstance(value, float)
    }
    return values | {name: [s["filtered_resps"] for s in found["samples"][name]] for name in names}


def test_scores_over_http_are_those_of_the_adapter(tmp_path: Path) -> None:
    import regard.evaluation.harness  # noqa: F401  registers the model

    folder = folder_of("llama-3.2-1b", tmp_path / "model")
    local = {"pretrained": str(folder), "dtype": "fp32", "device": "cpu"}
    ours = scores("regard", local, ["choice", "write"], tmp_path)
    # Over HTTP a window leaves one token for its context and one for an answer.
    texts = scores("regard", {**local, "max_length": CONTEXT - 2}, ["text"], tmp_path)
    remote: dict[str, Any] = {"model": "m", "tokenizer": str(folder), "max_length": CONTEXT}
    remote |= {"tokenizer_backend": "huggingface", "num_concurrent": 4, "max_retries": 1}
    with running({"m": folder}, options=Options(dtype="fp32")) as client:
        remote["base_url"] = f"{client.url}/v1/completions"
        theirs = scores("local-completions", remote, ["choice", "text", "write"], tmp_path)
    assert theirs["write"] == ours["write"]
    assert theirs.keys() == ours.keys() | texts.keys()
    for name, value in (ours | texts).items():
        if isinstance(value, float):
            # Counts are equal to the last digit; so are sums of logarithms but for the rounding of float32.
            far = 1e-6 if name[0] == "text" else 0
            assert theirs[name] == pytest.approx(value, rel=far, abs=0), name
