"""`make bench`: every figure that a document quotes, in one run.

make bench                          everything (on a two-core CPU: an hour with stock MLX)
make bench ARGS="decode ttft"       some of it
make bench ARGS="--size 15M"        on a smaller model
"""

import argparse
import importlib.metadata
import os
import platform
import tempfile
from pathlib import Path

import mlx.core as mx

from models.builtin.score import HELD_BACK, questions, score
from models.builtin.score import report as scores
from tests.bench import grid, random_model, switch
from tests.bench.builtin import chat
from tests.bench.serving import MEASUREMENTS
from tests.serving import Served, serving

CHOICES = [*MEASUREMENTS, "builtin", "start", "grid", "switch"]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="make bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", nargs="*", metavar="WHAT", help=f"of {', '.join(CHOICES)}")
    parser.add_argument("--size", choices=list(random_model.SHAPES), default="110M")
    arguments = parser.parse_args()
    for name in arguments.what:
        if name not in CHOICES:
            parser.error(f"{name} is none of {', '.join(CHOICES)}")
    wanted = arguments.what or CHOICES
    print(_machine(arguments.size), flush=True)
    if "start" in wanted:
        print(_start(), flush=True)
    if "builtin" in wanted:
        with serving() as server:
            print(scores(score(chat(server.url), questions(HELD_BACK))), flush=True)
    with tempfile.TemporaryDirectory() as place:
        folder = random_model.write(Path(place), arguments.size)
        measured = [name for name in MEASUREMENTS if name in wanted]
        if measured:
            with serving(str(folder)) as server:
                for name in measured:
                    print(MEASUREMENTS[name](server, folder), flush=True)
        if "grid" in wanted:
            print(grid.report(folder), flush=True)
        if "switch" in wanted:
            print(switch.report(folder), flush=True)


def _machine(size: str) -> str:
    preloaded = os.environ.get("LD_PRELOAD", "nothing")
    return (
        f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"MLX {importlib.metadata.version('mlx')} on {mx.default_device()}, "
        f"LD_PRELOAD {preloaded}; random {size} Llama in float32, client on the same machine"
    )


def _start() -> str:
    """Seconds from the command to the first answer of /v1/status, on the built-in model."""
    import time

    times: list[float] = []
    for _ in range(5):
        server = Served([])
        server.status()
        times.append(time.monotonic() - server.started)
        server.stop()
    return f"from the command to listening, s: {', '.join(f'{t:.2f}' for t in times)}"


if __name__ == "__main__":
    main()
