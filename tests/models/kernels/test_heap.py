"""Memory that arrays let go of: kept for the next ones, and given back when told."""

import platform
import subprocess
import sys

import pytest

from models import kernels

pytestmark = [
    pytest.mark.skipif(kernels.ops() is None, reason=f"no kernels here: {kernels.describe().why}"),
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is not glibc's"),
]

PROGRAM = """
import resource
import threading
from pathlib import Path
from models import kernels
import mlx.core as mx

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

def prompt():
    with mx.stream(mx.cpu):
        arrays = [mx.ones((1 << 20,)) + i for i in range(12)]
        mx.eval(arrays)

def told():
    prompt()
    before = faults()
    for _ in range(5):
        prompt()
    print(faults() - before)
    kept = resident()
    kernels.trim_memory()
    print(kept - resident())

{how}
"""

ON_MAIN, ON_ANOTHER = "told()", "one = threading.Thread(target=told); one.start(); one.join()"


@pytest.mark.parametrize("how", [ON_MAIN, ON_ANOTHER], ids=["main thread", "another thread"])
def test_what_a_prompt_takes_is_kept_for_the_next_and_goes_back_when_told(how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("{how}", how)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    asked, given_back = map(int, done.stdout.split())
    # 48 MiB are 12288 pages, five times over
    assert asked < 2000
    assert given_back > 16 << 20
