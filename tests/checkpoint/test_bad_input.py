"""Wrong configs and wrong calls get one error type, and a sentence that says what was asked and what is possible."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import regard
from regard.checkpoint import store
from regard.checkpoint.families import FAMILIES, INERT
from regard.checkpoint.hf import STARTS, _unknown_family, read
from regard.errors import UsageError
from tests.checkpoint.families import ONE_PER_FAMILY, Peer
from tests.checkpoint.spoil import SIZES, configure, refused
from tests.wide import wide

# --- config.json --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["n_layer", "n_embd", "n_head", "vocab_size", "n_positions"])
def test_missing_key_is_named(key: str, folder: Path) -> None:
    refused(configure(folder, drop=key), f"{key} is missing", "gpt2")


def test_unknown_model_type_names_the_nearest_family_and_what_it_lacks(folder: Path) -> None:
    text = refused(
        configure(folder, model_type="gpt9", state_size=16), "'gpt9', which is not known"
    )
    assert text.endswith("the nearest family is gpt2, which has no word for: state_size")


def test_nearest_family_knows_most_keys_then_has_the_nearest_name() -> None:
    """Many kinds of Llama know the same keys."""
    keys = dict.fromkeys(FAMILIES["llama"].keys & FAMILIES["mistral"].keys - INERT)
    for name in ("mistral_two", "llama9"):
        text = str(_unknown_family({"model_type": name, **keys}))
        assert f"the nearest family is {name[:5]}" in text
        assert text.endswith("has a word for each of its keys: write that model_type if it is one")
    latent = {**keys, "kv_lora_rank": 1, "q_lora_rank": 2}
    text = str(_unknown_family({"model_type": "llama9", **latent}))
    near = re.search(r"the nearest family is (\w+)", text)
    assert near and "kv_lora_rank" in FAMILIES[near[1]].keys
    many = {f"key{i}": i for i in range(23)}
    assert str(_unknown_family(many)).endswith("key18, key19 and 3 more")


@pytest.mark.parametrize("kind", [None, 5, [], {}, ""])
def test_model_type_that_is_none_names_the_nearest_family(kind: object, folder: Path) -> None:
    refused(configure(folder, model_type=kind), "model_type", "the nearest family is gpt2")


def test_unknown_architecture_lists_those_of_the_family(folder: Path) -> None:
    said = ["GPT2DoubleHeadsModel"]
    refused(configure(folder, architectures=said), *said, "gpt2", "GPT2LMHeadModel", "GPT2Model")


@pytest.mark.parametrize("word", ["su"])
def test_unknown_rope_lists_the_known(word: str, tmp_path: Path) -> None:
    regard.build("llama", **SIZES, kv_heads=1).save(tmp_path)
    configure(tmp_path, rope_parameters={"rope_type": word, "rope_theta": 1e4})
    refused(tmp_path, word, "linear", "llama3", "yarn")


@pytest.mark.parametrize("key", ["scale_attn_by_inverse_layer_idx", "add_cross_attention"])
def test_switch_that_regard_lacks_is_refused(key: str, folder: Path) -> None:
    refused(configure(folder, **{key: True}), key, "True", "can only do False")


def test_heads_that_do_not_divide_say_what_would(folder: Path) -> None:
    refused(configure(folder, n_head=5), "heads=5", "dim=24", "[1, 2, 3, 4, 6, 8, 12, 24]")


def test_number_of_layers_beyond_the_weights_is_refused_at_once(folder: Path) -> None:
    refused(configure(folder, n_layer=10**12), "n_layer", "1,000,000,000,000", "tensors")


@pytest.mark.parametrize(
    "text, why",
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ('{"a": 1,}', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"layer_norm_epsilon": NaN}', "NaN is not a finite number"),
        ('{"layer_norm_epsilon": -Infinity}', "-Infinity is not a finite number"),
        ('{"layer_norm_epsilon": 1e999}', "1e999 is not a finite number"),
        ("[]", "must hold a JSON object, it holds a list"),
        ("null", "must hold a JSON object"),
        ("3", "must hold a JSON object"),
    ],
)
def test_config_that_is_no_object_says_why(text: str, why: str, folder: Path) -> None:
    (folder / "config.json").write_text(text)
    refused(folder, "config.json", why)


def test_config_that_is_not_utf8_says_so(folder: Path) -> None:
    (folder / "config.json").write_bytes(b'{"model_type": "\xff"}')
    refused(folder, "config.json is not valid JSON")


def test_config_that_is_a_folder_says_so(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    refused(folder, "config.json cannot be read")


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    "name", wide(ONE_PER_FAMILY, keep=["gpt2", "gpt-oss", "bert-ForMaskedLM", "t5"])
)
def test_value_of_any_key_is_refused_in_words_or_kept(
    name: str, peer: Callable[[str], Peer], tmp_path: Path
) -> None:
    """Every key of the family, with values of every type. A refusal names the key. What is taken must decide something,
    and is then written back as it was read, or decide nothing, and is then carried."""
    wrong = [
        None,
        "x",
        "32",
        "",
        -1,
        0,
        1.5,
        -0.5,
        10**6,
        2**100,
        True,
        False,
        [],
        [1],
        {},
        {"a": 1},
    ]
    said = json.loads((peer(name).folder / "config.json").read_text())
    weights, family = store.weights(peer(name).folder), FAMILIES[said["model_type"]]
    plain, rng = read(said, weights, None, None), random.Random(name)
    for key in sorted({"architectures", *STARTS, *family.keys}):
        for value in rng.sample(wrong, 3):
            try:
                model = read(said | {key: value}, weights, None, None)
            except UsageError as error:
                # Of what does not fit the weights, the tensor is named.
                if key not in str(error) and not str(error).startswith("tensor "):
                    pytest.fail(f"{key} = {value!r} is refused without its name: {error}")
                continue
            except Exception as error:
                pytest.fail(f"{key} = {value!r} gives {error!r}")
            if model.config == plain.config:
                kept = model.origin.config
            else:
                kept = json.loads((model.save(tmp_path / "kept") / "config.json").read_text())
            # None and {} say nothing, and the family's default is written for them; the ranges of
            # numbers, 0 among them, have a law of their own.
            if value is False or value not in (None, {}, 0):
                assert kept.get(key, "nothing") == value, f"{key} = {value!r} is taken in silence"


@pytest.mark.parametrize(
    "name, key, value, words",
    [
        (
            "llama",
            "rope_parameters",
            {"rope_type": "yarn", "rope_theta": 1, "factor": 4},
            "more than 1",
        ),
        ("llama", "rope_theta", 0, "more than 0"),
        ("llama", "initializer_range", "a", "it must be a number"),
        ("qwen2", "use_sliding_window", "no", "it must be true or false"),
        ("llama", "hidden_size", "32", "must be int"),
        ("llama", "num_attention_heads", 10**30, "must divide"),
        ("gpt2", "n_head", 5, "does not divide dim=24"),
        ("deepseek-v3", "head_dim", 6, "it must be qk_rope_head_dim, 4"),
        ("deepseek-v2", "topk_method", "noaux_tc", "greedy, group_limited_greedy"),
        ("t5", "dense_act_fn", "cosine", "known: relu"),
        ("t5", "is_causal", None, "can only do True"),
    ],
)
def test_refusal_says_the_key_and_what_is_possible(
    name: str, key: str, value: object, words: str, peer: Callable[[str], Peer]
) -> None:
    said = json.loads((peer(name).folder / "config.json").read_text())
    # Older folders say the base beside the scaling.
    said.pop("rope_parameters" if key == "rope_theta" else "no such key", None)
    with pytest.raises(UsageError) as caught:
        read(said | {key: value}, store.weights(peer(name).folder), None, None)
    assert f"{key} is {value!r:.40}" in str(caught.value) and words in str(caught.value)


# --- the call -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ids, words",
    [
        (torch.zeros(1, 41, dtype=torch.long), ["41 tokens", "context is 40"]),
        (torch.full((1, 3), 50), ["between 0 and 49", "got 50"]),
        (torch.full((1, 3), -1), ["between 0 and 49", "got -1"]),
        (torch.zeros(0, 3, dtype=torch.long), ["empty batch"]),
        (torch.zeros(2, 0, dtype=torch.long), ["empty batch"]),
        (torch.zeros(3, dtype=torch.long), ["shape (b, t)"]),
        (torch.zeros(1, 3), ["whole numbers"]),
    ],
)
def test_wrong_ids_say_what_is_possible(ids: torch.Tensor, words: list[str], gpt2: Path) -> None:
    with pytest.raises(UsageError) as caught:
        regard.load(gpt2)(ids)
    assert [w for w in words if w not in str(caught.value)] == []


def test_missing_source_says_how_to_give_it() -> None:
    model = regard.build("t5-small", **{k: v for k, v in SIZES.items() if k != "max_len"})
    with pytest.raises(UsageError, match=r"source=source_ids"):
        model(torch.zeros(1, 3, dtype=torch.long))
