"""The scripts of docs/ that draw, as modules: the folder is not a package."""

import importlib
import sys
from pathlib import Path

path = sys.path[:]
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs"))
plots, quantities = map(importlib.import_module, ("plots", "quantities"))
sys.path[:] = path
