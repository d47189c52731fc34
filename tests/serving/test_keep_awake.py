"""A Mac does not go to idle sleep while the server runs. caffeinate exists only on macOS."""

import sys
from pathlib import Path

import pytest

from app.core.settings import Settings
from app.serving.keep_awake import keep_awake

ON = Settings(keep_awake=True)


def test_the_program_gets_the_process_to_wait_for(tmp_path: Path) -> None:
    program = tmp_path / "caffeinate"
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(0o755)
    process = keep_awake(ON, system="darwin", program=str(program))
    assert process is not None
    assert process.wait(60) == 0
    assert isinstance(process.args, list)
    assert process.args[1:3] == ["-i", "-w"]


def test_a_missing_program_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert keep_awake(ON, system="darwin", program="/nowhere/caffeinate") is None
    [warning] = caplog.messages
    assert warning.startswith("the machine may sleep during a response: ")


def test_it_is_off_by_default_and_on_other_systems() -> None:
    assert keep_awake(Settings(), system="darwin", program=sys.executable) is None
    assert keep_awake(ON, system="linux", program=sys.executable) is None
