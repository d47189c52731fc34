"""A failure on a thread of MLX or of the pool raises an error in the evaluating thread only.

The tests set the name of an unknown instruction set, with which all work fails, as it does without
memory. `models.kernels` is then disabled, so the programs import the extension module.
"""

import os
import subprocess
import sys

import pytest

from models import kernels

pytestmark = pytest.mark.skipif(
    kernels.ops() is None, reason=f"no kernels: {kernels.describe().why}"
)

SHARED = """
from models.kernels import _kernels
import mlx.core as mx

_kernels.set_num_threads(3)
for _ in range(3):
    try:
        mx.eval(_kernels.rms_norm(mx.ones((4000, 64)), None, 1e-5))
    except RuntimeError as error:
        print("MLXRUNNER_ISA" in str(error))
"""

STEPS = """
from models.kernels import _kernels
import mlx.core as mx

_kernels.set_num_threads(3)
q, buffer = mx.ones((1, 2, 1, 8)), mx.zeros((1, 2, 16, 8))
keys, values = [buffer], [buffer + 1]
for i in range(3):
    copies = keys, values
    results = _kernels.attend(q, q, q, keys, values, [i], [i + 1], [0], [0], scale=1.0)
    try:
        mx.eval(results)
    except RuntimeError as error:
        print("MLXRUNNER_ISA" in str(error))
    _, keys, values = results
"""

BLOCKS = """
from models.kernels import _kernels
import mlx.core as mx

norm, product = (mx.ones(8), 1e-5), _kernels.Matmul(mx.ones((8, 8)))
block = _kernels.AttentionBlock(norm, *[product] * 4, heads=1, kv_heads=1, scale=1.0)
keys, values = [mx.zeros((1, 1, 16, 8))], [mx.ones((1, 1, 16, 8))]
for i in range(3):
    copies = keys, values
    results = block(mx.ones((1, 1, 8)), [0], keys, values, [i], [i + 1], [0], [0], 0)
    try:
        mx.eval(results)
    except RuntimeError as error:
        print("MLXRUNNER_ISA" in str(error))
    _, keys, values = results
"""


@pytest.mark.parametrize(
    "program", [SHARED, STEPS, BLOCKS], ids=["among threads", "holding buffers", "in a block"]
)
def test_a_failure_is_raised_and_blocks_no_thread(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "MLXRUNNER_ISA": "none"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True"] * 3


def test_kernels_of_another_version_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """After updating the source without running `make`, a new operation would be missing."""
    monkeypatch.setattr(kernels, "_INTERFACE", 0)
    found, built, why = kernels._load_extension()
    assert (found, built) == (None, True)
    assert why == "the kernels belong to a different version of mlxrunner; rebuild them with `make`"
