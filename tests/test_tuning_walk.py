"""The way of the README: tune, merge, serve, ask. Its own lines, on the model that is included, in the types that
folders come in, by every method, from every form that data comes in."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import urllib.request
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.errors import Notice
from regard.kernels.linear import is_fast
from regard.training.config import configure
from regard.training.finetune import decide
from regard.training.plan import Forecast
from tests.documents import ROOT, SERVER, Session, pieces_of
from tests.test_finetune import written
from tests.wide import crossed, wide

ASKED, ANSWERED = "What is this?", "A cat."
TALK = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWERED}]
SHARED = [{"from": "human", "value": ASKED}, {"from": "gpt", "value": ANSWERED}]
PAIR = {"prompt": ASKED, "completion": ANSWERED}
ALPACA = {"instruction": ASKED, "input": "", "output": ANSWERED}
FORMS: dict[str, dict[str, Any]] = {
    "openai.jsonl": {"messages": TALK},
    "pairs.jsonl": PAIR,
    "pairs.csv": PAIR,
    "pairs.tsv": PAIR,
    "alpaca.json": ALPACA,
    "sharegpt.json": {"id": "1", "conversations": SHARED},
    "alpaca.parquet": ALPACA,
}
OTHER = [form for form in FORMS if form != "openai.jsonl"]
# What torch and C++ say when something went wrong below.
TRACES = re.compile(r"frame #\d|Exception raised from|Traceback|\.cpp:\d")


def walk() -> list[str]:
    """The lines of the README's block, from finetune to curl."""
    lines = [piece.text for piece in pieces_of("README.md") if not piece.alone]
    first = next(i for i, line in enumerate(lines) if line.startswith("regard finetune MODEL"))
    block = lines[first : first + 4]
    assert [shlex.split(x)[:2] for x in block[1:3]] == [["regard", "merge"], ["regard", "serve"]]
    assert "--train.steps" in block[0] and block[3].startswith(f"curl {SERVER}/v1/chat")
    return block


def changed(line: str, method: str, file: str) -> str:
    """A line of the block for another method and file. After `full` the run itself is served."""
    line = line.replace("--method lora", f"--method {method}").replace("chats.jsonl", file)
    return line.replace("serve mine", "serve mine=runs/mine") if method == "full" else line


def model_in(home: Path, dtype: torch.dtype) -> Path:
    return regard.load("demo", dtype=dtype).save(home / "decoder")


def data_in(home: Path, name: str) -> str:
    text = json.dumps(FORMS[name])
    rows = [json.loads(text.replace(ASKED, f"{i}. {ASKED}")) for i in range(12)]
    if name.endswith("parquet"):
        pytest.importorskip("datasets", reason="Parquet is read by the package datasets")
        arrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(arrow.Table.from_pylist(rows), home / name)
    else:
        written(home / name, rows)
    return name


def told_wide(said: str, dtype: torch.dtype, method: str) -> bool:
    """Whether a run says what it computes in exactly where that is not what the folder has."""
    wide = dtype == torch.bfloat16 and (method == "full" or not is_fast(dtype))
    return bool(re.search("weights are bfloat16.* in float32", said)) == wide


@pytest.mark.parametrize(
    "dtype, method, form",
    [
        *crossed(("bf16", "fp32"), ("lora", "qlora", "full"), ["openai.jsonl"]),
        *wide([("bf16", "lora", form) for form in OTHER], keep=[("bf16", "lora", OTHER[0])]),
    ],
)
def test_walk(
    dtype: str, method: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    (tmp_path / "MODEL").symlink_to(model_in(tmp_path, kind))
    session, file = Session(tmp_path, monkeypatch), data_in(tmp_path, form)
    tune, merge, serve, ask = (changed(line, method, file) for line in walk())
    said = session.typed(tune)
    assert told_wide(said, kind, method) and "11 chats, " in said
    config = tomllib.loads(Path("runs/mine/config.toml").read_text(encoding="utf-8"))
    assert config["task"] == "chat" and config["train"]["steps"] == 3
    assert "epochs" not in config["train"]
    if method != "full":
        said += session.typed(merge)
        # What is merged is of the type that the folder had, whatever was computed in.
        merged = regard.load("mine", dtype="stored")
        assert {p.dtype for p in merged.parameters()} == {kind}
    said += session.typed(serve)
    answer = json.loads(session.typed(ask))
    assert answer["model"] == "mine" and answer["choices"][0]["message"]["role"] == "assistant"
    assert not TRACES.search(said)


def test_walk_as_processes(tmp_path: Path) -> None:
    """As it is typed: each line a process of its own."""
    (tmp_path / "MODEL").symlink_to(model_in(tmp_path, torch.bfloat16))
    tune, merge, serve, _ = (
        changed(line, "lora", data_in(tmp_path, "alpaca.json")) for line in walk()
    )
    tune = re.sub(r"--train.steps \d+", "--train.steps 2", tune)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    how: Any = {"cwd": tmp_path, "env": env, "text": True, "stderr": subprocess.PIPE}
    said = ""
    for line in (tune, merge):
        words = [sys.executable, "-m", *shlex.split(line)]
        done = subprocess.run(words, stdout=subprocess.PIPE, timeout=300, **how)
        assert done.returncode == 0, done.stderr
        said += done.stderr
    assert (tmp_path / "mine" / "config.json").is_file()
    words = [sys.executable, "-m", *shlex.split(serve), "--port", "0"]
    server = subprocess.Popen(words, **how)
    try:
        assert server.stderr is not None
        for line in server.stderr:
            said += line
            if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                break
        else:
            raise AssertionError(said)
        body = {"model": "mine", "messages": TALK[:1], "max_tokens": 3}
        request = urllib.request.Request(
            f"http://127.0.0.1:{found[1]}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] >= 1
    finally:
        server.terminate()
        said += server.communicate(timeout=60)[1]
    assert told_wide(said, torch.bfloat16, "lora") and not TRACES.search(said)


@pytest.mark.parametrize("fast", [False, True])
def test_plan_of_lora_counts_what_is_computed_in(
    fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.checkpoint.hf.is_fast", lambda dtype: fast or dtype.itemsize > 2)
    file = written(tmp_path / "chats.jsonl", [{"messages": TALK}] * 12)
    changes = {"train.steps": 2, "adapt.targets": ("wq",), "adapt.rank": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Notice)
        tables = decide(model_in(tmp_path, torch.bfloat16), file, None, "lora", None, changes)
    forecast = Forecast(configure(tables, changes), tmp_path / "run", torch.device("cpu"), 1)
    weights = sum(p.nbytes for p in forecast.model.parameters())
    stored = sum(p.numel() for p in forecast.model.parameters()) * 2
    assert weights / stored == pytest.approx(1 if fast else 2, abs=0.05)


def test_frames_of_torch_are_not_shown() -> None:
    """oneDNN may lack a product, of which torch tells with its C++ frames, once: where half precision is asked for."""
    text = "could not create a primitive\\nException raised from mkldnn at Blas.cpp:1\\nframe #0: x"
    tells = [f"mkldnn_matmul failed, switching to baddbmm:{text}"]
    tells += [f"mkldnn_bf16_gemm failed, switching to BLAS gemm: {text}"]
    code = "import warnings, regard.kernels.linear\n"
    code += "".join(f"warnings.warn({each!r})\n" for each in [*tells, "another"])
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and "another" in done.stderr and "frame" not in done.stderr
