"""regard doctor: what there is, and whether it works; a self-test that fails is exit 1."""

import json
import re
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import torch

import regard
from regard.attention import core
from regard.cli import doctor
from regard.cli.main import main

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.training.plan.PROBED", 0.02)


def test_doctor_says_what_there_is_and_that_it_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    said = capsys.readouterr()
    assert said.err == "" and said.out.count(": ok") == 3
    for name in ("python", "torch", "device", "attention", "bf16", "native", "disk", "extras"):
        assert f"\n{name} " in said.out
    assert torch.__version__ in said.out


def test_doctor_json_has_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["torch"] == torch.__version__ and told["bf16"].startswith("products at ")
    assert [test["ok"] for test in told["self-test"].values()] == [True] * 3


def test_wrong_kernel_is_noticed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(core.BACKENDS, "sdpa", lambda q, k, v, mask, terms: 1.01 * q)
    assert main(["doctor"]) == 1
    said = capsys.readouterr()
    assert "fused attention = reference: FAILED (ValueError: off by " in said.out
    assert said.err.startswith("error: Regard does not work here: fused attention")


@pytest.mark.parametrize("name", doctor.TESTS)
def test_failing_self_test_is_exit_1(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(device: torch.device) -> str:
        raise RuntimeError("no luck\nand more")

    monkeypatch.setitem(doctor.TESTS, name, broken)
    assert main(["doctor", "--json"]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["self-test"][name] == {"ok": False, "said": "RuntimeError: no luck"}
    assert name in said.err and len(said.err.splitlines()) == 1


def test_changed_weights_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(path: object, device: object = None) -> object:
        model = doctor.tiny()
        torch.nn.init.zeros_(next(model.parameters()))
        return model

    monkeypatch.setattr("regard.checkpoint.load", wrong)
    assert doctor.tried(doctor.same_bits, torch.device("cpu")) == (
        False,
        "ValueError: the weights came back changed",
    )


def test_missing_extra_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor.EXTRAS, "plots", ("no_such_module",))
    assert doctor.extra_line("plots") == "plots missing (pip install 'regard[plots]')"
    monkeypatch.setitem(doctor.EXTRAS, "transformers", ("no_such_module",))
    assert doctor.extra_line("transformers") == "transformers missing (pip install transformers)"


def test_extras_are_those_that_can_be_installed() -> None:
    """An extra is missing where something is that pip would bring; `regard serve` runs without anything else."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = extras["project"]["optional-dependencies"]
    assert set(doctor.EXTRAS) == set(wanted) - {"dev", "browser"} | {"transformers"}
    homes = packages_distributions()

    def names(extra: str) -> set[str]:
        found = set()
        for text in wanted[extra]:
            name, more = re.fullmatch(r"([\w-]+)(?:\[(\w+)\])?\S*", text).groups()  # type: ignore[union-attr]
            found |= names(more) if name == "regard" else {re.sub("[-_.]+", "-", name).lower()}
        return found

    for extra in doctor.EXTRAS.keys() - {"transformers"}:
        brought = {homes.get(module, [module])[0] for module in doctor.EXTRAS[extra]}
        assert {re.sub("[-_.]+", "-", name).lower() for name in brought} == names(extra), extra


@pytest.mark.parametrize(
    ("bf16", "fp32", "said"),
    [
        (48.8e6, 11.6e9, "fp32 is 237.7 times as fast here"),
        (1e9, 1.1e9, "fp32 is as fast here"),
        (1.1e9, 1e9, "fp32 is as fast here"),
        (3e9, 1e9, "train.precision = bf16 pays, it is 3.0 times as fast"),
    ],
)
def test_doctor_says_which_type_pays(bf16: float, fp32: float, said: str) -> None:
    assert doctor.faster(bf16, fp32) == said


def test_offline_variables_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in doctor.OFFLINE:
        monkeypatch.delenv(name, raising=False)
    assert doctor.network_line() == "used by data of format hub alone"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert doctor.network_line() == "offline by HF_HUB_OFFLINE=1"


def test_doctor_of_a_model_says_which_runner_decodes_it_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    regard.build("gpt2", layers=1, dim=32, heads=2, vocab=50, max_len=32).save(tmp_path / "m")
    assert main(["doctor", str(tmp_path / "m"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["decoding"]
    assert told.startswith("runner native: no CUDA graph, as it was prepared in fp32 for a CPU\n")
    assert "GroupedQueryAttention" in told
    assert main(["doctor", str(tmp_path / "missing")]) == 4
