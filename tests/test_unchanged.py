"""A digest covers the files that the marked tests of a file depend on, and no others."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import conftest, unchanged

FILES = {
    "models/llama.py": "from models import layers\n",
    "models/kernels/src/simd.hpp": "int x;\n",
    "models/builtin/config.json": "{}",
    "app/engine/sampling/draw.py": "from app.core import sampling_params\n",
    "app/engine/loop.py": "",
    "app/engine/prefix/cache.py": "policy = import_module(f'app.engine.prefix.{name}')\n",
    "app/engine/prefix/radix.py": "from app.core import prefixes\n",
    "app/core/prefixes.py": "",
    "app/core/sampling_params.py": "",
    "requirements/serve.txt": "mlx==0.32.4\n",
    "requirements/dev.txt": "pytest==9\n",
    "tests/models/kernels/test_tiles.py": (
        "import pytest\nfrom tests.models import parity\n"
        f"@{unchanged.MARK}\ndef test_tiles(): pass\n"
    ),
    "tests/engine/test_images.py": (
        f"from app.engine.prefix import cache\npytestmark = {unchanged.MARK}\n"
    ),
    "tests/models/kernels/driver.cpp": "int main() {}\n",
    "tests/models/parity.py": "",
    "tests/models/test_llama.py": "import pytest\n",
}
TILES, IMAGES = "tests/models/kernels/test_tiles.py", "tests/engine/test_images.py"


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
    ("how", "path", "tests"),
    [
        ("change", "models/llama.py", {TILES, IMAGES}),
        ("change", "models/kernels/src/simd.hpp", {TILES, IMAGES}),
        ("change", "models/builtin/config.json", {TILES, IMAGES}),
        ("change", "app/engine/sampling/draw.py", {TILES, IMAGES}),
        ("change", "requirements/serve.txt", {TILES, IMAGES}),
        ("change", "requirements/dev.txt", {TILES, IMAGES}),
        ("change", "tests/models/kernels/test_tiles.py", {TILES}),
        ("change", "tests/models/kernels/driver.cpp", {TILES}),
        # these are imported
        ("change", "app/core/sampling_params.py", {TILES, IMAGES}),
        ("change", "tests/models/parity.py", {TILES}),
        ("change", "app/engine/prefix/cache.py", {IMAGES}),
        # by a name that is known when the program runs
        ("change", "app/engine/prefix/radix.py", {IMAGES}),
        ("change", "app/core/prefixes.py", {IMAGES}),
        ("add", "app/engine/prefix/slots.py", {IMAGES}),
        ("add", "models/qwen3.py", {TILES, IMAGES}),
        ("add", "models/kernels/src/new/simd.cpp", {TILES, IMAGES}),
        ("remove", "models/llama.py", {TILES, IMAGES}),
        ("remove", "requirements/serve.txt", {TILES, IMAGES}),
        ("rename", "models/llama.py", {TILES, IMAGES}),
    ],
)
def test_a_changed_added_or_removed_file_changes_the_digests_of_tests_that_depend_on_it(
    root: Path, how: str, path: str, tests: set[str]
) -> None:
    before = unchanged.compute_digests(root)
    edit(root, how, path)
    after = unchanged.compute_digests(root)
    assert {test for test, digest in after.items() if digest != before[test]} == tests


@pytest.mark.parametrize(
    ("how", "path"),
    [
        ("change", "app/engine/loop.py"),
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
def test_other_edits_change_no_digest(root: Path, how: str, path: str) -> None:
    before = unchanged.compute_digests(root)
    assert before.keys() == {TILES, IMAGES}
    edit(root, how, path)
    assert unchanged.compute_digests(root) == before


def test_digests_do_not_depend_on_the_folder(root: Path, tmp_path: Path) -> None:
    other = write_files(tmp_path / "somewhere" / "else")
    assert unchanged.compute_digests(other) == unchanged.compute_digests(root)


def test_the_tests_are_unchanged_after_they_were_recorded(root: Path) -> None:
    assert unchanged.find_unchanged(root) == set()
    others = {"other-machine": {TILES: "0"}}
    (root / unchanged.RECORD).write_text(json.dumps(others))
    assert unchanged.find_unchanged(root) == set()
    digests = unchanged.compute_digests(root)
    unchanged.record(digests, root)
    assert unchanged.find_unchanged(root) == {TILES, IMAGES}
    known = json.loads((root / unchanged.RECORD).read_text())
    assert known == {**others, unchanged.find_platform(): digests}
    edit(root, "change", "app/core/prefixes.py")
    assert unchanged.find_unchanged(root) == {TILES}
    edit(root, "change", "models/llama.py")
    assert unchanged.find_unchanged(root) == set()


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
    unchanged.record(unchanged.compute_digests(root), root)
    monkeypatch.setattr(unchanged, "find_platform", lambda: "linux-x86_64-avx2")
    assert bool(unchanged.find_unchanged(root)) is counts


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
    assert capsys.readouterr().out == f"changed    {IMAGES}\nchanged    {TILES}\n"
    run = Pytest(0)
    monkeypatch.setattr(subprocess, "run", run)
    assert unchanged.main(["--record"], root) == 0
    assert [word for word in run.command if word.endswith(".py")] == [IMAGES, TILES]
    capsys.readouterr()
    assert unchanged.main([], root) == 0
    assert capsys.readouterr().out == f"unchanged  {IMAGES}\nunchanged  {TILES}\n"
    # only those that depend on a change run again
    edit(root, "change", "app/core/prefixes.py")
    assert unchanged.main(["--record"], root) == 0
    assert [word for word in run.command if word.endswith(".py")] == [IMAGES]
    assert unchanged.find_unchanged(root) == {TILES, IMAGES}


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
    found = unchanged.list_dependencies()
    sanitizers = found["tests/models/kernels/test_sanitizers.py"]
    assert sanitizers >= {
        "models/kernels/src/isa_avx512_amx.cpp",
        "app/engine/sampling/draw.py",
        "app/core/sampling_params.py",
        "tests/models/kernels/amx_emulator.hpp",
        "tests/models/kernels/test_sanitizers.py",
        "requirements/serve.txt",
    }
    assert "app/engine/loop.py" not in sanitizers
    assert {"app/engine/loop.py", "app/engine/prefix/radix.py"} <= found[IMAGES]
    for paths in found.values():
        assert "tests/unchanged.py" not in paths
        assert not [path for path in paths if path.endswith((".so", ".pyc"))]


def test_a_marked_file_that_is_unchanged_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of two marked files, one is unchanged. pytest runs in this process, as in a worker."""
    other = "tests/models/test_gpu_layout.py"
    collected: list[str] = []

    class Plugin:
        def pytest_collection_finish(self, session: pytest.Session) -> None:
            collected.extend(item.nodeid.partition("::")[0] for item in session.items)

    monkeypatch.setattr(conftest, "find_unchanged", lambda: frozenset({TILES}))
    arguments = [TILES, other, "--collect-only", "-q", "-p", "no:cacheprovider"]
    with monkeypatch.context() as patch:
        patch.delenv("PYTEST_XDIST_WORKER", raising=False)
        for options, files in ((["--skip-unchanged"], {other}), ([], {TILES, other})):
            collected.clear()
            pytest.main([*arguments, *options, "-m", "recorded"], [Plugin()])
            assert set(collected) == files
    assert "tests marked recorded of 1 files are left out" in capfd.readouterr().out
