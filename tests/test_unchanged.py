"""The digest covers the files that the tests marked `emulation` depend on, and no others."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import unchanged

FILES = {
    "models/llama.py": "from models import layers\n",
    "models/kernels/src/simd.hpp": "int x;\n",
    "models/builtin/config.json": "{}",
    "app/engine/sampling/draw.py": "from app.core import sampling_params\n",
    "app/engine/loop.py": "",
    "app/core/sampling_params.py": "",
    "requirements/serve.txt": "mlx==0.32.4\n",
    "requirements/dev.txt": "pytest==9\n",
    "tests/models/kernels/test_tiles.py": (
        "import pytest\nfrom tests.models import parity\n"
        f"@{unchanged.MARK}\ndef test_tiles(): pass\n"
    ),
    "tests/models/kernels/driver.cpp": "int main() {}\n",
    "tests/models/parity.py": "",
    "tests/models/test_llama.py": "import pytest\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_files(tmp_path / "checkout")


def write_files(folder: Path) -> Path:
    for path, text in FILES.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def edit(root: Path, how: str, path: str) -> None:
    """how: `change`, `add`, `remove`, `rename`, `mode` or `line endings`."""
    file = root / path
    match how:
        case "change":
            file.write_text("# changed\n" + file.read_text())
        case "add":
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("new")
        case "remove":
            file.unlink()
        case "rename":
            file.rename(file.with_stem("renamed"))
        case "mode":
            file.chmod(0o755)
        case _:
            file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))


@pytest.mark.parametrize(
    ("how", "path"),
    [
        ("change", "models/llama.py"),
        ("change", "models/kernels/src/simd.hpp"),
        ("change", "app/engine/sampling/draw.py"),
        ("change", "requirements/serve.txt"),
        ("change", "tests/models/kernels/test_tiles.py"),
        ("change", "tests/models/kernels/driver.cpp"),
        # these two are imported
        ("change", "app/core/sampling_params.py"),
        ("change", "tests/models/parity.py"),
        ("add", "models/qwen3.py"),
        ("add", "models/kernels/src/new/simd.cpp"),
        ("remove", "models/llama.py"),
        ("remove", "requirements/serve.txt"),
        ("rename", "models/llama.py"),
    ],
)
def test_a_changed_added_or_removed_file_changes_the_digest(
    root: Path, how: str, path: str
) -> None:
    before = unchanged.compute_digest(root)
    edit(root, how, path)
    assert unchanged.compute_digest(root) != before


@pytest.mark.parametrize(
    ("how", "path"),
    [
        ("change", "app/engine/loop.py"),
        ("change", "requirements/dev.txt"),
        ("change", "models/builtin/config.json"),
        ("change", "tests/models/test_llama.py"),
        ("add", "tools/builtin_model/train.py"),
        ("add", "models/__pycache__/llama.cpython-311.pyc"),
        ("add", "models/kernels/_kernels.cpython-311-x86_64-linux-gnu.so"),
        ("add", "models/kernels/not_built.txt"),
        ("add", "models/.DS_Store"),
        ("add", "docs/page.md"),
        ("mode", "models/llama.py"),
        ("line endings", "models/llama.py"),
    ],
)
def test_other_edits_do_not_change_the_digest(root: Path, how: str, path: str) -> None:
    before = unchanged.compute_digest(root)
    edit(root, how, path)
    assert unchanged.compute_digest(root) == before


def test_the_digest_does_not_depend_on_the_folder(root: Path, tmp_path: Path) -> None:
    other = write_files(tmp_path / "somewhere" / "else")
    assert unchanged.compute_digest(other) == unchanged.compute_digest(root)


def test_the_tests_are_unchanged_after_they_were_recorded(root: Path) -> None:
    assert not unchanged.is_unchanged(root)
    (root / unchanged.RECORD).write_text('{"other-machine": "0"}')
    assert not unchanged.is_unchanged(root)
    unchanged.record(root)
    assert unchanged.is_unchanged(root)
    known = json.loads((root / unchanged.RECORD).read_text())
    assert known == {
        "other-machine": "0",
        unchanged.find_platform(): unchanged.compute_digest(root),
    }
    edit(root, "change", "models/llama.py")
    assert not unchanged.is_unchanged(root)


@pytest.mark.parametrize(
    ("recorded_on", "counts"),
    [
        ("linux-x86_64-avx2", True),
        ("linux-x86_64-avx2-avx512f-avx512_vnni-amx_int8", True),
        ("linux-x86_64", False),
        ("linux-x86_64-avx512f", False),
        ("darwin-x86_64-avx2", False),
        ("linux-aarch64-avx2", False),
    ],
)
def test_a_machine_with_more_instruction_sets_runs_more_tests(
    root: Path, monkeypatch: pytest.MonkeyPatch, recorded_on: str, counts: bool
) -> None:
    monkeypatch.setattr(unchanged, "find_platform", lambda: recorded_on)
    unchanged.record(root)
    monkeypatch.setattr(unchanged, "find_platform", lambda: "linux-x86_64-avx2")
    assert unchanged.is_unchanged(root) is counts


class Pytest:
    """Replaces the run of the tests. meanwhile: what happens while they run."""

    def __init__(self, status: int, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.status, self.meanwhile = status, meanwhile
        self.command: list[str] = []

    def __call__(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.command = command
        self.meanwhile()
        return subprocess.CompletedProcess(command, self.status)


@pytest.fixture
def _compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")


@pytest.mark.usefixtures("_compiler")
def test_the_command_records_a_run_that_passed(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert unchanged.main([], root) == 0
    assert "have not passed" in capsys.readouterr().out
    run = Pytest(0)
    monkeypatch.setattr(subprocess, "run", run)
    assert unchanged.main(["--record"], root) == 0
    assert "tests/models/kernels/test_tiles.py" in run.command
    assert "tests/models/test_llama.py" not in run.command
    capsys.readouterr()
    assert unchanged.main([], root) == 0
    assert "have passed" in capsys.readouterr().out


@pytest.mark.usefixtures("_compiler")
def test_a_failed_run_is_not_recorded(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", Pytest(1))
    assert unchanged.main(["--record"], root) == 1
    assert not (root / unchanged.RECORD).exists()


@pytest.mark.usefixtures("_compiler")
def test_a_run_during_which_files_changed_is_not_recorded(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Pytest(0, lambda: edit(root, "change", "models/llama.py"))
    monkeypatch.setattr(subprocess, "run", run)
    assert unchanged.main(["--record"], root) == 1
    assert "files changed" in capsys.readouterr().err
    assert not (root / unchanged.RECORD).exists()


def test_without_a_compiler_nothing_is_recorded(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Most tests would be skipped."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(subprocess, "run", None)
    assert unchanged.main(["--record"], root) == 1
    assert "C++ compiler" in capsys.readouterr().err


def test_the_files_of_this_repository_are_found() -> None:
    """Sources and drivers of the kernels, the sampling, the tests, and nothing generated."""
    files = set(unchanged.list_files())
    assert files >= {
        "models/kernels/src/isa_avx512_amx.cpp",
        "app/engine/sampling/draw.py",
        "app/core/sampling_params.py",
        "tests/models/kernels/amx_emulator.hpp",
        "tests/models/kernels/test_sanitizers.py",
        "tests/models/parity.py",
        "requirements/serve.txt",
    }
    assert "tests/unchanged.py" not in files
    assert not [path for path in files if path.endswith(".so") or "builtin" in path]
