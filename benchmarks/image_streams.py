"""`make bench ARGS=images`: a stream while an image of 1,024 tokens is encoded for another client.

The clock is the CPU time of the process, as in benchmarks/arrivals.py, so the figures apply to one
core, whatever else the machine does. The engine runs in this process, without HTTP. The vision
tower is a quarter of Qwen3-VL 2B's: six of its blocks, so each step is as long. The text model is
small, so that the tokens of the stream come fast. The weights are random.
"""

import json
import tempfile
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from app.core.jobs import Token
from models import architectures
from models.cpu_layout import apply_cpu_layout
from models.vision import qwen3_vl
from tests import tiny_vision
from tests.engine.harness import job, make_loop
from tests.engine.images import Driver, drive, image_job, picture

# image rows per side
SIDE = 32
TOKENS_ALONE = 200

TOWER: Mapping[str, Any] = {
    "depth": 6,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "out_hidden_size": tiny_vision.HIDDEN,
    "deepstack_visual_indexes": [2, 4],
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


def report() -> str:
    image = picture(1, SIDE, SIDE, side=tiny_vision.SIDE)
    loop = make_loop(
        build_model(),
        running=2,
        chunk=128,
        policy="slots",
        context=1 << 14,
        step_seconds=0.1,
        clock=time.process_time,
    )
    driver = drive(loop, image)
    driver.submit(job("stream", b"hello", max_tokens=1 << 14, stop_token_ids=frozenset[int]()))
    times: list[float] = []
    while len(times) < TOKENS_ALONE:
        step(driver, times)
    driver.submit(image_job("image", image, b"?", side=tiny_vision.SIDE, max_tokens=1))
    began = time.process_time()
    while not driver.stats.images_encoded:
        step(driver, times)
    delays = [after - before for before, after in pairwise(times)]
    alone, beside = delays[20 : TOKENS_ALONE - 1], delays[TOKENS_ALONE - 1 :]
    return (
        "a stream beside an image of 1,024 tokens, in CPU time: delay of a token, "
        f"alone {1e3 * median(alone):.1f} ms; beside the image, median {1e3 * median(beside):.1f} "
        f"ms, longest {1e3 * max(beside):.0f} ms; the image took {times[-1] - began:.1f} s, the "
        f"tower alone {measure_tower(loop, image):.1f} s"
    )


def step(driver: Driver, times: list[float]) -> None:
    """Runs a step, and adds the times of the stream's tokens."""
    for update in driver.step().updates:
        if isinstance(update, Token) and update.job_id == "stream":
            times.append(time.process_time())


def measure_tower(loop: Any, image: Any) -> float:
    [tile] = image.tiles
    pixels = mx.array(np.frombuffer(tile.data, np.uint8).reshape(tile.height, tile.width, 3))
    began = time.process_time()
    loop._model.vision.encode([pixels])
    return time.process_time() - began


def build_model() -> Any:
    """A tiny Qwen3-VL with this tower."""
    with tempfile.TemporaryDirectory() as place:
        folder = tiny_vision.write(Path(place) / "model")
        config = json.loads((folder / "config.json").read_text())
        weights: Any = mx.load(str(folder / "model.safetensors"))
        text = {name: array for name, array in weights.items() if "visual" not in name}
        mx.eval(text)
    config["vision_config"].update(TOWER)
    tower = qwen3_vl.Tower(qwen3_vl.Config.from_dict(config["vision_config"]), {})
    flat: Any = tree_flatten(tower.parameters())
    drawn = {f"model.visual.{name}": array.astype(mx.bfloat16) for name, array in flat}
    model: Any = architectures.build(config, {**text, **drawn})
    apply_cpu_layout(model)
    mx.eval(model.parameters())
    return model


if __name__ == "__main__":
    print(report())
