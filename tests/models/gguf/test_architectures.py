"""Models in GGUF give the same results as the same weights in the layout of the hub."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from models import architectures, kernels
from models.base import ModelError
from models.checkpoint_config import get_text_config
from models.cpu_layout import apply_cpu_layout
from models.gguf import reader
from models.gguf.architectures import ARCHITECTURES as READERS
from models.gguf.architectures import read_config
from models.gguf.layers import GgufExpertLinear
from models.gguf.reader import GGUFError
from models.gguf.weights import open_weights
from tests.models import parity
from tests.models.architectures import Case, cases
from tests.models.gguf.converter import ARCHITECTURES, convert
from tests.models.gguf.encoders import ENCODERS
from tests.models.gguf.raw_file import gguf as raw_gguf
from tests.models.gguf.raw_file import int_entry, text_entry

pytestmark = pytest.mark.recorded

# cases whose configs no published model of llama.cpp's architecture has, or for which GGUF has no
# key: layers with a window in a Llama, experts in some layers, biases that its graphs lack, other
# numbers of layers with a window, limits of the step of a Mamba-2 layer
UNREPRESENTABLE = {
    "llama-traditional",
    "llama-windowed",
    "mistral-windowed",
    "ministral3-windowed",
    "smollm3-listed",
    "smollm3-windowed",
    "smollm3-interval",
    "olmo2-mlp-bias",
    "qwen3_moe-some-dense",
    "qwen3_next-mixed",
    "qwen3_next-dense",
    "lfm2-adjusted",
    "lfm2_moe-unbiased",
    "gpt_oss-layer-types",
    "gemma2-plain",
    "gemma3_text-plain",
    "gemma3_text-stretched",
    "gemma3_text-scaled-by-a-bfloat16",
    "glm4_moe_lite-long",
    "nemotron_h-limited",
}

# what is different in these, so that every architecture has a case
CHANGED: dict[str, dict[str, Any]] = {
    "smollm3-interval": {"no_rope_layer_interval": 4, "num_hidden_layers": 4},
    "qwen3_next-mixed": {
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
    },
    "lfm2-adjusted": {"conv_bias": False},
    "gemma2-plain": {"query_pre_attn_scalar": 32, "sliding_window": 7},
    "gemma3_text-plain": {"query_pre_attn_scalar": 32, "sliding_window_pattern": 6},
    "gemma3_text-stretched": {
        "query_pre_attn_scalar": 32,
        "sliding_window_pattern": 6,
        "num_hidden_layers": 7,
    },
    "lfm2_moe-experts": {"rope_theta": 1e6},
    "nemotron_h-latent": {"n_group": 1, "topk_group": 1},
    "glm4_moe_lite-groups": {"attention_bias": False},
    # the latent attention of both models has one epsilon in llama.cpp, that of the published models
    "deepseek_v3-plain": {"rms_norm_eps": 1e-6},
    "deepseek_v3-long": {
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.8,
            "mscale_all_dim": 0.8,
        },
    },
    "glm4_moe_lite-long": {
        "moe_layer_freq": 1,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "mscale": 0.8,
            "mscale_all_dim": 0.8,
        },
    },
    "mistral4-plain": {"rms_norm_eps": 1e-6},
    "mistral4-groups": {"rms_norm_eps": 1e-6},
    "qwen3_5-tied": {"attention_bias": False},
    "gpt_oss-plain": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 64,
            "truncate": False,
        }
    },
}


# architectures of mlx-lm's classes
_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 101,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5e4,
    "tie_word_embeddings": False,
}
MLX_LM_CASES = [
    Case(
        name="windowed",
        config={
            "model_type": "olmo3",
            **_SHAPE,
            "sliding_window": 6,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
        },
    ),
    Case(
        name="biased",
        config={
            "model_type": "glm4",
            **_SHAPE,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
        },
    ),
]


def select_cases() -> list[Case]:
    found = [*MLX_LM_CASES]
    for case in cases():
        config = {**case.config, **CHANGED.get(case.id, {})}
        kind = get_text_config(config)["model_type"]
        has_parts = "text_config" in config and "moe" not in kind and "_vl" not in kind
        if kind not in ARCHITECTURES or has_parts:
            continue
        if case.id in UNREPRESENTABLE and case.id not in CHANGED:
            continue
        found.append(Case(name=case.name, config=config))
    return found


CASES = select_cases()


def write_model(case: Case, folder: Path, **options: Any) -> tuple[Path, dict[str, np.ndarray]]:
    """Writes the same random weights as a folder and as a GGUF file."""
    parity.save_reference(case, folder)
    loaded = mx.load(str(folder / "model.safetensors"))
    assert isinstance(loaded, dict)
    weights = {
        name.removeprefix("language_model."): np.array(array.astype(mx.float32))
        for name, array in loaded.items()
    }
    convert(get_text_config(case.config), weights, folder / "model.gguf", **options)
    return folder / "model.gguf", weights


def build(path: Path, *, keep_blocks: bool = False) -> Any:
    file = reader.read(path)
    weights, unread = open_weights(file)
    blocks = unread.blocks if keep_blocks else ()
    model = architectures.build(read_config(file), weights, blocks=blocks)
    if keep_blocks:
        assert isinstance(model, nn.Module)
        apply_cpu_layout(model)
    unread.read()
    return model


def logits(model: Any, case: Case) -> np.ndarray:
    return parity.prefill(model, parity.ids(case, 23), [23])


@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_the_logits_are_those_of_the_same_weights_in_a_folder(tmp_path, case: Case):
    path, weights = write_model(case, tmp_path)
    expected = architectures.build(
        case.config, {name: mx.array(array) for name, array in weights.items()}
    )
    difference = parity.max_difference(logits(build(path), case), logits(expected, case))
    assert difference <= parity.tolerance(case)


def test_every_architecture_has_a_case():
    kinds = {get_text_config(case.config)["model_type"] for case in CASES}
    # nemotron_h with experts, and those of other tests
    others = {"nemotron_h_moe", "gemma-embedding", *ENCODERS.values()}
    assert {ARCHITECTURES[kind] for kind in kinds} == READERS.keys() - others


def quantized(name: str) -> gguf.GGMLQuantizationType | None:
    """Different types in one model, as in published files; norms, filters and routers are F32."""
    types = gguf.GGMLQuantizationType
    if name.endswith((".ffn_gate_inp.weight", "conv1d.weight", "conv.weight", "_shexp.weight")):
        return None
    if "exps" in name:
        return types.MXFP4
    if "attn_k" in name or "ssm_out" in name:
        return types.Q4_0
    return types.Q5_1 if "ffn_down" in name else types.Q8_0


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in CASES
        if case.id
        in ("llama-tied", "qwen3_moe-plain", "glm4_moe_lite-plain", "gemma4_text-26b-a4b")
    ],
    ids=lambda case: case.id,
)
def test_quantized_weights_are_exact(tmp_path, case: Case):
    path, weights = write_model(case, tmp_path, quantize=quantized)
    plain = tmp_path / "plain.gguf"  # the same weights as float32, dequantized by gguf-py
    values = {t.name: t for t in gguf.GGUFReader(path).tensors}

    def reference(name: str) -> mx.array:
        tensor = values[name]
        shape = [int(size) for size in tensor.shape[::-1]]
        return mx.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape))

    assert len({tensor.tensor_type for tensor in values.values()}) >= 4
    convert(case.config, weights, plain)
    content = bytearray(plain.read_bytes())
    for name, tensor in reader.read(plain).tensors.items():
        values_of_tensor = np.array(reference(name)).astype(np.float32).tobytes()
        content[tensor.offset : tensor.offset + tensor.nbytes] = values_of_tensor
    plain.write_bytes(content)
    file = reader.read(plain)
    given, unread = open_weights(file)
    model = architectures.build(read_config(file), given)
    unread.read()
    for keep_blocks in (False, True):
        found = logits(build(path, keep_blocks=keep_blocks), case)
        assert parity.max_difference(found, logits(model, case)) <= parity.tolerance(case)


def write_raw(path: Path, *entries: bytes) -> Path:
    path.write_bytes(raw_gguf(entries))
    return path


def test_an_unknown_architecture_is_named(tmp_path):
    path = write_raw(tmp_path / "m.gguf", text_entry("general.architecture", "plamo3"))
    with pytest.raises(GGUFError, match="'plamo3' are not supported") as caught:
        read_config(reader.read(path))
    assert str(path) in str(caught.value)


def test_a_projector_is_not_a_language_model(tmp_path):
    path = write_raw(
        tmp_path / "m.gguf",
        text_entry("general.architecture", "clip"),
        text_entry("general.type", "mmproj"),
    )
    with pytest.raises(GGUFError, match="is the vision tower of a model"):
        read_config(reader.read(path))


def test_a_missing_key_is_named(tmp_path):
    case = next(case for case in CASES if case.id == "llama-plain")
    path, _ = write_model(case, tmp_path)
    path.write_bytes(path.read_bytes().replace(b"llama.context_length", b"llama.context_xxxxxx"))
    with pytest.raises(GGUFError, match=r"lacks the key llama\.context_length"):
        read_config(reader.read(path))


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (text_entry("llama.block_count", "two"), "'two', but must be an integer"),
        (int_entry("llama.block_count", 0), "the model has 0 layers"),
        (int_entry("llama.block_count", (1 << 31) - 1), "the model has 2147483647 layers"),
    ],
)
def test_an_invalid_value_is_named(tmp_path, entry: bytes, reason: str):
    path = write_raw(tmp_path / "m.gguf", text_entry("general.architecture", "llama"), entry)
    with pytest.raises(GGUFError, match=reason):
        read_config(reader.read(path))


def test_a_tensor_of_another_architecture_is_named(tmp_path):
    case = next(case for case in CASES if case.id == "llama-plain")
    path, _ = write_model(case, tmp_path)
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_norm", b"blk.1.ffn_xorm"))
    with pytest.raises(GGUFError, match=r"have no tensors blk\.1\.ffn_xorm\.weight"):
        open_weights(reader.read(path))


def test_the_config_is_that_of_the_hub(tmp_path):
    case = next(case for case in CASES if case.id == "qwen3-long")
    path, _ = write_model(case, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    found = read_config(reader.read(path))
    for key in ("hidden_size", "head_dim", "rms_norm_eps", "vocab_size", "num_key_value_heads"):
        assert found[key] == config[key]
    assert found["rope_scaling"]["factor"] == 4.0
    assert found["rope_theta"] == 500000.0


def test_a_tensor_whose_shape_contradicts_the_keys_is_named(tmp_path):
    case = next(case for case in CASES if case.id == "qwen3_next-mixed")
    path, _ = write_model(case, tmp_path)
    key, heads = b"qwen3next.ssm.time_step_rank", case.config["linear_num_value_heads"]
    before, after = (key + struct.pack("<II", 4, count) for count in (heads, 7 * heads))
    assert path.read_bytes().count(before) == 1
    path.write_bytes(path.read_bytes().replace(before, after))
    with pytest.raises(ModelError, match=r"in_proj_ba\.weight does not have the shape"):
        open_weights(reader.read(path))


@pytest.mark.parametrize("change", ["truncated", "rewritten", "replaced"])
def test_a_file_that_changes_before_its_weights_are_read_is_an_error(tmp_path, change: str):
    case = next(case for case in CASES if case.id == "llama-plain")
    path, _ = write_model(case, tmp_path)
    _, unread = open_weights(reader.read(path))
    content = path.read_bytes()
    if change == "truncated":
        os.truncate(path, len(content) - 100)
    elif change == "rewritten":
        path.write_bytes(content[:-100] + bytes(100))
    else:  # as by a download
        (tmp_path / "new").write_bytes(content)
        (tmp_path / "new").replace(path)
    os.utime(path, ns=(1, 1))  # two changes may have the same time
    with pytest.raises(ModelError, match=r"\.gguf was changed while the model was loaded: load it"):
        unread.read()


def write_deepseek_v2(folder: Path) -> Path:
    case = next(case for case in CASES if case.id == "deepseek_v2-groups")
    return write_model(case, folder)[0]


def remove_key(path: Path, name: bytes) -> None:
    """Renames a key, so that the file has an unknown one instead."""
    content = path.read_bytes()
    assert content.count(name) == 1
    path.write_bytes(content.replace(name, b"x" * len(name)))


@pytest.mark.parametrize("id", ["deepseek_v2-lite", "deepseek_v3-plain"])
def test_the_selection_of_experts_follows_from_the_tensors_of_an_older_file(tmp_path, id: str):
    case = next(case for case in CASES if case.id == id)
    path, _ = write_model(case, tmp_path)
    expected = read_config(reader.read(path))
    remove_key(path, b"deepseek2.expert_gating_func")
    assert read_config(reader.read(path)) == expected


def test_groups_of_experts_that_an_older_file_lacks_are_those_of_the_published_models(tmp_path):
    path = write_deepseek_v2(tmp_path)
    for key in (b"deepseek2.expert_group_count", b"deepseek2.expert_group_used_count"):
        remove_key(path, key)
    assert read_config(reader.read(path))["topk_method"] == "greedy"
    content = path.read_bytes()
    for key, count in ((b"deepseek2.expert_count", 160), (b"deepseek2.block_count", 60)):
        start = content.index(key) + len(key) + 4  # behind the type
        content = content[:start] + struct.pack("<I", count) + content[start + 4 :]
    path.write_bytes(content)
    config = read_config(reader.read(path))
    found = [config[key] for key in ("topk_method", "n_group", "topk_group")]
    assert found == ["group_limited_greedy", 8, 3]


@pytest.mark.parametrize(
    ("key", "value"), [(b"expert_gating_func", 2), (b"attention.temperature_length", 4096)]
)
def test_other_scales_of_queries_of_a_deepseek2_are_not_supported(tmp_path, key: bytes, value: int):
    """Published are those of Mistral Large 3."""
    case = next(case for case in CASES if case.id == "mistral4-plain")
    path, _ = write_model(case, tmp_path)
    content = path.read_bytes()
    start = content.index(b"deepseek2." + key) + len(b"deepseek2." + key) + 4  # behind the type
    path.write_bytes(content[:start] + struct.pack("<I", value) + content[start + 4 :])
    with pytest.raises(GGUFError, match="scaled by position are supported only with a softmax"):
        read_config(reader.read(path))


def test_experts_of_a_gemma4_keep_their_blocks(tmp_path):
    """Gate and up projections are one tensor of the file."""
    case = next(case for case in CASES if case.id == "gemma4_text-26b-a4b")
    path, _ = write_model(case, tmp_path, quantize=quantized)
    file = reader.read(path)
    weights, unread = open_weights(file)
    model: Any = architectures.build(read_config(file), weights, blocks=unread.blocks)
    if kernels.ops() is None:
        pytest.skip("without the kernels, there are no blocks")
    experts = model.model.layers[0].experts
    names = ("gate_proj", "up_proj", "down_proj")
    assert {type(experts[name]) for name in names} == {GgufExpertLinear}


def test_a_gemma4_with_another_partial_rotation_is_not_supported(tmp_path):
    case = next(case for case in CASES if case.id == "gemma4_text-e4b")
    path, _ = write_model(case, tmp_path)
    divisor = np.float32(1e30).tobytes()
    path.write_bytes(path.read_bytes().replace(divisor, np.float32(8.0).tobytes()))
    with pytest.raises(GGUFError, match=r"rope_freqs\.weight of a gemma4 must have divisors of 1"):
        read_config(reader.read(path))


def test_a_gemma4_without_a_flag_per_layer_is_named(tmp_path):
    case = next(case for case in CASES if case.id == "gemma4_text-e4b")
    path, _ = write_model(case, tmp_path)
    pattern = b"gemma4.attention.sliding_window_pattern"
    path.write_bytes(path.read_bytes().replace(pattern, pattern[:-1] + b"x"))
    with pytest.raises(GGUFError, match=r"lacks the key gemma4\.attention\.sliding_window_pattern"):
        read_config(reader.read(path))
