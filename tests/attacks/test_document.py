"""SECURITY.md names only tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def list_tests(file: Path) -> set[str]:
    return set(re.findall(r"^(?:async )?def (test_\w+)\(", file.read_text("utf-8"), re.MULTILINE))


def test_each_test_that_a_guarantee_names_exists() -> None:
    text = (ROOT / "SECURITY.md").read_text("utf-8")
    names = set(re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", text))
    assert len(names) > 100
    existing = {file: list_tests(ROOT / file) for file, _ in names}
    assert [f"{file}::{test}" for file, test in sorted(names) if test not in existing[file]] == []
