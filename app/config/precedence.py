"""Which source counts: flags before the environment, that before a file, that before the defaults.

Knows: the order, and where each setting came from. Must not know: how any source is written.

No file is looked for that nobody named: what a server does, and whom it lets in, must not depend
on the folder in which it was started or on what somebody left in a home.
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
    """sources: where the value of each field was said, in words. secret_variables: variables that
    hold keys; their names."""

    settings: Settings
    sources: Mapping[str, str]
    secret_variables: tuple[str, ...]


def resolve_config(
    flags: SourcedValues, config_path: str | None, environment: Mapping[str, str]
) -> ResolvedConfig:
    """config_path: the one that the command line names; else the environment may name one. Raises
    AppError(INVALID)."""
    of_environment = read_environment(environment)
    config_path = config_path or environment.get(CONFIG_VARIABLE)
    of_file: SourcedValues = read_toml_file(config_path) if config_path else {}
    found = {**of_file, **of_environment, **flags}
    fields = (*(option.field for option in OPTIONS), "models")
    places = {name: found[name].source if name in found else DEFAULT_SOURCE for name in fields}
    try:
        settings = Settings(**{name: one.value for name, one in found.items()})
    except AppError as error:
        raise _add_source(error, places) from None
    return ResolvedConfig(
        settings=settings, sources=places, secret_variables=find_secret_variables(environment)
    )


def _add_source(error: AppError, sources: Mapping[str, str]) -> AppError:
    """What excludes something else, and was not typed just now, is told with its place."""
    place = sources.get(error.param or "", DEFAULT_SOURCE)
    if place == DEFAULT_SOURCE or place.startswith("-"):
        return error
    return AppError(error.kind, f"{error.message} ({error.param}: {place})", param=error.param)
