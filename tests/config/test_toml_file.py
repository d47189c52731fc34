"""The configuration file: its settings, and the line number of each error."""

import math
from pathlib import Path

import pytest

from app.config.toml_file import read_toml_file
from app.core.errors import AppError, ErrorKind
from app.core.model_files import ModelDefaults
from app.core.settings import ModelSettings, Settings
from tests.rows import rows

FULL_FILE = """\
# a comment
port = 9
cors_origins = [
  "https://a",
]
"keep_alive" = "5m"

[[models]]
name = "org/a"
alias = "a"
aliases = ["b", "c"]
preload = true
pinned = true
keep_alive = "forever"
quantize = 4
activations = 8
parallel = 2
context = 512
memory = 1.5
cache = "slots"

[[models]]
name = "b:4b"
"""


@pytest.fixture
def working_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory, so that paths in messages are short."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(content: str | bytes) -> str:
    data = content.encode() if isinstance(content, str) else content
    Path("a.toml").write_bytes(data)
    with pytest.raises(AppError) as caught:
        read_toml_file("a.toml")
    assert caught.value.kind is ErrorKind.INVALID
    assert "\n" not in caught.value.message
    return caught.value.message


def test_settings_and_models_are_read_with_their_line_numbers(working_dir: Path):
    Path("a.toml").write_text(FULL_FILE)
    found = read_toml_file("a.toml")
    assert {name: (value.value, value.source) for name, value in found.items()} == {
        "port": (9, "a.toml:2"),
        "cors_origins": (("https://a",), "a.toml:3"),
        "keep_alive": (300.0, "a.toml:6"),
        "models": (
            (
                ModelSettings(
                    name="org/a",
                    alias="a",
                    aliases=("b", "c"),
                    preload=True,
                    pinned=True,
                    keep_alive=float("inf"),
                    quantize=4,
                    activations=8,
                    parallel=2,
                    context=512,
                    memory=3 << 29,
                    cache="slots",
                ),
                ModelSettings(name="b:4b"),
            ),
            "a.toml:8",
        ),
    }


def test_models_without_settings_can_be_a_list_of_names(working_dir: Path):
    Path("a.toml").write_text('models = ["org/a", "b:4b"]')
    found = read_toml_file("a.toml")["models"]
    assert found.value == (ModelSettings(name="org/a"), ModelSettings(name="b:4b"))
    assert found.source == "a.toml:1"


def test_a_model_may_be_called_default(working_dir: Path):
    Path("a.toml").write_text('models = [{name = "default", alias = "default"}]')
    [model] = read_toml_file("a.toml")["models"].value
    assert model == ModelSettings(name="default", alias="default")


def test_defaults_of_models_are_read_and_checked_with_their_line(working_dir: Path):
    file = working_dir / "a.toml"
    file.write_text(
        '[[defaults]]\nname = "a"\nsystem = """\nBe\nbrief."""\ncontext = "8K"\ntop_k = 3\n'
        '[[defaults]]\nname = "b"\nkeep_alive = "forever"\nmin_p = 0\n'
    )
    assert read_toml_file("a.toml")["defaults"].value == (
        ModelDefaults(name="a", system="Be\nbrief.", context=8192, sampling={"top_k": 3}),
        ModelDefaults(name="b", keep_alive=math.inf, sampling={"min_p": 0}),
    )
    for line, message in {
        "temperature = 3": "a.toml:3: defaults[0].temperature: must be a number from 0 to 2,",
        "temprature = 1": "defaults[0].temprature: unknown key; did you mean temperature?",
        "port = 1": "unknown key; it is a server setting: move it above the first [[defaults]]",
        "[[defaults]]": "a.toml:3: defaults[1] needs a name",
    }.items():
        file.write_text(f'[[defaults]]\nname = "a"\n{line}\n')
        with pytest.raises(AppError) as caught:
            read_toml_file("a.toml")
        assert message in caught.value.message
    file.write_text("defaults = 5")
    with pytest.raises(AppError, match=r"must be \[\[defaults\]\] tables"):
        read_toml_file("a.toml")


def test_two_defaults_for_one_model_are_a_conflict():
    for tables in (
        (ModelDefaults(name="a"), ModelDefaults(name="a")),
        (ModelDefaults(name="a", aliases=("x",)), ModelDefaults(name="b", aliases=("x",))),
    ):
        with pytest.raises(AppError, match=r"two of the \[\[defaults\]\] "):
            Settings(defaults=tables)


def test_an_empty_file_sets_nothing(working_dir: Path):
    Path("a.toml").write_text("")
    assert read_toml_file("a.toml") == {}


@rows(
    ("content", "message"),
    [
        ("\nprot = 9", "a.toml:2: prot: unknown key; did you mean port?"),
        ("zzz = 9", "a.toml:1: zzz: unknown key"),
        ("model = 9", "a.toml:1: model: unknown key; did you mean models?"),
        ("port = 'x'", "a.toml:1: port: must be an integer from 0 to 65535, not 'x'"),
        ("port = 1.5", "a.toml:1: port: must be an integer from 0 to 65535, not 1.5"),
        ("debug = 1", "a.toml:1: debug: must be true or false, not 1"),
        (
            "x = 0\n[server]\nport = 9",
            "a.toml:1: x: unknown key",
        ),
        (
            "[server]\nport = 9",
            "a.toml:1: [server]: unknown section; settings are top-level keys, without sections",
        ),
        ("[modles]", "a.toml:1: [modles]: unknown section"),
        ("port.number = 9", "a.toml:1: port: must be an integer from 0 to 65535, not {'nu"),
        ("models = 7", "a.toml:1: must be [[models]] tables, or a list of names"),
        ("models = [7]", "a.toml:1: models[0] needs a name"),
        ("[models]\nname = 'a'", "a.toml:1: must be [[models]] tables, or a list of names"),
        ("[[models]]\nalias = 'a'", "a.toml:1: models[0] needs a name"),
        (
            "[[models]]\nname = 'a'\n[[models]]\nname = 'b'\npined = true",
            "a.toml:5: models[1].pined: unknown key; did you mean pinned?",
        ),
        (
            "[[models]]\nname = 'a'\nport = 9",
            "a.toml:3: models[0].port: unknown key; it is a server setting: "
            "move it above the first [[models]]",
        ),
        ("[[models]]\nname = 7", "a.toml:2: models[0].name: must be the name of a model, not 7"),
        (
            "[[models]]\nname = 'a'\nparallel = 0",
            "a.toml:3: models[0].parallel: must be an integer",
        ),
        (
            "models = [{name = 'a', parallel = 0}]",
            "a.toml:1: models[0].parallel: must be an integer",
        ),
        ("port = ", "a.toml: is not valid TOML: Invalid value (at "),
        ("port = 1\nport = 2", "a.toml: is not valid TOML: Cannot overwrite a value"),
        (b"host = '\xff'", "a.toml: is not valid TOML: "),
    ],
)
def test_a_mistake_is_reported_with_its_line(content: str | bytes, message: str, working_dir: Path):
    assert refusal(content).startswith(message)


def test_a_line_of_a_multiline_string_is_not_taken_for_a_key(working_dir: Path):
    """Two lines match the key, so the message has no line number."""
    assert refusal('api_keys = """\nport = 1\n"""\nport = "x"').startswith("a.toml: port: must be")


def test_an_unreadable_file_is_reported(working_dir: Path):
    for path, reason in (("b.toml", "No such file"), (".", "Is a directory")):
        with pytest.raises(AppError, match=reason) as caught:
            read_toml_file(path)
        assert caught.value.message.startswith(f"{path}: ")


def test_a_line_break_in_a_path_is_replaced(working_dir: Path):
    name = "a\nport = 1 #.toml"
    Path(name).write_text("port = 9")
    assert read_toml_file(name)["port"].source == "a?port = 1 #.toml:1"
