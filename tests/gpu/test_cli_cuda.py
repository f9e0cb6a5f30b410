"""The commands on a GPU: what they print is what the Python functions give there. Skipped without one."""

import json

import pytest
import torch

pytest.importorskip("tyro", reason="needs tyro, which the commands are made with: pip install tyro")
pytest.importorskip("tokenizers", reason="needs tokenizers: pip install tokenizers")

import regard
from regard.evaluation.model import Opened
from regard.machine import pick_device
from regard.text import needed, render_chat
from tests.test_cli import Done, call, folder

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device: there is none here"
)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "auto"])
def test_generate_on_cuda(device: str) -> None:
    model = regard.load(folder("gpt2"), device="cuda")
    (want,) = regard.generate(model, "The dog", max_new_tokens=8)
    given = ["generate", folder("gpt2"), "The dog", "--max-new-tokens", 8, "--device", device]
    assert call(*given) == Done(0, f"{want.text}\n", "")
    assert json.loads(call(*given, "--json").out)["ids"] == want.ids


@pytest.mark.parametrize(
    "flags",
    [
        ["--beams", 3],
        ["--samples", 3, "--temperature", 0.9, "--top-p", 0.8],
        ["--lookup", 4],
        ["--dtype", "bf16"],
        ["--repetition-penalty", 1.5, "--banned", 7, "--min-new-tokens", 2],
    ],
    ids=str,
)
def test_settings_of_generate_on_cuda(flags: list) -> None:
    given = ["generate", folder("gpt2"), "The dog", "--max-new-tokens", 6, "--json"]
    done = call(*given, "--device", "cuda", *flags)
    assert (done.code, done.err) == (0, "")
    assert all(len(json.loads(line)["ids"]) <= 6 for line in done.out.splitlines())


def test_draft_model_on_cuda_changes_no_token() -> None:
    given = ["generate", folder("gpt2"), "The dog", "--max-new-tokens", 12, "--device", "cuda"]
    assert call(*given, "--draft-model", folder("gpt2")) == call(*given)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantize_on_cuda_says_what_it_costs(kind: str) -> None:
    for name in ("gpt2", "t5"):
        given = ["generate", folder(name), "The dog runs", "--max-new-tokens", 3]
        done = call(*given, "--device", "cuda", "--quantize", kind)
        assert done.code == 0 and done.err.startswith(f"{kind}: perplexity of the ")


@pytest.mark.parametrize("name", ["t5", "marian"])
def test_translate_on_cuda(name: str) -> None:
    model = regard.load(folder(name), device="cuda")
    want = regard.translate(model, ["The dog", "", "Hund"], beams=2, max_new_tokens=6)
    given = ["translate", folder(name), "--beams", 2, "--max-new-tokens", 6, "--device", "cuda"]
    done = call(*given, stdin="The dog\n\nHund")
    assert done == Done(0, "".join(f"{line}\n" for line in want), "")
    aligned = call(*given, "--align", stdin="The dog\n\nHund")
    assert aligned.code == 0 and [x.partition("\t")[0] for x in aligned.out.splitlines()] == want


def test_chat_on_cuda_answers_a_turn() -> None:
    opened = Opened(folder("gpt2"), device="cuda")
    tokenizer = needed(opened.tokenizer)
    said = render_chat(tokenizer, [{"role": "user", "content": "Hi"}])
    prompt = tokenizer.encode(said, special=False)
    (want,) = regard.generate(opened.model, [prompt], max_new_tokens=5)
    given = ["chat", folder("gpt2"), "--max-new-tokens", 5, "--device", "cuda"]
    assert call(*given, stdin="Hi\n") == Done(0, f"{want.text}\n", "")


def test_weights_on_cuda_keep_their_precision() -> None:
    for dtype, name in (("fp32", "fp32"), ("bf16", "bf16"), ("auto", "fp32")):
        opened = Opened(folder("gpt2"), device="cuda", dtype=dtype)
        assert opened.precision == name and opened.model is opened.plain
        assert next(opened.model.parameters()).is_cuda


def test_device_that_is_not_there_is_one_line() -> None:
    count = torch.cuda.device_count()
    done = call("generate", folder("gpt2"), "a", "--device", f"cuda:{count}")
    assert (done.code, done.out) == (3, "") and f"has {count} cuda devices" in done.err


def test_auto_takes_the_gpu() -> None:
    assert pick_device("auto")[0].type == "cuda"
