"""Each guarantee of SECURITY.md names a test that tries to break it."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "SECURITY.md").read_text("utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", TEXT)))


def guarantees() -> list[str]:
    """The items of the chapter."""
    [chapter] = re.findall(r"^## Guarantees\n(.*?)^## ", TEXT, re.MULTILINE | re.DOTALL)
    return re.findall(r"^- (.*?)(?=^- |^#|\Z)", chapter, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("file", "test"), NAMED)
def test_each_test_that_is_named_exists(file: str, test: str) -> None:
    tree = ast.parse((ROOT / file).read_text("utf-8"))
    functions = {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert test in functions


def test_each_guarantee_names_a_test() -> None:
    found = guarantees()
    assert len(found) > 15
    for guarantee in found:
        assert re.search(r"`tests/[\w/]+\.py::test_\w+`", guarantee), guarantee


def test_each_attack_is_told_of() -> None:
    """But for those that show again that an attack disturbs nobody, which one sentence tells of."""
    told = {test for _, test in NAMED}
    made = {test for file in Path(__file__).parent.glob("test_*.py") for test in attacks(file)}
    assert {test for test in made - told if not re.search("disturbs?_nobody$", test)} == set()


def attacks(file: Path) -> set[str]:
    if file == Path(__file__):
        return set()
    body = ast.parse(file.read_text("utf-8")).body
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    return {node.name for node in functions if node.name.startswith("test_")}
