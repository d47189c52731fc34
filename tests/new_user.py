"""`python -m tests.new_user`: installs this project in each documented way, as a new user would.

For each Python that CI would test with (.ci/interpreters), the last commit is cloned into a folder
whose path has spaces. It is installed, started and used: `make serve` with and without a C++
compiler, and the wheel with pip, pipx and uv. The wheels run in the folder of another project,
whose packages `app` and `models` cannot be imported. HOME is unset, the empty string or an empty
folder. A table shows the seconds from the first command to a ready server, and which checks failed.

It downloads packages, and compiles the kernels twice for each Python, so CI does not run it. It
takes about five minutes for each. `--python /path/to/python3` and `--way pip` select a part.
"""

import argparse
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.machine_load import read_stats, sum_tree_ticks
from tests.ports import find_free_port

ROOT = Path(__file__).resolve().parents[1]

# the longest wait for a ready server, with the compilation on a busy machine
START_TIMEOUT = 900.0
REQUEST_TIMEOUT = 60.0

# with a version and the prefix of a platform: x86_64-linux-gnu-g++-12
_COMPILERS = re.compile(r"(.*-)?(cc|c\+\+|gcc|g\+\+|clang|clang\+\+|c89|c99|icx|icpx)(-[\d.]+)?")

# configure package registries and certificates, which a user has set up before
_KEPT_VARIABLES = re.compile(r"PIP_.*|UV_.*|SSL_CERT_.*|\w+_CA_BUNDLE|(?i:https?|no|all)_proxy")

CHECKS = ("page", "chat", "run", "ps", "stop", "log", "exit")


class StepError(Exception):
    """A step that failed. The message contains its output."""


@dataclass
class Row:
    """One way with one Python. first: seconds from the first command to a ready server. cpu: CPU
    seconds of all processes until then. again: seconds of the second start. problems: what failed,
    by check."""

    python: str
    way: str
    home: str
    first: float | None = None
    cpu: float | None = None
    again: float | None = None
    problems: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Way:
    """home: the value of HOME, or None if it is unset. compiler: whether one is on PATH."""

    name: str
    home: str | None
    compiler: bool
    prepare: Callable[["Installation"], None]

    @property
    def uses_make(self) -> bool:
        return self.prepare is _clone


@dataclass(frozen=True)
class Installation:
    """python: the interpreter. folder: of this installation. environ: of all its commands. tools:
    the folder with pipx and uv."""

    python: Path
    folder: Path
    environ: Mapping[str, str]
    wheel: Path | None
    tools: Path

    @property
    def clone(self) -> Path:
        return self.folder / "my clone"

    @property
    def other_project(self) -> Path:
        return self.folder / "another project"

    @property
    def program(self) -> Path:
        """The installed command."""
        if self.clone.exists():
            return self.clone / ".venv/bin/mlxrunner"
        if (venv := self.folder / "my environment").exists():
            return venv / "bin/mlxrunner"
        return Path(self.environ["HOME"]) / ".local/bin/mlxrunner"

    def run(self, *command: str | Path, folder: Path | None = None) -> str:
        return run(*command, folder=folder or self.folder, environ=self.environ)


def run(*command: str | Path, folder: Path, environ: Mapping[str, str]) -> str:
    """Runs a command and returns its output. Raises StepError if it fails."""
    process = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if process.returncode:
        words = " ".join(map(str, command))
        raise StepError(f"{words}: status {process.returncode}\n{process.stdout}")
    return process.stdout


# How each way installs the project.


def _clone(installation: Installation) -> None:
    installation.run("git", "clone", "--quiet", ROOT, installation.clone)


def _make_other_project(installation: Installation) -> None:
    for name in ("app", "models"):
        package = installation.other_project / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"raise ImportError('a foreign package: {name}')\n")


def _install_with_pip(installation: Installation) -> None:
    _make_other_project(installation)
    environment = installation.folder / "my environment"
    installation.run(installation.python, "-m", "venv", environment)
    assert installation.wheel is not None
    installation.run(environment / "bin/pip", "install", "--quiet", installation.wheel)


def _install_with_pipx(installation: Installation) -> None:
    _make_other_project(installation)
    assert installation.wheel is not None
    pipx = installation.tools / "bin/pipx"
    installation.run(pipx, "install", "--python", installation.python, installation.wheel)


def _install_with_uv(installation: Installation) -> None:
    _make_other_project(installation)
    assert installation.wheel is not None
    uv = installation.tools / "bin/uv"
    installation.run(uv, "tool", "install", "--python", installation.python, installation.wheel)


EMPTY_FOLDER = "an empty folder"
WAYS = (
    Way("make", None, compiler=True, prepare=_clone),
    Way("make without a compiler", "", compiler=False, prepare=_clone),
    Way("pip", None, compiler=False, prepare=_install_with_pip),
    Way("pipx", EMPTY_FOLDER, compiler=False, prepare=_install_with_pipx),
    Way("uv", EMPTY_FOLDER, compiler=False, prepare=_install_with_uv),
)


def describe_home(home: str | None) -> str:
    return {None: "unset", "": "empty string"}.get(home, str(home))


def make_environ(
    environ: Mapping[str, str], *, home: str | None, path: str | Path
) -> dict[str, str]:
    """The variables of a new user: PATH, HOME, and the configuration of package registries."""
    kept = {name: value for name, value in environ.items() if _KEPT_VARIABLES.fullmatch(name)}
    return {**kept, "PATH": str(path), **({} if home is None else {"HOME": home})}


def link_programs(path: str, folder: Path) -> None:
    """Fills the folder with links to all programs on PATH, except for compilers."""
    folder.mkdir()
    for directory in filter(os.path.isdir, path.split(os.pathsep)):
        for program in Path(directory).iterdir():
            link = folder / program.name
            if not is_compiler(program.name) and not link.is_symlink():
                link.symlink_to(program)


def is_compiler(name: str) -> bool:
    return _COMPILERS.fullmatch(name) is not None


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


class Server:
    """A started server. command: without the port. Its output goes to a file."""

    def __init__(self, command: Sequence[str | Path], installation: Installation) -> None:
        self.port = find_free_port()
        uses_make = str(command[0]) == "make"
        port = (f"PORT={self.port}",) if uses_make else ("--port", str(self.port))
        self._log = installation.folder / "log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*map(str, command), *port],
                cwd=installation.clone if uses_make else installation.other_project,
                env=dict(installation.environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.url = f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        with httpx.Client(timeout=REQUEST_TIMEOUT) as client:  # creating one takes 30 ms
            while time.monotonic() < deadline:
                if self.process.poll() is not None:
                    raise StepError(f"the server has ended\n{self.log}")
                try:
                    if client.get(f"{self.url}/health").status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                time.sleep(0.1)
        raise StepError(f"not ready within {START_TIMEOUT:.0f} s\n{self.log}")

    def cpu_seconds(self) -> float:
        return sum_tree_ticks(read_stats(), self.process.pid) / os.sysconf("SC_CLK_TCK")

    def interrupt(self) -> str:
        """Presses Ctrl-C. Returns the problem, or nothing."""
        os.killpg(self.process.pid, signal.SIGINT)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()
            return "it did not end within 30 s after Ctrl-C"
        return f"Traceback at the end\n{self.log}" if "Traceback" in self.log else ""

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def check_server(server: Server, installation: Installation) -> dict[str, str]:
    """What failed, by check."""
    problems: dict[str, str] = {}
    checks: dict[str, Callable[[], str]] = {
        "page": lambda: check_page(server.url),
        "chat": lambda: check_chat(server.url),
        "run": lambda: check_run(installation, server.port),
        "ps": lambda: check_ps(installation, server.port),
        "stop": lambda: check_stop(installation, server.port),
        "log": lambda: check_log(server.log, server.port),
    }
    for name, check in checks.items():
        try:
            problem = check()
        except (StepError, httpx.HTTPError, ValueError, LookupError) as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            problems[name] = problem
    return problems


def check_page(url: str) -> str:
    page = httpx.get(url, headers={"Accept": "text/html"}, timeout=REQUEST_TIMEOUT)
    is_page = page.headers["content-type"].startswith("text/html") and "<title>" in page.text
    return "" if page.status_code == 200 and is_page else f"{page.status_code}: {page.text[:500]}"


def check_chat(url: str) -> str:
    body = {"model": "builtin", "messages": [{"role": "user", "content": "What is mlxrunner?"}]}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=REQUEST_TIMEOUT)
    text = answer.json()["choices"][0]["message"]["content"]
    return "" if "mlxrunner" in text else f"the answer is {text!r}"


def check_run(installation: Installation, port: int) -> str:
    """One word after the model, and a prompt without a model."""
    for words in (["builtin", "hello"], ["What is mlxrunner?"]):
        output = _use(installation, port, "run", *words)
        if not output.strip() or "Traceback" in output:
            return f"run {words} printed {output!r}"
    return ""


def check_ps(installation: Installation, port: int) -> str:
    output = _use(installation, port, "ps")
    return "" if re.search(r"^builtin\b", output, re.MULTILINE) else output


def check_stop(installation: Installation, port: int) -> str:
    output = _use(installation, port, "stop", "builtin") + _use(installation, port, "ps")
    return "" if "unloaded" in output and not re.search(r"^builtin +\d", output, re.M) else output


def _use(installation: Installation, port: int, command: str, *words: str) -> str:
    folder = installation.clone if installation.clone.exists() else installation.other_project
    return installation.run(
        *(installation.program, command, *words, "--port", str(port)), folder=folder
    )


def check_log(log: str, port: int) -> str:
    """The address, the model, and one line for each request."""
    patterns = (
        rf"running on http://127\.0\.0\.1:{port}\b",
        r"builtin is ready",
        r"POST /v1/chat/completions 200\b",
    )
    missing = [pattern for pattern in patterns if not re.search(pattern, log)]
    if "Traceback" in log:
        missing.append("no Traceback")
    return f"expected {', '.join(missing)} in\n{log}" if missing else ""


def try_way(way: Way, row: Row, installation: Installation, *, verbose: bool) -> None:
    """Installs, starts, uses and stops the project, starts it again, and fills the row."""
    began, used = time.monotonic(), _children_seconds()
    way.prepare(installation)
    command: list[str | Path] = [installation.program, "serve"]
    if way.uses_make:  # `make serve` is the first command
        began, used = time.monotonic(), _children_seconds()
        command = ["make", "serve", f"PYTHON={installation.python}"]
    for is_first in (True, False):
        started = time.monotonic()
        server = Server(command, installation)
        try:
            server.wait_until_ready()
            if is_first:
                row.first = time.monotonic() - began
                row.cpu = _children_seconds() - used + server.cpu_seconds()
                row.problems |= check_server(server, installation)
            else:
                row.again = time.monotonic() - started
            if problem := server.interrupt():
                row.problems["exit"] = problem
        finally:
            server.kill()
        if verbose:
            print(server.log, flush=True)


def try_python(python: Path, ways: Sequence[Way], folder: Path, *, verbose: bool) -> list[Row]:
    version = run(python, "-c", "import platform; print(platform.python_version())", **_HERE)
    compilerless = folder / "programs"
    if not compilerless.exists():
        link_programs(os.environ["PATH"], compilerless)
    rows: list[Row] = []
    wheel: Path | None = None
    for way in ways:
        place = folder / f"{version.strip()} {way.name}"
        (place / "home").mkdir(parents=True)
        home = str(place / "home") if way.home == EMPTY_FOLDER else way.home
        path = os.environ["PATH"] if way.compiler else str(compilerless)
        environ = make_environ(os.environ, home=home, path=path)
        row = Row(version.strip(), way.name, describe_home(way.home))
        rows.append(row)
        try:
            if not way.uses_make:
                wheel = wheel or build_wheel(python, folder / f"{version.strip()} wheel")
            installation = Installation(python, place, environ, wheel, folder / "tools")
            try_way(way, row, installation, verbose=verbose)
        except StepError as error:
            row.problems["failed"] = str(error)
        print(format_table([row]).splitlines()[-1], flush=True)
        for check, problem in row.problems.items():
            print(f"{version.strip()}, {way.name}, {check}: {problem}", flush=True)
        shutil.rmtree(place)
    return rows


_HERE = {"folder": ROOT, "environ": os.environ}


def build_wheel(python: Path, folder: Path) -> Path:
    """A wheel with the kernels, built as pip builds it, from a clone."""
    folder.mkdir()
    began = time.monotonic()
    environ = make_environ(os.environ, home=None, path=os.environ["PATH"])
    clone = folder / "my clone"
    run("git", "clone", "--quiet", ROOT, clone, folder=folder, environ=environ)
    run(python, "-m", "pip", "wheel", "--no-deps", ".", folder=clone, environ=environ)
    [wheel] = clone.glob("*.whl")
    print(f"built {wheel.name} in {time.monotonic() - began:.0f} s", flush=True)
    return wheel


def format_table(rows: Sequence[Row]) -> str:
    """A table in Markdown, with a cell for each check."""
    head = ("Python", "way", "HOME", "to /health", "CPU", "second start", *CHECKS)
    lines = [head, ("---",) * len(head)]
    for row in rows:
        numbers = [
            "–" if one is None else f"{one:.1f} s" for one in (row.first, row.cpu, row.again)
        ]
        # no check has run if the installation or the start failed
        ran = row.again is not None
        cells = ["FAILED" if name in row.problems else "ok" if ran else "–" for name in CHECKS]
        lines.append((row.python, row.way, row.home, *numbers, *cells))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def find_pythons() -> list[Path]:
    lines = run(ROOT / ".ci/interpreters", **_HERE).splitlines()
    return [Path(line.partition(" ")[2]) for line in lines]


def main(arguments: Sequence[str] | None = None) -> int:
    description = "Install and use this project as a new user would."
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--python", type=Path, action="append", help="default: all that run here")
    parser.add_argument("--way", choices=[way.name for way in WAYS], action="append")
    parser.add_argument("--verbose", action="store_true", help="print the log of each server")
    options = parser.parse_args(arguments)
    ways = [way for way in WAYS if way.name in (options.way or [way.name])]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="a new user ") as name:
        folder = Path(name)
        run(sys.executable, "-m", "venv", folder / "tools", **_HERE)
        run(folder / "tools/bin/pip", "install", "--quiet", "pipx", "uv", **_HERE)
        for python in options.python or find_pythons():
            rows += try_python(python, ways, folder, verbose=options.verbose)
    print(f"\n{format_table(rows)}")
    return 1 if any(row.problems for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
