"""The environment: known variables, unknown ones, and secrets that are never shown."""

import pytest

from app.config.options import BACKEND_VARIABLES, BUILD_VARIABLE, SECRET_VARIABLES
from app.config.sources import SourcedValue, find_secret_variables, read_environment
from app.core.errors import AppError, ErrorKind
from app.core.settings import ModelSettings


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
