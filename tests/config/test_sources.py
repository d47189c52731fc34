"""The environment: variables that are read, refused, and never shown."""

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


def test_what_is_not_ours_is_left_alone():
    assert (
        read_environment({"PATH": "/bin", "PORT": "x", "MLX_RANK": "1", "mlxrunner_port": "x"})
        == {}
    )


def test_a_variable_is_found_with_its_name():
    found = read_environment({"MLXRUNNER_MAX_QUEUE": "3"})
    assert found == {"max_queue": SourcedValue(value=3, source="MLXRUNNER_MAX_QUEUE")}


def test_an_empty_variable_is_as_good_as_none():
    assert read_environment({"MLXRUNNER_PORT": "", "MLXRUNNER_NONSENSE": ""}) == {}


def test_models_are_parted_by_commas():
    found = read_environment({"MLXRUNNER_MODELS": "org/a, b:4b,"})["models"].value
    assert found == (ModelSettings(name="org/a"), ModelSettings(name="b:4b"))


def test_variables_of_what_computes_are_known_and_set_nothing():
    """They are read before there are settings, also by processes that have none."""
    assert read_environment(dict.fromkeys(BACKEND_VARIABLES, "2")) == {}
    assert refusal(MLXRUNNER_THREAD="2").endswith("did you mean MLXRUNNER_THREADS?")


def test_the_variable_of_the_install_is_known_and_sets_nothing():
    """`MLXRUNNER_BUILD_KERNELS=0 make serve` built, and then refused to start."""
    assert read_environment({BUILD_VARIABLE: "0"}) == {}


def test_an_unknown_variable_is_refused_with_the_one_that_was_meant():
    assert refusal(MLXRUNNER_MAX_QUEU="3") == (
        "MLXRUNNER_MAX_QUEU: unknown variable; did you mean MLXRUNNER_MAX_QUEUE?"
    )
    assert refusal(MLXRUNNER_MODEL="a").endswith("did you mean MLXRUNNER_MODELS?")


def test_what_an_unknown_variable_holds_may_be_a_key_and_is_not_told():
    assert "mr-hunter2" not in refusal(MLXRUNNER_APIKEY="mr-hunter2")


def test_a_value_that_cannot_be_read_is_told_with_the_variable():
    assert refusal(MLXRUNNER_PORT="x") == (
        "MLXRUNNER_PORT: must be a whole number from 0 to 65535, not 'x'"
    )


@pytest.mark.parametrize(
    "environment",
    [
        {"MLXRUNNER_PORT": "tcp://10.0.0.7:8080"},
        {"MLXRUNNER_SERVICE_HOST": "10.0.0.7", "MLXRUNNER_PORT_8080_TCP": "tcp://10.0.0.7:8080"},
    ],
)
def test_the_variables_of_a_kubernetes_service_are_told_for_what_they_are(environment):
    """A service called mlxrunner puts them into every container beside it."""
    assert "enableServiceLinks: false" in refusal(**environment)


def test_variables_with_keys_are_known_by_name_only():
    environment: dict[str, str] = dict.fromkeys(SECRET_VARIABLES, "mr-hunter2")
    assert read_environment(environment) == {}
    assert find_secret_variables(environment) == SECRET_VARIABLES
    assert find_secret_variables({SECRET_VARIABLES[0]: ""}) == ()
