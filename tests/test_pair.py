"""Models of images, of images beside texts, and of sound, in their fast forms and in `regard embed`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard.cli.main import main
from regard.data.pictures import Pictures
from regard.decode.engine import Engine
from regard.decode.settings import Request, Settings
from regard.errors import UsageError
from regard.fast.train import joined
from regard.models import Pair, Pool, TransformerConfig
from tests.checkpoint.families import CASES, at_tokens, batch

NAMES = [
    "dinov2",
    "dinov2-gated",
    "clip-vision-projected",
    "siglip-vision",
    "siglip",
    "clip",
    "whisper",
]


@pytest.mark.parametrize("precision, close", [("fp32", 1e-4), ("int8", 0.3)])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_prepared_model_gives_what_the_plain_one_gives(
    name: str, precision: str, close: float
) -> None:
    module = CASES[name].make()
    model, given = regard.from_hf(module), batch(module.config)
    want = model(**given)
    fast = regard.prepare(model, precision)
    off = at_tokens(fast(**given) - want, given)
    error = off.abs().max() / want.abs().max()
    assert error < close, fast.explain()


@torch.no_grad()
def test_pooled_vector_of_a_prepared_model_is_the_plain_one() -> None:
    module = CASES["siglip-vision"].make()
    model, images = regard.from_hf(module), batch(module.config)["ids"]
    torch.testing.assert_close(
        regard.prepare(model, "fp32").pool(images), model.pool(images), rtol=1e-4, atol=1e-4
    )


def test_keys_without_a_bias_train_alike_in_one_product() -> None:
    module = CASES["whisper"].make()
    grads = []
    for change in (lambda model: model, joined):
        model = change(regard.from_hf(module).train())
        model(**batch(module.config)).square().sum().backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-3)


def answers(model: Any, runner: str, source: torch.Tensor) -> list[list[int]]:
    engine = Engine(model, layout="paged", page=4, pages=64, runner=runner)
    for i, each in enumerate(source):
        engine.submit(
            Request([3, 5, 6][: i + 1], Settings.of({"max_new_tokens": 7, "eos": ()}), each)
        )
    found = {e.request: e.done[0].ids for e in engine.run() if e.done is not None}
    return [found[i] for i in range(len(source))]


@torch.no_grad()
def test_sound_is_answered_alike_by_every_runner() -> None:
    module = CASES["whisper-untied"].make()
    model, source = regard.from_hf(module), batch(module.config)["source"]
    want = answers(model, "torch", source)
    assert answers(model, "graph", source) == want
    assert answers(regard.prepare(model, "fp32"), "torch", source) == want
    steady = [r.ids for r in regard.generate(model, source, invariant=True, max_new_tokens=7)]
    alone = [regard.generate(model, x, invariant=True, max_new_tokens=7)[0].ids for x in source]
    assert steady == alone


def test_part_that_few_rows_pass_adds_nothing_to_the_others() -> None:
    model = regard.from_hf(CASES["dinov2"].make())
    thin = regard.build(model.config, path_drop=0.999999).train()
    x = torch.randn(2, 3, 12, 12)
    with torch.no_grad():
        torch.testing.assert_close(thin(x), thin.tower.norm(thin.embedding(x)))


def test_vector_of_a_text_is_made_of_all_of_it_at_once() -> None:
    """In pieces, as a cache is fed, each piece would be pooled by itself."""
    model = regard.from_hf(CASES["clip-text-older"].make())
    assert not model.decodes
    with pytest.raises(UsageError, match="does not decode step by step"):
        model.cache(1)
    cache = regard.build("gpt2", layers=1, dim=8, heads=2, vocab=9).cache(1)
    with pytest.raises(UsageError, match="gives one vector for a whole text"):
        model(torch.ones(1, 3, dtype=torch.long), cache=cache)


def test_configs_that_do_not_fit_are_told() -> None:
    clip: Any = regard.from_hf(CASES["clip"].make()).config
    with pytest.raises(UsageError, match="texts? that reads tokens"):
        type(clip)(clip.image, clip.image)
    with pytest.raises(UsageError, match="give a pooler too"):
        TransformerConfig(clip.text.embedding, clip.text.tower, clip.text.head)
    with pytest.raises(UsageError, match="give both or neither"):
        Pool("end")


# --- vectors of texts and of pictures -----------------------------------------------------------------------------


@torch.no_grad()
def test_vectors_have_length_one_and_are_those_of_transformers() -> None:
    module = CASES["clip"].make()
    model: Any = regard.from_hf(module)
    given = batch(module.config)
    assert isinstance(model, Pair)
    mask = (torch.arange(11)[None] < given["lengths"][:, None]).long()
    out = module(input_ids=given["ids"], attention_mask=mask, pixel_values=given["images"])
    torch.testing.assert_close(
        model.texts(given["ids"], given["lengths"]), out.text_embeds, atol=1e-5, rtol=0
    )
    torch.testing.assert_close(model.images(given["images"]), out.image_embeds, atol=1e-5, rtol=0)


@torch.no_grad()
def test_texts_of_siglip_are_filled_up_as_it_was_trained() -> None:
    module = CASES["siglip-text"].make()
    model: Any = regard.from_hf(module)
    ids, lengths = torch.randint(3, 43, (2, 6)), torch.tensor([6, 4])
    full = torch.full((2, 11), module.config.pad_token_id)
    for i, n in enumerate(lengths):
        full[i, :n] = ids[i, :n]
    want = module(input_ids=full).pooler_output
    torch.testing.assert_close(model.pool(ids, lengths), want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["dinov2", "clip", "siglip-vision"])
def test_embed_gives_vectors_of_pictures(name: str, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("PIL.Image")
    module = CASES[name].make()
    module.save_pretrained(tmp_path / "model")
    model: Any = regard.load(tmp_path / "model")
    patches = (model.image if name == "clip" else model).config.embedding
    shape = (2, patches.size, patches.size, patches.channels)
    x = np.random.default_rng(0).integers(0, 255, shape, dtype=np.uint8)
    np.save(tmp_path / "x.npy", x)
    assert main(["embed", str(tmp_path / "model"), str(tmp_path / "x.npy")]) == 0
    rows = [json.loads(line)["embedding"] for line in capsys.readouterr().out.splitlines()]
    given = torch.from_numpy(x).permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.no_grad():
        want = model.images(given) if name == "clip" else model.pool(given)
    torch.testing.assert_close(torch.tensor(rows), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("sides", [(30, 20), (17, 40), (12, 12)])
@pytest.mark.parametrize("short, crop", [(12, 12), (15, 12), (30, 24)])
def test_picture_is_cut_out_as_transformers_does(
    sides: tuple[int, int], short: int, crop: int, tmp_path: Path
) -> None:
    image, transformers = pytest.importorskip("PIL.Image"), pytest.importorskip("transformers")
    pixels = np.random.default_rng(1).integers(0, 255, (*sides, 3), dtype=np.uint8)
    image.fromarray(pixels).save(tmp_path / "a.png")
    # Where the model reads half as much, all is half as large.
    edge = short * 12 // crop
    said = dict(size={"shortest_edge": edge}, crop_size={"height": 12, "width": 12}, resample=3)
    theirs = transformers.CLIPImageProcessorPil(**said)
    want = theirs(image.open(tmp_path / "a.png"), return_tensors="pt").pixel_values[0]
    stored = dict(size={"shortest_edge": short}, crop_size=crop, do_center_crop=True, resample=3)
    stored |= {"image_mean": theirs.image_mean, "image_std": theirs.image_std}
    model: Any = regard.from_hf(CASES["clip-vision"].make())
    model.origin.files["preprocessor_config.json"] = json.dumps(stored).encode()
    ours = Pictures(model.config.embedding, model.origin).file(tmp_path / "a.png")
    torch.testing.assert_close(ours, want, atol=1e-4, rtol=0)


def test_middle_is_cut_out_at_another_size_too(tmp_path: Path) -> None:
    CASES["clip-vision"].make().save_pretrained(tmp_path)
    said = {"do_center_crop": True, "size": {"shortest_edge": 15}, "crop_size": 12}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said))
    model = regard.load(tmp_path, image_size=24)
    found = json.loads(model.origin.files["preprocessor_config.json"])
    assert found["size"] == {"shortest_edge": 30} and found["crop_size"]["width"] == 24
