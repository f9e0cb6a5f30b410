"""regard classify: a label for each line or picture."""

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard.checkpoint.hf import Origin
from regard.decode.generate import tokenizer_of
from regard.text import needed
from tests.test_cli import HOME, Done, call, folder, put
from tests.test_cli_eval import LINES, NAMES, SMALL, encoder


def scores(texts: list[str]) -> list[list[float]]:
    """By transformers, line by line."""
    from transformers import BertForSequenceClassification, BertTokenizer

    home = encoder("classify")
    model = BertForSequenceClassification.from_pretrained(home).eval()
    tokenizer = BertTokenizer.from_pretrained(home)
    with torch.no_grad():
        rows = [model(**tokenizer(text, return_tensors="pt")).logits[0] for text in texts]
    return [row.softmax(-1).tolist() for row in rows]


def test_labels_and_probabilities_are_those_of_transformers() -> None:
    want = scores(LINES)
    done = call("classify", encoder("classify"), "--rows", 2, stdin="\n".join(LINES))
    assert done.code == 0 and done.err == ""
    for line, p in zip(done.out.splitlines(), want, strict=True):
        label, number = line.split("\t")
        assert label == NAMES[int(np.argmax(p))] and float(number) == pytest.approx(
            max(p), abs=1e-4
        )


def test_lines_stay_lines(tmp_path: Path) -> None:
    text = f"{LINES[0]}\n\n   \n{LINES[1]}\n"
    done = call("classify", encoder("classify"), stdin=text)
    rows = done.out.split("\n")
    assert [bool(row) for row in rows] == [True, False, False, True, False]
    file = tmp_path / "lines.txt"
    file.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    for rows_at_once in (1, 2, 64):
        assert call("classify", encoder("classify"), file, "--rows", rows_at_once) == done
    assert call("classify", encoder("classify"), stdin="") == Done(0, "", "")


def test_top_and_json_give_more_labels() -> None:
    (p,) = scores(LINES[:1])
    order = [NAMES[i] for i in np.argsort(p)[::-1]]
    done = call("classify", encoder("classify"), "--top", 2, stdin=LINES[0])
    assert done.out.split("\t")[::2] == order[:2]
    done = call("classify", encoder("classify"), "--json", stdin=f"{LINES[0]}\n\n")
    first, empty = map(json.loads, done.out.splitlines())
    assert list(first["probabilities"]) == order and first["label"] == order[0]
    assert sum(first["probabilities"].values()) == pytest.approx(1.0)
    assert first["probability"] == first["probabilities"][order[0]]
    assert empty == {"label": None, "probability": None, "probabilities": {}}


def test_text_that_spells_a_special_token_is_text() -> None:
    plain, spelt = call(
        "classify", encoder("classify"), "--json", stdin="dog\ndog [SEP]"
    ).out.splitlines()
    model = regard.load(encoder("classify"))
    tokenizer = needed(tokenizer_of(model))
    ids = tokenizer.encode("dog [SEP]", literal=True)
    want = model(torch.tensor([ids])).softmax(-1).max().item()
    assert plain != spelt and json.loads(spelt)["probability"] == pytest.approx(want, abs=1e-5)


def test_line_that_is_too_long_is_named_or_cut() -> None:
    text = "fine\n" + "dog " * 40
    done = call("classify", encoder("classify"), stdin=text)
    assert done.code == 4 and "line 2 of stdin has 42 tokens, the model's context is 24" in done.err
    assert "--overlong truncate" in done.err
    done = call("classify", encoder("classify"), "--overlong", "truncate", stdin=text)
    short = call("classify", encoder("classify"), stdin="fine\n" + "dog " * 22)
    assert done == short and done.code == 0


def test_classes_without_names_are_numbers(tmp_path: Path) -> None:
    model = regard.load(encoder("classify"))
    model.origin.config["id2label"] = {str(i): f"LABEL_{i}" for i in range(3)}
    done = call("classify", model.save(tmp_path / "m"), stdin="dog")
    assert done.out.split("\t")[0] in {"0", "1", "2"}


def test_model_without_the_head_is_refused() -> None:
    for name in ("gpt2", "bert", "t5"):
        done = call("classify", folder(name), stdin="x")
        assert (
            done.code == 4 and done.out == "" and "answers would be random; train one" in done.err
        )


@pytest.mark.parametrize(
    "flags, code, text",
    [
        (["--top", 0], 2, "--top is 0"),
        (["--rows", -1], 2, "--rows is -1"),
        (["gone.txt"], 4, "gone.txt does not exist"),
    ],
)
def test_mistakes_are_told(flags: list[Any], code: int, text: str) -> None:
    done = call("classify", encoder("classify"), *flags, stdin="x")
    assert done.code == code and text in done.err and len(done.err.splitlines()) == 1


# --- pictures -----------------------------------------------------------------------------------------------------


@cache
def vision(channels: int = 3, more: str = "{}") -> Path:
    torch.manual_seed(1)
    changes: dict[str, Any] = dict(size=8, patch=4, channels=channels, labels=3)
    model = regard.build("vit-small", **changes, **SMALL)
    for p in model.parameters():
        p.data *= 3
    names = {"0": "cat", "1": "dog", "2": "owl"}
    model.origin = Origin("vit", config={"id2label": names})
    path = model.save(Path(HOME.name) / f"vision-{channels}-{len(more)}")
    return put(path, {"preprocessor_config.json": more.encode()})


def answers(home: Path, x: np.ndarray, mean: float = 0.5, std: float = 0.5) -> list[str]:
    model = regard.load(home)
    given = (torch.from_numpy(x).permute(0, 3, 1, 2).float() / 255 - mean) / std
    with torch.no_grad():
        p = model(given).softmax(-1)
    return [f"{('cat', 'dog', 'owl')[int(row.argmax())]}\t{row.max():.4f}" for row in p]


def noise(n: int, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(5).integers(0, 256, (n, 8, 8, channels), dtype=np.uint8)


def test_pictures_by_name_in_folders_and_from_stdin(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    x = noise(3)
    (tmp_path / "inner").mkdir()
    files = [tmp_path / "a.png", tmp_path / "b.PNG", tmp_path / "inner" / "c.png"]
    for file, pixels in zip(files, x):
        image.fromarray(pixels).save(file)
    (tmp_path / "note.txt").write_text("no picture")
    want = answers(vision(), x)
    assert call("classify", vision(), files[1]).out == f"{want[1]}\n"
    done = call("classify", vision(), tmp_path, "--rows", 2)
    assert done.out.splitlines() == [f"{w}\t{file}" for w, file in zip(want, files)]
    done = call("classify", vision(), stdin=f"{files[2]}\n\n{files[0]}\n")
    assert done.out.split("\n") == [want[2], "", want[0], ""]
    done = call("classify", vision(), tmp_path, "--json")
    assert json.loads(done.out.splitlines()[0])["file"] == str(files[0])


def test_pictures_of_another_size_are_scaled(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    flat = np.full((20, 12, 3), 77, np.uint8)
    image.fromarray(flat).save(tmp_path / "flat.png")
    want = answers(vision(), np.full((1, 8, 8, 3), 77, np.uint8))
    assert call("classify", vision(), tmp_path / "flat.png").out == f"{want[0]}\n"


def test_arrays_of_pictures(tmp_path: Path) -> None:
    x = noise(3, 1)
    want = "".join(f"{line}\n" for line in answers(vision(1), x))
    np.save(tmp_path / "x.npy", x[..., 0])
    np.savez(tmp_path / "x.npz", x=x, y=np.arange(3))
    np.savez(tmp_path / "only.npz", pictures=x)
    for name in ("x.npy", "x.npz", "only.npz"):
        assert call("classify", vision(1), tmp_path / name) == Done(0, want, "")
    np.save(tmp_path / "bad.npy", x.astype(np.float32))
    done = call("classify", vision(1), tmp_path / "bad.npy")
    assert done.code == 4 and "holds float32 (3, 8, 8, 1); the model reads bytes" in done.err
    np.save(tmp_path / "odd.npy", np.array([{}], dtype=object), allow_pickle=True)
    assert call("classify", vision(1), tmp_path / "odd.npy").code == 4


def test_folders_own_mean_and_deviation_are_used(tmp_path: Path) -> None:
    more = json.dumps({"image_mean": [0.2] * 3, "image_std": [0.3] * 3})
    x = noise(2)
    np.save(tmp_path / "x.npy", x)
    done = call("classify", vision(3, more), tmp_path / "x.npy")
    assert done.out.splitlines() == answers(vision(3, more), x, 0.2, 0.3)
    assert done.out.splitlines() != answers(vision(3, more), x)


def test_bad_pictures_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    assert "has no pictures" in call("classify", vision(), tmp_path / "empty").err
    (tmp_path / "x.png").write_bytes(b"no picture")
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    done = call("classify", vision(), tmp_path / "x.png")
    assert done.code == 3 and "pip install pillow" in done.err
    monkeypatch.undo()
    pytest.importorskip("PIL.Image")
    done = call("classify", vision(), tmp_path / "x.png")
    assert done.code == 4 and "x.png is not a picture that can be read" in done.err
