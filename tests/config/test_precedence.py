"""Flags before the environment, that before the file, that before the defaults."""

import dataclasses
import string
from collections.abc import Mapping

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.config.options import MODELS_VARIABLE, OPTIONS, Option
from app.config.precedence import ResolvedConfig
from app.config.toml_file import render_toml
from app.core.errors import AppError
from app.core.settings import ModelSettings, Settings
from tests.config.conftest import Decide
from tests.config.samples import COMPANIONS, SAMPLES, Sample

BY_FIELD = {option.field: option for option in OPTIONS}

# what excludes nothing: any values of these go together
FREE = sorted(
    SAMPLES.keys() - COMPANIONS.keys() - {"runner", "cache", "parallel", "exact", "max_loaded"}
)

SOURCES = ("flags", "environment", "file")
Asked = Mapping[str, Mapping[str, Sample]]


def words(fields: Mapping[str, Sample]) -> list[str]:
    return [word for field, one in fields.items() for word in flag(BY_FIELD[field], one)]


def flag(option: Option, one: Sample) -> list[str]:
    if option.is_boolean:
        return [option.flag if one.value else option.flag.replace("--", "--no-", 1)]
    return [option.flag, one.word]


def variables(fields: Mapping[str, Sample]) -> dict[str, str]:
    return {BY_FIELD[field].env_var: one.word for field, one in fields.items()}


def lines(fields: Mapping[str, Sample]) -> str:
    return "".join(f"{field} = {one.toml}\n" for field, one in fields.items())


def beside(field: str) -> dict[str, Sample]:
    return {
        name: next(one for one in SAMPLES[name] if one.word == word)
        for name, word in COMPANIONS.get(field, {}).items()
    }


def value(configuration: ResolvedConfig, field: str) -> object:
    return getattr(configuration.settings, field)


def test_without_sources_the_settings_are_the_defaults(decided: Decide):
    configuration = decided()
    assert configuration.settings == Settings()
    assert set(configuration.sources.values()) == {"default"}


@pytest.mark.parametrize(
    ("field", "one"),
    [(field, one) for field, all_of_it in SAMPLES.items() for one in all_of_it],
    ids=lambda value: value.word if isinstance(value, Sample) else value,
)
def test_every_setting_can_be_said_by_every_source(field: str, one: Sample, decided: Decide):
    rest, option = words(beside(field)), BY_FIELD[field]
    by_flag = decided(*rest, *flag(option, one))
    by_variable = decided(*rest, environment={option.env_var: one.word})
    by_file = decided(*rest, file=f"{field} = {one.toml}")
    for configuration, place in (
        (by_flag, option.flag),
        (by_variable, option.env_var),
        (by_file, "settings.toml:1"),
    ):
        assert value(configuration, field) == one.value
        assert type(value(configuration, field)) is type(one.value)
        assert configuration.sources[field].endswith(place)


@pytest.mark.parametrize("field", SAMPLES)
def test_the_word_default_undoes_what_counts_less(field: str, decided: Decide):
    option, file = BY_FIELD[field], lines({field: SAMPLES[field][0]})
    configuration = decided(environment={option.env_var: "default"}, file=file)
    assert value(configuration, field) == option.default
    assert configuration.sources[field] == option.env_var


ASKED = st.fixed_dictionaries(
    {
        source: st.fixed_dictionaries(
            {}, optional={field: st.sampled_from(SAMPLES[field]) for field in FREE}
        )
        for source in SOURCES
    }
)

one_folder_for_all = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def decide_all(asked: Asked, decided: Decide) -> ResolvedConfig:
    return decided(
        *words(asked["flags"]),
        environment=variables(asked["environment"]),
        file=lines(asked["file"]),
    )


@one_folder_for_all
@given(asked=ASKED)
def test_the_first_source_that_says_anything_counts(asked: Asked, decided: Decide):
    configuration = decide_all(asked, decided)
    for field in FREE:
        saying = [source for source in SOURCES if field in asked[source]]
        place = configuration.sources[field]
        if not saying:
            assert value(configuration, field) == BY_FIELD[field].default
            assert place == "default"
            continue
        assert value(configuration, field) == asked[saying[0]][field].value
        told = (place.startswith("--"), place.startswith("MLXRUNNER_"), "settings.toml:" in place)
        assert told == tuple(source == saying[0] for source in SOURCES)


NAMES = st.lists(
    st.text(string.ascii_letters + string.digits + "-/.:\"'é", min_size=1, max_size=8),
    unique=True,
    max_size=3,
)


@one_folder_for_all
@given(asked=ASKED, names=NAMES, pinned=st.booleans(), keep_alive=st.sampled_from([None, 0.0, 9.5]))
def test_what_is_in_force_is_written_as_a_file_that_says_the_same(
    asked: Asked, names: list[str], pinned: bool, keep_alive: float | None, decided: Decide
):
    configuration = decide_all(asked, decided)
    made = dataclasses.replace(
        configuration.settings,
        models=tuple(ModelSettings(name=n, pinned=pinned, keep_alive=keep_alive) for n in names),
    )
    again = decided(file=render_toml(made, configuration.sources))
    assert again.settings == made


def test_models_named_by_a_source_that_counts_more_replace_those_of_the_others(decided: Decide):
    file = '[[models]]\nname = "c"\npinned = true'
    environment = {MODELS_VARIABLE: "b"}
    for words_, variables_, name in (
        (("a",), environment, "a"),
        ((), environment, "b"),
        ((), {}, "c"),
    ):
        configuration = decided(*words_, environment=variables_, file=file)
        assert [model.name for model in configuration.settings.models] == [name]
        assert configuration.settings.models[0].pinned is (name == "c")


def test_the_environment_may_name_the_file_and_a_flag_another(decided: Decide, tmp_path):
    (tmp_path / "other.toml").write_text("port = 9")
    environment = {"MLXRUNNER_CONFIG": str(tmp_path / "other.toml")}
    assert decided(environment=environment).settings.port == 9
    assert decided(environment=environment, file="port = 10").settings.port == 10


def test_no_file_is_read_that_nobody_named(decided: Decide, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mlxrunner.toml", ".mlxrunner.toml", "pyproject.toml"):
        (tmp_path / name).write_text("port = 9")
    assert decided(environment={"HOME": str(tmp_path)}).settings == Settings()


@pytest.mark.parametrize(
    ("file", "why"),
    [
        ("multi_user = true", r"--multi-user needs --cache slots.* \(multi_user: .*toml:1\)$"),
        ("\ntls_cert = 'c'", r"must be given together.* \(tls_cert: .*toml:2\)$"),
        ("tls_key = 'k'", r"must be given together.* \(tls_key: .*toml:1\)$"),
        ("models = ['a', 'b']\nrunner = 'thread'", r"supports one model.* \(runner: .*toml:2\)$"),
        ("models = ['a', 'a']", r"two models are named 'a'.* \(models: .*toml:1\)$"),
        ("models = [{name = 'a', alias = 'b'}, 'b']", "two models are named 'b'"),
        ("memory = 1\nmodels = [{name = 'a', memory = 2}]", "a: its memory exceeds --memory"),
        (
            "multi_user = true\ncache = 'slots'\nmodels = [{name = 'a', cache = 'radix'}]",
            "a: --multi-user needs --cache slots",
        ),
        (
            "parallel = 4\nmodels = [{name = 'a', cache = 'single'}]",
            "a: --cache single supports one sequence",
        ),
        (
            "max_loaded = 1\nmodels = [{name = 'a', pinned = true}, {name = 'b', preload = true}]",
            "2 models are pinned or preloaded, but --max-loaded allows only 1",
        ),
    ],
)
def test_what_excludes_each_other_is_told_with_its_place(file: str, why: str, decided: Decide):
    with pytest.raises(AppError, match=why):
        decided(file=file)


def test_what_was_typed_just_now_needs_no_place(decided: Decide):
    with pytest.raises(AppError) as caught:
        decided("--multi-user")
    assert caught.value.message.endswith("--multi-user needs --cache slots")


def test_variables_with_keys_are_passed_on_by_name(decided: Decide):
    configuration = decided(environment={"MLXRUNNER_API_KEY": "mr-hunter2"})
    assert configuration.secret_variables == ("MLXRUNNER_API_KEY",)
    assert "hunter2" not in repr(configuration)
