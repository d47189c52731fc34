"""The faults of tests/mutants.py: what is drawn, and what it does to a source. No test is run."""

import shutil
from pathlib import Path

import pytest

from tests.mutants import (
    KINDS,
    apply,
    draw,
    find_selections,
    find_sites,
    format_table,
    read_notes,
)

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.exhaustive


def list_changes(source: str) -> list[tuple[str, str]]:
    """(kind, the changed source) of each possible fault."""
    data = source.encode()
    changes = [(site.kind, apply(data, site).decode()) for site in find_sites("a.py", data)]
    for _, changed in changes:
        compile(changed, "a.py", "exec")
    return changes


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("comparison", "a < b", "a <= b"),
        ("comparison", "(a) >= (b)", "(a) > (b)"),
        ("comparison", "a == b", "a != b"),
        ("comparison", "a not in b", "a in b"),
        ("comparison", "a is b", "a is not b"),
        ("comparison", "(a is  not\n    b)", "(a is\n    b)"),
        ("operator", "a + b", "a - b"),
        ("operator", "a and b and c", "a or b and c"),
        ("index", "a[0]", "a[1]"),
        ("index", "a[..., -1]", "a[..., -2]"),
        ("index", "a[1:b]", "a[2:b]"),
        ("statement", "a(\n    b,\n)", "pass"),
        ("statement", "a.b = c", "pass"),
        ("statement", "a -= b", "pass"),
        ("constant", "a = 0x10", "a = 17"),
        ("condition", "if a(\n        b\n    ): c", "if not (a(\n        b\n    )): c"),
    ],
)
def test_a_fault_of_each_kind_changes_the_source(kind: str, before: str, after: str):
    source, expected = (f"def f():\n    {text}\n" for text in (before, after))
    assert list_changes(source) == [(kind, expected)]


@pytest.mark.parametrize(
    "source",
    [
        "LIMIT = 1",
        "def f(a: 'x[1]' = None) -> Literal[1]:\n    'a < b'",
        "class A(Protocol):\n    def f(self, a=1): ...",
        "def f():\n    assert a < 1, 2",
        "def f():\n    log.info('%d', a + 1)",
        "def f():\n    return f'{a + 1}' + ''",
        "if __name__ == '__main__':\n    f()",
        "class A:\n    def __init__(self, a):\n        self.a = a",
        "@f(1)\ndef g(): a: list[1]",
    ],
)
def test_code_that_does_not_run_has_no_fault(source: str):
    assert list_changes(source) == []


def test_positions_count_characters_that_need_several_bytes():
    source = "def f():\n    return 'ä€😀' , a < 'ß', '😀'\n"
    assert list_changes(source) == [("comparison", source.replace("<", "<="))]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a part of the product."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("core", "grammar"):
        shutil.copytree(ROOT / "app" / name, folder / "app" / name)
    return folder


def test_the_same_seed_draws_the_same_faults(checkout: Path):
    first = draw(1, 6, checkout)
    assert first == draw(1, 6, checkout)
    assert first != draw(2, 6, checkout)


def test_a_draw_has_all_kinds_and_one_fault_per_file(checkout: Path):
    mutants = draw(36, 8, checkout)
    assert [mutant.number for mutant in mutants] == list(range(1, 9))
    assert tuple(mutant.kind for mutant in mutants[:6]) == KINDS
    assert len({mutant.file for mutant in mutants}) == 8
    for mutant in mutants:
        source = (checkout / mutant.file).read_bytes()
        changed = apply(source, mutant)
        assert changed != source
        compile(changed, mutant.file, "exec")


def test_the_mirrored_tests_of_a_module_come_first():
    assert find_selections(ROOT, "app/text/detokenizer.py") == [
        ["tests/text/test_detokenizer.py"],
        ["tests/text"],
    ]
    assert find_selections(ROOT, "models/llama.py")[-1] == ["tests/models"]
    # without the folder of all tests
    assert find_selections(ROOT, "app/cli.py") == [["tests/test_cli.py"]]


def test_a_table_keeps_its_notes(checkout: Path):
    mutants = [mutant.__dict__ for mutant in draw(1, 2, checkout)]
    results = {"seed": 1, "commit": "abc", "mutants": mutants}
    results["caught"] = {"1": {"tier": "make test", "test": "tests/a.py::b[c | d]"}}
    results["before"] = {"tried": [2], "caught": {}}
    table = format_table(results, {"2": "the same for all values"})
    found, missed = table.splitlines()[-2:]
    assert r"| make test: `tests/a.py::b[c \| d]` |  |  |" in found
    assert missed.endswith("| **missed** | missed | the same for all values |")
    assert read_notes(table) == {"#": "note", "1": "", "2": "the same for all values"}
