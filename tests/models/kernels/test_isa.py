"""Instruction sets differ in speed, not in results."""

import os
import platform
import subprocess
import sys

import pytest

from models import kernels

OPS = kernels.ops()
pytestmark = pytest.mark.skipif(OPS is None, reason=f"no kernels: {kernels.describe().why}")

# One line: the instruction set in use, a hash of products of all formats and sizes except bfloat16
# matrices, and a hash of products with these.
PROGRAM = """
import hashlib
import mlx.core as mx
import numpy as np
from models.kernels import ops
k, digest, bf16_digest = ops(), hashlib.sha256(), hashlib.sha256()
mx.random.seed(0)
for width in (128, 384, 1152):
    for rows in (1, 3, 7, 8, 9, 65):
        x, w = mx.random.normal((rows, width)), mx.random.normal((45, width))
        products = [k.Matmul(k.repack(w.astype(t))) for t in (mx.float32, mx.float16)]
        for bits in (4, 8):
            for group in (32, 64, 128):
                q, *parts = mx.quantize(w, group, bits)
                for t in (mx.float32, mx.bfloat16, mx.float16):
                    two = [part.astype(t) for part in parts]
                    strips = k.repack(q, bits), *(k.repack_scales(part) for part in two)
                    for activations in (24, 16, 8):
                        options = {"group_size": group, "bits": bits, "activations": activations}
                        products.append(k.Matmul(*strips, **options))
        bf16 = k.Matmul(k.repack(w.astype(mx.bfloat16)))
        bf16_digest.update(np.array(bf16(x)).tobytes())
        for product in products:
            digest.update(np.array(product(x)).tobytes())
        for product in [*products, bf16]:
            digest.update(np.array(product.dequantize_rows(mx.array([0, 44]))).tobytes())
print(k.isa(), digest.hexdigest(), bf16_digest.hexdigest())
"""


DESCRIBE = """
from models import kernels
d = kernels.describe()
print(kernels.ops() is None, d.built, d.enabled, d.isa, d.threads, d.why, sep="; ")
"""


def run_program(isa: str, program: str = PROGRAM) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "MLXRUNNER_ISA": isa},
        capture_output=True,
        text=True,
        check=False,
    )


def list_supported_isas() -> list[str]:
    """Instruction sets of this machine, best first, from the error for an unknown one."""
    output = run_program("no such thing", DESCRIBE).stdout.strip()
    off, why = "True; True; False; None; None; ", "MLXRUNNER_ISA is 'no such thing'"
    assert output.startswith(f"{off}{why}, but this machine supports ")
    return output.partition(" supports ")[2].split(", ")


def test_an_unknown_instruction_set_disables_the_kernels_and_the_error_lists_all() -> None:
    supported = list_supported_isas()
    assert supported[-1] == "scalar"
    x86 = {"avx512-amx-bf16", "avx512-amx", "avx512-vnni", "avx512", "avx2", "scalar"}
    arm = {"neon-i8mm", "neon-dot", "neon", "scalar"}
    assert set(supported) <= x86 or set(supported) <= arm
    for isa in supported:
        assert run_program(isa, DESCRIBE).stdout.startswith(f"False; True; True; {isa}; ")


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="needs a machine without neon"
)
def test_an_instruction_set_of_other_machines_is_refused() -> None:
    assert (
        "; MLXRUNNER_ISA is 'neon', but this machine supports "
        in run_program("neon", DESCRIBE).stdout
    )


@pytest.mark.recorded
def test_instruction_sets_with_fused_multiply_add_give_the_same_bits() -> None:
    """With one exception: products with bfloat16 matrices on tiles."""
    supported = [isa for isa in list_supported_isas() if isa != "scalar"]
    lines = {isa: run_program(isa).stdout.split() for isa in supported}
    assert [line[0] for line in lines.values()] == supported
    assert len({line[1] for line in lines.values()}) <= 1
    on_tiles = lines.pop("avx512-amx-bf16", None)
    bf16 = {line[2] for line in lines.values()}
    assert len(bf16) <= 1
    if on_tiles is not None:
        assert on_tiles[2] not in bf16
        lines["avx512-amx-bf16"] = on_tiles
    if supported:
        assert run_program("").stdout.split() == lines[supported[0]]


def test_every_machine_has_the_scalar_instruction_set() -> None:
    done = run_program("scalar")
    assert done.stdout.startswith("scalar "), done.stderr
