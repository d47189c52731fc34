"""The speed of a matrix product in PyTorch, as a peak that a mature library reaches.

    PYTHON benchmarks/cpu_torch.py THREADS

It needs a Python with torch, and prints a line of JSON for each precision. The int8 product
quantizes x for each call, as PyTorch's dynamic quantization does.
"""

import json
import statistics
import sys
import time

import torch  # pyright: ignore[reportMissingImports]  # of another environment

ROWS, INNER, OUT, SECONDS = 512, 1024, 3072, 1.0


def main(threads: int) -> None:
    torch.set_num_threads(threads)
    linear = torch.nn.Linear(INNER, OUT, bias=False)
    quantized = torch.ao.quantization.quantize_dynamic(
        torch.nn.Sequential(linear), {torch.nn.Linear}, torch.qint8
    )
    x = torch.randn(ROWS, INNER)
    products = {
        "float32": (linear, x),
        "bfloat16": (torch.nn.Linear(INNER, OUT, bias=False).bfloat16(), x.bfloat16()),
        "int8": (quantized, x),
    }
    for name, (layer, rows) in products.items():
        try:
            rate = measure(layer, rows)
        except RuntimeError as error:  # the build has no engine for it
            print(f"{name}: {error}", file=sys.stderr)
            continue
        print(json.dumps({"name": name, "threads": threads, "rate": rate}), flush=True)


@torch.inference_mode()
def measure(layer: torch.nn.Module, rows: torch.Tensor) -> float:
    """Billions of operations per second."""
    layer(rows)
    found: list[float] = []
    begun = time.perf_counter()
    while time.perf_counter() - begun < SECONDS:
        started = time.perf_counter()
        layer(rows)
        found.append(time.perf_counter() - started)
    return 2 * ROWS * INNER * OUT / statistics.median(found) / 1e9


if __name__ == "__main__":
    main(int(sys.argv[1]))
