"""The sources of settings and their precedence: flags, environment variables, a file, and the
defaults.

Knows: the order of the sources, the source of each setting, the environment variables, including
the one for the program's data folder. Must not know: the syntax of the file and of the flags.

A configuration file is read only if its path is given explicitly. The behavior and access control
of a server must not depend on the working directory or on a forgotten file in a home directory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.config.options import (
    BACKEND_VARIABLES,
    BUILD_VARIABLE,
    CONFIG_VARIABLE,
    ENV_PREFIX,
    MODELS_VARIABLE,
    OPTIONS,
    SECRET_VARIABLES,
    SourcedValue,
    SourcedValues,
    find_option_by_other_name,
)
from app.config.toml_file import read_toml_file
from app.config.value_types import InvalidOptionValue
from app.core.errors import AppError, ErrorKind, suggest
from app.core.settings import ModelSettings, Settings

DEFAULT_SOURCE = "default"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """The settings and their sources. sources: maps each field to a description of its source.
    secret_variables: the names of the environment variables that contain keys. path: that of the
    configuration file, if any."""

    settings: Settings
    sources: Mapping[str, str]
    secret_variables: tuple[str, ...]
    path: str | None = None


def resolve_config(
    flags: SourcedValues, config_path: str | None, environment: Mapping[str, str]
) -> ResolvedConfig:
    """Merges the settings of all sources.

    config_path: the configuration file given on the command line; None uses the file specified in
    the environment, if any. Raises AppError(INVALID) for invalid or conflicting settings.
    """
    of_environment = read_environment(environment)
    config_path = config_path or environment.get(CONFIG_VARIABLE)
    of_file: SourcedValues = read_toml_file(config_path) if config_path else {}
    values = {**of_file, **of_environment, **flags}
    fields = (*(option.field for option in OPTIONS), "models", "defaults")
    sources = {name: values[name].source if name in values else DEFAULT_SOURCE for name in fields}
    try:
        settings = Settings(**{name: sourced.value for name, sourced in values.items()})
    except AppError as error:
        raise _add_source(error, sources) from None
    return ResolvedConfig(
        settings=settings,
        sources=sources,
        secret_variables=find_secret_variables(environment),
        path=config_path or None,
    )


def _add_source(error: AppError, sources: Mapping[str, str]) -> AppError:
    """Adds the source of the conflicting setting to the message, unless it is a flag or the
    default."""
    source = sources.get(error.param or "", DEFAULT_SOURCE)
    if source == DEFAULT_SOURCE or source.startswith("-"):
        return error
    return AppError(error.kind, f"{error.message} ({error.param}: {source})", param=error.param)
