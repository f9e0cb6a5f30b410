"""The wheel's tag: a wheel that holds compiled C code (`make wheel`) is for one architecture, any other is for all."""

import platform
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Tag(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if any(Path(self.root, "regard", "kernels", "c").glob("*.so")):
            build_data["tag"] = f"py3-none-linux_{platform.machine()}"
            build_data["pure_python"] = False
