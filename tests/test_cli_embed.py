"""regard embed: a vector for each line, whatever lines stand beside it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard.decode.generate import tokenizer_of
from regard.evaluate.model import embedded
from tests.test_cli import call, folder, put
from tests.test_cli_eval import LINES, SMALL, encoder
from tests.text import tiny


def bert(tmp_path: Path, **changes: Any) -> Path:
    model = regard.build("bert-base", vocab=300, max_len=24, dropout=0.0, **SMALL, **changes)
    return put(model.save(tmp_path / "bert"), tiny.bert())


def vectors(home: Path, *flags: Any, text: str = "\n".join(LINES)) -> np.ndarray:
    done = call("embed", home, *flags, stdin=text)
    assert done.code == 0 and done.err == "", done.err
    return np.array([json.loads(line)["embedding"] for line in done.out.splitlines()])


@pytest.mark.parametrize("name", ["gpt2", "t5", "marian", "bahdanau", "gru-lm"])
def test_vector_does_not_depend_on_the_lines_beside_it(name: str, tmp_path: Path) -> None:
    home = folder(name) if name in ("gpt2", "t5", "marian") else recurrent(name, tmp_path)
    together = vectors(home)
    alone = np.concatenate([vectors(home, text=line) for line in LINES])
    # the same sums in another order: rounding of float32
    np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(vectors(home, "--rows", 2), alone, rtol=1e-4, atol=1e-5)
    assert np.abs(together[0] - together[1]).max() > 1e-3


def recurrent(name: str, tmp_path: Path) -> Path:
    sizes = dict(vocab=145, dim=16, **({"source_vocab": 145} if name == "bahdanau" else {}))
    return put(regard.build(name, **sizes).save(tmp_path / "m"), tiny.t5())


def test_encoder_with_a_pooler_gives_what_transformers_pools(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel, BertTokenizer

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=300,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=24,
    )
    peer = BertModel(config).eval()
    peer.save_pretrained(tmp_path / "m")
    home = put(tmp_path / "m", tiny.bert())
    tokenizer = BertTokenizer.from_pretrained(home)
    with torch.no_grad():
        want = [peer(**tokenizer(t, return_tensors="pt")).pooler_output[0].numpy() for t in LINES]
    np.testing.assert_allclose(vectors(home), np.stack(want), rtol=1e-4, atol=1e-5)


def test_without_a_pooler_it_is_the_mean_of_the_last_states(tmp_path: Path) -> None:
    for home in (bert(tmp_path, head=None), folder("gpt2"), encoder("classify")):
        model = regard.load(home)
        tokenizer: Any = tokenizer_of(model)
        with torch.no_grad():
            want = [
                model.hidden(torch.tensor([tokenizer.encode(t)]))[0].mean(0).numpy() for t in LINES
            ]
        np.testing.assert_allclose(vectors(home), np.stack(want), rtol=1e-4, atol=1e-5)


def test_encoder_decoder_gives_the_mean_of_its_encoder(tmp_path: Path) -> None:
    model = regard.load(folder("t5"))
    tokenizer: Any = tokenizer_of(model)
    with torch.no_grad():
        want = [
            model.encode(torch.tensor([tokenizer.encode(t)]))[0][0].mean(0).numpy() for t in LINES
        ]
    np.testing.assert_allclose(vectors(folder("t5")), np.stack(want), rtol=1e-4, atol=1e-5)


def test_normalized_vectors_have_length_1() -> None:
    plain, normal = vectors(folder("gpt2")), vectors(folder("gpt2"), "--normalize")
    np.testing.assert_allclose(np.linalg.norm(normal, axis=1), 1.0, rtol=1e-5)
    want = plain / np.linalg.norm(plain, axis=1, keepdims=True)
    np.testing.assert_allclose(normal, want, rtol=1e-4, atol=1e-6)


def test_array_has_the_same_numbers_and_a_row_for_every_line(tmp_path: Path) -> None:
    text = f"{LINES[0]}\n\n{LINES[1]}\n"
    path = tmp_path / "v.npy"
    done = call("embed", folder("gpt2"), "--output", path, stdin=text)
    assert (done.code, done.out, done.err) == (0, "", "")
    found = np.load(path, allow_pickle=False)
    assert found.dtype == np.float32 and found.shape == (3, 32) and np.isnan(found[1]).all()
    lines = call("embed", folder("gpt2"), stdin=text).out.splitlines()
    assert json.loads(lines[1]) == {"embedding": None}
    for i in (0, 2):  # to the bit: the text has digits enough
        assert (
            np.array(json.loads(lines[i])["embedding"], np.float32).tobytes() == found[i].tobytes()
        )
    assert [p.name for p in tmp_path.iterdir()] == ["v.npy"]


def test_long_lines_and_other_mistakes_are_told(tmp_path: Path) -> None:
    long = "fine\n" + "dog " * 200
    done = call("embed", folder("gpt2"), stdin=long)
    assert (
        done.code == 4 and "line 2 of stdin has" in done.err and "--overlong truncate" in done.err
    )
    assert vectors(folder("gpt2"), "--overlong", "truncate", text=long).shape == (2, 32)
    done = call("embed", folder("gpt2"), "--output", "v.json", stdin="x")
    assert done.code == 2 and "ends in .npy" in done.err
    done = call("embed", folder("gpt2"), "--output", tmp_path / "no" / "v.npy", stdin="x")
    assert done.code == 1 and "cannot write" in done.err
    assert call("embed", folder("bare"), stdin="x").code in (2, 4)
    assert "reads images" in call("embed", folder("captioner"), stdin="x").err


def test_vector_that_is_not_finite_is_told(tmp_path: Path) -> None:
    model = regard.load(folder("gpt2"))
    model.embedding.weight.data[:] = torch.nan
    done = call("embed", model.save(tmp_path / "m"), stdin="fine")
    assert done.code == 1 and "the vector of line 1 is not finite" in done.err
    assert embedded(regard.load(folder("gpt2")), [torch.tensor([1, 2])]).shape == (1, 32)
