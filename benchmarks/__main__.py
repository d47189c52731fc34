"""`make bench`: all figures that the docs quote, in one run.

make bench                          everything (on a two-core CPU: an hour with stock MLX)
make bench ARGS="decode ttft"       some of it
make bench ARGS="--size 15M"        on a smaller model
make bench ARGS="soak --minutes 60" for longer
make bench ARGS="delivery start --baseline 8b51e97"
                                    compared with an older commit

`make bench-cpu` compares a Linux CPU with its limits and with other engines. Earlier figures,
with the conditions and the commands of each, are in benchmarks/results.
"""

import argparse
import importlib.metadata
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from benchmarks import (
    activations,
    agreement,
    arrivals,
    batches,
    block_products,
    chunk_alignment,
    delivery,
    frames,
    grammars,
    graph,
    image_answers,
    image_streams,
    image_towers,
    kv_layouts,
    kv_precision,
    loading,
    prefix_hits,
    prefix_inserts,
    prefix_reuse,
    quant_parity,
    random_model,
    replay,
    rounding,
    runners,
    sampling,
    soak,
    start,
    switch_interval,
    token_posts,
    versus_mlx_lm,
    weight_layout,
)
from benchmarks.builtin import make_chat_client
from benchmarks.serving import MEASUREMENTS
from tests.conftest import SHARED
from tests.server_process import run_server
from tools.builtin_model.evaluate import HELD_OUT, evaluate, load_questions
from tools.builtin_model.evaluate import format_report as scores

# measurements on a random-weight model folder, in this process or with their own servers
MODEL_REPORTS: dict[str, Callable[[Path], str]] = {
    "grid": chunk_alignment.report,
    "switch": switch_interval.report,
    "layouts": kv_layouts.report,
    "versus": versus_mlx_lm.report,
    "agreement": agreement.report,
    "weights": weight_layout.report,
    "grammars": grammars.report,
    "sampling": sampling.report,
    "activations": activations.report,
    "runners": runners.report,
    "posts": token_posts.report,
    "reuse": prefix_reuse.report,
    "arrivals": arrivals.report,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="make bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", nargs="*", metavar="WHAT", help=f"of {', '.join(CHOICES)}")
    parser.add_argument("--size", choices=list(random_model.SHAPES), default="110M")
    parser.add_argument("--minutes", type=float, default=10.0, help="of soak (%(default)g)")
    parser.add_argument("--baseline", metavar="COMMIT", help="compare delivery and start with it")
    arguments = parser.parse_args()
    for name in arguments.what:
        if name not in CHOICES:
            parser.error(f"unknown measurement {name}; choose from {', '.join(CHOICES)}")
    selected = arguments.what or CHOICES
    print(_describe_machine(arguments.size), flush=True)
    for name, report in OTHER_REPORTS.items():
        if name in selected:
            print(report(), flush=True)
    if "delivery" in selected:
        print(delivery.report(arguments.baseline), flush=True)
    if "start" in selected:
        print(start.report(arguments.baseline), flush=True)
    if "soak" in selected:
        text, well = soak.report(arguments.minutes)
        print(text, flush=True)
        if not well:
            raise SystemExit(1)
    with tempfile.TemporaryDirectory() as place:
        folder = random_model.write(Path(place), arguments.size)
        measured = [name for name in MEASUREMENTS if name in selected]
        if measured:
            with run_server(str(folder)) as server:
                for name in measured:
                    print(MEASUREMENTS[name](server, folder), flush=True)
        for name, report in MODEL_REPORTS.items():
            if name in selected:
                print(report(folder), flush=True)


def _describe_machine(size: str) -> str:
    preloaded = os.environ.get("LD_PRELOAD", "nothing")
    return (
        f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"MLX {importlib.metadata.version('mlx')} on {mx.default_device()}, "
        f"LD_PRELOAD {preloaded}; random {size} Llama in float32, client on the same machine"
    )


def _replay_traces() -> str:
    if not SHARED.is_dir():
        return "traces: not replayed (../shared/data is missing)"
    return replay.report(SHARED)


def _measure_builtin() -> str:
    with run_server() as server:
        return scores(evaluate(make_chat_client(server.url), load_questions(HELD_OUT)))


# measurements that need no model folder
OTHER_REPORTS: dict[str, Callable[[], str]] = {
    "blocks": block_products.report,
    "builtin": _measure_builtin,
    "traces": _replay_traces,
    "hits": prefix_hits.report,
    "kinds": quant_parity.report,
    "batches": batches.report,
    "rounding": rounding.report,
    "graph": graph.report,
    "kv": kv_precision.report,
    "loading": loading.report,
    "inserts": prefix_inserts.report,
    "frames": frames.report,
    "images": image_streams.report,
    "towers": image_towers.report,
    "first-image": image_answers.report,
}
CHOICES = [*MEASUREMENTS, *MODEL_REPORTS, *OTHER_REPORTS, "delivery", "start", "soak"]


if __name__ == "__main__":
    main()
