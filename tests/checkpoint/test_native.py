"""Models that Hugging Face has no words for keep the folder's layout; presets that it knows are said in its words."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.checkpoint.hf import Origin, express
from regard.layers import Answer, Classify, Tag
from regard.presets import PRESETS
from tests.checkpoint.families import error
from tests.tiny import FEW, OWN, answer, tiny
from tests.wide import wide

TEXT = dict(dim=24, layers=2, vocab=50)
GPT = dict(TEXT, heads=3, ffn_dim=20, max_len=40)
HEADS = dict(heads=3, head_dim=8)
_MIXED = (
    regard.GQA(3, window=4),
    regard.MLA(3, 16),
    regard.DSA(regard.GQA(3), 2, 8, 4),
)
NATIVE: dict[str, tuple[str, dict[str, Any]]] = {
    "mla-in-bert": ("bert-base", dict(TEXT, max_len=40, ffn_dim=20, attention=regard.MLA(3, 16))),
    "dsa-in-gpt2": ("gpt2", dict(GPT, attention=regard.DSA(regard.GQA(3), 2, 8, 4))),
    "dsa-over-mla-in-gpt2": (
        "gpt2", dict(GPT, attention=regard.DSA(regard.MLA(3, 16), 2, 8, 4, hadamard=True))
    ),
    "mla-in-t5": ("t5-small", dict(TEXT, heads=3, ffn_dim=20, attention=regard.MLA(3, 16))),
    "gru-lm": ("gru-lm", TEXT),
    "lstm-lm-with-attention": ("gru-lm", dict(TEXT, cell="lstm", attention="bilinear")),
    "bahdanau": ("bahdanau", dict(TEXT, source_vocab=43)),
    "luong": ("luong", dict(TEXT, source_vocab=43)),
    "captioner": ("captioner", dict(GPT, heads=3, size=12, patch=4)),
    "vaswani": ("vaswani-base", GPT),
    "alibi": ("gpt2", dict(GPT, relative=regard.Alibi(3))),
    "softcap": ("llama", dict(GPT, kv_heads=1, softcap=5.0)),
    "sinks": ("llama", dict(GPT, kv_heads=1, sinks=True)),
    "mixed-attention": ("gpt2", dict(GPT, layers=3, attention=_MIXED)),
    "value-heads-of-their-own-width": ("llama", dict(GPT, kv_heads=1, value_dim=5)),
    "two-feed-forwards": ("llama", dict(GPT, kv_heads=1, ffn=(regard.MLP(9), regard.MoE(3, 2, 7)))),
}  # fmt: skip


def assert_same(one: regard.Model, other: regard.Model) -> None:
    a, b = one.state_dict(), other.state_dict()
    assert sorted(a) == sorted(b)
    assert [n for n in a if not torch.equal(a[n], b[n])] == []


@pytest.mark.parametrize("name", NATIVE)
def test_native_model_saves_as_regard(name: str, tmp_path: Path) -> None:
    preset, changes = NATIVE[name]
    regard.build(preset, **changes).save(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "regard"


@pytest.mark.parametrize("name", NATIVE)
@torch.no_grad()
def test_native_model_loads_back_equal(name: str, tmp_path: Path) -> None:
    preset, changes = NATIVE[name]
    model = regard.build(preset, **changes)
    model.save(tmp_path)
    again = regard.load(tmp_path)
    assert again.config == model.config
    assert_same(again, model)
    assert torch.equal(answer(again), answer(model))


def test_native_folder_keeps_its_type_and_shards(tmp_path: Path) -> None:
    model = regard.build("gru-lm", dtype=torch.bfloat16, **TEXT)
    regard.checkpoint.save(model, tmp_path, shard_bytes=4000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_same(regard.load(tmp_path), model)


def test_loaded_model_that_outgrew_its_family_saves_as_regard(tmp_path: Path) -> None:
    regard.build("gpt2", **GPT).save(tmp_path / "one")
    loaded = regard.load(tmp_path / "one")
    changed = regard.build(loaded.config, relative=regard.Alibi(3))
    changed.save(tmp_path / "two")
    assert json.loads((tmp_path / "two" / "config.json").read_text())["model_type"] == "regard"
    assert regard.load(tmp_path / "two").config == changed.config


# --- presets ------------------------------------------------------------------------------------------------------

# What transformers has beside what a model reads with: for its training, and for contacts of residues; the angles of
# ESM and the sines of Marian and Pegasus, which it makes anew.
BESIDE = ("mask_token", "contact_head", "esm.rotary_embeddings")
SINES = ("marian", "pegasus-large")
IN_FAMILY = [name for name, (family, _) in PRESETS.items() if family]


def beside(name: str, key: str) -> bool:
    return any(part in key for part in (*BESIDE, *["embed_positions"] * (name in SINES)))


@pytest.mark.parametrize("name", PRESETS)
@torch.no_grad()
def test_preset_runs_at_a_tiny_size(name: str) -> None:
    assert answer(tiny(name)).isfinite().all()


@pytest.mark.parametrize("name", wide(PRESETS, keep=[*FEW, *OWN]))
def test_preset_saves_in_its_family_and_loads_equal(name: str, tmp_path: Path) -> None:
    model = tiny(name)
    model.save(tmp_path)
    kind = json.loads((tmp_path / "config.json").read_text())["model_type"]
    assert kind == (PRESETS[name][0] or "regard")
    assert_same(regard.load(tmp_path), model)


@pytest.mark.parametrize("name", wide(IN_FAMILY, keep=FEW))
def test_preset_loads_in_transformers_and_agrees(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = tiny(name)
    model.save(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    cls = getattr(transformers, said["architectures"][0])
    module, info = cls.from_pretrained(tmp_path, output_loading_info=True)
    info["missing_keys"] = {key for key in info["missing_keys"] if not beside(name, key)}
    assert not any(info.values()), info
    # transformers scales as if it had tied every head of UMT5 (the table of families says how); Ernie's new routers
    # are all 0, so that its experts tie, and either side takes others.
    if name not in ("umt5-small", "ernie-4.5-21b-a3b"):
        assert error(model.eval(), module.eval()) < 2e-4


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "name", ["gpt2", "llama", "bert-base", "roberta-base", "distilbert-base", "t5-small", "bart-base", "marian"]
)  # fmt: skip
def test_preset_tied_or_not_loads_in_transformers(name: str, tied: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = tiny(name, tied=tied)
    model.save(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    assert said["model_type"] == PRESETS[name][0]
    module = getattr(transformers, said["architectures"][0]).from_pretrained(tmp_path)
    assert error(model, module.eval()) < 2e-4
    assert regard.load(tmp_path).config.head.tied == tied


@pytest.mark.parametrize("head", [Classify(3), Tag(3), Answer()], ids=lambda head: head.kind)
def test_head_without_dropout_loads_in_transformers(head: Any, tmp_path: Path) -> None:
    """One that says nothing of dropout has none, which transformers calls a rate of 0."""
    transformers = pytest.importorskip("transformers")
    model = tiny("bert-base", head=head)
    model.save(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    module = getattr(transformers, said["architectures"][0]).from_pretrained(tmp_path)
    assert error(model, module.eval()) < 2e-4
    assert head.kind == "answer" or module.dropout.p == 0.0
    assert not regard.load(tmp_path).config.head.dropout


@pytest.mark.parametrize("name", wide(PRESETS, keep=[*FEW, *OWN]))
def test_preset_at_full_size_is_of_its_family(name: str) -> None:
    model = regard.build(name, device="meta")
    family, *_ = express(model, Origin(model.family))
    assert (family.name if family else "") == PRESETS[name][0]


@pytest.mark.parametrize("name", wide(IN_FAMILY, keep=FEW))
def test_preset_has_as_many_parameters_as_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    model = regard.build(name, device="meta")
    _, said, _ = express(model, Origin(model.family))
    cls = getattr(transformers, said["architectures"][0])
    with torch.device("meta"):
        module = cls(cls.config_class(**said))
    theirs = dict(module.named_parameters()) | {
        n: b
        for n, b in module.named_buffers()
        if any(part in n for part in ("e_score_correction", "final_logits", "act_fn"))
    }
    count = sum(p.numel() for n, p in theirs.items() if not beside(name, n))
    # Whose head transformers makes its own only when it reads one.
    if name in ("t5-v1.1-small", "mt5-small", "mt5-base", "umt5-small"):
        count += module.lm_head.weight.numel()
    assert sum(p.numel() for p in model.parameters()) == count
