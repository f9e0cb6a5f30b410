"""How models learn: tasks and losses, the step and the loop, the run and its folder.

result = regard.train("story.toml", folder="runs/story")
"""

from __future__ import annotations

import importlib
import sys
from inspect import Signature, getdoc, signature
from types import ModuleType
from typing import Any


# A package that can be called: `regard.train(config)` is `regard.train.run.train(config)`, and so on. The import of any
# module in here, by whomever, binds the name `regard.train` to this package. So the package itself must answer the call
# and be described as what is called, and `from regard.train.trainer import Trainer` and `regard.train(config)` work in
# any order.
class CallablePackage(ModuleType):
    def _function(self) -> Any:
        run = importlib.import_module(f"{self.__name__}.run")
        return getattr(run, self.__name__.rpartition(".")[2])

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return getdoc(self._function())

    @property
    def __signature__(self) -> Signature:
        return signature(self._function())

    def __call__(self, *args: Any, **settings: Any) -> Any:
        return self._function()(*args, **settings)


sys.modules[__name__].__class__ = CallablePackage
