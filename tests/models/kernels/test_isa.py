"""Instruction sets differ in speed, not in results."""

import os
import platform
import subprocess
import sys

import pytest

from models import kernels

OPS = kernels.ops()
pytestmark = pytest.mark.skipif(OPS is None, reason=f"no kernels here: {kernels.describe().why}")

# one line: what is in use; then the bits of products of all formats, small and large
PROGRAM = """
import hashlib
import mlx.core as mx
import numpy as np
from models.kernels import ops
k, seen = ops(), hashlib.sha256()
mx.random.seed(0)
for width in (128, 384, 1152):
    for rows in (1, 3, 8, 9, 65):
        x, w = mx.random.normal((rows, width)), mx.random.normal((45, width))
        made = [k.Product(k.strips(w.astype(t))) for t in (mx.float32, mx.bfloat16, mx.float16)]
        for bits in (4, 8):
            for group in (32, 64, 128):
                q, *parts = mx.quantize(w, group, bits)
                for t in (mx.float32, mx.bfloat16, mx.float16):
                    two = [part.astype(t) for part in parts]
                    laid = k.strips(q, bits), *(k.strips(part) for part in two)
                    made.append(k.Product(*laid, group_size=group, bits=bits))
        for one in made:
            seen.update(np.array(one(x)).tobytes())
            seen.update(np.array(one.rows(mx.array([0, 44]))).tobytes())
print(k.isa(), seen.hexdigest())
"""


LOADED = """
from models import kernels
told = kernels.describe()
print(kernels.ops() is None, told.built, told.enabled, told.isa, told.threads, told.why, sep="; ")
"""


def ran(isa: str, program: str = PROGRAM) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "MLXRUNNER_ISA": isa},
        capture_output=True,
        text=True,
        check=False,
    )


def all_of_this_machine() -> list[str]:
    """Best first, from what is said to whoever asks for one that there is not."""
    told = ran("no such thing", LOADED).stdout.strip()
    off, why = "True; True; False; None; None; ", "MLXRUNNER_ISA is 'no such thing'"
    assert told.startswith(f"{off}{why}, but this machine supports ")
    return told.partition(" supports ")[2].split(", ")


def test_with_the_name_of_no_instruction_set_the_kernels_are_off_and_say_which_there_are() -> None:
    have = all_of_this_machine()
    assert have[-1] == "scalar"
    assert set(have) < {"avx512-vnni", "avx512", "avx2", "neon", "scalar"}
    for isa in have:
        assert ran(isa, LOADED).stdout.startswith(f"False; True; True; {isa}; ")


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="needs a machine that lacks neon"
)
def test_an_instruction_set_of_other_machines_is_refused_like_a_name_of_none() -> None:
    assert "; MLXRUNNER_ISA is 'neon', but this machine supports " in ran("neon", LOADED).stdout


def test_instruction_sets_that_fuse_agree_to_the_bit() -> None:
    have = [isa for isa in all_of_this_machine() if isa != "scalar"]
    lines = {isa: ran(isa).stdout.split() for isa in have}
    assert [line[0] for line in lines.values()] == have
    assert len({line[1] for line in lines.values()}) <= 1
    if have:
        assert ran("").stdout.split() == lines[have[0]]


def test_every_machine_has_the_scalar_one() -> None:
    done = ran("scalar")
    assert done.stdout.startswith("scalar "), done.stderr
