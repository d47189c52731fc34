"""Products on tiles have the bits of their definition and of VNNI, and tiles are used only if they
compute correctly.

AMX instructions run natively if the processor has them, and are emulated by a signal handler if it
has AVX-512 with VNNI but no AMX.
"""

import os
import re
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
    EXACT,
    HERE,
    SOURCES,
    X86,
    X86_64,
    compile_program,
    run,
    supports_flag,
)

OPS = kernels.ops()

# outputs, inputs
BF16_SHAPES = [(16, 32), (48, 64), (37, 97), (5, 1), (80, 161), (300, 1100), (600, 160)]

needs_bf16_tiles = pytest.mark.skipif(
    OPS is None or bool(OPS.why_no_bf16_tiles()),
    reason=f"no bfloat16 tiles: {kernels.describe().why_no_bf16_tiles}",
)
needs_kernels = pytest.mark.skipif(OPS is None, reason=f"no kernels: {kernels.describe().why}")
needs_compiler = pytest.mark.skipif(
    not COMPILER or not X86_64, reason="needs an x86-64 and a C++ compiler"
)

# outputs, groups, numbers of rows
SHAPES = [(16, 1, range(1, 131)), (45, 2, (1, 6, 7, 16, 33)), (80, 9, (5, 40)), (301, 17, (7, 20))]
FORMATS = [
    Format(dtype, bits, group, activations)
    for dtype, group in ((mx.float32, 64), (mx.bfloat16, 64), (mx.float16, 128))
    for bits in (4, 8)
    for activations in (24, 16, 8)
]


@needs_kernels
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_a_product_has_the_bits_of_its_definition_for_every_number_of_rows(format: Format) -> None:
    for outputs, groups, counts in SHAPES:
        inputs = groups * format.group
        product = case(format, outputs, inputs).product
        x = random(np.random.default_rng(outputs), max(counts), inputs)
        full = np.array(product(x))
        for rows in counts:
            found = np.array(product.multiply_by_reference(x[:rows]))
            assert (found == full[:rows]).all(), rows
            # products choose other code for few rows
            assert (np.array(product(x[:rows])) == full[:rows]).all(), rows


# rows of x that end in the middle of a block, or fill blocks and batches
ROW_COUNTS = (1, 2, 7, 15, 16, 17, 31, 32, 33, 64, 65, 127, 128, 129, 300)


@needs_kernels
@pytest.mark.parametrize("activations", [24, 16])
@pytest.mark.parametrize(("outputs", "inputs"), BF16_SHAPES)
def test_the_bfloat16_tile_algorithm_gives_a_row_the_same_bits_alone_and_with_others(
    outputs: int, inputs: int, activations: int
) -> None:
    one = case(Format(mx.bfloat16, activations=activations), outputs, inputs)
    x = random(np.random.default_rng(outputs), max(ROW_COUNTS), inputs)
    full = np.array(one.product.multiply_by_reference(x))
    for rows in ROW_COUNTS:
        found = np.array(one.product.multiply_by_reference(x[-rows:]))
        assert (found == full[-rows:]).all(), rows
    exact = np.array(x).astype(np.float64) @ one.weight.astype(np.float64).T
    size = np.abs(np.array(x)).astype(np.float64) @ np.abs(one.weight).astype(np.float64).T
    roundings = min(inputs, 32) + inputs / 32 * 4 + 8
    allowed = size * (2.0**-24 * roundings + (0 if activations == 24 else 2.0**-17))
    assert (np.abs(full - exact) <= allowed).all()


@needs_bf16_tiles
@pytest.mark.parametrize("activations", [24, 16])
@pytest.mark.parametrize(("outputs", "inputs"), BF16_SHAPES)
def test_bfloat16_products_on_tiles_have_the_bits_of_the_reference_however_rows_are_cut(
    outputs: int, inputs: int, activations: int
) -> None:
    product = case(Format(mx.bfloat16, activations=activations), outputs, inputs).product
    draw = np.random.default_rng(inputs)
    x = random(draw, 140, inputs)
    full = np.array(product(x))
    assert (np.array(product.multiply_by_reference(x)) == full).all()
    for cut in range(1, 140):
        parts = [np.array(product(x[:cut])), np.array(product(x[cut:]))]
        assert (np.concatenate(parts) == full).all(), cut
    order = draw.permutation(140)
    assert (np.array(product(x[mx.array(order)])) == full[order]).all()
    strange = np.array(x)
    strange[::3, 0], strange[1::3, -1] = np.nan, np.inf
    found = np.array(product(mx.array(strange)))
    assert (found[2::3] == full[2::3]).all()
    assert not np.isfinite(found[::3]).any()
    assert not np.isfinite(found[1::3]).any()


@needs_bf16_tiles
def test_the_largest_numbers_do_not_become_infinite_in_the_parts_of_x() -> None:
    weight = np.zeros((16, 64), np.float32)
    weight[:, 3] = 2.0**-10
    largest = float(np.finfo(np.float32).max)
    x = mx.full((3, 64), largest)
    for activations in (24, 16):
        packed = OPS.repack(mx.array(weight).astype(mx.bfloat16))
        found = np.array(OPS.Matmul(packed, activations=activations)(x))
        assert (np.abs(found - largest * 2.0**-10) <= largest * 2.0**-10 * 2.0**-16).all()


@needs_bf16_tiles
def test_a_stack_and_a_gated_mlp_of_bfloat16_have_the_bits_of_single_products() -> None:
    weights = random(np.random.default_rng(1), 3, 48, 96).astype(mx.bfloat16)
    x = random(np.random.default_rng(2), 40, 1, 96)
    single = [OPS.Matmul(OPS.repack(weight)) for weight in weights]
    ids = mx.array(np.random.default_rng(3).integers(0, 3, (40, 2)))
    found = np.array(OPS.Matmul(OPS.repack(weights)).gather(x[:, None], ids))
    for row in range(40):
        for i in range(2):
            alone = np.array(single[int(ids[row, i])](x[row]))
            assert (found[row, i] == alone).all()
    gated = np.array(OPS.gate_up("silu", single[0], single[1], x[:, 0]))
    separate = OPS.glu("silu", single[0](x[:, 0]), single[1](x[:, 0]))
    assert (gated == np.array(separate)).all()


@needs_kernels
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_a_row_has_the_same_bits_wherever_a_batch_is_cut_and_in_any_order(format: Format) -> None:
    inputs, rows = 9 * format.group, 35
    product = case(format, 40, inputs).product
    rng = np.random.default_rng(1)
    x = random(rng, rows, inputs)
    full = np.array(product(x))
    for cut in range(1, rows):
        parts = [np.array(product(part)) for part in (x[:cut], x[cut:])]
        assert (np.concatenate(parts) == full).all(), cut
    order = rng.permutation(rows)
    assert (np.array(product(x[mx.array(order)])) == full[order]).all()
    strange = np.array(x)
    strange[::3, 5] = np.nan
    found = np.array(product(mx.array(strange)))
    assert np.isnan(found[::3]).all()
    kept = np.arange(rows) % 3 != 0
    assert (found[kept] == full[kept]).all()


@needs_kernels
def test_the_reference_is_for_affine_matrices_without_a_bias() -> None:
    x = mx.zeros((2, 128))
    for product in (
        case(Format(mx.float32), 16, 128).product,
        case(Format(mx.float32, 4, 64), 16, 128, biased=True).product,
    ):
        with pytest.raises(ValueError, match="without a bias"):
            product.multiply_by_reference(x)


@needs_kernels
def test_the_reason_for_not_using_tiles_is_known() -> None:
    """Which reason it is depends on the machine."""
    info = kernels.describe()
    assert (info.isa in ("avx512-amx", "avx512-amx-bf16")) == (info.why_no_tiles is None)
    assert (info.isa == "avx512-amx-bf16") == (info.why_no_bf16_tiles is None)
    for why in (info.why_no_tiles, info.why_no_bf16_tiles):
        assert why is None or "AMX" in why or "ISA" in why
        assert why is None or not why.startswith(kernels.TILE_TEST_FAILED)


@needs_kernels
def test_with_another_instruction_set_tiles_are_off() -> None:
    program = (
        "from models import kernels; info = kernels.describe(); "
        "print(info.why_no_tiles, info.why_no_bf16_tiles, sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "MLXRUNNER_ISA": "scalar"},
        capture_output=True,
        text=True,
        check=True,
    )
    possible = {
        "MLXRUNNER_ISA is scalar",
        "the processor has no AMX",
        "the processor has no AMX-BF16",
        "the compiler that built the kernels does not support AMX",
    }
    assert set(done.stdout.splitlines()) <= possible


AMX = ["-mamx-tile", "-mamx-int8", "-mamx-bf16"]
TILE_FILES = {
    SOURCES / "isa_avx512_amx.cpp": [*X86["isa_avx512_vnni"], *AMX, "-DMLXRUNNER_AMX"],
    SOURCES / "isa_avx512_amx_bf16.cpp": [*X86["isa_avx512"], *AMX, "-DMLXRUNNER_AMX_BF16"],
}


@pytest.fixture(scope="module")
def tile_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_driver(tmp_path_factory.mktemp("tiles"), TILE_FILES)


@pytest.fixture(scope="module")
def trapping_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program whose AMX instructions are emulated on every processor."""
    folder = tmp_path_factory.mktemp("trapping")
    check_amx_support(folder)
    files: dict[Path, list[str]] = {}
    for source, flags in TILE_FILES.items():
        assembly = folder / f"{source.stem}.s"
        run(COMPILER, *EXACT, "-O1", *flags, f"-I{SOURCES}", "-S", source, "-o", assembly)
        trapping = re.sub(
            r"^(?=\s+(ldtilecfg|tile|tdp))", "\tud2\n", assembly.read_text(), flags=re.M
        )
        assembly.write_text(trapping)
        files[assembly] = []
    return compile_driver(folder, files)


def compile_driver(folder: Path, tile_files: dict[Path, list[str]]) -> Path:
    check_amx_support(folder)
    files = {
        **tile_files,
        SOURCES / "isa_avx512_vnni.cpp": X86["isa_avx512_vnni"],
        SOURCES / "isa_avx512.cpp": X86["isa_avx512"],
        SOURCES / "isa_scalar.cpp": [],
        SOURCES / "tile_check.cpp": [],
        HERE / "tile_driver.cpp": [],
    }
    return compile_program(COMPILER, folder, ["-O1"], files)


def check_amx_support(folder: Path) -> None:
    if not all(supports_flag(COMPILER, folder, flag) for flag in AMX):
        pytest.skip("the compiler does not support AMX")


def run_driver(program: Path, action: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(program), action], capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.recorded
@needs_compiler
@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("right", ""),
        ("wrong", "a product differs from the reference"),
        ("wrong-bf16", "a product differs from the reference"),
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


@pytest.mark.recorded
@needs_compiler
def test_amx_instructions_give_the_bits_of_vnni_and_release_their_tiles(tile_program: Path) -> None:
    check_equal(run_driver(tile_program, "amx"))


@pytest.mark.recorded
@needs_compiler
def test_amx_bf16_instructions_give_the_bits_of_the_reference(tile_program: Path) -> None:
    check_equal(run_driver(tile_program, "amx-bf16"))


@pytest.mark.recorded
@needs_compiler
@pytest.mark.parametrize("action", ["emulated", "emulated-bf16"])
def test_emulated_instructions_give_the_same_bits(trapping_program: Path, action: str) -> None:
    done = run_driver(trapping_program, action)
    check_equal(done)
    assert done.stdout.splitlines()[-1] == "equal, emulated"


def check_equal(done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] in ("equal, native", "equal, emulated")
