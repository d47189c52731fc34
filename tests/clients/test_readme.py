"""The programs of README.md and docs/clients.md, run unchanged except for the server's address."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.clients.client_process import run_client
from tests.server_process import ROOT, ServerProcess

ADDRESS = "http://127.0.0.1:8080"

PAGES = {page: (ROOT / page).read_text("utf-8") for page in ("README.md", "docs/clients.md")}
FENCES = [
    fence
    for text in PAGES.values()
    for fence in re.findall(r"^```(\w+)\n(.*?)^```", text, re.M | re.S)
]
COMMANDS = [body for language, body in FENCES if language == "sh" and ADDRESS in body]


def test_the_programs_run_in_sequence(
    client_environment: dict[str, str], tmp_path: Path, server: ServerProcess
):
    """The first one of each page creates the client that the others use."""
    programs = [body for language, body in FENCES if language == "python"]
    assert len(programs) == 5
    script = tmp_path / "readme.py"
    script.write_text("\n".join(programs).replace(ADDRESS, server.url), "utf-8")
    output = run_client([sys.executable, str(script)], client_environment, tmp_path, server)
    assert "mlxrunner" in output
    assert "name='get_weather'" in output
    assert re.search(r"city='(Oslo|Rome)' rain=(True|False)", output)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_gets_an_answer(
    command: str, client_environment: dict[str, str], tmp_path: Path, server: ServerProcess
):
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    command_ = command.replace("curl ", "curl --silent --show-error --fail-with-body ")
    command_ = command_.replace(ADDRESS, server.url)
    output = run_client(["sh", "-c", command_], client_environment, tmp_path, server)
    assert "mlxrunner is" in join_content(output)


def join_content(output: str) -> str:
    """The text of a chat completion, a message or a stream of chunks."""
    prefix = "data: "
    events = [line for line in output.splitlines() if line.startswith(prefix)]
    if events:
        events = [event.removeprefix(prefix) for event in events]
        assert events.pop() == "[DONE]"
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
        return "".join(choice["delta"].get("content") or "" for choice in choices)
    body = json.loads(output)
    if "choices" in body:
        return body["choices"][0]["message"]["content"]
    return "".join(block["text"] for block in body["content"])


# tests/clients/programs runs the command of the guide, after `mlxrunner launch`
LAUNCHED = {
    "Claude Code": "claude",
    "Codex": "codex",
    "opencode": "opencode",
    "aider": "aider",
    "Cline": "cline",
    "Continue": "continue",
}


@pytest.mark.parametrize("client", LAUNCHED)
def test_the_guide_of_a_coding_agent_has_its_command(client: str):
    guide = find_section("### " + client)
    assert f".venv/bin/mlxrunner launch {LAUNCHED[client]} org/model -- " in guide


@pytest.mark.parametrize("client", ["Zed", "Xcode", "VS Code"])
def test_the_guide_of_an_editor_is_below_the_command_of_all_editors(client: str):
    editors = find_section("## Editors")
    assert f"\n### {client}\n" in editors
    assert [command for command in COMMANDS if command in editors]


def test_the_guide_of_open_webui_has_a_command():
    """tests/deploy/test_readme.py checks it without Docker."""
    assert "docker run " in find_section("## Open WebUI")


def find_section(heading: str) -> str:
    """The text below the first such heading, to the next heading of its level or above."""
    _, _, text = PAGES["docs/clients.md"].partition(f"\n{heading}\n")
    assert text, heading
    level = len(heading.split()[0])
    return re.split(rf"^#{{1,{level}}} ", text, maxsplit=1, flags=re.MULTILINE)[0]
