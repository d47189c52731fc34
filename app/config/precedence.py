"""The precedence of setting sources: flags, environment variables, a file, and the defaults.

Knows: the order of the sources, the source of each setting. Must not know: the syntax of any
source.

A configuration file is read only if its path is given explicitly. The behavior and access control
of a server must not depend on the working directory or on a forgotten file in a home directory.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from app.config.options import CONFIG_VARIABLE, OPTIONS
from app.config.sources import SourcedValues, find_secret_variables, read_environment
from app.config.toml_file import read_toml_file
from app.core.errors import AppError
from app.core.settings import Settings

DEFAULT_SOURCE = "default"


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
