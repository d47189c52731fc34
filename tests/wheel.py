"""`make wheel`: the wheels for Linux with the CPU kernels, for macOS, and for CUDA.

The wheel is built from an sdist, which tests both, and gets the tag of the oldest Linux on which
MLX's own wheel runs: MLX would not run on an older one. auditwheel rejects the tag if our library
needs a newer Linux. Then the wheel is installed, with its dependencies, into an environment without
a compiler on its PATH, and multiplies matrices. The wheels for macOS and CUDA have no kernels.
Their contents and metadata are compared with the first wheel, because neither platform is here.

A wheel with kernels is for one version of Python and one architecture. For another version, run
`make wheel PYTHON=python3.13 VENV=.venv-3.13`; for arm64, run the command on an arm64 machine.
"""

import importlib.metadata
import os
import re
import shutil
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

kernel_info = kernels.describe()
assert kernel_info.enabled, kernel_info.why
assert cpu_backend.ACTIVE.blas, cpu_backend.ACTIVE.why
assert not any(map(shutil.which, ["cc", "c++", "gcc", "g++", "clang"]))
weight = mx.random.randint(-8, 8, (96, 256)).astype(mx.float32)
x = mx.random.randint(-8, 8, (5, 256)).astype(mx.float32)
ops = kernels.ops()
for kind in (mx.float32, mx.bfloat16, mx.float16):
    assert mx.array_equal(ops.Matmul(ops.repack(weight.astype(kind)))(x), x @ weight.T), kind
for bits in (4, 8):
    packed = mx.quantize(weight, group_size=64, bits=bits)
    laid = ops.repack(packed[0], bits), *map(ops.repack_scales, packed[1:])
    ours = ops.Matmul(*laid, group_size=64, bits=bits)(x)
    theirs = mx.quantized_matmul(x, *packed, group_size=64, bits=bits)
    assert mx.allclose(ours, theirs, rtol=1e-4, atol=1e-2), bits
blas = cpu_backend.ACTIVE.blas
print(f"kernels: {kernel_info.isa}, {kernel_info.threads} threads, BLAS {blas}")
"""


class WheelError(Exception):
    """A wheel that must not be published."""


def run(*command: str | Path, **options) -> None:
    """Run a command; its output is shown only if it fails."""
    process = subprocess.run(
        [str(word) for word in command],
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        **options,
    )
    if process.returncode:
        raise WheelError(f"{' '.join(map(str, command))}\n{process.stdout}")


def build_wheel(folder: Path) -> Path:
    """Build a wheel for this machine, from an sdist."""
    hook = "import sys; sys.path.insert(0, 'deploy/wheel'); from backend import build_sdist"
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
    DIST.mkdir(exist_ok=True)
    shutil.copy(sources, DIST)
    return wheel


def manylinux_tag() -> str:
    """The tag of MLX's own library, for example manylinux_2_35_x86_64."""
    metadata = importlib.metadata.distribution("mlx-cpu").read_text("WHEEL") or ""
    tags = re.findall(r"^Tag: .*-(manylinux_\d+_\d+_\w+)$", metadata, re.MULTILINE)
    if not tags:
        raise WheelError("the mlx-cpu wheel has no manylinux tag")
    return tags[0]


def tag_wheel(wheel: Path, tag: str) -> Path:
    """Write the wheel to dist with the tag, if its libraries are compatible with it. libmlx.so is
    not included: MLX's own wheel has it."""
    tagged_wheel = DIST / re.sub(r"-linux_\w+[.]whl$", f"-{tag}.whl", wheel.name)
    tagged_wheel.unlink(missing_ok=True)
    run(
        *(BIN / "auditwheel", "repair", "--plat", tag, "--only-plat"),
        *("--exclude", "libmlx.so", "--wheel-dir", DIST, wheel),
        env={**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"},
    )
    assert tagged_wheel.is_file()
    return tagged_wheel


def install_and_check(wheel: Path, folder: Path) -> str:
    """Install the wheel as a user would, and run the check script. Returns its output."""
    environment = folder / "environment"
    venv.create(environment, with_pip=True)
    python = environment / "bin/python"
    variables = {**os.environ, "PATH": str(environment / "bin")}
    run(
        *(python, "-m", "pip", "install", "--only-binary=:all:", wheel),
        cwd=folder,
        env=variables,
    )
    process = subprocess.run(
        [python, "-c", CHECK_SCRIPT],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        raise WheelError(process.stderr)
    return process.stdout.strip()


PLAIN_WHEELS = {
    "macos": ("mlxrunner-{}-py3-none-macosx_14_0_arm64.whl", "mlx>=", "mlx-cuda"),
    "cuda": ("mlxrunner_cuda-{}-py3-none-any.whl", "mlx[cuda13]>=", "mlx[cpu]"),
}


def build_plain_wheel(target: str, reference: Path) -> Path:
    """Build the wheel without kernels for a target (deploy/wheel/backend.py). It must have the same
    modules and data as the reference, a wheel with kernels."""
    pattern, required, excluded = PLAIN_WHEELS[target]
    wheel = DIST / pattern.format(reference.name.split("-")[1])
    wheel.unlink(missing_ok=True)
    run(
        *(sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps"),
        *("--wheel-dir", DIST, ROOT),
        env={**os.environ, "MLXRUNNER_BUILD_FOR": target},
    )
    if not wheel.is_file():
        raise WheelError(
            f"{wheel.name} was not built, but {[path.name for path in DIST.iterdir()]}"
        )
    if list_content(wheel) != list_content(reference):
        difference = list_content(wheel) ^ list_content(reference)
        raise WheelError(f"{wheel.name} and {reference.name} differ: {sorted(difference)}")
    with zipfile.ZipFile(wheel) as opened:
        [name] = [name for name in opened.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = opened.read(name).decode()
    if f"Requires-Dist: {required}" not in metadata or f"Requires-Dist: {excluded}" in metadata:
        raise WheelError(f"{wheel.name} has other requirements:\n{metadata}")
    return wheel


def list_content(wheel: Path) -> set[str]:
    """The files of the package mlxrunner, except for compiled files."""
    with zipfile.ZipFile(wheel) as opened:
        names = {name for name in opened.namelist() if name.startswith("mlxrunner/")}
    # auditwheel adds entries for folders
    return {name for name in names if not name.endswith((".so", "/"))}


def main() -> int:
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            wheel = build_wheel(folder)
            print(f"built from an sdist: {wheel.name}", flush=True)
            tagged_wheel = tag_wheel(wheel, manylinux_tag())
            print(
                f"tagged: {tagged_wheel.relative_to(ROOT)}, "
                f"{tagged_wheel.stat().st_size / 2**20:.1f} MiB",
                flush=True,
            )
            print(install_and_check(tagged_wheel, folder), flush=True)
        for target in PLAIN_WHEELS:
            plain_wheel = build_plain_wheel(target, tagged_wheel)
            print(f"for {target}: {plain_wheel.relative_to(ROOT)}", flush=True)
    except WheelError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
