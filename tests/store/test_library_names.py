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
    ],
)
def test_a_name_of_today_has_an_equivalent(name: str, repository: str):
    assert str(find_equivalent(name)) == repository


@rows(
    "name",
    [
        *("gemma4:12b-fp16", "qwen3.8:27b-q8_0", "gemma4:3b"),
        *("qwen3:5b", "qwen3:4b-q2_K", "gpt-oss:20b-q8_0", "someone/qwen3:4b", "org/name"),
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
