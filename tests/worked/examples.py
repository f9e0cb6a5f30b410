"""The worked examples of `tests/data/worked_examples.json`, and the few things that tests of them share."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention import Context, Terms, weights
from regard.attention.core import scores
from regard.mask import Causal, Mask, Span, Visible

DATA = Path(__file__).parents[1] / "data" / "worked_examples.json"
FAR = 1e-3  # a value this far from the wrong one is not a rounding of it


class Example:
    """One entry: `given` inputs, and `right` and `wrong` results that a test must use up.

    Numbers become float64 tensors; "inf" and "nan" are read, null is NaN: undefined."""

    def __init__(self, entry: dict[str, Any]):
        self.given = space(entry["given"])
        self.tolerance = entry["tolerance"]
        self.results = {"right": flat(entry["right"]), "wrong": flat(entry.get("wrong", {}))}
        self.unused = {f"{side}: {key}" for side in self.results for key in self.results[side]}

    def right(self, actual: Any, key: str) -> None:
        """`actual` is the right value, to the entry's tolerance in float64."""
        expected = self._take("right", key)
        if not isinstance(expected, Tensor):
            assert actual == expected, key
            return
        actual = tensor(actual)
        assert actual.dtype in (torch.float64, torch.int64, torch.bool), actual.dtype
        torch.testing.assert_close(
            actual.double(),
            expected.double(),
            atol=self.tolerance,
            rtol=0,
            equal_nan=True,
            msg=lambda text: f"{key}: {text}",
        )

    def wrong(self, actual: Any, key: str) -> None:
        """`actual` is not the value that the source text gives."""
        expected = self._take("wrong", key)
        if not isinstance(expected, Tensor):
            assert actual != expected, key
            return
        distance = (tensor(actual).double() - expected.double()).abs().max()
        assert not distance <= FAR, f"{key}: the wrong value came out"

    def both(self, actual: Any, key: str) -> None:
        """Right, and not wrong."""
        self.right(actual, key)
        self.wrong(actual, key)

    def _take(self, side: str, key: str) -> Any:
        self.unused.discard(f"{side}: {key}")
        return self.results[side][key]


def read() -> dict[str, dict[str, Any]]:
    """Every entry by name."""
    return {entry["name"]: entry for entry in json.loads(DATA.read_text(encoding="utf-8"))}


def entry_of(test: str, names: Any) -> str | None:
    """The entry that a test is named after: test_<entry>_<claim>."""
    found = [name for name in names if test.startswith(f"test_{name}_")]
    return max(found, key=len, default=None)


def functions_in(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [n.name for n in tree.body if isinstance(n, ast.FunctionDef) and n.name[:5] == "test_"]


def value(data: Any) -> Any:
    """Lists of numbers as tensors (float64, int64 or bool); words, ragged lists and single numbers as they are."""
    if not isinstance(data, list):
        return data
    try:
        return tensor(_numbers(data))
    except (TypeError, ValueError):
        return data


def tensor(data: Any) -> Tensor:
    """float64 where torch would take float32."""
    if isinstance(data, Tensor):
        return data
    exact = torch.tensor(data, dtype=torch.float64)
    guess = torch.tensor(data)
    return exact if guess.is_floating_point() else guess


def _numbers(data: Any) -> Any:
    if isinstance(data, list):
        return [_numbers(item) for item in data]
    return float("nan") if data is None else float(data) if isinstance(data, str) else data


def space(data: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(
        **{k: space(v) if isinstance(v, dict) else value(v) for k, v in data.items()}
    )


def flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": x}} -> {"a.b": x}; single numbers become tensors too."""
    found: dict[str, Any] = {}
    for key, item in data.items():
        if isinstance(item, dict):
            found |= flat(item, f"{prefix}{key}.")
        else:
            single = isinstance(item, int | float)
            found[prefix + key] = tensor(item) if single else value(item)
    return found


# --- running a layer on an example --------------------------------------------------------------------------------


def fill(module: nn.Module, **weights: Tensor) -> Any:
    """The module in float64 with these weights; `up` means up.weight, `up__bias` up.bias."""
    module.double().eval()
    for name, given_weight in weights.items():
        part = getattr(module, name.removesuffix("__bias"))
        parameter = part if isinstance(part, Tensor) else part.weight
        parameter = part.bias if name.endswith("__bias") else parameter
        assert parameter.shape == given_weight.shape, name
        parameter.data.copy_(given_weight)
    return module


class Watch:
    """A probe that keeps what decides the weights: queries, keys, scores before the mask, weights."""

    def at(self, site: str) -> Watch:
        return self

    def see(self, q: Tensor, k: Tensor, v: Tensor, mask: Visible | Tensor, terms: Terms) -> None:
        seen = mask.tensor() if isinstance(mask, Visible) else mask
        self.q, self.k, self.v, self.scale = q[0], k[0], v[0], terms.scale
        self.scaled = scores(q, k, terms)[0]
        self.weights = weights(q, k, seen, terms)[0]


def context(size: int, mask: Mask | None = None, **more: Any) -> Context:
    return Context(Span.run(0, size), mask or Causal(), **more)


def run(layer: nn.Module, x: Tensor, mask: Mask | None = None, **more: Any) -> Tensor:
    """One row without a batch axis: (t m) -> (t m)."""
    with torch.no_grad():
        return layer(x[None], context(len(x), mask, **more))[0]
