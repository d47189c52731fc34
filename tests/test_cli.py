"""The command line: options in, settings out, mistakes in one line."""

from pathlib import Path

import pytest

from app import cli, server
from app.core.errors import AppError, Kind
from app.core.settings import Settings


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The settings that serve was called with."""
    calls: list[Settings] = []

    def serve(settings: Settings) -> int:
        calls.append(settings)
        return 0

    monkeypatch.setattr(server, "serve", serve)
    return calls


def test_without_options_the_settings_are_the_defaults(served: list[Settings]) -> None:
    assert cli.main(["serve"]) == 0
    assert served == [Settings()]


def test_every_option_reaches_its_setting(served: list[Settings]) -> None:
    line = (
        "serve folder --host ::1 --port 9 --cors-origin https://a --cors-origin https://b "
        "--cache single --exact --prefill-chunk 64 --max-body 2 --keep-alive 0.5"
    )
    assert cli.main(line.split()) == 0
    assert served == [
        Settings(
            model="folder",
            host="::1",
            port=9,
            cors_origins=("https://a", "https://b"),
            cache="single",
            exact=True,
            prefill_chunk=64,
            max_body=2 << 20,
            keep_alive=0.5,
        )
    ]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "dance",
        "serve --port 70000",
        "serve --port x",
        "serve --prefill-chunk 0",
        "serve --max-body -1",
        "serve --max-body nan",
        "serve --keep-alive inf",
        "serve --cache lots",
        "serve one two",
    ],
)
def test_a_bad_line_is_refused(
    line: str, served: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(line.split())
    assert caught.value.code == 2
    assert "usage: mlxrunner" in capsys.readouterr().err
    assert not served


def test_a_model_that_is_not_there_is_one_line_and_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", str(tmp_path)]) == 1
    message = capsys.readouterr().err
    assert message == f"mlxrunner: {tmp_path} has no config.json: it is not a model folder\n"


def test_an_error_while_serving_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def serve(_: Settings) -> int:
        raise AppError(Kind.MODEL_FILES, "planted")

    monkeypatch.setattr(server, "serve", serve)
    assert cli.main(["serve"]) == 1
    assert capsys.readouterr().err == "mlxrunner: planted\n"
