"""Speech: sound as a model hears it, what stands before an answer, and `regard transcribe`, on tiny random models."""

from __future__ import annotations

import json
import re
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard.cli.main import main
from regard.data.sound import Spectra, mel_filters, read_wav, resample
from regard.decode.generate import transcribe
from regard.decode.speech import opening
from regard.errors import UsageError
from regard.models import Sound
from tests.checkpoint.families import CASES

RATE = 16000


def sine(hertz: float, rate: int, seconds: float = 1.0) -> np.ndarray:
    t = np.arange(int(rate * seconds)) / rate
    return (0.5 * np.sin(2 * np.pi * hertz * t)).astype(np.float32)


def write_wav(path: Path, x: np.ndarray, rate: int, width: int = 2, channels: int = 1) -> Path:
    most = 2 ** (8 * width - 1)
    whole = np.round(x.astype(np.float64) * (most - 1)).astype(np.int64)
    if width == 1:
        data = (whole + 128).astype(np.uint8).tobytes()
    else:
        data = whole.astype("<i8").view(np.uint8).reshape(-1, 8)[:, :width].tobytes()
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(data)
    return path


# --- sound --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_wav_of_any_width_is_read(width: int, tmp_path: Path) -> None:
    x = sine(440, 8000, 0.1)
    read, rate = read_wav(write_wav(tmp_path / "a.wav", x, 8000, width))
    assert rate == 8000 and read.dtype == np.float32
    np.testing.assert_allclose(read, x, atol=1.1 / 2 ** (8 * width - 1) + 1e-7)


def test_channels_are_heard_as_their_mean(tmp_path: Path) -> None:
    left, right = sine(440, 8000, 0.1), sine(880, 8000, 0.1)
    both = np.stack([left, right], 1).reshape(-1)
    read, _ = read_wav(write_wav(tmp_path / "a.wav", both, 8000, channels=2))
    np.testing.assert_allclose(read, (left + right) / 2, atol=1e-4)


@pytest.mark.parametrize(
    "old, new", [(44100, 16000), (8000, 16000), (48000, 16000), (22051, 16000)]
)
def test_sine_stays_a_sine_at_another_rate(old: int, new: int) -> None:
    y = resample(sine(440, old), old, new)
    want = sine(440, new)
    assert len(y) == len(want)
    # Beyond the ends there is silence.
    np.testing.assert_allclose(y[200:-200], want[200:-200], atol=2e-5)


def test_what_the_new_rate_cannot_hold_is_not_folded_back() -> None:
    y = resample(sine(9000, 44100), 44100, 16000)
    assert np.abs(y[200:-200]).max() < 2e-5
    kept = resample(sine(6500, 44100), 44100, 16000)
    np.testing.assert_allclose(kept[200:-200], sine(6500, 16000)[200:-200], atol=2e-5)


def test_silence_and_nothing_stay_what_they_are() -> None:
    assert not resample(np.zeros(500, np.float32), 44100, 16000).any()
    assert len(resample(np.zeros(0, np.float32), 44100, 16000)) == 0
    np.testing.assert_allclose(
        resample(np.ones(2000, np.float32), 44100, 16000)[200:500], 1, atol=1e-6
    )


class Folder:
    """What a model's folder says, in place of a folder."""

    def __init__(self, **said: Any):
        self.files = {"preprocessor_config.json": json.dumps(said).encode()}


@pytest.mark.parametrize(
    "settings",
    [
        {"feature_size": 80, "chunk_length": 1},
        {"feature_size": 17, "chunk_length": 2, "hop_length": 128, "n_fft": 512},
        {"feature_size": 40, "chunk_length": 1, "sampling_rate": 22050, "hop_length": 225},
    ],
)
def test_spectrograms_are_those_of_transformers(settings: dict[str, int]) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.WhisperFeatureExtractor(**settings)
    x = np.random.default_rng(0).normal(size=theirs.n_samples * 3 // 4).astype(np.float32) * 0.1
    x += sine(300, theirs.sampling_rate, len(x) / theirs.sampling_rate)[: len(x)]
    want = theirs(x, sampling_rate=theirs.sampling_rate, return_tensors="pt").input_features[0]
    sound = Sound(settings["feature_size"], want.shape[1] // 2)
    ours = Spectra(sound, Folder(**settings)).window(x)
    torch.testing.assert_close(ours, want, atol=2e-5, rtol=0)
    filters = mel_filters(settings["feature_size"], theirs.n_fft // 2 + 1, theirs.sampling_rate)
    np.testing.assert_allclose(filters.T, theirs.mel_filters, atol=1e-9)


def test_settings_that_do_not_fit_are_told() -> None:
    for said, why in (
        ({"feature_size": 81}, "of 81 bands"),
        ({"hop_length": 0}, "hop_length = 0"),
        ({"do_normalize": True}, "do_normalize = True"),
        ({"chunk_length": 7}, "7 s, the model reads 80 bands and 30 s"),
    ):
        with pytest.raises(UsageError, match=why):
            Spectra(Sound(), Folder(**said))


# --- answers ------------------------------------------------------------------------------------------------------

SPOKEN = {
    "lang_to_id": {"<|en|>": 40, "<|de|>": 41, "<|haw|>": 42},
    "task_to_id": {"transcribe": 43, "translate": 44},
    "no_timestamps_token_id": 45,
    "is_multilingual": True,
}


def speaker(**generation: Any) -> Any:
    """A tiny Whisper of transformers."""
    module = CASES["whisper-untied"].make()
    module.generation_config.update(max_length=20, suppress_tokens=[7, 11], **generation)
    for name, value in generation.items():
        setattr(module.generation_config, name, value)
    return module


def spectrograms(n: int = 3) -> torch.Tensor:
    return torch.randn(n, 7, 18, generator=torch.Generator().manual_seed(5))


def test_every_length_of_window_is_that_of_its_model() -> None:
    """Seconds are no whole numbers: 4.02 s are 64,320 samples, not 64,319."""
    for size in range(1, 1200):
        sound = Sound(bands=8, size=size)
        assert Spectra(sound, Folder()).size == sound.shape[1] * 160


@pytest.mark.parametrize(
    "generation, asked",
    [
        ({}, {}),
        (SPOKEN, {"language": "de"}),
        (SPOKEN, {"language": "german", "task": "translate"}),
        (SPOKEN, {"task": "transcribe"}),
        ({"no_timestamps_token_id": 45, "begin_suppress_tokens": [12, 2]}, {}),
        ({"forced_decoder_ids": [[1, 41], [2, 43]]}, {}),
        (SPOKEN | {"forced_decoder_ids": [[1, None], [2, 43]]}, {}),
        (SPOKEN | {"language": "en"}, {}),
    ],
)
@torch.no_grad()
def test_texts_are_those_of_transformers(generation: dict[str, Any], asked: dict[str, Any]) -> None:
    module, x = speaker(**generation), spectrograms()
    model = regard.from_hf(module)
    end = module.generation_config.eos_token_id
    for each in x:
        out = module.generate(each[None], do_sample=False, **asked)[0].tolist()
        begin = opening(model, each, **asked)
        out = out[len(begin) :] if out[: len(begin)] == begin else out
        want = out[: out.index(end)] if end in out else out
        (result,) = transcribe(model, [each], **asked)
        assert result.ids == want
        if not asked:
            (plain,) = regard.generate(model, each)
            assert plain.ids == want


# --- the command --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that speaks three languages, in windows of 0.18 s."""
    folder = tmp_path_factory.mktemp("speech") / "whisper"
    speaker(**SPOKEN).save_pretrained(folder)
    said = {"feature_size": 7, "hop_length": 160, "chunk_length": 0.18}
    (folder / "preprocessor_config.json").write_text(json.dumps(said))
    write_wav(folder.parent / "long.wav", sine(440, 44100, 0.5), 44100)
    return folder


def test_long_recording_is_read_window_by_window(home: Path, capsys: Any) -> None:
    file = home.parent / "long.wav"
    assert main(["transcribe", str(home), str(file), "--json", "--language", "de"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["start"], row["end"]) for row in rows] == [(0, 0.18), (0.18, 0.36), (0.36, 0.5)]
    model = regard.load(home)
    windows, seconds = Spectra(model.config.source, model.origin).file(file)
    assert seconds == 0.5 and len(windows) == 3
    want = [r.ids for r in transcribe(model, windows, language="de", task="transcribe")]
    assert [row["ids"] for row in rows] == want
    # Without a tokenizer ids are printed.
    assert main(["transcribe", str(home), str(file), "--language", "de", "--rows", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == [" ".join(map(str, ids)) for ids in want]


@pytest.mark.parametrize(
    "arguments, code, words",
    [
        (["nothing.wav"], 4, "nothing.wav"),
        (["text.wav"], 4, "is not a wav file of whole numbers .*ffmpeg -i"),
        (["long.wav", "--language", "xx"], 2, "language 'xx' is unknown; known: de, en, haw"),
        (["long.wav", "--rows", "0"], 2, "rows"),
        (["-"], 2, "a recording is read from a file"),
    ],
)
def test_mistakes_are_told_in_a_sentence(
    arguments: list[str], code: int, words: str, home: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(home.parent)
    Path("text.wav").write_text("no sound")
    assert main(["transcribe", "whisper", *arguments]) == code
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1 and re.search(words, said), said


def test_model_that_does_not_hear_is_refused(home: Path, tmp_path: Path, capsys: Any) -> None:
    CASES["vit"].make().save_pretrained(tmp_path)
    assert main(["transcribe", str(tmp_path), str(home.parent / "long.wav")]) == 2
    assert "does not read sound" in capsys.readouterr().err
    assert main(["generate", str(home), "hello"]) == 2
    assert "reads sound: regard transcribe" in capsys.readouterr().err
