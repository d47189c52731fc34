"""The documents agree with the code.

Options, packages, paths, targets, links and versions are compared with the sources, and no
published file names a machine's own folders or a package registry.
"""

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from app.cli import _build_parser
from app.config.command_line import parse_arguments
from app.config.options import (
    BACKEND_VARIABLES,
    CONFIG_VARIABLE,
    DEFAULT_OPTIONS,
    MODEL_OPTIONS,
    MODELS_VARIABLE,
    OPTIONS,
    SECRET_VARIABLES,
)
from app.config.precedence import resolve_config
from app.core.settings import Settings
from tests.rows import rows

ROOT = Path(__file__).resolve().parents[1]

DOCUMENTS = (
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "deploy/README.md",
    "examples/README.md",
    "models/builtin/MODEL_CARD.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md")),
)

# Written in pieces, so that this file does not contain the forbidden names.
REGISTRIES = (
    "pypi." + "org",
    "python" + "hosted.org",
    "npm" + "js.org",
    "npm" + "js.com",
    "ana" + "conda.org",
    "down" + "load.pytorch.org",
)
PRIVATE_FOLDER = re.compile(
    r"(?<![\w.~-])/(?:" + "|".join(("root", "home", "Users", "work")) + r")/\w"
)
INDEX_LINE = re.compile(r"^\s*(?:--(?:extra-)?index-url|-i|--find-links|-f)\b", re.MULTILINE)


def read(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def list_text_files() -> list[Path]:
    """Every text file that is in the repository, or would be added to it."""
    output = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    files = [ROOT / name for name in output.split("\0") if name]
    return [file for file in files if file.is_file() and b"\0" not in file.read_bytes()[:8192]]


def extract_code(markdown: str) -> str:
    """The contents of code fences and code spans."""
    fences = re.findall(r"^```.*?\n(.*?)^```", markdown, re.MULTILINE | re.DOTALL)
    spans = re.findall(r"`([^`\n]+)`", markdown)
    return "\n".join([*fences, *spans])


def extract_anchors(markdown: str) -> set[str]:
    """The fragments that headings get on the usual hosts."""
    headings = re.findall(r"^#+ +(.+?) *$", markdown, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


@rows("option", OPTIONS, ids=lambda option: option.field)
def test_each_option_has_a_row_with_its_default(option):
    """The description may differ from --help."""
    words = option.flag if option.is_boolean else f"{option.flag} {option.value_type.metavar}"
    default = option.format_value(option.default)
    words, default = words.replace("|", r"\|"), "" if default == "none" else default
    assert f"\n| `{words}` | {default} | " in read("docs/configuration.md")


def test_the_options_in_the_readme_have_the_same_defaults():
    rows = re.findall(r"^\| `--[^`]+` \| [^|]* \| ", read("README.md"), re.MULTILINE)
    assert len(rows) == 10
    options = read("docs/configuration.md")
    assert [row for row in rows if f"\n{row}" not in options] == []


def test_no_row_names_an_unknown_option():
    page = read("docs/configuration.md")
    section = page.split("\n## Options of `mlxrunner serve`\n")[1].split("\n## ")[0]
    known = {option.flag for option in OPTIONS} | {"--config", "--no", "--no-access-log"}
    of_config = {"--toml", "--json"}
    assert set(re.findall(r"--[a-z][a-z-]*[a-z]", extract_code(section))) == known | of_config
    variables = {option.env_var for option in OPTIONS} | {CONFIG_VARIABLE, MODELS_VARIABLE}
    variables_ = set(re.findall(r"MLXRUNNER_[A-Z_]+", extract_code(section)))
    assert variables_ <= variables | {*SECRET_VARIABLES, *BACKEND_VARIABLES}
    assert variables_ >= set(BACKEND_VARIABLES)


def test_the_example_configuration_is_valid(tmp_path):
    page = read("docs/configuration.md")
    [example] = re.findall(r"^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "a.toml").write_text(example)
    assert len(resolve_config({}, str(tmp_path / "a.toml"), {}).settings.models) == 2


EXAMPLE = "deploy/mlxrunner.toml"


def test_the_example_file_has_the_default_settings():
    assert resolve_config({}, str(ROOT / EXAMPLE), {}).settings == Settings()


def test_the_example_file_names_every_key_with_its_default(tmp_path):
    """An option without a default has an example value."""
    keys = re.sub(r"^#(?=\w+ = |\[\[)", "", read(EXAMPLE), flags=re.MULTILINE)
    document = tomllib.loads(keys)
    [model] = document.pop("models")
    [defaults] = document.pop("defaults")
    assert list(defaults) == [option.field for option in DEFAULT_OPTIONS]
    assert list(document) == [option.field for option in OPTIONS]
    assert list(model) == [option.field for option in MODEL_OPTIONS]
    for option in OPTIONS:
        if option.default not in (None, ()):
            assert option.from_toml(document[option.field]) == option.default, option.field
    (tmp_path / "a.toml").write_text(keys)
    resolve_config({}, str(tmp_path / "a.toml"), {})


COMMANDS = sorted(
    {
        line
        for document in DOCUMENTS
        for fence in re.findall(r"^```sh\n(.*?)^```", read(document), re.MULTILINE | re.DOTALL)
        for line in fence.splitlines()
        if line.startswith(".venv/bin/mlxrunner ")
    }
)


@rows("command", COMMANDS)
def test_each_command_is_valid(command):
    words = shlex.split(command, comments=True)[1:]
    assert parse_arguments(_build_parser(), words).command == words[0]


@rows("document", DOCUMENTS)
def test_each_make_target_exists(document):
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
    targets_ = set(re.findall(r"\bmake ([a-z-]+)\b", extract_code(read(document))))
    assert targets_ <= targets


@rows("document", DOCUMENTS)
def test_each_relative_link_has_a_target(document):
    text = read(document)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, fragment = target.partition("#")
        file = (ROOT / document).parent / path if path else ROOT / document
        assert file.exists(), target
        if fragment:
            assert fragment in extract_anchors(file.read_text("utf-8")), target


@rows("document", DOCUMENTS)
def test_each_path_and_name_exists(document):
    """As a path, or as path:name; foo is a file that a reader would write."""
    pattern = r"\b((?:app|models|tests)/[\w/]+\.(?:py|[ch]pp|c)\b)(?::([\w.]*\w))?"
    for path, name in re.findall(pattern, extract_code(read(document))):
        if "foo" in path:
            continue
        assert (ROOT / path).is_file(), path
        for part in name.split(".") if name else ():
            defined = rf"^ *(?:(?:async )?def|class) {part}\b|^ *{part}\b.* = "
            assert re.search(defined, read(path), re.MULTILINE), f"{path}:{name}"


def test_no_file_names_a_package_registry():
    for file in list_text_files():
        text = file.read_text("utf-8").lower()
        assert [name for name in REGISTRIES if name in text] == [], file


def test_no_file_names_a_private_folder():
    for file in list_text_files():
        assert PRIVATE_FOLDER.findall(file.read_text("utf-8")) == [], file


@pytest.mark.parametrize(
    "lock", sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("requirements/*.txt"))
)
def test_a_lock_has_pins_and_hashes_and_no_index(lock):
    text = read(lock)
    assert not INDEX_LINE.search(text)
    entries = re.split(r"^(?=\w)", re.sub(r"^ *#.*\n", "", text, flags=re.MULTILINE), flags=re.M)
    assert [entry for entry in entries[1:] if not re.match(r"[\w.-]+==", entry)] == []
    assert [entry for entry in entries[1:] if "--hash=sha256:" not in entry] == []


NODE_FOLDERS = ("examples/node", "tests/clients/programs")


@pytest.mark.parametrize("folder", NODE_FOLDERS)
def test_a_lock_for_node_has_pins_and_hashes_and_no_registry(folder):
    lock = json.loads(read(f"{folder}/package-lock.json"))
    packages = {name: entry for name, entry in lock["packages"].items() if name}
    assert packages
    for name, entry in packages.items():
        assert entry["version"], name
        assert entry["integrity"].startswith("sha512-"), name
        assert "resolved" not in entry, name


@pytest.mark.parametrize("folder", NODE_FOLDERS)
def test_a_lock_for_node_has_each_required_package(folder):
    """A registry did not have the programs of all platforms when the lock was written. npm left
    these out, and refused the lock where the registry listed them."""
    packages = json.loads(read(f"{folder}/package-lock.json"))["packages"]
    kinds = ("dependencies", "devDependencies", "optionalDependencies")
    manifest = json.loads(read(f"{folder}/package.json"))
    assert {kind: packages[""].get(kind) for kind in kinds} == {
        kind: manifest.get(kind) for kind in kinds
    }
    locked = {name.rpartition("node_modules/")[2] for name in packages}
    for name, entry in packages.items():
        required = {
            dependency
            for kind in ("dependencies", "optionalDependencies")
            for dependency in entry.get(kind, {})
        }
        assert required - locked == set(), name


def test_the_locks_agree_with_each_other():
    pins: dict[str, set[str]] = {}
    for lock in ("serve", "cuda", "build", "dev"):
        for name, version in re.findall(
            r"^([\w.-]+)==(\S+)", read(f"requirements/{lock}.txt"), re.MULTILINE
        ):
            pins.setdefault(name, set()).add(version)
    assert {name: versions for name, versions in pins.items() if len(versions) > 1} == {}
