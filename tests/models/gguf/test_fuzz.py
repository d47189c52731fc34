"""Mutated GGUF files give a valid model or a one-line error, and so does any content of their
blocks."""

import struct
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from app.core.errors import AppError
from app.engine.model_info import complete_config
from app.engine.weights import open_model, read_weights
from app.store.gguf import model as gguf_model
from models.gguf.ggml_types import GGML_TYPES
from tests.models.gguf.fuzz import TOKENIZERS, Sample, fuzz, make_sample, make_samples
from tests.models.gguf.random_blocks import SCALES
from tests.models.gguf.raw_file import tensor

SAMPLES = [make_sample(tokenizer) for tokenizer in TOKENIZERS]


def test_mutated_files_give_a_model_or_an_error(tmp_path: Path) -> None:
    outcomes = fuzz(range(400), SAMPLES, tmp_path)
    assert outcomes.total() == 400
    assert outcomes["valid"] > 10
    assert outcomes["read"] > 0
    assert outcomes["GGUFError"] > 100


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    sample, path = make_sample(), tmp_path / "m.gguf"
    tensors = [
        tensor("output_norm.weight", (16,), 0, int.from_bytes(part[-8:], "little"))
        if b"output_norm" in part
        else part
        for part in sample.tensors
    ]
    path.write_bytes(Sample(entries=sample.entries, tensors=tensors, data=sample.data).write())
    with pytest.raises(
        AppError, match=r"m\.gguf: .* model\.norm\.weight \(\[16\], expected \[32\]\)"
    ):
        open_model(complete_config(gguf_model.read(path, name="m")), None)


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(4))
def test_many_mutated_files_of_all_architectures_give_a_model_or_an_error(
    tmp_path: Path, part: int
) -> None:
    numbers = range(50_000 * part, 50_000 * (part + 1))
    assert fuzz(numbers, make_samples(tmp_path), tmp_path).total() == 50_000


F16_NAN, F16_INF = struct.pack("<H", 0x7E00), struct.pack("<H", 0xFC00)


@pytest.mark.parametrize("type_id", GGML_TYPES, ids=[kind.name for kind in GGML_TYPES.values()])
@pytest.mark.parametrize("content", ["random", "ones", "nan", "inf"])
def test_any_content_of_blocks_gives_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, type_id: int, content: str
) -> None:
    """Which may be NaN: then the engine ends the request with an error, see
    tests/engine/test_failures.py."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kind = GGML_TYPES[type_id]
    sample = make_sample(width=256, type_id=type_id)
    raw = np.random.default_rng(type_id).integers(0, 256, len(sample.data), dtype=np.uint8)
    if content == "ones":
        raw[:] = 0xFF
    elif content in ("nan", "inf"):
        scale = F16_NAN if content == "nan" else F16_INF
        # the blocks of the first matrix, which is the embedding
        blocks = raw[: len(raw) // kind.nbytes * kind.nbytes].reshape(-1, kind.nbytes)
        for place in SCALES.get(type_id, (0,)) or (0,):
            width = min(2, kind.nbytes - place)
            blocks[:, place : place + width] = np.frombuffer(scale, np.uint8)[:width]
    path = tmp_path / "m.gguf"
    path.write_bytes(
        Sample(entries=sample.entries, tensors=sample.tensors, data=raw.tobytes()).write()
    )
    files = complete_config(gguf_model.read(path, name="m"))
    model = open_model(files, None)
    read_weights(model, path, lambda percent, memory: None)
    logits = model.logits(model(mx.array([[3, 4, 5]]), model.make_kv()))
    mx.eval(logits)
    assert logits.shape == (1, 3, 6)
