"""A real browser: Playwright (pip install 'regard[browser]') and the system's Chromium; without, a skip."""

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    api = pytest.importorskip(
        "playwright.sync_api", reason="needs Playwright: pip install 'regard[browser]'"
    )
    path = os.environ.get("CHROMIUM") or shutil.which("chromium")
    path = path or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("needs Chromium: apt install chromium, or CHROMIUM=its path")
    with api.sync_playwright() as play:
        found = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()
