"""What fine-tuning changes in a model, without a run: more labels, names for them, images of another size, what LoRA
starts as, and dropout that is taken out."""

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import regard
from regard.attention import GQA
from regard.block import Tower
from regard.errors import UsageError
from regard.layers import LM, MLP, Classify, Tag
from regard.models import Tokens, TransformerConfig
from regard.models.adapt import (
    LoRA,
    LowRank,
    class_names,
    inject,
    labels,
    low_ranks,
    with_head,
    with_image_size,
    with_labels,
    without_dropout,
)
from regard.models.init import Start
from regard.models.recurrent import RecurrentConfig

TEXT: dict[str, Any] = dict(dim=32, layers=1, heads=2, ffn_dim=16, vocab=50, max_len=40)
IMAGES: dict[str, Any] = dict(dim=16, layers=1, heads=2, ffn_dim=24, size=16, patch=4, channels=1)
HEADS = [
    Classify(3),
    Classify(3, None, "last", bias=False),
    Classify(3, None, distilled=True),
    Tag(3),
]


# --- labels -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head", HEADS, ids=["dense", "last", "distilled", "tag"])
def test_more_labels_leave_those_that_were_there(head: Classify | Tag, dtype: torch.dtype) -> None:
    """The same logits and weights for them; rows of the family's deviation, and no bias, for the new ones."""
    model: Any = with_head(regard.build("bert-base", **TEXT), head).to(dtype).eval()
    model.origin = SimpleNamespace(start=Start("normal", 0.5))
    ids = torch.randint(50, (2, 6))
    before, old = model(ids), {n: p.clone() for n, p in model.head.named_parameters()}
    config = replace(model.config.head, labels=400)
    assert with_labels(model, 400) is model
    assert model.config.head == model.head.config == config
    torch.testing.assert_close(model(ids)[..., :3], before)
    assert model(ids).shape[-1] == 400
    found = dict(model.head.named_parameters())
    assert found.keys() == old.keys()
    for name, p in found.items():
        assert p.dtype == dtype and torch.equal(p[: len(old[name])], old[name])
        if name in ("out.weight", "teacher.weight"):
            assert p.shape == (400, 32)
            assert float(p[3:].detach().float().std()) == pytest.approx(0.5, rel=0.05)
        elif name in ("out.bias", "teacher.bias"):
            assert p.shape == (400,) and not p[3:].any()


def test_new_labels_of_no_family_start_as_its_body_does() -> None:
    model: Any = with_head(regard.build("gpt2", **TEXT), Classify(3))
    model.origin = None
    with_labels(model, 400)
    assert float(model.head.out.weight[3:].detach().std()) == pytest.approx(0.02, rel=0.05)


def test_class_names_are_those_of_the_folder_or_numbers() -> None:
    model: Any = with_head(regard.build("bert-base", **TEXT), Classify(11))
    names = [f"name {i}" for i in range(11)]
    for said, want in (
        (labels(names), names), ({}, [str(i) for i in range(11)]),
        (labels(names[:10]), [str(i) for i in range(11)]),
        (labels(f"LABEL_{i}" for i in range(11)), [str(i) for i in range(11)]),
        (labels(["LABEL_1", "LABEL_0", *names[2:]]), ["LABEL_1", "LABEL_0", *names[2:]]),
    ):  # fmt: skip
        model.origin = SimpleNamespace(config=said)
        assert class_names(model) == want
    model.origin = None
    assert class_names(model) == [str(i) for i in range(11)]


# --- images -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [8, 12, 16, 28])
@pytest.mark.parametrize("extra", [1, 2])
def test_positions_of_another_size_are_those_of_transformers(size: int, extra: int) -> None:
    vit = pytest.importorskip("transformers.models.vit.modeling_vit")
    model: Any = regard.build("vit-small", **IMAGES, **{"embedding.extra": extra})
    model.embedding.position.data.normal_()
    old = model.embedding.position.detach().clone()
    config = dict(hidden_size=16, image_size=16, patch_size=4, num_channels=1)
    peer = vit.ViTEmbeddings(vit.ViTConfig(**config))
    peer.position_embeddings.data = old[None, extra - 1 :]
    want = peer.interpolate_pos_encoding(torch.zeros(1, 1 + (size // 4) ** 2, 16), size, size)[0]
    assert with_image_size(model, size) is model
    found = model.embedding.position
    assert isinstance(found, torch.nn.Parameter)
    assert torch.equal(found[:extra], old[:extra])
    torch.testing.assert_close(found[extra:].detach(), want[1:].detach())
    assert model.config.embedding.size == model.embedding.config.size == size
    assert model(torch.randn(2, 1, size, size)).isfinite().all()


def test_another_size_is_said_in_the_file_for_images_and_in_no_other() -> None:
    name = "preprocessor_config.json"
    for files, want in (
        ({name: b'{"size": 16, "image_mean": [0.2]}', "a": b"b"}, (b'"height": 8', b'"width": 8', b"0.2")),
        ({"a": b"b"}, ()),
    ):  # fmt: skip
        model: Any = regard.build("vit-small", **IMAGES)
        model.origin = SimpleNamespace(files=dict(files))
        with_image_size(model, 8)
        assert model.origin.files.keys() == files.keys() and model.origin.files["a"] == b"b"
        assert all(part in model.origin.files[name] for part in want)


def test_narrow_positions_are_resized_in_float32_and_stay_narrow() -> None:
    model: Any = regard.build("vit-small", **IMAGES).bfloat16()
    model.embedding.position.data.normal_()
    exact: Any = regard.build("vit-small", **IMAGES)
    exact.embedding.position.data = model.embedding.position.data.float()
    for one in (model, exact):
        with_image_size(one, 12)
    found = model.embedding.position.detach()
    assert torch.equal(found, exact.embedding.position.detach().bfloat16())


def test_size_of_images_is_refused_by_what_reads_none() -> None:
    with pytest.raises(UsageError, match="this model reads no images: leave their size out"):
        with_image_size(regard.build("gpt2", **TEXT), 8)


# --- LoRA and dropout ---------------------------------------------------------------------------------------------


def test_lora_starts_within_one_over_the_root_of_the_inputs() -> None:
    low = LowRank(torch.nn.Linear(400, 7), LoRA(64, 4.0))
    assert 0.0499 < float(low.a.detach().max()) <= 0.05
    assert -0.0499 > float(low.a.detach().min()) >= -0.05
    assert low.a.shape == (64, 400) and low.b.shape == (7, 64) and not low.b.any()
    for rslora, scale in ((False, 4 / 64), (True, 4 / 8)):
        assert LoRA(64, 4.0, rslora=rslora).scale == scale


def test_dropout_of_the_body_is_taken_out_and_that_of_lora_stays() -> None:
    """The configs of its parts say so; that of the model, which is saved, does not."""
    tower = Tower(8, 2, GQA(2, dropout=0.3), MLP(8, dropout=0.2), dropout=0.1)
    model = TransformerConfig(Tokens(9, dropout=0.4), tower, LM()).make().train()
    plain, ids = copy.deepcopy(model).eval(), torch.randint(9, (2, 5))
    inject(model, ["tower.blocks.0.attention.wq"], LoRA(2, dropout=0.5))
    assert without_dropout(model) and not without_dropout(model)
    (low,) = low_ranks(model).values()
    assert low.dropout.p == low.config.dropout == 0.5
    rest = [m for m in model.modules() if isinstance(m, torch.nn.Dropout) and m is not low.dropout]
    assert rest and not any(m.p for m in rest)
    assert model.config == plain.config
    torch.testing.assert_close(model(ids), plain(ids))  # in training; B is 0


@pytest.mark.parametrize("part", ["embedding", "attention", "ffn", "tower"])
def test_dropout_anywhere_is_found(part: str) -> None:
    given = {part: 0.3}
    attention, ffn = GQA(2, dropout=given.get("attention", 0.0)), MLP(8, dropout=given.get("ffn"))
    tower = Tower(8, 1, attention, ffn, dropout=given.get("tower", 0.0))
    tokens = Tokens(9, dropout=given.get("embedding", 0.0))
    assert without_dropout(TransformerConfig(tokens, tower, LM()).make())
    assert not without_dropout(TransformerConfig(Tokens(9), Tower(8, 1, GQA(2), MLP(8))).make())


def test_dropout_of_a_model_of_cells_is_found() -> None:
    """Its config is the model's own: what it does is said by its layers alone."""
    model = RecurrentConfig(9, 8, dropout=0.3).make()
    assert without_dropout(model) and not without_dropout(model)
    assert model.dropout.p == 0 and model.config.dropout == 0.3


@pytest.mark.parametrize("cell", ["elman", "gru", "lstm"])
def test_dropout_between_cells_is_taken_out(cell: str) -> None:
    model = RecurrentConfig(9, 8, layers=2, cell=cell, dropout=0.5).make().train()
    ids = torch.arange(8)[None]
    assert not torch.equal(model(ids), model(ids))
    assert without_dropout(model)
    assert torch.equal(model(ids), model(ids))
