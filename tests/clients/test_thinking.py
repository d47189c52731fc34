"""The examples with thinking, against a server with a scripted engine.

The built-in model does not think. The engine is scripted; the libraries, HTTP, the dialects, the
chat template and the parsers are real. Therefore the outputs are known exactly.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.client_process import run_client
from tests.clients.programs.scripted_server import (
    FOLDER_VARIABLE,
    THINKING_TEMPLATE,
    EngineScript,
    Task,
    write_model,
)
from tests.clients.test_examples import EXAMPLES, NODE_THINKING_EXAMPLES, THINKING_EXAMPLES
from tests.server_process import ServerProcess, run_server

THOUGHT, CALL = (
    "I need the weather of Rome.",
    {"name": "get_weather", "arguments": {"city": "Rome"}},
)
CALL_TURN = f"<think>\n{THOUGHT}\n</think>\n\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>"
LAST_TURN = "<think>\nNow I can answer.\n</think>\n\nIt is sunny in Rome."
OUTPUT = [
    f"thinking: {THOUGHT}",
    'call: get_weather {"city":"Rome"}',
    "answer: It is sunny in Rome.",
]


@pytest.fixture(scope="module")
def script_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the engine's script and of the prompts that it got."""
    folder = tmp_path_factory.mktemp("engine")
    task = Task(marker="the weather in Rome", answers=[CALL_TURN, LAST_TURN])
    EngineScript(tasks=[task], needs_tools=False).write(folder)
    return folder


@pytest.fixture(scope="module")
def server(script_folder: Path) -> Iterator[ServerProcess]:
    """Replaces the server with the built-in model."""
    with run_server(
        str(write_model(script_folder / "thinker", THINKING_TEMPLATE)),
        environ={FOLDER_VARIABLE: str(script_folder)},
        module="tests.clients.programs.scripted_server",
    ) as server:
        yield server


@pytest.fixture(autouse=True)
def delete_prompts(script_folder: Path) -> None:
    for file in script_folder.glob("prompt-*.txt"):
        file.unlink()


def check_example(
    command: list[str],
    client_environment: dict[str, str],
    script_folder: Path,
    server: ServerProcess,
) -> None:
    """Checks the output of the example, and that the thinking was part of the next prompt."""
    output = run_client(command, client_environment, script_folder, server)
    lines = output.replace('": "', '":"').splitlines()
    # an example with two libraries prints the lines twice
    assert lines == OUTPUT * (len(lines) // len(OUTPUT))
    assert lines
    prompts = [file.read_text("utf-8") for file in script_folder.glob("prompt-*.txt")]
    answered = [prompt for prompt in prompts if "<tool_response>" in prompt]
    assert len(answered) >= len(lines) // len(OUTPUT)
    assert [prompt for prompt in answered if CALL_TURN not in prompt] == []


@pytest.mark.product
@pytest.mark.parametrize("script", THINKING_EXAMPLES)
def test_python_libraries(
    script: str, clients_python: str, client_environment, script_folder: Path, server: ServerProcess
):
    command = [clients_python, str(EXAMPLES / script)]
    check_example(command, client_environment, script_folder, server)


def test_the_last_version_0_of_anthropics_library(
    anthropic0_python: str, client_environment, script_folder: Path, server: ServerProcess
):
    command = [anthropic0_python, str(EXAMPLES / "anthropic_thinking.py")]
    check_example(command, client_environment, script_folder, server)


@pytest.mark.product
@pytest.mark.parametrize("script", NODE_THINKING_EXAMPLES)
def test_libraries_for_node(
    script: str, node: str, client_environment, script_folder: Path, server: ServerProcess
):
    command = [node, str(EXAMPLES / "node" / script)]
    check_example(command, client_environment, script_folder, server)
