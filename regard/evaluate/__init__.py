"""A trained model on data: measured, or asked for labels or vectors.

result = regard.evaluate("runs/story", "test.txt")
"""

from __future__ import annotations

import sys
from typing import Any

import regard.train


class CallablePackage(regard.train.CallablePackage):
    """`regard.evaluate(model, data)` is `regard.evaluate.run.evaluate(model, data)`."""

    def _function(self) -> Any:
        from regard.evaluate.run import evaluate

        return evaluate


sys.modules[__name__].__class__ = CallablePackage
