"""The fenced blocks of the manual: README.md, docs/ and the other documents of its navigation.

Knows: Markdown fences, the navigation. Must not know: how a block is run.
"""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from tests.server_process import ROOT

_FENCE = re.compile(r"^( *)(`{3,}|~{3,})(.*)$")


@dataclass(frozen=True, slots=True)
class Block:
    """page: its path in the repository. line: of the fence. language: "" if the fence has none.
    text: without the indentation of the fence."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


class _Loader(yaml.SafeLoader):
    """Reads the tags of Python objects in mkdocs.yml as None."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


@functools.cache
def read_site() -> Any:
    return yaml.load((ROOT / "docs/manual/mkdocs.yml").read_text("utf-8"), _Loader)


def list_nav(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [page for part in parts for page in list_nav(part)]


@functools.cache
def list_pages() -> tuple[str, ...]:
    """The documents of the navigation, in its order, and then the other pages of docs/."""
    pages = [
        page.removeprefix("repository/") if page.startswith("repository/") else f"docs/{page}"
        for page in list_nav(read_site()["nav"])
    ]
    others = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md"))
    return tuple(dict.fromkeys([*pages, *others]))


@functools.cache
def read_blocks(page: str) -> tuple[Block, ...]:
    return tuple(parse_blocks(page, (ROOT / page).read_text("utf-8")))


def list_blocks(*languages: str) -> list[Block]:
    """All blocks of the manual in these languages, or all blocks."""
    return [
        block
        for page in list_pages()
        for block in read_blocks(page)
        if not languages or block.language in languages
    ]


def parse_blocks(page: str, text: str) -> Iterator[Block]:
    """Raises AssertionError if the last block has no end."""
    opening: re.Match[str] | None = None
    start, lines = 0, list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        fence = _FENCE.match(line)
        if opening is None:
            if fence:
                opening, start, lines = fence, number, []
        elif fence and fence[2].startswith(opening[2]) and not fence[3].strip():
            yield Block(page, start, opening[3].strip(), "".join(f"{one}\n" for one in lines))
            opening = None
        else:
            lines.append(line.removeprefix(opening[1]))
    assert opening is None, f"{page}:{start}: this block has no end"
