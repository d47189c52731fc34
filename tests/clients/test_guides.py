"""docs/clients.md has a guide for each client, with its command. tests/manual runs the commands."""

import re

import pytest

from tests.server_process import ROOT

TEXT = (ROOT / "docs/clients.md").read_text("utf-8")

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
    assert "\ncurl " in editors


def test_the_guide_of_open_webui_has_a_command():
    """tests/deploy/test_readme.py checks it without Docker."""
    assert "docker run " in find_section("## Open WebUI")


def find_section(heading: str) -> str:
    """The text below the first such heading, to the next heading of its level or above."""
    _, _, text = TEXT.partition(f"\n{heading}\n")
    assert text, heading
    level = len(heading.split()[0])
    return re.split(rf"^#{{1,{level}}} ", text, maxsplit=1, flags=re.MULTILINE)[0]
