"""No row of output_parsing is forgotten: each belongs to a test, which may leave it out by name."""

import json
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TESTS = "\n".join(
    path.read_text("utf-8") for path in HERE.glob("test_*.py") if path != Path(__file__)
)


@pytest.mark.parametrize(
    ("file", "key"),
    [
        ("roundtrip.jsonl", "template"),
        ("llamacpp.jsonl", "template"),
        ("ollama.jsonl", "family"),
        ("mlx_lm.jsonl", "parser"),
    ],
)
def test_every_row_belongs_to_a_test(shared: Path, file: str, key: str) -> None:
    lines = (shared / "output_parsing" / file).read_text("utf-8").splitlines()
    groups = {json.loads(line)[key] for line in lines} - {None}
    told = [
        text for pair in re.findall(r'"([^"\n]+)"|\'([^\'\n]+)\'', TESTS) for text in pair if text
    ]
    begins = file == "ollama.jsonl"
    forgotten = {
        group
        for group in groups
        if not any(group.startswith(text) if begins else group == text for text in told)
    }
    assert not forgotten
