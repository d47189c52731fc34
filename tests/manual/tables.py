"""Markdown tables, and the generated parts of pages.

Knows: Markdown. Must not know: what a page contains.
"""

import re
from collections.abc import Sequence


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(_escape, cells))} |\n" for cells in lines)


def _escape(cell: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\|", cell)


def read_part(page: str, name: str) -> str:
    """The text between the marks of a generated part."""
    [part] = re.findall(_pattern(name), page, re.DOTALL)
    return part


def replace_part(page: str, name: str, text: str) -> str:
    found = re.search(_pattern(name), page, re.DOTALL)
    assert found, f"there is no part {name!r}"
    return page[: found.start(1)] + text + page[found.end(1) :]


def _pattern(name: str) -> str:
    return rf"<!-- generated: {re.escape(name)} -->\n\n(.*?)\n<!-- end -->"
