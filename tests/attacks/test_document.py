"""Each guarantee of SECURITY.md names a test that tries to break it."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "SECURITY.md").read_text("utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", TEXT)))


def list_guarantees() -> list[str]:
    """The items of the section."""
    [section] = re.findall(r"^## Guarantees\n(.*?)^## ", TEXT, re.MULTILINE | re.DOTALL)
    return re.findall(r"^- (.*?)(?=^- |^#|\Z)", section, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("file", "test"), NAMED)
def test_each_named_test_exists(file: str, test: str) -> None:
    tree = ast.parse((ROOT / file).read_text("utf-8"))
    functions = {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert test in functions


def test_each_guarantee_names_a_test() -> None:
    found = list_guarantees()
    assert len(found) > 15
    for guarantee in found:
        assert re.search(r"`tests/[\w/]+\.py::test_\w+`", guarantee), guarantee


def test_each_attack_is_documented() -> None:
    """Except for the tests that other clients are not disturbed, which one sentence covers."""
    named = {test for _, test in NAMED}
    existing = {
        test for file in Path(__file__).parent.glob("test_*.py") for test in list_tests(file)
    }
    assert {
        test for test in existing - named if not re.search("_not_disturb_other_clients$", test)
    } == set()


def list_tests(file: Path) -> set[str]:
    if file == Path(__file__):
        return set()
    body = ast.parse(file.read_text("utf-8")).body
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    return {node.name for node in functions if node.name.startswith("test_")}
