"""`make wheel`: a wheel with the CPU kernels in it, for Linux machines that have no compiler.

The wheel is built from an sdist, so that both are known to be whole, and gets the tag of the oldest
Linux on which MLX's own wheel runs: an older one would promise what MLX cannot keep, and auditwheel
refuses it where our library asks for more. Then it is installed, with what it needs, into an
environment that has no compiler on its PATH, and multiplies there.
"""

import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
BIN = Path(sys.executable).parent

# Run in the new environment. Products of whole numbers this small are exact in every format.
CHECK_SCRIPT = """
import shutil
import sys

import mlxrunner

sys.path.insert(0, mlxrunner.__path__[0])
from models import cpu_backend, kernels

import mlx.core as mx

told = kernels.describe()
assert told.enabled, told.why
assert cpu_backend.ACTIVE.blas, cpu_backend.ACTIVE.why
assert not any(map(shutil.which, ["cc", "c++", "gcc", "g++", "clang"]))
weight = mx.random.randint(-8, 8, (96, 256)).astype(mx.float32)
x = mx.random.randint(-8, 8, (5, 256)).astype(mx.float32)
ops = kernels.ops()
for kind in (mx.float32, mx.bfloat16, mx.float16):
    assert mx.array_equal(ops.Product(ops.strips(weight.astype(kind)))(x), x @ weight.T), kind
for bits in (4, 8):
    packed = mx.quantize(weight, group_size=64, bits=bits)
    laid = ops.strips(packed[0], bits), ops.strips(packed[1]), ops.strips(packed[2])
    ours = ops.Product(*laid, group_size=64, bits=bits)(x)
    theirs = mx.quantized_matmul(x, *packed, group_size=64, bits=bits)
    assert mx.allclose(ours, theirs, rtol=1e-4, atol=1e-2), bits
blas = cpu_backend.ACTIVE.blas
print(f"there: {told.isa}, {told.threads} threads, BLAS {blas}; products as MLX's")
"""


class WheelError(Exception):
    """A wheel that must not be given to anybody."""


def run(*command: str | Path, **options) -> None:
    """Quiet unless it fails."""
    done = subprocess.run(
        [str(word) for word in command],
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        **options,
    )
    if done.returncode:
        raise WheelError(f"{' '.join(map(str, command))}\n{done.stdout}")


def build_wheel(folder: Path) -> Path:
    """A wheel for this machine, made from an sdist."""
    hook = (
        "import sys; sys.path.insert(0, 'deploy/wheel'); from backend import build_sdist as build"
    )
    run(sys.executable, "-c", f"{hook}; build_sdist({str(folder)!r})", cwd=ROOT)
    [sources] = folder.glob("*.tar.gz")
    run(
        *(sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps"),
        *("--wheel-dir", folder, sources),
    )
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
        if "mlxrunner/models/kernels/not_built.txt" in names:
            raise WheelError(opened.read("mlxrunner/models/kernels/not_built.txt").decode())
    if not any(name.startswith("mlxrunner/models/kernels/_kernels.") for name in names):
        raise WheelError("the wheel has no kernels: they are built on Linux with mlx[cpu] only")
    return wheel


def manylinux_tag() -> str:
    """Where MLX's own library runs: manylinux_2_35_x86_64 and the like."""
    told = importlib.metadata.distribution("mlx-cpu").read_text("WHEEL") or ""
    tags = re.findall(r"^Tag: .*-(manylinux_\d+_\d+_\w+)$", told, re.MULTILINE)
    if not tags:
        raise WheelError("the mlx-cpu wheel has no manylinux tag")
    return tags[0]


def tag_wheel(wheel: Path, tag: str) -> Path:
    """In dist, under the tag, if its libraries keep what that promises. libmlx.so is not ours to
    bring: it is found beside us."""
    made = DIST / re.sub(r"-linux_\w+[.]whl$", f"-{tag}.whl", wheel.name)
    made.unlink(missing_ok=True)
    run(
        *(BIN / "auditwheel", "repair", "--plat", tag, "--only-plat"),
        *("--exclude", "libmlx.so", "--wheel-dir", DIST, wheel),
        env={**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"},
    )
    assert made.is_file()
    return made


def install_and_check(wheel: Path, folder: Path) -> str:
    """Installs it as anybody would, and lets it multiply. Returns what it says of itself."""
    place = folder / "environment"
    venv.create(place, with_pip=True)
    python = place / "bin/python"
    around = {**os.environ, "PATH": str(place / "bin")}
    run(
        *(python, "-m", "pip", "install", "--only-binary=:all:", f"{wheel}[cpu]"),
        cwd=folder,
        env=around,
    )
    done = subprocess.run(
        [python, "-c", CHECK_SCRIPT],
        cwd=folder,
        env=around,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise WheelError(done.stderr)
    return done.stdout.strip()


def main() -> int:
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            wheel = build_wheel(folder)
            print(f"built from an sdist: {wheel.name}", flush=True)
            made = tag_wheel(wheel, manylinux_tag())
            print(
                f"tagged: {made.relative_to(ROOT)}, {made.stat().st_size / 2**20:.1f} MiB",
                flush=True,
            )
            print(install_and_check(made, folder), flush=True)
    except WheelError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
