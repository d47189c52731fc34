"""Our side of `make bench-cpu`, in a process of its own: what MLX computes with is settled once.

python -m tests.bench.cpu_worker ours FOLDER                  measures what it is told to
python -m tests.bench.cpu_worker stock FOLDER                 the same, as MLX alone has it
python -m tests.bench.cpu_worker look FOLDER STREAMS          tells where a step's time goes
python -m tests.bench.cpu_worker step FOLDER STREAMS SECONDS  takes steps while perf looks on
"""

import sys
from pathlib import Path

# before anything imports MLX: this settles its BLAS
import models  # noqa: F401
from tests.bench import cpu_breakdown, cpu_mlx
from tests.bench.cpu_backends import serve_measurements


def main(what: str, place: str, *rest: str) -> None:
    folder = Path(place)
    match what, rest:
        case "ours" | "stock", ():
            worker = cpu_mlx.MlxWorker(cpu_mlx.load(folder, stock=what == "stock"))
            serve_measurements(worker.measure, cpu_mlx.describe_backend())
        case "look", (streams,):
            print(cpu_breakdown.profile_step(folder, int(streams)))
        case "step", (streams, seconds):
            cpu_breakdown.run_steps(folder, int(streams), float(seconds))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(*sys.argv[1:])
