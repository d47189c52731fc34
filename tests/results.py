"""The results of a run of pytest, in a file that tests/run_parts.py reads.

Knows: the file that tests/plugins.py writes. Must not know: what a failure means for CI. It needs
only the standard library.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

# The reason of a skipped test begins with it if the test is void: it compared clocks, and other
# programs used the machine (tests/conftest.py).
VOID = "void: "


@dataclass
class Results:
    """passed, skipped: numbers of tests. failures: the output of each failed test, by its ID. void:
    the reason of each void test, by its ID. figures: the output of tests marked `timing`."""

    passed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    failures: dict[str, str] = field(default_factory=dict)
    void: dict[str, str] = field(default_factory=dict)
    figures: dict[str, str] = field(default_factory=dict)


def read_results(file: Path) -> Results | None:
    """None if the run ended before it wrote the file."""
    return Results(**json.loads(file.read_text("utf-8"))) if file.exists() else None
