"""How often a regular expression repeats something."""

import pytest

from app.grammar.schema import count_repetitions


@pytest.mark.parametrize(
    ("pattern", "most"),
    [
        ("", 1),
        ("a*b+c?", 1),
        ("a{7}", 7),
        ("a{3,7}b{2}", 7),
        ("a{3,}", 3),
        ("a{,7}", 7),
        ("((ab){3}c){5}", 15),
        ("(a{2}b){3}c{4}", 6),
        ("(a{2})b{3}", 3),
        ("(a|b){2}{3}", 6),
        (r"\{9}", 1),
        (r"\({9}", 9),
        ("[{9}]{4}", 4),
        ("[]{9}]{4}", 4),
        (r"[\]{9}]{4}", 4),
        ("a{0}", 1),
        ("))a{3}", 3),
        ("((((a{100}){100}){100}){100}){100}", 10**10),
    ],
)
def test_bounded_repetitions_inside_one_another_multiply(pattern: str, most: int) -> None:
    assert count_repetitions(pattern) == most


def test_a_count_that_nobody_could_mean_is_only_large() -> None:
    assert count_repetitions("a{" + "9" * 100_000 + "}") >= 10**8
