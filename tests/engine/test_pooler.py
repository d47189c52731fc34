"""The dense layers of sentence-transformers, read from the folders that modules.json lists."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from app.core.errors import AppError, ErrorKind
from app.engine.pooler import load_embedding_head, load_gguf_embedding_head
from tests import tiny_encoder
from tests.models.encoder_reference import draw_tensor
from tests.models.gguf.encoders import DENSE_SHAPES, write_embedding_gemma

POOLED = np.random.default_rng(1).standard_normal((3, tiny_encoder.WIDTH)).astype(np.float32)
TANH = "torch.nn.modules.activation.Tanh"


def read_weight(folder: Path) -> np.ndarray:
    arrays: Any = mx.load(str(folder / "model.safetensors"))
    return np.array(arrays["linear.weight"])


def test_dense_layers_precede_the_norm(tmp_path: Path) -> None:
    folder = tiny_encoder.write(
        tmp_path / "m", pooling="mean_tokens", dense=(48, 16), activation=TANH
    )
    head = load_embedding_head(folder, tiny_encoder.WIDTH)
    expected = POOLED
    for part in ("2_Dense", "3_Dense"):
        expected = np.tanh(expected @ read_weight(folder / part).T)
    expected /= np.linalg.norm(expected, axis=-1, keepdims=True)
    found = head(mx.array(POOLED), [None] * 3)
    assert head.size == 16
    np.testing.assert_allclose(np.array(found), expected, atol=1e-6)


def test_a_row_has_the_same_bits_alone_and_with_others(tmp_path: Path) -> None:
    folder = tiny_encoder.write(tmp_path / "m", pooling="mean_tokens", dense=(48,))
    head = load_embedding_head(folder, tiny_encoder.WIDTH)
    together = head(mx.array(POOLED), [None] * 3)
    for row in range(3):
        assert mx.array_equal(head(mx.array(POOLED[row : row + 1]), [None])[0], together[row])


def test_a_folder_without_modules_has_no_dense_layers(tmp_path: Path) -> None:
    head = load_embedding_head(tiny_encoder.write(tmp_path / "m"), tiny_encoder.WIDTH)
    assert head.size == tiny_encoder.WIDTH


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("2_Dense/config.json", '{"activation_function": "torch.nn.Softsign"}', "Softsign"),
        ("2_Dense/config.json", "[", "cannot be read"),
        ("2_Dense/model.safetensors", "x", "not a complete safetensors file"),
        ("modules.json", '[{"type": "x.Dense", "path": "../other"}]', "not a subfolder"),
        ("modules.json", '[{"type": "x.Dense", "path": 3}]', "not a subfolder"),
    ],
)
def test_an_unusable_dense_layer_is_an_error_that_names_the_file(
    tmp_path: Path, file: str, content: str, message: str
) -> None:
    folder = tiny_encoder.write(tmp_path / "m", pooling="mean_tokens", dense=(48,))
    (folder / file).write_text(content)
    with pytest.raises(AppError, match=message) as caught:
        load_embedding_head(folder, tiny_encoder.WIDTH)
    assert caught.value.kind is ErrorKind.MODEL_FILES
    assert str(folder) in caught.value.message


def test_a_dense_layer_of_another_width_is_an_error(tmp_path: Path) -> None:
    folder = tiny_encoder.write(tmp_path / "m", pooling="mean_tokens", dense=(48,))
    with pytest.raises(AppError, match=r"\[48, 32\], but its input has 16 elements"):
        load_embedding_head(folder, 16)


def test_the_dense_layers_of_a_gguf_file_precede_the_norm(tmp_path: Path) -> None:
    path = write_embedding_gemma(tmp_path / "m.gguf")
    head = load_gguf_embedding_head(path, 32)
    pooled = np.random.default_rng(1).standard_normal((3, 32)).astype(np.float32)
    expected = pooled
    for name, shape in DENSE_SHAPES.items():
        expected = expected @ draw_tensor(name, shape).T
    expected /= np.linalg.norm(expected, axis=-1, keepdims=True)
    np.testing.assert_allclose(np.array(head(mx.array(pooled), [None] * 3)), expected, atol=1e-6)
    with pytest.raises(AppError, match=r"\[96, 32\], but its input has 16 elements"):
        load_gguf_embedding_head(path, 16)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(AppError, match="reading the dense layers failed"):
        load_gguf_embedding_head(path, 32)
