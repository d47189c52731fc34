"""How long a request may be, and what is said to one that is longer."""

import pytest

from app.core.jobs import Capacity
from app.core.model_state import ContextLimit

MIB = 1 << 20


def capacity(context: int, *, scarce: bool = False) -> Capacity:
    """A position takes one MiB."""
    return Capacity(
        parallel=2,
        context_length=context,
        kv_budget=4000 * MIB,
        kv_bytes_per_sequence=context * MIB,
        limited_by_memory=scarce,
    )


@pytest.mark.parametrize(
    ("asked", "loaded", "context"),
    [
        (None, None, 4096),
        (100, None, 100),
        (9999, None, 4096),
        (None, capacity(4096), 4096),
        (100, capacity(100), 100),
        (3000, capacity(70, scarce=True), 70),
    ],
)
def test_a_loaded_engine_knows_best_and_before_that_the_settings(
    asked: int | None, loaded: Capacity | None, context: int
) -> None:
    assert (
        ContextLimit(model_context=4096, configured_context=asked, capacity=loaded).context_length
        == context
    )


@pytest.mark.parametrize(
    ("room", "told"),
    [
        (
            ContextLimit(model_context=4096, configured_context=None, capacity=None),
            ("the model's context is 4096 tokens", "shorten the prompt"),
        ),
        (
            ContextLimit(model_context=4096, configured_context=64, capacity=capacity(64)),
            ("the server's context is 64 tokens", "the model's own is 4096", "--context"),
        ),
        (
            ContextLimit(
                model_context=4096, configured_context=None, capacity=capacity(64, scarce=True)
            ),
            ("only 64 tokens fit in memory", "about 5001.0 MiB", "can have 64.0 MiB", "--memory"),
        ),
    ],
)
def test_a_refusal_says_what_limits_and_what_to_do(
    room: ContextLimit, told: tuple[str, ...]
) -> None:
    for words in told:
        assert words in room.explain_too_long(5000)
