"""Runs the shell blocks of deploy/README.md in a temporary folder.

/opt, /etc and the other paths of the system are replaced by folders below a root of the test.
Commands that change the system are replaced by stubs at the front of PATH, which check their
arguments and record them. All other commands are the real ones. The packages are not installed:
the stub for deploy/install.py creates a command that runs in the environment of the tests.
"""

import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.server_process import ROOT, TIMEOUT

GUIDE = ROOT / "deploy" / "README.md"
PROGRAM = "/opt/mlxrunner/bin/mlxrunner"

# the paths of the system in the guide, the unit and the launchd job
_SYSTEM_PATHS = re.compile(r"(?<![\w.~/-])(?=/(?:opt|etc|var|Library)/)")

# Each stub records its name and arguments, one call per line, and then runs its lines.
STUBS = {
    # runs the command without other rights; the user of the service exists only in the sandbox
    "sudo": 'if [ "$1 $2" = "-u mlxrunner" ]; then shift 2; fi\n'
    'case "$1" in -*) exit 90;; esac\nexec "$@"',
    # the user exists only in the sandbox
    "useradd": '[ "$1" = --system ] || exit 91',
    "chown": 'for path; do :; done; [ -e "$path" ] || exit 92',
    # the unit must be in place before it is enabled or restarted
    "systemctl": 'case "$1" in\n'
    "daemon-reload) [ $# = 1 ];;\n"
    'enable) [ "$2" = --now ] && [ -f "@ROOT@/etc/systemd/system/$3.service" ];;\n'
    "restart|reload) [ $# = 2 ];;\n"
    "*) exit 93;; esac",
    "launchctl": '[ "$1 $2" = "bootstrap system" ] && [ -f "$3" ]',
    "nginx": '[ "$*" = -t ] && [ -n "$(ls @ROOT@/etc/nginx/conf.d)" ]',
    "docker": '[ "$1" = compose ] && [ -f compose.yaml ]',
    # as the real one, but without the change of the owner
    "install": '[ "$1 $2 $3 $4" = "-m 600 -o prometheus" ] || exit 94\n'
    'shift 4\ncat "$1" > "$2"; chmod 600 "$2"',
    # the step that needs the network
    "python3": '[ "$1" = deploy/install.py ] && [ -f "$1" ] || exit 95\n'
    '[ $# = 2 ] && [ -w "$2" ] || exit 96\n'
    'mkdir -p "$2/bin"\nprintf \'#!/bin/sh\\nexec "@PYTHON@" -m app "$@"\\n\' '
    '> "$2/bin/mlxrunner"\nchmod 755 "$2/bin/mlxrunner"',
}


@dataclass(frozen=True, slots=True)
class Sandbox:
    """root: contains the folders of the system. checkout: a copy of deploy/. stubs: the folder of
    the stubs, at the front of PATH. calls_file: the calls to the stubs."""

    root: Path
    checkout: Path
    stubs: Path
    calls_file: Path

    @staticmethod
    def make(folder: Path) -> "Sandbox":
        sandbox = Sandbox(folder / "root", folder / "checkout", folder / "stubs", folder / "calls")
        for name in (
            "etc/systemd/system",
            "etc/nginx/conf.d",
            "etc/prometheus",
            "Library/LaunchDaemons",
        ):
            (sandbox.root / name).mkdir(parents=True)
        ignored = shutil.ignore_patterns("secrets", ".env", "__pycache__")
        shutil.copytree(ROOT / "deploy", sandbox.checkout / "deploy", ignore=ignored)
        sandbox.stubs.mkdir()
        sandbox.calls_file.touch()
        for name, lines in STUBS.items():
            text = lines.replace("@ROOT@", str(sandbox.root)).replace("@PYTHON@", sys.executable)
            stub = sandbox.stubs / name
            stub.write_text(f'#!/bin/sh\necho "{name} $*" >> "{sandbox.calls_file}"\n{text}\n')
            stub.chmod(stub.stat().st_mode | stat.S_IXUSR)
        return sandbox

    @property
    def environment(self) -> dict[str, str]:
        # the installed command finds the packages of the source tree
        path = f"{self.stubs}{os.pathsep}{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}

    def relocate(self, text: str) -> str:
        return relocate(text, self.root)

    def get_path(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def run(self, block: str, *, answer: str = "") -> str:
        """Runs a block as a shell would that stops at the first error. answer: its input. Returns
        its output. Raises AssertionError with both outputs if a command fails."""
        process = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self.relocate(block)],
            cwd=self.checkout,
            env=self.environment,
            input=answer,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        report = f"{block}{process.stdout}{process.stderr}"
        assert process.returncode == 0, f"exit status {process.returncode}:\n{report}"
        return process.stdout

    def get_calls(self, name: str) -> list[str]:
        """The arguments of each call of a stub, with the paths of the guide."""
        text = self.calls_file.read_text("utf-8").replace(str(self.root), "")
        return re.findall(rf"^{name} (.*)$", text, re.MULTILINE)


def relocate(text: str, root: Path) -> str:
    """The text with the paths of the system below the root."""
    return _SYSTEM_PATHS.sub(str(root), text)


def read_blocks(heading: str) -> list[str]:
    """The shell blocks in a section of the guide. Raises AssertionError if there is none."""
    sections = re.split(r"^## (.+)\n", GUIDE.read_text("utf-8"), flags=re.MULTILINE)
    section = dict(zip(sections[1::2], sections[2::2], strict=True))[heading]
    blocks = re.findall(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert blocks, heading
    return blocks


def read_unit(unit: Path) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of an installed unit, as systemd would read them."""
    command: list[str] = []
    environment: dict[str, str] = {}
    for line in unit.read_text("utf-8").splitlines():
        name, _, value = line.partition("=")
        if name == "ExecStart":
            command = value.split()
        elif name == "Environment":
            environment.update(_read_assignments(value.split()))
        elif name == "EnvironmentFile":
            file = Path(value.removeprefix("-"))
            lines = file.read_text("utf-8").splitlines() if file.exists() else []
            environment.update(_read_assignments(lines))
    return command, environment


def _read_assignments(words: Sequence[str]) -> dict[str, str]:
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def find_expected(block: str) -> Sequence[tuple[str, ...]]:
    """The statuses that the comment of each curl command in a block allows."""
    comments = re.findall(r"^curl .*?# (.*)$", block, re.MULTILINE)
    return [tuple(re.findall(r"\b\d{3}\b", comment)) for comment in comments]
