"""The adapter for mlx-lm's own classes, and its errors.

The suites that run all `CASES` (test_parity.py in this folder and
tests/engine/test_architectures.py) check logits and caches.
"""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models.cache as theirs
import numpy as np
import pytest
from mlx_lm.models import starcoder2

from models import architectures, kernels, mlx_lm_adapter
from models.base import Model, ModelError, select_last
from models.cpu_layout import apply_cpu_layout, is_batch_invariant
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
DBRX: dict[str, Any] = {
    "vocab_size": 101,
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 2,
    "max_seq_len": 512,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
    "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
}

# one config for each kind of cache and of cache operation
CONFIGS: Mapping[str, dict[str, Any]] = {
    "plain": PLAIN,
    "experts": {
        "model_type": "olmoe",
        **TINY,
        "rms_norm_eps": 1e-5,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
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
        "n_groups": 1,
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
    "latent-and-index": {
        "model_type": "deepseek_v32",
        **LATENT,
        "index_head_dim": 32,
        "index_n_heads": 4,
        # fewer than the prompts have, so most positions are ignored
        "index_topk": 8,
    },
    "head-with-another-name": {
        "model_type": "internlm2",
        **TINY,
        "bias": False,
        "rms_norm_eps": 1e-6,
    },
    "chunks": {
        "model_type": "llama4",
        "text_config": {
            "model_type": "llama4_text",
            **TINY,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "attention_bias": False,
            # longer than the prompts of the comparison, because mlx-lm decodes wrongly beyond it
            "attention_chunk_size": 64,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 96,
            "num_experts_per_tok": 1,
            "num_local_experts": 4,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "rope_theta": 5e4,
            "use_qk_norm": True,
        },
        "vision_config": {"hidden_size": 8},
    },
    "multimodal": {
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
    for name, config in CONFIGS.items()
]


def load_model(config: dict[str, Any], folder: Path) -> Model:
    parity.save_reference(Case(name="", config=config), folder)
    return parity.load_model(folder)


def test_the_error_without_mlx_lm_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx_lm", None)
    hint = r"model_type 'starcoder2' is not supported.*pip install \"mlx-lm>=0\.32\.2,<0\.33\""
    for ask in (architectures.read_info, lambda config: architectures.build(config, {})):
        with pytest.raises(ModelError, match=hint):
            ask(PLAIN)


def test_mlx_lm_is_imported_on_load_only_and_transformers_never() -> None:
    """Its own initialization imports transformers, and lowers the limit of open files."""
    script = f"""
import resource, sys
from models import architectures
before = resource.getrlimit(resource.RLIMIT_NOFILE)
assert architectures.read_info({PLAIN}).context_length == 512
assert "mlx_lm" not in sys.modules
try:
    architectures.build({PLAIN}, {{}})
except architectures.ModelError as error:
    assert "lacks tensors" in str(error), error
assert "mlx_lm.models.starcoder2" in sys.modules
assert not any(name.partition(".")[0] in ("transformers", "torch") for name in sys.modules)
assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    "kind", ["no_such_model", "no_such_text", "cache", "../starcoder2", "Llama"]
)
def test_an_architecture_that_mlx_lm_does_not_have_is_refused(kind: str) -> None:
    with pytest.raises(ModelError, match="is not supported, and mlx-lm does not support it either"):
        architectures.build({**PLAIN, "model_type": kind}, {})


def test_aliases_of_mlx_lm_are_supported() -> None:
    config = {**CONFIGS["states"], "model_type": "falcon_mamba"}
    assert architectures.read_info(config) == architectures.ModelInfo(
        context_length=512, vocab_size=101
    )


def test_code_in_a_model_folder_is_refused() -> None:
    with pytest.raises(ModelError, match="model_file refers to code"):
        architectures.build({**PLAIN, "model_file": "model.py"}, {})


@pytest.mark.parametrize("name", ["n_positions", "max_seq_len", "model_max_length"])
def test_the_context_length_can_have_several_keys(name: str) -> None:
    config = {**PLAIN, name: 77}
    del config["max_position_embeddings"]
    assert architectures.read_info(config).context_length == 77


@pytest.mark.parametrize("value", [None, "77", 0, 1e30, 10**30, True])
def test_the_error_without_a_context_length_names_the_key(value: Any) -> None:
    config = {**PLAIN, "max_position_embeddings": value}
    with pytest.raises(
        ModelError, match="does not define the context length: add max_position_embeddings"
    ):
        architectures.read_info(config)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_heads": None}, "config.json lacks num_heads"),
        (
            {"n_groups": 0},
            "mlx-lm's mamba2 implementation does not support this config.json: ZeroDivisionError",
        ),
        ({"time_step_rank": []}, "the checkpoint lacks tensors"),
    ],
)
def test_a_config_that_mlx_lm_cannot_use_gives_a_one_line_error(
    changes: dict[str, Any], complaint: str
) -> None:
    config = {
        key: value for key, value in {**CONFIGS["states"], **changes}.items() if value is not None
    }
    with pytest.raises(ModelError, match=complaint) as caught:
        architectures.build(config, {})
    assert "\n" not in str(caught.value)


def test_tensors_that_mlx_lm_cannot_use_give_a_one_line_error() -> None:
    with pytest.raises(
        ModelError, match="falcon_h1 implementation rejects these tensors: KeyError"
    ):
        architectures.build(CONFIGS["states-and-attention"], {"model.norm.weight": mx.zeros((64,))})


@pytest.mark.parametrize(
    ("make_cache", "named"),
    [
        (lambda: theirs.QuantizedKVCache(), "QuantizedKVCache"),
        (lambda: theirs.RotatingKVCache(8, keep=4), "RotatingKVCache"),
        (lambda: theirs.CacheList(theirs.KVCache(), theirs.QuantizedKVCache()), "QuantizedKVCache"),
    ],
    ids=["quantized", "with-sinks", "in-a-list"],
)
def test_the_error_for_an_unsupported_cache_names_its_class(
    make_cache: Any, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starcoder2.Model, "make_cache", lambda _: [make_cache()], raising=False)
    with pytest.raises(ModelError, match=f"mlx-lm's {named} is not supported as a layer's cache"):
        architectures.build(PLAIN, {})


def test_a_cache_that_does_not_advance_by_position_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        starcoder2.Model,
        "make_cache",
        lambda _: [theirs.KVCache() for _ in range(3)],
        raising=False,
    )
    model = load_model(PLAIN, tmp_path)
    with pytest.raises(ModelError, match="does not advance by one entry per position"):
        model(mx.array([[1, 2, 3]]), model.make_kv())


def test_unused_logits_are_not_computed(tmp_path: Path) -> None:
    length, vocab = 256, 40000
    model = load_model({**PLAIN, "vocab_size": vocab}, tmp_path)
    kv = model.make_kv()
    mx.eval(model.logits(model(mx.array([[1]]), kv)))
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    model(mx.array([[7] * length]), kv)
    mx.eval([layer.state() for layer in kv])
    assert mx.get_peak_memory() - before < 4 * length * vocab // 2


def test_context_shift_is_not_supported(tmp_path: Path) -> None:
    model = load_model(PLAIN, tmp_path)
    kv = model.make_kv()
    mx.eval(model(mx.array([[1, 2, 3, 4]]), kv))
    assert not model.shift(kv, 1, 2)
    assert [layer.offset for layer in kv] == [4, 4]


# The steps of these classes have only batch-invariant operations with our kernels. A recurrent
# class computes several positions in a different form.
BATCHED = ("plain", "experts", "windows", "head-with-another-name", "states-and-attention")


@pytest.mark.skipif(kernels.ops() is None, reason="the rows share a pass with the kernels only")
@pytest.mark.parametrize("name", BATCHED)
def test_the_rows_of_a_batch_share_a_pass_and_have_the_bits_of_each_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, lengths = CONFIGS[name], (1, 3, 17, 9, 6)
    model: Any = load_model(config, tmp_path)
    apply_cpu_layout(model)
    assert is_batch_invariant(model) == (name != "states-and-attention")
    assert model.shares_pass
    case = Case(name=name, config=config)
    prompts = [parity.ids(case, length, seed=length) for length in lengths]
    steps = [parity.ids(case, 9, seed=100 + length) for length in lengths]
    alone = [
        parity.prefill(model, [*prompt, *more], [len(prompt), *[1] * 9])[-9:]
        for prompt, more in zip(prompts, steps, strict=True)
    ]
    monkeypatch.setattr(mlx_lm_adapter, "_forward_rows", None)
    np.testing.assert_array_equal(parity.decode_batch(model, prompts, steps), np.stack(alone))


def test_a_class_that_cannot_compute_a_batch_gets_one_row_at_a_time(tmp_path: Path) -> None:
    """Gemma 3n shares keys and values among layers."""
    model: Any = load_model(CONFIGS["multimodal"], tmp_path)
    apply_cpu_layout(model)
    assert not model.may_share_pass
    assert not is_batch_invariant(model)


@pytest.mark.skipif(kernels.ops() is None, reason="the rows share a pass with the kernels only")
def test_a_class_that_uses_the_positions_of_a_batch_wrongly_gets_one_row_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the numbers show it."""
    call = starcoder2.Attention.__call__

    def misuse(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        first = cache.offset if isinstance(cache.offset, int) else cache.offset[0]
        return call(self, x, mask, cache) + 0.01 * first

    monkeypatch.setattr(starcoder2.Attention, "__call__", misuse)
    model: Any = load_model(PLAIN, tmp_path)
    apply_cpu_layout(model)
    assert model.may_share_pass
    assert not model.shares_pass


def test_a_pass_that_would_be_evaluated_has_no_trial(tmp_path: Path) -> None:
    """Its weights may not be read yet."""
    config = {"model_type": "dbrx", **DBRX}
    model: Any = load_model(config, tmp_path)
    assert not any(trait.attends for trait in model._find_trial().traits)
    assert not model.may_share_pass


def test_logits_are_computed_for_the_selected_positions_only(tmp_path: Path) -> None:
    length, vocab = 256, 40000
    model: Any = load_model({**PLAIN, "vocab_size": vocab}, tmp_path)
    expected = np.array(model(mx.array([[7, 8, 9]]), model.make_kv()))
    kv = model.make_kv()
    mx.eval(model(mx.array([[1]]), kv))
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    logits = model(mx.array([[7] * length]), kv, select_last)
    assert logits.shape == (1, 1, vocab)
    mx.eval(logits)
    assert mx.get_peak_memory() - before < 4 * length * vocab // 2
    got = model(mx.array([[7, 8, 9]]), model.make_kv(), lambda hidden: hidden[:, 1:])
    np.testing.assert_allclose(np.array(got), expected[:, 1:], atol=1e-5)
