"""Installs mlxrunner from this source tree into a virtual environment, from the hashed locks.

    python3 deploy/install.py /opt/mlxrunner            a copy of the package, for a service
    python3 deploy/install.py .venv --editable          as `make` does

Knows: uv, pip, the locks. Must not know: the build of the package (pyproject.toml,
deploy/wheel/backend.py, models/kernels/CMakeLists.txt).

Only the standard library is used, because this runs before anything is installed. The build tools
are installed into a separate folder, build/tools, which is on the path only while the package is
built. They are therefore not in the environment that serves, and every download has a hash.

uv is used if it is installed, because it is several times as fast as pip. uv does not read pip's
configuration. If pip is configured to use another index and uv is not, pip is used. pip is also
used if uv fails.
"""

import argparse
import configparser
import importlib.metadata
import math
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "requirements"
PIP = ("-m", "pip", "--disable-pip-version-check")
# The time in seconds to compile the kernels with one job (110 s with two processors).
COMPILE_SECONDS = 240

# The seconds between two updates of the compiled files, on a terminal and in a log.
TERMINAL_SECONDS, LOG_SECONDS = 0.5, 15.0

# Python compiles the modules that it imports. Compiling every installed module would take longer
# than that.
LOCKED = ("--require-hashes", "--only-binary=:all:", "--no-compile")


class InstallError(Exception):
    """The installation failed. The message contains the output of the failed command."""


@dataclass(frozen=True)
class Installer:
    """Installs packages with uv, or with pip if `uv` is None. clear: whether an existing
    environment is deleted first."""

    environment: Path
    uv: str | None
    clear: bool

    @property
    def python(self) -> Path:
        return self.environment / "bin" / "python"

    def create(self) -> None:
        """Creates the environment, with pip, because the documents name `.venv/bin/pip`."""
        # ensurepip compiles all of pip, which takes three seconds
        options = ("--without-pip",) if self.uv or _has_pip() else ()
        # a service continues to run in its environment during an upgrade
        clear = ("--clear",) if self.clear else ()
        run(sys.executable, "-m", "venv", *clear, *options, str(self.environment))
        if options:
            with extract_lock("pip") as lock:
                self.install_lock(lock)

    def install_lock(self, lock: Path, *, target: Path | None = None) -> None:
        """Installs a lock into the environment, or into the folder `target`."""
        into = ("--target", str(target)) if target else ()
        hashed = ("--require-hashes", "--only-binary", ":all:", "-r", str(lock))
        if self.uv and self._try_uv(*self._uv_install, *hashed, *into):
            return
        run(*self._pip_install, *LOCKED, "-r", str(lock), *into)

    def install_project(self, *, editable: bool, environ: Mapping[str, str]) -> None:
        project = (*(("--editable",) if editable else ()), str(ROOT))
        options = ("--no-build-isolation", "--no-deps")
        command = self._uv_install + options + ("--reinstall",)
        # uv expects the name in pyproject.toml, but the build for CUDA has a different one
        renamed = "MLXRUNNER_BUILD_FOR" in environ
        if self.uv and not renamed and self._try_uv(*command, *project, environ=environ):
            return
        run(*self._pip_install, *options, *project, environ=environ)

    @property
    def _uv_install(self) -> tuple[str, ...]:
        return ("pip", "install", "--quiet", "--python", str(self.python))

    @property
    def _pip_install(self) -> tuple[str, ...]:
        if Path(sys.executable) == self.python or not _has_pip():
            return (str(self.python), *PIP, "install", "--quiet")
        return (sys.executable, *PIP, "--python", str(self.python), "install", "--quiet")

    def _try_uv(self, *arguments: str, environ: Mapping[str, str] | None = None) -> bool:
        try:
            run(str(self.uv), *arguments, environ=environ)
        except (InstallError, OSError) as error:
            [*_, reason] = ["", *filter(None, map(str.strip, str(error).splitlines()))]
            print(f"\nuv failed, so pip is used ({reason})", file=sys.stderr, flush=True)
            return False
        return True


def _has_pip() -> bool:
    """Returns whether this Python has a pip that can install into another environment (--python
    exists since 22.3)."""
    try:
        major, minor = importlib.metadata.version("pip").split(".")[:2]
    except importlib.metadata.PackageNotFoundError:
        return False
    return (int(major), int(minor)) >= (22, 3)


@contextmanager
def extract_lock(package: str, lock: Path = LOCKS / "build.txt") -> Iterator[Path]:
    """Yields a lock with only this package of a lock."""
    text = lock.read_text("utf-8")
    [entry] = [part for part in re.split(r"(?m)^(?=\w)", text) if part.startswith(f"{package}==")]
    with tempfile.TemporaryDirectory() as folder:
        extracted = Path(folder, "lock.txt")
        extracted.write_text(entry, "utf-8")
        yield extracted


def run(*command: str, environ: Mapping[str, str] | None = None) -> None:
    """Runs a command. Raises InstallError with its output if it fails."""
    process = subprocess.run(
        command,
        env=None if environ is None else dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if process.returncode:
        raise InstallError(f"{' '.join(command)}\n{process.stdout.strip()}")


@contextmanager
def step(
    number: int, text: str, *, steps: int = 4, progress_log: Path | None = None
) -> Iterator[None]:
    """Prints a step and the seconds that it took, in one line. progress_log: a folder in which
    Ninja's output is written. On a terminal, the line then shows the compiled files. Otherwise, a
    longer step writes a line with them at intervals."""
    line = f"[{number}/{steps}] {text} …"
    print(line, end="", flush=True)
    began, stop = time.time(), threading.Event()
    progress = _Progress(line, began, rewrites=sys.stdout.isatty())
    thread = None
    if progress_log is not None:
        thread = threading.Thread(target=progress.follow, args=(progress_log, stop))
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if thread is not None:
            thread.join()
            progress.finish()
    print(f" {time.time() - began:.0f} s", flush=True)


class _Progress:
    """Shows how many files are compiled. rewrites: whether the line can be written again."""

    def __init__(self, line: str, began: float, *, rewrites: bool) -> None:
        self._line = line
        self._began = began
        self._rewrites = rewrites
        self._shown = ""

    def follow(self, folder: Path, stop: threading.Event) -> None:
        """Shows the progress until `stop` is set."""
        while not stop.wait(TERMINAL_SECONDS if self._rewrites else LOG_SECONDS):
            for log in folder.glob("*/log-build.txt"):
                done = re.findall(rb"^\[([1-9]\d*/\d+)\]", log.read_bytes(), re.MULTILINE)
                if done and log.stat().st_mtime >= self._began:
                    self._show(done[-1].decode())

    def finish(self) -> None:
        """Returns to a line that ends with the text of the step."""
        if self._shown and not self._rewrites:
            print()
        if self._shown or self._rewrites:
            print(f"\r\x1b[K{self._line}" if self._rewrites else self._line, end="")

    def _show(self, done: str) -> None:
        if done == self._shown:
            return
        self._shown = done
        if self._rewrites:
            print(f"\r\x1b[K{self._line} {done}", end="", flush=True)
        else:
            seconds = time.time() - self._began
            print(f"\n      {done} files after {seconds:.0f} s", end="", flush=True)


def find_uv(environ: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Returns the path of uv, or None and the reason why an installed uv is not used."""
    uv = shutil.which("uv", path=environ.get("PATH"))
    if uv is None or _has_uv_index(environ):
        return uv, None
    option = find_pip_index(environ)
    if option is None:
        return uv, None
    return None, f"pip is used: {option} is set for pip, but no index is set for uv"


def _has_uv_index(environ: Mapping[str, str]) -> bool:
    names = ("UV_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX", "UV_NO_INDEX", "UV_CONFIG_FILE")
    config = environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    files = (Path(config, "uv/uv.toml"), Path("/etc/uv/uv.toml"))
    return any(environ.get(name) for name in names) or any(file.is_file() for file in files)


def find_pip_index(environ: Mapping[str, str]) -> str | None:
    """Returns the option of pip's configuration that replaces the public index, or None. An
    additional index is no reason to avoid uv, because pip also uses the public one."""
    for option in ("index-url", "no-index"):
        if environ.get(f"PIP_{option.upper().replace('-', '_')}"):
            return option
    home = os.path.expanduser("~")
    config = environ.get("XDG_CONFIG_HOME") or f"{home}/.config"
    files = [
        *("/etc/xdg/pip/pip.conf", "/etc/pip.conf", f"{home}/.pip/pip.conf"),
        *(f"{home}/Library/Application Support/pip/pip.conf", f"{config}/pip/pip.conf"),
    ]
    if environ.get("PIP_CONFIG_FILE") == os.devnull:
        files = []
    elif extra := environ.get("PIP_CONFIG_FILE"):
        files.append(extra)
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read(files, encoding="utf-8")
    except (configparser.Error, OSError, UnicodeDecodeError):
        return "an unreadable configuration"
    for section in ("global", "install"):
        for option in ("index-url", "no-index"):
            if parser.has_option(section, option):
                return option
    return None


def install_packages(installer: Installer, lock: Path) -> None:
    """Creates the environment, with the packages of a lock."""
    version = ".".join(map(str, sys.version_info[:3]))
    place = os.path.relpath(installer.environment)
    with step(1, f"creating {place} with Python {version}"):
        installer.create()
    with step(2, describe_lock(installer, lock)):
        installer.install_lock(lock)


def add_uv(installer: Installer, lock: Path, environ: Mapping[str, str]) -> Installer:
    """Returns an installer that uses the uv of a lock, which is installed first. pip takes two
    seconds for it, and much longer for all packages."""
    if installer.uv or not re.search(r"(?m)^uv==", lock.read_text("utf-8")):
        return installer
    with extract_lock("uv", lock) as only:
        installer.install_lock(only)
    uv, _ = find_uv({**environ, "PATH": str(installer.environment / "bin")})
    return replace(installer, uv=uv)


def describe_lock(installer: Installer, lock: Path) -> str:
    """Returns the text of the step. Some packages are for other platforms only."""
    count = len(re.findall(r"^[\w.-]+==", lock.read_text("utf-8"), re.MULTILINE))
    return f"installing about {count} packages with {'uv' if installer.uv else 'pip'}"


def install_project(installer: Installer, *, cuda: bool, editable: bool) -> None:
    """Builds and installs the package, with the kernels if this machine can compile them."""
    compiles = not cuda and sys.platform == "linux" and find_compiler(os.environ) is not None
    tools = install_tools(installer, with_cmake=compiles)
    path = os.pathsep.join(filter(None, (str(tools), os.environ.get("PYTHONPATH"))))
    # scikit-build-core looks for Ninja in the environment and on PATH
    programs = os.pathsep.join((str(tools / "bin"), os.environ.get("PATH", os.defpath)))
    environ = {**os.environ, "PYTHONPATH": path, "PATH": programs}
    environ.pop("PYTHONHOME", None)
    text = describe_compilation(environ) if compiles else "installing mlxrunner"
    if cuda:
        environ["MLXRUNNER_BUILD_FOR"] = "cuda"
    with step(4, text, progress_log=ROOT / "build" / "kernels" if compiles else None):
        installer.install_project(editable=editable, environ=environ)


def describe_compilation(environ: Mapping[str, str]) -> str:
    """Returns the text of the step, with the expected time for the number of parallel jobs."""
    given = environ.get("CMAKE_BUILD_PARALLEL_LEVEL", "")
    jobs = int(given) if given.isdecimal() and int(given) else _count_processors()
    minutes = max(1, math.ceil(COMPILE_SECONDS / 60 / jobs))
    time_needed = "about a minute" if minutes == 1 else f"about {minutes} minutes"
    number = "one job" if jobs == 1 else f"{jobs} jobs"
    return f"compiling the CPU kernels with {number}, {time_needed}"


def _count_processors() -> int:
    """Returns the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def find_compiler(environ: Mapping[str, str]) -> str | None:
    """Returns the C++ compiler, or None if the kernels are not compiled."""
    if environ.get("MLXRUNNER_BUILD_KERNELS") == "0":
        return None
    names = (*environ.get("CXX", "").split()[:1], "c++", "g++", "clang++")
    return next(filter(None, map(shutil.which, names)), None)


def install_tools(installer: Installer, *, with_cmake: bool) -> Path:
    """Installs the build tools, unless they are installed, and returns their folder. Without
    CMake, setuptools is sufficient."""
    # one folder per Python, because the wheels differ
    kind = str(sysconfig.get_config_var("SOABI")) if with_cmake else "setuptools"
    folder = ROOT / "build" / "tools" / kind
    stamp = folder / "lock.txt"
    found = nullcontext(LOCKS / "build.txt") if with_cmake else extract_lock("setuptools")
    with step(3, "installing the build tools"), found as lock:
        if not (stamp.is_file() and stamp.read_bytes() == lock.read_bytes()):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent) as name:
                new = Path(name, "tools")
                installer.install_lock(lock, target=new)
                shutil.copy(lock, new / stamp.name)
                shutil.rmtree(folder, ignore_errors=True)
                new.rename(folder)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description="Install mlxrunner into a virtual environment.")
    parser.add_argument("environment", type=Path)
    parser.add_argument("--cuda", action="store_true", help="for NVIDIA GPUs on Linux")
    parser.add_argument(
        "--editable",
        action="store_true",
        help="run from this source tree; an existing environment is deleted first",
    )
    parser.add_argument(
        "--only", choices=("packages", "project"), help="only steps 1 and 2, or only 3 and 4"
    )
    parser.add_argument(
        "--add", type=Path, metavar="LOCK", help="only add the packages of a lock to an environment"
    )
    arguments = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036  # any Python may run this script
        parser.error("mlxrunner needs Python 3.11 or newer")
    uv, note = find_uv(os.environ)
    if note:
        print(note, file=sys.stderr)
    installer = Installer(
        environment=arguments.environment.absolute(), uv=uv, clear=arguments.editable
    )
    try:
        if arguments.add:
            installer = add_uv(installer, arguments.add, os.environ)
            with step(1, describe_lock(installer, arguments.add), steps=1):
                installer.install_lock(arguments.add)
            return 0
        if arguments.only != "project":
            install_packages(installer, LOCKS / f"{'cuda' if arguments.cuda else 'serve'}.txt")
        if arguments.only != "packages":
            install_project(installer, cuda=arguments.cuda, editable=arguments.editable)
    except (InstallError, OSError) as error:
        print(f"\nmlxrunner could not be installed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; the same command starts again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
