"""Asking for settings as the command does, from sources that are the test's own."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from app.config import flags
from app.config.precedence import ResolvedConfig, resolve_config

Decide = Callable[..., ResolvedConfig]


@pytest.fixture
def decided(tmp_path: Path) -> Decide:
    """Words of the command line, an environment, and what stands in the file `settings.toml`."""

    def ask(
        *words: str, environment: Mapping[str, str] | None = None, file: str | None = None
    ) -> ResolvedConfig:
        parser = flags.CommandLineParser()
        flags.add_setting_flags(parser)
        if file is not None:
            (tmp_path / "settings.toml").write_text(file, "utf-8")
            words = (*words, "--config", str(tmp_path / "settings.toml"))
        arguments = flags.parse_arguments(parser, words)
        return resolve_config(flags.collect_flags(arguments), arguments.config, environment or {})

    return ask
