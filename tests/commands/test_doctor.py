"""What is said of a machine, and what of it counts as lost."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from app.commands import doctor
from app.commands.doctor import Findings, diagnose, find_problems, render_lines
from app.core.errors import AppError, ErrorKind
from models import cpu_backend

WELL = Findings(
    python="3.11.1",
    mlx="1.2.3",
    device="cpu",
    cpu="A CPU",
    threads=2,
    gigaflops=123.4,
    blas="OpenBLAS 9.9 (Fake)",
    blas_why=None,
    called=True,
    kernels="avx2",
    kernels_why=None,
    memory=6 << 30,
    scratch="/tmp/ours",
    models={"built in": 1, "hub": 2, "ollama": 0},
    stores=None,
)

STOCK = replace(WELL, blas=None, called=None, blas_why="MLXRUNNER_BLAS is stock")
NO_KERNELS = replace(WELL, kernels=None, kernels_why="they were not built")
ON_GPU = replace(
    WELL, device="gpu", blas=None, called=None, kernels=None, kernels_why="no", blas_why="no"
)

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere MLX lacks nothing")


def test_a_machine_that_is_well_is_told_in_a_few_lines() -> None:
    told = dict(render_lines(WELL))
    assert told["MLX"] == "1.2.3, on the CPU"
    assert told["processor"] == "A CPU, 2 threads"
    assert told["BLAS"] == "OpenBLAS 9.9 (Fake); matmul at 123 GFLOP/s"
    assert told["kernels"] == "avx2"
    assert told["memory"] == "6.00 GiB available"
    assert told["models"] == "1 built in, 2 hub, 0 ollama"
    assert list(find_problems(WELL, {})) == []


def test_where_something_is_not_in_use_it_says_why() -> None:
    told = dict(render_lines(replace(STOCK, kernels=None, kernels_why="they were not built")))
    assert told["BLAS"] == "MLX's own: MLXRUNNER_BLAS is stock; matmul at 123 GFLOP/s"
    assert told["kernels"] == "none: they were not built"


def test_a_gpu_has_neither_blas_nor_kernels_to_tell_of() -> None:
    told = dict(render_lines(ON_GPU))
    assert told["MLX"] == "1.2.3, on the GPU"
    assert not {"BLAS", "kernels"} & told.keys()
    assert list(find_problems(ON_GPU, {})) == []


@on_linux
@pytest.mark.parametrize(
    ("found", "words"),
    [
        (replace(STOCK, blas_why=cpu_backend.NOT_FOUND), "reference BLAS"),
        (
            replace(STOCK, blas_why=f"{cpu_backend.NOT_BUILT}: no g++"),
            "was not built: no g++. Install OpenBLAS",
        ),
        (replace(WELL, called=False), "MLX does not call it"),
        (NO_KERNELS, "so decoding is slower: they were not built"),
        (replace(STOCK, blas_why=cpu_backend.USES_CUDA), "found no GPU"),
        (replace(WELL, memory=1 << 20), "only 1.00 MiB are available"),
        (replace(WELL, scratch=None), "set TMPDIR"),
        (replace(WELL, models={}, stores="planted"), "could not be listed: planted"),
    ],
)
def test_each_loss_is_one_sentence(found: Findings, words: str) -> None:
    [loss] = find_problems(found, {})
    assert words in loss


def test_what_somebody_has_turned_off_is_no_loss() -> None:
    assert list(find_problems(STOCK, {})) == []
    assert list(find_problems(NO_KERNELS, {"MLXRUNNER_KERNELS": "off"})) == []


def test_what_the_install_was_asked_to_leave_out_is_no_loss() -> None:
    why = "the CPU kernels are not built, as MLXRUNNER_BUILD_KERNELS=0 asks"
    assert list(find_problems(replace(NO_KERNELS, kernels_why=why), {})) == []


def test_the_status_tells_whether_something_is_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "_examine", lambda: WELL)
    assert diagnose(as_json=False) == 0
    assert capsys.readouterr().out.endswith("\n\nno problems found\n")
    monkeypatch.setattr(doctor, "_examine", lambda: replace(WELL, scratch=None))
    assert diagnose(as_json=True) == 1
    [loss] = json.loads(capsys.readouterr().out)["lost"]
    assert "TMPDIR" in loss


def test_models_that_cannot_be_listed_are_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreadable() -> None:
        raise AppError(ErrorKind.MODEL_FILES, "planted")

    monkeypatch.setattr("app.store.list_installed", unreadable)
    assert diagnose(as_json=True) == 1
    assert json.loads(capsys.readouterr().out)["stores"] == "planted"


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "app", "doctor", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environ},
        check=False,
    )


def test_a_process_of_its_own_finds_what_is_there() -> None:
    said = {"MLXRUNNER_KERNELS": "off", "MLXRUNNER_BLAS": "stock", "MLXRUNNER_THREADS": "3"}
    ended = run("--json", **said)
    found = json.loads(ended.stdout)
    assert (ended.returncode, ended.stderr, found["lost"]) == (0, "", [])
    assert (found["threads"], found["models"]["built in"]) == (3, 1)
    assert found["gigaflops"] > 0
    assert found["memory"] > 0


@on_linux
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MLXRUNNER_BLAS", "/nowhere/lib.so"),
        ("MLXRUNNER_THREADS", "many"),
        ("MLXRUNNER_THREADS", "257"),
    ],
)
def test_what_was_asked_for_and_cannot_be_is_one_line(name: str, value: str) -> None:
    ended = run(**{name: value})
    assert (ended.returncode, ended.stdout) == (1, "")
    [line] = ended.stderr.splitlines()
    assert line.startswith(f"mlxrunner: {name}: ")
    assert value in line
