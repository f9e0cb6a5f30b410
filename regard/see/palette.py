"""The colours of every attention map: one table for the page's script, matplotlib and reports.

Lightness runs one way from the page's ground, so that colours read without hue; signed values run
to blue below zero and to orange above it. Weights are placed by their root, so that small ones
show; 0, which is what is masked, is grey.
"""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np

RAMPS: dict[str, dict[str, list[list[int]]]] = {
    "light": {
        "plain": [[255, 255, 255], [205, 232, 190], [90, 180, 180], [44, 100, 160], [26, 16, 62]],
        "signed": [[10, 60, 140], [120, 170, 225], [250, 250, 250], [240, 170, 100], [160, 70, 0]],
        "masked": [[226, 229, 233]],
    },
    "dark": {
        "plain": [[20, 23, 26], [44, 62, 122], [24, 134, 142], [116, 192, 92], [250, 236, 120]],
        "signed": [[130, 195, 255], [45, 95, 150], [20, 23, 26], [150, 85, 30], [255, 180, 100]],
        "masked": [[52, 57, 63]],
    },
    # Laid over a photograph.
    "photo": {
        "plain": [[70, 0, 110], [190, 30, 100], [245, 125, 20], [255, 235, 90]],
        "negative": [[60, 120, 200], [110, 190, 255]],
    },
}
# Of curves and bars, one after the other.
SERIES = {
    "light": ("#0b62a8", "#b34700", "#007556", "#8f3f8f", "#7a6200", "#444c56"),
    "dark": ("#6cb6ff", "#ffa05c", "#4fd1a5", "#e0a3e0", "#e3c84b", "#b6bec8"),
}


def table(scheme: str, signed: bool = False) -> np.ndarray:
    """All colours of a scheme, "light" or "dark", as bytes (256 3): masked, then the ramp."""
    stops = np.array(RAMPS[scheme]["signed" if signed else "plain"], float)
    at, each = np.linspace(0, len(stops) - 1, 255), np.arange(len(stops))
    ramp = np.stack([np.interp(at, each, channel) for channel in stops.T], -1)
    return np.concatenate([RAMPS[scheme]["masked"], np.rint(ramp)]).astype(np.uint8)


def levels(values: np.ndarray, most: float | None = None, signed: bool = False) -> np.ndarray:
    """Which row of the table each value has; `most`, or the largest magnitude there is, has the
    last one."""
    seen = np.isfinite(values) & (signed | (values != 0))
    values = np.where(seen, values, 0.0)
    shares = values / (most or np.abs(values).max(initial=0.0) or 1.0)
    place = (shares + 1) / 2 if signed else np.sqrt(np.clip(shares, 0, 1))
    return np.where(seen, 1 + np.rint(254 * np.clip(place, 0, 1)), 0).astype(np.uint8)


def image(values: np.ndarray, scheme: str) -> str:
    """A map as the data address of a PNG with one pixel for each value: thousands of them cost a
    browser nothing."""
    rows = levels(values)
    lines = np.pad(rows, ((0, 0), (1, 0))).tobytes()
    header = struct.pack(">IIBBBBB", rows.shape[1], rows.shape[0], 8, 3, 0, 0, 0)
    chunks = {
        b"IHDR": header,
        b"PLTE": table(scheme).tobytes(),
        b"IDAT": zlib.compress(lines),
        b"IEND": b"",
    }
    data = b"\x89PNG\r\n\x1a\n"
    for kind, body in chunks.items():
        data += struct.pack(">I", len(body)) + kind + body
        data += struct.pack(">I", zlib.crc32(kind + body))
    return "data:image/png;base64," + base64.b64encode(data).decode()
