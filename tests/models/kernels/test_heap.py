"""Freed arrays: the heap keeps their memory for the next ones; `trim_memory` returns it."""

import platform
import subprocess
import sys

import pytest

from models import kernels

pytestmark = [
    pytest.mark.skipif(kernels.ops() is None, reason=f"no kernels: {kernels.describe().why}"),
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is not glibc's"),
]

PROGRAM = """
import resource
import threading
from pathlib import Path
from models import kernels
import mlx.core as mx

def count_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

def prompt():
    with mx.stream(mx.cpu):
        arrays = [mx.ones((1 << 20,)) + i for i in range(12)]
        mx.eval(arrays)

def measure():
    prompt()
    before = count_faults()
    for _ in range(5):
        prompt()
    print(count_faults() - before)
    before = resident()
    kernels.trim_memory()
    print(before - resident())

{how}
"""

ON_MAIN = "measure()"
ON_ANOTHER = "thread = threading.Thread(target=measure); thread.start(); thread.join()"


@pytest.mark.parametrize("how", [ON_MAIN, ON_ANOTHER], ids=["main thread", "another thread"])
def test_the_heap_is_reused_for_the_next_prompt_and_trimmed_on_request(how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("{how}", how)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    faults, freed = map(int, done.stdout.split())
    # five prompts with 48 MiB, or 12288 pages, each
    assert faults < 2000
    assert freed > 16 << 20
