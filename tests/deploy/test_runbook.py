"""The alerts in docs/operations.md: each alert links to its section, and the sections name what
exists."""

import re
import shlex
from typing import Any

import pytest
import yaml

from app.cli import _build_parser
from app.config.command_line import parse_arguments
from app.config.options import OPTIONS
from tests.deploy.test_guide import TEXT, read_codes, read_sources
from tests.server_process import ROOT
from tests.test_docs import extract_anchors

RUNBOOK = TEXT.partition("\n## Alerts\n")[2]
DOCUMENT: Any = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text("utf-8"))
ALERTS = [rule for group in DOCUMENT["groups"] for rule in group["rules"]]
NAMES = [rule["alert"] for rule in ALERTS]
# without the blocks, which tests/manual runs
PROSE = re.sub(r"^```.*?^```$", "", RUNBOOK, flags=re.MULTILINE | re.DOTALL)
SPANS = sorted(set(re.findall(r"`([^`]+)`", PROSE)))
PAGE = "https://github.com/OWNER/mlxrunner/blob/main/docs/operations.md"


def read_sections() -> dict[str, str]:
    parts = re.split(r"^### (\w+)\n", RUNBOOK, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("rule", ALERTS, ids=NAMES)
def test_the_link_of_each_alert_leads_to_its_section(rule: Any) -> None:
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert page == PAGE
    assert anchor in extract_anchors(RUNBOOK)
    assert anchor == rule["alert"].lower()


@pytest.mark.parametrize("name", NAMES)
def test_each_section_has_the_three_parts(name: str) -> None:
    parts = re.findall(r"^\*\*(.+?)\.\*\* \S", read_sections()[name], re.MULTILINE)
    assert parts == ["Meaning", "Look at", "Do"]


def test_the_sections_are_in_the_order_of_the_file() -> None:
    assert list(read_sections()) == NAMES


def test_each_metric_exists() -> None:
    sources = read_sources()
    names = {span for span in SPANS if re.match(r"(?:mlxrunner_|vllm:)\w", span)}
    assert len(names) > 5
    for name in names:
        assert f'"{name.removesuffix("_total")}"' in sources, name


def test_each_option_exists() -> None:
    known = {option.flag for option in OPTIONS} | {"--config"}
    named = {flag for span in SPANS for flag in re.findall(r"--[a-z][a-z-]+", span)}
    assert len(named) > 5
    assert named <= known


@pytest.mark.parametrize("command", [span for span in SPANS if span.startswith("mlxrunner ")])
def test_each_command_is_valid(command: str) -> None:
    words = shlex.split(command)[1:]
    assert parse_arguments(_build_parser(), words).command == words[0]


def test_each_error_and_log_line_exists() -> None:
    """The codes are taken from the table, which tests/deploy/test_guide.py compares with the
    code."""
    words = {span for span in SPANS if re.fullmatch(r"[a-z]+_[a-z_]+", span)}
    # metrics of the process, and names with a separate test
    others = {"process_open_fds", "process_max_fds", "runbook_url"}
    codes = {word for word in words - others if not word.startswith("mlxrunner_")}
    assert len(codes) > 3
    assert codes <= read_codes().keys()
    for line in ("could not be loaded", "connection limit reached", "connections need up to"):
        assert any(line in span for span in SPANS), line
        assert line in read_sources()


def test_the_deleted_key_is_the_one_that_setup_creates() -> None:
    [path] = re.findall(r"--entrypoint rm setup -f (\S+)", RUNBOOK)
    compose = (ROOT / "deploy/compose.yaml").read_text("utf-8")
    assert f"if ! [ -s {path} ]; then" in compose


@pytest.mark.parametrize(
    ("section", "setting", "path"),
    [
        ("MlxrunnerFilesRunOut", "LimitNOFILE", "deploy/mlxrunner.service"),
        ("MlxrunnerFilesRunOut", "ulimits", "deploy/compose.yaml"),
        ("MlxrunnerFilesRunOut", "NumberOfFiles", "deploy/org.mlxrunner.plist"),
        ("MlxrunnerModelsDriveEachOtherOut", "pinned", "deploy/mlxrunner.toml"),
    ],
)
def test_each_setting_is_in_its_file(section: str, setting: str, path: str) -> None:
    assert f"`{setting}`" in read_sections()[section]
    assert setting in (ROOT / path).read_text("utf-8")
