"""`make parity`: a Markdown table that compares our logits with mlx-lm and transformers.

For each case, transformers creates a random model and saves it (`save_pretrained`), like published
models; we load this folder. So the comparison includes the names, layouts and config.json of the
current transformers. Both evaluate in float32 on the CPU, transformers with its simplest attention
("eager"). The columns of mlx-lm come from tests/models/test_parity.py.

It needs torch, and therefore its own environment (requirements/parity.in); pytest does not collect
it.
"""

import importlib.metadata
import json
import math
import statistics
import sys
import tempfile
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]  # in its own environment
import transformers
from safetensors.numpy import load_file, save_file
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
)

from tests.models import parity, text_reference
from tests.models.architectures import Case, cases
from tests.models.mlx_lm_families import FAMILIES
from tests.models.test_cohere2_moe import TRANSFORMERS_CASES

COLUMNS = {
    "mlx-lm": ("prefill", "pieces", "decode", "batch"),
    "transformers": ("prefill", "decode"),
}
LENGTH = 23
# The table shows the median of this number of draws. In some draws, the output of a gated delta net
# is almost zero at a few positions before it is normalized: there, prefill and decode of
# transformers differ by 1e-4, and so do its logits if the last bit of each weight changes.
DRAWS = 3
MOST = 20_000_000

# cases of architectures that mlx-lm lacks, or whose configs are only those of transformers
WITHOUT_MLX_LM = [*FAMILIES, *TRANSFORMERS_CASES]

# ids that a tiny vocabulary does not have
_NO_SPECIAL = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
# classes that generate text
_WRITERS = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
# classes whose cache is another argument, or a part of the model
_WITHOUT_CACHE = ("falcon_mamba", "mamba", "mamba2", "recurrent_gemma")
# sizes of the vision part of a multimodal model, under all their names; it is never evaluated
_BLIND = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "depth": 1,
    "embed_dim": 8,
    "num_attention_heads": 2,
    "num_heads": 2,
    "image_size": 8,
    "patch_size": 4,
    "output_proj_dims": 8,
}


def main(filters: Sequence[str]) -> int:
    """filters: run the cases whose id contains one of these strings; by default all cases."""
    # for models of this size, threads cost more than they save
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    print(_head())
    worst, failed = 0.0, list[str]()
    for case in [*cases(), *WITHOUT_MLX_LM]:
        if filters and not any(part in case.id for part in filters):
            continue
        found, remark = compare(case)
        print(_row(case, found, remark), flush=True)
        largest = max(value for row in found.values() for value in row.values())
        worst = max(worst, largest)
        # `not <`, so that NaN fails
        if not largest < parity.TOLERANCE:
            failed.append(case.id)
    print(f"\nLargest difference: {worst:.1e}; allowed: {parity.TOLERANCE:.0e}.")
    if failed:
        print(f"Beyond it: {', '.join(failed)}.", file=sys.stderr)
    return len(failed) and 1


def compare(case: Case) -> tuple[dict[str, dict[str, float]], str]:
    """The largest differences by reference and way of evaluating; the reason if one is missing."""
    with tempfile.TemporaryDirectory() as place:
        found = dict[str, dict[str, float]]()
        if case not in WITHOUT_MLX_LM:
            folder = Path(place) / "mlx-lm"
            reference = parity.save_reference(case, folder)
            ours = parity.load_model(folder)
            found["mlx-lm"] = parity.find_differences(reference, ours, case)
        why_not = explain_absence(case)
        if why_not:
            return found, why_not
        try:
            draws = [find_differences(case, Path(place) / f"{seed}", seed) for seed in range(DRAWS)]
            found["transformers"] = {
                way: statistics.median(draw[way] for draw in draws) for way in draws[0]
            }
        except Exception as error:  # compare the other cases after any error
            traceback.print_exception(error)
            found["transformers"] = dict.fromkeys(COLUMNS["transformers"], math.inf)
            return found, f"failed: {' '.join(str(error).split())[:120]}"
    return found, ""


def save_reference(case: Case, folder: Path, seed: int) -> Any:
    """Save a random model of transformers' class into `folder`, and return the model."""
    config = _config(case)
    make: Any = AutoModelForCausalLM
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        make = AutoModelForImageTextToText
    with torch.device("meta"):
        size = make.from_config(config, attn_implementation="eager").num_parameters()
    # some default sizes come from the largest published model
    assert size < MOST, f"{size} parameters: the case leaves a size to a default"
    torch.manual_seed(seed)
    model = make.from_config(
        config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )
    _draw(model, seed)
    model.save_pretrained(folder)
    return model.eval()


def describe_reference(case: Case) -> dict[str, Any]:
    """A row of tests/models/text_reference.json."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = save_reference(case, folder, seed=0)
        shapes = dict[str, list[int]]()
        for file in folder.glob("*.safetensors"):
            found = {name: list(array.shape) for name, array in load_file(file).items()}
            drawn = {name: text_reference.draw_tensor(name, found[name]) for name in found}
            save_file(drawn, file, metadata={"format": "pt"})
            shapes |= found
        config = json.loads((folder / "config.json").read_text())
        model = type(model).from_pretrained(
            folder,
            attn_implementation="eager",
            experts_implementation="eager",
            dtype=torch.float32,
        )
        logits = _evaluate(
            model.eval(), text_reference.draw_prompt(case.vocab), [text_reference.LENGTH]
        )
    assert np.isfinite(logits).all()
    config.pop("transformers_version", None)
    return {
        "config": config,
        "tensors": text_reference.fold_names(shapes),
        "logits": [
            [float(f"{value:.7g}") for value in row[text_reference.COLUMNS].tolist()]
            for row in logits
        ],
    }


def find_differences(case: Case, folder: Path, seed: int) -> dict[str, float]:
    """The largest difference of a logit in one draw."""
    theirs = save_reference(case, folder, seed)
    ours = parity.load_model(folder)
    prompt = parity.ids(case, LENGTH)
    ways = {"prefill": [LENGTH], "decode": [1] * LENGTH}
    return {
        way: parity.max_difference(
            parity.prefill(ours, prompt, chunks), _evaluate(theirs, prompt, chunks)
        )
        for way, chunks in ways.items()
    }


@torch.no_grad()
def _evaluate(model: Any, prompt: Sequence[int], chunks: Sequence[int]) -> np.ndarray:
    """Logits [L, V] of transformers, in chunks through its cache. The classes in _WITHOUT_CACHE
    compute all positions at once."""
    if model.config.model_type == "llama4":  # without images, the class fails after its logits
        model = model.language_model
    past, start, rows = None, 0, list[torch.Tensor]()
    if len(chunks) == 1 or model.config.model_type in _WITHOUT_CACHE:
        ids = torch.tensor([prompt])
        return model(input_ids=ids, use_cache=False).logits[0].float().numpy()
    for length in chunks:
        ids = torch.tensor([prompt[start : start + length]])
        out = model(input_ids=ids, past_key_values=past, use_cache=True)
        past = out.past_key_values
        rows.append(out.logits[0])
        start += length
    return torch.cat(rows).float().numpy()


@torch.no_grad()
def _draw(model: Any, seed: int) -> None:
    """Draw weights as tests/models/parity.py does: every part affects the logits."""
    rng = np.random.default_rng(seed)
    drawn = set[int]()
    # saved buffers, such as the biases of a router, are weights too
    for parameter in model.state_dict().values():
        if not parameter.is_floating_point() or parameter.data_ptr() in drawn:
            continue  # a tied head is drawn once
        drawn.add(parameter.data_ptr())
        noise = torch.from_numpy(rng.standard_normal(tuple(parameter.shape)).astype(np.float32))
        if parameter.ndim > 1:
            parameter.copy_(noise / parameter.shape[-1] ** 0.5)
        else:
            parameter.add_(0.1 * noise)


def _config(case: Case) -> PretrainedConfig:
    """The config of the case for transformers. For multimodal models, flat keys move into the text
    part."""
    config = json.loads(json.dumps(case.config))
    kind = config.pop("model_type")
    parts: Any = transformers.CONFIG_MAPPING[kind].sub_configs
    if "text_config" in parts and "text_config" not in config:
        config = {"text_config": config, "tie_word_embeddings": config.get("tie_word_embeddings")}
    if "vision_config" in parts:
        config["vision_config"] = {**config.get("vision_config", {}), **_BLIND}
    if kind == "gemma3":
        config["mm_tokens_per_image"] = 4  # of 2 x 2 patches
    return AutoConfig.for_model(kind, **{**config, **_NO_SPECIAL})


def explain_absence(case: Case) -> str:
    """Why there is no comparison with transformers, as a sentence, or an empty string."""
    if not case.transformers:
        return case.why or "not compared with transformers; the case does not say why"
    kind = case.config["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        return f"transformers has no {kind}"
    config_class = transformers.CONFIG_MAPPING[kind]
    if not any(config_class in mapping for mapping in _WRITERS):
        return f"transformers has {kind} only as a part of other models"
    return ""


def _head() -> str:
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}"
        for name in ("mlx", "mlx-lm", "transformers", "torch")
    )
    names = [f"{library}: {way}" for library, ways in COLUMNS.items() for way in ways]
    return "\n".join(
        [
            f"Largest difference of any logit, float32, CPU; {versions}. Of transformers: the "
            f"median of {DRAWS} draws.\n",
            f"| case | {' | '.join(names)} | remark |",
            f"|---|{'---|' * len(names)}---|",
        ]
    )


def _row(case: Case, found: Mapping[str, Mapping[str, float]], remark: str) -> str:
    cells = [
        f"{found[library][way]:.1e}" if library in found else "–"
        for library, ways in COLUMNS.items()
        for way in ways
    ]
    return f"| {case.id} | {' | '.join(cells)} | {remark} |"


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sys.exit(main(sys.argv[1:]))
