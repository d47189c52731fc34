"""Properties that follow from the files of a model."""

from typing import Any

import pytest

from tests.core.test_model_files_defaults import make_model_files


@pytest.mark.parametrize(
    ("model_context", "recommended", "configured", "expected"),
    [
        (100, None, None, 100),
        (100, 40, None, 40),
        (100, 40, 60, 60),
        (100, None, 60, 60),
        (100, 200, None, 100),
        (100, 40, 1000, 100),
    ],
)
def test_the_context_is_the_configured_one_else_the_recommended_one(
    model_context: int, recommended: int | None, configured: int | None, expected: int
) -> None:
    config: Any = {"max_position_embeddings": model_context, "vocab_size": 9}
    assert (
        make_model_files({}, config=config, recommended_context=recommended).resolve_context_length(
            configured
        )
        == expected
    )


@pytest.mark.parametrize(
    ("tokenizer_vocab", "expected"), [(None, 50), (50, 50), (48, 48), (60, 50)]
)
def test_sampled_ids_are_in_the_model_and_the_tokenizer(
    tokenizer_vocab: int | None, expected: int
) -> None:
    assert (
        make_model_files({}, tokenizer_vocab_size=tokenizer_vocab).sampleable_vocab_size == expected
    )
