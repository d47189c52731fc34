"""The programs that the blocks of the manual may run: real ones, and stubs.

A stub is on PATH instead of a program that cannot run in a test. It records its
arguments, checks them where that is possible, and exits with an error if they are wrong. A program
that is in none of these tables fails the test of its page.
"""

import re
from dataclasses import dataclass

from tests.deploy.guide_sandbox import STUBS as GUIDE_STUBS

# Programs of the system that run unchanged.
REAL_PROGRAMS = (
    *("bash", "sh", "cat", "chmod", "cp", "curl", "echo", "env", "git", "grep", "id", "ls"),
    *("mkdir", "mv", "printf", "rm", "sed", "sleep", "tail", "tee", "touch"),
)

# Shells whose lines run if they are installed.
OTHER_SHELLS = ("zsh", "fish")


@dataclass(frozen=True, slots=True)
class Stub:
    """reason: why the program does not run. script: of sh; @SOURCES@ is the checkout, @ROOT@ the
    folder that has /etc, /opt and the other folders of the system, @PYTHON@ the interpreter of the
    tests. pattern: matches each block in which the stub is called."""

    reason: str
    script: str
    pattern: str


def _command(name: str) -> str:
    return rf"(?m)(?:^|[|&;] *|\bsudo |^\w+=\S+ (?:\\\n *)?|^  ){re.escape(name)} "


def _agent(name: str, pattern: str | None = None) -> Stub:
    """The address of a running server must be in a variable, an argument or a file. pattern: of a
    program that `launch` does not know."""
    return Stub(
        "its prompts are too long for the small models: tests/clients/programs runs it",
        '{ env; echo "$*"; cat "${CLINE_PROVIDER_SETTINGS_PATH:-/dev/null}"\n'
        '  if [ "$1" = --config ]; then cat "$2"; fi; } > "$HOME/agent"\n'
        'grep -q "http://127.0.0.1:$MLXRUNNER_PORT" "$HOME/agent" || exit 98',
        pattern or rf"(?m)launch {name}\b(?!.*--print)",
    )


_CHANGES_SYSTEM = "it changes the system: tests/deploy follows the guide with the same stub"
_INSTALLS = "it installs mlxrunner with packages from the network; make and CI do the same"
_NEEDS_PROJECT = '[ -f "@SOURCES@/pyproject.toml" ] && [ "$PWD" = "@CHECKOUT@" ]'

# name of the program -> stub
STUBS: dict[str, Stub] = {
    **{
        name: Stub(_CHANGES_SYSTEM, GUIDE_STUBS[name], _command(name))
        for name in ("sudo", "useradd", "chown", "systemctl", "python3")
    },
    "nginx": Stub(
        "it would listen on port 443; the real one, if it is installed, checks the configuration",
        '[ "$*" = -t ] && "@PYTHON@" "@SOURCES@/tests/manual/check_nginx.py" "@ROOT@" "@NGINX@"',
        _command("nginx"),
    ),
    "apt": Stub(
        "it installs packages of the system",
        '[ "$1" = install ] && [ $# -gt 1 ]',
        _command("apt"),
    ),
    "uv": Stub(_INSTALLS, f'[ "$*" = "tool install ." ] && {_NEEDS_PROJECT}', _command("uv")),
    "pipx": Stub(_INSTALLS, f'[ "$*" = "install ." ] && {_NEEDS_PROJECT}', _command("pipx")),
    "pip": Stub(_INSTALLS, f'[ "$*" = "install ." ] && {_NEEDS_PROJECT}', _command("pip")),
    "make": Stub(
        "its targets build environments, and measure for hours; the real make must know the target "
        "and say what it would run, of which the server is started",
        'commands=$(@MAKE@ --no-print-directory --dry-run -C "@SOURCES@" "$@") || exit\n'
        'server=$(echo "$commands" | sed -n "/^exec [^ ]*mlxrunner serve/,\\$p")\n'
        'if [ -n "$server" ]; then eval "${server#exec }"; fi',
        _command("make"),
    ),
    "docker": Stub(
        "it builds and runs images; the arguments after the image must be those of `serve`",
        'if [ "$1" = compose ]; then grep -q "^  setup:" compose.yaml; exit; fi\n'
        'if [ "$1" = build ]; then eval "folder=\\$$#"; [ -f "$folder/Dockerfile" ]; exit; fi\n'
        '[ "$1" = run ] || exit 95\n'
        "while [ $# -gt 0 ]; do\n"
        '    case "$1" in\n'
        '    mlxrunner) shift; exec mlxrunner config --json "$@" > /dev/null;;\n'
        "    ghcr.io/open-webui/*) exit 0;;\n"
        "    esac\n"
        "    shift\n"
        "done\n"
        "exit 96",
        _command("docker"),
    ),
    "mlx.launch": Stub(
        "it needs ssh to other machines, and for two ranks much time: tests/test_distributed.py "
        "runs it; here, the command of the ranks runs once",
        'if [ "$1" = --hostfile ]; then\n'
        '    "@PYTHON@" -c "import json, sys; json.load(open(sys.argv[1]))" "$2" || exit 95\n'
        'else [ "$1" = -n ] || exit 96; fi\n'
        'while [ "$1" != -- ]; do shift; done; shift\n'
        '"$@"',
        _command("mlx.launch"),
    ),
    **{name: _agent(name) for name in ("codex", "opencode", "aider", "cline")},
    **{name: _agent(name, _command(name)) for name in ("copilot", "qwen")},
    "claude": Stub(
        _agent("claude").reason, _agent("claude").script, _agent("claude").pattern + "|^claude$"
    ),
    "cn": Stub(_agent("continue").reason, _agent("continue").script, _agent("continue").pattern),
}
