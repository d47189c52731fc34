"""Each shell block of the manual runs: in bash, in an empty folder, with the real `mlxrunner`
against a real server with the built-in model and a stand-in of the Hugging Face hub.

Programs that cannot run here are stubs (stubs.py). The tables below contain everything that a block
needs beyond its text. A row that no block needs fails a test.
"""

import contextlib
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.clients.conftest import CLIENTS
from tests.deploy.nginx import NAME, Certificate, run_nginx
from tests.manual.blocks import Block, list_blocks, list_pages, read_blocks
from tests.manual.conftest import HOME_MODELS
from tests.manual.reader import Reader, iter_missing_programs
from tests.manual.stubs import OTHER_SHELLS, STUBS
from tests.ports import find_free_port
from tests.server_process import ROOT, ServerProcess
from tests.store.stand_in import StandIn

pytestmark = pytest.mark.manual

SHELL = ("sh", "bash", "console")

# Text of a block -> its replacement, besides the addresses that Reader.adapt replaces.
PLACEHOLDERS = {
    # other ports might be in use, or another server's
    "--port 9000": "--port 0",
    "--port 11434": "--port 0",
    "http://127.0.0.1:8081": "http://127.0.0.1:8080",
    "http://a:8080": "http://127.0.0.1:8080",
    "http://b:8080": "http://127.0.0.1:8080",
    "--model a --model b": "--model builtin --model builtin",
    "--base-url https://llm.example.org/v1": "--base-url http://127.0.0.1:8080/v1",
    # words in capitals, which the page explains
    "=MODEL ": "=builtin ",
    "=MODEL\n": "=builtin\n",
}

# Pages on which nothing is installed: they begin with the download of a model.
FROM_NOTHING = ("README.md", "docs/quickstart.md")

# Pages that mostly repeat commands of README.md and docs/commands.md: `make test-all` runs them.
REPEATED = ("docs/models.md", "docs/quickstart.md")

# Pages whose blocks call the servers that earlier blocks have started.
OWN_SERVER = ("docs/howto.md",)

# Pages that another test runs as a whole, with that test.
RUN_BY_OTHER_TESTS = {"deploy/README.md": "tests/deploy/test_guide_commands.py"}


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a table about the blocks of a page that contain `text`."""

    page: str
    text: str
    value: str

    def matches(self, block: Block) -> bool:
        return self.page == block.page and self.text in block.text


REPOSITORY = (
    "git init -q . && git add report.txt && git -c user.name=a -c user.email=a@b commit -qm a"
    " && echo changed > report.txt"
)
LOAD = "READER_MEMO= mlxrunner run qwen3:4b hello"
REPORT = "echo 'What is mlxrunner?' > report.txt"

# Commands that run before a block, because its text assumes their effects.
PREPARATIONS = (
    Row("README.md", "cat report.txt", REPORT),
    Row("docs/commands.md", "git diff", f"{REPORT} && {REPOSITORY}"),
    Row("docs/models.md", "git diff", f"{REPORT} && {REPOSITORY}"),
    # rm does not delete a loaded model, and an earlier block may have loaded it
    Row("docs/commands.md", "mlxrunner rm ", f"{LOAD} && mlxrunner stop qwen3:4b"),
    # rm has deleted it
    Row("docs/commands.md", "mlxrunner cp ", "mlxrunner pull mlx-community/Qwen3-4B-4bit"),
    Row("docs/commands.md", "mlxrunner stop ", LOAD),
    Row(
        "docs/benchmarks.md",
        "trace.jsonl",
        """echo '{"prompt": "Hello", "output_length": 3, "timestamp": 0}' > trace.jsonl""",
    ),
    Row(
        "docs/distributed.md",
        "--hostfile hosts.json",
        """echo '[{"ssh": "one.local", "ips": ["10.0.0.1"]}]' > hosts.json""",
    ),
    Row(
        "docs/operations.md",
        "/etc/mlxrunner/keys.toml",
        "mkdir -p /etc/mlxrunner && mlxrunner key anna --file /etc/mlxrunner/keys.toml",
    ),
)

# Patterns in the output of a block that Ctrl-C ends: it is endless.
ENDLESS = (Row("docs/page.md", "curl -N", r"event: status[\s\S]*event: prefix"),)

# Patterns in the output of a block: the output that the page describes.
OUTPUTS = (
    Row("README.md", "curl ", r'"content":"mlxrunner is a small server for language models\.'),
    Row("README.md", "mlxrunner list", r"builtin .*"),
    Row("README.md", "mlxrunner key anna", r"mr-[-\w]{43}"),
    Row("docs/clients.md", "launch claude org/model    ", r"export ANTHROPIC_MODEL=org/model"),
    Row("docs/clients.md", '"stream": true', r"data: \[DONE\]"),
    Row("docs/clients.md", "/v1/messages", r'"text":"mlxrunner is a small server'),
    Row("docs/commands.md", "mlxrunner list", r"mlx-community/Qwen3-4B-4bit"),
    Row("docs/commands.md", "mlxrunner ps", r"builtin"),
    Row("docs/commands.md", "launch codex --print", r"model_providers\.mlxrunner\.base_url"),
    Row("docs/howto.md", "https://llm", r"data: \[DONE\]"),
    Row("docs/howto.md", "ben.key)", r'\{"Status":0,[^{}]*\}\{"Status":0,.*"Models":'),
    Row(
        "docs/howto.md", "OPTIONS", r"(?i)^access-control-allow-origin: https://chat\.example\.org"
    ),
    Row("docs/models.md", "mlxrunner list", r"mlx-community/Qwen3-4B-4bit"),
    Row("docs/operations.md", "mlxrunner --version", r"^\d+\.\d+"),
)

# Lines of configuration for several shells, of which each runs its own.
SHELL_LINES = (
    Row("docs/commands.md", "completion zsh", ""),
    Row("docs/configuration.md", "completion zsh", ""),
)

TABLES = {
    "PREPARATIONS": PREPARATIONS,
    "ENDLESS": ENDLESS,
    "OUTPUTS": OUTPUTS,
    "SHELL_LINES": SHELL_LINES,
}


def list_shell_pages() -> list[str]:
    return [page for page in list_pages() if page_blocks(page)]


def mark_pages() -> list[object]:
    return [
        pytest.param(page, marks=pytest.mark.exhaustive if page in REPEATED else ())
        for page in list_shell_pages()
    ]


def page_blocks(page: str) -> list[Block]:
    if page in RUN_BY_OTHER_TESTS:
        return []
    return [block for block in read_blocks(page) if block.language in SHELL]


@pytest.fixture
def reader(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    manual_server: ServerProcess,
    manual_hub: StandIn,
    manual_model: Path,
    hub_cache: Path,
    memo: Path,
) -> Iterator[Reader]:
    page: str = request.node.callspec.params["page"]
    own = page in OWN_SERVER
    environment = {"HF_ENDPOINT": manual_hub.endpoint, "READER_MEMO": str(memo)}
    port = find_free_port() if own else manual_server.port
    reader = Reader(tmp_path / "reader", port, environment, kept_servers=own)
    for name in HOME_MODELS:
        shutil.copytree(manual_model, reader.home / name)
    if page not in FROM_NOTHING:
        shutil.copytree(hub_cache, reader.home / ".cache/huggingface/hub")
    if CLIENTS.exists():
        reader.add_program("python", str(CLIENTS))
    with contextlib.ExitStack() as stack:
        stack.callback(reader.close)
        if NAME in "".join(re.findall(r"https://\S+", join_text(page))) and shutil.which("nginx"):
            stack.enter_context(serve_name(reader))
        yield reader


@contextlib.contextmanager
def serve_name(reader: Reader) -> Iterator[None]:
    """nginx as the guide installs it, in front of the server of the reader, whose curl finds it."""
    folder = reader.folder / "nginx"
    folder.mkdir()
    certificate = Certificate.make(folder)
    with run_nginx("one.conf", [reader], certificate, folder) as nginx:
        (reader.home / ".curlrc").write_text(
            f'connect-to = "{NAME}:443:127.0.0.1:{nginx.http.base_url.port}"\n'
            f'cacert = "{certificate.authority}"\n',
            "utf-8",
        )
        yield


def join_text(page: str) -> str:
    return "".join(block.text for block in page_blocks(page))


@pytest.mark.parametrize("page", mark_pages())
def test_the_shell_blocks_of_a_page_run_in_sequence(page: str, reader: Reader) -> None:
    """A block that fails does not stop the others."""
    faults: list[str] = []
    skipped: list[str] = []
    for block in page_blocks(page):
        missing = list(iter_missing_programs(block.text))
        if re.search(r"(?m)(^| )python ", block.text) and not CLIENTS.exists():
            missing.append(".venv-clients (`make clients`)")
        if f"https://{NAME}" in block.text and page in OWN_SERVER and not shutil.which("nginx"):
            missing.append("nginx")
        if missing and not is_shell_lines(block):
            skipped.append(f"{block} needs {', '.join(missing)}")
            continue
        faults += [f"{block}: {fault}" for fault in run_block(reader, block)]
    assert faults == [], "\n".join(faults)
    expected = {
        name
        for name, stub in STUBS.items()
        if any(re.search(stub.pattern, block.text) for block in page_blocks(page))
    }
    assert reader.list_called_stubs() >= expected, "a stub was not called"
    if skipped:
        pytest.skip("; ".join(skipped))


def run_block(reader: Reader, block: Block) -> Iterator[str]:
    """Yields what is wrong."""
    if is_shell_lines(block):
        yield from run_shell_lines(reader, block)
        return
    for row in PREPARATIONS:
        if row.matches(block):
            output = reader.run(reader.adapt(row.value, PLACEHOLDERS))
            assert output.status == 0, f"{block}: the preparation failed:\n{output.text}"
    until = next((row.value for row in ENDLESS if row.matches(block)), None)
    output = reader.run(reader.adapt(block.text, PLACEHOLDERS), until=until)
    if output.status:
        yield f"exit status {output.status} of\n{block.text}{output.text}"
        return
    for row in OUTPUTS:
        if row.matches(block) and not re.search(row.value, output.text, re.MULTILINE):
            yield f"no {row.value!r} in the output of\n{block.text}{output.text}"


def is_shell_lines(block: Block) -> bool:
    return any(row.matches(block) for row in SHELL_LINES)


def run_shell_lines(reader: Reader, block: Block) -> Iterator[str]:
    """Each line runs in the shell that it names, which then completes mlxrunner."""
    checks = {
        "bash": "complete -p mlxrunner",
        "zsh": '[ -n "$_comps[mlxrunner]" ]',
        "fish": "complete -c mlxrunner | grep -q mlxrunner",
    }
    for line in block.text.splitlines():
        [shell] = re.findall(r"completion (\w+)", line)
        if not shutil.which(shell):
            assert shell in OTHER_SHELLS
            continue
        start = "autoload -Uz compinit && compinit -u\n" if shell == "zsh" else ""
        output = reader.run(f"{start}{line}\n{checks[shell]}", shell)
        if output.status:
            yield f"exit status {output.status} of {line}\n{output.text}"


# the tables


@pytest.mark.parametrize("name", TABLES)
def test_each_row_is_about_a_block(name: str) -> None:
    blocks = list_blocks(*SHELL)
    unused = [row for row in TABLES[name] if not any(map(row.matches, blocks))]
    assert unused == [], f"no block needs these rows of {name}"


def test_each_placeholder_occurs() -> None:
    texts = [block.text for block in list_blocks(*SHELL)]
    assert [name for name in PLACEHOLDERS if not any(name in text for text in texts)] == []


def test_each_stub_is_called() -> None:
    """The test of each page fails if a stub whose pattern matches is not called there."""
    blocks = [block for page in list_shell_pages() for block in page_blocks(page)]
    unused = [
        name
        for name, stub in STUBS.items()
        if not any(re.search(stub.pattern, block.text) for block in blocks)
    ]
    assert unused == [], "no block calls these stubs"


@pytest.mark.parametrize("page", RUN_BY_OTHER_TESTS)
def test_the_other_test_runs_the_page(page: str) -> None:
    sections = re.findall(
        r"^## (.+)\n((?:(?!^## )[\s\S])*)", (ROOT / page).read_text("utf-8"), re.M
    )
    test = (ROOT / RUN_BY_OTHER_TESTS[page]).read_text("utf-8")
    for heading, text in sections:
        if "```sh" in text:
            assert f'"{heading}"' in test, heading


# the reader


def test_an_unknown_program_fails_and_says_what_to_do(tmp_path: Path) -> None:
    output = Reader(tmp_path / "reader", 9).run("echo before; frobnicate --all; echo after")
    assert output.status == 127
    assert "`frobnicate`" in output.text
    assert "tests/manual/stubs.py" in output.text
    assert "after" not in output.text


def test_a_failing_command_fails_its_block(tmp_path: Path) -> None:
    reader = Reader(tmp_path / "reader", 9)
    block = Block("docs/x.md", 1, "sh", "cat absent | tail\necho after\n")
    [fault] = run_block(reader, block)
    assert fault.startswith("exit status 1 of")
    assert "after\n" not in fault.replace(block.text, "")
