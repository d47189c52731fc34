"""Downloads llama.cpp's server tests into build/llama.cpp, for `make clients`.

Knows: the source distribution in requirements/llama-cpp.txt, which contains them. Must not know:
the tests. Nothing of it is installed or enters the repository.
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
LOCK = ROOT / "requirements" / "llama-cpp.txt"
FOLDER = ROOT / "build" / "llama.cpp"
STAMP = FOLDER / ".installed"

# folders of llama.cpp that the tests read
WANTED = ("tools/server/tests/", "models/templates/")


def download() -> str | None:
    """Returns why the tests could not be downloaded, or None."""
    with tempfile.TemporaryDirectory() as temporary:
        # pip reads the metadata of a source distribution with its build tools, which .venv has
        options = ("--no-deps", "--no-build-isolation", "--no-binary=:all:", "--require-hashes")
        command = [sys.executable, "-m", "pip", "download", "--quiet", *options]
        command += ["--disable-pip-version-check", "--dest", temporary, "--requirement", str(LOCK)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines()
            return lines[-1] if lines else f"pip ended with status {done.returncode}"
        [archive] = Path(temporary).iterdir()
        shutil.rmtree(FOLDER, ignore_errors=True)
        with tarfile.open(archive) as source:
            source.extractall(FOLDER, members=_select(source), filter="data")
    STAMP.touch()
    return None


def _select(source: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yields the wanted files, with their paths in llama.cpp."""
    for member in source:
        _, _, path = member.name.partition("/vendor/llama.cpp/")
        if member.isfile() and path.startswith(WANTED):
            yield member.replace(name=path)


if __name__ == "__main__":
    problem = download()
    if problem is not None:
        print(f"llama.cpp's server tests could not be downloaded: {problem}", file=sys.stderr)
