"""Resolves settings as the command does, from the test's own sources."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from app.config import command_line
from app.config.command_line import CommandLineParser, parse_arguments
from app.config.precedence import ResolvedConfig, resolve_config

Resolve = Callable[..., ResolvedConfig]


@pytest.fixture
def resolve(tmp_path: Path) -> Resolve:
    """Arguments of the command line, an environment, and the content of `settings.toml`."""

    def run(
        *arguments: str, environment: Mapping[str, str] | None = None, file: str | None = None
    ) -> ResolvedConfig:
        parser = CommandLineParser()
        command_line.add_setting_flags(parser)
        if file is not None:
            (tmp_path / "settings.toml").write_text(file, "utf-8")
            arguments = (*arguments, "--config", str(tmp_path / "settings.toml"))
        namespace = parse_arguments(parser, arguments)
        return resolve_config(
            command_line.collect_flags(namespace), namespace.config, environment or {}
        )

    return run
