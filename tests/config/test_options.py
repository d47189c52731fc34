"""The table of options is complete and has no duplicates."""

import dataclasses
import re
from pathlib import Path

from app.config.options import (
    CONFIG_VARIABLE,
    DEFAULT_OPTIONS,
    DEFAULT_WORD,
    ENV_PREFIX,
    MODEL_OPTIONS,
    MODELS_VARIABLE,
    OPTIONS,
    SECRET_VARIABLES,
    find_option_by_other_name,
)
from app.core.errors import suggest
from app.core.model_files import ModelDefaults
from app.core.sampling_params import SAMPLING_KNOBS
from app.core.settings import ModelSettings, Settings
from tests.config.samples import SAMPLES
from tests.rows import rows

FIELDS = [field.name for field in dataclasses.fields(Settings)]


def test_each_settings_field_that_is_no_table_has_one_option():
    assert sorted([*(option.field for option in OPTIONS), "defaults", "models"]) == sorted(FIELDS)


def test_each_model_setting_has_a_key_in_the_file():
    model_fields = [field.name for field in dataclasses.fields(ModelSettings)]
    assert [option.field for option in MODEL_OPTIONS] == model_fields
    default_fields = [field.name for field in dataclasses.fields(ModelDefaults)]
    knobs = [knob.name for knob in SAMPLING_KNOBS]
    assert [option.field for option in DEFAULT_OPTIONS] == [*default_fields[:-1], *knobs]


def test_flag_and_variable_names_are_unique():
    flags = [option.flag for option in OPTIONS]
    variables = [
        *(option.env_var for option in OPTIONS),
        CONFIG_VARIABLE,
        MODELS_VARIABLE,
        *SECRET_VARIABLES,
    ]
    assert len(set(flags)) == len(flags)
    assert len(set(variables)) == len(variables)


@rows("option", OPTIONS, ids=lambda option: option.field)
def test_a_variable_is_named_after_its_setting(option):
    """Except the key file: the variable with the plain name contains the keys themselves."""
    default_name = ENV_PREFIX + option.field.upper()
    assert option.env_var == (
        f"{default_name}_FILE" if default_name in SECRET_VARIABLES else default_name
    )


@rows("option", OPTIONS, ids=lambda option: option.field)
def test_option_defaults_equal_the_settings_defaults_and_can_be_written(option):
    default = getattr(Settings(), option.field)
    assert option.default == default
    assert option.from_toml(option.to_toml(default)) == default
    assert option.format_value(default)
    assert option.help


@rows("option", OPTIONS, ids=lambda option: option.field)
def test_the_word_default_is_the_default_everywhere(option):
    assert option.parse_text(DEFAULT_WORD) == option.from_toml(DEFAULT_WORD) == option.default


def test_each_option_has_a_sample():
    assert list(SAMPLES) == [option.field for option in OPTIONS]


def test_only_a_similar_name_is_suggested():
    assert suggest("max_que", ["port", "max_queue"]) == "; did you mean max_queue?"
    assert suggest("zzz", ["port", "max_queue"]) == ""


def test_a_name_of_another_server_belongs_to_one_option_and_is_no_flag() -> None:
    names = [name for option in OPTIONS for name in option.other_names]
    assert len(set(names)) == len(names)
    assert not {f"--{name}" for name in names} & {option.flag for option in OPTIONS}
    for option in OPTIONS:
        for name in option.other_names:
            for spelling in (f"--{name}", name.replace("-", "_"), name.upper()):
                assert find_option_by_other_name(spelling) is option


def test_the_common_options_are_those_of_the_readme() -> None:
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text("utf-8")
    flags = set(re.findall(r"^\| `(--[a-z-]+)", readme, re.MULTILINE))
    assert {option.flag for option in OPTIONS if option.is_common} == flags
