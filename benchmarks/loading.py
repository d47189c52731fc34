"""`make bench ARGS=loading`: time and memory to load 1 GB of weights.

Each load runs in its own process, so that its peak is measured separately: the peak memory of the
process minus the memory before the load, the peak of MLX's allocator, and the size of the weights.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from app import store
from app.engine.model_info import complete_config
from app.engine.weights import list_parameters, open_model, read_weights
from models import llama
from models.cpu_layout import apply_cpu_layout
from tests import tiny

# 1.0 GB in bfloat16, its largest tensor 131 MB
SHAPE: Mapping[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 8,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}

# stored type, number of layers for 1 GB, bits to quantize to
LOADS: Mapping[str, tuple[mx.Dtype, int, int | None]] = {
    "bfloat16": (mx.bfloat16, 9, None),
    "float32": (mx.float32, 4, None),
    "bfloat16, --quantize 8": (mx.bfloat16, 9, 8),
    "bfloat16, --quantize 4": (mx.bfloat16, 9, 4),
}

MB = 1_000_000

_STATUS = Path("/proc/self/status")


def write(folder: Path, dtype: mx.Dtype, shape: Mapping[str, Any], shards: int = 2) -> Path:
    """A Llama of random weights, all of one type, in `shards` files."""
    config = {**tiny.CONFIG, **shape}
    tiny.write(folder)
    (folder / "model.safetensors").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    flat: Any = tree_flatten(llama.Model(llama.Config.from_dict(config)).parameters())
    mx.random.seed(0)
    for shard in range(shards):
        weights = {
            name: mx.random.normal(array.shape, dtype) for name, array in flat[shard::shards]
        }
        mx.save_safetensors(str(folder / f"model-{shard}.safetensors"), weights)
    return folder


def measure(folder: Path, bits: int | None) -> dict[str, float]:
    """Load the folder in a new process; bytes and seconds."""
    command = [sys.executable, "-m", "benchmarks.loading", str(folder), str(bits or 0)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return cast(dict[str, float], json.loads(done.stdout))


def report() -> str:
    lines = [
        "| stored as | in files, MB | weights, MB | process, MB over weights | "
        "MLX, MB over weights | s |",
        "|---|---|---|---|---|---|",
    ]
    for name, (dtype, layers, bits) in LOADS.items():
        with tempfile.TemporaryDirectory() as place:
            folder = write(Path(place) / "model", dtype, {**SHAPE, "num_hidden_layers": layers})
            stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
            found = measure(folder, bits)
        over, mlx_over = (found[kind] - found["weights"] for kind in ("process", "mlx"))
        lines.append(
            f"| {name} | {stored / MB:.0f} | {found['weights'] / MB:.0f} | {over / MB:.0f} | "
            f"{mlx_over / MB:.0f} | {found['seconds']:.1f} |"
        )
    return "\n".join(lines)


def main(folder: str, bits: int) -> None:
    files = complete_config(store.resolve(folder))
    # memory before the load: the interpreter and its libraries
    mx.eval(mx.zeros((1,)))
    before = _peak_rss()
    begun = time.monotonic()
    model = open_model(files, cast(Any, bits or None))
    read_weights(model, files.path, lambda percent, memory: None)
    assert isinstance(model, nn.Module)
    apply_cpu_layout(model)
    found = {
        "weights": sum(array.nbytes for array in list_parameters(model)),
        "process": _peak_rss() - before,
        "mlx": mx.get_peak_memory(),
        "seconds": time.monotonic() - begun,
    }
    print(json.dumps(found))


def _peak_rss() -> int:
    """Peak memory of this process in bytes."""
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # on Linux this value also includes the parent process
    [line] = [line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
