"""The tiers of tests, for pytest's option `--tier`: each is an expression of markers.

Knows: the markers of pyproject.toml. Must not know: which tests have them. It needs only the
standard library.
"""

from collections.abc import Set

_NEVER_BY_DEFAULT = "gpu or exhaustive or network or programs"

TIERS = {
    # what `make test` runs: no process, less than a second of CPU time
    "unit": f"not (integration or timing or manual or {_NEVER_BY_DEFAULT})",
    "integration": f"integration and not (timing or manual or {_NEVER_BY_DEFAULT})",
    # both of them, for coverage and mutants
    "blocking": f"not (timing or manual or {_NEVER_BY_DEFAULT})",
    "timing": f"timing and not ({_NEVER_BY_DEFAULT})",
    "manual": f"manual and not ({_NEVER_BY_DEFAULT})",
    "programs": "programs and not network",
    "exhaustive": "exhaustive and not (gpu or network)",
}


_EXHAUSTIVE = "\npytestmark = pytest.mark.exhaustive"


def is_outside(tier: str | None, function: str, listed: Set[str]) -> bool:
    """Whether a test function need not be collected for the tier, whatever markers it has. listed:
    the functions of tests/integration.txt."""
    return (tier == "unit" and function in listed) or (
        tier == "integration" and function not in listed
    )


def is_file_outside(tier: str | None, path: str, text: str, listed: Set[str]) -> bool:
    """Whether no test of a file is in the tier. Importing the file would only take time: each
    worker collects all tests. path: relative to the root of the repository. text: of the file."""
    match tier:
        case "unit":
            return _EXHAUSTIVE in text
        case "integration":
            return _EXHAUSTIVE in text or not any(name.startswith(f"{path}::") for name in listed)
        case "timing" | "manual" | "programs":
            return f"pytest.mark.{tier}" not in text
        case _:
            return False
