"""`mlxrunner doctor`: its report of a machine, and the problems that it finds."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from app import cli
from app.commands import doctor
from app.commands.device_report import DeviceDescription
from app.commands.doctor import Findings, diagnose, find_problems, render_lines
from app.core.errors import AppError, ErrorKind
from models import cpu_backend, kernels
from tests.server_process import ROOT

GOOD = Findings(
    python="3.11.1",
    mlx="1.2.3",
    library="mlx-cpu",
    device="cpu",
    cpu="A CPU",
    threads=2,
    gigaflops=123.4,
    blas="OpenBLAS 9.9 (Fake)",
    blas_why=None,
    called=True,
    kernels="avx2",
    kernels_why=None,
    tiles_why="the processor has no AMX",
    activations="auto",
    memory=6 << 30,
    scratch="/tmp/ours",
    models={"built in": 1, "hub": 2, "ollama": 0},
    stores=None,
    gpu=DeviceDescription(system="Linux"),
)

STOCK_BLAS = replace(GOOD, blas=None, called=None, blas_why="MLXRUNNER_BLAS is stock")
NO_KERNELS = replace(GOOD, kernels=None, kernels_why="they were not built")
ON_GPU = replace(
    GOOD,
    device="gpu",
    library="mlx-cuda-13",
    blas=None,
    called=None,
    kernels=None,
    kernels_why="no",
    blas_why="no",
)

needs_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="no problems are known on other systems"
)


def test_the_report_of_a_machine_without_problems() -> None:
    report = dict(render_lines(GOOD))
    assert report["MLX"] == "1.2.3, on the CPU, libmlx.so of mlx-cpu"
    assert report["processor"] == "A CPU, 2 threads"
    assert report["BLAS"] == "OpenBLAS 9.9 (Fake); matmul at 123 GFLOP/s"
    assert report["kernels"] == (
        "avx2; 16-bit (float32 models: 24-bit) activations in 4- and 8-bit layers"
    )
    assert report["tiles"] == "off: the processor has no AMX"
    assert dict(render_lines(replace(GOOD, tiles_why=None)))["tiles"] == "on"
    assert report["memory"] == "6.00 GiB available"
    assert report["models"] == "1 built in, 2 hub, 0 ollama"
    assert list(find_problems(GOOD, {})) == []


def test_unused_libraries_are_reported_with_the_reason() -> None:
    report = dict(
        render_lines(replace(STOCK_BLAS, kernels=None, kernels_why="they were not built"))
    )
    assert report["BLAS"] == "MLX's own: MLXRUNNER_BLAS is stock; matmul at 123 GFLOP/s"
    assert report["kernels"] == "none: they were not built"
    assert "tiles" not in report


def test_the_report_of_a_gpu_has_neither_blas_nor_kernels() -> None:
    report = dict(render_lines(ON_GPU))
    assert report["MLX"] == "1.2.3, on the GPU, libmlx.so of mlx-cuda-13"
    assert not {"BLAS", "kernels"} & report.keys()
    assert list(find_problems(ON_GPU, {})) == []


@needs_linux
@pytest.mark.parametrize(
    ("findings", "expected"),
    [
        (replace(STOCK_BLAS, blas_why=cpu_backend.NOT_FOUND), "reference BLAS"),
        (
            replace(STOCK_BLAS, blas_why=f"{cpu_backend.NOT_BUILT}: no g++"),
            "was not built: no g++. Install OpenBLAS",
        ),
        (replace(GOOD, called=False), "MLX does not call it"),
        (
            replace(GOOD, tiles_why=f"{kernels.TILE_TEST_FAILED}: a product differs"),
            "a wrong result, so prompts are slower without them: the known-answer test failed: a",
        ),
        (NO_KERNELS, "so decoding is slower: they were not built"),
        (replace(STOCK_BLAS, blas_why=cpu_backend.USES_CUDA), "found no GPU"),
        (replace(GOOD, memory=1 << 20), "only 1.00 MiB of memory is available"),
        (replace(GOOD, scratch=None), "set TMPDIR"),
        (replace(GOOD, models={}, stores="planted"), "could not be listed: planted"),
    ],
)
def test_each_problem_is_one_sentence(findings: Findings, expected: str) -> None:
    [problem] = find_problems(findings, {})
    assert expected in problem


def test_disabled_features_are_no_problem() -> None:
    assert list(find_problems(STOCK_BLAS, {})) == []
    assert list(find_problems(NO_KERNELS, {"MLXRUNNER_KERNELS": "off"})) == []


def test_features_excluded_at_install_are_no_problem() -> None:
    why = "the CPU kernels are not built, because MLXRUNNER_BUILD_KERNELS=0 is set"
    assert list(find_problems(replace(NO_KERNELS, kernels_why=why), {})) == []


def test_the_exit_status_tells_whether_there_are_problems(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "_examine", lambda: GOOD)
    assert diagnose(as_json=False) == 0
    assert capsys.readouterr().out.endswith("\n\nno problems found\n")
    monkeypatch.setattr(doctor, "_examine", lambda: replace(GOOD, scratch=None))
    assert diagnose(as_json=True) == 1
    [problem] = json.loads(capsys.readouterr().out)["lost"]
    assert "TMPDIR" in problem


def test_models_that_cannot_be_listed_are_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise AppError(ErrorKind.MODEL_FILES, "planted")

    monkeypatch.setattr("app.store.list_installed", fail)
    assert diagnose(as_json=True) == 1
    assert json.loads(capsys.readouterr().out)["stores"] == "planted"


def test_the_command_examines_this_machine() -> None:
    variables = {"MLXRUNNER_KERNELS": "off", "MLXRUNNER_BLAS": "stock", "MLXRUNNER_THREADS": "3"}
    process = subprocess.run(
        [sys.executable, "-m", "app", "doctor", "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, **variables, "MLXRUNNER_ACTIVATIONS": "16"},
        check=False,
    )
    report = json.loads(process.stdout)
    assert (process.returncode, process.stderr, report["lost"]) == (0, "", [])
    assert (report["threads"], report["models"]["built in"]) == (3, 1)
    assert report["activations"] == 16
    assert report["library"] == ("mlx-cpu" if sys.platform == "linux" else None)
    assert report["gigaflops"] > 0
    assert report["memory"] > 0


# runs the command once with each variable
ONE_BY_ONE = """
import os, sys
from app import cli
for name, value in zip(sys.argv[1::2], sys.argv[2::2]):
    os.environ[name] = value
    print("status", cli.main(["doctor"]), file=sys.stderr)
    del os.environ[name]
"""


@needs_linux
def test_an_invalid_variable_is_an_error_of_one_line() -> None:
    """The variables are read before MLX is imported, and an error prevents the import: so one
    process can try them all."""
    cases = (
        ("MLXRUNNER_BLAS", "/nowhere/lib.so"),
        ("MLXRUNNER_THREADS", "many"),
        ("MLXRUNNER_THREADS", "257"),
    )
    words = [word for case in cases for word in case]
    command = [sys.executable, "-c", ONE_BY_ONE, *words]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert process.stdout == ""
    lines = process.stderr.splitlines()
    assert lines[1::2] == ["status 1"] * len(cases)
    for (name, value), line in zip(cases, lines[::2], strict=True):
        assert line.startswith(f"mlxrunner: {name}: ")
        assert value in line


def test_an_invalid_setting_is_an_error_of_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLXRUNNER_ACTIVATIONS", "12")
    assert cli.main(["doctor"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    [line] = err.splitlines()
    assert line.startswith("mlxrunner: MLXRUNNER_ACTIVATIONS: ")
    assert "12" in line
