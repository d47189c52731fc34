"""The number of repetitions in a regular expression."""

from app.grammar.schema import count_repetitions
from tests.rows import rows


@rows(
    ("pattern", "expected"),
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
def test_bounded_repetitions_inside_one_another_multiply(pattern: str, expected: int) -> None:
    assert count_repetitions(pattern) == expected


def test_an_absurd_count_is_just_a_large_number() -> None:
    assert count_repetitions("a{" + "9" * 100_000 + "}") >= 10**8
