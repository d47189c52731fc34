"""Precedence: flags, then the environment, then the file, then the defaults."""

import dataclasses
import string
from collections.abc import Mapping

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.config.options import (
    BACKEND_VARIABLES,
    BUILD_VARIABLE,
    MODELS_VARIABLE,
    OPTIONS,
    SECRET_VARIABLES,
    Option,
    SourcedValue,
)
from app.config.precedence import ResolvedConfig, find_secret_variables, read_environment
from app.config.toml_file import render_toml
from app.core.errors import AppError, ErrorKind
from app.core.settings import ModelSettings, Settings
from tests.config.conftest import Resolve
from tests.config.samples import COMPANIONS, SAMPLES, Sample
from tests.rows import rows

BY_FIELD = {option.field: option for option in OPTIONS}

# settings without conflicts: all combinations of their values are valid
FREE = sorted(
    SAMPLES.keys() - COMPANIONS.keys() - {"runner", "cache", "parallel", "exact", "max_loaded"}
)

SOURCES = ("flags", "environment", "file")
SampleSettings = Mapping[str, Mapping[str, Sample]]


def refusal(**environment: str) -> str:
    with pytest.raises(AppError) as caught:
        read_environment(environment)
    assert caught.value.kind is ErrorKind.INVALID
    assert "\n" not in caught.value.message
    return caught.value.message


def test_variables_of_other_programs_are_ignored():
    assert (
        read_environment({"PATH": "/bin", "PORT": "x", "MLX_RANK": "1", "mlxrunner_port": "x"})
        == {}
    )


def test_the_source_of_a_setting_is_its_variable():
    found = read_environment({"MLXRUNNER_MAX_QUEUE": "3"})
    assert found == {"max_queue": SourcedValue(value=3, source="MLXRUNNER_MAX_QUEUE")}


def test_an_empty_variable_is_ignored():
    assert read_environment({"MLXRUNNER_PORT": "", "MLXRUNNER_NONSENSE": ""}) == {}


def test_model_names_are_comma_separated():
    found = read_environment({"MLXRUNNER_MODELS": "org/a, b:4b,"})["models"].value
    assert found == (ModelSettings(name="org/a"), ModelSettings(name="b:4b"))


def test_backend_variables_are_accepted_and_set_nothing():
    """The backend reads them before the settings exist, also in processes without settings."""
    assert read_environment(dict.fromkeys(BACKEND_VARIABLES, "2")) == {}
    assert refusal(MLXRUNNER_THREAD="2").endswith("did you mean MLXRUNNER_THREADS?")


def test_the_build_variable_is_accepted_and_sets_nothing():
    """`MLXRUNNER_BUILD_KERNELS=0 make serve` built the package and then failed to start."""
    assert read_environment({BUILD_VARIABLE: "0"}) == {}


def test_an_unknown_variable_is_rejected_with_a_suggestion():
    assert refusal(MLXRUNNER_MAX_QUEU="3") == (
        "MLXRUNNER_MAX_QUEU: unknown variable; did you mean MLXRUNNER_MAX_QUEUE?"
    )
    assert refusal(MLXRUNNER_MODEL="a").endswith("did you mean MLXRUNNER_MODELS?")


def test_the_value_of_an_unknown_variable_is_not_shown():
    assert "mr-hunter2" not in refusal(MLXRUNNER_APIKEY="mr-hunter2")


def test_an_invalid_value_is_reported_with_its_variable():
    assert refusal(MLXRUNNER_PORT="x") == (
        "MLXRUNNER_PORT: must be an integer from 0 to 65535, not 'x'"
    )


@pytest.mark.parametrize(
    "environment",
    [
        {"MLXRUNNER_PORT": "tcp://10.0.0.7:8080"},
        {"MLXRUNNER_SERVICE_HOST": "10.0.0.7", "MLXRUNNER_PORT_8080_TCP": "tcp://10.0.0.7:8080"},
    ],
)
def test_the_variables_of_a_kubernetes_service_are_explained(environment):
    """A service named mlxrunner sets them in every container of its namespace."""
    assert "enableServiceLinks: false" in refusal(**environment)


def test_variables_with_keys_are_listed_by_name_only():
    environment: dict[str, str] = dict.fromkeys(SECRET_VARIABLES, "mr-hunter2")
    assert read_environment(environment) == {}
    assert find_secret_variables(environment) == SECRET_VARIABLES
    assert find_secret_variables({SECRET_VARIABLES[0]: ""}) == ()


def to_arguments(fields: Mapping[str, Sample]) -> list[str]:
    return [word for field, sample in fields.items() for word in to_flag(BY_FIELD[field], sample)]


def to_flag(option: Option, sample: Sample) -> list[str]:
    if option.is_boolean:
        return [option.flag if sample.value else option.flag.replace("--", "--no-", 1)]
    return [option.flag, sample.word]


def to_variables(fields: Mapping[str, Sample]) -> dict[str, str]:
    return {BY_FIELD[field].env_var: sample.word for field, sample in fields.items()}


def to_toml(fields: Mapping[str, Sample]) -> str:
    return "".join(f"{field} = {sample.toml}\n" for field, sample in fields.items())


def companions(field: str) -> dict[str, Sample]:
    return {
        name: next(sample for sample in SAMPLES[name] if sample.word == word)
        for name, word in COMPANIONS.get(field, {}).items()
    }


def get_value(configuration: ResolvedConfig, field: str) -> object:
    return getattr(configuration.settings, field)


def test_without_sources_the_settings_are_the_defaults(resolve: Resolve):
    configuration = resolve()
    assert configuration.settings == Settings()
    assert set(configuration.sources.values()) == {"default"}


@rows(
    ("field", "sample"),
    [(field, sample) for field, samples in SAMPLES.items() for sample in samples],
    ids=lambda value: value.word if isinstance(value, Sample) else value,
)
def test_every_source_can_set_every_setting(field: str, sample: Sample, resolve: Resolve):
    rest, option = to_arguments(companions(field)), BY_FIELD[field]
    by_flag = resolve(*rest, *to_flag(option, sample))
    by_variable = resolve(*rest, environment={option.env_var: sample.word})
    by_file = resolve(*rest, file=f"{field} = {sample.toml}")
    for configuration, source in (
        (by_flag, option.flag),
        (by_variable, option.env_var),
        (by_file, "settings.toml:1"),
    ):
        assert get_value(configuration, field) == sample.value
        assert type(get_value(configuration, field)) is type(sample.value)
        assert configuration.sources[field].endswith(source)


@rows("field", SAMPLES)
def test_the_word_default_overrides_sources_of_lower_precedence(field: str, resolve: Resolve):
    option, file = BY_FIELD[field], to_toml({field: SAMPLES[field][0]})
    configuration = resolve(environment={option.env_var: "default"}, file=file)
    assert get_value(configuration, field) == option.default
    assert configuration.sources[field] == option.env_var


SAMPLE_SETTINGS = st.fixed_dictionaries(
    {
        source: st.fixed_dictionaries(
            {}, optional={field: st.sampled_from(SAMPLES[field]) for field in FREE}
        )
        for source in SOURCES
    }
)

allow_shared_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def resolve_all(samples: SampleSettings, resolve: Resolve) -> ResolvedConfig:
    return resolve(
        *to_arguments(samples["flags"]),
        environment=to_variables(samples["environment"]),
        file=to_toml(samples["file"]),
    )


@allow_shared_folder
@given(samples=SAMPLE_SETTINGS)
def test_the_first_source_that_sets_a_field_wins(samples: SampleSettings, resolve: Resolve):
    configuration = resolve_all(samples, resolve)
    for field in FREE:
        setting_sources = [source for source in SOURCES if field in samples[source]]
        source = configuration.sources[field]
        if not setting_sources:
            assert get_value(configuration, field) == BY_FIELD[field].default
            assert source == "default"
            continue
        assert get_value(configuration, field) == samples[setting_sources[0]][field].value
        kinds = (
            source.startswith("--"),
            source.startswith("MLXRUNNER_"),
            "settings.toml:" in source,
        )
        assert kinds == tuple(source == setting_sources[0] for source in SOURCES)


NAMES = st.lists(
    st.text(string.ascii_letters + string.digits + "-/.:\"'é", min_size=1, max_size=8),
    unique=True,
    max_size=3,
)


@allow_shared_folder
@given(
    samples=SAMPLE_SETTINGS,
    names=NAMES,
    pinned=st.booleans(),
    keep_alive=st.sampled_from([None, 0.0, 9.5]),
)
def test_the_rendered_toml_restores_the_resolved_settings(
    samples: SampleSettings,
    names: list[str],
    pinned: bool,
    keep_alive: float | None,
    resolve: Resolve,
):
    configuration = resolve_all(samples, resolve)
    expected = dataclasses.replace(
        configuration.settings,
        models=tuple(ModelSettings(name=n, pinned=pinned, keep_alive=keep_alive) for n in names),
    )
    restored = resolve(file=render_toml(expected, configuration.sources))
    assert restored.settings == expected


def test_models_of_a_source_of_higher_precedence_replace_the_others(resolve: Resolve):
    file = '[[models]]\nname = "c"\npinned = true'
    environment = {MODELS_VARIABLE: "b"}
    for arguments, variables, name in (
        (("a",), environment, "a"),
        ((), environment, "b"),
        ((), {}, "c"),
    ):
        configuration = resolve(*arguments, environment=variables, file=file)
        assert [model.name for model in configuration.settings.models] == [name]
        assert configuration.settings.models[0].pinned is (name == "c")


def test_a_flag_overrides_the_config_file_of_the_environment(resolve: Resolve, tmp_path):
    (tmp_path / "other.toml").write_text("port = 9")
    environment = {"MLXRUNNER_CONFIG": str(tmp_path / "other.toml")}
    assert resolve(environment=environment).settings.port == 9
    assert resolve(environment=environment, file="port = 10").settings.port == 10


def test_only_a_named_config_file_is_read(resolve: Resolve, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mlxrunner.toml", ".mlxrunner.toml", "pyproject.toml"):
        (tmp_path / name).write_text("port = 9")
    assert resolve(environment={"HOME": str(tmp_path)}).settings == Settings()


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("multi_user = true", r"--multi-user needs --cache slots.* \(multi_user: .*toml:1\)$"),
        ("\ntls_cert = 'c'", r"must be given together.* \(tls_cert: .*toml:2\)$"),
        ("tls_key = 'k'", r"must be given together.* \(tls_key: .*toml:1\)$"),
        ("models = ['a', 'b']\nrunner = 'thread'", r"supports one model.* \(runner: .*toml:2\)$"),
        ("models = ['a', 'a']", r"two models are named 'a'.* \(models: .*toml:1\)$"),
        ("models = [{name = 'a', alias = 'b'}, 'b']", "two models are named 'b'"),
        ("models = [{name = 'a', aliases = ['b']}, 'b']", "two models are named 'b'"),
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
def test_conflicting_settings_are_reported_with_their_source(
    file: str, message: str, resolve: Resolve
):
    with pytest.raises(AppError, match=message):
        resolve(file=file)


def test_a_conflict_of_flags_is_reported_without_a_source(resolve: Resolve):
    with pytest.raises(AppError) as caught:
        resolve("--multi-user")
    assert caught.value.message.endswith("--multi-user needs --cache slots")


def test_variables_with_keys_are_passed_on_by_name(resolve: Resolve):
    configuration = resolve(environment={"MLXRUNNER_API_KEY": "mr-hunter2"})
    assert configuration.secret_variables == ("MLXRUNNER_API_KEY",)
    assert "hunter2" not in repr(configuration)
