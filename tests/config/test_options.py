"""The table of options: nothing is left out, nothing stands there twice."""

import dataclasses

import pytest

from app.config.options import (
    CONFIG_VARIABLE,
    DEFAULT_WORD,
    ENV_PREFIX,
    MODEL_OPTIONS,
    MODELS_VARIABLE,
    OPTIONS,
    SECRET_VARIABLES,
)
from app.config.value_types import suggest
from app.core.settings import ModelSettings, Settings
from tests.config.samples import SAMPLES

FIELDS = [field.name for field in dataclasses.fields(Settings)]


def test_each_field_of_the_settings_has_one_option_but_for_the_models():
    assert sorted([*(option.field for option in OPTIONS), "models"]) == sorted(FIELDS)


def test_each_field_of_one_model_has_a_key_in_the_file():
    of_a_model = [field.name for field in dataclasses.fields(ModelSettings)]
    assert [option.field for option in MODEL_OPTIONS] == of_a_model


def test_no_name_means_two_things():
    flags = [option.flag for option in OPTIONS]
    variables = [
        *(option.env_var for option in OPTIONS),
        CONFIG_VARIABLE,
        MODELS_VARIABLE,
        *SECRET_VARIABLES,
    ]
    assert len(set(flags)) == len(flags)
    assert len(set(variables)) == len(variables)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.field)
def test_a_variable_is_called_as_its_setting_is(option):
    """But for the file of keys: the name that would be its own holds the keys themselves."""
    rule = ENV_PREFIX + option.field.upper()
    assert option.env_var == (f"{rule}_FILE" if rule in SECRET_VARIABLES else rule)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.field)
def test_the_defaults_are_those_of_the_settings_and_can_be_written(option):
    default = getattr(Settings(), option.field)
    assert option.default == default
    assert option.from_toml(option.to_toml(default)) == default
    assert option.format_value(default)
    assert option.help


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.field)
def test_the_word_default_is_the_default_everywhere(option):
    assert option.parse_text(DEFAULT_WORD) == option.from_toml(DEFAULT_WORD) == option.default


def test_there_is_a_sample_for_each():
    assert list(SAMPLES) == [option.field for option in OPTIONS]


def test_what_is_nearly_right_is_told_and_nothing_else():
    assert suggest("max_que", ["port", "max_queue"]) == "; did you mean max_queue?"
    assert suggest("zzz", ["port", "max_queue"]) == ""
