"""Each row of output_parsing belongs to a test, which may exclude it by id."""

import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
TESTS = "\n".join(
    path.read_text("utf-8") for path in FOLDER.glob("test_*.py") if path != Path(__file__)
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
    strings = [
        text for pair in re.findall(r'"([^"\n]+)"|\'([^\'\n]+)\'', TESTS) for text in pair if text
    ]
    prefixes = file == "ollama.jsonl"
    forgotten = {
        group
        for group in groups
        if not any(group.startswith(text) if prefixes else group == text for text in strings)
    }
    assert not forgotten
