"""How numbers, curves and texts are made fit to be seen, in terminals and on pages."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Container, Sequence
from typing import Any

BLOCKS = "▁▂▃▄▅▆▇█"
# Control characters become their pictures in Unicode; what turns the direction of text is replaced.
CONTROL = {code: 0x2400 + code for code in range(32)} | {127: 0x2421}
CONTROL |= {code: 0xFFFD for code in (*range(128, 160), *range(0x202A, 0x202F), 0x2028, 0x2029)}
CONTROL |= {code: 0xFFFD for code in range(0x2066, 0x206A)}


def number(value: float | None, digits: int = 4) -> str:
    """0.1234, 31.2, 6e-4, 1,234,567; - for nothing."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return small(f"{value:.{digits}g}")


def small(text: str) -> str:
    """6.0e-04 as 6.0e-4."""
    return re.sub(r"e([+-])0+(?=\d)", lambda sign: "e" + sign[1].replace("+", ""), text)


def short(value: float | None) -> str:
    """3570 as 3.6k, 26.4M, 671B; below 1000, and for nothing, as `number` has it."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value is not None and abs(value) >= size:
            scaled = value / size
            return f"{scaled:.0f}{letter}" if abs(scaled) >= 99.95 else f"{scaled:.1f}{letter}"
    return number(value, 3)


def span(seconds: float | None) -> str:
    """344 as 5 min 44 s; - for nothing."""
    if seconds is None:
        return "-"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"


def clock(seconds: float) -> str:
    """344 as 00:05:44."""
    whole = round(seconds)
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def spark(values: Sequence[float], width: int) -> str:
    """A curve of `width` letters at most, from ▁ to █; each is the mean of a stretch of values."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite or width < 1:
        return ""
    n = min(width, len(finite))
    parts = [finite[i * len(finite) // n : (i + 1) * len(finite) // n] for i in range(n)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    scale = 0.0 if level(low, high) else (len(BLOCKS) - 1) / (high - low)
    return "".join(BLOCKS[round((m - low) * scale)] for m in means)


def level(low: float, high: float) -> bool:
    """Whether a curve between these is flat but for rounding."""
    return high - low <= 1e-9 * max(abs(low), abs(high))


def visible(text: object, keep: str = "") -> str:
    """A text that can do nothing but be read: control characters other than those of `keep` as
    pictures, half surrogates replaced."""
    plain = str(text).encode("utf-8", "replace").decode("utf-8")
    return plain.translate({code: to for code, to in CONTROL.items() if chr(code) not in keep})


def clip(text: str, width: int) -> str:
    """The text within `width` columns, cut with … where it is longer."""
    if columns(text) <= width:
        return text
    start = ""
    for letter in text:
        if columns(start + letter) > width - 1:
            break
        start += letter
    return start + "…" if width > 0 else ""


def columns(text: str) -> int:
    """How many columns of a terminal a text takes: wide letters two, accents that stand on another
    none."""
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    return len(text) + wide - sum(unicodedata.combining(letter) > 0 for letter in text)


def aligned(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> str:
    """A table as text, its columns two spaces apart; those in `right` end together."""
    widths = [max(map(columns, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        room = [" " * (width - columns(cell)) for cell, width in zip(row, widths)]
        cells = (b + a if i in right else a + b for i, (a, b) in enumerate(zip(row, room)))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def strict(value: Any) -> Any:
    """The same with None for numbers that are not finite, which JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: strict(each) for key, each in value.items()}
    return [strict(each) for each in value] if isinstance(value, (list, tuple)) else value
