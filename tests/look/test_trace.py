"""What a page of attention is made of: the library's own numbers, whole or pooled, and a page that holds no more."""

import base64
import hashlib
import json
import re
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard.errors import UsageError
from regard.see import look as module
from regard.see.look import Full, Given, Panel, Picture, Pooled, View, exact, telling, trace
from regard.see.page import MODULES, WEB, joined, maps, page
from regard.see.probe import Probe
from tests.laws.mechanisms import VOCAB, decoder

SMALL: dict[str, Any] = dict(layers=2, dim=24, heads=3, ffn_dim=20)


def words(count: int) -> list[str]:
    return [f"w{i}" for i in range(count)]


def given(count: int, vocab: int = 50) -> Given:
    return Given(torch.randint(vocab, (1, count)), words(count))


def pair(source: int, target: int) -> Given:
    ids = torch.randint(50, (1, target)), torch.randint(50, (1, source))
    return Given(ids[0], words(target), ids[1], words(source), words(target))


def loud(model: Any) -> Any:
    """Weights far from even, so that maps differ."""
    for p in model.parameters():
        if p.dim() > 1:
            p.data.mul_(4.0)
    return model.eval()


def weights(model: Any, of: Given) -> dict[str, torch.Tensor]:
    probe = Probe()
    more = {} if of.source_ids is None else {"source": of.source_ids}
    with torch.no_grad():
        model(of.ids, probe=probe, **more)
    return {site: calls[0][0] for site, calls in probe.maps.items()}


def heads(view: View) -> list[Full]:
    found = [head for layer in view.layers for head in layer.heads]
    assert all(isinstance(head, Full) for head in found)
    return found  # type: ignore[return-value]


# --- whole --------------------------------------------------------------------------------------------------------


def test_trace_of_a_decoder_has_the_probes_weights_and_the_steps_to_them() -> None:
    model, text = loud(regard.build("gpt2", vocab=50, max_len=40, **SMALL)), given(9)
    (view,) = trace(model, text)
    assert view.name == "self" and view.whole and view.rows == view.columns == words(9)
    for layer in view.layers:
        expected = weights(model, text)[layer.site]
        for i, head in enumerate(layer.heads):
            assert isinstance(head, Full) and head.raw is not None
            np.testing.assert_array_equal(head.weight, expected[i].numpy())
            masked = np.triu(np.ones((9, 9), bool), 1)
            assert (head.score[masked] == -np.inf).all() and np.isfinite(head.raw).all()
            scaled = head.raw * layer.scale
            np.testing.assert_allclose(scaled[~masked], head.score[~masked], rtol=1e-5, atol=1e-6)
            e = np.exp(head.score - head.score.max(-1, keepdims=True))
            np.testing.assert_allclose(e / e.sum(-1, keepdims=True), head.weight, atol=1e-6)


def test_trace_gives_lengths_of_values() -> None:
    model, text = loud(regard.build("gpt2", vocab=50, max_len=40, **SMALL)), given(7)
    probe = Probe(what=("weight", "norm"))
    with torch.no_grad():
        model(text.ids, probe=probe)
    (view,) = trace(model, text)
    for layer in view.layers:
        norm = probe.of("norm")[layer.site][0][0]
        for i, head in enumerate(layer.heads):
            assert isinstance(head, Full)
            np.testing.assert_allclose(
                head.weight * head.norm, norm[i].numpy(), rtol=1e-5, atol=1e-6
            )


def test_trace_of_an_encoder_decoder_has_three_views_with_their_tokens() -> None:
    model, text = loud(regard.build("t5-small", vocab=50, **SMALL)), pair(6, 4)
    views = {view.name: view for view in trace(model, text)}
    assert list(views) == ["encoder", "decoder", "cross"]
    sizes = {name: (len(view.rows), len(view.columns)) for name, view in views.items()}
    assert sizes == {"encoder": (6, 6), "decoder": (4, 4), "cross": (4, 6)}
    expected = weights(model, text)
    for view in views.values():
        for layer in view.layers:
            found = np.stack([head.weight for head in layer.heads])  # type: ignore[union-attr]
            np.testing.assert_array_equal(found, expected[layer.site].numpy())
    assert all(layer.biased for layer in views["encoder"].layers)
    assert not any(layer.biased for layer in views["cross"].layers)


@pytest.mark.parametrize("attention", ["additive", "dot"])
def test_trace_of_a_recurrent_model_is_its_alignment(attention: str) -> None:
    model = regard.build("luong", vocab=50, source_vocab=50, dim=16, attention=attention)
    (view,) = trace(model.eval(), pair(6, 4))
    (head,) = heads(view)
    assert view.name == "cross" and head.weight.shape == (4, 6)
    np.testing.assert_allclose(head.weight.sum(-1), 1, rtol=1e-6)
    assert (head.raw is None) == (attention == "additive")


@pytest.mark.parametrize(
    "name", ["dsa_gqa", "dsa_window_sinks", "sinks", "mla", "softcap", "gqa_t5"]
)
def test_steps_of_every_mechanism_lead_to_its_weights(name: str) -> None:
    model, text = decoder(name), given(9, VOCAB)
    (view,) = trace(model, text)
    for layer in view.layers:
        expected = weights(model, text)[layer.site]
        for i, head in enumerate(layer.heads):
            assert isinstance(head, Full)
            np.testing.assert_allclose(head.weight, expected[i].numpy(), atol=1e-6)
            assert (head.raw is None) == name.startswith("dsa")
            e = np.exp(head.score.astype(float))
            assert (np.isneginf(head.score) == (head.weight == 0)).all()
            share = e / e.sum(-1, keepdims=True) * head.weight.sum(-1, keepdims=True)
            np.testing.assert_allclose(share, head.weight, atol=1e-5)
        assert layer.sinks == ("sinks" in name) and layer.capped == (name == "softcap")
        assert layer.biased == (name == "gqa_t5") and layer.sparse == name.startswith("dsa")


def test_a_model_without_attention_is_refused() -> None:
    model = regard.build("luong", vocab=50, source_vocab=50, dim=16, attention=None)
    with pytest.raises(UsageError, match="no attention"):
        trace(model.eval(), pair(6, 4))


def test_a_layer_or_head_that_is_not_there_is_told_with_those_that_are() -> None:
    model = regard.build("gpt2", vocab=50, max_len=40, **SMALL).eval()
    with pytest.raises(UsageError, match="no layer 7; this model's are 0 and 1"):
        trace(model, given(5), layer=7)
    with pytest.raises(UsageError, match="no head 3; the heads are 0 to 2"):
        trace(model, given(5), head=3)


# --- pooled -------------------------------------------------------------------------------------------------------


def test_a_long_text_is_pooled_by_the_largest_and_the_asked_head_stays_whole(
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(module, "WHOLE", 100)
    monkeypatch.setattr(module, "EVERY", 100)
    model, text = loud(regard.build("gpt2", vocab=50, max_len=200, **SMALL)), given(130)
    (view,) = trace(model, text, layer=0, head=2)
    assert not view.whole and view.step == (3, 3)
    expected = weights(model, text)
    for layer in view.layers:
        for i, head in enumerate(layer.heads):
            a = expected[layer.site][i].numpy()
            if (layer.number, i) == (0, 2):
                assert isinstance(head, Full) and head.raw is not None
                np.testing.assert_allclose(head.weight, a, atol=1e-6)
                continue
            assert isinstance(head, Pooled) and head.cells.shape == (44, 44)
            np.testing.assert_allclose(head.cells[10, 3], a[30:33, 9:12].max(), atol=1e-6)
            np.testing.assert_allclose(head.cells[43, 0], a[129, 0:3].max(), atol=1e-6)
            np.testing.assert_allclose(head.first[10], a[30:33, 1:3].max(), atol=1e-6)
        mean = expected[layer.site].mean(0).numpy()
        np.testing.assert_allclose(layer.mean.cells[10, 3], mean[30:33, 9:12].max(), atol=1e-6)


def test_a_text_between_short_and_long_has_every_weight_and_the_asked_head_its_steps(
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(module, "WHOLE", 100)
    model, text = loud(regard.build("gpt2", vocab=50, max_len=200, **SMALL)), given(130)
    (view,) = trace(model, text, layer=0, head=2)
    assert not view.whole and view.step == (1, 1)
    expected = weights(model, text)
    for layer in view.layers:
        for i, head in enumerate(layer.heads):
            full = (layer.number, i) == (0, 2)
            assert isinstance(head, Full if full else Pooled)
            found = head.weight if isinstance(head, Full) else head.cells
            np.testing.assert_allclose(found, expected[layer.site][i].numpy(), atol=1e-6)
        mean = expected[layer.site].mean(0).numpy()
        np.testing.assert_allclose(layer.mean.cells, mean, atol=1e-6)


def test_many_heads_share_the_room_for_thumbnails(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "WHOLE", 100)
    monkeypatch.setattr(module, "EVERY", 100)
    monkeypatch.setattr(module, "THUMBS", 6 * 32 * 32)
    model, text = loud(regard.build("gpt2", vocab=50, max_len=200, **SMALL)), given(128)
    (view,) = trace(model, text, 0, 0)
    a = weights(model, text)["0.self"][1].numpy()
    head = view.layers[0].heads[1]
    assert isinstance(head, Pooled) and view.step == (4, 4) and head.cells.shape == (32, 32)
    np.testing.assert_allclose(head.cells[20, 9], a[80:84, 36:40].max(), atol=1e-6)
    np.testing.assert_allclose(head.first[20], a[80:84, 1:4].max(), atol=1e-6)


# --- the page -----------------------------------------------------------------------------------------------------


def made(text: str = "x", tokens: list[str] | None = None) -> str:
    model = regard.build("gpt2", vocab=50, max_len=40, **SMALL).eval()
    ids = torch.randint(50, (1, 4))
    views = trace(model, Given(ids, tokens or words(4)))
    return page(text, [Panel("a model", "told", views)])


def inside(text: str, tag: str) -> str:
    found = re.search(rf"<{tag}>(.*?)</{tag.split()[0]}>", text, re.DOTALL)
    assert found
    return found[1]


def test_page_allows_its_own_script_and_style_and_nothing_else() -> None:
    text = made()
    policy = re.search(r'Security-Policy" content="([^"]*)"', text)
    assert policy and policy[1].startswith("default-src 'none'")
    for tag in ('script type="module"', "style"):
        digest = hashlib.sha256(inside(text, tag).encode()).digest()
        assert f"'sha256-{base64.b64encode(digest).decode()}'" in policy[1]
    assert "unsafe" not in policy[1] and "http" not in text.replace("http-equiv", "")


def test_page_takes_tokens_and_titles_as_text() -> None:
    bad = "</script><script>alert(1)</script>"
    text = made(bad, [bad, "{data}", "\u202eodd", "\x00"])
    assert text.count("<script") == 2 and text.count("</script>") == 2
    rows = json.loads(inside(text, 'script type="application/json" id="data"'))["models"][0]
    assert rows["views"][0]["rows"] == [bad, "{data}", "\ufffdodd", "␀"]


def test_page_numbers_are_the_traces() -> None:
    model, text = loud(regard.build("gpt2", vocab=50, max_len=40, **SMALL)), given(5)
    (view,) = trace(model, text)
    html = page("x", [Panel("m", "", [view], layer=0, head=1)])
    data = json.loads(inside(html, 'script type="application/json" id="data"'))["models"][0]
    place = telling(view, 0, 1)
    assert data["start"] == 0 and place[:2] == (0, 1)
    assert data["views"][0]["start"] == dict(zip(("layer", "head", "row", "column"), place))
    for i, head in enumerate(heads(view)):
        found = data["views"][0]["layers"][i // 3]["heads"][i % 3]
        for name in ("weight", "score", "raw", "norm"):
            array = np.frombuffer(base64.b64decode(found[name]), "<f4")
            np.testing.assert_array_equal(array, getattr(head, name).ravel())


# --- where a page opens -------------------------------------------------------------------------------------------


def uniform(size: int) -> np.ndarray:
    """A causal head that reads every token alike."""
    seen = np.tril(np.ones((size, size), np.float32))
    return seen / seen.sum(-1, keepdims=True)


def planted(at: tuple[int, int], weight: float = 0.9, size: int = 16) -> np.ndarray:
    """The same, but that a row reads one token with this weight."""
    cells = uniform(size)
    cells[at[0]] *= (1 - weight) / (1 - cells[at])
    cells[at] = weight
    return cells


def seen_as(heads: list[np.ndarray], names: list[str] | None = None, kind: str = "self") -> View:
    full = [module.Full(a, a, a[0]) for a in heads]
    layers = [module.Layer(3, "3.self", full[:2]), module.Layer(5, "5.self", full[2:])]
    rows, columns = (names or words(n) for n in heads[0].shape)
    return View(kind, rows, columns, layers)


def test_a_page_opens_on_the_weight_that_stands_out() -> None:
    plain, sink = uniform(16), uniform(16)
    # Every row reads the same token: that tells nothing of a row.
    for row in range(6, 16):
        sink[row] = planted((row, 5), 0.95)[row]
    view = seen_as([plain, sink, planted((9, 2)), planted((12, 3), 0.7)])
    assert telling(view) == (1, 0, 9, 2)
    assert telling(view, head=1) == (1, 1, 12, 3)
    assert telling(view, layer=3)[0] == 0
    # Not the token itself or its neighbour, not the first one, not what is no word.
    tokens = [*words(16)[:2], "</s>", *words(16)[3:12], ".", *words(16)[13:]]
    dull = ((9, 8), (9, 0), (9, 2), (12, 3))
    for place in dull:
        view = seen_as([plain, plain, planted(place, 0.99), planted((11, 4), 0.4)], tokens)
        assert telling(view) == (1, 1, 11, 4), place
    # Cross-attention has no neighbours; where all is dull, the largest is left.
    view = seen_as([plain, planted((9, 8)), plain, plain], words(16), "cross")
    assert telling(view) == (0, 1, 9, 8)
    assert telling(seen_as([np.ones((1, 1), np.float32)] * 3)) == (0, 0, 0, 0)


def test_a_pooled_page_opens_on_the_same_head_as_it_has_in_full(monkeypatch: Any) -> None:
    for name, value in (("WHOLE", 50), ("EVERY", 50), ("SIDE", 8)):
        monkeypatch.setattr(module, name, value)
    model = loud(regard.build("gpt2", vocab=50, max_len=40, **SMALL))
    (view,) = trace(model, given(32))
    layer, head, row, column = telling(view)
    assert isinstance(view.layers[layer].heads[head], module.Full) and view.step == (4, 4)
    others = [h for each in view.layers for h in each.heads if isinstance(h, Pooled)]
    assert others and row < 32 and column < row


def test_a_picture_opens_on_what_its_class_token_reads() -> None:
    model = loud(regard.build("vit-base", size=16, patch=8, labels=3, **SMALL))
    pixels = np.zeros((16, 16, 3), np.uint8)
    image = Given(torch.randn(1, 3, 16, 16), words(5), picture=Picture(pixels, 8, 1))
    (view,) = trace(model, image)
    *_, row, column = telling(view)
    assert row == 0 and column > 0


def test_a_caption_opens_on_a_word() -> None:
    """Not on the space that reads one patch the most."""
    cells = np.array([[0.1, 0.9, 0.0], [0.4, 0.3, 0.3], [0.3, 0.1, 0.6]], np.float32)
    head = Pooled(cells, cells[:, 0])
    picture = Picture(np.zeros((16, 16, 3), np.uint8), 8, 1)
    layer = module.Layer(0, "decoder.0.cross", [head])
    view = View("cross", ["␣", "a", "cat"], ["class", "1,1", "1,2"], [layer], picture=picture)
    assert telling(view) == (0, 0, 2, 2)


def test_page_of_a_long_text_is_bounded() -> None:
    cells = np.random.default_rng(0).random((64, 64)).astype(np.float32)
    small = Pooled(cells, cells[:, 0])
    layers = [module.Layer(i, f"{i}.self", [small] * 12, small) for i in range(12)]
    view = View("self", words(1024), words(1024), layers, (16, 16))
    text = page("x", [Panel("m", "", [view])])
    assert len(text) < 2_000_000 and "max-pooled" in text and "16 × 16" in json_text(text)


def test_packed_weights_keep_four_digits_and_mark_what_is_masked() -> None:
    cells = np.random.default_rng(0).dirichlet(np.full(50, 0.1), 40).astype(np.float32)
    cells = np.where(np.triu(np.ones_like(cells), 1) > 0, 0, cells)
    small = Pooled(cells, cells[:, 0])
    view = View("self", words(40), words(50), [module.Layer(0, "0.self", [small], small)])
    data = json.loads(
        inside(page("x", [Panel("m", "", [view])]), 'script type="application/json" id="data"')
    )
    head = data["models"][0]["views"][0]["layers"][0]["heads"][0]
    levels = np.frombuffer(base64.b64decode(head["cells"]), "<u2").reshape(40, 50)
    np.testing.assert_allclose((levels / 65535.0) ** 2 * head["most"], cells, atol=2e-5)
    assert ((levels == 0) == (cells == 0)).all()


def json_text(text: str) -> str:
    return json.loads(inside(text, 'script type="application/json" id="data"'))["models"][0][
        "views"
    ][0]["note"]


def test_every_module_is_joined_after_those_it_imports() -> None:
    assert {path.stem for path in WEB.glob("*.js")} == set(MODULES)
    known: list[str] = []
    for name in MODULES:
        source = (WEB / f"{name}.js").read_text(encoding="utf-8")
        assert len(source.splitlines()) <= 300, name
        wanted = re.findall(r'^import \{.*\} from "\./(\w+)\.js";$', source, re.MULTILINE)
        assert len(wanted) == source.count("\nimport ") and set(wanted) <= set(known), name
        known.append(name)
    names = re.findall(r"^(?:const|class|function|async function) (\w+)", joined(), re.MULTILINE)
    assert len(names) == len(set(names)), "two modules declare the same name"
    assert not re.search(r"^(import|export) ", joined(), re.MULTILINE)


def test_picture_of_patches_is_in_the_page() -> None:
    model = regard.build("vit-base", size=16, patch=8, labels=3, **SMALL).eval()
    pixels = np.arange(16 * 16 * 3, dtype=np.uint8).reshape(16, 16, 3)
    image = Given(torch.randn(1, 3, 16, 16), words(5), picture=Picture(pixels, 8, 1))
    (view,) = trace(model, image)
    html = page("x", [Panel("m", "", [view])])
    data = json.loads(inside(html, 'script type="application/json" id="data"'))["models"][0][
        "views"
    ][0]["image"]
    assert (data["size"], data["patch"], data["extra"]) == (16, 8, 1)
    assert base64.b64decode(data["pixels"]) == pixels.tobytes()


# --- states -------------------------------------------------------------------------------------------------------


def test_states_have_no_map_and_attention_beside_them_has() -> None:
    """In one sentence, not a fault: a state weighs no tokens."""
    with pytest.raises(UsageError, match="this model has no attention to look at"):
        trace(decoder("delta"), given(7, VOCAB))
    hybrid = decoder("delta_gqa")
    (view,) = trace(hybrid, given(7, VOCAB))
    assert [layer.number for layer in view.layers] == [1]
    with pytest.raises(UsageError, match="there is no layer 0"):
        trace(hybrid, given(7, VOCAB), layer=0)


# --- chosen parts, exactly ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "chosen",
    [{}, {"rows": [3]}, {"layers": [1], "heads": [2]}, {"heads": [0, 2], "rows": [1, 4]}],
    ids=str,
)
@pytest.mark.parametrize("preset", ["gpt2", "t5-small"])
def test_chosen_parts_are_those_of_the_whole(preset: str, chosen: dict[str, list[int]]) -> None:
    model = loud(regard.build(preset, vocab=50, **SMALL))
    inputs = given(6) if preset == "gpt2" else pair(7, 6)
    whole = {view.name: view for view in trace(model, inputs)}
    for view in maps(model, inputs, 4, **chosen):
        full = whole[view["name"]]
        assert view["rows"] == [full.rows[i] for i in view["row_numbers"]]
        assert view["answer_row"] == {"self": 3, "cross": 0, "decoder": 0}.get(view["name"])
        layers = {layer.number: layer for layer in full.layers}
        assert [x["number"] for x in view["layers"]] == chosen.get("layers", sorted(layers))
        for layer in view["layers"]:
            assert layer["head_numbers"] == chosen.get("heads", [0, 1, 2])
            for number, head in zip(layer["head_numbers"], layer["heads"], strict=True):
                want = layers[layer["number"]].heads[number]
                for kind in ("weight", "score"):
                    found = np.frombuffer(base64.b64decode(head[kind]), "<f4")
                    part = getattr(want, kind)[view["row_numbers"]]
                    np.testing.assert_allclose(found.reshape(part.shape), part, atol=1e-5)


@pytest.mark.parametrize(
    "chosen,message",
    [
        ({"rows": [99]}, "no rows"),
        ({"layers": [9]}, "no layer 9|no rows"),
        ({"heads": [7]}, "no head 7"),
        ({"most": 10}, "fewer layers"),
    ],
    ids=str,
)
def test_parts_that_are_not_there_are_named(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        exact(regard.build("gpt2", vocab=50, **SMALL), given(6), **chosen)
