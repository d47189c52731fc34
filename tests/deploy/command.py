"""What a command line in one of our files comes to, as the command itself would read it."""

from collections.abc import Mapping, Sequence

from app.cli import _build_parser
from app.config import flags
from app.config.precedence import resolve_config
from app.core.settings import Settings
from app.http.api_keys import Keyring
from app.http.bind_policy import check_bind_policy


def settings_of(words: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """words: `mlxrunner serve …`. Raises AppError, or SystemExit, for what would not start."""
    program, *rest = words
    assert program.rpartition("/")[2] == "mlxrunner"
    assert rest[0] == "serve"
    arguments = flags.parse_arguments(_build_parser(), rest)
    return resolve_config(flags.collect_flags(arguments), arguments.config, environment).settings


def would_start(settings: Settings, environment: Mapping[str, str]) -> Settings:
    """The same settings. Raises AppError where strangers would be served."""
    has_keys = (
        settings.api_keys is not None or Keyring.from_settings(settings, {**environment}).enabled
    )
    check_bind_policy(settings, has_keys=has_keys)
    return settings
