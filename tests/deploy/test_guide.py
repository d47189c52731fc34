"""deploy/README.md, which somebody reads at night: what it says of states, codes, log lines and
commands has to be so."""

import re
import shlex
from typing import get_args

import pytest

from app.api.health import OLLAMA_STATUS_CODES
from app.cli import _build_parser
from app.config import flags
from app.config.options import OPTIONS
from app.core.model_state import ModelPhase
from app.http.responses import ERROR_FORMATS
from tests.server_process import ROOT

GUIDE = ROOT / "deploy" / "README.md"
TEXT = GUIDE.read_text("utf-8")
SPANS = set(re.findall(r"`([^`\n]+)`", TEXT))


def rows(heading: str) -> list[list[str]]:
    """The cells of the table whose first column is called so."""
    _, _, table = TEXT.partition(f"| {heading} |")
    lines = table.split("\n\n")[0].splitlines()[2:]
    assert lines
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def sources() -> str:
    """Our code, with texts that are written in several pieces as one."""
    code = "\n".join(file.read_text("utf-8") for file in sorted((ROOT / "app").rglob("*.py")))
    return re.sub(r'"\s*\n\s*f?"', "", code)


def test_each_state_of_the_server_is_told() -> None:
    said = {cell for row in rows("`/v1/status` says") for cell in row[:1]}
    assert {f"{number}, {state}" for state, number in OLLAMA_STATUS_CODES.items()} <= said


def test_each_state_of_a_model_is_told_and_no_other() -> None:
    told = {name for row in rows("state") for name in re.findall(r"`(\w+)`", row[0])}
    assert told == set(get_args(ModelPhase))


def codes() -> dict[str, set[int]]:
    """Those of the table, and with which statuses."""
    found: dict[str, set[int]] = {}
    for status, names, _ in rows("status"):
        for name in re.findall(r"`(\w+)`", names):
            found.setdefault(name, set()).update(map(int, status.split(", ")))
    return found


def test_each_code_is_told_with_its_status() -> None:
    told = codes()
    for manner in ERROR_FORMATS.values():
        if manner.code is not None:
            assert manner.status in told.get(manner.code, set()), manner.code


def test_no_code_is_told_that_there_is_not() -> None:
    code = sources()
    assert [name for name in codes() if f'"{name}"' not in code] == []


@pytest.mark.parametrize("line", [row[0].strip("`") for row in rows("line")])
def test_each_line_of_the_log_is_one_that_is_written(line: str) -> None:
    """… stands for what differs."""
    pieces = [piece.strip() for piece in line.split("…") if len(piece.strip()) > 1]
    pattern = r"[^\"\n]{0,40}".join(re.escape(piece) for piece in pieces)
    assert re.search(pattern, sources()), line


def test_each_option_is_one() -> None:
    known = {option.flag for option in OPTIONS} | {"--admin", "--file", "--config"}
    told = {flag for span in SPANS for flag in re.findall(r"^--[a-z-]+", span)}
    assert told
    assert told <= known


def commands() -> list[str]:
    fences = re.findall(r"^```sh\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    lines = [line for fence in fences for line in fence.splitlines()]
    return [line for line in sorted({*lines, *SPANS}) if line.startswith("mlxrunner ")]


@pytest.mark.parametrize("command", commands())
def test_each_command_is_one(command: str) -> None:
    arguments = flags.parse_arguments(_build_parser(), shlex.split(command)[1:])
    assert arguments.command in command


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)\s]+)\)", TEXT))))
def test_each_link_leads_somewhere(target: str) -> None:
    path, _, fragment = target.partition("#")
    file = GUIDE.parent / path
    assert file.exists()
    if fragment:
        headings = re.findall(r"^#+ +(.+?) *$", file.read_text("utf-8"), re.MULTILINE)
        assert fragment in {title.lower().replace(" ", "-") for title in headings}


def test_each_file_here_is_told() -> None:
    for file in (ROOT / "deploy").iterdir():
        if file.name not in ("README.md", "secrets", "provisioning", ".env"):
            assert file.name in TEXT, file.name


def test_figures_are_those_of_the_code() -> None:
    """They are told in words there, and change without anybody thinking of this page."""
    from app.engine import device
    from app.http import connection_limits

    shares = (device._DEVICE_SHARE, device._MACHINE_SHARE, device._FREE_SHARE)  # pyright: ignore[reportPrivateUsage]
    assert shares == (0.9, 0.7, 0.9)
    assert connection_limits._RESERVED_FDS == 256  # pyright: ignore[reportPrivateUsage]
