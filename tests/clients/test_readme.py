"""The programs of README.md and docs/clients.md, run unchanged except for the server's address."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server_process import ROOT, TIMEOUT, ServerProcess

ADDRESS = "http://127.0.0.1:8080"

PAGES = {page: (ROOT / page).read_text("utf-8") for page in ("README.md", "docs/clients.md")}
FENCES = [
    fence
    for text in PAGES.values()
    for fence in re.findall(r"^```(\w+)\n(.*?)^```", text, re.M | re.S)
]
COMMANDS = [body for language, body in FENCES if language == "sh" and ADDRESS in body]


def run(
    command: list[str], surroundings: dict[str, str], folder: Path, server: ServerProcess
) -> str:
    """What it printed."""
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
    return done.stdout


def test_the_programs_run_one_behind_the_other(
    surroundings: dict[str, str], tmp_path: Path, server: ServerProcess
):
    """The first one of each page creates the client that the others use."""
    programs = [body for language, body in FENCES if language == "python"]
    assert len(programs) == 5
    script = tmp_path / "readme.py"
    script.write_text("\n".join(programs).replace(ADDRESS, server.url), "utf-8")
    said = run([sys.executable, str(script)], surroundings, tmp_path, server)
    assert "mlxrunner" in said
    assert "name='get_weather'" in said
    assert re.search(r"city='(Oslo|Rome)' rain=(True|False)", said)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_is_answered(
    command: str, surroundings: dict[str, str], tmp_path: Path, server: ServerProcess
):
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    asked = command.replace("curl ", "curl --fail-with-body ").replace(ADDRESS, server.url)
    said = run(["sh", "-c", asked], surroundings, tmp_path, server)
    assert "mlxrunner is" in said
