"""Every script of examples/ runs to its end against a real server. Each of them asserts what must
hold; what it prints is shown when it fails."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.runners.spawning import wait_until
from tests.server_process import ROOT, TIMEOUT, ServerProcess

EXAMPLES = ROOT / "examples"
# OpenAI's own library is among what the tests need, and newer there
OURS = sorted(path.name for path in EXAMPLES.glob("openai_*.py"))
OTHERS = sorted({path.name for path in EXAMPLES.glob("*.py")} - set(OURS))
NODE = sorted(path.name for path in (EXAMPLES / "node").glob("*.mjs"))


def run(
    command: list[str], surroundings: dict[str, str], folder: Path, server: ServerProcess
) -> None:
    done = subprocess.run(
        command,
        cwd=folder,
        env=surroundings,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2 * TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n--- the server ---\n{server.log_text()[-4000:]}"
    assert done.stdout, "an example tells what it did"
    # what a script left is noticed a moment later
    wait_until(lambda: server.status()["Running"] == 0)
    status = server.status()
    assert (status["Status"], status["Failures"]) == (0, 0)


@pytest.mark.parametrize("script", OURS)
def test_openais_python_library(script: str, surroundings, tmp_path: Path, server: ServerProcess):
    run([sys.executable, str(EXAMPLES / script)], surroundings, tmp_path, server)


@pytest.mark.parametrize("script", OTHERS)
def test_python_libraries_of_others(
    script: str, clients: str, surroundings, tmp_path: Path, server: ServerProcess
):
    run([clients, str(EXAMPLES / script)], surroundings, tmp_path, server)


@pytest.mark.parametrize("script", NODE)
def test_libraries_for_node(
    script: str, node: str, surroundings, tmp_path: Path, server: ServerProcess
):
    run([node, str(EXAMPLES / "node" / script)], surroundings, tmp_path, server)


def test_the_readme_tells_each_example():
    told = (EXAMPLES / "README.md").read_text("utf-8")
    names = [*OURS, *OTHERS, *(f"node/{name}" for name in NODE), "browser/index.html"]
    assert [name for name in names if f"({name})" not in told] == []
