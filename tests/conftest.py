"""Settings that all tests share."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("arrays", "reference")

settings.register_profile(
    "attnspec",
    max_examples=50,
    deadline=None,  # the first sight of a shape is judged, later ones are waved through: times differ a lot
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("attnspec")


@pytest.fixture(scope="session")
def built_site(tmp_path_factory):
    """The documentation, built strictly."""
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    built = subprocess.run(
        command, cwd=Path(__file__).parents[1], env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return site


@pytest.fixture(scope="session")
def browser():
    """Chromium, as Debian installs it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        yield chromium
        chromium.close()
