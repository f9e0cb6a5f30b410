"""Adapters: small folders that name what they stand on, and models that have them merged in."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import regard
from regard.checkpoint import load_adapter, save_adapter
from regard.checkpoint.adapter import PEFT, RECORD, TENSORS
from regard.cli.main import main
from regard.errors import UsageError
from regard.layers import LM, Classify, Tag
from regard.models.adapt import classes_of, labels, low_ranks, merge, with_head
from regard.training.config import Adapt, adapted

TEXT: dict[str, Any] = dict(dim=24, layers=2, heads=3, ffn_dim=20, vocab=50, max_len=40)
PRESETS: dict[str, dict[str, Any]] = {
    "gpt2": TEXT,
    "llama": dict(TEXT, kv_heads=1),
    "bert-base": TEXT,
    "vit-small": dict(dim=24, layers=2, heads=3, ffn_dim=20, size=12, patch=4),
    "t5-small": dict(dim=24, layers=2, heads=3, ffn_dim=20, vocab=50),
}
WORDS = {"tokenizer.json": b"{}"}
THEIRS = "base_model.model."


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return made("gpt2", tmp_path / "base")


def made(preset: str, folder: Path, dtype: torch.dtype | None = None) -> Path:
    model = regard.build(preset, dtype=dtype, **PRESETS[preset]).save(folder)
    for name, content in WORDS.items():
        (folder / name).write_bytes(content)
    return model


def tuned(folder: Path, head: Any = None, classes: tuple[str, ...] = (), **settings: Any) -> Any:
    """As after training: matrices and head that are not what they began with."""
    model: Any = regard.load(folder, dtype="stored")
    model = model if head is None else with_head(model, head)
    model.origin.config |= {"pad_token_id": 0, **labels(classes)}
    adapted(model, Adapt("lora", **settings))
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p) * 0.2)
    return model.eval()


def ragged() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randint(1, 50, (3, 7), generator=g), torch.tensor([7, 2, 5])


def same(one: Any, two: Any) -> bool:
    a, b = one.state_dict(), two.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(UsageError) as caught:
        regard.load(folder)
    text = str(caught.value)
    assert [w for w in words if w not in text] == [], text


# --- out and in ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", [None, Classify(3), Tag(3)], ids=["own", "classify", "tag"])
@pytest.mark.parametrize("preset", PRESETS)
def test_adapter_loads_as_the_merged_model(preset: str, head: Any, tmp_path: Path) -> None:
    model = tuned(made(preset, tmp_path / "base"), head)
    again = regard.load(save_adapter(model, tmp_path / "small"))
    assert again.config == model.config and not again.training and not low_ranks(again)
    assert same(again, merge(model))


def test_adapter_folder_is_small_and_whole(base: Path, tmp_path: Path) -> None:
    folder = save_adapter(tuned(base, Classify(3), rank=2), tmp_path / "small")
    assert sorted(p.name for p in folder.iterdir()) == [RECORD, PEFT, TENSORS, "tokenizer.json"]
    names = load_file(folder / TENSORS).keys()
    lora = {f"{THEIRS}transformer.h.{i}.attn.c_attn.lora_{x}.weight" for i in (0, 1) for x in "AB"}
    assert names == lora | {f"{THEIRS}score.weight"}
    whole, small = (p.stat().st_size for p in (base / "model.safetensors", folder / TENSORS))
    assert small < whole / 8


def test_frozen_body_keeps_the_head_alone(base: Path, tmp_path: Path) -> None:
    model: Any = adapted(with_head(regard.load(base), Classify(3)), Adapt("frozen"))
    folder = save_adapter(model, tmp_path / "small")
    assert load_file(folder / TENSORS).keys() == {f"{THEIRS}score.weight"}
    assert same(regard.load(folder), model)


def test_resumed_model_has_the_state_of_the_saved_one(base: Path, tmp_path: Path) -> None:
    model = tuned(base, Classify(3), dropout=0.1)
    folder = save_adapter(model, tmp_path / "small")
    again = adapted(with_head(regard.load(base), Classify(3)), Adapt("lora", dropout=0.1))
    assert not same(again, model)
    assert load_adapter(folder, into=again) is again and same(again, model)


def test_resuming_with_other_settings_or_on_another_base_is_refused(
    base: Path, tmp_path: Path
) -> None:
    folder = save_adapter(tuned(base, Classify(3)), tmp_path / "small")
    for other in (tuned(base, Classify(3), rank=4), tuned(base, Classify(2))):
        with pytest.raises(UsageError, match="go on with the same settings"):
            load_adapter(folder, into=other)
    with pytest.raises(UsageError, match=r"wk\.a is missing from adapter_model"):
        load_adapter(folder, into=tuned(base, Classify(3), targets=("wq", "wk", "wv")))
    torch.manual_seed(9)
    with pytest.raises(UsageError, match="as it was then; go on with that model"):
        load_adapter(folder, into=tuned(made("gpt2", tmp_path / "other"), Classify(3)))


def test_classes_and_token_ids_go_with_the_adapter(base: Path, tmp_path: Path) -> None:
    model = tuned(base, Classify(3), ("bad", "so so", "good"))
    again = regard.load(save_adapter(model, tmp_path / "small"))
    assert classes_of(again) == ["bad", "so so", "good"]
    assert again.origin.config["pad_token_id"] == 0 and again.origin.files == WORDS
    merged = regard.load(again.save(tmp_path / "merged"))
    assert classes_of(merged) == ["bad", "so so", "good"] and merged.origin.files == WORDS


def test_adapter_may_stand_on_an_adapter(base: Path, tmp_path: Path) -> None:
    first = save_adapter(tuned(base), tmp_path / "first")
    second = tuned(first, Classify(3))
    assert same(regard.load(save_adapter(second, tmp_path / "second")), merge(second))


def test_half_precision_body_keeps_full_matrices(tmp_path: Path) -> None:
    model = tuned(made("gpt2", tmp_path / "base", torch.bfloat16), Classify(3))
    folder = save_adapter(model, tmp_path / "small")
    again = regard.load(folder, dtype="stored")
    assert next(again.parameters()).dtype == torch.bfloat16 and same(again, merge(model))
    merged = again.save(tmp_path / "merged")
    wide = [regard.load(f, dtype=torch.float32) for f in (folder, merged)]
    assert next(wide[0].parameters()).dtype == torch.float32 and same(*wide)


def test_body_trained_wider_than_it_is_stored_is_merged_wide(tmp_path: Path) -> None:
    folder = made("gpt2", tmp_path / "base", torch.bfloat16)
    model = adapted(regard.load(folder, dtype=torch.float32), Adapt("lora"))
    for low in low_ranks(model).values():
        low.b.data.normal_()
    again = regard.load(save_adapter(model, tmp_path / "small"))
    assert next(again.parameters()).dtype == torch.float32 and same(again, merge(model))


# --- merged folders -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["gpt2", "llama", "bert-base"])
def test_merged_folder_gives_the_same_logits_to_the_bit(preset: str, tmp_path: Path) -> None:
    model, x = tuned(made(preset, tmp_path / "base"), Classify(3)), ragged()
    adapted_logits = model(*x)
    merge(model)
    again: Any = regard.load(model.save(tmp_path / "merged"))
    assert torch.equal(again(*x), model(*x))
    torch.testing.assert_close(model(*x), adapted_logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "preset, head, name",
    [
        ("gpt2", None, "GPT2LMHeadModel"),
        ("gpt2", Classify(3), "GPT2ForSequenceClassification"),
        ("gpt2", Tag(3), "GPT2ForTokenClassification"),
        ("llama", Classify(3), "LlamaForSequenceClassification"),
        ("llama", Tag(3), "LlamaForTokenClassification"),
        ("bert-base", Classify(3), "BertForSequenceClassification"),
    ],
)
def test_transformers_reads_the_merged_folder(
    preset: str, head: Any, name: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers", reason="the peer; it is in the dev extra")
    transformers.logging.set_verbosity_error()
    small = save_adapter(
        tuned(made(preset, tmp_path / "base"), head, ("x", "y", "z")), tmp_path / "a"
    )
    assert main(["merge", str(small), str(tmp_path / "merged")]) == 0
    said = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert said["architectures"] == [name]
    theirs, info = getattr(transformers, name).from_pretrained(
        tmp_path / "merged", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids, lengths = ragged()
    real = torch.arange(7)[None] < lengths[:, None]
    ids = torch.where(real, ids, 0)  # the padding id, by which transformers finds the last token
    with torch.no_grad():
        want = theirs.eval()(ids, attention_mask=real.long()).logits
        got = regard.load(tmp_path / "merged")(ids, lengths)
    kept = real if got.dim() == 3 else slice(None)
    torch.testing.assert_close(got[kept], want[kept], rtol=1e-4, atol=1e-5)
    if head is not None:
        assert theirs.config.id2label == {0: "x", 1: "y", 2: "z"}


def test_transformers_classifier_loads_with_the_same_logits(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the peer; it is in the dev extra")
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=24, n_layer=2, n_head=3, n_positions=40, num_labels=4, pad_token_id=0
    )
    theirs = transformers.GPT2ForSequenceClassification(config).eval()
    theirs.save_pretrained(tmp_path)
    ids, lengths = ragged()
    ids = torch.where(torch.arange(7)[None] < lengths[:, None], ids, 0)
    model: Any = regard.load(tmp_path)
    assert model.config.head == Classify(4, None, "last", False)
    with torch.no_grad():
        torch.testing.assert_close(model(ids, lengths), theirs(ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("preset", ["gpt2", "vit-small", "t5-small"])
def test_classes_survive_saving_in_every_format(preset: str, tmp_path: Path) -> None:
    """Of T5 with a classifier there is no class of Hugging Face: its folder says regard."""
    model: Any = with_head(regard.load(made(preset, tmp_path / "base")), Classify(2))
    model.origin.config |= labels(["no", "yes"])
    folder = model.save(tmp_path / "out")
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    assert kind == ("regard" if preset == "t5-small" else preset.split("-")[0])
    again = regard.load(folder)
    assert classes_of(again) == ["no", "yes"] and same(again, model)
    assert classes_of(regard.load(again.save(tmp_path / "twice"))) == ["no", "yes"]


def test_new_head_drops_the_names_of_the_old_labels(tmp_path: Path) -> None:
    first = regard.build("vit-small", **PRESETS["vit-small"], labels=2)
    old: Any = regard.load(first.save(tmp_path / "a"))
    old.origin.config |= labels(["cat", "dog"])
    again = regard.load(old.save(tmp_path / "b"))
    assert classes_of(again) == ["cat", "dog"]
    assert classes_of(with_head(again, Classify(2))) == [] and labels([]) == {}


# --- what goes wrong ----------------------------------------------------------------------------------------------


def test_base_that_is_gone_or_changed_is_refused(base: Path, tmp_path: Path) -> None:
    folder = save_adapter(tuned(base, Classify(3)), tmp_path / "small")
    config = (base / "config.json").read_text()
    (base / "config.json").write_text(config + " ")
    refused(folder, "stands on", str(base), "config.json is no longer what it was", "base.folder")
    (base / "config.json").write_text(config)
    weights = bytearray((base / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (base / "model.safetensors").write_bytes(weights)
    refused(folder, "model.safetensors is no longer what it was")
    shutil.rmtree(base)
    refused(folder, "stands on", str(base), "not there; put it back", "base.folder")


def test_base_is_found_beside_the_adapter_when_both_moved(base: Path, tmp_path: Path) -> None:
    model = tuned(base)
    save_adapter(model, tmp_path / "small")
    (tmp_path / "new").mkdir()
    for name in ("base", "small"):
        os.rename(tmp_path / name, tmp_path / "new" / name)
    assert same(regard.load(tmp_path / "new" / "small"), merge(model))


def test_base_behind_a_link_is_the_folder_itself(base: Path, tmp_path: Path) -> None:
    (tmp_path / "best").symlink_to(base)
    folder = save_adapter(tuned(tmp_path / "best"), tmp_path / "small")
    assert json.loads((folder / RECORD).read_text())["base"]["folder"] == str(base.resolve())


def test_broken_adapters_are_refused_in_one_sentence(base: Path, tmp_path: Path) -> None:
    folder = save_adapter(tuned(base, Classify(3)), tmp_path / "small")
    record, tensors = (folder / RECORD).read_text(), load_file(folder / TENSORS)
    tensors = {n: x.clone() for n, x in tensors.items()}

    def said(**changes: Any) -> None:
        (folder / RECORD).write_text(json.dumps({**json.loads(record), **changes}))

    said(format=1)
    refused(folder, "format 1", "reads 2")
    said(hed=None)
    refused(folder, "adapter.json.hed is not a setting", "'head'")
    said(dtype="load")
    refused(folder, "dtype is 'load'")
    (folder / RECORD).write_text(record)
    save_file({n: x for n, x in tensors.items() if "lora" in n}, folder / TENSORS)
    refused(folder, "tensor head.out.weight is missing from adapter_model.safetensors")
    one, other = (f"{THEIRS}transformer.h.{i}.attn.c_attn.lora_A.weight" for i in (0, 7))
    save_file({**tensors, other: torch.zeros(1)}, folder / TENSORS)
    refused(folder, "is an adapter of another model", "h.7", "has no place in the model")
    save_file({**tensors, one: torch.zeros(2, 23)}, folder / TENSORS)
    refused(folder, "is an adapter of another model", "(2, 23)")
    save_file({**tensors, f"{THEIRS}score.weight": torch.zeros(2, 24)}, folder / TENSORS)
    refused(folder, "head.out.weight", "(2, 24)", "(3, 24)")
    (folder / TENSORS).write_bytes(b"no tensors")
    refused(folder, "is not a whole safetensors file", "again")
    (folder / TENSORS).unlink()
    refused(folder, "is not a whole safetensors file")


def test_models_that_are_no_adapters_are_not_saved_as_such(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="comes from none: use model.save"):
        save_adapter(adapted(regard.build("gpt2", **TEXT), Adapt("lora")), tmp_path / "x")
    with pytest.raises(UsageError, match="weights of the body itself are trained: use model.save"):
        save_adapter(regard.load(base), tmp_path / "x")
    with pytest.raises(UsageError, match="this model has LoRA: save_adapter"):
        tuned(base, LM(tied=False)).save(tmp_path / "x")
    assert not (tmp_path / "x").exists()


# --- the command --------------------------------------------------------------------------------------------------


def test_merge_command_writes_a_folder_that_needs_no_other(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tuned(base)
    folder, out = save_adapter(model, tmp_path / "small"), tmp_path / "out"
    out.mkdir()
    assert main(["merge", str(folder), str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    shutil.rmtree(base)
    assert same(regard.load(out), merge(model))
    assert main(["merge", str(folder), str(out)]) == 2
    assert "not an empty folder; name another" in capsys.readouterr().err
    assert main(["merge", str(folder), str(tmp_path / "more")]) == 4
    assert "which is not there" in capsys.readouterr().err
    assert main(["merge", str(out), str(tmp_path / "more")]) == 4
    assert "it is not an adapter, nothing to merge" in capsys.readouterr().err
    assert main(["merge", str(tmp_path / "none"), str(tmp_path / "more")]) == 4
    assert "is not a folder" in capsys.readouterr().err
    assert not (tmp_path / "more").exists()
