"""Which tests need not run in CI, because what they depend on has not changed since they passed.

    python -m tests.unchanged             print the state
    python -m tests.unchanged --record    run these tests, and record the files that pass

Tests marked `recorded` compare each architecture with references, compile the kernels for
sanitizers and emulated processors, or run long histories of the engine. They take minutes. Their
results depend only on models/, on the installed packages, and on the tests themselves with all
modules that they import. For each platform, `tests/unchanged.json` contains a digest of these files
for each file of tests, with which its tests last passed. CI runs the tests of a file unless its
digest is still the same. `make integration` and `make test-all` always run them.

Knows: the files that these tests depend on. Must not know: what they test, git, CI.

A digest is of names and contents, so it is the same in each checkout and in an archive of the
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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = "tests/unchanged.json"

# Of a digest in the record.
DIGITS = 16

MARK = "pytest.mark.recorded"

# All tests depend on these folders and files. Some tests use modules of dev.txt as references.
FOLDERS = ("models", "app/engine/sampling")
FILES = ("requirements/serve.txt", "requirements/dev.txt")

# As in /proc/cpuinfo.
INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_vnni", "amx_int8")

# These folders are searched for marked tests.
TESTS = ("tests/models", "tests/engine")

# A module that imports others whose names it computes: all modules of its package count.
_DYNAMIC_IMPORT = "import_module("

Record = Mapping[str, Mapping[str, str]]


def find_unchanged(root: Path = ROOT) -> frozenset[str]:
    """The files whose marked tests have passed with the same files on a machine of this kind, or on
    one with more instruction sets: the tests use each that the machine has."""
    recorded = read_record(root)
    platforms = [name for name in recorded if _includes(name, find_platform())]
    digests = compute_digests(root) if platforms else {}
    return frozenset(
        path
        for path, digest in digests.items()
        if any(recorded[name].get(path) == digest for name in platforms)
    )


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


def read_record(root: Path = ROOT) -> Record:
    """The digest of each file of tests, for each platform. Without the file, none is known."""
    try:
        return json.loads((root / RECORD).read_text("utf-8"))
    except FileNotFoundError:
        return {}


def record(digests: Mapping[str, str], root: Path = ROOT) -> None:
    """Records the digests for this platform. The other platforms keep theirs."""
    known = {**read_record(root), find_platform(): digests}
    text = json.dumps(known, indent=2, sort_keys=True) + "\n"
    (root / RECORD).write_text(text, encoding="utf-8", newline="\n")


def compute_digests(root: Path = ROOT) -> dict[str, str]:
    """The digest for each file with marked tests: of the sorted paths and of the contents of all
    files that it depends on. Line endings are Unix's."""
    contents: dict[str, bytes] = {}
    digests: dict[str, str] = {}
    for test, paths in list_dependencies(root).items():
        digest = hashlib.sha256()
        for path in sorted(paths):
            if path not in contents:
                contents[path] = _hash_file(root / path)
            digest.update(f"{path} ".encode() + contents[path])
        digests[test] = digest.hexdigest()[:DIGITS]
    return digests


def _hash_file(path: Path) -> bytes:
    """Of a file that does not exist: of no content."""
    content = path.read_bytes().replace(b"\r\n", b"\n") if path.is_file() else b""
    return hashlib.sha256(content).digest()


def list_dependencies(root: Path = ROOT) -> dict[str, set[str]]:
    """The paths of the files that each file with marked tests depends on, relative."""
    common = {*FILES, *(path for folder in FOLDERS for path in _walk(root, folder))}
    modules = _Modules(root)
    found: dict[str, set[str]] = {}
    for test in list_marked_tests(root):
        # references, and programs in C++ that tests compile, with their headers
        data = {path for path in _walk(root, os.path.dirname(test)) if not path.endswith(".py")}
        imported = modules.follow({test, *_walk_python(root, "app/engine/sampling")})
        found[test] = common | data | imported
    return found


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
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            if not (
                name.endswith((".so", ".pyc")) or name.startswith(".") or name == "not_built.txt"
            ):
                yield f"{below}/{name}"


class _Modules:
    """The modules in app/ and tests/, and what they import. Each is parsed once. Those in models/
    need not be followed, because all of them are in each digest."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._imports: dict[str, set[str]] = {}

    def follow(self, start: set[str]) -> set[str]:
        """The given modules, and all modules that they import, directly or not."""
        found: set[str] = set()
        open_paths = set(start)
        while open_paths:
            path = open_paths.pop()
            found.add(path)
            open_paths |= self._list_imports(path) - found
        return found

    def _list_imports(self, path: str) -> set[str]:
        if path not in self._imports:
            text = (self._root / path).read_text("utf-8")
            tree = ast.parse(text)
            found = {file for name in _imported_names(tree) for file in self._find_module(name)}
            if path.startswith("app/") and _DYNAMIC_IMPORT in text:
                found |= set(_walk_python(self._root, os.path.dirname(path)))
            self._imports[path] = found
        return self._imports[path]

    def _find_module(self, name: str) -> list[str]:
        """The files of a module of the repository: with it, Python imports the packages above."""
        parts = name.split(".")
        packages = ["/".join([*parts[:end], "__init__.py"]) for end in range(1, len(parts) + 1)]
        files = [*packages, "/".join(parts) + ".py"]
        is_ours = parts[0] in ("app", "tests")
        return [file for file in files if is_ours and (self._root / file).is_file()]


def _imported_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            # a name may be a module or a part of one
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.unchanged", description=__doc__)
    parser.add_argument(
        "--record", action="store_true", help="run the tests, and record that they passed"
    )
    options = parser.parse_args(arguments)
    before, done = compute_digests(root), find_unchanged(root)
    if not options.record:
        for path in before:
            state = "unchanged" if path in done else "changed"
            print(f"{state:<9}  {path}")
        return 0
    if not shutil.which("g++") and not shutil.which("c++"):
        # some tests would be skipped
        print("nothing is recorded: the tests need a C++ compiler", file=sys.stderr)
        return 1
    if changed := sorted(before.keys() - done):
        expression = "recorded and not (gpu or exhaustive or network)"
        command = [sys.executable, "-m", "pytest", *changed, "-m", expression, "-n", "auto"]
        result = subprocess.run([*command, "--dist", "worksteal"], cwd=root, check=False)
        if result.returncode != 0:
            return result.returncode
    if compute_digests(root) != before:
        print("nothing is recorded: files changed while the tests ran", file=sys.stderr)
        return 1
    record(before, root)
    print(f"{find_platform()} is recorded in {RECORD}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
