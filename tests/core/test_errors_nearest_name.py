"""The most similar name, for suggestions."""

from app.core.errors import find_nearest, suggest
from tests.rows import rows

NAMES = ("--port", "--max-queue", "--max-tokens", "--no-pull", "qwen3:4b", "MLXRUNNER_ISA")


@rows(
    ("word", "expected"),
    [
        ("--prot", "--port"),
        ("--PORT", "--port"),
        ("-port", "--port"),
        ("port", "--port"),
        ("--max_queue", "--max-queue"),
        ("--max-que", "--max-queue"),
        ("--max-t", "--max-tokens"),
        ("--no-pul", "--no-pull"),
        ("qwen3-4b", "qwen3:4b"),
        ("Qwen3", "qwen3:4b"),
        ("--zzz", None),
        ("", None),
    ],
)
def test_the_most_similar_name_is_found(word: str, expected: str | None) -> None:
    assert find_nearest(word, NAMES) == expected


def test_a_beginning_is_suggested_only_if_it_is_the_only_one() -> None:
    known = ["--load-timeout-in-seconds", "--load-wait-in-seconds"]
    assert find_nearest("--load", known) is None
    assert find_nearest("--load", known[:1]) == known[0]


def test_a_common_prefix_makes_no_names_similar() -> None:
    assert suggest("MLXRUNNER_ZZZ", NAMES, "MLXRUNNER_") == ""
    assert suggest("MLXRUNNER_ISO", NAMES, "MLXRUNNER_") == "; did you mean MLXRUNNER_ISA?"
