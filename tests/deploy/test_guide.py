"""docs/operations.md: its states, codes, log lines, options and commands match the code."""

import re
import shlex
from typing import get_args

import pytest

from app.api.status import OLLAMA_STATUS_CODES
from app.cli import _build_parser
from app.config.command_line import parse_arguments
from app.config.options import OPTIONS
from app.core.models import ModelPhase
from app.http.responses import ERROR_FORMATS
from tests.server_process import ROOT

GUIDE = ROOT / "docs" / "operations.md"
TEXT = GUIDE.read_text("utf-8")
SPANS = set(re.findall(r"`([^`\n]+)`", TEXT))


def read_table(heading: str) -> list[list[str]]:
    """The cells of the table whose first column has this heading."""
    _, _, table = TEXT.partition(f"| {heading} |")
    lines = table.split("\n\n")[0].splitlines()[2:]
    assert lines
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def read_sources() -> str:
    """The source code, with adjacent string literals joined."""
    code = "\n".join(file.read_text("utf-8") for file in sorted((ROOT / "app").rglob("*.py")))
    return re.sub(r'"\s*\n\s*f?"', "", code)


def test_each_state_of_the_server_has_a_row() -> None:
    states = {cell for row in read_table("`Status`") for cell in row[:1]}
    assert {f"{number}, {state}" for state, number in OLLAMA_STATUS_CODES.items()} <= states


def test_the_states_of_a_model_are_those_of_the_code() -> None:
    states = {name for row in read_table("state") for name in re.findall(r"`(\w+)`", row[0])}
    assert states == set(get_args(ModelPhase))


def read_codes() -> dict[str, set[int]]:
    """The codes of the table with their statuses."""
    codes: dict[str, set[int]] = {}
    for status, names, _ in read_table("status"):
        for name in re.findall(r"`(\w+)`", names):
            codes.setdefault(name, set()).update(map(int, status.split(", ")))
    return codes


# Each error of these kinds has its own code, so the kind's code is never sent.
UNSENT_CODES = {"forbidden", "server_overloaded"}


def test_each_code_has_a_row_with_its_status() -> None:
    listed = read_codes()
    for kind in ERROR_FORMATS.values():
        if kind.code is not None and kind.code not in UNSENT_CODES:
            assert kind.status in listed.get(kind.code, set()), kind.code


def test_each_listed_code_exists() -> None:
    code = read_sources()
    assert [name for name in read_codes() if f'"{name}"' not in code] == []


@pytest.mark.parametrize("line", [row[0].strip("`") for row in read_table("line")])
def test_each_log_line_is_in_the_sources(line: str) -> None:
    """… replaces the variable part."""
    pieces = [piece.strip() for piece in line.split("…") if len(piece.strip()) > 1]
    pattern = r"[^\"\n]{0,40}".join(re.escape(piece) for piece in pieces)
    assert re.search(pattern, read_sources()), line


def test_each_option_exists() -> None:
    known = {option.flag for option in OPTIONS} | {"--admin", "--file", "--config"}
    known |= {f"--no-{option.flag.removeprefix('--')}" for option in OPTIONS if option.is_boolean}
    named = {flag for span in SPANS for flag in re.findall(r"^--[a-z-]+", span)}
    assert named
    assert named <= known


def list_commands() -> list[str]:
    fences = re.findall(r"^```sh\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    lines = [line for fence in fences for line in fence.splitlines()]
    lines = sorted({*lines, *SPANS} - {"mlxrunner --version"})
    return [line for line in lines if line.startswith("mlxrunner ")]


@pytest.mark.parametrize("command", list_commands())
def test_each_command_is_valid(command: str) -> None:
    arguments = parse_arguments(_build_parser(), shlex.split(command)[1:])
    assert arguments.command in command


def test_each_file_of_deploy_is_named() -> None:
    files = (ROOT / "deploy/README.md").read_text("utf-8").split("\n## Files\n")[1]
    for file in (ROOT / "deploy").iterdir():
        if file.name not in ("README.md", "secrets", ".env", "__pycache__"):
            assert f"[{file.name}" in files or f"`{file.name}/`" in files, file.name


def test_numbers_are_those_of_the_code() -> None:
    """The page quotes these constants."""
    from app.engine import device
    from app.http import connection_limits

    shares = (device._DEVICE_SHARE, device._MACHINE_SHARE, device._FREE_SHARE)  # pyright: ignore[reportPrivateUsage]
    assert shares == (0.9, 0.7, 0.9)
    assert connection_limits._RESERVED_FDS == 256  # pyright: ignore[reportPrivateUsage]
