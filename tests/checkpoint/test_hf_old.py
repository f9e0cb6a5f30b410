"""Folders as they are found in the wild: older words in config.json, older names of tensors, tensors nobody needs."""

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import regard
from regard.checkpoint import store
from regard.checkpoint.families import FAMILIES, INERT
from regard.checkpoint.hf import LAYERS, plan, read, read_config
from regard.checkpoint.rules import REQUIRED, Key
from regard.errors import UsageError
from tests.checkpoint.families import FEW, ONE_PER_FAMILY, Peer, batch, error, tensors, theirs
from tests.wide import wide

Peers = Callable[[str], Peer]
PUBLISHED = json.loads((Path(__file__).parent / "published.json").read_text(encoding="utf-8"))


def rewrite(peer: Peer, to: Path, config: Any = None, weights: Any = None) -> Path:
    """The peer's folder with config.json and the tensors passed through the two functions."""
    data, found = json.loads((peer.folder / "config.json").read_text()), tensors(peer.folder)
    to.mkdir(exist_ok=True)
    (to / "config.json").write_text(json.dumps(data if config is None else config(data)))
    found = found if weights is None else weights(found)
    save_file({n: t.clone() for n, t in found.items()}, to / "model.safetensors")
    return to


def without(data: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key not in keys}


# --- config.json --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["type", "rope_type"])
@pytest.mark.parametrize(
    "name", ["llama-biases", "llama-yarn", "llama-linear", "llama-base-5e5", "deepseek-v3"]
)
def test_old_rope_spelling_means_the_same(
    name: str, word: str, peer: Peers, tmp_path: Path
) -> None:
    def old(data: dict[str, Any]) -> dict[str, Any]:
        new = data["rope_parameters"]
        scaling = {word: new["rope_type"], **without(new, "rope_type", "rope_theta")}
        scaling = None if new["rope_type"] == "default" else scaling  # type: ignore[assignment]
        words = {"rope_theta": new["rope_theta"], "rope_scaling": scaling}
        return without(data, "rope_parameters") | words

    folder = rewrite(peer(name), tmp_path / "old", config=old)
    model = regard.load(folder)
    assert model.config == regard.load(peer(name).folder).config
    model.save(tmp_path / "ours")
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert (
        "rope_scaling" in written and "rope_parameters" not in written
    )  # nothing changed, nothing rewritten
    again = type(peer(name).model).from_pretrained(tmp_path / "ours")
    assert error(model, again) < 2e-4


def test_old_torch_dtype_becomes_dtype(peer: Peers, tmp_path: Path) -> None:
    def old(data: dict[str, Any]) -> dict[str, Any]:
        return without(data, "dtype") | {"torch_dtype": data["dtype"]}

    regard.load(rewrite(peer("llama"), tmp_path / "old", config=old)).save(tmp_path / "ours")
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert written["dtype"] == "float32" and "torch_dtype" not in written


@pytest.mark.parametrize(
    "name", wide(ONE_PER_FAMILY, keep=["gpt2", "gpt-oss", "bert-ForMaskedLM", "t5"])
)
def test_null_and_switch_mean_what_transformers_means(name: str, peer: Peers) -> None:
    """Every key of the family that takes part as null, and every switch on and off: where transformers answers with
    these weights, so do we, and alike, or the key is refused."""
    model, folder = peer(name).model, peer(name).folder
    said, weights = json.loads((folder / "config.json").read_text()), store.weights(folder)
    family = FAMILIES[said["model_type"]]
    # Of these the stored tensors tell more.
    told = {"tie_word_embeddings", "share_encoder_decoder_embeddings", *family.inert.split()}
    # A null tower is one of the published size (T5Gemma's has 2B), which these weights do not fit.
    told |= {
        key for key, value in said.items() if isinstance(value, dict) and "model_type" in value
    }
    for key in sorted(family.keys - told):
        for value in (None, True, False) if isinstance(said.get(key), bool | None) else (None,):
            try:
                # Gemma 2's, which only their plain attention computes as it should.
                how = {"attn_implementation": model.config._attn_implementation}
                config = type(model.config)(**copy.deepcopy(said | {key: value}), **how)
                changed = type(model)(config).eval()
                changed.load_state_dict(model.state_dict())
                theirs(changed, batch(config))
            except Exception:
                # transformers cannot.
                continue
            try:
                ours = read(said | {key: value}, weights, None, None)
            except UsageError as refusal:
                if f"{key} is {value}" not in str(refusal):
                    pytest.fail(f"{key} = {value} is refused without its name: {refusal}")
                continue
            assert error(ours, changed) < 2e-4, f"{key} = {value} means something else"


@pytest.mark.parametrize("name", FAMILIES)
def test_missing_optional_keys_mean_what_transformers_means(name: str, peer: Peers) -> None:
    from transformers import AutoConfig

    family = FAMILIES[name]
    every = json.loads(AutoConfig.for_model(name).to_json_string(use_diff=False))
    needed = {n for n, r in family.rules if isinstance(r, Key) and r.default is REQUIRED}
    needed |= {"n_routed_experts"} & set(every)
    every |= {
        key: 2 for key in needed if every[key] is None
    }  # V2 leaves the number of experts open
    for architecture in family.heads:
        brief = {key: every[key] for key in needed} | {"model_type": name}
        read = [read_config(words, family, architecture) for words in (every, brief)]
        assert read[0] == read[1]


@pytest.mark.parametrize(
    "name", ["gpt2", "llama", "deepseek-v3", "bert-ForMaskedLM", "vit", "bart"]
)
def test_missing_architectures_mean_the_family_s_first_head(
    name: str, peer: Peers, tmp_path: Path
) -> None:
    folder = rewrite(peer(name), tmp_path, config=lambda data: without(data, "architectures"))
    assert error(regard.load(folder), peer(name).model) < 2e-4


@pytest.mark.parametrize("name", wide(ONE_PER_FAMILY, keep=FEW))
def test_keys_of_every_config_class_are_known(name: str, peer: Peers, tmp_path: Path) -> None:
    """Transformers 4 wrote some fifty keys of its base class when asked for all of them."""
    base = {key: None for key in INERT - {"architectures", "model_type", "id2label", "label2id"}}
    base |= {"is_decoder": False, "add_cross_attention": False, "tie_encoder_decoder": False}
    base |= {"max_length": 20, "num_beams": 1, "pruned_heads": {}, "output_scores": False}
    folder = rewrite(peer(name), tmp_path, config=lambda data: base | data)
    assert error(regard.load(folder), peer(name).model) < 2e-4


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_asks_for_the_tensors_of_transformers(name: str, peer: Peers) -> None:
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    theirs = dict(PUBLISHED[name])
    theirs.pop("quantization_config", None)
    for key in LAYERS:
        # Every kind of layer, without naming 44,544 experts.
        if key in theirs:
            theirs[key] = min(theirs[key], 4)
    if "layer_types" in theirs:
        theirs["layer_types"] = theirs["layer_types"][:4]
    family, architecture = FAMILIES[theirs["model_type"]], theirs["architectures"][0]
    config = read_config(theirs, family, architecture)
    with torch.device("meta"):
        ours = config.make()
        cls = getattr(transformers, architecture)
        module = cls(cls.config_class(**theirs))
    asked = {n: s for step in plan(ours, family) for n, s in zip(step.theirs, step.their_shapes())}
    held = revert_weight_conversion(module, module.state_dict())
    base = "" if config.head is not None else family.base
    have = {base + n: tuple(t.shape) for n, t in held.items()}
    assert {n: have.get(n) for n in asked} == asked
    spare = {n for n, *_ in family.twins} | {n for n in have if "embed_positions" in n}
    assert {n for n in set(have) - set(asked) - spare if "pooler" not in n} == set()


# --- tensors ------------------------------------------------------------------------------------------------------


def check(peer: Peer, to: Path, weights: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """The folder with changed tensors loads, answers as before, and transformers reads what we write."""
    model = regard.load(rewrite(peer, to / "old", weights=weights))
    assert error(model, peer.model) < 2e-4
    model.save(to / "ours")
    again = type(peer.model).from_pretrained(to / "ours", **peer.case.options)
    assert error(model, again) < 2e-4


@pytest.mark.parametrize("name", ["gpt2", "gpt2-untied"])
def test_gpt2_without_prefix_and_with_mask_buffers_loads(
    name: str, peer: Peers, tmp_path: Path
) -> None:
    def old(found: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {n.removeprefix("transformer."): t for n, t in found.items()}
        for i in range(2):
            found[f"h.{i}.attn.bias"] = torch.ones(1, 1, 40, 40).tril()
            found[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
        return found

    check(peer(name), tmp_path, old)


@pytest.mark.parametrize("name", ["bert-ForMaskedLM", "bert-body", "roberta-ForMaskedLM"])
def test_bert_norms_named_gamma_and_beta_load(name: str, peer: Peers, tmp_path: Path) -> None:
    def old(found: dict[str, Tensor]) -> dict[str, Tensor]:
        words = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        for new, word in words.items():
            found = {n.replace(new, word): t for n, t in found.items()}
        return found

    check(peer(name), tmp_path, old)


@pytest.mark.parametrize(
    "name, extra",
    [
        ("bert-ForMaskedLM", {"bert.pooler.dense.weight": (24, 24), "bert.pooler.dense.bias": (24,),
                              "cls.seq_relationship.weight": (2, 24), "cls.seq_relationship.bias": (2,)}),
        ("bert-ForTokenClassification", {"bert.pooler.dense.weight": (24, 24)}),
        ("roberta-ForMaskedLM", {"roberta.pooler.dense.weight": (24, 24)}),
        ("t5", {"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": (32, 3)}),
        ("deepseek-v3", {"model.layers.2.embed_tokens.weight": (50, 24), "model.layers.2.eh_proj.weight": (24, 48),
                         "model.layers.2.self_attn.q_a_proj.weight": (12, 24)}),
        ("deepseek-v32-sparse", {"model.layers.2.enorm.weight": (24,)}),
        ("vit", {"vit.pooler.dense.weight": (24, 24)}),
    ],
)  # fmt: skip
def test_tensors_of_no_use_here_are_kept(
    name: str, extra: dict[str, tuple[int, ...]], peer: Peers, tmp_path: Path
) -> None:
    spare = {n: torch.randn(shape) for n, shape in extra.items()}
    folder = rewrite(peer(name), tmp_path / "old", weights=lambda found: found | spare)
    model = regard.load(folder)
    assert error(model, peer(name).model) < 2e-4
    model.save(tmp_path / "ours")
    written = tensors(tmp_path / "ours")
    assert all(torch.equal(written[n], t) for n, t in spare.items())
    type(peer(name).model).from_pretrained(tmp_path / "ours")


@pytest.mark.parametrize(
    "name, extra",
    [
        ("llama", {"model.layers.0.self_attn.rotary_emb.inv_freq": (4,)}),
        ("bert-ForMaskedLM", {"bert.embeddings.position_ids": (1, 40)}),
        ("roberta-ForMaskedLM", {"roberta.embeddings.position_ids": (1, 40)}),
        ("distilbert-ForMaskedLM", {"distilbert.embeddings.position_ids": (1, 40)}),
        ("bart", {"model.encoder.version": (1,), "model.decoder.version": (1,)}),
        ("marian", {f"model.{side}.embed_positions.weight": (40, 24) for side in ("encoder", "decoder")}),
    ],
)  # fmt: skip
def test_tensors_that_follow_from_the_config_are_left_out(
    name: str, extra: dict[str, tuple[int, ...]], peer: Peers, tmp_path: Path
) -> None:
    check(peer(name), tmp_path, lambda found: found | {n: torch.zeros(s) for n, s in extra.items()})
    assert not set(extra) & set(tensors(tmp_path / "ours"))


_EMBED = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


@pytest.mark.parametrize(
    "name, twin, copies",
    [
        ("gpt2", "transformer.wte.weight", ["lm_head.weight"]),
        ("llama-gqa-tied", "model.embed_tokens.weight", ["lm_head.weight"]),
        ("deepseek-v3-dense", "model.embed_tokens.weight", ["lm_head.weight"]),
        ("bert-ForMaskedLM", "bert.embeddings.word_embeddings.weight", ["cls.predictions.decoder.weight"]),
        ("bert-ForMaskedLM", "cls.predictions.bias", ["cls.predictions.decoder.bias"]),
        ("roberta-ForMaskedLM", "roberta.embeddings.word_embeddings.weight", ["lm_head.decoder.weight"]),
        ("roberta-ForMaskedLM", "lm_head.bias", ["lm_head.decoder.bias"]),
        ("distilbert-ForMaskedLM", "distilbert.embeddings.word_embeddings.weight", ["vocab_projector.weight"]),
        ("t5", "shared.weight", ["lm_head.weight", *_EMBED]),
        ("bart", "model.shared.weight", ["lm_head.weight", *(f"model.{n}" for n in _EMBED)]),
        ("marian", "model.shared.weight", ["lm_head.weight", *(f"model.{n}" for n in _EMBED)]),
    ],
)  # fmt: skip
def test_copies_of_tied_tensors_stay_tied(
    name: str, twin: str, copies: list[str], peer: Peers, tmp_path: Path
) -> None:
    check(peer(name), tmp_path, lambda found: found | {n: found[twin] for n in copies})
    assert regard.load(tmp_path / "old").config == regard.load(peer(name).folder).config
    assert not set(copies) & set(tensors(tmp_path / "ours"))


@pytest.mark.parametrize("name", ["t5", "t5-v1.1", "bart", "gpt2", "llama-gqa-tied"])
def test_head_of_its_own_in_a_folder_that_says_tied_is_kept(
    name: str, peer: Peers, tmp_path: Path
) -> None:
    folder = rewrite(
        peer(name), tmp_path / "old", weights=lambda f: f | {"lm_head.weight": torch.randn(50, len(_any(f)))}
    )  # fmt: skip
    module = type(peer(name).model).from_pretrained(folder)
    model = regard.load(folder)
    assert not model.config.head.tied
    assert error(model, module) < 2e-4
    model.save(tmp_path / "ours")
    again = type(module).from_pretrained(tmp_path / "ours")
    assert torch.equal(again.lm_head.weight, module.lm_head.weight)
    assert error(model, again) < 2e-4


def _any(found: dict[str, Tensor]) -> Tensor:
    """A vector as wide as the model."""
    return next(t for n, t in found.items() if t.dim() == 1 and "norm" in n.replace("ln_", "norm"))


def test_t5_v11_folder_of_old_is_not_scaled(peer: Peers, tmp_path: Path) -> None:
    """tie_word_embeddings false was the only sign of v1.1."""

    def old(data: dict[str, Any]) -> dict[str, Any]:
        words = without(data, "scale_decoder_outputs", "dense_act_fn", "is_gated_act")
        return words | {"tie_word_embeddings": False}

    folder = rewrite(peer("t5-v1.1"), tmp_path, config=old)
    model = regard.load(folder)
    assert not model.config.head.scaled
    assert error(model, peer("t5-v1.1").model) < 2e-4
