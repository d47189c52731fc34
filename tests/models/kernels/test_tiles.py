"""The algorithm for tiles gives the bits of the products, and tiles are used only if they compute
correctly.

The reference tiles in plain C++ run on every processor. AMX instructions run natively if the
processor has them, and are emulated by a signal handler if it has AVX-512 with VNNI but no AMX.
"""

import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from models import kernels
from tests.models.kernels.test_products import Format, case, random
from tests.models.kernels.test_sanitizers import (
    COMPILER,
    HERE,
    SOURCES,
    X86,
    X86_64,
    compile_program,
    supports_flag,
)

OPS = kernels.ops()

needs_kernels = pytest.mark.skipif(OPS is None, reason=f"no kernels: {kernels.describe().why}")
needs_compiler = pytest.mark.skipif(
    not COMPILER or not X86_64, reason="needs an x86-64 and a C++ compiler"
)

# outputs, groups, numbers of rows
SHAPES = [(16, 1, range(1, 131)), (48, 2, (1, 6, 7, 16, 33)), (80, 5, (5, 40))]
FORMATS = [
    Format(dtype, bits, group, activations)
    for dtype, group in ((mx.float32, 64), (mx.bfloat16, 64), (mx.float16, 128))
    for bits in (4, 8)
    for activations in (24, 16, 8)
]


@needs_kernels
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_the_tile_algorithm_gives_the_same_bits_for_every_number_of_rows(format: Format) -> None:
    for outputs, groups, counts in SHAPES:
        inputs = groups * format.group
        product = case(format, outputs, inputs).product
        x = random(np.random.default_rng(outputs), max(counts), inputs)
        full = np.array(product(x))
        for rows in counts:
            found = np.array(product.multiply_by_tile_reference(x[:rows]))
            assert (found == full[:rows]).all(), rows
            # products choose other code for few rows
            assert (np.array(product(x[:rows])) == full[:rows]).all(), rows


@needs_kernels
def test_tiles_fit_only_groups_of_64_and_whole_panels() -> None:
    x = mx.zeros((2, 128))
    for product in (
        case(Format(mx.float32), 16, 128).product,
        case(Format(mx.float32, 4, 32), 16, 128).product,
        case(Format(mx.float32, 4, 64), 17, 128).product,
        case(Format(mx.float32, 4, 64), 16, 128, biased=True).product,
    ):
        with pytest.raises(ValueError, match="do not fit"):
            product.multiply_by_tile_reference(x)


@needs_kernels
def test_the_reason_for_not_using_tiles_is_known() -> None:
    """Which reason it is depends on the machine."""
    info = kernels.describe()
    assert (info.isa == "avx512-amx") == (info.why_no_tiles is None)
    assert info.why_no_tiles is None or "AMX" in info.why_no_tiles or "ISA" in info.why_no_tiles
    if info.why_no_tiles is not None:
        assert not info.why_no_tiles.startswith(kernels.TILE_TEST_FAILED)


@needs_kernels
def test_with_another_instruction_set_tiles_are_off() -> None:
    program = "from models import kernels; print(kernels.describe().why_no_tiles)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "MLXRUNNER_ISA": "scalar"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() in (
        "MLXRUNNER_ISA is scalar",
        "the processor has no AMX",
        "the compiler that built the kernels does not support AMX",
    )


@pytest.fixture(scope="module")
def tile_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiles")
    amx = ["-mamx-tile", "-mamx-int8"]
    if not all(supports_flag(COMPILER, folder, flag) for flag in amx):
        pytest.skip("the compiler does not support AMX")
    files = {
        SOURCES / "isa_avx512_amx.cpp": [*X86["isa_avx512_vnni"], *amx, "-DMLXRUNNER_AMX"],
        SOURCES / "isa_avx512_vnni.cpp": X86["isa_avx512_vnni"],
        SOURCES / "isa_avx512.cpp": X86["isa_avx512"],
        SOURCES / "isa_scalar.cpp": [],
        SOURCES / "tile_check.cpp": [],
        HERE / "tile_driver.cpp": [],
    }
    return compile_program(COMPILER, folder, ["-O1"], files)


def run_driver(program: Path, action: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(program), action], capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.emulation
@needs_compiler
@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("right", ""),
        ("wrong", "a product differs from the reference"),
        ("illegal", "its process died of signal 4"),
        ("invalid", "its process died of signal 11"),
        ("endless", "it did not end"),
    ],
)
def test_the_known_answer_test_finds_each_fault(
    tile_program: Path, action: str, expected: str
) -> None:
    """A crash harms only the child process, which ignores the signal handlers of its parent."""
    done = run_driver(tile_program, action)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{expected}\n", "")


@pytest.mark.emulation
@needs_compiler
def test_amx_instructions_give_the_bits_of_vnni_and_release_their_tiles(tile_program: Path) -> None:
    done = run_driver(tile_program, "amx")
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] in ("equal, native", "equal, emulated")
