"""The kernels and the thread pool under sanitizers and with guard pages.

The tests compile `driver.cpp` and `pool_driver.cpp` with the sources of the kernels, without MLX
and Python. Each matrix, row and result ends at a guard page, so that any load past the last number
is detected.
"""

import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[2] / "models" / "kernels" / "src"
COMPILER = next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), "")
CROSS, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
X86_64 = platform.machine() in ("x86_64", "AMD64")

AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
VNNI = [*AVX512, "-mavx512vnni"]
X86 = {"isa_avx2": AVX2, "isa_avx512": AVX512, "isa_avx512_vnni": VNNI}
ARM = {
    "isa_neon_dot": ["-march=armv8.2-a+dotprod"],
    "isa_neon_i8mm": ["-march=armv8.2-a+i8mm"],
}
NATIVE = X86 if X86_64 else ARM if platform.machine() in ("aarch64", "arm64") else {}
# emulated processors, and the instruction sets that each has, best first
ARM_PROCESSORS = {
    "cortex-a53": ["neon", "scalar"],
    "neoverse-n1": ["neon-dot", "neon", "scalar"],
    "max": ["neon-i8mm", "neon-dot", "neon", "scalar"],
}
# The files for AMX without their flags compile to stubs; test_tiles.py compiles them with them.
FILES = (
    "isa_avx512_amx_bf16",
    "isa_avx512_amx",
    "isa_avx512_vnni",
    "isa_avx512",
    "isa_avx2",
    "isa_neon_i8mm",
    "isa_neon_dot",
    "isa_neon",
    "isa_scalar",
    "isa_dispatch",
    "sample_edits",
    "sample_filters",
    "tile_check",
)
EXACT = ["-std=c++20", "-ffp-contract=off", "-w"]

pytestmark = [
    pytest.mark.recorded,
    pytest.mark.skipif(not COMPILER, reason="no C++ compiler"),
]


def compile_program(
    compiler: str, folder: Path, flags: list[str], sources: dict[Path, list[str]]
) -> Path:
    def one(source: Path) -> Path:
        object_file = folder / f"{source.stem}.o"
        run(
            compiler,
            *EXACT,
            *flags,
            *sources[source],
            f"-I{SOURCES}",
            "-c",
            source,
            "-o",
            object_file,
        )
        return object_file

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(one, sources))
    run(compiler, *flags, *objects, "-o", folder / "program", "-pthread")
    return folder / "program"


def run(*command: str | Path, isa: str = "", under: tuple[str, ...] = ()) -> str:
    env = {**os.environ, "MLXRUNNER_ISA": isa}
    words = [*under, *(str(word) for word in command)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


def kernels(flags: dict[str, list[str]]) -> dict[Path, list[str]]:
    files = {SOURCES / f"{name}.cpp": flags.get(name, []) for name in FILES}
    return {HERE / "driver.cpp": [], **files}


def supports_flag(compiler: str, folder: Path, flag: str) -> bool:
    """Whether programs can be compiled and run with this sanitizer; some distributions package its
    library separately."""
    source = folder / "empty.cpp"
    source.write_text("int main() {}\n")
    done = subprocess.run(
        [compiler, flag, str(source), "-o", str(folder / "empty")], capture_output=True, check=False
    )
    if done.returncode != 0:
        return False
    return subprocess.run([str(folder / "empty")], capture_output=True, check=False).returncode == 0


def isas(program: Path, under: tuple[str, ...] = ()) -> list[str]:
    """Instruction sets of this machine or of an emulated one, best first."""
    process = subprocess.run(
        [*under, str(program), "1", "0"],
        env={**os.environ, "MLXRUNNER_ISA": "all of them"},
        capture_output=True,
        text=True,
        check=False,
    )
    return (
        process.stderr.split("this machine supports ")[1].split("\n")[0].rstrip("'\" ").split(", ")
    )


@pytest.fixture(scope="module")
def sanitized_program(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sanitized")
    flag = "-fsanitize=address,undefined"
    if not supports_flag(COMPILER, folder, flag):
        pytest.skip(f"the compiler does not support {flag}")
    # without optimization, which takes four times as long to compile and removes unused reads
    flags = [flag, "-fno-sanitize-recover=all", "-O0"]
    return compile_program(COMPILER, folder, flags, kernels(NATIVE))


@pytest.mark.exhaustive
def test_no_kernel_accesses_memory_out_of_bounds(sanitized_program: Path) -> None:
    outputs = {
        isa: run(sanitized_program, "7", "150", isa=isa).split()[1:]
        for isa in isas(sanitized_program)
    }
    assert "scalar" in outputs
    # instruction sets with fused multiply-add give the same bits
    assert len({tuple(hashes) for isa, hashes in outputs.items() if isa != "scalar"}) <= 1


@pytest.mark.exhaustive
@pytest.mark.skipif(
    CROSS is None or EMULATOR is None or not X86_64,
    reason="needs an x86-64, a compiler for arm64, and qemu",
)
def test_arm_and_x86_give_the_same_bits(sanitized_program: Path, tmp_path) -> None:
    if "avx2" not in isas(sanitized_program):
        pytest.skip("this machine has no fused multiply-add")
    arm_program = compile_program(str(CROSS), tmp_path, ["-O1", "-static"], kernels(ARM))
    ours = run(sanitized_program, "3", "60", isa="avx2").split()[1:]
    for processor, supported in ARM_PROCESSORS.items():
        under = (str(EMULATOR), "-cpu", processor)
        assert isas(arm_program, under) == supported
        # the best one is selected
        assert run(arm_program, "3", "60", under=under).split() == [supported[0], *ours]
    assert run(arm_program, "3", "60", isa="scalar", under=under).split() == ["scalar", *ours]


@pytest.mark.exhaustive
def test_the_pool_runs_all_parts_and_synchronises_their_writes(tmp_path) -> None:
    flag = "-fsanitize=thread"
    if not supports_flag(COMPILER, tmp_path, flag):
        pytest.skip(f"the compiler does not support {flag}")
    program = compile_program(
        COMPILER,
        tmp_path,
        [flag, "-O1", "-g"],
        {HERE / "pool_driver.cpp": [], SOURCES / "thread_pool.cpp": []},
    )
    run(program, "2000")
