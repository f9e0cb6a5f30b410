"""The generation settings that a model's folder names, as transformers reads them: in generation_config.json, or where
there is none in config.json. What the caller gives wins over them.

For every key of transformers' GenerationConfig it is decided here what becomes of it, and a test walks them: it is
taken, or it changes no token, or a notice says that it is not taken."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from regard.decode.check import check_tokens, context_of, hears, written
from regard.decode.settings import DEFAULTS, DRAWING, Settings
from regard.errors import UsageError, check_choice, notice
from regard.text import Special, Tokenizer, special_ids
from regard.text.build import read_json

FILE = "generation_config.json"
WHERE = ("model", "plain")  # the defaults of a call
# Keys that are settings of ours, by their names here.
TAKEN = {
    "max_new_tokens": "max_new_tokens",
    "min_new_tokens": "min_new_tokens",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "encoder_repetition_penalty": "encoder_repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size": "encoder_no_repeat_ngram_size",
    "sequence_bias": "sequence_bias",
    "begin_suppress_tokens": "begin_suppress_tokens",
    "forced_bos_token_id": "forced_first",
    "exponential_decay_length_penalty": "exponential_decay_length_penalty",
    "num_beams": "beams",
    "length_penalty": "length_penalty",
    "early_stopping": "early_stopping",
    "renormalize_logits": "renormalize_logits",
}
# Keys that `_read` makes settings of, or that `special_ids` reads.
READ = frozenset(
    """max_length min_length do_sample temperature num_return_sequences bad_words_ids suppress_tokens
    forced_eos_token_id eos_token_id bos_token_id pad_token_id decoder_start_token_id""".split()  # noqa: SIM905
)
# Keys that change no token: how transformers computes, guesses ahead or reports.
INERT = frozenset(
    """use_cache cache_config max_cache_len compile_config disable_compile low_memory prefill_chunk_size
    continuous_batching_config output_attentions output_hidden_states output_scores output_logits
    return_dict_in_generate use_mtp is_assistant num_assistant_tokens num_assistant_tokens_schedule
    assistant_confidence_threshold assistant_early_exit assistant_lookbehind assistant_ensemble_weight
    target_lookbehind speculation_type prompt_lookup_num_tokens max_matching_ngram_size
    transformers_version _from_model_config""".split()  # noqa: SIM905
)
# Keys that are not taken, each with the values that do nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "max_time": (),
    "stop_strings": (),
    "cache_implementation": (
        "static",
        "dynamic",
        "hybrid",
        "offloaded",
        "offloaded_static",
        "paged",
    ),
    "top_h": (),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "remove_invalid_values": (False,),
    "token_healing": (False,),
    "guidance_scale": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0,),
    "watermarking_config": (),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "constraints": (),
    "force_words_ids": (),
    # Of older ones.
    "forced_decoder_ids": (),
}
# Of these, what matters where tokens are drawn.
DRAWN = ("top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
ALONE = ("lookup", "draft", "overflow", "top_logprobs")  # beside DRAWING, what beam search has not
SEARCHED = ("beams", "n_best")
TOP_K = 50  # transformers', where a folder draws and does not say


def tokenizer_of(model: Any) -> Tokenizer | None:
    """The tokenizer of the model's folder, made once."""
    origin = model.origin
    if origin is None:
        return None
    if not hasattr(origin, "tokenizer"):
        origin.tokenizer = Tokenizer.from_files(origin.files, origin.config)
    return origin.tokenizer


def special_of(model: Any) -> Special:
    if model.origin is None:
        return Special()
    tokenizer = tokenizer_of(model)
    return tokenizer.special if tokenizer else special_ids(model.origin.files, model.origin.config)


def folder_settings(model: Any) -> tuple[dict[str, Any], str]:
    """What the model's folder says of generation: our settings, and max_length and min_length, which count the prompt;
    and the file that says it. It is read once; then a notice names each key that is not taken."""
    origin = model.origin
    if origin is None:
        return {"eos": ()}, ""
    files, kept = (origin.files.get(FILE), origin.config), vars(origin).get("generation")
    if kept is None or kept[0] is not files[0] or kept[1] is not files[1]:
        kept = origin.generation = (*files, *_folder_settings(model, origin))
    return dict(kept[2]), kept[3]


def _folder_settings(model: Any, origin: Any) -> tuple[dict[str, Any], str]:
    """As `folder_settings`, read anew: the settings, and the file that says them. End tokens are those of
    `special_of`, which has read both files."""
    found: dict[str, Any] = {"eos": special_of(model).eos}
    # As in transformers, config.json decides nothing of this where there is a generation_config.json.
    where = FILE if FILE in origin.files else "config.json"
    said = read_json(origin.files, FILE) if FILE in origin.files else _legacy(origin.config)
    said = {key: value for key, value in said.items() if value is not None}
    # Of sound, `speech.opening` takes what stands before an answer.
    taken = {"forced_decoder_ids"} if hears(model) else set()
    for key in (key for key in UNSUPPORTED if key in said and key not in taken):
        idle = said[key] in UNSUPPORTED[key] or (key in DRAWN and said.get("do_sample") is not True)
        if not idle:
            more = f"{key}={said[key]!r:.60} is not taken, so texts may differ from transformers'"
            notice(f"{where}: {more}" + ("; give stop=" if key == "stop_strings" else ""))
    found |= {ours: said[key] for key, ours in TAKEN.items() if key in said}
    found |= {key: said[key] for key in ("max_length", "min_length") if key in said}
    try:
        _read(said, found)
        for name, value in found.items():
            _check(name, value)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    vocab = getattr(written(model), "vocab", None)
    return found if vocab is None else _known(found, vocab), where


def _legacy(config: dict[str, Any]) -> dict[str, Any]:
    """A config's own keys, then those of the part of it that writes."""
    parts = [config.get(name) for name in ("decoder", "generator", "text_config")]
    inner = next((part for part in parts if isinstance(part, dict)), {})
    return inner | {key: value for key, value in config.items() if value is not None}


def _read(said: dict[str, Any], found: dict[str, Any]) -> None:
    """Settings that are made of several keys."""
    drawn, many = said.get("do_sample") is True, said.get("num_return_sequences", 1)
    if drawn:
        found |= {"temperature": said.get("temperature", 1.0), "top_k": said.get("top_k", TOP_K)}
    if many != 1:
        found["n_best" if said.get("num_beams", 1) != 1 else "samples"] = many
    last = said.get("forced_eos_token_id")
    if isinstance(last, list):
        if len(last) > 1:
            notice(f"forced_eos_token_id has {len(last)} ids; the lowest is forced")
        last = min(last, default=None)
    if last is not None:
        found["forced_last"] = last
    words = said.get("bad_words_ids", [])
    if not isinstance(words, list) or not all(isinstance(word, list) and word for word in words):
        raise UsageError(f"bad_words_ids must be lists of ids, got {words!r:.60}")
    words = list(dict.fromkeys(tuple(word) for word in words))
    single, several = ([w for w in words if (len(w) == 1) == one] for one in (True, False))
    # An end by itself is not a bad word, but it may be suppressed.
    banned = [i for (i,) in single if i not in found["eos"]]
    banned += said.get("suppress_tokens") or []
    if banned:
        found["banned"] = tuple(dict.fromkeys(banned))
    if several:
        found["sequence_bias"] = [
            *found.get("sequence_bias", []),
            *([w, -math.inf] for w in several),
        ]


def _check(name: str, value: Any) -> None:
    """A value that our settings would refuse is the folder's mistake."""
    if name in ("max_length", "min_length"):
        if type(value) is not int or value < 0:
            raise UsageError(f"{name} is {value!r}; give a whole number from 0 on")
        return
    check_given({name: value})


def check_given(given: dict[str, Any]) -> None:
    """Settings that others will be added to, by a folder: what would be refused whatever it says."""
    most: dict[str, Any] = {"max_new_tokens": 10**6} if "min_new_tokens" in given else {}
    several = given.get("n_best", 1)
    if several != 1 and "beams" not in given and type(several) is int:
        most["beams"] = max(1, several)
    elif given.get("samples", 1) != 1:
        most["temperature"] = 1.0
    Settings.of({**most, **given})


def _known(found: dict[str, Any], vocab: int) -> dict[str, Any]:
    """Without the ids that the vocabulary does not have: published folders with a smaller one than GPT-2's name ids
    that the model cannot write."""

    def beyond(entry: Any) -> list[int]:
        ids = entry[0] if isinstance(entry, tuple | list) else [entry]
        return [i for i in ids if not 0 <= i < vocab]

    for name in ("eos", "banned", "begin_suppress_tokens", "sequence_bias"):
        lost = [i for entry in found.get(name, ()) for i in beyond(entry)]
        if lost:
            where = f"outside the vocabulary (0 to {vocab - 1})"
            notice(f"the model folder's {name} {lost[0]!r} is {where}; left out")
            found[name] = tuple(entry for entry in found[name] if not beyond(entry))
    for name in ("forced_first", "forced_last"):
        if found.get(name) is not None:
            check_tokens([found[name]], vocab, f"the model folder's {name}")
    return found


def settings_of(
    model: Any, given: dict[str, Any], defaults: str = "model", not_for_beams: str = ""
) -> Callable[[int], Settings]:
    """The settings of a prompt of so many tokens: what is given, and else what the model's folder names (`defaults`:
    plain takes its end tokens alone). `not_for_beams` names, in words for a notice, what else is asked for that
    does not go with beam search: then the folder's beams are left out."""
    check_choice("defaults", defaults, WHERE)
    plain = {"eos": special_of(model).eos}
    named: dict[str, Any] = folder_settings(model)[0] if defaults == "model" else plain
    said = {name: value for name, value in named.items() if name not in given}
    most, least = said.pop("max_length", None), said.pop("min_length", 0)
    _settle(said, given, not_for_beams)
    bounded = given.get("overflow", "error") == "error"
    longest = context_of(model) if bounded else None

    @functools.cache
    def sized(prompt: int) -> Settings:
        found = {**said, **given}
        # In transformers a forced first token is that of a text of one token.
        if prompt > 1 and "forced_first" in said:
            del found["forced_first"]
        if "max_new_tokens" not in found and most is not None:
            # Whisper's does not count what stands before an answer.
            counted = 0 if hears(model) else prompt
            if most > counted:
                found["max_new_tokens"] = most - counted
            else:
                notice(
                    f"max_length={most} leaves no room after {prompt} tokens of prompt; not taken"
                )
        new = found.get("max_new_tokens", DEFAULTS["max_new_tokens"])
        if longest is not None and "max_new_tokens" in found.keys() - given.keys():
            new = found["max_new_tokens"] = max(1, min(new, longest - prompt))
        if "min_new_tokens" not in given:
            found["min_new_tokens"] = max(0, min(new, said.get("min_new_tokens", least - prompt)))
        return Settings.of(found)

    return sized


def _settle(said: dict[str, Any], given: dict[str, Any], not_for_beams: str) -> None:
    """Take out of a folder's settings what does not go with the others, or with what is given."""
    beams = given.get("beams", said.get("beams", 1))
    wishes = [
        name for name in (*DRAWING, *ALONE) if given.get(name, DEFAULTS[name]) != DEFAULTS[name]
    ]
    not_for_beams = not_for_beams or next(iter(wishes), "")
    if beams != 1 and "beams" not in given and not_for_beams:
        notice(f"num_beams={beams} is not taken, as {not_for_beams} does not go with beam search")
        beams = 1
    if beams == 1:
        for name in SEARCHED:
            said.pop(name, None)
        if not given.get("temperature", said.get("temperature", 0)):
            said.pop("samples", None)
        return
    if said.get("temperature") and "beams" not in given:
        notice("do_sample is not taken, as num_beams is: beam search does not draw here")
    if said.get("encoder_repetition_penalty", 1.0) != 1.0:
        notice(
            "encoder_repetition_penalty is that of every beam here; transformers has it of the first alone"
        )
    for name in DRAWING:
        said.pop(name, None)
    if said.get("n_best", 1) > beams:
        said["n_best"] = beams


def described(model: Any) -> str:
    """The settings that the model's folder names, in a line; nothing where it names none."""
    found, where = folder_settings(model)
    shown = [f"{name} {value}" for name, value in found.items() if name != "eos"]
    return f"generation settings from {where}: {', '.join(shown)}" if shown else ""
