"""Each program of the manual in Python or JavaScript runs against a server with the built-in model.
Each block is in a language that a test runs.

tests/manual/test_extending_blocks.py has the programs of docs/extending.md.
"""

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest

from tests.clients.client_process import run_to_end
from tests.clients.conftest import CLIENTS
from tests.manual.blocks import list_blocks, list_pages, parse_blocks, read_blocks
from tests.manual.test_configuration_blocks import CONFIGURATION
from tests.manual.test_shell_blocks import SHELL
from tests.server_process import TIMEOUT, ServerProcess

pytestmark = pytest.mark.manual

EXTENDING = "docs/extending.md"

PYTHON_PAGES = [
    page
    for page in list_pages()
    if page != EXTENDING and any(block.language == "python" for block in read_blocks(page))
]
SCRIPTS = list_blocks("javascript")

# Patterns in the output of the programs of a page.
OUTPUTS = {
    "README.md": (r"^mlxrunner is a small server for language models\.",),
    "docs/clients.md": (
        r"name='get_weather'",
        r"city='(Oslo|Rome)' rain=(True|False)",
        "mlxrunner",
    ),
    "docs/howto.md": (r"^mlxrunner is a small server for language models\.",),
}

# Blocks of these languages are not run, for these reasons.
NOT_RUN = {
    "text": "diagrams, log lines, and the usage lines that tests/test_manual.py compares",
}

# A block in `text` whose first line looks like one of these is a command.
COMMAND = re.compile(r"^(?:\$ |(?:\.venv/bin/)?mlxrunner |curl |docker |make |pip |sudo )")


@pytest.fixture
def environment(manual_server: ServerProcess, tmp_path: Path) -> dict[str, str]:
    """Without another server."""
    unreachable = "http://127.0.0.1:9"
    return {
        "HOME": str(tmp_path),
        "HTTP_PROXY": unreachable,
        "HTTPS_PROXY": unreachable,
        "NO_PROXY": "127.0.0.1,localhost",
    }


def use_server(text: str, server: ServerProcess) -> str:
    return text.replace("127.0.0.1:8080", f"127.0.0.1:{server.port}")


def find_python(program: str) -> str:
    """The interpreter that has the libraries: the one of the tests, or of the clients."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
    missing = sorted(name for name in names if importlib.util.find_spec(name) is None)
    if not missing:
        return sys.executable
    if not CLIENTS.exists():
        pytest.skip(f"needs {', '.join(missing)} in .venv-clients: `make clients` installs it")
    return str(CLIENTS)


@pytest.mark.parametrize("page", PYTHON_PAGES)
def test_the_python_programs_of_a_page_run_in_sequence(
    page: str, manual_server: ServerProcess, environment: dict[str, str], tmp_path: Path
) -> None:
    """The first one of a page may define names that the others use."""
    blocks = [block.text for block in read_blocks(page) if block.language == "python"]
    program = use_server("\n".join(blocks), manual_server)
    script = tmp_path / "program.py"
    script.write_text(program, "utf-8")
    command = [find_python(program), str(script)]
    output = run_to_end(command, environment, tmp_path, manual_server, 2 * TIMEOUT)
    for pattern in OUTPUTS[page]:
        assert re.search(pattern, output, re.MULTILINE), output


@pytest.mark.parametrize("block", SCRIPTS, ids=str)
def test_a_javascript_program_runs(
    block, node: str, manual_server: ServerProcess, environment: dict[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "program.mjs"
    script.write_text(use_server(block.text, manual_server), "utf-8")
    output = run_to_end([node, str(script)], environment, tmp_path, manual_server, 2 * TIMEOUT)
    for pattern in OUTPUTS[block.page]:
        assert re.search(pattern, output, re.MULTILINE), output


def test_each_program_has_an_expected_output() -> None:
    assert set(OUTPUTS) == {*PYTHON_PAGES, *(block.page for block in SCRIPTS)}


# all blocks


def test_each_block_is_in_a_language_that_a_test_runs() -> None:
    known = {*SHELL, "python", "javascript", *CONFIGURATION, *NOT_RUN}
    unknown = [
        f"{block} [{block.language}]" for block in list_blocks() if block.language not in known
    ]
    assert unknown == [], (
        "no test runs blocks in these languages. Use one of "
        f"{', '.join(sorted(known))}, or add a test in tests/manual"
    )


def test_no_command_is_hidden_in_a_block_of_text() -> None:
    """The usage lines of docs/commands.md are generated, and have no values."""
    hidden = [
        str(block)
        for block in list_blocks("text")
        if COMMAND.match(block.text) and block.page != "docs/commands.md"
    ]
    assert hidden == [], "these blocks are commands: their language is `sh`"


def test_the_navigation_and_all_pages_are_read() -> None:
    pages = list_pages()
    assert pages.index("docs/index.md") < pages.index("README.md") < pages.index("docs/models.md")
    assert {"deploy/README.md", "CONTRIBUTING.md", "docs/decisions/http.md"} <= set(pages)
    assert len(list_blocks()) > 100


def test_fences_are_parsed() -> None:
    text = "a\n```sh\necho 1\n```\n  ~~~~ json\n  {\n   }\n  ~~~\n  ~~~~\n````text\n```\n````\n"
    blocks = list(parse_blocks("x.md", text))
    assert [(block.line, block.language, block.text) for block in blocks] == [
        (2, "sh", "echo 1\n"),
        (5, "json", "{\n }\n~~~\n"),
        (10, "text", "```\n"),
    ]
    with pytest.raises(AssertionError, match=r"x\.md:1"):
        list(parse_blocks("x.md", "```sh\n"))
