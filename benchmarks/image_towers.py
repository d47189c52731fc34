"""`make bench ARGS=towers`: the vision towers and those of mlx-vlm, with random float32 weights.

The towers are four blocks of published ones, and the images have about 512 x 512 pixels (Gemma 3:
896 x 896). Ours runs as in the engine, from 8-bit pixels to image rows. The others get normalized
patches or pixels. `MLX_VLM` is a Python with mlx-vlm. Rounds alternate. The figures are CPU seconds
of the process, which other programs barely affect.
"""

import json
import os
import subprocess
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import mlx.core as mx

from models.cpu_layout import apply_cpu_layout
from models.vision import gemma3, pixtral, qwen2_5_vl, qwen2_vl, qwen3_vl
from models.vision.tower import VisionTower

ROUNDS = 3
MLX_VLM_VARIABLE = "MLX_VLM"

_TEXT = {"hidden_size": 2048}

# name: the module here, that of mlx-vlm, `vision_config`, and the side of the image in pixels
TOWERS: Mapping[str, tuple[Any, str, Mapping[str, Any], int]] = {
    "Qwen3-VL 2B": (
        qwen3_vl,
        "qwen3_vl",
        {
            "depth": 4,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_heads": 16,
            "patch_size": 16,
            "out_hidden_size": 2048,
            "deepstack_visual_indexes": [1, 2, 3],
        },
        512,
    ),
    "Qwen2.5-VL 3B": (
        qwen2_5_vl,
        "qwen2_5_vl",
        {
            "depth": 4,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 2048,
            "fullatt_block_indexes": [3],
        },
        504,
    ),
    "Qwen2-VL 2B": (
        qwen2_vl,
        "qwen2_vl",
        {"depth": 4, "embed_dim": 1280, "hidden_size": 1536, "num_heads": 16, "mlp_ratio": 4},
        504,
    ),
    "Gemma 3 4B": (
        gemma3,
        "gemma3",
        {
            "model_type": "siglip_vision_model",
            "num_hidden_layers": 4,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_attention_heads": 16,
            "patch_size": 14,
            "image_size": 896,
        },
        896,
    ),
    "Pixtral": (
        pixtral,
        "pixtral",
        {
            "model_type": "pixtral",
            "num_hidden_layers": 4,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
            "patch_size": 16,
            "image_size": 1024,
        },
        512,
    ),
}

# run by the other Python: reads a line with a side for each round, and writes the seconds
_WORKER = """
import importlib, json, sys, time
import mlx.core as mx
name, config, side = json.loads(sys.argv[1])
config_class = importlib.import_module(f"mlx_vlm.models.{name}.config").VisionConfig
module = importlib.import_module(f"mlx_vlm.models.{name}.vision")
model = module.VisionModel(config_class.from_dict(config))
mx.eval(model.parameters())
if name.startswith("qwen"):
    rows = side // config.get("patch_size", 14)
    patches = mx.random.normal((rows * rows, 6 * config.get("patch_size", 14) ** 2))
    arguments = patches, mx.array([[1, rows, rows]])
else:
    arguments = (mx.random.normal((1, side, side, 3)),)
for _ in sys.stdin:
    began = time.process_time()
    mx.eval(model(*arguments))
    print(time.process_time() - began, flush=True)
"""


def report() -> str:
    python = os.environ.get(MLX_VLM_VARIABLE)
    lines = [
        "CPU seconds for an image and four blocks:",
        "tower          image rows  ours  mlx-vlm  ratio",
    ]
    for title, (module, name, config, side) in TOWERS.items():
        tower, tile = build(module, config), mx.random.randint(0, 256, (side, side, 3), mx.uint8)
        theirs = None if python is None else start_worker(python, name, config, side)
        seconds, others = list[float](), list[float]()
        for _ in range(ROUNDS + 1):  # the first one warms up
            began = time.process_time()
            tower.encode([tile])
            seconds.append(time.process_time() - began)
            if theirs is not None:
                others.append(measure_worker(theirs))
        ours = median(seconds[1:])
        line = f"{title:13}  {tower.count_rows([(side, side)]):10}  {ours:4.2f}"
        if theirs is not None:
            theirs.kill()
            theirs.wait()
            line += f"  {median(others[1:]):7.2f}  {ours / median(others[1:]):5.2f}"
        lines.append(line)
    return "\n".join(lines)


def build(module: Any, config: Mapping[str, Any]) -> VisionTower:
    made = module.Config.from_dict({**config, "text_config": _TEXT})
    tower: VisionTower = module.Tower(made, {})
    apply_cpu_layout(tower)
    mx.eval(tower.parameters())
    return tower


def start_worker(
    python: str, name: str, config: Mapping[str, Any], side: int
) -> "subprocess.Popen[str]":
    command = [python, "-c", _WORKER, json.dumps([name, config, side])]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def measure_worker(worker: "subprocess.Popen[str]") -> float:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write("\n")
    worker.stdin.flush()
    return float(worker.stdout.readline())


if __name__ == "__main__":
    print(report())
