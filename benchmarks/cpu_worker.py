"""Our worker of `make bench-cpu`, a process because MLX's backend is selected once per process.

python -m benchmarks.cpu_worker ours FOLDER                  serves measurements
python -m benchmarks.cpu_worker ours FOLDER BITS             with activations of so many bits
python -m benchmarks.cpu_worker stock FOLDER                 the same with stock MLX
python -m benchmarks.cpu_worker profile FOLDER STREAMS       prints the time of a step by module
python -m benchmarks.cpu_worker step FOLDER STREAMS SECONDS  runs steps for perf
"""

import sys
from pathlib import Path
from typing import cast

# before any import of MLX, because this selects its BLAS
import models  # noqa: F401
from app.core.settings import ActivationPrecision
from benchmarks import cpu_breakdown, cpu_mlx
from benchmarks.cpu_backends import serve_measurements


def main(what: str, place: str, *rest: str) -> None:
    folder = Path(place)
    match what, rest:
        case "ours" | "stock", ():
            worker = cpu_mlx.MlxWorker(cpu_mlx.load(folder, stock=what == "stock"))
            serve_measurements(worker.measure, cpu_mlx.describe_backend())
        case "ours", (bits,):
            worker = cpu_mlx.MlxWorker(
                cpu_mlx.load(folder, activations=cast(ActivationPrecision, int(bits)))
            )
            serve_measurements(worker.measure, cpu_mlx.describe_backend())
        case "profile", (streams,):
            print(cpu_breakdown.profile_step(folder, int(streams)))
        case "step", (streams, seconds):
            cpu_breakdown.run_steps(folder, int(streams), float(seconds))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(*sys.argv[1:])
