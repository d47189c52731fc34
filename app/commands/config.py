"""`mlxrunner config`: shows the effective settings and the source of each value.

Knows: the layout of the table. Must not know: the parsers of the sources, the values of API keys.
Of the variables that hold keys, this module sees only the names.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from app.config.options import OPTIONS, Option, list_default_values
from app.config.precedence import ResolvedConfig
from app.config.toml_file import iter_model_overrides, render_toml
from app.http.bind_policy import check_security_settings
from app.observability.tracing import check_tracing

SettingRow = tuple[str, str, str]


def show_config(
    configuration: ResolvedConfig, output_format: Literal["json", "toml"] | None
) -> int:
    """Prints the settings and returns the exit status.

    output_format: the output format; None prints a table. Raises AppError(INVALID) for settings
    that `serve` would reject at startup.
    """
    # use a copy, because check_security_settings removes the keys from it
    check_security_settings(configuration.settings, dict(os.environ))
    check_tracing(configuration.settings)
    match output_format:
        case "json":
            print(json.dumps(build_report(configuration), indent=2))
        case "toml":
            print(render_toml(configuration.settings, configuration.sources), end="")
        case None:
            for line in render_table(configuration):
                print(line)
    return 0


def build_report(configuration: ResolvedConfig) -> Mapping[str, Any]:
    """Returns the JSON report. settings: for each setting, its value as written in a file (null if
    unset), its unit and its source. secrets: the names of the set variables that hold keys."""
    settings, places = configuration.settings, configuration.sources
    return {
        "models": {
            "value": [_to_json_object(iter_model_overrides(model)) for model in settings.models],
            "from": places["models"],
        },
        "defaults": {
            "value": [_to_json_object(list_default_values(one)) for one in settings.defaults],
            "from": places["defaults"],
        },
        "settings": {
            option.field: {
                "value": _to_json(option, getattr(settings, option.field)),
                "unit": option.value_type.unit or None,
                "from": places[option.field],
            }
            for option in OPTIONS
        },
        "secrets": list(configuration.secret_variables),
    }


def render_table(configuration: ResolvedConfig) -> Iterator[str]:
    rows = [("SETTING", "VALUE", "FROM"), *_build_rows(configuration)]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, value, place in rows:
        yield f"{name:<{widths[0]}}  {value:<{widths[1]}}  {place}"


def _build_rows(configuration: ResolvedConfig) -> Iterator[SettingRow]:
    settings, places = configuration.settings, configuration.sources
    if not settings.models:
        yield "models", "the built-in model", places["models"]
    for index, model in enumerate(settings.models):
        for option, value in iter_model_overrides(model):
            yield f"models[{index}].{option.field}", option.format_value(value), places["models"]
    for index, defaults in enumerate(settings.defaults):
        for option, value in list_default_values(defaults):
            # a system prompt may have several lines
            text = " ".join(option.format_value(value).split())
            yield f"defaults[{index}].{option.field}", text, places["defaults"]
    for option in OPTIONS:
        yield (
            option.field,
            option.format_value(getattr(settings, option.field)),
            places[option.field],
        )
    for name in configuration.secret_variables:
        yield "keys", "set (hidden)", name


def _to_json_object(values: Iterable[tuple[Option, Any]]) -> Mapping[str, Any]:
    return {option.field: _to_json(option, value) for option, value in values}


def _to_json(option: Option, value: Any) -> Any:
    return None if value is None else option.value_type.to_toml(value)
