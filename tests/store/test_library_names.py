"""Ollama's names of models and their repositories on the hub."""

import pytest

from app.store.library_names import LIBRARY, find_equivalent, suggest_names
from app.store.model_names import HubName, parse_hub_name
from tests.rows import rows


@rows(
    ("name", "repository"),
    [
        ("qwen3:4b", "Qwen3-4B-4bit"),
        ("QWEN3:4B", "Qwen3-4B-4bit"),
        ("qwen3", "Qwen3-8B-4bit"),
        ("qwen3:latest", "Qwen3-8B-4bit"),
        ("library/qwen3:4b", "Qwen3-4B-4bit"),
        ("qwen3:4b-q4_K_M", "Qwen3-4B-4bit"),
        ("qwen3:4b-q8_0", "Qwen3-4B-8bit"),
        ("qwen3:4b-fp16", "Qwen3-4B-bf16"),
        ("qwen3:4b-instruct-2507-q8_0", "Qwen3-4B-Instruct-2507-8bit"),
        ("llama3.1:8b-instruct-q4_K_M", "Meta-Llama-3.1-8B-Instruct-4bit"),
        ("gemma3:4b-it-fp16", "gemma-3-4b-it-bf16"),
        ("gpt-oss:20b", "gpt-oss-20b-MXFP4-Q8"),
    ],
)
def test_a_name_has_an_equivalent(name: str, repository: str):
    assert find_equivalent(name) == HubName(repo_id=f"mlx-community/{repository}")


@rows(
    ("name", "repository"),
    [
        ("gemma4", "mlx-community/gemma-4-e4b-it-4bit"),
        ("gemma4:12b", "mlx-community/gemma-4-12B-it-4bit"),
        ("gemma4:12b-it-q4_K_M", "mlx-community/gemma-4-12B-it-4bit"),
        ("gemma4:12b-it-qat", "mlx-community/gemma-4-12B-it-qat-4bit"),
        ("gemma4:26b", "mlx-community/gemma-4-26b-a4b-it-4bit"),
        ("gemma4:31b-it-q8_0", "mlx-community/gemma-4-31b-it-8bit"),
        ("gemma3:27b-it-qat", "mlx-community/gemma-3-27b-it-qat-4bit"),
        ("gemma3n", "lmstudio-community/gemma-3n-E4B-it-MLX-4bit"),
        ("qwen3.5", "mlx-community/Qwen3.5-9B-4bit"),
        ("qwen3.5:4b", "mlx-community/Qwen3.5-4B-MLX-4bit"),
        ("qwen3.5:27b", "mlx-community/Qwen3.5-27B-4bit"),
        ("qwen3.6", "mlx-community/Qwen3.6-35B-A3B-4bit"),
        ("qwen3.6:27b-q8_0", "unsloth/Qwen3.6-27B-MLX-8bit"),
        ("qwen3.8:27b", "rapid-mlx/Qwen3.8-27B-4bit-MTP-MLX"),
        ("qwen3-coder-next", "mlx-community/Qwen3-Coder-Next-4bit"),
        ("qwen3-vl", "mlx-community/Qwen3-VL-8B-Instruct-4bit"),
        ("devstral-small-2", "mlx-community/Devstral-Small-2-24B-Instruct-2512-4bit"),
        ("nemotron-3-nano", "lmstudio-community/NVIDIA-Nemotron-3-Nano-30B-A3B-MLX-4bit"),
        ("lfm2.5", "LiquidAI/LFM2.5-2.6B-MLX/4bit"),
        ("lfm2.5:2.6b-q8_0", "LiquidAI/LFM2.5-2.6B-MLX/8bit"),
        ("lfm2.5:1.2b", "mlx-community/LFM2.5-1.2B-Instruct-4bit"),
        ("granite4", "mlx-community/granite-4.0-h-micro-4bit"),
        ("granite4.2:3b", "ibm-granite/granite-4.2-3b-q4-mlx"),
        ("smollm3", "mlx-community/SmolLM3-3B-4bit"),
        ("olmo3", "mlx-community/Olmo-3-7B-Instruct-4bit"),
        ("smollm2:135m", "mlx-community/SmolLM2-135M-Instruct-4bit"),
        ("embeddinggemma", "mlx-community/embeddinggemma-300m-8bit"),
        ("gpt-oss", "mlx-community/gpt-oss-20b-MXFP4-Q8"),
        ("gpt-oss:120b", "mlx-community/gpt-oss-120b-MXFP4-Q8"),
        ("bonsai", "prism-ml/Ternary-Bonsai-27B-mlx-2bit"),
        ("bonsai2:9b", "prism-ml/Ternary-Bonsai-2-9B-mlx-2bit"),
        ("deepseek-coder-v2", "mlx-community/DeepSeek-Coder-V2-Lite-Instruct-4bit-mlx"),
        ("deepseek-r1", "mlx-community/DeepSeek-R1-0528-Qwen3-8B-4bit"),
        ("deepseek-r1:1.5b", "mlx-community/DeepSeek-R1-Distill-Qwen-1.5B-4bit"),
        ("glm-4.5-air", "mlx-community/GLM-4.5-Air-4bit"),
        ("glm-4.7-flash:30b-q8_0", "mlx-community/GLM-4.7-Flash-8bit"),
        ("hermes3", "mlx-community/Hermes-3-Llama-3.1-8B-4bit"),
        ("hermes4", "lmstudio-community/Hermes-4-70B-MLX-4bit"),
        ("holo3.1", "pipenetwork/Holo-3.1-35B-A3B-MLX-4bit"),
        ("kimi-k2.6", "mlx-community/Kimi-K2.6-mlx-DQ3_K_M-q8"),
        ("lfm2:24b", "lmstudio-community/LFM2-24B-A2B-MLX-4bit"),
        ("lfm2.5:24b", "LiquidAI/LFM2.5-24B-A2B-MLX-4bit"),
        ("llama3.2", "mlx-community/Llama-3.2-3B-Instruct-4bit"),
        ("llama3.3", "mlx-community/Llama-3.3-70B-Instruct-4bit"),
        ("minicpm-v4.7", "mlx-community/MiniCPM-V-4.7-1B-8bit"),
        ("minimax-m2.7", "mlx-community/MiniMax-M2.7-4bit-mxfp4"),
        ("ministral-3", "mlx-community/Ministral-3-8B-Instruct-2512-4bit"),
        ("mistral", "mlx-community/Mistral-7B-Instruct-v0.3-4bit"),
        ("mistral-small-4", "mlx-community/Mistral-Small-4-119B-2603-4bit"),
        ("mistral-small3.1", "mlx-community/Mistral-Small-3.1-24B-Instruct-2503-4bit"),
        ("muse-glimmer", "mlx-community/Muse-Glimmer-30B-4bit"),
        ("nanbeige4.1", "mlx-community/Nanbeige4.1-3B-4bit"),
        ("nemotron-3.5-lightning", "mlx-community/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-4bit"),
        ("north-mini-code", "mlx-community/North-Mini-Code-1.0-4bit"),
        ("phi4", "mlx-community/phi-4-4bit"),
        ("phi4-mini", "mlx-community/Phi-4-mini-instruct-4bit"),
        ("qwen2.5", "mlx-community/Qwen2.5-7B-Instruct-4bit"),
        ("qwen2.5-coder", "mlx-community/Qwen2.5-Coder-7B-Instruct-4bit"),
        ("qwen3-coder", "mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit"),
        ("qwen3-next", "mlx-community/Qwen3-Next-80B-A3B-Instruct-4bit"),
        ("tmax:27b-q8_0", "mlx-community/Tmax-27B-MLX-8bit"),
        ("ui-tars", "mlx-community/UI-TARS-1.5-7B-4bit"),
        ("vibethinker", "mlx-community/VibeThinker-1.5B-mlx-4bit"),
    ],
)
def test_a_name_of_today_has_an_equivalent(name: str, repository: str):
    assert str(find_equivalent(name)) == repository


@rows(
    "name",
    [
        *("gemma4:12b-fp16", "qwen3.8:27b-q8_0", "gemma4:3b"),
        *("qwen3:5b", "qwen3:4b-q2_K", "gpt-oss:20b-q8_0", "someone/qwen3:4b", "org/name"),
        *("deepseek-v4", "llama4", "qwen3.8-flash-next", "glm-5.3-flash", "tmax:27b-fp16"),
        *("example.com/library/qwen3:4b", "builtin", "tiny", "", "a/b/c/d"),
    ],
)
def test_any_other_name_has_none(name: str):
    assert find_equivalent(name) is None


def test_every_row_is_the_name_of_a_repository():
    names = [f"{name}:{tag}" for name, tags in LIBRARY.items() for tag in tags]
    repositories = [find_equivalent(name) for name in names]
    assert len(repositories) > 120
    assert all(parse_hub_name(str(name)) == name for name in repositories)


@pytest.mark.parametrize(
    ("name", "suggested"),
    [("qwn3:4b", "qwen3:4b"), ("gema4", "gemma4"), ("llama3.2:4b", "llama3.2:3b")],
)
def test_the_most_similar_names_are_suggested(name: str, suggested: str):
    assert suggest_names(name)[0] == suggested


def test_a_name_like_none_of_the_table_has_no_suggestion():
    assert suggest_names("xyzzy:1b") == []
