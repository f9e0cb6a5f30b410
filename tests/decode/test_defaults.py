"""For every key of transformers' GenerationConfig: our default for a folder that has it gives transformers' ids, or the
key changes none, or a notice names it. In every runner; and what the caller gives wins over the folder."""

import copy
import functools
import json
import math
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationConfig

import regard
from regard.checkpoint import families
from regard.decode import defaults
from regard.decode.defaults import FILE, INERT, READ, TAKEN, UNSUPPORTED, settings_of
from regard.decode.engine import Engine
from regard.decode.settings import Request, Settings
from regard.errors import Notice, UsageError
from regard.fast.cpu import prepare
from tests.checkpoint.families import CASES
from tests.wide import crossed, wide

KEYS = [key for key in GenerationConfig().to_dict() if key != "transformers_version"]
NAMES = ["gpt2", "bart"]
PROMPTS = [[17, 42, 16, 31, 4], [41], [20, 20, 14, 31, 35, 8]]
# Spread and seed of weights by which the texts have many tokens, some runs of them twice, and some of the prompts'.
LIVELY = {"gpt2": (0.25, 11), "bart": (0.15, 6)}


class Folder:
    """A transformers model and ours with its weights, whose folders may say anything of generation."""

    def __init__(self, name: str):
        self.theirs = CASES[name].make()
        std, seed = LIVELY[name]
        torch.manual_seed(seed)
        for part, weight in self.theirs.named_parameters():
            norm = "norm" in part or "ln_" in part
            still = 1.0 if norm and part.endswith("weight") else 0.0
            torch.nn.init.normal_(weight, still, std * (3 if "pos" in part or "wpe" in part else 1))
        self.ours = regard.from_hf(self.theirs).eval()
        c = self.theirs.config
        self.two, self.pad = c.is_encoder_decoder, c.pad_token_id or 0
        self.base = {"pad_token_id": self.pad, "bos_token_id": 1, "max_new_tokens": 12}
        if self.two:
            self.base["decoder_start_token_id"] = c.decoder_start_token_id
        # An end that comes: what greedy search says late, and not at once.
        self.say({"eos_token_id": 2})
        said = self.written()[0]
        late = [token for ids in said for token in ids[7:] if token not in ids[:7] and token]
        self.base["eos_token_id"] = self.eos = late[0]

    def say(self, values: dict[str, Any]) -> None:
        self.theirs.generation_config = GenerationConfig(**{**self.base, **values})
        text = self.theirs.generation_config.to_json_string()
        self.ours.origin.files[FILE] = text.encode()
        vars(self.ours.origin).pop("tokenizer", None)

    def written(self) -> tuple[list[list[int]], list[list[int]]]:
        """What transformers writes without being told anything, and what we do: without prompt and end."""
        theirs, c = [], self.theirs.generation_config
        start = 1 if self.two else None
        for prompt in PROMPTS:
            out = self.theirs.generate(torch.tensor([prompt])).tolist()
            for ids in out:
                ids = ids[start or len(prompt) :]
                theirs.append(ids[: ids.index(c.eos_token_id)] if c.eos_token_id in ids else ids)
        return theirs, [r.ids for r in regard.generate(self.ours, PROMPTS)]


folder = functools.cache(Folder)


@functools.cache
def usual(name: str, beams: int) -> list[list[int]]:
    """What transformers writes where the folder says nothing but how many beams."""
    f = folder(name)
    f.say({"num_beams": beams})
    return f.written()[0]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """transformers warns of keys that greedy search does not use."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="transformers")
        yield
    transformers.logging.set_verbosity(verbosity)


# --- every key is decided -----------------------------------------------------------------------------------------


def test_every_key_of_transformers_is_decided() -> None:
    """A new key of transformers fails here until it is."""
    tables = [set(TAKEN), set(READ), set(INERT), set(UNSUPPORTED)]
    assert sum(map(len, tables)) == len(set().union(*tables))
    assert set(KEYS) <= set().union(*tables)
    assert set(TAKEN.values()) <= set(defaults.DEFAULTS)


def test_every_key_may_stand_in_an_old_config() -> None:
    """As transformers wrote them before it had generation_config.json."""
    assert set(KEYS) - families.INERT == set()


# What each key that is taken is tried with, in greedy search and (where it says nothing of beams) with three of them.
FEW = [i for i in range(3, 40) if i % 3]
VALUES: dict[str, list[dict[str, Any]]] = {
    "max_new_tokens": [{"max_new_tokens": 4}],
    "max_length": [{"max_new_tokens": None, "max_length": 11}],
    "min_new_tokens": [{"min_new_tokens": 11}],
    "min_length": [{"min_length": 12}, {"min_length": 9, "min_new_tokens": 2}],
    "repetition_penalty": [{"repetition_penalty": 1.8}, {"repetition_penalty": 0.6}],
    "encoder_repetition_penalty": [{"encoder_repetition_penalty": 2.5}],
    "no_repeat_ngram_size": [{"no_repeat_ngram_size": n} for n in (1, 2, 3)],
    "encoder_no_repeat_ngram_size": [{"encoder_no_repeat_ngram_size": n} for n in (1, 2)],
    "bad_words_ids": [{"bad_words_ids": [[i] for i in FEW]}, {"bad_words_ids": "said"}],
    "suppress_tokens": [{"suppress_tokens": FEW}],
    "begin_suppress_tokens": [
        {"begin_suppress_tokens": FEW},
        {"begin_suppress_tokens": FEW, "forced_bos_token_id": 8},
    ],
    "sequence_bias": [
        {"sequence_bias": [[[5], 6.0], [[9], -2.5], [[11], 5.0]]},
        {"sequence_bias": "said"},
    ],
    "forced_bos_token_id": [{"forced_bos_token_id": 8}],
    "forced_eos_token_id": [{"forced_eos_token_id": 17, "max_new_tokens": 5}],
    "exponential_decay_length_penalty": [{"exponential_decay_length_penalty": [2, 1.6]}],
    "num_beams": [{"num_beams": 4}],
    "length_penalty": [{"num_beams": 3, "length_penalty": x} for x in (-2.0, 3.0)],
    "early_stopping": [{"num_beams": 3, "early_stopping": x} for x in (True, "never")],
    "num_return_sequences": [{"num_beams": 3, "num_return_sequences": 3}],
    "renormalize_logits": [
        {"num_beams": 3, "renormalize_logits": True, "suppress_tokens": FEW},
        {"num_beams": 3, "renormalize_logits": True, "repetition_penalty": 1.8},
    ],
    "eos_token_id": [{"eos_token_id": 5, "sequence_bias": [[[5], 3.0]]}],
    "pad_token_id": [{"pad_token_id": 40}],
    "bos_token_id": [{"bos_token_id": 4}],
    "decoder_start_token_id": [{"decoder_start_token_id": 9}],
    # Taken as numbers: what is drawn differs.
    "do_sample": [],
    "temperature": [],
    "top_k": [],
    "top_p": [],
    "min_p": [],
}
# What a notice names: transformers changes the logits of the first beam alone.
NAMED = [("encoder_repetition_penalty", {"num_beams": 3})]
TRIED = [(n, key, i) for n in NAMES for key, each in VALUES.items() for i in range(len(each))]
FIRST = [("gpt2", key, 0) for key, each in VALUES.items() if each]
OF_TWO = [
    row for row in TRIED if row[0] == "bart" and re.match("encoder_|forced_|decoder_", row[1])
]
# Keys whose values here need not change a text: they are what the models have by themselves, or the search does not
# meet them.
SAME = {"pad_token_id", "bos_token_id", "early_stopping", "decoder_start_token_id"}


def test_every_key_that_is_taken_is_tried() -> None:
    assert set(VALUES) == set(TAKEN) | READ


def values_of(name: str, key: str, i: int) -> dict[str, Any]:
    """`said`: of words that the model would say by itself, in several tokens and in one."""
    values = dict(VALUES[key][i])
    if "said" in values.values():
        words = [ids[n : n + k] for ids in usual(name, 1) for n, k in ((0, 2), (1, 3), (3, 2))]
        # transformers takes ids from 1 on in a list.
        words = [list(word) for word in dict.fromkeys(map(tuple, words)) if word and all(word)]
        values[key] = (
            [*words, [folder(name).eos]] if key == "bad_words_ids" else [[w, -7.5] for w in words]
        )
    return values


@pytest.mark.parametrize("name, key, i", wide(TRIED, keep=[*FIRST, *OF_TWO]))
def test_a_folders_key_gives_the_ids_of_transformers(name: str, key: str, i: int) -> None:
    f, changed = folder(name), False
    for beams in ({}, {"num_beams": 3}):
        values = values_of(name, key, i)
        if beams and "num_beams" in values:
            continue
        plain = usual(name, beams.get("num_beams", 1))
        f.say({**values, **beams})
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", Notice)
            theirs, ours = f.written()
        if any(key in str(w.message) for w in told):
            assert (key, beams) in NAMED
            continue
        assert ours == theirs, values | beams
        changed |= theirs != plain
    # Else it would hold for a key that is not read.
    lone = key == "forced_bos_token_id" or "forced_bos_token_id" in values
    assert changed or i or key in SAME or (lone and not f.two)


@pytest.mark.parametrize(
    "key", ["no_repeat_ngram_size", "suppress_tokens", "num_beams", "min_length"]
)
def test_keys_of_an_old_config_are_read_as_transformers_reads_them(
    key: str, tmp_path: Path
) -> None:
    f = folder("bart")
    f.say({})
    f.theirs.save_pretrained(tmp_path)
    (tmp_path / FILE).unlink()
    path = tmp_path / "config.json"
    said = {**f.base, **VALUES[key][0], "max_length": 10}
    del said["max_new_tokens"]
    path.write_text(json.dumps(json.loads(path.read_text()) | said))
    theirs = type(f.theirs).from_pretrained(tmp_path)
    ours = regard.load(tmp_path)
    for prompt in PROMPTS:
        (ids,) = theirs.generate(torch.tensor([prompt]))[:, 1:].tolist()
        ids = ids[: ids.index(f.eos)] if f.eos in ids else ids
        assert regard.generate(ours, [prompt])[0].ids == ids
    assert "generation settings from config.json: " in Engine(ours).explain()


# --- what is not taken --------------------------------------------------------------------------------------------

ACTIVE: dict[str, Any] = {
    "max_time": 3.0, "stop_strings": ["."], "cache_implementation": "quantized", "top_h": 0.4,
    "epsilon_cutoff": 0.01, "eta_cutoff": 0.01, "remove_invalid_values": True, "token_healing": True,
    "guidance_scale": 1.5, "watermarking_config": {"bias": 2.0}, "penalty_alpha": 0.6,
    "dola_layers": "low", "constraints": [1], "force_words_ids": [[4]], "forced_decoder_ids": [[1, 4]],
    "typical_p": 0.7, "num_beam_groups": 2, "diversity_penalty": 0.5,
}  # fmt: skip


@pytest.mark.parametrize("key", UNSUPPORTED)
def test_a_key_that_is_not_taken_is_named(key: str) -> None:
    f = folder("gpt2")
    f.say({})
    said = json.loads(f.ours.origin.files[FILE]) | {"do_sample": True}
    f.ours.origin.files[FILE] = json.dumps(said | {key: ACTIVE[key]}).encode()
    with pytest.warns(Notice, match=f"generation_config.json: {key}="):
        regard.generate(f.ours, PROMPTS[0])
    # What matters where tokens are drawn alone is idle where none is.
    drawn = {"top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}
    greedy = [said | {key: ACTIVE[key], "do_sample": False}] if key in drawn else []
    for quiet in (*greedy, *(said | {key: idle} for idle in (None, *UNSUPPORTED[key]))):
        f.ours.origin.files[FILE] = json.dumps(quiet).encode()
        with warnings.catch_warnings():
            warnings.simplefilter("error", Notice)
            regard.generate(f.ours, PROMPTS[0])


def test_beam_sampling_is_named() -> None:
    f = folder("gpt2")
    f.say({"do_sample": True, "num_beams": 3, "temperature": 0.7})
    with pytest.warns(Notice, match="do_sample is not taken, as num_beams is"):
        found = settings_of(f.ours, {})(1)
    assert (found.beams, found.temperature) == (3, 0.0)


@pytest.mark.parametrize("value", ["hot", -1.0, [0.5]])
def test_a_value_that_cannot_be_is_the_folders_mistake(value: Any) -> None:
    f = folder("gpt2")
    f.say({})
    said = json.loads(f.ours.origin.files[FILE])
    f.ours.origin.files[FILE] = json.dumps(
        said | {"do_sample": True, "temperature": value}
    ).encode()
    with pytest.raises(UsageError, match=r"generation_config.json: temperature is"):
        regard.generate(f.ours, PROMPTS[0])


# --- what is drawn ------------------------------------------------------------------------------------------------

DRAWN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"do_sample": True}, {"temperature": 1.0, "top_k": 50}),
    (
        {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20},
        {"temperature": 0.6, "top_p": 0.9, "top_k": 20},
    ),
    ({"do_sample": True, "min_p": 0.1, "top_k": 0}, {"min_p": 0.1, "temperature": 1.0}),
    ({"temperature": 0.6}, {}),
    ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"top_p": 0.9}),
    ({"do_sample": True, "num_return_sequences": 3}, {"temperature": 1.0, "top_k": 50, "samples": 3}),
]  # fmt: skip


@pytest.mark.parametrize("said, want", DRAWN)
def test_a_folder_that_draws_is_drawn_from(said: dict[str, Any], want: dict[str, Any]) -> None:
    f = folder("gpt2")
    f.say(said)
    base = {"max_new_tokens": 12, "eos": (f.eos,)}
    assert settings_of(f.ours, {})(5) == Settings.of(base | want)
    shown = Engine(f.ours).explain()
    assert all(f"{name} {value}" in shown for name, value in want.items())
    # Whoever calls decides.
    assert settings_of(f.ours, {}, "plain")(5) == Settings(eos=(f.eos,))
    mine: dict[str, Any] = {"temperature": 0.0, "samples": 1, "beams": 1, "max_new_tokens": 3}
    found = settings_of(f.ours, mine)(5)
    assert all(getattr(found, name) == value for name, value in mine.items())


@pytest.mark.parametrize(
    "given",
    [{"temperature": 0.5}, {"lookup": 2}, {"top_logprobs": 1}, {"overflow": "crop"}],
    ids=lambda given: next(iter(given)),
)
def test_what_does_not_go_with_a_folders_beams_wins_over_them(given: dict[str, Any]) -> None:
    f = folder("gpt2")
    f.say({"num_beams": 4, "num_return_sequences": 2, "length_penalty": 2.0})
    with pytest.warns(Notice, match="num_beams=4 is not taken"):
        found = settings_of(f.ours, given)(1)
    assert (found.beams, found.n_best) == (1, 1)
    with pytest.warns(Notice, match="num_beams=4 is not taken, as a stream"):
        list(regard.stream(f.ours, PROMPTS[0]))


def test_a_length_that_the_prompt_has_already_is_named() -> None:
    f = folder("gpt2")
    f.say({"max_new_tokens": None, "max_length": 3})
    with pytest.warns(Notice, match="max_length=3 leaves no room after 5 tokens"):
        found = settings_of(f.ours, {})(5)
    assert found.max_new_tokens == Settings().max_new_tokens
    # The context is an end too.
    f.say({"max_new_tokens": 10_000})
    longest = f.theirs.config.n_positions
    for prompt, room in ((5, longest - 5), (longest - 1, 1), (longest + 3, 1)):
        assert settings_of(f.ours, {})(prompt).max_new_tokens == room
    # What the caller gives is not cut in silence: a text that is too long is refused.
    assert settings_of(f.ours, {"max_new_tokens": 10_000})(5).max_new_tokens == 10_000
    # A least length counts the prompt. One that is more than the most is as much as there may be.
    f.say({"min_length": 8})
    assert [settings_of(f.ours, {})(n).min_new_tokens for n in (5, 8, 9)] == [3, 0, 0]
    f.say({"min_length": 30})
    assert settings_of(f.ours, {"max_new_tokens": 4})(5).min_new_tokens == 4


# --- every runner -------------------------------------------------------------------------------------------------

RULES: dict[str, dict[str, Any]] = {
    "runs": {"no_repeat_ngram_size": 2},
    "runs of the source": {"encoder_no_repeat_ngram_size": 1},
    "sequences": {"sequence_bias": {(12, 31): -math.inf, (16, 42): -math.inf, (4, 31): 2.0}},
    "begin": {"begin_suppress_tokens": FEW},
    "source": {"encoder_repetition_penalty": 3.0},
    "decay": {"exponential_decay_length_penalty": (1, 1.5), "eos": [4, 17]},
    "renormalize": {"renormalize_logits": True, "banned": FEW},
    "all": {
        "no_repeat_ngram_size": 2, "sequence_bias": {(12, 31): -3.0}, "begin_suppress_tokens": [8],
        "repetition_penalty": 1.3, "encoder_repetition_penalty": 1.5, "min_new_tokens": 3, "eos": [4],
        "exponential_decay_length_penalty": (4, 1.2), "renormalize_logits": True, "banned": [13],
    },
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "samples": {"temperature": 0.8, "top_p": 0.9, "samples": 2, "seed": 3},
    "beams": {"beams": 3, "n_best": 3},
    "lookup": {"lookup": 3},
}
RUNNERS: dict[str, dict[str, Any]] = {
    "paged": {"page": 4, "pages": 200},
    "graph": {"page": 4, "pages": 200, "runner": "graph"},
    "native": {"page": 4, "pages": 200},
    "crop": {"layout": "contiguous"},
}


@functools.cache
def prepared(name: str) -> Any:
    return prepare(copy.deepcopy(folder(name).ours), "fp32")


def said_by(model: Any, two: bool, s: Settings, **options: Any) -> list[list[list[int]]]:
    engine = Engine(model, **options)
    for i, prompt in enumerate(PROMPTS):
        source = torch.tensor(prompt) if two else None
        engine.submit(Request([1] if two else prompt, s, source=source, key=i))
    found = {e.request: e.done for e in engine.run() if e.done is not None}
    assert {r.finish for each in found.values() for r in each} <= {"eos", "length"}
    return [[r.ids for r in found[i]] for i in range(len(PROMPTS))]


@pytest.mark.parametrize("rule, name, kind", crossed(reversed(RULES), NAMES, KINDS))
def test_rules_hold_in_every_runner(name: str, rule: str, kind: str) -> None:
    f, how = folder(name), {"max_new_tokens": 10} | KINDS[kind]
    s = Settings.of(how | RULES[rule])
    plain = said_by(f.ours, f.two, s, layout="contiguous")
    for runner, options in RUNNERS.items():
        if runner == "crop" and (f.two or s.beams > 1):
            continue
        model = prepared(name) if runner == "native" else f.ours
        settings = Settings.of(
            how | RULES[rule] | ({"overflow": "crop"} if runner == "crop" else {})
        )
        assert said_by(model, f.two, settings, **options) == plain, runner
    # Guesses change no token.
    if kind == "lookup":
        assert plain == said_by(f.ours, f.two, Settings.of({**how, "lookup": 0} | RULES[rule]))
    elif rule != "renormalize":
        assert plain != said_by(f.ours, f.two, Settings.of(how), layout="contiguous")


def test_rules_of_one_row_leave_its_neighbours_alone() -> None:
    f = folder("gpt2")
    ruled, free = (Settings.of({"max_new_tokens": 10} | x) for x in (RULES["runs"], {}))
    engine = Engine(f.ours, page=4, pages=200)
    for i, prompt in enumerate(PROMPTS):
        engine.submit(Request(prompt, ruled if i == 1 else free, key=i))
    found = {e.request: e.done for e in engine.run() if e.done is not None}
    alone = [said_by(f.ours, False, s, page=4) for s in (free, ruled, free)]
    assert [[r.ids for r in found[i]] for i in range(3)] == [alone[i][i] for i in range(3)]
