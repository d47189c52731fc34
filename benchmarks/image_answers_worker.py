"""mlx-vlm's part of `make bench ARGS=first-image`, run by a Python that has mlx-vlm and torch.

    image_answers_worker.py save FAMILY      saves the checkpoint with transformers
    image_answers_worker.py answer FAMILY    reads a line with a photo and the IDs of the prompt for
                                             each answer, and writes the seconds and the CPU seconds
                                             until the first token, and the token

FAMILY is a JSON object (benchmarks/image_answers.py). Torch is not imported for answers.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any


def save(family: Any) -> None:
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]
    from safetensors.numpy import load_file, save_file

    make = getattr(transformers, family["model"])
    torch.manual_seed(0)
    make(make.config_class(**family["config"])).save_pretrained(family["folder"])
    # the published name of Gemma 3's tower, which mlx-vlm reads
    file = Path(family["folder"]) / "model.safetensors"
    if family["model"].startswith("Gemma3"):
        old, new = "vision_tower.", "vision_tower.vision_model."
        named = {name.replace(old, new): array for name, array in load_file(file).items()}
        save_file(named, file, metadata={"format": "pt"})


def answer(family: Any) -> None:
    sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]
    import mlx.core as mx
    import mlx_vlm.utils  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]
    from mlx_vlm.generate import generate_step  # pyright: ignore[reportMissingImports]
    from PIL import Image

    processor = getattr(transformers, family["processor"])(**family["settings"])
    model = mlx_vlm.utils.load_model(Path(family["folder"]))
    mx.eval(model.parameters())
    for line in sys.stdin:
        question = json.loads(line)
        began, cpu_began = time.perf_counter(), time.process_time()
        with Image.open(question["photo"]) as photo:
            inputs = processor(photo.convert("RGB"), return_tensors="np", **family["options"])
        arrays = {name: mx.array(inputs[name]) for name in inputs if name in ARRAYS}
        ids = mx.array([question["ids"]])
        pixels = mx.array(inputs["pixel_values"])
        options: Any = {**arrays, "max_tokens": 1, "temperature": 0.0}
        token, _ = next(iter(generate_step(ids, model, pixels, mx.ones_like(ids), **options)))
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
        print(json.dumps([seconds, cpu, int(token)]), flush=True)


# the input of the models besides the pixels
ARRAYS = {"image_grid_thw", "image_position_ids", "image_sizes", "pixel_attention_mask"}

if __name__ == "__main__":
    {"save": save, "answer": answer}[sys.argv[1]](json.loads(sys.argv[2]))
