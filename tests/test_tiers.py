"""The files that a tier does not collect: the markers would deselect them anyway."""

import pytest

from tests.tiers import TIERS, is_file_outside, is_outside

LISTED = frozenset({"tests/test_a.py::test_slow"})
EXHAUSTIVE = "import pytest\n\npytestmark = pytest.mark.exhaustive\n"


@pytest.mark.parametrize(
    ("tier", "function", "expected"),
    [
        ("unit", "tests/test_a.py::test_slow", True),
        ("unit", "tests/test_a.py::test_fast", False),
        ("integration", "tests/test_a.py::test_slow", False),
        ("integration", "tests/test_a.py::test_fast", True),
        ("blocking", "tests/test_a.py::test_slow", False),
        (None, "tests/test_a.py::test_fast", False),
    ],
)
def test_the_list_divides_the_functions(tier: str | None, function: str, expected: bool) -> None:
    assert is_outside(tier, function, LISTED) is expected


@pytest.mark.parametrize(
    ("tier", "path", "text", "expected"),
    [
        ("unit", "tests/test_a.py", "", False),
        ("unit", "tests/test_b.py", EXHAUSTIVE, True),
        ("integration", "tests/test_a.py", "", False),
        ("integration", "tests/test_a.py", EXHAUSTIVE, True),
        ("integration", "tests/test_b.py", "", True),
        ("timing", "tests/test_a.py", "@pytest.mark.timing\n", False),
        ("timing", "tests/test_a.py", "@pytest.mark.manual\n", True),
        ("exhaustive", "tests/test_b.py", EXHAUSTIVE, False),
        ("blocking", "tests/test_b.py", EXHAUSTIVE, False),
        (None, "tests/test_b.py", EXHAUSTIVE, False),
    ],
)
def test_a_file_without_a_test_of_the_tier_is_not_imported(
    tier: str | None, path: str, text: str, expected: bool
) -> None:
    assert tier is None or tier in TIERS
    assert is_file_outside(tier, path, text, LISTED) is expected
