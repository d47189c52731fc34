"""Whether the tests of the kernels' emulation and of compiled chains must run again.

    python -m tests.unchanged             print the state
    python -m tests.unchanged --record    run these tests, and record that they passed

Tests marked `emulation` compile the kernels for sanitizers and emulated processors, or chains of
operations as on a GPU. They take minutes. Their results depend only on a few files: models/, the
sampling, and the tests themselves with all modules that they import. For each platform,
`tests/unchanged.json` contains the digest of these files with which the tests last passed. CI runs
the tests unless the digest is still the same. `make test-all` always runs them.

Knows: the files that these tests depend on. Must not know: what they test, git, CI.

The digest is of names and contents, so it is the same in each checkout and in an archive of the
sources.
"""

import argparse
import ast
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = "tests/unchanged.json"
MARK = "pytest.mark.emulation"

# The built-in model is data, and no test marked `emulation` uses it.
FOLDERS = ("models", "app/engine/sampling")
LEFT_OUT = ("models/builtin",)
FILES = ("requirements/serve.txt",)

# As in /proc/cpuinfo.
INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_vnni", "amx_int8")

# These folders are searched for marked tests.
TESTS = ("tests/models", "tests/engine")


def is_unchanged(root: Path = ROOT) -> bool:
    """Whether the tests have passed with the same files on a machine of this kind, or on one with
    more instruction sets: the tests use each that the machine has."""
    recorded = read_record(root)
    platforms = [name for name in recorded if _includes(name, find_platform())]
    digest = compute_digest(root) if platforms else ""
    return any(recorded[name] == digest for name in platforms)


def _includes(platform_: str, other: str) -> bool:
    """Whether a platform has the system, the architecture and the instruction sets of the other."""
    system, sets = platform_.split("-")[:2], platform_.split("-")[2:]
    return system == other.split("-")[:2] and set(sets) >= set(other.split("-")[2:])


def find_platform() -> str:
    """For example darwin-arm64 or linux-x86_64-avx2: with the instruction sets on which it depends
    which tests can run."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text("utf-8").split() if cpuinfo.exists() else []
    found = [name for name in INSTRUCTION_SETS if name in flags]
    return "-".join([sys.platform, platform.machine(), *found])


def read_record(root: Path = ROOT) -> dict[str, str]:
    """The digest of each platform. Without the file, none is known."""
    try:
        return json.loads((root / RECORD).read_text("utf-8"))
    except FileNotFoundError:
        return {}


def record(root: Path = ROOT) -> None:
    """Records the digest for this platform. The other platforms keep theirs."""
    known = read_record(root) | {find_platform(): compute_digest(root)}
    text = json.dumps(known, indent=2, sort_keys=True) + "\n"
    (root / RECORD).write_text(text, encoding="utf-8", newline="\n")


def compute_digest(root: Path = ROOT) -> str:
    """SHA-256 of the sorted paths and of the contents. Line endings are Unix's."""
    digest = hashlib.sha256()
    for path in list_files(root):
        content = (root / path).read_bytes().replace(b"\r\n", b"\n")
        digest.update(f"{path} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def list_files(root: Path = ROOT) -> list[str]:
    """The paths of the files that the marked tests depend on, relative and sorted."""
    marked = list_marked_tests(root)
    found = {*FILES, *(path for folder in FOLDERS for path in _walk(root, folder))}
    found |= _follow_imports(root, {*marked, *_walk_python(root, "app/engine/sampling")})
    # programs in C++ that tests compile, and their headers
    for folder in {os.path.dirname(path) for path in marked}:
        found |= {path for path in _walk(root, folder) if not path.endswith(".py")}
    return sorted(path for path in found if (root / path).is_file())


def list_marked_tests(root: Path = ROOT) -> list[str]:
    """The files with a marked test."""
    files = (path for folder in TESTS for path in _walk_python(root, folder))
    return sorted(path for path in files if MARK in (root / path).read_text("utf-8"))


def _walk_python(root: Path, folder: str) -> Iterator[str]:
    return (path for path in _walk(root, folder) if path.endswith(".py"))


def _walk(root: Path, folder: str) -> Iterator[str]:
    """All files below the folder, without those that a build or an interpreter writes."""
    for here, folders, names in os.walk(root / folder):
        below = Path(here).relative_to(root).as_posix()
        if below in LEFT_OUT:
            folders.clear()
            continue
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            if not (
                name.endswith((".so", ".pyc")) or name.startswith(".") or name == "not_built.txt"
            ):
                yield f"{below}/{name}"


def _follow_imports(root: Path, start: set[str]) -> set[str]:
    """The given modules, and all modules in app/ and tests/ that they import, directly or not. A
    module whose name is only known when the program runs is not found. Those in models/ need not
    be followed, because they are in the digest."""
    found: set[str] = set()
    open_paths = set(start)
    while open_paths:
        path = open_paths.pop()
        found.add(path)
        tree = ast.parse((root / path).read_bytes())
        open_paths |= {file for name in _imported_names(tree) for file in _find_module(root, name)}
        open_paths -= found
    return found


def _imported_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            # a name may be a module or a part of one
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _find_module(root: Path, name: str) -> list[str]:
    """The files of a module of the repository: with it, Python imports the packages above."""
    parts = name.split(".")
    packages = ["/".join([*parts[:end], "__init__.py"]) for end in range(1, len(parts) + 1)]
    files = [*packages, "/".join(parts) + ".py"]
    is_ours = parts[0] in ("app", "tests")
    return [file for file in files if is_ours and (root / file).is_file()]


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.unchanged", description=__doc__)
    parser.add_argument(
        "--record", action="store_true", help="run the tests, and record that they passed"
    )
    options = parser.parse_args(arguments)
    if not options.record:
        state = "have passed with" if is_unchanged(root) else "have not passed with"
        print(f"{find_platform()}: the tests marked emulation {state} these files")
        return 0
    if not shutil.which("g++") and not shutil.which("c++"):
        # most of them would be skipped
        print("nothing is recorded: the tests need a C++ compiler", file=sys.stderr)
        return 1
    before = compute_digest(root)
    command = [sys.executable, "-m", "pytest", *list_marked_tests(root)]
    result = subprocess.run([*command, "-m", "emulation and not gpu"], cwd=root, check=False)
    if result.returncode != 0:
        return result.returncode
    if compute_digest(root) != before:
        print("nothing is recorded: files changed while the tests ran", file=sys.stderr)
        return 1
    record(root)
    print(f"{find_platform()} is recorded in {RECORD}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
