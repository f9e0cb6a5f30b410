"""regard transcribe: speech in a wav file as text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from regard.cli import shared as cli
from regard.errors import UsageError


@dataclass(frozen=True)
class Options:
    """Write down what is said in a recording, a line for each window of the model, which is 30 seconds for Whisper.

    regard transcribe MODEL talk.wav                        in the language that is heard at the beginning
    regard transcribe MODEL talk.wav --language de          or in the one that is said here
    regard transcribe MODEL talk.wav --task translate       in English, whatever is spoken
    """

    model: cli.Folder
    file: Annotated[Positional[str], arg(metavar="FILE.wav")]  # 8, 16, 24 or 32 bits, any rate
    # what is spoken, by name or code: german or de; left out: what the folder says, or what is heard
    language: Annotated[str | None, arg(metavar="LANGUAGE")] = None
    task: Literal["transcribe", "translate"] = "transcribe"  # translate: into English
    beams: cli.Count = None  # hypotheses of beam search; default: the folder's, or greedy
    rows: int = 8  # windows in a batch
    json: cli.Switch = False  # one JSON object per window: start and end in seconds, text, ids
    machine: cli.Machine = cli.Machine()


def run(options: Options) -> int:
    from regard.data.sound import Spectra
    from regard.decode.generate import Unanswered, failed, transcribe
    from regard.decode.speech import check_hears

    cli.check_counts(options, "rows", *(["beams"] if options.beams is not None else []))
    if options.file == "-":
        raise UsageError("a recording is read from a file, not from stdin: give its name")
    cli.check_file(options.file)
    opened = cli.open_model(options.model, options.machine)
    check_hears(opened.plain)
    spectra = Spectra(opened.plain.config.source, opened.plain.origin)
    windows, seconds = spectra.file(Path(options.file))
    given: dict[str, Any] = {} if options.beams is None else {"beams": options.beams}
    how: dict[str, Any] = {"language": options.language, "task": options.task, "rows": options.rows}
    results = []
    for i, result in enumerate(transcribe(opened.model, windows, **how, **given)):
        results.append(result)
        text = " ".join(map(str, result.ids)) if result.text is None else result.text.strip()
        if options.json:
            end = min((i + 1) * spectra.seconds, seconds)
            times = {"start": round(i * spectra.seconds, 3), "end": round(end, 3)}
            text = json.dumps({**times, "text": result.text, "ids": result.ids}, ensure_ascii=False)
        print(text, flush=True)
    if failed(results):
        raise Unanswered(failed(results))
    return 0
