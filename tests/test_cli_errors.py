"""How each mistake ends: one line, an exit code."""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.models import EncoderDecoder
from tests.test_cli import SMALL, Done, call, folder, put

GPT2 = "gpt2"  # stands for the folder in the table
WRONG: dict[str, tuple[list[Any], int, str]] = {
    "command": (["generat", "x"], 2, "did you mean 'generate'?"),
    "option": (["--halp"], 2, "there is no option '--halp'"),
    "flag": (["generate", GPT2, "hi", "--max-new-tokns", 3], 2, "did you mean --max-new-tokens?"),
    "far flag": (["generate", GPT2, "hi", "--zzz"], 2, "see regard generate --help"),
    "short flag": (["generate", GPT2, "-x"], 2, "-x"),
    "no model": (["generate"], 2, "MODEL"),
    "too many": (["generate", GPT2, "a", "b"], 2, "b"),
    "no value": (["generate", GPT2, "a", "--top-p"], 2, "--top-p"),
    "type": (["generate", GPT2, "a", "--beams", "x"], 2, "--beams needs a whole number, got 'x'"),
    "choice": (["generate", GPT2, "a", "--dtype", "fp8"], 2, "--dtype is 'fp8'; known: auto, bf16, fp32"),
    "near choice": (["generate", GPT2, "a", "--dtype", "bfloat16"], 2, "did you mean 'bf16'?"),
    "quantize": (["generate", GPT2, "a", "--quantize", "int9"], 2, "'int9'"),
    "range": (["generate", GPT2, "a", "--top-p", 1.5], 2, "top_p is 1.5"),
    "nan": (["generate", GPT2, "a", "--temperature", "nan"], 2, "temperature is nan"),
    "absurd": (["generate", GPT2, "a", "--beams", 10**9], 2, "beams is 1000000000"),
    "zero": (["generate", GPT2, "a", "--max-new-tokens", 0], 2, "max_new_tokens is 0"),
    "together": (["generate", GPT2, "a", "--beams", 2, "--temperature", 1], 2, "beam search"),
    "n-best": (["generate", GPT2, "a", "--n-best", 3], 2, "n_best=3"),
    "samples": (["generate", GPT2, "a", "--samples", 3], 2, "temperature 0"),
    "draft": (["generate", GPT2, "a", "--draft", 3], 2, "--draft-model FOLDER"),
    "draft of its own": (["generate", GPT2, "a", "--draft-model", "mtp"], 2, "MTP layers, and it has none"),
    "draft folder": (["generate", GPT2, "a", "--draft-model", "nowhere"], 4, "nowhere is not a folder"),
    "bias": (["generate", GPT2, "a", "--logit-bias", "5:3"], 2, "ID=BIAS"),
    "stop": (["generate", GPT2, "a", "--stop="], 2, "stop must be"),
    "stop and beams": (["generate", GPT2, "a", "--stop", "x", "--beams", 2], 2, "stop strings"),
    "ids": (["generate", GPT2, "a b", "--ids"], 2, "--ids wants whole numbers"),
    "id": (["generate", GPT2, "400", "--ids"], 2, "outside the vocabulary (0 to 399)"),
    "id below": (["generate", GPT2, "5 -1", "--ids"], 2, "token -1 is outside the vocabulary"),
    "id too large": (["generate", GPT2, 10**30, "--ids"], 2, "outside the vocabulary"),
    "id too long": (["generate", GPT2, "1" * 5000, "--ids"], 2, "--ids wants whole numbers"),
    "id and text": (["generate", GPT2, "5", "hello", "--ids"], 2, "hello"),
    "no ids": (["generate", GPT2, "", "--ids"], 2, "no prompt given"),
    "eos": (["generate", GPT2, "a", "--eos", 400], 2, "token 400 is outside the vocabulary"),
    "banned": (["generate", GPT2, "a", "--banned", -1], 2, "token -1 is outside the vocabulary"),
    "bias id": (["generate", GPT2, "a", "--logit-bias", "400=1"], 2, "token 400 is outside"),
    "bias nan": (["generate", GPT2, "a", "--logit-bias", "4=nan"], 2, "logit_bias is"),
    "hot": (["generate", GPT2, "a", "--temperature", "inf"], 2, "temperature is inf"),
    "seed": (["generate", GPT2, "a", "--seed", 2**64], 2, "seed is 18446744073709551616"),
    "many": (["generate", GPT2, "a", "--samples", 10**6], 2, "samples is 1000000"),
    "negative": (["generate", GPT2, "a", "--beams", -1], 2, "beams is -1"),
    "real": (["generate", GPT2, "a", "--beams", "1e3"], 2, "--beams needs a whole number, got '1e3'"),
    "no number": (["generate", GPT2, "a", "--top-p", "all"], 2, "--top-p needs a number, got 'all'"),
    "layer": (["look", GPT2, "a", "--layer", "top"], 2, "--layer needs a whole number, got 'top'"),
    "tokens": (["generate", GPT2, "a", "--max-new-tokens", 10**9], 2, "max_new_tokens is 1000000000"),
    "guess and search": (["generate", GPT2, "a", "--beams", 2, "--lookup", 3], 2, "does not guess"),
    "draft and search": (["generate", GPT2, "a", "--beams", 2, "--draft-model", "x"], 2, "does not guess"),
    "empty": (["generate", GPT2, ""], 2, "the prompt is empty"),
    "too long": (["generate", GPT2, "a" * 200], 2, "context of 96"),
    "surrogate": (["generate", GPT2, "\udcff"], 2, "surrogate"),
    "stop surrogate": (["generate", GPT2, "a", "--stop", "\udcff"], 2, "stop holds half a surrogate"),
    "too long in int8": (["generate", GPT2, "a" * 200, "--quantize", "int8"], 2, "context of 96"),
    "device": (["generate", GPT2, "a", "--device", "gpu"], 2, "choose auto, cpu, cuda"),
    "device number": (["generate", GPT2, "a", "--device", f"cuda:{10**20}"], 2, "choose auto, cpu, cuda"),
    "device digit": (["chat", GPT2, "--device", "cuda:\u0663"], 2, "choose auto, cpu, cuda"),
    "long folder": (["generate", "x" * 5000, "a"], 4, "cannot be read: File name too long"),
    "file as folder": (["generate", __file__, "a"], 4, "is not a folder"),
    "name as folder": (["generate", "org/model", "a"], 4, "regard pull org/model"),
    "no folder": (["generate", "nowhere", "a"], 4, "nowhere is not a folder"),
    "no tokenizer": (["generate", "bare", "a"], 2, "carries no tokenizer"),
    "encoder": (["generate", "bert", "5", "--ids"], 2, "does not decode"),
    "image": (["generate", "captioner", "5", "--ids"], 2, "this model reads images"),
    "translate what": (["translate", GPT2], 2, "translate needs an encoder-decoder"),
    "translate file": (["translate", "t5", "nowhere.txt"], 4, "nowhere.txt does not exist; give a file"),
    "translate folder": (["translate", "t5", "."], 4, "'.' cannot be read: Is a directory"),
    "translate no name": (["translate", "t5", ""], 4, "'' cannot be read: No such"),
    "translate image": (["translate", "captioner"], 2, "this model reads images"),
    "translate penalty": (["translate", "t5", "--beams", 1, "--length-penalty", "nan"], 2, "is nan"),
    "translate rows": (["translate", "t5", "--rows", 0], 2, "--rows is 0"),
    "translate block": (["translate", "t5", "--block", 0], 2, "--block is 0"),
    "translate beams": (["translate", "t5", "--beams", 0], 2, "beams is 0"),
    "chat template": (["chat", "t5"], 4, "carries no chat template"),
    "chat tokenizer": (["chat", "bare"], 4, "carries no tokenizer"),
    "chat image": (["chat", "captioner"], 2, "this model reads images"),
    "chat word": (["chat", GPT2, "hello"], 2, "hello"),
    "chat system": (["chat", GPT2, "--system", "\udcff"], 2, "--system holds half a surrogate"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_mistake_is_one_line_and_an_exit_code(name: str) -> None:
    arguments, code, part = WRONG[name]
    known = (GPT2, "bare", "bert", "captioner", "t5")
    done = call(*(folder(a) if i == 1 and a in known else a for i, a in enumerate(arguments)))
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith("error: ") and done.err.count("\n") == 1 and part in done.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a cuda device")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:300"])
@pytest.mark.parametrize(
    "name, model", [("generate", "gpt2"), ("translate", "t5"), ("chat", "gpt2")]
)
def test_missing_device_is_the_environments_fault(name: str, model: str, device: str) -> None:
    done = call(name, folder(model), "--device", device, stdin="a")
    text = f"device {device}: this machine has 0 cuda devices that torch can use; take device cpu"
    assert done == Done(3, "", f"error: {text}\n")


@pytest.mark.parametrize(
    "said, code, part",
    [
        (
            "CUDA error: no kernel image is available\nCompile with",
            3,
            "available; try --device cpu",
        ),
        ("CUDA out of memory. Tried to allocate 2 GiB", 1, "fewer beams"),
        ("[enforce fail] DefaultCPUAllocator: can't allocate memory", 1, "fewer beams"),
    ],
)
def test_failing_device_is_one_line(
    said: str, code: int, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr("regard.evaluation.model.load", fails)
    done = call("generate", folder("gpt2"), "a")
    assert (done.code, done.out) == (code, "")
    assert done.err.count("\n") == 1 and part in done.err


def test_errors_that_are_ours_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr("regard.evaluation.model.load", fails)
    with pytest.raises(RuntimeError, match="shapes"):
        call("generate", folder("gpt2"), "a")


@pytest.mark.parametrize(
    "name, content",
    [("config.json", b"{"), ("model.safetensors", b"x" * 9), ("tokenizer.json", b"[")],
)
def test_broken_folder_is_the_datas_fault(name: str, content: bytes, tmp_path: Path) -> None:
    regard.build("gpt2", vocab=50, max_len=40, **SMALL).save(tmp_path / "m")
    put(tmp_path / "m", {name: content})
    done = call("generate", tmp_path / "m", "a")
    assert done.code == 4 and done.err.startswith("error: ") and done.err.count("\n") == 1


@pytest.mark.parametrize(
    "saved, code, part",
    [
        (b"[", 4, "is not valid JSON"),
        (b'{"eos_token_id": "x"}', 4, "eos_token_id must be an id"),
        (
            b'{"forced_bos_token_id": "x"}',
            4,
            "generation_config.json: 'x' is not a token id",
        ),
        (b'{"forced_eos_token_id": [400]}', 4, "the model folder's forced_last 400 is outside"),
        (b'{"bad_words_ids": 5}', 4, "bad_words_ids must be lists of ids"),
        (b'{"bad_words_ids": [5]}', 4, "bad_words_ids must be lists of ids"),
    ],
)
def test_settings_of_a_folder_are_checked(
    saved: bytes, code: int, part: str, tmp_path: Path
) -> None:
    shutil.copytree(folder("gpt2"), tmp_path / "m")
    put(tmp_path / "m", {"generation_config.json": saved})
    done = call("generate", tmp_path / "m", "a")
    assert (done.code, done.out) == (code, "")
    assert done.err.count("\n") == 1 and part in done.err


@pytest.mark.parametrize(
    "saved, part",
    [
        (b'{"eos_token_id": [400, 7]}', "the model folder's eos 400 is outside the vocabulary"),
        (b'{"bad_words_ids": [[400]]}', "the model folder's banned 400 is outside"),
    ],
)
def test_ids_of_a_folder_that_no_text_can_hold_are_left_out(
    saved: bytes, part: str, tmp_path: Path
) -> None:
    """As GPT-2's eos in published models with a smaller vocabulary, which transformers runs."""
    shutil.copytree(folder("gpt2"), tmp_path / "m")
    put(tmp_path / "m", {"generation_config.json": saved})
    done = call("generate", tmp_path / "m", "a", "--max-new-tokens", 3)
    assert done.code == 0 and done.err.count("note: ") == 1 and part in done.err


def test_flags_stand_above_the_folders_settings(tmp_path: Path) -> None:
    shutil.copytree(folder("gpt2"), tmp_path / "m")
    put(tmp_path / "m", {"generation_config.json": b'{"eos_token_id": 400}'})
    done = call("generate", tmp_path / "m", "a", "--eos", 7, "--max-new-tokens", 3)
    assert done.code == 0


@pytest.mark.parametrize("template", [b"{% for", b"{{ 1/0 }}", b"\xff"])
def test_broken_chat_template_is_the_datas_fault(template: bytes, tmp_path: Path) -> None:
    shutil.copytree(folder("gpt2"), tmp_path / "m")
    put(tmp_path / "m", {"chat_template.jinja": template})
    done = call("chat", tmp_path / "m", stdin="a")
    assert (done.code, done.out) == (4, "") and done.err.count("\n") == 1


def test_file_that_is_no_text_is_the_datas_fault() -> None:
    weights = folder("gpt2") / "model.safetensors"
    done = call("translate", folder("t5"), weights)
    assert (done.code, done.out) == (4, "") and "is not UTF-8 text: byte" in done.err


def test_stdin_that_is_no_text_is_the_datas_fault() -> None:
    done = call("generate", folder("gpt2"), stdin=b"ab\xff")
    assert done.code == 4 and "stdin is not UTF-8 text: byte 2 is 0xff" in done.err


def test_broken_weights_end_the_answer_with_an_error(tmp_path: Path) -> None:
    model = regard.load(folder("gpt2"))
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    model.save(tmp_path / "m")
    for more in ([], ["--json"], ["--beams", 2]):
        done = call("generate", tmp_path / "m", "a", *more)
        assert done.code == 1 and "not a number" in done.err
        if more == ["--json"]:
            said = json.loads(done.out)
            assert said["finish"] == "error" and "not a number" in said["error"]
        else:
            assert done.out.strip() == ""


def test_lines_that_fail_are_named_and_the_others_are_translated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    want = call("translate", folder("t5"), stdin=b"dog\npark\nHund\n").out.split("\n")
    encode = EncoderDecoder.encode

    def spoilt(self: EncoderDecoder, source: torch.Tensor, *rest: Any, **more: Any) -> Any:
        memory, *others = encode(self, source, *rest, **more)
        memory[source.shape[0] // 2] = torch.nan
        return memory, *others

    monkeypatch.setattr(EncoderDecoder, "encode", spoilt)
    done = call("translate", folder("t5"), stdin=b"dog\npark\nHund\n")
    assert done.code == 1 and "was not translated: " in done.err and "not a number" in done.err
    number = int(re.findall(r"line (\d) of stdin", done.err)[0])
    want[number - 1] = ""
    assert done.out.split("\n") == want


def test_missing_package_is_the_environments_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tyro", None)
    for name in ("generate", "shared"):
        monkeypatch.delitem(sys.modules, f"regard.cli.{name}", raising=False)
    done = call("generate", folder("gpt2"), "a")
    assert done.code == 3 and done.err == "error: the package tyro is missing; pip install tyro\n"
