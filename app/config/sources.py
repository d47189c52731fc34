"""Settings from environment variables, and the type of a value with its source.

Knows: the names of mlxrunner's variables, and the one for the folder of its data. Must not know:
the other sources, the use of the secrets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.config.options import (
    BACKEND_VARIABLES,
    BUILD_VARIABLE,
    CONFIG_VARIABLE,
    ENV_PREFIX,
    MODELS_VARIABLE,
    OPTIONS,
    SECRET_VARIABLES,
    find_option_by_other_name,
)
from app.config.value_types import InvalidOptionValue
from app.core.errors import AppError, ErrorKind, suggest
from app.core.settings import ModelSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcedValue:
    """A value with its source. value: the value of a field of Settings. source: describes where it
    was set."""

    value: Any
    source: str


SourcedValues = Mapping[str, SourcedValue]
"""Maps field names to values."""


def read_environment(environment: Mapping[str, str]) -> SourcedValues:
    """Reads the settings from the environment.

    An empty variable is treated as unset, because compose files and systemd units set variables
    without a value to "". Raises AppError(INVALID) for an invalid value and for an unknown
    MLXRUNNER_ variable. The message for an unknown variable omits its value, which may be a key.
    """
    ours = {
        name: word for name, word in environment.items() if name.startswith(ENV_PREFIX) and word
    }
    _reject_kubernetes_service_links(ours)
    options = {option.env_var: option for option in OPTIONS}
    unknown = (
        CONFIG_VARIABLE,
        MODELS_VARIABLE,
        BUILD_VARIABLE,
        *SECRET_VARIABLES,
        *BACKEND_VARIABLES,
    )
    for name in sorted(ours.keys() - options.keys() - set(unknown)):
        raise AppError(
            ErrorKind.INVALID,
            f"{name}: unknown variable{_suggest(name, [*options, *unknown])}",
            param=name,
        )
    given: dict[str, SourcedValue] = {}
    for name in ours.keys() & options.keys():
        option = options[name]
        try:
            given[option.field] = SourcedValue(value=option.parse_text(ours[name]), source=name)
        except InvalidOptionValue as problem:
            raise AppError(ErrorKind.INVALID, f"{name}: {problem}", param=option.field) from None
    if names := ours.get(MODELS_VARIABLE):
        models = tuple(
            ModelSettings(name=name) for part in names.split(",") if (name := part.strip())
        )
        given["models"] = SourcedValue(value=models, source=MODELS_VARIABLE)
    return given


def _suggest(name: str, known: Sequence[str]) -> str:
    """Suggests the variable of the setting that has this name in another server, or a similar
    one."""
    foreign = find_option_by_other_name(name.removeprefix(ENV_PREFIX))
    return (
        suggest(name, known, ENV_PREFIX)
        if foreign is None
        else f"; did you mean {foreign.env_var}?"
    )


def find_secret_variables(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the names of the secret variables that are set, but never their values."""
    return tuple(name for name in SECRET_VARIABLES if environment.get(name))


def _reject_kubernetes_service_links(ours: Mapping[str, str]) -> None:
    """Raises AppError(INVALID) for variables that Kubernetes has set.

    Kubernetes passes the address of each service to every container, in variables named after the
    service (see "Service environment variables" in its documentation). The variables for a service
    named mlxrunner collide with mlxrunner's own variables.
    """
    for name in (f"{ENV_PREFIX}SERVICE_HOST", f"{ENV_PREFIX}PORT"):
        if name in ours and (name != f"{ENV_PREFIX}PORT" or "://" in ours[name]):
            raise AppError(
                ErrorKind.INVALID,
                f"{name} was set by Kubernetes for a service called mlxrunner: set "
                "enableServiceLinks: false in the pod, or rename the service",
                param=name,
            )


def find_state_folder(environment: Mapping[str, str]) -> Path | None:
    """Returns the folder for data that is kept between runs (XDG Base Directory), which may not
    exist; None without a home folder."""
    if given := environment.get("XDG_STATE_HOME"):
        return Path(given) / "mlxrunner"
    try:
        return Path.home() / ".local" / "state" / "mlxrunner"
    except RuntimeError:
        return None
