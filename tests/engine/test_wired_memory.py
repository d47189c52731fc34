"""The memory pressure of the system."""

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from app.engine import wired_memory
from app.engine.memory_policy import MemoryPressure
from app.engine.wired_memory import classify_free_memory, read_macos_pressure, read_pressure

# sysctlbyname(3) with one known name, as on macOS: it fails for another name or size
SYSCTL = """
#include <string.h>
int level;
int sysctlbyname(const char *name, void *value, size_t *size, const void *next, size_t length) {
  if (strcmp(name, "kern.memorystatus_vm_pressure_level")) return -1;
  if (*size < sizeof level || next || length) return -1;
  memcpy(value, &level, *size = sizeof level);
  return 0;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("sysctl")
    (folder / "sysctl.c").write_text(SYSCTL)
    command = [compiler, "-shared", "-fPIC", "-o", str(folder / "sysctl.so")]
    subprocess.run([*command, str(folder / "sysctl.c")], check=True)
    return ctypes.CDLL(str(folder / "sysctl.so"))


@pytest.mark.parametrize(
    ("level", "expected"),
    [(1, "NORMAL"), (2, "WARNING"), (4, "CRITICAL"), (0, "NORMAL"), (7, "NORMAL")],
)
def test_the_level_of_macos_is_read(library: Any, level: int, expected: str) -> None:
    ctypes.c_int.in_dll(library, "level").value = level
    assert read_macos_pressure(library).name == expected


def test_a_system_without_the_level_has_no_pressure(
    library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctypes.c_int.in_dll(library, "level").value = 4
    assert read_macos_pressure(library) is MemoryPressure.CRITICAL
    monkeypatch.setattr(wired_memory, "_LEVEL_NAME", b"another")
    assert read_macos_pressure(library) is MemoryPressure.NORMAL


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        (1000, "NORMAL"),
        (50, "NORMAL"),
        (49, "WARNING"),
        (20, "WARNING"),
        (19, "CRITICAL"),
        (-5, "CRITICAL"),
    ],
)
def test_free_memory_is_classified(free: int, expected: str) -> None:
    assert classify_free_memory(free, 1000).name == expected


def test_linux_reads_the_machine_or_the_container(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(wired_memory.sys, "platform", "linux")
    monkeypatch.setattr(wired_memory, "read_machine_memory", lambda: (30, 1000))
    assert read_pressure() is MemoryPressure.WARNING
