"""regard look: a page or pictures of any model's attention, and one sentence for each mistake."""

import base64
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard.decode.generate import tokenizer_of
from regard.see import look as trace
from regard.see.look import names as names_of
from regard.see.page import PAPER
from regard.see.probe import Probe
from regard.text import Tokenizer, needed
from tests.test_cli import SMALL, call, folder, process, put
from tests.text import tiny


def data(path: Path) -> list[dict[str, Any]]:
    found = re.search(r'id="data">(.*?)</script>', path.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    return json.loads(found[1])["models"]


def weight(head: dict[str, str], rows: int) -> np.ndarray:
    return np.frombuffer(base64.b64decode(head["weight"]), "<f4").reshape(rows, -1)


def vision(tmp_path: Path) -> tuple[Path, Path]:
    image = pytest.importorskip("PIL.Image", reason="needs pillow to make a picture")
    home = regard.build("vit-base", size=16, patch=8, labels=3, **SMALL).save(tmp_path / "vit")
    file = tmp_path / "x.png"
    pixels = np.arange(16 * 16 * 3, dtype=np.uint8).reshape(16, 16, 3)
    image.fromarray(pixels).save(file)
    return home, file


# --- pages --------------------------------------------------------------------------------------------------------


def test_look_at_a_decoder_writes_the_probes_numbers(tmp_path: Path) -> None:
    out = tmp_path / "a.html"
    done = call("look", folder("gpt2"), "Once upon a time", "--output", out)
    assert (done.code, done.out, done.err) == (0, f"{out}\n", "")
    (model,) = data(out)
    (view,) = model["views"]
    assert (
        view["rows"] == view["columns"]
        and "".join(view["rows"]).replace("␣", "") == "Onceuponatime"
    )
    loaded = regard.load(folder("gpt2"))
    probe, ids = Probe(), tokenizer_of(loaded).encode("Once upon a time")  # type: ignore[union-attr]
    with torch.no_grad():
        loaded(torch.tensor([ids]), probe=probe)
    for layer in view["layers"]:
        expected = probe.maps[f"{layer['number']}.self"][0][0]
        for i, head in enumerate(layer["heads"]):
            np.testing.assert_allclose(weight(head, len(ids)), expected[i], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["t5", "marian"])
@pytest.mark.parametrize("target", [None, "a little dog"])
def test_look_at_an_encoder_decoder_has_three_views(
    name: str, target: str | None, tmp_path: Path
) -> None:
    out = tmp_path / "a.html"
    more = [] if target is None else ["--target", target]
    done = call("look", folder(name), "Der Hund spielt", "--output", out, *more)
    assert done.code == 0, done.err
    (model,) = data(out)
    encoder, decoder, cross = model["views"]
    assert model["start"] == 2
    assert cross["columns"] == encoder["columns"] and len(cross["rows"]) == len(decoder["rows"])
    if target is not None and name == "t5":  # the other's vocabulary lacks some pieces
        assert "".join(cross["rows"][:-1]).replace("␣", "") == target.replace(" ", "")
        assert cross["rows"][:-1] == decoder["rows"][1:]


def test_look_at_a_vision_model_has_its_picture(tmp_path: Path) -> None:
    home, file = vision(tmp_path)
    out = tmp_path / "a.html"
    assert call("look", home, "--image", file, "--output", out).code == 0
    (view,) = data(out)[0]["views"]
    assert view["rows"] == ["class", "1,1", "1,2", "2,1", "2,2"]
    pixels = np.frombuffer(base64.b64decode(view["image"]["pixels"]), np.uint8)
    np.testing.assert_array_equal(pixels, np.arange(16 * 16 * 3, dtype=np.uint8))


def test_look_at_a_captioner_lets_it_write(tmp_path: Path) -> None:
    _, file = vision(tmp_path)
    out = tmp_path / "a.html"
    assert call("look", folder("captioner"), "--image", file, "--output", out).code == 0
    encoder, decoder, cross = data(out)[0]["views"]
    assert "image" in encoder and "image" in cross and "image" not in decoder
    assert cross["textRows"] and all(name.isdigit() for name in cross["rows"])


def test_look_at_a_recurrent_model_is_its_alignment(tmp_path: Path) -> None:
    model = regard.build("bahdanau", vocab=300, source_vocab=300, dim=16, layers=1)
    files = {**tiny.t5(), "generation_config.json": tiny.dump({"decoder_start_token_id": 0})}
    home, out = put(model.save(tmp_path / "rnn"), files), tmp_path / "a.html"
    assert call("look", home, "Der Hund", "--target", "a dog", "--output", out).code == 0
    (view,) = data(out)[0]["views"]
    assert view["name"] == "cross" and len(view["layers"][0]["heads"]) == 1


def test_compare_puts_two_models_on_one_page(tmp_path: Path) -> None:
    out = tmp_path / "a.html"
    done = call("look", folder("gpt2"), "Once", "--compare", folder("t5"), "--output", out)
    assert done.code == 0, done.err
    assert [len(model["views"]) for model in data(out)] == [1, 3]


def test_text_may_come_from_stdin_and_the_page_starts_at_the_asked_head(tmp_path: Path) -> None:
    out = tmp_path / "a.html"
    asked = ["--layer", 1, "--head", 1, "--output", out]
    assert call("look", folder("gpt2"), "-", *asked, stdin="Once upon\n").code == 0
    start = data(out)[0]["views"][0]["start"]
    assert (start["layer"], start["head"]) == (1, 1)


def test_long_text_is_pooled_and_says_so(tmp_path: Path, monkeypatch: Any) -> None:
    for name, value in (("WHOLE", 50), ("EVERY", 50), ("SIDE", 4)):
        monkeypatch.setattr(trace, name, value)
    out = tmp_path / "a.html"
    assert (
        call("look", folder("gpt2"), "Once upon a time there was a dog", "--output", out).code == 0
    )
    (view,) = data(out)[0]["views"]
    opened = "layer {layer}, head {head}".format(**view["start"])
    assert "max-pooled" in view["note"] and f"In full: {opened}" in view["note"]
    full = [
        (i, j)
        for i, a in enumerate(view["layers"])
        for j, h in enumerate(a["heads"])
        if "score" in h
    ]
    # the one that the page opens with, and no other
    assert full == [(view["start"]["layer"], view["start"]["head"])]


def test_a_model_is_called_by_its_run_and_told_by_its_mechanism(tmp_path: Path) -> None:
    homes = [tmp_path / name / "checkpoints" / "step-00000500" for name in ("first", "second")]
    for kv_heads, home in zip((2, 1), homes):
        made = regard.build("llama", vocab=400, max_len=96, **{**SMALL, "kv_heads": kv_heads})
        put(made.save(home), tiny.gpt2())
    (tmp_path / "second" / "best").symlink_to(homes[1])
    out = tmp_path / "a.html"
    best = tmp_path / "second" / "best"
    assert call("look", homes[0], "Once", "--compare", best, "--output", out).code == 0
    models = data(out)
    assert [model["name"] for model in models] == ["first/step-00000500", "second/best"]
    assert "2 layers of 4 heads (gqa, 2 key heads)" in models[0]["note"]
    assert "(mqa)" in models[1]["note"]


def test_blanks_are_seen(tmp_path: Path) -> None:
    out = tmp_path / "a.html"
    assert call("look", folder("gpt2"), "Once\n\tupon  a", "--output", out).code == 0
    text = "".join(data(out)[0]["views"][0]["rows"])
    assert "⏎" in text and "⇥" in text and "␣" in text and "\n" not in text


@pytest.mark.parametrize("family", ["gpt2", "qwen2", "llama", "t5", "xlm_roberta"])
def test_tokens_on_a_page_keep_their_spaces(family: str, tmp_path: Path) -> None:
    """Put together they are the text, for tokenizers of every kind that keep spaces."""
    files = getattr(tiny, family)()
    tokenizer = needed(Tokenizer.from_files(files, {}))
    text = "a dog, a cat"
    tokens = names_of(tokenizer, tokenizer.encode(text, special=False))
    assert "".join(tokens).removeprefix("␣") == text.replace(" ", "␣")


# --- pictures -----------------------------------------------------------------------------------------------------


def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are saved from here on, for light pages."""
    from regard.see import plots

    figures, save = list[Any](), plots.save

    def kept(drawing: Any, path: Path) -> Path:
        figures.append(drawing())
        return save(drawing, path)

    monkeypatch.setattr(plots, "save", kept)
    return figures


def texts_of(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


@pytest.mark.parametrize(
    ("model", "asked", "tiles", "names"),
    [
        ("gpt2", [], 8, ["a.png"]),
        ("gpt2", ["--layer", 1], 4, ["a.png"]),
        ("gpt2", ["--layer", 1, "--head", 2], 1, ["a.png"]),
        ("gpt2", ["--head", 2], 1, ["a.png"]),
        ("t5", ["--target", "a dog"], 24, ["a.png", "a-alignment.png"]),
        ("t5", ["--target", "a dog", "--layer", 1], 12, ["a.png", "a-alignment.png"]),
        ("t5", ["--target", "a dog", "--head", 1], 1, ["a.png", "a-alignment.png"]),
    ],
)
def test_pictures_show_what_was_asked_for_and_every_file_is_named(
    model: str, asked: list[Any], tiles: int, names: list[str], tmp_path: Path, monkeypatch: Any
) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    figures = drawn(monkeypatch)
    done = call("look", folder(model), "Der Hund", *asked, "--output", tmp_path / "a.png")
    assert done.code == 0, done.err
    assert [Path(line).name for line in done.out.splitlines()] == names
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names)
    assert len(figures[0].axes[0].images) == tiles


def test_picture_as_svg_has_a_form_for_dark_pages(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    asked = ["--target", "a dog", "--output", tmp_path / "a.svg"]
    assert call("look", folder("t5"), "Der Hund", *asked).code == 0
    for name in ("a.svg", "a-alignment.svg"):
        svg = (tmp_path / name).read_text(encoding="utf-8")
        light, dark = svg.split('<g class="dark">')
        assert "@media (prefers-color-scheme: dark)" in light
        assert PAPER["light"]["ink"] in light and PAPER["dark"]["ink"] in dark
        assert PAPER["light"]["ink"] not in dark and PAPER["dark"]["ink"] not in light
        assert light.count("<text") == dark.count("<text") > 10
        ids = re.findall(r' id="([^"]+)"', svg)
        assert len(ids) == len(set(ids))


def test_tiles_have_their_tokens(tmp_path: Path, monkeypatch: Any) -> None:
    """Queries beside the first tile of a layer, keys below every tile of the last."""
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    figures = drawn(monkeypatch)
    assert call("look", folder("gpt2"), "Once upon", "--output", tmp_path / "a.png").code == 0
    tokenizer = needed(Tokenizer.from_folder(folder("gpt2")))
    tokens = names_of(tokenizer, tokenizer.encode("Once upon"))
    assert len(set(tokens)) > 3 and sorted(texts_of(figures[0])) == sorted(tokens * (2 + 4))


def test_pictures_of_a_long_text_have_the_asked_head_among_pooled_ones(
    tmp_path: Path, monkeypatch: Any
) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    for name, value in (("WHOLE", 50), ("EVERY", 50), ("SIDE", 4)):
        monkeypatch.setattr(trace, name, value)
    figures = drawn(monkeypatch)
    for asked, tiles in (([], 4), (["--head", 2], 1)):
        how = ["--layer", 1, *asked, "--output", tmp_path / "a.png"]
        done = call("look", folder("gpt2"), "Once upon a time there was a dog", *how)
        assert (done.code, done.err) == (0, "")
        assert len(figures[-1].axes[0].images) == tiles
    # A pooled cell is no token, a full head's are.
    assert texts_of(figures[0]) == []
    assert figures[1].axes[0].images[0].get_array().shape[0] > 8


def test_pictures_need_no_display(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MPLBACKEND", "TkAgg")
    done = process("look", folder("gpt2"), "Once", "--output", tmp_path / "a.png")
    assert (done.code, done.err) == (0, "") and (tmp_path / "a.png").stat().st_size > 1000


# --- mistakes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, arguments, code, said",
    [
        ("gpt2", [], 2, 'there is no text to look at; say regard look MODEL "some text"'),
        ("gpt2", [" "], 2, "there is no text to look at"),
        ("gpt2", ["-"], 2, "there is no text to look at"),
        ("gpt2", ["dog " * 99], 2, "tokens, the model's context is 96; shorten it: about "),
        ("gpt2", ["Once", "--layer", "9"], 2, "there is no layer 9; this model's are 0 and 1"),
        ("gpt2", ["Once", "--head", "-1"], 2, "there is no head -1; the heads are 0 to 3"),
        ("gpt2", ["Once", "--head", "4"], 2, "there is no head 4; the heads are 0 to 3"),
        ("gpt2", ["Once", "--target", "x"], 2, "gpt2 has no cross-attention; leave --target out"),
        ("gpt2", ["--image", __file__], 2, "gpt2 reads text; give that instead of --image"),
        ("captioner", [], 2, "captioner reads pictures; give one: --image FILE"),
        ("captioner", ["text"], 2, "captioner reads pictures; give one: --image FILE"),
        ("captioner", ["text", "--image", __file__], 2, "leave the text out"),
        ("captioner", ["--image", "none.png"], 4, "none.png is not a file; give a PNG or JPEG"),
        ("captioner", ["--image", "."], 4, ". is not a file; give a PNG or JPEG"),
        ("captioner", ["--image", __file__], 4, "cannot identify image file"),
        ("captioner", ["--image", "cut.png"], 4, "give a PNG or JPEG"),
        ("bare", ["Once"], 2, "carries no tokenizer"),
        ("none", ["Once"], 4, "is not a folder; give the path of a model folder"),
        ("gpt2", ["Once", "--compare", "no-such-model"], 4, "no-such-model is not a folder"),
        ("gpt2", ["Once", "--compare", "captioner"], 2, "captioner reads pictures; give --compare"),
        ("gpt2", ["Once", "--output", "a.gif"], 2, "give a name that ends in .html, or in .png"),
        ("gpt2", ["Once", "--output", "none/a.html"], 2, "there is no folder none; make it first"),
        ("gpt2", ["Once", "--output", "dir.html"], 2, "dir.html cannot be written; name a file"),
        ("gpt2", ["Once", "--output", "a.png", "--compare", "x"], 2, "ends in .html"),
    ],
)
def test_mistake_is_one_sentence_and_spares_the_last_page(
    name: str, arguments: list[str], code: int, said: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("look.html").write_text("the last one", encoding="utf-8")
    Path("cut.png").write_bytes(b"\x89PNG\r\n\x1a\n cut off")
    Path("dir.html").mkdir()
    arguments = [str(folder(a)) if a == "captioner" else a for a in arguments]
    done = call("look", tmp_path / name if name == "none" else folder(name), *arguments)
    assert done.code == code and said in done.err and done.err.count("\n") == 1, done.err
    assert done.err.startswith("error: ") and done.out == "" and "Traceback" not in done.err
    assert Path("look.html").read_text(encoding="utf-8") == "the last one"
    assert sorted(os.listdir()) == ["cut.png", "dir.html", "look.html"]


def test_output_that_cannot_be_written_is_told_before_the_model_is_read(
    tmp_path: Path, monkeypatch: Any
) -> None:
    def refuse(**_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)  # root may write anywhere
    done = call("look", tmp_path / "no model", "Once", "--output", tmp_path / "a.html")
    assert done.code == 2 and "cannot be written; name a file in a folder of yours" in done.err
    assert done.err.count("\n") == 1


def test_missing_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: Any) -> None:
    for name in ("matplotlib", "matplotlib.backends", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    done = call("look", folder("gpt2"), "Once", "--output", tmp_path / "a.png")
    assert done.code == 3 and "pip install 'regard[plots]', or --output look.html" in done.err
    assert done.err.count("\n") == 1 and not list(tmp_path.iterdir())
    assert call("look", folder("gpt2"), "Once", "--output", tmp_path / "a.html").code == 0
