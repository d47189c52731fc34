"""The command line: options become settings, and errors are one line."""

import logging
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from app import cli, server
from app.commands import declarations, servers
from app.config.command_line import parse_arguments
from app.config.options import OPTIONS, TEMPORARY_CONFIG_VARIABLE
from app.config.precedence import resolve_config
from app.core.errors import AppError, ErrorKind
from app.core.settings import ModelSettings, Settings

pytestmark = pytest.mark.usefixtures("no_early_process")


@pytest.fixture
def serve_calls(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The settings of each call of serve."""
    calls: list[Settings] = []

    def serve(settings: Settings, *_: object) -> int:
        calls.append(settings)
        return 0

    monkeypatch.setattr(server, "serve", serve)
    return calls


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    names = ("", "app", "app.access", "uvicorn.access", "httpx2")
    levels = {name: logging.getLogger(name).level for name in names}
    handlers = logging.root.handlers
    yield
    logging.root.handlers = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def test_without_options_the_settings_are_the_defaults(serve_calls: list[Settings]) -> None:
    assert cli.main(["serve"]) == 0
    assert serve_calls == [Settings()]


def test_defaults_are_saved_only_in_a_file_that_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server of `launch` and `run` has a file that is deleted with it."""
    paths: list[str | None] = []
    monkeypatch.setattr(server, "serve", lambda _, path, *rest: paths.append(path) or 0)
    file = tmp_path / "a.toml"
    file.write_text("port = 9\n")
    assert cli.main(["serve", "--config", str(file)]) == 0
    monkeypatch.setenv(TEMPORARY_CONFIG_VARIABLE, "1")
    assert cli.main(["serve", "--config", str(file)]) == 0
    assert paths == [str(file), None]


def test_a_launched_server_has_a_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments: list[Mapping[str, str]] = []
    monkeypatch.setattr(
        servers, "LaunchedServer", lambda _, environ, log: environments.append(environ)
    )
    servers.start_server(resolve_config({}, None, {}), tmp_path, {})
    assert TEMPORARY_CONFIG_VARIABLE in environments[0]


def test_options_reach_their_settings(serve_calls: list[Settings]) -> None:
    """tests/config has a test of each option; this test shows that the command uses them."""
    command_line = (
        "serve folder --pull --quantize 4 --host ::1 --port 9 "
        "--cors-origin https://a --cors-origin https://b "
        "--parallel 3 --max-queue 0 --context 2048 --context-shift --memory 6.5 --cache slots "
        "--multi-user --prefill-chunk 64 --watchdog 2.5 --max-body 2 --ping 0.5 --debug"
    )
    assert cli.main(command_line.split()) == 0
    assert serve_calls == [
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


@pytest.mark.parametrize("command_line", ["", " --parallel 1", " --cache single", " --cache radix"])
def test_exact_is_accepted_with_other_cache_options(
    command_line: str, serve_calls: list[Settings]
) -> None:
    assert cli.main(["serve", "--exact", *command_line.split()]) == 0
    assert serve_calls[0].exact


@pytest.mark.parametrize(
    ("command_line", "level"),
    [
        ("serve", logging.INFO),
        ("serve --debug", logging.DEBUG),
        ("serve --log-level error", logging.ERROR),
    ],
)
def test_logging_is_configured_before_serve(
    command_line: str, level: int, serve_calls: list[Settings]
) -> None:
    assert cli.main(command_line.split()) == 0
    assert logging.getLogger("app").level == level
    assert logging.getLogger("starlette").getEffectiveLevel() >= logging.INFO


@pytest.mark.parametrize(
    ("command_line", "reason"),
    [
        ("--context-shift", "--context-shift needs --cache slots"),
        ("--context-shift --cache radix", "--context-shift needs --cache slots"),
        ("--context-shift --cache slots --exact", "--context-shift and --exact cannot be combined"),
        ("--multi-user", "--multi-user needs --cache slots"),
        ("--multi-user --cache single", "--multi-user needs --cache slots"),
        ("--cache single --parallel 2", "but --parallel is 2"),
    ],
)
def test_conflicting_options_are_rejected_by_name(
    command_line: str, reason: str, serve_calls: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", *command_line.split()]) == 1
    [message] = capsys.readouterr().err.splitlines()
    assert reason in message
    assert not serve_calls


@pytest.mark.parametrize(
    "command_line",
    [
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
def test_an_invalid_command_line_is_rejected(
    command_line: str, serve_calls: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(command_line.split())
    assert caught.value.code == 2
    [message] = capsys.readouterr().err.splitlines()
    assert message.startswith("mlxrunner: ")
    assert not serve_calls


@pytest.mark.parametrize(
    ("command_line", "message"),
    [
        (
            "srve",
            f"unknown command 'srve': the commands are {', '.join(cli.COMMAND_NAMES)}; "
            "did you mean serve?",
        ),
        ("''", f"no command: the commands are {', '.join(cli.COMMAND_NAMES)}"),
        (
            "list one",
            "unexpected argument 'one' (`mlxrunner list --help` lists the accepted options)",
        ),
    ],
)
def test_an_unknown_command_is_rejected_with_the_known_ones(
    command_line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(shlex.split(command_line))
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"mlxrunner: {message}\n"


def test_without_arguments_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([])
    assert caught.value.code == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out == cli._build_parser().format_help()


def test_every_listed_command_exists(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for command in cli.COMMAND_NAMES:
        with pytest.raises(SystemExit) as caught:
            cli.main([command, "--help"])
        assert caught.value.code == 0
    assert "usage: mlxrunner key" in capsys.readouterr().out


def test_a_missing_model_is_one_line_and_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", str(tmp_path), "--port", "0"]) == 1
    message = capsys.readouterr().err
    assert message == f"mlxrunner: {tmp_path} has no config.json: it is not a model folder\n"


def test_an_error_of_serve_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def serve(*_: object) -> int:
        raise AppError(ErrorKind.MODEL_FILES, "planted")

    monkeypatch.setattr(server, "serve", serve)
    assert cli.main(["serve"]) == 1
    assert capsys.readouterr().err == "mlxrunner: planted\n"


@pytest.mark.parametrize("name", ["org/nothing", "nothing:4b", "./nothing", "org/../nothing"])
def test_an_unknown_model_name_is_one_line_for_every_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    for command in ("serve", "show"):
        assert cli.main([command, name]) == 1
        [message] = capsys.readouterr().err.splitlines()
        assert message.startswith("mlxrunner: ")


def test_serve_reads_environment_and_file(
    serve_calls: list[Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.toml").write_text('models = ["c"]\nport = 7\nmax_queue = 7\nmax_tokens = 7')
    monkeypatch.setenv("MLXRUNNER_CONFIG", str(tmp_path / "a.toml"))
    monkeypatch.setenv("MLXRUNNER_PORT", "8")
    monkeypatch.setenv("MLXRUNNER_MAX_QUEUE", "8")
    assert cli.main(["serve", "a", "--port", "9", "b"]) == 0
    models = (ModelSettings(name="a"), ModelSettings(name="b"))
    assert serve_calls == [Settings(models=models, port=9, max_queue=8, max_tokens=7)]


def test_a_reload_reads_the_file_again_below_the_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.toml"
    file.write_text("max_queue = 7\nmax_tokens = 7")
    seen: list[Settings] = []

    def serve(
        settings: Settings, path: str, read_settings: Callable[[], Settings], *_: object
    ) -> int:
        assert path == str(file)
        file.write_text("max_queue = 8\nmax_tokens = 8")
        seen.extend((settings, read_settings()))
        return 0

    monkeypatch.setattr(server, "serve", serve)
    before = signal.getsignal(signal.SIGHUP)
    assert cli.main(["serve", "--config", str(file), "--max-queue", "9"]) == 0
    assert seen == [Settings(max_queue=9, max_tokens=7), Settings(max_queue=9, max_tokens=8)]
    assert signal.getsignal(signal.SIGHUP) is before


def test_settings_are_resolved_without_heavy_imports() -> None:
    """`mlxrunner config` and errors of options must be fast."""
    heavy = {"mlx", "starlette", "uvicorn", "tokenizers", "jinja2", "huggingface_hub"}
    program = (
        "import sys; from app.cli import main; main(['config']); "
        f"print(sorted({heavy} & sys.modules.keys()), file=sys.stderr)"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert process.stderr == b"[]\n"


def test_show_describes_the_built_in_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", "--context", "64", "--parallel", "2", "--memory", "1"]) == 0
    assert "for 2 sequences of 64 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["serve", "pull org/tiny"])
def test_a_command_interrupted_before_a_download_does_not_mention_one(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message at Ctrl-C during the start of a server did."""

    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(server, "serve", interrupt)
    monkeypatch.setattr("app.store.hub.download_plan.plan_download", interrupt)
    assert cli.main(command.split()) == 130
    assert capsys.readouterr().err == "mlxrunner: interrupted\n"


def test_an_interrupted_command_without_a_download_does_not_mention_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("app.commands.config.show_config", interrupt)
    assert cli.main(["config"]) == 130
    assert capsys.readouterr().err == "mlxrunner: interrupted\n"


@pytest.mark.parametrize("command_line", ["list", "show --json"])
def test_a_closed_output_pipe_is_no_failure(command_line: str, tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    variables = {"HF_HOME": str(tmp_path), "OLLAMA_MODELS": str(tmp_path)}
    program = "import sys; from app.cli import main; sys.exit(main())"
    process = subprocess.run(
        [sys.executable, "-c", program, *command_line.split()],
        stdout=write,
        stderr=subprocess.PIPE,
        env={**os.environ, **variables},
        check=False,
    )
    os.close(write)
    assert (process.returncode, process.stderr) == (0, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full of Linux")
def test_a_full_disk_is_an_error_of_one_line() -> None:
    with open("/dev/full", "w") as full:
        process = subprocess.run(
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
    assert process.returncode == 1
    assert process.stderr.startswith("mlxrunner: ")
    assert process.stderr.count("\n") == 1


def test_a_server_loads_the_hubs_library_only_for_a_download() -> None:
    """It takes 10 MiB and a third of the start time."""
    code = "import sys, app.server; print('huggingface_hub' in sys.modules)"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout == "False\n"


def read_help(command_line: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        cli.main(command_line.split())
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_the_help_lists_each_command_once_in_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    text = read_help("--help", capsys)
    groups = {command.group for command in declarations.COMMANDS}
    for group in groups:
        assert f"\n{group}:\n" in text
    for name in cli.COMMAND_NAMES:
        assert len(re.findall(rf"^  {name}  ", text, re.MULTILINE)) == 1, name
    assert "`mlxrunner COMMAND --help`" in text


@pytest.mark.parametrize("command", declarations.COMMANDS, ids=lambda command: command.name)
def test_each_example_in_the_help_is_a_valid_command_line(
    command: declarations.Command, capsys: pytest.CaptureFixture[str]
) -> None:
    text = read_help(f"{command.name} --help", capsys)
    assert command.examples
    for line, _ in command.examples:
        assert line in text
        [words] = re.findall(r"mlxrunner ([^|>)\"]+)", line)
        parsed = parse_arguments(cli._build_parser(), shlex.split(words), cli.COMMAND_NAMES)
        assert parsed.command == command.name


def test_rare_options_are_only_in_help_all(capsys: pytest.CaptureFixture[str]) -> None:
    short, full = read_help("serve --help", capsys), read_help("serve --help-all", capsys)
    assert "--prefill-chunk" not in short
    assert "--prefill-chunk" in full
    assert len(short.splitlines()) <= 60
    hidden = sum(not option.is_common for option in OPTIONS)
    assert f"`mlxrunner serve --help-all` lists {hidden} more options." in short


def test_no_other_command_name_is_a_command() -> None:
    assert not cli.OTHER_COMMAND_NAMES.keys() & set(cli.COMMAND_NAMES)
    names = [name for command in declarations.COMMANDS for name in command.other_names.split()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("line", ["serve", "run", "launch claude", "pull a/b", "show", "doctor"])
def test_a_command_that_uses_mlx_checks_its_library_first(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`pull` imports MLX and did not check."""

    def check() -> None:
        raise AppError(ErrorKind.INVALID, "MLX is inconsistent")

    monkeypatch.setattr(cli, "check_mlx_library", check)
    assert cli.main(line.split()) == 1
    assert capsys.readouterr().err == "mlxrunner: MLX is inconsistent\n"


@pytest.mark.parametrize("command", ["ps", "stop", "rm"])
def test_the_address_of_a_client_command_is_the_one_of_the_server(command: str) -> None:
    """The help said that `ps` listens on this address."""
    text = cli._build_parser().subcommands[command].format_help()
    assert "--host HOST    address of the server (default: 127.0.0.1)" in text
    assert "--port N       port of the server (default: 8080)" in text
    assert "listen" not in text
