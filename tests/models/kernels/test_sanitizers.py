"""The kernels and the pool by themselves, under sanitizers and against the ends of pages.

What is compiled here is `driver.cpp` and `pool_driver.cpp` with the kernels' own sources; neither
MLX nor Python is in it. Each matrix, row and result lies before a page that nobody may touch, so
that a register that is filled past the last number is found, whatever fills it.
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
FILES = ("isa_avx512_vnni", "isa_avx512", "isa_avx2", "isa_neon", "isa_scalar", "isa_dispatch")
EXACT = ["-std=c++20", "-ffp-contract=off", "-w"]

pytestmark = pytest.mark.skipif(not COMPILER, reason="there is no C++ compiler")


def compiled(compiler: str, folder: Path, flags: list[str], sources: dict[Path, list[str]]) -> Path:
    def one(source: Path) -> Path:
        made = folder / f"{source.stem}.o"
        run(compiler, *EXACT, *flags, *sources[source], f"-I{SOURCES}", "-c", source, "-o", made)
        return made

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


def kernels(*, x86: bool) -> dict[Path, list[str]]:
    files = {SOURCES / f"{name}.cpp": X86.get(name, []) if x86 else [] for name in FILES}
    return {HERE / "driver.cpp": [], **files}


def works(compiler: str, folder: Path, flag: str) -> bool:
    """Whether programs can be made and run with this sanitizer, whose library is a package of its
    own in some places."""
    source = folder / "empty.cpp"
    source.write_text("int main() {}\n")
    done = subprocess.run(
        [compiler, flag, str(source), "-o", str(folder / "empty")], capture_output=True, check=False
    )
    if done.returncode != 0:
        return False
    return subprocess.run([str(folder / "empty")], capture_output=True, check=False).returncode == 0


def isas(program: Path) -> list[str]:
    """Those that this machine has."""
    asked = subprocess.run(
        [str(program), "1", "0"],
        env={**os.environ, "MLXRUNNER_ISA": "all of them"},
        capture_output=True,
        text=True,
        check=False,
    )
    return asked.stderr.split("this machine supports ")[1].split("\n")[0].rstrip("'\" ").split(", ")


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sanitized")
    flag = "-fsanitize=address,undefined"
    if not works(COMPILER, folder, flag):
        pytest.skip(f"this compiler makes no programs with {flag}")
    # not optimised: that takes four times as long to compile, and hides what is read in vain
    flags = [flag, "-fno-sanitize-recover=all", "-O0"]
    return compiled(COMPILER, folder, flags, kernels(x86=X86_64))


def test_no_kernel_touches_what_is_not_its_own(sanitized: Path) -> None:
    seen = {isa: run(sanitized, "7", "150", isa=isa).split()[1:] for isa in isas(sanitized)}
    assert "scalar" in seen
    # as far as processors multiply and add in one, they agree to the bit
    assert len({tuple(prints) for isa, prints in seen.items() if isa != "scalar"}) <= 1


@pytest.mark.skipif(
    CROSS is None or EMULATOR is None or not X86_64,
    reason="needs an x86-64, a compiler for arm64, and qemu",
)
def test_on_arm_the_results_are_those_of_x86(sanitized: Path, tmp_path) -> None:
    if "avx2" not in isas(sanitized):
        pytest.skip("this machine has no fused multiply-add")
    there = compiled(str(CROSS), tmp_path, ["-O0", "-static"], kernels(x86=False))
    ours = run(sanitized, "3", "60", isa="avx2").split()[1:]
    for isa in ("neon", "scalar"):
        assert run(there, "3", "60", isa=isa, under=(str(EMULATOR),)).split()[1:] == ours


def test_the_pool_never_leaves_a_part_undone_nor_a_write_unseen(tmp_path) -> None:
    flag = "-fsanitize=thread"
    if not works(COMPILER, tmp_path, flag):
        pytest.skip(f"this compiler makes no programs with {flag}")
    program = compiled(
        COMPILER,
        tmp_path,
        [flag, "-O1", "-g"],
        {HERE / "pool_driver.cpp": [], SOURCES / "thread_pool.cpp": []},
    )
    run(program, "2000")
