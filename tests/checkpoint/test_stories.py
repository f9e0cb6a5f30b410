"""A real trained model: Karpathy's stories260K, a Llama with eight query heads on four key heads."""

import json
import lzma
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regard

tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def folder(shared: Path) -> Path:
    return shared / "weights" / "stories260K"


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "expected.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model(folder: Path) -> regard.Model:
    return regard.load(folder)


def encode(folder: Path, text: str) -> list[int]:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids


@torch.no_grad()
def continued(model: regard.Model, ids: list[int], size: int) -> list[int]:
    """The plain loop: every token from all before it, no cache."""
    while len(ids) < size:
        ids = [*ids, int(model(torch.tensor([ids]))[0, -1].argmax())]
    return ids


def test_stories_config_has_grouped_heads(model: regard.Model) -> None:
    attention = model.config.tower.attention
    assert (attention.heads, attention.groups) == (8, 4)


@pytest.mark.parametrize("i", range(3))
def test_stories_prompt_encodes_as_the_author_s(i: int, folder: Path, expected: Any) -> None:
    case = expected["greedy"][i]
    if case["prompt"]:
        assert encode(folder, case["prompt"]) == case["prompt_ids"]
    else:
        assert case["prompt_ids"] == [1]


@pytest.mark.parametrize("i", range(3))
def test_stories_greedy_continuation_is_the_author_s(
    i: int, folder: Path, model: regard.Model, expected: Any
) -> None:
    case = expected["greedy"][i]
    ids = continued(model, case["prompt_ids"], len(case["ids"]))
    assert ids == case["ids"]
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.decode(ids).strip() == case["text"].strip()


@pytest.mark.parametrize("i", range(3))
@torch.no_grad()
def test_stories_best_five_logits_are_the_author_s(
    i: int, model: regard.Model, expected: Any
) -> None:
    case = expected["greedy"][i]
    top = model(torch.tensor([case["prompt_ids"]]))[0, -1].topk(5)
    assert top.indices.tolist() == [token for token, _ in case["top5_next"]]
    theirs = torch.tensor([logit for _, logit in case["top5_next"]])
    torch.testing.assert_close(top.values, theirs, atol=1e-3, rtol=0)  # given to four places


@torch.no_grad()
def test_stories_loss_is_the_author_s(
    shared: Path, folder: Path, model: regard.Model, expected: Any
) -> None:
    """Mean negative log-likelihood of 20 stories, in one ragged batch."""
    said = expected["tinystories_sample_loss"]
    with lzma.open(shared / "lm" / "tinystories_2mb.txt.xz", "rt", encoding="utf-8") as file:
        texts = [text.strip() for text in file.read().split("<|endoftext|>")]
    rows = [encode(folder, text)[:256] for text in texts if text][:20]
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    logits: Tensor = model(ids, lengths)
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    ).view(len(rows), -1)
    seen = torch.arange(1, ids.shape[1])[None] < lengths[:, None]
    assert int(seen.sum()) == said["tokens"]
    assert float(losses[seen].mean()) == pytest.approx(said["nll"], abs=1e-4)


def test_stories_saved_folder_is_the_same(
    folder: Path, model: regard.Model, tmp_path: Path
) -> None:
    model.save(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()
    again = regard.load(tmp_path)
    assert again.config == model.config
    assert all(torch.equal(t, again.state_dict()[n]) for n, t in model.state_dict().items())
