"""The table of `docs/migrating.md` with the names that other servers give our options.

Knows: the settings. Must not know: the other pages.
"""

from app.config.options import OPTIONS
from tests.manual.tables import format_table


def render() -> str:
    rows = [
        (
            ", ".join(f"`{_format_flag(name)}`" for name in option.other_names),
            f"`{option.flag}`",
            f"`{option.env_var}`",
            f"`{option.field}`",
        )
        for option in OPTIONS
        if option.other_names
    ]
    return format_table(("elsewhere", "option", "variable", "TOML key"), rows)


def _format_flag(name: str) -> str:
    return f"-{name}" if len(name) <= 2 else f"--{name}"
