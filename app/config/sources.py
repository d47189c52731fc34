"""What the environment says, and what a value found somewhere looks like.

Knows: how our variables are spelled. Must not know: the other sources, who reads the secrets.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.config.options import (
    BACKEND_VARIABLES,
    BUILD_VARIABLE,
    CONFIG_VARIABLE,
    ENV_PREFIX,
    MODELS_VARIABLE,
    OPTIONS,
    SECRET_VARIABLES,
)
from app.config.value_types import InvalidOptionValue, suggest
from app.core.errors import AppError, ErrorKind
from app.core.settings import ModelSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcedValue:
    """value: of a field of Settings. source: where it was said, in words."""

    value: Any
    source: str


SourcedValues = Mapping[str, SourcedValue]
"""By the name of the field."""


def read_environment(environment: Mapping[str, str]) -> SourcedValues:
    """An empty variable is none: that is how compose files and units write one that is not set.
    Raises AppError(INVALID) for a variable of ours that there is not, without its value, which may
    be a key; and for a value that cannot be read."""
    ours = {
        name: word for name, word in environment.items() if name.startswith(ENV_PREFIX) and word
    }
    _reject_kubernetes_service_links(ours)
    known = {option.env_var: option for option in OPTIONS}
    others = (
        CONFIG_VARIABLE,
        MODELS_VARIABLE,
        BUILD_VARIABLE,
        *SECRET_VARIABLES,
        *BACKEND_VARIABLES,
    )
    for name in sorted(ours.keys() - known.keys() - set(others)):
        raise AppError(
            ErrorKind.INVALID,
            f"{name}: unknown variable{suggest(name, [*known, *others])}",
            param=name,
        )
    given: dict[str, SourcedValue] = {}
    for name in ours.keys() & known.keys():
        option = known[name]
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


def find_secret_variables(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The names of those that are there; never what they hold."""
    return tuple(name for name in SECRET_VARIABLES if environment.get(name))


def _reject_kubernetes_service_links(ours: Mapping[str, str]) -> None:
    """Kubernetes tells every container the address of each service, in variables called after the
    service ("Service environment variables" in its documentation): of one called mlxrunner, in
    ours."""
    for name in (f"{ENV_PREFIX}SERVICE_HOST", f"{ENV_PREFIX}PORT"):
        if name in ours and (name != f"{ENV_PREFIX}PORT" or "://" in ours[name]):
            raise AppError(
                ErrorKind.INVALID,
                f"{name} was set by Kubernetes for a service called mlxrunner: set "
                "enableServiceLinks: false in the pod, or rename the service",
                param=name,
            )
