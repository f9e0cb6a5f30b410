"""What settings come of what a folder says and what the caller gives, and what is noticed: without a peer, key by key.
That texts are those of transformers is tested in test_defaults.py."""

import copy
import json
import math
import warnings
from typing import Any

import pytest

from regard.checkpoint.hf import Origin
from regard.decode.defaults import check_given, described, folder_settings, settings_of
from regard.decode.settings import Settings
from regard.errors import Notice, UsageError
from tests.decode.tiny import VOCAB, model

FILE = "generation_config.json"
CONTEXT = 64


def telling(said: dict[str, Any], config: dict[str, Any] | None = None) -> Any:
    """A model of 19 tokens and a context of 64, whose folder says this."""
    made = copy.copy(model("delta_gqa"))
    files = {FILE: json.dumps(said).encode()} if config is None else {}
    made.origin = Origin("llama", config=config or {}, files=files)
    return made


def settled(made: Any, given: dict[str, Any], prompt: int, **how: Any) -> tuple[Settings, str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = settings_of(made, given, **how)(prompt)
    assert {w.category for w in seen} <= {Notice}
    return found, " | ".join(str(w.message) for w in seen)


INF = math.inf
# What the folder says, what the caller gives, tokens of the prompt; what comes of it, and what is noticed.
CASES: list[tuple[dict[str, Any], dict[str, Any], int, dict[str, Any], str]] = [
    ({}, {}, 5, {}, ""),
    ({"top_k": 9, "top_p": None}, {}, 5, {"top_k": 9}, ""),
    # Lengths.
    ({"max_length": 10}, {}, 4, {"max_new_tokens": 6}, ""),
    ({"max_length": 10}, {}, 9, {"max_new_tokens": 1}, ""),
    ({"max_length": 10}, {}, 10, {}, "max_length=10 leaves no room after 10 tokens of prompt; not taken"),
    ({"max_length": 10}, {"max_new_tokens": 3}, 10, {"max_new_tokens": 3}, ""),
    ({"max_length": 10, "max_new_tokens": 7}, {}, 4, {"max_new_tokens": 7}, ""),
    ({"max_length": 100}, {}, 4, {"max_new_tokens": CONTEXT - 4}, ""),
    ({"max_new_tokens": 100}, {}, CONTEXT - 1, {"max_new_tokens": 1}, ""),
    ({"max_new_tokens": 100}, {}, CONTEXT + 9, {"max_new_tokens": 1}, ""),
    ({"max_new_tokens": 100}, {"overflow": "crop"}, 4, {"max_new_tokens": 100, "overflow": "crop"}, ""),
    ({"max_new_tokens": 100}, {"max_new_tokens": 90}, 4, {"max_new_tokens": 90}, ""),
    ({"min_length": 8}, {}, 5, {"min_new_tokens": 3}, ""),
    ({"min_length": 8}, {}, 9, {}, ""),
    ({"min_length": 0}, {}, 1, {}, ""),
    ({"min_length": 8, "min_new_tokens": 2}, {}, 5, {"min_new_tokens": 2}, ""),
    ({"min_length": 8}, {"min_new_tokens": 1}, 5, {"min_new_tokens": 1}, ""),
    ({"min_new_tokens": 200}, {}, 5, {"min_new_tokens": 64}, ""),
    ({"min_new_tokens": 200, "max_new_tokens": 9}, {}, 5, {"min_new_tokens": 9, "max_new_tokens": 9}, ""),
    # Tokens.
    ({"eos_token_id": [3, 4]}, {}, 5, {"eos": (3, 4)}, ""),
    ({"eos_token_id": [3, 4]}, {"eos": (5,)}, 5, {"eos": (5,)}, ""),
    ({"suppress_tokens": [7, 7, 8]}, {}, 5, {"banned": (7, 8)}, ""),
    ({"bad_words_ids": [[4], [9], [4]]}, {}, 5, {"banned": (4, 9)}, ""),
    (
        {"bad_words_ids": [[3], [4, 5], [6]], "eos_token_id": 3, "suppress_tokens": [3], "sequence_bias": [[[2], 1.0]]},
        {}, 5, {"eos": (3,), "banned": (6, 3), "sequence_bias": (((2,), 1.0), ((4, 5), -INF))}, "",
    ),
    ({"bad_words_ids": [[4, 5], [4, 5]]}, {}, 5, {"sequence_bias": (((4, 5), -INF),)}, ""),
    ({"forced_eos_token_id": 0}, {}, 5, {"forced_last": 0}, ""),
    ({"forced_eos_token_id": [5]}, {}, 5, {"forced_last": 5}, ""),
    ({"forced_eos_token_id": [6, 5]}, {}, 5, {"forced_last": 5}, "forced_eos_token_id has 2 ids; the lowest is forced"),
    ({"forced_eos_token_id": []}, {}, 5, {}, ""),
    ({"forced_bos_token_id": 4}, {}, 1, {"forced_first": 4}, ""),
    ({"forced_bos_token_id": 4}, {}, 2, {}, ""),
    ({"forced_bos_token_id": 4}, {"forced_first": 6}, 2, {"forced_first": 6}, ""),
    # Ids that the vocabulary does not have.
    (
        {"suppress_tokens": [0, VOCAB - 1, VOCAB, 99]}, {}, 5, {"banned": (0, VOCAB - 1)},
        f"the model folder's banned {VOCAB} is outside the vocabulary (0 to {VOCAB - 1}); left out",
    ),
    (
        {"begin_suppress_tokens": [-1, 0]}, {}, 5, {"begin_suppress_tokens": (0,)},
        f"the model folder's begin_suppress_tokens -1 is outside the vocabulary (0 to {VOCAB - 1}); left out",
    ),
    (
        {"sequence_bias": [[[1, 50], 1.0], [[0, 2], 3.0]]}, {}, 5, {"sequence_bias": (((0, 2), 3.0),)},
        f"the model folder's sequence_bias 50 is outside the vocabulary (0 to {VOCAB - 1}); left out",
    ),
    (
        {"eos_token_id": [50, 3]}, {}, 5, {"eos": (3,)},
        f"the model folder's eos 50 is outside the vocabulary (0 to {VOCAB - 1}); left out",
    ),
    # What is drawn, and what is searched.
    ({"do_sample": True}, {}, 5, {"temperature": 1.0, "top_k": 50}, ""),
    ({"do_sample": True, "temperature": 0.5, "top_k": 3}, {}, 5, {"temperature": 0.5, "top_k": 3}, ""),
    ({"do_sample": True, "num_return_sequences": 3}, {}, 5, {"temperature": 1.0, "top_k": 50, "samples": 3}, ""),
    ({"num_return_sequences": 3}, {}, 5, {}, ""),
    ({"num_return_sequences": 3}, {"temperature": 0.5}, 5, {"samples": 3, "temperature": 0.5}, ""),
    ({"num_return_sequences": 2, "num_beams": 4}, {}, 5, {"n_best": 2, "beams": 4}, ""),
    ({"num_return_sequences": 4, "num_beams": 4}, {}, 5, {"n_best": 4, "beams": 4}, ""),
    ({"num_return_sequences": 4, "num_beams": 4}, {"beams": 4}, 5, {"n_best": 4, "beams": 4}, ""),
    ({"num_return_sequences": 4, "num_beams": 4}, {"beams": 3}, 5, {"n_best": 3, "beams": 3}, ""),
    ({"num_return_sequences": 2, "num_beams": 4}, {"beams": 1}, 5, {}, ""),
    (
        {"num_return_sequences": 2, "num_beams": 4}, {"lookup": 2}, 5, {"lookup": 2},
        "num_beams=4 is not taken, as lookup does not go with beam search",
    ),
    (
        {"do_sample": True, "num_beams": 3, "top_k": 7, "top_p": 0.5}, {}, 5, {"beams": 3},
        "do_sample is not taken, as num_beams is: beam search does not draw here",
    ),
    ({"do_sample": True, "num_beams": 3, "top_p": 0.5}, {"beams": 2}, 5, {"beams": 2}, ""),
    (
        {"num_beams": 2, "encoder_repetition_penalty": 2.0}, {}, 5, {"beams": 2, "encoder_repetition_penalty": 2.0},
        "encoder_repetition_penalty is that of every beam here; transformers has it of the first alone",
    ),
    ({"num_beams": 2, "encoder_repetition_penalty": 1.0}, {}, 5, {"beams": 2}, ""),
    ({"encoder_repetition_penalty": 2.0}, {}, 5, {"encoder_repetition_penalty": 2.0}, ""),
    (
        {"stop_strings": ["x"]}, {}, 5, {},
        "stop_strings=['x'] is not taken, so texts may differ from transformers'; give stop=",
    ),
    ({"top_h": 0.5}, {}, 5, {}, ""),
]  # fmt: skip


@pytest.mark.parametrize("said, given, prompt, want, notes", CASES, ids=lambda x: str(x)[:60])
def test_settings_are_of_the_folder_and_of_who_calls(
    said: dict[str, Any], given: dict[str, Any], prompt: int, want: dict[str, Any], notes: str
) -> None:
    found, noticed = settled(telling(said), given, prompt)
    assert found == Settings(**want)
    assert noticed.removeprefix(f"{FILE}: ") == notes
    # A config may say the same.
    assert settled(telling({}, said), given, prompt)[0] == found
    # Of all this `plain` takes the ends alone; who gives others, has these.
    ends = Settings.of({"eos": want.get("eos", ()), **given})
    if "is outside" not in notes:
        assert settled(telling(said), given, prompt, defaults="plain") == (ends, "")


def test_what_is_asked_for_beside_beams_is_named() -> None:
    made = telling({"num_beams": 4})
    found, noticed = settled(made, {}, 5, not_for_beams="a stream")
    assert found.beams == 1 and "as a stream does not go with beam search" in noticed
    assert settled(made, {"beams": 2}, 5, not_for_beams="a stream") == (Settings(beams=2), "")


@pytest.mark.parametrize(
    "said, says",
    [
        ({"max_length": -1}, "max_length is -1; give a whole number from 0 on"),
        ({"min_length": True}, "min_length is True; give a whole number from 0 on"),
        ({"max_length": 1.5}, "max_length is 1.5; give a whole number from 0 on"),
        ({"bad_words_ids": 3}, "bad_words_ids must be lists of ids, got 3"),
        ({"bad_words_ids": [3]}, "bad_words_ids must be lists of ids"),
        ({"bad_words_ids": [[]]}, "bad_words_ids must be lists of ids"),
        ({"min_new_tokens": 1_000_001}, "min_new_tokens is 1000001"),
        ({"num_return_sequences": 0}, "samples is 0"),
        ({"num_return_sequences": "x"}, "samples is 'x'"),
        ({"num_return_sequences": "x", "num_beams": 2}, "n_best is 'x'"),
        ({"num_return_sequences": 0, "num_beams": 2}, "n_best is 0"),
    ],
)
def test_what_a_folder_may_not_say(said: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=f"{FILE}: {says}"):
        folder_settings(telling(said))
    with pytest.raises(UsageError, match=f"config.json: {says}"):
        folder_settings(telling({}, said))


def test_a_forced_token_must_be_one() -> None:
    for key, ours in (
        ("forced_bos_token_id", "forced_first"),
        ("forced_eos_token_id", "forced_last"),
    ):
        with pytest.raises(UsageError, match=f"the model folder's {ours} {VOCAB} is outside"):
            folder_settings(telling({key: VOCAB}))


def test_given_settings_are_checked_before_a_folder_is_known() -> None:
    for fine in (
        {}, {"n_best": 3}, {"n_best": 3, "beams": 3}, {"samples": 3}, {"samples": 3, "temperature": 0.1},
        {"min_new_tokens": 100}, {"min_new_tokens": 9, "max_new_tokens": 9}, {"n_best": 1, "samples": 2},
    ):  # fmt: skip
        check_given(fine)
    for bad, says in (
        ({"n_best": 3, "beams": 2}, "n_best=3 of 2 beams"),
        ({"n_best": 3, "beams": 1}, "n_best=3 of 1 beams"),
        ({"n_best": 0}, "n_best is 0"),
        ({"samples": 3, "temperature": 0.0}, "samples=3 would all be the same"),
        ({"samples": 3, "n_best": 3}, "does not draw|would all be the same"),
        ({"min_new_tokens": 10, "max_new_tokens": 9}, "min_new_tokens=10 is more than"),
    ):
        with pytest.raises(UsageError, match=says):
            check_given(bad)


def test_a_folder_is_read_once_and_again_when_it_says_something_else() -> None:
    made = telling({"top_k": 3, "stop_strings": ["x"]})
    for notes in ("stop_strings", ""):
        found, noticed = settled(made, {}, 5)
        assert found.top_k == 3 and notes in noticed and bool(notes) == bool(noticed)
    # Who changes what is given does not change what the folder says.
    folder_settings(made)[0]["top_k"] = 99
    assert described(made) == f"generation settings from {FILE}: top_k 3"
    made.origin.files[FILE] = b'{"top_k": 4}'
    assert described(made) == f"generation settings from {FILE}: top_k 4"
    del made.origin.files[FILE]
    made.origin.config = {"top_k": 5}
    assert described(made) == "generation settings from config.json: top_k 5"
    made.origin.config = {"top_k": 6, "num_beams": 2}
    assert described(made) == "generation settings from config.json: top_k 6, beams 2"
    made.origin.config = {"eos_token_id": 3}
    assert described(made) == "" and folder_settings(made)[0] == {"eos": (3,)}
    made.origin = None
    assert folder_settings(made) == ({"eos": ()}, "") and described(made) == ""


@pytest.mark.parametrize("part", ["decoder", "generator", "text_config"])
def test_a_config_may_say_it_of_the_part_that_writes(part: str) -> None:
    """But its own keys win, unless they say nothing."""
    inner = {"top_k": 4, "top_p": 0.5, "min_p": 0.1}
    made = telling({}, {part: inner, "top_k": 3, "min_p": None})
    assert settled(made, {}, 5)[0] == Settings(top_k=3, top_p=0.5, min_p=0.1)
