"""`make test-device`, on a machine without a GPU."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from benchmarks.cpu_http import ScenarioRounds
from benchmarks.cpu_scenarios import TOKENS
from tests.device.__main__ import NO_GPU
from tests.device.conftest import DEVICE_VARIABLE
from tests.device.speed_table import format_head, format_rows

ROOT = Path(__file__).resolve().parents[2]

without_gpu = pytest.mark.skipif(
    mx.default_device().type != mx.DeviceType.cpu, reason="this machine has a GPU"
)


def run_command(*arguments: str, **variables: str) -> tuple[int, str]:
    """The exit status and the output."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.device", *arguments],
        cwd=ROOT,
        env={**os.environ, "COVERAGE_PROCESS_CONFIG": "", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return process.returncode, process.stdout


@without_gpu
def test_without_a_gpu_one_line_says_so_and_the_status_is_its_own() -> None:
    status, printed = run_command(**{DEVICE_VARIABLE: ""})
    assert status == NO_GPU
    assert printed.startswith("no GPU: MLX computes on the CPU of this machine")
    assert printed.count("\n") == 1


@without_gpu
def test_without_a_gpu_the_tests_are_skipped() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--no-cov", "-m", "gpu", "-k", "llama-tied",
         "tests/device/test_device.py"],
        cwd=ROOT, env={**os.environ, DEVICE_VARIABLE: ""}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert re.search(r"\n2 skipped", process.stdout), process.stdout
    assert "MLX has no GPU" in process.stdout


@pytest.mark.exhaustive
@without_gpu
def test_the_tests_of_a_device_run_on_a_cpu_on_request() -> None:
    chosen = "llama-tied or compiled or (alone and radix) or (default and llama)"
    status, printed = run_command("-k", chosen, **{DEVICE_VARIABLE: "cpu"})
    assert status == 0, printed
    assert f"MLX {importlib.metadata.version('mlx')} on Device(cpu" in printed
    count = re.search(r"(\d+) passed", printed)
    assert count is not None
    assert int(count[1]) > 8
    assert "tokens/s" not in printed, "a selection has no table"


# Runs the command with a device whose final norms are wrong by a percent. The reference is right.
WRONG_DEVICE = """
import mlx.core as mx, sys
from tests.device import __main__ as command, test_device

load = test_device.load_on_device

def load_wrongly(folder):
    model = load(folder)
    model.model.norm.weight = model.model.norm.weight * mx.array(1.01)
    return model

test_device.load_on_device = load_wrongly
sys.argv = ["test-device", "-k", "llama-tied", "-W", "ignore:Module already imported"]
sys.exit(command.main())
"""


@pytest.mark.exhaustive
@without_gpu
def test_a_device_that_computes_wrong_results_fails() -> None:
    process = subprocess.run(
        [sys.executable, "-c", WRONG_DEVICE],
        cwd=ROOT,
        env={**os.environ, DEVICE_VARIABLE: "cpu", "COVERAGE_PROCESS_CONFIG": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert process.returncode == 1, process.stdout
    assert "2 failed" in process.stdout


def make_rounds(*rates: float) -> ScenarioRounds:
    return ScenarioRounds([{TOKENS: rate} for rate in rates])


def test_the_table_has_the_rows_of_the_readme() -> None:
    found = {
        ("1 client", "mlxrunner"): make_rounds(200.0, 220.0, 210.0),
        ("1 client", "mlx-lm"): make_rounds(100.0, 100.0, 105.0),
        ("8 clients", "mlxrunner"): make_rounds(900.0),
    }
    assert format_rows("4 bits", found) == [
        "| 4 bits, 1 client | 210 | 100 | 2 |",
        "| 4 bits, 8 clients | 900 | – | – |",
    ]
    readme = (ROOT / "README.md").read_text("utf-8")
    assert "| 4 bits, 1 client |" in readme
    assert "| 4 bits, 8 clients |" in readme
    assert [line.count("|") for line in format_head()] == [5, 5]
