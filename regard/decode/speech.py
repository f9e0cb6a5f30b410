"""What stands before an answer to sound: language, task, and that no times are wanted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.decode.check import hears
from regard.decode.defaults import FILE, special_of
from regard.errors import UsageError, nearest
from regard.text.build import read_json

TASKS = ("transcribe", "translate")
# What published folders call languages beside their codes.
LANGUAGES = dict(
    pair.split(":")
    for pair in """english:en chinese:zh german:de spanish:es russian:ru korean:ko french:fr japanese:ja portuguese:pt
    turkish:tr polish:pl catalan:ca dutch:nl arabic:ar swedish:sv italian:it indonesian:id hindi:hi finnish:fi
    vietnamese:vi hebrew:he ukrainian:uk greek:el malay:ms czech:cs romanian:ro danish:da hungarian:hu tamil:ta
    norwegian:no thai:th urdu:ur croatian:hr bulgarian:bg lithuanian:lt latin:la maori:mi malayalam:ml welsh:cy
    slovak:sk telugu:te persian:fa latvian:lv bengali:bn serbian:sr azerbaijani:az slovenian:sl kannada:kn
    estonian:et macedonian:mk breton:br basque:eu icelandic:is armenian:hy nepali:ne mongolian:mn bosnian:bs
    kazakh:kk albanian:sq swahili:sw galician:gl marathi:mr punjabi:pa sinhala:si khmer:km shona:sn yoruba:yo
    somali:so afrikaans:af occitan:oc georgian:ka belarusian:be tajik:tg sindhi:sd gujarati:gu amharic:am
    yiddish:yi lao:lo uzbek:uz faroese:fo pashto:ps turkmen:tk nynorsk:nn maltese:mt sanskrit:sa luxembourgish:lb
    myanmar:my tibetan:bo tagalog:tl malagasy:mg assamese:as tatar:tt hawaiian:haw lingala:ln hausa:ha bashkir:ba
    javanese:jw sundanese:su cantonese:yue burmese:my valencian:ca flemish:nl haitian:ht letzeburgesch:lb
    pushto:ps panjabi:pa moldavian:ro moldovan:ro sinhalese:si castilian:es mandarin:zh""".split()  # noqa: SIM905
)


def check_hears(model: Any) -> None:
    if not hears(model):
        raise UsageError("this model does not read sound; give a folder of Whisper's kind")


def opening(
    model: Any, source: Tensor, language: str | None = None, task: str | None = None
) -> list[int]:
    """The tokens before an answer, as the folder's generation settings name them: the start, the language (heard in the
    spectrogram `source` (n t) where nobody says it), the task, and that no times are wanted."""
    said = _settings_of(model)
    language, task = language or said.get("language"), task or said.get("task")
    tasks = said.get("task_to_id") or {}
    found: list[int | None] = [special_of(model).start or 0]
    if task is not None and not tasks:
        if task != TASKS[0]:
            raise UsageError(f"this model knows no tasks, {task} among them; leave it out")
        task = None
    if task is not None and task not in tasks:
        raise UsageError(f"task {task!r} is unknown; {nearest(task, tasks)}")
    if task is None and language is None:
        for place, token in said.get("forced_decoder_ids") or ():
            if place == len(found):
                found.append(token)
    if language is not None:
        found[1:2] = [_language(said, language)]
    elif said.get("lang_to_id") and (len(found) == 1 or found[1] is None):
        found[1:2] = [heard(model, source)]
    if task is not None:
        found.append(tasks[task])
    elif language is not None and tasks and not set(tasks.values()) & set(found):
        found.append(tasks[TASKS[0]])
    untimed = said.get("no_timestamps_token_id")
    if untimed is not None and found[-1] != untimed:
        found.append(untimed)
    return [token for token in found if token is not None]


def _settings_of(model: Any) -> dict[str, Any]:
    """Of generation: generation_config.json, and what of it only config.json has."""
    if model.origin is None:
        return {}
    older = {"forced_decoder_ids": model.origin.config.get("forced_decoder_ids")}
    said = read_json(model.origin.files, FILE)
    return older | {key: value for key, value in said.items() if value is not None}


def _language(said: dict[str, Any], language: str) -> int:
    known = said.get("lang_to_id") or {}
    if not known:
        raise UsageError("this model's folder names no languages; leave the language out")
    word = language.lower()
    word = word if word in known else f"<|{LANGUAGES.get(word, word)}|>"
    if word not in known:
        codes = [token.strip("<|>") for token in known]
        raise UsageError(f"language {language!r} is unknown; {nearest(language.lower(), codes)}")
    return known[word]


@torch.inference_mode()
def heard(model: Any, source: Tensor) -> int:
    """The token of the language that a model hears in a spectrogram (n t)."""
    tokens = sorted((_settings_of(model).get("lang_to_id") or {}).values())
    weight = next(model.parameters())
    start = torch.tensor([[special_of(model).start or 0]], device=weight.device)
    logits = model.next_logits(start, source=source[None].to(weight.device))[0]
    return tokens[int(logits[tokens].argmax())]
