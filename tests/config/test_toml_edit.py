"""Defaults of models are written into the configuration file, which keeps its other lines."""

import math
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.config.toml_edit import ConfigFile, edit_defaults
from app.config.toml_file import read_toml_file
from app.core.errors import AppError
from app.core.model_files import ModelDefaults
from tests.rows import rows

FILE = """\
# The server of the office.
port = 8080  # not 80

models = [
  "org/a",  # the first one
  "org/b",
]

[[defaults]]
# a # in a text is no comment
name = "org/a"
  context = "8K"  # enough
system = \"\"\"
[[defaults]]
name = "no # table"
\"\"\"  # of the lawyers

# The other one.
[[defaults]]
name = "org/b"
temperature = 0.5
"""

A = ModelDefaults(
    name="org/a", context=8192, system='[[defaults]]\nname = "no # table"\n', sampling={}
)


def test_equal_values_change_nothing():
    assert edit_defaults(FILE, A) == FILE
    assert edit_defaults(FILE, ModelDefaults(name="org/c")) == FILE


def test_only_the_lines_of_changed_keys_change():
    edited = edit_defaults(
        FILE,
        ModelDefaults(name="org/a", context=4096, system="Be\nbrief.", sampling={"top_p": 0.9}),
    )
    assert edited == FILE.replace('context = "8K"  # enough', "context = 4096  # enough").replace(
        'system = """\n[[defaults]]\nname = "no # table"\n"""  # of the lawyers\n',
        'system = "Be\\nbrief."  # of the lawyers\ntop_p = 0.9\n',
    )


def test_a_removed_key_and_a_removed_table_leave_the_comments():
    edited = edit_defaults(FILE, ModelDefaults(name="org/a", context=8192))
    assert "lawyers" not in edited
    edited = edit_defaults(FILE, ModelDefaults(name="org/a"))
    assert edited == FILE.replace(
        FILE[FILE.index("[[defaults]]") : FILE.index("\n# The other one.")],
        "# a # in a text is no comment\n",
    )
    assert [table["name"] for table in tomllib.loads(edited)["defaults"]] == ["org/b"]


@rows(
    "text",
    ["", "port = 1", "port = 1\n\n\n", "[[models]]\nname = 'x'\n", "# only a comment"],
    ids=["empty", "without a newline", "empty lines", "a model", "a comment"],
)
def test_a_new_table_is_appended(text: str):
    defaults = ModelDefaults(name="org/c", aliases=("c",), keep_alive=math.inf)
    edited = edit_defaults(text, defaults)
    assert edited.startswith(text.rstrip())
    assert edited.endswith(
        '[[defaults]]\nname = "org/c"\naliases = ["c"]\nkeep_alive = "forever"\n'
    )
    assert edit_defaults(edited, defaults) == edited


def test_the_line_ends_of_windows_are_kept():
    edited = edit_defaults(FILE.replace("\n", "\r\n"), ModelDefaults(name="org/c", aliases=("c",)))
    assert edited.count("\n") == edited.count("\r\n")
    edited = edit_defaults(edited, ModelDefaults(name="org/c", aliases=("d", "e"), max_tokens=5))
    assert edited.count("\n") == edited.count("\r\n")


@rows("text", ['defaults = [{name = "org/a", context = 5}]\n', 'defaults = [{name = "org/b"}]\n'])
def test_a_table_in_one_line_is_an_error(text: str):
    with pytest.raises(AppError, match="can only be edited by hand"):
        edit_defaults(text, A)


TEXTS = st.text(st.sampled_from(list("ab#\"'\\ =[]\n\t")), min_size=1, max_size=12).filter(
    lambda text: bool(text.strip())
)
DEFAULTS = st.builds(
    ModelDefaults,
    name=st.sampled_from(["org/a", "org/b", "org/c", "a ] # b"]),
    aliases=st.sampled_from([(), ("x",), ("y#", "z")]),
    system=st.none() | TEXTS,
    context=st.none() | st.integers(2, 99),
    keep_alive=st.none() | st.sampled_from([math.inf, 0.0, 2.5]),
    max_tokens=st.none() | st.integers(1, 9),
    sampling=st.dictionaries(
        st.sampled_from(["temperature", "min_p"]), st.sampled_from([0.0, 0.25, 1.0])
    )
    | st.fixed_dictionaries({"seed": st.integers(0, 9)}),
)


@settings(max_examples=60, deadline=None)
@given(edits=st.lists(DEFAULTS, max_size=6))
def test_any_edits_give_the_last_defaults_and_keep_the_rest(
    edits: list[ModelDefaults], tmp_path_factory: pytest.TempPathFactory
):
    path = tmp_path_factory.getbasetemp() / "edited.toml"
    path.write_text(FILE)
    expected = {"org/a": A, "org/b": ModelDefaults(name="org/b", sampling={"temperature": 0.5})}
    for defaults in edits:
        ConfigFile(str(path)).save_defaults(defaults)
        expected[defaults.name] = defaults
    found = read_toml_file(str(path))
    kept = {name: one for name, one in expected.items() if not one.is_empty}
    values = found["defaults"].value if "defaults" in found else ()
    assert {one.name: one for one in values} == kept
    text = path.read_text()
    assert text.startswith(FILE[: FILE.index("[[defaults]]")])
    assert "\n# a # in a text is no comment\n" in text
    assert "\n# The other one.\n" in text


def test_the_file_keeps_its_mode_and_its_link(tmp_path: Path):
    file, link = tmp_path / "a.toml", tmp_path / "link.toml"
    file.write_text(FILE)
    file.chmod(0o640)
    link.symlink_to(file)
    ConfigFile(str(link)).save_defaults(ModelDefaults(name="org/c", aliases=("c",)))
    assert link.is_symlink()
    assert file.stat().st_mode & 0o777 == 0o640
    assert "org/c" in file.read_text()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_file_that_cannot_be_read_or_parsed_is_an_error(tmp_path: Path):
    with pytest.raises(AppError, match="cannot be written: no such file"):
        ConfigFile(str(tmp_path / "a.toml")).save_defaults(A)
    (tmp_path / "b.toml").write_text("port = ")
    with pytest.raises(AppError, match="is not valid TOML"):
        ConfigFile(str(tmp_path / "b.toml")).save_defaults(A)
    assert (tmp_path / "b.toml").read_text() == "port = "
