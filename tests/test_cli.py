"""The command line: options in, settings out, mistakes in one line."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app import cli, server
from app.core.errors import AppError, ErrorKind
from app.core.settings import ModelSettings, Settings


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The settings that serve was called with."""
    calls: list[Settings] = []

    def serve(settings: Settings) -> int:
        calls.append(settings)
        return 0

    monkeypatch.setattr(server, "serve", serve)
    return calls


@pytest.fixture(autouse=True)
def untouched_log() -> Iterator[None]:
    names = ("", "app", "app.access", "uvicorn.access", "httpx2")
    levels = {name: logging.getLogger(name).level for name in names}
    handlers = logging.root.handlers
    yield
    logging.root.handlers = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def test_without_options_the_settings_are_the_defaults(served: list[Settings]) -> None:
    assert cli.main(["serve"]) == 0
    assert served == [Settings()]


def test_options_reach_their_settings(served: list[Settings]) -> None:
    """That each does is shown in tests/config; here, that the command asks all of them."""
    line = (
        "serve folder --pull --quantize 4 --host ::1 --port 9 "
        "--cors-origin https://a --cors-origin https://b "
        "--parallel 3 --max-queue 0 --context 2048 --context-shift --memory 6.5 --cache slots "
        "--multi-user --prefill-chunk 64 --watchdog 2.5 --max-body 2 --ping 0.5 --debug"
    )
    assert cli.main(line.split()) == 0
    assert served == [
        Settings(
            models=(ModelSettings(name="folder"),),
            pull=True,
            quantize=4,
            host="::1",
            port=9,
            cors_origins=("https://a", "https://b"),
            parallel=3,
            max_queue=0,
            context=2048,
            context_shift=True,
            memory=13 << 29,
            cache="slots",
            multi_user=True,
            prefill_chunk=64,
            watchdog=2.5,
            max_body=2 << 20,
            ping=0.5,
            debug=True,
        )
    ]


@pytest.mark.parametrize("line", ["", " --parallel 1", " --cache single", " --cache radix"])
def test_exact_goes_with_everything_that_does_not_forget(line: str, served: list[Settings]) -> None:
    assert cli.main(["serve", "--exact", *line.split()]) == 0
    assert served[0].exact


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("serve", logging.INFO),
        ("serve --debug", logging.DEBUG),
        ("serve --log-level error", logging.ERROR),
    ],
)
def test_the_log_is_set_up_before_anything_is_served(
    line: str, level: int, served: list[Settings]
) -> None:
    assert cli.main(line.split()) == 0
    assert logging.getLogger("app").level == level
    assert logging.getLogger("starlette").getEffectiveLevel() >= logging.INFO


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("--context-shift", "--context-shift needs --cache slots"),
        ("--context-shift --cache radix", "--context-shift needs --cache slots"),
        ("--context-shift --cache slots --exact", "--context-shift and --exact cannot be combined"),
        ("--multi-user", "--multi-user needs --cache slots"),
        ("--multi-user --cache single", "--multi-user needs --cache slots"),
        ("--cache single --parallel 2", "but --parallel is 2"),
    ],
)
def test_options_that_exclude_each_other_are_refused_by_name(
    line: str, why: str, served: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", *line.split()]) == 1
    [told] = capsys.readouterr().err.splitlines()
    assert why in told
    assert not served


@pytest.mark.parametrize(
    "line",
    [
        "",
        "dance",
        "serve --port 70000",
        "serve --port x",
        "serve --prefill-chunk 0",
        "serve --parallel 0",
        "serve --max-queue -1",
        "serve --context 1",
        "serve --memory 0",
        "serve --watchdog 0",
        "serve --max-body -1",
        "serve --max-body nan",
        "serve --ping inf",
        "serve --memory 1e300",
        "serve --max-body 1e300",
        "serve --cache lots",
        "serve --max-queu 1",
        "serve --max-q 1",
        "config --json --toml",
        "key",
        "serve --quantize 3",
        "pull",
        "pull one two",
        "list one",
        "show --context 0",
    ],
)
def test_a_bad_line_is_refused(
    line: str, served: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(line.split())
    assert caught.value.code == 2
    [message] = capsys.readouterr().err.splitlines()
    assert message.startswith("mlxrunner: ")
    assert not served


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "srve",
            "unknown command 'srve': the commands are serve, pull, list, show, doctor, config, key"
            "; did you mean serve?",
        ),
        ("", "no command: the commands are serve, pull, list, show, doctor, config, key"),
        ("list one", "unexpected argument 'one' (`mlxrunner list --help` lists what is accepted)"),
    ],
)
def test_an_unknown_command_is_refused_with_the_known_ones(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(line.split())
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"mlxrunner: {message}\n"


def test_every_listed_command_exists(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for command in cli.COMMANDS:
        with pytest.raises(SystemExit) as caught:
            cli.main([command, "--help"])
        assert caught.value.code == 0
    assert "usage: mlxrunner key" in capsys.readouterr().out


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
        raise AppError(ErrorKind.MODEL_FILES, "planted")

    monkeypatch.setattr(server, "serve", serve)
    assert cli.main(["serve"]) == 1
    assert capsys.readouterr().err == "mlxrunner: planted\n"


@pytest.mark.parametrize("name", ["org/nothing", "nothing:4b", "./nothing", "org/../nothing"])
def test_a_name_that_nothing_has_is_one_line_for_every_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    for command in ("serve", "show"):
        assert cli.main([command, name]) == 1
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("mlxrunner: ")


def test_environment_and_file_count_for_serve_too(
    served: list[Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.toml").write_text('models = ["c"]\nport = 7\nmax_queue = 7\nmax_tokens = 7')
    monkeypatch.setenv("MLXRUNNER_CONFIG", str(tmp_path / "a.toml"))
    monkeypatch.setenv("MLXRUNNER_PORT", "8")
    monkeypatch.setenv("MLXRUNNER_MAX_QUEUE", "8")
    assert cli.main(["serve", "a", "--port", "9", "b"]) == 0
    named = (ModelSettings(name="a"), ModelSettings(name="b"))
    assert served == [Settings(models=named, port=9, max_queue=8, max_tokens=7)]


def test_settings_are_known_before_anything_heavy_is_imported() -> None:
    """`mlxrunner config` may be asked at any start; so may a wrong option."""
    heavy = {"mlx", "starlette", "uvicorn", "tokenizers", "jinja2", "huggingface_hub"}
    program = (
        "import sys; from app.cli import main; main(['config']); "
        f"print(sorted({heavy} & sys.modules.keys()), file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert ended.stderr == b"[]\n"


def test_show_describes_the_built_in_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", "--context", "64", "--parallel", "2", "--memory", "1"]) == 0
    assert "for 2 sequences of 64 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["serve", "pull org/tiny"])
def test_a_command_interrupted_before_a_download_does_not_mention_one(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C during the start of a server did."""

    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(server, "serve", interrupted)
    monkeypatch.setattr("app.commands.pull.plan_download", interrupted)
    assert cli.main(command.split()) == 130
    assert capsys.readouterr().err == "mlxrunner: interrupted\n"


def test_an_interrupted_command_that_downloads_nothing_speaks_of_no_download(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("app.commands.config.show_config", interrupted)
    assert cli.main(["config"]) == 130
    assert capsys.readouterr().err == "mlxrunner: interrupted\n"


@pytest.mark.parametrize("line", ["list", "show --json"])
def test_a_reader_that_has_seen_enough_is_no_failure(line: str, tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    homes = {"HF_HOME": str(tmp_path), "OLLAMA_MODELS": str(tmp_path)}
    program = "import sys; from app.cli import main; sys.exit(main())"
    ended = subprocess.run(
        [sys.executable, "-c", program, *line.split()],
        stdout=write,
        stderr=subprocess.PIPE,
        env={**os.environ, **homes},
        check=False,
    )
    os.close(write)
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that Linux has")
def test_a_full_disk_is_told_in_one_line() -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [
                sys.executable,
                "-c",
                "import sys; from app.cli import main; sys.exit(main())",
                "config",
            ],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ended.returncode == 1
    assert ended.stderr.startswith("mlxrunner: ")
    assert ended.stderr.count("\n") == 1
