"""The libraries of OpenAI, Anthropic and Ollama send images to a model that was trained to see, and
to one that reads text only."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.client_process import run_client
from tests.colors_model.drawings import draw_named, encode_png
from tests.server_process import ROOT, ServerProcess, run_server

SCRIPT = ROOT / "tests" / "clients" / "image_questions.py"
MODEL = ROOT / "tests" / "colors_model" / "model"
WAYS = ("chat", "responses", "messages", "ollama chat")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """Replaces the server with the built-in model."""
    with run_server(str(MODEL)) as running:
        yield running.wait_until_ready()


def test_every_library_gets_the_color_and_may_go_on(
    server: ServerProcess,
    clients_python: str,
    client_environment: dict[str, str],
    tmp_path: Path,
) -> None:
    """The model answers a later question about the same image as the first one."""
    image = tmp_path / "image.png"
    image.write_bytes(encode_png(draw_named("purple", 4)))
    command = [clients_python, str(SCRIPT), server.url, "model", str(image)]
    lines = run_client(command, client_environment, tmp_path, server).splitlines()
    first = [line for line in lines if line.endswith(": purple")]
    for way in (*WAYS, "ollama generate"):
        assert f"{way}: purple" in first, lines
    assert len(lines) == 2 * len(WAYS) + 1
    later = {line.partition(": ")[2] for line in lines[1 : 2 * len(WAYS) : 2]}
    assert len(later) == 1, "all dialects render the same second turn"
