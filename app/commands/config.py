"""`mlxrunner config`: what is in force, and where each value was said.

Knows: how a table looks. Must not know: sources, and any key: of variables that hold some, only
the names are known here.
"""

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from app.configuration.file import said, written
from app.configuration.option import Option
from app.configuration.options import OPTIONS
from app.configuration.precedence import Configuration
from app.core.settings import ModelSettings
from app.door.exposure import check_door
from app.tracing import check_tracing

Row = tuple[str, str, str]


def tell(configuration: Configuration, form: Literal["json", "toml"] | None) -> int:
    """The exit status. Raises AppError(INVALID) for settings that `serve` would not start with."""
    # a copy: check_door removes the keys from it
    check_door(configuration.settings, dict(os.environ))
    check_tracing(configuration.settings)
    match form:
        case "json":
            print(json.dumps(facts(configuration), indent=2))
        case "toml":
            print(written(configuration.settings, configuration.places), end="")
        case None:
            for line in table(configuration):
                print(line)
    return 0


def facts(configuration: Configuration) -> Mapping[str, Any]:
    """settings: value as it would stand in a file, null where nothing was said and nothing can be;
    unit; and where it was said. secrets: variables with keys that are set."""
    settings, places = configuration.settings, configuration.places
    return {
        "models": {
            "value": [_own(model) for model in settings.models],
            "from": places["models"],
        },
        "settings": {
            option.field: {
                "value": _plain(option, getattr(settings, option.field)),
                "unit": option.form.unit or None,
                "from": places[option.field],
            }
            for option in OPTIONS
        },
        "secrets": list(configuration.secrets),
    }


def table(configuration: Configuration) -> Iterator[str]:
    rows = [("SETTING", "VALUE", "FROM"), *_rows(configuration)]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, value, place in rows:
        yield f"{name:<{widths[0]}}  {value:<{widths[1]}}  {place}"


def _rows(configuration: Configuration) -> Iterator[Row]:
    settings, places = configuration.settings, configuration.places
    if not settings.models:
        yield "models", "the built-in model", places["models"]
    for index, model in enumerate(settings.models):
        for option, value in said(model):
            yield f"models[{index}].{option.field}", option.shown(value), places["models"]
    for option in OPTIONS:
        yield option.field, option.shown(getattr(settings, option.field)), places[option.field]
    for name in configuration.secrets:
        yield "keys", "set (hidden)", name


def _own(model: ModelSettings) -> Mapping[str, Any]:
    return {option.field: _plain(option, value) for option, value in said(model)}


def _plain(option: Option, value: Any) -> Any:
    return None if value is None else option.form.give(value)
