"""More than sixty mistakes, and the line that reports each of them.

The line names the mistake, the accepted values or the most similar name, and what to do. All of
them are found before anything heavy is imported or any model is read.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from app import cli


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """command_line: after `mlxrunner`. message: the line, without `mlxrunner: `. {commands} stands
    for all commands, {folder} for the folder of the test. file: read with --config."""

    command_line: str
    message: str
    status: int
    environment: Mapping[str, str]
    file: str | None


def mistake(
    command_line: str,
    message: str,
    *,
    status: int = 2,
    environment: Mapping[str, str] | None = None,
    file: str | None = None,
) -> Mistake:
    return Mistake(
        command_line=command_line,
        message=message,
        status=status,
        environment=environment or {},
        file=file,
    )


MISTAKES = (
    mistake("''", "no command: the commands are {commands}"),
    mistake("srve", "unknown command 'srve': the commands are {commands}; did you mean serve?"),
    mistake("Serve", "unknown command 'Serve': the commands are {commands}; did you mean serve?"),
    mistake("start", "unknown command 'start': the commands are {commands}; did you mean serve?"),
    mistake(
        "download org/x",
        "unknown command 'download': the commands are {commands}; did you mean pull?",
    ),
    mistake("ls", "unknown command 'ls': the commands are {commands}; did you mean list?"),
    mistake("info", "unknown command 'info': the commands are {commands}; did you mean show?"),
    mistake("help", "unknown command 'help': the commands are {commands}; did you mean --help?"),
    mistake(
        "version", "unknown command 'version': the commands are {commands}; did you mean --version?"
    ),
    mistake("--vesion", "unknown option --vesion; did you mean --version?"),
    mistake("--port 9", "no command before --port: write `mlxrunner serve --port …`"),
    mistake(
        "mlx-community/Qwen3-4B-4bit",
        "unknown command 'mlx-community/Qwen3-4B-4bit': to serve a model, write `mlxrunner serve "
        "mlx-community/Qwen3-4B-4bit`",
    ),
    mistake(
        "qwen3:4b", "unknown command 'qwen3:4b': to serve a model, write `mlxrunner serve qwen3:4b`"
    ),
    mistake("dance", "unknown command 'dance': the commands are {commands}"),
    mistake(
        "serve --prot 9",
        "unknown option --prot; did you mean --port? (`mlxrunner serve --help-all` lists the "
        "accepted options)",
    ),
    mistake(
        "serve --Port 9",
        "unknown option --Port; did you mean --port? (`mlxrunner serve --help-all` lists the "
        "accepted options)",
    ),
    mistake(
        "serve --max_queue 3",
        "unknown option --max_queue; did you mean --max-queue? (`mlxrunner serve --help-all` "
        "lists the accepted options)",
    ),
    mistake(
        "serve -port 9",
        "unknown option -port; did you mean --port? (`mlxrunner serve --help-all` lists the "
        "accepted options)",
    ),
    mistake(
        "serve --ctx-size 8k",
        "unknown option --ctx-size; did you mean --context? (`mlxrunner serve --help-all` lists "
        "the accepted options)",
    ),
    mistake(
        "serve --alias chat",
        "unknown option --alias: a model gets another name with `alias` in a [[models]] table of "
        "--config FILE",
    ),
    mistake(
        "serve --kv-bits 8",
        "unknown option --kv-bits; did you mean --kv? (`mlxrunner serve --help-all` lists the "
        "accepted options)",
    ),
    mistake(
        "serve --max-model-len=8k",
        "unknown option --max-model-len; did you mean --context? (`mlxrunner serve --help-all` "
        "lists the accepted options)",
    ),
    mistake(
        "serve -c 8k",
        "unknown option -c; did you mean --context? (`mlxrunner serve --help-all` lists the "
        "accepted options)",
    ),
    mistake(
        "serve --max-num-seqs 4",
        "unknown option --max-num-seqs; did you mean --parallel? (`mlxrunner serve --help-all` "
        "lists the accepted options)",
    ),
    mistake(
        "serve --gpu-memory-utilization 0.9",
        "unknown option --gpu-memory-utilization; did you mean --memory? (`mlxrunner serve "
        "--help-all` lists the accepted options)",
    ),
    mistake(
        "serve --model org/x",
        "unknown option --model: a model is given without a flag, as in `mlxrunner serve MODEL`",
    ),
    mistake(
        "serve -m org/x",
        "unknown option -m: a model is given without a flag, as in `mlxrunner serve MODEL`",
    ),
    mistake(
        "serve --listen 0.0.0.0",
        "unknown option --listen; did you mean --host? (`mlxrunner serve --help-all` lists the "
        "accepted options)",
    ),
    mistake(
        "serve --no-pul",
        "unknown option --no-pul; did you mean --no-pull? (`mlxrunner serve --help-all` lists "
        "the accepted options)",
    ),
    mistake(
        "serve --zzz",
        "unknown option --zzz (`mlxrunner serve --help-all` lists the accepted options)",
    ),
    mistake("serve --port", "--port needs a value: --port N"),
    mistake("serve --pull=yes", "--pull takes no value: write --pull or --no-pull"),
    mistake(
        "list --jsn",
        "unknown option --jsn; did you mean --json? (`mlxrunner list --help` lists the "
        "accepted options)",
    ),
    mistake(
        "list one", "unexpected argument 'one' (`mlxrunner list --help` lists the accepted options)"
    ),
    mistake(
        "show --names",
        "unknown option --names (`mlxrunner show --help-all` lists the accepted options)",
    ),
    mistake("pull", "pull needs MODEL, as in `mlxrunner pull mlx-community/Qwen3-4B-4bit`"),
    mistake(
        "pull one two",
        "unexpected argument 'two' (`mlxrunner pull --help` lists the accepted options)",
    ),
    mistake("key", "key needs NAME, as in `mlxrunner key anna --file keys.toml`"),
    mistake(
        "launch",
        "launch needs PROGRAM, as in `mlxrunner launch claude mlx-community/Qwen3-4B-4bit`",
    ),
    mistake(
        "launch cluade",
        "PROGRAM: must be claude or codex or opencode or aider or cline or continue, not "
        "'cluade'; did you mean claude?",
    ),
    mistake("completion", 'completion needs SHELL, as in `eval "$(mlxrunner completion bash)"`'),
    mistake("completion powershell", "SHELL: must be bash or zsh or fish, not 'powershell'"),
    mistake("config --json --toml", "--toml and --json cannot be combined"),
    mistake("list --json --names", "--names and --json cannot be combined"),
    mistake("serve --port 70000", "--port: must be an integer from 0 to 65535, not '70000'"),
    mistake("serve --port 8k", "--port: must be an integer from 0 to 65535, not '8k'"),
    mistake(
        "serve --context eight",
        "--context: must be an integer of 2 or more, such as 8192, 8k (8000) or 8K (8192), not "
        "'eight'",
    ),
    mistake(
        "serve --context 1",
        "--context: must be an integer of 2 or more, such as 8192, 8k (8000) or 8K (8192), not '1'",
    ),
    mistake("serve --parallel 0", "--parallel: must be an integer of 1 or more, not '0'"),
    mistake(
        "serve --memory 6GX",
        "--memory: must be a number of GiB above 0 and at most 1,000,000,000, or a size such as "
        "600MB or 6GiB, not '6GX'",
    ),
    mistake(
        "serve --memory 0",
        "--memory: must be a number of GiB above 0 and at most 1,000,000,000, or a size such as "
        "600MB or 6GiB, not '0'",
    ),
    mistake(
        "serve --keep-alive soon",
        '--keep-alive: must be "forever", a number of seconds of 0 or more and at most '
        "1,000,000,000, or a duration such as \"5m\", not 'soon'",
    ),
    mistake(
        "serve --deadline 0",
        "--deadline: must be a number of seconds above 0 and at most 1,000,000,000, or a duration "
        "such as \"5m\", not '0'",
    ),
    mistake(
        "serve --cache radx",
        "--cache: must be single or slots or radix, not 'radx'; did you mean radix?",
    ),
    mistake(
        "serve --log-level inof",
        "--log-level: must be debug or info or warning or error, not 'inof'; did you mean info?",
    ),
    mistake("serve --quantize 3", "--quantize: must be 4 or 8, not '3'"),
    mistake(
        "serve --cors-origin a.example",
        "--cors-origin: must be an origin as browsers send it, such as https://chat.example.org "
        "(lower case, no path, no trailing slash, no default port), not 'a.example'",
    ),
    mistake("serve --tls-cert a.pem", "--tls-cert and --tls-key must be given together", status=1),
    mistake("serve --context-shift", "--context-shift needs --cache slots", status=1),
    mistake(
        "serve --cache single --parallel 2",
        "--cache single supports one sequence, but --parallel is 2: use --cache slots or --cache "
        "radix",
        status=1,
    ),
    mistake(
        "show org/nothing",
        "model org/nothing was not found: no such folder, not in the Hugging Face cache "
        "({folder}/hub), not in Ollama's store ({folder}); run `mlxrunner pull org/nothing` to "
        "download it, or serve it with --pull",
        status=1,
    ),
    mistake(
        "show bultin",
        "model bultin was not found: no such folder, not in Ollama's store ({folder}); run "
        "`mlxrunner list` to see local models, or download one with `mlxrunner pull org/name` or "
        "`ollama pull`; did you mean builtin?",
        status=1,
    ),
    mistake(
        "show ./nothing", "./nothing is neither a folder nor a GGUF file: check the path", status=1
    ),
    mistake(
        "show http://a/b", "'http://a/b' is a URL: use only the name, such as org/name", status=1
    ),
    mistake(
        "pull org/x@a --revision b", "org/x@a and --revision b are different revisions", status=1
    ),
    mistake(
        "config",
        "MLXRUNNER_PROT: unknown variable; did you mean MLXRUNNER_PORT?",
        status=1,
        environment={"MLXRUNNER_PROT": "9"},
    ),
    mistake(
        "config",
        "MLXRUNNER_MAX_QUEU: unknown variable; did you mean MLXRUNNER_MAX_QUEUE?",
        status=1,
        environment={"MLXRUNNER_MAX_QUEU": "9"},
    ),
    mistake(
        "config",
        "MLXRUNNER_CTX_SIZE: unknown variable; did you mean MLXRUNNER_CONTEXT?",
        status=1,
        environment={"MLXRUNNER_CTX_SIZE": "9"},
    ),
    mistake(
        "config",
        "MLXRUNNER_MODEL: unknown variable; did you mean MLXRUNNER_MODELS?",
        status=1,
        environment={"MLXRUNNER_MODEL": "a"},
    ),
    mistake(
        "config", "MLXRUNNER_ZZZ: unknown variable", status=1, environment={"MLXRUNNER_ZZZ": "9"}
    ),
    mistake(
        "config",
        "MLXRUNNER_MEMORY: must be a number of GiB above 0 and at most 1,000,000,000, or a size "
        "such as 600MB or 6GiB, not 'lots'",
        status=1,
        environment={"MLXRUNNER_MEMORY": "lots"},
    ),
    mistake(
        "config",
        "MLXRUNNER_PULL: must be true or false, not 'maybe'",
        status=1,
        environment={"MLXRUNNER_PULL": "maybe"},
    ),
    mistake(
        "config",
        "nowhere.toml: No such file or directory (--config or MLXRUNNER_CONFIG names this file)",
        status=1,
        environment={"MLXRUNNER_CONFIG": "nowhere.toml"},
    ),
    mistake("config", "a.toml:1: prot: unknown key; did you mean port?", status=1, file="prot = 9"),
    mistake(
        "config",
        "a.toml:1: max-queue: unknown key; did you mean max_queue?",
        status=1,
        file="max-queue = 9",
    ),
    mistake(
        "config",
        "a.toml:1: ctx_size: unknown key; did you mean context?",
        status=1,
        file="ctx_size = 9",
    ),
    mistake(
        "config", "a.toml:1: model: unknown key; did you mean models?", status=1, file="model = 'a'"
    ),
    mistake(
        "config",
        "a.toml:1: [server]: unknown section; settings are top-level keys, without sections",
        status=1,
        file="[server]\nport = 9",
    ),
    mistake("config", "a.toml:1: debug: must be true or false, not 1", status=1, file="debug = 1"),
    mistake(
        "config",
        "a.toml:1: memory: must be a number of GiB above 0 and at most 1,000,000,000, or a size "
        "such as 600MB or 6GiB, not '6 GX'",
        status=1,
        file="memory = '6 GX'",
    ),
    mistake(
        "config",
        "a.toml: is not valid TOML: Invalid value (at end of document)",
        status=1,
        file="port = ",
    ),
    mistake(
        "config",
        "a.toml:3: models[0].max_model_len: unknown key; did you mean context?",
        status=1,
        file="[[models]]\nname = 'a'\nmax_model_len = 9",
    ),
    mistake("config", "a.toml:1: models[0] needs a name", status=1, file="[[models]]\nalias = 'a'"),
    mistake(
        "config",
        "a.toml:3: models[0].port: unknown key; it is a server setting: move it above the first "
        "[[models]]",
        status=1,
        file="[[models]]\nname = 'a'\nport = 9",
    ),
)


def name(mistake: Mistake) -> str:
    given = " ".join(f"{key}={value}" for key, value in mistake.environment.items())
    return " ".join(filter(None, (given, mistake.command_line, mistake.file))) or "nothing"


def test_the_table_has_at_least_sixty_mistakes_and_no_two_equal_ones() -> None:
    assert len({name(one) for one in MISTAKES}) == len(MISTAKES) >= 60


@pytest.mark.parametrize("one", MISTAKES, ids=name)
def test_each_mistake_gets_one_line_that_tells_what_to_do(
    one: Mistake,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for key, value in one.environment.items():
        monkeypatch.setenv(key, value)
    words = shlex.split(one.command_line)
    if one.file is not None:
        (tmp_path / "a.toml").write_text(one.file)
        words += ["--config", "a.toml"]
    try:
        status = cli.main(words)
    except SystemExit as end:
        status = end.code
    output = capsys.readouterr()
    expected = one.message.replace("{commands}", ", ".join(cli.COMMAND_NAMES))
    expected = expected.replace("{folder}", str(tmp_path))
    assert (output.err, output.out) == (f"mlxrunner: {expected}\n", "")
    assert status == one.status
