"""The settings of a command line in one of our files, read as the command itself reads it."""

from collections.abc import Mapping, Sequence

from app.cli import _build_parser
from app.config import command_line
from app.config.command_line import parse_arguments
from app.config.precedence import resolve_config
from app.core.settings import Settings
from app.http.api_keys import Keyring
from app.http.bind_policy import check_bind_policy


def parse_serve_command(words: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """words: `mlxrunner serve …`. Raises AppError or SystemExit if the server would not start."""
    program, *rest = words
    assert program.rpartition("/")[2] == "mlxrunner"
    assert rest[0] == "serve"
    arguments = parse_arguments(_build_parser(), rest)
    return resolve_config(
        command_line.collect_flags(arguments), arguments.config, environment
    ).settings


def check_start(settings: Settings, environment: Mapping[str, str]) -> Settings:
    """Returns the settings. Raises AppError if the bind policy rejects them."""
    has_keys = (
        settings.api_keys is not None or Keyring.from_settings(settings, {**environment}).enabled
    )
    check_bind_policy(settings, has_keys=has_keys)
    return settings
