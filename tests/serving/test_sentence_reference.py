"""Embeddings and scores of encoders match sentence-transformers, starting from the text.

The references are in sentence_reference.json, which sentence_reference.py writes.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import tiny_encoder
from tests.serving import sentence_reference
from tests.serving.sentence_reference import ENCODERS, RERANKERS
from tests.serving.test_embeddings import build_request, embed, read_floats, run_service

REFERENCE: Any = json.loads(sentence_reference.FILE.read_text())
NEAR = 1e-5
# of a score between 0 and 1
NEAR_SCORE = 1e-4


@pytest.mark.parametrize("name", ENCODERS)
def test_an_embedding_is_that_of_sentence_transformers(name: str, tmp_path: Path):
    folder = tiny_encoder.write(tmp_path / "m", name, **ENCODERS[name])
    vectors = np.stack(
        [read_floats(one) for one in embed(folder, *sentence_reference.draw_texts()).vectors]
    )
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=NEAR)
    found = vectors @ sentence_reference.draw_directions(vectors.shape[1])
    np.testing.assert_allclose(found, np.array(REFERENCE[name]), rtol=0, atol=NEAR)


@pytest.mark.parametrize("name", RERANKERS)
def test_a_score_is_that_of_sentence_transformers(name: str, tmp_path: Path):
    folder = tiny_encoder.write(tmp_path / "m", name)

    async def run() -> list[float]:
        found: list[float] = []
        async with run_service(folder) as (service, _):
            for query, documents in sentence_reference.draw_rankings():
                request = build_request(*documents, name=folder.name, query=query)
                vectors = (await service.embed(request)).vectors
                found += [float(read_floats(one)[0]) for one in vectors]
        return found

    np.testing.assert_allclose(asyncio.run(run()), REFERENCE[name], rtol=0, atol=NEAR_SCORE)
