"""User-visible text uses the plain terms of docs/glossary.md: none of the words below.

Checks all string literals and docstrings of the product, its documents and its deployment files.
"""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

WORDS = (
    "told", "whoever", "nobody", "somebody", "want of", "mended", "in the making", "stands",
)  # fmt: skip
PATTERN = re.compile(
    r"\b(?:" + "|".join(word.replace(" ", r"\s+") for word in WORDS) + r")\b", re.IGNORECASE
)

# path -> texts of others that it quotes
QUOTED: dict[str, tuple[str, ...]] = {}


def tracked_files() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return [path for path in listed.stdout.split("\0") if path and (ROOT / path).is_file()]


def is_python(path: str) -> bool:
    return (
        path.startswith(("app/", "models/"))
        and not path.startswith("models/builtin/training/")
        and path.endswith(".py")
    )


def is_document(path: str) -> bool:
    return (
        ("/" not in path and path.endswith(".md"))
        or (path.startswith("docs/") and path.endswith(".md"))
        or path == "openapi.yaml"
        or path.startswith("deploy/")
    )


def literals(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each string literal, docstrings and the constant parts of f-strings
    included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def find_words(path: str, line: int, text: str) -> Iterator[str]:
    for quoted in QUOTED.get(path, ()):
        text = text.replace(quoted, " " * len(quoted))
    for match in PATTERN.finditer(text):
        at = line + text.count("\n", 0, match.start())
        yield f"{path}:{at}: {' '.join(match.group().split())!r}"


def test_no_user_visible_text_contains_them() -> None:
    found: list[str] = []
    for path in tracked_files():
        if not (is_python(path) or is_document(path)):
            continue
        content = (ROOT / path).read_text(encoding="utf-8")
        texts = literals(content) if is_python(path) else [(1, content)]
        found += [word for line, text in texts for word in find_words(path, line, text)]
    assert found == []


def test_they_are_found_in_each_kind_of_literal() -> None:
    source = '"""Nobody\\nwas told."""\nx = f"{y} in the\\nmaking"\n'
    found = [word for line, text in literals(source) for word in find_words("a.py", line, text)]
    assert found == ["a.py:1: 'Nobody'", "a.py:2: 'told'", "a.py:2: 'in the making'"]
