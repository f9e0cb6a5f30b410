"""How numbers, curves and texts are made fit to be seen: rounding, smoothing, thinning, ticks, sparklines."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence

Point = tuple[float, float]
BLOCKS = "▁▂▃▄▅▆▇█"
CONTROL = {code: 0x2400 + code for code in range(32)} | {127: 0x2421}  # their pictures in Unicode
CONTROL |= {code: 0xFFFD for code in (*range(128, 160), *range(0x202A, 0x202F), 0x2028, 0x2029)}
CONTROL |= {code: 0xFFFD for code in range(0x2066, 0x206A)}  # these turn the direction of text


# --- numbers ------------------------------------------------------------------------------------------------------


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
    return re.sub(r"e([+-])0+(?=\d)", lambda found: "e" + found[1].replace("+", ""), text)


def short(value: float) -> str:
    """3570 as 3.6k, 26.4M, 671B; below 1000 as `number` has it."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            scaled = value / size
            return f"{scaled:.0f}{letter}" if abs(scaled) >= 99.95 else f"{scaled:.1f}{letter}"
    return number(value, 3)


def span(seconds: float) -> str:
    """344 as 5 min 44 s."""
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


# --- curves -------------------------------------------------------------------------------------------------------


def ema(values: Sequence[float], keep: float) -> list[float]:
    """m_t = keep m_{t-1} + (1 - keep) x_t, divided by 1 - keep^t so that the beginning is not drawn to 0. Values that
    are not finite leave it as it is."""
    found, mean, weight = [], 0.0, 0.0
    for x in values:
        if math.isfinite(x):
            mean, weight = keep * mean + (1 - keep) * x, keep * weight + 1 - keep
        found.append(mean / weight if weight else math.nan)
    return found


def keep_for(count: int) -> float:
    """How much `ema` keeps to smooth over a fiftieth of a curve."""
    return 1 - 2 / (max(count / 50, 1) + 1)


def thin(points: Sequence[Point], most: int) -> list[Point]:
    """At most `most` points that show the same curve: of each stretch its lowest and its highest, and both ends."""
    if len(points) <= most:
        return list(points)
    inner, parts, found = points[1:-1], max((most - 2) // 2, 1), [points[0]]
    for i in range(parts):
        part = inner[i * len(inner) // parts : (i + 1) * len(inner) // parts]
        ends = {part.index(choose(part, key=lambda p: p[1])) for choose in (min, max)}
        found += [part[j] for j in sorted(ends)]
    return [*found, points[-1]]


def some(count: int, most: int) -> list[int]:
    """At most `most` of the numbers 0 to count - 1, evenly, with the first and the last."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers between low and high, as many as fit within `most`: steps of 1, 2 or 5 times a power of ten."""
    size = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(size * m for m in (1, 2, 5, 10, 20) if (high - low) / (size * m) <= most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def log_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Powers of ten between low and high, every one or every few; 1, 2 and 5 times them where there are less than two;
    as on a plain axis where that is not enough."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    stride = max(math.ceil((last - first) / most), 1)
    for factors in ((1,), (1, 2, 5)):
        found = [m * 10.0**e for e in range(first, last + 1, stride) for m in factors]
        found = [x for x in found if low * (1 - 1e-9) <= x <= high * (1 + 1e-9)]
        if len(found) > 1:
            return found
    return ticks(low, high, most)


def level(low: float, high: float) -> bool:
    """Whether a curve between these is flat but for rounding."""
    return high - low <= 1e-9 * max(abs(low), abs(high))


def spark(values: Sequence[float], width: int) -> str:
    """A curve of `width` letters at most, from ▁ to █; each is the mean of a stretch of the values."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite or width < 1:
        return ""
    n = min(width, len(finite))
    parts = [finite[i * len(finite) // n : (i + 1) * len(finite) // n] for i in range(n)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    scale = 0.0 if level(low, high) else (len(BLOCKS) - 1) / (high - low)
    return "".join(BLOCKS[round((m - low) * scale)] for m in means)


# --- texts --------------------------------------------------------------------------------------------------------


def visible(text: object, keep: str = "") -> str:
    """A text that can do nothing but be read: control characters but those of `keep` as pictures, half surrogates
    replaced."""
    plain = str(text).encode("utf-8", "replace").decode("utf-8")
    return plain.translate({code: to for code, to in CONTROL.items() if chr(code) not in keep})


def clip(text: str, width: int) -> str:
    """The text within `width` columns, cut with … where it is longer."""
    if columns(text) <= width:
        return text
    found = ""
    for letter in text:
        if columns(found + letter) > width - 1:
            break
        found += letter
    return found + "…" if width > 0 else ""


def columns(text: str) -> int:
    """How many columns of a terminal a text takes: wide letters two, accents that stand on another none."""
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    return len(text) + wide - sum(unicodedata.combining(letter) > 0 for letter in text)
