"""Each guarantee of SECURITY.md has its tests: guarantees.toml lists them, and all exist."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def list_tests(file: Path) -> set[str]:
    return set(re.findall(r"^(?:async )?def (test_\w+)\(", file.read_text("utf-8"), re.MULTILINE))


def test_each_test_of_a_guarantee_exists() -> None:
    text = Path(__file__).with_name("guarantees.toml").read_text("utf-8")
    names = [name for tests in tomllib.loads(text).values() for name in tests]
    assert len(names) > 100
    pairs = [tuple(name.split("::")) for name in names]
    existing = {file: list_tests(ROOT / file) for file, _ in pairs}
    assert [f"{file}::{test}" for file, test in pairs if test not in existing[file]] == []
