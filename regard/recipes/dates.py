"""Dates as people write them, in many languages, scripts and formats -> ISO 8601, from the Unicode CLDR (by Babel).

The forms are CLDR's full, long and medium; its short ones (05/03/24) are ambiguous. Digits are Latin, and those of the
script where it has its own. No date of the test files is in the training file, in any language; languages in UNSEEN are
not in it at all.
"""

from __future__ import annotations

import datetime
import random
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.data.read import needed
from regard.recipes.corpora import write

LOCALES = """
    af az cs cy de en en_GB eo es et eu fi fil fr ga gl ha hr hu id is it lt lv ms mt nb nl pl pt ro sk sl so sq sv sw
    tr uz vi zu be bg kk ky mk mn ru sr el he yi ar ckb fa ps sd ug hi ne as bn gu kn ml or pa si ta te lo my th ja ko
    zh
""".split()  # noqa: SIM905
UNSEEN = {"ca da mr uk ur": "known script", "am hy ka km": "new script"}
STYLES = ("full", "long", "medium")
DIGITS = {  # CLDR's name of a numbering system -> its zero
    **{"latn": "0", "arab": "\u0660", "arabext": "\u06f0", "deva": "\u0966", "beng": "\u09e6"},
    **{"guru": "\u0a66", "gujr": "\u0ae6", "orya": "\u0b66", "tamldec": "\u0be6", "telu": "\u0c66"},
    **{"knda": "\u0ce6", "mlym": "\u0d66", "thai": "\u0e50", "laoo": "\u0ed0", "mymr": "\u1040"},
    **{"khmr": "\u17e0"},
}
FIRST, LAST = datetime.date(1900, 1, 1), datetime.date(2100, 12, 31)
YEAR = 2024  # a leap year, on all of whose days the forms are compared
HEADER = "source\ttarget\tlocale\tform\n"
PLACES = {"y": range(4), "M": range(5, 7), "d": range(8, 10)}  # of a field's digits in the ISO date
Links = set[tuple[int, int]]  # characters of the source and of the target, both counted from 0


@dataclass(frozen=True)
class Form:
    """One way to write a date."""

    locale: str
    style: str
    digits: str  # a name of DIGITS

    @property
    def name(self) -> str:
        return self.style if self.digits == "latn" else f"{self.style}-{self.digits}"


def make(
    folder: Path,
    seed: int = 0,
    train: int = 120_000,
    test: int = 2_000,
    locales: Sequence[str] = LOCALES,
) -> str:
    """Write train.tsv, valid.tsv (unseen dates) and unseen.tsv (unseen dates in unseen languages); what was made."""
    dates = Dates()
    unseen = [locale for script in UNSEEN for locale in script.split()]
    known, held = dates.forms(locales), dates.forms(unseen)
    every = len(known) + len(held)
    doubtful = dates.doubtful([*known, *held])
    known, held = ([f for f in forms if f not in doubtful] for forms in (known, held))
    rng = random.Random(seed)
    # A day in twenty is new to the test files.
    days: tuple[list[datetime.date], list[datetime.date]] = ([], [])
    for n in range((LAST - FIRST).days + 1):
        days[rng.random() < 0.05].append(FIRST + datetime.timedelta(n))
    files = {"train": (known, days[0], train)}
    files |= {"valid": (known, days[1], test), "unseen": (held, days[1], test)}
    for name, given in files.items():
        write(folder, {f"{name}.tsv": [HEADER, *(dates.line(*x) for x in draw(rng, *given))]})
    return (
        f"{train:,} dates in {len(locales)} languages to learn from; {test:,} other dates; {test:,} in {len(unseen)} "
        f"languages that are never seen; {len(doubtful)} of {every} forms left out, which could mean two dates"
    )


def draw(
    rng: random.Random, forms: list[Form], days: list[datetime.date], count: int
) -> Iterator[tuple[Form, datetime.date]]:
    """Every language as often as any other, then every form of it."""
    by_locale: dict[str, list[Form]] = {}
    for form in forms:
        by_locale.setdefault(form.locale, []).append(form)
    locales = list(by_locale)
    for _ in range(count):
        choice = by_locale[locales[int(rng.random() * len(locales))]]
        form = choice[int(rng.random() * len(choice))]
        yield form, days[int(rng.random() * len(days))]


class Dates:
    """Babel, asked for one form at a time."""

    def __init__(self) -> None:
        self.babel = needed("babel", "the recipe's data (dates in many languages)", "Babel")
        self.dates = needed("babel.dates", "dates", "Babel")
        self.patterns: dict[Form, tuple[Any, Any]] = {}

    def forms(self, locales: Sequence[str]) -> list[Form]:
        """Three styles of each language, with Latin digits and with its own."""
        forms = []
        for name in locales:
            locale = self.babel.Locale.parse(name)
            native = {locale.default_numbering_system, locale.other_numbering_systems.get("native")}
            digits = ["latn", *sorted(native & DIGITS.keys() - {"latn"})]
            for form in (Form(name, style, kind) for style in STYLES for kind in digits):
                self.patterns[form] = self.dates.get_date_format(form.style, locale), locale
                forms.append(form)
        return forms

    def text(self, form: Form, day: datetime.date) -> str:
        pattern, locale = self.patterns[form]
        return self.written(form, pattern.apply(day, locale))

    def written(self, form: Form, text: str) -> str:
        zero = ord(DIGITS[form.digits])
        if form.digits != "latn":
            text = text.translate({48 + n: zero + n for n in range(10)})
        return unicodedata.normalize("NFC", text)

    def links(self, form: Form, day: datetime.date) -> tuple[Links, Links]:
        """Which characters of the text belong to which of the ISO date: the sure links, of a digit to itself; and the
        possible ones, which are these too. Where no digit of the text is sure, every character of its field is
        possible: all of "March" for both digits of 03, the 5 for the first of 05."""
        pattern, locale = self.patterns[form]
        fields = self.dates.DateTimeFormat(day, locale)
        at, sure, possible = 0, Links(), Links()
        for i, piece in enumerate(re.split(r"%\((\w+)\)s", pattern.format)):
            text = self.written(form, fields[piece] if i % 2 else piece.replace("%%", "%"))
            targets = PLACES.get(piece[:1], range(0)) if i % 2 else range(0)
            digits = [at + j for j, c in enumerate(text) if c.isdecimal()]
            pairs = set(zip(reversed(digits), reversed(targets)))
            left = set(targets) - {t for _, t in pairs}
            sure |= pairs
            possible |= pairs | {(at + j, t) for j in range(len(text)) for t in left}
            at += len(text)
        return sure, possible

    def line(self, form: Form, day: datetime.date) -> str:
        return f"{self.text(form, day)}\t{day.isoformat()}\t{form.locale}\t{form.name}\n"

    def doubtful(self, forms: list[Form]) -> set[Form]:
        """Forms that do not tell which date is meant: the year is not whole, or a text of theirs is that of another day
        too, in the same form or in another one (as 5/3/2024 would be)."""
        days = [datetime.date(YEAR, 1, 1) + datetime.timedelta(n) for n in range(366)]
        texts: dict[str, dict[datetime.date, set[Form]]] = {}
        for form in forms:
            for day in days:
                texts.setdefault(self.text(form, day), {}).setdefault(day, set()).add(form)
        gone = {form for form in forms if str(YEAR) not in latin(self.text(form, days[0]))}
        several = (meant for meant in texts.values() if len(meant) > 1)
        return gone.union(*(forms for meant in several for forms in meant.values()))


def latin(text: str) -> str:
    """The text with Latin digits."""
    return "".join(str(unicodedata.decimal(c)) if c.isdecimal() else c for c in text)
