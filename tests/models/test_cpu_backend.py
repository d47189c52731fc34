"""Selection of the BLAS library, in new processes and with fake libraries."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import cpu_backend
from models.cpu_backend import CpuBackend, CpuBackendError

ROOT = Path(__file__).resolve().parents[2]

# a BLAS with row-major products only, which counts calls. Its gemv multiplies the output buffer by
# beta even if beta is 0
BLAS = """
#define GLUE(a, b) a##b
#define NAME(a, b) GLUE(a, b)
static int products, vectors;
int fake_products(void) { return products; }
int fake_vectors(void) { return vectors; }
const char* NAME(P, openblas_get_config)(void) { return CONFIG; }
const char* NAME(P, openblas_get_corename)(void) { return "Fake"; }
#define PRODUCT(NUMBER, F) \\
  void NAME(P, F)(int o, int ta, int tb, int m, int n, int k, NUMBER alpha, const NUMBER* a, \\
                  int lda, const NUMBER* b, int ldb, NUMBER beta, NUMBER* c, int ldc) { \\
    products++; \\
    for (int i = 0; i < m; i++) for (int j = 0; j < n; j++) { \\
      NUMBER sum = 0; \\
      for (int l = 0; l < k; l++) \\
        sum += (ta == 111 ? a[i * lda + l] : a[l * lda + i]) \\
             * (tb == 111 ? b[l * ldb + j] : b[j * ldb + l]); \\
      c[i * ldc + j] = alpha * sum + (beta == 0 ? 0 : beta * c[i * ldc + j]); } }
PRODUCT(float, cblas_sgemm)
PRODUCT(double, cblas_dgemm)
void NAME(P, cblas_cgemm)(void) { products++; }
void NAME(P, cblas_sgemv)(int o, int t, int m, int n, float alpha, const float* a, int lda,
                          const float* x, int incx, float beta, float* y, int incy) {
  vectors++;
  for (int i = 0; i < (t == 111 ? m : n); i++) {
    float sum = 0;
    for (int l = 0; l < (t == 111 ? n : m); l++)
      sum += (t == 111 ? a[i * lda + l] : a[l * lda + i]) * x[l * incx];
    y[i * incy] = alpha * sum + beta * y[i * incy]; } }
"""

# `models` without its __init__, which selects the BLAS for the whole process
FRESH = f"""
import json, os, sys, types
from pathlib import Path
package = types.ModuleType("models")
package.__path__ = [{str(ROOT / "models")!r}]
sys.modules["models"] = package
from models import cpu_backend
os.environ.pop("MLXRUNNER_BLAS")
requested, shim = sys.argv[1], Path(sys.argv[2])
if requested:
    os.environ["MLXRUNNER_BLAS"] = requested
def select():
    found = cpu_backend.select_blas(os.environ, shim=shim)
    return {{name: getattr(found, name) for name in ("blas", "path", "why")}}
def product():
    import mlx.core as mx
    return float((mx.ones((8, 6)) @ mx.ones((6, 8))).sum())
def report(**result):
    print(json.dumps(result))
"""

CC = shutil.which("cc")

on_linux = pytest.mark.skipif(
    sys.platform != "linux" or CC is None, reason="needs Linux, and a compiler for its libraries"
)


def compile_library(out: Path, *arguments: str | Path) -> Path:
    assert CC is not None
    command = [CC, "-O1", "-fPIC", "-shared", "-w", "-o", out, *arguments, "-ldl"]
    subprocess.run(list(map(str, command)), check=True)
    return out


def build_fake_blas(folder: Path, *, prefix: str = "", config: str = "OpenBLAS 9.9 FAKE") -> Path:
    source = folder / "fake.c"
    source.write_text(BLAS)
    out = folder / f"lib{prefix}fake.so"
    return compile_library(out, source, f"-DP={prefix}", f'-DCONFIG="{config}"')


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shim") / "libmlxrunner_blas.so"
    return compile_library(out, ROOT / "models" / "kernels" / "src" / "blas_shim.c")


def run_fresh(
    program: str, requested: object = "", shim: object = "/nowhere", **environ: str
) -> Any:
    process = subprocess.run(
        [sys.executable, "-c", FRESH + program, str(requested), str(shim)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "MLXRUNNER_BLAS": "stock", **environ},
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


COUNT_CALLS = """
import ctypes
found = select()
report(found=found, sum=product(), products=ctypes.CDLL(requested).fake_products(),
       through=cpu_backend.count_blas_calls(shim) if shim.is_file() else None)
"""


@on_linux
def test_mlx_calls_the_requested_library(tmp_path: Path) -> None:
    library = build_fake_blas(tmp_path)
    result = run_fresh(COUNT_CALLS, library)
    assert result["found"] == {"blas": "OpenBLAS 9.9 (Fake)", "path": str(library), "why": None}
    assert (result["sum"], result["products"]) == (384.0, 1)


@on_linux
@pytest.mark.parametrize("prefix", ["", "scipy_"])
def test_the_shim_calls_a_library_with_any_symbol_prefix(
    tmp_path: Path, shim: Path, prefix: str
) -> None:
    library = build_fake_blas(tmp_path, prefix=prefix)
    result = run_fresh(COUNT_CALLS, library, shim)
    assert result["found"]["blas"] == "OpenBLAS 9.9 (Fake)"
    assert (result["sum"], result["products"], result["through"]) == (384.0, 1, 1)


REPORT_ERROR = """
import ctypes
try:
    select()
except cpu_backend.CpuBackendError as error:
    report(error=str(error), shown=hasattr(ctypes.CDLL(None), "cblas_sgemm"))
"""


@on_linux
@pytest.mark.parametrize("ours", [True, False])
def test_a_library_with_64_bit_integers_is_refused(tmp_path: Path, shim: Path, ours: bool) -> None:
    library = build_fake_blas(tmp_path, config="OpenBLAS 9.9 USE64BITINT")
    result = run_fresh(REPORT_ERROR, library, shim if ours else "/nowhere")
    assert "uses 64-bit integers, but MLX requires 32-bit integers" in result["error"]
    assert not result["shown"], "MLX would call it in spite of the error"


@on_linux
def test_a_symbol_prefix_needs_the_shim(tmp_path: Path) -> None:
    result = run_fresh(REPORT_ERROR, build_fake_blas(tmp_path, prefix="scipy_"))
    assert "requires the BLAS shim, which was not built" in result["error"]
    assert not result["shown"]


@on_linux
@pytest.mark.parametrize(
    ("requested", "words"),
    [
        ("/nowhere/libblas.so", "/nowhere/libblas.so cannot be used: /nowhere/libblas.so: cannot"),
        ("libm.so.6", "libm.so.6 has no CBLAS functions"),
    ],
)
def test_the_error_for_an_unusable_library_names_the_variable(requested: str, words: str) -> None:
    error = run_fresh(REPORT_ERROR, requested)["error"]
    assert error.startswith(f"MLXRUNNER_BLAS: {requested} cannot be used")
    assert words in error


@on_linux
@pytest.mark.parametrize(
    ("requested", "program", "why"),
    [
        ("stock", "report(**select())", "MLXRUNNER_BLAS is stock"),
        ("", "product(); report(**select())", "mlx.core was already imported before models"),
        # even if a library was requested: the report must be true
        (
            "openblas",
            "product(); report(**select())",
            "mlx.core was already imported before models",
        ),
    ],
)
def test_the_reason_is_reported_if_no_library_is_loaded(
    requested: str, program: str, why: str
) -> None:
    assert run_fresh(program, requested) == {"blas": None, "path": None, "why": why}


@on_linux
def test_stock_changes_no_variable() -> None:
    program = "before = dict(os.environ); select(); report(same=before == dict(os.environ))"
    assert run_fresh(program, "stock") == {"same": True}


@on_linux
def test_a_preloaded_library_is_reported(tmp_path: Path, shim: Path) -> None:
    """The dynamic linker finds its symbols before those of the shim."""
    program = "report(**select())"
    result = run_fresh(program, "", shim, LD_PRELOAD=str(build_fake_blas(tmp_path)))
    assert result == {"blas": "OpenBLAS 9.9 (Fake)", "path": None, "why": None}


@pytest.mark.parametrize(
    "first", ["models.architectures", "app.engine.device", "app.runners.worker"]
)
def test_the_blas_is_selected_before_mlx_is_imported(first: str) -> None:
    program = f"""
import sys, {first}
order = list(sys.modules)
assert order.index("models.cpu_backend") < order.index("mlx.core")
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


@pytest.mark.parametrize(
    ("environ", "set_by_us"),
    [
        ({}, {"OPENBLAS_NUM_THREADS": "3", "MKL_NUM_THREADS": "3"}),
        ({"OMP_NUM_THREADS": "1"}, {}),
        ({"OPENBLAS_NUM_THREADS": "1"}, {"MKL_NUM_THREADS": "3"}),
        ({"GOTO_NUM_THREADS": "1"}, {"MKL_NUM_THREADS": "3"}),
        ({"MKL_NUM_THREADS": "1"}, {"OPENBLAS_NUM_THREADS": "3"}),
    ],
)
def test_variables_set_by_the_user_are_not_changed(
    environ: dict[str, str], set_by_us: dict[str, str]
) -> None:
    waits = {"OPENBLAS_THREAD_TIMEOUT": "18", "KMP_BLOCKTIME": "0"}
    settings = cpu_backend._blas_variables  # pyright: ignore[reportPrivateUsage] pure
    assert settings(environ, 3) == waits | set_by_us
    assert settings(environ | dict.fromkeys(waits, "7"), 3) == set_by_us


def install_wheels(monkeypatch: pytest.MonkeyPatch, folder: Path, *names: str) -> None:
    for name in names:
        (folder / f"{name}.dist-info").mkdir(parents=True)
    found = SimpleNamespace(submodule_search_locations=[str(folder / "mlx")])
    monkeypatch.setattr("importlib.util.find_spec", lambda _: found)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")


def test_no_library_is_loaded_with_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_wheels(monkeypatch, tmp_path, "mlx-1.0", "mlx_cpu-1.0", "mlx_cuda_13-1.0")
    found = cpu_backend.select_blas({"MLXRUNNER_THREADS": "2", "MLXRUNNER_BLAS": "/nowhere"})
    assert found == CpuBackend(threads=2, why=cpu_backend.USES_CUDA)


def test_no_library_is_loaded_for_a_source_build_of_mlx(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install_wheels(monkeypatch, tmp_path, "mlx-1.0")
    found = cpu_backend.select_blas({"MLXRUNNER_THREADS": "2"})
    assert found.why == "MLX was not installed from its CPU wheel (mlx-cpu)"


@pytest.mark.parametrize(
    ("system", "machine", "why"),
    [
        ("darwin", "arm64", "MLX needs no other BLAS on this platform"),
        ("linux", "riscv64", "no BLAS is selected on riscv64"),
    ],
)
def test_no_library_is_loaded_on_other_platforms(
    monkeypatch: pytest.MonkeyPatch, system: str, machine: str, why: str
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    environ = {"MLXRUNNER_THREADS": "2"}
    assert cpu_backend.select_blas(environ) == CpuBackend(threads=2, why=why)
    assert environ == {"MLXRUNNER_THREADS": "2"}


def test_the_error_is_an_os_error_that_the_command_line_prints() -> None:
    assert issubclass(CpuBackendError, OSError)


@pytest.fixture(scope="module")
def shim_and_fake(shim: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """(the shim, which calls the fake library; the fake library)."""
    library = build_fake_blas(tmp_path_factory.mktemp("behind"))
    ours: Any = ctypes.CDLL(str(shim))
    why = ctypes.create_string_buffer(64)
    assert ours.mlxrunner_blas_open(str(library).encode(), b"", why, ctypes.c_size_t(64)) == 0
    number, address = ctypes.c_float, ctypes.c_void_p
    ours.cblas_sgemm.argtypes = [
        *[ctypes.c_int] * 6,
        *(number, address, ctypes.c_int, address, ctypes.c_int),
        *(number, address, ctypes.c_int),
    ]
    return ours, ctypes.CDLL(str(library))


@on_linux
@given(data=st.data())
def test_products_of_few_rows_use_gemv_with_the_same_result(
    shim_and_fake: tuple[Any, Any], data: st.DataObject
) -> None:
    """The output buffer has content, which must be used only if beta is not 0."""
    ours, behind = shim_and_fake
    rows, columns, depth = (data.draw(st.integers(0, most)) for most in (7, 9, 11))
    turned_a, turned_b = data.draw(st.booleans()), data.draw(st.booleans())
    alpha, beta = data.draw(st.sampled_from([1.0, -0.5])), data.draw(st.sampled_from([0.0, 2.0]))
    draw = np.random.default_rng(rows * 1000 + columns * 100 + depth)
    a, b = draw.normal(size=(rows, depth + 2)), draw.normal(size=(depth, columns + 3))
    a, b = a.astype(np.float32), b.astype(np.float32)
    left = np.ascontiguousarray(a.T) if turned_a else a
    right = np.ascontiguousarray(b.T) if turned_b else b
    out = np.full((rows, columns + 1), 3.0 if beta else np.nan, np.float32)
    vectors = behind.fake_vectors()
    ours.cblas_sgemm(
        *(101, 112 if turned_a else 111, 112 if turned_b else 111, rows, columns, depth),
        *(alpha, left.ctypes.data, max(1, left.shape[1])),
        *(right.ctypes.data, max(1, right.shape[1])),
        *(beta, out.ctypes.data, columns + 1),
    )
    expected = alpha * (a[:, :depth] @ b[:, :columns]) + (beta * 3.0 if beta else 0.0)
    few = 4 if turned_b else 2
    as_vectors = rows if rows <= few and depth and columns else 0
    assert behind.fake_vectors() - vectors == as_vectors
    np.testing.assert_allclose(out[:, :columns], expected, rtol=1e-5, atol=1e-5)
    assert np.isnan(out[:, columns]).all() or beta, "values beyond the product were overwritten"
