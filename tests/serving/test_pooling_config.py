"""How a model's files say that it ranks documents."""

import json
from pathlib import Path

import pytest

from app import store
from app.engine.model_info import complete_config
from app.serving.pooling_config import find_rank_method, read_pooling_config
from tests import tiny, tiny_encoder


@pytest.mark.parametrize(
    ("name", "expected"),
    [("bert", None), ("bert-reranker", "classifier"), ("modernbert-reranker", "classifier")],
)
def test_an_encoder_with_one_score_ranks_documents(
    tmp_path: Path, name: str, expected: str | None
) -> None:
    folder = tiny_encoder.write(tmp_path / "m", name)
    assert find_rank_method(complete_config(store.resolve(str(folder)))) == expected


def test_a_head_that_the_architecture_does_not_have_ranks_nothing(tmp_path: Path) -> None:
    folder = tiny_encoder.write(tmp_path / "m", "nomic-bert")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["NomicBertForSequenceClassification"], "num_labels": 1}
    (folder / "config.json").write_text(json.dumps(config))
    assert find_rank_method(complete_config(store.resolve(str(folder)))) is None


@pytest.mark.parametrize(
    ("folder", "kind", "expected"),
    [
        ("Qwen3-Reranker-0.6B", "qwen3", "yes_no"),
        ("Qwen3-0.6B", "qwen3", None),
        ("my-reranker", "llama", None),
    ],
)
def test_a_qwen3_reranker_is_recognised_by_its_name(
    tmp_path: Path, folder: str, kind: str, expected: str | None
) -> None:
    files = store.resolve(str(tiny.write(tmp_path / folder, model_type=kind)))
    assert find_rank_method(files) == expected


@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
def test_an_encoder_has_every_pooling(tmp_path: Path, pooling: str) -> None:
    flag = {"cls": "cls_token", "mean": "mean_tokens", "last": "lasttoken"}[pooling]
    folder = tiny_encoder.write(tmp_path / "m", pooling=flag, dense=(8,))
    config = read_pooling_config(complete_config(store.resolve(str(folder))))
    assert (config.pooling, config.unsupported) == (pooling, None)


def test_dense_layers_need_an_encoder(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "m")
    (folder / "modules.json").write_text('[{"type": "sentence_transformers.models.Dense"}]')
    config = read_pooling_config(complete_config(store.resolve(str(folder))))
    assert config.unsupported == "modules.json contains the unsupported module Dense"
