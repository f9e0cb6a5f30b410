"""Whatever asks a model takes a prepared one, or quantizes it itself; and packing a folder's weights saves memory."""

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.errors import UsageError
from regard.evaluation.model import Opened
from regard.evaluation.run import evaluate
from tests.test_cli import call, folder, put
from tests.test_cli_eval import encoder, tsv
from tests.text import tiny

LINES = ["The dog plays in the park.", "a little ball"]
DATA = [("The dog plays", "good"), ("a little ball", "bad")]
READING = {"columns": {"text": "0", "label": "1"}}


def evaluated(model: Any, **how: Any) -> Any:
    file = str(tsv(Path(encoder("classify").parent, "packed.tsv"), DATA))
    return evaluate(model, file, metrics=["loss"], reading=READING, **how).metrics


# Function -> a folder that it is for, and a call of it.
ASKING: dict[str, tuple[Callable[[], Path], Callable[..., Any]]] = {
    "embed": (lambda: encoder("mlm"), lambda m, **how: regard.embed(m, LINES, **how).tolist()),
    "classify": (lambda: encoder("classify"), lambda m, **how: regard.classify(m, LINES, **how)),
    "fill": (lambda: encoder("mlm"), lambda m, **how: regard.fill(m, "The [MASK] plays", **how)),
    "answer": (
        lambda: encoder("answer"),
        lambda m, **how: regard.answer(m, "The dog?", "The dog plays in the park", **how),
    ),
    "evaluate": (lambda: encoder("classify"), evaluated),
}


def test_every_function_that_quantizes_is_in_the_table() -> None:
    public = {name: getattr(regard, name) for name in regard.__all__}
    functions = {name: f for name, f in public.items() if inspect.isfunction(f)}
    takes = {name for name, f in functions.items() if "quantize" in inspect.signature(f).parameters}
    assert takes == set(ASKING)


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("name", ASKING)
def test_a_prepared_model_is_taken_as_it_is(name: str, precision: str) -> None:
    home, ask = ASKING[name][0](), ASKING[name][1]
    fast = regard.prepare(regard.load(home), precision)
    found = ask(fast)
    want = ask(home, **({} if precision == "fp32" else {"quantize": precision}))
    # The plain and the packed sums of fp32 have other last bits.
    assert found == (pytest.approx(want, rel=1e-6) if name == "evaluate" else want)
    with pytest.raises(UsageError, match=f"already prepared in {precision}"):
        ask(fast, quantize="int8")


def test_a_prepared_model_is_not_prepared_again() -> None:
    fast = regard.prepare(regard.load(folder("gpt2")), "int8")
    opened = Opened(fast)
    assert opened.model is fast and opened.precision == "int8"
    assert opened.compare("The dog") == ""


@pytest.mark.parametrize("flag", ["--dtype", "--precision"])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_weights_in_few_bits_are_asked_for_by_another_flag(flag: str, kind: str) -> None:
    done = call("generate", folder("gpt2"), "The dog", flag, kind)
    assert done.code == 2 and f"--quantize {kind}" in done.err


# --- memory -------------------------------------------------------------------------------------------------------

PEAK = """
import sys
from regard.evaluation.model import Opened
from regard.evaluation.run import evaluate
from regard.kernels.c import native
native.build()
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(x.split()[1]) // 1024 for x in lines if x.startswith("VmHWM"))
Opened(sys.argv[1], quantize=sys.argv[3]).model  # whatever else is needed
before = peak()
Opened(sys.argv[2], quantize=sys.argv[3]).model
print(peak() - before)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """152 MB of weights in float32, 144 of them linear."""
    config = dict(vocab=2000, dim=1024, layers=3, heads=8, max_len=32)
    model = regard.build("gpt2", **config)
    return put(model.save(tmp_path_factory.mktemp("large") / "m"), tiny.gpt2())


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_packing_a_folder_needs_the_packed_weights_alone(large: Path) -> None:
    size = (large / "model.safetensors").stat().st_size / 2**20
    root = Path(__file__).resolve().parents[1]
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    peak = {}
    for kind in ("none", "int8"):
        done = subprocess.run(
            [sys.executable, "-c", PEAK, str(folder("gpt2")), str(large), kind],
            env=env, capture_output=True, text=True, check=True,
        )  # fmt: skip
        peak[kind] = int(done.stdout)
    assert size < peak["none"] < 1.4 * size  # as packed, and a layer as it was
    # A quarter, the embedding as it is, a layer as it was, and what is left of reading random tokens.
    assert peak["int8"] < 0.8 * size


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["none", "int8"])
def test_a_packed_model_does_not_depend_on_its_file(large: Path, kind: str, tmp_path: Path) -> None:
    home = tmp_path / "m"
    home.mkdir()
    for file in large.iterdir():
        (home / file.name).write_bytes(file.read_bytes())
    model = Opened(home, quantize=kind).model
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    want = model(ids)
    with (home / "model.safetensors").open("r+b") as file:
        file.seek(2**16)
        file.write(bytes(2**27))
    assert torch.equal(model(ids), want)
