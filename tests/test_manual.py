"""The manual is complete: every page is in the navigation, every command, variable and route has
its place, and generated pages and tables match the code.

`make manual` writes what is generated. Its site generator is not installed here. It fails for
broken links, which tests/test_docs.py also finds.
"""

import functools
import re
import shlex
from pathlib import Path

import pytest

from app import cli
from app.config.command_line import parse_arguments
from app.config.options import BACKEND_VARIABLES, CONFIG_VARIABLE, SECRET_VARIABLES
from tests.manual import commands_page, memory_tables, option_names
from tests.manual.blocks import list_nav, read_site
from tests.manual.tables import read_part
from tests.openapi_document import read_openapi
from tests.rows import rows

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
PARSER = cli._build_parser()


def read(page: str) -> str:
    return (DOCS / page).read_text("utf-8")


def test_each_page_is_in_the_navigation_once():
    """A decision is reached from the list of decisions."""
    listed = list_nav(read_site()["nav"])
    assert len(listed) == len(set(listed))
    own = {page for page in listed if not page.startswith("repository/")}
    decisions = {page for page in PAGES if page.startswith("decisions/")} - {"decisions/README.md"}
    assert own == set(PAGES) - decisions
    assert all(Path(page).name in read("decisions/README.md") for page in decisions)


def list_linked_pages() -> set[str]:
    """The Markdown files outside docs/ that a page links to, directly or through others."""
    found = {ROOT / "README.md"}
    unread = [*DOCS.rglob("*.md"), ROOT / "README.md"]
    while unread:
        page = unread.pop()
        links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text("utf-8"))
        targets = {(page.parent / link).resolve() for link in links}
        pages = {path / "README.md" if path.is_dir() else path for path in targets}
        new = {path for path in pages - found if path.suffix == ".md" and path.is_file()}
        new = {path for path in new if not path.is_relative_to(DOCS)}
        unread += new
        found |= new
    return {path.relative_to(ROOT).as_posix() for path in found}


def test_each_linked_page_of_the_repository_is_in_the_navigation():
    """Otherwise `make manual` fails."""
    listed = list_nav(read_site()["nav"])
    prefix = "repository/"
    assert {page.removeprefix(prefix) for page in listed if page.startswith(prefix)} == (
        list_linked_pages()
    )


def test_the_page_of_the_commands_is_current():
    assert read("commands.md") == commands_page.render(), "run `make manual`"


def test_the_table_of_foreign_options_is_current():
    assert read_part(read("migrating.md"), "options") == option_names.render(), "run `make manual`"


@functools.cache
def measure(name: str) -> memory_tables.ModelMemory:
    [found] = [one for one in memory_tables.list_checkpoints() if one.name == name]
    return memory_tables.measure(found)


def test_the_tables_of_memory_are_current():
    memories = [measure(name) for name in memory_tables.NAMES]
    page = read("memory.md")
    assert read_part(page, "models") == memory_tables.format_models(memories), "run `make manual`"
    for part, compute_budget in memory_tables.MACHINE_PARTS.items():
        assert read_part(page, part) == memory_tables.format_machines(memories, compute_budget)


@rows("name", cli.COMMAND_NAMES)
def test_each_command_has_a_section_with_its_options(name):
    """Read from the parser, not from what the generator takes for the command's own arguments."""
    _, _, rest = read("commands.md").partition(f"\n## mlxrunner {name}\n")
    section = rest.split("\n## ")[0]
    settings = read("configuration.md") if "[settings](configuration.md#" in section else ""
    for flag in PARSER.subcommands[name].list_flags():
        if flag in ("-h", "--help", "--help-all") or flag.startswith("--no-"):
            continue
        pattern = rf"`(?:[^`\n]*, )?{re.escape(flag)}[ ,`]"
        assert re.search(pattern, section) or re.search(pattern, settings), flag


@pytest.mark.parametrize("variable", [*BACKEND_VARIABLES, *SECRET_VARIABLES, CONFIG_VARIABLE])
def test_each_other_variable_is_in_the_manual(variable):
    assert any(f"`{variable}`" in read(page) for page in PAGES)


def list_routes() -> list[str]:
    return list(read_openapi()["paths"])


@rows("path", list_routes())
def test_each_route_is_in_the_manual(path):
    """The names of parameters may differ."""
    pattern = re.escape(re.sub(r"\{\w+\}", "{}", path)).replace(r"\{\}", r"\{\w+\}")
    assert re.search(rf"`(?:[A-Z]+ )?{pattern}`", read("api.md"))


def list_command_lines() -> list[tuple[str, str]]:
    """The lines of shell code and the spans of text that run mlxrunner, with their pages. Leaves
    out the decisions, which describe the past."""
    found: list[tuple[str, str]] = []
    for page in (page for page in PAGES if not page.startswith("decisions/")):
        text = read(page)
        for fence in re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            found += [(page, line) for line in fence.replace("\\\n", " ").splitlines()]
        outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        found += [(page, span) for span in re.findall(r"`([^`\n]+)`", outside)]
    return [(page, words) for page, line in found for words in find_command(line)]


def find_command(line: str) -> list[str]:
    """The part of a line from `mlxrunner` to the end of this command. Leaves out lines with a
    placeholder for several words."""
    found = re.match(r"(?:[^|#]*\| )?(?:\.venv/bin/)?(mlxrunner [a-z-].*)", line)
    if not found or re.search(r"…|\bCOMMAND\b", line):
        return []
    command = re.split(r"\s[|>]\s|\s#\s", found[1].replace(r"\|", "|"))[0]
    return [command.strip()]


COMMAND_LINES = sorted(set(list_command_lines()))

EXITING_FLAGS = ("--help", "--help-all", "--version")


@rows(("page", "line"), COMMAND_LINES)
def test_each_command_line_is_valid(page, line):
    words = [word for word in shlex.split(line)[1:] if word not in EXITING_FLAGS]
    if not words or (len(words) == 1 and words[0] in cli.COMMAND_NAMES):
        return  # the name of a command, which may need arguments
    arguments = parse_arguments(PARSER, words, cli.COMMAND_NAMES, cli.OTHER_COMMAND_NAMES)
    assert arguments.command == words[0]
