"""Compares checkpoints that mlx-vlm saves with the logits of transformers.

It needs mlx-vlm, which no environment of the project has (`pip install mlx-vlm==0.7.10`):

    python -m tests.models.mlx_vlm_parity [PART OF A NAME]…

For each row of text_reference.json, mlx-vlm loads the folder of transformers and saves it with its
own names and layouts, unquantized and in 4 bits, and mlxrunner loads that.
"""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from models import architectures
from models.cpu_layout import apply_cpu_layout
from tests.models import parity, text_reference
from tests.models.test_text_reference import REFERENCE, draw_weights


def main(filters: Sequence[str]) -> None:
    print("| case | unquantized | 4 bits | remark |\n|---|---|---|---|")
    for name, row in REFERENCE.items():
        if filters and not any(part in name for part in filters):
            continue
        cells: list[str] = []
        remark = ""
        for bits in (None, 4):
            try:
                cells.append(f"{_compare(name, row, bits):.1e}")
            except Exception as error:  # compare the other cases after any error
                cells.append("–")
                remark = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        print(f"| {name} | {' | '.join(cells)} | {remark} |", flush=True)


def _compare(name: str, row: Mapping[str, Any], bits: int | None) -> float:
    with tempfile.TemporaryDirectory() as place:
        weights = _save_with_mlx_vlm(name, row, bits, Path(place))
    model = architectures.build(row["config"], weights, vision=False)
    apply_cpu_layout(cast(nn.Module, model))
    text = row["config"].get("text_config", row["config"])
    prompt = text_reference.draw_prompt(text["vocab_size"])
    logits = parity.prefill(model, prompt, [len(prompt)])
    return parity.max_difference(logits[:, text_reference.COLUMNS], np.array(row["logits"]))


def _save_with_mlx_vlm(
    name: str, row: Mapping[str, Any], bits: int | None, folder: Path
) -> dict[str, mx.array]:
    from mlx_vlm import utils  # pyright: ignore[reportMissingImports]

    mx.save_safetensors(str(folder / "model.safetensors"), draw_weights(name))
    (folder / "config.json").write_text(json.dumps(_add_older_keys(row["config"])))
    try:
        model: Any = utils.load_model(folder)
    except Exception as error:
        raise RuntimeError(f"mlx-vlm cannot load it: {error}") from error
    if bits is not None:
        nn.quantize(model, 64, bits, class_predicate=_is_quantized)
    path = folder / "saved.safetensors"
    mx.save_safetensors(str(path), dict(tree_flatten(model.parameters())))
    found = mx.load(str(path))
    mx.eval(found)
    return cast(dict[str, mx.array], found)


def _add_older_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the keys of transformers 4, which mlx-vlm reads."""
    given = (
        {**config, "text_config": dict(config["text_config"])}
        if ("text_config" in config)
        else dict(config)
    )
    text: dict[str, Any] = given.get("text_config", given)
    rope: dict[str, Any] = text.get("rope_parameters") or {}
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in rope:
            text.setdefault(key, rope[key])
    text.setdefault("rope_scaling", rope if rope.get("rope_type", "default") != "default" else None)
    if "num_local_experts" in text:
        text.setdefault("num_experts", text["num_local_experts"])
    widths = [layer.get("head_dim", 0) for layer in (text.get("per_layer_config") or {}).values()]
    if widths:
        text.setdefault("global_head_dim", max(widths))
    return given


def _is_quantized(path: str, layer: Any) -> bool:
    others = ("vision", "visual", "audio", "projector", "router", "gate.", "merger")
    if not hasattr(layer, "to_quantized") or layer.weight.shape[-1] % 64:
        return False
    return not any(part in f"{path}." for part in others)


if __name__ == "__main__":
    main(sys.argv[1:])
