"""`make test-device`: everything that needs a GPU, with one command on a Mac or an NVIDIA machine.

make test-device                            the tests marked `gpu`, then a table of speeds
make test-device ARGS="-k llama"            some of the tests, and no table
make test-device ARGS="--size Qwen3-0.6B"   the table for a larger model

Exit status: 0 if all tests pass, 1 if a test fails, 77 if MLX has no GPU and nothing was tested.
Other statuses come from pytest. `make` itself exits with 2 whenever the command fails.
"""

import argparse
import importlib.metadata
import os
import platform
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from app.commands.device_report import describe_device, find_device_problems, render_device_lines
from benchmarks.cpu_cells import SHAPES
from tests.device import speed_table
from tests.device.conftest import DEVICE_VARIABLE

NO_GPU = 77

_FOLDER = Path(__file__).parent

# Read by MLX when it first multiplies. Otherwise, some GPUs round the inputs of float32 products.
_FULL_PRECISION = {"MLX_ENABLE_TF32": "0"}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make test-device",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--size", choices=list(SHAPES), default="110M", help="of the table's model")
    parser.add_argument("--rounds", type=int, default=3, help="of the table; 0 for no table")
    arguments, selection = parser.parse_known_args()
    device = mx.default_device()
    if device.type == mx.DeviceType.cpu and os.environ.get(DEVICE_VARIABLE) != "cpu":
        print(
            "no GPU: MLX computes on the CPU of this machine, and nothing was tested. "
            "`mlxrunner doctor` shows the reason.",
            flush=True,
        )
        return NO_GPU
    print(_describe_machine(device), flush=True)
    table_environment = dict(os.environ)
    os.environ.update(_FULL_PRECISION)
    options = ["-m", "gpu", "--no-cov", "-p", "no:cacheprovider", *selection, str(_FOLDER)]
    status = pytest.main(options)
    if status or selection or not arguments.rounds:
        return int(status)
    os.environ.clear()
    os.environ.update(table_environment)
    print(f"\n{arguments.size}, random weights, tokens/s over HTTP on {device}:\n", flush=True)
    print(speed_table.report(arguments.size, arguments.rounds), flush=True)
    return 0


def _describe_machine(device: mx.Device) -> str:
    found = describe_device(dict(mx.device_info()))
    lines = [
        f"{platform.platform()}, Python {platform.python_version()}, "
        f"MLX {importlib.metadata.version('mlx')} on {device}",
        *(f"{label}: {value}" for label, value in render_device_lines(found)),
        *(f"problem: {problem}" for problem in find_device_problems(found)),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
