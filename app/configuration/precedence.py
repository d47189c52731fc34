"""Which source counts: flags before the environment, that before a file, that before the defaults.

Knows: the order, and where each setting came from. Must not know: how any source is written.

No file is looked for that nobody named: what a server does, and whom it lets in, must not depend
on the folder in which it was started or on what somebody left in a home.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from app.configuration.file import from_file
from app.configuration.options import CONFIG_VARIABLE, OPTIONS
from app.configuration.sources import Given, from_environment, secrets_in
from app.core.errors import AppError
from app.core.settings import Settings

DEFAULT_PLACE = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """places: where the value of each field was said, in words. secrets: variables that hold keys;
    their names."""

    settings: Settings
    places: Mapping[str, str]
    secrets: tuple[str, ...]


def decide(flags: Given, file: str | None, environment: Mapping[str, str]) -> Configuration:
    """file: the one that the command line names; else the environment may name one. Raises
    AppError(INVALID)."""
    of_environment = from_environment(environment)
    file = file or environment.get(CONFIG_VARIABLE)
    of_file: Given = from_file(file) if file else {}
    found = {**of_file, **of_environment, **flags}
    fields = (*(option.field for option in OPTIONS), "models")
    places = {name: found[name].place if name in found else DEFAULT_PLACE for name in fields}
    try:
        settings = Settings(**{name: one.value for name, one in found.items()})
    except AppError as error:
        raise _placed(error, places) from None
    return Configuration(settings=settings, places=places, secrets=secrets_in(environment))


def _placed(error: AppError, places: Mapping[str, str]) -> AppError:
    """What excludes something else, and was not typed just now, is told with its place."""
    place = places.get(error.param or "", DEFAULT_PLACE)
    if place == DEFAULT_PLACE or place.startswith("-"):
        return error
    return AppError(error.kind, f"{error.message} ({error.param}: {place})", param=error.param)
