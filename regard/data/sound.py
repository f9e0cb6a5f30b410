"""Sound as a model of speech reads it: wav files, another rate, and log-mel spectrograms."""

from __future__ import annotations

import json
import math
import wave
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.data.source import DataError

if TYPE_CHECKING:
    from torch import Tensor

    from regard.models import Sound

# Frames that are read, and samples that are made, at once.
PIECE = 1 << 16


def read_wav(path: Path) -> tuple[np.ndarray, int]:
    """The samples of a wav file between -1 and 1, its channels as their mean, and how many there are in a second."""
    try:
        with wave.open(str(path), "rb") as file:
            channels, width, rate = file.getnchannels(), file.getsampwidth(), file.getframerate()
            pieces = []
            while data := file.readframes(PIECE):
                pieces.append(_samples(data, width).reshape(-1, channels).mean(1))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    # A broken file raises several kinds.
    except (wave.Error, EOFError, ValueError, ArithmeticError) as error:
        how = "ffmpeg -i FILE -ac 1 -c:a pcm_s16le sound.wav"
        why = f"{path} is not a wav file of whole numbers ({error or 'it is cut off'})"
        raise DataError(f"{why}; make one of it: {how}") from None
    if not pieces or rate < 1:
        raise DataError(f"{path} holds no sound")
    return np.concatenate(pieces).astype(np.float32), rate


def _samples(data: bytes, width: int) -> np.ndarray:
    """Numbers of `width` bytes, the lowest first; those of one byte have no sign."""
    if width == 1:
        return (np.frombuffer(data, np.uint8) - 128.0) / 128
    if width == 3:
        # As the three high bytes of four.
        wide = np.zeros((len(data) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        return wide.reshape(-1).view("<i4") / 2.0**31
    if width not in (2, 4):
        raise ValueError(f"{8 * width} bits")
    return np.frombuffer(data, f"<i{width}") / 2.0 ** (8 * width - 1)


# Of the resampler: zeros of the sinc on either side, the share of the narrower band that it keeps whole, and the shape
# of Kaiser's window, which leaves about -120 dB of what lies beyond.
ZEROS, KEPT, BETA = 48, 0.94, 12.0


def resample(x: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """Samples (n) at another rate: y(t) = sum_k x_k c sinc(c (t - k)) kaiser(t - k), c the narrower of the two bands,
    so that nothing is folded back. The weights of a sample have the sum 1."""
    if rate == wanted or not len(x):
        return x
    shared = math.gcd(rate, wanted)
    up, down = wanted // shared, rate // shared
    band = KEPT * min(1.0, wanted / rate)
    half = math.ceil(ZEROS / band)
    reach = np.arange(-half, half + 1)
    padded = np.pad(x.astype(np.float64), half + 1)
    made = []
    for start in range(0, -(-len(x) * up // down), PIECE):
        n = np.arange(start, min(start + PIECE, -(-len(x) * up // down)), dtype=np.int64)
        place, phase = np.divmod(n * down, up)
        # Few phases serve many samples.
        phases, which = np.unique(phase, return_inverse=True)
        weights = _kaiser_sinc(phases[:, None] / up - reach, band, half + 1)
        weights /= weights.sum(1, keepdims=True)
        y = np.zeros(len(n))
        for i, shift in enumerate(reach):
            y += padded[place + shift + half + 1] * weights[which, i]
        made.append(y)
    return np.concatenate(made).astype(np.float32)


def _kaiser_sinc(t: np.ndarray, band: float, width: float) -> np.ndarray:
    return np.sinc(band * t) * np.i0(BETA * np.sqrt(np.maximum(0.0, 1 - (t / width) ** 2)))


def mel_filters(bands: int, bins: int, rate: int, most: float = 8000.0) -> np.ndarray:
    """Triangles (bands bins) over the bins of a spectrum, of equal area, evenly spaced on Slaney's mel scale: linear up
    to 1000 Hz, logarithmic above."""
    step = math.log(6.4) / 27

    def mel(hertz: float) -> float:
        return hertz * 3 / 200 if hertz < 1000 else 15 + math.log(hertz / 1000) / step

    def hertz(mels: np.ndarray) -> np.ndarray:
        return np.where(mels < 15, mels * 200 / 3, 1000 * np.exp((mels - 15) * step))

    edges = hertz(np.linspace(0, mel(most), bands + 2))[:, None]
    bin_hertz = np.linspace(0, rate // 2, bins)
    rising = (bin_hertz - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - bin_hertz) / (edges[2:] - edges[1:-1])
    return np.maximum(0, np.minimum(rising, falling)) * 2 / (edges[2:] - edges[:-2])


class Spectra:
    """Sound as spectrograms of a model's size, window after window, as preprocessor_config.json of its folder
    (`origin`) says: log10 of the power in each mel band, at least the highest minus 8, then (x + 4) / 4."""

    def __init__(self, wanted: Sound, origin: Any):
        said = _settings_of(origin)
        self.rate, self.hop, self.fft = (
            _whole(said, name, default)
            for name, default in (("sampling_rate", 16000), ("hop_length", 160), ("n_fft", 400))
        )
        bands = _whole(said, "feature_size", wanted.bands)
        frames = wanted.shape[1]
        seconds = said.get("chunk_length", frames * self.hop / self.rate)
        if bands != wanted.bands or round(seconds * self.rate) // self.hop != frames:
            raise DataError(
                f"preprocessor_config.json makes spectrograms of {bands} bands and {seconds} s, the model reads "
                f"{wanted.bands} bands and {frames * self.hop / self.rate:g} s"
            )
        for name in ("do_normalize", "dither", "padding_value"):
            if said.get(name):
                raise DataError(
                    f"preprocessor_config.json says {name} = {said[name]!r}; Regard can only do without"
                )
        self.size = round(seconds * self.rate)
        self.filters = mel_filters(bands, 1 + self.fft // 2, self.rate)

    @property
    def seconds(self) -> float:
        """Of a window."""
        return self.size / self.rate

    def file(self, path: Path) -> tuple[list[Tensor], float]:
        """The windows of a wav file, each (bands frames), and how many seconds it is long."""
        x, rate = read_wav(path)
        x = resample(x, rate, self.rate)
        windows = [self.window(x[i : i + self.size]) for i in range(0, len(x), self.size)]
        return windows, len(x) / self.rate

    def window(self, x: np.ndarray) -> Tensor:
        """Samples of one window, filled up with silence."""
        import torch

        wave = torch.zeros(self.size)
        wave[: len(x)] = torch.from_numpy(np.ascontiguousarray(x))
        hann = torch.hann_window(self.fft)
        spectrum = torch.stft(wave, self.fft, self.hop, window=hann, return_complex=True)
        power = spectrum[:, :-1].abs().square()
        bands = torch.from_numpy(self.filters).float() @ power
        levels = bands.clamp(min=1e-10).log10()
        return (levels.maximum(levels.max() - 8) + 4) / 4


def _settings_of(origin: Any) -> dict[str, Any]:
    files = getattr(origin, "files", {})
    try:
        said = json.loads(files.get("preprocessor_config.json", b"{}"))
    except ValueError as error:
        raise DataError(f"preprocessor_config.json is not as it should be: {error}") from None
    if not isinstance(said, dict):
        raise DataError("preprocessor_config.json is not as it should be: it must be an object")
    return said


def _whole(said: dict[str, Any], name: str, default: int) -> int:
    value = said.get(name, default)
    if type(value) is not int or value < 1:
        raise DataError(
            f"preprocessor_config.json says {name} = {value!r}; give a number from 1 on"
        )
    return value
