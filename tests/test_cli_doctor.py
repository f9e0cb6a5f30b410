"""regard doctor: what there is, and whether it works; a self-test that fails is exit 1."""

import json
from pathlib import Path

import pytest
import torch

import regard
from regard.attention import core
from regard.cli import doctor
from regard.cli.main import main


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.train.plan.PROBED", 0.02)


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
