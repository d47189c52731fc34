"""Random weights of a shape in a format, for MLX: a folder that `build` and mlx-lm load, or for
GGUF's types of files, a folder with such a file.

python -m benchmarks.cpu_models FOLDER SIZE FORMAT           config.json and weights
python -m benchmarks.cpu_models FOLDER SIZE FORMAT served    with a tokenizer, as servers need
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from benchmarks import cpu_gguf, random_model
from benchmarks.cpu_cells import (
    FORMATS,
    MAX_POSITIONS,
    SHAPES,
    Format,
    ModelShape,
    get_group_size,
)
from models import architectures

DTYPES: Mapping[str, mx.Dtype] = {"float32": mx.float32, "bfloat16": mx.bfloat16}


def make_config(shape: ModelShape, form: Format) -> dict[str, Any]:
    config = {
        "model_type": shape.kind,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.inner,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
    if form.bits is not None:
        config["quantization"] = {"group_size": get_group_size(shape, form), "bits": form.bits}
    return config


def make_weights(shape: ModelShape, form: Format, seed: int = 0) -> dict[str, mx.array]:
    """Each weight is evaluated at once, so the unquantized model is never completely in memory."""
    mx.random.seed(seed)
    weights: dict[str, mx.array] = {}
    dtype = DTYPES[form.dtype]
    for name, size in _weight_shapes(make_config(shape, form)).items():
        if name.endswith("norm.weight"):
            weights[name] = mx.ones(size, dtype)
            continue
        plain = (mx.random.normal(size) / size[-1] ** 0.5).astype(dtype)
        if form.bits is None:
            weights[name] = plain
        else:
            path = name.removesuffix(".weight")
            packed = mx.quantize(plain, get_group_size(shape, form), form.bits)
            weights |= zip((name, f"{path}.scales", f"{path}.biases"), packed, strict=True)
        mx.eval(weights)
    return weights


def write(folder: Path, size: str, form: str, *, served: bool = False) -> None:
    """served: also write a tokenizer in which all ids except the bytes are visible pieces of
    text."""
    shape, chosen = SHAPES[size], FORMATS[form]
    folder.mkdir(parents=True, exist_ok=True)
    if chosen.is_file:
        cpu_gguf.write_random_blocks(folder / "model.gguf", shape, chosen.gguf)
        return
    (folder / "config.json").write_text(json.dumps(make_config(shape, chosen)))
    mx.save_safetensors(str(folder / "model.safetensors"), make_weights(shape, chosen))
    if served:
        described = {"tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps(described))
        random_model.make_tokenizer(shape.vocab).save(str(folder / "tokenizer.json"))


def _weight_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the unquantized weights by name."""
    architecture = architectures._find_architecture(config)
    flat: Any = tree_flatten(architecture.Model(architecture.Config.from_dict(config)).parameters())
    return {name: array.shape for name, array in flat}


if __name__ == "__main__":
    place, size, form, *rest = sys.argv[1:]
    write(Path(place), size, form, served=rest == ["served"])
