"""Pickled weights -> safetensors, by a process that runs no code out of them."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import regard
from regard.checkpoint import convert
from regard.checkpoint.convert import find, pickled
from regard.errors import UsageError
from tests.checkpoint.test_bad_files import Canary

START = subprocess.Popen
SMALL: dict[str, Any] = dict(vocab=50, max_len=16, layers=2, dim=12, heads=3, ffn_dim=20)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    folder = regard.build("gpt2", **SMALL).save(tmp_path_factory.mktemp("saved") / "gpt2")
    return folder, load_file(folder / "model.safetensors")


@pytest.fixture
def source(saved: Any, tmp_path: Path) -> Path:
    """A folder with everything but the weights."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_bytes((saved[0] / "config.json").read_bytes())
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that reads is this one, without its limits: to start one takes seconds."""

    def unpickled(files: Any, folder: Path, dtype: torch.dtype | None, progress: Any) -> int:
        lines: list[dict[str, Any]] = []
        monkeypatch.setattr(convert, "say", lambda **what: lines.append(what))
        monkeypatch.setattr(convert, "confine", lambda size: None)
        kind = "" if dtype is None else str(dtype).removeprefix("torch.")
        convert.main(str(folder), kind, *map(str, files))
        assert lines[-1] == {"done": True}
        return lines[0]["tensors"]

    monkeypatch.setattr(convert, "_unpickled", unpickled)


def converted(source: Path, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    pickled(find(source), source.parent / "new", dtype)
    return load_file(source.parent / "new" / "model.safetensors")


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[n], x) and found[n].dtype == x.dtype for n, x in wanted.items())


def refused(source: Path, *words: str) -> None:
    """Refused in a sentence with these words, and nothing is left behind."""
    before = sorted(p.name for p in source.parent.iterdir())
    with pytest.raises(UsageError) as caught:
        pickled(find(source), source.parent / "new")
    for word in words:
        assert word in str(caught.value)
    assert sorted(p.name for p in source.parent.iterdir()) == before


def test_folder_loads_as_the_model(saved: Any, source: Path) -> None:
    torch.save(saved[1], source / "pytorch_model.bin")
    seen: list[tuple[int, int]] = []
    new = source.parent / "new"
    assert pickled(find(source), new, progress=lambda *both: seen.append(both)) == ""
    count = len(saved[1])
    assert seen == [(i + 1, count) for i in range(count)]
    same(load_file(new / "model.safetensors"), saved[1])
    assert sorted(p.name for p in new.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(regard.load(new)(ids), regard.load(saved[0])(ids))


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize(
    "file, wrap, zipped",
    [
        ("pytorch_model.bin", None, False),
        ("model.pt", "state_dict", True),
        ("model.pth", "model", True),
        ("model.ckpt", "state_dict", False),
    ],
)
def test_old_and_nested_files_are_read(
    file: str, wrap: str | None, zipped: bool, saved: Any, source: Path
) -> None:
    data = saved[1] if wrap is None else {wrap: saved[1], "step": 7}
    torch.save(data, source / file, _use_new_zipfile_serialization=zipped)
    same(converted(source), saved[1])


@pytest.mark.usefixtures("inside")
def test_shards_are_joined(saved: Any, source: Path) -> None:
    names = list(saved[1])
    half = len(names) // 2
    where = {}
    for i, part in enumerate((names[:half], names[half:]), 1):
        file = f"pytorch_model-{i:05}-of-00002.bin"
        torch.save({name: saved[1][name] for name in part}, source / file)
        where |= dict.fromkeys(part, file)
    index = source / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    # What the index does not name is none of the model.
    torch.save({"lr": 0.1}, source / "training_args.bin")
    assert find(source).left_out == ("training_args.bin",)
    same(converted(source), saved[1])
    assert not (source.parent / "new" / index.name).exists()
    (source / file).unlink()
    with pytest.raises(UsageError, match=f"{file} is missing"):
        find(source)
    for table in ({}, [], {"a": 3}):
        index.write_text(json.dumps({"weight_map": table}))
        with pytest.raises(UsageError, match="has no weight_map of tensor names"):
            find(source)


@pytest.mark.usefixtures("inside")
def test_tensors_of_any_form_keep_their_names_and_values(source: Path) -> None:
    base = torch.randn(6, 8)
    odd = {
        "tied.a": base,
        "tied.b": base,
        "slice": base[1:3],
        "turned": base.T,
        "stepped": base[::2, ::3],
        "spread": torch.randn(1, 3).expand(4, 3),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "flags": torch.tensor([True, False, True]),
        "half": torch.randn(3).half(),
        "brain": torch.randn(3).bfloat16(),
        "double": torch.randn(3).double(),
        "parameter": torch.nn.Parameter(torch.randn(2)),
    }
    torch.save(odd, source / "model.pt")
    # None of it is a GPT-2: the folder is written, and it is said why Regard cannot read it.
    assert "tensor" in pickled(find(source), source.parent / "new")
    found = load_file(source.parent / "new" / "model.safetensors")
    same(found, {name: x.detach() for name, x in odd.items()})


@pytest.mark.usefixtures("inside")
def test_asked_dtype_is_that_of_every_weight(saved: Any, source: Path) -> None:
    torch.save({**saved[1], "h.0.attn.bias": torch.ones(4, dtype=torch.bool)}, source / "model.pt")
    found = converted(source, torch.bfloat16)
    assert found.pop("h.0.attn.bias").dtype == torch.bool
    same(found, {name: x.bfloat16() for name, x in saved[1].items()})
    config = json.loads((source.parent / "new" / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and "torch_dtype" not in config


@pytest.mark.usefixtures("inside")
def test_value_beyond_the_asked_type_is_an_error(source: Path) -> None:
    torch.save({"a": torch.full((2,), 1e6)}, source / "model.pt")
    with pytest.raises(UsageError, match="a has values beyond the range of float16"):
        converted(source, torch.float16)


# --- what is refused ----------------------------------------------------------------------------------------------


def test_pickle_with_code_is_refused_and_not_run(source: Path) -> None:
    ran = source.parent / "ran"
    torch.save({"a": torch.zeros(2), "b": Canary(ran)}, source / "model.pt")
    refused(source, "model.pt is refused", "open", "could run code", "safetensors")
    assert not ran.exists()


@pytest.mark.usefixtures("inside")
def test_pickle_with_code_is_refused_in_every_form(source: Path) -> None:
    ran = source.parent / "ran"
    torch.save(Canary(ran), source / "model.pt")
    refused(source, "model.pt", "could run code")
    for protocol in (0, 1, 2):
        (source / "model.pt").write_bytes(pickle.dumps(Canary(ran), protocol=protocol))
        refused(source, "model.pt")
    assert not ran.exists()


@pytest.mark.usefixtures("inside")
def test_what_is_not_a_state_dict_is_named(source: Path) -> None:
    for data, what in (
        ([torch.zeros(2)], "holds a list, not a state dict"),
        ({}, "not a state dict"),
        ({"a": torch.zeros(2), "b": "text"}, "holds under 'b' a str"),
        ({1: torch.zeros(2)}, "holds under 1 a"),
        ({"a": torch.zeros(2, dtype=torch.complex64)}, "torch.complex64"),
        ({"a": torch.eye(2).to_sparse()}, "torch.sparse_coo"),
    ):
        torch.save(data, source / "model.pt")
        refused(source, "model.pt", what)


@pytest.mark.usefixtures("inside")
def test_damaged_files_are_refused(saved: Any, source: Path) -> None:
    torch.save(saved[1], source / "model.pt")
    whole = (source / "model.pt").read_bytes()
    for data in (b"", b"\x80\x02garbage", whole[: len(whole) // 2], whole[:-100], bytes(1000)):
        (source / "model.pt").write_bytes(data)
        refused(source, "model.pt", "copy or download it again")


def test_spread_tensor_that_no_disk_holds_is_refused(source: Path) -> None:
    torch.save({"a": torch.zeros(1).expand(2**50)}, source / "model.pt")
    refused(source, "make room")


def stand_in(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Another program in the place of the process that reads."""

    def popen(command: list[str], **more: Any) -> Any:
        return START([sys.executable, "-c", script], **more)

    monkeypatch.setattr(convert.subprocess, "Popen", popen)


def test_process_that_crashes_or_hangs_gives_a_sentence(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"a": torch.zeros(2)}, source / "model.pt")
    stand_in(monkeypatch, "import os; os.kill(os.getpid(), 11)")
    refused(source, "reads model.pt ended with signal SIGSEGV")
    stand_in(monkeypatch, "raise SystemExit(3)")
    refused(source, "reads model.pt ended with exit code 3")
    monkeypatch.setattr(convert, "QUIET_SECONDS", 0.4)
    stand_in(monkeypatch, "import time; time.sleep(60)")
    refused(source, "has not moved for 0 seconds", "was ended")


CONFINED = """
import os, socket, subprocess
from regard.checkpoint import convert

convert.confine(2**20)
for act in (
    socket.socket,
    lambda: os.system("true"),
    lambda: subprocess.run(["true"]),
    lambda: bytearray(6 * 2**30),
):
    try:
        act()
        print("done")
    except (RuntimeError, MemoryError):
        print("refused")
bytearray(2**26)
print("fine")
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux for the limit")
def test_process_has_no_network_no_programs_and_little_memory() -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(regard.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", CONFINED], env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["refused"] * 4 + ["fine"], done.stderr


@pytest.mark.usefixtures("inside")
def test_links_out_of_the_folder_are_not_followed(saved: Any, source: Path) -> None:
    torch.save(saved[1], source / "model.pt")
    (source.parent / "secret").write_text("mine")
    (source / "notes.txt").symlink_to(source.parent / "secret")
    (source / "inside.txt").symlink_to(source / "tokenizer.json")
    (source / "loop").symlink_to(source / "loop")
    assert "notes.txt" in find(source).left_out
    converted(source)
    new = source.parent / "new"
    assert not (new / "notes.txt").exists()
    assert (new / "inside.txt").read_text() == "{}" and not (new / "inside.txt").is_symlink()


@pytest.mark.usefixtures("inside")
def test_links_of_the_hub_cache_are_followed(saved: Any, source: Path) -> None:
    torch.save(saved[1], source / "pytorch_model.bin")
    blobs, snapshot = source.parent / "blobs", source.parent / "snapshots" / "abc"
    source.rename(blobs)
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    assert pickled(find(snapshot), source.parent / "new") == ""
    same(load_file(source.parent / "new" / "model.safetensors"), saved[1])


def test_folder_without_weights_to_convert_says_what_it_has(saved: Any, source: Path) -> None:
    with pytest.raises(UsageError, match="holds nothing to convert"):
        find(source)
    for name in ("a.pt", "b.pt"):
        torch.save(saved[1], source / name)
    with pytest.raises(UsageError, match=r"several pickled files \(a.pt, b.pt\); name the one"):
        find(source)
    assert find(source / "b.pt").weights == (source / "b.pt",)
    with pytest.raises(UsageError, match="nothing is to be converted, regard.load reads it"):
        find(saved[0])
    with pytest.raises(UsageError, match="nothing is to be converted, regard.load reads it"):
        find(saved[0] / "model.safetensors")
    (source / "config.json").unlink()
    with pytest.raises(UsageError, match="holds no config.json"):
        find(source)
    with pytest.raises(UsageError, match="nowhere does not exist; give a GGUF file"):
        find(source / "nowhere")
    with pytest.raises(UsageError, match="neither a GGUF file nor pickled"):
        find(source / "tokenizer.json")
