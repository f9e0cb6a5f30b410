"""regard pull: what is brought, that it is checked, that a cut-off pull is not taken for whole, and that nothing else
downloads. The hub is one of the test's own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import regard
from regard.checkpoint.hub import look_up, pull
from regard.cli import shared
from regard.cli.main import main
from regard.files import hub_cache, hub_name, in_hub_cache, model_folder
from tests.checkpoint.local_hub import COMMIT, Hub, local_hub

pytest.importorskip("huggingface_hub")
SMALL: Any = dict(layers=2, dim=32, heads=4, vocab=60)
NAME = "regard/tiny-gpt2"


@pytest.fixture(scope="module")
def served() -> Iterator[Hub]:
    with local_hub() as hub:
        yield hub


@pytest.fixture
def hub(served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A hub with one small model and files that no model needs; a cache of its own."""
    torch.manual_seed(0)
    folder = tmp_path / "published"
    regard.build("gpt2", **SMALL).save(folder)
    (folder / "modeling_tiny.py").write_text("raise SystemExit")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "consolidated.safetensors").write_bytes(b"another form of the weights")
    (folder / "special_tokens_map.json").write_text("{}")
    served.models = {NAME: folder}
    served.revisions = {"main": COMMIT}
    for name in ("spoilt", "cut", "gated", "asked", "agents"):
        getattr(served, name).clear()
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", served.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return served


def told(hub: Hub, name: str = NAME) -> str:
    with pytest.raises(regard.UsageError) as error:
        pull(look_up(name))
    return str(error.value)


def test_what_a_model_needs_is_brought_and_found_by_its_name(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pull", NAME]) == 0
    out, err = capsys.readouterr()
    folder = Path(out.strip())
    assert COMMIT in err and folder == in_hub_cache(NAME) == model_folder(NAME)
    assert folder.is_relative_to(tmp_path / "cache" / "hub")
    brought = {path.name for path in folder.iterdir()}
    assert brought == {"config.json", "model.safetensors", "special_tokens_map.json"}
    hub.asked.clear()
    model, own = regard.load(NAME), regard.load(hub.models[NAME])
    assert model.config == own.config
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), own.parameters(), strict=True))
    assert main(["generate", NAME, "1 2 3", "--ids", "--max-new-tokens", "2"]) == 0
    assert hub.asked == []
    model.save(tmp_path / "mine")


def test_shards_are_those_that_the_index_names(hub: Hub) -> None:
    folder = hub.models[NAME]
    parts = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    for part in parts:
        (folder / part).write_bytes(whole)
    index = {"weight_map": {f"tensor{i}": part for i, part in enumerate(parts)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    brought = {path.name for path in pull(look_up(NAME)).iterdir()}
    assert {name for name in brought if name.endswith(".safetensors")} == set(parts)


def test_revision_is_a_commit_and_has_a_name_of_its_own(hub: Hub) -> None:
    other = "f" * 40
    hub.revisions["v1/stable"] = other
    first = pull(look_up(NAME))
    second = pull(look_up(f"{NAME}@v1/stable"))
    assert (first.name, second.name) == (COMMIT, other)
    assert in_hub_cache(NAME) == first
    assert in_hub_cache(f"{NAME}@v1/stable") == in_hub_cache(f"{NAME}@{other}") == second
    hub.revisions["main"] = other
    assert in_hub_cache(NAME) == first, "what was pulled stays until it is pulled again"
    assert pull(look_up(NAME)) == in_hub_cache(NAME) == second


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_file_that_arrives_changed_is_removed(hub: Hub, file: str) -> None:
    hub.spoilt.add(file)
    text = told(hub)
    assert f"{file} did not arrive as it is on the hub" in text and "pull again" in text
    assert in_hub_cache(NAME) is None
    assert not list(hub_cache().rglob(file))
    hub.spoilt.clear()
    pull(look_up(NAME))
    assert regard.load(NAME).config


def test_pull_that_is_cut_off_is_not_taken_for_whole_and_goes_on(hub: Hub) -> None:
    # Every try brings half of what is missing.
    hub.cut.add("model.safetensors")
    assert f"{hub.url} cannot be reached" in told(hub) or in_hub_cache(NAME) is None
    hub.cut.clear()
    folder = pull(look_up(NAME))
    assert (folder / "model.safetensors").read_bytes() == (
        hub.models[NAME] / "model.safetensors"
    ).read_bytes()


def test_adapter_is_pulled_alone(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"x")
    hub.models["regard/adapter"] = folder
    assert {p.name for p in pull(look_up("regard/adapter")).iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


def test_mistakes_are_told_in_a_sentence(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "has no model regard/nothing, or it is private" in told(hub, "regard/nothing")
    assert "has no revision 'v9'" in told(hub, f"{NAME}@v9")
    assert "is no name on the Hugging Face Hub" in told(hub, "../up")
    hub.gated.add(NAME)
    assert "only for those who were let in" in told(hub)
    hub.gated.clear()
    (hub.models[NAME] / "model.safetensors").unlink()
    assert "has no safetensors; it has pytorch_model.bin: nothing was pulled" in told(hub)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "http://127.0.0.1:9 cannot be reached" in told(hub)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE is set: nothing is downloaded" in told(hub)


def test_disk_without_room_is_told_before_anything_is_brought(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = look_up(NAME)
    hub.asked.clear()
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(regard.UsageError, match="make room, or set HF_HOME to a larger disk"):
        pull(listing)
    assert hub.asked == []


def test_other_commands_download_nothing(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", NAME, "1", "--ids"]) == 4
    assert f"regard pull {NAME}" in capsys.readouterr().err
    with pytest.raises(regard.UsageError, match=f"regard pull {NAME}"):
        regard.load(NAME)
    assert hub.asked == []


@pytest.mark.parametrize(
    "answer, asks", [("y\n", True), ("\n", False), ("n\n", False), ("", False)]
)
def test_somebody_at_a_terminal_is_asked(
    answer: str, asks: bool, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyboard = SimpleNamespace(isatty=lambda: True, readline=lambda: answer)
    monkeypatch.setattr(sys, "stdin", keyboard)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    shared.offer_to_pull(NAME)
    assert (in_hub_cache(NAME) is not None) == bool(hub.asked) == asks
    hub.asked.clear()
    shared.offer_to_pull(str(hub.models[NAME]))
    assert hub.asked == []


def test_nobody_is_counted(hub: Hub) -> None:
    pull(look_up(NAME))
    assert hub.agents and not [agent for agent in hub.agents if "torch" in agent]


def test_without_the_package_it_says_what_to_install(tmp_path: Path) -> None:
    script = "import sys; sys.modules['huggingface_hub'] = None; from regard.cli.main import main; "
    script += "sys.exit(main(['pull', 'org/name']))"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env={"HF_HOME": str(tmp_path)})
    assert done.returncode == 3
    assert "pip install 'regard[hub]'" in done.stderr


@pytest.mark.parametrize(
    "name, meant",
    [
        ("org/name", ("org/name", "main")),
        ("org/name@v1.0", ("org/name", "v1.0")),
        ("gpt2", ("gpt2", "main")),
        ("a/b/c", None),
        ("./a", None),
        ("org/..", None),
        ("org/name@", None),
        ("org/name@../x", None),
        ("runs/x", None),
    ],
)
def test_names(name: str, meant: tuple[str, str] | None) -> None:
    assert hub_name(name) == meant
