"""Folders that transformers writes: our logits are its logits, and what was read is written back bit for bit."""

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

import regard
from regard.checkpoint import hf, save
from regard.checkpoint.families import FAMILIES
from regard.errors import Notice
from regard.fast.cpu import prepare
from regard.layers import LM
from tests.checkpoint.families import (
    CASES,
    FEW,
    HEADS,
    KEPT,
    ONE_PER_FAMILY,
    Peer,
    at_tokens,
    batch,
    error,
    real,
    tensors,
)
from tests.wide import wide

ROOT = Path(__file__).resolve().parents[2]
Peers = Callable[[str], Peer]
Ours = Callable[[str], tuple[regard.Model, Path]]
every = pytest.mark.parametrize("name", wide(CASES, keep=KEPT))
one_per_family = pytest.mark.parametrize("name", wide(ONE_PER_FAMILY, keep=FEW))
DECODERS = [c.name for c in CASES.values() if isinstance(HEADS[c.architecture], LM)]


def assert_bit_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert sorted(one) == sorted(other)
    assert [n for n in one if one[n].dtype != other[n].dtype] == []
    assert [n for n in one if not torch.equal(one[n], other[n])] == []


@pytest.fixture(scope="module")
def ours(peer: Peers, tmp_path_factory: pytest.TempPathFactory) -> Ours:
    """What we read in a peer's folder, and the folder that we write of it; once per case, for tests that change
    neither."""

    @cache
    def make(name: str) -> tuple[regard.Model, Path]:
        model = regard.load(peer(name).folder)
        return model, model.save(tmp_path_factory.mktemp("ours") / name)

    return make


# --- the same numbers ---------------------------------------------------------------------------------------------


@every
def test_hf_family_logits_match(name: str, peer: Peers, ours: Ours) -> None:
    assert error(ours(name)[0], peer(name).model) < 2e-4


@pytest.mark.parametrize("name", ["bert-ForMaskedLM", "bert-relu", "roberta-body"])
@torch.no_grad()
def test_hf_segment_types_match(name: str, peer: Peers) -> None:
    given = batch(peer(name).model.config)
    types = (torch.arange(11) > 2).long().expand(3, -1)
    mask = real(given["lengths"], 11)
    out = peer(name).model(given["ids"], attention_mask=mask.long(), token_type_ids=types)
    ours = regard.load(peer(name).folder)(**given, types=types)
    torch.testing.assert_close(ours[mask], out[0][mask], atol=2e-4, rtol=0)


@every
def test_hf_model_in_memory_equals_its_folder(name: str, peer: Peers, ours: Ours) -> None:
    folder, memory = ours(name)[0], regard.from_hf(peer(name).model)
    assert folder.config == memory.config
    assert_bit_equal(folder.state_dict(), memory.state_dict())


def test_hf_model_in_memory_shares_no_weights(peer: Peers) -> None:
    module = CASES["gpt2"].make()
    model = regard.from_hf(module)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert all(p.abs().sum() > 0 for p in module.parameters())


# --- there and back -----------------------------------------------------------------------------------------------


def derived(peer: Peer, names: Iterable[str]) -> set[str]:
    """Those that follow from the config (Marian's sines): a folder of ours leaves them out, transformers makes them."""
    family = FAMILIES[peer.model.config.model_type]
    both = ((n, whole) for n in names for whole in (n, family.base + n))
    return {n for n, whole in both if any(re.fullmatch(p, whole) for p in family.derived)}


@every
def test_hf_tensors_are_written_back_bit_equal(name: str, peer: Peers, ours: Ours) -> None:
    stored = tensors(peer(name).folder)
    kept = stored.keys() - derived(peer(name), stored)
    assert_bit_equal(tensors(ours(name)[1]), {n: stored[n] for n in kept})


@every
def test_hf_config_is_written_back_key_by_key(name: str, peer: Peers, ours: Ours) -> None:
    read = json.loads((peer(name).folder / "config.json").read_text())
    written = json.loads((ours(name)[1] / "config.json").read_text())
    assert {key: written.get(key) for key in read} == read
    assert set(written) - set(read) <= {"head_dim"}  # Qwen2 leaves it out


@every
def test_hf_saved_folder_loads_in_transformers(name: str, peer: Peers, ours: Ours) -> None:
    module = peer(name).model
    options = {**peer(name).case.options, "output_loading_info": True}
    again, info = type(module).from_pretrained(ours(name)[1], **options)
    assert_bit_equal(again.state_dict(), module.state_dict())
    info["missing_keys"] -= derived(peer(name), info["missing_keys"])
    assert not any(info.values()), info


@every
def test_hf_saved_folder_loads_equal(name: str, ours: Ours) -> None:
    model, folder = ours(name)
    again = regard.load(folder)
    assert again.config == model.config
    assert_bit_equal(again.state_dict(), model.state_dict())


@pytest.mark.parametrize(
    "name, fast",
    wide(
        [*((n, False) for n in ONE_PER_FAMILY), ("llama", True)],
        keep=[*((n, False) for n in FEW), ("llama", True)],
    ),
)
def test_hf_half_precision_folder_keeps_its_type(
    name: str, fast: bool, peer: Peers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU that does not multiply it computes in float32 and says so; what is saved is the type that was stored."""
    monkeypatch.setattr(hf, "is_fast", lambda dtype: fast or dtype == torch.float32)
    dtype = torch.bfloat16 if fast else torch.float16
    module = CASES[name].make().to(dtype)
    module.save_pretrained(tmp_path / "theirs")
    said = nullcontext() if fast else pytest.warns(Notice, match="does not multiply: .* in float32")
    with said:
        model = regard.load(tmp_path / "theirs", device="cpu")
    assert {p.dtype for p in model.parameters()} == {dtype if fast else torch.float32}
    model.save(tmp_path / "ours")
    assert_bit_equal(tensors(tmp_path / "ours"), tensors(tmp_path / "theirs"))
    written = json.loads((tmp_path / "ours" / "config.json").read_text())["dtype"]
    assert written == str(dtype).removeprefix("torch.")
    kept = regard.load(tmp_path / "theirs", dtype="stored")
    # Numbers of experts are stored as whole ones, and held in float32.
    held = [p for n, p in kept.named_parameters() if not n.endswith("ffn.table")]
    assert {p.dtype for p in held} == {dtype}
    # One weight that is no number of that type, and all are saved as they are.
    next(iter(model.parameters())).data.flatten()[0] += 2**-20
    again = regard.load(model.save(tmp_path / "changed"), dtype="stored")
    assert {p.dtype for p in again.parameters()} == {dtype if fast else torch.float32}


# --- decoding -----------------------------------------------------------------------------------------------------


def greedy(model: regard.Model, ids: Tensor, cached: bool, **source: Tensor) -> tuple[Tensor, list]:
    """Eight more tokens, and the logits that chose them."""
    cache = model.cache(len(ids)) if cached else None
    new, chose = ids, []
    for _ in range(8):
        logits = model(new, cache=cache, **source) if cached else model(ids, **source)
        chose.append(logits[:, -1])
        new = chose[-1].argmax(-1, keepdim=True)
        ids = torch.cat([ids, new], 1)
        source = {} if cached else source
    return ids, chose


@pytest.mark.parametrize("name", wide(DECODERS, keep=[n for n in KEPT if n in DECODERS]))
@torch.no_grad()
def test_hf_cached_decoding_equals_the_plain_loop(name: str, peer: Peers, ours: Ours) -> None:
    model = ours(name)[0]
    given = batch(peer(name).model.config)
    source = {key: given[key] for key in ("source", "source_lengths") if key in given}
    ids = given["ids"][:, :5]
    fast, plain = (greedy(model, ids, cached, **source) for cached in (True, False))
    assert torch.equal(fast[0], plain[0])
    torch.testing.assert_close(fast[1], plain[1], atol=2e-5, rtol=2e-5)  # other shapes, other sums


@pytest.mark.parametrize(
    "name",
    [
        CASES[n].name
        for n, family in zip(ONE_PER_FAMILY, FAMILIES.values(), strict=True)
        if family.blank.kind == "transformer" and isinstance(HEADS[CASES[n].architecture], LM)
    ],
)
@torch.no_grad()
def test_hf_greedy_text_is_that_of_transformers(name: str, peer: Peers) -> None:
    module = copy.deepcopy(peer(name).model)
    module.generation_config.update(eos_token_id=None, pad_token_id=0)
    ids = batch(module.config)["ids"][:1, :5]
    wanted = module.generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(greedy(regard.from_hf(module), ids, True)[0], wanted)


# --- shards, files, types, devices --------------------------------------------------------------------------------


@one_per_family
def test_hf_shards_of_transformers_load_equal(name: str, peer: Peers, tmp_path: Path) -> None:
    peer(name).model.save_pretrained(tmp_path, max_shard_size="6KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    whole, shards = regard.load(peer(name).folder), regard.load(tmp_path)
    assert_bit_equal(whole.state_dict(), shards.state_dict())


@one_per_family
def test_hf_shards_of_ours_load_in_transformers(name: str, peer: Peers, tmp_path: Path) -> None:
    save(regard.load(peer(name).folder), tmp_path, shard_bytes=6000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert not (tmp_path / "model.safetensors").exists()
    assert {p.name for p in tmp_path.glob("model-*.safetensors")} == {*index["weight_map"].values()}
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors(tmp_path).values())
    again = type(peer(name).model).from_pretrained(tmp_path, **peer(name).case.options)
    assert_bit_equal(again.state_dict(), peer(name).model.state_dict())


@pytest.mark.parametrize(
    "file",
    ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"],
)
def test_hf_files_are_carried_byte_for_byte(file: str, peer: Peers, tmp_path: Path) -> None:
    content = b'{"a": 1,\r\n  "\xc3\xa9": "{% raw %}"}\n\n'  # its form is nobody's business here
    shutil.copytree(peer("llama").folder, tmp_path / "theirs")
    (tmp_path / "theirs" / file).write_bytes(content)
    regard.load(tmp_path / "theirs").save(tmp_path / "ours")
    assert (tmp_path / "ours" / file).read_bytes() == content


def test_hf_generation_config_comes_from_memory_too(peer: Peers, tmp_path: Path) -> None:
    regard.from_hf(peer("gpt2").model).save(tmp_path)
    written = json.loads((tmp_path / "generation_config.json").read_text())
    assert written["eos_token_id"] == peer("gpt2").model.generation_config.eos_token_id


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v32-sparse"])
@torch.no_grad()
def test_load_dtype_is_that_of_every_weight_but_the_wide(
    name: str, dtype: torch.dtype, peer: Peers
) -> None:
    """Transformers keeps e_score_correction_bias in float32: rounded, it would choose other experts. DeepSeek keeps
    the indexer's weights_proj too."""
    model = regard.load(peer(name).folder, dtype=dtype)
    kinds = {
        n.rpartition("tower.blocks.")[2].partition(".")[2]: p.dtype
        for n, p in model.named_parameters()
    }
    wide = {
        n: kinds.pop(n) for n in ("ffn.correction", "attention.indexer.ww.weight") if n in kinds
    }
    assert set(kinds.values()) == {dtype}
    assert set(wide.values()) == {torch.float32 if dtype.itemsize == 2 else dtype}
    given = batch(peer(name).model.config)
    assert at_tokens(model(**given), given).isfinite().all()
    if dtype == torch.bfloat16:
        prepared = prepare(model, "bf16").tower.blocks[1].ffn.correction
        assert torch.equal(prepared, model.tower.blocks[1].ffn.correction)
    again = type(peer(name).model).from_pretrained(peer(name).folder, dtype=dtype)
    bias = again.state_dict()["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert torch.equal(bias.to(wide["ffn.correction"]), model.tower.blocks[1].ffn.correction)


def test_load_dtype_of_a_bfloat16_folder_widens_exactly(peer: Peers, tmp_path: Path) -> None:
    CASES["llama-mqa"].make().to(torch.bfloat16).save_pretrained(tmp_path)
    narrow, wide = regard.load(tmp_path), regard.load(tmp_path, dtype=torch.float32)
    assert_bit_equal({n: p.float() for n, p in narrow.state_dict().items()}, wide.state_dict())


@pytest.mark.parametrize("device", ["cpu", "meta", torch.device("cpu")])
def test_load_device_is_that_of_every_weight(device: str, peer: Peers) -> None:
    model = regard.load(peer("bart").folder, device=device)
    assert {p.device for p in model.parameters()} == {torch.device(device)}


def test_load_gives_a_model_in_evaluation_mode(peer: Peers) -> None:
    model = regard.load(peer("bert-body").folder)
    assert not any(m.training for m in model.modules())


def test_load_needs_no_transformers(peer: Peers, tmp_path: Path) -> None:
    script = f"""
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("transformers", "tokenizers", "huggingface_hub"):
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Block())
import regard

for folder in {[str(peer(n).folder) for n in ("gpt2", "deepseek-v32-sparse", "t5", "vit")]!r}:
    regard.load(folder).save({str(tmp_path / "again")!r})
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
