"""The context limit of a request, and the error beyond it."""

import pytest

from app.core.jobs import Capacity, ContextLimit

MIB = 1 << 20


def capacity(context: int, *, limited: bool = False) -> Capacity:
    """A position takes one MiB."""
    return Capacity(
        parallel=2,
        context_length=context,
        kv_budget=4000 * MIB,
        kv_bytes_per_sequence=context * MIB,
        limited_by_memory=limited,
    )


@pytest.mark.parametrize(
    ("configured", "loaded", "context"),
    [
        (None, None, 4096),
        (100, None, 100),
        (9999, None, 4096),
        (None, capacity(4096), 4096),
        (100, capacity(100), 100),
        (3000, capacity(70, limited=True), 70),
    ],
)
def test_the_context_is_that_of_the_engine_or_of_the_settings_before_the_load(
    configured: int | None, loaded: Capacity | None, context: int
) -> None:
    assert (
        ContextLimit(
            model_context=4096, configured_context=configured, capacity=loaded
        ).context_length
        == context
    )


@pytest.mark.parametrize(
    ("limit", "parts"),
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
                model_context=4096, configured_context=None, capacity=capacity(64, limited=True)
            ),
            ("only 64 tokens fit in memory", "about 5001.0 MiB", "can have 64.0 MiB", "--memory"),
        ),
    ],
)
def test_the_error_names_the_limit_and_the_remedy(
    limit: ContextLimit, parts: tuple[str, ...]
) -> None:
    for part in parts:
        assert part in limit.explain_too_long(5000)
