"""Encoders."""

from __future__ import annotations

from tests.checkpoint.cases import BASE, Case, Settings, case

_LABELS = {"ForSequenceClassification": 3, "ForTokenClassification": 5, "ForQuestionAnswering": 2}


def _labelled(label: str, settings: Settings, *heads: str) -> list[Case]:
    """A case of each head that labels, or of those named."""
    return [
        case(f"{label.lower()}-{head}", f"{label}{head}", settings, num_labels=_LABELS[head])
        for head in heads or _LABELS
    ]


CASES = [
    case("camembert", "CamembertForMaskedLM", BASE),
    *_labelled("Camembert", BASE),
    case("camembert-one-type", "CamembertModel", BASE, type_vocab_size=1, pad_token_id=0),
]  # fmt: skip
ODD: Settings = {}
KEPT: list[str] = ["camembert"]
