"""What can be told from a model's files."""

from typing import Any

import pytest

from tests.core.test_generation_config import files


@pytest.mark.parametrize(
    ("made_for", "wanted", "asked", "served"),
    [
        (100, None, None, 100),
        (100, 40, None, 40),
        (100, 40, 60, 60),
        (100, None, 60, 60),
        (100, 200, None, 100),
        (100, 40, 1000, 100),
    ],
)
def test_the_context_is_what_was_asked_else_what_its_makers_want(
    made_for: int, wanted: int | None, asked: int | None, served: int
) -> None:
    config: Any = {"max_position_embeddings": made_for, "vocab_size": 9}
    assert (
        files({}, config=config, recommended_context=wanted).resolve_context_length(asked) == served
    )


@pytest.mark.parametrize(("tokens", "sampled"), [(None, 50), (50, 50), (48, 48), (60, 50)])
def test_an_id_is_sampled_where_model_and_tokenizer_have_it(
    tokens: int | None, sampled: int
) -> None:
    assert files({}, tokenizer_vocab_size=tokens).sampleable_vocab_size == sampled
