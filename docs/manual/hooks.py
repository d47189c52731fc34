"""Adds the files outside of docs/ that the pages link to, so that no link of the site is broken.

Knows: MkDocs' hooks, the links of Markdown. Must not know: the navigation, the content of pages.

A file of the repository is at `repository/PATH` of the site, Markdown as a page and all other files
as they are. A link to a folder leads to its README.md.
"""

import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_ROOT = Path(__file__).resolve().parents[2]
_PREFIX = "repository/"
_LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=(?:#[^)\s]*)?\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds every file that is linked from a page, and from the pages added that way."""
    pages = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    pages.append("README.md")
    known = set(pages)
    for page in pages:
        for path in _list_links(page):
            if path in known or path.startswith("docs/"):
                continue
            known.add(path)
            if not (_ROOT / path).is_file():
                raise PluginError(f"{page} links to {path}, which does not exist")
            if path.endswith(".md"):
                pages.append(path)
    for path in sorted(path for path in known if not path.startswith("docs/")):
        # bytes, because some of the files are images
        content = (_ROOT / path).read_bytes()
        files.append(File.generated(config, _PREFIX + path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Makes the links that leave docs/ lead to the files added above."""
    source = _to_repository_path(page.file.src_uri)
    start = posixpath.dirname(page.file.src_uri)

    def rewrite(found: re.Match[str]) -> str:
        path = _resolve(source, found[0])
        inside = path.startswith("docs/")
        target = path.removeprefix("docs/") if inside else _PREFIX + path
        return posixpath.relpath(target, start or ".")

    return _LINK.sub(rewrite, markdown)


def _list_links(path: str) -> Iterator[str]:
    for found in _LINK.finditer((_ROOT / path).read_text("utf-8")):
        yield _resolve(path, found[0])


def _resolve(source: str, link: str) -> str:
    """Returns the path in the repository of the file that a link in `source` leads to."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    return f"{path}/README.md" if os.path.isdir(_ROOT / path) else path


def _to_repository_path(uri: str) -> str:
    return uri.removeprefix(_PREFIX) if uri.startswith(_PREFIX) else f"docs/{uri}"
