"""The machine of a reader who follows a page: a folder that looks like a checkout, a home with
models, the folders of the system below another root, and a PATH of chosen programs.

Knows: the shell, the substitutions. Must not know: which blocks there are.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.deploy.guide_sandbox import relocate
from tests.deploy.nginx import NAME, Certificate
from tests.manual.stubs import OTHER_SHELLS, REAL_PROGRAMS, STUBS
from tests.server_process import ROOT, TIMEOUT, UNTRACED

# A block that takes longer hangs.
BLOCK_TIMEOUT = 2 * TIMEOUT

# The files of a checkout that blocks name.
CHECKOUT = ("Dockerfile", "Makefile", "README.md", "examples", "pyproject.toml")

# Variables of this process that the commands of a reader also have.
_INHERITED = ("LANG", "LC_ALL", "TMPDIR", "PYTHONPYCACHEPREFIX", "LD_LIBRARY_PATH")

_UNKNOWN_PROGRAM = """\
command_not_found_handle() {
    echo "the test does not know the program \\`$1\\`: if it can run here, add it to" \\
        "REAL_PROGRAMS, otherwise add a stub to STUBS (tests/manual/stubs.py)" >&2
    return 127
}
"""

_MLXRUNNER = """\
export PATH="@BIN@:@PATH@"
case "$1" in
bench|doctor|run|serve|show) exec "@PYTHON@" "@SOURCES@/tests/manual/reader_command.py" "$@";;
*) exec "@PYTHON@" -m app "$@";;
esac"""


@dataclass(frozen=True, slots=True)
class Output:
    """The output of a block. text: stdout and stderr."""

    status: int
    text: str


@dataclass
class Reader:
    """port: the port of the server that blocks reach at 127.0.0.1:8080. environment: additional
    variables. kept_servers: whether a server that a block starts keeps running until the end of the
    page."""

    folder: Path
    port: int
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    kept_servers: bool = False

    def __post_init__(self) -> None:
        for name in ("checkout/.venv/bin", "home", "bin", "logs", "servers", "tmp"):
            (self.folder / name).mkdir(parents=True)
        for name in ("etc/nginx/conf.d", "etc/systemd/system", f"etc/ssl/{NAME}"):
            (self.root / name).mkdir(parents=True)
        self._nginx = shutil.which("nginx") or ""
        if self._nginx:
            Certificate.make(self.root / "etc/ssl" / NAME)
        self._write_checkout()
        self._write_programs()

    @property
    def root(self) -> Path:
        return self.folder / "root"

    @property
    def checkout(self) -> Path:
        return self.folder / "checkout"

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def _calls(self) -> Path:
        return self.folder / "calls"

    def list_called_stubs(self) -> set[str]:
        return set(self._calls.read_text("utf-8").split())

    def adapt(self, text: str, placeholders: Mapping[str, str]) -> str:
        """The text with the addresses of the test's server, other ports, and the folders of the
        system below the root."""
        for placeholder, value in placeholders.items():
            text = text.replace(placeholder, value)
        text = re.sub(r"\b(127\.0\.0\.1|localhost):8080\b", rf"\1:{self.port}", text)
        return relocate(text, self.root)

    def run(self, text: str, shell: str = "bash", until: str | None = None) -> Output:
        """Runs a script, which stops at the first error. until: a pattern in the output after which
        Ctrl-C ends the script. Raises AssertionError if it does not end."""
        options = ("-euo", "pipefail") if shell == "bash" else ()
        process = subprocess.Popen(
            [str(shutil.which(shell)), *options, "-c", text],
            cwd=self.checkout,
            env=self._build_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()), daemon=True)
        reader.start()
        deadline = time.monotonic() + BLOCK_TIMEOUT
        interrupted = False
        while process.poll() is None:
            if until and not interrupted and re.search(until, "".join(lines)):
                _signal_group(process, signal.SIGINT)
                interrupted = True
            if time.monotonic() > deadline:
                lines.append(f"it had not ended after {BLOCK_TIMEOUT} s\n")
                _signal_group(process, signal.SIGKILL)
                process.wait()
            time.sleep(0.01)
        # what the block has left in the background
        _signal_group(process, signal.SIGKILL)
        reader.join(TIMEOUT)
        assert process.stdout is not None
        process.stdout.close()
        return Output(0 if interrupted else process.returncode, "".join(lines))

    def close(self) -> None:
        """Ends the servers that still run."""
        for record in (self.folder / "servers").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(record.read_text("utf-8")), signal.SIGKILL)

    def _build_environment(self) -> dict[str, str]:
        inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        return {
            **inherited,
            **UNTRACED,
            "PATH": str(self.folder / "bin"),
            "HOME": str(self.home),
            "BASH_ENV": str(self.folder / "unknown_program.sh"),
            "READER_LOGS": str(self.folder / "logs"),
            "READER_PORT": str(self.port),
            **({"READER_SERVERS": str(self.folder / "servers")} if self.kept_servers else {}),
            # the commands find the server at this port
            "MLXRUNNER_PORT": str(self.port),
            # the models of the test may never end their answers
            "MLXRUNNER_MAX_TOKENS": "50",
            "NO_PROXY": "127.0.0.1,localhost",
            **self.environment,
        }

    def _write_checkout(self) -> None:
        for name in CHECKOUT:
            (self.checkout / name).symlink_to(ROOT / name)
        ignored = shutil.ignore_patterns("secrets", ".env", "__pycache__")
        shutil.copytree(ROOT / "deploy", self.checkout / "deploy", ignore=ignored)

    def _write_programs(self) -> None:
        programs = self.folder / "bin"
        for name in (*REAL_PROGRAMS, *OTHER_SHELLS):
            if program := shutil.which(name):
                (programs / name).symlink_to(program)
        (self.folder / "unknown_program.sh").write_text(_UNKNOWN_PROGRAM, "utf-8")
        self._calls.touch()
        for name, stub in STUBS.items():
            self._write_script(
                programs / name, f'echo "{name}" >> "{self._calls}"\n' + self._fill(stub.script)
            )
        self._write_script(programs / "mlxrunner", self._fill(_MLXRUNNER))
        (self.checkout / ".venv/bin/mlxrunner").symlink_to(programs / "mlxrunner")

    def add_program(self, name: str, program: str) -> None:
        """Makes `name` run a program in a different folder."""
        self._write_script(self.folder / "bin" / name, f'exec "{program}" "$@"')

    def _write_script(self, path: Path, text: str) -> None:
        path.write_text(f"#!/bin/sh\n{text}\n", "utf-8")
        path.chmod(0o755)

    def _fill(self, script: str) -> str:
        for placeholder, value in {
            "@ROOT@": str(self.root),
            "@SOURCES@": str(ROOT),
            "@CHECKOUT@": str(self.checkout),
            "@PYTHON@": sys.executable,
            "@BIN@": str(self.folder / "bin"),
            "@PATH@": os.environ["PATH"],
            "@MAKE@": shutil.which("make") or "make",
            "@NGINX@": self._nginx,
        }.items():
            script = script.replace(placeholder, value)
        return script


def _signal_group(process: "subprocess.Popen[str]", number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def iter_missing_programs(text: str) -> Iterator[str]:
    """The real programs that a block needs and that are not installed."""
    for name in (*REAL_PROGRAMS, *OTHER_SHELLS):
        if re.search(rf"(?m)(?:^|[|&;(] *){re.escape(name)}\b", text) and not shutil.which(name):
            yield name
