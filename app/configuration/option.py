"""What is known of one setting, whatever source it is read from.

Knows: the fields' defaults, the names that are made of a field's. Must not know: which settings
there are, argparse, TOML.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from app.configuration.forms import ValueType
from app.core.settings import ModelSettings, Settings

ENV_PREFIX = "MLXRUNNER_"

# what undoes a setting of a source that counts less, in every form
DEFAULT_WORD = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """field: of Settings, and the key in a file. default: its value there. help: what it does.
    unset_label: what holds where the default is None. env_var: in the environment."""

    field: str
    value_type: ValueType
    default: Any
    help: str
    unset_label: str
    env_var: str

    @property
    def is_boolean(self) -> bool:
        return bool in self.value_type.types

    @property
    def flag(self) -> str:
        name = self.field.removesuffix("s") if self.value_type.is_list else self.field
        return "--" + name.replace("_", "-")

    def parse_text(self, word: str) -> Any:
        """Raises Misread."""
        return self.default if word == DEFAULT_WORD else self.value_type.parse_text(word)

    def from_toml(self, value: object) -> Any:
        """From a file. Raises Misread."""
        return self.default if value == DEFAULT_WORD else self.value_type.from_toml(value)

    def to_toml(self, value: Any) -> Any:
        """For a file, where nothing stands for None."""
        return DEFAULT_WORD if value is None else self.value_type.to_toml(value)

    def format_value(self, value: Any) -> str:
        """For people."""
        if value is None:
            return self.unset_label
        given = self.value_type.to_toml(value)
        if isinstance(given, bool):
            return "on" if given else "off"
        if self.value_type.is_list:
            return ", ".join(map(str, given)) or self.unset_label
        unit = self.value_type.unit if isinstance(given, (int, float)) else ""
        return f"{given} {unit}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionGroup:
    title: str
    options: tuple[Option, ...]


def make_option(
    field: str,
    form: ValueType,
    help: str,
    *,
    unset: str = "none",
    variable: str | None = None,
    settings_class: type[Settings] | type[ModelSettings] = Settings,
) -> Option:
    [default] = [
        known.default for known in dataclasses.fields(settings_class) if known.name == field
    ]
    return Option(
        field=field,
        value_type=form,
        default=None if default is dataclasses.MISSING else default,
        help=help,
        unset_label=unset,
        env_var=variable or ENV_PREFIX + field.upper(),
    )
