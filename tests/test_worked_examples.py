"""Every worked example is a test, in `tests/worked/`, of the library's own functions.

The numbers are in `tests/data/worked_examples.json`: inputs, right results, and the wrong results that the source texts
print or that their formulas give. Each test asserts both sides and must use every value."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.worked.examples import entry_of, functions_in, read

ROOT = Path(__file__).resolve().parents[1]


def test_every_example_has_one_test() -> None:
    names = [
        name for path in (ROOT / "tests/worked").glob("test_*.py") for name in functions_in(path)
    ]
    entries = read()
    found = Counter(entry_of(name, entries) for name in names)
    assert found == dict.fromkeys(entries, 1)


def test_every_example_is_well_formed() -> None:
    for name, entry in read().items():
        assert set(entry) - {"wrong"} == {"name", "source", "given", "right", "tolerance"}, name


def leaves(data: Any) -> Counter:
    """Every number and word in nested data, without the undefined values."""
    if isinstance(data, dict | list):
        items = data.values() if isinstance(data, dict) else data
        return sum((leaves(item) for item in items), Counter())
    if data is None or isinstance(data, bool):
        return Counter() if data is None else Counter([str(data)])
    try:
        number = float(data)
    except ValueError:
        return Counter([data])
    return Counter(["nan" if math.isnan(number) else number])


CLAIMS = {  # said in words there, asserted by the test here
    "kv_cache_incremental": "equals_full_causal_output",
    "mla_absorbed_vs_explicit": "explicit_equals_absorbed",
    "mha_gqa_mqa": "equivalences",
    "online_attention_trace_3": "output_literal_first_step",
    "online_attention_trace_4": "output_literal_first_step",
}


def test_examples_cover_the_specification() -> None:
    path = ROOT.parent / "shared" / "spec" / "worked-examples.json"
    if not path.is_file():
        pytest.skip("needs ../shared/spec, the specification beside the repository: not here")
    spec = {entry["name"]: entry for entry in json.loads(path.read_text())["examples"]}
    ours = read()
    assert set(ours) == set(spec)
    for name, entry in spec.items():
        theirs = {**entry["expected"], **{"wrong": dict(entry.get("seed_says_wrong", {}))}}
        for part in (theirs, theirs["wrong"]):
            part.pop(CLAIMS.get(name), None)
        missing = leaves(theirs) - leaves([ours[name]["right"], ours[name].get("wrong", {})])
        missing -= leaves(ours[name]["given"])  # such as the values of `a` that the cases repeat
        assert not missing, f"{name}: {missing}"
        assert ours[name]["tolerance"] <= entry["atol"], name
