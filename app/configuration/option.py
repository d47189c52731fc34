"""What is known of one setting, whatever source it is read from.

Knows: the fields' defaults, the names that are made of a field's. Must not know: which settings
there are, argparse, TOML.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from app.configuration.forms import Form
from app.core.settings import ModelSettings, Settings

PREFIX = "MLXRUNNER_"

# what undoes a setting of a source that counts less, in every form
DEFAULT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """field: of Settings, and the key in a file. default: its value there. help: what it does.
    unset: what holds where the default is None. variable: in the environment."""

    field: str
    form: Form
    default: Any
    help: str
    unset: str
    variable: str

    @property
    def is_switch(self) -> bool:
        return bool in self.form.types

    @property
    def flag(self) -> str:
        name = self.field.removesuffix("s") if self.form.many else self.field
        return "--" + name.replace("_", "-")

    def read(self, word: str) -> Any:
        """Raises Misread."""
        return self.default if word == DEFAULT else self.form.read(word)

    def take(self, value: object) -> Any:
        """From a file. Raises Misread."""
        return self.default if value == DEFAULT else self.form.take(value)

    def give(self, value: Any) -> Any:
        """For a file, where nothing stands for None."""
        return DEFAULT if value is None else self.form.give(value)

    def shown(self, value: Any) -> str:
        """For people."""
        if value is None:
            return self.unset
        given = self.form.give(value)
        if isinstance(given, bool):
            return "on" if given else "off"
        if self.form.many:
            return ", ".join(map(str, given)) or self.unset
        unit = self.form.unit if isinstance(given, (int, float)) else ""
        return f"{given} {unit}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    title: str
    options: tuple[Option, ...]


def option(
    field: str,
    form: Form,
    help: str,
    *,
    unset: str = "none",
    variable: str | None = None,
    of: type[Settings] | type[ModelSettings] = Settings,
) -> Option:
    [default] = [known.default for known in dataclasses.fields(of) if known.name == field]
    return Option(
        field=field,
        form=form,
        default=None if default is dataclasses.MISSING else default,
        help=help,
        unset=unset,
        variable=variable or PREFIX + field.upper(),
    )
