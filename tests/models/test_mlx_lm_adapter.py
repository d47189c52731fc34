"""mlx-lm's own classes behind our contract; and what is said where they cannot be.

That their logits and what caches make of them are right is shown by the suites that take `CASES`:
test_parity.py beside this file and tests/engine/test_architectures.py.
"""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models.cache as theirs
import pytest
from mlx_lm.models import starcoder2

import models
from models.base import Model, ModelError
from tests.models import parity
from tests.models.architectures import Case

TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 512,
}
LATENT: dict[str, Any] = {
    **TINY,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
PLAIN: dict[str, Any] = {"model_type": "starcoder2", **TINY}

# each kind of cache, and of what is done with them, once
SAYINGS: Mapping[str, dict[str, Any]] = {
    "plain": PLAIN,
    "windows": {
        "model_type": "cohere2",
        **TINY,
        "num_hidden_layers": 3,
        "head_dim": 16,
        "sliding_window": 6,
        "sliding_window_pattern": 3,
        "logit_scale": 0.5,
    },
    "states": {
        "model_type": "mamba2",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "vocab_size": 101,
        "max_position_embeddings": 512,
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "conv_kernel": 4,
        "n_groups": 2,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": False,
        "time_step_limit": [0.0, 100.0],
        "time_step_rank": "auto",
    },
    "states-or-windows": {
        "model_type": "recurrent_gemma",
        **TINY,
        "num_hidden_layers": 3,
        "block_types": ["recurrent", "recurrent", "attention"],
        "attention_window_size": 6,
        "attention_bias": False,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    },
    "states-and-attention": {
        "model_type": "falcon_h1",
        **TINY,
        "head_dim": 16,
        "mamba_d_ssm": 64,
        "mamba_d_head": 16,
        "mamba_n_heads": 4,
        "mamba_d_state": 16,
        "embedding_multiplier": 1.0,
        "lm_head_multiplier": 1.0,
        "tie_word_embeddings": False,
    },
    "latent": {
        "model_type": "deepseek_v2",
        **LATENT,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "mscale": 0.7,
            "mscale_all_dim": 0.7,
        },
    },
    "latent-and-index": {
        "model_type": "deepseek_v32",
        **LATENT,
        "index_head_dim": 32,
        "index_n_heads": 4,
        # fewer than the prompts have: most positions are not looked at
        "index_topk": 8,
    },
    "head-of-another-name": {
        "model_type": "internlm2",
        **TINY,
        "bias": False,
        "rms_norm_eps": 1e-6,
    },
    "inside-of-a-whole": {
        "model_type": "gemma3n",
        "text_config": {
            "model_type": "gemma3n_text",
            **TINY,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "rms_norm_eps": 1e-6,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": 101,
            "hidden_size_per_layer_input": 32,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_local_base_freq": 1e4,
            "rope_theta": 1e6,
            "final_logit_softcapping": 30.0,
            "activation_sparsity_pattern": [0.0] * 4,
            "altup_num_inputs": 2,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 32,
        },
        "vision_config": {"hidden_size": 8},
        "audio_config": {"hidden_size": 8},
    },
}

CASES = [
    Case(
        name=name,
        config=config,
        transformers=False,
        why="It runs through mlx-lm's own class.",
    )
    for name, config in SAYINGS.items()
]


def opened(config: dict[str, Any], folder: Path) -> Model:
    parity.saved(Case(name="", config=config), folder)
    return parity.opened(folder)


def test_without_the_library_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx_lm", None)
    hint = r"model_type 'starcoder2' is not supported.*pip install \"mlx-lm>=0\.32\""
    for ask in (models.read_info, lambda config: models.build(config, {})):
        with pytest.raises(ModelError, match=hint):
            ask(PLAIN)


def test_the_library_is_imported_only_to_load_and_leaves_the_process_as_it_was() -> None:
    """It lowers how many files the process may open, when it is imported."""
    script = f"""
import resource, sys
import models
before = resource.getrlimit(resource.RLIMIT_NOFILE)
assert models.read_info({PLAIN}).context_length == 512
assert "mlx_lm" not in sys.modules
try:
    models.build({PLAIN}, {{}})
except models.ModelError as error:
    assert "lacks tensors" in str(error), error
assert "mlx_lm.models.starcoder2" in sys.modules
assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    "kind", ["no_such_model", "no_such_text", "cache", "../starcoder2", "Llama"]
)
def test_what_nobody_has_is_refused(kind: str) -> None:
    with pytest.raises(ModelError, match="is not supported, and mlx-lm does not support it either"):
        models.build({**PLAIN, "model_type": kind}, {})


def test_another_name_for_one_of_theirs_is_known() -> None:
    config = {**SAYINGS["states"], "model_type": "falcon_mamba"}
    assert models.read_info(config) == models.ModelInfo(context_length=512, vocab_size=101)


def test_code_from_a_models_folder_is_refused() -> None:
    with pytest.raises(ModelError, match="model_file would run code"):
        models.build({**PLAIN, "model_file": "model.py"}, {})


@pytest.mark.parametrize("name", ["n_positions", "max_seq_len", "model_max_length"])
def test_a_context_goes_by_many_names(name: str) -> None:
    config = {**PLAIN, name: 77}
    del config["max_position_embeddings"]
    assert models.read_info(config).context_length == 77


@pytest.mark.parametrize("value", [None, "77", 0, 1e30, 10**30, True])
def test_a_context_that_nobody_names_is_asked_for(value: Any) -> None:
    config = {**PLAIN, "max_position_embeddings": value}
    with pytest.raises(
        ModelError, match="does not give the context length: add max_position_embeddings"
    ):
        models.read_info(config)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_heads": None}, "config.json lacks num_heads"),
        (
            {"n_groups": 0},
            "mlx-lm cannot build its mamba2 from this config.json: ZeroDivisionError",
        ),
        ({"time_step_rank": []}, "the checkpoint lacks tensors"),
    ],
)
def test_a_config_that_their_class_cannot_take_is_one_line(
    changes: dict[str, Any], complaint: str
) -> None:
    config = {
        key: value for key, value in {**SAYINGS["states"], **changes}.items() if value is not None
    }
    with pytest.raises(ModelError, match=complaint) as caught:
        models.build(config, {})
    assert "\n" not in str(caught.value)


def test_tensors_that_their_class_cannot_take_are_one_line() -> None:
    with pytest.raises(ModelError, match="mlx-lm's falcon_h1 cannot use these tensors: KeyError"):
        models.build(SAYINGS["states-and-attention"], {"model.norm.weight": mx.zeros((64,))})


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (lambda: theirs.QuantizedKVCache(), "QuantizedKVCache"),
        (lambda: theirs.ChunkedKVCache(8), "ChunkedKVCache"),
        (lambda: theirs.RotatingKVCache(8, keep=4), "RotatingKVCache"),
        (lambda: theirs.CacheList(theirs.KVCache(), theirs.ChunkedKVCache(8)), "ChunkedKVCache"),
    ],
    ids=["quantised", "in-chunks", "with-sinks", "in-a-list"],
)
def test_caches_that_we_have_no_like_of_are_refused_by_name(
    made: Any, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starcoder2.Model, "make_cache", lambda _: [made()], raising=False)
    with pytest.raises(ModelError, match=f"mlx-lm's {named} is not supported as a layer's cache"):
        models.build(PLAIN, {})


def test_a_cache_that_is_not_filled_position_by_position_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = opened(PLAIN, tmp_path)
    monkeypatch.setattr(
        starcoder2.Model,
        "make_cache",
        lambda _: [theirs.KVCache() for _ in range(3)],
        raising=False,
    )
    with pytest.raises(ModelError, match="does not advance by one entry per position"):
        model(mx.array([[1, 2, 3]]), model.make_kv())


def test_logits_that_nobody_reads_are_not_computed(tmp_path: Path) -> None:
    length, vocab = 256, 40000
    model = opened({**PLAIN, "vocab_size": vocab}, tmp_path)
    kv = model.make_kv()
    mx.eval(model.logits(model(mx.array([[1]]), kv)))
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    model(mx.array([[7] * length]), kv)
    mx.eval([layer.state() for layer in kv])
    assert mx.get_peak_memory() - before < 4 * length * vocab // 2


def test_a_context_does_not_shift(tmp_path: Path) -> None:
    model = opened(PLAIN, tmp_path)
    kv = model.make_kv()
    mx.eval(model(mx.array([[1, 2, 3, 4]]), kv))
    assert not model.shift(kv, 1, 2)
    assert [layer.offset for layer in kv] == [4, 4]
