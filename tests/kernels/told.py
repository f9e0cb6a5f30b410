"""What the end of a test run says about fast kernels: which were run, which were not, and why."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch

from regard.kernels.c import native

NATIVE = ("attend", "rows", "train", "linear")


def lines(stats: Mapping[str, Sequence[Any]]) -> list[str]:
    """From pytest's reports by outcome. Nothing about kernels none of whose tests was asked for."""
    passed = [r.nodeid for r in stats.get("passed", ()) if r.when == "call"]
    skipped = [r.nodeid for r in stats.get("skipped", ())]
    failed = [r.nodeid for r in (*stats.get("failed", ()), *stats.get("error", ()))]

    def count(ids: list[str], part: str) -> int:
        return sum(part in nodeid for nodeid in ids)

    def asked(part: str) -> bool:
        return any(count(ids, part) for ids in (passed, skipped, failed))

    found = []
    if any(asked(f"kernels/test_native_{name}.py") for name in NATIVE):
        found.append(_native(passed, failed))
    if asked("kernels/test_gpu_kernels.py"):
        run = count(passed, "kernels/test_gpu_kernels.py")
        why = "TRITON_INTERPRET is not 1" if find_spec("triton") else "triton is not installed"
        not_run = f"not run here ({why}; make test-kernels)"
        found.append("Triton kernels: " + (f"{run} tests, interpreted" if run else not_run))
    if asked("tests/gpu/"):
        run, left = count(passed, "tests/gpu/"), count(skipped, "tests/gpu/")
        if torch.cuda.is_available():
            found.append(f"GPU: {run} tests run on {torch.cuda.get_device_name()}, {left} skipped")
        else:
            found.append(f"GPU: no CUDA device; {left} tests skipped")
    return found


def _native(passed: list[str], failed: list[str]) -> str:
    if native.why():
        return f"native C: not run here ({native.why()})"
    run, missing, rest = [], [], []
    for form in native.FORMS:
        again = f"kernels/test_native_forms.py::test_native_code_in_the_form[{form}]"
        here = form == native.form() and any("kernels/test_native_rows.py" in x for x in passed)
        if here or any(nodeid.endswith(again) for nodeid in passed):
            run.append(form)
        elif form not in native.forms():
            missing.append(form)
        else:
            broken = any(nodeid.endswith(again) for nodeid in failed)
            rest.append(f"{form}: {'FAILED' if broken else 'not run'}")
    parts = [f"{', '.join(run)} run"] if run else []
    parts += [f"{', '.join(missing)}: not on this CPU"] if missing else []
    return "native C: " + "; ".join(parts + rest)
