"""Every script of examples/ runs to its end against a real server. The scripts have assertions;
their output is shown if they fail."""

import sys
from pathlib import Path

import pytest

from tests.clients.client_process import run_client
from tests.server_process import ROOT, ServerProcess

EXAMPLES = ROOT / "examples"
# OpenAI's library is a requirement of the tests, in a newer version
OPENAI_EXAMPLES = sorted(path.name for path in EXAMPLES.glob("openai_*.py"))
# these run with two versions of Anthropic's library
ANTHROPIC_EXAMPLES = ["anthropic_messages.py", "anthropic_tools.py"]
# these need a model that thinks: test_thinking.py runs them
THINKING_EXAMPLES = sorted(path.name for path in EXAMPLES.glob("*_thinking.py"))
OTHER_EXAMPLES = sorted(
    {path.name for path in EXAMPLES.glob("*.py")} - {*OPENAI_EXAMPLES, *THINKING_EXAMPLES}
)
NODE_THINKING_EXAMPLES = sorted(path.name for path in (EXAMPLES / "node").glob("*_thinking.mjs"))
NODE_EXAMPLES = sorted(
    {path.name for path in (EXAMPLES / "node").glob("*.mjs")} - set(NODE_THINKING_EXAMPLES)
)


def run(
    command: list[str], client_environment: dict[str, str], folder: Path, server: ServerProcess
) -> None:
    output = run_client(command, client_environment, folder, server)
    assert output, "an example must print something"


@pytest.mark.product
@pytest.mark.parametrize("script", OPENAI_EXAMPLES)
def test_openais_python_library(
    script: str, client_environment, tmp_path: Path, server: ServerProcess
):
    run([sys.executable, str(EXAMPLES / script)], client_environment, tmp_path, server)


@pytest.mark.parametrize("script", ANTHROPIC_EXAMPLES)
def test_the_last_version_0_of_anthropics_library(
    script: str, anthropic0_python: str, client_environment, tmp_path: Path, server: ServerProcess
):
    run([anthropic0_python, str(EXAMPLES / script)], client_environment, tmp_path, server)


@pytest.mark.product
@pytest.mark.parametrize("script", OTHER_EXAMPLES)
def test_python_libraries_of_others(
    script: str, clients_python: str, client_environment, tmp_path: Path, server: ServerProcess
):
    run([clients_python, str(EXAMPLES / script)], client_environment, tmp_path, server)


@pytest.mark.product
@pytest.mark.parametrize("script", NODE_EXAMPLES)
def test_libraries_for_node(
    script: str, node: str, client_environment, tmp_path: Path, server: ServerProcess
):
    run([node, str(EXAMPLES / "node" / script)], client_environment, tmp_path, server)


def test_the_readme_lists_each_example():
    readme = (EXAMPLES / "README.md").read_text("utf-8")
    names = [
        *OPENAI_EXAMPLES,
        *OTHER_EXAMPLES,
        *THINKING_EXAMPLES,
        *(f"node/{name}" for name in (*NODE_EXAMPLES, *NODE_THINKING_EXAMPLES)),
        "browser/index.html",
    ]
    assert [name for name in names if f"({name})" not in readme] == []
